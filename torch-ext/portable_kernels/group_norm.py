"""Group norm of (batch, channels, ...) tensors, alone or with an activation after it.

    y = activation((x - mean) * rsqrt(var + eps) * weight + bias),   mean and var of each group of channels

Wu and He, "Group Normalization", 2018. Contiguous and channels-last tensors are read where they lie. Where there are
many groups of moderate size, one program reads a group twice, the second time from cache. Else programs take a share
of some channels each: moments of every channel and share, then those of groups from them, then the result. The
gradients take the same two ways. All sums run in a fixed order. As in layer_norm.py the mean is kept as two numbers.
"""

from typing import NamedTuple, Optional

import torch
from torch import Tensor

from . import _checks, _norms
from ._activation_math import ACTIVATIONS, FORMULAS, gradient
from ._device import facts, launch
from ._dispatch import differentiable, use_kernel
from ._group_norm import (
    _group_norm_bwd_kernel,
    _group_norm_bwd_kernel_means,
    _group_norm_bwd_kernel_share,
    _group_norm_fwd_kernel,
    _group_norm_fwd_kernel_apply,
    _group_norm_fwd_kernel_combine,
    _group_norm_fwd_kernel_moments,
)
from ._ops import add_op_namespace_prefix
from ._replay import replayed
from ._rows import compute_dtype, warps
from ._triton import cdiv, next_power_of_2, scalar, triton_dtype

SECOND_ORDER = "reference"


def group_norm_reference(x, num_groups, weight=None, bias=None, eps=1e-5, *, activation=None):
    """What `group_norm` computes, in plain PyTorch."""
    return _fwd_reference(x, num_groups, weight, bias, eps, activation)[0]


def _fwd_reference(x, groups, weight, bias, eps, activation):
    compute = compute_dtype(x, weight, bias)
    xhat, mean, rest, rstd = _normed_reference(x, groups, eps, compute)
    u = _affine_reference(xhat, weight, bias)
    if activation is not None:
        kind, a, b = ACTIVATIONS[activation]
        u = FORMULAS[kind](u, a, b)
    return u.to(x.dtype), torch.stack((mean, rest, rstd), -1)


