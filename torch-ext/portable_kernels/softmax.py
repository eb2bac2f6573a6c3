"""Softmax and its logarithm over any dimension.

    softmax(x) = exp(x - max(x)) / sum(exp(x - max(x)))
    log_softmax(x) = (x - max(x)) - log(sum(exp(x - max(x))))

Rows that fit in registers are read once. Wider ones are read twice, the first time with a running maximum and sum a
lane (Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018), so there is no limit on the width.
"""

import functools
from typing import Optional

import torch
from torch import Tensor

from . import _checks
from ._device import facts, launch
from ._dispatch import differentiable, use_kernel
from ._online import finish, grouped, lowest, neighbours, take
from ._ops import add_op_namespace_prefix
from ._replay import replayed
from ._rows import Plan, at, compute_dtype, plan_any_dim, plan_forward, row_index, rows, warps, wide
from ._triton import exp, next_power_of_2, round_to, tl, triton, triton_dtype

SECOND_ORDER = "reference"

_INTEGERS = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def softmax_reference(x, dim, dtype=None):
    """What `softmax` computes, in plain PyTorch."""
    return _fwd_reference(x, dim, dtype or x.dtype, False)


def log_softmax_reference(x, dim, dtype=None):
    """What `log_softmax` computes, in plain PyTorch."""
    return _fwd_reference(x, dim, dtype or x.dtype, True)


def _fwd_reference(x, dim, dtype, log):
    x = x.to(dtype)
    if not x.numel():
        return x.clone()
    shifted = x.to(compute_dtype(x))
    shifted = shifted - shifted.detach().amax(dim, keepdim=True)  # any constant gives the same result and derivatives
    e = torch.exp(shifted)
    total = e.sum(dim, keepdim=True)
    return (shifted - torch.log(total) if log else e / total).to(dtype)


def _bwd_reference(dy, y, dim, dtype, log):
    compute = compute_dtype(y)
    dy, y = dy.to(compute), y.to(compute)
    dx = dy - torch.exp(y) * dy.sum(dim, keepdim=True) if log else y * (dy - (dy * y).sum(dim, keepdim=True))
    return dx.to(dtype)


@functools.lru_cache(4096)
def _plan(N, max_warps):
    """Shares of a copy: H200 bf16."""
    BLOCK_N = next_power_of_2(N)
    if BLOCK_N <= 8192:  # 0.97 at 4096 and 8192
        return plan_forward(N, max_warps)
    if BLOCK_N <= 32768:  # the second reading comes from L1: 0.97 at 16384, 0.94 at 32768; in registers 0.92 at 16384
        return Plan(1, 8192, False, warps(16, max_warps))
    if BLOCK_N <= 65536:  # from L2, for which the rows under way must be few: 0.90
        return Plan(1, 16384, False, warps(32, max_warps))
    return Plan(1, 32768, False, warps(32, max_warps))  # 0.84 at 131072, 0.72 at 262144


@functools.lru_cache(4096)
def _plan_bwd(N, max_warps):
    if next_power_of_2(N) <= 32768:  # 1.03 of a copy up to 8192, 0.98 at 16384, 1.00 at 32768, H200 bf16
        return plan_forward(N, max_warps)
    return Plan(1, 32768, False, warps(32, max_warps))  # 0.88 at 65536, 0.68 at 131072, 0.63 at 262144


@triton.jit
def _load(x_ptr, x_strides, a, b, offs_m, offs_n, mask_m, N, EVICT: tl.constexpr):
    mask = mask_m & (offs_n < N)[None, :]
    return tl.load(at(x_ptr, x_strides, a, b, offs_m, offs_n), mask=mask, other=float("-inf"), eviction_policy=EVICT)


@triton.jit
def _rounded(x, dtype: tl.constexpr, COMPUTE: tl.constexpr):
    """x in the dtype of the result, as torch converts it: float64 goes to a half by way of float32."""
    return round_to(x.to(COMPUTE), dtype).to(COMPUTE)


