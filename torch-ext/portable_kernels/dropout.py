"""Dropout without a stored mask, alone or fused with a residual addition.

    y = x / (1 - p) where kept, 0 where dropped;   P(dropped) = p

Whether an element is kept follows from a 64-bit seed and its logical index alone, by the counter-based generator Philox
4x32-10 (Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", 2011): the backward draws the mask anew, and
strides, devices and tile sizes do not matter. A draw gives four words of 32 bits, one for each of four neighbours.
"""

import functools
from typing import Optional, Union

import torch
from torch import Tensor

from . import _checks
from ._device import launch
from ._dispatch import differentiable
from ._ops import add_op_namespace_prefix
from ._philox import WORD, draw, philox
from ._pointwise import Tile, grid_and_tiles, plan, tile_index
from ._replay import replayed
from ._rows import Rows, at, collapse, compute_dtype
from ._triton import round_to, scalar, tl, triton, triton_dtype

SECOND_ORDER = "reference"


def dropout_reference(x, seed, p):
    """What `dropout` computes, in plain PyTorch; seed: an int64 tensor of one element."""
    return _reference(x, None, seed, p, x.dtype)


def dropout_add_reference(x, residual, seed, p):
    """What `dropout_add` computes, in plain PyTorch."""
    return _reference(x, residual, seed, p, torch.promote_types(x.dtype, residual.dtype))


def _reference(x, residual, seed, p, dtype):
    compute = compute_dtype(x, residual)
    y = torch.where(_kept(x.shape, seed, p), x.to(compute) * _scale(p), 0.0)
    return (y if residual is None else y + residual).to(dtype)


def _kept(shape, seed, p):
    return (_words(shape.numel(), seed) >= _threshold(p)).view(shape)


