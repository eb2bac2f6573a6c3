"""Matrix products with an epilogue, launched by plans.

Ways to the same result, of which configs/matmul.json picks one:

- "descriptors": persistent programs; tiles are copied in bulk by the device's copy engine.
- "pointers": any strides, any device.
- "rows": up to four rows, a plain sum of products that reads the matrix once.
- either of the first two with SPLIT_K: shares of K summed apart, then together in a fixed order by a second launch.
- "vendor": torch's product, and the epilogue as a pass of its own.
"""

import functools
from typing import NamedTuple

import torch

from . import _tuning
from ._device import facts, float32_precision, launch
from ._matmul_kernels import (
    _matmul_fwd_kernel_descriptors,
    _matmul_fwd_kernel_parts,
    _matmul_fwd_kernel_pointers,
    _matmul_fwd_kernel_rows,
)
from ._rows import collapse, compute_dtype
from ._triton import TensorDescriptor, cdiv, next_power_of_2, scalar, triton_dtype


class Plan(NamedTuple):
    kind: str
    BLOCK_M: int = 64
    BLOCK_N: int = 64
    BLOCK_K: int = 32
    GROUP_M: int = 8
    SPLIT_K: int = 1
    SUBTILES: int = 1  # parts that a tile's results are written in: less shared memory, more of it for operands
    PER_SM: int = 1  # programs that share a multiprocessor
    PAD: bool = False  # operands whose rows the copy engine cannot take are copied to rows that it can
    FLATTEN: bool = True  # the next tile's operands are on their way while this one's results are written
    num_warps: int = 4
    num_stages: int = 3


class Geometry(NamedTuple):
    """A product as the kernels see it: outer x inner products of (M, K) and (K, N), all operands by four strides."""

    outer: int
    inner: int
    M: int
    N: int
    K: int
    a: tuple
    b: tuple
    b2: tuple
    y: tuple
    residual: tuple


@functools.lru_cache(4096)
def geometry(batch, M, N, K, a, b, b2, y, residual):
    """The Geometry of operands whose strides are those of the whole batch; None where they do not collapse."""
    if not any(b[:-2]) and not (b2 and any(b2[:-2])):  # one matrix for all: their rows may be rows of one product
        sizes, steps = collapse((*batch, M), (a[:-1], y[:-1], residual[:-1]), list(range(len(batch) + 1)))
        if len(sizes) <= 1:
            rows = sizes[0] if sizes else 1
            strides = [(0, 0, step[0] if step else 0, whole[-1]) for step, whole in zip(steps, (a, y, residual))]
            return Geometry(1, 1, rows, N, K, strides[0], (0, 0, *b[-2:]), (0, 0, *b2[-2:]), strides[1], strides[2])
    sizes, steps = collapse(batch, (a, b, b2, y, residual), list(range(len(batch))))
    if len(sizes) > 2:
        return None
    lead = (0,) * (2 - len(sizes))
    strides = [(*lead, *step, *whole[-2:]) for step, whole in zip(steps, (a, b, b2, y, residual))]
    return Geometry(*(1,) * len(lead), *sizes, M, N, K, *strides)


def turned(t, strides, rows, cols):
    """How the copy engine can take this operand: False as it lies, True transposed; None where it cannot."""
    if strides[3] == 1:
        turn, major, size = False, strides[2], rows
    elif strides[2] == 1:
        turn, major, size = True, strides[3], cols
    else:
        return None
    unit = 16 // t.element_size()
    if t.data_ptr() % 16 or (size > 1 and (major <= 0 or major % unit)) or strides[0] % unit or strides[1] % unit:
        return None
    return turn


def vendor_takes(*numbers):
    """Whether sizes and steps are numbers of 32 bits, as vendors' libraries have them."""
    return max(numbers) < 2**31 - 1


def _batched(strides, outer, inner):
    """Whether an operand has a matrix for each product, or one for all; None for neither."""
    own = [stride != 0 for stride, size in zip(strides, (outer, inner)) if size > 1]
    return None if len(set(own)) > 1 else bool(own and own[0])


def _descriptor(t, strides, turn, batched, outer, inner, rows, cols, block_rows, block_cols):
    unit = 16 // t.element_size()
    sizes, steps, block = [rows, cols], [strides[2], strides[3]], [block_rows, block_cols]
    if turn:
        sizes, steps, block = sizes[::-1], steps[::-1], block[::-1]
    if sizes[0] == 1:  # its stride says nothing
        steps[0] = cdiv(sizes[1], unit) * unit
    steps[1] = 1
    if batched:
        lead = [s if n > 1 else steps[0] * sizes[0] for n, s in zip((outer, inner), strides)]
        return TensorDescriptor(t, [outer, inner, *sizes], [*lead, *steps], [1, 1, *block])
    return TensorDescriptor(t, sizes, steps, block)


