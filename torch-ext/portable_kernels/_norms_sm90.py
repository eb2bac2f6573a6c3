"""The backward of norms of wide rows on Hopper GPUs, which reads every tensor once.

A row is split over programs. Each has BLOCK_N columns of every so many rows, and keeps their share of the weight and
bias gradients in registers. The programs of a row tell each other their sums by way of memory: two float32 in a word
of 64 bits, which is not 0 once it is there. They wait for each other, so all of them must run at once: the launch is
cooperative, and the device refuses one that would not fit.
"""

from typing import NamedTuple

import torch

from ._device import launch
from ._norms import packed, store_dx, store_parts
from ._rows import at, row_index
from ._triton import cdiv, next_power_of_2, tl, triton


class Plan(NamedTuple):
    BLOCK_N: int
    STAGES: int
    num_warps: int
    programs: int  # on a multiprocessor
    registers: int  # of a thread, at most: so many programs fit


def plan(layer, N):
    """Shares of a copy that reads and writes each tensor once, H200 bf16."""
    if not layer:
        return Plan(2048, 4, 2, 6, 168)  # 0.83 at 32768, 0.75 at 65536, 0.76 at 131072; in two kernels 0.58
    if N <= 32768:  # 0.64 at 16384, 0.60 at 32768; in two kernels 0.54
        return Plan(1024, 4, 1, 8, 255)
    if N <= 65536:  # 0.58
        return Plan(1024, 4, 2, 8, 128)
    return Plan(2048, 4, 2, 4, 255)  # 0.55 at 131072; at 262144 0.48


@triton.jit
def _hold(x):
    """x; what the compiler would widen once and keep so, it widens at each use: registers hold twice as much."""
    if x.dtype.primitive_bitwidth == 16:
        return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=2)
    else:
        return x


@triton.jit
def _xhat(x, stats_ptr, out_m, mask, LAYER: tl.constexpr):
    """(x normalised, rstd)."""
    x = x.to(tl.float32)
    if LAYER:
        rstd = tl.load(stats_ptr + out_m * 3 + 2)[:, None]
        shift = tl.load(stats_ptr + out_m * 3)[:, None]
        correction = tl.load(stats_ptr + out_m * 3 + 1)[:, None]
        return tl.where(mask, (x - shift) - correction, 0.0) * rstd, rstd
    else:
        rstd = tl.load(stats_ptr + out_m)[:, None]
        return x * rstd, rstd


@triton.jit
def _scale(w, offset):
    if offset is None:
        return w.to(tl.float32)
    else:
        return w.to(tl.float32) + offset


@triton.jit
def _bits(x):
    return x.to(tl.int32, bitcast=True).to(tl.int64)


@triton.jit
def _number(bits):
    return bits.to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["M", "n_rows", "slices"])
def _norm_bwd_kernel_sm90(
    dy_ptr, x_ptr, w_ptr, stats_ptr, words_ptr, ds_ptr, dx_ptr, dw_ptr, db_ptr, B, M, N, n_rows, slices,
    dy_strides, x_strides, ds_strides, offset,
    LAYER: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_S: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    own = tl.program_id(0) % slices
    group = tl.program_id(0) // slices
    offs_n = own * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = (offs_n < N)[None, :]
    if w_ptr is not None:
        w = _hold(tl.load(w_ptr + offs_n[None, :], mask=mask, other=0.0))
    dw = tl.zeros((1, BLOCK_N), tl.float32)
    db = tl.zeros((1, BLOCK_N), tl.float32)
    offs_s = tl.arange(0, BLOCK_S)
    for row in tl.range(group, n_rows, tl.num_programs(0) // slices, num_stages=STAGES):
        a, b, offs_m = row_index(row, B, M, 1)
        out_m = (a * B + b) * M + offs_m
        x = tl.load(at(x_ptr, x_strides, a, b, offs_m, offs_n), mask=mask, other=0.0)
        dy = tl.load(at(dy_ptr, dy_strides, a, b, offs_m, offs_n), mask=mask, other=0.0)
        xhat, rstd = _xhat(x, stats_ptr, out_m, mask, LAYER)
        g = dy.to(tl.float32)
        if w_ptr is not None:
            g *= _scale(w, offset)
        product = tl.sum(tl.sum(g * xhat, axis=1), axis=0)
        total = tl.sum(tl.sum(g, axis=1), axis=0) if LAYER else product
        words = words_ptr + tl.cast(row, tl.int64) * slices
        told = (_bits(product) << 32) | (_bits(total) & 0xFFFFFFFF)
        told = tl.where(told == 0, -(2**63), told)  # a product of -0.0, which as a number Triton would make 0.0
        tl.atomic_xchg(words + own, told, sem="relaxed")
        x, dy = _hold(x), _hold(dy)
        xhat, rstd = _xhat(x, stats_ptr, out_m, mask, LAYER)
        g = dy.to(tl.float32)
        dw += g * xhat
        if db_ptr is not None:
            db += g
        if w_ptr is not None:
            g *= _scale(_hold(w), offset)
        word = tl.inline_asm_elementwise(
            "{ .reg .pred none; wait: ld.relaxed.gpu.global.b64 $0, [$1]; setp.eq.s64 none, $0, 0; @none bra wait; }",
            "=l,l", [words + tl.minimum(offs_s, slices - 1)], dtype=tl.int64, is_pure=False, pack=1,
        )  # fmt: skip
        dx = g - xhat * (tl.sum(tl.where(offs_s < slices, _number(word >> 32), 0.0), axis=0) / N)
        if LAYER:
            dx -= tl.sum(tl.where(offs_s < slices, _number(word), 0.0), axis=0) / N
        store_dx(dx * rstd, ds_ptr, ds_strides, dx_ptr, a, b, offs_m, out_m, N, offs_n, mask, tl.float32)
    store_parts(dw_ptr, db_ptr, tl.sum(dw, axis=0), tl.sum(db, axis=0), group, N, offs_n)


def takes(layer, N, compute, device):
    """Whether rows of this width go through the kernel above."""
    return device.arch == "sm90" and compute == torch.float32 and (8192 if layer else 16384) < N <= 2**18


def backward(layer, dy, x, ds, weight, saved, layout, dx, need_dw, need_db, device, offset=0.0):
    """dx is written; returns partial sums of the weight and bias gradients."""
    tile = plan(layer, layout.N)
    n_rows, slices = layout.A * layout.B * layout.M, cdiv(layout.N, tile.BLOCK_N)
    groups = min(tile.programs * device.multiprocessors // slices, n_rows)
    words = torch.zeros((n_rows, slices), dtype=torch.int64, device=x.device)
    dw = saved.new_empty((groups, layout.N)) if need_dw else None
    db = saved.new_empty((groups, layout.N)) if need_db else None
    launch(
        _norm_bwd_kernel_sm90,
        (groups * slices,),
        x.device,
        (dy, x, packed(weight), saved, words, ds, dx, dw, db, layout.B, layout.M, layout.N, n_rows, slices,
         layout.strides[0], layout.strides[1], layout.strides[-1], offset or None),  # Gemma's alone costs an addition
        LAYER=layer, BLOCK_N=tile.BLOCK_N, BLOCK_S=next_power_of_2(slices), STAGES=tile.STAGES,
        num_warps=tile.num_warps, maxnreg=tile.registers, launch_cooperative_grid=True,
    )  # fmt: skip
    return dw, db
