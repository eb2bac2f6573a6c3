"""Cross-entropy of logits against class indices or probabilities, also where each rank holds a part of the classes.

    z = softcap(logit_scale * x)      lse = log(sum(exp(z)))
    loss = sum over classes of t * w * (lse - z)  +  z_loss * lse^2

with t the target: (1 - label_smoothing) at the label, plus label_smoothing / C everywhere. The logits are read once
forward, with a running maximum and sum a lane (Milakov and Gimelshein, "Online normalizer calculation for softmax",
2018), and once backward; nothing of their size is kept but themselves. Vocabulary-parallel as in Shoeybi et al.,
"Megatron-LM", 2019.
"""

from typing import NamedTuple, Optional

import torch
from torch import Tensor

from . import _checks, _losses
from ._cross_entropy import (
    cross_entropy_gradient,
    cross_entropy_rows,
    cross_entropy_total,
    fwd_reference,
    if_soft,
    totals,
)  # fmt: skip
from ._dispatch import is_plain, use_kernel
from ._replay import replayed
from ._rows import compute_dtype

SECOND_ORDER = "reference"  # of vocab_parallel_cross_entropy: refused


class CrossEntropy(NamedTuple):
    """What `return_aux` adds to the loss."""

    loss: Tensor
    lse: Tensor  # log(sum(exp(logits))) of every row, differentiable
    z_loss: Tensor  # the part of the loss that it is, reduced as the loss
    accuracy: Tensor  # share of the rows whose largest logit is the target's; their number; 1 or 0 a row


def cross_entropy_reference(
    x, target, weight=None, ignore_index=-100, reduction="mean", label_smoothing=0.0,
    *, z_loss=0.0, softcap=None, logit_scale=1.0, return_aux=False,
):  # fmt: skip
    """What `cross_entropy` computes, in plain PyTorch."""
    dim = _class_dim(x)
    if not target.is_floating_point() and not return_aux:  # nothing reaches an ignored row, not even a NaN
        x = x.masked_fill((target == ignore_index).unsqueeze(dim), 0.0)
    share = label_smoothing / max(x.shape[dim], 1)
    results = fwd_reference(
        x, target, weight, dim, ignore_index, 1.0 - label_smoothing, share, softcap, logit_scale, False, False
    )
    return _finish(results, target, weight, ignore_index, reduction, z_loss, return_aux)


class _VocabParallel(torch.autograd.Function):
    """The rank's own classes by the ops above, and three sums and a maximum over the ranks between them."""

    @staticmethod
    def forward(ctx, x, target, group, dim, ignore_index, keep, uniform, cap, scale):
        from torch.distributed import _functional_collectives as collectives

        def over_ranks(t, how):
            return collectives.wait_tensor(collectives.all_reduce(t.contiguous(), how, group))

        C, offset = x.shape[dim], x.shape[dim] * torch.distributed.get_rank(group)
        counted = target != ignore_index
        mine = counted & (target >= offset) & (target < offset + C)
        fault = counted & ((target < 0) | (target >= C * torch.distributed.get_world_size(group)))
        # -1 is ignored, C another rank's: the ignore_index itself may be a label of this rank once that is shifted.
        local = torch.where(mine, target.long() - offset, torch.where(counted, C, -1))
        params = (dim, -1, keep, uniform, cap, scale)
        loss, _, stats = cross_entropy_rows(x.detach(), local, None, *params, False, True)
        peak, log_total, mass, hit = stats.unbind(-1)
        top = over_ranks(peak, "max")
        to_top = torch.where(mass == 0, 0.0, mass * ((top - peak) - log_total))
        parts = [torch.exp((peak - top) + log_total), loss + to_top, mass, hit * (peak == top)]
        total, loss, mass, hit = over_ranks(torch.stack(parts), "sum").unbind(0)
        log_total = torch.log(total)
        mass = mass.masked_fill(fault, float("nan"))
        loss = torch.where(counted, loss + mass * log_total, 0.0)
        stats = torch.stack([top, log_total, mass, hit], -1)
        ctx.save_for_backward(x, local, stats)
        ctx.params = params
        ctx.mark_non_differentiable(stats)
        return loss, top + log_total, stats

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dloss, dlse, _):
        x, local, stats = ctx.saved_tensors
        dx, _ = cross_entropy_gradient(dloss, dlse, x, local, None, stats, None, *ctx.params, 0.0, True, False)
        return (dx, *(None,) * 8)