def fits(plan, device, dtype, *, M, N, aligned, pads, gated, out_bytes, vendor, **_):
    """Whether the device can run the plan on such operands."""
    if plan.kind == "vendor":
        return vendor
    if plan.kind == "rows":
        return M <= 4 or (N <= 4 and not gated)
    if plan.num_warps > device.max_warps:
        return False
    sets = 2 if gated else 1
    operands = _tuning.shared_bytes(plan.BLOCK_M, plan.BLOCK_N * sets, plan.BLOCK_K, plan.num_stages, dtype.itemsize)
    results = plan.BLOCK_M * plan.BLOCK_N // plan.SUBTILES * (out_bytes if plan.SPLIT_K == 1 else 4)
    if plan.kind == "pointers":
        return max(operands, results) <= device.shared_memory
    able = device.descriptors and (aligned or (plan.PAD and pads))
    return able and operands + results + 1024 <= device.shared_memory  # 1024: barriers


class Product(NamedTuple):
    """What is asked of a product, beside its operands."""

    activation: "str | None" = None
    p: float = 0.0
    q: float = 0.0
    out_dtype: "torch.dtype | None" = None
    precision: str = ""  # "ieee", "tf32", or as torch is set
    invariant: bool = False
    save: bool = False  # return the products themselves too


@_tuning.falls_back
def product(a, b, b2, bias, residual, how, plan=None):
    """(y, z, z2): the result, and a @ b and a @ b2 where they are to be saved. Operands have two dimensions or more."""
    batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    y = torch.empty((*batch, a.shape[-2], b.shape[-1]), dtype=how.out_dtype or a.dtype, device=a.device)
    z = torch.empty(y.shape, dtype=a.dtype, device=a.device) if how.save else None
    z2 = torch.empty_like(z) if how.save and b2 is not None else None
    if not y.numel():
        return y, z, z2
    return _compute(a, b, b2, y, z, z2, bias, residual, how, plan), z, z2


def sum_of_products(a, b, a2, b2, precision):
    """a @ b + a2 @ b2 of matrices. Of more than 64 rows the first is rounded to the operands' dtype, as the sum is."""
    numbers = (*a2.shape, *b2.shape, *a2.stride(), *b2.stride())
    by_torch = a.dtype != torch.float32 or precision in ("", float32_precision())
    if len(a) > 64 and b.shape[0] % 8 == b.shape[1] % 8 == 0 and by_torch and vendor_takes(*numbers):
        # 1.02 to 1.19 of two products and their sum on an H200; by ours, with float32 between them, 0.78 to 0.98.
        return product(a, b, None, None, None, Product(precision=precision))[0].addmm_(a2, b2)
    y = product(a, b, None, None, None, Product(out_dtype=compute_dtype(a), precision=precision))[0]
    return product(a2, b2, None, None, y, Product(out_dtype=a.dtype, precision=precision))[0]


def _compute(a, b, b2, y, z, z2, bias, residual, how, plan):
    operands = (a, b, b if b2 is None else b2)
    wide = [t.expand(*y.shape[:-2], *t.shape[-2:]) for t in operands]
    lies = y if residual is None else residual
    sizes = (y.shape[:-2], *y.shape[-2:], a.shape[-1])
    g = geometry(*sizes, *[t.stride() for t in (*wide, y, lies)])
    if g is None:  # batches of three or more dimensions that do not lie evenly, which torch copies too
        operands, lies = [t.contiguous() for t in wide], lies.contiguous()
        residual = None if residual is None else lies
        g = geometry(*sizes, *[t.stride() for t in (*operands, y, lies)])
    return run(g, *operands[:2], None if b2 is None else operands[2], y, z, z2, bias, residual, how, plan)


def _padded(t):
    """A copy of t whose rows are padded to whole 16 bytes; what lies transposed stays so."""
    if t.stride(-1) != 1 and t.stride(-2) == 1:
        return _padded(t.mT).mT
    unit = 16 // t.element_size()
    rows = t.new_empty((*t.shape[:-1], cdiv(t.shape[-1], unit) * unit))[..., : t.shape[-1]]
    return rows.copy_(t)


def sizes(device, M, N, K, batch, gated):
    """What the rows of the tables ask of a product, beside its layout and epilogue."""

    def full(block_m, block_n):
        tiles = cdiv(M, block_m) * cdiv(N, block_n) * batch
        waves = cdiv(tiles, device.multiprocessors) * device.multiprocessors
        return 100 * M * N * batch // (waves * block_m * block_n)

    return {
        "M": M, "N": N, "K": K, "batch": batch, "gated": gated, "tiles": cdiv(M, 64) * cdiv(N, 64) * batch,
        # Percent of the device that results keep at work, in tiles of 128 x 256 (of two products 128 x 128), 64 x 128.
        "full": full(128, 128 if gated else 256), "full_small": full(64, 128),
    }  # fmt: skip


