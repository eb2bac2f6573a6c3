"""Softmax of scaled scores under a mask, over the last dimension.

    y = softmax(scale * x + mask), 0 where masked;   a row in which all is masked is 0

This is what attention does between its two products. The mask is read where it lies, however it broadcasts, and what is
causally masked is not read at all. Rows that fit in registers are read once, wider ones twice.
"""

from typing import Optional, Union

import torch
from torch import Tensor

from . import _checks, _online
from ._device import facts, launch
from ._dispatch import differentiable, use_kernel
from ._online import finish, grouped, take
from ._ops import add_op_namespace_prefix
from ._replay import replayed
from ._rows import Plan, at, compute_dtype, plan_any_dim, plan_forward, row_index, rows, warps
from ._triton import exp, next_power_of_2, round_to, scalar, tl, triton, triton_dtype

SECOND_ORDER = "reference"


def masked_softmax_reference(x, mask=None, *, scale=1.0, causal=False):
    """What `masked_softmax` computes, in plain PyTorch."""
    return _reference(x, mask, scale, _last_key(x, causal))


def _last_key(x, causal):
    """The last key that the first query sees, None for all."""
    return None if causal is False else x.shape[-1] - x.shape[-2] if causal == "lower_right" else 0


def _reference(x, mask, scale, last_key):
    scores = x.to(compute_dtype(x, mask)) * scale
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    if last_key is not None:
        seen = torch.ones(x.shape[-2:], dtype=torch.bool, device=x.device).tril(last_key)
        scores = scores.masked_fill(~seen, -torch.inf)
    empty = (scores == -torch.inf).all(-1, keepdim=True)
    return torch.softmax(scores.masked_fill(empty, 0.0), -1).masked_fill(empty, 0.0).to(x.dtype)


def _bwd_reference(dy, y, scale, mask_dtype):
    compute = torch.promote_types(compute_dtype(dy, y), mask_dtype or y.dtype)
    dy, p = dy.to(compute), y.to(compute)
    ds = p * (dy - (dy * p).sum(-1, keepdim=True))
    return (ds * scale).to(y.dtype), y.new_empty(0) if mask_dtype is None else ds.to(mask_dtype)


