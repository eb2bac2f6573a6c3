"""The four float8 types in kernels: by the device's own instructions where it has them, else by bit arithmetic.

A type that the device lacks reaches a kernel as uint8, and its values are converted, never reinterpreted. A type is
told by two numbers: the width of its mantissa, and whether it is of the "fnuz" kind, which has an exponent bias higher
by one, no negative zero, no infinity, and one NaN where negative zero would be.
"""

from typing import NamedTuple

import torch

from ._triton import INTERPRET, tl, triton


class Format(NamedTuple):
    mantissa: int
    fnuz: bool
    max: float  # the largest finite value


FORMATS = {
    torch.float8_e4m3fn: Format(3, False, 448.0),
    torch.float8_e5m2: Format(2, False, 57344.0),
    torch.float8_e4m3fnuz: Format(3, True, 240.0),
    torch.float8_e5m2fnuz: Format(2, True, 57344.0),
}
DTYPES = tuple(FORMATS)

SMALLEST = tl.constexpr(2.0**-126)  # of scales: the smallest number that has an inverse and is not flushed to zero
LARGEST = tl.constexpr(3.4028234663852886e38)


def native(dtype, arch):
    """Whether devices of this architecture convert and multiply the type themselves."""
    if arch.startswith("sm"):
        return not FORMATS[dtype].fnuz and int(arch[2:]) >= 89
    if arch.startswith("gfx94"):
        return FORMATS[dtype].fnuz
    return arch.startswith(("gfx95", "gfx12")) and not FORMATS[dtype].fnuz


def operand(t, arch):
    """A float8 tensor as it reaches a kernel: itself where its type is native, else its bytes."""
    return t if native(t.dtype, arch) else t.view(torch.uint8)


def multiplied_as(a, b, arch):
    """What tiles of the two float8 types are multiplied as: None = as they are, where both are native.

    Each of the four types fits in float16 and in bfloat16 to the last bit.
    """
    if native(a, arch) and native(b, arch):
        return None
    if INTERPRET:
        return tl.float32
    # AMD's products flush float16's subnormals on some devices, and e5m2 has some; NVIDIA's keep them, and have no
    # bfloat16 on the oldest.
    return tl.bfloat16 if arch.startswith("gfx") else tl.float16


@triton.jit
def decode(code, MANTISSA: tl.constexpr, FNUZ: tl.constexpr):
    """The float32 values of float8 codes, (uint8)."""
    BIAS: tl.constexpr = (7 if MANTISSA == 3 else 15) + FNUZ
    bits = code.to(tl.uint32)
    size = bits & 0x7F
    normal = ((size << (23 - MANTISSA)) + ((127 - BIAS) << 23)).to(tl.float32, bitcast=True)
    x = tl.where(size >= (1 << MANTISSA), normal, size.to(tl.float32) * (2.0 ** (1 - BIAS - MANTISSA)))
    if FNUZ:
        x = tl.where(bits == 0x80, float("nan"), x)
    elif MANTISSA == 3:
        x = tl.where(size == 0x7F, float("nan"), x)
    else:
        x = tl.where(size == 0x7C, float("inf"), tl.where(size > 0x7C, float("nan"), x))
    return tl.where(bits >= 0x80, -x, x)


@triton.jit
def encode(x, MANTISSA: tl.constexpr, FNUZ: tl.constexpr):
    """The float8 codes (uint8) nearest to float32 values that are in range or NaN; ties go to even."""
    BIAS: tl.constexpr = (7 if MANTISSA == 3 else 15) + FNUZ
    DROPPED: tl.constexpr = 23 - MANTISSA
    bits = x.to(tl.uint32, bitcast=True)
    size = bits & 0x7FFFFFFF
    sign = (bits >> 24) & 0x80
    normal = ((size + ((1 << (DROPPED - 1)) - 1) + ((size >> DROPPED) & 1)) >> DROPPED) - ((127 - BIAS) << MANTISSA)
    # Of subnormals: a float32 of the exponent at which one unit in the last place is theirs has rounded the sum.
    ANCHOR: tl.constexpr = 2.0 ** (24 - BIAS - MANTISSA)
    anchored = (tl.abs(x) + ANCHOR).to(tl.uint32, bitcast=True)
    small = anchored & 0x7FFFFF
    code = tl.where(size >= ((128 - BIAS) << 23), normal, small)
    if FNUZ:
        code = tl.where(x == x, tl.where(code == 0, 0, code | sign), 0x80)
    else:
        code = tl.where(x == x, code, 0x7F) | sign
    return code.to(tl.uint8)


@triton.jit
def store_fp8(ptr, x, mask, MANTISSA: tl.constexpr, FNUZ: tl.constexpr):
    """Store float32 values that are in range or NaN as float8, through a pointer to that type or to bytes."""
    if ptr.dtype.element_ty == tl.uint8:
        tl.store(ptr, encode(x, MANTISSA, FNUZ), mask=mask)
    else:
        tl.store(ptr, x.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def finite_size(x):
    """|x|, and 0 where x is NaN or infinite: what scales are made from."""
    size = tl.abs(x)
    return tl.where(size < float("inf"), size, 0.0)


@triton.jit
def scale_of(size, fmax):
    """(scale, its inverse) by which numbers up to `size` fill the range up to `fmax`; 1 for zeros.

    The scale is a float32 and the inverse of size's dtype. Both divisions round to nearest, on every device.
    """
    if size.dtype == tl.float64:
        scale = (size / fmax).to(tl.float32)
    else:
        scale = tl.div_rn(size, tl.full(size.shape, fmax, tl.float32))
    scale = tl.where(scale < SMALLEST, SMALLEST, tl.where(scale > LARGEST, LARGEST, scale))
    scale = tl.where(size > 0.0, scale, 1.0)
    if size.dtype == tl.float64:
        inverse = 1.0 / scale.to(tl.float64)
    else:
        inverse = tl.div_rn(tl.full(size.shape, 1.0, tl.float32), scale)
    return scale, inverse


@triton.jit
def saturate(x, fmax):
    """x in the range up to `fmax`, as float32. NaN stays."""
    return tl.where(x > fmax, fmax, tl.where(x < -fmax, -fmax, x)).to(tl.float32)
