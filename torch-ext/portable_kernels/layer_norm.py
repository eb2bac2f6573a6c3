"""Layer norm over trailing dimensions, alone or fused with a residual addition.

    y = (x - mean(x)) * rsqrt(var(x) + eps) * weight + bias

Ba, Kiros and Hinton, "Layer Normalization", 2016. Rows of any width; weight and bias gradients are summed in a fixed
order. The mean is kept as two numbers, `shift` and `correction`: a value near the mean, which every element gives up
first, and the mean of what is left. So a mean far larger than the spread costs no digits.
"""

import functools
from typing import Optional

import torch
from torch import Tensor

from . import _checks, _norms
from ._device import facts, launch
from ._dispatch import differentiable, transforms, use_kernel
from ._moments import take_moments, within
from ._norms import (
    by_rows,
    fold,
    load_bias,
    load_pair,
    load_rows,
    load_scale,
    load_sum,
    store_dx,
    store_parts,
    store_rows,
    two_sums,
)  # fmt: skip
from ._online import neighbours
from ._ops import add_op_namespace_prefix
from ._replay import replayed
from ._rows import Plan, compute_dtype, first_row, inside, plan_forward, row_index, rows, sum_leading, warps, wide
from ._triton import next_power_of_2, round_to, scalar, tl, triton, triton_dtype

SECOND_ORDER = "reference"


def layer_norm_reference(x, weight=None, bias=None, eps=1e-5):
    """What `layer_norm` computes, in plain PyTorch."""
    return _reference(x, weight, bias, eps, x.dtype, compute_dtype(x, weight, bias))


def add_layer_norm_reference(x, residual, weight=None, bias=None, eps=1e-5, *, residual_dtype=None):
    """What `add_layer_norm` computes, in plain PyTorch."""
    total = _norms.add(x, residual, residual_dtype)
    compute = compute_dtype(x, residual, total, weight, bias)
    return _reference(total, weight, bias, eps, x.dtype, compute), total


def _reference(x, weight, bias, eps, dtype, compute):
    centred, _, _, rstd = _centred_reference(x, _norms.trailing(weight, bias), eps, compute)
    y = centred * rstd
    if weight is not None:
        y = y * weight
    if bias is not None:
        y = y + bias
    return y.to(dtype)


def _centred_reference(x, ndim, eps, compute):
    """x - shift - correction, and what the forward keeps of each row, with ndim dimensions of size 1."""
    dims = tuple(range(-ndim, 0))
    h = x.to(compute)
    shift = h.mean(dims, keepdim=True)
    h = h - shift
    correction = h.mean(dims, keepdim=True)
    h = h - correction
    return h, shift, correction, torch.rsqrt(h.square().mean(dims, keepdim=True) + eps)


