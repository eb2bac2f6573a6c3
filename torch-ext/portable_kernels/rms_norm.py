"""Root-mean-square norm over trailing dimensions, alone or fused with a residual addition.

    y = x * rsqrt(mean(x^2) + eps) * (weight + offset) + bias

Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019. Rows of any width; weight and bias gradients are
summed in a fixed order.
"""

import functools
from typing import Optional, Union

import torch
from torch import Tensor

from . import _checks, _fp8, _norms, _quantize, _rms_norm_quantize
from ._device import facts, launch
from ._dispatch import differentiable, use_kernel
from ._norms import (
    fold,
    load_bias,
    load_pair,
    load_rows,
    load_scale,
    load_sum,
    store_dx,
    store_parts,
    store_rows,
)  # fmt: skip
from ._online import grouped, neighbours
from ._ops import add_op_namespace_prefix
from ._replay import replayed
from ._rows import Plan, at, compute_dtype, first_row, inside, plan_forward, row_index, rows, sum_leading, warps, wide
from ._triton import next_power_of_2, round_to, scalar, tl, triton, triton_dtype
from .scaled_matmul import quantize_fp8_reference

SECOND_ORDER = "reference"

_BEFORE_WEIGHT = {"before_weight": True, "llama": True, "after_weight": False, "gemma": False}


def rms_norm_reference(x, weight=None, eps=1e-6, *, bias=None, offset=0.0, casting="after_weight", quantize=None):
    """What `rms_norm` computes, in plain PyTorch."""
    if quantize is not None:
        return _quantize_reference(x, weight, bias, eps, offset, _BEFORE_WEIGHT[casting], _float8(quantize))
    compute = compute_dtype(x, weight, bias)
    return _reference(x, weight, bias, eps, offset, _BEFORE_WEIGHT[casting], x.dtype, compute)


def add_rms_norm_reference(
    x, residual, weight=None, eps=1e-6, *, bias=None, offset=0.0, casting="after_weight", residual_dtype=None
):
    """What `add_rms_norm` computes, in plain PyTorch."""
    total = _norms.add(x, residual, residual_dtype)
    compute = compute_dtype(x, residual, total, weight, bias)
    return _reference(total, weight, bias, eps, offset, _BEFORE_WEIGHT[casting], x.dtype, compute), total


def _reference(x, weight, bias, eps, offset, before_weight, dtype, compute):
    y = x.to(compute) * _per_row(_rstd(x, _norms.trailing(weight), eps, compute), _norms.trailing(weight))
    out_dtype = _out_dtype(dtype, weight, bias, before_weight)
    if before_weight:
        y = y.to(dtype).to(compute)
    if weight is not None:
        y = y * (weight.to(compute) + offset)
    if before_weight:
        y = y.to(out_dtype).to(compute)
    if bias is not None:
        y = y + bias
    return y.to(out_dtype)


def _quantize_reference(x, weight, bias, eps, offset, before_weight, dtype):
    n, compute = _norms.trailing(weight), compute_dtype(x, weight, bias)
    y = x.to(compute) * _per_row(_rstd(x, n, eps, compute), n)
    if before_weight:
        y = y.to(x.dtype).to(compute)
    if weight is not None:
        y = y * (weight.to(compute) + offset)
    if bias is not None:
        y = y + bias
    q, scale = quantize_fp8_reference(y.flatten(-n), dtype, "row")
    return q.view(x.shape), scale.view(*x.shape[: x.dim() - n], *[1] * n)


def _float8(quantize):
    return torch.float8_e4m3fn if quantize == "fp8" else quantize


def _rstd(x, ndim, eps, compute):
    mean_square = x.to(compute).square().mean(tuple(range(-ndim, 0)))
    return torch.rsqrt(mean_square + (torch.finfo(compute).eps if eps is None else eps))


def _per_row(t, ndim):
    return t[(...,) + (None,) * ndim]


def _out_dtype(dtype, weight, bias, before_weight):
    """x's dtype, or what it is promoted to where the product with the weight comes after the rounding."""
    for t in (weight, bias):
        if before_weight and t is not None:
            dtype = torch.promote_types(dtype, t.dtype)
    return dtype


