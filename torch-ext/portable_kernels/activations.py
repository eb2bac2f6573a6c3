"""Activation functions of one argument.

relu, relu_squared, leaky_relu, silu, gelu, quick_gelu, sigmoid, tanh, softplus, mish and hardswish, with the names,
parameters and gradients at kinks of torch.nn.functional. All share one forward and one backward kernel. For each:

    x: any shape, float64 | float32 | float16 | bfloat16, any strides; the result has its shape, dtype and, where x is
        dense, its strides.
    Raises: TypeError where x is no such tensor or a parameter is no number.
    Numerics: computed in float32, or float64, and rounded once; NaN and inf as torch's, or better: the gradient of
        gelu_tanh at 1e20 is 1, where torch's is NaN.
    Autograd: first and second derivative, vmap; forward mode raises.
"""

import torch
from torch import Tensor

from . import _checks
from ._activation_math import ACTIVATIONS, FORMULAS, activate, activate_gradient, gradient
from ._dispatch import differentiable, elementwise, use_kernel
from ._ops import add_op_namespace_prefix
from ._pointwise import elements, launch_pointwise, tile_index
from ._replay import replayed
from ._rows import at, compute_dtype
from ._triton import round_to, scalar, tl, triton, triton_dtype

SECOND_ORDER = "reference"


def activation_reference(x, activation, a, b):
    """What every function of this file computes, in plain PyTorch; activation, a and b as in `ACTIVATIONS`."""
    return FORMULAS[activation](x.to(compute_dtype(x)), a, b).to(x.dtype)


def _bwd_reference(dy, x, activation, a, b):
    compute = compute_dtype(x)
    return gradient(activation, dy.to(compute), x.to(compute), a, b).to(x.dtype)