@replayed
def cross_entropy(
    x: Tensor,
    target: Tensor,
    weight: Optional[Tensor] = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    *,
    z_loss: float = 0.0,
    softcap: Optional[float] = None,
    logit_scale: float = 1.0,
    return_aux: bool = False,
) -> "Tensor | CrossEntropy":
    """Measure logits against class indices or probabilities.

    z = softcap * tanh(logit_scale * x / softcap);   loss = sum(t * weight * (lse - z)) + z_loss * lse^2

    Args:
        x: (N, C), (N, C, d1, ...) or (C,), float64 | float32 | float16 | bfloat16, any strides.
        target: class indices of x's shape without C, any integer dtype; or probabilities of x's shape.
        weight: (C,), of the classes.
        ignore_index: rows of this label do not count, and their gradient is exactly 0; not with probabilities.
        reduction: "mean" divides by the sum of the targets' weights as torch does, "sum", or "none".
        label_smoothing: how much of the target is spread evenly over the classes.
        z_loss: factor of lse^2. Its mean is over the rows that count, whatever their weights.
        softcap: bounds the logits; None: not at all.
        logit_scale: factor of the logits, before the softcap.
        return_aux: return CrossEntropy(loss, lse, z_loss, accuracy).
    Returns:
        The loss, in float32 (float64 if an argument is; torch gives x's dtype); of x's shape without C for "none".
    Raises:
        TypeError, ValueError: dtype, shape or value not listed.   IndexError: a label is no class, on PyTorch's path.
        In kernels its row's loss is NaN.
    Numerics: computed in float32, or float64. Large logits lose no digits. NaN and inf as torch, but for ignored rows.
        Autograd: first and second derivative of x, of probabilities, and through lse; vmap; forward mode raises.
    Source: Milakov and Gimelshein 2018.
    """
    op = "cross_entropy"
    _check(op, x, target, ignore_index, reduction, label_smoothing, z_loss, softcap, logit_scale)
    _checks.flags(op, return_aux=return_aux)
    dim, soft = _class_dim(x), target.is_floating_point()
    _checks.tensors(op, x, weight=weight)
    _checks.shape(op, "weight", weight, (x.shape[dim],))
    if weight is not None and weight.requires_grad:
        raise ValueError(f"{op}: weight must not require a gradient, got one that does: pass weight.detach()")
    if not use_kernel(x):
        if z_loss == 0 and softcap is None and logit_scale == 1 and not return_aux:
            return _torchs(op, x, target, weight, ignore_index, reduction, label_smoothing, dim)
        if not soft and not torch.compiler.is_compiling() and is_plain((x, target)):
            _refuse_out_of_range(op, target, ignore_index, x.shape[dim])
    params = (
        dim, int(ignore_index), 1.0 - label_smoothing, label_smoothing / max(x.shape[dim], 1),
        softcap if softcap is None else float(softcap), float(logit_scale), not return_aux,
    )  # fmt: skip
    if reduction != "none" and not torch.compiler.is_compiling() and is_plain((x, target)):
        loss, lse, _, counts = cross_entropy_total(x, target, weight, *params, reduction, float(z_loss), return_aux)
        return CrossEntropy(loss, lse, counts[2], counts[3]) if return_aux else loss
    results = cross_entropy_rows(x, target, weight, *params, False)
    return _finish(results, target, weight, ignore_index, reduction, z_loss, return_aux)


