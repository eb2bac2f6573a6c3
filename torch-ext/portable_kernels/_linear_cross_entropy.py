"""The ops of the linear cross-entropy family: loops over chunks of rows, of which one's logits exist at a time.

A chunk's logits are a product, are read by the row op of the cross-entropy families, and turn into their gradient in
the same memory, of which the gradients of the linear layer are products.
"""

import functools
from typing import Optional

import torch
from torch import Tensor

from . import _losses
from ._cross_entropy import _bwd_reference as _rows_bwd_reference
from ._cross_entropy import _logits, cross_entropy_rows, fwd_reference
from ._device import facts, launch
from ._dispatch import _second_order, differentiable, use_kernel
from ._ops import add_op_namespace_prefix
from ._rows import compute_dtype
from ._triton import cdiv, next_power_of_2, round_to, scalar, tl, triton, triton_dtype


def chunk_rows(T, H, V, itemsize, chunk_bytes):
    """Rows of logits that exist at a time: as even chunks as there can be, of multiples of 128 rows."""
    if chunk_bytes is None:
        # With H rows, logits take what the weight does: that much more than its gradient's float32 sum is needed
        # anyway, when the sum is cast. More rows read and write that sum less often. Untuned.
        fit = min(max(H, 1024), 2**29 // max(V * itemsize, 1))
    else:
        fit = chunk_bytes // max(V * itemsize, 1)
    fit = max(fit, 1)
    step = 128 if fit >= 128 else 1
    chunks = max(cdiv(T, fit // step * step), 1)
    return max(cdiv(cdiv(T, chunks), step) * step, 1)


@triton.jit(do_not_specialize=["ignore_index"])
def _linear_cross_entropy_bwd_kernel(
    x_ptr, t_ptr, w_ptr, stats_ptr, dloss_ptr, dlse_ptr, dentropy_ptr, entropy_ptr, N,
    ignore_index, keep, uniform, scale, cap,
    SMOOTH: tl.constexpr, COMPUTE: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """A row of logits a program: its entropy, or its gradient in its place."""
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * N
    stats_ptr += row * 4
    offs_n = tl.arange(0, BLOCK_N)
    peak = tl.load(stats_ptr)
    log_total = tl.load(stats_ptr + 1)
    entropy = tl.zeros((), COMPUTE)
    if entropy_ptr is not None or dentropy_ptr is not None:
        acc = tl.zeros((BLOCK_N,), COMPUTE)
        for start in range(0, N, BLOCK_N):
            mask = offs_n < N - start
            x = tl.load(x_ptr + start + offs_n, mask=mask, other=float("-inf")).to(COMPUTE)
            logp = (_logits(x, scale, cap, mask) - peak) - log_total
            p = tl.exp(logp)
            acc += tl.where(p == 0, 0.0, -p * logp)
        entropy = tl.sum(acc)
    if entropy_ptr is not None:
        tl.store(entropy_ptr + row, entropy)
    else:
        label = tl.load(t_ptr + row)
        counted = label != ignore_index
        valid = counted & (label >= 0) & (label < N)
        dloss = tl.load(dloss_ptr + row)
        g = dloss * tl.load(stats_ptr + 2)
        if dlse_ptr is not None:
            g += tl.load(dlse_ptr + row)
        share = keep * dloss
        if w_ptr is not None:
            share *= tl.load(w_ptr + tl.where(valid, label, 0)).to(COMPUTE)
        if dentropy_ptr is not None:
            dentropy = tl.load(dentropy_ptr + row)
        for start in range(0, N, BLOCK_N):
            cols = start + offs_n
            mask = offs_n < N - start
            x = tl.load(x_ptr + cols, mask=mask, other=float("-inf")).to(COMPUTE)
            logp = (_logits(x, scale, cap, mask) - peak) - log_total
            p = tl.exp(logp)
            dx = p * g - tl.where(cols == label, share, 0.0)
            if dentropy_ptr is not None:
                dx -= tl.where(p == 0, 0.0, dentropy * p * (logp + entropy))
            if SMOOTH:
                u = tl.zeros((BLOCK_N,), COMPUTE) + uniform * dloss
                if w_ptr is not None:
                    u *= tl.load(w_ptr + cols, mask=mask, other=0.0).to(COMPUTE)
                dx -= u
            dx *= scale
            if cap is not None:
                e = tl.exp(-2.0 * tl.abs(x * scale / cap))
                dx *= 4.0 * e / ((1.0 + e) * (1.0 + e))  # not 1 - tanh^2, of which little is left far out
            dx = tl.where(counted, dx, 0.0)  # whatever an ignored row holds
            tl.store(x_ptr + cols, round_to(dx, x_ptr.dtype.element_ty), mask=mask)


def _launch(logits, target, weight, stats, grads, entropy, ignore_index, keep, uniform, cap, scale):
    compute, N = stats.dtype, logits.shape[-1]
    if not logits.numel():
        return
    BLOCK_N = min(next_power_of_2(N), 4096)  # 16 elements a thread: untuned
    launch(
        _linear_cross_entropy_bwd_kernel,
        (logits.shape[0],),
        logits.device,
        (logits, target, weight, stats, *grads, entropy, N, ignore_index,
         scalar(keep, compute), scalar(uniform, compute), scalar(scale, compute),
         cap if cap is None else scalar(cap, compute)),
        SMOOTH=uniform != 0, COMPUTE=triton_dtype(compute), BLOCK_N=BLOCK_N,
        num_warps=min(max(BLOCK_N // 512, 1), facts(logits.device).max_warps),
    )  # fmt: skip


def _entropy_reference(logits, scale, compute):
    logp = torch.log_softmax(logits.to(compute) * scale, -1)
    p = logp.exp()
    surprise = torch.where(p == 0, 0.0, logp)
    return -(p * surprise).sum(-1), p, surprise


def _dlogits_reference(dloss, dlse, dentropy, logits, target, weight, stats, ignore_index, keep, uniform, cap, scale):
    dz, _ = _rows_bwd_reference(
        dloss, dlse, logits, target, weight, stats, None, -1, ignore_index, keep, uniform, cap, scale, 0.0, False, False
    )
    if dentropy is not None:
        entropy, p, logp = _entropy_reference(logits, scale, stats.dtype)
        dz = (dz - scale * dentropy.unsqueeze(-1) * p * (logp + entropy.unsqueeze(-1))).to(logits.dtype)
    return dz


def _entropy(logits, target, weight, stats, *params):
    if not use_kernel(logits):
        return _entropy_reference(logits, params[-1], stats.dtype)[0]
    entropy = torch.empty(logits.shape[:1], dtype=stats.dtype, device=logits.device)
    _launch(logits, target, weight, stats, (None, None, None), entropy, *params)
    return entropy


def _to_dlogits(logits, grads, target, weight, stats, *params):
    """Overwrite logits with their gradient."""
    if use_kernel(logits):
        _launch(logits, target, weight, stats, grads, None, *params)
    else:
        logits.copy_(_dlogits_reference(*grads, logits, target, weight, stats, *params))


def _chunks(x, linear_weight, linear_bias, chunk_bytes):
    """(rows, their logits) of every chunk. All chunks share one piece of memory, to be overwritten at will."""
    T, V = x.shape[0], linear_weight.shape[0]
    step = chunk_rows(T, x.shape[1], V, x.element_size(), chunk_bytes)
    memory = torch.empty((min(step, T), V), dtype=x.dtype, device=x.device)
    for start in range(0, T, step):
        part = slice(start, min(start + step, T))
        logits = memory[: part.stop - start]
        if linear_bias is None:
            torch.mm(x[part], linear_weight.t(), out=logits)
        else:
            torch.addmm(linear_bias, x[part], linear_weight.t(), out=logits)
        yield part, logits


@functools.cache
def _adds_in_float32(device, dtype):
    """Whether this torch adds products of `dtype` to a float32 matrix in one call, as it does on CUDA from 2.8 on."""
    a, acc = torch.zeros((16, 16), dtype=dtype, device=device), torch.zeros((16, 16), device=device)
    try:
        torch.addmm(acc, a, a, out_dtype=acc.dtype, out=acc)
        return True
    except (RuntimeError, TypeError):
        return False


def _add_product(acc, a, b, first):
    """acc += a @ b; the first time acc = a @ b, whatever acc held."""
    beta = 0 if first else 1
    if acc.dtype == a.dtype:
        torch.addmm(acc, a, b, beta=beta, out=acc)
    elif _adds_in_float32(a.device, a.dtype):
        torch.addmm(acc, a, b, beta=beta, out_dtype=acc.dtype, out=acc)
    elif a.device.type == "cpu":
        torch.addmm(acc, a.to(acc.dtype), b.to(acc.dtype), beta=beta, out=acc)
    elif first:
        acc.copy_(torch.mm(a, b))
    else:
        acc += torch.mm(a, b)


class _Gradients:
    """Of x in its dtype, of weight and bias in float32 or float64, from the gradient of one chunk of logits a time."""

    def __init__(self, x, linear_weight, needs):
        self.x, self.linear_weight, self.needs = x, linear_weight, needs
        acc = {"dtype": compute_dtype(x), "device": x.device}
        self.dx = torch.empty(x.shape if needs[0] else 0, dtype=x.dtype, device=x.device)
        # Without rows nothing will be added, and so nothing written.
        make = torch.empty if x.shape[0] else torch.zeros
        self.dw = make(linear_weight.shape if needs[1] else 0, **acc)
        self.db = torch.zeros(linear_weight.shape[0] if needs[2] else 0, **acc)

    def add(self, part, dlogits):
        if self.needs[0]:
            torch.mm(dlogits, self.linear_weight, out=self.dx[part])
        if self.needs[1]:
            _add_product(self.dw, dlogits.t(), self.x[part], first=part.start == 0)
        if self.needs[2]:
            self.db += dlogits.sum(0, dtype=self.db.dtype)


def _counts(target, weight, ignore_index, compute):
    """(sum of the weights of the targets that count, their number). Nothing here waits for the device."""
    counted = target != ignore_index
    number = counted.sum(dtype=compute)
    if weight is None:
        return number, number
    classes = target.clamp(0, weight.shape[0] - 1)
    return torch.where(counted, weight.to(compute)[classes], 0.0).sum(), number


@torch.library.custom_op(add_op_namespace_prefix("linear_cross_entropy_fwd"), mutates_args=())
def linear_cross_entropy_fwd(
    x: Tensor, linear_weight: Tensor, target: Tensor, linear_bias: Optional[Tensor], weight: Optional[Tensor],
    ignore_index: int, keep: float, uniform: float, cap: Optional[float], scale: float, z_loss: float, reduction: str,
    chunk_bytes: Optional[int], need_entropy: bool, need_dx: bool, need_dw: bool, need_db: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """(loss, entropy of every row, statistics of every row, gradients of x, weight and bias).

    The gradients are those of a sum, so that nothing is lost to the small numbers of a mean in float16.
    """
    compute = compute_dtype(x, weight)
    params = (ignore_index, keep, uniform, cap, scale)
    loss = torch.empty(x.shape[:1], dtype=compute, device=x.device)
    entropy = torch.empty(x.shape[0] if need_entropy else 0, dtype=compute, device=x.device)
    lse, stats, ones = torch.empty_like(loss), loss.new_empty((*loss.shape, 4)), torch.ones_like(loss)
    grads = _Gradients(x, linear_weight, (need_dx, need_dw, need_db))
    target, weight = target.contiguous(), None if weight is None else weight.contiguous()
    total, number = _counts(target, weight, ignore_index, compute)
    # The z term's mean is over the rows that count, the loss's over their weights.
    z_factor = 2.0 * z_loss * (total / number.clamp(min=1) if reduction == "mean" else 1.0)
    for part, logits in _chunks(x, linear_weight, linear_bias, chunk_bytes):
        loss[part], lse[part], stats[part] = cross_entropy_rows(logits, target[part], weight, -1, *params, True, False)
        if need_entropy:
            entropy[part] = _entropy(logits, target[part], weight, stats[part], *params)
        if any(grads.needs):
            dlse = z_factor * lse[part] if z_loss else None
            _to_dlogits(logits, (ones[part], dlse, None), target[part], weight, stats[part], *params)
            grads.add(part, logits)
    loss = _losses.reduce(loss, reduction, lambda: total)
    if z_loss:
        loss = loss + _losses.reduce(z_loss * lse.square(), reduction, lambda: number)
    return loss, entropy, stats, grads.dx, grads.dw, grads.db


@linear_cross_entropy_fwd.register_fake
def _(x, linear_weight, target, linear_bias, weight, ignore_index, keep, uniform, cap, scale, z_loss, reduction,
      chunk_bytes, need_entropy, need_dx, need_dw, need_db):  # fmt: skip
    compute = compute_dtype(x, weight)
    T, V = x.shape[0], linear_weight.shape[0]
    return (
        x.new_empty((T,) if reduction == "none" else (), dtype=compute),
        x.new_empty(T if need_entropy else 0, dtype=compute),
        x.new_empty((T, 4), dtype=compute),
        x.new_empty(x.shape if need_dx else (0,)),
        x.new_empty(linear_weight.shape if need_dw else (0,), dtype=compute_dtype(x)),
        x.new_empty((V,) if need_db else (0,), dtype=compute_dtype(x)),
    )


@torch.library.custom_op(add_op_namespace_prefix("linear_cross_entropy_bwd"), mutates_args=())
def linear_cross_entropy_bwd(
    x: Tensor, linear_weight: Tensor, target: Tensor, linear_bias: Optional[Tensor], weight: Optional[Tensor],
    stats: Tensor, dloss: Tensor, dsquare: Optional[Tensor], dentropy: Optional[Tensor],
    ignore_index: int, keep: float, uniform: float, cap: Optional[float], scale: float, chunk_bytes: Optional[int],
    need_dx: bool, need_dw: bool, need_db: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of x, weight and bias, given those of every row's loss, lse^2 and entropy."""
    params = (ignore_index, keep, uniform, cap, scale)
    compute = stats.dtype
    grads = _Gradients(x, linear_weight, (need_dx, need_dw, need_db))
    target, weight = target.contiguous(), None if weight is None else weight.contiguous()
    dloss, stats = dloss.to(compute).contiguous(), stats.contiguous()
    dlse = None if dsquare is None else 2.0 * dsquare.to(compute) * (stats[:, 0] + stats[:, 1])
    dentropy = None if dentropy is None else dentropy.to(compute).contiguous()
    for part, logits in _chunks(x, linear_weight, linear_bias, chunk_bytes):
        rows = (dloss[part], *(None if t is None else t[part] for t in (dlse, dentropy)))
        _to_dlogits(logits, rows, target[part], weight, stats[part], *params)
        grads.add(part, logits)
    return grads.dx, grads.dw.to(x.dtype), grads.db.to(x.dtype)


@linear_cross_entropy_bwd.register_fake
def _(x, linear_weight, target, linear_bias, weight, stats, dloss, dsquare, dentropy,
      ignore_index, keep, uniform, cap, scale, chunk_bytes, need_dx, need_dw, need_db):  # fmt: skip
    return (
        x.new_empty(x.shape if need_dx else (0,)),
        x.new_empty(linear_weight.shape if need_dw else (0,)),
        x.new_empty(linear_weight.shape[:1] if need_db else (0,)),
    )


def _bwd_reference(
    x, linear_weight, target, linear_bias, weight, stats, dloss, dsquare, dentropy,
    ignore_index, keep, uniform, cap, scale, chunk_bytes, need_dx, need_dw, need_db,
):  # fmt: skip
    params = (ignore_index, keep, uniform, cap, scale)
    logits = torch.nn.functional.linear(x, linear_weight, linear_bias)
    dlse = None
    if dsquare is not None:
        dlse = 2.0 * dsquare * fwd_reference(logits, target, weight, -1, *params, True, False)[1]
    dlogits = _dlogits_reference(dloss, dlse, dentropy, logits, target, weight, stats, *params)
    return (
        dlogits @ linear_weight if need_dx else x.new_empty(0),
        dlogits.t() @ x if need_dw else x.new_empty(0),
        dlogits.sum(0) if need_db else x.new_empty(0),
    )


_gradients = differentiable(linear_cross_entropy_bwd, linear_cross_entropy_bwd._init_fn, *_second_order(_bwd_reference))


def _setup_context(ctx, inputs, output):
    x, linear_weight, target, linear_bias, weight, *ctx.params = inputs
    ctx.save_for_backward(x, linear_weight, target, linear_bias, weight, *output[2:])
    ctx.mark_non_differentiable(*output[2:])
    ctx.set_materialize_grads(False)


def _backward(ctx, dloss, dentropy, *_):
    *inputs, stats, dx, dw, db = ctx.saved_tensors
    x, linear_weight, target, linear_bias, weight = inputs
    *params, z_loss, reduction, chunk_bytes, need_entropy, made_dx, made_dw, made_db = ctx.params
    needs = (ctx.needs_input_grad[0], ctx.needs_input_grad[1], ctx.needs_input_grad[3])
    dentropy = dentropy if need_entropy else None
    if dloss is None and dentropy is None:
        return (None,) * 17
    dloss = stats.new_zeros(()) if dloss is None else dloss
    per_square = dloss
    if reduction == "mean":
        total, number = _counts(target, weight, params[0], stats.dtype)
        dloss, per_square = (torch.where(number == 0, 0.0, dloss / n) for n in (total, number))
    made = all(not need or has for need, has in zip(needs, (made_dx, made_dw, made_db)))
    if made and reduction != "none" and not torch.is_grad_enabled():  # enabled: a second derivative may follow
        like = (x, linear_weight, linear_bias)
        dx, dw, db = (_scaled(t, dloss, u) if need else None for t, u, need in zip((dx, dw, db), like, needs))
    else:
        dloss, per_square = (t.expand(x.shape[0]) for t in (dloss, per_square))
        dsquare = z_loss * per_square.masked_fill(target == params[0], 0.0) if z_loss else None
        found = _gradients(*inputs, stats, dloss, dsquare, dentropy, *params, chunk_bytes, *needs)
        dx, dw, db = (t if need else None for t, need in zip(found, needs))
    return dx, dw, None, db, *(None,) * 13


def _scaled(t, factor, like):
    """factor * t, rounded once, and with no float32 copy where t has many elements."""
    factor = factor.reshape((1,) * t.dim())  # of no dimensions it would be rounded to t's dtype first
    return torch.mul(t, factor, out=torch.empty(like.shape, dtype=like.dtype, device=like.device))


linear_cross_entropy_rows = differentiable(
    linear_cross_entropy_fwd, linear_cross_entropy_fwd._init_fn, _setup_context, _backward
)
