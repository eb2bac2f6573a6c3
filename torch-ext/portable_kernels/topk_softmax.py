"""The k largest probabilities of each row, and where they are: the router of a mixture of experts.

    p = softmax(x);   weights, indices = topk(p, k);   weights = weights / sum(weights) where renormalised

One pass over the logits: k times a maximum and its first index, and the sum of the exponentials, or of the k alone
where they are renormalised. Rows wider than 16384 go to PyTorch.
"""

from typing import Optional

import torch
from torch import Tensor

from . import _checks
from ._device import facts, launch
from ._dispatch import differentiable, use_kernel
from ._ops import add_op_namespace_prefix
from ._replay import replayed
from ._rows import at, compute_dtype, row_index, rows, warps
from ._triton import exp, next_power_of_2, round_to, tl, triton, triton_dtype

SECOND_ORDER = "reference"

_WIDEST = 16384  # a row is held in registers


def topk_softmax_reference(x, k, *, renormalize=False, dtype=None):
    """What `topk_softmax` computes, in plain PyTorch."""
    return _reference(x, k, renormalize, dtype or x.dtype)


def _reference(x, k, renormalize, dtype):
    # A stable sort takes the first of equals, and NaN before all; topk promises no order of equals.
    indices = torch.sort(x.detach(), dim=-1, descending=True, stable=True).indices[..., :k]
    return _weights(x, indices, renormalize, dtype).to(dtype), indices


def _weights(x, indices, renormalize, dtype):
    compute = torch.promote_types(compute_dtype(x), dtype)
    weights = torch.softmax(x.to(compute), -1).gather(-1, indices)
    return weights / weights.sum(-1, keepdim=True) if renormalize else weights


def _bwd_reference(dweights, x, indices, renormalize):
    compute = compute_dtype(dweights, x)
    dweights = dweights.to(compute)
    if renormalize:
        w = _weights(x, indices, True, compute)
        dx = torch.zeros_like(x, dtype=compute)
        return dx.scatter(-1, indices, w * (dweights - (dweights * w).sum(-1, keepdim=True))).to(x.dtype)
    p = torch.softmax(x.to(compute), -1)
    g = torch.zeros_like(p).scatter(-1, indices, dweights)
    return (p * (g - (g * p).sum(-1, keepdim=True))).to(x.dtype)