def vocab_parallel_cross_entropy(
    x: Tensor,
    target: Tensor,
    *,
    group=None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: Optional[float] = None,
    logit_scale: float = 1.0,
    return_aux: bool = False,
) -> "Tensor | CrossEntropy":
    """Measure logits whose classes are split evenly over the ranks of a group.

    Args:
        x: this rank's slice, classes rank * C to (rank + 1) * C - 1; shapes as `cross_entropy`.
        target: class indices among all classes, the same on every rank.
        group: of torch.distributed; None: the default one.
        ignore_index, reduction, label_smoothing, z_loss, softcap, logit_scale, return_aux: as `cross_entropy`.
    Returns:
        As `cross_entropy`, the same on every rank. Each rank's backward gives the gradient of its slice.
    Raises:
        TypeError, ValueError: as `cross_entropy`. A label that is no class makes its row's loss NaN.
    Numerics: as `cross_entropy`, of which the results are those to float32 rounding: two reductions of [rows] numbers.
        Autograd: first derivative; the second raises.
    Source: Shoeybi et al. 2019.
    """
    op = "vocab_parallel_cross_entropy"
    _check(op, x, target, ignore_index, reduction, label_smoothing, z_loss, softcap, logit_scale)
    if target.is_floating_point():
        raise TypeError(f"{op}: target must have an integer dtype, got {str(target.dtype).replace('torch.', '')}")
    _checks.flags(op, return_aux=return_aux)
    group = torch.distributed.group.WORLD if group is None else group
    dim = _class_dim(x)
    share = label_smoothing / max(x.shape[dim] * torch.distributed.get_world_size(group), 1)
    results = _VocabParallel.apply(
        x, target, group, dim, ignore_index, 1.0 - label_smoothing, share, softcap, logit_scale
    )
    return _finish(results, target, None, ignore_index, reduction, z_loss, return_aux)


def _class_dim(x):
    return min(1 - x.dim(), -1)  # from the last, since a vmapped dimension comes first


def _finish(results, target, weight, ignore_index, reduction, z_loss, return_aux):
    total, _, z, accuracy = totals(results, target, weight, ignore_index, reduction, z_loss)
    return CrossEntropy(total, results[1], z, accuracy) if return_aux else total


def _torchs(op, x, target, weight, ignore_index, reduction, label_smoothing, dim):
    """torch's own function, in the compute dtype, and with nothing of an ignored row in any gradient."""
    compute = compute_dtype(x, weight, *if_soft(target))
    x, weight = x.to(compute), None if weight is None else weight.to(compute)
    if target.is_floating_point():
        target = target.to(compute)
    else:
        target = target.long()
        x = x.masked_fill((target == ignore_index).unsqueeze(dim), 0.0)
    try:
        return torch.nn.functional.cross_entropy(
            x, target, weight, ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing
        )
    except IndexError:
        _refuse_out_of_range(op, target, ignore_index, x.shape[dim])
        raise


def _refuse_out_of_range(op, target, ignore_index, classes):
    bad = target[(target != ignore_index) & ((target < 0) | (target >= classes))]
    if bad.numel():
        raise IndexError(f"{op}: target must be in 0 to {classes - 1} or ignore_index, got {bad[0].item()}")


def _check(op, x, target, ignore_index, reduction, label_smoothing, z_loss, softcap, logit_scale):
    _checks.tensors(op, x)
    if not x.dim():
        raise ValueError(f"{op}: x must have 1 or more dimensions, got 0")
    _losses.check_reduction(op, reduction)
    _checks.integer(op, "ignore_index", ignore_index)
    _checks.number(op, "label_smoothing", label_smoothing, low=0)
    if label_smoothing > 1:
        raise ValueError(f"{op}: label_smoothing must be at most 1, got {label_smoothing}")
    _checks.number(op, "z_loss", z_loss)
    _checks.number(op, "logit_scale", logit_scale)
    _checks.number(op, "softcap", softcap, low=0, optional=True)
    if softcap == 0:
        raise ValueError(f"{op}: softcap must be above 0 or None, got 0")
    if isinstance(target, Tensor) and target.is_floating_point():
        _checks.tensors(op, x, target=target)
        _checks.shape(op, "target of probabilities", target, x.shape)
        if ignore_index >= 0:
            raise ValueError(f"{op}: ignore_index must be negative with a target of probabilities, got {ignore_index}")
    else:
        _losses.check_labels(op, "target", target, x, _class_dim(x))
