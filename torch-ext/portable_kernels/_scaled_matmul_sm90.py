"""Products of float8 matrices with sums in float32, for Hopper GPUs: one warp copies tiles, two groups multiply them.

Hopper's tensor cores keep about 14 bits of a sum of float8 products, so that every 128 of K it moves to float32. While
one group of warps moves its sums the other's products fill the tensor cores. A group owns half of a tile's rows, in one
or two parts of 64 rows and at most 128 columns, of which one is summed at a time.

Imported where a plan chooses it, and only then.
"""

from ._device import facts, launch
from ._gluon import (
    TensorDescriptor,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)  # fmt: skip
from ._triton import cdiv

_STEP = gl.constexpr(128)  # of K: a row of a tile in shared memory
_OPERANDS = gl.NVMMASharedLayout(128, 8, 2)  # bytes of swizzling, bits of an element, dimensions
_RESULTS = gl.NVMMASharedLayout(128, 16, 2)


@gluon.jit
def _place(tile, tiles_m, tiles_n, GROUP_M: gl.constexpr):
    """(pid_m, pid_n) of a tile, in the order of `_tiles.tile_of`."""
    width = GROUP_M * tiles_n
    group = tile // width
    rows = gl.minimum(tiles_m - group * GROUP_M, GROUP_M)
    place = tile % width
    return group * GROUP_M + place % rows, place // rows


