"""The row ops of the cross-entropy families: loss, logsumexp and what the backward needs, from one read of the logits.

    z = cap * tanh(scale * x / cap)      loss = sum over classes of u * (log(sum(exp(z))) - z)

with u what is asked of a class: (keep * target + uniform) * weight, a label being a target of one 1.
"""

from typing import Optional

import torch
from torch import Tensor

from . import _losses, _online
from ._activation_math import activate
from ._device import facts, launch
from ._dispatch import differentiable
from ._losses import lead, store_part
from ._online import finish, grouped, take, take_several
from ._ops import add_op_namespace_prefix
from ._rows import at, compute_dtype, row_index
from ._triton import cdiv, exp, round_to, scalar, tl, triton, triton_dtype


def fwd_reference(x, target, weight, dim, ignore_index, keep, uniform, cap, scale, skip, partial):
    compute = compute_dtype(x, weight, *if_soft(target))
    if not x.shape[dim]:
        return _no_classes(x, target, dim, ignore_index, compute)
    z = _logits_reference(x, cap, scale, compute)
    peak = z.detach().amax(dim, keepdim=True).clamp(min=torch.finfo(compute).min)
    log_total = torch.log(torch.exp(z - peak).sum(dim, keepdim=True))
    logp = (z - peak) - log_total
    at_peak = z == peak
    u = _soft_target(x, target, weight, dim, keep, uniform, compute)
    loss = -(u * logp).sum(dim) if uniform or target.is_floating_point() else 0.0
    mass = u.expand(x.shape).sum(dim)
    if target.is_floating_point():
        best = target.amax(dim, keepdim=True)
        hit = (at_peak & (target == best)).any(dim)
        counted = valid = torch.ones_like(hit)
    else:
        counted, valid, index = _index(x, target, dim, ignore_index)
        share = (
            valid.to(compute) * keep if weight is None else torch.where(valid, keep * weight.to(compute)[index], 0.0)
        )
        at_label = torch.where(valid, -logp.gather(dim, index.unsqueeze(dim)).squeeze(dim), 0.0)
        loss, mass = loss + share * at_label, mass + share
        hit = valid & at_peak.gather(dim, index.unsqueeze(dim)).squeeze(dim)
    peak, log_total = peak.squeeze(dim), log_total.squeeze(dim)
    if not partial:
        loss, mass = (torch.where(valid | ~counted, t, float("nan")) for t in (loss, mass))
    loss = torch.where(counted, loss, 0.0)
    lse, stats = peak + log_total, torch.stack([peak, log_total, mass, hit.to(compute)], -1).detach()
    if skip:
        lse, stats = torch.where(counted, lse, 0.0), torch.where(counted.unsqueeze(-1), stats, 0.0)
    return loss, lse, stats


def totals(results, target, weight, ignore_index, reduction, z_loss):
    """(the loss as the caller wants it; what it and its z part are divided by; that part; accuracy)."""
    loss, lse, stats = results
    rows = torch.ones_like(loss) if target.is_floating_point() else (target != ignore_index).to(loss.dtype)
    weights = rows
    if weight is not None and not target.is_floating_point():
        classes = target.long().clamp(0, weight.shape[0] - 1)
        weights = torch.where(rows != 0, weight.to(loss.dtype)[classes], 0.0)

    def over_rows(t):
        return _losses.reduce(t, reduction, rows.sum)

    total = _losses.reduce(loss, reduction, weights.sum)
    z = torch.zeros_like(total, requires_grad=False)
    if z_loss:
        z = over_rows(z_loss * torch.where(rows != 0, lse, 0.0).square())
        total = total + z
    ones = weights.new_ones(())
    counts = (weights.sum(), rows.sum()) if reduction == "mean" else (ones, ones)
    return total, counts, z.detach(), over_rows(torch.where(rows != 0, stats[..., 3], 0.0))


def total_reference(x, target, weight, dim, ignore_index, keep, uniform, cap, scale, skip, reduction, z_loss, aux):
    results = fwd_reference(x, target, weight, dim, ignore_index, keep, uniform, cap, scale, skip, False)
    total, counts, *extra = totals(results, target, weight, ignore_index, reduction, z_loss)
    lse = results[1] if aux else total.new_empty(0)
    return total, lse, results[2], torch.stack([*counts, *extra] if aux or z_loss else counts[:1])