@triton.jit
def _store_softmax(
    shifted, total, y_ptr, y_strides, a, b, offs_m, offs_n, mask, LOG: tl.constexpr, EVICT: tl.constexpr
):
    if LOG:  # not x - (max + log): that sum keeps no digit of the logarithm where the maximum is large
        y = shifted - tl.log(total)[:, None]
    else:
        y = exp(shifted) * (1.0 / total)[:, None]
    y = round_to(y, y_ptr.dtype.element_ty)
    tl.store(at(y_ptr, y_strides, a, b, offs_m, offs_n), y, mask=mask, eviction_policy=EVICT)


@triton.jit  # M is specialised: vectors across rows must know that 16 divides it
def _softmax_fwd_kernel(
    x_ptr, y_ptr, B, M, N, x_strides, y_strides, LOWEST: tl.constexpr,
    GROUP: tl.constexpr, LOG: tl.constexpr, COMPUTE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ONE_PASS: tl.constexpr,
):  # fmt: skip
    """NaN where torch has it: tl.max may drop a NaN, but exp(NaN) stays in the sum, as does inf - inf."""
    a, b, offs_m = row_index(tl.program_id(0), B, M, BLOCK_M)
    mask_m = (offs_m < M)[:, None]
    offs_n = tl.arange(0, BLOCK_N)
    dtype: tl.constexpr = y_ptr.dtype.element_ty
    AHEAD: tl.constexpr = BLOCK_N >= 32768  # a single program fills a multiprocessor: it loads before it works
    if ONE_PASS:
        x = _rounded(_load(x_ptr, x_strides, a, b, offs_m, offs_n, mask_m, N, ""), dtype, COMPUTE)
        shifted = x - tl.max(x, axis=1)[:, None]
        total = tl.sum(exp(shifted), axis=1)
        mask = mask_m & (offs_n < N)[None, :]
        _store_softmax(shifted, total, y_ptr, y_strides, a, b, offs_m, offs_n, mask, LOG, "")
    else:
        peaks = tl.full((BLOCK_M, BLOCK_N // GROUP), LOWEST, COMPUTE)
        sums = tl.zeros((BLOCK_M, BLOCK_N // GROUP), COMPUTE)
        if AHEAD:
            ahead = _load(x_ptr, x_strides, a, b, offs_m, offs_n, mask_m, N, "evict_last")
        for start in range(0, N, BLOCK_N):
            cols = start + offs_n
            if AHEAD:
                x, ahead = ahead, _load(x_ptr, x_strides, a, b, offs_m, cols + BLOCK_N, mask_m, N, "evict_last")
            else:
                x = _load(x_ptr, x_strides, a, b, offs_m, cols, mask_m, N, "evict_last")
            peaks, sums = take(grouped(_rounded(x, dtype, COMPUTE), GROUP), peaks, sums)
        peak, total = finish(peaks, sums)  # a row of nothing but -inf sums to 0: 0 * (1 / 0) = NaN
        peak = peak[:, None]
        if AHEAD:
            ahead = _load(x_ptr, x_strides, a, b, offs_m, offs_n, mask_m, N, "evict_first")
        for start in range(0, N, BLOCK_N):
            cols = start + offs_n
            if AHEAD:
                x, ahead = ahead, _load(x_ptr, x_strides, a, b, offs_m, cols + BLOCK_N, mask_m, N, "evict_first")
            else:
                x = _load(x_ptr, x_strides, a, b, offs_m, cols, mask_m, N, "evict_first")
            shifted = _rounded(x, dtype, COMPUTE) - peak
            mask = mask_m & (cols < N)[None, :]
            _store_softmax(shifted, total, y_ptr, y_strides, a, b, offs_m, cols, mask, LOG, "evict_first")


@triton.jit
def _load_pair(
    dy_ptr, dy_strides, y_ptr, y_strides, a, b, offs_m, offs_n, mask, COMPUTE: tl.constexpr, EVICT: tl.constexpr
):
    dy = tl.load(at(dy_ptr, dy_strides, a, b, offs_m, offs_n), mask=mask, other=0.0, eviction_policy=EVICT)
    y = tl.load(at(y_ptr, y_strides, a, b, offs_m, offs_n), mask=mask, other=0.0, eviction_policy=EVICT)
    return dy.to(COMPUTE), y.to(COMPUTE)


@triton.jit
def _store_dx(dy, y, total, dx_ptr, dx_strides, a, b, offs_m, offs_n, mask, LOG: tl.constexpr, EVICT: tl.constexpr):
    if LOG:
        dx = dy - exp(y) * total[:, None]
    else:
        dx = y * (dy - total[:, None])
    dx = round_to(dx, dx_ptr.dtype.element_ty)
    tl.store(at(dx_ptr, dx_strides, a, b, offs_m, offs_n), dx, mask=mask, eviction_policy=EVICT)


@triton.jit
def _softmax_bwd_kernel(
    dy_ptr, y_ptr, dx_ptr, B, M, N, dy_strides, y_strides, dx_strides,
    GROUP: tl.constexpr, LOG: tl.constexpr, COMPUTE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ONE_PASS: tl.constexpr,
):  # fmt: skip
    a, b, offs_m = row_index(tl.program_id(0), B, M, BLOCK_M)
    mask_m = (offs_m < M)[:, None]
    offs_n = tl.arange(0, BLOCK_N)
    if ONE_PASS:
        mask = mask_m & (offs_n < N)[None, :]
        dy, y = _load_pair(dy_ptr, dy_strides, y_ptr, y_strides, a, b, offs_m, offs_n, mask, COMPUTE, "")
        total = tl.sum(dy if LOG else dy * y, axis=1)
        _store_dx(dy, y, total, dx_ptr, dx_strides, a, b, offs_m, offs_n, mask, LOG, "")
    else:
        sums = tl.zeros((BLOCK_M, BLOCK_N // GROUP), COMPUTE)
        for start in range(0, N, BLOCK_N):
            mask = mask_m & (offs_n < N - start)[None, :]
            cols = start + offs_n
            dy, y = _load_pair(dy_ptr, dy_strides, y_ptr, y_strides, a, b, offs_m, cols, mask, COMPUTE, "evict_last")
            sums += tl.sum(grouped(dy if LOG else dy * y, GROUP), axis=2)
        total = tl.sum(sums, axis=1)
        for start in range(0, N, BLOCK_N):
            cols = start + offs_n
            mask = mask_m & (offs_n < N - start)[None, :]
            dy, y = _load_pair(dy_ptr, dy_strides, y_ptr, y_strides, a, b, offs_m, cols, mask, COMPUTE, "evict_first")
            _store_dx(dy, y, total, dx_ptr, dx_strides, a, b, offs_m, cols, mask, LOG, "evict_first")


def _launch(kernel, operands, dim, compute, plan_rows, LOG, **options):
    device = operands[0].device
    layout, operands = rows(*operands, dim=dim)
    if (module := wide(layout.N, compute, device)) is not None:
        *g, x = zip(operands[:-1], layout.strides)
        kind = "log_softmax" if LOG else "softmax"
        if module.run(kind, x, g[0] if g else None, operands[-1], layout, backward=bool(g)) is not None:
            return
    itemsize = max(t.element_size() for t in operands)
    plan = plan_any_dim(layout, itemsize, facts(device).max_warps, plan_rows)
    launch(
        kernel,
        (layout.blocks(plan.BLOCK_M),),
        device,
        (*operands, layout.B, layout.M, layout.N, *layout.strides),
        GROUP=neighbours(layout.strides[0][3], itemsize), LOG=LOG, COMPUTE=triton_dtype(compute), **options,
        **plan._asdict(),
    )  # fmt: skip


@torch.library.custom_op(add_op_namespace_prefix("softmax_fwd"), mutates_args=())
def softmax_fwd(x: Tensor, dim: int, dtype: torch.dtype, log: bool) -> Tensor:
    y = torch.empty(x.shape, dtype=dtype, device=x.device)
    if x.numel():
        compute = compute_dtype(y)
        _launch(_softmax_fwd_kernel, (x, y), dim, compute, _plan, LOG=log, LOWEST=lowest(compute))
    return y


@softmax_fwd.register_fake
def _(x, dim, dtype, log):
    return x.new_empty(x.shape, dtype=dtype)


@torch.library.custom_op(add_op_namespace_prefix("softmax_bwd"), mutates_args=())
def softmax_bwd(dy: Tensor, y: Tensor, dim: int, dtype: torch.dtype, log: bool) -> Tensor:
    """The gradient of x, in its dtype, from that of y and y as it was rounded."""
    dx = torch.empty(y.shape, dtype=dtype, device=y.device)
    if y.numel():
        _launch(_softmax_bwd_kernel, (dy, y, dx), dim, compute_dtype(y), _plan_bwd, LOG=log)
    return dx


@softmax_bwd.register_fake
def _(dy, y, dim, dtype, log):
    return y.new_empty(y.shape, dtype=dtype)


def _rows_of(*positions):
    # A batch of single numbers has its batch dimension where `dim` would look for the row.
    return lambda x, *_: list(positions) if x.dim() > 1 else None


_softmax_bwd = differentiable(softmax_bwd, _bwd_reference, rowwise=_rows_of(0, 1))


def _setup_context(ctx, inputs, output):
    x, ctx.dim, _, ctx.log = inputs
    ctx.dtype = x.dtype
    ctx.save_for_backward(output)


def _backward(ctx, dy):
    (y,) = ctx.saved_tensors
    return _softmax_bwd(dy, y, ctx.dim, ctx.dtype, ctx.log), None, None, None


_softmax = differentiable(softmax_fwd, _fwd_reference, _setup_context, _backward, rowwise=_rows_of(0))


@replayed
def softmax(x: Tensor, dim: int, dtype: Optional[torch.dtype] = None) -> Tensor:
    """Turn a dimension into probabilities.

    y = exp(x - max(x)) / sum(exp(x - max(x))), over `dim`

    Args:
        x: float64 | float32 | float16 | bfloat16, any shape and strides; integers or bool where `dtype` is given.
        dim: the dimension that sums to 1; from the last where negative.
        dtype: what x is converted to first, one of those four; None = x's. The gradient has x's dtype.
    Returns:
        Of x's shape and of `dtype`, contiguous.
    Raises:
        TypeError: dtype not listed.   ValueError: x has no dimension `dim`.
    Numerics: computed in float32, float64 in float64, and rounded once. As in torch, a NaN or +inf makes its row NaN,
        and so does a row of nothing but -inf. The result keeps its dtype under autocast. Autograd: first and second
        derivative, vmap; forward mode raises. The gradient is taken at the rounded result, as torch takes it.
    Source: Milakov and Gimelshein 2018.
    """
    x, dim, dtype = _canonical("softmax", x, dim, dtype)
    if use_kernel(x):
        return _softmax(x, dim, dtype, False)
    return torch.nn.functional.softmax(x, dim, dtype=dtype).contiguous()


@replayed
def log_softmax(x: Tensor, dim: int, dtype: Optional[torch.dtype] = None) -> Tensor:
    """Turn a dimension into logarithms of probabilities.

    y = (x - max(x)) - log(sum(exp(x - max(x)))), over `dim`

    Args:
        x, dim, dtype: as in `softmax`.
    Returns:
        Of x's shape and of `dtype`, contiguous.
    Raises:
        TypeError, ValueError: as `softmax`.
    Numerics: as `softmax`. Large logits lose no digits: the maximum and the logarithm are subtracted one by one.
        Autograd: as `softmax`.
    Source: as `softmax`.
    """
    x, dim, dtype = _canonical("log_softmax", x, dim, dtype)
    if use_kernel(x):
        return _softmax(x, dim, dtype, True)
    return torch.nn.functional.log_softmax(x, dim, dtype=dtype).contiguous()


def _canonical(op, x, dim, dtype):
    """x in a floating dtype, dim counted from the last (a vmapped dimension comes first), the result's dtype."""
    if dtype is not None and dtype not in _checks.FLOATS:
        raise TypeError(f"{op}: dtype must be float64 | float32 | float16 | bfloat16 or None, got {dtype}")
    if dtype is not None and isinstance(x, Tensor) and x.dtype in _INTEGERS:
        x = x.to(dtype)
    _checks.tensors(op, x)
    _checks.integer(op, "dim", dim)
    ndim = max(x.dim(), 1)  # a single number is a row of one
    if not -ndim <= dim < ndim:
        raise ValueError(f"{op}: dim must be in {-ndim} to {ndim - 1} for x {tuple(x.shape)}, got {dim}")
    return x, dim if dim < 0 else dim - ndim, dtype or x.dtype
