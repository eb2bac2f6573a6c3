"""What the loss families share: tiles, operands that have one number a row, and reductions."""

from typing import NamedTuple

import torch

from . import _checks
from ._device import facts, launch
from ._rows import collapse, rows, warps
from ._triton import next_power_of_2, scalar, tl, triton, triton_dtype

REDUCTIONS = ("none", "mean", "sum")


class Tiles(NamedTuple):
    BLOCK_M: int
    BLOCK_N: int
    num_warps: int


def plan(layout, max_warps, width=4096, each=16):
    """Tiles of 2048 to `width` elements, `each` a thread, that a row is walked in whichever way it lies.

    Of a copy, H200 bf16: cross_entropy's backward, 8192 wide and 32 a thread, 0.98 to 0.99.
    """
    BLOCK_N = next_power_of_2(layout.N)
    if any(0 < stride_m < stride_n for _, _, stride_m, stride_n in layout.strides):
        # Dense across the rows: at least 32 of them a tile, so that memory is read in whole sectors.
        BLOCK_M = min(next_power_of_2(layout.M), max(2048 // BLOCK_N, 32))
        BLOCK_N = min(BLOCK_N, 4096 // BLOCK_M)
    elif BLOCK_N <= 1024:
        BLOCK_M = 2048 // max(BLOCK_N, 32)
    else:
        BLOCK_M, BLOCK_N = 1, min(BLOCK_N, width)
    return Tiles(BLOCK_M, BLOCK_N, warps(min(max(BLOCK_M * BLOCK_N // (32 * each), 1), 16), max_warps))


def loss_rows(dim, whole, per_row):
    """`rows` over tensors of one shape and tensors that lack its dimension `dim`, in this order. None is skipped."""
    whole = [t for t in whole if t is not None]
    per_row = [t for t in per_row if t is not None]
    shape = whole[0].shape
    others = [d for d in range(len(shape)) if d != dim % len(shape)]
    while True:
        operands = (*whole, *(t.unsqueeze(dim).expand(shape) for t in per_row))
        if len(collapse(shape, [t.stride() for t in operands], others)[0]) <= 3:
            return rows(*operands, dim=dim)
        # Made dense here, as `rows` would, but before the numbers of a row are expanded over it.
        whole, per_row = [t.contiguous() for t in whole], [t.contiguous() for t in per_row]


def lead(x, dim):
    """x's shape without the dimension `dim`."""
    shape = list(x.shape)
    del shape[dim]
    return shape


def check_reduction(op, reduction):
    _checks.choice(op, "reduction", reduction, REDUCTIONS)


def reduce(loss, reduction, denominator):
    """`denominator`, of the mean, is called where it is needed."""
    if reduction == "none":
        return loss
    return loss.sum() / denominator() if reduction == "mean" else loss.sum()


@triton.jit
def store_part(parts_ptr, which, value, mask):
    """The sum over this program's rows, where they count."""
    tl.store(parts_ptr + which * tl.num_programs(0) + tl.program_id(0), tl.sum(tl.where(mask, value, 0.0), axis=0))


@triton.jit
def _sum_parts(parts_ptr, which, P, COMPUTE: tl.constexpr, BLOCK_P: tl.constexpr):
    acc = tl.zeros((BLOCK_P,), COMPUTE)
    for start in range(0, P, BLOCK_P):
        offs = start + tl.arange(0, BLOCK_P)
        acc += tl.load(parts_ptr + which * P + offs, mask=offs < P, other=0.0)
    return tl.sum(acc, axis=0)


@triton.jit(do_not_specialize=["P"])
def _total_kernel(
    parts_ptr, total_ptr, counts_ptr, P, z_loss, MEAN: tl.constexpr, ALL: tl.constexpr, COMPUTE: tl.constexpr,
    BLOCK_P: tl.constexpr,
):  # fmt: skip
    total = _sum_parts(parts_ptr, 0, P, COMPUTE, BLOCK_P)
    weights = _sum_parts(parts_ptr, 1, P, COMPUTE, BLOCK_P)
    if MEAN:
        total = total / weights
        tl.store(counts_ptr, weights)
    else:
        tl.store(counts_ptr, 1.0)
    if ALL:
        number = _sum_parts(parts_ptr, 2, P, COMPUTE, BLOCK_P)
        hits = _sum_parts(parts_ptr, 4, P, COMPUTE, BLOCK_P)
        if not MEAN:
            number = number * 0.0 + 1.0
        tl.store(counts_ptr + 1, number)
        if z_loss is None:
            tl.store(counts_ptr + 2, 0.0)
        else:
            z = z_loss * _sum_parts(parts_ptr, 3, P, COMPUTE, BLOCK_P) / number
            tl.store(counts_ptr + 2, z)
            total += z
        tl.store(counts_ptr + 3, hits / number)
    tl.store(total_ptr, total)


def total(parts, reduction, z_loss=0.0):
    """(loss, what it is divided by and, of five parts, what its z part is, that part, and accuracy), in a fixed order.

    parts: (2, P), sums of losses and weights; or (5, P), also of rows, squared logsumexps and hits.
    """
    if parts.shape[1] > 16384:
        parts = parts.sum(1, keepdim=True)
    sizes, compute = parts.shape, parts.dtype
    total, counts = parts.new_empty(()), parts.new_empty(4 if sizes[0] > 2 else 1)
    launch(
        _total_kernel,
        (1,),
        parts.device,
        (parts, total, counts, sizes[1], scalar(z_loss, compute) if z_loss else None),
        MEAN=reduction == "mean", ALL=sizes[0] > 2, COMPUTE=triton_dtype(compute),
        BLOCK_P=min(next_power_of_2(sizes[1]), 8192), num_warps=warps(16, facts(parts.device).max_warps),
    )  # fmt: skip
    return total, counts


def check_labels(op, name, labels, x, dim):
    """Refuse labels that are no integers of x's device and of its shape without `dim`."""
    if not isinstance(labels, torch.Tensor):
        raise TypeError(f"{op}: {name} must be a tensor, got {type(labels).__name__}")
    if labels.is_nested:
        raise TypeError(f"{op}: {name} must be a strided tensor, got a nested one")
    if labels.dtype not in (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8):
        raise TypeError(f"{op}: {name} must have an integer dtype, got {str(labels.dtype).replace('torch.', '')}")
    _checks.shape(op, name, labels, lead(x, dim))
    if labels.device != x.device:
        raise ValueError(f"{op}: {name} must be on {x.device} as x is, got {labels.device}")
