"""my_op: x * sigmoid(x), elementwise.

A program computes a block of elements, which lie in a row: a tensor that is not contiguous is copied first.
"""

import torch
from torch import Tensor

from ._ops import add_op_namespace_prefix
from ._triton import check, launch, round_to, runs_kernels, tl, triton

BLOCK = 1024  # untuned


def my_op_reference(x):
    """What `my_op` computes, in plain PyTorch."""
    return x * torch.sigmoid(x)


def _backward_reference(dy, x):
    s = torch.sigmoid(x)
    return dy * s * (1 + x * (1 - s))


@triton.jit
def _sigmoid(x):
    e = tl.exp(-tl.abs(x))  # never above 1
    return tl.where(x < 0, e, 1.0) / (1.0 + e)


@triton.jit
def _my_op_fwd_kernel(x_ptr, y_ptr, n_elements, BLOCK: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n_elements
    x = tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    tl.store(y_ptr + offsets, round_to(x * _sigmoid(x), y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _my_op_bwd_kernel(dy_ptr, x_ptr, dx_ptr, n_elements, BLOCK: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n_elements
    dy = tl.load(dy_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    dx = dy * _sigmoid(x) * (1.0 + x * _sigmoid(-x))
    tl.store(dx_ptr + offsets, round_to(dx, dx_ptr.dtype.element_ty), mask=mask)


def _launch(kernel, *operands):
    """Launch over operands of one shape; the result."""
    operands = [t.contiguous() for t in operands]
    result = torch.empty_like(operands[-1])
    n = result.numel()
    if n:
        launch(kernel, (triton.cdiv(n, BLOCK),), result.device, *operands, result, n, BLOCK=BLOCK)
    return result


@torch.library.custom_op(add_op_namespace_prefix("my_op_fwd"), mutates_args=())
def my_op_fwd(x: Tensor) -> Tensor:
    if not runs_kernels(x):
        return my_op_reference(x.float()).to(x.dtype).contiguous()
    return _launch(_my_op_fwd_kernel, x)


@my_op_fwd.register_fake
def _(x):
    return x.new_empty(x.shape)


@torch.library.custom_op(add_op_namespace_prefix("my_op_bwd"), mutates_args=())
def my_op_bwd(dy: Tensor, x: Tensor) -> Tensor:
    if not runs_kernels(x):
        return _backward_reference(dy.float(), x.float()).to(x.dtype).contiguous()
    return _launch(_my_op_bwd_kernel, dy, x)


@my_op_bwd.register_fake
def _(dy, x):
    return x.new_empty(x.shape)


def _setup_context(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def _backward(ctx, dy):
    return my_op_bwd(dy, *ctx.saved_tensors)


my_op_fwd.register_autograd(_backward, setup_context=_setup_context)


def my_op(x: Tensor) -> Tensor:
    """x * sigmoid(x).

    Args:
        x: any shape, float32 | float16 | bfloat16, any strides.
    Returns:
        As x, contiguous.
    Numerics: in float32, rounded once.
    """
    check("my_op", x=x)
    return my_op_fwd(x)
