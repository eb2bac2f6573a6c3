"""Divergences of a student's logits from a teacher's, row by row.

    p = softmax(x / temperature), q = softmax(teacher / temperature), m = (1 - beta) * p + beta * q
    distillation_kl  = temperature^2 * sum(q * (log q - log p))
    distillation_jsd = temperature^2 * (beta * sum(q * (log q - log m)) + (1 - beta) * sum(p * (log p - log m)))

Hinton, Vinyals and Dean, "Distilling the Knowledge in a Neural Network", 2015, whence the factor, which keeps
gradients of one size at every temperature; Agarwal et al., "On-Policy Distillation of Language Models", 2024. Both
logits are read twice forward and once backward, and no softmax is stored.
"""

import math
from typing import Optional

import torch
from torch import Tensor

from . import _checks, _losses, _online
from ._device import facts, launch
from ._dispatch import differentiable, is_plain
from ._losses import store_part
from ._online import finish, grouped, take
from ._ops import add_op_namespace_prefix
from ._replay import replayed
from ._rows import at, compute_dtype, row_index
from ._triton import cdiv, exp, round_to, scalar, tl, triton, triton_dtype

SECOND_ORDER = "reference"


def distillation_kl_reference(x, teacher, *, temperature=1.0, labels=None, ignore_index=-100, reduction="mean"):
    """What `distillation_kl` computes, in plain PyTorch."""
    loss, _ = _fwd_reference(x, teacher, labels, ignore_index, 0.0, float(temperature))
    return _finish(loss, labels, ignore_index, reduction)


def distillation_jsd_reference(
    x, teacher, *, beta=0.5, temperature=1.0, labels=None, ignore_index=-100, reduction="mean"
):
    """What `distillation_jsd` computes, in plain PyTorch."""
    x, teacher = (teacher, x) if beta == 1 else (x, teacher)
    loss, _ = _fwd_reference(x, teacher, labels, ignore_index, float(beta % 1), float(temperature))
    return _finish(loss, labels, ignore_index, reduction)


def _log_softmax(x, labels, ignore_index, temperature, compute):
    if labels is not None:  # nothing reaches an ignored row, not even a NaN
        x = torch.where((labels == ignore_index).unsqueeze(-1), 0.0, x)
    return torch.log_softmax(x.to(compute) / temperature, -1)


def _times(p, t):
    """p * t, and 0 where p is 0."""
    return torch.where(p == 0, 0.0, p * torch.where(p == 0, 0.0, t))


def _terms(logp, logq, beta):
    """What p and q are multiplied by in the divergence."""
    if not beta:
        return torch.zeros_like(logp), logq - logp
    nowhere = (logp == float("-inf")) & (logq == float("-inf"))  # where logaddexp has no derivative
    logp, logq = torch.where(nowhere, 0.0, logp), torch.where(nowhere, 0.0, logq)
    logm = torch.logaddexp(logp + math.log1p(-beta), logq + math.log(beta))
    return (1 - beta) * (logp - logm), beta * (logq - logm)


def _fwd_reference(x, teacher, labels, ignore_index, beta, temperature):
    compute = compute_dtype(x, teacher)
    logp, logq = (_log_softmax(t, labels, ignore_index, temperature, compute) for t in (x, teacher))
    of_p, of_q = _terms(logp, logq, beta)
    parts = [_times(torch.exp(logp), of_p).sum(-1), _times(torch.exp(logq), of_q).sum(-1)]
    stats = []
    for t in (x, teacher):
        s = t.to(compute) / temperature
        peak = s.amax(-1) if s.shape[-1] else s.new_zeros(s.shape[:-1])
        stats += [peak, torch.log(torch.exp(s - peak.unsqueeze(-1)).sum(-1))]
    loss = (parts[0] + parts[1]) * temperature**2
    if labels is not None:
        loss = torch.where(labels == ignore_index, 0.0, loss)
    return loss, torch.stack(stats + parts, -1).detach()


def _total_reference(x, teacher, labels, ignore_index, beta, temperature, reduction):
    loss, stats = _fwd_reference(x, teacher, labels, ignore_index, beta, temperature)
    counted = torch.ones_like(loss) if labels is None else (labels != ignore_index).to(loss.dtype)
    count = counted.sum() if reduction == "mean" else loss.new_ones(())
    return loss.sum() / count, stats, count.unsqueeze(0)


