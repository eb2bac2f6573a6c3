"""Kernels of grouped products, of which a group's place is read from offsets on the device.

Rows in groups: `_grouped_mm_fwd_kernel_places` writes down which rows each row of tiles covers, and the product's
programs walk that list. K in groups: each group is a matrix of its own, a sum over its share of K.
"""

from typing import NamedTuple

import torch

from . import _tuning
from ._device import facts, float32_precision, launch
from ._rows import compute_dtype
from ._tiles import columns, dot, tile_of
from ._triton import TensorDescriptor, cdiv, next_power_of_2, round_to, tl, triton, triton_dtype


class Plan(NamedTuple):
    """kind: "descriptor" (tiles are copied in bulk), "pointer" (any strides) or "vendor" (torch's own product)."""

    kind: str
    BLOCK_M: int = 64
    BLOCK_N: int = 64
    BLOCK_K: int = 32
    num_warps: int = 4
    num_stages: int = 2
    GROUP_M: int = 8
    FLATTEN: bool = False
    PER_SM: int = 1  # programs that share a multiprocessor
    SUBTILES: int = 1  # parts that a tile of a product over shares of K is stored in


def fits(plan, device, dtype, *, groups, vendor=False, **sizes):
    """vendor: whether torch has such a product."""
    if plan.kind == "vendor":
        return vendor
    if plan.kind == "descriptor" and not device.descriptors:
        return False
    used = _tuning.shared_bytes(plan.BLOCK_M, plan.BLOCK_N, plan.BLOCK_K, plan.num_stages, dtype.itemsize)
    if plan.kind == "descriptor" and groups == "shares":  # the part of a tile that is stored
        used += plan.BLOCK_M * plan.BLOCK_N // plan.SUBTILES * dtype.itemsize + 1024
    return used <= device.shared_memory and plan.num_warps <= device.max_warps


@triton.jit
def _bounds(offs_ptr, group, groups, size):
    """(start, end) of groups, which end where offs says and start where those before end; within 0 and size.

    Group number `groups` is what is left past the last offset. Others past it are empty.
    """
    start = tl.load(offs_ptr + group - 1, mask=(group > 0) & (group <= groups), other=0)
    end = tl.load(offs_ptr + group, mask=group < groups, other=0)
    start = tl.minimum(tl.maximum(start, 0), size).to(tl.int32)
    end = tl.where(group == groups, size, tl.minimum(tl.maximum(end, 0), size)).to(tl.int32)
    return start, tl.where(group > groups, start, tl.maximum(start, end))


