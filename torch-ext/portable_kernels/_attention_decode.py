"""Attention of few queries to many keys: the keys are split over programs, whose results a second kernel merges.

The rows of a tile are the queries of all heads that share a head of keys, so that keys and values are read once.
Lengths stay on the device: a program finds its share of the keys itself, and nothing depends on how many there are but
the number of programs, which the capacity of the cache bounds. The order of every sum is fixed.
"""

import functools
from typing import NamedTuple

import torch

from ._activation_math import _tanh
from ._device import facts, launch
from ._rows import compute_dtype
from ._tiles import dot
from ._triton import cdiv, next_power_of_2, round_to, scalar, tl, triton, triton_dtype


class Plan(NamedTuple):
    """BLOCK_M queries by BLOCK_N keys a step; SPLITS programs share the keys of a sequence."""

    BLOCK_M: int
    BLOCK_N: int
    SPLITS: int
    num_warps: int
    num_stages: int


@functools.lru_cache(4096)
def plan(sequences, rows, keys, D, itemsize, multiprocessors, shared_memory, splits=0):
    """Tiles for `sequences` heads of at most `keys` keys, each shared by `rows` queries; splits = 0 chooses."""
    width = next_power_of_2(D) * itemsize
    BLOCK_M = min(max(next_power_of_2(rows), 16), 64 if width <= 256 else 32)
    BLOCK_N = 64 if width <= 256 else 32 if width <= 512 else 16
    stages = 3 if 2 * 3 * 2 * BLOCK_N * width <= shared_memory else 2 if 4 * BLOCK_N * width <= shared_memory else 1
    tiles = sequences * cdiv(rows, BLOCK_M)
    if not splits:
        splits = _splits(tiles, keys, 2 * multiprocessors)
    if splits == 1 and BLOCK_M == 16 and itemsize == 2 and 2 * 3 * 128 * width + 16384 <= shared_memory:
        # 64, 128 and 256 sequences with 8 heads of keys: 1.03, 1.03 and 1.02 of a copy, H200 bf16, D = 128; 64 keys a
        # step 0.90, 1.00 and 1.03. Where programs share the keys of a head, 64 keys have 0.01 to 0.03 more than 128.
        BLOCK_N = 128
    return Plan(BLOCK_M, BLOCK_N, max(1, min(splits, cdiv(keys, 16), 128)), 4, stages)


