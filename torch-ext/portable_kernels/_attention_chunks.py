"""Attention in PyTorch, a chunk of queries at a time: what computes where there are no kernels, and float64.

No more than 2^22 scores exist at a time.
"""

import torch

from ._attention import keep_scale
from ._philox import philox
from ._rows import compute_dtype
from ._triton import cdiv


def pad(t, cu, S):
    """(T, ...) to (B, S, ...): zeros after each sequence."""
    place, inside = _places(cu, S, t.shape[0])
    if not t.shape[0]:
        return t.new_zeros((*place.shape, *t.shape[1:]))
    return t[place.clamp(max=t.shape[0] - 1)].masked_fill(~inside.view(*inside.shape, *(1,) * (t.dim() - 1)), 0)


def unpad(t, cu, T, fill=0.0):
    """(B, S, ...) to (T, ...), `fill` where no sequence lies."""
    place, inside = _places(cu, t.shape[1], T)
    packed = t.new_full((T + 1, *t.shape[2:]), fill)
    packed[torch.where(inside, place, T).flatten()] = t.flatten(0, 1)
    return packed[:T]


def _places(cu, S, T):
    rows = torch.arange(S, device=cu.device)
    return cu[:-1, None].long() + rows, rows < (cu[1:] - cu[:-1])[:, None]