def _normed_reference(x, groups, eps, compute):
    """x normalised, of x's shape, and of each group two parts of the mean and rstd, (batch, groups)."""
    h = x.to(compute).reshape(x.shape[0], groups, x[0].numel() // groups if x.shape[0] else 0)
    mean = h.mean(-1)
    h = h - mean[..., None]
    rest = h.mean(-1)
    h = h - rest[..., None]
    rstd = torch.rsqrt(h.square().mean(-1) + eps)
    return (h * rstd[..., None]).reshape(x.shape), mean, rest, rstd


def _affine_reference(xhat, weight, bias):
    per_channel = (-1,) + (1,) * (xhat.dim() - 2)
    xhat = xhat if weight is None else xhat * weight.view(per_channel)
    return xhat if bias is None else xhat + bias.view(per_channel)


class GroupPlan(NamedTuple):
    """A program takes a group (FUSED), or BLOCK_C channels and up to CHUNK positions; tiles of BLOCK_C x BLOCK_S."""

    FUSED: bool
    BLOCK_C: int
    BLOCK_S: int
    CHUNK: int
    num_warps: int


def _plan(batch, C, S, groups, channels_last, device, backward=False):
    """Of a copy, forward / backward, H200 bf16: a group a program 0.63 / 0.50 at (8, 320, 128, 128) and 32 groups,
    where shares have 0.59 / 0.36; shares 0.60 / 0.48 at (2, 256, 512, 512). One reading, shares kept in registers by
    programs that tell each other their moments: 0.53 / 0.54, and 0.46 / 0.40. Channels-last: untuned.
    """
    width = C // groups
    size = width * S
    # A group's second reading comes from cache. In channels-last a group is narrow pieces, to be read with others.
    fused = size <= 8192 or (size <= 262144 and batch * groups >= device.multiprocessors and not channels_last)
    channels = width if fused else C
    if channels_last:
        elements, num_warps = 2048, 4
        BLOCK_C = min(next_power_of_2(channels), 64)
        BLOCK_S = min(next_power_of_2(S), elements // BLOCK_C)
    else:
        elements, num_warps = (2048, 4) if size <= 4096 else (8192, 16 if backward else 32) if fused else (4096, 4)
        BLOCK_S = min(next_power_of_2(S), elements)
        BLOCK_C = min(next_power_of_2(channels), elements // BLOCK_S)
    # Enough programs for the device; few enough tiles for the first one's mean to be near the mean of all.
    tiles = cdiv(S, BLOCK_S) * batch * cdiv(C, BLOCK_C)
    share = min(max(tiles // (4 * device.multiprocessors), 1), 64) if channels_last else 1
    return GroupPlan(fused, BLOCK_C, BLOCK_S, share * BLOCK_S, warps(num_warps, device.max_warps))


def _like(x):
    """An empty tensor laid out as results are: channels-last where x is, else contiguous."""
    return torch.empty(x.shape, dtype=x.dtype, device=x.device, memory_format=_format(x))


def _format(x):
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(x.dim())
    if last and not x.is_contiguous() and x.stride(1) == 1 and all(s >= x.shape[1] > 1 for s in x.stride()[2:]):
        return last
    return torch.contiguous_format


def _flat(t):
    """(batch, channels, positions): a view, or a copy where the positions have no common stride."""
    return t.flatten(2) if t.dim() > 2 else t.unsqueeze(-1)


def _options(x, compute, activation):
    """What a launch takes, and the activation's numbers."""
    kind, alpha, beta = ACTIVATIONS.get(activation, (None, 0.0, 0.0))
    precise = compute == torch.float32 == x.dtype
    options = {"ACTIVATION": kind, "PRECISE": precise, "COMPUTE": triton_dtype(compute)}
    return options, (scalar(alpha, compute), scalar(beta, compute))


def _planned(x, groups, backward):
    """x as (batch, channels, positions), the plan, its tiles as launches take them, and the programs of a share."""
    x = _flat(x)
    batch, C, S = x.shape
    channels_last = x.stride(1) == 1 and C > 1 and S > 1
    plan = _plan(batch, C, S, groups, channels_last, facts(x.device), backward)
    tile = {"BLOCK_C": plan.BLOCK_C, "BLOCK_S": plan.BLOCK_S, "num_warps": plan.num_warps}
    return x, plan, tile, batch * cdiv(C, plan.BLOCK_C)


@torch.library.custom_op(add_op_namespace_prefix("group_norm_fwd"), mutates_args=())
def group_norm_fwd(
    x: Tensor, groups: int, weight: Optional[Tensor], bias: Optional[Tensor], eps: float, activation: Optional[str]
) -> tuple[Tensor, Tensor]:
    """y, and of each group two parts of the mean and rstd."""
    compute = compute_dtype(x, weight, bias)
    y = _like(x)
    stats = torch.empty((x.shape[0], groups, 3), dtype=compute, device=x.device)
    if not x.numel():
        return y, stats.fill_(torch.nan)
    options, numbers = _options(x, compute, activation)
    x, plan, tile, programs = _planned(x, groups, False)
    device, (batch, C, S) = x.device, x.shape
    affine = (_norms.packed(weight), _norms.packed(bias))
    strides = (x.stride(), _flat(y).stride())
    eps = scalar(eps, compute)
    if plan.FUSED:
        args = (x, *affine, y, stats, C, S, groups, *strides, eps, *numbers)
        launch(_group_norm_fwd_kernel, (batch * groups,), device, args, **options, **tile)
        return y, stats
    COMPUTE, CHUNK, chunks = options["COMPUTE"], plan.CHUNK, cdiv(S, plan.CHUNK)
    parts = torch.empty((batch, C, chunks, 3), dtype=compute, device=device)
    args = (x, parts, C, S, x.stride())
    launch(_group_norm_fwd_kernel_moments, (programs * chunks,), device, args, COMPUTE=COMPUTE, CHUNK=CHUNK, **tile)
    BLOCK = min(next_power_of_2(C // groups * chunks), 1024)
    launch(
        _group_norm_fwd_kernel_combine, (batch * groups,), device, (parts, stats, C, S, groups, eps),
        COMPUTE=COMPUTE, CHUNK=CHUNK, BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip
    args = (x, *affine, y, stats, C, S, groups, *strides, *numbers)
    launch(_group_norm_fwd_kernel_apply, (programs * cdiv(S, plan.BLOCK_S),), device, args, **options, **tile)
    return y, stats


@group_norm_fwd.register_fake
def _(x, groups, weight, bias, eps, activation):
    return _like(x), x.new_empty((x.shape[0], groups, 3), dtype=compute_dtype(x, weight, bias))


@torch.library.custom_op(add_op_namespace_prefix("group_norm_bwd"), mutates_args=())
def group_norm_bwd(
    dy: Tensor, x: Tensor, weight: Optional[Tensor], bias: Optional[Tensor], stats: Tensor, groups: int, eps: float,
    activation: Optional[str], need_dw: bool, need_db: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of x, weight and bias; empty what is not needed."""
    dx = _like(x)
    parts = stats.new_zeros((1, x.shape[1])), stats.new_zeros((1, x.shape[1]))
    if x.numel():
        options, numbers = _options(x, stats.dtype, activation)
        x, plan, tile, programs = _planned(x, groups, True)
        dy, device, (batch, C, S) = _flat(dy), x.device, x.shape
        inputs = (dy, x, _norms.packed(weight), _norms.packed(bias), stats)
        chunks = 1 if plan.FUSED else cdiv(S, plan.CHUNK)
        parts = stats.new_empty((batch * chunks, C)), stats.new_empty((batch * chunks, C))
        rest = (C, S, groups, dy.stride(), x.stride(), _flat(dx).stride(), *numbers)
        if plan.FUSED:
            args = (*inputs, dx, *parts, *rest)
            launch(_group_norm_bwd_kernel, (batch * groups,), device, args, **options, **tile)
        else:
            kernel, args = _group_norm_bwd_kernel_share, (*inputs, None, None, None, *parts, *rest)
            launch(kernel, (programs * chunks,), device, args, **options, **tile, CHUNK=plan.CHUNK)
            means = stats.new_empty((batch, groups)), stats.new_empty((batch, groups))
            width = C // groups
            BLOCK_C = min(next_power_of_2(width), 32)
            launch(
                _group_norm_bwd_kernel_means, (batch * groups,), device,
                (*parts, inputs[2], *means, C, S, groups, chunks),
                COMPUTE=options["COMPUTE"], BLOCK_C=BLOCK_C, BLOCK_P=min(next_power_of_2(chunks), 1024 // BLOCK_C),
                num_warps=4,
            )  # fmt: skip
            args = (*inputs, *means, dx, None, None, *rest)
            launch(kernel, (programs * cdiv(S, plan.BLOCK_S),), device, args, **options, **tile, CHUNK=plan.BLOCK_S)
    pairs = ((t, p.dtype) if need else (None, None) for t, p, need in zip(parts, (bias, weight), (need_db, need_dw)))
    db, dw = (x.new_empty(0) if t is None else t for t in _norms.sum_parts(*pairs))
    return dx, dw, db


@group_norm_bwd.register_fake
def _(dy, x, weight, bias, stats, groups, eps, activation, need_dw, need_db):
    dw = weight.new_empty(weight.shape) if need_dw else x.new_empty(0)
    return _like(x), dw, bias.new_empty(bias.shape) if need_db else x.new_empty(0)


def _bwd_reference(dy, x, weight, bias, stats, groups, eps, activation, need_dw, need_db):
    compute = stats.dtype
    xhat, _, _, rstd = _normed_reference(x, groups, eps, compute)  # not the argument: it has a derivative
    dz = dy.to(compute)
    if activation is not None:
        kind, a, b = ACTIVATIONS[activation]
        dz = gradient(kind, dz, _affine_reference(xhat, weight, bias), a, b)
    grouped = (*rstd.shape, x[0].numel() // groups if x.shape[0] else 0)
    g = _affine_reference(dz, weight, None).reshape(grouped)
    h = xhat.reshape(grouped)
    dx = (g - g.mean(-1, keepdim=True) - h * (g * h).mean(-1, keepdim=True)) * rstd[..., None]
    dims = [d for d in range(x.dim()) if d != 1]
    dw = (dz * xhat).sum(dims).to(weight.dtype) if need_dw else x.new_empty(0)
    return dx.reshape(x.shape).to(x.dtype), dw, dz.sum(dims).to(bias.dtype) if need_db else x.new_empty(0)


_group_norm_bwd = differentiable(group_norm_bwd, _bwd_reference, like=lambda dy, x, *_: _like(x))


def _setup_context(ctx, inputs, output):
    x, groups, weight, bias, eps, activation = inputs
    ctx.params = groups, eps, activation
    ctx.save_for_backward(x, weight, bias, output[1])
    ctx.mark_non_differentiable(output[1])


def _backward(ctx, dy, _):
    _, _, need_dw, need_db, _, _ = ctx.needs_input_grad
    dx, dw, db = _group_norm_bwd(dy, *ctx.saved_tensors, *ctx.params, need_dw, need_db)
    return dx, None, dw if need_dw else None, db if need_db else None, None, None


_group_norm = differentiable(
    group_norm_fwd, _fwd_reference, _setup_context, _backward, like=lambda x, *_: _like(x)
)  # fmt: skip


@replayed
def group_norm(
    x: Tensor,
    num_groups: int,
    weight: Optional[Tensor] = None,
    bias: Optional[Tensor] = None,
    eps: float = 1e-5,
    *,
    activation: Optional[str] = None,
) -> Tensor:
    """Normalise groups of channels.

    y = activation((x - mean) * rsqrt(var + eps) * weight + bias), mean and var of each sample's group

    Args:
        x: (batch, channels, ...), float64 | float32 | float16 | bfloat16, any strides.
        num_groups: how many groups the channels are, neighbours together.
        weight, bias: (channels,), of any of those dtypes.
        eps: added inside the square root.
        activation: None, "silu" or another function of activations.py, with its default parameters.
    Returns:
        Of x's shape and dtype; channels-last where x is, else contiguous.
    Raises:
        TypeError: dtype not listed.   ValueError: num_groups does not divide the channels; weight or bias is not
            (channels,); unknown activation; negative eps.
    Numerics: float32 throughout, float64 where an argument is float64; rounded once, after the activation. In the
        kernels a mean far larger than the spread costs no digits. Gradients are deterministic. Autograd: first and
        second derivative, vmap; forward mode raises.
    Source: Wu and He 2018.
    """
    op = "group_norm"
    _checks.tensors(op, x, weight=weight, bias=bias)
    if x.dim() < 2:
        raise ValueError(f"{op}: x must have at least two dimensions, got {tuple(x.shape)}")
    C = x.shape[1]
    if isinstance(num_groups, bool) or not isinstance(num_groups, int) or num_groups < 1 or C % num_groups:
        raise ValueError(f"{op}: num_groups must be an int that divides {C} channels, got {num_groups}")
    _checks.shape(op, "weight", weight, (C,))
    _checks.shape(op, "bias", bias, (C,))
    _checks.number(op, "eps", eps, low=0)
    if activation is not None:
        _checks.choice(op, "activation", activation, ACTIVATIONS)
    torchs = activation is None and x.numel() and all(t is None or t.dtype == x.dtype for t in (weight, bias))
    torchs = torchs and (weight is not None or bias is None)  # PyTorch has no gradient of a bias alone
    if torchs and not use_kernel(x):
        return torch.group_norm(x, num_groups, weight, bias, eps).contiguous(memory_format=_format(x))
    return _group_norm(x, num_groups, weight, bias, float(eps), activation)[0]
