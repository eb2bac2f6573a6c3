"""Gated activations, y = activation(gate) * up: of one packed tensor read in place, or of two tensors.

`gated` is the general form, with the clamps of gpt-oss; `silu_and_mul` and its kin are the names that models know, and
`swiglu`, `geglu` and `reglu` take gate and up apart. All share one forward and one backward kernel: they differ in
pointers and strides alone. Shazeer, "GLU Variants Improve Transformer", 2020.

The activation, the product and what comes between are computed in float32 (float64) and rounded once. Models written
in PyTorch round activation(gate) to 16 bits before the product, so their results are up to an ulp less exact.
"""

from typing import Optional

import torch
from torch import Tensor

from . import _checks
from ._activation_math import ACTIVATIONS, FORMULAS, activate, activate_gradient, gradient
from ._dispatch import differentiable, elementwise, use_kernel
from ._ops import add_op_namespace_prefix
from ._pointwise import elements, inside, launch_pointwise, load_halves, store_halves, tile_start
from ._replay import replayed
from ._rows import at, compute_dtype, rows
from ._triton import round_to, scalar, tl, triton, triton_dtype

SECOND_ORDER = "reference"


def gated_reference(x, activation, *, gate_first=True, interleaved=False, limit=None, alpha=None, up_offset=0.0):
    """What `gated` computes, in plain PyTorch."""
    activation, a, b = ACTIVATIONS[activation]
    return _packed_reference(x, activation, gate_first, interleaved, limit, a if alpha is None else alpha, b, up_offset)


def gated_pair_reference(gate, up, activation, a, b):
    """What `swiglu`, `geglu` and `reglu` compute, in plain PyTorch; activation, a and b as in `ACTIVATIONS`."""
    return _product(gate, up, activation, a, b).to(torch.promote_types(gate.dtype, up.dtype))


def _product(gate, up, activation, a, b, limit=None, up_offset=0.0):
    compute = compute_dtype(gate, up)
    gate, up = gate.to(compute), up.to(compute)
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return FORMULAS[activation](gate, a, b) * (up + up_offset)


def _split(x, gate_first, interleaved):
    """(gate, up), views of x."""
    n = x.shape[-1] // 2
    first, second = (x[..., ::2], x[..., 1::2]) if interleaved else (x[..., :n], x[..., n:])
    return (first, second) if gate_first else (second, first)


def _packed_reference(x, activation, gate_first, interleaved, limit, a, b, up_offset):
    return _product(*_split(x, gate_first, interleaved), activation, a, b, limit, up_offset).to(x.dtype)


def _gradients(dy, gate, up, activation, a, b, limit=None, up_offset=0.0):
    """(dgate, dup) in closed form, in the compute dtype."""
    compute = compute_dtype(gate, up)
    dy, gate, up = dy.to(compute), gate.to(compute), up.to(compute)
    if limit is None:
        return gradient(activation, dy * (up + up_offset), gate, a, b), dy * FORMULAS[activation](gate, a, b)
    g, u = gate.clamp(max=limit), up.clamp(-limit, limit)
    dgate = torch.where(gate <= limit, gradient(activation, dy * (u + up_offset), g, a, b), 0.0)
    return dgate, torch.where(up.abs() <= limit, dy * FORMULAS[activation](g, a, b), 0.0)


def _packed_bwd_reference(dy, x, activation, gate_first, interleaved, limit, a, b, up_offset):
    gate, up = _split(x, gate_first, interleaved)
    dgate, dup = _gradients(dy, gate, up, activation, a, b, limit, up_offset)
    halves = (dgate, dup) if gate_first else (dup, dgate)
    return (torch.stack(halves, -1).flatten(-2) if interleaved else torch.cat(halves, -1)).to(x.dtype)


def _pair_bwd_reference(dy, gate, up, activation, a, b):
    dgate, dup = _gradients(dy, gate, up, activation, a, b)
    return dgate.to(gate.dtype), dup.to(up.dtype)


