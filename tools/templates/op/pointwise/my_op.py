"""my_op: x * sigmoid(x), elementwise.

Computed in the memory order of x: one pass, whatever the strides.
"""

import torch
from torch import Tensor

from . import _checks
from ._dispatch import differentiable
from ._ops import add_op_namespace_prefix
from ._pointwise import elements, launch_pointwise, tile_index
from ._replay import replayed
from ._rows import at, compute_dtype
from ._triton import round_to, tl, triton, triton_dtype

SECOND_ORDER = "reference"


def my_op_reference(x):
    """What `my_op` computes, in plain PyTorch."""
    h = x.to(compute_dtype(x))
    return (h * torch.sigmoid(h)).to(x.dtype)


def _bwd_reference(dy, x):
    h = x.to(compute_dtype(x))
    return (dy.to(h.dtype) * torch.sigmoid(h) * (1 + h * torch.sigmoid(-h))).to(x.dtype)


@triton.jit
def _sigmoid(x):
    e = tl.exp(-tl.abs(x))  # never above 1
    return tl.where(x < 0, e, 1.0) / (1.0 + e)


@triton.jit(do_not_specialize=["B", "M", "tiles_n"])
def _my_op_fwd_kernel(
    y_ptr, x_ptr, B, M, N, tiles_n, y_strides, x_strides,
    COMPUTE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    a, b, offs_m, offs_n, mask = tile_index(B, M, N, tiles_n, BLOCK_M, BLOCK_N)
    x = tl.load(at(x_ptr, x_strides, a, b, offs_m, offs_n), mask=mask, other=0.0).to(COMPUTE)
    y = round_to(x * _sigmoid(x), y_ptr.dtype.element_ty)
    tl.store(at(y_ptr, y_strides, a, b, offs_m, offs_n), y, mask=mask)


@triton.jit(do_not_specialize=["B", "M", "tiles_n"])
def _my_op_bwd_kernel(
    dx_ptr, dy_ptr, x_ptr, B, M, N, tiles_n, dx_strides, dy_strides, x_strides,
    COMPUTE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    a, b, offs_m, offs_n, mask = tile_index(B, M, N, tiles_n, BLOCK_M, BLOCK_N)
    dy = tl.load(at(dy_ptr, dy_strides, a, b, offs_m, offs_n), mask=mask, other=0.0).to(COMPUTE)
    x = tl.load(at(x_ptr, x_strides, a, b, offs_m, offs_n), mask=mask, other=0.0).to(COMPUTE)
    dx = round_to(dy * _sigmoid(x) * (1.0 + x * _sigmoid(-x)), dx_ptr.dtype.element_ty)
    tl.store(at(dx_ptr, dx_strides, a, b, offs_m, offs_n), dx, mask=mask)


def _launch(kernel, *operands):
    result = torch.empty_like(operands[-1])
    if result.numel():
        layout, operands = elements(result, *operands)
        launch_pointwise(kernel, layout, operands, COMPUTE=triton_dtype(compute_dtype(result)))
    return result


@torch.library.custom_op(add_op_namespace_prefix("my_op_fwd"), mutates_args=())
def my_op_fwd(x: Tensor) -> Tensor:
    return _launch(_my_op_fwd_kernel, x)


@my_op_fwd.register_fake
def _(x):
    return torch.empty_like(x)


@torch.library.custom_op(add_op_namespace_prefix("my_op_bwd"), mutates_args=())
def my_op_bwd(dy: Tensor, x: Tensor) -> Tensor:
    return _launch(_my_op_bwd_kernel, dy, x)


@my_op_bwd.register_fake
def _(dy, x):
    return torch.empty_like(x)


_gradient = differentiable(my_op_bwd, _bwd_reference, like=1, rowwise=lambda *_: [0, 1])


def _setup_context(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def _backward(ctx, dy):
    return _gradient(dy, *ctx.saved_tensors)


_apply = differentiable(
    my_op_fwd, my_op_reference, _setup_context, _backward,
    like=0, rowwise=lambda *_: [0],
)  # fmt: skip


@replayed
def my_op(x: Tensor) -> Tensor:
    """x * sigmoid(x).

    Args:
        x: any shape, float64 | float32 | float16 | bfloat16, any strides.
    Returns:
        As x, and laid out as x where it is dense.
    Raises:
        TypeError: dtype not listed.
    Numerics: in float32, or float64, rounded once. Autograd: first and second derivative, vmap; forward mode raises.
    Source: an example; name the paper, or the function of torch.
    """
    _checks.tensors("my_op", x)
    return _apply(x)
