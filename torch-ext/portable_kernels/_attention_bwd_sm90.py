"""Attention, backward, for Hopper GPUs: the five products of a tile of keys and a tile of queries in one kernel.

    P = exp(scale * Q K^T - lse)    dS = P * (dO V^T - delta)    dV += P^T dO    dK += dS^T Q    dQ += dS K

A program keeps the gradients of 128 keys in registers while it walks the queries. One warp copies tiles. Eight warps
multiply: the products that a step leaves to be done (dS^T Q, dS K) go out together with the next step's scores, so that
exponentials run while tensor cores do. Tiles of scores lie turned, keys by queries: so P is an operand as it is.

dQ is summed in memory by all programs of a head, in float32 and in a fixed order: one more warp waits until those whose
turn is before have added theirs to this tile of queries, and tells the next. Tiles are taken from a counter in the same
order, so who waits, waits for tiles that others have begun. The last kernel rounds.

Imported where a plan chooses it, and only then.
"""

from typing import NamedTuple

import torch

from ._attention import LOG2E
from ._attention_fwd import describe, heads_at_once, row_strides
from ._attention_fwd_sm90 import _barriers, _invalidate, _matrix, _take
from ._device import facts, launch
from ._gluon import (
    TensorDescriptor,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)  # fmt: skip
from ._triton import cdiv, round_to, tl, triton

_BLOCK_M = 64
_BLOCK_N = 128
_SWIZZLED = gl.NVMMASharedLayout(128, 16, 4)
_ROWS = gl.NVMMASharedLayout(0, 32, 2)


class Plan(NamedTuple):
    """So many tiles of QUERIES and of output GRADIENTS at once in shared memory."""

    QUERIES: int
    GRADIENTS: int


def plan_backward(block_d):
    return Plan(3, 2) if block_d == 128 else Plan(4, 4)  # what fits beside two tiles of keys and of values


