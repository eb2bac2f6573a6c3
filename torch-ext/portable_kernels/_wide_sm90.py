"""Softmax and norms of wide rows, forward and backward, on Hopper GPUs: every tensor is read once, however wide.

A row is split over programs. Each has BLOCK_N columns of every so many rows, which bulk copies bring into a ring of
SLOTS in shared memory. Of a row that has come a program tells the others two numbers of its columns, by way of memory:
two float32 in a word of 64 bits, which is not 0 once it is there. LAG rows later, when all have told, it reads those
columns again from shared memory and writes its part of the result. Gradients of weight and bias stay in registers.

The programs of a row wait for each other, so all of them must run at once: the launch is cooperative, and the device
refuses one that would not fit.
"""

from typing import NamedTuple

import torch

from ._device import facts, launch
from ._gluon import TensorDescriptor, fence_async_shared, gl, gluon, mbarrier, tma
from ._triton import cdiv, next_power_of_2

_FLOATS = (torch.float32, torch.float16, torch.bfloat16)
_LAYOUTS = {size: gl.NVMMASharedLayout(0, 8 * size, 3) for size in (2, 4)}
_LOWEST = gl.constexpr(torch.finfo(torch.float32).min)


class Plan(NamedTuple):
    BLOCK_N: int
    SLOTS: int
    LAG: int
    num_warps: int
    programs: int  # on a multiprocessor


@gluon.jit
def _exp(x):
    return gl.exp2(x * 1.4426950408889634)


@gluon.jit
def _hold(x):
    """x; what the compiler would widen once and keep so, it widens at each use: registers hold twice as much."""
    if x.dtype.primitive_bitwidth == 16:
        return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=2)
    else:
        return x


@gluon.jit
def _only(within, x, fill: gl.constexpr = 0.0):
    return x if within is None else gl.where(within, x, fill)


@gluon.jit
def _read(slot, fill: gl.constexpr, within, LAYOUT: gl.constexpr):
    """A slot as (R, T, 8): 8 neighbours for each of T threads, R times. `fill` past the row's end."""
    T: gl.constexpr = LAYOUT.threads_per_warp[1] * LAYOUT.warps_per_cta[1]
    shape: gl.constexpr = [slot.shape[1] * slot.shape[2] // (8 * T), T, 8]
    x = slot._reinterpret(slot.dtype, shape, gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])).load(LAYOUT).to(gl.float32)
    return _only(within, x, fill)


@gluon.jit
def _sum(x):
    return gl.sum(gl.sum(gl.sum(x, axis=2), axis=0), axis=0)


@gluon.jit
def _bits(x):
    return x.to(gl.int32, bitcast=True).to(gl.int64)


@gluon.jit
def _tell(word_ptr, first, second):
    word = (_bits(first) << 32) | (_bits(second) & 0xFFFFFFFF)
    word = gl.where(word == 0, -(2**63), word)  # a first of -0.0, which as a number Triton would make 0.0
    gl.atomic_xchg(word_ptr, word, sem="relaxed")


