"""my_op: the mean of squares over the last dimension.

Rows of any width, in blocks: each lane keeps its own sum, and the lanes of a row are added at the end.
"""

import torch
from torch import Tensor

from . import _checks
from ._device import facts, launch
from ._dispatch import differentiable
from ._ops import add_op_namespace_prefix
from ._replay import replayed
from ._rows import at, compute_dtype, plan_forward, row_index, rows
from ._triton import round_to, tl, triton, triton_dtype

SECOND_ORDER = "reference"


def my_op_reference(x):
    """What `my_op` computes, in plain PyTorch."""
    return x.to(compute_dtype(x)).square().mean(-1).to(x.dtype)


def _bwd_reference(dy, x):
    compute = compute_dtype(x)
    return (x.to(compute) * (2 * dy.to(compute) / x.shape[-1])[..., None]).to(x.dtype)


@triton.jit(do_not_specialize=["B", "M"])
def _my_op_fwd_kernel(
    x_ptr, y_ptr, B, M, N, x_strides, COMPUTE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    a, b, offs_m = row_index(tl.program_id(0), B, M, BLOCK_M)
    mask_m = offs_m < M
    squares = tl.zeros((BLOCK_M, BLOCK_N), COMPUTE)
    for start in range(0, N, BLOCK_N):
        cols = start + tl.arange(0, BLOCK_N)
        mask = mask_m[:, None] & (cols < N)[None, :]
        x = tl.load(at(x_ptr, x_strides, a, b, offs_m, cols), mask=mask, other=0.0).to(COMPUTE)
        squares += x * x
    y = round_to(tl.sum(squares, axis=1) / N, y_ptr.dtype.element_ty)
    tl.store(y_ptr + (a * B + b) * M + offs_m, y, mask=mask_m)


@triton.jit(do_not_specialize=["B", "M"])
def _my_op_bwd_kernel(
    x_ptr, dy_ptr, dx_ptr, B, M, N, x_strides, COMPUTE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    a, b, offs_m = row_index(tl.program_id(0), B, M, BLOCK_M)
    mask_m = offs_m < M
    out_m = (a * B + b) * M + offs_m
    scale = tl.load(dy_ptr + out_m, mask=mask_m, other=0.0).to(COMPUTE) * 2 / N
    for start in range(0, N, BLOCK_N):
        cols = start + tl.arange(0, BLOCK_N)
        mask = mask_m[:, None] & (cols < N)[None, :]
        x = tl.load(at(x_ptr, x_strides, a, b, offs_m, cols), mask=mask, other=0.0).to(COMPUTE)
        dx = round_to(x * scale[:, None], dx_ptr.dtype.element_ty)
        tl.store(dx_ptr + out_m[:, None] * N + cols[None, :], dx, mask=mask)


def _launch(kernel, x, *others):
    """x lies in any way; the others are contiguous."""
    layout, (x,) = rows(x)
    plan = plan_forward(layout.N, facts(x.device).max_warps)
    launch(
        kernel,
        (layout.blocks(plan.BLOCK_M),),
        x.device,
        (x, *others, layout.B, layout.M, layout.N, *layout.strides),
        COMPUTE=triton_dtype(compute_dtype(x)), BLOCK_M=plan.BLOCK_M, BLOCK_N=plan.BLOCK_N, num_warps=plan.num_warps,
    )  # fmt: skip


@torch.library.custom_op(add_op_namespace_prefix("my_op_fwd"), mutates_args=())
def my_op_fwd(x: Tensor) -> Tensor:
    y = torch.empty(x.shape[:-1], dtype=x.dtype, device=x.device)
    if x.numel():
        _launch(_my_op_fwd_kernel, x, y)
    else:
        y.fill_(torch.nan)  # of rows of nothing
    return y


@my_op_fwd.register_fake
def _(x):
    return x.new_empty(x.shape[:-1])


@torch.library.custom_op(add_op_namespace_prefix("my_op_bwd"), mutates_args=())
def my_op_bwd(dy: Tensor, x: Tensor) -> Tensor:
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel():
        _launch(_my_op_bwd_kernel, x, dy.contiguous(), dx)
    return dx


@my_op_bwd.register_fake
def _(dy, x):
    return x.new_empty(x.shape)


_gradient = differentiable(my_op_bwd, _bwd_reference, rowwise=lambda *_: [0, 1])


def _setup_context(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def _backward(ctx, dy):
    return _gradient(dy, *ctx.saved_tensors)


_apply = differentiable(
    my_op_fwd, my_op_reference, _setup_context, _backward, rowwise=lambda *_: [0]
)  # fmt: skip


@replayed
def my_op(x: Tensor) -> Tensor:
    """The mean of squares over the last dimension.

    Args:
        x: (..., N), float64 | float32 | float16 | bfloat16, any strides.
    Returns:
        (...), contiguous, of x's dtype. NaN where N is 0.
    Raises:
        TypeError: dtype not listed.   ValueError: x has no dimensions.
    Numerics: in float32, or float64, rounded once. Autograd: first and second derivative, vmap; forward mode raises.
    Source: an example; name the paper, or the function of torch.
    """
    _checks.tensors("my_op", x)
    if x.dim() == 0:
        raise ValueError("my_op: x must have a last dimension, got shape ()")
    return _apply(x)