@gluon.jit
def _producer(
    a_desc, b_desc, a_smem, b_smem, full, empty, K, tiles_m, tiles_n,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, GROUP_M: gl.constexpr,
):  # fmt: skip
    """The copying warp. A stage is filled when both groups have left it."""
    step = 0
    for tile in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        pid_m, pid_n = _place(tile, tiles_m, tiles_n, GROUP_M)
        for k in range(0, K, _STEP):
            stage = step % STAGES
            mbarrier.wait(empty.index(stage), ((step // STAGES) & 1) ^ 1)
            mbarrier.expect(full.index(stage), (BLOCK_M + BLOCK_N) * _STEP)
            tma.async_copy_global_to_shared(a_desc, [pid_m * BLOCK_M, k], full.index(stage), a_smem.index(stage))
            tma.async_copy_global_to_shared(b_desc, [pid_n * BLOCK_N, k], full.index(stage), b_smem.index(stage))
            step += 1


@gluon.jit
def _product(a_tile, b_tile, registers, row: gl.constexpr, column: gl.constexpr, PART_N: gl.constexpr):
    """The product of one step of K of a part, a sum of its own, in `registers`."""
    b_part = b_tile.slice(column, PART_N, 0).permute((1, 0))
    part = warpgroup_mma(a_tile.slice(row, 64, 0), b_part, registers, use_acc=False, is_async=True)
    return warpgroup_mma_wait(0, (part,))


@gluon.jit
def _block_scale(ptrs, block, stride, mask, ROWS: gl.constexpr):
    """The scale of one block of K: of each row, or one for all where ROWS (a square's) share it, or None."""
    if ROWS == 0:
        scale = None
    elif ROWS == 1:
        scale = gl.load(ptrs + block * stride, mask=mask, other=0.0)
    else:
        scale = gl.load(ptrs + block * stride)
    return scale


@gluon.jit
def _scaled(x, scale_m, scale_n, A_ROWS: gl.constexpr, B_ROWS: gl.constexpr):
    if A_ROWS == 1 and B_ROWS > 1:
        x = x * (scale_m * scale_n)[:, None]
    elif A_ROWS > 1 and B_ROWS == 1:
        x = x * (scale_m * scale_n)[None, :]
    elif A_ROWS > 1 and B_ROWS > 1:
        x = x * (scale_m * scale_n)
    else:
        if A_ROWS == 1:
            x = x * scale_m[:, None]
        elif A_ROWS > 1:
            x = x * scale_m
        if B_ROWS == 1:
            x = x * scale_n[None, :]
        elif B_ROWS > 1:
            x = x * scale_n
    return x


@gluon.jit
def _consumer(
    out_desc, sa_ptr, sb_ptr, bias_ptr, a_smem, b_smem, out_smem, full, empty, M, N, K, tiles_m, tiles_n,
    stride_sam, stride_sak, stride_sbn, stride_sbk,
    GROUP: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, GROUP_M: gl.constexpr,
    A_ROWS: gl.constexpr, B_ROWS: gl.constexpr, A_WHOLE: gl.constexpr, B_WHOLE: gl.constexpr,
):  # fmt: skip
    """Half of a tile's rows. A_ROWS, B_ROWS: rows that share a scale of a block of K; 0 where K has no blocks: then
    there is one scale for all, WHOLE, or one a row, contiguous as the bias is."""
    PART_N: gl.constexpr = out_smem.shape[2]
    PARTS_M: gl.constexpr = BLOCK_M // 128
    PARTS_N: gl.constexpr = BLOCK_N // PART_N
    FIRST: gl.constexpr = GROUP * 64 * PARTS_M
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PART_N, 32])
    out_tile = out_smem.index(GROUP)
    step = 0
    for tile in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        pid_m, pid_n = _place(tile, tiles_m, tiles_n, GROUP_M)
        first_m = pid_m * BLOCK_M + FIRST
        first_n = pid_n * BLOCK_N
        rows = (first_m + gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))).to(gl.int64)
        columns = (first_n + gl.arange(0, PART_N, gl.SliceLayout(0, LAYOUT))).to(gl.int64)
        sa_ptrs, sb_ptrs = sa_ptr, sb_ptr
        if A_ROWS == 1:
            sa_ptrs = sa_ptr + rows * stride_sam
        elif A_ROWS > 1:
            sa_ptrs = sa_ptr + (gl.minimum(first_m, M - 1) // A_ROWS).to(gl.int64) * stride_sam
        if B_ROWS == 1:
            sb_ptrs = sb_ptr + columns * stride_sbn
        elif B_ROWS > 1:
            sb_ptrs = sb_ptr + (first_n // B_ROWS).to(gl.int64) * stride_sbn
        zero = gl.zeros([64, PART_N], gl.float32, LAYOUT)
        acc0 = zero
        if PARTS_M * PARTS_N == 2:
            acc1 = zero
            part = zero
        for k in range(0, K, _STEP):
            stage = step % STAGES
            scale_m = _block_scale(sa_ptrs, (k // _STEP).to(gl.int64), stride_sak, rows < M, A_ROWS)
            scale_n = _block_scale(sb_ptrs, (k // _STEP).to(gl.int64), stride_sbk, columns < N, B_ROWS)
            a_tile, b_tile = a_smem.index(stage), b_smem.index(stage)
            mbarrier.wait(full.index(stage), (step // STAGES) & 1)
            if PARTS_M * PARTS_N == 2:
                # Both go through the same registers, one after the other: there are none for two.
                part = _product(a_tile, b_tile, part, FIRST, 0, PART_N)
                acc0 = acc0 + part
                row: gl.constexpr = FIRST + 64 * (PARTS_M - 1)
                part = _product(a_tile, b_tile, part, row, PART_N * (PARTS_N - 1), PART_N)
                mbarrier.arrive(empty.index(stage))
                acc1 = acc1 + part
            else:
                part = _product(a_tile, b_tile, zero, FIRST, 0, PART_N)
                mbarrier.arrive(empty.index(stage))
                acc0 = acc0 + _scaled(part, scale_m, scale_n, A_ROWS, B_ROWS)
            step += 1
        for p in gl.static_range(PARTS_M * PARTS_N):
            x = acc0
            if p == 1:
                x = acc1
            at_m = rows + p * (PARTS_M - 1) * 64
            at_n = columns + p * (PARTS_N - 1) * PART_N
            if A_ROWS == 0:
                x = x * (gl.load(sa_ptr) if A_WHOLE else gl.load(sa_ptr + at_m, mask=at_m < M, other=0.0)[:, None])
            if B_ROWS == 0:
                x = x * (gl.load(sb_ptr) if B_WHOLE else gl.load(sb_ptr + at_n, mask=at_n < N, other=0.0)[None, :])
            if bias_ptr is not None:
                x = x + gl.load(bias_ptr + at_n, mask=at_n < N, other=0.0).to(gl.float32)[None, :]
            tma.store_wait(0)  # out_tile may still be on its way from the part before
            gl.thread_barrier()
            out_tile.store(x.to(out_desc.dtype))
            fence_async_shared()
            gl.thread_barrier()
            to = [first_m + p * (PARTS_M - 1) * 64, first_n + p * (PARTS_N - 1) * PART_N]
            tma.async_copy_shared_to_global(out_desc, to, out_tile)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["M", "tiles_m", "tiles_n"])
def _scaled_matmul_fwd_kernel_sm90(
    a_desc, b_desc, out_desc, sa_ptr, sb_ptr, bias_ptr, M, N, K, tiles_m, tiles_n,
    stride_sam, stride_sak, stride_sbn, stride_sbk,
    A_ROWS: gl.constexpr, B_ROWS: gl.constexpr, A_WHOLE: gl.constexpr, B_WHOLE: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, PART_N: gl.constexpr, STAGES: gl.constexpr, GROUP_M: gl.constexpr,
):  # fmt: skip
    a_smem = gl.allocate_shared_memory(a_desc.dtype, [STAGES, BLOCK_M, _STEP], a_desc.layout)
    b_smem = gl.allocate_shared_memory(b_desc.dtype, [STAGES, BLOCK_N, _STEP], b_desc.layout)
    out_smem = gl.allocate_shared_memory(out_desc.dtype, [2, 64, PART_N], out_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    fence_async_shared()
    gl.thread_barrier()
    # Constants are listed anew each time: one that is given a name is a constant no more.
    gl.warp_specialize([
        (_consumer, (out_desc, sa_ptr, sb_ptr, bias_ptr, a_smem, b_smem, out_smem, full, empty, M, N, K, tiles_m,
                     tiles_n, stride_sam, stride_sak, stride_sbn, stride_sbk,
                     0, BLOCK_M, BLOCK_N, STAGES, GROUP_M, A_ROWS, B_ROWS, A_WHOLE, B_WHOLE)),
        (_consumer, (out_desc, sa_ptr, sb_ptr, bias_ptr, a_smem, b_smem, out_smem, full, empty, M, N, K, tiles_m,
                     tiles_n, stride_sam, stride_sak, stride_sbn, stride_sbk,
                     1, BLOCK_M, BLOCK_N, STAGES, GROUP_M, A_ROWS, B_ROWS, A_WHOLE, B_WHOLE)),
        (_producer, (a_desc, b_desc, a_smem, b_smem, full, empty, K, tiles_m, tiles_n, BLOCK_M, BLOCK_N, STAGES,
                     GROUP_M)),
    ], [4, 1], [240, 24])  # fmt: skip
    for i in gl.static_range(STAGES):  # nothing else may be laid over a barrier's memory while the kernel runs
        mbarrier.invalidate(full.index(i))
        mbarrier.invalidate(empty.index(i))


def scaled_matmul(a, b, scale_a, scale_b, bias, out, rows, strides, plan):
    """Write the product of a (M, K) and the transpose of b (N, K), both contiguous along K, to out.

    rows, strides: of both scales, as _scaled_matmul.py has them.
    """
    (M, K), N = a.shape, b.shape[0]
    part_n = min(plan.BLOCK_N, 128)
    # Of addresses that step unevenly there would be two registers each, of which there are none to spare.
    scale_a, scale_b = (s if r else s.contiguous() for s, r in zip((scale_a, scale_b), rows))  # N elements, once
    bias = None if bias is None else bias.contiguous()
    tiles_m, tiles_n = cdiv(M, plan.BLOCK_M), cdiv(N, plan.BLOCK_N)
    described = (
        TensorDescriptor(t, list(t.shape), list(t.stride()), block, layout)
        for t, block, layout in (
            (a, [plan.BLOCK_M, 128], _OPERANDS), (b, [plan.BLOCK_N, 128], _OPERANDS), (out, [64, part_n], _RESULTS)
        )
    )  # fmt: skip
    launch(
        _scaled_matmul_fwd_kernel_sm90,
        (min(tiles_m * tiles_n, facts(a.device).multiprocessors),),
        a.device,
        (*described, scale_a, scale_b, bias, M, N, K, tiles_m, tiles_n, *strides[0], *strides[1]),
        A_ROWS=rows[0], B_ROWS=rows[1], A_WHOLE=scale_a.numel() == 1, B_WHOLE=scale_b.numel() == 1,
        BLOCK_M=plan.BLOCK_M, BLOCK_N=plan.BLOCK_N, PART_N=part_n, STAGES=plan.num_stages, GROUP_M=plan.GROUP_M,
        num_warps=4,
    )  # fmt: skip
    return out
