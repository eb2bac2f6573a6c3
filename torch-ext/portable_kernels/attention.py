"""Attention, exact and in one pass over the keys: softmax(scale * q k^T) v, without the matrix of scores in memory.

    s_ij = scale * q_i . k_j        softcap: c * tanh(s_ij / c);  alibi: - slope * |i + d - j|;  a mask: + m_ij
    out_i = sum_j exp(s_ij) v_j / (sum_j exp(s_ij) + exp(sink))         over the keys j that query i sees

Dao et al., "FlashAttention", 2022 and 2023. Query i sees key j where -left <= j - i - d <= right: d = Sk - Sq in
`flash_attn_*`, whose last query sees the last key, and 0 in `scaled_dot_product_attention`. A query that sees no key
gives 0, and no gradient. The backward is deterministic: no sum depends on the order in which programs run.
"""

import math
from typing import Optional, Union

import torch
from torch import Tensor

from . import _checks
from ._attention import keep_scale
from ._attention_bwd import attention_bwd
from ._attention_chunks import backward_in_chunks, dropout_mask, forward_in_chunks
from ._attention_fwd import attention_fwd
from ._dispatch import autocast, autocast_dtype, differentiable, use_kernel
from ._replay import replayed

SECOND_ORDER = "refused"


def flash_attn_func_reference(
    q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None,
    deterministic=False, return_attn_probs=False, s_aux=None,
):  # fmt: skip
    """What `flash_attn_func` computes, in plain PyTorch."""
    Sq, Sk = q.shape[1], k.shape[1]
    out, lse = _reference(
        q, k, v, _seen(Sq, Sk, Sk - Sq, window_size[0], 0 if causal else window_size[1], q.device),
        _scale(q, softmax_scale), softcap, alibi_slopes, s_aux, _seed(q, dropout_p), dropout_p,
    )  # fmt: skip
    return (out, lse, None) if return_attn_probs else out


def flash_attn_varlen_func_reference(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None, causal=False,
    window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False, return_attn_probs=False, s_aux=None,
    block_table=None,
):  # fmt: skip
    """What `flash_attn_varlen_func` computes without dropout, in plain PyTorch, one sequence after another."""
    outs, lses = [], []
    ends_q, ends_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    for b in range(len(ends_q) - 1):
        kb, vb = (
            t[ends_k[b] : ends_k[b + 1]]
            if block_table is None
            else t[block_table[b].long()].flatten(0, 1)[: ends_k[b + 1] - ends_k[b]]
            for t in (k, v)
        )
        slopes = alibi_slopes if alibi_slopes is None or alibi_slopes.dim() == 1 else alibi_slopes[b : b + 1]
        out, lse, _ = flash_attn_func_reference(
            q[None, ends_q[b] : ends_q[b + 1]], kb[None], vb[None], 0.0, softmax_scale, causal, window_size, softcap,
            slopes, return_attn_probs=True, s_aux=s_aux,
        )  # fmt: skip
        outs.append(out[0]), lses.append(lse[0])
    out, lse = torch.cat(outs), torch.cat(lses, -1)
    return (out, lse, None) if return_attn_probs else out


def scaled_dot_product_attention_reference(
    query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False
):
    """What `scaled_dot_product_attention` computes, in plain PyTorch."""
    q, k, v = (t.transpose(-3, -2).flatten(0, -4) for t in (query, key, value))
    seen = _seen(q.shape[1], k.shape[1], 0, -1, 0 if is_causal else -1, q.device)
    if attn_mask is not None:
        seen = attn_mask.expand(*query.shape[:-1], key.shape[-2]).flatten(0, -4)
    out, _ = _reference(q, k, v, seen, _scale(q, scale), 0.0, None, None, _seed(q, dropout_p), dropout_p)
    return out.transpose(1, 2).reshape(*query.shape[:-1], value.shape[-1])