@gluon.jit
def _peek(words_ptr, slices, BLOCK_S: gl.constexpr):
    """The words of a row's programs, as far as they are there."""
    # Each warp has them all, so that none need be passed between warps.
    WORDS: gl.constexpr = gl.BlockedLayout([max(BLOCK_S // 32, 1)], [32], [gl.num_warps()], [0])
    at = words_ptr + gl.minimum(gl.arange(0, BLOCK_S, WORDS), slices - 1)
    return gl.inline_asm_elementwise(
        "ld.relaxed.gpu.global.b64 $0, [$1];", "=l,l", [at], dtype=gl.int64, is_pure=False, pack=1
    )


@gluon.jit
def _told(word, words_ptr, slices, fill: gl.constexpr):
    """(programs' numbers, first, second) of all programs of a row, once they are there."""
    offs_s = gl.arange(0, word.shape[0], word.type.layout)
    word = gl.inline_asm_elementwise(
        """{
        .reg .pred there; mov.b64 $0, $1;
        again: setp.ne.s64 there, $0, 0; @there bra done; ld.relaxed.gpu.global.b64 $0, [$2]; bra again; done:
        }""",
        "=&l,l,l", [word, words_ptr + gl.minimum(offs_s, slices - 1)], dtype=gl.int64, is_pure=False, pack=1,
    )  # fmt: skip
    there = offs_s < slices
    first = gl.where(there, (word >> 32).to(gl.int32).to(gl.float32, bitcast=True), fill)
    return offs_s, first, gl.where(there, word.to(gl.int32).to(gl.float32, bitcast=True), 0.0)


@gluon.jit
def _element(x_ptr, g_ptr, s_ptr):
    """Of what is normalised: x, or x + residual as rounded in the sum."""
    x = gl.load(x_ptr).to(gl.float32)
    if g_ptr is not None:
        x = (x + gl.load(g_ptr).to(gl.float32)).to(s_ptr.dtype.element_ty).to(gl.float32)
    return x


@gluon.jit
def _numbers(row, ptrs, strides, first_n, KIND: gl.constexpr, BACKWARD: gl.constexpr):
    """What a program must know of a row besides its columns."""
    x_ptr, g_ptr, s_ptr, stats_ptr = ptrs
    if BACKWARD and KIND == "layer_norm":  # shift, correction, rstd
        at = stats_ptr + row * 3
        return gl.load(at), gl.load(at + 1), gl.load(at + 2)
    elif BACKWARD and KIND == "rms_norm":
        return gl.load(stats_ptr + row), 0.0, 0.0
    elif KIND == "layer_norm":  # the first element of the row and that of the slice
        x_row = x_ptr + row * strides[0]
        g_row = None
        g_slice = None
        if g_ptr is not None:
            g_row = g_ptr + row * strides[1]
            g_slice = g_row + first_n
        return _element(x_row, g_row, s_ptr), _element(x_row + first_n, g_slice, s_ptr), 0.0
    else:
        return 0.0, 0.0, 0.0


@gluon.jit
def _xhat(x, numbers, KIND: gl.constexpr):
    """(x normalised, rstd), from what the forward kept."""
    if KIND == "layer_norm":
        shift, correction, rstd = numbers
        return (x - shift) * rstd - correction * rstd, rstd
    else:
        return x * numbers[0], numbers[0]


@gluon.jit
def _scaled(g, w, offset, w_ptr):
    if w_ptr is not None:
        w = _hold(w).to(gl.float32)
        g *= w if offset is None else w + offset
    return g


@gluon.jit
def _share(x, g, w, offset, w_ptr, numbers, within, count, KIND: gl.constexpr, BACKWARD: gl.constexpr):
    """Two numbers of a program's columns of a row, from which and those of others comes what the row needs."""
    if BACKWARD:
        if KIND == "softmax":
            total = _sum(g * x)
            return total, total
        elif KIND == "log_softmax":
            total = _sum(g)
            return total, total
        else:
            g = _scaled(g, w, offset, w_ptr)  # 0 past the row's end, where xhat may be inf
            product = _sum(_only(within, g * _xhat(x, numbers, KIND)[0]))
            return product, _sum(g) if KIND == "layer_norm" else product
    elif KIND == "rms_norm":
        total = _sum(x * x)
        return total, total
    elif KIND == "layer_norm":  # the mean less the row's first element, and the variance
        # Of BLOCK_N numbers none is further from the mean than sqrt(BLOCK_N) deviations: as much may cancel, squared.
        d = _only(within, x - numbers[1])
        share = d * (1.0 / count)  # divided first: a sum may overflow
        mean = _sum(share)
        variance = _sum(share * d)
        variance = gl.where(mean * mean < variance, variance - mean * mean, variance)  # not inf - inf
        return mean + (numbers[1] - numbers[0]), variance
    else:  # the maximum, and the sum of exponentials
        peaks = gl.maximum(gl.max(gl.max(x, axis=2), axis=0), _LOWEST)
        sums = gl.sum(gl.sum(_exp(x - peaks[None, :, None]), axis=2), axis=0)
        peak = gl.max(peaks, axis=0)
        return peak, gl.sum(sums * _exp(peaks - peak), axis=0)


@gluon.jit
def _fill(x_desc, g_desc, x_smem, g_smem, bars, slot, row, M, first_n):
    """Have the columns of a row copied to a slot."""
    SIZE: gl.constexpr = x_smem.shape[2] * x_smem.shape[3]
    BYTES: gl.constexpr = SIZE * x_desc.dtype.primitive_bitwidth // 8
    if g_desc is None:
        mbarrier.expect(bars.index(slot), BYTES, pred=row < M)
    else:
        G_BYTES: gl.constexpr = SIZE * g_desc.dtype.primitive_bitwidth // 8
        mbarrier.expect(bars.index(slot), BYTES + G_BYTES, pred=row < M)
    at = [row.to(gl.int32), first_n // x_smem.shape[3], 0]
    tma.async_copy_global_to_shared(x_desc, at, bars.index(slot), x_smem.index(slot), pred=row < M)
    if g_desc is not None:
        tma.async_copy_global_to_shared(g_desc, at, bars.index(slot), g_smem.index(slot), pred=row < M)


@gluon.jit
def _refill(x_desc, g_desc, x_smem, g_smem, bars, slot, row, M, first_n):
    gl.thread_barrier()  # all threads have read the slot
    _fill(x_desc, g_desc, x_smem, g_smem, bars, slot, row, M, first_n)


@gluon.jit(do_not_specialize=["M", "slices"])
def _wide_kernel_sm90(
    x_desc, g_desc, x_ptr, g_ptr, w_ptr, b_ptr, stats_ptr, words_ptr, ds_ptr, s_ptr, y_ptr, dw_ptr, db_ptr,
    M, N8, slices, x_stride8, g_stride8, ds_stride8, eps, offset,
    KIND: gl.constexpr, BACKWARD: gl.constexpr, BEFORE_WEIGHT: gl.constexpr, MASKED: gl.constexpr,
    BLOCK_N: gl.constexpr, BLOCK_S: gl.constexpr, SLOTS: gl.constexpr, LAG: gl.constexpr,
):  # fmt: skip
    """Forward, x_desc and g_desc are of x and the residual (or None), backward of x (or softmax's result) and dy."""
    T: gl.constexpr = 32 * gl.num_warps()
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 1, 8], [1, 32, 1], [1, gl.num_warps(), 1], [2, 1, 0])
    FILL: gl.constexpr = 0.0 if BACKWARD or KIND == "rms_norm" or KIND == "layer_norm" else float("-inf")
    N = N8 * 8  # so that the compiler knows it for a multiple
    own = gl.program_id(0) % slices
    group = gl.program_id(0) // slices
    groups = gl.num_programs(0) // slices
    first_n = own * BLOCK_N

    PIECE: gl.constexpr = x_desc.block_type.shape[2]
    x_smem = gl.allocate_shared_memory(x_desc.dtype, [SLOTS, 1, BLOCK_N // PIECE, PIECE], x_desc.layout)
    g_smem = None
    if g_desc is not None:
        g_smem = gl.allocate_shared_memory(g_desc.dtype, [SLOTS, 1, BLOCK_N // PIECE, PIECE], g_desc.layout)
    bars = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(SLOTS):
        mbarrier.init(bars.index(i), count=1)
    fence_async_shared()
    gl.thread_barrier()
    for i in range(SLOTS):
        _fill(x_desc, g_desc, x_smem, g_smem, bars, i, group + i * groups, M, first_n)

    offs_r = gl.arange(0, BLOCK_N // (8 * T), gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))
    offs_t = gl.arange(0, T, gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))
    offs_e = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))
    offs_n = first_n + offs_r[:, None, None] * (8 * T) + offs_t[None, :, None] * 8 + offs_e[None, None, :]
    within = offs_n < N if MASKED else None
    count = gl.minimum(N - first_n, BLOCK_N).to(gl.float32)
    w = None
    b = None
    if w_ptr is not None:
        w = gl.load(w_ptr + offs_n, mask=within, other=0.0 if MASKED else None)
    if b_ptr is not None:
        b = gl.load(b_ptr + offs_n, mask=within, other=0.0 if MASKED else None)
    dw = gl.zeros([BLOCK_N // (8 * T), T, 8], gl.float32, LAYOUT)
    db = gl.zeros([BLOCK_N // (8 * T), T, 8], gl.float32, LAYOUT)

    steps = (M - group + groups - 1) // groups
    ptrs = (x_ptr, g_ptr, s_ptr, stats_ptr)
    strides = (x_stride8.to(gl.int64) * 8, g_stride8.to(gl.int64) * 8)
    ahead = _numbers(group.to(gl.int64), ptrs, strides, first_n, KIND, BACKWARD)
    for i in range(steps + LAG):
        # Long before they are needed, what comes from memory: of the row that is due, and of the next that is to come.
        due = (group + gl.maximum(i - LAG, 0) * groups).to(gl.int64)
        word = _peek(words_ptr + due * slices, slices, BLOCK_S)
        known = _numbers(due, ptrs, strides, first_n, KIND, BACKWARD)
        if i < steps:
            row = (group + i * groups).to(gl.int64)
            slot = i % SLOTS
            numbers = ahead
            ahead = _numbers(gl.minimum(row + groups, M - 1), ptrs, strides, first_n, KIND, BACKWARD)
            mbarrier.wait(bars.index(slot), (i // SLOTS) & 1)
            x = _read(x_smem.index(slot), FILL, within, LAYOUT)
            g = x
            if g_desc is not None:
                g = _read(g_smem.index(slot), 0.0, within, LAYOUT)
                if not BACKWARD:
                    x = (x + g).to(s_ptr.dtype.element_ty).to(gl.float32)
            first, second = _share(x, g, w, offset, w_ptr, numbers, within, count, KIND, BACKWARD)
            _tell(words_ptr + row * slices + own, first, second)
        if i >= LAG:
            slot = (i - LAG) % SLOTS
            x = _read(x_smem.index(slot), FILL, within, LAYOUT)
            if g_desc is not None:
                g = _read(g_smem.index(slot), 0.0, within, LAYOUT)
            PEAKS: gl.constexpr = FILL if FILL < 0.0 else 0.0
            offs_s, firsts, seconds = _told(word, words_ptr + due * slices, slices, PEAKS)
            if not BACKWARD:
                _refill(x_desc, g_desc, x_smem, g_smem, bars, slot, due + SLOTS * groups, M, first_n)
            out = due * N + offs_n
            if BACKWARD:
                total = gl.sum(firsts, axis=0)
                if KIND == "softmax":
                    y = x * (g - total)
                elif KIND == "log_softmax":
                    y = g - _exp(x) * total
                else:
                    xhat, rstd = _xhat(x, known, KIND)
                    dw += g * xhat
                    if db_ptr is not None:
                        db += g
                    y = _scaled(g, w, offset, w_ptr) - xhat * (total / N)
                    if KIND == "layer_norm":
                        y -= gl.sum(seconds, axis=0) / N
                    y *= rstd
                    if ds_ptr is not None:
                        at_ds = ds_ptr + due * (ds_stride8.to(gl.int64) * 8) + offs_n
                        y += gl.load(at_ds, mask=within, other=0.0 if MASKED else None).to(gl.float32)
            elif KIND == "softmax" or KIND == "log_softmax":
                peak = gl.maximum(gl.max(firsts, axis=0), _LOWEST)
                total = gl.sum(seconds * _exp(firsts - peak), axis=0)
                if KIND == "softmax":
                    y = gl.exp2((x - peak) * 1.4426950408889634 - gl.log2(total))
                else:
                    y = (x - peak) - gl.log(total)
            else:
                if g_desc is not None:
                    total = (x + g).to(s_ptr.dtype.element_ty)
                    gl.store(s_ptr + out, total, mask=within)
                    x = total.to(gl.float32)
                if KIND == "layer_norm":
                    share = gl.minimum(N - offs_s * BLOCK_N, BLOCK_N).to(gl.float32) / N
                    share = gl.where(offs_s < slices, share, 0.0)
                    correction = gl.sum(firsts * share, axis=0)
                    apart = firsts - correction
                    rstd = gl.rsqrt(gl.sum((seconds + apart * apart) * share, axis=0) + eps)
                    if own == 0:
                        gl.store(stats_ptr + due * 3, known[0])
                        gl.store(stats_ptr + due * 3 + 1, correction)
                        gl.store(stats_ptr + due * 3 + 2, rstd)
                    y = (x - known[0]) * rstd - correction * rstd
                else:
                    rstd = gl.rsqrt(gl.sum(firsts, axis=0) / N + eps)
                    if own == 0:
                        gl.store(stats_ptr + due, rstd)
                    y = x * rstd
                if BEFORE_WEIGHT:
                    y = y.to(x_desc.dtype).to(gl.float32)
                y = _scaled(y, w, offset, w_ptr)
                if BEFORE_WEIGHT:
                    y = y.to(y_ptr.dtype.element_ty).to(gl.float32)
                if b_ptr is not None:
                    y += _hold(b).to(gl.float32)
            gl.store(y_ptr + out, y.to(y_ptr.dtype.element_ty), mask=within)
            if BACKWARD:  # late: registers are full of gradients, and the slot is read where it is used
                _refill(x_desc, g_desc, x_smem, g_smem, bars, slot, due + SLOTS * groups, M, first_n)
    part = group.to(gl.int64) * N + offs_n
    if dw_ptr is not None:
        gl.store(dw_ptr + part, dw, mask=within)
    if db_ptr is not None:
        gl.store(db_ptr + part, db, mask=within)
    for i in gl.static_range(SLOTS):  # to the end: nothing else may be laid over a barrier while the kernel runs
        mbarrier.invalidate(bars.index(i))


# (widest row, plan) in turn, None where the portable kernel is as fast. Shares of a copy: H200 bf16, weights in bf16.
_ANY = 2**31
_FORWARD = {
    "softmax": ((65536, None), (_ANY, Plan(4096, 3, 1, 2, 8))),  # 0.89 at 131072, log_softmax 0.92; 0.88 at 262144
    "rms_norm": ((16384, None), (131072, Plan(2048, 3, 1, 1, 12)), (_ANY, Plan(4096, 4, 2, 2, 6))),  # 0.92, 0.91
    "layer_norm": ((_ANY, Plan(4096, 3, 1, 2, 6)),),  # 0.87 to 65536, 0.86 at 131072, 0.84 at 262144
    "add_rms_norm": ((131072, Plan(2048, 4, 2, 2, 6)), (_ANY, Plan(4096, 4, 2, 4, 3))),  # 0.95, 0.92
    "add_layer_norm": ((65536, Plan(2048, 3, 1, 2, 8)), (_ANY, Plan(4096, 4, 2, 4, 3))),  # 0.94, 0.91
}
_BACKWARD = {
    "softmax": ((32768, None), (_ANY, Plan(4096, 4, 2, 4, 3))),  # 0.97
    "rms_norm": ((131072, Plan(2048, 4, 2, 2, 6)), (_ANY, Plan(4096, 4, 2, 4, 3))),  # 0.93 to 32768, 0.92, 0.91; 0.89
    "layer_norm": (
        (16384, Plan(1024, 3, 1, 1, 12)),  # 0.86
        (131072, Plan(2048, 4, 2, 2, 6)),  # 0.83 at 32768, 0.81 at 65536, 0.80
        (_ANY, Plan(4096, 4, 2, 4, 3)),  # 0.77
    ),
}
_FEW = Plan(4096, 3, 1, 4, 4)  # rows that would leave multiprocessors idle: softmax of 1 x 131072 4.7 us, not 14.6


def plan(kind, backward, N, n_rows):
    """kind: as that of `run`, with "add_" before it where a residual is added."""
    if not backward and n_rows <= 16 and N > 32768:
        return _FEW
    for widest, found in (_BACKWARD if backward else _FORWARD)[kind.removeprefix("log_")]:
        if N <= widest:
            return found
    return None


def registers(tile):
    """How many a thread may have so that all programs fit: warps are dealt to four schedulers of 16384 each."""
    return min(16384 // (cdiv(tile.programs * tile.num_warps, 4) * 32) // 8 * 8, 255)


def bulk(t, strides, M):
    """Whether rows of these strides can be copied in bulk."""
    steady = M == 1 or (strides[2] > 0 and strides[2] * t.element_size() % 16 == 0)
    return t.dtype in _FLOATS and strides[3] == 1 and steady and t.data_ptr() % 16 == 0


def run(
    kind, x, g, y, layout, *, backward=False, weight=None, bias=None, stats=None, ds=None, total=None, eps=0.0,
    offset=0.0, before_weight=False, need_dw=False, need_db=False,
):  # fmt: skip
    """Partial sums of the gradients of weight and bias, or None for each; None where this is left to portable kernels.

    Args:
        kind: "softmax" | "log_softmax" | "rms_norm" | "layer_norm".
        x, g: rows, each a tensor and its strides in `layout`. Forward x and the residual (or None), backward x (or
            softmax's result) and dy. ds, or None: likewise, the gradient of the sum.
        y: what is written, contiguous; forward also stats, and total, the sum that is normalised.
    """
    device, M, N = facts(y.device), layout.M, layout.N
    tile = plan("add_" * (total is not None) + kind, backward, N, M)
    ring = [one for one in (x, g) if one is not None]
    if tile is None or layout.A * layout.B != 1 or N % 8 or not all(bulk(*one, M) for one in ring):
        return None
    if kind.endswith("softmax") and not backward and x[0].dtype != y.dtype:
        return None  # x is converted first
    if kind == "layer_norm" and not backward and (x[0] if total is None else total).dtype == torch.float32:
        return None  # whose variance would not be as right
    if ds is not None and (ds[1][2] % 8 or ds[1][3] != 1):
        return None
    BLOCK_N = tile.BLOCK_N * 2 // max(t.element_size() for t, _ in ring)
    slices = cdiv(N, BLOCK_N)
    groups = min(tile.programs * device.multiprocessors // slices, M)
    if not groups:
        return None
    piece = min(N & -N, 256)  # a copy's box has sides of up to 256, and none of it lies in two rows
    descriptors = [
        TensorDescriptor(
            t, [M, N // piece, piece], [s[2] if M > 1 else N, piece, 1], [1, BLOCK_N // piece, piece],
            _LAYOUTS[t.element_size()],
        )
        for t, s in ring
    ]  # fmt: skip
    x_at, g_at, ds_at = ((t, s[2] // 8) for t, s in (x, g or (None, (0,) * 4), ds or (None, (0,) * 4)))
    words = torch.zeros((M, slices), dtype=torch.int64, device=y.device)
    dw = stats.new_empty((groups, N)) if need_dw else None
    db = stats.new_empty((groups, N)) if need_db else None
    launch(
        _wide_kernel_sm90,
        (groups * slices,),
        y.device,
        (descriptors[0], descriptors[1] if g else None, x_at[0], g_at[0], weight, bias, stats, words, ds_at[0], total,
         y, dw, db, M, N // 8, slices, x_at[1], g_at[1], ds_at[1], eps, offset or None),
        KIND=kind, BACKWARD=backward, BEFORE_WEIGHT=before_weight, MASKED=N % BLOCK_N != 0,
        BLOCK_N=BLOCK_N, BLOCK_S=max(next_power_of_2(slices), 32), SLOTS=tile.SLOTS, LAG=tile.LAG,
        num_warps=tile.num_warps, maxnreg=registers(tile), launch_cooperative_grid=True,
    )  # fmt: skip
    return dw, db
