"""What the rotary ops share: operands by the names of their dimensions, tile plan, and kernels.

A tile is BLOCK_T tokens by BLOCK_H heads by BLOCK_R pairs, with the tables read once for its heads. A program takes a
tile of q and one of k. Dimensions are named b (batch), t (token), h (head), d.
"""

import functools
from typing import NamedTuple

import torch

from ._device import facts, launch
from ._norms import load_scale, packed
from ._rows import compute_dtype
from ._triton import cdiv, next_power_of_2, round_to, scalar, tl, triton, triton_dtype


@functools.lru_cache(4096)
def _named(values, layout, absent):
    """The values of (b, t, h, d), given those of the dimensions that `layout` names."""
    return tuple(values[layout.index(c)] if c in layout else absent for c in "bthd")


def _strides(t, layout):
    return (0,) * 4 if t is None else _named(t.stride(), layout, 0)


@functools.lru_cache(4096)
def _outer_strides(shape, strides, axes, ndim):
    """Strides of (axis, b, *the last ndim), of a table or of positions that may lack the first two."""
    given = [0 if n == 1 else s for n, s in zip(shape, strides)]
    axis = given.pop(0) if axes else 0
    return (axis, given[0] if len(given) > ndim else 0, *given[-ndim:])


class Plan(NamedTuple):
    BLOCK_T: int
    BLOCK_H: int  # heads of q
    BLOCK_K: int  # heads of k
    BLOCK_R: int  # pairs
    BLOCK_TAIL: int  # of the dimensions that are not rotated; 0 where there are none
    num_warps: int