def _reference(q, k, v, mask, scale, softcap, alibi, sinks, seed, dropout_p):
    """(out, lse) of (B, S, H, D) tensors. mask: bool, or added."""
    compute = torch.promote_types(q.dtype, torch.float32)
    heads = torch.arange(q.shape[2], device=q.device) // max(q.shape[2] // max(k.shape[2], 1), 1)
    (B, Sq, H, _), Sk = q.shape, k.shape[1]
    s = torch.einsum("bihd,bjhd->bhij", q.to(compute), k.to(compute)[:, :, heads]) * scale
    if softcap:
        s = softcap * torch.tanh(s / softcap)
    if alibi is not None:
        place = torch.arange(Sq, device=q.device)[:, None] + Sk - Sq
        distance = (place - torch.arange(Sk, device=q.device)).abs()
        s = s - alibi.to(compute).reshape(-1, H, 1, 1) * distance
    s = s.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else s + mask
    if sinks is not None:
        s = torch.cat((s, sinks.to(compute)[None, :, None, None].expand(B, H, Sq, 1)), -1)
    empty = (s == -torch.inf).all(-1, keepdim=True)
    p = torch.softmax(s.masked_fill(empty, 0.0), -1).masked_fill(empty, 0.0)[..., :Sk]
    if seed is not None:
        p = p * dropout_mask(seed, B, H, slice(0, Sq), Sk, dropout_p) * keep_scale(dropout_p)
    out = torch.einsum("bhij,bjhd->bihd", p, v.to(compute)[:, :, heads])
    return out.to(q.dtype), torch.logsumexp(s, -1)


def _seen(Sq, Sk, offset, left, right, device):
    place = torch.arange(Sq, device=device)[:, None] + offset
    key = torch.arange(Sk, device=device)
    seen = torch.ones((Sq, Sk), dtype=torch.bool, device=device)
    if left >= 0:
        seen = seen & (key >= place - left)
    if right >= 0:
        seen = seen & (key <= place + right)
    return seen


def _refuse(ctx, *grads):
    raise NotImplementedError(
        "attention: the second derivative must come from plain PyTorch: flash_attn_func_reference, "
        "flash_attn_varlen_func_reference or scaled_dot_product_attention_reference of the attention module"
    )


_attention_bwd = differentiable(attention_bwd, backward_in_chunks, lambda ctx, inputs, output: None, _refuse)


def _setup_context(ctx, inputs, output):
    *tensors, pages, mask, alibi, sinks, seed = inputs[:10]
    ctx.params = inputs[10:]
    ctx.paged = pages is not None
    ctx.save_for_backward(*tensors, mask, alibi, sinks, seed, *output)
    ctx.set_materialize_grads(False)


def _backward(ctx, dout, dlse):
    q, k, v, cu_q, cu_k, mask, alibi, sinks, seed, out, lse = ctx.saved_tensors
    if ctx.paged:
        raise NotImplementedError("attention: block_table must come without gradients; gather k and v to have them")
    if dout is None and dlse is None:
        return (None,) * 18
    dout = torch.zeros_like(out) if dout is None else dout
    needs = ctx.needs_input_grad
    dq, dk, dv, dmask, dsinks = _attention_bwd(
        q, k, v, dout, dlse, out, lse, cu_q, cu_k, mask, alibi, sinks, seed, *ctx.params, needs[6], needs[8]
    )
    found = {0: dq, 1: dk, 2: dv, 6: dmask, 8: dsinks}
    return tuple(found.get(n) if needs[n] else None for n in range(18))


_attention = differentiable(attention_fwd, forward_in_chunks, _setup_context, _backward)


