"""Norms that a condition scales and shifts, as diffusion transformers use them, with the gated residual before them.

    y = norm(s) * weight * (1 + scale) + shift,   s = x, or s = residual + gate * x

Peebles and Xie, "Scalable Diffusion Models with Transformers" (adaLN-Zero), 2023. The norm is layer norm or root mean
square. scale, shift and gate are read where they lie, shared by the rows of a batch or one a token; what the rows of a
batch share gets its gradient summed in a fixed order. Rows of any width. As in layer_norm.py the mean is kept as two
numbers, so that one far larger than the spread costs no digits.
"""

import math
from typing import NamedTuple, Optional

import torch
from torch import Tensor

from . import _checks, _norms
from ._device import facts, launch
from ._dispatch import differentiable, use_kernel
from ._modulated_norm import (
    _modulated_norm_bwd_kernel,
    _modulated_norm_bwd_kernel_wide,
    _modulated_norm_fwd_kernel,
    _modulated_norm_fwd_kernel_wide,
)
from ._ops import add_op_namespace_prefix
from ._replay import replayed
from ._rows import compute_dtype, rows, sum_leading, warps
from ._triton import cdiv, next_power_of_2, scalar, triton_dtype

SECOND_ORDER = "reference"


def modulated_layer_norm_reference(x, scale, shift=None, eps=1e-6, *, weight=None, residual=None, gate=None):
    """What `modulated_layer_norm` computes, in plain PyTorch."""
    return _public(_fwd_reference, x, scale, shift, eps, weight, residual, gate, True)


def modulated_rms_norm_reference(x, scale, shift=None, eps=1e-6, *, weight=None, residual=None, gate=None):
    """What `modulated_rms_norm` computes, in plain PyTorch."""
    return _public(_fwd_reference, x, scale, shift, eps, weight, residual, gate, False)


def _fwd_reference(x, residual, gate, scale, shift, weight, eps, layer):
    compute = compute_dtype(x, residual, gate, scale, shift, weight)
    total, h = x.new_empty(0), x.to(compute)
    if residual is not None:
        total = (residual + (h if gate is None else gate * h)).to(torch.promote_types(x.dtype, residual.dtype))
        h = total.to(compute)
    h, mean, rest, rstd = _centred_reference(h, eps, layer)
    y = h * rstd if weight is None else h * rstd * weight
    y = y * (1 + scale.to(compute))
    y = y if shift is None else y + shift
    return y.to(x.dtype), total, torch.cat((mean, rest, rstd), -1)


def _centred_reference(h, eps, layer):
    """h without its mean, and what the forward keeps of each row."""
    mean = h.mean(-1, keepdim=True) if layer else torch.zeros_like(h[..., :1])
    h = h - mean
    rest = h.mean(-1, keepdim=True) if layer else torch.zeros_like(mean)
    h = h - rest
    return h, mean, rest, torch.rsqrt(h.square().mean(-1, keepdim=True) + eps)


class Plan(NamedTuple):
    """Tiles of BLOCK_M rows and BLOCK_N + TAIL columns; HELD where that covers the row."""

    HELD: bool
    BLOCK_M: int
    BLOCK_N: int
    TAIL: int
    STAGES: int
    num_warps: int
    programs: int  # on a multiprocessor, in the backward


def _columns(N):
    """(BLOCK_N, TAIL): one power of two that covers N, or two where they do it with less."""
    BLOCK_N = next_power_of_2(N + 1) // 2
    TAIL = next_power_of_2(N - BLOCK_N) if N > BLOCK_N else 0
    return (2 * BLOCK_N, 0) if TAIL == BLOCK_N else (BLOCK_N, TAIL)


