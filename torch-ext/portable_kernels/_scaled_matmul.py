"""Kernels of products of float8 matrices, and their tile plans.

One for any strides, one whose tiles are copied in bulk; for Hopper GPUs one more, in _scaled_matmul_sm90.py; and where
that was measured to be faster, torch's own.
"""

from typing import NamedTuple

import torch

from . import _tuning
from ._device import facts, launch
from ._fp8 import FORMATS, decode, multiplied_as
from ._quantize import GROUP
from ._tiles import tile_of
from ._triton import GLUON, TensorDescriptor, cdiv, round_to, tl, triton


class Plan(NamedTuple):
    """kind: "pointer" (any strides, a tile a program); "descriptor" (bulk copies of tiles, programs that walk them);
    "sm90" (as that, sums in float32); "vendor" (torch's own product)."""

    kind: str
    BLOCK_M: int = 128
    BLOCK_N: int = 128
    BLOCK_K: int = 128
    num_warps: int = 4
    num_stages: int = 1
    GROUP_M: int = 8
    SUBTILES: int = 1  # parts of N that a tile of "descriptor" is stored in
    FLATTEN: bool = True  # the next tile's operands are on their way while this one is stored
    PER_SM: int = 1  # programs that share a multiprocessor


def fits(plan, device, dtype, *, out_bytes, blocks, vendor=False, gluon=GLUON, **sizes):
    """out_bytes: of an element of the result. vendor: whether torch has such a product. gluon: whether Gluon serves."""
    M, N, K = plan.BLOCK_M, plan.BLOCK_N, plan.BLOCK_K
    stages = _tuning.shared_bytes(M, N, K, plan.num_stages, 1)
    if plan.kind == "vendor":
        return vendor
    if plan.kind == "sm90":
        parts = M // 128 * cdiv(N, 128)
        beside = 128 * min(N, 128) * out_bytes
        if not gluon or device.arch != "sm90" or out_bytes != 2 or (blocks and parts > 1):  # else it would spill
            return False
    elif plan.kind == "descriptor":
        beside = M * N // plan.SUBTILES * out_bytes  # the tile that is stored
        if not device.descriptors:
            return False
    else:
        beside = _tuning.shared_bytes(M, N, K, 1, 2)  # the tiles that are decoded
    return (
        stages + beside + 512 * (plan.kind != "pointer") <= device.shared_memory and plan.num_warps <= device.max_warps
    )


