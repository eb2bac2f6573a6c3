"""Attention to a cache of keys and values, for decoding: new tokens are appended to the cache and attend to all of it.

    o = softmax(scale * q @ k^T) @ v    over the keys that a sequence has

The cache is contiguous or in pages, and has room for more than is in it. The keys are split over programs (Dao et al.,
"Flash-Decoding for long-context inference", 2023), and heads of queries that share keys are computed together.
"""

import math
from typing import Optional, Union

import torch
from torch import Tensor

from . import _attention_decode, _checks
from ._dispatch import undifferentiable
from ._ops import add_op_namespace_prefix
from ._rows import compute_dtype
from .attention import _check_slopes, _check_window

SECOND_ORDER = "refused"  # and the first: what decodes does not learn


def flash_attn_with_kvcache_reference(
    q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None, cache_batch_idx=None,
    cache_leftpad=None, block_table=None, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
    rotary_interleaved=True, alibi_slopes=None, num_splits=0, return_softmax_lse=False, s_aux=None,
):  # fmt: skip
    """What `flash_attn_with_kvcache` computes, in plain PyTorch."""
    left, right = _window(window_size, causal)
    seqlens, cached, new = _lengths(k_cache, k, cache_seqlens, block_table)
    if k is not None:
        _append_reference(
            k, v, k_cache, v_cache, rotary_cos, rotary_sin, seqlens, cache_batch_idx, block_table, cached,
            rotary_interleaved,
        )  # fmt: skip
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    out, lse = _reference(
        q, k_cache, v_cache, rotary_cos, rotary_sin, seqlens, cache_batch_idx, cache_leftpad, block_table, alibi_slopes,
        s_aux, cached, new, scale, left, right, softcap, rotary_interleaved, num_splits,
    )  # fmt: skip
    return (out, lse) if return_softmax_lse else out


def _rotate(x, cos, sin, positions, interleaved):
    """x (B, S, H, D) turned by the angles of positions (B, S), and rounded; NaN where the table lacks one."""
    known = (positions >= 0) & (positions < cos.shape[0])
    row = torch.where(known, positions, 0)
    compute = compute_dtype(x)
    cos, sin = (t.to(compute)[row].masked_fill(~known[..., None], torch.nan)[:, :, None] for t in (cos, sin))
    half = cos.shape[-1]
    turned, rest = x[..., : 2 * half].to(compute), x[..., 2 * half :]
    a, b = (turned[..., ::2], turned[..., 1::2]) if interleaved else turned.split(half, -1)
    a, b = a * cos - b * sin, b * cos + a * sin
    turned = torch.stack((a, b), -1).flatten(-2) if interleaved else torch.cat((a, b), -1)
    return torch.cat((turned.to(x.dtype), rest), -1)


def _per_sequence(seqlens, cached, x):
    return torch.full((x.shape[0],), cached, device=x.device) if seqlens is None else seqlens.long()