@functools.lru_cache(4096)
def _plan(N, max_warps):
    """As `plan_forward`, for a kernel with two dependent sums. Shares of a copy: H200 bf16, weight and bias."""
    BLOCK_N = next_power_of_2(N)
    if BLOCK_N <= 1024:  # a warp has rows of its own: 0.94 at 128 and 0.96 at 1024; 4 warps a tile 0.81 and 0.76
        return Plan(1024 // max(BLOCK_N, 32), BLOCK_N, True, 1)
    if BLOCK_N <= 2048:  # 0.97
        return Plan(2, BLOCK_N, True, warps(4, max_warps))
    if BLOCK_N <= 8192:  # 0.97 at 4096; at 8192 0.84 without masks, see _forward
        return plan_forward(N, max_warps)
    if BLOCK_N <= 16384:  # 0.77, likewise
        return Plan(1, BLOCK_N, True, warps(8, max_warps))
    # 0.74 at 32768, 0.69 at 65536, 0.63 at 131072, 0.62 at 262144
    return Plan(1, 8192 if BLOCK_N <= 32768 else 16384, False, warps(16, max_warps))


@triton.jit
def _mean(x, N, COMPUTE: tl.constexpr):
    """Means of rows. Divided before they are summed: a sum may overflow where the mean does not."""
    return tl.sum(x * (tl.full((), 1.0, COMPUTE) / N), axis=1)


@triton.jit
def _centred(x, shift, correction, mask):
    """0 past the row's end, where the map would leave -mean."""
    return tl.where(mask, (x - shift[:, None]) - correction[:, None], 0.0)


@triton.jit
def _store_normed(
    x, d, correction, rstd, w_ptr, b_ptr, y_ptr, s_ptr, out_m, N, offs_n, mask,
    KEEP: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    """d = x - shift; what it is past the row's end is not stored."""
    out = out_m[:, None] * N + offs_n[None, :]
    mask_n = offs_n < N
    y = by_rows(d * rstd[:, None] - (correction * rstd)[:, None], KEEP)
    y = y * load_scale(w_ptr, 0.0, offs_n, mask_n, COMPUTE, KEEP)[None, :, :]
    y = tl.reshape(y + load_bias(b_ptr, offs_n, mask_n, COMPUTE, KEEP)[None, :, :], d.shape)
    tl.store(y_ptr + out, round_to(y, y_ptr.dtype.element_ty), mask=mask)
    if s_ptr is not None:
        tl.store(s_ptr + out, round_to(x, s_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["M"])
def _layer_norm_fwd_kernel(
    x_ptr, r_ptr, w_ptr, b_ptr, y_ptr, s_ptr, stats_ptr, B, M, N, x_strides, r_strides, eps,
    GROUP: tl.constexpr, WHOLE: tl.constexpr, KEEP: tl.constexpr, COMPUTE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ONE_PASS: tl.constexpr,
):  # fmt: skip
    a, b, offs_m = row_index(tl.program_id(0), B, M, BLOCK_M)
    mask_m = offs_m < M
    out_m = (a * B + b) * M + offs_m
    offs_n = tl.arange(0, BLOCK_N)
    mask = inside(offs_m, offs_n, M, N, WHOLE)
    x = load_sum(x_ptr, x_strides, r_ptr, r_strides, s_ptr, a, b, offs_m, offs_n, mask, COMPUTE)
    shift = _mean(x, tl.minimum(N, BLOCK_N), COMPUTE)  # of the first block, rounded
    if ONE_PASS:
        d = tl.where(mask, x - shift[:, None], 0.0)
        # The correction is what the rounding of shift left: too small for the difference of squares to cancel.
        correction, variance = two_sums(d * (tl.full((), 1.0, COMPUTE) / N), d * d)
        variance = variance / N
        square = correction * correction
        variance = tl.where(square < variance, variance - square, variance)  # not inf - inf, nor below 0
    else:  # the moments of groups, as they come (Chan, Golub and LeVeque 1979); then the groups together
        mean = tl.zeros((BLOCK_M, BLOCK_N // GROUP), COMPUTE)
        squares = tl.zeros((BLOCK_M, BLOCK_N // GROUP), COMPUTE)
        seen = tl.zeros((1, BLOCK_N // GROUP), COMPUTE)
        for start in range(0, N, BLOCK_N):
            cols = start + offs_n
            mask = mask_m[:, None] & (cols < N)[None, :]
            x = load_sum(x_ptr, x_strides, r_ptr, r_strides, s_ptr, a, b, offs_m, cols, mask, COMPUTE, "evict_last")
            more = within(N, start, BLOCK_N, GROUP).to(COMPUTE)
            mean, squares, seen = take_moments(tl.where(mask, x - shift[:, None], 0.0), mask, more, mean, squares, seen)
        correction = tl.sum(mean * (seen * (tl.full((), 1.0, COMPUTE) / N)), axis=1)
        mean -= correction[:, None]
        variance = tl.sum(squares + mean * mean * seen, axis=1) / N
    rstd = tl.rsqrt(variance + eps)
    tl.store(stats_ptr + out_m * 3, shift, mask=mask_m)
    tl.store(stats_ptr + out_m * 3 + 1, correction, mask=mask_m)
    tl.store(stats_ptr + out_m * 3 + 2, rstd, mask=mask_m)
    if ONE_PASS:
        _store_normed(x, d, correction, rstd, w_ptr, b_ptr, y_ptr, s_ptr, out_m, N, offs_n, mask, KEEP, COMPUTE)
    else:
        for start in range(0, N, BLOCK_N):
            cols = start + offs_n
            mask = mask_m[:, None] & (cols < N)[None, :]
            x = load_sum(x_ptr, x_strides, r_ptr, r_strides, s_ptr, a, b, offs_m, cols, mask, COMPUTE, "evict_first")
            d = x - shift[:, None]
            _store_normed(x, d, correction, rstd, w_ptr, b_ptr, y_ptr, s_ptr, out_m, N, cols, mask, KEEP, COMPUTE)


@triton.jit
def _load_stats(stats_ptr, out_m, mask_m):
    shift = tl.load(stats_ptr + out_m * 3, mask=mask_m, other=0.0)
    correction = tl.load(stats_ptr + out_m * 3 + 1, mask=mask_m, other=0.0)
    return shift, correction, tl.load(stats_ptr + out_m * 3 + 2, mask=mask_m, other=0.0)


@triton.jit
def _xhat(x, shift, correction, rstd, mask):
    return tl.where(mask, (x - shift[:, None]) * rstd[:, None] - (correction * rstd)[:, None], 0.0)


@triton.jit(do_not_specialize=["M", "n_tiles"])
def _layer_norm_bwd_kernel(
    dy_ptr, x_ptr, w_ptr, stats_ptr, ds_ptr, dx_ptr, dw_ptr, db_ptr, B, M, N, n_tiles,
    dy_strides, x_strides, ds_strides,
    WHOLE: tl.constexpr, KEEP: tl.constexpr, COMPUTE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Each program walks row tiles and keeps its share of the weight and bias gradients in registers."""
    pid = tl.program_id(0)
    offs_m, offs_n = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    scale = load_scale(w_ptr, 0.0, offs_n, offs_n < N, COMPUTE, BLOCK_M if KEEP > 1 else 1)
    dw = tl.zeros((KEEP, BLOCK_N), COMPUTE)
    db = tl.zeros((KEEP, BLOCK_N), COMPUTE)
    TWICE: tl.constexpr = BLOCK_N > 8192  # read again, from L1: registers would not hold the row too
    first: tl.constexpr = "evict_last" if TWICE else ""
    for tile in tl.range(pid, n_tiles, tl.num_programs(0), num_stages=STAGES):
        a, b, m = first_row(tile, B, M, BLOCK_M)
        row = (a * B + b) * M + m
        mask = inside(offs_m, offs_n, M - m, N, WHOLE)
        shift, correction, rstd = _load_stats(stats_ptr + row * 3, offs_m, offs_m < M - m)
        dy = load_rows(dy_ptr, dy_strides, a, b, m, offs_m, offs_n, mask, COMPUTE, first)
        x = load_rows(x_ptr, x_strides, a, b, m, offs_m, offs_n, mask, COMPUTE, first)
        xhat = _xhat(x, shift, correction, rstd, mask)
        g = dy * scale
        mean, projection = two_sums(g, g * xhat)
        if TWICE:
            dy = load_rows(dy_ptr, dy_strides, a, b, m, offs_m, offs_n, mask, COMPUTE, "evict_first")
            x = load_rows(x_ptr, x_strides, a, b, m, offs_m, offs_n, mask, COMPUTE, "evict_first")
            xhat = _xhat(x, shift, correction, rstd, mask)
            g = dy * scale
        share = rstd / N
        dx = g * rstd[:, None] - (xhat * (projection * share)[:, None] + (mean * share)[:, None])
        if ds_ptr is not None:
            dx += load_rows(ds_ptr, ds_strides, a, b, m, offs_m, offs_n, mask, COMPUTE)
        store_rows(dx_ptr, dx, row, offs_m, offs_n, N, mask)
        if dw_ptr is not None:
            dw += fold(dy * xhat, KEEP)
        if db_ptr is not None:
            db += fold(dy, KEEP)
    store_parts(dw_ptr, db_ptr, tl.sum(dw, axis=0), tl.sum(db, axis=0), pid, N, offs_n)


@triton.jit(do_not_specialize=["M"])
def _layer_norm_bwd_kernel_dots(
    dy_ptr, x_ptr, w_ptr, stats_ptr, dots_ptr, B, M, N, dy_strides, x_strides,
    COMPUTE: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The means of the gradient and of its product with xhat, of a row."""
    a, b, offs_m = row_index(tl.program_id(0), B, M, 1)
    out_m = (a * B + b) * M + offs_m
    shift, correction, rstd = _load_stats(stats_ptr, out_m, offs_m < M)
    sums = tl.zeros((1, BLOCK_N), COMPUTE)
    products = tl.zeros((1, BLOCK_N), COMPUTE)
    for start in range(0, N, BLOCK_N):
        cols = start + tl.arange(0, BLOCK_N)
        mask = (cols < N)[None, :]
        dy, x = load_pair(dy_ptr, dy_strides, x_ptr, x_strides, a, b, offs_m, cols, mask, COMPUTE)
        g = dy * load_scale(w_ptr, 0.0, cols, cols < N, COMPUTE)
        sums += g
        products += g * _centred(x, shift, correction, mask)
    tl.store(dots_ptr + out_m * 2, tl.sum(sums, axis=1) / N)
    tl.store(dots_ptr + out_m * 2 + 1, tl.sum(products, axis=1) * rstd / N)


@triton.jit(do_not_specialize=["M", "n_tiles"])
def _layer_norm_bwd_kernel_columns(
    dy_ptr, x_ptr, w_ptr, stats_ptr, dots_ptr, ds_ptr, dx_ptr, dw_ptr, db_ptr, B, M, N, n_tiles,
    dy_strides, x_strides, ds_strides,
    COMPUTE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A program owns BLOCK_N columns of every num_programs(1)-th row tile."""
    pid_m = tl.program_id(1)
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    scale = load_scale(w_ptr, 0.0, offs_n, offs_n < N, COMPUTE)
    dw = tl.zeros((BLOCK_M, BLOCK_N), COMPUTE)
    db = tl.zeros((BLOCK_M, BLOCK_N), COMPUTE)
    for tile in tl.range(pid_m, n_tiles, tl.num_programs(1), num_stages=STAGES):
        a, b, offs_m = row_index(tile, B, M, BLOCK_M)
        mask_m = offs_m < M
        mask = mask_m[:, None] & (offs_n < N)[None, :]
        out_m = (a * B + b) * M + offs_m
        dy, x = load_pair(dy_ptr, dy_strides, x_ptr, x_strides, a, b, offs_m, offs_n, mask, COMPUTE)
        shift, correction, rstd = _load_stats(stats_ptr, out_m, mask_m)
        mean = tl.load(dots_ptr + out_m * 2, mask=mask_m, other=0.0)[:, None]
        projection = tl.load(dots_ptr + out_m * 2 + 1, mask=mask_m, other=0.0)[:, None]
        xhat = _centred(x, shift, correction, mask) * rstd[:, None]
        dx = (dy * scale - mean - xhat * projection) * rstd[:, None]
        store_dx(dx, ds_ptr, ds_strides, dx_ptr, a, b, offs_m, out_m, N, offs_n, mask, COMPUTE)
        dw += dy * xhat
        db += dy
    store_parts(dw_ptr, db_ptr, tl.sum(dw, axis=0), tl.sum(db, axis=0), pid_m, N, offs_n)


def _forward(x, residual, weight, bias, eps, total_dtype):
    """(y, total or None, stats): of each row shift, correction and rstd."""
    n = _norms.trailing(weight, bias)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = None if residual is None else torch.empty(x.shape, dtype=total_dtype, device=x.device)
    compute = compute_dtype(x, residual, total, weight, bias)
    stats = torch.empty((*x.shape[: x.dim() - n], 3), dtype=compute, device=x.device)
    if x.numel():
        operands = (x,) if residual is None else (x, residual)
        layout, (x, *r) = rows(*(t.flatten(-n) for t in operands))
        if (module := wide(layout.N, compute, x.device)) is not None:
            xs = (x, layout.strides[0])
            rs = (r[0], layout.strides[1]) if r else None
            if module.run(
                "layer_norm", xs, rs, y, layout, weight=_norms.packed(weight), bias=_norms.packed(bias), stats=stats,
                total=total, eps=eps,
            ) is not None:  # fmt: skip
                return y, total, stats
        plan = _plan(layout.N, facts(x.device).max_warps)
        launch(
            _layer_norm_fwd_kernel,
            (layout.blocks(plan.BLOCK_M),),
            x.device,
            (x, r[0] if r else None, _norms.packed(weight), _norms.packed(bias), y, total, stats,
             layout.B, layout.M, layout.N, layout.strides[0], layout.strides[-1], scalar(eps, compute)),
            GROUP=neighbours(layout.strides[0][3], x.element_size()), COMPUTE=triton_dtype(compute), **plan._asdict(),
            # Without masks a thread takes 80 registers at 8192, not 64, and 3 programs fit, not 4.
            WHOLE=layout.N == plan.BLOCK_N <= 4096 and layout.M % plan.BLOCK_M == 0, KEEP=_norms.side_by_side(plan),
        )  # fmt: skip
    else:
        stats.fill_(torch.nan)
    return y, total, stats


@torch.library.custom_op(add_op_namespace_prefix("layer_norm_fwd"), mutates_args=())
def layer_norm_fwd(x: Tensor, weight: Optional[Tensor], bias: Optional[Tensor], eps: float) -> tuple[Tensor, Tensor]:
    y, _, stats = _forward(x, None, weight, bias, eps, None)
    return y, stats


@layer_norm_fwd.register_fake
def _(x, weight, bias, eps):
    stats_shape = (*x.shape[: x.dim() - _norms.trailing(weight, bias)], 3)
    return x.new_empty(x.shape), x.new_empty(stats_shape, dtype=compute_dtype(x, weight, bias))


@torch.library.custom_op(add_op_namespace_prefix("add_layer_norm_fwd"), mutates_args=())
def add_layer_norm_fwd(
    x: Tensor, residual: Tensor, weight: Optional[Tensor], bias: Optional[Tensor], eps: float, total_dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    return _forward(x, residual, weight, bias, eps, total_dtype)


@add_layer_norm_fwd.register_fake
def _(x, residual, weight, bias, eps, total_dtype):
    total = x.new_empty(x.shape, dtype=total_dtype)
    stats_shape = (*x.shape[: x.dim() - _norms.trailing(weight, bias)], 3)
    stats = x.new_empty(stats_shape, dtype=compute_dtype(x, residual, total, weight, bias))
    return x.new_empty(x.shape), total, stats


def _fwd_reference(x, weight, bias, eps):
    compute = compute_dtype(x, weight, bias)
    return _reference(x, weight, bias, eps, x.dtype, compute), _stats(x, _norms.trailing(weight, bias), eps, compute)


def _add_fwd_reference(x, residual, weight, bias, eps, total_dtype):
    total = _norms.add(x, residual, total_dtype)
    compute = compute_dtype(x, residual, total, weight, bias)
    y = _reference(total, weight, bias, eps, x.dtype, compute)
    return y, total, _stats(total, _norms.trailing(weight, bias), eps, compute)


def _stats(x, ndim, eps, compute):
    stats = _centred_reference(x, ndim, eps, compute)[1:]
    return torch.stack([t.flatten(-ndim).squeeze(-1) for t in stats], -1)


@torch.library.custom_op(add_op_namespace_prefix("layer_norm_bwd"), mutates_args=())
def layer_norm_bwd(
    dy: Tensor, ds: Optional[Tensor], x: Tensor, weight: Optional[Tensor], bias: Optional[Tensor], stats: Tensor,
    eps: float, need_dw: bool, need_db: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of x (or of x + residual, then with ds added), weight and bias. One not needed is empty."""
    return _norms.backward(
        True, _layer_norm_bwd_kernel, _layer_norm_bwd_kernel_dots, _layer_norm_bwd_kernel_columns,
        dy, ds, x, _norms.trailing(weight, bias), weight, bias, stats, need_dw, need_db,
    )  # fmt: skip


@layer_norm_bwd.register_fake
def _(dy, ds, x, weight, bias, stats, eps, need_dw, need_db):
    return _norms.fake_backward(x, weight, bias, need_dw, need_db)


def _bwd_reference(dy, ds, x, weight, bias, stats, eps, need_dw, need_db):
    n = _norms.trailing(weight, bias)
    dims = tuple(range(-n, 0))
    centred, _, _, rstd = _centred_reference(x, n, eps, stats.dtype)  # not from stats: they have a derivative
    dy, xhat = dy.to(stats.dtype), centred * rstd
    g = dy if weight is None else dy * weight
    dx = (g - g.mean(dims, keepdim=True) - xhat * (g * xhat).mean(dims, keepdim=True)) * rstd
    dx = (dx if ds is None else dx + ds).to(x.dtype)
    dw = sum_leading(dy * xhat, n).to(weight.dtype) if need_dw else x.new_empty(0)
    db = sum_leading(dy, n).to(bias.dtype) if need_db else x.new_empty(0)
    return dx, dw, db


def _rows_of_bwd(dy, ds, x, weight, bias, stats, eps, need_dw, need_db):
    return None if need_dw or need_db else [0, 2, 5] if ds is None else [0, 1, 2, 5]


_layer_norm_bwd = differentiable(layer_norm_bwd, _bwd_reference, rowwise=_rows_of_bwd)


def _setup_context(ctx, inputs, output):
    x, weight, bias, ctx.eps = inputs
    ctx.save_for_backward(x, weight, bias, output[1])
    ctx.mark_non_differentiable(output[1])


def _backward(ctx, dy, _):
    x, weight, bias, stats = ctx.saved_tensors
    needs = ctx.needs_input_grad
    dx, dw, db = _layer_norm_bwd(dy, None, x, weight, bias, stats, ctx.eps, needs[1], needs[2])
    return dx, dw if needs[1] else None, db if needs[2] else None, None


_layer_norm = differentiable(layer_norm_fwd, _fwd_reference, _setup_context, _backward, rowwise=lambda *_: [0])


def _add_setup_context(ctx, inputs, output):
    x, residual, weight, bias, ctx.eps, _ = inputs
    ctx.dtypes = x.dtype, residual.dtype
    _, total, stats = output
    ctx.save_for_backward(total, weight, bias, stats)
    frozen = () if any(ctx.needs_input_grad[:2]) else (total,)
    ctx.mark_non_differentiable(*frozen, stats)


def _add_backward(ctx, dy, ds, _):
    total, weight, bias, stats = ctx.saved_tensors
    needs = ctx.needs_input_grad
    dx, dw, db = _layer_norm_bwd(dy, ds, total, weight, bias, stats, ctx.eps, needs[2], needs[3])
    dx, dr = (dx.to(dtype) if need else None for need, dtype in zip(needs, ctx.dtypes))
    return dx, dr, dw if needs[2] else None, db if needs[3] else None, None, None


_add_layer_norm = differentiable(
    add_layer_norm_fwd, _add_fwd_reference, _add_setup_context, _add_backward, rowwise=lambda *_: [0, 1]
)


@replayed
def layer_norm(x: Tensor, weight: Optional[Tensor] = None, bias: Optional[Tensor] = None, eps: float = 1e-5) -> Tensor:
    """Normalise the trailing dimensions to mean 0 and variance 1, then scale and shift them.

    y = (x - mean(x)) * rsqrt(var(x) + eps) * weight + bias

    Args:
        x: (..., *weight.shape), or (..., N) without weight and bias; float64 | float32 | float16 | bfloat16, any
            strides.
        weight: scale, of any of those dtypes.
        bias: of weight's shape; without a weight it says how many dimensions are normalised. Of any of those dtypes.
        eps: added to the (biased) variance.
    Returns:
        (..., N), dtype of x, contiguous.
    Raises:
        TypeError: dtype not listed.   ValueError: weight or bias is not of x's trailing shape; negative eps.
    Numerics: sums and products in float32, in float64 where an argument is float64, and one rounding. The mean is
        held in two parts, so that a row of mean 1e4 and spread 1e-3 keeps its digits. Weight and bias gradients are
        deterministic. Autograd: first and second derivative, vmap; forward mode raises.
    Source: Ba, Kiros and Hinton 2016.
    """
    _check("layer_norm", x, weight, bias, eps)
    if use_kernel(x):
        return _layer_norm(x, weight, bias, float(eps))[0]
    return _without_kernels(x, weight, bias, eps, x.dtype, compute_dtype(x, weight, bias))


@replayed
def add_layer_norm(
    x: Tensor,
    residual: Tensor,
    weight: Optional[Tensor] = None,
    bias: Optional[Tensor] = None,
    eps: float = 1e-5,
    *,
    residual_dtype: Optional[torch.dtype] = None,
) -> tuple[Tensor, Tensor]:
    """Add a residual and normalise the sum, in one pass over memory.

    s = x + residual, rounded to its dtype;   y = layer_norm(s, weight, bias, eps)

    Args:
        x, residual: of one shape; the other arguments as in `layer_norm`.
        residual_dtype: dtype of the sum; None = what x and residual promote to.
    Returns:
        (y, s), contiguous. y has x's dtype; neither shares memory with an input.
    Raises:
        TypeError, ValueError: as `layer_norm`; residual is not of x's shape.
    Numerics: y comes from the rounded s, as in two separate calls. Autograd: as `layer_norm`, with
        gradients flowing in through both results.
    Source: as `layer_norm`, behind a residual connection.
    """
    _check("add_layer_norm", x, weight, bias, eps, residual=residual)
    _norms.check_residual("add_layer_norm", x, residual, residual_dtype)
    if use_kernel(x):
        total_dtype = residual_dtype or torch.promote_types(x.dtype, residual.dtype)
        y, total, _ = _add_layer_norm(x, residual, weight, bias, float(eps), total_dtype)
        return y, total
    total = _norms.add(x, residual, residual_dtype).contiguous()
    return _without_kernels(total, weight, bias, eps, x.dtype, compute_dtype(x, residual, total, weight, bias)), total


def _check(op, x, weight, bias, eps, **others):
    _checks.tensors(op, x, weight=weight, bias=bias, **others)
    _norms.check_shapes(op, x, _norms.trailing(weight, bias), weight, bias)
    _checks.number(op, "eps", eps, low=0)


def _without_kernels(x, weight, bias, eps, dtype, compute):
    """By torch's own function, of x less a constant a row, which changes nothing but what torch loses to a large mean.

    In the compute dtype: in 16 bits torch would sum the parameters' gradients in 16 bits.
    """
    if not torch.compiler.is_compiling() and transforms():  # torch's own is wrong under jacrev of jacrev
        return _reference(x, weight, bias, eps, dtype, compute).contiguous()
    weight, bias = (t if t is None else t.to(compute) for t in (weight, bias))
    shape = x.shape[-_norms.trailing(weight, bias) :]
    x = x.to(compute)
    shift = x.detach().mean(tuple(range(-len(shape), 0)), keepdim=True)
    return torch.nn.functional.layer_norm(x - shift, shape, weight, bias, eps).to(dtype).contiguous()