def _plan(N, max_warps):
    BLOCK_N = next_power_of_2(N)
    if BLOCK_N <= 1024:  # a warp has rows of its own: 0.97 of a copy at 512, H200 bf16; 4 warps a tile 0.92
        return Plan(1024 // max(BLOCK_N, 32), BLOCK_N, True, 1)
    if BLOCK_N <= 4096:  # 0.97 at 2048, 0.95 at 4096; 4 warps 0.91 and 0.95
        return Plan(1, BLOCK_N, True, warps(2, max_warps))
    return plan_forward(N, max_warps)


def _together(layout, itemsize, mask_itemsize):
    """Whether programs go from head to head of the same rows, so that a mask of all heads is read from memory once.

    16 heads of 4096 x 4096, H200 bf16: 0.95 of a copy; head after head 0.82. Of 2048 x 2048, whose mask is still in the
    cache when the next head wants it, 0.95 and 0.97.
    """
    between = layout.M * layout.N * (2 * itemsize + mask_itemsize)  # two readings of a part of the mask: bytes
    return layout.B > 1 and layout.strides[-1][1] == 0 and between > 2**25


@triton.jit
def _load_scores(
    x_ptr, x_strides, m_ptr, m_strides, a, b, offs_m, offs_n, mask, row, S, scale, last_key, COMPUTE: tl.constexpr
):
    """scale * x + mask, -inf where masked or beyond the row."""
    if last_key is not None:
        mask = mask & (offs_n[None, :] <= (row % S + last_key)[:, None])
    x = tl.load(at(x_ptr, x_strides, a, b, offs_m, offs_n), mask=mask, other=0.0).to(COMPUTE)
    if m_ptr is None:
        return tl.where(mask, x * scale, float("-inf"))
    else:
        m = tl.load(at(m_ptr, m_strides, a, b, offs_m, offs_n), mask=mask, other=0)
        if m_ptr.dtype.element_ty == tl.uint8:  # what PyTorch calls bool
            return tl.where(mask & (m != 0), x * scale, float("-inf"))
        else:
            return tl.where(mask, x * scale + m.to(COMPUTE), float("-inf"))


@triton.jit
def _store_softmax(scores, peak, total, y_ptr, row, N, offs_n, mask):
    y = exp(scores - peak[:, None]) * (1.0 / tl.where(total == 0.0, 1.0, total))[:, None]
    tl.store(y_ptr + row[:, None] * N + offs_n[None, :], round_to(y, y_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["S", "last_key"])
def _masked_softmax_fwd_kernel(
    x_ptr, m_ptr, y_ptr, B, M, N, x_strides, m_strides, S, scale, last_key, LOWEST: tl.constexpr,
    GROUP: tl.constexpr, TOGETHER: tl.constexpr, COMPUTE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ONE_PASS: tl.constexpr,
):  # fmt: skip
    """S queries follow each other. NaN where torch has it: tl.max may drop a NaN, but exp(NaN) stays in the sum."""
    tile = tl.program_id(0)
    if TOGETHER:  # tiles of the same rows of all B follow each other: they read the same mask
        tiles_m = (M - 1) // BLOCK_M + 1
        within = tile % (B * tiles_m)
        tile += within % B * tiles_m + within // B - within
    a, b, offs_m = row_index(tile, B, M, BLOCK_M)
    row = (a * B + b) * M + offs_m
    mask_m = (offs_m < M)[:, None]
    offs_n = tl.arange(0, BLOCK_N)
    if ONE_PASS:
        mask = mask_m & (offs_n < N)[None, :]
        scores = _load_scores(
            x_ptr, x_strides, m_ptr, m_strides, a, b, offs_m, offs_n, mask, row, S, scale, last_key, COMPUTE
        )
        peak = tl.max(scores, axis=1)
        peak = tl.where(peak == float("-inf"), 0.0, peak)  # of a row in which all is masked: its sum is 0
        total = tl.sum(exp(scores - peak[:, None]), axis=1)
        _store_softmax(scores, peak, total, y_ptr, row, N, offs_n, mask)
    else:
        peaks = tl.full((BLOCK_M, BLOCK_N // GROUP), LOWEST, COMPUTE)
        sums = tl.zeros((BLOCK_M, BLOCK_N // GROUP), COMPUTE)
        for start in range(0, N, BLOCK_N):
            mask = mask_m & (offs_n < N - start)[None, :]
            x = _load_scores(
                x_ptr, x_strides, m_ptr, m_strides, a, b, offs_m, start + offs_n, mask, row, S, scale, last_key, COMPUTE
            )
            peaks, sums = take(grouped(x, GROUP), peaks, sums)
        peak, total = finish(peaks, sums)
        for start in range(0, N, BLOCK_N):
            mask = mask_m & (offs_n < N - start)[None, :]
            x = _load_scores(
                x_ptr, x_strides, m_ptr, m_strides, a, b, offs_m, start + offs_n, mask, row, S, scale, last_key, COMPUTE
            )
            _store_softmax(x, peak, total, y_ptr, row, N, start + offs_n, mask)


@triton.jit
def _load_pair(dy_ptr, dy_strides, y_ptr, y_strides, a, b, offs_m, offs_n, mask, COMPUTE: tl.constexpr):
    dy = tl.load(at(dy_ptr, dy_strides, a, b, offs_m, offs_n), mask=mask, other=0.0).to(COMPUTE)
    y = tl.load(at(y_ptr, y_strides, a, b, offs_m, offs_n), mask=mask, other=0.0).to(COMPUTE)
    return dy, y


@triton.jit
def _store_gradients(dy, y, total, dx_ptr, dm_ptr, row, N, offs_n, mask, scale):
    ds = y * (dy - total[:, None])  # 0 where masked: y is
    out = row[:, None] * N + offs_n[None, :]
    tl.store(dx_ptr + out, round_to(ds * scale, dx_ptr.dtype.element_ty), mask=mask)
    if dm_ptr is not None:
        tl.store(dm_ptr + out, round_to(ds, dm_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _masked_softmax_bwd_kernel(
    dy_ptr, y_ptr, dx_ptr, dm_ptr, B, M, N, dy_strides, y_strides, scale,
    COMPUTE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ONE_PASS: tl.constexpr,
):  # fmt: skip
    a, b, offs_m = row_index(tl.program_id(0), B, M, BLOCK_M)
    row = (a * B + b) * M + offs_m
    mask_m = (offs_m < M)[:, None]
    offs_n = tl.arange(0, BLOCK_N)
    if ONE_PASS:
        mask = mask_m & (offs_n < N)[None, :]
        dy, y = _load_pair(dy_ptr, dy_strides, y_ptr, y_strides, a, b, offs_m, offs_n, mask, COMPUTE)
        _store_gradients(dy, y, tl.sum(dy * y, axis=1), dx_ptr, dm_ptr, row, N, offs_n, mask, scale)
    else:
        sums = tl.zeros((BLOCK_M, BLOCK_N), COMPUTE)
        for start in range(0, N, BLOCK_N):
            mask = mask_m & (offs_n < N - start)[None, :]
            dy, y = _load_pair(dy_ptr, dy_strides, y_ptr, y_strides, a, b, offs_m, start + offs_n, mask, COMPUTE)
            sums += dy * y
        total = tl.sum(sums, axis=1)
        for start in range(0, N, BLOCK_N):
            mask = mask_m & (offs_n < N - start)[None, :]
            dy, y = _load_pair(dy_ptr, dy_strides, y_ptr, y_strides, a, b, offs_m, start + offs_n, mask, COMPUTE)
            _store_gradients(dy, y, total, dx_ptr, dm_ptr, row, N, start + offs_n, mask, scale)


@torch.library.custom_op(add_op_namespace_prefix("masked_softmax_fwd"), mutates_args=())
def masked_softmax_fwd(x: Tensor, mask: Optional[Tensor], scale: float, last_key: Optional[int]) -> Tensor:
    """mask: of x's shape, bool or floating."""
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if y.numel():
        compute = compute_dtype(x, mask)
        if mask is not None and mask.dtype == torch.bool:
            mask = mask.view(torch.uint8)
        layout, (x, *m) = rows(*((x,) if mask is None else (x, mask)))
        plan = plan_any_dim(layout, max(t.element_size() for t in (x, *m)), facts(x.device).max_warps, _plan)
        launch(
            _masked_softmax_fwd_kernel,
            (layout.blocks(plan.BLOCK_M),),
            x.device,
            (x, m[0] if m else None, y, layout.B, layout.M, layout.N, layout.strides[0], layout.strides[-1],
             y.shape[-2] if y.dim() > 1 else 1, scalar(scale, compute), last_key),
            LOWEST=_online.lowest(compute), GROUP=_online.neighbours(layout.strides[0][3], x.element_size()),
            TOGETHER=bool(m) and _together(layout, x.element_size(), m[0].element_size()),
            COMPUTE=triton_dtype(compute), **plan._asdict(),
        )  # fmt: skip
    return y


@masked_softmax_fwd.register_fake
def _(x, mask, scale, last_key):
    return x.new_empty(x.shape)


@torch.library.custom_op(add_op_namespace_prefix("masked_softmax_bwd"), mutates_args=())
def masked_softmax_bwd(
    dy: Tensor, y: Tensor, scale: float, mask_dtype: Optional[torch.dtype]
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Gradients of x, from y as it was rounded, and of the mask, of y's shape; empty where mask_dtype is None."""
    dx = torch.empty(y.shape, dtype=y.dtype, device=y.device)
    dm = None if mask_dtype is None else torch.empty(y.shape, dtype=mask_dtype, device=y.device)
    if y.numel():
        compute = compute_dtype(dy, y, dm)
        layout, (dy, y) = rows(dy, y)
        plan = plan_any_dim(layout, max(dy.element_size(), y.element_size()), facts(y.device).max_warps)
        launch(
            _masked_softmax_bwd_kernel,
            (layout.blocks(plan.BLOCK_M),),
            y.device,
            (dy, y, dx, dm, layout.B, layout.M, layout.N, *layout.strides, scalar(scale, compute)),
            COMPUTE=triton_dtype(compute), **plan._asdict(),
        )  # fmt: skip
    return dx, y.new_empty(0) if dm is None else dm


@masked_softmax_bwd.register_fake
def _(dy, y, scale, mask_dtype):
    return y.new_empty(y.shape), y.new_empty(0) if mask_dtype is None else y.new_empty(y.shape, dtype=mask_dtype)


_masked_softmax_bwd = differentiable(masked_softmax_bwd, _bwd_reference, rowwise=lambda *_: [0, 1])


def _setup_context(ctx, inputs, output):
    _, mask, ctx.scale, _ = inputs
    ctx.mask_dtype = None if mask is None else mask.dtype
    ctx.save_for_backward(output)


def _backward(ctx, dy):
    (y,) = ctx.saved_tensors
    need_dm = ctx.needs_input_grad[1]
    dx, dm = _masked_softmax_bwd(dy, y, ctx.scale, ctx.mask_dtype if need_dm else None)
    return dx, dm if need_dm else None, None, None


_masked_softmax = differentiable(
    masked_softmax_fwd,
    _reference,
    _setup_context,
    _backward,
    rowwise=lambda x, mask, *_: [0] if mask is None else [0, 1],
)


@replayed
def masked_softmax(
    x: Tensor, mask: Optional[Tensor] = None, *, scale: float = 1.0, causal: Union[bool, str] = False
) -> Tensor:
    """Turn scores into probabilities over the last dimension, without those that are masked.

    y = softmax(scale * x + mask), and 0 where masked

    A row in which everything is masked, or that is all -inf, gives 0 and passes no gradient, where `softmax` gives NaN.

    Args:
        x: (..., S, N), S queries and N keys, or (N,); float64 | float32 | float16 | bfloat16, any strides.
        mask: what broadcasts to x's shape. bool: True keeps a score. Floating: added after the scaling, and -inf masks.
        scale: multiplies x.
        causal: True or "upper_left": query i sees the keys 0 to i, as torch's scaled_dot_product_attention has it.
            "lower_right": the last query sees all keys, query i the keys 0 to i + N - S, as with a cache of keys.
    Returns:
        Of x's shape and dtype, contiguous.
    Raises:
        TypeError: dtype not listed.   ValueError: mask does not broadcast to x's shape; causal of another value, or of
        x with one dimension.
    Numerics: computed in float32, in float64 where an argument is float64, and rounded once. A NaN or +inf that is not
        masked makes its row NaN, one that a bool or causal mask hides does not count. Autograd: first and second
        derivative of x and of a floating mask, vmap; forward mode raises. The gradient is taken at the rounded result.
    Source: Milakov and Gimelshein 2018, as `softmax`.
    """
    op = "masked_softmax"
    _checks.tensors(op, x)
    _checks.number(op, "scale", scale)
    if not isinstance(causal, bool):
        _checks.choice(op, "causal", causal, ("upper_left", "lower_right"))
    if x.dim() < (2 if causal else 1):
        raise ValueError(f"{op}: x must have at least {2 if causal else 1} dimensions, got shape {tuple(x.shape)}")
    if mask is not None:
        if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
            _checks.tensors(op, x, mask=mask)
        elif mask.device != x.device:
            raise ValueError(f"{op}: mask must be on {x.device} as x is, got {mask.device}")
        try:
            mask = mask.expand(x.shape)
        except RuntimeError:
            raise ValueError(f"{op}: mask must broadcast to {tuple(x.shape)}, got {tuple(mask.shape)}") from None
    args = x, mask, float(scale), _last_key(x, causal)
    return _masked_softmax(*args) if use_kernel(x) else _reference(*args).contiguous()
