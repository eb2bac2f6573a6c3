"""How pointwise kernels walk their operands, in one dimension where they lie alike and by strides where they do not."""

import functools
from typing import NamedTuple

import torch

from ._device import launch
from ._rows import Rows, at, collapse, row_index
from ._triton import cdiv, next_power_of_2, tl, triton


def elements(first, *others):
    """The operands (tensors of one shape) as rows in the memory order of the first, which is dense, and the operands.

    One dimension is as good as another here: N is the one that the first is contiguous along, and is everything
    (A = B = M = 1) where the operands lie alike.
    """
    operands = (first, *others)
    found = _elements(first.shape, *[t.stride() for t in operands])
    if found is None:  # once, as in `rows`. Outputs are laid out as the first, and stay.
        operands = tuple(
            t if t.stride() == first.stride() else torch.empty_like(first, dtype=t.dtype).copy_(t) for t in operands
        )
        found = _elements(first.shape, *[first.stride()] * len(operands))
    return found, operands


@functools.lru_cache(4096)
def _elements(shape, *strides):
    """The Rows of operands with these strides, or None where they do not collapse."""
    order = sorted(range(len(shape)), key=strides[0].__getitem__, reverse=True)
    sizes, steps = collapse(shape, strides, order)
    if not sizes:
        return Rows(1, 1, 1, 1, ((0, 0, 0, 1),) * len(strides))
    if len(sizes) > 4:
        return None
    lead = 4 - len(sizes)
    return Rows(*(1,) * lead, *sizes, tuple((0,) * lead + s for s in steps))


class Tile(NamedTuple):
    BLOCK_M: int
    BLOCK_N: int
    num_warps: int


@functools.lru_cache(4096)
def plan(layout):
    """2048 elements a program, 16 a thread of NVIDIA's. Shares of a copy, H200 bf16: silu, gelu, tanh and mish 1.01,
    softplus 0.97; half as many where rows do not lie as one: gated 1.02, also where the halves interleave."""
    if layout.M == 1:
        return Tile(1, 2048, 4)  # whatever N: lengths that vary do not compile anew
    if any(s[3] > 1 for s in layout.strides):
        BLOCK_N = min(next_power_of_2(layout.N), 64)  # an operand that is contiguous along M is read in lines too
    else:
        BLOCK_N = min(next_power_of_2(layout.N), 1024)
    return Tile(1 if BLOCK_N == 1024 else 2048 // BLOCK_N, BLOCK_N, 4)


@triton.jit
def tile_start(B, M, tiles_n, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """(a, b, offs_m, first column) of this program's tile."""
    pid = tl.program_id(0)
    if tiles_n is None:  # one row: the divisions below would be a third of a kernel's instructions
        return 0, 0, tl.arange(0, BLOCK_M), tl.cast(pid, tl.int64) * BLOCK_N
    else:
        a, b, offs_m = row_index(pid // tiles_n, B, M, BLOCK_M)
        return a, b, offs_m, tl.cast(pid % tiles_n, tl.int64) * BLOCK_N


@triton.jit
def tile_index(B, M, N, tiles_n, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """(a, b, offs_m, offs_n, mask) of this program's tile; `at` of _rows.py takes the first four."""
    a, b, offs_m, start = tile_start(B, M, tiles_n, BLOCK_M, BLOCK_N)
    offs_n = start + tl.arange(0, BLOCK_N)
    return a, b, offs_m, offs_n, inside(offs_m, M, offs_n, N, tiles_n)


@triton.jit
def inside(offs_m, M, offs_n, N, tiles_n):
    if tiles_n is None:
        return (offs_n < N)[None, :]
    else:
        return (offs_m < M)[:, None] & (offs_n < N)[None, :]


@triton.jit
def load_halves(
    first_ptr, second_ptr, first_strides, second_strides, a, b, offs_m, start, M, N, tiles_n,
    PAIRS: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Two operands of a tile. PAIRS: they alternate in memory, strides are those of both, and one load is enough."""
    if PAIRS:
        cols = 2 * start + tl.arange(0, 2 * BLOCK_N)
        mask = inside(offs_m, M, cols, 2 * tl.cast(N, tl.int64), tiles_n)
        both = tl.load(at(first_ptr, first_strides, a, b, offs_m, cols), mask=mask, other=0.0)
        return tl.split(tl.reshape(both, (both.shape[0], BLOCK_N, 2)))
    else:
        offs_n = start + tl.arange(0, BLOCK_N)
        mask = inside(offs_m, M, offs_n, N, tiles_n)
        first = tl.load(at(first_ptr, first_strides, a, b, offs_m, offs_n), mask=mask, other=0.0)
        return first, tl.load(at(second_ptr, second_strides, a, b, offs_m, offs_n), mask=mask, other=0.0)


@triton.jit
def store_halves(
    first, second, first_ptr, second_ptr, first_strides, second_strides, a, b, offs_m, start, M, N, tiles_n,
    PAIRS: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """As `load_halves` reads."""
    if PAIRS:
        cols = 2 * start + tl.arange(0, 2 * BLOCK_N)
        both = tl.reshape(tl.join(first, second), (first.shape[0], 2 * BLOCK_N))
        mask = inside(offs_m, M, cols, 2 * tl.cast(N, tl.int64), tiles_n)
        tl.store(at(first_ptr, first_strides, a, b, offs_m, cols), both, mask=mask)
    else:
        offs_n = start + tl.arange(0, BLOCK_N)
        mask = inside(offs_m, M, offs_n, N, tiles_n)
        tl.store(at(first_ptr, first_strides, a, b, offs_m, offs_n), first, mask=mask)
        tl.store(at(second_ptr, second_strides, a, b, offs_m, offs_n), second, mask=mask)


def grid_and_tiles(layout, tile):
    """(programs, the kernels' tiles_n: how many tiles a row has, None of a single row)."""
    tiles_n = cdiv(layout.N, tile.BLOCK_N)
    outer = layout.blocks(tile.BLOCK_M)
    return outer * tiles_n, None if layout.A * layout.B * layout.M == 1 else tiles_n


def launch_pointwise(kernel, layout, operands, *scalars, **options):
    """Launch `kernel(*operands, B, M, N, tiles_n, *strides, *scalars, **options)` over the layout."""
    tile = plan(layout)
    programs, tiles_n = grid_and_tiles(layout, tile)
    launch(
        kernel,
        (programs,),
        operands[0].device,
        (*operands, layout.B, layout.M, layout.N, tiles_n, *layout.strides, *scalars),
        **options,
        **tile._asdict(),
    )
