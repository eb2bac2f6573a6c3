"""Kernels that quantise to float8: scales of the whole tensor, of rows, of 128 elements, of 128x128 squares."""

import torch

from ._device import facts, launch
from ._fp8 import FORMATS, finite_size, operand, saturate, scale_of, store_fp8
from ._pointwise import elements
from ._pointwise import plan as plan_elements
from ._rows import at, compute_dtype, plan_any_dim, plan_forward, row_index, rows
from ._triton import cdiv, next_power_of_2, tl, triton, triton_dtype

GROUP = 128  # elements of a row, or rows and columns of a square, that share a scale


@triton.jit
def _load(ptrs, mask, COMPUTE: tl.constexpr):
    return tl.load(ptrs, mask=mask, other=0.0).to(COMPUTE)


@triton.jit(do_not_specialize=["M"])
def _quantize_fp8_fwd_kernel(
    x_ptr, q_ptr, scale_ptr, B, M, N, groups, x_strides, fmax,
    WIDTH: tl.constexpr, MANTISSA: tl.constexpr, FNUZ: tl.constexpr, COMPUTE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ONE_PASS: tl.constexpr,
):  # fmt: skip
    """A scale a group: a row, or with WIDTH that many elements of one. M counts groups, of which a row has `groups`."""
    a, b, offs_g = row_index(tl.program_id(0), B, M, BLOCK_M)
    mask_g = offs_g < M
    out_g = (a * B + b) * M + offs_g
    row, first = offs_g, tl.zeros((BLOCK_M,), tl.int64)
    if WIDTH:
        row, first = offs_g // groups, offs_g % groups * WIDTH
    x_row = x_ptr + (a * x_strides[0] + b * x_strides[1] + row * x_strides[2] + first * x_strides[3])[:, None]
    q_row = q_ptr + (((a * B + b) * (M // groups) + row) * N + first)[:, None]
    size_n = (N - first)[:, None]
    offs_n = tl.arange(0, BLOCK_N)[None, :]
    step_n = tl.cast(x_strides[3], tl.int64)
    if ONE_PASS:
        mask = mask_g[:, None] & (offs_n < size_n)
        x = _load(x_row + offs_n * step_n, mask, COMPUTE)
        size = tl.max(finite_size(x), axis=1)
    else:
        sizes = tl.zeros((BLOCK_M, BLOCK_N), COMPUTE)
        for start in range(0, N, BLOCK_N):
            mask = mask_g[:, None] & (offs_n < size_n - start)
            sizes = tl.maximum(sizes, finite_size(_load(x_row + (start + offs_n) * step_n, mask, COMPUTE)))
        size = tl.max(sizes, axis=1)
    scale, inverse = scale_of(size, fmax)
    tl.store(scale_ptr + out_g, scale, mask=mask_g)
    if ONE_PASS:
        store_fp8(q_row + offs_n, saturate(x * inverse[:, None], fmax), mask, MANTISSA, FNUZ)
    else:
        for start in range(0, N, BLOCK_N):
            mask = mask_g[:, None] & (offs_n < size_n - start)
            x = _load(x_row + (start + offs_n) * step_n, mask, COMPUTE)
            store_fp8(q_row + start + offs_n, saturate(x * inverse[:, None], fmax), mask, MANTISSA, FNUZ)


@triton.jit
def _quantize_fp8_fwd_kernel_squares(
    x_ptr, q_ptr, scale_ptr, M, N, tiles_m, tiles_n, x_strides, fmax,
    MANTISSA: tl.constexpr, FNUZ: tl.constexpr, COMPUTE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A square a program."""
    pid = tl.program_id(0)
    a = tl.cast(pid // (tiles_m * tiles_n), tl.int64)
    offs_m = tl.cast(pid // tiles_n % tiles_m, tl.int64) * BLOCK + tl.arange(0, BLOCK)
    offs_n = tl.cast(pid % tiles_n, tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = (offs_m < M)[:, None] & (offs_n < N)[None, :]
    x = _load(at(x_ptr, x_strides, a, 0, offs_m, offs_n), mask, COMPUTE)
    scale, inverse = scale_of(tl.max(tl.max(finite_size(x), axis=1, keep_dims=True), axis=0, keep_dims=True), fmax)
    tl.store(scale_ptr + pid + tl.zeros((1, 1), tl.int32), scale)
    q = saturate(x * inverse, fmax)
    store_fp8(q_ptr + ((a * M + offs_m) * N)[:, None] + offs_n[None, :], q, mask, MANTISSA, FNUZ)


@triton.jit(do_not_specialize=["M", "n_tiles"])
def _quantize_fp8_fwd_kernel_tensor(
    x_ptr, q_ptr, part_ptr, scale_ptr, B, M, N, tiles_n, n_tiles, n_parts, x_strides, fmax,
    MANTISSA: tl.constexpr, FNUZ: tl.constexpr, COMPUTE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Without q_ptr: the largest size that each program meets. With it: the scale from those, and the quotients.

    The second walk is backwards, since what the first has read last is still in the cache.
    """
    pid = tl.program_id(0)
    if q_ptr is None:
        sizes = tl.zeros((BLOCK_M, BLOCK_N), COMPUTE)
    else:
        offs_p = tl.arange(0, PARTS)
        # lint: ok wrong-fill: sizes are never below 0
        size = tl.max(tl.load(part_ptr + offs_p, mask=offs_p < n_parts, other=0.0), axis=0, keep_dims=True)
        scale, inverse = scale_of(size, fmax)
        if pid == 0:
            tl.store(scale_ptr + tl.arange(0, 1), scale)
    for step in range(pid, n_tiles, tl.num_programs(0)):
        tile = step
        if q_ptr is not None:
            tile = n_tiles - 1 - step
        a, b, offs_m = row_index(tile // tiles_n, B, M, BLOCK_M)
        offs_n = tl.cast(tile % tiles_n, tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
        mask = (offs_m < M)[:, None] & (offs_n < N)[None, :]
        x = _load(at(x_ptr, x_strides, a, b, offs_m, offs_n), mask, COMPUTE)
        if q_ptr is None:
            sizes = tl.maximum(sizes, finite_size(x))
        else:
            out = (((a * B + b) * M + offs_m) * N)[:, None] + offs_n[None, :]
            store_fp8(q_ptr + out, saturate(x * inverse[:, None], fmax), mask, MANTISSA, FNUZ)
    if q_ptr is None:
        tl.store(part_ptr + pid, tl.max(tl.max(sizes, axis=1), axis=0))


def scale_shape(shape, scaling):
    """Of the scales of a tensor of this shape."""
    if scaling == "tensor":
        return ()
    if scaling == "row":
        return (*shape[:-1], 1)
    rows = (cdiv(shape[-2], GROUP),) if scaling == "square" else shape[-2:-1]
    return (*shape[:-2], *rows, cdiv(shape[-1], GROUP))


def quantize(x, dtype, scaling):
    """(q, scale) from the kernels."""
    q = torch.empty(x.shape, dtype=dtype, device=x.device)
    scale = torch.empty(scale_shape(x.shape, scaling), dtype=torch.float32, device=x.device)
    if not x.numel():
        return q, scale.fill_(1.0)
    device, form, compute = facts(x.device), FORMATS[dtype], compute_dtype(x)
    out = operand(q, device.arch)
    options = {"MANTISSA": form.mantissa, "FNUZ": form.fnuz, "COMPUTE": triton_dtype(compute)}
    if scaling == "tensor":
        layout, (_, x) = elements(q, x)
        tile = plan_elements(layout)
        tiles_n = cdiv(layout.N, tile.BLOCK_N)
        n_tiles = layout.blocks(tile.BLOCK_M) * tiles_n
        programs = min(n_tiles, 8 * device.multiprocessors)  # untuned
        parts = torch.empty(programs, dtype=compute, device=x.device)
        for target in (None, out):
            launch(
                _quantize_fp8_fwd_kernel_tensor,
                (programs,),
                x.device,
                (x, target, parts, scale, layout.B, layout.M, layout.N, tiles_n, n_tiles, programs,
                 layout.strides[1], form.max),
                **options, **tile._asdict(), PARTS=next_power_of_2(programs),
            )  # fmt: skip
    elif scaling == "square":
        x = x.flatten(0, -3) if x.dim() > 2 else x.unsqueeze(0)
        tiles_m, tiles_n = cdiv(x.shape[1], GROUP), cdiv(x.shape[2], GROUP)
        launch(
            _quantize_fp8_fwd_kernel_squares,
            (x.shape[0] * tiles_m * tiles_n,),
            x.device,
            (x, out, scale, *x.shape[1:], tiles_m, tiles_n, (x.stride(0), 0, *x.stride()[1:]), form.max),
            **options, BLOCK=GROUP, num_warps=8,
        )  # fmt: skip
    else:
        layout, (x,) = rows(x)
        groups, width = (cdiv(layout.N, GROUP), GROUP) if scaling == "block" else (1, 0)
        if width:
            plan = plan_forward(GROUP, device.max_warps)
        else:
            plan = plan_any_dim(layout, x.element_size(), device.max_warps)
        grouped = layout._replace(M=layout.M * groups)
        launch(
            _quantize_fp8_fwd_kernel,
            (grouped.blocks(plan.BLOCK_M),),
            x.device,
            (x, out, scale, layout.B, grouped.M, layout.N, groups, layout.strides[0], form.max),
            WIDTH=width, **options, **plan._asdict(),
        )  # fmt: skip
    return q, scale


def refuse_gradient(op):
    """setup_context and backward of an op without a derivative: an error, where zeros would go unseen."""

    def backward(ctx, *grads):
        raise NotImplementedError(f"{op}: has no gradient; detach its inputs, or differentiate the product unquantised")

    return lambda ctx, inputs, output: None, backward
