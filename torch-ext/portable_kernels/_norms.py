"""What the norm families share: reading x + residual, and summing weight and bias gradients in a fixed order.

The backward of a norm is persistent: each program walks row tiles and keeps its share of the weight and bias gradients
in registers, one row of partial sums a program. Rows too wide for that get those from a kernel over columns.
"""

import functools
from typing import NamedTuple

import torch

from . import _checks
from ._device import facts, launch
from ._rows import at, compute_dtype, rows
from ._triton import cdiv, next_power_of_2, round_to, scalar, tl, triton, triton_dtype


def trailing(weight, bias=None):
    """How many trailing dimensions are normalised: the weight's, or else the bias's, or else the last one."""
    return 1 if weight is None and bias is None else (bias if weight is None else weight).dim()


def check_shapes(op, x, ndim, weight, bias):
    """Refuse a weight or bias that is not of x's `ndim` trailing dimensions."""
    if not 0 < ndim <= x.dim():
        name = "bias" if weight is None and bias is not None else "weight"
        raise ValueError(f"{op}: {name} must have 1 to x.dim() dimensions, got {ndim} for x {tuple(x.shape)}")
    _checks.shape(op, "weight", weight, x.shape[-ndim:])
    _checks.shape(op, "bias", bias, x.shape[-ndim:])


def check_residual(op, x, residual, residual_dtype):
    if residual is None:
        raise TypeError(f"{op}: residual must be a tensor, got NoneType")
    _checks.shape(op, "residual", residual, x.shape)
    if residual_dtype is not None and residual_dtype not in _checks.FLOATS:
        raise TypeError(f"{op}: residual_dtype must be a floating dtype or None, got {residual_dtype}")


def add(x, residual, dtype=None):
    """x + residual in PyTorch, rounded once to `dtype`, or to what the two promote to."""
    dtype = dtype or torch.promote_types(x.dtype, residual.dtype)
    compute = torch.promote_types(compute_dtype(x, residual), dtype)
    return (x.to(compute) + residual).to(dtype)


def packed(param):
    """A weight or bias, or None, as kernels read it."""
    return param if param is None or param.is_contiguous() else param.contiguous()  # N elements, once


class BackwardPlan(NamedTuple):
    """Tiles as in `Plan`, STAGES of them in flight, and how many programs walk them on each multiprocessor."""

    BLOCK_M: int
    BLOCK_N: int
    ONE_PASS: bool
    STAGES: int
    num_warps: int
    programs: int


