"""Rotary position embedding of queries and keys, alone or after the per-head RMS norm of recent models.

    y = x * cos + rotate(x) * sin,   rotate((x1, x2)) = (-x2, x1)

A pair (x1, x2) is a dimension of the first half and its fellow of the second half, or two neighbours (interleaved).
Su et al., "RoFormer", 2021. Dimensions past the tables' are copied. The derivative is the transposed rotation.

Products and sum run in float32 (float64) and are rounded once. Models written in PyTorch with tables in 16 bits round
both products and the sum: their results are up to two ulps less exact.
"""

from typing import Optional, Union

import torch
from torch import Tensor

from . import _checks
from ._dispatch import differentiable, use_kernel
from ._ops import add_op_namespace_prefix
from ._replay import replayed
from ._rotary import norm_rotary_backward, rotate
from ._rotary_layout import (
    check_index,
    check_layout,
    check_pair,
    check_sections,
    check_tables,
    from_row,
    heads_dim,
    in_memory_order,
    in_order,
    layout_of,
    require_tables,
)  # fmt: skip
from ._rows import compute_dtype
from .rms_norm import rms_norm, rms_norm_reference

SECOND_ORDER = "reference"

_BEFORE_WEIGHT = {"before_weight": True, "llama": True, "after_weight": False, "gemma": False}
_WIDEST_NORM = 8192  # head dimensions that one tile of qk_norm_rotary holds; wider heads take two calls


def rotary_reference(
    x, cos, sin, *, heads_dim=1, interleaved=False, inverse=False, rotary_dim=None, position_ids=None, offsets=None,
    cu_seqlens=None, mrope_section=None,
):  # fmt: skip
    """What `rotary` computes, in plain PyTorch."""
    layout = layout_of(x, heads_dim - x.dim() if heads_dim >= 0 else heads_dim)
    if isinstance(offsets, int):
        cos, sin, offsets = from_row(cos, sin, offsets, x, layout, cu_seqlens)
    rotary_dim = cos.shape[-1] if rotary_dim is None else rotary_dim
    index = position_ids, offsets, cu_seqlens
    return _reference(x, layout, cos, sin, *index, interleaved, inverse, rotary_dim, mrope_section or (), x.dtype)


def apply_rotary_pos_emb_reference(q, k, cos, sin, unsqueeze_dim=1, *, interleaved=False, mrope_section=None):
    """What `apply_rotary_pos_emb` computes, in plain PyTorch."""
    lined_up = heads_dim(unsqueeze_dim, cos, mrope_section)
    table_dtype = torch.promote_types(cos.dtype, sin.dtype)
    sections = mrope_section or ()

    def one(x):
        dtype = torch.promote_types(x.dtype, table_dtype)
        layout = layout_of(x, lined_up)
        return _reference(x, layout, cos, sin, None, None, None, interleaved, False, cos.shape[-1], sections, dtype)

    return tuple(None if x is None else one(x) for x in (q, k))


def qk_norm_rotary_reference(
    q, k, q_weight, k_weight, cos, sin, eps=1e-6, *, offset=0.0, casting="after_weight", unsqueeze_dim=1,
    interleaved=False,
):  # fmt: skip
    """What `qk_norm_rotary` computes, in plain PyTorch."""
    q, k = (
        None if x is None else rms_norm_reference(x, w, eps, offset=offset, casting=casting)
        for x, w in ((q, q_weight), (k, k_weight))
    )
    return apply_rotary_pos_emb_reference(q, k, cos, sin, unsqueeze_dim, interleaved=interleaved)


def _reference(
    x, layout, cos, sin, position_ids, offsets, cu_seqlens, interleaved, inverse, rotary_dim, sections, dtype
):  # fmt: skip
    """One tensor, whose dimensions are named b, t, h, d by `layout`."""
    compute = compute_dtype(x, cos, sin)
    named = "".join(c for c in "bthd" if c in layout)
    x = x.permute([layout.index(c) for c in named]).to(compute)
    x = x if "b" in named else x[None]
    cos, sin = (
        _angles(t, x.shape[1], position_ids, offsets, cu_seqlens, interleaved, rotary_dim, sections).to(compute)
        for t in (cos, sin)
    )
    turned, tail = x[..., :rotary_dim], x[..., rotary_dim:]
    y = turned * cos + (-_turn(turned * sin, interleaved) if inverse else _turn(turned, interleaved) * sin)
    y = torch.cat((y, tail), -1).to(dtype)
    y = y if "b" in named else y[0]
    return y.permute([named.index(c) for c in layout])