def _splits(tiles, keys, slots):
    """The fewest splits that leave little of the last wave of `slots` programs idle."""
    most = max(1, min(slots // max(tiles, 1) or 4, cdiv(keys, 128), 128))

    def filled(splits):
        return tiles * splits / (cdiv(tiles * splits, slots) * slots)

    best = max(filled(s) for s in range(1, most + 1))
    return next(s for s in range(1, most + 1) if filled(s) >= 0.95 * best)


@triton.jit
def _rotated(
    x, partner, offs_d, cos_ptr, sin_ptr, table_strides, pos, positions, mask,
    ROTARY: tl.constexpr, INTERLEAVED: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    """x * cos + rotate(x) * sin in COMPUTE; NaN where the table lacks the position."""
    turned = mask & (offs_d < ROTARY)[None, :]
    angle = offs_d // 2 if INTERLEAVED else offs_d % (ROTARY // 2)
    known = turned & ((pos >= 0) & (pos < positions))[:, None]
    row = pos.to(tl.int64)[:, None]
    cos = tl.load(cos_ptr + row * table_strides[0] + angle[None, :] * table_strides[1], mask=known, other=float("nan"))
    sin = tl.load(sin_ptr + row * table_strides[2] + angle[None, :] * table_strides[3], mask=known, other=float("nan"))
    first = (offs_d % 2 == 0) if INTERLEAVED else (offs_d < ROTARY // 2)
    turn = tl.where(first[None, :], -partner.to(COMPUTE), partner.to(COMPUTE))
    return tl.where(turned, x.to(COMPUTE) * cos.to(COMPUTE) + turn * sin.to(COMPUTE), x.to(COMPUTE))


@triton.jit
def _partner(offs_d, ROTARY: tl.constexpr, INTERLEAVED: tl.constexpr):
    """The other dimension of each one's pair."""
    if INTERLEAVED:
        return offs_d ^ 1
    return tl.where(offs_d < ROTARY // 2, offs_d + ROTARY // 2, offs_d - ROTARY // 2)


@triton.jit(do_not_specialize=["S", "cached", "capacity", "positions"])
def _kv_cache_append_kernel(
    k_ptr, v_ptr, kc_ptr, vc_ptr, cos_ptr, sin_ptr, seqlens_ptr, batch_ptr, table_ptr, S, cached, capacity, positions,
    k_strides, v_strides, kc_strides, vc_strides, table_strides, rotary_strides,
    H: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, ROTARY: tl.constexpr, INTERLEAVED: tl.constexpr,
    COMPUTE: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """A program copies one token's keys and values of BLOCK_H heads. What the cache has no room for is dropped."""
    b = tl.program_id(0) // S
    i = tl.program_id(0) % S
    offs_h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    offs_d = tl.arange(0, BLOCK_D)
    mask = (offs_h < H)[:, None] & (offs_d < D)[None, :]
    if seqlens_ptr is not None:
        cached = tl.minimum(tl.load(seqlens_ptr + b), 1 << 30).to(tl.int32)  # of int64, more than int32 holds
    pos = cached + i
    room = (pos >= 0) & (pos < capacity)
    b, i = tl.cast(b, tl.int64), tl.cast(i, tl.int64)
    if table_ptr is None:
        row = b if batch_ptr is None else tl.load(batch_ptr + b).to(tl.int64)
        slot = tl.cast(pos, tl.int64)
    else:
        entry = table_ptr + b * table_strides[0] + tl.cast(pos // PAGE, tl.int64) * table_strides[1]
        row = tl.load(entry, mask=room, other=-1).to(tl.int64)
        slot = tl.cast(pos % PAGE, tl.int64)
    # Compared, not joined with `mask`: the interpreter makes an int32 of a scalar and a tile, which is no mask.
    stored = (offs_h < tl.where(room & (row >= 0), H, 0))[:, None] & (offs_d < D)[None, :]
    head, lane = offs_h[:, None].to(tl.int64), offs_d[None, :]
    k_row = k_ptr + b * k_strides[0] + i * k_strides[1] + head * k_strides[2]
    k = tl.load(k_row + lane * k_strides[3], mask=mask, other=0.0)
    if ROTARY > 0:
        other = _partner(offs_d, ROTARY, INTERLEAVED)[None, :]
        partner = tl.load(k_row + other * k_strides[3], mask=mask & (lane < ROTARY), other=0.0)
        every = tl.zeros((BLOCK_H,), tl.int32) + pos
        k = _rotated(
            k, partner, offs_d, cos_ptr, sin_ptr, rotary_strides, every, positions, mask, ROTARY, INTERLEAVED, COMPUTE
        )
    v_at = b * v_strides[0] + i * v_strides[1] + head * v_strides[2] + lane * v_strides[3]
    v = tl.load(v_ptr + v_at, mask=mask, other=0.0)
    kc_at = row * kc_strides[0] + slot * kc_strides[1] + head * kc_strides[2] + lane * kc_strides[3]
    vc_at = row * vc_strides[0] + slot * vc_strides[1] + head * vc_strides[2] + lane * vc_strides[3]
    tl.store(kc_ptr + kc_at, round_to(k, kc_ptr.dtype.element_ty), mask=stored)
    tl.store(vc_ptr + vc_at, v, mask=stored)


@triton.jit(do_not_specialize=["B", "S", "tiles_m", "cached", "new", "capacity", "positions", "left", "right"])
def _decode_fwd_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr, cos_ptr, sin_ptr, seqlens_ptr, batch_ptr, leftpad_ptr, table_ptr, alibi_ptr,
    sink_ptr, B, S, tiles_m, cached, new, capacity, positions, left, right, scale, softcap,
    q_strides, k_strides, v_strides, table_strides, rotary_strides, alibi_strides,
    H: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, ROTARY: tl.constexpr,
    INTERLEAVED: tl.constexpr, TURNS: tl.constexpr, COMPUTE: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """The queries of one head of keys over one share of its keys: their result so far, and its log-sum-exp.

    o is (SPLITS, B, S, H, D) and lse (SPLITS, B, H, S). H counts heads of keys, GROUP the heads of queries of each.
    """
    LOG2E: tl.constexpr = 1.4426950408889634
    pid = tl.program_id(0)
    head = pid % H
    tile = pid // H % tiles_m
    split = pid // (H * tiles_m) % SPLITS
    b = tl.cast(pid // (H * tiles_m * SPLITS), tl.int64)
    if seqlens_ptr is not None:
        cached = tl.minimum(tl.load(seqlens_ptr + b), 1 << 30).to(tl.int32)  # of int64, more than int32 holds
    length = tl.minimum(cached + new, capacity)

    row = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    token = row // GROUP
    mask_m = token < S
    offs_h = head * GROUP + row % GROUP
    offs_d = tl.arange(0, BLOCK_D)
    mask_q = mask_m[:, None] & (offs_d < D)[None, :]
    q_row = q_ptr + (b * q_strides[0] + token.to(tl.int64) * q_strides[1] + offs_h.to(tl.int64) * q_strides[2])[:, None]
    q = tl.load(q_row + offs_d[None, :] * q_strides[3], mask=mask_q, other=0.0)
    if ROTARY > 0:
        other = _partner(offs_d, ROTARY, INTERLEAVED)[None, :]
        partner = tl.load(q_row + other * q_strides[3], mask=mask_q & (offs_d < ROTARY)[None, :], other=0.0)
        turned_by = cached + token if TURNS else cached + token * 0
        q = round_to(
            _rotated(
                q, partner, offs_d, cos_ptr, sin_ptr, rotary_strides, turned_by, positions, mask_q, ROTARY,
                INTERLEAVED, COMPUTE,
            ),
            q_ptr.dtype.element_ty,
        )  # fmt: skip

    # The keys that any query of this tile sees, and this program's share of them.
    first_token = tile * BLOCK_M // GROUP
    last_token = tl.minimum((tile * BLOCK_M + BLOCK_M - 1) // GROUP, S - 1)
    pos = length - S + token
    lo = 0 if leftpad_ptr is None else tl.maximum(tl.load(leftpad_ptr + b).to(tl.int32), 0)
    hi = tl.maximum(length, 0)
    if left is not None:
        lo = tl.maximum(lo, length - S + first_token - left)
    if right is not None:
        hi = tl.minimum(hi, tl.maximum(length - S + last_token + right + 1, 0))
    share = (tl.maximum(hi - lo, 0) + SPLITS - 1) // SPLITS
    share = (share + 15) // 16 * 16
    lo += split * share
    hi = tl.minimum(hi, lo + share)

    if table_ptr is None:
        place = b if batch_ptr is None else tl.load(batch_ptr + b).to(tl.int64)
        k_ptr += place * k_strides[0]
        v_ptr += place * v_strides[0]
    k_ptr += tl.cast(head, tl.int64) * k_strides[2]
    v_ptr += tl.cast(head, tl.int64) * v_strides[2]
    if alibi_ptr is not None:
        slopes = alibi_ptr + b * alibi_strides[0] + offs_h.to(tl.int64) * alibi_strides[1]
        slope = tl.load(slopes, mask=mask_m, other=0.0).to(COMPUTE) * LOG2E

    peak = tl.full((BLOCK_M,), float("-inf"), COMPUTE)
    total = tl.zeros((BLOCK_M,), COMPUTE)
    if sink_ptr is not None:  # a key without a value, which the first share holds
        sink = tl.load(sink_ptr + offs_h, mask=mask_m, other=0.0).to(COMPUTE) * LOG2E
        peak = tl.where(split == 0, sink, peak)
        total += tl.where(peak == float("-inf"), 0.0, 1.0)
    acc = tl.zeros((BLOCK_M, BLOCK_D), COMPUTE)
    for start in range(lo, hi, BLOCK_N):
        offs_n = start + tl.arange(0, BLOCK_N)
        mask_n = offs_n < hi
        mask_kv = mask_n[:, None] & (offs_d < D)[None, :]
        if table_ptr is None:
            k_row = k_ptr + offs_n.to(tl.int64) * k_strides[1]
            v_row = v_ptr + offs_n.to(tl.int64) * v_strides[1]
        else:
            entry = table_ptr + b * table_strides[0] + (offs_n // PAGE).to(tl.int64) * table_strides[1]
            page = tl.load(entry, mask=mask_n, other=0).to(tl.int64)
            slot = (offs_n % PAGE).to(tl.int64)
            k_row = k_ptr + page * k_strides[0] + slot * k_strides[1]
            v_row = v_ptr + page * v_strides[0] + slot * v_strides[1]
        k = tl.load(k_row[:, None] + offs_d[None, :] * k_strides[3], mask=mask_kv, other=0.0)
        v = tl.load(v_row[:, None] + offs_d[None, :] * v_strides[3], mask=mask_kv, other=0.0)
        scores = dot(q, tl.trans(k), tl.zeros((BLOCK_M, BLOCK_N), COMPUTE), "ieee") * scale
        if softcap is not None:
            scores = softcap * _tanh(scores / softcap, False)
        scores *= LOG2E
        gap = offs_n[None, :] - pos[:, None]
        if alibi_ptr is not None:
            scores -= slope[:, None] * tl.abs(gap).to(COMPUTE)
        seen = mask_n[None, :]
        if right is not None:
            seen = seen & (gap <= right)
        if left is not None:
            seen = seen & (gap >= -left)
        scores = tl.where(seen, scores, float("-inf"))
        # tl.max may drop a NaN, which stays in the sum; a row that has seen nothing yet keeps a sum of 0.
        higher = tl.maximum(peak, tl.max(scores, axis=1))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        p = tl.exp2(scores - base[:, None])
        fade = tl.exp2(peak - base)
        total = total * fade + tl.sum(p, axis=1)
        acc = dot(round_to(p, v.dtype), v, acc * fade[:, None], "ieee")
        peak = higher

    acc = acc * (1.0 / tl.where(total == 0.0, 1.0, total))[:, None]
    lse = (tl.where(peak == float("-inf"), 0.0, peak) + tl.log2(total)) / LOG2E
    part = tl.cast(split, tl.int64) * B + b
    o_row = o_ptr + ((part * S + token) * (H * GROUP) + offs_h)[:, None] * D
    tl.store(o_row + offs_d[None, :], round_to(acc, o_ptr.dtype.element_ty), mask=mask_q)
    tl.store(lse_ptr + (part * (H * GROUP) + offs_h) * S + token, lse, mask=mask_m)


@triton.jit(do_not_specialize=["S", "rows"])
def _decode_merge_kernel(
    parts_ptr, lses_ptr, o_ptr, lse_ptr, S, rows,
    H: tl.constexpr, D: tl.constexpr, SPLITS: tl.constexpr, COMPUTE: tl.constexpr,
    BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One query of one head: the results of all shares of its keys, weighed by their log-sum-exps."""
    row = tl.cast(tl.program_id(0), tl.int64)
    token = row // H
    head = row % H
    offs_s = tl.arange(0, BLOCK_S)
    offs_d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    lse_at = (token // S * H + head) * S + token % S
    lses = tl.load(lses_ptr + offs_s * rows + lse_at, mask=offs_s < SPLITS, other=float("-inf")).to(COMPUTE)
    peak = tl.max(lses, axis=0)
    peak = tl.where(peak == float("-inf"), 0.0, peak)
    weights = tl.exp(lses - peak)
    total = tl.sum(weights, axis=0)
    at = parts_ptr + (offs_s * rows + row)[:, None] * D + offs_d[None, :]
    parts = tl.load(at, mask=(offs_s < SPLITS)[:, None] & (offs_d < D)[None, :], other=0.0).to(COMPUTE)
    o = tl.sum(parts * weights[:, None], axis=0) / tl.where(total == 0.0, 1.0, total)
    tl.store(o_ptr + row * D + offs_d, round_to(o, o_ptr.dtype.element_ty), mask=offs_d < D)
    if tl.program_id(1) == 0:
        tl.store(lse_ptr + lse_at, peak + tl.log(total))


def _dense(*tensors):
    """One number a sequence or a head, as kernels read them."""
    return (t if t is None else t.contiguous() for t in tensors)


def _strides(t):
    return (0, 0) if t is None else t.stride()


def _rotary_strides(cos, sin):
    return (0, 0, 0, 0) if cos is None else (*cos.stride(), *sin.stride())


def capacity(cache, table):
    """The keys that a sequence has room for."""
    return cache.shape[1] * (1 if table is None else table.shape[1])


def append(k, v, k_cache, v_cache, cos, sin, seqlens, batch_idx, table, cached, interleaved):
    """Write k, rotated, and v into the caches from position seqlens on (cached, where that is None)."""
    B, S, H, D = k.shape
    seqlens, batch_idx = _dense(seqlens, batch_idx)
    BLOCK_D = next_power_of_2(D)
    BLOCK_H = min(next_power_of_2(H), max(2048 // BLOCK_D, 1))
    launch(
        _kv_cache_append_kernel,
        (B * S, cdiv(H, BLOCK_H)),
        k.device,
        (k, v, k_cache, v_cache, cos, sin, seqlens, batch_idx, table, S, cached, capacity(k_cache, table),
         0 if cos is None else cos.shape[0],
         k.stride(), v.stride(), k_cache.stride(), v_cache.stride(), _strides(table), _rotary_strides(cos, sin)),
        H=H, D=D, PAGE=1 if table is None else k_cache.shape[1], ROTARY=0 if cos is None else 2 * cos.shape[1],
        INTERLEAVED=interleaved, COMPUTE=triton_dtype(compute_dtype(k)), BLOCK_H=BLOCK_H, BLOCK_D=BLOCK_D,
        num_warps=4,
    )  # fmt: skip


def attend(
    q, k_cache, v_cache, cos, sin, seqlens, batch_idx, leftpad, table, alibi, sinks, cached, new, scale, left, right,
    softcap, interleaved, turns, num_splits,
):  # fmt: skip
    """(o (B, S, H, D), lse (B, H, S)) of q over the keys of the caches. left, right: None = without a bound."""
    B, S, H, D = q.shape
    seqlens, batch_idx, leftpad, sinks = _dense(seqlens, batch_idx, leftpad, sinks)
    heads = k_cache.shape[2]
    compute = compute_dtype(q)
    o = torch.empty((B, S, H, D), dtype=q.dtype, device=q.device)
    lse = torch.empty((B, H, S), dtype=compute, device=q.device)
    if not lse.numel():
        return o, lse
    keys = capacity(k_cache, table)
    alibi = alibi if alibi is None else alibi.expand(B, H)
    device = facts(q.device)
    tiles = plan(
        B * heads, H // heads * S, keys, D, q.element_size(), device.multiprocessors, device.shared_memory, num_splits
    )
    splits = tiles.SPLITS
    parts, lses = o, lse
    if splits > 1:
        parts = torch.empty((splits, B, S, H, D), dtype=compute, device=q.device)
        lses = torch.empty((splits, B, H, S), dtype=compute, device=q.device)
    tiles_m = cdiv(H // heads * S, tiles.BLOCK_M)
    launch(
        _decode_fwd_kernel,
        (B * heads * tiles_m * splits,),
        q.device,
        (q, k_cache, v_cache, parts, lses, cos, sin, seqlens, batch_idx, leftpad, table, alibi, sinks,
         B, S, tiles_m, cached, new, keys, 0 if cos is None else cos.shape[0], left, right,
         scalar(scale, compute), None if softcap is None else scalar(softcap, compute),
         q.stride(), k_cache.stride(), v_cache.stride(), _strides(table), _rotary_strides(cos, sin), _strides(alibi)),
        H=heads, GROUP=H // heads, D=D, PAGE=1 if table is None else k_cache.shape[1],
        ROTARY=0 if cos is None else 2 * cos.shape[1], INTERLEAVED=interleaved, TURNS=turns,
        COMPUTE=triton_dtype(compute), BLOCK_D=max(next_power_of_2(D), 16), **tiles._asdict(),
    )  # fmt: skip
    if splits > 1:
        BLOCK_S = next_power_of_2(splits)
        BLOCK_D = min(next_power_of_2(D), max(4096 // BLOCK_S, 16))  # untuned
        launch(
            _decode_merge_kernel,
            (B * S * H, cdiv(D, BLOCK_D)),
            q.device,
            (parts, lses, o, lse, S, B * S * H),
            H=H, D=D, SPLITS=splits, COMPUTE=triton_dtype(compute), BLOCK_S=BLOCK_S, BLOCK_D=BLOCK_D, num_warps=4,
        )  # fmt: skip
    return o, lse


def few_queries(q, k, v, alibi, sinks, scale, left, right, softcap):
    """(o, lse) of (B, S, H, D) tensors; left, right: negative = without a bound."""
    if q.shape[1] == 1 and alibi is None:
        right = -1  # the last key is the query's own
    left, right = (None if w < 0 else w for w in (left, right))
    return attend(
        q, k, v, None, None, None, None, None, None, alibi, sinks, k.shape[1], 0, scale, left, right, softcap or None,
        False, False, 0,
    )  # fmt: skip
