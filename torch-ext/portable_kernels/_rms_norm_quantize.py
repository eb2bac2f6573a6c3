"""The kernel of the root-mean-square norm whose result is quantised, row by row, without being written in between."""

import torch

from . import _norms
from ._device import facts, launch
from ._fp8 import FORMATS, finite_size, operand, saturate, scale_of, store_fp8
from ._norms import load_bias, load_scale, load_sum
from ._rows import compute_dtype, plan_forward, row_index, rows
from ._triton import round_to, scalar, tl, triton, triton_dtype


@triton.jit
def _normed(
    x, rstd, w_ptr, b_ptr, x_ptr, offs_n, mask_n, offset, BEFORE_WEIGHT: tl.constexpr, COMPUTE: tl.constexpr
):  # fmt: skip
    y = x * rstd[:, None]
    if BEFORE_WEIGHT:
        y = round_to(y, x_ptr.dtype.element_ty).to(COMPUTE)
    return y * load_scale(w_ptr, offset, offs_n, mask_n, COMPUTE) + load_bias(b_ptr, offs_n, mask_n, COMPUTE)


@triton.jit(do_not_specialize=["M"])
def _rms_norm_quantize_fwd_kernel(
    x_ptr, w_ptr, b_ptr, q_ptr, scale_ptr, B, M, N, x_strides, eps, offset, fmax,
    BEFORE_WEIGHT: tl.constexpr, MANTISSA: tl.constexpr, FNUZ: tl.constexpr, COMPUTE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ONE_PASS: tl.constexpr,
):  # fmt: skip
    a, b, offs_m = row_index(tl.program_id(0), B, M, BLOCK_M)
    mask_m = offs_m < M
    out_m = (a * B + b) * M + offs_m
    offs_n = tl.arange(0, BLOCK_N)
    q_row = q_ptr + (out_m * N)[:, None]
    if ONE_PASS:
        mask_n = offs_n < N
        mask = mask_m[:, None] & mask_n[None, :]
        x = load_sum(x_ptr, x_strides, None, x_strides, None, a, b, offs_m, offs_n, mask, COMPUTE)
        rstd = tl.rsqrt(tl.sum(x * x, axis=1) / N + eps)
        y = _normed(x, rstd, w_ptr, b_ptr, x_ptr, offs_n, mask_n, offset, BEFORE_WEIGHT, COMPUTE)
        scale, inverse = scale_of(tl.max(finite_size(y), axis=1), fmax)
        store_fp8(q_row + offs_n[None, :], saturate(y * inverse[:, None], fmax), mask, MANTISSA, FNUZ)
    else:
        squares = tl.zeros((BLOCK_M, BLOCK_N), COMPUTE)
        for start in range(0, N, BLOCK_N):
            mask = mask_m[:, None] & (start + offs_n < N)[None, :]
            x = load_sum(x_ptr, x_strides, None, x_strides, None, a, b, offs_m, start + offs_n, mask, COMPUTE)
            squares += x * x
        rstd = tl.rsqrt(tl.sum(squares, axis=1) / N + eps)
        sizes = tl.zeros((BLOCK_M, BLOCK_N), COMPUTE)
        for start in range(0, N, BLOCK_N):
            cols = start + offs_n
            mask_n = cols < N
            mask = mask_m[:, None] & mask_n[None, :]
            x = load_sum(x_ptr, x_strides, None, x_strides, None, a, b, offs_m, cols, mask, COMPUTE)
            y = _normed(x, rstd, w_ptr, b_ptr, x_ptr, cols, mask_n, offset, BEFORE_WEIGHT, COMPUTE)
            sizes = tl.maximum(sizes, finite_size(y))
        scale, inverse = scale_of(tl.max(sizes, axis=1), fmax)
        for start in range(0, N, BLOCK_N):
            cols = start + offs_n
            mask_n = cols < N
            mask = mask_m[:, None] & mask_n[None, :]
            x = load_sum(x_ptr, x_strides, None, x_strides, None, a, b, offs_m, cols, mask, COMPUTE)
            y = _normed(x, rstd, w_ptr, b_ptr, x_ptr, cols, mask_n, offset, BEFORE_WEIGHT, COMPUTE)
            store_fp8(q_row + cols[None, :], saturate(y * inverse[:, None], fmax), mask, MANTISSA, FNUZ)
    tl.store(scale_ptr + out_m, scale, mask=mask_m)


def empty_results(x, weight, dtype):
    """(q, scale), to be filled."""
    n = _norms.trailing(weight)
    return x.new_empty(x.shape, dtype=dtype), x.new_empty((*x.shape[: x.dim() - n], *[1] * n), dtype=torch.float32)


def rms_norm_quantized(x, weight, bias, eps, offset, before_weight, dtype):
    """(q, scale) from the kernel."""
    q, scale = empty_results(x, weight, dtype)
    if not x.numel():
        return q, scale.fill_(1.0)
    device, form, compute = facts(x.device), FORMATS[dtype], compute_dtype(x, weight, bias)
    layout, (x,) = rows(x.flatten(-_norms.trailing(weight)))
    plan = plan_forward(layout.N, device.max_warps)
    launch(
        _rms_norm_quantize_fwd_kernel,
        (layout.blocks(plan.BLOCK_M),),
        x.device,
        (x, _norms.packed(weight), _norms.packed(bias), operand(q, device.arch), scale,
         layout.B, layout.M, layout.N, layout.strides[0],
         scalar(torch.finfo(compute).eps if eps is None else eps, compute), scalar(offset, compute), form.max),
        BEFORE_WEIGHT=before_weight, MANTISSA=form.mantissa, FNUZ=form.fnuz, COMPUTE=triton_dtype(compute),
        **plan._asdict(),
    )  # fmt: skip
    return q, scale
