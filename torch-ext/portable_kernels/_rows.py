"""How kernels walk rows of any strides: every operand as an (A, B, M, N) view, N the row that is reduced or mapped.

Most layouts need only M and N (A = B = 1). The two outer sizes let permuted tensors, such as the gradient of a
(B, H, S, D) transpose, be read where they lie instead of being copied.
"""

import functools
from typing import NamedTuple

import torch

from ._device import facts
from ._triton import GLUON, cdiv, next_power_of_2, tl, triton


class Rows(NamedTuple):
    A: int
    B: int
    M: int
    N: int
    strides: tuple  # of one (a, b, m, n) for each operand

    def blocks(self, block_m):
        """How many tiles of block_m rows cover the rows. A tile never spans two outer indices."""
        return self.A * self.B * cdiv(self.M, block_m)


def rows(*operands, dim=-1):
    """The operands (tensors of one shape) as rows along `dim`, and those operands.

    A layout that does not collapse to two outer sizes (five or more permuted dimensions) is copied first.
    """
    found = _rows(operands[0].shape, dim, *[t.stride() for t in operands])
    if found is None:
        operands = tuple(t.contiguous() for t in operands)  # once, for layouts no model has been seen to make
        found = _rows(operands[0].shape, dim, *[t.stride() for t in operands])
    return found, operands


@functools.lru_cache(4096)
def _rows(shape, dim, *strides):
    """The Rows of operands with these strides, or None where they do not collapse."""
    if not shape:
        return Rows(1, 1, 1, 1, ((0, 0, 0, 1),) * len(strides))
    dim %= len(shape)
    outer, steps = collapse(shape, strides, [d for d in range(len(shape)) if d != dim])
    if len(outer) > 3:
        return None
    lead = 3 - len(outer)
    strides = tuple((0,) * lead + step + (s[dim],) for step, s in zip(steps, strides))
    return Rows(*(1,) * lead, *outer, shape[dim], strides)


def collapse(shape, strides, dims):
    """Sizes and strides of the dimensions `dims`, neighbours merged where every operand steps evenly."""
    sizes, merged = [], [[] for _ in strides]
    for d in dims:
        size = shape[d]
        if size == 1:
            continue
        steps = [s[d] for s in strides]
        if sizes and all(m[-1] == step * size for m, step in zip(merged, steps)):
            sizes[-1] *= size
            for m, step in zip(merged, steps):
                m[-1] = step
        else:
            sizes.append(size)
            for m, step in zip(merged, steps):
                m.append(step)
    return tuple(sizes), tuple(tuple(m) for m in merged)


class Plan(NamedTuple):
    """Tile of BLOCK_M rows by BLOCK_N columns; ONE_PASS when BLOCK_N covers the row."""

    BLOCK_M: int
    BLOCK_N: int
    ONE_PASS: bool
    num_warps: int


def warps(n, max_warps):
    """As many threads as n warps of 32, which plans are measured in: at most 1024, 16 warps of AMD's data center GPUs.

    So a thread holds as much on every device. That it is as good there is reasoned, not measured.
    """
    return max(1, n * max_warps // 32)


@functools.lru_cache(4096)
def plan_forward(N, max_warps):
    """Tiles for a kernel that reads a row, reduces it and writes a row. Shares of a copy: H200 bf16 rms_norm."""
    BLOCK_N = next_power_of_2(N)
    if BLOCK_N <= 1024:  # packed rows, 2048 elements a program: 0.98 at N = 128, 256 and 1024
        return Plan(2048 // max(BLOCK_N, 32), BLOCK_N, True, warps(4, max_warps))
    if BLOCK_N <= 32768:  # one row in registers: 0.96 at 4096 and 8192, 0.94 at 16384, 0.84 at 32768
        return Plan(1, BLOCK_N, True, warps(min(max(4, BLOCK_N // 1024), 16), max_warps))
    return Plan(1, 8192, False, warps(16, max_warps))  # wider rows are looped over: 0.63 at 131072


def plan_any_dim(layout, itemsize, max_warps, plan=plan_forward):
    """Tiles for rows read and written in place, whichever way they lie; by `plan` where they lie along N.

    itemsize: of the widest operand."""
    if not any(0 < stride_m < stride_n for _, _, stride_m, stride_n in layout.strides):
        return plan(layout.N, max_warps)
    # Some operand is dense across the rows: a tile spans at least 32 rows, so that it is read and written in whole
    # sectors of memory both along rows and across them. 32 KiB: where one operand lies along rows and another across
    # them, the tile is turned in shared memory, of which the smallest devices have 64 KiB. Sizes: untuned.
    BLOCK_N = next_power_of_2(layout.N)
    BLOCK_M = min(next_power_of_2(layout.M), max(2048 // BLOCK_N, 32))
    one_pass = BLOCK_M * BLOCK_N * itemsize <= 32768
    if not one_pass:
        BLOCK_N = 4096 // BLOCK_M
    return Plan(BLOCK_M, BLOCK_N, one_pass, min(max(BLOCK_M * BLOCK_N // 512, 1), 16, max_warps))


def wide(N, compute, device):
    """The module whose kernel splits rows of this width over programs that talk to each other, or None."""
    if N <= 8192 or not GLUON or compute != torch.float32 or facts(device).arch != "sm90":
        return None
    from . import _wide_sm90  # and with it Gluon

    return _wide_sm90


@triton.jit
def row_index(tile, B, M, BLOCK_M: tl.constexpr):
    """(a, b, offs_m) of a tile of BLOCK_M rows, in int64: rows times strides may pass 2^31."""
    a, b, first = first_row(tile, B, M, BLOCK_M)
    return a, b, first + tl.arange(0, BLOCK_M)


@triton.jit
def first_row(tile, B, M, BLOCK_M: tl.constexpr):
    """(a, b, m) of a tile's first row, in int64."""
    if isinstance(B, tl.constexpr):  # Triton passes a 1 so. A is 1 where B is: no need of four divisions
        return 0, 0, tl.cast(tile, tl.int64) * BLOCK_M
    tiles_m = (M - 1) // BLOCK_M + 1  # tl.cdiv(M, BLOCK_M) overflows just below 2^31, as would the offsets in int32
    outer = tile // tiles_m
    return tl.cast(outer // B, tl.int64), tl.cast(outer % B, tl.int64), tl.cast(tile % tiles_m, tl.int64) * BLOCK_M


@triton.jit
def inside(offs_m, offs_n, M, N, WHOLE: tl.constexpr):
    """The mask of a tile; WHOLE says that no tile ends past its rows, and the compiler then drops it."""
    if WHOLE:
        return tl.full((offs_m.shape[0], offs_n.shape[0]), True, tl.int1)
    else:
        return (offs_m < M)[:, None] & (offs_n < N)[None, :]


@triton.jit
def at(ptr, strides, a, b, offs_m, offs_n):
    """Pointers to a (BLOCK_M, BLOCK_N) tile of an operand with the given (a, b, m, n) strides."""
    row = ptr + a * strides[0] + b * strides[1] + offs_m * strides[2]
    return row[:, None] + (tl.cast(offs_n, tl.int64) * strides[3])[None, :]


def compute_dtype(*operands):
    """The dtype that sums run in: float64 where any operand is, else float32. None is skipped."""
    return torch.float64 if any(t is not None and t.dtype == torch.float64 for t in operands) else torch.float32


def sum_leading(t, ndim):
    """The sum over all but the last `ndim` dimensions."""
    lead = tuple(range(t.dim() - ndim))
    return t.sum(lead) if lead else t.clone()  # torch takes an empty list of dimensions as all of them
