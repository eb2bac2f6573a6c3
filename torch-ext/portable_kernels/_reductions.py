"""Kernels of reductions.py: how they walk x, the states of their lanes, and how splits of a row come together.

A kernel walks BLOCK_M rows in steps of BLOCK_R * BLOCK_N lanes and keeps one running state for each GROUP neighbouring
lanes, which a thread loads at once: a sum, the best so far, mean and squared deviations (Chan, Golub and LeVeque
1979), or maximum and scaled sum (Milakov and Gimelshein 2018). States merge at the end, in a fixed order. Where there
are too few rows to fill the device, several programs share a row, and a second kernel merges their states.
"""

import functools
from typing import NamedTuple

import torch

from ._device import facts, launch
from ._moments import take_moments, within
from ._online import grouped, neighbours
from ._rows import collapse, compute_dtype, row_index, warps
from ._triton import cdiv, exp, next_power_of_2, round_to, scalar, tl, triton, triton_dtype

_INF = float("inf")


class Kind(NamedTuple):
    """How terms are made, combined and finished, and how many numbers a row the backward needs."""

    COMBINE: str
    MAP: str = ""
    FINISH: str = ""
    stats: int = 0


KINDS = {
    "sum": Kind("sum"),
    "mean": Kind("sum", FINISH="mean"),
    "amax": Kind("max", stats=2),  # value, ties
    "amin": Kind("min", stats=2),
    "argmax": Kind("argmax"),
    "argmin": Kind("argmin"),
    "var": Kind("moments", FINISH="var", stats=3),  # shift, mean - shift, result
    "std": Kind("moments", FINISH="std", stats=3),
    "logsumexp": Kind("logsumexp", stats=2),  # maximum, logarithm of the scaled sum
    "norm_0": Kind("sum", "nonzero"),
    "norm_1": Kind("sum", "abs"),
    "norm_2": Kind("sum", "square", "sqrt", stats=1),  # the norm
    "norm_p": Kind("sum", "power", "root", stats=1),
    "norm_inf": Kind("max", "abs", stats=2),  # the norm, ties
    "norm_-inf": Kind("min", "abs", stats=2),
}


class Layout(NamedTuple):
    """A, B and M are kept, R and N reduced. strides: of one (a, b, m, r, n) for each operand."""

    A: int
    B: int
    M: int
    R: int
    N: int
    strides: tuple

    @property
    def rows(self):
        return self.A * self.B * self.M

    def blocks(self, block_m):
        return self.A * self.B * cdiv(self.M, block_m)


@functools.lru_cache(4096)
def layout_of(shape, dims, *strides):
    """How to walk operands of these strides, and last a contiguous result; None where the dimensions do not collapse.

    Kept and reduced dimensions are each taken in the order in which they lie in the first operand. An operand of the
    result's shape has strides 0 where x is reduced.
    """
    reduced = [d % len(shape) for d in dims]
    kept = [d for d in range(len(shape)) if d not in reduced]
    step, result = 1, [0] * len(shape)
    for d in reversed(kept):
        result[d] = step
        step *= shape[d]
    strides = (*strides, tuple(result))
    sizes, steps = [], [()] * len(strides)
    for group, most in ((kept, 3), (reduced, 2)):
        found, merged = collapse(shape, strides, sorted(group, key=lambda d: -strides[0][d]))
        lead = most - len(found)
        if lead < 0:
            return None
        sizes += [1] * lead + list(found)
        steps = [s + (0,) * lead + m for s, m in zip(steps, merged)]
    return Layout(*sizes, tuple(steps))


def reduced_last(x, dims):
    """(x with the reduced dimensions last and as one, which `layout_of` always takes; the order they were put in).

    A copy, once, for layouts that no model has been seen to make.
    """
    reduced = [d % x.dim() for d in dims]
    order = [d for d in range(x.dim()) if d not in reduced] + reduced
    return x.permute(order).contiguous().flatten(x.dim() - len(dims)), order


class Plan(NamedTuple):
    BLOCK_M: int
    BLOCK_R: int
    BLOCK_N: int
    STAGES: int
    num_warps: int


@functools.lru_cache(4096)
def plan_tiles(layout, multiprocessors, max_warps):
    """(tiles, steps of a row, steps of a split, splits), for scans and gradients. All sizes are untuned."""
    lanes = 4096  # 32 elements a thread: up to eight loads of 16 bytes in flight
    if _across(layout):
        return _tiles(layout, multiprocessors, 128, lanes, warps(4, max_warps))
    return _tiles(layout, multiprocessors, 2048, lanes, warps(4, max_warps))


