"""What the norm families share: reading x + residual, and summing weight and bias gradients in a fixed order.

The backward of a norm is persistent: each program walks row tiles and keeps its share of the weight and bias gradients
in registers, one row of partial sums a program. Rows too wide for that are read twice.
"""

import functools
from typing import NamedTuple

import torch

from . import _checks
from ._device import facts, launch
from ._rows import at, compute_dtype, rows, warps, wide
from ._triton import INTERPRET, cdiv, next_power_of_2, round_to, scalar, tl, triton, triton_dtype

_ANY = tl.constexpr("")  # no policy of what the cache gives up first
_ROUGH = tl.constexpr(INTERPRET)  # where numpy adds joined rows up one by one, and its errors too


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
        return BackwardPlan(1, 4096, False, 1, warps(8, device.max_warps), 2)
    # Of a copy, rms_norm / layer_norm, H200 bf16: 0.94 / 0.92 at N = 128, 0.94 / 0.93 at 256, 0.95 / 0.95 at 1024,
    # 0.94 / 0.93 at 4096, 0.92 / 0.93 at 8192, 0.88 / 0.55 at 16384. Up to 512 a warp has rows of its own: with 4 warps
    # a row 0.36 / 0.20.
    if BLOCK_N <= 512:
        plan = BackwardPlan(1024 // max(BLOCK_N, 128), BLOCK_N, True, 3, 1, 8)
    elif BLOCK_N <= 4096:
        plan = BackwardPlan(4096 // BLOCK_N, BLOCK_N, True, 3, warps(4, device.max_warps), 2)
    else:
        plan = BackwardPlan(1, BLOCK_N, True, 4 if BLOCK_N <= 8192 else 1, warps(16, device.max_warps), 1)
    # All stages but one wait in shared memory, beside a tile that changes its layout where dtypes differ.
    fits = ((plan.STAGES - 1) * itemsize + 4) * plan.BLOCK_M * BLOCK_N <= device.shared_memory
    return plan if fits else plan._replace(STAGES=1)


@triton.jit
def load_sum(
    x_ptr, x_strides, r_ptr, r_strides, s_ptr, a, b, offs_m, offs_n, mask,
    COMPUTE: tl.constexpr, EVICT: tl.constexpr = _ANY,
):  # fmt: skip
    """The rows to normalise: x, or x + residual as rounded in the sum that is returned."""
    x = tl.load(at(x_ptr, x_strides, a, b, offs_m, offs_n), mask=mask, other=0.0, eviction_policy=EVICT).to(COMPUTE)
    if r_ptr is not None:
        r = tl.load(at(r_ptr, r_strides, a, b, offs_m, offs_n), mask=mask, other=0.0, eviction_policy=EVICT)
        x = round_to(x + r.to(COMPUTE), s_ptr.dtype.element_ty).to(COMPUTE)
    return x


@triton.jit
def load_scale(w_ptr, offset, offs_n, mask_n, COMPUTE: tl.constexpr, ROWS: tl.constexpr = 1):
    """weight + offset, (ROWS, BLOCK_N): loaded as the rows are, so that it lies over threads as they do."""
    if w_ptr is not None:
        shape: tl.constexpr = (ROWS, offs_n.shape[0])
        ptrs = tl.broadcast_to(w_ptr + offs_n[None, :], shape)
        return tl.load(ptrs, mask=tl.broadcast_to(mask_n[None, :], shape), other=0.0).to(COMPUTE) + offset
    else:
        return tl.full((1, 1), 1.0, COMPUTE)


@triton.jit
def load_bias(b_ptr, offs_n, mask_n, COMPUTE: tl.constexpr, ROWS: tl.constexpr = 1):
    """bias, (ROWS, BLOCK_N)."""
    if b_ptr is not None:
        return load_scale(b_ptr, 0.0, offs_n, mask_n, COMPUTE, ROWS)
    else:
        return tl.full((1, 1), 0.0, COMPUTE)


@triton.jit
def load_pair(
    dy_ptr, dy_strides, x_ptr, x_strides, a, b, offs_m, offs_n, mask,
    COMPUTE: tl.constexpr, EVICT: tl.constexpr = _ANY,
):  # fmt: skip
    dy = tl.load(at(dy_ptr, dy_strides, a, b, offs_m, offs_n), mask=mask, other=0.0, eviction_policy=EVICT)
    x = tl.load(at(x_ptr, x_strides, a, b, offs_m, offs_n), mask=mask, other=0.0, eviction_policy=EVICT)
    return dy.to(COMPUTE), x.to(COMPUTE)


@triton.jit
def load_rows(ptr, strides, a, b, m, offs_m, offs_n, mask, COMPUTE: tl.constexpr, EVICT: tl.constexpr = _ANY):
    """The rows m + offs_m. m is a number: a loop then adds a number to pointers that stay as they are."""
    row = ptr + a * strides[0] + b * strides[1] + tl.cast(m, tl.int64) * strides[2]
    tile = (tl.cast(offs_m, tl.int64) * strides[2])[:, None] + (tl.cast(offs_n, tl.int64) * strides[3])[None, :]
    return tl.load(row + tile, mask=mask, other=0.0, eviction_policy=EVICT).to(COMPUTE)


@triton.jit
def store_rows(ptr, values, row, offs_m, offs_n, N, mask):
    """To the rows row + offs_m of a contiguous tensor."""
    tl.store(ptr + row * N + (offs_m[:, None] * N + offs_n[None, :]), round_to(values, ptr.dtype.element_ty), mask=mask)


def side_by_side(plan):
    """How many rows of a tile lie over the threads at once, 8 elements each: what threads hold of columns, they hold of
    so many rows, and no element has to change its thread."""
    return min(plan.BLOCK_M, max(1, 256 * plan.num_warps // plan.BLOCK_N))


@triton.jit
def by_rows(x, KEEP: tl.constexpr):
    """Rows as (BLOCK_M / KEEP, KEEP, BLOCK_N)."""
    return tl.reshape(x, (x.shape[0] // KEEP, KEEP, x.shape[1]))


@triton.jit
def fold(x, KEEP: tl.constexpr):
    """Sums over rows, down to KEEP of them."""
    if KEEP == x.shape[0]:
        return x
    else:
        return tl.sum(by_rows(x, KEEP), axis=0)


@triton.jit
def two_sums(first, second):
    """The sums of two tiles' rows. Joined they take one reduction, with half the barriers."""
    if _ROUGH:
        return tl.sum(first, axis=1), tl.sum(second, axis=1)
    else:
        return tl.split(tl.sum(tl.join(first, second), axis=1))


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


def backward(
    layer, kernel, kernel_dots, kernel_columns, dy, ds, x, ndim, weight, bias, saved, need_dw, need_db, *scalars
):
    """Gradients of x (or of x + residual, then with ds added), weight and bias. One not needed is empty.

    Rows that fit in registers are read once, by `kernel`. Of wider ones `kernel_dots` keeps two sums, with which
    `kernel_columns` takes tiles of a few rows in any order: so each program has columns of its own to sum over.

    Args:
        layer: layer_norm, whose kernels take no scalars; else rms_norm.
        kernel: of (dy, x, weight, saved, ds, dx, dw, db, B, M, N, n_tiles, strides of dy, x and ds, *scalars).
        kernel_dots: of (dy, x, weight, saved, dots, B, M, N, strides of dy and x, *scalars).
        kernel_columns: as `kernel`, with dots after saved.
        saved: the statistics that the forward kept of each row, in the dtype to compute in.
    """
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    dw = db = None
    if x.numel():
        layout, (dy, x, *extra) = rows(*(t.flatten(-ndim) for t in (dy, x, ds) if t is not None))
        ds = extra[0] if extra else None
        device = facts(x.device)
        itemsize = dy.element_size() + x.element_size() + (ds.element_size() if ds is not None else 0)
        if (module := wide(layout.N, saved.dtype, x.device)) is not None:
            dys, xs, *dss = zip((dy, x, *extra), layout.strides)
            parts = module.run(
                "layer_norm" if layer else "rms_norm", xs, dys, dx, layout, backward=True, weight=packed(weight),
                stats=saved, ds=dss[0] if dss else None, offset=scalars[0] if scalars else 0.0,
                need_dw=need_dw, need_db=need_db,
            )  # fmt: skip
            if parts is not None:
                return dx, *_summed(*parts, weight, bias, need_dw, need_db, x)
        plan = plan_backward(layout.N, itemsize, device)
        options = {"COMPUTE": triton_dtype(saved.dtype)}
        sizes = layout.B, layout.M, layout.N
        strides = layout.strides[0], layout.strides[1], layout.strides[-1]
        scalars = [scalar(s, saved.dtype) for s in scalars]
        weight_packed = packed(weight)
        dots = ()
        if plan.ONE_PASS:
            n_tiles = layout.blocks(plan.BLOCK_M)
            parts = min(n_tiles, plan.programs * device.multiprocessors)
            grid = (parts,)
            options["WHOLE"] = layout.N == plan.BLOCK_N and layout.M % plan.BLOCK_M == 0
            options["KEEP"] = side_by_side(plan)
        else:
            plan = plan_columns(itemsize, device)
            n_tiles, columns = layout.blocks(plan.BLOCK_M), cdiv(layout.N, plan.BLOCK_N)
            parts = min(n_tiles, cdiv(plan.programs * device.multiprocessors, columns))
            grid = (columns, parts)
            kernel = kernel_columns
            dots = (saved.new_empty((layout.A * layout.B * layout.M, 2)),)
            args = (dy, x, weight_packed, saved, *dots, *sizes, *strides[:2], *scalars)
            num_warps = warps(8, device.max_warps)
            launch(kernel_dots, (len(dots[0]),), x.device, args, **options, BLOCK_N=4096, num_warps=num_warps)
        dw = saved.new_empty((parts, layout.N)) if need_dw else None
        db = saved.new_empty((parts, layout.N)) if need_db else None
        launch(
            kernel, grid, x.device,
            (dy, x, weight_packed, saved, *dots, ds, dx, dw, db, *sizes, n_tiles, *strides, *scalars),
            **options, BLOCK_M=plan.BLOCK_M, BLOCK_N=plan.BLOCK_N, STAGES=plan.STAGES, num_warps=plan.num_warps,
        )  # fmt: skip
    return dx, *_summed(dw, db, weight, bias, need_dw, need_db, x)


def plan_columns(itemsize, device):
    """rms_norm / layer_norm: 0.58 / 0.54 of a copy of what is read or written, at N = 32768 to 131072, H200 bf16."""
    plan = BackwardPlan(2, 1024, False, 4, warps(4, device.max_warps), 4)
    fits = ((plan.STAGES - 1) * itemsize + 4) * plan.BLOCK_M * plan.BLOCK_N * plan.programs <= device.shared_memory
    return plan if fits else plan._replace(STAGES=2)


@triton.jit
def _store_column_sums(ptr, out_ptr, outer, count, N, offs_n, BLOCK_P: tl.constexpr):
    if ptr is not None:
        mask_n = (offs_n < N)[None, :]
        sums = tl.zeros((BLOCK_P, offs_n.shape[0]), ptr.dtype.element_ty)
        for start in range(0, count, BLOCK_P):
            offs_p = start + tl.arange(0, BLOCK_P)
            part = (tl.cast(outer, tl.int64) * count + offs_p) * N
            sums += tl.load(ptr + part[:, None] + offs_n[None, :], mask=(offs_p < count)[:, None] & mask_n, other=0.0)
        total = round_to(tl.sum(sums, axis=0), out_ptr.dtype.element_ty)
        tl.store(out_ptr + tl.cast(outer, tl.int64) * N + offs_n, total, mask=offs_n < N)


@triton.jit
def _sum_parts_kernel(
    a_ptr, b_ptr, c_ptr, a_sum_ptr, b_sum_ptr, c_sum_ptr, count, N, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr
):
    """A program sums BLOCK_N columns of the parts of one gradient and one outer index."""
    pid, which = tl.program_id(0), tl.program_id(1)
    tiles_n = (N - 1) // BLOCK_N + 1
    offs_n = pid % tiles_n * BLOCK_N + tl.arange(0, BLOCK_N)
    outer = pid // tiles_n
    if which == 0:
        _store_column_sums(a_ptr, a_sum_ptr, outer, count, N, offs_n, BLOCK_P)
    if which == 1:
        _store_column_sums(b_ptr, b_sum_ptr, outer, count, N, offs_n, BLOCK_P)
    if which == 2:
        _store_column_sums(c_ptr, c_sum_ptr, outer, count, N, offs_n, BLOCK_P)


def sum_parts(*pairs):
    """Sums over the second last dimension of up to three tensors (..., count, N), each as the dtype beside it; in one
    launch, where torch takes two for each, and a backward of 200 us has 5% of its time there. None gives None."""
    there = [(parts, dtype) for parts, dtype in pairs if parts is not None]
    if not there:
        return (None,) * len(pairs)
    shape, count = there[0][0].shape[:-2], there[0][0].shape[-2]
    N, device = there[0][0].shape[-1], there[0][0].device
    sums = [torch.empty((*shape, N), dtype=dtype, device=device) for _, dtype in there]
    nothing = [None] * (3 - len(there))
    # A line of memory; of wide rows more, so that there are no more than eight programs a multiprocessor.
    width = max(8 if N <= 1024 else 32, N // (8 * facts(device).multiprocessors))
    BLOCK_N = min(next_power_of_2(N), next_power_of_2(width), 1024)
    BLOCK_P = min(next_power_of_2(count), 4096 // BLOCK_N)
    launch(
        _sum_parts_kernel, (cdiv(N, BLOCK_N) * shape.numel(), len(there)), device,
        (*[parts for parts, _ in there], *nothing, *sums, *nothing, count, N),
        BLOCK_P=BLOCK_P, BLOCK_N=BLOCK_N, num_warps=4,
    )  # fmt: skip
    found = iter(sums)
    return tuple(None if parts is None else next(found) for parts, _ in pairs)


def _summed(dw, db, weight, bias, need_dw, need_db, x):
    """The gradients of weight and bias from parts of them; empty what is not needed."""
    if dw is None and db is None:
        return tuple(
            param.new_zeros(param.shape) if needed else x.new_empty(0)
            for param, needed in ((weight, need_dw), (bias, need_db))
        )
    sums = sum_parts(*((t, t if t is None else param.dtype) for t, param in ((dw, weight), (db, bias))))
    return tuple(x.new_empty(0) if t is None else t.view(p.shape) for t, p in zip(sums, (weight, bias)))


def fake_backward(x, weight, bias, need_dw, need_db):
    """Shapes, strides and dtypes of what `backward` returns."""
    dw = x.new_empty(weight.shape, dtype=weight.dtype) if need_dw else x.new_empty(0)
    db = x.new_empty(bias.shape, dtype=bias.dtype) if need_db else x.new_empty(0)
    return x.new_empty(x.shape), dw, db
