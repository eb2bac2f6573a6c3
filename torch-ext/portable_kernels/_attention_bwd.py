"""Attention, backward: one kernel walks the keys of a tile of queries, another the queries of a tile of keys.

Both form the probabilities anew from the log of their sum. Two passes instead of one cost 7 products instead of 5, and
buy sums of fixed order without atomics.
"""

from typing import Optional

import torch
from torch import Tensor

from ._attention import (
    LOG2E,
    fold,
    keep_scale,
    kept,
    load_tile,
    options,
    scores,
    seen,
    sequence,
    spans,
    strides,
    tile_and_head,
    unit_last_stride,
)
from ._attention_chunks import backward_in_chunks
from ._attention_fwd import (
    Plan,
    alibi_strides,
    describe,
    heads_at_once,
    mask_bytes,
    mask_strides,
    on_kernels,
    precision,
    row_strides,
)
from ._device import facts, launch
from ._ops import add_op_namespace_prefix
from ._tiles import dot
from ._triton import GLUON, cdiv, next_power_of_2, round_to, tl, triton


def plan_backward(rows_q, rows_k, block_d, itemsize, extras, descriptors, device, plain=False):
    """(plan of the queries' kernel, plan of the keys' kernel), or None where no tiles fit the device.

    The arguments are as of `plan_forward`; what is plain has one kernel on Hopper GPUs. Each holds twice BLOCK of its
    own rows, and walks twice BLOCK of the others.
    """
    kind = "descriptor" if descriptors and device.descriptors and itemsize == 2 else "pointer"
    if kind == "descriptor" and plain and GLUON and device.arch == "sm90" and block_d in (64, 128):
        return (Plan("sm90", 64, 128, 2, 8),) * 2  # one kernel, which has plans of its own
    itemsize = 4 if device.arch.startswith("sm7") else itemsize  # of which Triton uses no tensor cores
    plans = []
    if itemsize == 2:
        if block_d <= 128 and not extras:
            if kind == "descriptor":
                # Of FlashAttention-2 at 4096 keys, H200 bf16: D = 128 1.25 to 1.29, 64 1.32 causal and 1.16 full
                keys = Plan(kind, 64 if block_d == 128 else 128, 64, 2, 4)
                plans += [(Plan(kind, 128, 64, 3, 8), keys)]
            plans += [(Plan(kind, 128, 64, 2, 8), Plan(kind, 64, 64, 2, 4))]  # untuned
        plans += [(Plan(kind, 64, 64, 2, 8), Plan(kind, 64, 64, 2, 8))]  # untuned: 8 warps share the registers
        plans += [(Plan("pointer", 64, 32, stages, 8), Plan("pointer", 32, 64, stages, 8)) for stages in (2, 1)]
    plans += [(Plan("pointer", 32, 32, 1, 8),) * 2, (Plan("pointer", 16, 16, 1, 4),) * 2]  # untuned
    for queries, keys in plans:
        held = max(queries.BLOCK_M + queries.STAGES * queries.BLOCK_N, keys.BLOCK_N + keys.STAGES * keys.BLOCK_M)
        if 2 * held * block_d * itemsize + queries.BLOCK_M * queries.BLOCK_N * 4 <= device.shared_memory:
            break
    else:
        return None
    most_q, most_k = (max(next_power_of_2(rows), 16) for rows in (rows_q, rows_k))
    return (
        queries._replace(BLOCK_M=min(queries.BLOCK_M, most_q)),
        keys._replace(BLOCK_M=min(keys.BLOCK_M, most_q), BLOCK_N=min(keys.BLOCK_N, most_k)),
    )


@triton.jit
def _probabilities(s, lse, factor, FOLD: tl.constexpr):
    if FOLD:
        return tl.exp2(s * factor - lse)
    else:
        return tl.exp2((s - lse) * factor)