def _plan(N, residual, max_warps):
    """Shares of a copy, H200 bf16, widths 1152 and 3072."""
    BLOCK_N, TAIL = _columns(N)
    if BLOCK_N <= 16384 and not residual:  # 0.87 and 0.92; 4 rows 0.76 and 1 row 0.87
        BLOCK_M = max(1, (2048 if BLOCK_N <= 1024 else 4096) // max(BLOCK_N, 32))
        return Plan(True, BLOCK_M, BLOCK_N, TAIL, 1, warps(min(BLOCK_M * BLOCK_N // 1024, 16), max_warps), 0)
    if BLOCK_N <= 1024:  # 0.90
        return Plan(True, max(1, 4096 // max(BLOCK_N, 32)), BLOCK_N, TAIL, 1, warps(4, max_warps), 0)
    if BLOCK_N <= 16384:  # 0.91
        return Plan(True, 1, BLOCK_N, TAIL, 1, warps(min(BLOCK_N // 1024, 16), max_warps), 0)
    return Plan(False, 1, 8192, 0, 1, warps(16, max_warps), 0)


def _plan_backward(N, shared, itemsize, device):
    """itemsize: bytes of an element of all operands that are read together. Shares of a copy: as above."""
    BLOCK_N, TAIL = _columns(N) if shared else (next_power_of_2(N), 0)
    if BLOCK_N > 8192:
        return Plan(False, 1, 4096, 0, 1, warps(8, device.max_warps), 2)
    if BLOCK_N <= 1024:  # 0.86
        plan = Plan(True, max(1, 1024 // max(BLOCK_N, 128)), BLOCK_N, TAIL, 3, 1, 8)
    else:  # 0.87; 2 programs of 4 warps 0.82, and of 8 warps 0.77
        plan = Plan(
            True, 1, BLOCK_N, TAIL, 3, warps(min(BLOCK_N // 512, 16), device.max_warps), 3 if BLOCK_N <= 2048 else 2
        )
    # All stages but one wait in shared memory, beside a tile that changes its layout where dtypes differ.
    fits = ((plan.STAGES - 1) * itemsize + 4) * plan.BLOCK_M * (BLOCK_N + TAIL) <= device.shared_memory
    return plan if fits else plan._replace(STAGES=1)


def _tile(plan, layout):
    """What the kernels take that hold their rows."""
    if not plan.HELD:
        return {}
    whole = layout.N == plan.BLOCK_N + plan.TAIL and layout.M % plan.BLOCK_M == 0
    return {"WHOLE": whole, "BLOCK_M": plan.BLOCK_M, "TAIL": plan.TAIL}


def _layout(**operands):
    """The operands that are there as `rows`; of each its tensor and strides, None and zeros where it is absent."""
    present = {name: t for name, t in operands.items() if t is not None}
    layout, tensors = rows(*present.values())
    found = dict(zip(present, zip(tensors, layout.strides)))
    return layout, {name: found.get(name, (None, (0, 0, 0, 0))) for name in operands}


def _expanded(x, *modulations):
    return [t if t is None else t.expand(x.shape) for t in modulations]


@torch.library.custom_op(add_op_namespace_prefix("modulated_norm_fwd"), mutates_args=())
def modulated_norm_fwd(
    x: Tensor, residual: Optional[Tensor], gate: Optional[Tensor], scale: Tensor, shift: Optional[Tensor],
    weight: Optional[Tensor], eps: float, layer: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(y, s, stats): s is empty without a residual; stats are of each row two parts of the mean, and rstd."""
    compute = compute_dtype(x, residual, gate, scale, shift, weight)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = None
    if residual is not None:
        total = torch.empty(x.shape, dtype=torch.promote_types(x.dtype, residual.dtype), device=x.device)
    stats = torch.empty((*x.shape[:-1], 3), dtype=compute, device=x.device)
    if x.numel():
        gate, scale, shift = _expanded(x, gate, scale, shift)
        layout, found = _layout(x=x, residual=residual, gate=gate, scale=scale, shift=shift)
        tensors, strides = zip(*found.values())
        plan = _plan(layout.N, residual is not None, facts(x.device).max_warps)
        options = {"LAYER": layer, "SHARED": all(s[2] == 0 for s in strides[2:]), "COMPUTE": triton_dtype(compute)}
        launch(
            _modulated_norm_fwd_kernel if plan.HELD else _modulated_norm_fwd_kernel_wide,
            (layout.blocks(plan.BLOCK_M),),
            x.device,
            (*tensors, _norms.packed(weight), y, total, stats, layout.B, layout.M, layout.N, *strides,
             scalar(eps, compute)),
            **options, **_tile(plan, layout), BLOCK_N=plan.BLOCK_N, num_warps=plan.num_warps,
        )  # fmt: skip
    else:
        stats.fill_(torch.nan)
    return y, x.new_empty(0) if total is None else total, stats


@modulated_norm_fwd.register_fake
def _(x, residual, gate, scale, shift, weight, eps, layer):
    total = x.new_empty(0)
    if residual is not None:
        total = x.new_empty(x.shape, dtype=torch.promote_types(x.dtype, residual.dtype))
    compute = compute_dtype(x, residual, gate, scale, shift, weight)
    return x.new_empty(x.shape), total, x.new_empty((*x.shape[:-1], 3), dtype=compute)


@torch.library.custom_op(add_op_namespace_prefix("modulated_norm_bwd"), mutates_args=())
def modulated_norm_bwd(
    dy: Tensor, ds: Optional[Tensor], h: Tensor, x: Optional[Tensor], gate: Optional[Tensor], scale: Tensor,
    shift: Optional[Tensor], weight: Optional[Tensor], stats: Tensor, eps: float, layer: bool,
    need_dgate: bool, need_dscale: bool, need_dshift: bool, need_dw: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of h (the rows that were normalised), x, gate, scale, shift and weight; empty what is not needed.

    x and its gradient are there with a gate alone: else h's is x's, and the residual's.
    """
    compute, shape, N = stats.dtype, dy.shape, dy.shape[-1]
    dh = torch.empty(shape, dtype=h.dtype, device=h.device)
    dx = None if gate is None else torch.empty(shape, dtype=x.dtype, device=x.device)
    if not dy.numel():
        needed = zip((gate, scale, shift, weight), (need_dgate, need_dscale, need_dshift, need_dw))
        rest = [h.new_zeros(t.shape, dtype=t.dtype) if need else h.new_empty(0) for t, need in needed]
        return (dh, h.new_empty(0) if dx is None else dx, *rest)
    views = dict(zip(("gate", "scale", "shift"), _expanded(dy, gate, scale, shift)))
    layout, found = _layout(dy=dy, ds=ds, h=h, x=x, **views)
    lead = _leading(shape, layout.A * layout.B)
    shared = all(
        strides[2] == 0 and math.prod(t.shape[lead:-1]) == 1
        for t, (_, strides) in zip((gate, scale, shift), (found["gate"], found["scale"], found["shift"]))
        if t is not None
    )
    del found["shift"]  # read for its layout alone
    tensors, strides = zip(*found.values())
    device = facts(h.device)
    plan = _plan_backward(N, shared, sum(t.element_size() for t in tensors if t is not None), device)
    outer = layout.A * layout.B
    # A program more than run at once would be as long again as all that do.
    parts = min(cdiv(layout.M, plan.BLOCK_M), max(1, plan.programs * device.multiprocessors // outer))
    sums = torch.empty if plan.HELD else torch.zeros

    def buffer(t, needed):
        if not needed:
            return None
        if shared:
            return sums((outer * parts, N), dtype=compute, device=h.device)
        return torch.empty(shape, dtype=t.dtype if t.shape == shape else compute, device=h.device)

    dgate, dshift = buffer(gate, need_dgate), buffer(shift, need_dshift)
    dscale = buffer(scale, need_dscale or (shared and need_dw))
    dw = sums((outer * parts, N), dtype=compute, device=h.device) if need_dw and not shared else None
    launch(
        _modulated_norm_bwd_kernel if plan.HELD else _modulated_norm_bwd_kernel_wide,
        (outer * parts,),
        h.device,
        (*tensors, _norms.packed(weight), stats, dh, dx, dscale, dshift, dgate, dw,
         layout.B, layout.M, layout.N, parts, *strides),
        LAYER=layer, SHARED=shared, COMPUTE=triton_dtype(compute), **_tile(plan, layout),
        BLOCK_N=plan.BLOCK_N, STAGES=plan.STAGES, num_warps=plan.num_warps,
    )  # fmt: skip

    if shared:  # (outer * parts, N) -> x's leading dimensions, then 1s, then N
        final = [
            (t, compute if t is None or weight is not None or like.shape[:lead] != shape[:lead] else like.dtype)
            for t, like in ((dgate, gate), (dscale, scale), (dshift, shift))
        ]
        sums = _norms.sum_parts(*((t if t is None else t.view(outer, parts, N), dtype) for t, dtype in final))
        middle = (1,) * (len(shape) - 1 - lead)
        dgate, dscale, dshift = (t if t is None else t.view(*shape[:lead], *middle, N) for t in sums)
        if need_dw:
            dw = dscale * (1 + scale.to(compute))
        if weight is not None and need_dscale:
            dscale = dscale * weight

    def finished(t, like, needed):
        return _summed_to(t, like).to(like.dtype).contiguous() if needed else h.new_empty(0)

    return (
        dh,
        h.new_empty(0) if dx is None else dx,
        finished(dgate, gate, need_dgate),
        finished(dscale, scale, need_dscale),
        finished(dshift, shift, need_dshift),
        sum_leading(dw, 1).to(weight.dtype) if need_dw else h.new_empty(0),
    )


def _leading(shape, outer):
    """How many of the leading dimensions the outer indices are."""
    lead = 0
    while outer > 1:
        outer //= shape[lead]
        lead += 1
    return lead


def _summed_to(t, like):
    """The sum over the dimensions in which `like` has size 1."""
    dims = [d for d in range(t.dim()) if like.shape[d] == 1 and t.shape[d] != 1]
    return t.sum(dims, keepdim=True) if dims else t


@modulated_norm_bwd.register_fake
def _(
    dy, ds, h, x, gate, scale, shift, weight, stats, eps, layer, need_dgate, need_dscale, need_dshift, need_dw
):  # fmt: skip
    needed = zip((gate, scale, shift, weight), (need_dgate, need_dscale, need_dshift, need_dw))
    rest = [t.new_empty(t.shape) if need else h.new_empty(0) for t, need in needed]
    return (h.new_empty(h.shape), h.new_empty(0) if gate is None else x.new_empty(x.shape), *rest)


def _bwd_reference(
    dy, ds, h, x, gate, scale, shift, weight, stats, eps, layer, need_dgate, need_dscale, need_dshift, need_dw
):  # fmt: skip
    compute = stats.dtype
    centred, _, _, rstd = _centred_reference(h.to(compute), eps, layer)  # not the argument: it has a derivative
    xhat, dy = centred * rstd, dy.to(compute)
    w = dy.new_ones(()) if weight is None else weight.to(compute)
    factor = 1 + scale.to(compute)
    g = dy * factor * w
    dh = g - xhat * (g * xhat).mean(-1, keepdim=True)
    dh = rstd * (dh - g.mean(-1, keepdim=True) if layer else dh)
    dh = dh if ds is None else dh + ds
    return (
        dh.to(h.dtype),
        h.new_empty(0) if gate is None else (dh * gate).to(x.dtype),
        _summed_to(dh * x, gate).to(gate.dtype) if need_dgate else h.new_empty(0),
        _summed_to(dy * xhat * w, scale).to(scale.dtype) if need_dscale else h.new_empty(0),
        _summed_to(dy, shift).to(shift.dtype, copy=True) if need_dshift else h.new_empty(0),
        sum_leading(dy * xhat * factor, 1).to(weight.dtype) if need_dw else h.new_empty(0),
    )


_modulated_norm_bwd = differentiable(modulated_norm_bwd, _bwd_reference)


def _setup_context(ctx, inputs, output):
    x, residual, gate, scale, shift, weight, *ctx.params = inputs
    _, total, stats = output
    ctx.residual_dtype, ctx.dtype = None if residual is None else residual.dtype, x.dtype
    h = x if residual is None else total
    ctx.save_for_backward(h, None if gate is None else x, gate, scale, shift, weight, stats)
    ctx.mark_non_differentiable(*((total, stats) if residual is None else (stats,)))


def _backward(ctx, dy, ds, _):
    added = ctx.residual_dtype is not None
    needs = ctx.needs_input_grad[2:6]
    saved = ctx.saved_tensors  # once: activation checkpointing unpacks no tensor twice
    dh, dx, *rest = _modulated_norm_bwd(dy, ds if added else None, *saved, *ctx.params, *needs)
    dx = (dh if saved[2] is None else dx).to(ctx.dtype)
    dr = dh.to(ctx.residual_dtype) if added else None
    return dx, dr, *(t if need else None for t, need in zip(rest, needs)), None, None


_modulated_norm = differentiable(modulated_norm_fwd, _fwd_reference, _setup_context, _backward)


@replayed
def modulated_layer_norm(
    x: Tensor,
    scale: Tensor,
    shift: Optional[Tensor] = None,
    eps: float = 1e-6,
    *,
    weight: Optional[Tensor] = None,
    residual: Optional[Tensor] = None,
    gate: Optional[Tensor] = None,
):
    """Layer norm, then scale and shift by a condition; with a residual, of residual + gate * x.

    y = (s - mean(s)) * rsqrt(var(s) + eps) * weight * (1 + scale) + shift,   s = x or residual + gate * x

    An adaLN block of a diffusion transformer is y = modulated_layer_norm(x, scale_msa, shift_msa), and after its
    attention y, x = modulated_layer_norm(attention, scale_mlp, shift_mlp, residual=x, gate=gate_msa).

    Args:
        x: (..., N), float64 | float32 | float16 | bfloat16, any strides.
        scale, shift, gate: (N,); or (B, N), one row for each of x's B batches; or of as many dimensions as x, each of
            x's size or 1, and the last N. Of any of those dtypes and any strides.
        eps: added inside the square root.
        weight: (N,), multiplies before the scale.
        residual: of x's shape. None: x itself is normalised.
        gate: multiplies x before it is added to the residual.
    Returns:
        y of x's shape and dtype, contiguous. With a residual (y, s), s of the dtype that x and residual promote to.
    Raises:
        TypeError: dtype not listed.   ValueError: a shape that does not fit; a gate without a residual; negative eps.
    Numerics: float32 throughout, float64 where an argument is float64; s and y are each rounded once, y comes from
        the rounded s. PyTorch code rounds 1 + scale and each product, so that its half-precision results are less
        exact. Gradients are deterministic. Autograd: first and second derivative, vmap; forward mode raises.
    Source: Peebles and Xie 2023; AdaLayerNormZero of diffusers.
    """
    return _public_checked("modulated_layer_norm", x, scale, shift, eps, weight, residual, gate, True)


@replayed
def modulated_rms_norm(
    x: Tensor,
    scale: Tensor,
    shift: Optional[Tensor] = None,
    eps: float = 1e-6,
    *,
    weight: Optional[Tensor] = None,
    residual: Optional[Tensor] = None,
    gate: Optional[Tensor] = None,
):
    """Root-mean-square norm, then scale and shift by a condition; with a residual, of residual + gate * x.

    y = s * rsqrt(mean(s^2) + eps) * weight * (1 + scale) + shift,   s = x or residual + gate * x

    Arguments, results, errors, numerics and derivatives as in `modulated_layer_norm`.
    """
    return _public_checked("modulated_rms_norm", x, scale, shift, eps, weight, residual, gate, False)


def _public_checked(op, x, scale, shift, eps, weight, residual, gate, layer):
    _checks.tensors(op, x, scale=scale, shift=shift, weight=weight, residual=residual, gate=gate)
    if scale is None:
        raise TypeError(f"{op}: scale must be a tensor, got NoneType")
    if not x.dim():
        raise ValueError(f"{op}: x must have at least one dimension, got ()")
    _checks.shape(op, "weight", weight, x.shape[-1:])
    _checks.shape(op, "residual", residual, x.shape)
    _checks.number(op, "eps", eps, low=0)
    if gate is not None and residual is None:
        raise ValueError(f"{op}: gate must be None without a residual, got {tuple(gate.shape)}")
    for name, t in (("scale", scale), ("shift", shift), ("gate", gate)):
        if t is not None and not _fits(t, x):
            raise ValueError(
                f"{op}: {name} must have shape (N,), (B, N), or x.dim() dimensions of x's size or 1 and then N, "
                f"got {tuple(t.shape)} for x {tuple(x.shape)}"
            )
    function = _modulated_norm if use_kernel(x) else _contiguous_reference
    return _public(function, x, scale, shift, float(eps), weight, residual, gate, layer)


def _fits(t, x):
    if t.dim() == x.dim():
        return t.shape[-1] == x.shape[-1] and all(n in (1, m) for n, m in zip(t.shape, x.shape))
    return t.shape == x.shape[-1:] or t.shape == (x.shape[0], x.shape[-1])


def _public(function, x, scale, shift, eps, weight, residual, gate, layer):
    """scale, shift and gate with as many dimensions as x; what the public functions return."""
    gate, scale, shift = (
        t if t is None or t.dim() == x.dim() else t[(slice(None),) * (t.dim() - 1) + (None,) * (x.dim() - t.dim())]
        for t in (gate, scale, shift)
    )
    y, total, _ = function(x, residual, gate, scale, shift, weight, eps, layer)
    return y if residual is None else (y, total)


def _contiguous_reference(*args):
    return tuple(t.contiguous() for t in _fwd_reference(*args))
