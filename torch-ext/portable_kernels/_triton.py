"""Triton where it is installed, and a stand-in where it is not, so that the package imports anywhere.

Every other file takes `triton` and `tl` from here. `INTERPRET` says whether `@triton.jit` functions run in
Triton's interpreter (TRITON_INTERPRET=1), which Triton decides when a function is decorated.
"""

import torch


class _Absent:
    """Answers to any attribute, and leaves a decorated function as it is."""

    def __getattr__(self, name):
        return self

    def __call__(self, *args, **kwargs):
        return args[0] if args and callable(args[0]) else self


try:
    import triton
    import triton.language as tl

    ABSENT = None
    VERSION = triton.__version__
    INTERPRET = bool(triton.knobs.runtime.interpret)
except Exception as error:  # a broken installation must not take the CPU path down with it: report() names the error
    triton = tl = _Absent()
    ABSENT = f"{type(error).__name__}: {error}"
    VERSION = None
    INTERPRET = False

try:
    from triton.runtime.errors import OutOfResources
except Exception:  # no Triton

    class OutOfResources(Exception):
        """What a launch raises where a kernel needs more shared memory, threads or registers than there are."""


try:
    from triton.tools.tensor_descriptor import TensorDescriptor
except Exception:  # older Triton has none
    TensorDescriptor = None

DESCRIPTORS = {TensorDescriptor}  # and Gluon's, once it is there

# Whether this Triton is one that the kernels in Gluon, its lower level, were tested with. Else portable ones serve.
GLUON = VERSION is not None and not INTERPRET and VERSION.startswith("3.6.")
DIRECT = GLUON  # likewise, whether its launcher takes what launches here give it


_TRUNCATES = tl.constexpr(INTERPRET)  # the interpreter drops the low bits of a float32 that becomes a bfloat16


@triton.jit
def round_to(x, dtype: tl.constexpr):
    """x in `dtype`, rounded to nearest even."""
    if _TRUNCATES and dtype == tl.bfloat16:
        x = x.to(tl.float32)
        bits = x.to(tl.uint32, bitcast=True)
        bits = tl.where(x == x, ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) << 16, bits)
        x = bits.to(tl.float32, bitcast=True)
    return x.to(dtype)


@triton.jit
def exp(x):
    """exp(x). In float32 what is below 2^-126 may be 0: two instructions on NVIDIA, where tl.exp takes five."""
    if x.dtype == tl.float32:
        return tl.exp2(x * 1.4426950408889634)
    else:
        return tl.exp(x)


def triton_dtype(dtype):
    """Triton's name for a torch dtype."""
    return getattr(tl, str(dtype)[len("torch.") :])


def scalar(value, dtype):
    """`value` as a launch argument for a kernel that computes in `dtype`.

    Triton passes a Python float as float32, so float64 kernels take it as a compile-time constant.
    """
    return tl.constexpr(float(value)) if dtype == torch.float64 and not INTERPRET else float(value)


def next_power_of_2(n):
    """The smallest power of two that is at least n, and at least 1."""
    return 1 << max(n - 1, 0).bit_length()


def cdiv(a, b):
    return -(-a // b)