@triton.jit
def _dot(a, b, acc, A: tl.constexpr, B: tl.constexpr, AS: tl.constexpr, IMPRECISE: tl.constexpr):
    """acc + a @ b of float8 tiles or of their codes. A, B: (mantissa, fnuz)."""
    if AS is not None:
        a = decode(a, A[0], A[1]).to(AS)
        b = decode(b, B[0], B[1]).to(AS)
    if IMPRECISE:
        return tl.dot(a, b, acc, max_num_imprecise_acc=IMPRECISE)
    else:
        return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def _scales(ptr, strides, offs, start_k, size, GROUP_ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Scales of rows (or columns) `offs`, for the block of K that start_k is in. strides: of one row, one block."""
    ptr += tl.cast(start_k // 128, tl.int64) * strides[1]
    if GROUP_ROWS > 1 and BLOCK <= GROUP_ROWS:  # a tile does not straddle squares
        return tl.load(ptr + tl.min(offs, axis=0) // GROUP_ROWS * strides[0])
    else:
        return tl.load(ptr + offs // GROUP_ROWS * strides[0], mask=offs < size, other=0.0)


@triton.jit
def _scale_rows(x, scale):
    if scale.type.is_block():
        return x * scale[:, None]
    else:
        return x * scale


@triton.jit
def _scale_columns(x, scale):
    if scale.type.is_block():
        return x * scale[None, :]
    else:
        return x * scale


@triton.jit
def _step(
    a, b, acc, sa_ptr, sb_ptr, sa_strides, sb_strides, offs_m, offs_n, start_k, M, N,
    A: tl.constexpr, B: tl.constexpr, AS: tl.constexpr, IMPRECISE: tl.constexpr,
    A_ROWS: tl.constexpr, B_ROWS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """acc with one more step of K. A_ROWS, B_ROWS: rows that share a scale of a block of K; 0 where K has no blocks."""
    if A_ROWS or B_ROWS:
        part = _dot(a, b, tl.zeros((BLOCK_M, BLOCK_N), tl.float32), A, B, AS, 0)
        if A_ROWS:
            part = _scale_rows(part, _scales(sa_ptr, sa_strides, offs_m, start_k, M, A_ROWS, BLOCK_M))
        if B_ROWS:
            part = _scale_columns(part, _scales(sb_ptr, sb_strides, offs_n, start_k, N, B_ROWS, BLOCK_N))
        return acc + part
    else:
        return _dot(a, b, acc, A, B, AS, IMPRECISE)


@triton.jit
def _finish(
    acc, sa_ptr, sb_ptr, bias_ptr, sa_strides, sb_strides, stride_bias, offs_m, offs_n, M, N,
    A_ROWS: tl.constexpr, B_ROWS: tl.constexpr,
):  # fmt: skip
    """What is done once to a tile: scales without blocks of K, and the bias."""
    if not A_ROWS:
        acc *= tl.load(sa_ptr + offs_m * sa_strides[0], mask=offs_m < M, other=0.0)[:, None]
    if not B_ROWS:
        acc *= tl.load(sb_ptr + offs_n * sb_strides[0], mask=offs_n < N, other=0.0)[None, :]
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + offs_n * stride_bias, mask=offs_n < N, other=0.0).to(tl.float32)[None, :]
    return acc


@triton.jit(do_not_specialize=["M", "tiles_m", "tiles_n"])
def _scaled_matmul_fwd_kernel(
    a_ptr, b_ptr, sa_ptr, sb_ptr, bias_ptr, out_ptr, M, N, K, tiles_m, tiles_n,
    a_strides, b_strides, sa_strides, sb_strides, stride_bias,
    A: tl.constexpr, B: tl.constexpr, AS: tl.constexpr, IMPRECISE: tl.constexpr,
    A_ROWS: tl.constexpr, B_ROWS: tl.constexpr, EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    """A tile a program. Operands of any strides: a's of (m, k), b's of (k, n)."""
    pid_m, pid_n = tile_of(tl.program_id(0), tiles_m, tiles_n, GROUP_M)
    offs_m = tl.cast(pid_m, tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = tl.cast(pid_n, tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_K)
    step_ak, step_bk = tl.cast(a_strides[1], tl.int64), tl.cast(b_strides[0], tl.int64)
    a_row = a_ptr + (offs_m * a_strides[0])[:, None]
    b_column = b_ptr + (offs_n * b_strides[1])[None, :]
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start_k in range(0, K, BLOCK_K):
        cols = start_k + offs_k
        mask_a, mask_b = (offs_m < M)[:, None], (offs_n < N)[None, :]
        if not EVEN_K:
            mask_a &= (cols < K)[None, :]
            mask_b &= (cols < K)[:, None]
        a = tl.load(a_row + (cols * step_ak)[None, :], mask=mask_a, other=0.0)
        b = tl.load(b_column + (cols * step_bk)[:, None], mask=mask_b, other=0.0)
        acc = _step(
            a, b, acc, sa_ptr, sb_ptr, sa_strides, sb_strides, offs_m, offs_n, start_k, M, N,
            A, B, AS, IMPRECISE, A_ROWS, B_ROWS, BLOCK_M, BLOCK_N,
        )  # fmt: skip
    acc = _finish(
        acc, sa_ptr, sb_ptr, bias_ptr, sa_strides, sb_strides, stride_bias, offs_m, offs_n, M, N, A_ROWS, B_ROWS
    )
    out = out_ptr + (offs_m * N)[:, None] + offs_n[None, :]
    mask = (offs_m < M)[:, None] & (offs_n < N)[None, :]
    tl.store(out, round_to(acc, out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _store_part(
    part, out, sa_ptr, sb_ptr, bias_ptr, sa_strides, sb_strides, stride_bias, offs_m, offs_n, first_m, first_n, M, N,
    A_ROWS: tl.constexpr, B_ROWS: tl.constexpr,
):  # fmt: skip
    part = _finish(
        part, sa_ptr, sb_ptr, bias_ptr, sa_strides, sb_strides, stride_bias, offs_m, offs_n, M, N, A_ROWS, B_ROWS
    )
    out.store([first_m, first_n], part.to(out.dtype))


@triton.jit(do_not_specialize=["M", "tiles_m", "tiles_n"])
def _scaled_matmul_fwd_kernel_descriptor(
    a, b, sa_ptr, sb_ptr, bias_ptr, out, M, N, K, tiles_m, tiles_n, sa_strides, sb_strides, stride_bias,
    IMPRECISE: tl.constexpr, A_ROWS: tl.constexpr, B_ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    SUBTILES: tl.constexpr, FLATTEN: tl.constexpr,
):  # fmt: skip
    """Programs that walk tiles. a, b and out are tensor descriptors: of (M, K), (N, K) and (M, N)."""
    PART: tl.constexpr = BLOCK_N // SUBTILES
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0), flatten=FLATTEN):
        pid_m, pid_n = tile_of(tile, tiles_m, tiles_n, GROUP_M)
        first_m, first_n = pid_m * BLOCK_M, pid_n * BLOCK_N
        offs_m = tl.cast(first_m, tl.int64) + tl.arange(0, BLOCK_M)
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for start_k in range(0, K, BLOCK_K):
            acc = _step(
                a.load([first_m, start_k]), b.load([first_n, start_k]).T, acc, sa_ptr, sb_ptr, sa_strides, sb_strides,
                offs_m, tl.cast(first_n, tl.int64) + tl.arange(0, BLOCK_N), start_k, M, N,
                None, None, None, IMPRECISE, A_ROWS, B_ROWS, BLOCK_M, BLOCK_N,
            )  # fmt: skip
        offs_n = tl.cast(first_n, tl.int64) + tl.arange(0, PART)
        if SUBTILES == 1:
            _store_part(
                acc, out, sa_ptr, sb_ptr, bias_ptr, sa_strides, sb_strides, stride_bias, offs_m, offs_n,
                first_m, first_n, M, N, A_ROWS, B_ROWS,
            )  # fmt: skip
        else:
            low, high = tl.split(tl.permute(tl.reshape(acc, (BLOCK_M, 2, PART)), (0, 2, 1)))
            _store_part(
                low, out, sa_ptr, sb_ptr, bias_ptr, sa_strides, sb_strides, stride_bias, offs_m, offs_n,
                first_m, first_n, M, N, A_ROWS, B_ROWS,
            )  # fmt: skip
            _store_part(
                high, out, sa_ptr, sb_ptr, bias_ptr, sa_strides, sb_strides, stride_bias, offs_m, offs_n + PART,
                first_m, first_n + PART, M, N, A_ROWS, B_ROWS,
            )  # fmt: skip


def _describable(t):
    """Whether tiles of a matrix of bytes can be copied in bulk."""
    return t.stride(1) == 1 and t.stride(0) > 0 and t.stride(0) % 16 == t.data_ptr() % 16 == 0


def rows_of_block(scale, size):
    """How many rows of an operand share a scale of a block of K; 0 where a scale is of whole rows.

    scale: (rows or fewer, blocks of K or 1).
    """
    if scale.shape[1] == 1 and scale.shape[0] in (1, size):
        return 0
    return 1 if scale.shape[0] == size else GROUP


def _strides(scale):
    """Of one row and one block of K, 0 where all share."""
    return tuple(0 if n == 1 else s for n, s in zip(scale.shape, scale.stride()))


def find_plan(device, a, b, M, N, K, fast, blocks, describable, out_bytes=2, vendor=False, gluon=GLUON):
    """The tile plan for operands of float8 types a and b."""
    return _tuning.find(
        "scaled_matmul", Plan, fits, device, a, M=M, N=N, K=K, fast=fast, blocks=blocks, describable=describable,
        native=multiplied_as(a, b, device.arch) is None, tiles=cdiv(M, 128) * cdiv(N, 128), out_bytes=out_bytes,
        vendor=vendor, gluon=gluon,
    )  # fmt: skip


def _vendor_serves(a, b, scale_a, scale_b, bias, out_dtype):
    """Whether torch has this product, of native types and one scale an operand."""
    return (
        hasattr(torch, "_scaled_mm")
        and scale_a.numel() == scale_b.numel() == 1
        and a.is_contiguous()
        and b.t().is_contiguous()
        and a.shape[1] % 16 == b.shape[1] % 16 == 0
        and max(*a.shape, b.shape[1]) < 2**31 - 1
        and not a.dtype == b.dtype == torch.float8_e5m2
        and (bias is None or (bias.dtype == out_dtype != torch.float32 and bias.is_contiguous()))
    )


@_tuning.falls_back
def scaled_matmul(a, b, scale_a, scale_b, bias, out_dtype, fast_accum, plan=None, *, given=None):
    """The product from the kernels. scale_a: (M or fewer, blocks of K or 1); scale_b: the same of N.

    given: the scales as the caller has them, for torch, which takes one element of any shape.
    """
    (M, K), N = a.shape, b.shape[1]
    device = facts(a.device)
    A_ROWS, B_ROWS = rows_of_block(scale_a, M), rows_of_block(scale_b, N)
    AS = multiplied_as(a.dtype, b.dtype, device.arch)
    if plan is None:
        out_bytes, blocks = out_dtype.itemsize, bool(A_ROWS or B_ROWS)
        describable = AS is None and K > 0 and N * out_bytes % 16 == 0 and _describable(a) and _describable(b.t())
        vendor = describable and M * N > 0 and _vendor_serves(a, b, scale_a, scale_b, bias, out_dtype)
        plan = find_plan(device, a.dtype, b.dtype, M, N, K, fast_accum, blocks, describable, out_bytes, vendor)
    if plan.kind == "vendor":
        return torch._scaled_mm(
            a, b, *(given or (scale_a, scale_b)), bias, out_dtype=out_dtype, use_fast_accum=fast_accum
        )
    out = torch.empty((M, N), dtype=out_dtype, device=a.device)
    if not out.numel():
        return out
    tiles_m, tiles_n = cdiv(M, plan.BLOCK_M), cdiv(N, plan.BLOCK_N)
    strides = (_strides(scale_a), _strides(scale_b), 0 if bias is None else bias.stride(0))
    if plan.kind == "sm90":
        from . import _scaled_matmul_sm90  # and with it Gluon

        rows = A_ROWS, B_ROWS
        return _scaled_matmul_sm90.scaled_matmul(a, b.t(), scale_a, scale_b, bias, out, rows, strides, plan)
    options = plan._asdict()
    kind, per_sm = options.pop("kind"), options.pop("PER_SM")
    # Sums on the tensor cores of Hopper have fewer bits than float32: every 128 of K they move to one.
    IMPRECISE = min(GROUP, plan.BLOCK_K) if device.arch == "sm90" and AS is None and not fast_accum else 0
    if kind == "descriptor":
        args = (
            TensorDescriptor.from_tensor(a, [plan.BLOCK_M, plan.BLOCK_K]),
            TensorDescriptor.from_tensor(b.t(), [plan.BLOCK_N, plan.BLOCK_K]),
            scale_a, scale_b, bias,
            TensorDescriptor.from_tensor(out, [plan.BLOCK_M, plan.BLOCK_N // plan.SUBTILES]),
            M, N, K, tiles_m, tiles_n, *strides,
        )  # fmt: skip
        programs = min(tiles_m * tiles_n, device.multiprocessors * per_sm)
        launch(
            _scaled_matmul_fwd_kernel_descriptor, (programs,), a.device, args,
            IMPRECISE=IMPRECISE, A_ROWS=A_ROWS, B_ROWS=B_ROWS, **options,
        )  # fmt: skip
        return out
    del options["SUBTILES"], options["FLATTEN"]
    if AS is None:
        codes = a, b
    else:  # one that is native beside one that is not is decoded too
        codes = a.view(torch.uint8), b.view(torch.uint8)
    launch(
        _scaled_matmul_fwd_kernel,
        (tiles_m * tiles_n,),
        a.device,
        (*codes, scale_a, scale_b, bias, out, M, N, K, tiles_m, tiles_n, a.stride(), b.stride(), *strides),
        A=FORMATS[a.dtype][:2], B=FORMATS[b.dtype][:2], AS=AS, IMPRECISE=IMPRECISE, A_ROWS=A_ROWS, B_ROWS=B_ROWS,
        EVEN_K=K % plan.BLOCK_K == 0, **options,
    )  # fmt: skip
    return out