def _bwd_reference(
    dloss, dlse, x, target, weight, stats, counts, dim, ignore_index, keep, uniform, cap, scale, z_loss, partial,
    need_dt,
):  # fmt: skip
    compute = stats.dtype
    dz = 2.0 * z_loss * dloss / counts[1] if z_loss else None
    dloss = dloss if counts is None else dloss / counts[0]
    soft = target.is_floating_point()
    t = _soft_target(x, target, weight, dim, keep, uniform, compute)
    if not soft:
        counted, valid, index = _index(x, target, dim, ignore_index)
        dloss = torch.where(counted, dloss, 0.0)
        dz = dz if dz is None else torch.where(counted, dz, 0.0)
        dead = (~counted if dlse is None else ~counted & (dlse == 0)).unsqueeze(dim)
        x = torch.where(dead & ~x.isfinite(), 0.0, x)
        classes = _classwise(torch.arange(x.shape[dim], device=x.device), dim)
        at_label = (classes == index.unsqueeze(dim)) & valid.unsqueeze(dim)
        t = t + at_label.to(compute) * (keep * (1.0 if weight is None else weight.to(compute)[index].unsqueeze(dim)))
    z = _logits_reference(x, cap, scale, compute)
    if partial:  # of all ranks: x's own would not do
        peak, log_total, mass = (s.unsqueeze(dim) for s in stats.unbind(-1)[:3])
        logp = (z - peak) - log_total
    else:
        logp = torch.log_softmax(z, dim)
        mass = t.expand(x.shape).sum(dim, keepdim=True)
        if not soft:
            mass = torch.where((valid | ~counted).unsqueeze(dim), mass, float("nan"))
    if z_loss:
        lse = torch.logsumexp(z, dim)
        dz = dz * (lse if soft else torch.where(counted, lse, 0.0))
        dlse = dz if dlse is None else dlse + dz
    dloss = dloss.to(compute).unsqueeze(dim)
    g = dloss * mass if dlse is None else dloss * mass + dlse.to(compute).unsqueeze(dim)
    dz = torch.exp(logp) * g - t * dloss
    if cap is not None:
        u = 2 * (x.to(compute) * scale / cap)
        dz = dz * (4 * torch.sigmoid(u) * torch.sigmoid(-u))
    dt = x.new_empty(0)
    if need_dt:
        dt = -keep * dloss * logp
        dt = (dt if weight is None else dt * _classwise(weight, dim).to(compute)).to(target.dtype)
    return (dz * scale).to(x.dtype), dt


def _logits_reference(x, cap, scale, compute):
    z = x.to(compute) * scale
    return z if cap is None else cap * torch.tanh(z / cap)


def _soft_target(x, target, weight, dim, keep, uniform, compute):
    """The part of the target that is given for every class, with the class weights."""
    soft = target.to(compute) * keep if target.is_floating_point() else x.new_zeros((), dtype=compute)
    soft = soft + uniform
    return soft if weight is None else soft * _classwise(weight, dim).to(compute)


def _index(x, target, dim, ignore_index):
    counted = target != ignore_index
    valid = counted & (target >= 0) & (target < x.shape[dim])
    return counted, valid, torch.where(valid, target, 0).long()


def _classwise(weight, dim):
    return weight.reshape(-1, *(1,) * (-1 - dim))


def if_soft(target):
    return (target,) if target.is_floating_point() else ()


def _no_classes(x, target, dim, ignore_index, compute):
    loss = x.new_zeros(lead(x, dim), dtype=compute)
    if not target.is_floating_point():
        loss = loss.masked_fill(target != ignore_index, float("nan"))
    return loss, torch.full_like(loss, float("-inf")), loss.new_zeros((*loss.shape, 4))


@triton.jit
def _logits(x, scale, cap, mask):
    """x is -inf where masked; scale: None for 1."""
    z = x
    if scale is not None:
        z = z * scale
    if cap is not None:
        z = cap * activate(z / cap, 0.0, 0.0, "tanh", z.dtype == tl.float32)
    if scale is not None or cap is not None:
        z = tl.where(mask, z, float("-inf"))
    return z


