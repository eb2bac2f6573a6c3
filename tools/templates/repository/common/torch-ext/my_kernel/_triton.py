"""Triton, or a stand-in where there is none, and how to launch: the only file that asks which device this is."""

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

    PRESENT, INTERPRET = True, bool(triton.knobs.runtime.interpret)
except ImportError:
    triton = tl = _Absent()
    PRESENT, INTERPRET = False, False

INTERPRETED = tl.constexpr(INTERPRET)


def runs_kernels(x):
    """Whether x goes through the kernels: else it goes through PyTorch."""
    return PRESENT and (x.device.type in ("cuda", "xpu") or (INTERPRET and x.device.type == "cpu"))


def launch(kernel, grid, device, *args, **options):
    """Launch on `device`, whichever is current."""
    if device.type == "cpu":
        kernel[grid](*args, **options)
    else:
        with getattr(torch, device.type).device(device):
            kernel[grid](*args, enable_fp_fusion=True, **options)  # Triton 3.10's default is another


@triton.jit
def round_to(x, dtype: tl.constexpr):
    """x in `dtype`, rounded to nearest even: the interpreter cuts bfloat16 off."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.float32).to(tl.uint32, bitcast=True)
        bits = tl.where(x == x, ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) << 16, bits)
        x = bits.to(tl.float32, bitcast=True)
    return x.to(dtype)


def check(op, **tensors):
    """Refuse what is no floating tensor, or lies on another device than the first."""
    first = next(iter(tensors.values()))
    for name, t in tensors.items():
        if not isinstance(t, torch.Tensor) or t.dtype not in (torch.float32, torch.float16, torch.bfloat16):
            got = t.dtype if isinstance(t, torch.Tensor) else type(t).__name__
            raise TypeError(f"{op}: {name} must be a float32, float16 or bfloat16 tensor, got {got}")
        if t.device != first.device:
            raise ValueError(f"{op}: {name} must be on {first.device}, got {t.device}")
