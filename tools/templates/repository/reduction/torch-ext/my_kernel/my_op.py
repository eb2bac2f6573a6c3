"""my_op: the mean of squares over the last dimension.

A program walks one row, of any width, in blocks: each lane keeps its own sum, and the lanes are added at the end.
"""

import torch
from torch import Tensor

from ._ops import add_op_namespace_prefix
from ._triton import check, launch, round_to, runs_kernels, tl, triton


def my_op_reference(x):
    """What `my_op` computes, in plain PyTorch."""
    return x.square().mean(-1)


def _backward_reference(dy, x):
    return 2 * x * (dy / x.shape[-1])[..., None]


@triton.jit
def _my_op_fwd_kernel(x_ptr, y_ptr, N, stride_m, stride_n, BLOCK_N: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    offs_n = tl.arange(0, BLOCK_N)
    squares = tl.zeros((BLOCK_N,), dtype=tl.float32)
    for start in range(0, N, BLOCK_N):
        cols = start + offs_n
        x = tl.load(x_ptr + row * stride_m + cols * stride_n, mask=cols < N, other=0.0).to(tl.float32)
        squares += x * x
    tl.store(y_ptr + row, round_to(tl.sum(squares, axis=0) / N, y_ptr.dtype.element_ty))


@triton.jit
def _my_op_bwd_kernel(x_ptr, dy_ptr, dx_ptr, N, stride_m, stride_n, BLOCK_N: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    scale = 2.0 * tl.load(dy_ptr + row).to(tl.float32) / N
    for start in range(0, N, BLOCK_N):
        cols = start + tl.arange(0, BLOCK_N)
        mask = cols < N
        x = tl.load(x_ptr + row * stride_m + cols * stride_n, mask=mask, other=0.0).to(tl.float32)
        tl.store(dx_ptr + row * N + cols, round_to(x * scale, dx_ptr.dtype.element_ty), mask=mask)


def _launch(kernel, x, *rest):
    """x may lie in any way; the rest is contiguous."""
    N = x.shape[-1]
    rows = x.reshape(-1, N)
    BLOCK_N = min(1 << (N - 1).bit_length(), 4096)  # untuned
    num_warps = 4 if BLOCK_N < 4096 else 8  # untuned
    launch(
        kernel, (rows.shape[0],), x.device, rows, *rest, N, *rows.stride(), BLOCK_N=BLOCK_N, num_warps=num_warps
    )  # fmt: skip


@torch.library.custom_op(add_op_namespace_prefix("my_op_fwd"), mutates_args=())
def my_op_fwd(x: Tensor) -> Tensor:
    if not runs_kernels(x) or x.numel() == 0:
        return my_op_reference(x.float()).to(x.dtype).contiguous()
    y = torch.empty(x.shape[:-1], dtype=x.dtype, device=x.device)
    _launch(_my_op_fwd_kernel, x, y)
    return y


@my_op_fwd.register_fake
def _(x):
    return x.new_empty(x.shape[:-1])


@torch.library.custom_op(add_op_namespace_prefix("my_op_bwd"), mutates_args=())
def my_op_bwd(dy: Tensor, x: Tensor) -> Tensor:
    if not runs_kernels(x):
        return _backward_reference(dy.float(), x.float()).to(x.dtype).contiguous()
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel():
        _launch(_my_op_bwd_kernel, x, dy.contiguous(), dx)
    return dx


@my_op_bwd.register_fake
def _(dy, x):
    return x.new_empty(x.shape)


def _setup_context(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def _backward(ctx, dy):
    return my_op_bwd(dy, *ctx.saved_tensors)


my_op_fwd.register_autograd(_backward, setup_context=_setup_context)


def my_op(x: Tensor) -> Tensor:
    """The mean of squares over the last dimension.

    Args:
        x: (..., N), float32 | float16 | bfloat16, any strides.
    Returns:
        (...), contiguous, of x's dtype. NaN where N is 0.
    Numerics: sums in float32, rounded once; the order of a sum depends on N alone.
    """
    check("my_op", x=x)
    if x.dim() == 0:
        raise ValueError("my_op: x must have a last dimension, got shape ()")
    return my_op_fwd(x)
