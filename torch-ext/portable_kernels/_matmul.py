"""The kernels of matrix products with an epilogue, and how one is launched by a plan.

    y = activation(a @ b + bias) + residual        gated: y = activation(a @ b) * (a @ b2)

Five ways to the same result, of which configs/matmul.json picks one:

- "descriptors": persistent programs; tiles are copied in bulk by the device's copy engine.
- "pointers": any strides, any device.
- "rows": up to four rows, a plain sum of products that reads the matrix once.
- either of the first two with SPLIT_K: shares of K summed apart, then together in a fixed order by a second launch.
- "vendor": torch's product, and the epilogue as a pointwise kernel.
"""

import functools
from typing import NamedTuple

import torch

from . import _tuning
from ._activation_math import activate
from ._device import facts, launch
from ._rows import collapse, compute_dtype
from ._tiles import dot, tile_of
from ._triton import TensorDescriptor, cdiv, next_power_of_2, round_to, scalar, tl, triton, triton_dtype


class Plan(NamedTuple):
    kind: str
    BLOCK_M: int = 64
    BLOCK_N: int = 64
    BLOCK_K: int = 32
    GROUP_M: int = 8
    SPLIT_K: int = 1
    SUBTILES: int = 1  # parts that a tile's results are written in: less shared memory, more of it for operands
    PER_SM: int = 1  # programs that share a multiprocessor
    FLATTEN: bool = True  # the next tile's operands are on their way while this one's results are written
    num_warps: int = 4
    num_stages: int = 3


@triton.jit
def _place(ptr, strides, i, j, offs_m, offs_n):
    """Pointers to a tile of an operand with the given (outer, inner, m, n) strides; all offsets int64."""
    return ptr + (i * strides[0] + j * strides[1]) + (offs_m * strides[2])[:, None] + (offs_n * strides[3])[None, :]