@triton.jit
def _load_soft(
    t_ptr, t_strides, w_ptr, a, b, offs_m, cols, mask, N, keep, uniform, SOFT: tl.constexpr, COMPUTE: tl.constexpr
):
    """(target, what it comes to after smoothing and class weights), without the label's own share."""
    if SOFT:
        t = tl.load(at(t_ptr, t_strides, a, b, offs_m, cols), mask=mask, other=0.0).to(COMPUTE)
    else:
        t = tl.zeros(mask.shape, COMPUTE)
    u = t * keep + uniform
    if w_ptr is not None:
        u *= tl.load(w_ptr + cols, mask=cols < N, other=0.0).to(COMPUTE)[None, :]
    return t, tl.where(mask, u, 0.0)


@triton.jit(do_not_specialize=["ignore_index"])
def _cross_entropy_fwd_kernel(
    x_ptr, t_ptr, w_ptr, loss_ptr, lse_ptr, stats_ptr, parts_ptr, B, M, N, x_strides, t_strides,
    ignore_index, keep, uniform, scale, cap,
    SOFT: tl.constexpr, SMOOTH: tl.constexpr, SKIP: tl.constexpr, PARTIAL: tl.constexpr, ALL: tl.constexpr,
    LOWEST: tl.constexpr,
    GROUP: tl.constexpr, EACH: tl.constexpr, COMPUTE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """NaN where torch has it: tl.max may drop a NaN, but exp(NaN) stays in the sum, as does inf - inf.

    parts_ptr: the rows' share of what `_losses.total` sums; ALL of it, or no more than the loss's.
    """
    a, b, offs_m = row_index(tl.program_id(0), B, M, BLOCK_M)
    mask_m = offs_m < M
    offs_n = tl.arange(0, BLOCK_N)
    reads = mask_m
    if not SOFT:
        label = tl.load(t_ptr + a * t_strides[0] + b * t_strides[1] + offs_m * t_strides[2], mask=mask_m, other=0)
        counted = mask_m & (label != ignore_index)
        valid = counted & (label >= 0) & (label < N)
        index = tl.where(valid, label, 0).to(tl.int64)
        x_row = x_ptr + a * x_strides[0] + b * x_strides[1] + offs_m * x_strides[2]
        z_y = tl.load(x_row + index * x_strides[3], mask=valid, other=float("-inf")).to(COMPUTE)
        z_y = _logits(z_y, scale, cap, valid)
        if SKIP:
            reads = counted
    peaks = tl.full((BLOCK_M, BLOCK_N // EACH), LOWEST, COMPUTE)
    sums = tl.zeros((BLOCK_M, BLOCK_N // EACH), COMPUTE)
    if SOFT or SMOOTH:  # of what a group has seen: the target's sum, and its sum of target * (peak - logit)
        masses = tl.zeros((BLOCK_M, BLOCK_N // GROUP), COMPUTE)
        falls = tl.zeros((BLOCK_M, BLOCK_N // GROUP), COMPUTE)
    if SOFT:  # the largest target, and the target of the largest logit
        bests = tl.full((BLOCK_M, BLOCK_N // GROUP), float("-inf"), COMPUTE)
        tops = tl.full((BLOCK_M, BLOCK_N // GROUP), float("-inf"), COMPUTE)
    stop = tl.max(tl.where(reads, N, 0)) if SKIP else N
    for start in range(0, stop, BLOCK_N):
        cols = start + offs_n
        mask = reads[:, None] & (offs_n < N - start)[None, :]
        x = tl.load(at(x_ptr, x_strides, a, b, offs_m, cols), mask=mask, other=float("-inf")).to(COMPUTE)
        z = _logits(x, scale, cap, mask)
        if not (SOFT or SMOOTH):
            peaks, sums = take_several(z, peaks, sums, GROUP)
        else:
            z = grouped(z, GROUP)
            before = peaks
            peaks, sums = take(z, peaks, sums)
            t, u = _load_soft(t_ptr, t_strides, w_ptr, a, b, offs_m, cols, mask, N, keep, uniform, SOFT, COMPUTE)
            falls += tl.where(masses == 0, 0.0, masses * (peaks - before))  # nothing seen: 0 times inf
            u = grouped(u, GROUP)
            falls += tl.sum(tl.where(grouped(mask, GROUP), u * (peaks[:, :, None] - z), 0.0), axis=2)
            masses += tl.sum(u, axis=2)
        if SOFT:
            t = grouped(tl.where(mask, t, float("-inf")), GROUP)
            bests = tl.maximum(bests, tl.max(t, axis=2))
            top = tl.max(tl.where(z == peaks[:, :, None], t, float("-inf")), axis=2)
            tops = tl.where(peaks > before, top, tl.maximum(tops, top))
    peak, total = finish(peaks, sums)
    log_total = tl.log(total)
    # Never lse - z: that keeps no digit of the logarithm where the maximum is large.
    if SOFT or SMOOTH:
        mass = tl.sum(masses, axis=1)
        falls += tl.where(masses == 0, 0.0, masses * (peak[:, None] - peaks))
        loss = tl.sum(falls, axis=1) + mass * log_total
    else:
        mass = tl.zeros((BLOCK_M,), COMPUTE)
        loss = mass
    if SOFT:
        hit = tl.max(tl.where(peaks == peak[:, None], tops, float("-inf")), axis=1) == tl.max(bests, axis=1)
    else:
        own = tl.full((BLOCK_M,), 1.0, COMPUTE)
        if w_ptr is not None:
            own = tl.load(w_ptr + index, mask=valid, other=0.0).to(COMPUTE)
        share = keep * own
        loss += tl.where(valid, share * ((peak - z_y) + log_total), 0.0)
        mass += tl.where(valid, share, 0.0)
        hit = valid & (z_y >= peak)
        if not PARTIAL:
            loss = tl.where(valid, loss, float("nan"))
            mass = tl.where(valid | (label == ignore_index), mass, float("nan"))
        loss = tl.where(counted, loss, 0.0)
    lse = peak + log_total
    if SKIP:
        lse = tl.where(counted, lse, 0.0)
        peak = tl.where(counted, peak, 0.0)
        log_total = tl.where(counted, log_total, 0.0)
        mass = tl.where(counted, mass, 0.0)
    hit = (hit & (total == total)).to(COMPUTE)
    out_m = (a * B + b) * M + offs_m
    if loss_ptr is not None:
        tl.store(loss_ptr + out_m, loss, mask=mask_m)
    if lse_ptr is not None:
        tl.store(lse_ptr + out_m, lse, mask=mask_m)
    tl.store(stats_ptr + out_m * 4, peak, mask=mask_m)
    tl.store(stats_ptr + out_m * 4 + 1, log_total, mask=mask_m)
    tl.store(stats_ptr + out_m * 4 + 2, mass, mask=mask_m)
    tl.store(stats_ptr + out_m * 4 + 3, hit, mask=mask_m)
    if parts_ptr is not None:
        if SOFT:
            counted = mask_m
            own = tl.full((BLOCK_M,), 1.0, COMPUTE)
        store_part(parts_ptr, 0, loss, counted)
        store_part(parts_ptr, 1, own, counted)
        if ALL:
            store_part(parts_ptr, 2, tl.full((BLOCK_M,), 1.0, COMPUTE), counted)
            store_part(parts_ptr, 3, lse * lse, counted)
            store_part(parts_ptr, 4, hit, counted)


@triton.jit(do_not_specialize=["ignore_index"])
def _cross_entropy_bwd_kernel(
    dloss_ptr, dlse_ptr, x_ptr, t_ptr, w_ptr, stats_ptr, counts_ptr, dx_ptr, dt_ptr, B, M, N,
    dloss_strides, dlse_strides, x_strides, t_strides, dx_strides, dt_strides,
    ignore_index, keep, uniform, scale, cap, twice_z,
    SOFT: tl.constexpr, SMOOTH: tl.constexpr,
    COMPUTE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One tile a program: with the forward's statistics nothing is summed."""
    tiles_n = (N - 1) // BLOCK_N + 1
    pid = tl.program_id(0)
    a, b, offs_m = row_index(pid // tiles_n, B, M, BLOCK_M)
    mask_m = offs_m < M
    cols = (pid % tiles_n) * BLOCK_N + tl.arange(0, BLOCK_N)
    out_m = (a * B + b) * M + offs_m
    dloss = dloss_ptr + a * dloss_strides[0] + b * dloss_strides[1] + offs_m * dloss_strides[2]
    dloss = tl.load(dloss, mask=mask_m, other=0.0).to(COMPUTE)
    dz = dloss
    if counts_ptr is not None:
        dloss = dloss / tl.load(counts_ptr)
    live = mask_m
    if not SOFT:
        label = tl.load(t_ptr + a * t_strides[0] + b * t_strides[1] + offs_m * t_strides[2], mask=mask_m, other=0)
        live = mask_m & (label != ignore_index)
        dloss = tl.where(live, dloss, 0.0)
    g = dloss * tl.load(stats_ptr + out_m * 4 + 2, mask=live, other=0.0)
    counted = live
    if dlse_ptr is not None:
        dlse = dlse_ptr + a * dlse_strides[0] + b * dlse_strides[1] + offs_m * dlse_strides[2]
        dlse = tl.load(dlse, mask=mask_m, other=0.0).to(COMPUTE)
        live = live | (dlse != 0)
        g += dlse
    peak = tl.load(stats_ptr + out_m * 4, mask=live, other=0.0)
    log_total = tl.load(stats_ptr + out_m * 4 + 1, mask=live, other=0.0)
    if twice_z is not None:
        g += tl.where(counted, dz / tl.load(counts_ptr + 1) * twice_z * (peak + log_total), 0.0)
    peak = peak[:, None]
    log_total = log_total[:, None]
    mask = mask_m[:, None] & (cols < N)[None, :]
    reads = mask & live[:, None]  # an ignored row is not read: it is one of -inf with a g of 0, so its gradient is 0
    x = tl.load(at(x_ptr, x_strides, a, b, offs_m, cols), mask=reads, other=float("-inf")).to(COMPUTE)
    z = _logits(x, scale, cap, reads)
    dx = exp((z - peak) - log_total) * g[:, None]
    if SOFT or SMOOTH:
        t, u = _load_soft(t_ptr, t_strides, w_ptr, a, b, offs_m, cols, reads, N, keep, uniform, SOFT, COMPUTE)
        dx -= u * dloss[:, None]
    if not SOFT:
        share = keep * dloss
        valid = live & (label >= 0) & (label < N)
        index = tl.where(valid, label, -1).to(tl.int32)  # compared in 32 bits
        if w_ptr is not None:
            share *= tl.load(w_ptr + index, mask=valid, other=0.0).to(COMPUTE)
        dx -= tl.where(cols[None, :] == index[:, None], share[:, None], 0.0)
    t = x
    if scale is not None:
        dx *= scale
        t = x * scale
    if cap is not None:
        e = exp(-2.0 * tl.abs(t / cap))
        dx *= 4.0 * e / ((1.0 + e) * (1.0 + e))  # not 1 - tanh^2, of which little is left far out
    tl.store(at(dx_ptr, dx_strides, a, b, offs_m, cols), round_to(dx, dx_ptr.dtype.element_ty), mask=mask)
    if dt_ptr is not None:
        dt = ((peak - z) + log_total) * (keep * dloss)[:, None]
        if w_ptr is not None:
            dt *= tl.load(w_ptr + cols, mask=cols < N, other=0.0).to(COMPUTE)[None, :]
        tl.store(at(dt_ptr, dt_strides, a, b, offs_m, cols), round_to(dt, dt_ptr.dtype.element_ty), mask=mask)


def _dense(weight):
    return weight if weight is None else weight.contiguous()  # C elements


def _width(N):
    """(width, each) of tiles. Of a copy, H200 bf16: 0.75 at 2048, 0.82 at 4096; 0.86 at 8192, 0.93 at 32000, 0.92 at
    65024; 0.93 to 0.95 at 128256; 0.92 to 0.94 at 262144."""
    if N <= 2**16:
        return 2048, 32 if 1024 < N <= 4096 else 16
    return 4096 if N <= 2**17 else 8192, 16


def _each(plan, group, max_warps):
    """How many elements of a tile share a running maximum: of a single row, as many as a thread holds."""
    if plan.BLOCK_M > 1 or group == 1:
        return group
    return max(plan.BLOCK_N * max_warps // (1024 * plan.num_warps), group)


def _forward(
    x, target, weight, loss, lse, stats, parts, dim, ignore_index, keep, uniform, cap, scale, skip, partial, every=False
):
    """Launch over the rows of x, which is not empty. parts: return what `_losses.total` sums."""
    compute, soft = stats.dtype, target.is_floating_point()
    layout, (x, target) = _losses.loss_rows(dim, (x, target if soft else None), (None if soft else target,))
    max_warps = facts(x.device).max_warps
    plan = _losses.plan(layout, max_warps, *_width(layout.N))
    group = _online.neighbours(layout.strides[0][3], x.element_size(), plan.BLOCK_N)
    programs = layout.blocks(plan.BLOCK_M)
    parts = torch.empty((5 if every else 2, programs), dtype=compute, device=x.device) if parts else None
    launch(
        _cross_entropy_fwd_kernel,
        (programs,),
        x.device,
        (x, target, _dense(weight), loss, lse, stats, parts, layout.B, layout.M, layout.N, *layout.strides,
         ignore_index, scalar(keep, compute), scalar(uniform, compute), None if scale == 1 else scalar(scale, compute),
         cap if cap is None else scalar(cap, compute)),
        SOFT=soft, SMOOTH=uniform != 0, SKIP=skip and not soft, PARTIAL=partial, ALL=every,
        LOWEST=_online.lowest(compute), COMPUTE=triton_dtype(compute),
        GROUP=group, EACH=group if soft or uniform else _each(plan, group, max_warps), **plan._asdict(),
    )  # fmt: skip
    return parts


@torch.library.custom_op(add_op_namespace_prefix("cross_entropy_fwd"), mutates_args=())
def cross_entropy_fwd(
    x: Tensor, target: Tensor, weight: Optional[Tensor], dim: int, ignore_index: int, keep: float, uniform: float,
    cap: Optional[float], scale: float, skip: bool, partial: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(loss, lse, (peak, log(sum(exp(z - peak))), sum of the target, hit)) of every row.

    keep: what the label keeps of 1; uniform: what every class gets. skip: ignored rows are not read, and all of theirs
    is 0. partial: a label that is no class is another rank's, and not a fault.
    """
    compute = compute_dtype(x, weight, *if_soft(target))
    if not x.shape[dim]:
        return _no_classes(x, target, dim, ignore_index, compute)
    loss = torch.empty(lead(x, dim), dtype=compute, device=x.device)
    lse, stats = torch.empty_like(loss), loss.new_empty((*loss.shape, 4))
    if x.numel():
        _forward(
            x, target, weight, loss, lse, stats, False, dim, ignore_index, keep, uniform, cap, scale, skip, partial
        )
    return loss, lse, stats


@cross_entropy_fwd.register_fake
def _(x, target, weight, dim, ignore_index, keep, uniform, cap, scale, skip, partial):
    loss = x.new_empty(lead(x, dim), dtype=compute_dtype(x, weight, *if_soft(target)))
    return loss, torch.empty_like(loss), loss.new_empty((*loss.shape, 4))


@torch.library.custom_op(add_op_namespace_prefix("cross_entropy_total_fwd"), mutates_args=())
def cross_entropy_total_fwd(
    x: Tensor, target: Tensor, weight: Optional[Tensor], dim: int, ignore_index: int, keep: float, uniform: float,
    cap: Optional[float], scale: float, skip: bool, reduction: str, z_loss: float, aux: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """(loss of all rows, lse of every row or nothing, statistics of every row, what `_losses.total` counts)."""
    if not x.numel():
        return total_reference(
            x, target, weight, dim, ignore_index, keep, uniform, cap, scale, skip, reduction, z_loss, aux
        )
    compute = compute_dtype(x, weight, *if_soft(target))
    stats = torch.empty((*lead(x, dim), 4), dtype=compute, device=x.device)
    lse = torch.empty(stats.shape[:-1] if aux else (0,), dtype=compute, device=x.device)
    parts = _forward(
        x, target, weight, None, lse if aux else None, stats, True, dim, ignore_index, keep, uniform, cap, scale, skip,
        False, aux or z_loss != 0,
    )  # fmt: skip
    total, counts = _losses.total(parts, reduction, z_loss)
    return total, lse, stats, counts


@cross_entropy_total_fwd.register_fake
def _(x, target, weight, dim, ignore_index, keep, uniform, cap, scale, skip, reduction, z_loss, aux):
    stats = x.new_empty((*lead(x, dim), 4), dtype=compute_dtype(x, weight, *if_soft(target)))
    return (
        stats.new_empty(()),
        stats.new_empty(stats.shape[:-1] if aux else (0,)),
        stats,
        stats.new_empty(4 if aux or z_loss else 1),
    )


@torch.library.custom_op(add_op_namespace_prefix("cross_entropy_bwd"), mutates_args=())
def cross_entropy_bwd(
    dloss: Tensor, dlse: Optional[Tensor], x: Tensor, target: Tensor, weight: Optional[Tensor], stats: Tensor,
    counts: Optional[Tensor], dim: int, ignore_index: int, keep: float, uniform: float, cap: Optional[float],
    scale: float, z_loss: float, partial: bool, need_dt: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Gradients of x and of a target of probabilities; the second is empty where it is not needed.

    dloss: of every row's loss; or of the total, expanded, with the counts that it is divided by.
    """
    compute, soft = stats.dtype, target.is_floating_point()
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    dt = torch.empty(x.shape, dtype=target.dtype, device=x.device) if need_dt else x.new_empty(0)
    if x.numel():
        whole = (x, dx, target if soft else None, dt if need_dt else None)
        per_row = (None if soft else target, dloss, dlse)
        layout, operands = _losses.loss_rows(dim, whole, per_row)
        given = iter(zip(operands, layout.strides))
        absent = (None, (0, 0, 0, 0))
        (x, x_strides), (dx, dx_strides), (target, t_strides) = (next(given) for _ in range(3))
        if soft and need_dt:
            dt, dt_strides = next(given)
        else:
            dt_strides = (0, 0, 0, 0)
        (dloss, dloss_strides), (dlse, dlse_strides) = next(given), next(given, absent)
        plan = _losses.plan(layout, facts(x.device).max_warps, 8192, 32)
        # stats: four numbers a row, which lie as the forward made them but under vmap.
        launch(
            _cross_entropy_bwd_kernel,
            (layout.blocks(plan.BLOCK_M) * cdiv(layout.N, plan.BLOCK_N),),
            x.device,
            (dloss, dlse, x, target, _dense(weight), stats.contiguous(), counts, dx, dt if need_dt else None,
             layout.B, layout.M, layout.N, dloss_strides, dlse_strides, x_strides, t_strides, dx_strides, dt_strides,
             ignore_index, scalar(keep, compute), scalar(uniform, compute),
             None if scale == 1 else scalar(scale, compute), cap if cap is None else scalar(cap, compute),
             scalar(2.0 * z_loss, compute) if z_loss else None),
            SOFT=soft, SMOOTH=uniform != 0, COMPUTE=triton_dtype(compute), **plan._asdict(),
        )  # fmt: skip
    return dx, dt


@cross_entropy_bwd.register_fake
def _(dloss, dlse, x, target, weight, stats, counts, dim, ignore_index, keep, uniform, cap, scale, z_loss, partial,
      need_dt):  # fmt: skip
    return x.new_empty(x.shape), x.new_empty(x.shape, dtype=target.dtype) if need_dt else x.new_empty(0)


def _rows_of_bwd(dloss, dlse, *rest):
    return None if rest[4] is not None else [0, 2, 3, 5] if dlse is None else [0, 1, 2, 3, 5]


cross_entropy_gradient = differentiable(cross_entropy_bwd, _bwd_reference, rowwise=_rows_of_bwd)


def _setup_context(ctx, inputs, output):
    x, target, weight, *params, _, partial = inputs
    ctx.params = (*params, 0.0, partial)
    ctx.save_for_backward(x, target, weight, output[2], None)
    ctx.mark_non_differentiable(output[2])
    ctx.set_materialize_grads(False)  # an lse that nothing depends on costs nothing


def _backward(ctx, dloss, dlse, *_):
    x, target, weight, stats, counts = ctx.saved_tensors
    if dloss is None and dlse is None:
        return (None,) * (len(ctx.needs_input_grad))
    if dloss is None:
        dloss = torch.zeros((), dtype=stats.dtype, device=stats.device)
    needs = ctx.needs_input_grad
    dloss = dloss.expand(stats.shape[:-1])
    dx, dt = cross_entropy_gradient(dloss, dlse, x, target, weight, stats, counts, *ctx.params, needs[1])
    return dx, dt if needs[1] else None, *(None,) * (len(needs) - 2)


cross_entropy_rows = differentiable(
    cross_entropy_fwd, fwd_reference, _setup_context, _backward, rowwise=lambda *_: [0, 1]
)


def _total_setup_context(ctx, inputs, output):
    x, target, weight, *params, _, _, z_loss, aux = inputs
    _, lse, stats, counts = output
    ctx.params = (*params, z_loss, False)
    ctx.save_for_backward(x, target, weight, stats, counts)
    ctx.mark_non_differentiable(stats, counts, *(() if aux else (lse,)))
    ctx.set_materialize_grads(False)


cross_entropy_total = differentiable(cross_entropy_total_fwd, total_reference, _total_setup_context, _backward)