def _words(size, seed):
    """The first words of Philox."""
    counter = torch.arange(-(-size // 4), device=seed.device)
    return philox(counter & WORD, counter >> 32, 0, 0, seed).flatten()[:size]


def _threshold(p):
    """Words below it drop their element: a share of p, to 2^-33."""
    return round(p * 2**32)


def _scale(p):
    return 0.0 if p == 1 else 1.0 / (1.0 - p)


@functools.lru_cache(4096)
def _layout(shape, *strides):
    """(Rows of operands with these strides, the index first; whether fours of a draw lie along N). None: copy first.

    Unlike `elements` of _pointwise.py it keeps the logical order: N is where the index steps by one.
    """
    index = [1]
    for size in reversed(shape[1:]):
        index.append(index[-1] * size)
    sizes, merged = collapse(shape, (tuple(reversed(index)), *strides), range(len(shape)))
    if len(sizes) > 4:
        return None
    lead = 4 - len(sizes)
    rows = Rows(*(1,) * lead, *sizes, tuple((0,) * lead + s for s in merged))
    return rows, all(step % 4 == 0 for step in rows.strides[0][:3])


def _plan(layout):
    """A warp has 32 elements a thread: 0.96 and 0.95 of a copy at 16384 x 14336 and 32768 x 4096, H200 bf16; 4 warps
    and 16 elements 0.92 and 0.91."""
    return Tile(1, 1024, 1) if layout.M == 1 else plan(layout)


@triton.jit
def _draws(seed, low, high, PAIRS: tl.constexpr):
    """The words of each draw along new last dimensions. PAIRS: low is even, and its successor is drawn as well.

    A thread then holds the words of the eight neighbours that it loads at once, of 16 bits each: none changes hands.
    """
    w0, w1, w2, w3 = draw(seed, low, high)
    if PAIRS:
        v0, v1, v2, v3 = draw(seed, low + 1, high)
        return tl.join(tl.join(tl.join(w0, v0), tl.join(w2, v2)), tl.join(tl.join(w1, v1), tl.join(w3, v3)))
    else:
        return tl.join(tl.join(w0, w2), tl.join(w1, w3))


@triton.jit(do_not_specialize=["M", "tiles_n", "threshold"])
def _dropout_fwd_kernel(
    y_ptr, x_ptr, r_ptr, seed_ptr, B, M, N, tiles_n, index_strides, y_strides, x_strides, r_strides, threshold, scale,
    FOURS: tl.constexpr, PAIRS: tl.constexpr, COMPUTE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    a, b, offs_m, offs_n, mask = tile_index(B, M, N, tiles_n, BLOCK_M, BLOCK_N)
    x = tl.load(at(x_ptr, x_strides, a, b, offs_m, offs_n), mask=mask, other=0.0).to(COMPUTE)
    seed = tl.load(seed_ptr)
    if FOURS:
        tile_n = tl.program_id(0) if tiles_n is None else tl.program_id(0) % tiles_n
        first = tl.cast(tile_n, tl.int64) * (BLOCK_N // 4)
        step: tl.constexpr = 2 if PAIRS else 1
        offs = tl.arange(0, BLOCK_N // 4 // step) * step
        if tiles_n is None:  # a tile begins at a multiple of its size, so that its draws share their high word
            words = _draws(
                seed, (first.to(tl.uint32) + offs.to(tl.uint32))[None, :], (first >> 32).to(tl.uint32), PAIRS
            )
        else:
            row = a * index_strides[0] + b * index_strides[1] + offs_m * index_strides[2]
            counter = (row >> 2)[:, None] + (first + offs)[None, :]
            words = _draws(seed, counter.to(tl.uint32), (counter >> 32).to(tl.uint32), PAIRS)
        word = tl.reshape(words, (BLOCK_M, BLOCK_N))
    else:  # a draw for every element: a row begins within the four of another
        row = a * index_strides[0] + b * index_strides[1] + offs_m * index_strides[2]
        index = row[:, None] + offs_n[None, :]
        counter = index >> 2
        w0, w1, w2, w3 = draw(seed, counter.to(tl.uint32), (counter >> 32).to(tl.uint32))
        word = tl.where((index & 2) == 0, tl.where((index & 1) == 0, w0, w1), tl.where((index & 1) == 0, w2, w3))
    y = tl.where(word >= tl.cast(threshold, tl.uint32), x * scale, 0.0)
    if r_ptr is not None:
        y += tl.load(at(r_ptr, r_strides, a, b, offs_m, offs_n), mask=mask, other=0.0).to(COMPUTE)
    tl.store(at(y_ptr, y_strides, a, b, offs_m, offs_n), round_to(y, y_ptr.dtype.element_ty), mask=mask)


@torch.library.custom_op(add_op_namespace_prefix("dropout_fwd"), mutates_args=())
def dropout_fwd(x: Tensor, residual: Optional[Tensor], seed: Tensor, p: float, dtype: torch.dtype) -> Tensor:
    y = out = torch.empty_like(x, dtype=dtype)
    if not y.numel():
        return y
    threshold = _threshold(p)
    if threshold == 2**32:
        return y.zero_() if residual is None else y.copy_(residual)
    operands = (x,) if residual is None else (x, residual)
    found = _layout(x.shape, *(t.stride() for t in (out, *operands)))
    if found is None:  # more dimensions that do not merge than the kernel walks
        out, operands = torch.empty(x.shape, dtype=dtype, device=x.device), [t.contiguous() for t in operands]
        found = _layout(x.shape, *(t.stride() for t in (out, *operands)))
    layout, fours = found
    compute = compute_dtype(*operands)
    tile = _plan(layout)
    programs, tiles_n = grid_and_tiles(layout, tile)
    launch(
        _dropout_fwd_kernel,
        (programs,),
        x.device,
        (out, operands[0], None if residual is None else operands[1], seed, layout.B, layout.M, layout.N, tiles_n,
         *layout.strides[:3], layout.strides[-1],
         threshold - ((threshold >> 31) << 32), scalar(_scale(p), compute)),
        FOURS=fours, PAIRS=x.element_size() == 2 and tile.BLOCK_N >= 8, COMPUTE=triton_dtype(compute), **tile._asdict(),
    )  # fmt: skip
    return y if y is out else y.copy_(out)


@dropout_fwd.register_fake
def _(x, residual, seed, p, dtype):
    return torch.empty_like(x, dtype=dtype)


def _setup_context(ctx, inputs, output):
    x, residual, seed, ctx.p, _ = inputs
    ctx.dtypes = x.dtype, None if residual is None else residual.dtype
    ctx.save_for_backward(seed)


def _backward(ctx, dy):
    (seed,) = ctx.saved_tensors
    needs = ctx.needs_input_grad
    dx = _dropout(dy, None, seed, ctx.p, ctx.dtypes[0]) if needs[0] else None
    return dx, dy.to(ctx.dtypes[1]) if needs[1] else None, None, None, None


# Linear in x: the derivative is the same op on the gradient, any number of times. No rowwise rule: under vmap the index
# that the mask follows from is that of one sample.
_dropout = differentiable(dropout_fwd, _reference, _setup_context, _backward, like=0)


@replayed
def dropout(
    x: Tensor, p: float = 0.5, training: bool = True, *, seed: Optional[Union[int, Tensor]] = None
) -> Tensor:  # fmt: skip
    """Set each element to 0 with probability p, and divide the others by 1 - p.

    Args:
        x: any shape, float64 | float32 | float16 | bfloat16, any strides.
        p: the probability, 0 to 1. At 1 the result and the gradient are 0.
        training: False returns x, as p = 0 does.
        seed: what the mask follows from: an int, or an int64 tensor of one element on x's device. The same seed, p and
            shape give the same mask on every device. None draws one by torch.randint on x's device, so that
            torch.manual_seed, checkpoints and CUDA graphs work as with torch's dropout, of which the mask differs.
    Returns:
        Of x's shape and dtype; with its strides where it is dense.
    Raises:
        TypeError: dtype not listed; p no number; seed neither int nor int64.   ValueError: p outside [0, 1]; a seed of
        more elements or of another device.
    Numerics: x * (1 / (1 - p)) in float32, float64 in float64, rounded once. What is dropped is 0 even where x is NaN
        or inf (torch: NaN). Autograd: any derivative; only the seed is kept. vmap as torch's dropout, with
        randomness="different" or "same"; forward mode raises.
    Source: Srivastava et al. 2014; Salmon et al. 2011.
    """
    _check("dropout", x, p, training, seed)
    if p == 0 or not training:
        return x
    return _dropout(x, None, _seed(x, seed), float(p), x.dtype)


@replayed
def dropout_add(
    x: Tensor, residual: Tensor, p: float = 0.5, training: bool = True, *, seed: Optional[Union[int, Tensor]] = None
) -> Tensor:  # fmt: skip
    """dropout(x, p, training, seed=seed) + residual, in one pass.

    Args:
        x, residual: of one shape; the other arguments as in `dropout`.
    Returns:
        Of that shape and the dtype that x and residual promote to; with x's strides where it is dense.
    Raises:
        TypeError, ValueError: as `dropout`; residual is not of x's shape.
    Numerics: as `dropout`, rounded once after the sum. Autograd, Source: as `dropout`.
    """
    _check("dropout_add", x, p, training, seed, residual)
    if p == 0 or not training:
        return x + residual
    dtype = torch.promote_types(x.dtype, residual.dtype)
    return _dropout(x, residual, _seed(x, seed), float(p), dtype)


def _check(op, x, p, training, seed, *residual):
    _checks.tensors(op, x)
    for r in residual:
        if r is None:
            raise TypeError(f"{op}: residual must be a tensor, got NoneType")
        _checks.tensors(op, x, residual=r)
        _checks.shape(op, "residual", r, x.shape)
    _checks.number(op, "p", p)
    if not 0 <= p <= 1:
        raise ValueError(f"{op}: p must be in [0, 1], got {p}")
    _checks.flags(op, training=training)
    if isinstance(seed, Tensor):
        if seed.dtype != torch.int64:
            raise TypeError(f"{op}: seed must have dtype int64, got {str(seed.dtype).replace('torch.', '')}")
        if seed.numel() != 1:
            raise ValueError(f"{op}: seed must have one element, got shape {tuple(seed.shape)}")
        if seed.device != x.device:
            raise ValueError(f"{op}: seed must be on {x.device} as x is, got {seed.device}")
    elif isinstance(seed, bool) or not (seed is None or isinstance(seed, int)):
        raise TypeError(f"{op}: seed must be an int, an int64 tensor or None, got {type(seed).__name__}")
    elif seed is not None and not -(2**63) <= seed < 2**63:
        raise ValueError(f"{op}: seed must fit in 64 bits, got {seed}")


def _seed(x, seed):
    if seed is None:
        return torch.randint(2**63 - 1, (), dtype=torch.int64, device=x.device)
    return seed if isinstance(seed, Tensor) else torch.full((), seed, dtype=torch.int64, device=x.device)
