"""my_op: rows divided by their root mean square.

    y = x / sqrt(mean(x^2) + eps)

A row is read twice, the second time from the cache where it fits.
"""

import torch
from torch import Tensor

from . import _checks
from ._device import facts, launch
from ._dispatch import differentiable
from ._ops import add_op_namespace_prefix
from ._replay import replayed
from ._rows import at, compute_dtype, plan_forward, row_index, rows
from ._triton import round_to, scalar, tl, triton, triton_dtype

SECOND_ORDER = "reference"


def my_op_reference(x, eps=1e-6):
    """What `my_op` computes, in plain PyTorch."""
    h = x.to(compute_dtype(x))
    return (h * _rstd(x, eps)[..., None]).to(x.dtype)


def _rstd(x, eps):
    return torch.rsqrt(x.to(compute_dtype(x)).square().mean(-1) + eps)


def _fwd_reference(x, eps):
    return my_op_reference(x, eps), _rstd(x, eps)


def _bwd_reference(dy, x, rstd, eps):
    rstd = _rstd(x, eps)[..., None]  # not the argument: it has a derivative
    dy, xhat = dy.to(rstd.dtype), x.to(rstd.dtype) * rstd
    return ((dy - xhat * (dy * xhat).mean(-1, keepdim=True)) * rstd).to(x.dtype)


@triton.jit(do_not_specialize=["B", "M"])
def _my_op_fwd_kernel(
    x_ptr, y_ptr, rstd_ptr, B, M, N, x_strides, eps,
    COMPUTE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    a, b, offs_m = row_index(tl.program_id(0), B, M, BLOCK_M)
    mask_m = offs_m < M
    out_m = (a * B + b) * M + offs_m
    squares = tl.zeros((BLOCK_M, BLOCK_N), COMPUTE)
    for start in range(0, N, BLOCK_N):
        cols = start + tl.arange(0, BLOCK_N)
        mask = mask_m[:, None] & (cols < N)[None, :]
        x = tl.load(at(x_ptr, x_strides, a, b, offs_m, cols), mask=mask, other=0.0).to(COMPUTE)
        squares += x * x
    rstd = tl.rsqrt(tl.sum(squares, axis=1) / N + eps)
    tl.store(rstd_ptr + out_m, rstd, mask=mask_m)
    for start in range(0, N, BLOCK_N):
        cols = start + tl.arange(0, BLOCK_N)
        mask = mask_m[:, None] & (cols < N)[None, :]
        x = tl.load(at(x_ptr, x_strides, a, b, offs_m, cols), mask=mask, other=0.0).to(COMPUTE)
        y = round_to(x * rstd[:, None], y_ptr.dtype.element_ty)
        tl.store(y_ptr + out_m[:, None] * N + cols[None, :], y, mask=mask)


@triton.jit(do_not_specialize=["B", "M"])
def _my_op_bwd_kernel(
    dy_ptr, x_ptr, rstd_ptr, dx_ptr, B, M, N, dy_strides, x_strides,
    COMPUTE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    a, b, offs_m = row_index(tl.program_id(0), B, M, BLOCK_M)
    mask_m = offs_m < M
    out_m = (a * B + b) * M + offs_m
    rstd = tl.load(rstd_ptr + out_m, mask=mask_m, other=0.0)[:, None]
    products = tl.zeros((BLOCK_M, BLOCK_N), COMPUTE)
    for start in range(0, N, BLOCK_N):
        cols = start + tl.arange(0, BLOCK_N)
        mask = mask_m[:, None] & (cols < N)[None, :]
        dy = tl.load(at(dy_ptr, dy_strides, a, b, offs_m, cols), mask=mask, other=0.0).to(COMPUTE)
        x = tl.load(at(x_ptr, x_strides, a, b, offs_m, cols), mask=mask, other=0.0).to(COMPUTE)
        products += dy * (x * rstd)
    projection = tl.sum(products, axis=1)[:, None] / N
    for start in range(0, N, BLOCK_N):
        cols = start + tl.arange(0, BLOCK_N)
        mask = mask_m[:, None] & (cols < N)[None, :]
        dy = tl.load(at(dy_ptr, dy_strides, a, b, offs_m, cols), mask=mask, other=0.0).to(COMPUTE)
        x = tl.load(at(x_ptr, x_strides, a, b, offs_m, cols), mask=mask, other=0.0).to(COMPUTE)
        dx = round_to((dy - x * rstd * projection) * rstd, dx_ptr.dtype.element_ty)
        tl.store(dx_ptr + out_m[:, None] * N + cols[None, :], dx, mask=mask)


def _launch(kernel, operands, others, *scalars):
    """`operands` lie in any way; `others`, statistics and results, are contiguous."""
    layout, operands = rows(*operands)
    device = operands[0].device
    plan = plan_forward(layout.N, facts(device).max_warps)
    launch(
        kernel,
        (layout.blocks(plan.BLOCK_M),),
        device,
        (*operands, *others, layout.B, layout.M, layout.N, *layout.strides, *scalars),
        COMPUTE=triton_dtype(compute_dtype(*operands)), BLOCK_M=plan.BLOCK_M, BLOCK_N=plan.BLOCK_N,
        num_warps=plan.num_warps,
    )  # fmt: skip


@torch.library.custom_op(add_op_namespace_prefix("my_op_fwd"), mutates_args=())
def my_op_fwd(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rstd = torch.empty(x.shape[:-1], dtype=compute_dtype(x), device=x.device)
    if x.numel():
        _launch(_my_op_fwd_kernel, (x,), (y, rstd), scalar(eps, rstd.dtype))
    else:
        rstd.fill_(torch.nan)
    return y, rstd


@my_op_fwd.register_fake
def _(x, eps):
    return x.new_empty(x.shape), x.new_empty(x.shape[:-1], dtype=compute_dtype(x))


@torch.library.custom_op(add_op_namespace_prefix("my_op_bwd"), mutates_args=())
def my_op_bwd(dy: Tensor, x: Tensor, rstd: Tensor, eps: float) -> Tensor:
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel():
        _launch(_my_op_bwd_kernel, (dy, x), (rstd.contiguous(), dx))
    return dx


@my_op_bwd.register_fake
def _(dy, x, rstd, eps):
    return x.new_empty(x.shape)


_gradient = differentiable(my_op_bwd, _bwd_reference, rowwise=lambda *_: [0, 1, 2])


def _setup_context(ctx, inputs, output):
    x, ctx.eps = inputs
    ctx.save_for_backward(x, output[1])
    ctx.mark_non_differentiable(output[1])


def _backward(ctx, dy, _):
    return _gradient(dy, *ctx.saved_tensors, ctx.eps), None


_apply = differentiable(my_op_fwd, _fwd_reference, _setup_context, _backward, rowwise=lambda *_: [0])


@replayed
def my_op(x: Tensor, eps: float = 1e-6) -> Tensor:
    """Divide rows by their root mean square.

    y = x / sqrt(mean(x^2) + eps)

    Args:
        x: (..., N), float64 | float32 | float16 | bfloat16, any strides.
        eps: added inside the square root.
    Returns:
        As x, contiguous.
    Raises:
        TypeError: dtype not listed.   ValueError: x has no dimensions; eps < 0.
    Numerics: in float32, or float64, rounded once. Autograd: first and second derivative, vmap; forward mode raises.
    Source: an example; name the paper, or the function of torch.
    """
    _checks.tensors("my_op", x)
    _checks.number("my_op", "eps", eps, low=0)
    if x.dim() == 0:
        raise ValueError("my_op: x must have a last dimension, got shape ()")
    return _apply(x, float(eps))[0]