def plan(S, HQ, HK, pairs, tail, whole_rows, backward=False):
    """All heads of a token, up to 4096 elements, 32 a thread of NVIDIA's; more tokens where heads are few.

    Of a copy, H200 bf16, 32 heads of 128 and 8: 0.91 to 0.94, and 0.84 with norms. The backward of norms has tiles of
    2048 elements: untuned. `whole_rows`: BLOCK_R and BLOCK_TAIL cover the row.
    """
    BLOCK_R, BLOCK_TAIL = next_power_of_2(pairs), next_power_of_2(tail) if tail else 0
    if not whole_rows:
        BLOCK_R, BLOCK_TAIL = min(BLOCK_R, 1024), min(BLOCK_TAIL, 2048)
    width = max(2 * BLOCK_R, BLOCK_TAIL)
    most = min(8, max(2048 // width, 1)) if backward else max(4096 // width, 1)
    BLOCK_H, BLOCK_K = (min(next_power_of_2(max(H, 1)), most) for H in (HQ, HK))
    BLOCK_T = min(next_power_of_2(S), max(2048 // (width * max(BLOCK_H, BLOCK_K)), 1))
    return Plan(BLOCK_T, BLOCK_H, BLOCK_K, BLOCK_R, BLOCK_TAIL, 4 if BLOCK_R <= 1024 else 8)


@triton.jit
def _columns(offs_r, R2, INTERLEAVED: tl.constexpr):
    """Where the two members of a pair lie."""
    first = offs_r
    second = offs_r + R2
    if INTERLEAVED:
        first = 2 * offs_r
        second = first + 1
    return first, second


@triton.jit
def _sequence_of(cu_ptr, offs_t, mask_t, n_sequences, steps):
    """The last sequence that starts at or before each token, by bisection."""
    low = tl.zeros_like(offs_t)
    high = low + (n_sequences - 1)
    for _ in range(steps):
        middle = (low + high + 1) // 2
        started = tl.load(cu_ptr + middle, mask=mask_t, other=0) <= offs_t
        low = tl.where(started, middle, low)
        high = tl.where(started, high, middle - 1)
    return low


@triton.jit
def _load_tables(
    cos_ptr, sin_ptr, positions_ptr, offsets_ptr, cu_ptr, b, offs_t, mask_t, offs_r, P, n_sequences, steps,
    cos_strides, sin_strides, position_strides, ends,
    R2: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr, INVERSE: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    """(cos, sin) of the first and of the second members of the pairs, each (BLOCK_T, 1, BLOCK_R)."""
    axis = tl.zeros((1, 1), tl.int64)
    if ends is not None:
        axis = (tl.cast(offs_r >= ends[0], tl.int64) + tl.cast(offs_r >= ends[1], tl.int64))[None, :]
    if positions_ptr is not None:
        where = positions_ptr + axis * position_strides[0] + b * position_strides[1]
        p = tl.load(where + offs_t[:, None] * position_strides[2], mask=mask_t[:, None], other=0).to(tl.int64)
    else:
        p = offs_t
        if cu_ptr is not None:
            sequence = _sequence_of(cu_ptr, offs_t, mask_t, n_sequences, steps)
            p -= tl.load(cu_ptr + sequence, mask=mask_t, other=0)
            if offsets_ptr is not None:
                p += tl.load(offsets_ptr + sequence, mask=mask_t, other=0)
        elif offsets_ptr is not None:
            p += tl.load(offsets_ptr + b)
        p = p[:, None]
    inside = (p >= 0) & (p < P)
    mask = (mask_t[:, None] & (offs_r < R2)[None, :]) & inside
    first, second = _columns(tl.cast(offs_r, tl.int64)[None, :], R2, INTERLEAVED)
    if HALF:
        first = tl.cast(offs_r, tl.int64)[None, :]
        second = first
    cos_row = cos_ptr + axis * cos_strides[0] + b * cos_strides[1] + p * cos_strides[2]
    sin_row = sin_ptr + axis * sin_strides[0] + b * sin_strides[1] + p * sin_strides[2]
    cos_1 = tl.load(cos_row + first * cos_strides[3], mask=mask, other=0.0).to(COMPUTE)
    sin_1 = tl.load(sin_row + first * sin_strides[3], mask=mask, other=0.0).to(COMPUTE)
    if HALF:
        cos_2 = cos_1
        sin_2 = sin_1
    else:
        cos_2 = tl.load(cos_row + second * cos_strides[3], mask=mask, other=0.0).to(COMPUTE)
        sin_2 = tl.load(sin_row + second * sin_strides[3], mask=mask, other=0.0).to(COMPUTE)
    if positions_ptr is not None or cu_ptr is not None or offsets_ptr is not None:
        cos_1 = tl.where(inside, cos_1, float("nan"))  # a position that the table lacks shows, and is not read
        cos_2 = tl.where(inside, cos_2, float("nan"))
    if INVERSE:  # the transpose of the rotation, also where the table's halves differ
        swap = sin_1
        sin_1 = -sin_2
        sin_2 = -swap
    return cos_1[:, None, :], sin_1[:, None, :], cos_2[:, None, :], sin_2[:, None, :]


@triton.jit
def _tile_index(tile, tiles_h, tiles_c, tiles_t, BLOCK_T: tl.constexpr):
    """(tile_h, tile_c, b, offs_t). Heads of a token are neighbours, so that its tables stay in cache."""
    tile_h = tile % tiles_h
    tile_c = tile // tiles_h % tiles_c
    outer = tile // tiles_h // tiles_c
    offs_t = tl.cast(outer % tiles_t, tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    return tile_h, tile_c, tl.cast(outer // tiles_t, tl.int64), offs_t


@triton.jit
def _rows_of(ptr, strides, b, offs_t, offs_h):
    """Pointers to the rows of a tile, (BLOCK_T, BLOCK_H, 1)."""
    return (ptr + b * strides[0] + (offs_t * strides[1])[:, None] + (offs_h * strides[2])[None, :])[:, :, None]


@triton.jit
def _load_pairs(
    rows, step, mask_m, tile_c, R2: tl.constexpr, INTERLEAVED: tl.constexpr, COMPUTE: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """The first and the second members of the pairs, each (BLOCK_T, BLOCK_H, BLOCK_R)."""
    if INTERLEAVED:  # in one load along memory, parted in registers
        cols = tl.cast(tile_c, tl.int64) * (2 * BLOCK_R) + tl.arange(0, 2 * BLOCK_R)
        x = tl.load(rows + (cols * step)[None, None, :], mask=mask_m & (cols < 2 * R2)[None, None, :], other=0.0)
        first, second = tl.split(tl.reshape(x, (BLOCK_T, BLOCK_H, BLOCK_R, 2)))
    else:
        cols = tl.cast(tile_c, tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
        mask = mask_m & (cols < R2)[None, None, :]
        first = tl.load(rows + (cols * step)[None, None, :], mask=mask, other=0.0)
        second = tl.load(rows + ((cols + R2) * step)[None, None, :], mask=mask, other=0.0)
    return first.to(COMPUTE), second.to(COMPUTE)


@triton.jit
def _store_pairs(
    rows, step, mask_m, tile_c, first, second, dtype: tl.constexpr, R2: tl.constexpr, INTERLEAVED: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    first = round_to(first, dtype)
    second = round_to(second, dtype)
    if INTERLEAVED:
        cols = tl.cast(tile_c, tl.int64) * (2 * BLOCK_R) + tl.arange(0, 2 * BLOCK_R)
        both = tl.reshape(tl.join(first, second), (BLOCK_T, BLOCK_H, 2 * BLOCK_R))
        tl.store(rows + (cols * step)[None, None, :], both, mask=mask_m & (cols < 2 * R2)[None, None, :])
    else:
        cols = tl.cast(tile_c, tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
        mask = mask_m & (cols < R2)[None, None, :]
        tl.store(rows + (cols * step)[None, None, :], first, mask=mask)
        tl.store(rows + ((cols + R2) * step)[None, None, :], second, mask=mask)


@triton.jit
def _load_tail(rows, step, mask_m, cols, D, COMPUTE: tl.constexpr):
    return tl.load(
        rows + (tl.cast(cols, tl.int64) * step)[None, None, :], mask=mask_m & (cols < D)[None, None, :], other=0.0
    ).to(COMPUTE)


@triton.jit
def _rstd(first, second, tail, D, eps):
    squares = tl.sum(first * first, axis=2) + tl.sum(second * second, axis=2) + tl.sum(tail * tail, axis=2)
    return tl.rsqrt(squares / D + eps)[:, :, None]


@triton.jit
def _weighted(
    xhat, w_ptr, offset, cols, mask_n, X_DTYPE: tl.constexpr, NORM_DTYPE: tl.constexpr, BEFORE_WEIGHT: tl.constexpr,
    COMPUTE: tl.constexpr,
):  # fmt: skip
    """What rms_norm gives for x * rstd, with its roundings."""
    if BEFORE_WEIGHT:
        xhat = round_to(xhat, X_DTYPE).to(COMPUTE)
    return round_to(xhat * load_scale(w_ptr, offset, cols, mask_n, COMPUTE)[None, :, :], NORM_DTYPE).to(COMPUTE)


@triton.jit
def _rotate_tile(
    x_ptr, y_ptr, w_ptr, x_strides, y_strides, H, b, offs_t, mask_t, tile_h, tile_c, cos_1, sin_1, cos_2, sin_2,
    eps, offset,
    D: tl.constexpr, R2: tl.constexpr, INTERLEAVED: tl.constexpr, NORM_DTYPE: tl.constexpr,
    BEFORE_WEIGHT: tl.constexpr, COMPUTE: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_TAIL: tl.constexpr,
):  # fmt: skip
    offs_h = tl.cast(tile_h, tl.int64) * BLOCK_H + tl.arange(0, BLOCK_H)
    mask_m = (mask_t[:, None] & (offs_h < H)[None, :])[:, :, None]
    x_rows = _rows_of(x_ptr, x_strides, b, offs_t, offs_h)
    y_rows = _rows_of(y_ptr, y_strides, b, offs_t, offs_h)
    first, second = _load_pairs(
        x_rows, x_strides[3], mask_m, tile_c, R2, INTERLEAVED, COMPUTE, BLOCK_T, BLOCK_H, BLOCK_R
    )
    tail = tl.zeros((1, 1, 1), COMPUTE)
    if BLOCK_TAIL:
        cols = 2 * R2 + tile_c * BLOCK_TAIL + tl.arange(0, BLOCK_TAIL)
        tail = _load_tail(x_rows, x_strides[3], mask_m, cols, D, COMPUTE)
    if NORM_DTYPE is not None:
        x_dtype: tl.constexpr = x_ptr.dtype.element_ty
        rstd = _rstd(first, second, tail, D, eps)
        offs_r = tl.arange(0, BLOCK_R)
        c1, c2 = _columns(offs_r, R2, INTERLEAVED)
        mask_r = offs_r < R2
        first = _weighted(first * rstd, w_ptr, offset, c1, mask_r, x_dtype, NORM_DTYPE, BEFORE_WEIGHT, COMPUTE)
        second = _weighted(second * rstd, w_ptr, offset, c2, mask_r, x_dtype, NORM_DTYPE, BEFORE_WEIGHT, COMPUTE)
        if BLOCK_TAIL:
            tail = _weighted(tail * rstd, w_ptr, offset, cols, cols < D, x_dtype, NORM_DTYPE, BEFORE_WEIGHT, COMPUTE)
    y_dtype: tl.constexpr = y_ptr.dtype.element_ty
    _store_pairs(
        y_rows, y_strides[3], mask_m, tile_c, first * cos_1 - second * sin_1, second * cos_2 + first * sin_2,
        y_dtype, R2, INTERLEAVED, BLOCK_T, BLOCK_H, BLOCK_R,
    )  # fmt: skip
    if BLOCK_TAIL:
        where = y_rows + (tl.cast(cols, tl.int64) * y_strides[3])[None, None, :]
        tl.store(where, round_to(tail, y_dtype), mask=mask_m & (cols < D)[None, None, :])


@triton.jit(do_not_specialize=["S", "P", "HQ", "HK", "tiles_t", "n_sequences", "steps"])
def _rotary_fwd_kernel(
    q_ptr, k_ptr, yq_ptr, yk_ptr, wq_ptr, wk_ptr, cos_ptr, sin_ptr, positions_ptr, offsets_ptr, cu_ptr,
    S, P, HQ, HK, tiles_t, tiles_c, tiles_h, tiles_q, tiles_k, n_sequences, steps,
    q_strides, k_strides, yq_strides, yk_strides, cos_strides, sin_strides, position_strides, ends, eps, offset,
    D: tl.constexpr, R2: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr, INVERSE: tl.constexpr,
    Q_NORM: tl.constexpr, K_NORM: tl.constexpr, BEFORE_WEIGHT: tl.constexpr, COMPUTE: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_TAIL: tl.constexpr,
):  # fmt: skip
    """Q_NORM and K_NORM are the dtypes in which the norms before the rotation are rounded, or None without norms."""
    tile_h, tile_c, b, offs_t = _tile_index(tl.program_id(0), tiles_h, tiles_c, tiles_t, BLOCK_T)
    mask_t = offs_t < S
    cos_1, sin_1, cos_2, sin_2 = _load_tables(
        cos_ptr, sin_ptr, positions_ptr, offsets_ptr, cu_ptr, b, offs_t, mask_t,
        tile_c * BLOCK_R + tl.arange(0, BLOCK_R), P, n_sequences, steps, cos_strides, sin_strides, position_strides,
        ends, R2, HALF, INTERLEAVED, INVERSE, COMPUTE,
    )  # fmt: skip
    if tile_h < tiles_q:
        _rotate_tile(
            q_ptr, yq_ptr, wq_ptr, q_strides, yq_strides, HQ, b, offs_t, mask_t, tile_h, tile_c,
            cos_1, sin_1, cos_2, sin_2, eps, offset,
            D, R2, INTERLEAVED, Q_NORM, BEFORE_WEIGHT, COMPUTE, BLOCK_T, BLOCK_H, BLOCK_R, BLOCK_TAIL,
        )  # fmt: skip
    if k_ptr is not None:
        if tile_h < tiles_k:
            _rotate_tile(
                k_ptr, yk_ptr, wk_ptr, k_strides, yk_strides, HK, b, offs_t, mask_t, tile_h, tile_c,
                cos_1, sin_1, cos_2, sin_2, eps, offset,
                D, R2, INTERLEAVED, K_NORM, BEFORE_WEIGHT, COMPUTE, BLOCK_T, BLOCK_K, BLOCK_R, BLOCK_TAIL,
            )  # fmt: skip


@triton.jit
def _store_part(dw_ptr, pid, D, cols, mask, acc):
    """Sum a tile-shaped accumulator over tokens and heads into this program's row of partial sums."""
    part = tl.sum(tl.sum(acc, axis=0), axis=0)
    tl.store(dw_ptr + tl.cast(pid, tl.int64) * D + cols, part, mask=mask)


@triton.jit(do_not_specialize=["S", "H", "tiles_t", "n_tiles"])
def _norm_rotary_bwd_kernel(
    dy_ptr, x_ptr, w_ptr, cos_ptr, sin_ptr, dx_ptr, dw_ptr, S, H, tiles_t, tiles_h, n_tiles,
    dy_strides, x_strides, dx_strides, cos_strides, sin_strides, eps, offset,
    D: tl.constexpr, R2: tl.constexpr, INTERLEAVED: tl.constexpr, COMPUTE: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_TAIL: tl.constexpr,
):  # fmt: skip
    """Gradient of one tensor. Each program walks tiles and keeps its share of the weight gradient in registers."""
    pid = tl.program_id(0)
    offs_r = tl.arange(0, BLOCK_R)
    mask_r = offs_r < R2
    c1, c2 = _columns(offs_r, R2, INTERLEAVED)
    scale_1 = load_scale(w_ptr, offset, c1, mask_r, COMPUTE)[None, :, :]
    scale_2 = load_scale(w_ptr, offset, c2, mask_r, COMPUTE)[None, :, :]
    acc_1 = tl.zeros((BLOCK_T, BLOCK_H, BLOCK_R), COMPUTE)
    acc_2 = tl.zeros((BLOCK_T, BLOCK_H, BLOCK_R), COMPUTE)
    if BLOCK_TAIL:
        cols = 2 * R2 + tl.arange(0, BLOCK_TAIL)
        scale_tail = load_scale(w_ptr, offset, cols, cols < D, COMPUTE)[None, :, :]
        acc_tail = tl.zeros((BLOCK_T, BLOCK_H, BLOCK_TAIL), COMPUTE)
    for tile in range(pid, n_tiles, tl.num_programs(0)):
        tile_h, _, b, offs_t = _tile_index(tile, tiles_h, 1, tiles_t, BLOCK_T)
        mask_t = offs_t < S
        cos_1, sin_1, cos_2, sin_2 = _load_tables(
            cos_ptr, sin_ptr, None, None, None, b, offs_t, mask_t, offs_r, S, 1, 1,
            cos_strides, sin_strides, None, None, R2, False, INTERLEAVED, True, COMPUTE,
        )  # fmt: skip
        offs_h = tl.cast(tile_h, tl.int64) * BLOCK_H + tl.arange(0, BLOCK_H)
        mask_m = (mask_t[:, None] & (offs_h < H)[None, :])[:, :, None]
        x_rows = _rows_of(x_ptr, x_strides, b, offs_t, offs_h)
        dy_rows = _rows_of(dy_ptr, dy_strides, b, offs_t, offs_h)
        dx_rows = _rows_of(dx_ptr, dx_strides, b, offs_t, offs_h)
        x_1, x_2 = _load_pairs(x_rows, x_strides[3], mask_m, 0, R2, INTERLEAVED, COMPUTE, BLOCK_T, BLOCK_H, BLOCK_R)
        dy_1, dy_2 = _load_pairs(dy_rows, dy_strides[3], mask_m, 0, R2, INTERLEAVED, COMPUTE, BLOCK_T, BLOCK_H, BLOCK_R)
        x_tail = tl.zeros((1, 1, 1), COMPUTE)
        if BLOCK_TAIL:
            x_tail = _load_tail(x_rows, x_strides[3], mask_m, cols, D, COMPUTE)
            g_tail = _load_tail(dy_rows, dy_strides[3], mask_m, cols, D, COMPUTE)
        rstd = _rstd(x_1, x_2, x_tail, D, eps)
        x_1 *= rstd
        x_2 *= rstd
        g_1 = dy_1 * cos_1 - dy_2 * sin_1
        g_2 = dy_2 * cos_2 + dy_1 * sin_2
        if dw_ptr is not None:
            acc_1 += g_1 * x_1
            acc_2 += g_2 * x_2
        g_1 *= scale_1
        g_2 *= scale_2
        products = tl.sum(g_1 * x_1, axis=2) + tl.sum(g_2 * x_2, axis=2)
        if BLOCK_TAIL:
            x_tail *= rstd
            if dw_ptr is not None:
                acc_tail += g_tail * x_tail
            g_tail *= scale_tail
            products += tl.sum(g_tail * x_tail, axis=2)
        projection = (products / D)[:, :, None]
        dx_dtype: tl.constexpr = dx_ptr.dtype.element_ty
        _store_pairs(
            dx_rows, dx_strides[3], mask_m, 0, (g_1 - x_1 * projection) * rstd, (g_2 - x_2 * projection) * rstd,
            dx_dtype, R2, INTERLEAVED, BLOCK_T, BLOCK_H, BLOCK_R,
        )  # fmt: skip
        if BLOCK_TAIL:
            where = dx_rows + (tl.cast(cols, tl.int64) * dx_strides[3])[None, None, :]
            dx_tail = round_to((g_tail - x_tail * projection) * rstd, dx_dtype)
            tl.store(where, dx_tail, mask=mask_m & (cols < D)[None, None, :])
    if dw_ptr is not None:
        _store_part(dw_ptr, pid, D, c1, mask_r, acc_1)
        _store_part(dw_ptr, pid, D, c2, mask_r, acc_2)
        if BLOCK_TAIL:
            _store_part(dw_ptr, pid, D, cols, cols < D, acc_tail)


@functools.lru_cache(4096)
def _tiles(q_shape, q_layout, k_shape, k_layout, rotary_dim, whole_rows, backward=False):
    """(programs, (S, HQ, HK, tiles of t, columns, heads, q and k), constants of the kernels)."""
    B, S, HQ, D = _named(q_shape, q_layout, 1)
    HK = 0 if k_shape is None else _named(k_shape, k_layout, 1)[2]
    tile = plan(S, HQ, HK, rotary_dim // 2, D - rotary_dim, whole_rows, backward)
    tiles_t, tiles_q, tiles_k = cdiv(S, tile.BLOCK_T), cdiv(HQ, tile.BLOCK_H), cdiv(HK, tile.BLOCK_K)
    tiles_c = max(cdiv(rotary_dim // 2, tile.BLOCK_R), cdiv(D - rotary_dim, max(tile.BLOCK_TAIL, 1)), 1)
    tiles_h = max(tiles_q, tiles_k)
    constants = {"D": D, "R2": rotary_dim // 2, **tile._asdict()}
    return B * tiles_t * tiles_c * tiles_h, (S, HQ, HK, tiles_t, tiles_c, tiles_h, tiles_q, tiles_k), constants


def rotate(
    q, k, cos, sin, q_layout, k_layout, dtypes, rotary_dim, interleaved, *, inverse=False, position_ids=None,
    offsets=None, cu_seqlens=None, sections=(), weights=(None, None), norms=(None, None), eps=0.0, offset=0.0,
    before_weight=False,
):  # fmt: skip
    """q and k rotated, contiguous in their layouts, in one launch; without k the second is empty.

    With `norms`, the dtypes that the norms round to, each head is normalised first.
    """
    yq = torch.empty(q.shape, dtype=dtypes[0], device=q.device)
    yk = torch.empty((0,) if k is None else k.shape, dtype=dtypes[1], device=q.device)
    if not q.numel() and not yk.numel():
        return yq, yk
    compute = compute_dtype(q, k, cos, sin, *weights)
    k_shape, out_k = (None, None) if k is None else (k.shape, yk)
    programs, (S, *counts), constants = _tiles(q.shape, q_layout, k_shape, k_layout, rotary_dim, norms[0] is not None)
    axes = bool(sections)
    n_sequences = 1 if cu_seqlens is None else cu_seqlens.numel() - 1
    launch(
        _rotary_fwd_kernel,
        (programs,),
        q.device,
        (q, k, yq, out_k, packed(weights[0]), packed(weights[1]), cos, sin,
         position_ids, packed(offsets), packed(cu_seqlens),
         S, cos.shape[-2], *counts, n_sequences, n_sequences.bit_length(),
         _strides(q, q_layout), _strides(k, k_layout), _strides(yq, q_layout), _strides(out_k, k_layout),
         _outer_strides(cos.shape, cos.stride(), axes and position_ids is None, 2),
         _outer_strides(sin.shape, sin.stride(), axes and position_ids is None, 2),
         None if position_ids is None else _outer_strides(position_ids.shape, position_ids.stride(), axes, 1),
         (sections[0], sections[0] + sections[1]) if axes else None,
         scalar(eps, compute), scalar(offset, compute)),
        HALF=cos.shape[-1] != rotary_dim, INTERLEAVED=interleaved, INVERSE=inverse,
        Q_NORM=norms[0] and triton_dtype(norms[0]), K_NORM=norms[1] and triton_dtype(norms[1]),
        BEFORE_WEIGHT=before_weight, COMPUTE=triton_dtype(compute), **constants,
    )  # fmt: skip
    return yq, yk


def norm_rotary_backward(dy, x, weight, cos, sin, layout, interleaved, eps, offset, need_dw):
    """(dx, contiguous in its layout, and the weight's gradient, empty if not needed)."""
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    parts = None
    if x.numel():
        compute = compute_dtype(dy, x, weight, cos, sin)
        n_tiles, (S, H, _, tiles_t, _, tiles_h, *_), constants = _tiles(
            x.shape, layout, None, layout, cos.shape[-1], True, True
        )
        constants = {name: value for name, value in constants.items() if name != "BLOCK_K"}
        programs = min(n_tiles, 8 * facts(x.device).multiprocessors)  # 32 warps a multiprocessor: untuned
        parts = torch.empty((programs, x.shape[-1]), dtype=compute, device=x.device) if need_dw else None
        launch(
            _norm_rotary_bwd_kernel,
            (programs,),
            x.device,
            (dy, x, packed(weight), cos, sin, dx, parts, S, H, tiles_t, tiles_h, n_tiles,
             _strides(dy, layout), _strides(x, layout), _strides(dx, layout),
             _outer_strides(cos.shape, cos.stride(), False, 2), _outer_strides(sin.shape, sin.stride(), False, 2),
             scalar(eps, compute), scalar(offset, compute)),
            INTERLEAVED=interleaved, COMPUTE=triton_dtype(compute), **constants,
        )  # fmt: skip
    if not need_dw:
        return dx, x.new_empty(0)
    return dx, weight.new_zeros(weight.shape) if parts is None else parts.sum(0).to(weight.dtype)