def _plan(N, itemsize, max_warps):
    """(BLOCK_M, BLOCK_N, num_warps). Of a copy, H200, bf16: 8 of 128 0.30, 8 of 256 0.29; with half the rows 0.29 and
    0.25. 10 of 512 0.29, with 4 rows and 4 warps 0.19. Float32: 8 of 256 0.19, with 4 rows and 4 warps 0.17."""
    BLOCK_N = next_power_of_2(N)
    if itemsize == 2 and BLOCK_N <= 256:
        return 2048 // max(BLOCK_N, 32), BLOCK_N, warps(4, max_warps)
    return max(512 // max(BLOCK_N, 32), 1), BLOCK_N, warps(min(max(BLOCK_N // 1024, 1), 16), max_warps)


@triton.jit
def _keys(x, offs_n):
    """Integers in the order of numbers of 16 bits, of equals the smaller index first: no two of a row are the same.

    NaN is above all, and -0 is 0.
    """
    number = x.to(tl.float32)  # to compare: the interpreter has bfloat16 as integers
    bits = tl.where(number == 0, 0, x.to(tl.int16, bitcast=True).to(tl.int32))
    bits = tl.where(number == number, bits ^ ((bits >> 16) & 0x7FFF), 0x7FFF)
    return (bits << 16) + (0xFFFF - offs_n)


@triton.jit
def _of_keys(keys, DTYPE: tl.constexpr):
    """The numbers and their indices."""
    bits = keys >> 16
    bits = bits ^ ((bits >> 16) & 0x7FFF)
    return bits.to(tl.int16).to(DTYPE, bitcast=True), 0xFFFF - (keys & 0xFFFF)


@triton.jit(do_not_specialize=["M"])
def _topk_softmax_fwd_kernel(
    x_ptr, w_ptr, i_ptr, B, M, N, x_strides,
    K: tl.constexpr, RENORMALIZE: tl.constexpr, COMPUTE: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    a, b, offs_m = row_index(tl.program_id(0), B, M, BLOCK_M)
    mask_m = (offs_m < M)[:, None]
    offs_n = tl.arange(0, BLOCK_N)[None, :]
    offs_k = tl.arange(0, BLOCK_K)[None, :]
    left = mask_m & (offs_n < N)  # what has not been taken
    x = tl.load(at(x_ptr, x_strides, a, b, offs_m, tl.arange(0, BLOCK_N)), mask=left, other=float("-inf"))
    if x_ptr.dtype.element_ty.primitive_bitwidth == 16:  # one maximum finds a number and its index
        keys = tl.where(left, _keys(x, offs_n), -(2**31))
        best = tl.zeros((BLOCK_M, BLOCK_K), tl.int32)
        for k in range(K):
            top = tl.max(keys, axis=1)[:, None]
            keys = tl.where(keys == top, -(2**31), keys)
            best = tl.where(offs_k == k, top, best)
        chosen, indices = _of_keys(best, x_ptr.dtype.element_ty)
    else:
        x = tl.where(x == x, x, float("inf"))  # NaN is the largest
        chosen = tl.zeros((BLOCK_M, BLOCK_K), COMPUTE)
        indices = tl.zeros((BLOCK_M, BLOCK_K), tl.int32)
        for k in range(K):
            largest = tl.max(tl.where(left, x, float("-inf")), axis=1)
            first = tl.min(tl.where(left & (x == largest[:, None]), offs_n, BLOCK_N), axis=1)
            left = left & (offs_n != first[:, None])
            chosen = tl.where(offs_k == k, largest[:, None], chosen)
            indices = tl.where(offs_k == k, first[:, None], indices)
    mask = mask_m & (offs_k < K)
    chosen = tl.where(mask, chosen.to(COMPUTE), float("-inf"))
    if RENORMALIZE:  # what the others of the row have cancels
        x = chosen
    x = x.to(COMPUTE)
    peak = tl.max(x, axis=1)[:, None]  # it may drop a NaN, but exp(NaN) stays in the sum, as does inf - inf
    weights = exp(chosen - peak) / tl.sum(exp(x - peak), axis=1)[:, None]
    out = ((a * B + b) * M + offs_m)[:, None] * K + offs_k
    tl.store(w_ptr + out, round_to(weights, w_ptr.dtype.element_ty), mask=mask)
    tl.store(i_ptr + out, indices.to(tl.int64), mask=mask)


@triton.jit(do_not_specialize=["M"])
def _topk_softmax_bwd_kernel_chosen(
    dw_ptr, x_ptr, i_ptr, dx_ptr, B, M, N, x_strides,
    K: tl.constexpr, COMPUTE: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """dx at the k chosen, whose weights sum to 1: nothing else of x has a part in them. dx is 0 elsewhere."""
    a, b, offs_m = row_index(tl.program_id(0), B, M, BLOCK_M)
    row = ((a * B + b) * M + offs_m)[:, None]
    offs_n = tl.arange(0, BLOCK_N)[None, :]
    zeros = tl.zeros((BLOCK_M, BLOCK_N), dx_ptr.dtype.element_ty)
    tl.store(dx_ptr + row * N + offs_n, zeros, mask=(offs_m < M)[:, None] & (offs_n < N))
    tl.debug_barrier()  # what follows may come from another thread
    offs_k = tl.arange(0, BLOCK_K)[None, :]
    mask = (offs_m < M)[:, None] & (offs_k < K)
    index = tl.load(i_ptr + row * K + offs_k, mask=mask, other=0)
    x_row = (x_ptr + a * x_strides[0] + b * x_strides[1] + offs_m * x_strides[2])[:, None]
    x = tl.load(x_row + index * x_strides[3], mask=mask, other=float("-inf")).to(COMPUTE)
    dw = tl.load(dw_ptr + row * K + offs_k, mask=mask, other=0.0).to(COMPUTE)
    e = exp(x - tl.max(x, axis=1)[:, None])
    w = e / tl.sum(e, axis=1)[:, None]
    dx = w * (dw - tl.sum(dw * w, axis=1)[:, None])
    tl.store(dx_ptr + row * N + index, round_to(dx, dx_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["M"])
def _topk_softmax_bwd_kernel(
    dw_ptr, x_ptr, i_ptr, dx_ptr, B, M, N, x_strides,
    K: tl.constexpr, COMPUTE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """dx = p * (g - sum(g * p)), g the gradient at the k chosen."""
    a, b, offs_m = row_index(tl.program_id(0), B, M, BLOCK_M)
    row = (a * B + b) * M + offs_m
    mask_m = offs_m < M
    offs_n = tl.arange(0, BLOCK_N)[None, :]
    mask = mask_m[:, None] & (offs_n < N)
    x = tl.load(at(x_ptr, x_strides, a, b, offs_m, tl.arange(0, BLOCK_N)), mask=mask, other=float("-inf")).to(COMPUTE)
    e = exp(x - tl.max(x, axis=1)[:, None])
    chosen = mask & (offs_n < 0)
    g = tl.zeros((BLOCK_M, BLOCK_N), COMPUTE)
    for k in range(K):
        index = tl.load(i_ptr + row * K + k, mask=mask_m, other=-1).to(tl.int32)
        dw = tl.load(dw_ptr + row * K + k, mask=mask_m, other=0.0).to(COMPUTE)
        here = offs_n == index[:, None]
        g = tl.where(here, dw[:, None], g)
        chosen = chosen | here
    p = e / tl.sum(e, axis=1)[:, None]
    dx = p * (g - tl.sum(tl.where(chosen, g * p, 0.0), axis=1)[:, None])
    tl.store(dx_ptr + row[:, None] * N + offs_n, round_to(dx, dx_ptr.dtype.element_ty), mask=mask)


def _plan_chosen(N, BLOCK_K, max_warps):
    """(BLOCK_M, BLOCK_N, num_warps). Of a copy, 8 chosen, H200 bf16: 0.83 of 128, 0.99 of 256 and 512; with twice the
    rows 0.70 and 0.86."""
    BLOCK_N = next_power_of_2(N)
    rows = max(min(1024 // BLOCK_N, 128 // BLOCK_K), 1)
    return rows, BLOCK_N, warps(min(max(BLOCK_N // 1024, 1), 16), max_warps)


def _launch_chosen(dweights, x, indices, dx, k, compute):
    layout, (x,) = rows(x)
    BLOCK_K = next_power_of_2(k)
    BLOCK_M, BLOCK_N, num_warps = _plan_chosen(layout.N, BLOCK_K, facts(x.device).max_warps)
    launch(
        _topk_softmax_bwd_kernel_chosen,
        (layout.blocks(BLOCK_M),),
        x.device,
        (dweights, x, indices, dx, layout.B, layout.M, layout.N, *layout.strides),
        K=k, COMPUTE=triton_dtype(compute), BLOCK_K=BLOCK_K, BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, num_warps=num_warps,
    )  # fmt: skip


def _launch(kernel, before, x, after, k, compute, **constants):
    layout, (x,) = rows(x)
    BLOCK_M, BLOCK_N, num_warps = _plan(layout.N, x.element_size(), facts(x.device).max_warps)
    launch(
        kernel,
        (layout.blocks(BLOCK_M),),
        x.device,
        (*before, x, *after, layout.B, layout.M, layout.N, *layout.strides),
        K=k, COMPUTE=triton_dtype(compute), **constants, BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, num_warps=num_warps,
    )  # fmt: skip


@torch.library.custom_op(add_op_namespace_prefix("topk_softmax_fwd"), mutates_args=())
def topk_softmax_fwd(x: Tensor, k: int, renormalize: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    weights = torch.empty((*x.shape[:-1], k), dtype=dtype, device=x.device)
    indices = torch.empty(weights.shape, dtype=torch.int64, device=x.device)
    if weights.numel():
        _launch(
            _topk_softmax_fwd_kernel, (), x, (weights, indices), k, compute_dtype(x, weights),
            RENORMALIZE=renormalize, BLOCK_K=next_power_of_2(k),
        )  # fmt: skip
    return weights, indices


@topk_softmax_fwd.register_fake
def _(x, k, renormalize, dtype):
    shape = (*x.shape[:-1], k)
    return x.new_empty(shape, dtype=dtype), x.new_empty(shape, dtype=torch.int64)


@torch.library.custom_op(add_op_namespace_prefix("topk_softmax_bwd"), mutates_args=())
def topk_softmax_bwd(dweights: Tensor, x: Tensor, indices: Tensor, renormalize: bool) -> Tensor:
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if dx.numel():
        k, compute = indices.shape[-1], compute_dtype(dweights, x)
        dweights, indices = dweights.contiguous(), indices.contiguous()  # k numbers a row
        if renormalize:
            _launch_chosen(dweights, x, indices, dx, k, compute)
        else:
            _launch(_topk_softmax_bwd_kernel, (dweights,), x, (indices, dx), k, compute)
    return dx


@topk_softmax_bwd.register_fake
def _(dweights, x, indices, renormalize):
    return x.new_empty(x.shape)


_topk_softmax_bwd = differentiable(topk_softmax_bwd, _bwd_reference, rowwise=lambda *_: [0, 1, 2])


def _setup_context(ctx, inputs, output):
    x, _, ctx.renormalize, _ = inputs
    _, indices = output
    ctx.save_for_backward(x, indices)
    ctx.mark_non_differentiable(indices)


def _backward(ctx, dweights, _):
    return _topk_softmax_bwd(dweights, *ctx.saved_tensors, ctx.renormalize), None, None, None


_topk_softmax = differentiable(topk_softmax_fwd, _reference, _setup_context, _backward, rowwise=lambda *_: [0])


@replayed
def topk_softmax(
    x: Tensor, k: int, *, renormalize: bool = False, dtype: Optional[torch.dtype] = None
) -> tuple[Tensor, Tensor]:
    """Choose the k most probable of each row: softmax over the last dimension, then the k largest.

    Args:
        x: (..., N) logits, float64 | float32 | float16 | bfloat16, any strides.
        k: how many, 1 to N.
        renormalize: divide the k by their sum (Mixtral, Qwen3-MoE with norm_topk_prob).
        dtype: of the weights, one of those four; None = x's.
    Returns:
        (weights, indices), (..., k) each, contiguous: the largest first, of equal logits the one with the smallest
        index first; indices are int64.
    Raises:
        TypeError: dtype not listed.   ValueError: k outside 1 to N.
    Numerics: computed in float32, in float64 where x or dtype is, and rounded once. A NaN or +inf makes the weights of
        its row NaN; NaN counts as the largest, as in torch.topk, and the indices are valid and distinct. Autograd:
        first and second derivative of the weights, at the unrounded probabilities; vmap; forward mode raises.
    Source: Shazeer et al., "Outrageously Large Neural Networks", 2017.
    """
    op = "topk_softmax"
    _checks.tensors(op, x)
    if dtype is not None and dtype not in _checks.FLOATS:
        raise TypeError(f"{op}: dtype must be float64 | float32 | float16 | bfloat16 or None, got {dtype}")
    if not x.dim():
        raise ValueError(f"{op}: x must have at least one dimension, got shape ()")
    _checks.integer(op, "k", k)
    if not 1 <= k <= x.shape[-1]:
        raise ValueError(f"{op}: k must be in 1 to {x.shape[-1]} for x {tuple(x.shape)}, got {k}")
    _checks.flags(op, renormalize=renormalize)
    args = x, k, renormalize, dtype or x.dtype
    if use_kernel(x) and x.shape[-1] <= _WIDEST:
        return _topk_softmax(*args)
    weights, indices = _reference(*args)
    return weights.contiguous(), indices.contiguous()