def _bwd_reference(dloss, x, teacher, labels, stats, count, ignore_index, beta, temperature, need_dx, need_dt):
    compute = stats.dtype
    dloss = dloss if count is None else dloss / count
    logp, logq = (_log_softmax(t, labels, ignore_index, temperature, compute) for t in (x, teacher))
    p, q = torch.exp(logp), torch.exp(logq)
    of_p, of_q = _terms(logp, logq, beta)
    g = dloss.to(compute) * temperature
    if labels is not None:
        g = torch.where(labels == ignore_index, 0.0, g)
    g = g.unsqueeze(-1)
    dx, dt = x.new_empty(0), teacher.new_empty(0)
    if need_dx:
        dx = _times(p, of_p - _times(p, of_p).sum(-1, keepdim=True)) if beta else p - q
        dx = (g * dx).to(x.dtype)
    if need_dt:
        dt = (g * _times(q, of_q - _times(q, of_q).sum(-1, keepdim=True))).to(teacher.dtype)
    return dx, dt


@triton.jit
def _load_pair(x_ptr, x_strides, t_ptr, t_strides, a, b, offs_m, cols, mask, inverse, COMPUTE: tl.constexpr):
    x = tl.load(at(x_ptr, x_strides, a, b, offs_m, cols), mask=mask, other=float("-inf")).to(COMPUTE)
    t = tl.load(at(t_ptr, t_strides, a, b, offs_m, cols), mask=mask, other=float("-inf")).to(COMPUTE)
    return x * inverse, t * inverse


@triton.jit
def _terms_of(logp, logq, beta, log_rest, log_beta, MIX: tl.constexpr):
    """What p and q are multiplied by in the divergence, where they are not 0."""
    if MIX:
        u, v = logp + log_rest, logq + log_beta
        logm = tl.where(u > v, u, v) + tl.log(1.0 + exp(-tl.abs(u - v)))  # a NaN in either stays
        return (1.0 - beta) * (logp - logm), beta * (logq - logm)
    else:
        return tl.zeros_like(logp), logq - logp


@triton.jit
def _load_counted(l_ptr, l_strides, a, b, offs_m, mask_m, ignore_index):
    if l_ptr is not None:
        label = tl.load(l_ptr + a * l_strides[0] + b * l_strides[1] + offs_m * l_strides[2], mask=mask_m, other=0)
        mask_m = mask_m & (label != ignore_index)
    return mask_m