@triton.jit(do_not_specialize=["M", "tiles_n"])
def _activation_fwd_kernel(
    y_ptr, x_ptr, B, M, N, tiles_n, y_strides, x_strides, a, b,
    ACTIVATION: tl.constexpr, PRECISE: tl.constexpr, COMPUTE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    outer_a, outer_b, offs_m, offs_n, mask = tile_index(B, M, N, tiles_n, BLOCK_M, BLOCK_N)
    x = tl.load(at(x_ptr, x_strides, outer_a, outer_b, offs_m, offs_n), mask=mask, other=0.0).to(COMPUTE)
    y = round_to(activate(x, a, b, ACTIVATION, PRECISE), y_ptr.dtype.element_ty)
    tl.store(at(y_ptr, y_strides, outer_a, outer_b, offs_m, offs_n), y, mask=mask)


@triton.jit(do_not_specialize=["M", "tiles_n"])
def _activation_bwd_kernel(
    dx_ptr, dy_ptr, x_ptr, B, M, N, tiles_n, dx_strides, dy_strides, x_strides, a, b,
    ACTIVATION: tl.constexpr, PRECISE: tl.constexpr, COMPUTE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    outer_a, outer_b, offs_m, offs_n, mask = tile_index(B, M, N, tiles_n, BLOCK_M, BLOCK_N)
    dy = tl.load(at(dy_ptr, dy_strides, outer_a, outer_b, offs_m, offs_n), mask=mask, other=0.0).to(COMPUTE)
    x = tl.load(at(x_ptr, x_strides, outer_a, outer_b, offs_m, offs_n), mask=mask, other=0.0).to(COMPUTE)
    dx = round_to(activate_gradient(dy, x, a, b, ACTIVATION, PRECISE), dx_ptr.dtype.element_ty)
    tl.store(at(dx_ptr, dx_strides, outer_a, outer_b, offs_m, offs_n), dx, mask=mask)


def _launch(kernel, operands, activation, a, b):
    result = torch.empty_like(operands[-1])
    if result.numel():
        compute = compute_dtype(result)
        layout, operands = elements(result, *operands)
        launch_pointwise(
            kernel, layout, operands, scalar(a, compute), scalar(b, compute),
            ACTIVATION=activation, PRECISE=result.dtype == torch.float32, COMPUTE=triton_dtype(compute),
        )  # fmt: skip
    return result


@torch.library.custom_op(add_op_namespace_prefix("activation_fwd"), mutates_args=())
def activation_fwd(x: Tensor, activation: str, a: float, b: float) -> Tensor:
    return _launch(_activation_fwd_kernel, (x,), activation, a, b)


@activation_fwd.register_fake
def _(x, activation, a, b):
    return torch.empty_like(x)


@torch.library.custom_op(add_op_namespace_prefix("activation_bwd"), mutates_args=())
def activation_bwd(dy: Tensor, x: Tensor, activation: str, a: float, b: float) -> Tensor:
    return _launch(_activation_bwd_kernel, (dy, x), activation, a, b)


@activation_bwd.register_fake
def _(dy, x, activation, a, b):
    return torch.empty_like(x)


_activation_bwd = differentiable(activation_bwd, _bwd_reference, like=1, rowwise=elementwise(0, 1))


def _setup_context(ctx, inputs, output):
    x, *ctx.params = inputs
    ctx.save_for_backward(x)


def _backward(ctx, dy):
    (x,) = ctx.saved_tensors
    return _activation_bwd(dy, x, *ctx.params), None, None, None


_activation = differentiable(
    activation_fwd, activation_reference, _setup_context, _backward, like=0, rowwise=elementwise(0)
)


def _call(op, x, activation, a, b):
    _checks.tensors(op, x)
    if use_kernel(x):
        return _activation(x, activation, float(a), float(b))
    if activation == "relu_squared" or (activation == "silu" and a != 1.0):  # torch has no such function
        return activation_reference(x, activation, a, b)
    return FORMULAS[activation](x, a, b)


@replayed
def relu(x: Tensor) -> Tensor:
    """max(x, 0). The gradient at 0 is 0."""
    return _call("relu", x, *ACTIVATIONS["relu"])


@replayed
def relu_squared(x: Tensor) -> Tensor:
    """max(x, 0)^2 (So et al. 2021)."""
    return _call("relu_squared", x, *ACTIVATIONS["relu_squared"])


@replayed
def leaky_relu(x: Tensor, negative_slope: float = 0.01) -> Tensor:
    """x where x > 0, else negative_slope * x."""
    _checks.number("leaky_relu", "negative_slope", negative_slope)
    return _call("leaky_relu", x, "leaky_relu", negative_slope, 0.0)


@replayed
def silu(x: Tensor) -> Tensor:
    """x * sigmoid(x), also known as swish."""
    return _call("silu", x, *ACTIVATIONS["silu"])


@replayed
def gelu(x: Tensor, approximate: str = "none") -> Tensor:
    """x * Phi(x), Phi the normal distribution function (Hendrycks and Gimpel 2016).

    Args:
        approximate: "none": Phi(x) = (1 + erf(x / sqrt(2))) / 2.
            "tanh": Phi(x) is taken as (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x^3))) / 2.
    """
    _checks.choice("gelu", "approximate", approximate, ("none", "tanh"))
    return _call("gelu", x, *ACTIVATIONS["gelu" if approximate == "none" else "gelu_tanh"])


@replayed
def quick_gelu(x: Tensor) -> Tensor:
    """x * sigmoid(1.702 * x), the gelu of CLIP."""
    return _call("quick_gelu", x, *ACTIVATIONS["quick_gelu"])


@replayed
def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + exp(-x))."""
    return _call("sigmoid", x, *ACTIVATIONS["sigmoid"])


@replayed
def tanh(x: Tensor) -> Tensor:
    """(exp(x) - exp(-x)) / (exp(x) + exp(-x)), to full relative accuracy near 0."""
    return _call("tanh", x, *ACTIVATIONS["tanh"])


@replayed
def softplus(x: Tensor, beta: float = 1.0, threshold: float = 20.0) -> Tensor:
    """log(1 + exp(beta * x)) / beta, and x where beta * x > threshold."""
    _checks.number("softplus", "beta", beta)
    _checks.number("softplus", "threshold", threshold)
    return _call("softplus", x, "softplus", beta, threshold)


@replayed
def mish(x: Tensor) -> Tensor:
    """x * tanh(softplus(x)) (Misra 2019)."""
    return _call("mish", x, *ACTIVATIONS["mish"])


@replayed
def hardswish(x: Tensor) -> Tensor:
    """x * min(max(x + 3, 0), 6) / 6 (Howard et al. 2019). The gradient is 0 at -3 and 1 at 3."""
    return _call("hardswish", x, *ACTIVATIONS["hardswish"])