@triton.jit(do_not_specialize=["H", "Sq", "tiles"])
def _attention_bwd_kernel_rows(
    do_ptr, o_ptr, lse_ptr, dlse_ptr, rows_ptr, counts_ptr,
    H, Sq, tiles, do_strides, o_strides, lse_strides, dlse_strides,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Of each query the log of its sum, base 2, and delta = sum(do * o) - dlse. And zeros for what counts."""
    head = tl.program_id(0) // tiles
    tile = tl.program_id(0) % tiles
    b = (head // H).to(tl.int64)
    h = (head % H).to(tl.int64)
    i = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, BLOCK_D)
    mask = (i < Sq)[:, None] & (offs_d < D)[None, :]
    row = i.to(tl.int64)
    do_at = do_ptr + b * do_strides[0] + h * do_strides[2] + row[:, None] * do_strides[1] + offs_d[None, :]
    o_at = o_ptr + b * o_strides[0] + h * o_strides[2] + row[:, None] * o_strides[1] + offs_d[None, :]
    do = tl.load(do_at, mask=mask, other=0.0).to(tl.float32)
    delta = tl.sum(do * tl.load(o_at, mask=mask, other=0.0).to(tl.float32), axis=1)
    if dlse_ptr is not None:
        at = dlse_ptr + b * dlse_strides[0] + h * dlse_strides[1] + row * dlse_strides[2]
        delta -= tl.load(at, mask=i < Sq, other=0.0)
    lse_ptr += b * lse_strides[0] + h * lse_strides[1]
    lse = tl.load(lse_ptr + row, mask=i < Sq, other=float("-inf"))
    lse = tl.where(lse == float("-inf"), float("inf"), lse * LOG2E)  # inf: probabilities of 0
    rows_ptr += head.to(tl.int64) * 2 * tiles * BLOCK_M + row
    tl.store(rows_ptr, lse)
    tl.store(rows_ptr + tiles * BLOCK_M, delta)
    tl.store(counts_ptr, 0)
    tl.store(counts_ptr + 1 + tl.program_id(0), 0)


@gluon.jit
def _tile(t, tiles, heads, at_once, offset, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, CAUSAL: gl.constexpr):
    """(head of keys, its tile's number, first tile of queries, whether it is of the last heads) of tile t.

    Last keys first: who has fewer queries to visit begins first, and so stays ahead of those who add to the same tiles
    of dQ after it. The last heads go the other way round, so that long tiles do not end when all others have.
    The first keys visit all queries, so that each tile of dQ is written; all keys visit the last.
    """
    tiles_q, tiles_k = tiles
    first = t // (tiles_k * at_once) * at_once
    count = gl.minimum(heads - first, at_once)
    place = t % (tiles_k * at_once)
    late = first + at_once >= heads
    n = gl.where(late, place // count, tiles_k - 1 - place // count)
    first_q = 0
    if CAUSAL:
        first_q = gl.minimum(gl.maximum(n * BLOCK_N - offset, 0) // BLOCK_M, tiles_q - 1)
        first_q = gl.where(n == 0, 0, first_q)
    return first + place % count, n, first_q, late


@gluon.jit
def _visit(i, first_q, late, tiles, group):
    """(which head of queries of the group, which tile of queries) step i visits."""
    m = gl.where(late, tiles[0] - 1 - i // group, first_q + i // group)
    return i % group, m


@gluon.jit
def _turn(n, m, late, tiles, offset, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, CAUSAL: gl.constexpr):
    """How many programs add to tile m of dQ before that of keys n does."""
    last = tiles[1] - 1
    if CAUSAL:
        seen = gl.minimum(gl.maximum((m + 1) * BLOCK_M - 1 + offset, 0) // BLOCK_N, last)
        last = gl.where(m == tiles[0] - 1, last, seen)
    return gl.where(late, n, last - n)


@gluon.jit
def _await(turn_ptr, n):
    """Until n programs have added to a tile of dQ."""
    gl.inline_asm_elementwise(
        """{
        .reg .pred more; .reg .u32 now;
        again: ld.acquire.gpu.global.u32 now, [$1]; setp.ne.u32 more, now, $2; @more bra again;
        mov.u32 $0, now;
        }""",
        "=r,l,r", [turn_ptr, n], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def _pass_on(turn_ptr, n):
    gl.inline_asm_elementwise(
        "st.release.gpu.global.u32 [$1], $2; mov.u32 $0, $2;",
        "=r,l,r", [turn_ptr, n], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def _take_next(counter_ptr, total, next_smem, next_bars, turn):
    """A program holds no tile before it runs: others may wait for it."""
    t = _take(counter_ptr, total + gl.num_programs(0))
    mbarrier.wait(next_bars[1].index(turn & 1), ((turn >> 1) & 1) ^ 1)
    next_smem.index(turn & 1).store(gl.full([1], t, gl.int32, gl.BlockedLayout([1], [32], [1], [0])))
    mbarrier.arrive(next_bars[0].index(turn & 1))
    return t


@gluon.jit
def _next(next_smem, next_bars, turn, WARPS: gl.constexpr):
    mbarrier.wait(next_bars[0].index(turn & 1), (turn >> 1) & 1)
    t = gl.max(next_smem.index(turn & 1).load(gl.BlockedLayout([1], [32], [WARPS], [0])), axis=0)
    mbarrier.arrive(next_bars[1].index(turn & 1))
    return t


@gluon.jit
def _orderer(smem, bars, sizes, turns_ptr, CAUSAL: gl.constexpr):
    k_smem, q_smem, next_smem = smem
    BLOCK_N: gl.constexpr = k_smem.shape[3]
    BLOCK_M: gl.constexpr = q_smem.shape[3]
    tiles, heads, at_once, offset, group = sizes
    next_bars, turn_bars = bars
    step = 0
    turn = 0
    t = _next(next_smem, next_bars, turn, 1)
    while t < tiles[1] * heads:
        head, n, first_q, late = _tile(t, tiles, heads, at_once, offset, BLOCK_M, BLOCK_N, CAUSAL)
        count = tiles[0] - first_q
        for i in range(count * group):
            g, m = _visit(i, first_q, late, tiles, group)
            at = turns_ptr + ((head * group + g) * tiles[0] + m)
            before = _turn(n, m, late, tiles, offset, BLOCK_M, BLOCK_N, CAUSAL)
            if before > 0:
                _await(at, before)
            mbarrier.arrive(turn_bars[0].index(0))
            mbarrier.wait(turn_bars[1].index(0), step & 1)
            _pass_on(at, before + 1)
            step += 1
        turn += 1
        t = _next(next_smem, next_bars, turn, 1)


@gluon.jit
def _send(smem, out_full, descs, sizes, t, Hk, side, phase, CAUSAL: gl.constexpr):
    """Gradients of the keys of tile t, which lie where the keys and values did."""
    k_smem, v_smem, q_smem = smem
    dk_desc, dv_desc = descs
    BLOCK_N: gl.constexpr = k_smem.shape[3]
    head, n, first_q, late = _tile(t, sizes[0], sizes[1], sizes[2], sizes[3], q_smem.shape[3], BLOCK_N, CAUSAL)
    mbarrier.wait(out_full.index(side), phase)
    at = [head // Hk, head % Hk, n * BLOCK_N, 0]
    tma.async_copy_shared_to_global(dk_desc, at, k_smem.index(side))
    tma.async_copy_shared_to_global(dv_desc, at, v_smem.index(side))
    tma.store_wait(0)


@gluon.jit
def _producer(
    smem, bars, sizes, descs, counter_ptr, Hk,
    QUERIES: gl.constexpr, GRADIENTS: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    k_smem, v_smem, q_smem, do_smem, rows_smem, ds_smem, next_smem = smem
    k_desc, v_desc, q_desc, do_desc, rows_desc, dk_desc, dv_desc = descs
    tiles, heads, at_once, offset, group = sizes
    kv_bars, out_bars, q_bars, do_bars, next_bars, turn_bars = bars
    BLOCK_N: gl.constexpr = k_smem.shape[3]
    BLOCK_M: gl.constexpr = q_smem.shape[3]
    BLOCK_D: gl.constexpr = k_smem.shape[4]
    outs = (k_smem, v_smem, q_smem)
    out_descs = (dk_desc, dv_desc)
    step = 0
    turn = 0
    total = tiles[1] * heads
    t = _take_next(counter_ptr, total, next_smem, next_bars, turn)
    older = 0  # the tile before the last. Not t, whose value Triton would take for it all along
    last = 0
    while t < total:
        head, n, first_q, late = _tile(t, tiles, heads, at_once, offset, BLOCK_M, BLOCK_N, CAUSAL)
        side = turn & 1
        if turn >= 2:
            _send(outs, out_bars[0], out_descs, sizes, older, Hk, side, ((turn >> 1) & 1) ^ 1, CAUSAL)
        mbarrier.expect(kv_bars[0].index(side), 2 * BLOCK_N * BLOCK_D * 2)
        at = [head // Hk, head % Hk, n * BLOCK_N, 0]
        tma.async_copy_global_to_shared(k_desc, at, kv_bars[0].index(side), k_smem.index(side))
        tma.async_copy_global_to_shared(v_desc, at, kv_bars[0].index(side), v_smem.index(side))
        count = tiles[0] - first_q
        for i in range(count * group):
            g, m = _visit(i, first_q, late, tiles, group)
            h = (head % Hk) * group + g
            q_head = head * group + g
            row = m * BLOCK_M
            stage = step % QUERIES
            mbarrier.wait(q_bars[1].index(stage), ((step // QUERIES) & 1) ^ 1)
            full = q_bars[0].index(stage)
            mbarrier.expect(full, BLOCK_M * BLOCK_D * 2 + 2 * BLOCK_M * 4)
            tma.async_copy_global_to_shared(q_desc, [head // Hk, h, row, 0], full, q_smem.index(stage))
            tma.async_copy_global_to_shared(rows_desc, [2 * q_head, row], full, rows_smem.index(2 * stage))
            tma.async_copy_global_to_shared(rows_desc, [2 * q_head + 1, row], full, rows_smem.index(2 * stage + 1))
            stage = step % GRADIENTS
            mbarrier.wait(do_bars[1].index(stage), ((step // GRADIENTS) & 1) ^ 1)
            full = do_bars[0].index(stage)
            mbarrier.expect(full, BLOCK_M * BLOCK_D * 2)
            tma.async_copy_global_to_shared(do_desc, [head // Hk, h, row, 0], full, do_smem.index(stage))
            step += 1
        older = last
        last = t
        turn += 1
        t = _take_next(counter_ptr, total, next_smem, next_bars, turn)
    if turn >= 2:
        _send(outs, out_bars[0], out_descs, sizes, older, Hk, turn & 1, ((turn >> 1) & 1) ^ 1, CAUSAL)
    if turn >= 1:
        turn -= 1
        _send(outs, out_bars[0], out_descs, sizes, last, Hk, turn & 1, (turn >> 1) & 1, CAUSAL)


@gluon.jit
def _row(rows_smem, index, LAYOUT: gl.constexpr):
    BLOCK_M: gl.constexpr = rows_smem.shape[2]
    row = rows_smem.index(index)._reinterpret(gl.float32, [BLOCK_M], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    return row.load(gl.SliceLayout(0, LAYOUT))[None, :]


@gluon.jit
def _seen(x, key, row, Sk, offset, CAUSAL: gl.constexpr):
    """x, keys by queries, 0 where a query does not see the key.

    A thread's elements differ in bit 3 of the key and in all bits but 1 and 2 of the query. Apart, those are constants
    of the compiler, and no registers are taken up by indices.
    """
    keys = gl.arange(0, x.shape[0], gl.SliceLayout(1, x.type.layout))[:, None]
    queries = gl.arange(0, x.shape[1], gl.SliceLayout(0, x.type.layout))[None, :]
    first = (keys & ~8) + key
    seen = first + (keys & 8) < Sk
    if CAUSAL:
        seen = seen & (first - (queries & 6) - (row + offset) <= (queries & ~6) - (keys & 8))
    return gl.where(seen, x, 0.0)


@gluon.jit
def _add(dq_ptr, dq, ahead):
    """Add to a tile of dQ, which lies in memory as in registers: four neighbours of a thread, thread by thread."""
    M: gl.constexpr = dq.shape[0]
    D: gl.constexpr = dq.shape[1]
    flat = dq.reshape([M // 16, 2, 8, D // 8, 4, 2]).permute((0, 3, 2, 4, 1, 5)).reshape([M * D])
    at = dq_ptr + gl.arange(0, M * D, flat.type.layout)
    if ahead == 0:
        gl.store(at, flat)
    else:
        gl.atomic_add(at, flat, sem="relaxed")


@gluon.jit
def _step(
    side, dk, dv, smem, bars, dq_ptr, ahead, n, step, row, Sk, offset, scale,
    QUERIES: gl.constexpr, GRADIENTS: gl.constexpr, CAUSAL: gl.constexpr, FIRST: gl.constexpr,
):  # fmt: skip
    """One tile of queries, whose dS is left in shared memory: (dk, dv).

    dq_ptr, ahead: where dQ of the tile before lies, and how many add to that ahead of this program.
    """
    k_smem, v_smem, q_smem, do_smem, rows_smem, ds_smem, next_smem = smem
    kv_bars, out_bars, q_bars, do_bars, next_bars, turn_bars = bars
    # Something new at each step: else its addresses are kept from step to step, in local memory.
    side = gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [side], dtype=gl.int32, is_pure=False, pack=1)
    k = _matrix(k_smem.index(side))
    v = _matrix(v_smem.index(side))
    BLOCK_N: gl.constexpr = k.shape[0]
    BLOCK_M: gl.constexpr = q_smem.shape[3]
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, BLOCK_M, 16])
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, dk.type.layout, 2)
    zero = gl.zeros([BLOCK_N, BLOCK_M], gl.float32, SCORES)
    stage = step % QUERIES
    before = (step - 1) % QUERIES
    mbarrier.wait(q_bars[0].index(stage), (step // QUERIES) & 1)
    q_turned = _matrix(q_smem.index(stage)).permute((1, 0))
    if FIRST:
        s = warpgroup_mma(k, q_turned, zero, use_acc=False, is_async=True)
    else:
        dq = _dq(ds_smem, k)
        s = warpgroup_mma(k, q_turned, zero, use_acc=False, is_async=True)
        dk = warpgroup_mma(ds_smem, _matrix(q_smem.index(before)), dk, is_async=True)
        dq = warpgroup_mma_wait(2, (dq,))
        mbarrier.wait(turn_bars[0].index(0), (step - 1) & 1)
        _add(dq_ptr, dq, ahead)
        mbarrier.arrive(turn_bars[1].index(0))
    place = stage
    stage = step % GRADIENTS
    mbarrier.wait(do_bars[0].index(stage), (step // GRADIENTS) & 1)
    do = _matrix(do_smem.index(stage))
    dp = warpgroup_mma(v, do.permute((1, 0)), zero, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(1 if FIRST else 2, (s,))
    p = gl.exp2(s * scale - _row(rows_smem, 2 * place, SCORES))
    edge = (n + 1) * BLOCK_N > Sk
    if CAUSAL:
        edge = edge | (row + offset < (n + 1) * BLOCK_N - 1)
    if edge:
        p = _seen(p, n * BLOCK_N, row, Sk, offset, CAUSAL)
    weights = gl.convert_layout(p.to(q_smem.dtype), WEIGHTS)
    dv = warpgroup_mma(weights, do, dv, use_acc=not FIRST, is_async=True)
    dp, dk = warpgroup_mma_wait(1, (dp, dk))
    if not FIRST:
        mbarrier.arrive(q_bars[1].index(before))
    ds = p * (dp - _row(rows_smem, 2 * place + 1, SCORES))
    if edge:
        ds = _seen(ds, n * BLOCK_N, row, Sk, offset, CAUSAL)
    ds_smem.store(ds.to(q_smem.dtype))
    fence_async_shared()
    dv, weights = warpgroup_mma_wait(0, (dv, weights))
    gl.thread_barrier()
    mbarrier.arrive(do_bars[1].index(stage))
    return dk, dv


@gluon.jit
def _dq(ds_smem, k):
    BLOCK_M: gl.constexpr = ds_smem.shape[1]
    BLOCK_D: gl.constexpr = k.shape[1]
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, BLOCK_D // 2, 16])
    zero = gl.zeros([BLOCK_M, BLOCK_D], gl.float32, LAYOUT)
    return warpgroup_mma(ds_smem.permute((1, 0)), k, zero, use_acc=False, is_async=True)


@gluon.jit
def _consumer(
    smem, bars, sizes, dq_ptr, Sk, scale, out_scale,
    QUERIES: gl.constexpr, GRADIENTS: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    k_smem, v_smem, q_smem, do_smem, rows_smem, ds_smem, next_smem = smem
    tiles, heads, at_once, offset, group = sizes
    kv_bars, out_bars, q_bars, do_bars, next_bars, turn_bars = bars
    BLOCK_N: gl.constexpr = k_smem.shape[3]
    BLOCK_M: gl.constexpr = q_smem.shape[3]
    BLOCK_D: gl.constexpr = k_smem.shape[4]
    RESULT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, BLOCK_D, 16])
    step = 0
    turn = 0
    t = _next(next_smem, next_bars, turn, 8)
    while t < tiles[1] * heads:
        head, n, first_q, late = _tile(t, tiles, heads, at_once, offset, BLOCK_M, BLOCK_N, CAUSAL)
        side = turn & 1
        count = tiles[0] - first_q
        mbarrier.wait(kv_bars[0].index(side), (turn >> 1) & 1)
        k = _matrix(k_smem.index(side))
        v = _matrix(v_smem.index(side))
        dk = gl.zeros([BLOCK_N, BLOCK_D], gl.float32, RESULT)
        dv = gl.zeros([BLOCK_N, BLOCK_D], gl.float32, RESULT)
        g, m = _visit(0, first_q, late, tiles, group)
        tile_ptr = dq_ptr + ((head * group + g) * tiles[0] + m).to(gl.int64) * (BLOCK_M * BLOCK_D)
        ahead = _turn(n, m, late, tiles, offset, BLOCK_M, BLOCK_N, CAUSAL)
        dk, dv = _step(
            side, dk, dv, smem, bars, tile_ptr, ahead, n, step, m * BLOCK_M, Sk, offset, scale,
            QUERIES, GRADIENTS, CAUSAL, True,
        )  # fmt: skip
        step += 1
        for i in range(1, count * group):
            g, m = _visit(i, first_q, late, tiles, group)
            dk, dv = _step(
                side, dk, dv, smem, bars, tile_ptr, ahead, n, step, m * BLOCK_M, Sk, offset, scale,
                QUERIES, GRADIENTS, CAUSAL, False,
            )  # fmt: skip
            tile_ptr = dq_ptr + ((head * group + g) * tiles[0] + m).to(gl.int64) * (BLOCK_M * BLOCK_D)
            ahead = _turn(n, m, late, tiles, offset, BLOCK_M, BLOCK_N, CAUSAL)
            step += 1
        before = (step - 1) % QUERIES
        dq = _dq(ds_smem, k)
        dk = warpgroup_mma(ds_smem, _matrix(q_smem.index(before)), dk, is_async=True)
        dq = warpgroup_mma_wait(1, (dq,))
        mbarrier.wait(turn_bars[0].index(0), (step - 1) & 1)
        _add(tile_ptr, dq, ahead)
        mbarrier.arrive(turn_bars[1].index(0))
        dk = warpgroup_mma_wait(0, (dk,))
        gl.thread_barrier()
        mbarrier.arrive(q_bars[1].index(before))
        k.store((dk * out_scale).to(k_smem.dtype))
        v.store(dv.to(k_smem.dtype))
        fence_async_shared()
        gl.thread_barrier()
        mbarrier.arrive(out_bars[0].index(side))
        turn += 1
        t = _next(next_smem, next_bars, turn, 8)


@gluon.jit(do_not_specialize=["Hk", "group", "Sk", "offset", "heads", "tiles_q", "tiles_k", "at_once"])
def _attention_bwd_kernel_sm90(
    k_desc, v_desc, q_desc, do_desc, rows_desc, dk_desc, dv_desc, dq_ptr, counts_ptr,
    Hk, group, Sk, offset, heads, tiles_q, tiles_k, at_once, scale, out_scale,
    QUERIES: gl.constexpr, GRADIENTS: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    BLOCK_N: gl.constexpr = k_desc.block_type.shape[2]
    BLOCK_M: gl.constexpr = q_desc.block_type.shape[2]
    BLOCK_D: gl.constexpr = k_desc.block_type.shape[3]
    k_smem = gl.allocate_shared_memory(k_desc.dtype, [2, 1, 1, BLOCK_N, BLOCK_D], k_desc.layout)
    v_smem = gl.allocate_shared_memory(k_desc.dtype, [2, 1, 1, BLOCK_N, BLOCK_D], v_desc.layout)
    q_smem = gl.allocate_shared_memory(k_desc.dtype, [QUERIES, 1, 1, BLOCK_M, BLOCK_D], q_desc.layout)
    do_smem = gl.allocate_shared_memory(k_desc.dtype, [GRADIENTS, 1, 1, BLOCK_M, BLOCK_D], do_desc.layout)
    rows_smem = gl.allocate_shared_memory(gl.float32, [2 * QUERIES, 1, BLOCK_M], rows_desc.layout)
    ds_smem = gl.allocate_shared_memory(k_desc.dtype, [BLOCK_N, BLOCK_M], gl.NVMMASharedLayout(128, 16, 2))
    next_smem = gl.allocate_shared_memory(gl.int32, [2, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    kv_bars = _barriers(2, 1)
    out_bars = _barriers(2, 1)
    q_bars = _barriers(QUERIES, 1)
    do_bars = _barriers(GRADIENTS, 1)
    next_bars = _barriers(2, 2)
    turn_bars = _barriers(1, 1)
    fence_async_shared()
    gl.thread_barrier()
    smem = (k_smem, v_smem, q_smem, do_smem, rows_smem, ds_smem, next_smem)
    bars = (kv_bars, out_bars, q_bars, do_bars, next_bars, turn_bars)
    sizes = ((tiles_q, tiles_k), heads, at_once, offset, group)
    descs = (k_desc, v_desc, q_desc, do_desc, rows_desc, dk_desc, dv_desc)
    gl.warp_specialize([
        (_consumer, (smem, bars, sizes, dq_ptr, Sk, scale, out_scale, QUERIES, GRADIENTS, CAUSAL)),
        (_producer, (smem, bars, sizes, descs, counts_ptr, Hk, QUERIES, GRADIENTS, CAUSAL)),
        (_orderer, ((k_smem, q_smem, next_smem), (next_bars, turn_bars), sizes, counts_ptr + 1, CAUSAL)),
    ], [1, 1], [24, 24])  # fmt: skip
    _invalidate(kv_bars, 2)
    _invalidate(out_bars, 2)
    _invalidate(q_bars, QUERIES)
    _invalidate(do_bars, GRADIENTS)
    _invalidate(next_bars, 2)
    _invalidate(turn_bars, 1)


@triton.jit(do_not_specialize=["H", "Sq", "tiles"])
def _attention_bwd_kernel_round(
    sums_ptr, dq_ptr, H, Sq, tiles, dq_strides, scale, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr
):
    head = tl.program_id(0) // tiles
    i = tl.program_id(0) % tiles * BLOCK_M + tl.arange(0, BLOCK_M)
    dq_ptr += (head // H).to(tl.int64) * dq_strides[0] + (head % H).to(tl.int64) * dq_strides[2]
    SIZE: tl.constexpr = BLOCK_M * BLOCK_D
    dq = tl.load(sums_ptr + tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE))
    dq = tl.permute(tl.reshape(dq, (BLOCK_M // 16, BLOCK_D // 8, 8, 4, 2, 2)), (0, 4, 2, 1, 3, 5))
    dq = tl.reshape(dq, (BLOCK_M, BLOCK_D))
    offs_d = tl.arange(0, BLOCK_D)
    at = dq_ptr + i.to(tl.int64)[:, None] * dq_strides[1] + offs_d[None, :]
    tl.store(at, round_to(dq * scale, dq_ptr.dtype.element_ty), mask=(i < Sq)[:, None] & (offs_d < D)[None, :])


def backward(q, k, v, dout, dlse, out, lse, dq, dk, dv, scale, right, top_left, plan=None):
    """Compute dq, dk and dv of (B, S, H, D) tensors; False where they do not lie as its copies need it.

    right: keys after its own that a query sees, negative for all. scale: above 0.
    """
    (B, Sq, H, D), (Sk, Hk) = q.shape, k.shape[1:3]
    offset = (0 if top_left else Sk - Sq) + right
    causal = 0 <= right and offset < Sk - 1
    block_d = 64 if D <= 64 else 128
    plan = plan or plan_backward(block_d)
    if not causal and block_d == 64:  # ptxas 12.8 dies of the other kernel
        offset, causal = Sk, True
    device = q.device
    sizes = ((k, _BLOCK_N), (v, _BLOCK_N), (q, _BLOCK_M), (dout, _BLOCK_M), (dk, _BLOCK_N), (dv, _BLOCK_N))
    descriptors = [describe(t, False, rows, block_d) for t, rows in sizes]
    if None in descriptors:
        return False
    descriptors = [TensorDescriptor(d.base, d.shape, d.strides, d.block_shape, _SWIZZLED) for d in descriptors]
    tiles, tiles_k, heads = cdiv(Sq, _BLOCK_M), cdiv(Sk, _BLOCK_N), B * Hk
    rows = torch.empty((B * H * 2, tiles * _BLOCK_M), dtype=torch.float32, device=device)
    sums = torch.empty(B * H * tiles * _BLOCK_M * block_d, dtype=torch.float32, device=device)
    counts = torch.empty(1 + B * H * tiles, dtype=torch.int32, device=device)  # of tiles taken, and of turns
    launch(
        _attention_bwd_kernel_rows,
        (B * H * tiles,),
        device,
        (dout, out, lse, dlse, rows, counts, H, Sq, tiles, dout.stride()[:3], out.stride()[:3],
         row_strides(lse), row_strides(dlse, 3)),
        D=D, BLOCK_D=block_d, BLOCK_M=_BLOCK_M,
    )  # fmt: skip
    # Heads whose queries, gradients and sums fill 16 MiB: up to 10 % better than 32 where they are short
    at_once = min(max(heads_at_once(heads, 1, Sq * (H // Hk), 8 * D, q.element_size()), 2), heads)
    launch(
        _attention_bwd_kernel_sm90,
        (min(facts(device).multiprocessors, tiles_k * heads),),
        device,
        (*descriptors[:4], TensorDescriptor(rows, list(rows.shape), list(rows.stride()), [1, _BLOCK_M], _ROWS),
         *descriptors[4:], sums, counts, Hk, H // Hk, Sk, offset, heads, tiles, tiles_k,
         at_once, scale * LOG2E.value, scale),
        QUERIES=plan.QUERIES, GRADIENTS=plan.GRADIENTS, CAUSAL=causal,
        num_warps=8,
    )  # fmt: skip
    launch(
        _attention_bwd_kernel_round,
        (B * H * tiles,),
        device,
        (sums, dq, H, Sq, tiles, dq.stride()[:3], scale),
        D=D, BLOCK_D=block_d, BLOCK_M=_BLOCK_M,
    )  # fmt: skip
    return True