@triton.jit(do_not_specialize=["ignore_index"])
def _distillation_fwd_kernel(
    x_ptr, t_ptr, l_ptr, loss_ptr, stats_ptr, parts_ptr, B, M, N, x_strides, t_strides, l_strides,
    ignore_index, beta, log_rest, log_beta, inverse, factor,
    MIX: tl.constexpr, LOWEST: tl.constexpr, GROUP: tl.constexpr, COMPUTE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    a, b, offs_m = row_index(tl.program_id(0), B, M, BLOCK_M)
    mask_m = offs_m < M
    counted = _load_counted(l_ptr, l_strides, a, b, offs_m, mask_m, ignore_index)
    offs_n = tl.arange(0, BLOCK_N)
    stop = N if l_ptr is None else tl.max(tl.where(counted, N, 0))
    x_peaks = tl.full((BLOCK_M, BLOCK_N // GROUP), LOWEST, COMPUTE)
    t_peaks = tl.full((BLOCK_M, BLOCK_N // GROUP), LOWEST, COMPUTE)
    x_sums = tl.zeros((BLOCK_M, BLOCK_N // GROUP), COMPUTE)
    t_sums = tl.zeros((BLOCK_M, BLOCK_N // GROUP), COMPUTE)
    for start in range(0, stop, BLOCK_N):
        mask = counted[:, None] & (offs_n < N - start)[None, :]
        x, t = _load_pair(x_ptr, x_strides, t_ptr, t_strides, a, b, offs_m, start + offs_n, mask, inverse, COMPUTE)
        x_peaks, x_sums = take(grouped(x, GROUP), x_peaks, x_sums)
        t_peaks, t_sums = take(grouped(t, GROUP), t_peaks, t_sums)
    x_peak, x_log = finish(x_peaks, x_sums)
    t_peak, t_log = finish(t_peaks, t_sums)
    x_log, t_log = tl.log(x_log), tl.log(t_log)
    of_p = tl.zeros((BLOCK_M, BLOCK_N), COMPUTE)
    of_q = tl.zeros((BLOCK_M, BLOCK_N), COMPUTE)
    for start in range(0, stop, BLOCK_N):
        mask = counted[:, None] & (offs_n < N - start)[None, :]
        x, t = _load_pair(x_ptr, x_strides, t_ptr, t_strides, a, b, offs_m, start + offs_n, mask, inverse, COMPUTE)
        logp = (x - x_peak[:, None]) - x_log[:, None]
        logq = (t - t_peak[:, None]) - t_log[:, None]
        p, q = exp(logp), exp(logq)
        term_p, term_q = _terms_of(logp, logq, beta, log_rest, log_beta, MIX)
        of_p += tl.where(mask & (p != 0), p * term_p, 0.0)
        of_q += tl.where(mask & (q != 0), q * term_q, 0.0)
    from_p = tl.sum(of_p, axis=1)
    from_q = tl.sum(of_q, axis=1)
    out_m = (a * B + b) * M + offs_m
    loss = factor * (from_p + from_q)
    if parts_ptr is None:
        tl.store(loss_ptr + out_m, tl.where(counted, loss, 0.0), mask=mask_m)
    else:
        store_part(parts_ptr, 0, loss, counted)
        store_part(parts_ptr, 1, tl.full((BLOCK_M,), 1.0, COMPUTE), counted)
    tl.store(stats_ptr + out_m * 6, x_peak, mask=mask_m)
    tl.store(stats_ptr + out_m * 6 + 1, x_log, mask=mask_m)
    tl.store(stats_ptr + out_m * 6 + 2, t_peak, mask=mask_m)
    tl.store(stats_ptr + out_m * 6 + 3, t_log, mask=mask_m)
    tl.store(stats_ptr + out_m * 6 + 4, from_p, mask=mask_m)
    tl.store(stats_ptr + out_m * 6 + 5, from_q, mask=mask_m)


@triton.jit(do_not_specialize=["ignore_index"])
def _distillation_bwd_kernel(
    dloss_ptr, x_ptr, t_ptr, l_ptr, stats_ptr, count_ptr, dx_ptr, dt_ptr, B, M, N,
    dloss_strides, x_strides, t_strides, l_strides, dx_strides, dt_strides,
    ignore_index, beta, log_rest, log_beta, inverse, factor,
    MIX: tl.constexpr, COMPUTE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One tile a program: with the forward's statistics nothing is summed."""
    tiles_n = (N - 1) // BLOCK_N + 1
    pid = tl.program_id(0)
    a, b, offs_m = row_index(pid // tiles_n, B, M, BLOCK_M)
    mask_m = offs_m < M
    counted = _load_counted(l_ptr, l_strides, a, b, offs_m, mask_m, ignore_index)
    cols = (pid % tiles_n) * BLOCK_N + tl.arange(0, BLOCK_N)
    out = stats_ptr + ((a * B + b) * M + offs_m) * 6
    g = dloss_ptr + a * dloss_strides[0] + b * dloss_strides[1] + offs_m * dloss_strides[2]
    g = tl.load(g, mask=counted, other=0.0).to(COMPUTE) * factor
    if count_ptr is not None:
        g = tl.where(counted, g / tl.load(count_ptr), 0.0)
    g = g[:, None]
    mask_n = (cols < N)[None, :]
    mask = counted[:, None] & mask_n  # an ignored row is not read: p, q and g are 0 there, and so is its gradient
    x, t = _load_pair(x_ptr, x_strides, t_ptr, t_strides, a, b, offs_m, cols, mask, inverse, COMPUTE)
    logp = (x - tl.load(out, mask=counted, other=0.0)[:, None]) - tl.load(out + 1, mask=counted, other=0.0)[:, None]
    logq = (t - tl.load(out + 2, mask=counted, other=0.0)[:, None]) - tl.load(out + 3, mask=counted, other=0.0)[:, None]
    p, q = exp(logp), exp(logq)
    term_p, term_q = _terms_of(logp, logq, beta, log_rest, log_beta, MIX)
    if dx_ptr is not None:
        if MIX:
            dx = tl.where(p != 0, p * (term_p - tl.load(out + 4, mask=counted, other=0.0)[:, None]), 0.0)
        else:
            dx = p - q
        dx *= g
        tl.store(
            at(dx_ptr, dx_strides, a, b, offs_m, cols), round_to(dx, dx_ptr.dtype.element_ty),
            mask=mask_m[:, None] & mask_n,
        )  # fmt: skip
    if dt_ptr is not None:
        dt = tl.where(q != 0, q * (term_q - tl.load(out + 5, mask=counted, other=0.0)[:, None]), 0.0)
        dt *= g
        tl.store(
            at(dt_ptr, dt_strides, a, b, offs_m, cols), round_to(dt, dt_ptr.dtype.element_ty),
            mask=mask_m[:, None] & mask_n,
        )  # fmt: skip


def _mixing(beta, compute):
    logs = (math.log1p(-beta), math.log(beta)) if beta else (0.0, 0.0)
    return tuple(scalar(t, compute) for t in (beta, *logs))


_ABSENT = None, (0, 0, 0, 0)


def _forward(x, teacher, labels, loss, stats, ignore_index, beta, temperature):
    """Launch over the rows of x, which is not empty. Without a loss: return what `_losses.total` sums."""
    compute = stats.dtype
    layout, operands = _losses.loss_rows(-1, (x, teacher), (labels,))
    (x, x_strides), (t, t_strides), (labels, l_strides) = (*zip(operands, layout.strides), _ABSENT)[:3]
    # 0.48 of a copy, read twice, at 128256 logits, H200 bf16; tiles of 4096, 16 elements a thread, 0.44.
    plan = _losses.plan(layout, facts(x.device).max_warps, 2048, 8)
    group = _online.neighbours(x_strides[3], max(x.element_size(), t.element_size()), plan.BLOCK_N)
    programs = layout.blocks(plan.BLOCK_M)
    parts = torch.empty((2, programs), dtype=compute, device=x.device) if loss is None else None
    launch(
        _distillation_fwd_kernel,
        (programs,),
        x.device,
        (x, t, labels, loss, stats, parts, layout.B, layout.M, layout.N, x_strides, t_strides, l_strides, ignore_index,
         *_mixing(beta, compute), scalar(1.0 / temperature, compute), scalar(temperature**2, compute)),
        MIX=beta != 0, LOWEST=_online.lowest(compute), GROUP=group, COMPUTE=triton_dtype(compute), **plan._asdict(),
    )  # fmt: skip
    return parts


@torch.library.custom_op(add_op_namespace_prefix("distillation_fwd"), mutates_args=())
def distillation_fwd(
    x: Tensor, teacher: Tensor, labels: Optional[Tensor], ignore_index: int, beta: float, temperature: float
) -> tuple[Tensor, Tensor]:
    """(loss, (peak and log(sum(exp)) of x, of the teacher, the parts of the divergence under p and under q)) of a row.

    beta 0 is the divergence KL(teacher || student).
    """
    loss = torch.empty(x.shape[:-1], dtype=compute_dtype(x, teacher), device=x.device)
    if not x.shape[-1]:
        return loss.zero_(), loss.new_zeros((*loss.shape, 6))
    stats = loss.new_empty((*loss.shape, 6))
    if x.numel():
        _forward(x, teacher, labels, loss, stats, ignore_index, beta, temperature)
    return loss, stats


@distillation_fwd.register_fake
def _(x, teacher, labels, ignore_index, beta, temperature):
    loss = x.new_empty(x.shape[:-1], dtype=compute_dtype(x, teacher))
    return loss, loss.new_empty((*loss.shape, 6))


@torch.library.custom_op(add_op_namespace_prefix("distillation_total_fwd"), mutates_args=())
def distillation_total_fwd(
    x: Tensor, teacher: Tensor, labels: Optional[Tensor], ignore_index: int, beta: float, temperature: float,
    reduction: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(loss of all rows, statistics of every row, what the loss is divided by)."""
    if not x.numel():
        return _total_reference(x, teacher, labels, ignore_index, beta, temperature, reduction)
    stats = torch.empty((*x.shape[:-1], 6), dtype=compute_dtype(x, teacher), device=x.device)
    parts = _forward(x, teacher, labels, None, stats, ignore_index, beta, temperature)
    total, count = _losses.total(parts, reduction)
    return total, stats, count


@distillation_total_fwd.register_fake
def _(x, teacher, labels, ignore_index, beta, temperature, reduction):
    stats = x.new_empty((*x.shape[:-1], 6), dtype=compute_dtype(x, teacher))
    return stats.new_empty(()), stats, stats.new_empty(1)


@torch.library.custom_op(add_op_namespace_prefix("distillation_bwd"), mutates_args=())
def distillation_bwd(
    dloss: Tensor, x: Tensor, teacher: Tensor, labels: Optional[Tensor], stats: Tensor, count: Optional[Tensor],
    ignore_index: int, beta: float, temperature: float, need_dx: bool, need_dt: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Gradients of x and of the teacher's logits. One not needed is empty.

    dloss: of every row's loss; or of the total, expanded, with the count that it is divided by.
    """
    compute = stats.dtype
    dx, dt = (
        torch.empty(t.shape if need else 0, dtype=t.dtype, device=t.device)
        for t, need in ((x, need_dx), (teacher, need_dt))
    )
    if x.numel() and (need_dx or need_dt):
        whole = (x, teacher, dx if need_dx else None, dt if need_dt else None)
        layout, operands = _losses.loss_rows(-1, whole, (dloss, labels))
        given = iter(zip(operands, layout.strides))
        (x, x_strides), (t, t_strides) = next(given), next(given)
        dx_, dx_strides = next(given) if need_dx else _ABSENT
        dt_, dt_strides = next(given) if need_dt else _ABSENT
        (dloss, dloss_strides), (labels, l_strides) = next(given), next(given, _ABSENT)
        plan = _losses.plan(layout, facts(x.device).max_warps)
        # stats: six numbers a row, which lie as the forward made them but under vmap.
        launch(
            _distillation_bwd_kernel,
            (layout.blocks(plan.BLOCK_M) * cdiv(layout.N, plan.BLOCK_N),),
            x.device,
            (dloss, x, t, labels, stats.contiguous(), count, dx_, dt_, layout.B, layout.M, layout.N,
             dloss_strides, x_strides, t_strides, l_strides, dx_strides, dt_strides, ignore_index,
             *_mixing(beta, compute), scalar(1.0 / temperature, compute), scalar(temperature, compute)),
            MIX=beta != 0, COMPUTE=triton_dtype(compute), **plan._asdict(),
        )  # fmt: skip
    return dx, dt


@distillation_bwd.register_fake
def _(dloss, x, teacher, labels, stats, count, ignore_index, beta, temperature, need_dx, need_dt):
    return x.new_empty(x.shape if need_dx else 0), teacher.new_empty(teacher.shape if need_dt else 0)


def _rows_of_bwd(dloss, x, teacher, labels, stats, count, *_):
    return None if count is not None else [0, 1, 2, 4] if labels is None else [0, 1, 2, 3, 4]


_distillation_bwd = differentiable(distillation_bwd, _bwd_reference, rowwise=_rows_of_bwd)


def _setup_context(ctx, inputs, output):
    x, teacher, labels, *ctx.params = inputs
    ctx.save_for_backward(x, teacher, labels, output[1], None)
    ctx.mark_non_differentiable(output[1])


def _total_setup_context(ctx, inputs, output):
    x, teacher, labels, *ctx.params, _ = inputs
    ctx.save_for_backward(x, teacher, labels, *output[1:])
    ctx.mark_non_differentiable(*output[1:])


def _backward(ctx, dloss, *_):
    saved, needs = ctx.saved_tensors, ctx.needs_input_grad  # once: activation checkpointing unpacks no tensor twice
    dloss = dloss.expand(saved[3].shape[:-1])
    dx, dt = _distillation_bwd(dloss, *saved, *ctx.params, needs[0], needs[1])
    return dx if needs[0] else None, dt if needs[1] else None, *(None,) * (len(needs) - 2)


_distillation = differentiable(
    distillation_fwd, _fwd_reference, _setup_context, _backward,
    rowwise=lambda x, t, labels, *_: [0, 1] if labels is None else [0, 1, 2],
)  # fmt: skip
_distillation_total = differentiable(distillation_total_fwd, _total_reference, _total_setup_context, _backward)


@replayed
def distillation_kl(
    x: Tensor,
    teacher: Tensor,
    *,
    temperature: float = 1.0,
    labels: Optional[Tensor] = None,
    ignore_index: int = -100,
    reduction: str = "mean",
) -> Tensor:
    """Measure how far a student is from its teacher: the divergence KL(teacher || student).

    loss = temperature^2 * sum(q * (log q - log p));   p, q = softmax(x / temperature), softmax(teacher / temperature)

    Args:
        x: the student's logits, (..., V), float64 | float32 | float16 | bfloat16, any strides.
        teacher: logits of x's shape, of any of those dtypes.
        temperature: above 0. Its square keeps gradients of one size: divide by it for the divergence alone.
        labels: (...), integers: rows where they equal ignore_index do not count, and their gradient is exactly 0.
        reduction: "mean" over the rows that count, "sum", or "none".
    Returns:
        The loss, in float32 (float64 if a tensor is); of x's shape without V for "none".
    Raises:
        TypeError, ValueError: dtype, shape or value not listed.
    Numerics: computed in float32, or float64; where the teacher's probability is 0 so is the term. Autograd: first and
        second derivative of x and, where it requires one, of the teacher; vmap; forward mode raises.
    Source: Hinton et al. 2015.
    """
    _check("distillation_kl", x, teacher, temperature, labels, ignore_index, reduction)
    return _reduced(x, teacher, labels, ignore_index, 0.0, float(temperature), reduction)


@replayed
def distillation_jsd(
    x: Tensor,
    teacher: Tensor,
    *,
    beta: float = 0.5,
    temperature: float = 1.0,
    labels: Optional[Tensor] = None,
    ignore_index: int = -100,
    reduction: str = "mean",
) -> Tensor:
    """Measure how far a student is from its teacher: the generalised Jensen-Shannon divergence.

    m = (1 - beta) * p + beta * q
    loss = temperature^2 * (beta * KL(q || m) + (1 - beta) * KL(p || m)), p the student's probabilities, q the teacher's

    Args:
        beta: 0 to 1, the teacher's share; by convention 0 gives KL(q || p) and 1 gives KL(p || q).
        x, teacher, temperature, labels, ignore_index, reduction: as in `distillation_kl`.
    Returns:
        As `distillation_kl`.
    Raises:
        TypeError, ValueError: as `distillation_kl`; beta is not in 0 to 1.
    Numerics, Autograd: as `distillation_kl`.
    Source: Agarwal et al. 2024.
    """
    _check("distillation_jsd", x, teacher, temperature, labels, ignore_index, reduction)
    _checks.number("distillation_jsd", "beta", beta, low=0)
    if beta > 1:
        raise ValueError(f"distillation_jsd: beta must be at most 1, got {beta}")
    if beta == 1:
        x, teacher, beta = teacher, x, 0.0
    return _reduced(x, teacher, labels, ignore_index, float(beta), float(temperature), reduction)


def _reduced(x, teacher, labels, ignore_index, beta, temperature, reduction):
    if reduction != "none" and not torch.compiler.is_compiling() and is_plain((x, teacher, labels)):
        return _distillation_total(x, teacher, labels, ignore_index, beta, temperature, reduction)[0]
    loss, _ = _distillation(x, teacher, labels, ignore_index, beta, temperature)
    return _finish(loss, labels, ignore_index, reduction)


def _finish(loss, labels, ignore_index, reduction):
    return _losses.reduce(loss, reduction, lambda: loss.numel() if labels is None else (labels != ignore_index).sum())


def _check(op, x, teacher, temperature, labels, ignore_index, reduction):
    if teacher is None:
        raise TypeError(f"{op}: teacher must be a tensor, got NoneType")
    _checks.tensors(op, x, teacher=teacher)
    if not x.dim():
        raise ValueError(f"{op}: x must have 1 or more dimensions, got 0")
    _checks.shape(op, "teacher", teacher, x.shape)
    _checks.number(op, "temperature", temperature)
    if not temperature > 0:
        raise ValueError(f"{op}: temperature must be above 0, got {temperature}")
    _losses.check_reduction(op, reduction)
    if labels is not None:
        _losses.check_labels(op, "labels", labels, x, -1)
    _checks.integer(op, "ignore_index", ignore_index)