def _append_reference(k, v, k_cache, v_cache, cos, sin, seqlens, batch_idx, table, cached, interleaved):
    positions = _per_sequence(seqlens, cached, k)[:, None] + torch.arange(k.shape[1], device=k.device)
    room = (positions >= 0) & (positions < _attention_decode.capacity(k_cache, table))
    if cos is not None:
        k = _rotate(k, cos, sin, positions, interleaved)
    at = torch.where(room, positions, 0)
    if table is None:
        rows = torch.arange(k.shape[0], device=k.device) if batch_idx is None else batch_idx.long()
        rows = rows[:, None].expand_as(at)
    else:
        rows = table.long().gather(1, at // k_cache.shape[1])
        room, at = room & (rows >= 0), at % k_cache.shape[1]
    k_cache[rows[room], at[room]] = k[room]
    v_cache[rows[room], at[room]] = v[room]


def _reference(
    q, k_cache, v_cache, cos, sin, seqlens, batch_idx, leftpad, table, alibi, sinks, cached, new, scale, left, right,
    softcap, interleaved, num_splits,
):  # fmt: skip
    B, S, H, D = q.shape
    compute = compute_dtype(q)
    seqlens = _per_sequence(seqlens, cached, q)
    if cos is not None:  # with no order among the queries they are all at the first one's position
        ordered = left is not None or right is not None
        token = torch.arange(S, device=q.device) * ordered
        q = _rotate(q, cos, sin, seqlens[:, None] + token, interleaved)
    if table is not None:
        pages = table.long().clamp(0, max(k_cache.shape[0] - 1, 0))  # those that are not reached may be any
        k, v = (c[pages].flatten(1, 2) for c in (k_cache, v_cache))
    elif batch_idx is not None:
        k, v = k_cache[batch_idx.long()], v_cache[batch_idx.long()]
    else:
        k, v = k_cache[:B], v_cache[:B]
    T, heads = k.shape[1:3]
    lengths = (seqlens + new).clamp(max=T)
    first = torch.zeros_like(lengths) if leftpad is None else leftpad.long()
    keys = torch.arange(T, device=q.device)
    there = (keys >= first[:, None]) & (keys < lengths[:, None])
    k, v = (t.masked_fill(~there[..., None, None], 0).to(compute) for t in (k, v))  # what lies beyond may be NaN

    q = q.to(compute).unflatten(2, (heads, H // heads))
    scores = torch.einsum("bshgd,bthd->bhgst", q, k).flatten(1, 2) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    gap = (keys - (lengths[:, None] - S + torch.arange(S, device=q.device))[..., None])[:, None]
    if alibi is not None:
        scores = scores - alibi.to(compute).expand(B, H)[..., None, None] * gap.abs()
    seen = there[:, None, None]
    if right is not None:
        seen = seen & (gap <= right)
    if left is not None:
        seen = seen & (gap >= -left)
    scores = scores.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        sink = sinks.to(compute)[:, None, None].expand(B, H, S, 1)
        scores = torch.cat((scores, sink), -1)
    lse = torch.logsumexp(scores, -1) if scores.shape[-1] else scores.new_full((B, H, S), -torch.inf)
    p = torch.softmax(scores, -1)[..., :T].masked_fill((lse == -torch.inf)[..., None], 0.0)  # sums to 1, as lse may not
    out = torch.einsum("bhgst,bthd->bshgd", p.unflatten(1, (heads, H // heads)), v)
    return out.flatten(2, 3).to(k_cache.dtype), lse


@torch.library.custom_op(add_op_namespace_prefix("kv_cache_append_fwd"), mutates_args=("k_cache", "v_cache"))
def kv_cache_append_fwd(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, cos: Optional[Tensor], sin: Optional[Tensor],
    seqlens: Optional[Tensor], batch_idx: Optional[Tensor], table: Optional[Tensor], cached: int, interleaved: bool,
) -> None:  # fmt: skip
    if k.numel():
        _attention_decode.append(k, v, k_cache, v_cache, cos, sin, seqlens, batch_idx, table, cached, interleaved)


@kv_cache_append_fwd.register_fake
def _(k, v, k_cache, v_cache, cos, sin, seqlens, batch_idx, table, cached, interleaved):
    pass


@torch.library.custom_op(add_op_namespace_prefix("kv_cache_attention_fwd"), mutates_args=())
def kv_cache_attention_fwd(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, cos: Optional[Tensor], sin: Optional[Tensor],
    seqlens: Optional[Tensor], batch_idx: Optional[Tensor], leftpad: Optional[Tensor], table: Optional[Tensor],
    alibi: Optional[Tensor], sinks: Optional[Tensor], cached: int, new: int, scale: float, left: Optional[int],
    right: Optional[int], softcap: float, interleaved: bool, num_splits: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    ordered = left is not None or right is not None
    if q.shape[1] == 1 and alibi is None:
        right = None if right is None or right >= 0 else right  # the last key is the query's own
    return _attention_decode.attend(
        q, k_cache, v_cache, cos, sin, seqlens, batch_idx, leftpad, table, alibi, sinks, cached, new, scale, left,
        right, softcap or None, interleaved, ordered, num_splits,
    )  # fmt: skip


@kv_cache_attention_fwd.register_fake
def _(
    q, k_cache, v_cache, cos, sin, seqlens, batch_idx, leftpad, table, alibi, sinks, cached, new, scale, left, right,
    softcap, interleaved, num_splits,
):  # fmt: skip
    B, S, H, _ = q.shape
    return q.new_empty(q.shape), q.new_empty((B, H, S), dtype=compute_dtype(q))


_append = undifferentiable(kv_cache_append_fwd, _append_reference, mutates=(2, 3))
_attend = undifferentiable(kv_cache_attention_fwd, _reference)


def _window(window_size, causal):
    """(left, right): how many keys before and after its own position a query sees, None = all."""
    left, right = (None if w < 0 else int(w) for w in window_size)
    return left, 0 if causal else right


def _lengths(k_cache, k, cache_seqlens, table):
    """(lengths before the new keys as a tensor, or None, then as a number, how many are new)."""
    new = 0 if k is None else k.shape[1]
    if isinstance(cache_seqlens, Tensor):
        return cache_seqlens, 0, new
    return None, _attention_decode.capacity(k_cache, table) if cache_seqlens is None else cache_seqlens, new


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Optional[Tensor] = None,
    v: Optional[Tensor] = None,
    rotary_cos: Optional[Tensor] = None,
    rotary_sin: Optional[Tensor] = None,
    cache_seqlens: Union[int, Tensor, None] = None,
    cache_batch_idx: Optional[Tensor] = None,
    cache_leftpad: Optional[Tensor] = None,
    block_table: Optional[Tensor] = None,
    softmax_scale: Optional[float] = None,
    causal: bool = False,
    window_size: tuple = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Optional[Tensor] = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    s_aux: Optional[Tensor] = None,
) -> Union[Tensor, tuple[Tensor, Tensor]]:
    """Append new keys and values to a cache, in place, and attend to all that it then holds.

    o = softmax(scale * q @ k^T) @ v, query i of S at position length - S + i

    Args:
        q: (B, S, H, D), D from 1 to 256; float64 | float32 | float16 | bfloat16, any strides, as all tensors here.
        k_cache, v_cache: (B or more, capacity, heads, D), of q's dtype, H a multiple of heads; or pages
            (n, page size, heads, D) with block_table. Written to where k and v are given.
        k, v: (B, S_new, heads, D), to be appended. What the cache has no room for is dropped.
        rotary_cos, rotary_sin: (positions, R / 2), R at most D. Turn k, and q, by their positions; only with k.
            q is all at position cache_seqlens unless causal or a window gives its tokens an order.
        cache_seqlens: keys in the cache before the new ones: (B,), int32 | int64, or one int; None = it is full.
        cache_batch_idx: (B,), int32 | int64, the row of the cache of each sequence; none twice where k is given.
        cache_leftpad: (B,), int32 | int64, the first key of each sequence; those before it are not seen.
        block_table: (B, pages of a sequence), int32 | int64. An entry that is not reached may hold anything.
        softmax_scale: None = D ** -0.5.
        causal: query i sees keys up to its own position.
        window_size: (left, right), how many keys before and after its own position a query sees; -1 = all.
        softcap: 0, or scores become softcap * tanh(score / softcap).
        rotary_interleaved: pairs are neighbours, else halves.
        alibi_slopes: (H,) or (B, H): slope * |distance| is taken off the scores.
        num_splits: over how many programs to split the keys; 0 chooses by the cache's capacity, not by its content.
        return_softmax_lse: also return the log-sum-exp.
        s_aux: (H,), a score for each head that takes part in the sum and has no value.
    Returns:
        (B, S, H, D), dtype of q, contiguous; with return_softmax_lse also (B, H, S), float32 (float64).
    Raises:
        TypeError: dtype not listed.   ValueError: shapes that do not fit.
    Numerics: sums in float32 (float64), rounded once; equal bits each time. A query that sees no key gives 0, and
        -inf for its log-sum-exp. Nothing beyond a sequence's length is read. Lengths on the device stay there: the call
        can be captured in a graph. Autograd: none; backward raises. Use `flash_attn_func` to learn.
    Source: Dao et al., "Flash-Decoding for long-context inference", 2023; Kwon et al., "PagedAttention", 2023.
    """
    op = "flash_attn_with_kvcache"
    _check(
        op, q, k_cache, v_cache, k, v, rotary_cos, rotary_sin, cache_seqlens, cache_batch_idx, cache_leftpad,
        block_table, alibi_slopes, s_aux,
    )  # fmt: skip
    _checks.number(op, "softmax_scale", softmax_scale, optional=True)
    _checks.number(op, "softcap", softcap, low=0)
    _checks.flags(op, causal=causal, rotary_interleaved=rotary_interleaved, return_softmax_lse=return_softmax_lse)
    if isinstance(num_splits, bool) or not isinstance(num_splits, int) or num_splits < 0:
        raise ValueError(f"{op}: num_splits must be an integer of at least 0, got {num_splits!r}")
    _check_window(op, window_size)
    left, right = _window(window_size, causal)
    seqlens, cached, new = _lengths(k_cache, k, cache_seqlens, block_table)
    if k is not None:
        _append(
            k, v, k_cache, v_cache, rotary_cos, rotary_sin, seqlens, cache_batch_idx, block_table, cached,
            rotary_interleaved,
        )  # fmt: skip
    scale = 1.0 / math.sqrt(q.shape[-1]) if softmax_scale is None else float(softmax_scale)
    out, lse = _attend(
        q, k_cache, v_cache, rotary_cos, rotary_sin, seqlens, cache_batch_idx, cache_leftpad, block_table, alibi_slopes,
        s_aux, cached, new, scale, left, right, float(softcap), rotary_interleaved, num_splits,
    )  # fmt: skip
    return (out, lse) if return_softmax_lse else out


def _check(op, q, k_cache, v_cache, k, v, cos, sin, seqlens, batch_idx, leftpad, table, alibi, sinks):
    _checks.tensors(
        op, q, first="q", k_cache=k_cache, v_cache=v_cache, k=k, v=v, rotary_cos=cos, rotary_sin=sin,
        alibi_slopes=alibi, s_aux=sinks,
    )  # fmt: skip
    _checks.given(op, k_cache=k_cache, v_cache=v_cache)
    for name, t in (("q", q), ("k_cache", k_cache)):
        if t.dim() != 4:
            raise ValueError(f"{op}: {name} must have 4 dimensions, got shape {tuple(t.shape)}")
    for name, t in (("k_cache", k_cache), ("v_cache", v_cache), ("k", k), ("v", v)):
        if t is not None and t.dtype != q.dtype:
            raise TypeError(f"{op}: {name} must have q's dtype {q.dtype}, got {t.dtype}")
    B, S, H, D = q.shape
    rows, size, heads, _ = k_cache.shape
    if not 1 <= D <= 256:
        raise ValueError(f"{op}: q must have a head dimension from 1 to 256, got {D}")
    if heads == 0 or H % heads:
        raise ValueError(f"{op}: q must have a multiple of the {heads} heads of k_cache, got {H}")
    _checks.shape(op, "k_cache", k_cache, (rows, size, heads, D))
    _checks.shape(op, "v_cache", v_cache, k_cache.shape)
    if (k is None) != (v is None):
        raise ValueError(f"{op}: k and v must come together, got {'v' if k is None else 'k'} alone")
    if k is not None:
        _checks.shape(op, "k", k, (B, k.shape[1] if k.dim() == 4 else "S_new", heads, D))
        _checks.shape(op, "v", v, k.shape)
        if seqlens is None:
            raise ValueError(f"{op}: cache_seqlens must say where k goes, got None")
    for name, t, shape in (
        ("cache_seqlens", seqlens, (B,)),
        ("cache_batch_idx", batch_idx, (B,)),
        ("cache_leftpad", leftpad, (B,)),
        ("block_table", table, None),
    ):
        if name == "cache_seqlens" and isinstance(t, int):
            _checks.integer(op, name, t)
            continue
        if t is None:
            continue
        if not isinstance(t, Tensor) or t.dtype not in (torch.int32, torch.int64):
            kind = str(t.dtype) if isinstance(t, Tensor) else type(t).__name__
            raise TypeError(f"{op}: {name} must be an int32 | int64 tensor, got {kind}")
        if t.device != q.device:
            raise ValueError(f"{op}: {name} must be on {q.device} as q is, got {t.device}")
        _checks.shape(op, name, t, shape or (B, t.shape[1] if t.dim() == 2 else "pages"))
    if table is not None and batch_idx is not None:
        raise ValueError(f"{op}: cache_batch_idx must be None with block_table, got both")
    if table is None and batch_idx is None and rows < B:
        raise ValueError(f"{op}: k_cache must have a row for each of {B} sequences, got {rows}")
    if (cos is None) != (sin is None) or (cos is not None and k is None):
        raise ValueError(f"{op}: rotary_cos, rotary_sin and k must come together")
    if cos is not None:
        if cos.dim() != 2 or not 2 <= 2 * cos.shape[1] <= D:
            raise ValueError(f"{op}: rotary_cos must have shape (positions, at most {D // 2}), got {tuple(cos.shape)}")
        _checks.shape(op, "rotary_sin", sin, cos.shape)
    _check_slopes(op, alibi, B, H)
    _checks.shape(op, "s_aux", sinks, (H,))