@functools.lru_cache(4096)
def plan_reduction(layout, itemsize, multiprocessors, max_warps, combine):
    """As `plan_tiles`. Shares of a copy, of which a read takes part; a copy of as many bytes has 0.95: H200 bf16."""
    if _across(layout):  # at 32768 x 4096 and 8388608 x 16 sum and amax 0.88; without stages 0.73 to 0.81
        stages = {1: 3, 2: 3, 4: 2}.get(itemsize, 1)
        if combine in ("argmax", "argmin"):  # 0.78 at 32768 x 4096; as the others 0.67
            return _tiles(layout, multiprocessors, 64, 4096, warps(4, max_warps), stages + (stages == 3), 2)
        return _tiles(layout, multiprocessors, 64, 4096, warps(4, max_warps), stages, 4)
    if layout.N > 2**17 and combine != "logsumexp":  # at 16 x 8388608 sum and amax 0.90, argmax 0.88, var 0.78; with a
        stages = {1: 3, 2: 3, 4: 2}.get(itemsize, 1)  # stage 0.84, 0.88, 0.86, 0.61
        return _tiles(layout, multiprocessors, 1, 8192, warps(8, max_warps), stages, 2)
    if layout.N > 8192:  # at 128256 amax 0.98, argmax 0.95, sum 0.97, var 0.89, logsumexp 0.93
        return _tiles(layout, multiprocessors, 1, 4096 if combine == "logsumexp" else 8192, warps(8, max_warps))
    if layout.N > 1024 and combine not in ("moments", "logsumexp"):  # at 4096 sum 0.89, amax 0.90, argmax 0.87
        return _tiles(layout, multiprocessors, 1, 2048, warps(4, max_warps))
    if combine == "sum":
        return _tiles(layout, multiprocessors, 2048, 4096, warps(4, max_warps))
    # A warp has rows of its own: var 0.83, logsumexp 0.86 at 4096; 4 warps a row 0.65 and 0.76.
    return _tiles(layout, multiprocessors, 1024, 1024, 1)


def _across(layout):
    """Whether x is dense across the rows, and read in lines of BLOCK_M."""
    _, _, stride_m, _, stride_n = layout.strides[0]
    return layout.M > 1 and 0 < stride_m < stride_n