@triton.jit
def _load_lse(lse_ptr, i, Sq, FOLD: tl.constexpr):
    """What `_probabilities` takes: inf, for probabilities of 0, where a query sees no key or is none."""
    lse = tl.load(lse_ptr + i, mask=i < Sq, other=float("-inf"))
    lse = tl.where(lse == float("-inf"), float("inf"), lse)
    if FOLD:
        lse = lse * LOG2E
    return lse


@triton.jit(do_not_specialize=["heads", "H", "group", "Sq", "Sk", "tiles", "at_once", "left", "right", "threshold"])
def _attention_bwd_kernel_queries(
    q, k, v, do, o, lse_ptr, dlse_ptr, delta_ptr, dq_ptr, dm_ptr, cu_q_ptr, cu_k_ptr, mask_ptr, alibi_ptr, seed_ptr,
    heads, H, group, Sq, Sk, tiles, at_once,
    q_strides, k_strides, v_strides, do_strides, o_strides, dq_strides, row_strides, dlse_strides,
    mask_strides, dm_strides, alibi_strides, scale, softcap, left, right, threshold, keep_scale,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    FOLD: tl.constexpr, TOP_LEFT: tl.constexpr, DESC: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The gradients of queries and of an added mask; and delta = sum(do * o) - dlse, which the other kernel reads."""
    PACKED: tl.constexpr = cu_k_ptr is not None
    PRECISE: tl.constexpr = dq_ptr.dtype.element_ty == tl.float32
    tile, head = tile_and_head(tiles, heads, at_once, right is not None)
    b = head // H
    h = head % H
    hk = h // group
    first_q, Sq = sequence(cu_q_ptr, b, Sq)
    first_k, Sk = sequence(cu_k_ptr, b, Sk)
    n_q = tile * BLOCK_M
    if n_q >= Sq:
        return
    offset = 0 if TOP_LEFT else Sk - Sq
    b64 = b.to(tl.int64)
    h64 = h.to(tl.int64)
    q += b64 * q_strides[0] + h64 * q_strides[1] + first_q * q_strides[2]
    do += b64 * do_strides[0] + h64 * do_strides[1] + first_q * do_strides[2]
    o += b64 * o_strides[0] + h64 * o_strides[1] + first_q * o_strides[2]
    if not DESC:
        k += b64 * k_strides[0] + hk.to(tl.int64) * k_strides[1] + first_k * k_strides[2]
        v += b64 * v_strides[0] + hk.to(tl.int64) * v_strides[1] + first_k * v_strides[2]
    if mask_ptr is not None:
        mask_ptr += b64 * mask_strides[0] + h64 * mask_strides[1]
    if dm_ptr is not None:
        dm_ptr += b64 * dm_strides[0] + h64 * dm_strides[1]
    b_desc = 0 if PACKED else b
    i = n_q + tl.arange(0, BLOCK_M)
    offs_n = tl.arange(0, BLOCK_N)
    slope = None
    if alibi_ptr is not None:
        slope = tl.load(alibi_ptr + b64 * alibi_strides[0] + h64 * alibi_strides[1]).to(tl.float32)
    factor = LOG2E
    if FOLD:
        factor = scale * LOG2E
    rows = b64 * row_strides[0] + h64 * row_strides[1] + first_q
    lse = _load_lse(lse_ptr + rows, i, Sq, FOLD)
    do_tile = load_tile(do, do_strides, b, h, first_q, n_q, Sq, None, 1, DV, True, False, False, BLOCK_M, BLOCK_DV)
    o_tile = load_tile(o, o_strides, b, h, first_q, n_q, Sq, None, 1, DV, True, False, False, BLOCK_M, BLOCK_DV)
    delta = tl.sum(o_tile.to(tl.float32) * do_tile.to(tl.float32), axis=1)
    if dlse_ptr is not None:
        row = dlse_ptr + b64 * dlse_strides[0] + h64 * dlse_strides[1] + (first_q + i) * dlse_strides[2]
        delta -= tl.load(row, mask=i < Sq, other=0.0)
    tl.store(delta_ptr + rows + i, delta, mask=i < Sq)
    q_tile = load_tile(q, q_strides, b, h, first_q, n_q, Sq, None, 1, D, True, False, False, BLOCK_M, BLOCK_D)
    dq = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    zero = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    edges = spans(n_q, min(n_q + BLOCK_M, Sq) - 1, Sk, offset, left, right, BLOCK_N)
    for part in tl.static_range(3):  # masked from the left, not masked, masked from the right
        for n in tl.range(edges[part], edges[part + 1], BLOCK_N, num_stages=STAGES):
            k_tile = load_tile(
                k, k_strides, b_desc, hk, first_k, n, Sk, None, 1, D, part != 1, DESC, PACKED, BLOCK_N, BLOCK_D
            )
            v_tile = load_tile(
                v, v_strides, b_desc, hk, first_k, n, Sk, None, 1, DV, part != 1, DESC, PACKED, BLOCK_N, BLOCK_DV
            )
            j = n + offs_n
            s, gain = scores(
                dot(q_tile, tl.trans(k_tile), zero, PRECISION), i[:, None], j[None, :], Sq, Sk, offset,
                mask_ptr, mask_strides, slope, scale, softcap, left, right, FOLD, part != 1, PRECISE,
            )  # fmt: skip
            p = _probabilities(s, lse[:, None], factor, FOLD)
            dp = dot(do_tile, tl.trans(v_tile), zero, PRECISION)
            if seed_ptr is not None:
                keep = kept(seed_ptr, head, i, n, threshold, BLOCK_M, BLOCK_N, False)
                dp = tl.where(keep, dp * keep_scale, 0.0)
            ds = p * (dp - delta[:, None])
            if part != 1:
                ds = tl.where(seen(i[:, None], j[None, :], Sk, offset, left, right), ds, 0.0)
            if dm_ptr is not None:
                dm_at = dm_ptr + i.to(tl.int64)[:, None] * dm_strides[2] + j.to(tl.int64)[None, :] * dm_strides[3]
                inside = (i < Sq)[:, None] & (j < Sk)[None, :]
                tl.store(dm_at, round_to(ds, dm_ptr.dtype.element_ty), mask=inside)
            if softcap is not None:
                ds *= gain
            dq = dot(round_to(ds, k_tile.dtype), k_tile, dq, PRECISION)
    offs_d = tl.arange(0, BLOCK_D)
    dq_ptr += b64 * dq_strides[0] + h64 * dq_strides[1] + first_q * dq_strides[2]
    tl.store(
        dq_ptr + i.to(tl.int64)[:, None] * dq_strides[2] + offs_d[None, :],
        round_to(dq * scale, dq_ptr.dtype.element_ty),
        mask=(i < Sq)[:, None] & (offs_d < D)[None, :],
    )


@triton.jit(do_not_specialize=["heads", "H", "group", "Sq", "Sk", "tiles", "at_once", "left", "right", "threshold"])
def _attention_bwd_kernel_keys(
    q, k, v, do, lse_ptr, delta_ptr, dk_ptr, dv_ptr, cu_q_ptr, cu_k_ptr, mask_ptr, alibi_ptr, seed_ptr,
    heads, H, group, Sq, Sk, tiles, at_once,
    q_strides, k_strides, v_strides, do_strides, dk_strides, dv_strides, row_strides, mask_strides, alibi_strides,
    scale, softcap, left, right, threshold, keep_scale,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    FOLD: tl.constexpr, TOP_LEFT: tl.constexpr, DESC: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The gradients of keys and values, over all query heads that share them. Tiles lie turned: keys by queries."""
    PACKED: tl.constexpr = cu_k_ptr is not None
    PRECISE: tl.constexpr = dk_ptr.dtype.element_ty == tl.float32
    tile, head = tile_and_head(tiles, heads, at_once, False)
    Hk = H // group
    b = head // Hk
    hk = head % Hk
    first_q, Sq = sequence(cu_q_ptr, b, Sq)
    first_k, Sk = sequence(cu_k_ptr, b, Sk)
    n_k = tile * BLOCK_N
    if n_k >= Sk:
        return
    offset = 0 if TOP_LEFT else Sk - Sq
    b64 = b.to(tl.int64)
    hk64 = hk.to(tl.int64)
    k += b64 * k_strides[0] + hk64 * k_strides[1] + first_k * k_strides[2]
    v += b64 * v_strides[0] + hk64 * v_strides[1] + first_k * v_strides[2]
    b_desc = 0 if PACKED else b
    j = n_k + tl.arange(0, BLOCK_N)
    offs_m = tl.arange(0, BLOCK_M)
    factor = LOG2E
    if FOLD:
        factor = scale * LOG2E
    k_tile = load_tile(k, k_strides, b, hk, first_k, n_k, Sk, None, 1, D, True, False, False, BLOCK_N, BLOCK_D)
    v_tile = load_tile(v, v_strides, b, hk, first_k, n_k, Sk, None, 1, DV, True, False, False, BLOCK_N, BLOCK_DV)
    dk = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    dv = tl.zeros((BLOCK_N, BLOCK_DV), tl.float32)
    zero = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    edges = spans(n_k, min(n_k + BLOCK_N, Sk) - 1, Sq, -offset, right, left, BLOCK_M)
    for g in range(group):
        h = hk * group + g
        h64 = h.to(tl.int64)
        rows = b64 * row_strides[0] + h64 * row_strides[1] + first_q
        q_head = q
        do_head = do
        mask_head = mask_ptr
        slope = None
        if not DESC:
            q_head = q + (b64 * q_strides[0] + h64 * q_strides[1] + first_q * q_strides[2])
            do_head = do + (b64 * do_strides[0] + h64 * do_strides[1] + first_q * do_strides[2])
        if mask_ptr is not None:
            mask_head = mask_ptr + (b64 * mask_strides[0] + h64 * mask_strides[1])
        if alibi_ptr is not None:
            slope = tl.load(alibi_ptr + b64 * alibi_strides[0] + h64 * alibi_strides[1]).to(tl.float32)
        for part in tl.static_range(3):
            for m in tl.range(edges[part], edges[part + 1], BLOCK_M, num_stages=STAGES):
                i = m + offs_m
                q_tile = load_tile(
                    q_head, q_strides, b_desc, h, first_q, m, Sq, None, 1, D, part != 1, DESC, PACKED, BLOCK_M, BLOCK_D
                )
                lse = _load_lse(lse_ptr + rows, i, Sq, FOLD)
                s, gain = scores(
                    dot(k_tile, tl.trans(q_tile), zero, PRECISION), i[None, :], j[:, None], Sq, Sk, offset,
                    mask_head, mask_strides, slope, scale, softcap, left, right, FOLD, part != 1, PRECISE,
                )  # fmt: skip
                p = _probabilities(s, lse[None, :], factor, FOLD)
                do_tile = load_tile(
                    do_head, do_strides, b_desc, h, first_q, m, Sq, None, 1, DV, part != 1, DESC, PACKED, BLOCK_M,
                    BLOCK_DV,
                )  # fmt: skip
                dp = dot(v_tile, tl.trans(do_tile), zero, PRECISION)
                delta = tl.load(delta_ptr + rows + i, mask=i < Sq, other=0.0)
                if seed_ptr is None:
                    dv = dot(round_to(p, do_tile.dtype), do_tile, dv, PRECISION)
                else:
                    keep = kept(seed_ptr, b * H + h, i, n_k, threshold, BLOCK_M, BLOCK_N, True)
                    dv = dot(round_to(tl.where(keep, p, 0.0), do_tile.dtype), do_tile, dv, PRECISION)
                    dp = tl.where(keep, dp * keep_scale, 0.0)
                ds = p * (dp - delta[None, :])
                if part != 1:
                    ds = tl.where(seen(i[None, :], j[:, None], Sk, offset, left, right), ds, 0.0)
                if softcap is not None:
                    ds *= gain
                dk = dot(round_to(ds, q_tile.dtype), q_tile, dk, PRECISION)
    j64 = j.to(tl.int64)
    offs_d = tl.arange(0, BLOCK_D)
    dk_ptr += b64 * dk_strides[0] + hk64 * dk_strides[1] + first_k * dk_strides[2]
    tl.store(
        dk_ptr + j64[:, None] * dk_strides[2] + offs_d[None, :],
        round_to(dk * scale, dk_ptr.dtype.element_ty),
        mask=(j < Sk)[:, None] & (offs_d < D)[None, :],
    )
    offs_dv = tl.arange(0, BLOCK_DV)
    dv_ptr += b64 * dv_strides[0] + hk64 * dv_strides[1] + first_k * dv_strides[2]
    tl.store(
        dv_ptr + j64[:, None] * dv_strides[2] + offs_dv[None, :],
        round_to(dv * keep_scale, dv_ptr.dtype.element_ty),
        mask=(j < Sk)[:, None] & (offs_dv < DV)[None, :],
    )


@torch.library.custom_op(add_op_namespace_prefix("attention_bwd"), mutates_args=())
def attention_bwd(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, dlse: Optional[Tensor], out: Tensor, lse: Tensor,
    cu_q: Optional[Tensor], cu_k: Optional[Tensor], mask: Optional[Tensor], alibi: Optional[Tensor],
    sinks: Optional[Tensor], seed: Optional[Tensor],
    max_q: int, max_k: int, scale: float, left: int, right: int, top_left: bool, softcap: float, dropout_p: float,
    need_dmask: bool, need_dsinks: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k, v, of an added mask and of the sinks. One not needed is empty."""
    packed, device = cu_q is not None, facts(q.device)
    folded = fold(scale, softcap, alibi, mask)
    extras = "mask" if mask is not None else "" if folded and seed is None else "more"
    plain = not packed and q.shape[-1] == v.shape[-1] and scale > 0 and left < 0 and not softcap
    plain = plain and mask is None and alibi is None and sinks is None and seed is None
    found = None
    if on_kernels(q, v):
        q, k, v, dout = (unit_last_stride(t) for t in (q, k, v, dout))
        found = _plans(q, k, v, dout, max_q, max_k, packed, extras, device, plain)
    if found is not None and found[0].kind == "sm90":
        from . import _attention_bwd_sm90  # and with it Gluon, which nothing else needs

        grads = [torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (q, k, v)]
        if _attention_bwd_sm90.backward(q, k, v, dout, dlse, out, lse, *grads, scale, right, top_left):
            return (*grads, q.new_empty(0), q.new_empty(0))
        found = _plans(q, k, v, dout, max_q, max_k, packed, extras, device, False)
    if found is None:
        return backward_in_chunks(
            q, k, v, dout, dlse, out, lse, cu_q, cu_k, mask, alibi, sinks, seed,
            max_q, max_k, scale, left, right, top_left, softcap, dropout_p, need_dmask, need_dsinks,
        )  # fmt: skip
    queries, keys, operands = found
    new = torch.zeros if packed else torch.empty  # rows of no sequence get no gradient
    dq, dk, dv = (new(t.shape, dtype=t.dtype, device=t.device) for t in (q, k, v))
    dmask = q.new_zeros(mask.shape, dtype=mask.dtype) if need_dmask else q.new_empty(0)
    delta = new(lse.shape, dtype=lse.dtype, device=lse.device)
    B = cu_q.shape[0] - 1 if packed else q.shape[0]
    H, Hk, D, DV = q.shape[-2], k.shape[-2], q.shape[-1], v.shape[-1]
    block_d, block_dv = (max(next_power_of_2(d), 16) for d in (D, DV))
    itemsize = q.element_size()
    scalars = (*options(scale, softcap, left, right, seed, dropout_p), keep_scale(dropout_p))
    constants = {
        "D": D, "DV": DV, "BLOCK_D": block_d, "BLOCK_DV": block_dv, "FOLD": folded, "TOP_LEFT": top_left,
        "PRECISION": precision(q, device),
    }  # fmt: skip
    steps_q, steps_k, steps_v, steps_do = (strides(t, packed) for t in (q, k, v, dout))
    if B * H * max_q:
        tiles = cdiv(max_q, queries.BLOCK_M)
        launch(
            _attention_bwd_kernel_queries,
            (tiles * B * H,),
            q.device,
            (q, *operands[0], dout, out, lse, dlse, delta, dq, dmask if need_dmask else None, cu_q, cu_k,
             mask_bytes(mask), alibi, seed, B * H, H, H // Hk, max_q, max_k, tiles,
             heads_at_once(B * H, H // Hk, max_k, D + DV, itemsize), steps_q, steps_k, steps_v, steps_do,
             strides(out, packed), strides(dq, packed), row_strides(lse), row_strides(dlse, 3), mask_strides(mask),
             mask_strides(dmask if need_dmask else None), alibi_strides(alibi), *scalars),
            **constants, **queries.options(),
        )  # fmt: skip
    if B * Hk * max_k:
        tiles = cdiv(max_k, keys.BLOCK_N)
        launch(
            _attention_bwd_kernel_keys,
            (tiles * B * Hk,),
            q.device,
            (operands[1][0], k, v, operands[1][1], lse, delta, dk, dv, cu_q, cu_k, mask_bytes(mask), alibi, seed,
             B * Hk, H, H // Hk, max_q, max_k, tiles, heads_at_once(B * Hk, 1, max_q * (H // Hk), D + DV, itemsize),
             steps_q, steps_k, steps_v, steps_do, strides(dk, packed), strides(dv, packed), row_strides(lse),
             mask_strides(mask), alibi_strides(alibi), *scalars),
            **constants, **keys.options(),
        )  # fmt: skip
    dsinks = q.new_empty(0)
    if need_dsinks:
        share = torch.where(lse == -torch.inf, 0.0, torch.exp(sinks.to(lse.dtype)[:, None] - lse) * delta)
        dsinks = -share.sum(1 if packed else (0, 2)).to(sinks.dtype)
    return dq, dk, dv, dmask, dsinks


def _plans(q, k, v, dout, max_q, max_k, packed, extras, device, plain):
    """(plan of the queries' kernel, plan of the keys', (k and v for the first, q and dout for the other))."""
    D, DV = (max(next_power_of_2(t.shape[-1]), 16) for t in (q, v))
    for descriptors in (device.descriptors and q.numel() > 0 and k.numel() > 0, False):
        plans = plan_backward(max_q, max_k, max(D, DV), q.element_size(), extras, descriptors, device, plain)
        if plans is None:
            return None
        queries, keys = plans
        operands = ((k, v), (q, dout))
        if queries.kind in ("pointer", "sm90"):
            break
        operands = (
            (describe(k, packed, queries.BLOCK_N, D), describe(v, packed, queries.BLOCK_N, DV)),
            (describe(q, packed, keys.BLOCK_M, D), describe(dout, packed, keys.BLOCK_M, DV)),
        )
        if None not in (*operands[0], *operands[1]):
            break
    return queries, keys, operands


@attention_bwd.register_fake
def _(q, k, v, dout, dlse, out, lse, cu_q, cu_k, mask, alibi, sinks, seed, max_q, max_k, scale, left, right, top_left,
      softcap, dropout_p, need_dmask, need_dsinks):  # fmt: skip
    dmask = q.new_empty(mask.shape, dtype=mask.dtype) if need_dmask else q.new_empty(0)
    dsinks = q.new_empty(sinks.shape, dtype=sinks.dtype) if need_dsinks else q.new_empty(0)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), dmask, dsinks