@functools.lru_cache(4096)
def plan_backward(N, itemsize, device):
    """itemsize: bytes of an element of all operands that are read together."""
    BLOCK_N = next_power_of_2(N)
    if BLOCK_N > 16384:  # looped over: untuned
        return BackwardPlan(1, 4096, False, 1, min(8, device.max_warps), 2)
    # Of a copy, rms_norm / layer_norm, H200 bf16: 0.90 / 0.76 at N = 256, 0.94 / 0.87 at 1024, 0.93 / 0.89 at 4096,
    # 0.95 / 0.91 at 8192, 0.63 / 0.45 at 16384. Up to 512 a warp has rows of its own: with 4 warps a row 0.36 / 0.20.
    if BLOCK_N <= 512:
        # With a third operand half the rows: else what a warp works on does not fit its registers.
        plan = BackwardPlan((2048 if itemsize <= 4 else 1024) // max(BLOCK_N, 128), BLOCK_N, True, 3, 1, 8)
    elif BLOCK_N <= 4096:
        plan = BackwardPlan(4096 // BLOCK_N, BLOCK_N, True, 3, 4, 2)
    else:
        plan = BackwardPlan(1, BLOCK_N, True, 4 if BLOCK_N <= 8192 else 1, 16, 1)
    # All stages but one wait in shared memory, beside a tile that changes its layout where dtypes differ.
    fits = ((plan.STAGES - 1) * itemsize + 4) * plan.BLOCK_M * BLOCK_N <= device.shared_memory
    return plan if fits else plan._replace(STAGES=1)


@triton.jit
def load_sum(x_ptr, x_strides, r_ptr, r_strides, s_ptr, a, b, offs_m, offs_n, mask, COMPUTE: tl.constexpr):
    """The rows to normalise: x, or x + residual as rounded in the sum that is returned."""
    x = tl.load(at(x_ptr, x_strides, a, b, offs_m, offs_n), mask=mask, other=0.0).to(COMPUTE)
    if r_ptr is not None:
        x += tl.load(at(r_ptr, r_strides, a, b, offs_m, offs_n), mask=mask, other=0.0).to(COMPUTE)
        x = round_to(x, s_ptr.dtype.element_ty).to(COMPUTE)
    return x


@triton.jit
def load_scale(w_ptr, offset, offs_n, mask_n, COMPUTE: tl.constexpr):
    """weight + offset, (1, BLOCK_N): loaded in two dimensions, so that it lies over threads as the rows do."""
    if w_ptr is not None:
        return tl.load(w_ptr + offs_n[None, :], mask=mask_n[None, :], other=0.0).to(COMPUTE) + offset
    else:
        return tl.full((1, 1), 1.0, COMPUTE)


@triton.jit
def load_bias(b_ptr, offs_n, mask_n, COMPUTE: tl.constexpr):
    """bias, (1, BLOCK_N)."""
    if b_ptr is not None:
        return tl.load(b_ptr + offs_n[None, :], mask=mask_n[None, :], other=0.0).to(COMPUTE)
    else:
        return tl.full((1, 1), 0.0, COMPUTE)


@triton.jit
def load_pair(dy_ptr, dy_strides, x_ptr, x_strides, a, b, offs_m, offs_n, mask, COMPUTE: tl.constexpr):
    dy = tl.load(at(dy_ptr, dy_strides, a, b, offs_m, offs_n), mask=mask, other=0.0).to(COMPUTE)
    x = tl.load(at(x_ptr, x_strides, a, b, offs_m, offs_n), mask=mask, other=0.0).to(COMPUTE)
    return dy, x


@triton.jit
def store_dx(dx, ds_ptr, ds_strides, dx_ptr, a, b, offs_m, out_m, N, offs_n, mask, COMPUTE: tl.constexpr):
    """dx, plus the gradient that flows in through the returned sum."""
    if ds_ptr is not None:
        dx += tl.load(at(ds_ptr, ds_strides, a, b, offs_m, offs_n), mask=mask, other=0.0).to(COMPUTE)
    tl.store(dx_ptr + out_m[:, None] * N + offs_n[None, :], round_to(dx, dx_ptr.dtype.element_ty), mask=mask)


@triton.jit
def store_parts(dw_ptr, db_ptr, dw, db, pid, N, offs_n):
    part = tl.cast(pid, tl.int64) * N + offs_n
    if dw_ptr is not None:
        tl.store(dw_ptr + part, dw, mask=offs_n < N)
    if db_ptr is not None:
        tl.store(db_ptr + part, db, mask=offs_n < N)


@triton.jit
def add_to(ptr, values, offs_n, mask_n):
    """Add to sums that no other program touches."""
    tl.store(ptr + offs_n, tl.load(ptr + offs_n, mask=mask_n, other=0.0) + values, mask=mask_n)
    tl.debug_barrier()  # the next addition may come from another thread


def backward(kernel, kernel_columns, dy, ds, x, ndim, weight, bias, saved, need_dw, need_db, *scalars):
    """Gradients of x (or of x + residual, then with ds added), weight and bias. One not needed is empty.

    Args:
        kernel: of (dy, x, weight, saved, ds, dx, dw, db, B, M, N, n_tiles, strides of dy, x and ds, *scalars).
        kernel_columns: of (dy, x, saved, dw, db, B, M, N, n_tiles, strides of dy and x).
        saved: the statistics that the forward kept of each row, in the dtype to compute in.
    """
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    dw = db = None
    if x.numel():
        layout, (dy, x, *extra) = rows(*(t.flatten(-ndim) for t in (dy, x, ds) if t is not None))
        ds = extra[0] if extra else None
        device = facts(x.device)
        itemsize = dy.element_size() + x.element_size() + (ds.element_size() if ds is not None else 0)
        plan = plan_backward(layout.N, itemsize, device)
        n_tiles = layout.blocks(plan.BLOCK_M)
        programs = min(n_tiles, plan.programs * device.multiprocessors)
        parts = programs if plan.ONE_PASS else min(cdiv(n_tiles, 64), 8)
        dw = saved.new_empty((parts, layout.N)) if need_dw else None
        db = saved.new_empty((parts, layout.N)) if need_db else None
        fused = plan.ONE_PASS
        compute = triton_dtype(saved.dtype)
        launch(
            kernel,
            (programs,),
            x.device,
            (dy, x, packed(weight), saved, ds, dx, dw if fused else None, db if fused else None,
             layout.B, layout.M, layout.N, n_tiles, layout.strides[0], layout.strides[1], layout.strides[-1],
             *(scalar(s, saved.dtype) for s in scalars)),
            COMPUTE=compute, BLOCK_M=plan.BLOCK_M, BLOCK_N=plan.BLOCK_N, ONE_PASS=fused, STAGES=plan.STAGES,
            num_warps=plan.num_warps,
        )  # fmt: skip
        if not fused and (need_dw or need_db):
            n_tiles = layout.blocks(16)
            launch(
                kernel_columns,
                (cdiv(layout.N, 256), parts),
                x.device,
                (dy, x, saved, dw, db, layout.B, layout.M, layout.N, n_tiles, layout.strides[0], layout.strides[1]),
                COMPUTE=compute, BLOCK_M=16, BLOCK_N=256, num_warps=4,
            )  # fmt: skip
    return dx, _summed(dw, weight, need_dw, x), _summed(db, bias, need_db, x)


def _summed(parts, param, needed, x):
    if not needed:
        return x.new_empty(0)
    return param.new_zeros(param.shape) if parts is None else parts.sum(0).to(param.dtype).view(param.shape)


def fake_backward(x, weight, bias, need_dw, need_db):
    """Shapes, strides and dtypes of what `backward` returns."""
    dw = x.new_empty(weight.shape, dtype=weight.dtype) if need_dw else x.new_empty(0)
    db = x.new_empty(bias.shape, dtype=bias.dtype) if need_db else x.new_empty(0)
    return x.new_empty(x.shape), dw, db