def _tiles(layout, multiprocessors, rows, lanes, num_warps, stages=1, programs=8):
    """rows: how many at least where x is dense across them, else how many elements of them at most."""
    M, R, N = layout.M, layout.R, layout.N
    width = next_power_of_2(R) * next_power_of_2(N)
    if _across(layout):
        BLOCK_M = min(next_power_of_2(M), max(rows, lanes // width), 1024)
        lanes //= BLOCK_M
    else:
        BLOCK_M = min(next_power_of_2(M), max(rows // width, 1), 512)
    BLOCK_N = min(next_power_of_2(N), lanes)
    BLOCK_R = min(next_power_of_2(R), lanes // BLOCK_N) if BLOCK_N >= N else 1
    steps = cdiv(R, BLOCK_R) * cdiv(N, BLOCK_N)
    blocks = layout.blocks(BLOCK_M)
    splits = 1
    if 2 * blocks <= multiprocessors or steps >= 32:  # up to `programs` a multiprocessor, of two steps or more each
        splits = max(1, min(programs * multiprocessors // blocks, steps // 2, 1024))
    split_steps = cdiv(steps, splits)
    return Plan(BLOCK_M, BLOCK_R, BLOCK_N, stages, num_warps), steps, split_steps, cdiv(steps, split_steps)


@triton.jit
def _lanes(step, R, N, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr):
    """(offs_r, offs_n, mask) of a step, (BLOCK_R * BLOCK_N,). Steps go along R first, so that a lane past the end of
    N is idle from its first such step on: the others have all seen as many elements as there were steps."""
    lane = tl.arange(0, BLOCK_R * BLOCK_N)
    if isinstance(R, tl.constexpr):  # Triton passes a 1 so: no need of divisions
        offs_r = tl.zeros((), tl.int64)
        offs_n = tl.cast(step, tl.int64) * BLOCK_N
    else:
        tiles_r = (R - 1) // BLOCK_R + 1
        offs_r = tl.cast(step % tiles_r, tl.int64) * BLOCK_R
        offs_n = tl.cast(step // tiles_r, tl.int64) * BLOCK_N
    if BLOCK_R == 1:
        return offs_r, offs_n + lane, offs_n + lane < N
    else:
        offs_r += lane // BLOCK_N
        offs_n += lane % BLOCK_N
        return offs_r, offs_n, (offs_r < R) & (offs_n < N)


@triton.jit
def _at(ptr, strides, a, b, offs_m, offs_r, offs_n):
    row = ptr + a * strides[0] + b * strides[1] + offs_m * strides[2]
    return row[:, None] + (offs_r * strides[3] + offs_n * strides[4])[None, :]


@triton.jit
def _term(x, p, MAP: tl.constexpr):
    if MAP == "abs":
        x = tl.abs(x)
    elif MAP == "nonzero":
        x = tl.where(x == 0, 0.0, 1.0).to(x.dtype)
    elif MAP == "square":
        x = x * x
    elif MAP == "power":
        x = tl.exp2(tl.full((), p, x.dtype) * tl.log2(tl.abs(x)))
    return x


@triton.jit
def _pairs(x):
    """The first and the second of neighbours in the last dimension of two."""
    return tl.split(tl.reshape(x, (x.shape[0], x.shape[1] // 2, 2)))


@triton.jit
def _better(x, s0, COMBINE: tl.constexpr, COMPUTE: tl.constexpr):
    """Whether x replaces s0, which came before it. NaN stays: nothing compares better than it."""
    if COMBINE == "min" or COMBINE == "argmin":
        worse = x >= s0
    else:
        worse = x <= s0
    better = worse == 0  # so is a NaN
    return better if COMPUTE == tl.int64 else better & (s0 == s0)


@triton.jit
def _best(x, COMBINE: tl.constexpr, GROUP: tl.constexpr):
    """(BLOCK_M, lanes) to the best of each GROUP neighbours; a NaN is."""
    LEVELS: tl.constexpr = 3 if GROUP == 8 else 2 if GROUP == 4 else GROUP - 1
    for _ in tl.static_range(LEVELS):
        first, second = _pairs(x)
        x = _extreme(first, second, COMBINE)
    return x


@triton.jit
def _extreme(x, y, COMBINE: tl.constexpr):
    if COMBINE == "min" or COMBINE == "argmin":
        return tl.minimum(x, y, propagate_nan=tl.PropagateNan.ALL)
    else:
        return tl.maximum(x, y, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _safe(top):
    """What exponents are taken relative to: inf - inf would be NaN."""
    return tl.where(top == float("inf"), 0.0, top)


@triton.jit
def _take_whole(x, mean, squares, step, GROUP: tl.constexpr):
    """The moments of groups that have seen `step` times GROUP elements, after as many more: the shares are numbers."""
    x = grouped(x, GROUP)
    new = tl.sum(x * (1.0 / GROUP), axis=2)  # divided first: a sum may overflow
    d = x - new[:, :, None]
    delta = new - mean
    before = tl.cast(step, x.dtype)
    share = 1.0 / (before + 1.0)
    return mean + delta * share, squares + tl.sum(d * d, axis=2) + delta * (GROUP * before * share) * delta


@triton.jit
def _accumulate(
    s0, s1, x, mask, step, COMBINE: tl.constexpr, TIES: tl.constexpr, GROUP: tl.constexpr, COMPUTE: tl.constexpr
):
    """The states after GROUP elements each of x (BLOCK_M, lanes) besides."""
    if COMBINE == "sum":
        s0 += x if GROUP == 1 else tl.sum(grouped(x, GROUP), axis=2)
    elif COMBINE == "logsumexp":
        x = grouped(x, GROUP)
        top = tl.maximum(s0, tl.max(x, axis=2))
        base = _safe(top)
        s1 = s1 * exp(s0 - base) + tl.sum(exp(x - base[:, :, None]), axis=2)
        s0 = top
    elif COMBINE == "argmax" or COMBINE == "argmin":
        best = _best(x, COMBINE, GROUP)
        better = _better(best, s0, COMBINE, COMPUTE)
        s1 = tl.where(better, step, s1)
        s0 = tl.where(better, best, s0)
    else:
        before = s0
        s0 = _extreme(s0, _best(x, COMBINE, GROUP), COMBINE)
        if TIES:
            zero = tl.full((1, 1), 0, COMPUTE)  # integers count ties too
            equal = grouped(mask, GROUP) & (grouped(x, GROUP) == s0[:, :, None])
            s1 = tl.where(s0 == before, s1, zero) + tl.sum(equal.to(COMPUTE), axis=2)
    return s0, s1


@triton.jit
def _merge(s0, s1, n, COMBINE: tl.constexpr, TIES: tl.constexpr, NEUTRAL: tl.constexpr, COMPUTE: tl.constexpr):
    """The states of lanes merged into one a row. n: how many elements a lane has seen; s1 of arg...: their indices."""
    if COMBINE == "sum":
        r0 = tl.sum(s0, axis=1)
        return r0, r0, r0
    elif COMBINE == "moments":
        total = tl.sum(n, axis=1)
        r0 = tl.sum(s0 * (n / total[:, None]), axis=1)
        d = s0 - r0[:, None]
        return r0, tl.sum(tl.where(n > 0, s1 + n * d * d, 0.0), axis=1), total
    elif COMBINE == "logsumexp":
        r0 = tl.max(s0, axis=1)
        return r0, tl.sum(s1 * exp(s0 - _safe(r0)[:, None]), axis=1), r0
    else:  # tl.max and tl.min may drop a NaN: that there is one is asked beside them
        nan = s0 != s0
        any_nan = tl.max(nan.to(tl.int32), axis=1) > 0
        numbers = tl.where(nan, tl.full((1, 1), NEUTRAL, COMPUTE), s0)
        if COMBINE == "min" or COMBINE == "argmin":
            r0 = tl.min(numbers, axis=1)
        else:
            r0 = tl.max(numbers, axis=1)
        r1 = r0
        if COMBINE == "argmax" or COMBINE == "argmin":
            best = (nan & any_nan[:, None]) | ((s0 == r0[:, None]) & (any_nan == 0)[:, None])
            r1 = tl.min(tl.where(best, s1, 0x7FFFFFFFFFFFFFFF), axis=1)
        elif TIES:
            r1 = tl.sum(
                tl.where((s0 == r0[:, None]) & (any_nan == 0)[:, None], s1, tl.full((1, 1), 0, COMPUTE)), axis=1
            )
        if COMPUTE != tl.int64:
            r0 = tl.where(any_nan, float("nan"), r0)
        return r0, r1, r0


@triton.jit
def _finish(
    r0, r1, shift, count, y_ptr, stats_ptr, out, mask_m, param, COMBINE: tl.constexpr, FINISH: tl.constexpr,
    STATS: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    """Store results, and what the backward needs of each row."""
    y = r0
    if COMBINE == "argmax" or COMBINE == "argmin":
        y = r1
    elif COMBINE == "logsumexp":
        r1 = tl.log(r1)
        y = r0 + r1
    elif FINISH == "mean":
        y = r0 / count
    elif FINISH == "sqrt":
        y = tl.sqrt(r0)
    elif FINISH == "root":
        y = tl.exp2(tl.log2(r0) / tl.full((), param, COMPUTE))
    elif COMBINE == "moments":
        freedom = count - tl.full((), param, COMPUTE)
        y = r1 / tl.where(freedom > 0, freedom, 0.0)
        if FINISH == "std":
            y = tl.sqrt(y)
    tl.store(y_ptr + out, round_to(y, y_ptr.dtype.element_ty), mask=mask_m)
    if stats_ptr is not None:
        if COMBINE == "moments":
            tl.store(stats_ptr + out * STATS, shift, mask=mask_m)
            tl.store(stats_ptr + out * STATS + 1, r0, mask=mask_m)
            tl.store(stats_ptr + out * STATS + 2, y, mask=mask_m)
        elif STATS == 2:
            tl.store(stats_ptr + out * STATS, r0, mask=mask_m)
            tl.store(stats_ptr + out * STATS + 1, r1, mask=mask_m)
        else:
            tl.store(stats_ptr + out * STATS, y, mask=mask_m)


@triton.jit(do_not_specialize=["rows", "steps", "split_steps"])
def _reduction_fwd_kernel(
    x_ptr, y_ptr, stats_ptr, s0_ptr, s1_ptr, n_ptr, B, M, R, N, rows, steps, split_steps, x_strides, y_strides, param,
    COMBINE: tl.constexpr, FINISH: tl.constexpr, STATS: tl.constexpr, TIES: tl.constexpr, NEUTRAL: tl.constexpr,
    COMPUTE: tl.constexpr, MAP: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Results of BLOCK_M rows; or, where s0_ptr is given, the merged states of one split of their steps."""
    a, b, offs_m = row_index(tl.program_id(0), B, M, BLOCK_M)
    mask_m = offs_m < M
    STATES: tl.constexpr = BLOCK_R * BLOCK_N // GROUP
    first = tl.program_id(1) * split_steps
    shift = tl.zeros((BLOCK_M,), COMPUTE)
    seen = tl.zeros((1, STATES), COMPUTE)
    more = seen
    s0 = tl.full((BLOCK_M, STATES), NEUTRAL, COMPUTE)
    s1 = tl.zeros((BLOCK_M, STATES), COMPUTE)
    if COMBINE == "moments":  # an element of the row, the same for every split: what it is far from has a large spread
        shift_ptr = x_ptr + a * x_strides[0] + b * x_strides[1] + offs_m * x_strides[2]
        shift = tl.load(shift_ptr, mask=mask_m, other=0.0).to(COMPUTE)
    elif COMBINE == "argmax" or COMBINE == "argmin":
        s1 = tl.zeros((BLOCK_M, STATES), tl.int32) + first
    for step in tl.range(first, tl.minimum(first + split_steps, steps), num_stages=STAGES):
        offs_r, offs_n, mask_k = _lanes(step, R, N, BLOCK_R, BLOCK_N)
        mask = mask_m[:, None] & mask_k[None, :]
        x = tl.load(_at(x_ptr, x_strides, a, b, offs_m, offs_r, offs_n), mask=mask, other=0).to(COMPUTE)
        x = _term(x, param, MAP)
        # Past the end, what changes no state. Not as the load's fill: int8 cannot hold that of int64, and 0^-1 is inf.
        if COMBINE == "logsumexp":
            x = tl.where(mask, x, float("-inf"))
        elif NEUTRAL != 0 or MAP == "power":
            x = tl.where(mask, x, tl.full((1, 1), NEUTRAL, COMPUTE))
        if COMBINE == "moments" and BLOCK_R == 1:
            start = tl.cast(step // R, tl.int64) * BLOCK_N
            if start + BLOCK_N <= N:
                s0, s1 = _take_whole(x - shift[:, None], s0, s1, step - first, GROUP)
                seen = tl.zeros((1, STATES), COMPUTE) + tl.cast(step - first + 1, COMPUTE) * GROUP
            else:
                more = within(N, start, BLOCK_N, GROUP).to(COMPUTE)
                s0, s1, seen = take_moments(tl.where(mask, x - shift[:, None], 0.0), mask, more, s0, s1, seen)
        elif COMBINE == "moments":
            more = mask_k.to(COMPUTE)[None, :]
            s0, s1, seen = take_moments(tl.where(mask, x - shift[:, None], 0.0), mask, more, s0, s1, seen)
        else:
            s0, s1 = _accumulate(s0, s1, x, mask, step, COMBINE, TIES, GROUP, COMPUTE)
    if COMBINE == "argmax" or COMBINE == "argmin":  # one dimension is reduced: R = 1
        s1 = s1.to(tl.int64) * BLOCK_N + tl.arange(0, STATES)[None, :] * GROUP
    r0, r1, n = _merge(s0, s1, seen, COMBINE, TIES, NEUTRAL, COMPUTE)
    if (COMBINE == "argmax" or COMBINE == "argmin") and GROUP > 1:  # which of the neighbours it is
        near = tl.arange(0, GROUP)
        offs_n = r1[:, None] + near[None, :]
        mask = mask_m[:, None] & (offs_n < N)
        row = x_ptr + a * x_strides[0] + b * x_strides[1] + offs_m * x_strides[2]
        x = tl.load(row[:, None] + offs_n * x_strides[4], mask=mask, other=0).to(COMPUTE)
        hit = mask & ((x == r0[:, None]) | ((x != x) & (r0 != r0)[:, None]))
        r1 += tl.min(tl.where(hit, near[None, :], GROUP), axis=1)
    if s0_ptr is None:
        out = a * y_strides[0] + b * y_strides[1] + offs_m * y_strides[2]
        count = (tl.full((), 0.0, COMPUTE) + R) * N
        _finish(r0, r1, shift, count, y_ptr, stats_ptr, out, mask_m, param, COMBINE, FINISH, STATS, COMPUTE)
    else:
        part = tl.cast(tl.program_id(1), tl.int64) * rows + (a * B + b) * M + offs_m
        tl.store(s0_ptr + part, r0, mask=mask_m)
        if s1_ptr is not None:
            tl.store(s1_ptr + part, r1, mask=mask_m)
        if n_ptr is not None:
            tl.store(n_ptr + part, tl.zeros((BLOCK_M,), COMPUTE) + n, mask=mask_m)


@triton.jit(do_not_specialize=["R", "rows", "splits"])
def _reduction_fwd_kernel_splits(
    x_ptr, y_ptr, stats_ptr, s0_ptr, s1_ptr, n_ptr, B, M, R, N, rows, splits, x_strides, y_strides, param,
    COMBINE: tl.constexpr, FINISH: tl.constexpr, STATS: tl.constexpr, TIES: tl.constexpr, NEUTRAL: tl.constexpr,
    COMPUTE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Results from the states of splits."""
    a, b, offs_m = row_index(tl.program_id(0), B, M, BLOCK_M)
    mask_m = offs_m < M
    offs_s = tl.arange(0, BLOCK_S)
    mask = mask_m[:, None] & (offs_s < splits)[None, :]
    part = ((a * B + b) * M + offs_m)[:, None] + tl.cast(offs_s, tl.int64)[None, :] * rows
    shift = tl.zeros((BLOCK_M,), COMPUTE)
    s0 = tl.load(s0_ptr + part, mask=mask, other=0)
    s0 = tl.where(mask, s0, tl.full((1, 1), NEUTRAL, COMPUTE))
    s1 = s0
    n = s0
    if s1_ptr is not None:
        s1 = tl.load(s1_ptr + part, mask=mask, other=0)  # an index of 0 is right where all is as low as the fill of s0
    if COMBINE == "moments":
        n = tl.load(n_ptr + part, mask=mask, other=0.0)
        shift_ptr = x_ptr + a * x_strides[0] + b * x_strides[1] + offs_m * x_strides[2]
        shift = tl.load(shift_ptr, mask=mask_m, other=0.0).to(COMPUTE)
    r0, r1, n = _merge(s0, s1, n, COMBINE, TIES, NEUTRAL, COMPUTE)
    out = a * y_strides[0] + b * y_strides[1] + offs_m * y_strides[2]
    count = (tl.full((), 0.0, COMPUTE) + R) * N
    _finish(r0, r1, shift, count, y_ptr, stats_ptr, out, mask_m, param, COMBINE, FINISH, STATS, COMPUTE)


@triton.jit(do_not_specialize=["steps"])
def _reduction_bwd_kernel(
    x_ptr, dx_ptr, dy_ptr, stats_ptr, B, M, R, N, steps, x_strides, dx_strides, dy_strides, y_strides, param, factor,
    KIND: tl.constexpr, STATS: tl.constexpr, COMPUTE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """dx of one tile. param: a norm's p; factor: of var and std, 2 over the degrees of freedom."""
    pid = tl.program_id(0)
    a, b, offs_m = row_index(pid // steps, B, M, BLOCK_M)
    mask_m = offs_m < M
    offs_r, offs_n, mask_k = _lanes(pid % steps, R, N, BLOCK_R, BLOCK_N)
    mask = mask_m[:, None] & mask_k[None, :]
    x = tl.load(_at(x_ptr, x_strides, a, b, offs_m, offs_r, offs_n), mask=mask, other=0.0).to(COMPUTE)
    g_ptr = dy_ptr + a * dy_strides[0] + b * dy_strides[1] + offs_m * dy_strides[2]
    g = tl.load(g_ptr, mask=mask_m, other=0.0).to(COMPUTE)[:, None]
    if STATS > 0:
        stat_ptr = stats_ptr + (a * y_strides[0] + b * y_strides[1] + offs_m * y_strides[2]) * STATS
        s0 = tl.load(stat_ptr, mask=mask_m, other=1.0)[:, None]
    if STATS > 1:
        s1 = tl.load(stat_ptr + 1, mask=mask_m, other=1.0)[:, None]
    sign = tl.where(x > 0, 1.0, tl.where(x < 0, -1.0, 0.0))
    if KIND == "amax" or KIND == "amin":
        dx = tl.where(x == s0, 1.0, 0.0) * (g / s1)
    elif KIND == "norm_inf" or KIND == "norm_-inf":
        dx = tl.where(tl.abs(x) == s0, sign * (g / s1), 0.0)
    elif KIND == "logsumexp":
        dx = g * exp((x - s0) - s1)
    elif KIND == "var" or KIND == "std":
        g = g * tl.full((), factor, COMPUTE)
        if KIND == "std":
            s2 = tl.load(stat_ptr + 2, mask=mask_m, other=1.0)[:, None]
            g = tl.where(s2 == 0, 0.0, 0.5 * g / s2)
        dx = ((x - s0) - s1) * g
    elif KIND == "norm_1":
        dx = sign * g
    elif KIND == "norm_2":
        dx = tl.where(s0 == 0, 0.0, x / s0 * g)
    else:
        p = tl.full((1, 1), param, COMPUTE)
        dx = sign * tl.exp2((p - 1.0) * tl.log2(tl.abs(x) / s0)) * g
        dx = tl.where((s0 == 0) | ((x == 0) & (p < 1.0)), 0.0, tl.where(x != x, x, dx))
    tl.store(_at(dx_ptr, dx_strides, a, b, offs_m, offs_r, offs_n), round_to(dx, dx_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["rows", "steps", "split_steps"])
def _cumsum_fwd_kernel(
    x_ptr, y_ptr, sums_ptr, B, M, N, rows, steps, split_steps, x_strides, y_strides,
    REVERSE: tl.constexpr, COMPUTE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Running sums of one split of the steps of BLOCK_M rows. sums_ptr: the sum of each split, where there are more."""
    a, b, offs_m = row_index(tl.program_id(0), B, M, BLOCK_M)
    mask_m = offs_m < M
    split = tl.program_id(1)
    carry = tl.zeros((BLOCK_M,), COMPUTE)
    if sums_ptr is not None:
        offs_s = tl.arange(0, BLOCK_S)
        others = (offs_s > split) & (offs_s < tl.num_programs(1)) if REVERSE else offs_s < split
        part = ((a * B + b) * M + offs_m)[:, None] + tl.cast(offs_s, tl.int64)[None, :] * rows
        carry += tl.sum(tl.load(sums_ptr + part, mask=mask_m[:, None] & others[None, :], other=0).to(COMPUTE), axis=1)
    low = tl.zeros((BLOCK_M,), COMPUTE)  # what additions to carry have rounded away (Knuth's two-sum)
    first = split * split_steps
    last = tl.minimum(first + split_steps, steps)
    for i in range(first, last):
        step = first + last - 1 - i if REVERSE else i
        offs_r, offs_n, mask_n = _lanes(step, 1, N, 1, BLOCK_N)
        mask = mask_m[:, None] & mask_n[None, :]
        x = tl.load(_at(x_ptr, x_strides, a, b, offs_m, offs_r, offs_n), mask=mask, other=0).to(COMPUTE)
        y = tl.cumsum(x, axis=1, reverse=REVERSE)
        out_ptr = _at(y_ptr, y_strides, a, b, offs_m, offs_r, offs_n)
        tl.store(out_ptr, round_to((y + low[:, None]) + carry[:, None], y_ptr.dtype.element_ty), mask=mask)
        # Not the sum of x: `carry += tl.sum(x)` is refused by the compiler in float64.
        last_lane = tl.arange(0, BLOCK_N) == (0 if REVERSE else BLOCK_N - 1)
        total = tl.sum(tl.where(last_lane[None, :], y, 0), axis=1)
        before = carry
        carry = before + total
        change = carry - before
        lost = (before - (carry - change)) + (total - change)
        low += tl.where(lost == lost, lost, 0)  # NaN where the sum is inf


def _neutral(combine, compute):
    """The state that changes no other. Of logsumexp the lowest number: -inf would come to -inf - -inf (softmax.py)."""
    if combine == "logsumexp":
        return torch.finfo(compute).min
    if combine in ("max", "argmax"):
        return -_INF if compute.is_floating_point else torch.iinfo(compute).min
    if combine in ("min", "argmin"):
        return _INF if compute.is_floating_point else torch.iinfo(compute).max
    return 0


def _bytes(t):
    return t.view(torch.uint8) if t is not None and t.dtype == torch.bool else t


def _group(layout, plan, x):
    return neighbours(layout.strides[0][4], max(x.element_size(), 2), plan.BLOCK_N) if plan.BLOCK_R == 1 else 1


def _reduce_layout(x, y, stats, layout, kind, param, compute, planned=None):
    """Launch over a layout: into y and stats, or, with y None, into the states of splits, which are returned."""
    kind, device = KINDS[kind], x.device
    if planned is None:
        planned = plan_reduction(
            layout, x.element_size(), facts(device).multiprocessors, facts(device).max_warps, kind.COMBINE
        )
    plan, steps, split_steps, splits = planned
    ties = stats is not None and kind.COMBINE in ("max", "min")
    s0 = s1 = n = None
    if splits > 1:
        s0 = torch.empty((splits, layout.rows), dtype=compute, device=device)
        if kind.COMBINE in ("argmax", "argmin"):
            s1 = torch.empty(s0.shape, dtype=torch.int64, device=device)
        elif kind.COMBINE in ("moments", "logsumexp") or ties:
            s1 = torch.empty_like(s0)
        n = torch.empty_like(s0) if kind.COMBINE == "moments" else None
    sizes = layout.B, layout.M, layout.R, layout.N, layout.rows
    rest = layout.strides[0], layout.strides[-1], scalar(param, compute)
    options = {
        "COMBINE": kind.COMBINE, "FINISH": kind.FINISH, "STATS": kind.stats, "TIES": ties,
        "NEUTRAL": _neutral(kind.COMBINE, compute), "COMPUTE": triton_dtype(compute),
    }  # fmt: skip
    args = (_bytes(x), _bytes(y), stats, s0, s1, n, *sizes)
    grid = layout.blocks(plan.BLOCK_M), splits
    launch(
        _reduction_fwd_kernel, grid, device, (*args, steps, split_steps, *rest),
        **options, MAP=kind.MAP, GROUP=_group(layout, plan, x), **plan._asdict(),
    )  # fmt: skip
    if y is not None and splits > 1:
        BLOCK_S = next_power_of_2(splits)
        BLOCK_M = min(next_power_of_2(layout.M), max(2048 // BLOCK_S, 1))
        launch(
            _reduction_fwd_kernel_splits, (layout.blocks(BLOCK_M),), device, (*args, splits, *rest),
            **options, BLOCK_M=BLOCK_M, BLOCK_S=BLOCK_S, num_warps=4,
        )  # fmt: skip
    return s0


def reduce(x, dims, y, stats, kind, param, compute):
    """Reduce x, which is not empty, into the contiguous y and stats (or None)."""
    layout = layout_of(x.shape, dims, x.stride())
    if layout is None:
        x, _ = reduced_last(x, dims)
        layout = layout_of(x.shape, (-1,), x.stride())
    _reduce_layout(x, y, stats, layout, kind, param, compute)


def reduce_backward(dy, x, stats, dims, dx, kind, param, factor):
    """The gradient of x into dx. dy: with the reduced dimensions, of size 1, in place."""
    dy_strides = tuple(0 if d - x.dim() in dims else s for d, s in enumerate(dy.stride()))
    layout = layout_of(x.shape, dims, x.stride(), dx.stride(), dy_strides)
    if layout is None:
        moved, order = reduced_last(x, dims)
        dx_moved = torch.empty_like(moved)
        dy = dy.permute(order).contiguous().view(*moved.shape[:-1], 1)
        reduce_backward(dy, moved, stats, (-1,), dx_moved, kind, param, factor)
        dx.permute(order).copy_(dx_moved.view([x.shape[d] for d in order]))
        return
    compute = compute_dtype(dy, x, stats)
    plan, steps, _, _ = plan_tiles(layout, facts(x.device).multiprocessors, facts(x.device).max_warps)
    launch(
        _reduction_bwd_kernel,
        (layout.blocks(plan.BLOCK_M) * steps,),
        x.device,
        (x, dx, dy, stats, layout.B, layout.M, layout.R, layout.N, steps, *layout.strides,
         scalar(param, compute), scalar(factor, compute)),
        KIND=kind, STATS=KINDS[kind].stats, COMPUTE=triton_dtype(compute),
        BLOCK_M=plan.BLOCK_M, BLOCK_R=plan.BLOCK_R, BLOCK_N=plan.BLOCK_N, num_warps=plan.num_warps,
    )  # fmt: skip


def scan(x, dim, y, reverse, compute):
    """Running sums of x, which is not empty, along `dim` into the contiguous y."""
    dims = (dim,) if x.dim() else ()
    layout = layout_of(x.shape, dims, x.stride(), y.stride())
    if layout is None:
        x = x.contiguous()
        layout = layout_of(x.shape, dims, x.stride(), y.stride())
    plan, steps, split_steps, splits = planned = plan_tiles(
        layout, facts(x.device).multiprocessors, facts(x.device).max_warps
    )
    sums = None
    if 2 * layout.blocks(plan.BLOCK_M) > facts(x.device).multiprocessors:
        split_steps, splits = steps, 1  # splits read x twice
    if splits > 1:
        sums = _reduce_layout(x, None, None, layout, "sum", 0.0, compute, planned)
    launch(
        _cumsum_fwd_kernel,
        (layout.blocks(plan.BLOCK_M), splits),
        x.device,
        (_bytes(x), y, sums, layout.B, layout.M, layout.N, layout.rows, steps, split_steps, *layout.strides[:2]),
        REVERSE=reverse, COMPUTE=triton_dtype(compute), BLOCK_M=plan.BLOCK_M, BLOCK_N=plan.BLOCK_N,
        BLOCK_S=next_power_of_2(splits), num_warps=plan.num_warps,
    )  # fmt: skip
