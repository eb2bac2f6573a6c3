"""my_op: the product of two matrices, by tiles.

Both operands are read where they lie: the gradients are products of transposed ones. float64 is PyTorch's.
"""

import torch
from torch import Tensor

from . import _checks
from ._device import launch
from ._dispatch import differentiable
from ._ops import add_op_namespace_prefix
from ._replay import replayed
from ._tiles import dot
from ._triton import cdiv, round_to, tl, triton

SECOND_ORDER = "reference"

_PLAN = {"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 32, "GROUP_M": 8, "num_warps": 4, "num_stages": 3}  # untuned


def my_op_reference(a, b):
    """What `my_op` computes, in plain PyTorch."""
    return a @ b


@triton.jit
def _my_op_fwd_kernel(
    a_ptr, b_ptr, c_ptr, M, N, K, a_strides, b_strides,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    group = pid // (GROUP_M * tiles_n)  # of rows of tiles: those at work together share operands in the cache
    rows = min(tiles_m - group * GROUP_M, GROUP_M)
    place = pid % (GROUP_M * tiles_n)
    offs_m = (group * GROUP_M + place % rows).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = (place // rows).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_m, mask_n = offs_m < M, offs_n < N
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, K, BLOCK_K):
        offs_k = start + tl.arange(0, BLOCK_K).to(tl.int64)
        mask_k = offs_k < K
        a_ptrs = a_ptr + offs_m[:, None] * a_strides[0] + offs_k[None, :] * a_strides[1]
        b_ptrs = b_ptr + offs_k[:, None] * b_strides[0] + offs_n[None, :] * b_strides[1]
        a = tl.load(a_ptrs, mask=mask_m[:, None] & mask_k[None, :], other=0.0)
        b = tl.load(b_ptrs, mask=mask_k[:, None] & mask_n[None, :], other=0.0)
        acc = dot(a, b, acc, "ieee")
    c_ptrs = c_ptr + offs_m[:, None] * N + offs_n[None, :]
    tl.store(c_ptrs, round_to(acc, c_ptr.dtype.element_ty), mask=mask_m[:, None] & mask_n[None, :])


@torch.library.custom_op(add_op_namespace_prefix("my_op_fwd"), mutates_args=())
def my_op_fwd(a: Tensor, b: Tensor) -> Tensor:
    if a.dtype == torch.float64:
        return my_op_reference(a, b).contiguous()
    (M, K), N = a.shape, b.shape[1]
    c = torch.empty((M, N), dtype=a.dtype, device=a.device)
    if c.numel():
        grid = (cdiv(M, _PLAN["BLOCK_M"]) * cdiv(N, _PLAN["BLOCK_N"]),)
        launch(_my_op_fwd_kernel, grid, a.device, (a, b, c, M, N, K, a.stride(), b.stride()), **_PLAN)
    return c


@my_op_fwd.register_fake
def _(a, b):
    return a.new_empty(a.shape[0], b.shape[1])


def _setup_context(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def _backward(ctx, dc):
    a, b = ctx.saved_tensors
    da = _apply(dc, b.t()) if ctx.needs_input_grad[0] else None
    db = _apply(a.t(), dc) if ctx.needs_input_grad[1] else None
    return da, db


_apply = differentiable(my_op_fwd, my_op_reference, _setup_context, _backward)


@replayed
def my_op(a: Tensor, b: Tensor) -> Tensor:
    """The product of two matrices.

    Args:
        a: (M, K), float64 | float32 | float16 | bfloat16, any strides.
        b: (K, N), of a's dtype, any strides.
    Returns:
        (M, N), contiguous, of a's dtype.
    Raises:
        TypeError: dtype not listed, or not the same.   ValueError: not matrices that fit.
    Numerics: products of float32 are not tf32; sums in float32, rounded once. Autograd: first and second derivative,
        vmap; forward mode raises.
    Source: an example; name the paper, or the function of torch.
    """
    _checks.given("my_op", a=a, b=b)
    _checks.tensors("my_op", a, first="a", b=b)
    if a.dim() != 2 or b.dim() != 2 or a.shape[1] != b.shape[0]:
        shapes = f"{tuple(a.shape)} and {tuple(b.shape)}"
        raise ValueError(f"my_op: a and b must be (M, K) and (K, N), got {shapes}")
    if a.dtype != b.dtype:
        raise TypeError(f"my_op: b must have a's dtype {a.dtype}, got {b.dtype}")
    return _apply(a, b)