@triton.jit(do_not_specialize=["size", "groups", "places"])
def _grouped_mm_fwd_kernel_places(
    offs_ptr, place_ptr, out_ptr, size, groups, places, N, out_strides,
    BLOCK_M: tl.constexpr, ALIGN: tl.constexpr, GROUPS: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """(group, first row, the group's start and end) of each row of tiles, how many there are, and zeros past the last
    group. Tiles begin at a multiple of ALIGN, which may be in the group before.
    """
    pid = tl.program_id(0)
    group = tl.arange(0, GROUPS)
    start, end = _bounds(offs_ptr, group, groups, size)
    begin = start // ALIGN * ALIGN
    tiles = tl.where((group < groups) & (start < end), (end - begin + BLOCK_M - 1) // BLOCK_M, 0)
    upto = tl.cumsum(tiles, axis=0)
    if pid == 0:  # offsets that fall could make more places than there is room for
        tl.store(place_ptr, tl.minimum(tl.max(upto, axis=0), places))
    place = pid * CHUNK + tl.arange(0, CHUNK)
    if pid * CHUNK < places:
        mine = tl.sum((upto[None, :] <= place[:, None]).to(tl.int32), axis=1)
        here = group[None, :] == mine[:, None]
        row = tl.sum(tl.where(here, (begin - (upto - tiles) * BLOCK_M)[None, :], 0), axis=1) + place * BLOCK_M
        mask = place < places
        tl.store(place_ptr + 1 + place * 4, mine, mask=mask)
        tl.store(place_ptr + 2 + place * 4, row, mask=mask)
        tl.store(place_ptr + 3 + place * 4, tl.sum(tl.where(here, start[None, :], 0), axis=1), mask=mask)
        tl.store(place_ptr + 4 + place * 4, tl.sum(tl.where(here, end[None, :], 0), axis=1), mask=mask)
    first = tl.sum(tl.where(group == groups, start, 0), axis=0)
    offs_n = tl.arange(0, BLOCK)
    for row in range(first + pid, size, tl.num_programs(0)):
        out_row = out_ptr + tl.cast(row, tl.int64) * out_strides[0]
        for n in range(0, N, BLOCK):
            cols = tl.cast(n + offs_n, tl.int64)
            tl.store(out_row + cols * out_strides[1], tl.zeros((BLOCK,), out_ptr.dtype.element_ty), mask=cols < N)


@triton.jit
def _bias(acc, bias_ptr, bias_strides, group, offs_n, N):
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + group * bias_strides[0] + offs_n * bias_strides[1], mask=offs_n < N, other=0.0)
        acc += bias.to(acc.dtype)[None, :]
    return acc


@triton.jit
def _load(desc, ptr, strides, outer, row, col, offs_row, offs_col, mask, TURNED: tl.constexpr, BATCHED: tl.constexpr):
    """A tile of an operand, by its descriptor (of the transposed matrix where TURNED) or by pointers."""
    if desc is None:
        where = (offs_row * strides[1])[:, None] + (offs_col * strides[2])[None, :]
        tile = tl.load(ptr + outer * strides[0] + where, mask=mask, other=0.0)
    else:
        if TURNED:
            row, col = col, row
        if BATCHED:
            tile = desc.load([outer.to(tl.int32), row, col])
            tile = tile.reshape((tile.shape[1], tile.shape[2]))
        else:
            tile = desc.load([row, col])
        if TURNED:
            tile = tile.T
    return tile


@triton.jit(do_not_specialize=["tiles_n"])
def _grouped_mm_fwd_kernel_rows(
    a_desc, b_desc, a_ptr, b_ptr, place_ptr, bias_ptr, out_ptr, N, K, tiles_n,
    a_strides, b_strides, bias_strides, out_strides,
    A_TURNED: tl.constexpr, B_TURNED: tl.constexpr, PRECISION: tl.constexpr, COMPUTE: tl.constexpr,
    EVEN_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr, FLATTEN: tl.constexpr,
):  # fmt: skip
    """Programs that walk the tiles of (T, K) rows in groups, times the group's (K, N)."""
    tiles_m = tl.load(place_ptr)
    offs_k = tl.arange(0, BLOCK_K)
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0), flatten=FLATTEN):
        pid_m, pid_n = tile_of(tile, tiles_m, tiles_n, GROUP_M)
        group = tl.load(place_ptr + 1 + pid_m * 4).to(tl.int64)
        first_m = tl.load(place_ptr + 2 + pid_m * 4)
        start = tl.load(place_ptr + 3 + pid_m * 4)
        end = tl.load(place_ptr + 4 + pid_m * 4)
        first_n = pid_n * BLOCK_N
        offs_m = tl.cast(first_m, tl.int64) + tl.arange(0, BLOCK_M)
        offs_n = tl.cast(first_n, tl.int64) + tl.arange(0, BLOCK_N)
        acc = tl.zeros((BLOCK_M, BLOCK_N), COMPUTE)
        for k in range(0, K, BLOCK_K):
            ks = tl.cast(k + offs_k, tl.int64)
            mask_a, mask_b = (offs_m < end)[:, None], (offs_n < N)[None, :]
            if not EVEN_K:
                mask_a = mask_a & (ks < K)[None, :]
                mask_b = mask_b & (ks < K)[:, None]
            a = _load(a_desc, a_ptr, a_strides, 0, first_m, k, offs_m, ks, mask_a, A_TURNED, False)
            b = _load(b_desc, b_ptr, b_strides, group, k, first_n, ks, offs_n, mask_b, B_TURNED, True)
            acc = dot(a, b, acc, PRECISION)
        acc = _bias(acc, bias_ptr, bias_strides, group, offs_n, N)
        out = out_ptr + (offs_m * out_strides[0])[:, None] + (offs_n * out_strides[1])[None, :]
        mask = ((offs_m >= start) & (offs_m < end))[:, None] & (offs_n < N)[None, :]
        tl.store(out, round_to(acc, out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["K", "groups", "tiles_m", "tiles_n"])
def _grouped_mm_fwd_kernel_shares(
    a_desc, b_desc, a_ptr, b_ptr, offs_ptr, bias_ptr, out_desc, out_ptr, M, N, K, groups, tiles_m, tiles_n,
    a_strides, b_strides, bias_strides,
    A_TURNED: tl.constexpr, B_TURNED: tl.constexpr, PRECISION: tl.constexpr, COMPUTE: tl.constexpr,
    ALIGN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    SUBTILES: tl.constexpr,
):  # fmt: skip
    """Programs that walk the tiles of all groups' (M, N), sums over the group's share of K, read from a multiple of
    ALIGN on. What lies in a tile before the group's start or past its end is another's, and may be NaN.
    """
    tiles = tiles_m * tiles_n
    offs_k = tl.arange(0, BLOCK_K)
    for tile in tl.range(tl.program_id(0), groups * tiles, tl.num_programs(0)):
        group = (tile // tiles).to(tl.int64)
        start, end = _bounds(offs_ptr, tile // tiles, groups, K)
        pid_m, pid_n = tile_of(tile % tiles, tiles_m, tiles_n, GROUP_M)
        first_m, first_n = pid_m * BLOCK_M, pid_n * BLOCK_N
        offs_m = tl.cast(first_m, tl.int64) + tl.arange(0, BLOCK_M)
        offs_n = tl.cast(first_n, tl.int64) + tl.arange(0, BLOCK_N)
        mask_m, mask_n = (offs_m < M)[:, None], (offs_n < N)[None, :]
        acc = tl.zeros((BLOCK_M, BLOCK_N), COMPUTE)
        first = start // ALIGN * ALIGN
        if first < start:
            ks = tl.cast(first + offs_k, tl.int64)
            mask_k = (ks >= start) & (ks < end)
            mask_a, mask_b = mask_m & mask_k[None, :], mask_k[:, None] & mask_n
            a = _load(a_desc, a_ptr, a_strides, 0, first_m, first, offs_m, ks, mask_a, A_TURNED, False)
            b = _load(b_desc, b_ptr, b_strides, 0, first, first_n, ks, offs_n, mask_b, B_TURNED, False)
            acc = dot(tl.where(mask_a, a, 0.0), tl.where(mask_b, b, 0.0), acc, PRECISION)
            first += BLOCK_K
        whole = first + tl.maximum(end - first, 0) // BLOCK_K * BLOCK_K
        for k in range(first, whole, BLOCK_K):
            ks = tl.cast(k + offs_k, tl.int64)
            a = _load(a_desc, a_ptr, a_strides, 0, first_m, k, offs_m, ks, mask_m, A_TURNED, False)
            b = _load(b_desc, b_ptr, b_strides, 0, k, first_n, ks, offs_n, mask_n, B_TURNED, False)
            acc = dot(a, b, acc, PRECISION)
        if whole < end:
            ks = tl.cast(whole + offs_k, tl.int64)
            mask_a, mask_b = mask_m & (ks < end)[None, :], (ks < end)[:, None] & mask_n
            a = _load(a_desc, a_ptr, a_strides, 0, first_m, whole, offs_m, ks, mask_a, A_TURNED, False)
            b = _load(b_desc, b_ptr, b_strides, 0, whole, first_n, ks, offs_n, mask_b, B_TURNED, False)
            acc = dot(tl.where(mask_a, a, 0.0), tl.where(mask_b, b, 0.0), acc, PRECISION)
        for part in tl.static_range(SUBTILES):
            at_n = first_n + part * (BLOCK_N // SUBTILES)
            offs_n = tl.cast(at_n, tl.int64) + tl.arange(0, BLOCK_N // SUBTILES)
            x = _bias(columns(acc, part, SUBTILES), bias_ptr, bias_strides, group, offs_n, N)
            x = round_to(x, out_ptr.dtype.element_ty)
            if out_desc is None:
                out = out_ptr + group * M * N + (offs_m * N)[:, None] + offs_n[None, :]
                tl.store(out, x, mask=mask_m & (offs_n < N)[None, :])
            else:
                out_desc.store([tile // tiles, first_m, at_n], x.reshape((1, x.shape[0], x.shape[1])))


def _turned(t):
    """Whether tiles of a matrix, or of each of a batch, can be copied in bulk: as it lies False, transposed True.

    None where they cannot.
    """
    if t.data_ptr() % 16 or 0 in t.shape:
        return None
    for turned, (step, unit) in ((False, t.stride()[-2:]), (True, t.stride()[:-3:-1])):
        if unit == 1 and all(s > 0 and s * t.element_size() % 16 == 0 for s in (step, *t.stride()[:-2])):
            return turned
    return None


def _descriptor(t, rows, columns, turned):
    if turned:
        t, rows, columns = t.mT, columns, rows
    return TensorDescriptor.from_tensor(t, [1] * (t.dim() - 2) + [rows, columns])


def _align(t, plan, inner):
    """What the tiles of a group begin at multiples of. Copies in bulk begin at 16 bytes of what lies contiguous, which
    a group need not: inner says whether groups divide that.
    """
    return 16 // t.element_size() if plan.kind == "descriptor" and inner else 1


def find_plan(device, dtype, groups, M, N, K, describable, vendor=False):
    """The tile plan. groups: "rows" or "shares"; M or K: that of a group, on average."""
    sizes = {"groups": groups, "M": M, "N": N, "K": K, "describable": describable, "vendor": vendor}
    return _tuning.find("grouped_mm", Plan, fits, device, dtype, **sizes)


def _plan(device, a, groups, M, N, K, turned, vendor=False):
    return find_plan(device, a.dtype, groups, M, N, K, None not in turned and a.dtype.itemsize == 2, vendor)


def _operands(a, b, plan, turned):
    """What the product's kernels are given of its operands: descriptors or Nones, then tensors."""
    if plan.kind != "descriptor":
        return None, None, a, b
    return (
        _descriptor(a, plan.BLOCK_M, plan.BLOCK_K, turned[0]), _descriptor(b, plan.BLOCK_K, plan.BLOCK_N, turned[1]),
        a, b,
    )  # fmt: skip


def _options(a, plan, turned, precision):
    turned = turned if plan.kind == "descriptor" else (False, False)
    options = plan._asdict()
    del options["kind"], options["PER_SM"], options["FLATTEN"], options["SUBTILES"]
    return {
        "A_TURNED": turned[0], "B_TURNED": turned[1], "PRECISION": precision,
        "COMPUTE": triton_dtype(compute_dtype(a)), **options,
    }  # fmt: skip


def precision_of(dtype, device):
    """How tiles of this dtype are multiplied: float32 as torch's own."""
    return float32_precision() if dtype == torch.float32 and device.tf32 else "ieee"


@_tuning.falls_back
def rows_in_groups(a, b, offs, bias, out, plan=None):
    """out (T, N) = rows of a (T, K) in groups, times b (G, K, N); bias (G, N). Rows past the last group are 0."""
    (T, K), (G, _, N) = a.shape, b.shape
    device = facts(a.device)
    turned = _turned(a), _turned(b)
    plan = plan or _plan(device, a, "rows", cdiv(T, max(G, 1)), N, K, turned)
    align = _align(a, plan, turned[0])
    places = cdiv(T + (align - 1) * G, plan.BLOCK_M) + G
    groups = next_power_of_2(G + 1)
    chunk = max(min(4096 // groups, next_power_of_2(places)), 1)
    place = torch.empty(1 + 4 * places, dtype=torch.int32, device=a.device)
    launch(
        _grouped_mm_fwd_kernel_places,
        (max(cdiv(places, chunk), device.multiprocessors),),
        a.device,
        (offs, place, out, T, G, places, N, out.stride()),
        BLOCK_M=plan.BLOCK_M, ALIGN=align, GROUPS=groups, CHUNK=chunk, BLOCK=1024, num_warps=4,
    )  # fmt: skip
    if not G:
        return out
    tiles_n = cdiv(N, plan.BLOCK_N)
    launch(
        _grouped_mm_fwd_kernel_rows,
        (min(places * tiles_n, device.multiprocessors * plan.PER_SM),),
        a.device,
        (*_operands(a, b, plan, turned), place, bias, out, N, K, tiles_n, (0, *a.stride()), b.stride(),
         (0, 0) if bias is None else bias.stride(), out.stride()),
        EVEN_K=K % plan.BLOCK_K == 0, FLATTEN=plan.FLATTEN, **_options(a, plan, turned, precision_of(a.dtype, device)),
    )  # fmt: skip
    return out


@_tuning.falls_back
def shares_of_k(a, b, offs, bias, out, plan=None):
    """out (G, M, N) = a (M, K) times b (K, N), over each group's share of K; bias (G, N). Returns out or torch's."""
    (M, K), (G, _, N) = a.shape, out.shape
    device = facts(a.device)
    turned = _turned(a), _turned(b)
    # torch reads a group from where it starts, at whole 16 bytes only where K does not lie contiguous.
    vendor = (
        hasattr(torch.nn.functional, "grouped_mm")
        and a.dtype == b.dtype == out.dtype == torch.bfloat16
        and bias is None
        and turned == (True, False)
        and N % 8 == 0
    )
    plan = plan or _plan(device, a, "shares", M, N, cdiv(K, max(G, 1)), turned, vendor)
    if plan.kind == "vendor":
        # It believes what it is told: offsets that fall, or lie past K, would be read beyond the operands.
        return torch.nn.functional.grouped_mm(a, b, offs=offs.clamp(0, K).cummax(0).values.int())
    tiles_m, tiles_n = cdiv(M, plan.BLOCK_M), cdiv(N, plan.BLOCK_N)
    bulk = plan.kind == "descriptor" and N * out.element_size() % 16 == 0
    out_desc = TensorDescriptor.from_tensor(out, [1, plan.BLOCK_M, plan.BLOCK_N // plan.SUBTILES]) if bulk else None
    align = _align(a, plan, not turned[0] or turned[1])
    launch(
        _grouped_mm_fwd_kernel_shares,
        (min(G * tiles_m * tiles_n, device.multiprocessors * plan.PER_SM),),
        a.device,
        (*_operands(a, b, plan, turned), offs, bias, out_desc, out, M, N, K, G, tiles_m, tiles_n,
         (0, *a.stride()), (0, *b.stride()), (0, 0) if bias is None else bias.stride()),
        ALIGN=align, SUBTILES=plan.SUBTILES, **_options(a, plan, turned, precision_of(a.dtype, device)),
    )  # fmt: skip
    return out