@replayed
def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: Optional[float] = None,
    causal: bool = False,
    window_size: tuple = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Optional[Tensor] = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    s_aux: Optional[Tensor] = None,
):
    """Attention of a batch, with flash-attn's arguments.

    Args:
        q: (B, Sq, H, D), float64 | float32 | float16 | bfloat16.   k, v: (B, Sk, Hk, D), H a multiple of Hk. v may have
            another D. Any strides: what has no unit last stride is copied first.
        dropout_p: probability of dropping a weight. The mask follows from one torch.randint on q's device.
        softmax_scale: None = D ** -0.5.
        causal: query i sees keys up to i + Sk - Sq. Then the right of the window is 0.
        window_size: (left, right): query i sees keys i + Sk - Sq - left to i + Sk - Sq + right, both included; -1: all.
        softcap: c of c * tanh(score / c); 0 = none.
        alibi_slopes: (H,) or (B, H): slope * |i + Sk - Sq - j| is subtracted. It gets no gradient.
        deterministic: taken for compatibility: the backward always is.
        return_attn_probs: return (out, lse, None).
        s_aux: (H,), sinks: exp(s_aux) joins each sum of exponentials, and no value.
    Returns:
        out (B, Sq, H, D of v), contiguous; lse (B, H, Sq): the log of the sum of exponentials, float32. A query that
        sees no key gives 0, and lse -inf (or the sink).
    Raises:
        TypeError, ValueError: a dtype, shape or number other than these. NotImplementedError: alibi_slopes that require
        grad; a second derivative, for which there is `flash_attn_func_reference`.
    Numerics: products of tiles and sums in float32 (in float64 as PyTorch's), weights rounded to v's dtype; float32
        products in tf32 only where torch's own are set to be. Deterministic. Autograd: the first
        derivative, through out and lse; vmap. Autocast casts q, k and v, as of torch's attention.
    Source: Dao et al. 2022; Dao 2023; alibi: Press et al. 2021.
    """
    op = "flash_attn_func"
    _check(op, q, k, v, 4, dropout_p, softmax_scale, window_size, softcap, alibi_slopes, s_aux)
    _checks.flags(op, causal=causal, deterministic=deterministic, return_attn_probs=return_attn_probs)
    _check_slopes(op, alibi_slopes, q.shape[0], q.shape[2])
    if q.shape[0] != k.shape[0] or k.shape[:-1] != v.shape[:-1]:
        raise ValueError(f"{op}: k and v must have shapes (B, Sk, Hk, D), got {tuple(k.shape)} and {tuple(v.shape)}")
    q, k, v = autocast(q, k, v)
    left, right = _window(window_size, causal, max(q.shape[1], k.shape[1]))
    plain = not (dropout_p or softcap or return_attn_probs) and alibi_slopes is None and s_aux is None and left < 0
    if (
        not use_kernel(q)
        and plain
        and q.numel()
        and k.numel()
        and (right < 0 or (not right and q.shape[1] == k.shape[1]))
    ):
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        out = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=right == 0, scale=softmax_scale, enable_gqa=q.shape[1] != k.shape[1]
        )
        return out.transpose(1, 2).contiguous()
    out, lse = _attention(
        q, k, v, None, None, None, None, _slopes(op, alibi_slopes), s_aux, _seed(q, dropout_p),
        q.shape[1], k.shape[1], _scale(q, softmax_scale), left, right, False, float(softcap), float(dropout_p),
    )  # fmt: skip
    return (out, lse, None) if return_attn_probs else out


@replayed
def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: Union[int, Tensor],
    max_seqlen_k: Union[int, Tensor],
    dropout_p: float = 0.0,
    softmax_scale: Optional[float] = None,
    causal: bool = False,
    window_size: tuple = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Optional[Tensor] = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    s_aux: Optional[Tensor] = None,
    block_table: Optional[Tensor] = None,
):
    """Attention of sequences that follow each other without padding, with flash-attn's arguments.

    Args:
        q: (Tq, H, D).   k, v: (Tk, Hk, D), or with block_table (pages, page size, Hk, D).
        cu_seqlens_q, cu_seqlens_k: (B + 1,), int32 or int64: where sequences begin, and the last one ends.
        max_seqlen_q, max_seqlen_k: no sequence is longer. Not checked: rows beyond it give 0. A tensor is not read
            (that would wait for the device): the bound is then the number of rows.
        block_table: (B, pages of a sequence), int32: in which pages its keys lie. There is no gradient then.
        others: as in `flash_attn_func`; alibi_slopes may be (B, H).
    Returns:
        out (Tq, H, D of v), contiguous; lse (H, Tq). Rows of no sequence give 0, and lse -inf.
    Raises:
        TypeError, ValueError, NotImplementedError: as `flash_attn_func`; block_table where a gradient is asked for.
    Numerics, Autograd, autocast, Source: as `flash_attn_func`.
    """
    op = "flash_attn_varlen_func"
    _check(op, q, k, v, 3, dropout_p, softmax_scale, window_size, softcap, alibi_slopes, s_aux, block_table is not None)
    if k.shape[:-1] != v.shape[:-1]:
        raise ValueError(f"{op}: v must have the sizes {tuple(k.shape[:-1])} of k, got {tuple(v.shape[:-1])}")
    _checks.flags(op, causal=causal, deterministic=deterministic, return_attn_probs=return_attn_probs)
    _check_starts(op, q, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    _checks.shape(op, "cu_seqlens_k", cu_seqlens_k, cu_seqlens_q.shape)
    B = cu_seqlens_q.shape[0] - 1
    _check_slopes(op, alibi_slopes, B, q.shape[1])
    rows_k = k.shape[0]
    if block_table is not None:
        _check_starts(op, q, 2, block_table=block_table)
        _checks.shape(op, "block_table", block_table, (B, block_table.shape[1]))
        rows_k = block_table.shape[1] * k.shape[1]
        if torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v)):
            raise NotImplementedError(f"{op}: block_table must come without gradients; gather k and v to have them")
    max_q, max_k = (_bound(op, *bound) for bound in (
        ("max_seqlen_q", max_seqlen_q, q.shape[0]), ("max_seqlen_k", max_seqlen_k, rows_k)))  # fmt: skip
    q, k, v = autocast(q, k, v)
    left, right = _window(window_size, causal, max(max_q, max_k))
    out, lse = _attention(
        q, k, v, cu_seqlens_q.contiguous(), cu_seqlens_k.contiguous(),
        None if block_table is None else block_table.contiguous(), None, _slopes(op, alibi_slopes), s_aux,
        _seed(q, dropout_p), max_q, max_k, _scale(q, softmax_scale), left, right, False, float(softcap),
        float(dropout_p),
    )  # fmt: skip
    return (out, lse, None) if return_attn_probs else out


