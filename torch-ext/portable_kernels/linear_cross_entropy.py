"""Cross-entropy and log-probabilities of a linear layer's outputs, of which only a chunk of rows exists at a time.

    logits = x @ linear_weight.T + linear_bias      loss = cross_entropy(logits, target)

For a mean or a sum, the gradients are formed with the loss, while a chunk of logits is at hand (Hsu et al., "Liger
Kernel", 2024); the backward scales them. For a loss a row they are not known yet, and the backward forms the logits
again. Gradients of weight and bias are summed over chunks in float32.
"""

from typing import Optional

import torch
from torch import Tensor

from . import _checks, _losses
from ._dispatch import autocast, is_plain, transforms, use_kernel
from ._linear_cross_entropy import linear_cross_entropy_rows
from .cross_entropy import _check, _refuse_out_of_range, cross_entropy, cross_entropy_reference

SECOND_ORDER = "reference"


def linear_cross_entropy_reference(
    x, linear_weight, target, *, linear_bias=None, weight=None, ignore_index=-100, reduction="mean",
    label_smoothing=0.0, z_loss=0.0, softcap=None, logit_scale=1.0, chunk_bytes=None,
):  # fmt: skip
    """What `linear_cross_entropy` computes, in plain PyTorch."""
    logits = torch.nn.functional.linear(x, linear_weight, linear_bias)
    lead, V = logits.shape[:-1], logits.shape[-1]
    loss = cross_entropy_reference(
        logits.reshape(lead.numel(), V), target.reshape((lead.numel(), V) if target.is_floating_point() else -1),
        weight, ignore_index, reduction, label_smoothing, z_loss=z_loss, softcap=softcap, logit_scale=logit_scale,
    )  # fmt: skip
    return loss.view(lead) if reduction == "none" else loss


def token_log_probs_reference(x, linear_weight, ids, *, temperature=1.0, return_entropy=False, chunk_bytes=None):
    """What `token_log_probs` computes, in plain PyTorch."""
    logits = torch.nn.functional.linear(x, linear_weight)
    logp = torch.log_softmax(logits.to(torch.promote_types(x.dtype, torch.float32)) / temperature, -1)
    chosen = logp.gather(-1, ids.long().unsqueeze(-1)).squeeze(-1)
    return (chosen, -(logp.exp() * logp).sum(-1)) if return_entropy else chosen


def linear_cross_entropy(
    x: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Optional[Tensor] = None,
    weight: Optional[Tensor] = None,
    reduction: str = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: Optional[float] = None,
    logit_scale: float = 1.0,
    chunk_bytes: Optional[int] = None,
) -> Tensor:
    """Measure a linear layer's outputs against class indices, without holding the outputs.

    loss = cross_entropy(x @ linear_weight.T + linear_bias, target, ...)

    Args:
        x: (..., H), float64 | float32 | float16 | bfloat16, any strides.
        linear_weight: (V, H), of x's dtype.
        target: (...), class indices of any integer dtype; or (..., V), probabilities, which take as much memory as the
            logits: they are then formed whole.
        linear_bias: (V,), of x's dtype.
        weight, reduction, ignore_index, label_smoothing, z_loss, softcap, logit_scale: as `cross_entropy`.
        chunk_bytes: at most so much memory for logits, though one row at least; None: as much as linear_weight, and
            512 MiB at most.
    Returns:
        The loss, in float32 (float64 if an argument is); of target's shape for "none".
    Raises:
        TypeError, ValueError: dtype, shape or value not listed.   IndexError: a label is no class, on PyTorch's path.
        In kernels its row's loss is NaN.
    Numerics: logits and their gradients are rounded to x's dtype, as by torch's two functions; gradients of weight and
        bias are summed in float32 and rounded once. Autocast: x, linear_weight and linear_bias are cast. Autograd:
        first and second derivative of x, linear_weight and linear_bias, the second with whole logits; vmap; forward
        mode raises. With "mean" and "sum" the gradients are formed by the forward; with "none", and where a second
        derivative may follow, the backward forms the logits again.
    Source: Hsu et al. 2024.
    """
    op = "linear_cross_entropy"
    x, linear_weight, linear_bias = _operands(op, x, linear_weight, linear_bias, chunk_bytes)
    lead, V = x.shape[:-1], linear_weight.shape[0]
    soft = isinstance(target, Tensor) and target.is_floating_point()
    if soft:
        _checks.tensors(op, x, target=target)
        _checks.shape(op, "target of probabilities", target, (*lead, V))
    else:
        _losses.check_labels(op, "target", target, _logits_shaped(x, *lead, V), -1)
    target = target.reshape(lead.numel(), V) if soft else target.reshape(-1).long()
    x = x.reshape(lead.numel(), x.shape[-1])
    _check(
        op, _logits_shaped(x, x.shape[0], V), target, ignore_index, reduction, label_smoothing, z_loss, softcap,
        logit_scale,
    )  # fmt: skip
    _checks.tensors(op, x, weight=weight)
    _checks.shape(op, "weight", weight, (V,))
    if weight is not None and weight.requires_grad:
        raise ValueError(f"{op}: weight must not require a gradient, got one that does: pass weight.detach()")
    if soft:
        loss = cross_entropy(
            torch.nn.functional.linear(x, linear_weight, linear_bias), target, weight, ignore_index, reduction,
            label_smoothing, z_loss=z_loss, softcap=softcap, logit_scale=logit_scale,
        )  # fmt: skip
        return loss.view(lead) if reduction == "none" else loss
    eager = not torch.compiler.is_compiling()
    if eager and not use_kernel(x) and is_plain((x, target)):
        _refuse_out_of_range(op, target, ignore_index, V)
    needs = [
        reduction != "none" and torch.is_grad_enabled() and t is not None and t.requires_grad
        for t in (x, linear_weight, linear_bias)
    ]
    if eager and transforms():  # their backward may be differentiated, and so does not take what is made here
        needs = [False] * 3
    loss = linear_cross_entropy_rows(
        x, linear_weight, target, linear_bias, weight, ignore_index, 1.0 - label_smoothing,
        label_smoothing / max(V, 1), softcap if softcap is None else float(softcap), float(logit_scale), float(z_loss),
        reduction, chunk_bytes, False, *needs,
    )[0]  # fmt: skip
    return loss.view(lead) if reduction == "none" else loss


