"""Attention, forward, for Hopper GPUs: one warp copies tiles, groups of four warps multiply them.

A program stays on its multiprocessor and takes tiles of queries until there are none. Its copying warp brings queries
and, a block ahead, keys and values into shared memory. Each of its other groups has 64 rows of queries: it issues the
product of a block's keys together with that of the block before's values, and its softmax runs while the other groups'
products fill the tensor cores. Blocks go from right to left, so that what has to be masked comes first.

Imported where a plan chooses it, and only then.
"""

from typing import NamedTuple

import torch

from ._attention import LN2, LOG2E, LOWEST
from ._attention_fwd import describe, heads_at_once
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
from ._triton import cdiv

ROWS = gl.constexpr(64)  # of a group of four warps
_BLOCK_N = 128
_SWIZZLED = gl.NVMMASharedLayout(128, 16, 4)  # bytes, bits of an element, dimensions


class Plan(NamedTuple):
    """GROUPS of 64 queries; STAGES blocks of keys and of values at once; queries in REGISTERS or in shared memory;
    tiles taken from a counter where DYNAMIC, else every so many."""

    GROUPS: int
    STAGES: int
    REGISTERS: bool
    DYNAMIC: bool


def plan_forward(Sk, block_d, causal):
    """The launch, for a head dim of at most block_d, 64 or 128."""
    if block_d == 128:  # of cuDNN 1.09 to 1.12 full and 1.13 to 1.20 causal, S = 1024 to 16384, H200 bf16
        return Plan(2, 2, False, True)
    if not causal and Sk >= 4096:  # 1.09 to 1.13, where the other has 1.01 to 1.06
        return Plan(3, 3, False, True)
    return Plan(2, 2, True, True)  # at 1024 and 4096: 1.00 full, 0.97 to 1.04 causal