def from_pages(t, table, S):
    """(pages, page size, H, D) to (B, S, H, D)."""
    rows = torch.arange(S, device=t.device)
    pages = table[:, rows // t.shape[1]].long()
    return t[pages.clamp(0, t.shape[0] - 1), rows % t.shape[1]]


def lengths(cu):
    return None if cu is None else cu[1:] - cu[:-1]


class Chunks:
    """Scores of (B, Sq, H, D) queries and (B, Sk, Hk, D) keys, for a few queries at a time."""

    def __init__(self, q, k, Lq, Lk, mask, alibi, seed, scale, left, right, top_left, softcap, dropout_p):
        self.q, self.k, self.compute = q, k.to(compute_dtype(q)).transpose(1, 2), compute_dtype(q)
        self.Lk, self.mask, self.alibi, self.seed = Lk, mask, alibi, seed
        self.scale, self.left, self.right, self.softcap, self.dropout_p = scale, left, right, softcap, dropout_p
        (B, Sq, H, _), Sk = q.shape, k.shape[1]
        self.step = max(2**22 // max(B * H * Sk, 1), 1)
        self.offset = 0 if top_left else Sk - Sq if Lk is None else (Lk - Lq).reshape(-1, 1, 1, 1)
        self.j = torch.arange(Sk, device=q.device)

    def __iter__(self):
        for start in range(0, self.q.shape[1], self.step):
            yield slice(start, min(start + self.step, self.q.shape[1]))

    def rows(self, t, part):
        """Rows of a (B, S, H, D) tensor as (B, Hk, H / Hk * rows, D): one product serves a group of heads."""
        t = t[:, part].to(self.compute).transpose(1, 2)
        return self.group(t)

    def group(self, t):
        """(B, H, rows, N) to (B, Hk, H / Hk * rows, N)."""
        B, H, rows, N = t.shape
        return t.reshape(B, self.k.shape[1], H // max(self.k.shape[1], 1) * rows, N)

    def split(self, t, part):
        return t.reshape(t.shape[0], self.q.shape[2], part.stop - part.start, t.shape[-1])

    def scores(self, part):
        """((B, H, rows, Sk) scores, the derivative of the soft cap)."""
        s = self.split(self.rows(self.q, part) @ self.k.mT, part) * self.scale
        gain = None
        i = torch.arange(part.start, part.stop, device=s.device)[:, None]
        place = i + self.offset
        if self.softcap:
            t = torch.tanh(s / self.softcap)
            s, gain = t * self.softcap, (1 - t) * (1 + t)
        if self.alibi is not None:
            s = s - self.alibi.to(self.compute).reshape(-1, s.shape[1], 1, 1) * (place - self.j).abs()
        if self.mask is not None:
            mask = self.mask[:, :, part]
            s = s.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else s + mask
        hidden = torch.zeros((), dtype=torch.bool, device=s.device)
        if self.Lk is not None:
            hidden = hidden | (self.j >= self.Lk.reshape(-1, 1, 1, 1))
        if self.right >= 0:
            hidden = hidden | (self.j > place + self.right)
        if self.left >= 0:
            hidden = hidden | (self.j < place - self.left)
        return s.masked_fill(hidden, -torch.inf), gain

    def kept(self, part):
        """Which probabilities are kept, times what makes up for the others; or 1.0."""
        if self.seed is None:
            return 1.0
        B, _, H, _ = self.q.shape
        kept = dropout_mask(self.seed, B, H, part, self.k.shape[2], self.dropout_p)
        return kept.to(self.compute) * keep_scale(self.dropout_p)


def dropout_mask(seed, B, H, part, Sk, p):
    """(B, H, rows of part, Sk): whether a probability is kept, by (seed, head of the batch, query, key) alone."""
    device = seed.device
    head = torch.arange(B * H, device=device)[:, None, None]
    query = torch.arange(part.start, part.stop, device=device)[:, None]
    four = torch.arange(cdiv(Sk, 4), device=device)
    shape = (B * H, part.stop - part.start, four.shape[0])
    words = philox(*(c.expand(shape) for c in (four, query, head, torch.zeros_like(four))), seed)
    return (words.flatten(-2)[..., :Sk] >= round(p * 2**32)).view(B, H, shape[1], Sk)


def forward_in_chunks(
    q, k, v, cu_q, cu_k, pages, mask, alibi, sinks, seed,
    max_q, max_k, scale, left, right, top_left, softcap, dropout_p,
):  # fmt: skip
    """The same in PyTorch, for CPUs, float64 and wide heads."""
    T, dtype = q.shape[0], q.dtype
    if cu_q is not None:
        q = pad(q, cu_q, max_q)
        k, v = (pad(t, cu_k, max_k) if pages is None else from_pages(t, pages, max_k) for t in (k, v))
    chunks = Chunks(
        q, k, lengths(cu_q), lengths(cu_k), mask, alibi, seed, scale, left, right, top_left, softcap, dropout_p
    )
    (B, Sq, H, _), compute = q.shape, chunks.compute
    out, lse = q.new_empty((B, Sq, H, v.shape[-1])), q.new_empty((B, H, Sq), dtype=compute)
    v = v.to(compute).transpose(1, 2)
    for part in chunks:
        s, _ = chunks.scores(part)
        peak = s.amax(-1) if s.shape[-1] else s.new_full(s.shape[:-1], -torch.inf)
        if sinks is not None:
            peak = torch.maximum(peak, sinks.to(compute)[:, None])
        peak = torch.where(peak == -torch.inf, 0.0, peak)  # of a row that sees no key: its sum is 0
        p = torch.exp(s - peak.unsqueeze(-1))
        total = p.sum(-1)
        if sinks is not None:
            total = total + torch.exp(sinks.to(compute)[:, None] - peak)
        p = p * chunks.kept(part) / torch.where(total == 0, 1.0, total).unsqueeze(-1)
        o = chunks.split(chunks.group(p) @ v, part)
        out[:, part] = o.transpose(1, 2).to(dtype)
        lse[:, :, part] = peak + torch.log(total)
    if cu_q is not None:
        out = unpad(out, cu_q, T)
        lse = unpad(lse.transpose(1, 2), cu_q, T, -torch.inf).t().contiguous()
    return out, lse


def backward_in_chunks(
    q, k, v, dout, dlse, out, lse, cu_q, cu_k, mask, alibi, sinks, seed,
    max_q, max_k, scale, left, right, top_left, softcap, dropout_p, need_dmask, need_dsinks,
):  # fmt: skip
    """Gradients of q, k, v, the mask and the sinks."""
    rows_q, rows_k = q.shape[0], k.shape[0]
    if cu_q is not None:
        q, dout, out = (pad(t, cu_q, max_q) for t in (q, dout, out))
        k, v = (pad(t, cu_k, max_k) for t in (k, v))
        lse, dlse = (None if t is None else pad(t.t(), cu_q, max_q).transpose(1, 2) for t in (lse, dlse))
    chunks = Chunks(
        q, k, lengths(cu_q), lengths(cu_k), mask, alibi, seed, scale, left, right, top_left, softcap, dropout_p
    )
    compute = chunks.compute
    delta = (dout.to(compute) * out.to(compute)).sum(-1).transpose(1, 2)
    if dlse is not None:
        delta = delta - dlse
    dq, dmask = torch.empty(q.shape, dtype=q.dtype, device=q.device), q.new_empty(0)
    dk = torch.zeros((*k.shape[:1], k.shape[2], k.shape[1], k.shape[3]), dtype=compute, device=k.device)
    dv = torch.zeros((*v.shape[:1], v.shape[2], v.shape[1], v.shape[3]), dtype=compute, device=v.device)
    if need_dmask:
        dmask = torch.empty(mask.shape, dtype=mask.dtype, device=q.device)
    v = v.to(compute).transpose(1, 2)
    for part in chunks:
        s, gain = chunks.scores(part)
        row = lse[:, :, part, None].to(compute)
        p = torch.exp(s - torch.where(row == -torch.inf, torch.inf, row))
        kept = chunks.kept(part)
        do = chunks.rows(dout, part)
        dv += chunks.group(p * kept).mT @ do
        dp = chunks.split(do @ v.mT, part) * kept
        ds = torch.where(p == 0, 0.0, p * (dp - delta[:, :, part, None]))  # whatever a masked key's value is
        if need_dmask:
            dmask[:, :, part] = ds.to(mask.dtype)
        ds = chunks.group((ds if gain is None else ds * gain) * scale)
        dk += ds.mT @ chunks.rows(q, part)
        dq[:, part] = chunks.split(ds @ chunks.k, part).transpose(1, 2).to(q.dtype)
    dk, dv = (t.transpose(1, 2).to(q.dtype).contiguous() for t in (dk, dv))
    dsinks = q.new_empty(0)
    if need_dsinks:
        share = torch.where(lse == -torch.inf, 0.0, torch.exp(sinks.to(compute)[:, None] - lse) * delta)
        if cu_q is not None:
            share = share.masked_fill((torch.arange(max_q, device=q.device) >= lengths(cu_q)[:, None])[:, None], 0.0)
        dsinks = -share.sum((0, 2)).to(sinks.dtype)
    if cu_q is not None:
        dq, dk, dv = unpad(dq, cu_q, rows_q), unpad(dk, cu_k, rows_k), unpad(dv, cu_k, rows_k)
    return dq, dk, dv, dmask, dsinks