def token_log_probs(
    x: Tensor,
    linear_weight: Tensor,
    ids: Tensor,
    *,
    temperature: float = 1.0,
    return_entropy: bool = False,
    chunk_bytes: Optional[int] = None,
) -> "Tensor | tuple[Tensor, Tensor]":
    """Log-probabilities that a linear layer's outputs give to tokens, without holding the outputs.

    logp = log_softmax(x @ linear_weight.T / temperature)[ids];   entropy = -sum(exp(logp) * logp) over all tokens

    Args:
        x: (..., H), float64 | float32 | float16 | bfloat16, any strides.
        linear_weight: (V, H), of x's dtype.
        ids: (...), tokens, of any integer dtype.
        temperature: divides the logits, above 0.
        return_entropy: return (logp, entropy), both differentiable.
        chunk_bytes: as `linear_cross_entropy`.
    Returns:
        (...), float32, or float64 for float64.
    Raises:
        TypeError, ValueError: dtype, shape or value not listed.   IndexError: an id is no token, on PyTorch's path.
        In kernels its log-probability is NaN.
    Numerics, Autograd, autocast, Source: as `linear_cross_entropy` with reduction="none".
    """
    op = "token_log_probs"
    x, linear_weight, _ = _operands(op, x, linear_weight, None, chunk_bytes)
    lead, V = x.shape[:-1], linear_weight.shape[0]
    _losses.check_labels(op, "ids", ids, _logits_shaped(x, *lead, V), -1)
    _checks.number(op, "temperature", temperature)
    _checks.flags(op, return_entropy=return_entropy)
    if not temperature > 0:
        raise ValueError(f"{op}: temperature must be above 0, got {temperature}")
    ids = ids.reshape(-1).long()
    x = x.reshape(lead.numel(), x.shape[-1])
    if not torch.compiler.is_compiling() and not use_kernel(x) and is_plain((x, ids)):
        bad = ids[(ids < 0) | (ids >= V)]
        if bad.numel():
            raise IndexError(f"{op}: ids must be in 0 to {V - 1}, got {bad[0].item()}")
    nothing = torch.iinfo(torch.int64).min  # is ignored
    loss, entropy, *_ = linear_cross_entropy_rows(
        x, linear_weight, ids, None, None, nothing, 1.0, 0.0, None, 1.0 / temperature, 0.0, "none", chunk_bytes,
        return_entropy, False, False, False,
    )  # fmt: skip
    return (-loss.view(lead), entropy.view(lead)) if return_entropy else -loss.view(lead)


def _logits_shaped(x, *shape):
    return x.new_empty((1,) * len(shape)).expand(shape)


def _operands(op, x, linear_weight, linear_bias, chunk_bytes):
    """(x, linear_weight, linear_bias), checked, and cast as torch's linear casts them under autocast."""
    _checks.given(op, linear_weight=linear_weight)
    _checks.tensors(op, x, linear_weight=linear_weight, linear_bias=linear_bias)
    if not x.dim():
        raise ValueError(f"{op}: x must have 1 or more dimensions, got 0")
    if linear_weight.dim() != 2 or linear_weight.shape[1] != x.shape[-1]:
        raise ValueError(f"{op}: linear_weight must have shape (V, {x.shape[-1]}), got {tuple(linear_weight.shape)}")
    _checks.shape(op, "linear_bias", linear_bias, linear_weight.shape[:1])
    _checks.integer(op, "chunk_bytes", chunk_bytes, low=1, optional=True)
    operands = autocast(x, linear_weight, linear_bias)
    for name, t in zip(("linear_weight", "linear_bias"), operands[1:]):
        if t is not None and t.dtype != operands[0].dtype:
            ours, theirs = (str(o.dtype).replace("torch.", "") for o in (operands[0], t))
            raise TypeError(f"{op}: {name} must have x's dtype {ours}, got {theirs}")
    return operands