@functools.lru_cache(4096)
def _plan(N, max_warps):
    """As `plan_forward`, but for wide rows. Shares of a copy: H200 bf16."""
    BLOCK_N = next_power_of_2(N)
    if BLOCK_N <= 8192:
        return plan_forward(N, max_warps)
    if BLOCK_N <= 65536:  # two tiles, the second reading from L1 or L2: 0.94 at 16384, 0.89 at 32768, 0.85 at 65536
        return Plan(1, BLOCK_N // 2, False, warps(BLOCK_N // 2048, max_warps))
    return Plan(1, 32768, False, warps(32, max_warps))  # 0.83 at 131072, 0.70 at 262144


@triton.jit
def _load(x_ptr, x_strides, a, b, offs_m, offs_n, mask_m, N, EVICT: tl.constexpr):
    mask = mask_m[:, None] & (offs_n < N)[None, :]
    return tl.load(at(x_ptr, x_strides, a, b, offs_m, offs_n), mask=mask, other=0.0, eviction_policy=EVICT)


@triton.jit
def _store_normed(
    x, rstd, w_ptr, b_ptr, y_ptr, s_ptr, x_ptr, out_m, N, offs_n, mask, offset,
    BEFORE_WEIGHT: tl.constexpr, COMPUTE: tl.constexpr, EVICT: tl.constexpr,
):  # fmt: skip
    out = out_m[:, None] * N + offs_n[None, :]
    mask_n = offs_n < N
    y = x * rstd[:, None]
    if BEFORE_WEIGHT:
        y = round_to(y, x_ptr.dtype.element_ty).to(COMPUTE)
    y = y * load_scale(w_ptr, offset, offs_n, mask_n, COMPUTE)
    if BEFORE_WEIGHT:
        y = round_to(y, y_ptr.dtype.element_ty).to(COMPUTE)
    y += load_bias(b_ptr, offs_n, mask_n, COMPUTE)
    tl.store(y_ptr + out, round_to(y, y_ptr.dtype.element_ty), mask=mask, eviction_policy=EVICT)
    if s_ptr is not None:
        tl.store(s_ptr + out, round_to(x, s_ptr.dtype.element_ty), mask=mask, eviction_policy=EVICT)


@triton.jit(do_not_specialize=["M"])
def _rms_norm_fwd_kernel(
    x_ptr, r_ptr, w_ptr, b_ptr, y_ptr, s_ptr, rstd_ptr, B, M, N, x_strides, r_strides, eps, offset,
    BEFORE_WEIGHT: tl.constexpr, GROUP: tl.constexpr, COMPUTE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ONE_PASS: tl.constexpr,
):  # fmt: skip
    a, b, offs_m = row_index(tl.program_id(0), B, M, BLOCK_M)
    mask_m = offs_m < M
    out_m = (a * B + b) * M + offs_m
    offs_n = tl.arange(0, BLOCK_N)
    if ONE_PASS:
        mask = mask_m[:, None] & (offs_n < N)[None, :]
        x = load_sum(x_ptr, x_strides, r_ptr, r_strides, s_ptr, a, b, offs_m, offs_n, mask, COMPUTE)
        total = tl.sum(x * x, axis=1)
    else:
        # Then a single program fills a multiprocessor, and loads before it works.
        AHEAD: tl.constexpr = BLOCK_N >= 32768 and r_ptr is None
        squares = tl.zeros((BLOCK_M, BLOCK_N // GROUP), COMPUTE)
        if AHEAD:
            ahead = _load(x_ptr, x_strides, a, b, offs_m, offs_n, mask_m, N, "evict_last")
        for start in range(0, N, BLOCK_N):
            cols = start + offs_n
            mask = mask_m[:, None] & (cols < N)[None, :]
            if AHEAD:
                x, ahead = ahead, _load(x_ptr, x_strides, a, b, offs_m, cols + BLOCK_N, mask_m, N, "evict_last")
                x = x.to(COMPUTE)
            else:
                x = load_sum(x_ptr, x_strides, r_ptr, r_strides, s_ptr, a, b, offs_m, cols, mask, COMPUTE, "evict_last")
            squares += tl.sum(grouped(x * x, GROUP), axis=2)
        total = tl.sum(squares, axis=1)
    rstd = tl.rsqrt(total / N + eps)
    tl.store(rstd_ptr + out_m, rstd, mask=mask_m)
    if ONE_PASS:
        _store_normed(
            x, rstd, w_ptr, b_ptr, y_ptr, s_ptr, x_ptr, out_m, N, offs_n, mask, offset, BEFORE_WEIGHT, COMPUTE, ""
        )
    else:
        if AHEAD:
            ahead = _load(x_ptr, x_strides, a, b, offs_m, offs_n, mask_m, N, "evict_first")
        for start in range(0, N, BLOCK_N):
            cols = start + offs_n
            mask = mask_m[:, None] & (cols < N)[None, :]
            if AHEAD:
                x, ahead = ahead, _load(x_ptr, x_strides, a, b, offs_m, cols + BLOCK_N, mask_m, N, "evict_first")
                x = x.to(COMPUTE)
            else:
                x = load_sum(
                    x_ptr, x_strides, r_ptr, r_strides, s_ptr, a, b, offs_m, cols, mask, COMPUTE, "evict_first"
                )
            _store_normed(
                x, rstd, w_ptr, b_ptr, y_ptr, s_ptr, x_ptr, out_m, N, cols, mask, offset, BEFORE_WEIGHT, COMPUTE,
                "evict_first",
            )  # fmt: skip


@triton.jit(do_not_specialize=["M", "n_tiles"])
def _rms_norm_bwd_kernel(
    dy_ptr, x_ptr, w_ptr, rstd_ptr, ds_ptr, dx_ptr, dw_ptr, db_ptr, B, M, N, n_tiles,
    dy_strides, x_strides, ds_strides, offset,
    WHOLE: tl.constexpr, KEEP: tl.constexpr, COMPUTE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Each program walks row tiles and keeps its share of the weight and bias gradients in registers."""
    pid = tl.program_id(0)
    offs_m, offs_n = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    scale = load_scale(w_ptr, offset, offs_n, offs_n < N, COMPUTE, BLOCK_M if KEEP > 1 else 1)
    dw = tl.zeros((KEEP, BLOCK_N), COMPUTE)
    db = tl.zeros((KEEP, BLOCK_N), COMPUTE)
    TWICE: tl.constexpr = BLOCK_N > 8192  # read again, from L1: registers would not hold the row too
    first: tl.constexpr = "evict_last" if TWICE else ""
    for tile in tl.range(pid, n_tiles, tl.num_programs(0), num_stages=STAGES):
        a, b, m = first_row(tile, B, M, BLOCK_M)
        row = (a * B + b) * M + m
        mask = inside(offs_m, offs_n, M - m, N, WHOLE)
        rstd = tl.load(rstd_ptr + row + offs_m, mask=offs_m < M - m, other=0.0)[:, None]
        dy = load_rows(dy_ptr, dy_strides, a, b, m, offs_m, offs_n, mask, COMPUTE, first)
        x = load_rows(x_ptr, x_strides, a, b, m, offs_m, offs_n, mask, COMPUTE, first)
        projection = tl.sum(dy * scale * (x * rstd), axis=1)[:, None] / N
        if TWICE:
            dy = load_rows(dy_ptr, dy_strides, a, b, m, offs_m, offs_n, mask, COMPUTE, "evict_first")
            x = load_rows(x_ptr, x_strides, a, b, m, offs_m, offs_n, mask, COMPUTE, "evict_first")
        xhat = x * rstd
        dx = (dy * scale - xhat * projection) * rstd
        if ds_ptr is not None:
            dx += load_rows(ds_ptr, ds_strides, a, b, m, offs_m, offs_n, mask, COMPUTE)
        store_rows(dx_ptr, dx, row, offs_m, offs_n, N, mask)
        if dw_ptr is not None:
            dw += fold(dy * xhat, KEEP)
        if db_ptr is not None:
            db += fold(dy, KEEP)
    store_parts(dw_ptr, db_ptr, tl.sum(dw, axis=0), tl.sum(db, axis=0), pid, N, offs_n)


@triton.jit(do_not_specialize=["M"])
def _rms_norm_bwd_kernel_dots(
    dy_ptr, x_ptr, w_ptr, rstd_ptr, dots_ptr, B, M, N, dy_strides, x_strides, offset,
    COMPUTE: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The mean of the gradient's product with xhat, of a row."""
    a, b, offs_m = row_index(tl.program_id(0), B, M, 1)
    products = tl.zeros((1, BLOCK_N), COMPUTE)
    for start in range(0, N, BLOCK_N):
        cols = start + tl.arange(0, BLOCK_N)
        mask = (cols < N)[None, :]
        dy, x = load_pair(dy_ptr, dy_strides, x_ptr, x_strides, a, b, offs_m, cols, mask, COMPUTE)
        products += dy * load_scale(w_ptr, offset, cols, cols < N, COMPUTE) * x
    out_m = (a * B + b) * M + offs_m
    tl.store(dots_ptr + out_m * 2, tl.sum(products, axis=1) * tl.load(rstd_ptr + out_m) / N)


@triton.jit(do_not_specialize=["M", "n_tiles"])
def _rms_norm_bwd_kernel_columns(
    dy_ptr, x_ptr, w_ptr, rstd_ptr, dots_ptr, ds_ptr, dx_ptr, dw_ptr, db_ptr, B, M, N, n_tiles,
    dy_strides, x_strides, ds_strides, offset,
    COMPUTE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A program owns BLOCK_N columns of every num_programs(1)-th row tile."""
    pid_m = tl.program_id(1)
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    scale = load_scale(w_ptr, offset, offs_n, offs_n < N, COMPUTE)
    dw = tl.zeros((BLOCK_M, BLOCK_N), COMPUTE)
    db = tl.zeros((BLOCK_M, BLOCK_N), COMPUTE)
    for tile in tl.range(pid_m, n_tiles, tl.num_programs(1), num_stages=STAGES):
        a, b, offs_m = row_index(tile, B, M, BLOCK_M)
        mask_m = offs_m < M
        mask = mask_m[:, None] & (offs_n < N)[None, :]
        out_m = (a * B + b) * M + offs_m
        dy, x = load_pair(dy_ptr, dy_strides, x_ptr, x_strides, a, b, offs_m, offs_n, mask, COMPUTE)
        rstd = tl.load(rstd_ptr + out_m, mask=mask_m, other=0.0)[:, None]
        projection = tl.load(dots_ptr + out_m * 2, mask=mask_m, other=0.0)[:, None]
        xhat = x * rstd
        dx = (dy * scale - xhat * projection) * rstd
        store_dx(dx, ds_ptr, ds_strides, dx_ptr, a, b, offs_m, out_m, N, offs_n, mask, COMPUTE)
        dw += dy * xhat
        db += dy
    store_parts(dw_ptr, db_ptr, tl.sum(dw, axis=0), tl.sum(db, axis=0), pid_m, N, offs_n)


def _forward(x, residual, weight, bias, eps, offset, before_weight, total_dtype):
    """(y, total or None, rstd)."""
    n = _norms.trailing(weight)
    y = torch.empty(x.shape, dtype=_out_dtype(x.dtype, weight, bias, before_weight), device=x.device)
    total = None if residual is None else torch.empty(x.shape, dtype=total_dtype, device=x.device)
    compute = compute_dtype(x, residual, total, weight, bias)
    eps = torch.finfo(compute).eps if eps is None else eps
    rstd = torch.empty(x.shape[: x.dim() - n], dtype=compute, device=x.device)
    if x.numel():
        operands = (x,) if residual is None else (x, residual)
        layout, (x, *r) = rows(*(t.flatten(-n) for t in operands))
        if (module := wide(layout.N, compute, x.device)) is not None:
            xs = (x, layout.strides[0])
            rs = (r[0], layout.strides[1]) if r else None
            if module.run(
                "rms_norm", xs, rs, y, layout, weight=_norms.packed(weight), bias=_norms.packed(bias), stats=rstd,
                total=total, eps=eps, offset=offset, before_weight=before_weight,
            ) is not None:  # fmt: skip
                return y, total, rstd
        plan = _plan(layout.N, facts(x.device).max_warps)
        launch(
            _rms_norm_fwd_kernel,
            (layout.blocks(plan.BLOCK_M),),
            x.device,
            (x, r[0] if r else None, _norms.packed(weight), _norms.packed(bias), y, total, rstd,
             layout.B, layout.M, layout.N, layout.strides[0], layout.strides[-1],
             scalar(eps, compute), scalar(offset, compute)),
            BEFORE_WEIGHT=before_weight, GROUP=neighbours(layout.strides[0][3], x.element_size()),
            COMPUTE=triton_dtype(compute), **plan._asdict(),
        )  # fmt: skip
    elif rstd.numel():
        rstd.fill_(torch.nan)  # of rows of nothing
    return y, total, rstd


@torch.library.custom_op(add_op_namespace_prefix("rms_norm_fwd"), mutates_args=())
def rms_norm_fwd(
    x: Tensor, weight: Optional[Tensor], bias: Optional[Tensor], eps: Optional[float], offset: float,
    before_weight: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    y, _, rstd = _forward(x, None, weight, bias, eps, offset, before_weight, None)
    return y, rstd


@rms_norm_fwd.register_fake
def _(x, weight, bias, eps, offset, before_weight):
    y = x.new_empty(x.shape, dtype=_out_dtype(x.dtype, weight, bias, before_weight))
    return y, x.new_empty(x.shape[: x.dim() - _norms.trailing(weight)], dtype=compute_dtype(x, weight, bias))


@torch.library.custom_op(add_op_namespace_prefix("add_rms_norm_fwd"), mutates_args=())
def add_rms_norm_fwd(
    x: Tensor, residual: Tensor, weight: Optional[Tensor], bias: Optional[Tensor], eps: Optional[float],
    offset: float, before_weight: bool, total_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return _forward(x, residual, weight, bias, eps, offset, before_weight, total_dtype)


@add_rms_norm_fwd.register_fake
def _(x, residual, weight, bias, eps, offset, before_weight, total_dtype):
    y = x.new_empty(x.shape, dtype=_out_dtype(x.dtype, weight, bias, before_weight))
    total = x.new_empty(x.shape, dtype=total_dtype)
    compute = compute_dtype(x, residual, total, weight, bias)
    return y, total, x.new_empty(x.shape[: x.dim() - _norms.trailing(weight)], dtype=compute)


def _fwd_reference(x, weight, bias, eps, offset, before_weight):
    compute = compute_dtype(x, weight, bias)
    y = _reference(x, weight, bias, eps, offset, before_weight, x.dtype, compute)
    return y, _rstd(x, _norms.trailing(weight), eps, compute)


def _add_fwd_reference(x, residual, weight, bias, eps, offset, before_weight, total_dtype):
    total = _norms.add(x, residual, total_dtype)
    compute = compute_dtype(x, residual, total, weight, bias)
    y = _reference(total, weight, bias, eps, offset, before_weight, x.dtype, compute)
    return y, total, _rstd(total, _norms.trailing(weight), eps, compute)


@torch.library.custom_op(add_op_namespace_prefix("rms_norm_bwd"), mutates_args=())
def rms_norm_bwd(
    dy: Tensor, ds: Optional[Tensor], x: Tensor, weight: Optional[Tensor], bias: Optional[Tensor], rstd: Tensor,
    eps: Optional[float], offset: float, before_weight: bool, dtype: torch.dtype, need_dw: bool, need_db: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of x (or of x + residual, then with ds added), weight and bias. One not needed is empty."""
    return _norms.backward(
        False, _rms_norm_bwd_kernel, _rms_norm_bwd_kernel_dots, _rms_norm_bwd_kernel_columns,
        dy, ds, x, _norms.trailing(weight), weight, bias, rstd, need_dw, need_db, offset,
    )  # fmt: skip


@rms_norm_bwd.register_fake
def _(dy, ds, x, weight, bias, rstd, eps, offset, before_weight, dtype, need_dw, need_db):
    return _norms.fake_backward(x, weight, bias, need_dw, need_db)


def _bwd_reference(dy, ds, x, weight, bias, rstd, eps, offset, before_weight, dtype, need_dw, need_db):
    ndim, compute = _norms.trailing(weight), rstd.dtype
    rstd = _per_row(_rstd(x, ndim, eps, compute), ndim)  # not the argument: it has a derivative
    dy, xhat = dy.to(compute), x.to(compute) * rstd
    g = dy if weight is None else dy * (weight.to(compute) + offset)
    dx = (g - xhat * (g * xhat).mean(tuple(range(-ndim, 0)), keepdim=True)) * rstd
    dx = (dx if ds is None else dx + ds).to(x.dtype)
    dw = sum_leading(dy * xhat, ndim).to(weight.dtype) if need_dw else x.new_empty(0)
    db = sum_leading(dy, ndim).to(bias.dtype) if need_db else x.new_empty(0)
    return dx, dw, db


def _rows_of_bwd(dy, ds, x, weight, bias, rstd, eps, offset, before_weight, dtype, need_dw, need_db):
    return None if need_dw or need_db else [0, 2, 5] if ds is None else [0, 1, 2, 5]


_rms_norm_bwd = differentiable(rms_norm_bwd, _bwd_reference, rowwise=_rows_of_bwd)


def _setup_context(ctx, inputs, output):
    x, weight, bias, *ctx.params = inputs
    ctx.save_for_backward(x, weight, bias, output[1])
    ctx.mark_non_differentiable(output[1])


def _backward(ctx, dy, _):
    x, weight, bias, rstd = ctx.saved_tensors
    needs = ctx.needs_input_grad
    dx, dw, db = _rms_norm_bwd(dy, None, x, weight, bias, rstd, *ctx.params, x.dtype, needs[1], needs[2])
    return dx, dw if needs[1] else None, db if needs[2] else None, None, None, None


_rms_norm = differentiable(rms_norm_fwd, _fwd_reference, _setup_context, _backward, rowwise=lambda *_: [0])


def _add_setup_context(ctx, inputs, output):
    x, residual, weight, bias, *params, _ = inputs
    ctx.params = (*params, x.dtype)
    ctx.dtypes = x.dtype, residual.dtype
    _, total, rstd = output
    ctx.save_for_backward(total, weight, bias, rstd)
    frozen = () if any(ctx.needs_input_grad[:2]) else (total,)
    ctx.mark_non_differentiable(*frozen, rstd)


def _add_backward(ctx, dy, ds, _):
    total, weight, bias, rstd = ctx.saved_tensors
    needs = ctx.needs_input_grad
    dx, dw, db = _rms_norm_bwd(dy, ds, total, weight, bias, rstd, *ctx.params, needs[2], needs[3])
    dx, dr = (dx.to(dtype) if need else None for need, dtype in zip(needs, ctx.dtypes))
    return dx, dr, dw if needs[2] else None, db if needs[3] else None, None, None, None, None


_add_rms_norm = differentiable(
    add_rms_norm_fwd, _add_fwd_reference, _add_setup_context, _add_backward, rowwise=lambda *_: [0, 1]
)


@torch.library.custom_op(add_op_namespace_prefix("rms_norm_quantize_fwd"), mutates_args=())
def rms_norm_quantize_fwd(
    x: Tensor, weight: Optional[Tensor], bias: Optional[Tensor], eps: Optional[float], offset: float,
    before_weight: bool, dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return _rms_norm_quantize.rms_norm_quantized(x, weight, bias, eps, offset, before_weight, dtype)


@rms_norm_quantize_fwd.register_fake
def _(x, weight, bias, eps, offset, before_weight, dtype):
    return _rms_norm_quantize.empty_results(x, weight, dtype)


_rms_norm_quantize_op = differentiable(
    rms_norm_quantize_fwd, _quantize_reference, *_quantize.refuse_gradient("rms_norm"), rowwise=lambda *_: [0]
)


@replayed
def rms_norm(
    x: Tensor,
    weight: Optional[Tensor] = None,
    eps: Optional[float] = 1e-6,
    *,
    bias: Optional[Tensor] = None,
    offset: float = 0.0,
    casting: str = "after_weight",
    quantize: Union[None, str, torch.dtype] = None,
) -> Union[Tensor, tuple[Tensor, Tensor]]:
    """Normalise the trailing dimensions by their root mean square.

    y = x * rsqrt(mean(x^2) + eps) * (weight + offset) + bias

    Args:
        x: (..., *weight.shape), or (..., N) without a weight; float64 | float32 | float16 | bfloat16, any strides.
        weight: scale, of any of those dtypes.
        eps: added inside the square root; None = finfo(compute dtype).eps.
        bias: of weight's shape, or (N,) without a weight.
        offset: added to the weight in the compute dtype (Gemma: 1.0).
        casting: where the result is rounded. "after_weight" (alias "gemma", and torch's): once, to x's dtype.
            "before_weight" (alias "llama"): x * rsqrt(...) is rounded to x's dtype, then multiplied by the weight;
            the result has the dtype that x and weight promote to.
        quantize: "fp8" or a float8 dtype: give y as `quantize_fp8(y, dtype, "row")` does, from y before its last
            rounding ("fp8" is float8_e4m3fn). This has no gradient: one that flows in raises.
    Returns:
        (..., N), contiguous. With quantize (q, scale): float8 of x's shape, and a float32 for each row.
    Raises:
        TypeError: dtype not listed.   ValueError: weight is not x's trailing shape; unknown casting, quantize; eps < 0.
    Numerics: sums and products in float32, in float64 where an argument is float64. Weight and bias gradients are
        deterministic. Autograd: first and second derivative, vmap; forward mode raises.
    Source: Zhang and Sennrich 2019.
    """
    _check("rms_norm", x, weight, bias, eps, offset, casting)
    eps = eps if eps is None else float(eps)
    if quantize is not None:
        if quantize != "fp8" and quantize not in _fp8.DTYPES:
            raise ValueError(f"rms_norm: quantize must be 'fp8', a float8 dtype or None, got {quantize!r}")
        return _rms_norm_quantize_op(x, weight, bias, eps, float(offset), _BEFORE_WEIGHT[casting], _float8(quantize))
    if use_kernel(x):
        return _rms_norm(x, weight, bias, eps, float(offset), _BEFORE_WEIGHT[casting])[0]
    if bias is None and offset == 0.0 and not _BEFORE_WEIGHT[casting] and (weight is None or weight.dtype == x.dtype):
        return torch.nn.functional.rms_norm(x, x.shape[-_norms.trailing(weight) :], weight, eps).contiguous()
    return rms_norm_reference(x, weight, eps, bias=bias, offset=offset, casting=casting).contiguous()


@replayed
def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Optional[Tensor] = None,
    eps: Optional[float] = 1e-6,
    *,
    bias: Optional[Tensor] = None,
    offset: float = 0.0,
    casting: str = "after_weight",
    residual_dtype: Optional[torch.dtype] = None,
) -> tuple[Tensor, Tensor]:
    """Add a residual and normalise the sum, in one pass over memory.

    s = x + residual, rounded to its dtype;   y = rms_norm(s, weight, eps, ...)

    Args:
        x, residual: of one shape; the other arguments as in `rms_norm`.
        residual_dtype: dtype of the sum; None = what x and residual promote to.
    Returns:
        (y, s), contiguous. y has the dtype that `rms_norm` gives for x's dtype; neither shares memory with an input.
    Raises:
        TypeError, ValueError: as `rms_norm`; residual is not of x's shape.
    Numerics: y comes from the rounded s, as in two separate calls. Autograd: as `rms_norm`, with
        gradients flowing in through both results.
    Source: as `rms_norm`, behind a residual connection.
    """
    _check("add_rms_norm", x, weight, bias, eps, offset, casting, residual=residual)
    _norms.check_residual("add_rms_norm", x, residual, residual_dtype)
    if not use_kernel(x):
        y, total = add_rms_norm_reference(
            x, residual, weight, eps, bias=bias, offset=offset, casting=casting, residual_dtype=residual_dtype
        )
        return y.contiguous(), total.contiguous()
    total_dtype = residual_dtype or torch.promote_types(x.dtype, residual.dtype)
    eps = eps if eps is None else float(eps)
    y, total, _ = _add_rms_norm(x, residual, weight, bias, eps, float(offset), _BEFORE_WEIGHT[casting], total_dtype)
    return y, total


def _check(op, x, weight, bias, eps, offset, casting, **others):
    _checks.tensors(op, x, weight=weight, bias=bias, **others)
    _norms.check_shapes(op, x, _norms.trailing(weight), weight, bias)
    _checks.number(op, "eps", eps, low=0, optional=True)
    _checks.number(op, "offset", offset)
    _checks.choice(op, "casting", casting, _BEFORE_WEIGHT)