@triton.jit
def _load(
    gate_ptr, up_ptr, gate_strides, up_strides, a, b, offs_m, start, M, N, tiles_n, limit, up_offset,
    PAIRS: tl.constexpr, COMPUTE: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """gate clamped, whether its gradient passes the clamp, and the same of up with the offset added."""
    if PAIRS == "up first":
        up, gate = load_halves(
            up_ptr, gate_ptr, up_strides, gate_strides, a, b, offs_m, start, M, N, tiles_n, True, BLOCK_N
        )
    else:
        gate, up = load_halves(
            gate_ptr, up_ptr, gate_strides, up_strides, a, b, offs_m, start, M, N, tiles_n, PAIRS is not None, BLOCK_N
        )
    gate = gate.to(COMPUTE)
    up = up.to(COMPUTE)
    gate_open = gate == gate
    up_open = gate_open
    if limit is not None:
        limit = tl.full((1, 1), limit, COMPUTE)  # a float64 constant would be compared as float32
        gate_open = gate <= limit
        up_open = tl.abs(up) <= limit
        gate = tl.where(gate > limit, limit, gate)  # NaN passes, as through torch.clamp
        up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
    return gate, gate_open, up + up_offset, up_open


@triton.jit(do_not_specialize=["M", "tiles_n"])
def _gated_fwd_kernel(
    y_ptr, gate_ptr, up_ptr, B, M, N, tiles_n, y_strides, gate_strides, up_strides, a, b, limit, up_offset,
    PAIRS: tl.constexpr, ACTIVATION: tl.constexpr, PRECISE: tl.constexpr, COMPUTE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """PAIRS: "gate first" or "up first" where gate and up alternate in memory; their strides are those of both."""
    outer_a, outer_b, offs_m, start = tile_start(B, M, tiles_n, BLOCK_M, BLOCK_N)
    gate, _, up, _ = _load(
        gate_ptr, up_ptr, gate_strides, up_strides, outer_a, outer_b, offs_m, start, M, N, tiles_n, limit, up_offset,
        PAIRS, COMPUTE, BLOCK_N,
    )  # fmt: skip
    y = round_to(activate(gate, a, b, ACTIVATION, PRECISE) * up, y_ptr.dtype.element_ty)
    offs_n = start + tl.arange(0, BLOCK_N)
    mask = inside(offs_m, M, offs_n, N, tiles_n)
    tl.store(at(y_ptr, y_strides, outer_a, outer_b, offs_m, offs_n), y, mask=mask)


@triton.jit(do_not_specialize=["M", "tiles_n"])
def _gated_bwd_kernel(
    dgate_ptr, dup_ptr, dy_ptr, gate_ptr, up_ptr, B, M, N, tiles_n,
    dgate_strides, dup_strides, dy_strides, gate_strides, up_strides, a, b, limit, up_offset,
    PAIRS: tl.constexpr, ACTIVATION: tl.constexpr, PRECISE: tl.constexpr, COMPUTE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    outer_a, outer_b, offs_m, start = tile_start(B, M, tiles_n, BLOCK_M, BLOCK_N)
    offs_n = start + tl.arange(0, BLOCK_N)
    mask = inside(offs_m, M, offs_n, N, tiles_n)
    dy = tl.load(at(dy_ptr, dy_strides, outer_a, outer_b, offs_m, offs_n), mask=mask, other=0.0).to(COMPUTE)
    gate, gate_open, up, up_open = _load(
        gate_ptr, up_ptr, gate_strides, up_strides, outer_a, outer_b, offs_m, start, M, N, tiles_n, limit, up_offset,
        PAIRS, COMPUTE, BLOCK_N,
    )  # fmt: skip
    dgate = activate_gradient(dy * up, gate, a, b, ACTIVATION, PRECISE)
    dup = dy * activate(gate, a, b, ACTIVATION, PRECISE)
    if limit is not None:
        dgate = tl.where(gate_open, dgate, 0.0)
        dup = tl.where(up_open, dup, 0.0)
    dgate = round_to(dgate, dgate_ptr.dtype.element_ty)
    dup = round_to(dup, dup_ptr.dtype.element_ty)
    if PAIRS == "up first":
        store_halves(
            dup, dgate, dup_ptr, dgate_ptr, dup_strides, dgate_strides, outer_a, outer_b, offs_m, start, M, N, tiles_n,
            True, BLOCK_N,
        )  # fmt: skip
    else:
        store_halves(
            dgate, dup, dgate_ptr, dup_ptr, dgate_strides, dup_strides, outer_a, outer_b, offs_m, start, M, N, tiles_n,
            PAIRS is not None, BLOCK_N,
        )  # fmt: skip


def _launch(kernel, layout, operands, activation, a, b, limit=None, up_offset=0.0, pairs=None):
    """Over operands whose last two are gate and up."""
    compute = compute_dtype(*operands[-2:])
    precise = compute == torch.float32 and any(t.dtype == torch.float32 for t in operands)
    launch_pointwise(
        kernel, layout, operands, scalar(a, compute), scalar(b, compute),
        limit if limit is None else scalar(limit, compute), scalar(up_offset, compute),
        PAIRS=pairs, ACTIVATION=activation, PRECISE=precise, COMPUTE=triton_dtype(compute),
    )  # fmt: skip


def _launch_packed(kernel, outputs, inputs, gate_first, interleaved, *params):
    """Outputs are a contiguous tensor, or its halves: their rows are even, so that only inputs may need a copy."""
    layout, found = rows(*inputs)
    A, B, M, N, strides = layout
    width = outputs[0].stride(-2) if outputs[0].dim() > 1 else 0
    step = outputs[0].stride(-1)
    strides = ((B * M * width, M * width, width, step),) * len(outputs) + strides
    pairs = None
    if interleaved and found[-1] is inputs[-1]:  # not where they were copied apart
        pairs = "gate first" if gate_first else "up first"
        halves = (len(outputs) > 1,) * len(outputs) + (False,) * (len(inputs) - 2) + (True,) * 2
        strides = tuple((*s[:3], s[3] // 2) if half else s for s, half in zip(strides, halves))
    _launch(kernel, layout._replace(strides=strides), (*outputs, *found), *params, pairs=pairs)


@torch.library.custom_op(add_op_namespace_prefix("gated_fwd"), mutates_args=())
def gated_fwd(
    x: Tensor, activation: str, gate_first: bool, interleaved: bool, limit: Optional[float], a: float, b: float,
    up_offset: float,
) -> Tensor:  # fmt: skip
    y = torch.empty((*x.shape[:-1], x.shape[-1] // 2), dtype=x.dtype, device=x.device)
    if y.numel():
        halves = _split(x, gate_first, interleaved)
        _launch_packed(_gated_fwd_kernel, (y,), halves, gate_first, interleaved, activation, a, b, limit, up_offset)
    return y


@gated_fwd.register_fake
def _(x, activation, gate_first, interleaved, limit, a, b, up_offset):
    return x.new_empty((*x.shape[:-1], x.shape[-1] // 2))


@torch.library.custom_op(add_op_namespace_prefix("gated_bwd"), mutates_args=())
def gated_bwd(
    dy: Tensor, x: Tensor, activation: str, gate_first: bool, interleaved: bool, limit: Optional[float], a: float,
    b: float, up_offset: float,
) -> Tensor:  # fmt: skip
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if dx.numel():
        dhalves, halves = _split(dx, gate_first, interleaved), _split(x, gate_first, interleaved)
        _launch_packed(
            _gated_bwd_kernel, dhalves, (dy, *halves), gate_first, interleaved, activation, a, b, limit, up_offset
        )
    return dx


@gated_bwd.register_fake
def _(dy, x, activation, gate_first, interleaved, limit, a, b, up_offset):
    return x.new_empty(x.shape)


_gated_bwd = differentiable(gated_bwd, _packed_bwd_reference, rowwise=lambda *_: [0, 1])


def _setup_context(ctx, inputs, output):
    x, *ctx.params = inputs
    ctx.save_for_backward(x)


def _backward(ctx, dy):
    (x,) = ctx.saved_tensors
    return _gated_bwd(dy, x, *ctx.params), None, None, None, None, None, None, None


_gated = differentiable(gated_fwd, _packed_reference, _setup_context, _backward, rowwise=lambda *_: [0])


@torch.library.custom_op(add_op_namespace_prefix("gated_pair_fwd"), mutates_args=())
def gated_pair_fwd(gate: Tensor, up: Tensor, activation: str, a: float, b: float) -> Tensor:
    y = torch.empty_like(gate, dtype=torch.promote_types(gate.dtype, up.dtype))
    if y.numel():
        layout, operands = elements(y, gate, up)
        _launch(_gated_fwd_kernel, layout, operands, activation, a, b)
    return y


@gated_pair_fwd.register_fake
def _(gate, up, activation, a, b):
    return torch.empty_like(gate, dtype=torch.promote_types(gate.dtype, up.dtype))


@torch.library.custom_op(add_op_namespace_prefix("gated_pair_bwd"), mutates_args=())
def gated_pair_bwd(
    dy: Tensor, gate: Tensor, up: Tensor, activation: str, a: float, b: float
) -> tuple[Tensor, Tensor]:  # fmt: skip
    dgate, dup = torch.empty_like(gate), torch.empty_like(gate, dtype=up.dtype)
    if dy.numel():
        layout, operands = elements(dgate, dup, dy, gate, up)
        _launch(_gated_bwd_kernel, layout, operands, activation, a, b)
    return dgate, dup


@gated_pair_bwd.register_fake
def _(dy, gate, up, activation, a, b):
    return torch.empty_like(gate), torch.empty_like(gate, dtype=up.dtype)


_gated_pair_bwd = differentiable(gated_pair_bwd, _pair_bwd_reference, like=1, rowwise=elementwise(0, 1, 2))


def _pair_setup_context(ctx, inputs, output):
    gate, up, *ctx.params = inputs
    ctx.save_for_backward(gate, up)


def _pair_backward(ctx, dy):
    gate, up = ctx.saved_tensors
    return *_gated_pair_bwd(dy, gate, up, *ctx.params), None, None, None


_gated_pair = differentiable(
    gated_pair_fwd,
    gated_pair_reference,
    _pair_setup_context,
    _pair_backward,
    like=0,
    rowwise=elementwise(0, 1),
)


@replayed
def gated(
    x: Tensor,
    activation: str,
    *,
    gate_first: bool = True,
    interleaved: bool = False,
    limit: Optional[float] = None,
    alpha: Optional[float] = None,
    up_offset: float = 0.0,
) -> Tensor:
    """Multiply one half of the last dimension by an activation of the other half.

    y = activation(gate) * (up + up_offset)

    gpt-oss is gated(x, "silu", interleaved=True, limit=7.0, alpha=1.702, up_offset=1.0):
    gate = min(gate, limit), up = min(max(up, -limit), limit), y = gate * sigmoid(alpha * gate) * (up + 1).
    torch.nn.functional.glu is gated(x, "sigmoid", gate_first=False).

    Args:
        x: (..., 2N), float64 | float32 | float16 | bfloat16, any strides; gate and up are read where they lie.
        activation: "silu", "gelu", "gelu_tanh", "quick_gelu", "relu", "sigmoid" or another function of
            activations.py, with its default parameters.
        gate_first: the gate is the first half, else the second.
        interleaved: the halves are x[..., ::2] and x[..., 1::2], else x[..., :N] and x[..., N:].
        limit: clamps the gate from above, and up from both sides. Gradients are 0 beyond it.
        alpha: the silu becomes gate * sigmoid(alpha * gate).
        up_offset: added to up after the clamp.
    Returns:
        (..., N), dtype of x, contiguous.
    Raises:
        TypeError: dtype not listed.   ValueError: odd last dimension; unknown activation; negative limit; alpha
            with another activation than silu.
    Numerics: rounded once (see the top of this file). Autograd: first and second derivative, vmap; the gradient is
        written packed in one pass; forward mode raises.
    Source: Shazeer 2020; the clamps: OpenAI, gpt-oss model card, 2025.
    """
    return _gated_checked("gated", x, activation, gate_first, interleaved, limit, alpha, up_offset)


def _gated_checked(op, x, activation, gate_first=True, interleaved=False, limit=None, alpha=None, up_offset=0.0):
    _checks.tensors(op, x)
    if not x.dim() or x.shape[-1] % 2:
        raise ValueError(f"{op}: x must have an even last dimension, got {tuple(x.shape)}")
    _checks.choice(op, "activation", activation, ACTIVATIONS)
    _checks.flags(op, gate_first=gate_first, interleaved=interleaved)
    _checks.number(op, "limit", limit, low=0, optional=True)
    _checks.number(op, "alpha", alpha, optional=True)
    _checks.number(op, "up_offset", up_offset)
    if alpha is not None and activation != "silu":
        raise ValueError(f"{op}: alpha must be None unless activation is 'silu', got {alpha} with {activation!r}")
    activation, a, b = ACTIVATIONS[activation]
    params = (
        activation,
        gate_first,
        interleaved,
        None if limit is None else float(limit),
        a if alpha is None else float(alpha),
        b,
        float(up_offset),
    )
    return _gated(x, *params) if use_kernel(x) else _packed_reference(x, *params).contiguous()


@replayed
def silu_and_mul(x: Tensor) -> Tensor:
    """silu(x[..., :N]) * x[..., N:] of x (..., 2N), as `gated`."""
    return _gated_checked("silu_and_mul", x, "silu")


@replayed
def mul_and_silu(x: Tensor) -> Tensor:
    """x[..., :N] * silu(x[..., N:]) of x (..., 2N), as `gated`."""
    return _gated_checked("mul_and_silu", x, "silu", gate_first=False)


@replayed
def gelu_and_mul(x: Tensor) -> Tensor:
    """gelu(x[..., :N]) * x[..., N:] of x (..., 2N), as `gated`."""
    return _gated_checked("gelu_and_mul", x, "gelu")


@replayed
def mul_and_gelu(x: Tensor) -> Tensor:
    """x[..., :N] * gelu(x[..., N:]) of x (..., 2N), as `gated`."""
    return _gated_checked("mul_and_gelu", x, "gelu", gate_first=False)


@replayed
def gelu_tanh_and_mul(x: Tensor) -> Tensor:
    """gelu(x[..., :N], approximate="tanh") * x[..., N:] of x (..., 2N), as `gated`."""
    return _gated_checked("gelu_tanh_and_mul", x, "gelu_tanh")


@replayed
def relu_and_mul(x: Tensor) -> Tensor:
    """relu(x[..., :N]) * x[..., N:] of x (..., 2N), as `gated`."""
    return _gated_checked("relu_and_mul", x, "relu")


@replayed
def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Multiply `up` by an activation of `gate`: silu(gate) * up.

    Args:
        gate, up: of one shape, float64 | float32 | float16 | bfloat16, any strides.
    Returns:
        That shape, the dtype that gate and up promote to; with gate's strides where it is dense.
    Raises:
        TypeError: dtype not listed.   ValueError: shapes or devices differ.
    Numerics, Autograd, Source: as `gated`.
    """
    return _pair("swiglu", gate, up, "silu")


@replayed
def geglu(gate: Tensor, up: Tensor, approximate: str = "none") -> Tensor:
    """gelu(gate, approximate) * up; the rest as `swiglu`."""
    _checks.choice("geglu", "approximate", approximate, ("none", "tanh"))
    return _pair("geglu", gate, up, "gelu" if approximate == "none" else "gelu_tanh")


@replayed
def reglu(gate: Tensor, up: Tensor) -> Tensor:
    """relu(gate) * up; the rest as `swiglu`."""
    return _pair("reglu", gate, up, "relu")


def _pair(op, gate, up, activation):
    if up is None:
        raise TypeError(f"{op}: up must be a tensor, got NoneType")
    _checks.tensors(op, gate, first="gate", up=up)
    _checks.shape(op, "up", up, gate.shape)
    params = ACTIVATIONS[activation]
    return _gated_pair(gate, up, *params) if use_kernel(gate) else gated_pair_reference(gate, up, *params)