def _turn(x, interleaved):
    if interleaved:
        return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), -1)


def _angles(t, S, position_ids, offsets, cu_seqlens, interleaved, rotary_dim, sections):
    """The rows of a table that belong to each token, (1 or B, S, 1, rotary_dim)."""
    if position_ids is not None or offsets is not None or cu_seqlens is not None:
        if position_ids is not None:
            p = position_ids.long()
        else:
            p = torch.arange(S, device=t.device)
            if cu_seqlens is not None:
                starts = cu_seqlens[:-1].long()
                sequence = (torch.searchsorted(starts, p, right=True) - 1).clamp(min=0)
                p = p - starts[sequence] + (0 if offsets is None else offsets.long()[sequence])
            else:
                p = p + offsets.long()[:, None]
        inside = ((p >= 0) & (p < t.shape[-2]))[..., None]
        t = torch.where(inside, t[p.clamp(0, t.shape[-2] - 1)], float("nan"))
    half = t.shape[-1] != rotary_dim
    if sections:  # as Qwen2-VL: pair i of the tables turns by the axis whose section it is in
        sections = list(sections)
        widths = sections if half else [2 * n for n in sections] if interleaved else 2 * sections
        t = torch.cat([part[i % len(sections)] for i, part in enumerate(t.split(widths, -1))], -1)
    if half:
        t = t.repeat_interleave(2, -1) if interleaved else torch.cat((t, t), -1)
    return t[..., None, :] if t.dim() == 3 else t[None, :, None, :]