def run(g, a, b, b2, y, z, z2, bias, residual, how, plan):
    """y, or what a vendor's library made in its place."""
    device, compute = facts(a.device), compute_dtype(a)
    turns = (turned(a, g.a, g.M, g.K), turned(b, g.b, g.K, g.N), turned(b if b2 is None else b2, g.b2, g.K, g.N))
    batched = (_batched(g.a, g.outer, g.inner), _batched(g.b, g.outer, g.inner))
    by_torch = float32_precision()
    precision = (how.precision or by_torch) if device.tf32 and a.dtype == torch.float32 else "ieee"
    even = None not in turns and None not in batched and turns[1] == turns[2] and g.b == g.b2 and g.K > 0
    aligned = even and (a.element_size() == 2 or precision == "tf32")
    if plan is None:
        asked = {
            **sizes(device, g.M, g.N, g.K, g.outer * g.inner, b2 is not None),
            "aligned": aligned, "pads": a.element_size() == 2 and None not in batched and g.K > 0,
            "turned": g.b[2] == 1, "whole": g.N % 8 == 0, "precision": precision,
            "out_bytes": y.element_size() if residual is None else 4,  # a residual is turned as float32
            "act": how.activation is not None or residual is not None,
            "vendor": vendor_takes(g.M, g.N, g.K, *g.a[2:], *g.b[2:], *g.b2[2:])
            and y.dtype == a.dtype
            and (a.dtype != torch.float32 or (how.precision or by_torch) == by_torch),
        }  # fmt: skip
        if _tuning.AUTOTUNE and not how.invariant:
            again = functools.partial(run, g, a, b, b2, y, z, z2, bias, residual, how)
            plan = _tuning.search("matmul", Plan, fits, (a.device, device), a.dtype, again, **asked)
        else:
            plan = choose(device, a.dtype, how.invariant, **asked)
    if plan.PAD and not aligned:
        copies = [t if t is None or turn is not None else _padded(t) for t, turn in zip((a, b, b2), turns)]
        if b2 is not None and copies[1].stride() != copies[2].stride():
            copies[1:] = _padded(b.contiguous()), _padded(b2.contiguous())
        return _compute(*copies, y, z, z2, bias, residual, how, plan._replace(PAD=False))
    if plan.kind == "vendor":
        return _vendor(g, a, b, b2, y, z, z2, bias, residual, how)
    swapped = plan.kind == "rows" and g.M > 4  # few columns are few rows of the transpose
    if swapped:
        g = g._replace(
            M=g.N, N=g.M, a=(*g.b[:2], g.b[3], g.b[2]), b=(*g.a[:2], g.a[3], g.a[2]), b2=(*g.a[:2], g.a[3], g.a[2]),
            y=(*g.y[:2], g.y[3], g.y[2]), residual=(*g.residual[:2], g.residual[3], g.residual[2]),
        )  # fmt: skip
        a, b = b, a
    tiles_m, tiles_n = cdiv(g.M, plan.BLOCK_M), cdiv(g.N, plan.BLOCK_N)
    batches = g.outer * g.inner
    part = None
    if plan.SPLIT_K > 1:
        sets = 1 if b2 is None else 2
        part = torch.empty((batches, plan.SPLIT_K, sets, g.M, g.N), dtype=compute, device=a.device)
    results = (y, z, z2, bias, residual)
    strides = (g.y, 0 if bias is None else bias.stride(0), g.residual)
    numbers, epilogue = _options(y, how, compute, swapped)
    early = device.early and plan.SPLIT_K > 1
    blocks = {
        "EARLY": early,
        "BLOCK_N": plan.BLOCK_N,
        "BLOCK_K": plan.BLOCK_K,
        "SPLIT_K": plan.SPLIT_K,
        "num_warps": plan.num_warps,
    }
    if plan.kind == "rows":
        launch(
            _matmul_fwd_kernel_rows,
            (batches * plan.SPLIT_K * tiles_n,),
            a.device,
            (a, b, b2, *results, part, g.inner, g.N, g.K, tiles_n, g.a, g.b, g.b2, *strides, *numbers),
            **epilogue, M=g.M, STAGES=plan.num_stages, **blocks,
        )  # fmt: skip
    elif plan.kind == "pointers":
        launch(
            _matmul_fwd_kernel_pointers,
            (batches * plan.SPLIT_K * tiles_m * tiles_n,),
            a.device,
            (a, b, b2, *results, part, g.inner, g.M, g.N, g.K, tiles_m, tiles_n, g.a, g.b, g.b2, *strides, *numbers),
            **epilogue, PRECISION=precision, EVEN_K=g.K % plan.BLOCK_K == 0, BLOCK_M=plan.BLOCK_M,
            GROUP_M=plan.GROUP_M, num_stages=plan.num_stages, **blocks,
        )  # fmt: skip
    else:
        work = batches * plan.SPLIT_K * tiles_m * tiles_n
        many = batches > 1
        lead = (g.outer, g.inner)
        block_b = (*lead, g.K, g.N, plan.BLOCK_K, plan.BLOCK_N)
        # Results go out in bulk where their rows are aligned, and saved products with them.
        unit = 16 // min(t.element_size() for t in (y, z) if t is not None)
        block_y = (False, many, *lead, g.M, g.N, plan.BLOCK_M, plan.BLOCK_N // plan.SUBTILES)
        bulk = plan.SPLIT_K == 1 and turned(y, g.y, g.M, g.N) is False and g.N % unit == 0
        launch(
            _matmul_fwd_kernel_descriptors,
            (min(work, device.multiprocessors * plan.PER_SM),),
            a.device,
            (
                _descriptor(a, g.a, turns[0], batched[0], *lead, g.M, g.K, plan.BLOCK_M, plan.BLOCK_K),
                _descriptor(b, g.b, turns[1], batched[1], *block_b),
                None if b2 is None else _descriptor(b2, g.b2, turns[1], batched[1], *block_b),
                *[_descriptor(t, g.y, *block_y) if bulk and t is not None else None for t in (y, z, z2)],
                *results, part, work, g.inner, g.M, g.N, g.K, tiles_m, tiles_n, *strides, *numbers,
            ),
            A_BATCHED=batched[0], B_BATCHED=batched[1], BATCHED=many, A_TURNED=turns[0], B_TURNED=turns[1],
            **epilogue, PRECISION=precision, BLOCK_M=plan.BLOCK_M, GROUP_M=plan.GROUP_M, SUBTILES=plan.SUBTILES,
            FLATTEN=plan.FLATTEN, num_stages=plan.num_stages, **blocks,
        )  # fmt: skip
    if part is not None:
        parts = (part[:, :, 0], None if b2 is None else part[:, :, 1])
        _sum(g, *parts, part.stride(1), plan.SPLIT_K, results, strides, numbers, epilogue, early)
    return y


def _options(y, how, compute, swapped):
    precise = y.dtype == torch.float32 and compute == torch.float32
    numbers = (scalar(how.p, compute), scalar(how.q, compute))
    return numbers, {
        "ACTIVATION": how.activation, "PRECISE": precise, "BIAS_M": swapped, "COMPUTE": triton_dtype(compute),
    }  # fmt: skip


def _sum(g, part, part2, step, split_k, results, strides, numbers, epilogue, early):
    BLOCK_N = min(next_power_of_2(g.N), 1024)  # 8 elements a thread: untuned
    BLOCK_M = 1024 // BLOCK_N
    tiles_m, tiles_n = cdiv(g.M, BLOCK_M), cdiv(g.N, BLOCK_N)
    launch(
        _matmul_fwd_kernel_parts,
        (g.outer * g.inner * tiles_m * tiles_n,),
        part.device,
        (part, part2, *results, step, g.inner, g.M, g.N, tiles_m, tiles_n, *strides, *numbers),
        **epilogue, SPLIT_K=split_k, BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, EARLY=early, num_warps=4,
        **({"launch_pdl": True} if early else {}),
    )  # fmt: skip


def _vendor(g, a, b, b2, y, z, z2, bias, residual, how):
    """torch's products, and the epilogue as one pass over them. z and z2 may be the products themselves."""
    if b2 is None and how.activation is None and residual is None and z is None:
        if a.dim() == b.dim() == 2 and (bias is None or bias.dtype == a.dtype):
            return torch.mm(a, b) if bias is None else torch.addmm(bias, a, b)
        if bias is None:
            return torch.matmul(a, b, out=y)
    z = torch.matmul(a, b, out=torch.empty_like(y) if z is None else z)
    z2 = None if b2 is None else torch.matmul(a, b2, out=torch.empty_like(y) if z2 is None else z2)
    numbers, epilogue = _options(y, how, compute_dtype(a), False)
    strides = (g.y, 0 if bias is None else bias.stride(0), g.residual)
    _sum(g, z, z2, g.M * g.N, 1, (y, None, None, bias, residual), strides, numbers, epilogue, False)
    return y


def choose(device, dtype, invariant, **asked):
    """The plan for a product of these sizes; where it is invariant, one by which a row's bits do not depend on M."""
    return _tuning.find("matmul_invariant" if invariant else "matmul", Plan, fits, device, dtype, **asked)