@triton.jit
def _finish(
    acc, acc2, y_desc, z_desc, z2_desc, y_ptr, z_ptr, z2_ptr, bias_ptr, residual_ptr, y_strides, bias_stride,
    residual_strides, i, j, start_m, start_n, M, N, p, q,
    ACTIVATION: tl.constexpr, PRECISE: tl.constexpr, BIAS_M: tl.constexpr, BATCHED: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """The epilogue of a (ROWS, COLS) tile of sums, and its results to memory."""
    offs_m = tl.cast(start_m, tl.int64) + tl.arange(0, ROWS)
    offs_n = tl.cast(start_n, tl.int64) + tl.arange(0, COLS)
    mask = (offs_m < M)[:, None] & (offs_n < N)[None, :]
    if z_ptr is not None:
        _store(acc, z_desc, z_ptr, y_strides, i, j, start_m, start_n, offs_m, offs_n, mask, BATCHED)
    if z2_ptr is not None:
        _store(acc2, z2_desc, z2_ptr, y_strides, i, j, start_m, start_n, offs_m, offs_n, mask, BATCHED)
    y = acc
    if bias_ptr is not None:
        if BIAS_M:
            y += tl.load(bias_ptr + offs_m * bias_stride, mask=offs_m < M, other=0.0).to(acc.dtype)[:, None]
        else:
            y += tl.load(bias_ptr + offs_n * bias_stride, mask=offs_n < N, other=0.0).to(acc.dtype)[None, :]
    if ACTIVATION is not None:
        y = activate(y, p, q, ACTIVATION, PRECISE)
    if acc2 is not None:
        y *= acc2
    if residual_ptr is not None:
        y += tl.load(_place(residual_ptr, residual_strides, i, j, offs_m, offs_n), mask=mask, other=0.0).to(acc.dtype)
    _store(y, y_desc, y_ptr, y_strides, i, j, start_m, start_n, offs_m, offs_n, mask, BATCHED)


@triton.jit
def _store(x, desc, ptr, strides, i, j, start_m, start_n, offs_m, offs_n, mask, BATCHED: tl.constexpr):
    x = round_to(x, ptr.dtype.element_ty)
    if desc is None:
        tl.store(_place(ptr, strides, i, j, offs_m, offs_n), x, mask=mask)
    elif BATCHED:
        desc.store([i.to(tl.int32), j.to(tl.int32), start_m, start_n], x.reshape((1, 1, x.shape[0], x.shape[1])))
    else:
        desc.store([start_m, start_n], x)


@triton.jit
def _store_parts(acc, acc2, part_ptr, part, start_m, start_n, M, N, ROWS: tl.constexpr, COLS: tl.constexpr):
    """One share of K's sums to (parts, 1 or 2, M, N)."""
    offs_m = tl.cast(start_m, tl.int64) + tl.arange(0, ROWS)
    offs_n = tl.cast(start_n, tl.int64) + tl.arange(0, COLS)
    mask = (offs_m < M)[:, None] & (offs_n < N)[None, :]
    at = offs_m[:, None] * N + offs_n[None, :]
    size = tl.cast(M, tl.int64) * N
    if acc2 is None:
        tl.store(part_ptr + part * size + at, acc, mask=mask)
    else:
        tl.store(part_ptr + part * 2 * size + at, acc, mask=mask)
        tl.store(part_ptr + (part * 2 + 1) * size + at, acc2, mask=mask)


@triton.jit(do_not_specialize=["inner", "M", "tiles_m", "tiles_n"])
def _matmul_fwd_kernel_pointers(
    a_ptr, b_ptr, b2_ptr, y_ptr, z_ptr, z2_ptr, bias_ptr, residual_ptr, part_ptr, inner, M, N, K, tiles_m, tiles_n,
    a_strides, b_strides, b2_strides, y_strides, bias_stride, residual_strides, p, q,
    ACTIVATION: tl.constexpr, PRECISE: tl.constexpr, BIAS_M: tl.constexpr,
    PRECISION: tl.constexpr, COMPUTE: tl.constexpr,
    EVEN_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr, SPLIT_K: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """A tile of the result a program, or one share of K of it."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    pid = tl.program_id(0)
    tiles = tiles_m * tiles_n
    pid_m, pid_n = tile_of(pid % tiles, tiles_m, tiles_n, GROUP_M)
    part = (pid // tiles).to(tl.int64)
    batch = part // SPLIT_K
    i, j = batch // inner, batch % inner
    share = tl.cdiv(tl.cdiv(K, BLOCK_K), SPLIT_K) * BLOCK_K
    first = (part % SPLIT_K).to(tl.int32) * share
    last = min(first + share, K)

    offs_m = pid_m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = pid_n.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_K)
    in_m = (offs_m < M)[:, None]
    in_n = (offs_n < N)[None, :]
    ks = offs_k.to(tl.int64) + first
    a_ptrs = _place(a_ptr, a_strides, i, j, offs_m, ks)
    b_ptrs = _place(b_ptr, b_strides, i, j, ks, offs_n)
    acc = tl.zeros((BLOCK_M, BLOCK_N), COMPUTE)
    acc2 = None
    if b2_ptr is not None:
        b2_ptrs = _place(b2_ptr, b2_strides, i, j, ks, offs_n)
        acc2 = tl.zeros((BLOCK_M, BLOCK_N), COMPUTE)
    for k in range(first, last, BLOCK_K):
        mask_a, mask_b = in_m, in_n
        if not EVEN_K:
            mask_a = mask_a & (offs_k < last - k)[None, :]
            mask_b = mask_b & (offs_k < last - k)[:, None]
        a = tl.load(a_ptrs, mask=mask_a, other=0.0)
        b = tl.load(b_ptrs, mask=mask_b, other=0.0)
        acc = dot(a, b, acc, PRECISION)
        a_ptrs += tl.cast(a_strides[3], tl.int64) * BLOCK_K
        b_ptrs += tl.cast(b_strides[2], tl.int64) * BLOCK_K
        if b2_ptr is not None:
            acc2 = dot(a, tl.load(b2_ptrs, mask=mask_b, other=0.0), acc2, PRECISION)
            b2_ptrs += tl.cast(b2_strides[2], tl.int64) * BLOCK_K
    if SPLIT_K > 1:
        _store_parts(acc, acc2, part_ptr, part, pid_m * BLOCK_M, pid_n * BLOCK_N, M, N, BLOCK_M, BLOCK_N)
    else:
        _finish(
            acc, acc2, None, None, None, y_ptr, z_ptr, z2_ptr, bias_ptr, residual_ptr, y_strides, bias_stride,
            residual_strides, i, j, pid_m * BLOCK_M, pid_n * BLOCK_N, M, N, p, q,
            ACTIVATION, PRECISE, BIAS_M, False, BLOCK_M, BLOCK_N,
        )  # fmt: skip


@triton.jit
def _tile(desc, i, j, row, col, BATCHED: tl.constexpr, TURNED: tl.constexpr):
    """The tile at (row, col) of an operand, which lies transposed in memory where TURNED."""
    if TURNED:
        row, col = col, row
    if BATCHED:
        tile = desc.load([i.to(tl.int32), j.to(tl.int32), row, col])
        tile = tile.reshape((tile.shape[2], tile.shape[3]))
    else:
        tile = desc.load([row, col])
    return tile.T if TURNED else tile


@triton.jit
def _columns(x, which: tl.constexpr, SUBTILES: tl.constexpr):
    """One of 1, 2 or 4 equal parts of a tile's columns."""
    if SUBTILES > 1:
        x = _halves(x)[2 * which // SUBTILES]
    if SUBTILES > 2:
        x = _halves(x)[which % 2]
    return x


@triton.jit
def _halves(x):
    return tl.split(tl.permute(tl.reshape(x, (x.shape[0], 2, x.shape[1] // 2)), (0, 2, 1)))


@triton.jit(do_not_specialize=["work", "inner", "M", "tiles_m", "tiles_n"])
def _matmul_fwd_kernel_descriptors(
    a_desc, b_desc, b2_desc, y_desc, z_desc, z2_desc, y_ptr, z_ptr, z2_ptr, bias_ptr, residual_ptr, part_ptr,
    work, inner, M, N, K, tiles_m, tiles_n, y_strides, bias_stride, residual_strides, p, q,
    A_BATCHED: tl.constexpr, B_BATCHED: tl.constexpr, BATCHED: tl.constexpr,
    A_TURNED: tl.constexpr, B_TURNED: tl.constexpr,
    ACTIVATION: tl.constexpr, PRECISE: tl.constexpr, BIAS_M: tl.constexpr,
    PRECISION: tl.constexpr, COMPUTE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr, SPLIT_K: tl.constexpr, SUBTILES: tl.constexpr, FLATTEN: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Programs that walk tiles of the result, or shares of K of them. What lies past an operand's end reads as 0."""
    if EARLY:  # the kernel that adds up the shares may come up meanwhile
        tl.extra.cuda.gdc_launch_dependents()
    tiles = tiles_m * tiles_n
    steps = tl.cdiv(tl.cdiv(K, BLOCK_K), SPLIT_K)
    for item in tl.range(tl.program_id(0), work, tl.num_programs(0), flatten=FLATTEN):
        pid_m, pid_n = tile_of(item % tiles, tiles_m, tiles_n, GROUP_M)
        part = (item // tiles).to(tl.int64)
        batch = part // SPLIT_K
        i, j = batch // inner, batch % inner
        first = (part % SPLIT_K).to(tl.int32) * steps
        start_m, start_n = pid_m * BLOCK_M, pid_n * BLOCK_N
        acc = tl.zeros((BLOCK_M, BLOCK_N), COMPUTE)
        if b2_desc is not None:
            acc2 = tl.zeros((BLOCK_M, BLOCK_N), COMPUTE)
        for step in range(steps):
            k = (first + step) * BLOCK_K
            a = _tile(a_desc, i, j, start_m, k, A_BATCHED, A_TURNED)
            b = _tile(b_desc, i, j, k, start_n, B_BATCHED, B_TURNED)
            acc = dot(a, b, acc, PRECISION)
            if b2_desc is not None:
                acc2 = dot(a, _tile(b2_desc, i, j, k, start_n, B_BATCHED, B_TURNED), acc2, PRECISION)
        for part_n in tl.static_range(SUBTILES):
            x = _columns(acc, part_n, SUBTILES)
            x2 = None
            if b2_desc is not None:
                x2 = _columns(acc2, part_n, SUBTILES)
            n = start_n + part_n * (BLOCK_N // SUBTILES)
            if SPLIT_K > 1:
                _store_parts(x, x2, part_ptr, part, start_m, n, M, N, BLOCK_M, BLOCK_N // SUBTILES)
            else:
                _finish(
                    x, x2, y_desc, z_desc, z2_desc, y_ptr, z_ptr, z2_ptr, bias_ptr, residual_ptr,
                    y_strides, bias_stride, residual_strides, i, j, start_m, n, M, N, p, q,
                    ACTIVATION, PRECISE, BIAS_M, BATCHED, BLOCK_M, BLOCK_N // SUBTILES,
                )  # fmt: skip


@triton.jit
def _row(ptr, strides, m, ks, mask, COMPUTE: tl.constexpr):
    return tl.load(ptr + m * strides[2] + ks * strides[3], mask=mask, other=0.0).to(COMPUTE)[None, :]


@triton.jit
def _row_sums(
    a_ptr, b_ptr, a_strides, b_strides, first, last, offs_n, N,
    M: tl.constexpr, COMPUTE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Products of four rows of a (the first M of them count) and columns offs_n of b, each element of b read once."""
    offs_k = tl.arange(0, BLOCK_K)
    acc0 = tl.zeros((BLOCK_N, BLOCK_K), COMPUTE)
    acc1, acc2, acc3 = acc0, acc0, acc0
    for k in tl.range(first, last, BLOCK_K, num_stages=STAGES):
        in_k = offs_k < last - k
        ks = offs_k.to(tl.int64) + k
        mask = (offs_n < N)[:, None] & in_k[None, :]
        b_ptrs = b_ptr + (offs_n * b_strides[3])[:, None] + (ks * b_strides[2])[None, :]
        b = tl.load(b_ptrs, mask=mask, other=0.0).to(COMPUTE)
        acc0 += b * _row(a_ptr, a_strides, 0, ks, in_k, COMPUTE)
        if M > 1:
            acc1 += b * _row(a_ptr, a_strides, 1, ks, in_k, COMPUTE)
        if M > 2:
            acc2 += b * _row(a_ptr, a_strides, 2, ks, in_k, COMPUTE)
        if M > 3:
            acc3 += b * _row(a_ptr, a_strides, 3, ks, in_k, COMPUTE)
    return tl.sum(acc0, 1)[None, :], tl.sum(acc1, 1)[None, :], tl.sum(acc2, 1)[None, :], tl.sum(acc3, 1)[None, :]


@triton.jit(do_not_specialize=["inner", "N", "tiles_n"])
def _matmul_fwd_kernel_rows(
    a_ptr, b_ptr, b2_ptr, y_ptr, z_ptr, z2_ptr, bias_ptr, residual_ptr, part_ptr, inner, N, K, tiles_n,
    a_strides, b_strides, b2_strides, y_strides, bias_stride, residual_strides, p, q,
    ACTIVATION: tl.constexpr, PRECISE: tl.constexpr, BIAS_M: tl.constexpr, COMPUTE: tl.constexpr, M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT_K: tl.constexpr, STAGES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """BLOCK_N columns of the result's one to four rows a program, or one share of K of them."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    pid = tl.program_id(0)
    part = (pid // tiles_n).to(tl.int64)
    batch = part // SPLIT_K
    i, j = batch // inner, batch % inner
    share = tl.cdiv(tl.cdiv(K, BLOCK_K), SPLIT_K) * BLOCK_K
    first = (part % SPLIT_K).to(tl.int32) * share
    last = min(first + share, K)
    start_n = (pid % tiles_n) * BLOCK_N
    offs_n = start_n.to(tl.int64) + tl.arange(0, BLOCK_N)
    a_ptr += i * a_strides[0] + j * a_strides[1]
    b_ptr += i * b_strides[0] + j * b_strides[1]
    sums = _row_sums(a_ptr, b_ptr, a_strides, b_strides, first, last, offs_n, N, M, COMPUTE, BLOCK_N, BLOCK_K, STAGES)
    if b2_ptr is not None:
        b2_ptr += i * b2_strides[0] + j * b2_strides[1]
        sums2 = _row_sums(
            a_ptr, b2_ptr, a_strides, b2_strides, first, last, offs_n, N, M, COMPUTE, BLOCK_N, BLOCK_K, STAGES
        )
    for m in tl.static_range(M):
        x2 = None
        if b2_ptr is not None:
            x2 = sums2[m]
        if SPLIT_K > 1:
            _store_parts(sums[m], x2, part_ptr, part, m, start_n, M, N, 1, BLOCK_N)
        else:
            _finish(
                sums[m], x2, None, None, None, y_ptr, z_ptr, z2_ptr, bias_ptr, residual_ptr, y_strides, bias_stride,
                residual_strides, i, j, m, start_n, M, N, p, q, ACTIVATION, PRECISE, BIAS_M, False, 1, BLOCK_N,
            )  # fmt: skip


@triton.jit
def _sum_parts(ptr, at, step, mask, COMPUTE: tl.constexpr, SPLIT_K: tl.constexpr):
    x = tl.load(ptr + at, mask=mask, other=0.0).to(COMPUTE)
    for s in tl.static_range(1, SPLIT_K):
        x += tl.load(ptr + at + tl.cast(step, tl.int64) * s, mask=mask, other=0.0).to(COMPUTE)
    return x


@triton.jit(do_not_specialize=["inner", "M"])
def _matmul_fwd_kernel_parts(
    part_ptr, part2_ptr, y_ptr, z_ptr, z2_ptr, bias_ptr, residual_ptr, step, inner, M, N, tiles_m, tiles_n,
    y_strides, bias_stride, residual_strides, p, q,
    ACTIVATION: tl.constexpr, PRECISE: tl.constexpr, BIAS_M: tl.constexpr, COMPUTE: tl.constexpr, SPLIT_K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Adds up the shares of K, which lie `step` apart, in their order."""
    pid = tl.program_id(0)
    tiles = tiles_m * tiles_n
    batch = (pid // tiles).to(tl.int64)
    start_m = (pid % tiles) // tiles_n * BLOCK_M
    start_n = (pid % tiles) % tiles_n * BLOCK_N
    offs_m = start_m.to(tl.int64) + tl.arange(0, BLOCK_M)
    offs_n = start_n.to(tl.int64) + tl.arange(0, BLOCK_N)
    mask = (offs_m < M)[:, None] & (offs_n < N)[None, :]
    at = batch * SPLIT_K * step + offs_m[:, None] * N + offs_n[None, :]
    if EARLY:  # this was launched while the shares were still at work
        tl.extra.cuda.gdc_wait()
    x = _sum_parts(part_ptr, at, step, mask, COMPUTE, SPLIT_K)
    x2 = None
    if part2_ptr is not None:
        x2 = _sum_parts(part2_ptr, at, step, mask, COMPUTE, SPLIT_K)
    _finish(
        x, x2, None, None, None, y_ptr, z_ptr, z2_ptr, bias_ptr, residual_ptr, y_strides, bias_stride,
        residual_strides, batch // inner, batch % inner, start_m, start_n, M, N, p, q,
        ACTIVATION, PRECISE, BIAS_M, False, BLOCK_M, BLOCK_N,
    )  # fmt: skip


class Geometry(NamedTuple):
    """A product as the kernels see it: outer x inner products of (M, K) and (K, N), all operands by four strides."""

    outer: int
    inner: int
    M: int
    N: int
    K: int
    a: tuple
    b: tuple
    b2: tuple
    y: tuple
    residual: tuple


@functools.lru_cache(4096)
def geometry(batch, M, N, K, a, b, b2, y, residual):
    """The Geometry of operands whose strides are those of the whole batch; None where they do not collapse."""
    if not any(b[:-2]) and not (b2 and any(b2[:-2])):  # one matrix for all: their rows may be rows of one product
        sizes, steps = collapse((*batch, M), (a[:-1], y[:-1], residual[:-1]), list(range(len(batch) + 1)))
        if len(sizes) <= 1:
            rows = sizes[0] if sizes else 1
            strides = [(0, 0, step[0] if step else 0, whole[-1]) for step, whole in zip(steps, (a, y, residual))]
            return Geometry(1, 1, rows, N, K, strides[0], (0, 0, *b[-2:]), (0, 0, *b2[-2:]), strides[1], strides[2])
    sizes, steps = collapse(batch, (a, b, b2, y, residual), list(range(len(batch))))
    if len(sizes) > 2:
        return None
    lead = (0,) * (2 - len(sizes))
    strides = [(*lead, *step, *whole[-2:]) for step, whole in zip(steps, (a, b, b2, y, residual))]
    return Geometry(*(1,) * len(lead), *sizes, M, N, K, *strides)


def turned(t, strides, rows, cols):
    """How the copy engine can take this operand: False as it lies, True transposed; None where it cannot."""
    if strides[3] == 1:
        turn, major, size = False, strides[2], rows
    elif strides[2] == 1:
        turn, major, size = True, strides[3], cols
    else:
        return None
    unit = 16 // t.element_size()
    if t.data_ptr() % 16 or (size > 1 and (major <= 0 or major % unit)) or strides[0] % unit or strides[1] % unit:
        return None
    return turn


def _batched(strides, outer, inner):
    """Whether an operand has a matrix for each product, or one for all; None for neither."""
    own = [stride != 0 for stride, size in zip(strides, (outer, inner)) if size > 1]
    return None if len(set(own)) > 1 else bool(own and own[0])


def _descriptor(t, strides, turn, batched, outer, inner, rows, cols, block_rows, block_cols):
    unit = 16 // t.element_size()
    sizes, steps, block = [rows, cols], [strides[2], strides[3]], [block_rows, block_cols]
    if turn:
        sizes, steps, block = sizes[::-1], steps[::-1], block[::-1]
    if sizes[0] == 1:  # its stride says nothing
        steps[0] = cdiv(sizes[1], unit) * unit
    steps[1] = 1
    if batched:
        lead = [s if n > 1 else steps[0] * sizes[0] for n, s in zip((outer, inner), strides)]
        return TensorDescriptor(t, [outer, inner, *sizes], [*lead, *steps], [1, 1, *block])
    return TensorDescriptor(t, sizes, steps, block)


def fits(plan, device, dtype, *, M, N, aligned, gated, out_bytes, vendor, **_):
    """Whether the device can run the plan on such operands."""
    if plan.kind == "vendor":
        return vendor
    if plan.kind == "rows":
        return M <= 4 or (N <= 4 and not gated)
    if plan.num_warps > device.max_warps:
        return False
    sets = 2 if gated else 1
    operands = _tuning.shared_bytes(plan.BLOCK_M, plan.BLOCK_N * sets, plan.BLOCK_K, plan.num_stages, dtype.itemsize)
    results = plan.BLOCK_M * plan.BLOCK_N // plan.SUBTILES * (out_bytes if plan.SPLIT_K == 1 else 4)
    if plan.kind == "pointers":
        return max(operands, results) <= device.shared_memory
    return aligned and device.descriptors and operands + results + 1024 <= device.shared_memory  # 1024: barriers


class Product(NamedTuple):
    """What is asked of a product, beside its operands."""

    activation: "str | None" = None
    p: float = 0.0
    q: float = 0.0
    out_dtype: "torch.dtype | None" = None
    precision: str = ""  # "ieee", "tf32", or as torch is set
    invariant: bool = False
    save: bool = False  # return the products themselves too


def product(a, b, b2, bias, residual, how, plan=None):
    """(y, z, z2): the result, and a @ b and a @ b2 where they are to be saved. Operands have two dimensions or more."""
    M, K, N = *a.shape[-2:], b.shape[-1]
    batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    y = torch.empty((*batch, M, N), dtype=how.out_dtype or a.dtype, device=a.device)
    z = torch.empty(y.shape, dtype=a.dtype, device=a.device) if how.save else None
    z2 = torch.empty_like(z) if how.save and b2 is not None else None
    if not y.numel():
        return y, z, z2
    residual = None if residual is None else residual.expand(y.shape)
    operands = [a, b] if b2 is None else [a, b, b2]
    wide = [t.expand(*batch, *t.shape[-2:]) for t in operands]
    strides = [t.stride() for t in wide]
    lies = y.stride() if residual is None else residual.stride()
    g = geometry(batch, M, N, K, strides[0], strides[1], strides[-1], y.stride(), lies)
    if g is None:  # batches of three or more dimensions that do not lie evenly, which torch copies too
        operands = [t.contiguous() for t in wide]
        residual = None if residual is None else residual.contiguous()
        strides = [t.stride() for t in operands]
        g = geometry(batch, M, N, K, strides[0], strides[1], strides[-1], y.stride(), y.stride())
    run(g, *operands[:2], None if b2 is None else operands[2], y, z, z2, bias, residual, how, plan)
    return y, z, z2


def run(g, a, b, b2, y, z, z2, bias, residual, how, plan):
    device, compute = facts(a.device), compute_dtype(a)
    turns = (turned(a, g.a, g.M, g.K), turned(b, g.b, g.K, g.N), turned(b if b2 is None else b2, g.b2, g.K, g.N))
    batched = (_batched(g.a, g.outer, g.inner), _batched(g.b, g.outer, g.inner))
    by_torch = "ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32"
    precision = (how.precision or by_torch) if device.tf32 and a.dtype == torch.float32 else "ieee"
    if plan is None:
        tensor_cores = a.element_size() == 2 or (a.dtype == torch.float32 and precision == "tf32")
        even = None not in turns and None not in batched and turns[1] == turns[2] and g.b == g.b2 and g.K > 0
        asked = dict(
            M=g.M, N=g.N, K=g.K, batch=g.outer * g.inner, gated=b2 is not None, aligned=tensor_cores and even,
            turned=g.b[2] == 1, precision=precision, out_bytes=y.element_size(), act=how.activation is not None or residual is not None,
            tiles=cdiv(g.M, 64) * cdiv(g.N, 64) * g.outer * g.inner,
            vendor=y.dtype == a.dtype and (a.dtype != torch.float32 or (how.precision or by_torch) == by_torch),
        )  # fmt: skip
        if _tuning.AUTOTUNE and not how.invariant:
            again = functools.partial(run, g, a, b, b2, y, z, z2, bias, residual, how)
            plan = _tuning.search("matmul", Plan, fits, (a.device, device), a.dtype, again, **asked)
        else:
            plan = choose(device, a.dtype, how.invariant, **asked)
    if plan.kind == "vendor":
        return _vendor(g, a, b, b2, y, z, z2, bias, residual, how)
    swapped = plan.kind == "rows" and g.M > 4  # few columns are few rows of the transpose
    if swapped:
        g = g._replace(
            M=g.N, N=g.M, a=(*g.b[:2], g.b[3], g.b[2]), b=(*g.a[:2], g.a[3], g.a[2]), b2=(*g.a[:2], g.a[3], g.a[2]),
            y=(*g.y[:2], g.y[3], g.y[2]), residual=(*g.residual[:2], g.residual[3], g.residual[2]),
        )  # fmt: skip
        a, b = b, a
    tiles_m, tiles_n = cdiv(g.M, plan.BLOCK_M), cdiv(g.N, plan.BLOCK_N)
    batches = g.outer * g.inner
    part = None
    if plan.SPLIT_K > 1:
        sets = 1 if b2 is None else 2
        part = torch.empty((batches, plan.SPLIT_K, sets, g.M, g.N), dtype=compute, device=a.device)
    results = (y, z, z2, bias, residual)
    strides = (g.y, 0 if bias is None else bias.stride(0), g.residual)
    numbers, epilogue = _options(y, how, compute, swapped)
    early = device.early and plan.SPLIT_K > 1
    blocks = {
        "EARLY": early,
        "BLOCK_N": plan.BLOCK_N,
        "BLOCK_K": plan.BLOCK_K,
        "SPLIT_K": plan.SPLIT_K,
        "num_warps": plan.num_warps,
    }
    if plan.kind == "rows":
        launch(
            _matmul_fwd_kernel_rows,
            (batches * plan.SPLIT_K * tiles_n,),
            a.device,
            (a, b, b2, *results, part, g.inner, g.N, g.K, tiles_n, g.a, g.b, g.b2, *strides, *numbers),
            **epilogue, M=g.M, STAGES=plan.num_stages, **blocks,
        )  # fmt: skip
    elif plan.kind == "pointers":
        launch(
            _matmul_fwd_kernel_pointers,
            (batches * plan.SPLIT_K * tiles_m * tiles_n,),
            a.device,
            (a, b, b2, *results, part, g.inner, g.M, g.N, g.K, tiles_m, tiles_n, g.a, g.b, g.b2, *strides, *numbers),
            **epilogue, PRECISION=precision, EVEN_K=g.K % plan.BLOCK_K == 0, BLOCK_M=plan.BLOCK_M,
            GROUP_M=plan.GROUP_M, num_stages=plan.num_stages, **blocks,
        )  # fmt: skip
    else:
        work = batches * plan.SPLIT_K * tiles_m * tiles_n
        many = batches > 1
        lead = (g.outer, g.inner)
        block_b = (*lead, g.K, g.N, plan.BLOCK_K, plan.BLOCK_N)
        # Results go out in bulk where their rows are aligned, and saved products with them.
        unit = 16 // min(t.element_size() for t in (y, z) if t is not None)
        block_y = (False, many, *lead, g.M, g.N, plan.BLOCK_M, plan.BLOCK_N // plan.SUBTILES)
        bulk = plan.SPLIT_K == 1 and turned(y, g.y, g.M, g.N) is False and g.N % unit == 0
        launch(
            _matmul_fwd_kernel_descriptors,
            (min(work, device.multiprocessors * plan.PER_SM),),
            a.device,
            (
                _descriptor(a, g.a, turns[0], batched[0], *lead, g.M, g.K, plan.BLOCK_M, plan.BLOCK_K),
                _descriptor(b, g.b, turns[1], batched[1], *block_b),
                None if b2 is None else _descriptor(b2, g.b2, turns[1], batched[1], *block_b),
                *[_descriptor(t, g.y, *block_y) if bulk and t is not None else None for t in (y, z, z2)],
                *results, part, work, g.inner, g.M, g.N, g.K, tiles_m, tiles_n, *strides, *numbers,
            ),
            A_BATCHED=batched[0], B_BATCHED=batched[1], BATCHED=many, A_TURNED=turns[0], B_TURNED=turns[1],
            **epilogue, PRECISION=precision, BLOCK_M=plan.BLOCK_M, GROUP_M=plan.GROUP_M, SUBTILES=plan.SUBTILES,
            FLATTEN=plan.FLATTEN, num_stages=plan.num_stages, **blocks,
        )  # fmt: skip
    if part is not None:
        parts = (part[:, :, 0], None if b2 is None else part[:, :, 1])
        _sum(g, *parts, part.stride(1), plan.SPLIT_K, results, strides, numbers, epilogue, early)


def _options(y, how, compute, swapped):
    precise = y.dtype == torch.float32 and compute == torch.float32
    numbers = (scalar(how.p, compute), scalar(how.q, compute))
    return numbers, {
        "ACTIVATION": how.activation, "PRECISE": precise, "BIAS_M": swapped, "COMPUTE": triton_dtype(compute),
    }  # fmt: skip


def _sum(g, part, part2, step, split_k, results, strides, numbers, epilogue, early):
    BLOCK_N = min(next_power_of_2(g.N), 1024)  # 8 elements a thread: untuned
    BLOCK_M = 1024 // BLOCK_N
    tiles_m, tiles_n = cdiv(g.M, BLOCK_M), cdiv(g.N, BLOCK_N)
    launch(
        _matmul_fwd_kernel_parts,
        (g.outer * g.inner * tiles_m * tiles_n,),
        part.device,
        (part, part2, *results, step, g.inner, g.M, g.N, tiles_m, tiles_n, *strides, *numbers),
        **epilogue, SPLIT_K=split_k, BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, EARLY=early, num_warps=4,
        **({"launch_pdl": True} if early else {}),
    )  # fmt: skip


def _vendor(g, a, b, b2, y, z, z2, bias, residual, how):
    """torch's products, and the epilogue as one pass over them. z and z2 may be the products themselves."""
    if b2 is None and how.activation is None and residual is None and z is None:
        if bias is None:
            torch.matmul(a, b, out=y)
            return
        if a.dim() == b.dim() == 2 and bias.dtype == a.dtype:
            torch.addmm(bias, a, b, out=y)
            return
    z = torch.matmul(a, b, out=torch.empty_like(y) if z is None else z)
    z2 = None if b2 is None else torch.matmul(a, b2, out=torch.empty_like(y) if z2 is None else z2)
    numbers, epilogue = _options(y, how, compute_dtype(a), False)
    strides = (g.y, 0 if bias is None else bias.stride(0), g.residual)
    _sum(g, z, z2, g.M * g.N, 1, (y, None, None, bias, residual), strides, numbers, epilogue, False)


def choose(device, dtype, invariant, **asked):
    """The plan for a product of these sizes; where it is invariant, one by which a row's bits do not depend on M."""
    return _tuning.find("matmul_invariant" if invariant else "matmul", Plan, fits, device, dtype, **asked)