@torch.library.custom_op(add_op_namespace_prefix("rotary_fwd"), mutates_args=())
def rotary_fwd(
    q: Tensor, k: Optional[Tensor], cos: Tensor, sin: Tensor, position_ids: Optional[Tensor],
    offsets: Optional[Tensor], cu_seqlens: Optional[Tensor], q_layout: str, k_layout: str, interleaved: bool,
    inverse: bool, rotary_dim: int, sections: list[int], q_dtype: torch.dtype, k_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """q and k, rotated; its own backward, with `inverse` the other way. A layout names the dimensions: b, t, h, d."""
    return rotate(
        q, k, cos, sin, q_layout, k_layout, (q_dtype, k_dtype), rotary_dim, interleaved, inverse=inverse,
        position_ids=position_ids, offsets=offsets, cu_seqlens=cu_seqlens, sections=sections,
    )  # fmt: skip


@rotary_fwd.register_fake
def _(q, k, cos, sin, position_ids, offsets, cu_seqlens, q_layout, k_layout, interleaved, inverse, rotary_dim,
      sections, q_dtype, k_dtype):  # fmt: skip
    return q.new_empty(q.shape, dtype=q_dtype), q.new_empty((0,) if k is None else k.shape, dtype=k_dtype)


def _fwd_reference(q, k, cos, sin, position_ids, offsets, cu_seqlens, q_layout, k_layout, *params):
    *params, q_dtype, k_dtype = params
    table = cos, sin, position_ids, offsets, cu_seqlens, *params
    yk = q.new_empty(0, dtype=k_dtype) if k is None else _reference(k, k_layout, *table, k_dtype)
    return _reference(q, q_layout, *table, q_dtype), yk


def _setup_context(ctx, inputs, output):
    q, k, cos, sin, *index = inputs[:7]
    ctx.params, ctx.dtypes = inputs[7:13], (q.dtype, q.dtype if k is None else k.dtype)
    ctx.has_k, ctx.out_dtypes = k is not None, inputs[13:]
    tables = ctx.needs_input_grad[2] or ctx.needs_input_grad[3]
    ctx.save_for_backward(q if tables else None, k if tables else None, cos, sin, *index)


def _backward(ctx, dq, dk):
    q, k, cos, sin, *index = ctx.saved_tensors
    dk = dk if ctx.has_k else None
    q_layout, k_layout, interleaved, inverse, *shape = ctx.params
    needs = ctx.needs_input_grad
    grads = [None] * 15
    if needs[0] or needs[1]:
        back = _rotary(dq, dk, cos, sin, *index, q_layout, k_layout, interleaved, not inverse, *shape, *ctx.dtypes)
        grads[:2] = (g if need else None for g, need in zip(back, needs))
    if needs[2] or needs[3]:
        grads[2:4] = _table_gradients(
            lambda cos, sin: _fwd_reference(q, k, cos, sin, *index, *ctx.params, *ctx.out_dtypes), cos, sin, dq, dk
        )
    return tuple(grads)


def _table_gradients(formula, cos, sin, dq, dk):
    """Of learned tables, from the formula in PyTorch: no kernel sums over heads."""
    results, vjp = torch.func.vjp(formula, cos, sin)
    return vjp((dq, torch.zeros_like(results[1]) if dk is None else dk))


_rotary = differentiable(rotary_fwd, _fwd_reference, _setup_context, _backward)


@torch.library.custom_op(add_op_namespace_prefix("qk_norm_rotary_fwd"), mutates_args=())
def qk_norm_rotary_fwd(
    q: Tensor, k: Optional[Tensor], q_weight: Optional[Tensor], k_weight: Optional[Tensor], cos: Tensor, sin: Tensor,
    q_layout: str, k_layout: str, interleaved: bool, eps: float, offset: float, before_weight: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    norms, dtypes = _norm_dtypes(q, k, q_weight, k_weight, cos, sin, before_weight)
    return rotate(
        q, k, cos, sin, q_layout, k_layout, dtypes, cos.shape[-1], interleaved, weights=(q_weight, k_weight),
        norms=norms, eps=eps, offset=offset, before_weight=before_weight,
    )  # fmt: skip


@qk_norm_rotary_fwd.register_fake
def _(q, k, q_weight, k_weight, cos, sin, q_layout, k_layout, interleaved, eps, offset, before_weight):
    _, (q_dtype, k_dtype) = _norm_dtypes(q, k, q_weight, k_weight, cos, sin, before_weight)
    return q.new_empty(q.shape, dtype=q_dtype), q.new_empty((0,) if k is None else k.shape, dtype=k_dtype)


def _norm_dtypes(q, k, q_weight, k_weight, cos, sin, before_weight):
    """The dtypes that the norms of q and k round to, and those of the results."""
    norms = [
        x.dtype if w is None or not before_weight else torch.promote_types(x.dtype, w.dtype)
        for x, w in ((q, q_weight), (q if k is None else k, k_weight))
    ]
    tables = torch.promote_types(cos.dtype, sin.dtype)
    return norms, [torch.promote_types(dtype, tables) for dtype in norms]


def _norm_fwd_reference(q, k, q_weight, k_weight, cos, sin, q_layout, k_layout, interleaved, eps, offset, before):
    _, dtypes = _norm_dtypes(q, k, q_weight, k_weight, cos, sin, before)
    casting = "before_weight" if before else "after_weight"
    q = rms_norm_reference(q, q_weight, eps, offset=offset, casting=casting)
    k = k if k is None else rms_norm_reference(k, k_weight, eps, offset=offset, casting=casting)
    rest = interleaved, False, cos.shape[-1], (), *dtypes
    return _fwd_reference(q, k, cos, sin, None, None, None, q_layout, k_layout, *rest)


@torch.library.custom_op(add_op_namespace_prefix("qk_norm_rotary_bwd"), mutates_args=())
def qk_norm_rotary_bwd(
    dq: Tensor, dk: Optional[Tensor], q: Tensor, k: Optional[Tensor], q_weight: Optional[Tensor],
    k_weight: Optional[Tensor], cos: Tensor, sin: Tensor, q_layout: str, k_layout: str, interleaved: bool, eps: float,
    offset: float, need_dwq: bool, need_dwk: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k and the weights. One that is not there or not needed is empty."""
    rest = interleaved, eps, offset
    dxq, dwq = norm_rotary_backward(dq, q, q_weight, cos, sin, q_layout, *rest, need_dwq)
    if k is None:
        return dxq, q.new_empty(0), dwq, q.new_empty(0)
    dxk, dwk = norm_rotary_backward(dk, k, k_weight, cos, sin, k_layout, *rest, need_dwk)
    return dxq, dxk, dwq, dwk


@qk_norm_rotary_bwd.register_fake
def _(dq, dk, q, k, q_weight, k_weight, cos, sin, q_layout, k_layout, interleaved, eps, offset, need_dwq, need_dwk):
    dwq = q_weight.new_empty(q_weight.shape) if need_dwq else q.new_empty(0)
    if k is None:
        return q.new_empty(q.shape), q.new_empty(0), dwq, q.new_empty(0)
    dwk = k_weight.new_empty(k_weight.shape) if need_dwk else k.new_empty(0)
    return q.new_empty(q.shape), k.new_empty(k.shape), dwq, dwk


def _norm_bwd_reference(
    dq, dk, q, k, q_weight, k_weight, cos, sin, q_layout, k_layout, interleaved, eps, offset, need_dwq, need_dwk
):
    def one(dy, x, weight, layout, need_dw):
        compute = compute_dtype(dy, x, weight, cos, sin)
        table = cos, sin, None, None, None, interleaved, True, cos.shape[-1], ()
        dn = _reference(dy, layout, *table, compute)
        x_ = x.to(compute)
        rstd = torch.rsqrt(x_.square().mean(-1, keepdim=True) + eps)
        xhat = x_ * rstd
        g = dn if weight is None else dn * (weight.to(compute) + offset)
        dx = ((g - xhat * (g * xhat).mean(-1, keepdim=True)) * rstd).to(x.dtype)
        return dx, (dn * xhat).flatten(0, -2).sum(0).to(weight.dtype) if need_dw else x.new_empty(0)

    dxq, dwq = one(dq, q, q_weight, q_layout, need_dwq)
    empty = q.new_empty(0)
    dxk, dwk = (empty, empty.clone()) if k is None else one(dk, k, k_weight, k_layout, need_dwk)
    return dxq, dxk, dwq, dwk


_qk_norm_rotary_bwd = differentiable(qk_norm_rotary_bwd, _norm_bwd_reference)


def _norm_setup_context(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:6])
    ctx.params = inputs[6:]


def _norm_backward(ctx, dq, dk):
    saved = q, k, q_weight, k_weight, cos, sin = ctx.saved_tensors
    dk = None if k is None else dk
    needs = ctx.needs_input_grad
    grads = [None] * 12
    if any(needs[:4]):
        back = _qk_norm_rotary_bwd(dq, dk, *saved, *ctx.params[:5], needs[2], needs[3])
        grads[:4] = (g if need else None for g, need in zip(back, needs))
    if needs[4] or needs[5]:
        grads[4:6] = _table_gradients(
            lambda *table: _norm_fwd_reference(*saved[:4], *table, *ctx.params), cos, sin, dq, dk
        )
    return tuple(grads)


_qk_norm_rotary = differentiable(qk_norm_rotary_fwd, _norm_fwd_reference, _norm_setup_context, _norm_backward)


@replayed
def apply_rotary_pos_emb(
    q: Optional[Tensor],
    k: Optional[Tensor],
    cos: Tensor,
    sin: Tensor,
    unsqueeze_dim: int = 1,
    *,
    interleaved: bool = False,
    mrope_section: Optional[list] = None,
) -> tuple[Optional[Tensor], Optional[Tensor]]:
    """Rotate queries and keys in one launch, as the function of this name in Hugging Face models.

    y = x * cos + rotate(x) * sin on the first cos.shape[-1] dimensions of each head; the others are copied.

    Args:
        q, k: (B, H, S, D), or (B, S, H, D) with unsqueeze_dim=2; float64 | float32 | float16 | bfloat16, any
            strides; H may differ (grouped heads). Either may be None. (T, H, D) goes with tables (T, R).
        cos, sin: (B, S, R) or (1, S, R), R even and at most D; (3, B, S, R) with mrope_section.
        unsqueeze_dim: where the tables get a dimension for the heads.
        interleaved: pairs are neighbours (Cohere, GPT-J), with tables that repeat each angle next to itself; else
            halves (Llama).
        mrope_section: pairs that turn by time, height and width, as Qwen2-VL's config has it.
    Returns:
        (q, k) rotated, new tensors in the dtype that each promotes to with the tables; dense, with the dimensions in
        the order in which the input has them in memory, D innermost.
    Raises:
        TypeError: dtype not listed.   ValueError: shapes that do not fit.
    Numerics: rounded once (see the top of this file). Autograd: any order; vmap; gradients of cos and sin, for
        learned tables, come from the formula in PyTorch; forward mode raises.
    Source: Su et al. 2021; transformers' modeling_llama.py, modeling_qwen2_vl.py.
    """
    op = "apply_rotary_pos_emb"
    layout = check_pair(op, q, k, cos, sin, unsqueeze_dim, interleaved, mrope_section)
    table_dtype = torch.promote_types(cos.dtype, sin.dtype)
    params = interleaved, False, cos.shape[-1], list(mrope_section or ())
    return _call_pair(
        lambda q, k, *layouts: (_rotary if use_kernel(q) else _fwd_reference)(
            q, k, cos, sin, None, None, None, *layouts, *params,
            *(torch.promote_types((q if x is None else x).dtype, table_dtype) for x in (q, k)),
        ),
        q, k, layout,
    )  # fmt: skip


@replayed
def rotary(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    heads_dim: int = 1,
    interleaved: bool = False,
    inverse: bool = False,
    rotary_dim: Optional[int] = None,
    position_ids: Optional[Tensor] = None,
    offsets: Union[int, Tensor, None] = None,
    cu_seqlens: Optional[Tensor] = None,
    mrope_section: Optional[list] = None,
) -> Tensor:
    """Rotate pairs of dimensions by the angles of each token's position.

    y = x * cos + rotate(x) * sin on the first `rotary_dim` dimensions of each head; the others are copied.

    Args:
        x: (B, H, S, D); (B, S, H, D) with heads_dim=2; (T, H, D), packed or of one sequence; float64 | float32 |
            float16 | bfloat16, any strides.
        cos, sin: a row for every token, (S, R), (1, S, R) or (B, S, R); or with one of the three arguments below,
            a row for every position, (P, R).
        heads_dim: which dimension of x the heads are.
        interleaved: pairs are neighbours, else halves. A full table repeats its angles in the same way.
        inverse: rotate back, by the transpose.
        rotary_dim: None = R, tables full as in Hugging Face models; 2 * R = tables without the repeated angles.
        position_ids: (S,), (1, S) or (B, S), int32 | int64.
        offsets: position of each sequence's first token, (B,), or (N,) with cu_seqlens, int32 | int64; or one int.
        cu_seqlens: (N + 1,), int32 | int64: sequence i of a packed (T, H, D) is rows cu_seqlens[i] to
            cu_seqlens[i + 1], and its positions start at 0.
        mrope_section: pairs that turn by each of 2 or 3 axes (height and width; time, height and width), summing to
            rotary_dim / 2. cos, sin or else position_ids then have a leading dimension of axes, and a batch.
    Returns:
        Shape and dtype of x, also with float32 tables; dense, with the dimensions in the order in which x has them in
        memory, D innermost.
    Raises:
        TypeError: dtype not listed.   ValueError: shapes that do not fit; rows that an int offset misses.
    Numerics: rounded once. A position that the table lacks gives NaN. Autograd: as `apply_rotary_pos_emb`.
    Source: Su et al. 2021; Wang et al., "Qwen2-VL", 2024 (multi-axis).
    """
    op = "rotary"
    _checks.tensors(op, x)
    require_tables(op, x, "x", cos, sin)
    _checks.integer(op, "heads_dim", heads_dim)
    _checks.integer(op, "rotary_dim", rotary_dim, optional=True)
    _checks.flags(op, interleaved=interleaved, inverse=inverse)
    lined_up = heads_dim - x.dim() if heads_dim >= 0 else heads_dim
    layout = check_layout(op, "heads_dim", heads_dim, x, lined_up)
    rotary_dim = cos.shape[-1] if rotary_dim is None else rotary_dim
    axes = check_sections(op, mrope_section, rotary_dim)
    check_index(op, x, layout, cos, sin, axes, position_ids, offsets, cu_seqlens)
    if isinstance(offsets, int):
        cos, sin, offsets = from_row(cos, sin, offsets, x, layout, cu_seqlens)
    indexed = position_ids is not None or offsets is not None or cu_seqlens is not None
    check_tables(op, x, layout, cos, sin, rotary_dim, 0 if indexed else axes, indexed)
    params = interleaved, inverse, rotary_dim, list(mrope_section or ()), x.dtype, x.dtype
    return _call_pair(
        lambda x, _, *layouts: (_rotary if use_kernel(x) else _fwd_reference)(
            x, None, cos, sin, position_ids, offsets, cu_seqlens, *layouts, *params
        ),
        x, None, layout,
    )[0]  # fmt: skip


@replayed
def qk_norm_rotary(
    q: Optional[Tensor],
    k: Optional[Tensor],
    q_weight: Optional[Tensor],
    k_weight: Optional[Tensor],
    cos: Tensor,
    sin: Tensor,
    eps: float = 1e-6,
    *,
    offset: float = 0.0,
    casting: str = "after_weight",
    unsqueeze_dim: int = 1,
    interleaved: bool = False,
) -> tuple[Optional[Tensor], Optional[Tensor]]:
    """Normalise each head of queries and keys and rotate it, in one launch.

    q = apply_rotary(rms_norm(q, q_weight, eps, offset, casting), cos, sin), and k likewise

    Args:
        q, k, cos, sin, unsqueeze_dim, interleaved: as in `apply_rotary_pos_emb`.
        q_weight, k_weight: (D,), or None.
        eps, offset, casting: as in `rms_norm`; Qwen3 is casting="before_weight", Gemma 3 is offset=1.0.
    Returns:
        (q, k): dtypes and layout that the two calls give.
    Raises:
        TypeError, ValueError: as `rms_norm` and `apply_rotary_pos_emb`.
    Numerics: rounded where the two calls round, and nowhere else; gradients are rounded once. Weight gradients are
        deterministic. Autograd: first and second derivative, vmap; forward mode raises. Heads wider than 8192 take
        the two calls.
    Source: Zhang and Sennrich 2019; Su et al. 2021; transformers' modeling_qwen3.py.
    """
    op = "qk_norm_rotary"
    layout = check_pair(op, q, k, cos, sin, unsqueeze_dim, interleaved, q_weight=q_weight, k_weight=k_weight)
    D = (k if q is None else q).shape[-1]
    _checks.shape(op, "q_weight", q_weight, (D,))
    _checks.shape(op, "k_weight", k_weight, (D,))
    _checks.number(op, "eps", eps, low=0)
    _checks.number(op, "offset", offset)
    _checks.choice(op, "casting", casting, _BEFORE_WEIGHT)
    if D > _WIDEST_NORM:
        q, k = (
            None if x is None else rms_norm(x, w, eps, offset=offset, casting=casting)
            for x, w in ((q, q_weight), (k, k_weight))
        )
        return apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim, interleaved=interleaved)
    if q is None:
        q_weight, k_weight = k_weight, None
    params = interleaved, float(eps), float(offset), _BEFORE_WEIGHT[casting]
    return _call_pair(
        lambda q, k, *layouts: (_qk_norm_rotary if use_kernel(q) else _norm_fwd_reference)(
            q, k, q_weight, None if k is None else k_weight, cos, sin, *layouts, *params
        ),
        q, k, layout,
    )  # fmt: skip


def _call_pair(call, q, k, layout):
    """call(q, k, their layouts) with dimensions in memory order, and results in the order of the arguments."""
    first, second = (k, None) if q is None else (q, k)
    first, first_layout = in_memory_order(first, layout)
    second, second_layout = (None, layout) if second is None else in_memory_order(second, layout)
    y, z = call(first, second, first_layout, second_layout)
    y = in_order(y, first_layout, layout)
    if q is None:
        return None, y
    return y, None if second is None else in_order(z, second_layout, layout)