@replayed
def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Optional[Tensor] = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: Optional[float] = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Attention with the arguments and meaning of torch.nn.functional.scaled_dot_product_attention.

    Args:
        query: (..., H, Sq, D), float64 | float32 | float16 | bfloat16.   key, value: (..., H, Sk, D), value of any D.
            Three dimensions are (B, S, D). Any strides: what has no unit last stride is copied first.
        attn_mask: broadcasts to (..., H, Sq, Sk). bool: True where a key is seen; of those float dtypes: added. It is
            read where it lies; its gradient, where it requires one, has Sq * Sk elements a head. A query that finite
            numbers hide from every key sees their mean, as in torch; for exact gradients hide with -inf or a bool.
        dropout_p: probability of dropping a weight. The mask follows from one torch.randint on query's device.
        is_causal: query i sees keys up to i, whichever lengths they have.
        scale: None = D ** -0.5.
        enable_gqa: key and value may have fewer heads, of which H is a multiple.
    Returns:
        (..., H, Sq, D of value), in memory as (..., Sq, H, D) is.
    Raises:
        TypeError, ValueError: a dtype, shape or number other than these; attn_mask with is_causal.
        NotImplementedError: a second derivative, for which there is `scaled_dot_product_attention_reference`.
    Numerics, Autograd, autocast: as `flash_attn_func`. A query that sees no key gives 0.
    Source: torch.nn.functional.scaled_dot_product_attention; how it is computed, as `flash_attn_func`.
    """
    op = "scaled_dot_product_attention"
    names = ("query", "key", "value")
    _checks.tensors(op, query, first="query", key=key, value=value)
    _checks.given(op, key=key, value=value)
    for name, t in zip(names, (query, key, value)):
        if t.dim() != query.dim() or t.dim() < 3:
            raise ValueError(
                f"{op}: {name} must have 3 or more dimensions, as many as query, got shape {tuple(t.shape)}"
            )
    query, key, value = autocast(query, key, value)
    q, k, v = (t.unsqueeze(1) if t.dim() == 3 else t.flatten(0, -4) for t in (query, key, value))
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    _check(op, q, k, v, 4, dropout_p, scale, (-1, -1), 0.0, None, None, names=names)
    if query.shape[:-3] != key.shape[:-3] or key.shape[:-1] != value.shape[:-1] or q.shape[0] != k.shape[0]:
        raise ValueError(f"{op}: key and value must have query's batch and one length, got {tuple(key.shape)} and "
                         f"{tuple(value.shape)} for {tuple(query.shape)}")  # fmt: skip
    if q.shape[2] != k.shape[2] and not enable_gqa:
        raise ValueError(f"{op}: key must have query's {q.shape[2]} heads without enable_gqa, got {k.shape[2]}")
    _checks.flags(op, is_causal=is_causal, enable_gqa=enable_gqa)
    mask = _mask(op, attn_mask, query, key, is_causal)
    if not use_kernel(query) and not dropout_p and (mask is None or mask.dtype in (torch.bool, query.dtype)):
        out = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask if mask is None else torch.atleast_2d(attn_mask), is_causal=is_causal,
            scale=scale, enable_gqa=enable_gqa,
        )  # fmt: skip
        return out.transpose(-3, -2).contiguous().transpose(-3, -2)
    out, _ = _attention(
        q, k, v, None, None, None, mask, None, None, _seed(q, dropout_p), q.shape[1], k.shape[1], _scale(q, scale),
        -1, 0 if is_causal else -1, True, 0.0, float(dropout_p),
    )  # fmt: skip
    out = out.transpose(1, 2)
    return out.squeeze(1) if query.dim() == 3 else out if query.dim() == 4 else out.unflatten(0, query.shape[:-3])


def _mask(op, mask, query, key, is_causal):
    """The mask as (B, H, Sq, Sk)."""
    if mask is None:
        return None
    if is_causal:
        raise ValueError(f"{op}: attn_mask must be None with is_causal, got a tensor")
    if not (isinstance(mask, Tensor) and mask.dtype == torch.bool):
        _checks.tensors(op, query, first="query", attn_mask=mask)
    if mask.device != query.device:
        raise ValueError(f"{op}: attn_mask must be on {query.device} as query is, got {mask.device}")
    shape = (*query.shape[:-1], key.shape[-2])
    try:
        mask = mask.expand(shape)
    except RuntimeError:
        raise ValueError(f"{op}: attn_mask must broadcast to {shape}, got {tuple(mask.shape)}") from None
    return mask.unsqueeze(1) if query.dim() == 3 else mask.flatten(0, -4)


def _check(op, q, k, v, ndim, dropout_p, scale, window, softcap, alibi, sinks, paged=False, names=("q", "k", "v")):
    _checks.tensors(op, q, first=names[0], **{names[1]: k, names[2]: v}, alibi_slopes=alibi, s_aux=sinks)
    _checks.given(op, **{names[1]: k, names[2]: v})
    for name, t, dims in zip(names, (q, k, v), (ndim, ndim + paged, ndim + paged)):
        if t.dim() != dims:
            raise ValueError(f"{op}: {name} must have {dims} dimensions, got shape {tuple(t.shape)}")
        if t.dtype != q.dtype and autocast_dtype(q) is None:
            raise TypeError(f"{op}: {name} must have dtype {str(q.dtype)[6:]} as {names[0]}, got {str(t.dtype)[6:]}")
    H, Hk = q.shape[-2], k.shape[-2]
    if q.shape[-1] != k.shape[-1]:
        raise ValueError(f"{op}: {names[1]} must have head dimension {q.shape[-1]}, got {k.shape[-1]}")
    if H != Hk and (not Hk or H % Hk):
        raise ValueError(f"{op}: {names[0]}'s heads must be a multiple of the {Hk} of {names[1]}, got {H}")
    _checks.number(op, "dropout_p", dropout_p)
    if not 0 <= dropout_p <= 1:
        raise ValueError(f"{op}: dropout_p must be in [0, 1], got {dropout_p}")
    _checks.number(op, "scale" if names[0] == "query" else "softmax_scale", scale, optional=True)
    _checks.number(op, "softcap", softcap, low=0)
    _check_window(op, window)
    _checks.shape(op, "s_aux", sinks, (H,))


def _check_window(op, window):
    if not (isinstance(window, (tuple, list)) and len(window) == 2 and all(isinstance(w, int) for w in window)):
        raise ValueError(f"{op}: window_size must be two integers (left, right), got {window!r}")


def _check_slopes(op, alibi, B, H):
    if alibi is not None and tuple(alibi.shape) not in ((H,), (B, H)):
        raise ValueError(f"{op}: alibi_slopes must have shape ({H},) or ({B}, {H}), got {tuple(alibi.shape)}")


def _check_starts(op, q, dims=1, **tensors):
    for name, t in tensors.items():
        if not isinstance(t, Tensor) or t.dtype not in (torch.int32, torch.int64):
            got = str(t.dtype)[6:] if isinstance(t, Tensor) else type(t).__name__
            raise TypeError(f"{op}: {name} must be a tensor of dtype int32 | int64, got {got}")
        if t.dim() != dims or not t.shape[0]:
            raise ValueError(f"{op}: {name} must have {dims} dimensions, not empty, got shape {tuple(t.shape)}")
        if t.device != q.device:
            raise ValueError(f"{op}: {name} must be on {q.device} as q is, got {t.device}")


def _bound(op, name, value, rows):
    if isinstance(value, Tensor):
        return rows
    if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)):
        raise TypeError(f"{op}: {name} must be an int or a tensor, got {type(value).__name__}")
    if value < 0:
        raise ValueError(f"{op}: {name} must be at least 0, got {value}")
    return min(value, rows)


def _window(window, causal, longest):
    """(left, right) with -1 for whatever hides nothing from sequences of up to `longest`."""
    left, right = window[0], 0 if causal else window[1]
    return left if 0 <= left < longest else -1, right if 0 <= right < longest else -1


def _scale(q, scale):
    return float(scale) if scale is not None else 1.0 / math.sqrt(q.shape[-1]) if q.shape[-1] else 1.0


def _slopes(op, alibi):
    if alibi is not None and alibi.requires_grad and torch.is_grad_enabled():
        raise NotImplementedError(f"{op}: alibi_slopes must not require grad; flash_attn_func_reference has a gradient")
    return alibi


def _seed(q, dropout_p):
    if not dropout_p:
        return None
    return torch.randint(2**63 - 1, (), dtype=torch.int64, device=q.device)