def masked_blocks(block_m, offset, Sk, causal):
    """How many blocks of keys, from the last one of a tile, some of its queries may not see all of."""
    if not causal:
        return int(Sk % _BLOCK_N > 0)
    firsts = {(tile * block_m + offset + 1) % _BLOCK_N for tile in (0, 1)}  # that a tile's first query does not see
    return max((first + block_m - 2) // _BLOCK_N + 1 for first in firsts)


@gluon.jit
def _tile(t, tiles, heads, at_once, Sq, Sk, offset, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, CAUSAL: gl.constexpr):
    """(head, first query, blocks of keys) of tile t, the longest first. A tile that sees no key is given one block."""
    first = t // (tiles * at_once) * at_once
    count = gl.minimum(heads - first, at_once)
    place = t % (tiles * at_once)
    row = (tiles - 1 - place // count) * BLOCK_M
    seen = Sk
    if CAUSAL:
        seen = gl.minimum(gl.minimum(row + BLOCK_M, Sq) + offset, Sk)
    return first + place % count, row, gl.maximum((seen + (BLOCK_N - 1)) // BLOCK_N, 1)


@gluon.jit
def _take(counter_ptr, last):
    """The next number of the counter, which goes back to 0 after `last`: one lane asks, and tells its warp.

    An atomic of Triton would pass it through shared memory that the compiler may lay over a barrier's.
    """
    return gl.inline_asm_elementwise(
        """{
        .reg .pred first; .reg .u32 lane, n;
        mov.u32 lane, %laneid; setp.eq.u32 first, lane, 0; mov.u32 n, 0;
        @first atom.global.relaxed.gpu.inc.u32 n, [$1], $2;
        shfl.sync.idx.b32 $0, n, 0, 31, 0xffffffff;
        }""",
        "=r,l,r", [counter_ptr, last], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def _matrix(block):
    """A (1, 1, rows, D) tile as (rows, D)."""
    return block.reshape([block.shape[2], block.shape[3]])


@gluon.jit
def _copy_keys(desc, at, full, empty, smem, stage, phase, BYTES: gl.constexpr):
    mbarrier.wait(empty.index(stage), phase ^ 1)
    mbarrier.expect(full.index(stage), BYTES)
    tma.async_copy_global_to_shared(desc, at, full.index(stage), smem.index(stage))


@gluon.jit
def _producer(
    smem, bars, sizes, copies,
    GROUPS: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr, DYNAMIC: gl.constexpr,
):  # fmt: skip
    """Keys run one block ahead of values; queries of the next tile are fetched while this one is computed."""
    q_smem, k_smem, v_smem, next_smem = smem
    H, Sq, Sk, offset, heads, tiles, at_once = sizes
    q_desc, k_desc, v_desc, counter_ptr, group = copies
    BLOCK_N: gl.constexpr = k_smem.shape[3]
    BLOCK_D: gl.constexpr = k_smem.shape[4]
    BYTES: gl.constexpr = BLOCK_N * BLOCK_D * 2
    q_full, q_empty = bars[0]
    k_full, k_empty = bars[1]
    v_full, v_empty = bars[2]
    next_full, next_empty = bars[3]
    total = tiles * heads
    block = 0  # of all that this program copies
    turn = 0  # tiles that it has taken
    t = gl.program_id(0)
    while t < total:
        head, row, n = _tile(t, tiles, heads, at_once, Sq, Sk, offset, GROUPS * ROWS, BLOCK_N, CAUSAL)
        b = head // H
        h = head % H
        hk = h // group
        key = (n - 1) * BLOCK_N
        _copy_keys(k_desc, [b, hk, key, 0], k_full, k_empty, k_smem, block % STAGES, (block // STAGES) & 1, BYTES)
        side = turn & 1
        phase = (turn >> 1) & 1
        mbarrier.wait(q_empty.index(side), phase ^ 1)
        mbarrier.expect(q_full.index(side), GROUPS * ROWS * BLOCK_D * 2)
        for g in gl.static_range(GROUPS):
            tma.async_copy_global_to_shared(
                q_desc, [b, h, row + g * ROWS, 0], q_full.index(side), q_smem.index(side * GROUPS + g)
            )
        if DYNAMIC:
            t = _take(counter_ptr, total - 1) + gl.num_programs(0)
            mbarrier.wait(next_empty.index(side), phase ^ 1)
            next_smem.index(side).store(gl.full([1], t, gl.int32, gl.BlockedLayout([1], [32], [1], [0])))
            mbarrier.arrive(next_full.index(side))
        else:
            t += gl.num_programs(0)
        for _ in range(1, n):
            ahead = block + 1
            _copy_keys(
                k_desc, [b, hk, key - BLOCK_N, 0], k_full, k_empty, k_smem, ahead % STAGES, (ahead // STAGES) & 1, BYTES
            )
            _copy_keys(v_desc, [b, hk, key, 0], v_full, v_empty, v_smem, block % STAGES, (block // STAGES) & 1, BYTES)
            block = ahead
            key -= BLOCK_N
        _copy_keys(v_desc, [b, hk, key, 0], v_full, v_empty, v_smem, block % STAGES, (block // STAGES) & 1, BYTES)
        block += 1
        turn += 1


@gluon.jit
def _masked(s, row, key, Sk, offset, LAYOUT: gl.constexpr, CAUSAL: gl.constexpr):
    keys = key + gl.arange(0, s.shape[1], gl.SliceLayout(0, LAYOUT))
    last = gl.full([s.shape[0]], 0, gl.int32, gl.SliceLayout(1, LAYOUT)) + (Sk - 1)
    if CAUSAL:
        last = gl.minimum(row + gl.arange(0, s.shape[0], gl.SliceLayout(1, LAYOUT)) + offset, last)
    return gl.where(keys[None, :] <= last[:, None], s, float("-inf"))


@gluon.jit
def _block(
    q, k_smem, v_smem, k_bars, v_bars, acc, p, peak, total, block, row, key, Sk, offset, scale,
    STAGES: gl.constexpr, CAUSAL: gl.constexpr, MASK: gl.constexpr,
):  # fmt: skip
    """Scores of one block of keys, while the values of the block before are summed: (acc, p, peak, total)."""
    BLOCK_N: gl.constexpr = k_smem.shape[3]
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    stage = (block - 1) % STAGES
    ahead = block % STAGES
    mbarrier.wait(k_bars[0].index(ahead), (block // STAGES) & 1)
    zero = gl.zeros([ROWS, BLOCK_N], gl.float32, SCORES)
    s = warpgroup_mma(q, _matrix(k_smem.index(ahead)).permute((1, 0)), zero, use_acc=False, is_async=True)
    mbarrier.wait(v_bars[0].index(stage), ((block - 1) // STAGES) & 1)
    acc = warpgroup_mma(p, _matrix(v_smem.index(stage)), acc, is_async=True)
    s = warpgroup_mma_wait(1, (s,))
    mbarrier.arrive(k_bars[1].index(ahead))
    if MASK:
        s = _masked(s, row, key, Sk, offset, SCORES, CAUSAL)
    higher = gl.maximum(peak, gl.max(s, axis=1) * scale)
    e = gl.exp2(s * scale - higher[:, None])
    fade = gl.exp2(peak - higher)
    total = total * fade + gl.sum(e, axis=1)
    acc, p = warpgroup_mma_wait(0, (acc, p))  # p too: its registers are read until then
    mbarrier.arrive(v_bars[1].index(stage))
    acc = acc * gl.convert_layout(fade, gl.SliceLayout(1, p.type.layout.parent))[:, None]
    return acc, gl.convert_layout(e.to(p.dtype), p.type.layout), higher, total


@gluon.jit
def _consumer(
    smem, bars, sizes, results,
    GROUP: gl.constexpr, GROUPS: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr, MASKED: gl.constexpr,
    REGISTERS: gl.constexpr, DYNAMIC: gl.constexpr,
):  # fmt: skip
    """Group GROUP's 64 rows of each tile. The last MASKED blocks of keys are masked, 0 for none."""
    q_smem, k_smem, v_smem, next_smem = smem
    q_bars, k_bars, v_bars, next_bars = bars
    H, Sq, Sk, offset, heads, tiles, at_once = sizes
    o_desc, o_smem, lse_ptr, scale = results
    BLOCK_N: gl.constexpr = k_smem.shape[3]
    BLOCK_D: gl.constexpr = k_smem.shape[4]
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    RESULT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, RESULT, 2)
    o_tile = _matrix(o_smem.index(GROUP))
    block = 0
    turn = 0
    t = gl.program_id(0)
    while t < tiles * heads:
        head, row, n = _tile(t, tiles, heads, at_once, Sq, Sk, offset, GROUPS * ROWS, BLOCK_N, CAUSAL)
        row += GROUP * ROWS
        side = turn & 1
        phase = (turn >> 1) & 1
        q = _matrix(q_smem.index(side * GROUPS + GROUP))
        mbarrier.wait(q_bars[0].index(side), phase)
        if REGISTERS:
            q = q.load(gl.DotOperandLayout(0, SCORES, 2))
            mbarrier.arrive(q_bars[1].index(side))

        stage = block % STAGES
        mbarrier.wait(k_bars[0].index(stage), (block // STAGES) & 1)
        zero = gl.zeros([ROWS, BLOCK_N], gl.float32, SCORES)
        s = warpgroup_mma(q, _matrix(k_smem.index(stage)).permute((1, 0)), zero, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(0, (s,))
        mbarrier.arrive(k_bars[1].index(stage))
        key = (n - 1) * BLOCK_N
        if MASKED > 0:
            s = _masked(s, row, key, Sk, offset, SCORES, CAUSAL)
        peak = gl.maximum(gl.max(s, axis=1) * scale, LOWEST)  # finite: no -inf - -inf in rows that see nothing yet
        e = gl.exp2(s * scale - peak[:, None])
        total = gl.sum(e, axis=1)
        p = gl.convert_layout(e.to(q_smem.dtype), WEIGHTS)
        acc = gl.zeros([ROWS, BLOCK_D], gl.float32, RESULT)
        whole = 1
        if MASKED > 1:
            whole = gl.minimum(n, MASKED)
            for _ in range(1, whole):
                block += 1
                key -= BLOCK_N
                acc, p, peak, total = _block(
                    q, k_smem, v_smem, k_bars, v_bars, acc, p, peak, total, block, row, key, Sk, offset, scale,
                    STAGES, CAUSAL, True,
                )  # fmt: skip
        for _ in range(whole, n):
            block += 1
            acc, p, peak, total = _block(
                q, k_smem, v_smem, k_bars, v_bars, acc, p, peak, total, block, row, 0, Sk, offset, scale,
                STAGES, CAUSAL, False,
            )  # fmt: skip
        if not REGISTERS:
            mbarrier.arrive(q_bars[1].index(side))
        stage = block % STAGES
        mbarrier.wait(v_bars[0].index(stage), (block // STAGES) & 1)
        acc = warpgroup_mma(p, _matrix(v_smem.index(stage)), acc, is_async=True)
        acc, p = warpgroup_mma_wait(0, (acc, p))
        mbarrier.arrive(v_bars[1].index(stage))
        block += 1

        share = 1.0 / gl.where(total == 0.0, 1.0, total)
        acc = acc * gl.convert_layout(share, gl.SliceLayout(1, RESULT))[:, None]
        tma.store_wait(0)  # o_tile may still be on its way from the tile before
        gl.thread_barrier()
        o_tile.store(acc.to(o_smem.dtype))
        fence_async_shared()
        gl.thread_barrier()
        if row < Sq:
            b = head // H
            tma.async_copy_shared_to_global(o_desc, [b, head % H, row, 0], o_smem.index(GROUP))
        rows = row + gl.arange(0, ROWS, gl.SliceLayout(1, SCORES))
        lse = (peak + gl.log2(total)) * LN2  # -inf where no key was seen
        gl.store(lse_ptr + head.to(gl.int64) * Sq + rows, lse, mask=rows < Sq)
        if DYNAMIC:
            mbarrier.wait(next_bars[0].index(side), phase)
            t = gl.max(next_smem.index(side).load(gl.BlockedLayout([1], [32], [4], [0])), axis=0)
            mbarrier.arrive(next_bars[1].index(side))
        else:
            t += gl.num_programs(0)
        turn += 1
    tma.store_wait(0)


@gluon.jit
def _barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    """(full, empty): the copying warp, or its copies, arrive at the first, ARRIVALS groups at the second."""
    full = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=ARRIVALS)
    return full, empty


@gluon.jit
def _invalidate(bars, COUNT: gl.constexpr):
    """To the end of the kernel: nothing else may be laid over a barrier's memory while the kernel runs."""
    for i in gl.static_range(COUNT):
        mbarrier.invalidate(bars[0].index(i))
        mbarrier.invalidate(bars[1].index(i))


@gluon.jit(do_not_specialize=["H", "group", "Sq", "Sk", "offset", "heads", "tiles", "at_once"])
def _attention_fwd_kernel_sm90(
    q_desc, k_desc, v_desc, o_desc, lse_ptr, counter_ptr, H, group, Sq, Sk, offset, heads, tiles, at_once, scale,
    GROUPS: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr, MASKED: gl.constexpr, REGISTERS: gl.constexpr,
    DYNAMIC: gl.constexpr,
):  # fmt: skip
    BLOCK_N: gl.constexpr = k_desc.block_type.shape[2]
    BLOCK_D: gl.constexpr = k_desc.block_type.shape[3]
    q_smem = gl.allocate_shared_memory(q_desc.dtype, [2 * GROUPS, 1, 1, ROWS, BLOCK_D], q_desc.layout)
    k_smem = gl.allocate_shared_memory(q_desc.dtype, [STAGES, 1, 1, BLOCK_N, BLOCK_D], k_desc.layout)
    v_smem = gl.allocate_shared_memory(q_desc.dtype, [STAGES, 1, 1, BLOCK_N, BLOCK_D], v_desc.layout)
    o_smem = gl.allocate_shared_memory(q_desc.dtype, [GROUPS, 1, 1, ROWS, BLOCK_D], o_desc.layout)
    next_smem = gl.allocate_shared_memory(gl.int32, [2, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    q_bars = _barriers(2, GROUPS)
    k_bars = _barriers(STAGES, GROUPS)
    v_bars = _barriers(STAGES, GROUPS)
    next_bars = _barriers(2, GROUPS)
    fence_async_shared()
    gl.thread_barrier()
    smem = (q_smem, k_smem, v_smem, next_smem)
    bars = (q_bars, k_bars, v_bars, next_bars)
    sizes = (H, Sq, Sk, offset, heads, tiles, at_once)
    copies = (q_desc, k_desc, v_desc, counter_ptr, group)
    results = (o_desc, o_smem, lse_ptr, scale)
    # Constants are listed anew each time: one that is given a name is a constant no more.
    if GROUPS == 2:
        gl.warp_specialize([
            (_consumer, (smem, bars, sizes, results, 0, GROUPS, STAGES, CAUSAL, MASKED, REGISTERS, DYNAMIC)),
            (_consumer, (smem, bars, sizes, results, 1, GROUPS, STAGES, CAUSAL, MASKED, REGISTERS, DYNAMIC)),
            (_producer, (smem, bars, sizes, copies, GROUPS, STAGES, CAUSAL, DYNAMIC)),
        ], [4, 1], [240, 24])  # fmt: skip
    else:
        gl.warp_specialize([
            (_consumer, (smem, bars, sizes, results, 0, GROUPS, STAGES, CAUSAL, MASKED, REGISTERS, DYNAMIC)),
            (_consumer, (smem, bars, sizes, results, 1, GROUPS, STAGES, CAUSAL, MASKED, REGISTERS, DYNAMIC)),
            (_consumer, (smem, bars, sizes, results, 2, GROUPS, STAGES, CAUSAL, MASKED, REGISTERS, DYNAMIC)),
            (_producer, (smem, bars, sizes, copies, GROUPS, STAGES, CAUSAL, DYNAMIC)),
        ], [4, 4, 1], [160, 160, 24])  # fmt: skip
    _invalidate(q_bars, 2)
    _invalidate(k_bars, STAGES)
    _invalidate(v_bars, STAGES)
    _invalidate(next_bars, 2)


def forward(q, k, v, out, lse, scale, right, top_left, plan=None):
    """Compute out and lse of (B, S, H, D) tensors; False where they do not lie as its copies need it.

    right: keys after its own that a query sees, negative for all. scale: above 0.
    """
    (B, Sq, H, D), (Sk, Hk) = q.shape, k.shape[1:3]
    offset = (0 if top_left else Sk - Sq) + right
    causal = 0 <= right and offset < Sk - 1
    block_d = 64 if D <= 64 else 128
    plan = plan or plan_forward(Sk, block_d, causal)
    block_m = plan.GROUPS * 64
    descriptors = [describe(t, False, rows, block_d) for t, rows in ((q, 64), (k, _BLOCK_N), (v, _BLOCK_N), (out, 64))]
    if None in descriptors:
        return False
    tiles, heads, device = cdiv(Sq, block_m), B * H, q.device
    programs = min(facts(device).multiprocessors, tiles * heads)
    # A counter has to be zeroed first. Where each program has two tiles at most it does without: 1.23 instead of 1.17
    dynamic = plan.DYNAMIC and 2 * programs < tiles * heads
    counter = torch.zeros(1, dtype=torch.int32, device=device) if dynamic else lse  # this launch's own
    launch(
        _attention_fwd_kernel_sm90,
        (programs,),
        device,
        (*(TensorDescriptor(d.base, d.shape, d.strides, d.block_shape, _SWIZZLED) for d in descriptors), lse, counter,
         H, H // Hk, Sq, Sk, offset, heads, tiles,
         heads_at_once(heads, H // Hk, Sk, 2 * D, q.element_size()) if causal else 1, scale * LOG2E.value),
        GROUPS=plan.GROUPS, STAGES=plan.STAGES, MASKED=masked_blocks(block_m, offset, Sk, causal), num_warps=4,
        CAUSAL=causal, REGISTERS=plan.REGISTERS, DYNAMIC=dynamic,
    )  # fmt: skip
    return True
