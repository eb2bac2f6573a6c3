"""Input checks, with one message format: `{op}: {arg} must {rule}, got {value}`."""

import numbers

import torch

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def tensors(op, x, *, first="x", **others):
    """Refuse what is no strided tensor of a supported dtype, or lies on another device than the first.

    The first is called x, or by the name given as `first`. None is skipped.
    """
    _tensor(op, first, x)
    for name, t in others.items():
        if t is not None:
            _tensor(op, name, t)
            if t.device != x.device:
                raise ValueError(f"{op}: {name} must be on {x.device} as {first} is, got {t.device}")


def given(op, **tensors):
    """Refuse None."""
    for name, t in tensors.items():
        if t is None:
            raise TypeError(f"{op}: {name} must be a tensor, got NoneType")


def _tensor(op, name, t):
    if not isinstance(t, torch.Tensor):
        raise TypeError(f"{op}: {name} must be a tensor, got {type(t).__name__}")
    if t.dtype not in FLOATS:
        allowed = " | ".join(str(d).replace("torch.", "") for d in FLOATS)
        raise TypeError(f"{op}: {name} must have dtype {allowed}, got {str(t.dtype).replace('torch.', '')}")
    if t.layout is not torch.strided or t.is_nested:
        raise TypeError(
            f"{op}: {name} must be a strided tensor, got {'a nested one' if t.is_nested else f'layout {t.layout}'}"
        )


def shape(op, name, t, expected):
    """Refuse a tensor of another shape. None is skipped."""
    if t is not None and t.shape != tuple(expected):
        raise ValueError(f"{op}: {name} must have shape {tuple(expected)}, got {tuple(t.shape)}")


def choice(op, name, value, allowed):
    if value not in tuple(allowed):  # not of a dictionary: the value may have no hash
        raise ValueError(f"{op}: {name} must be one of {', '.join(map(repr, allowed))}, got {value!r}")


def number(op, name, value, low=None, optional=False):
    """Refuse what is no real number, or not above `low`."""
    if value is None and optional:
        return
    if isinstance(value, bool) or not isinstance(value, (int, float, numbers.Real)):
        raise TypeError(f"{op}: {name} must be a number{' or None' if optional else ''}, got {type(value).__name__}")
    try:
        float(value)
    except OverflowError:
        raise ValueError(f"{op}: {name} must be in the range of float64, got a larger number") from None
    if isinstance(value, int):
        _fits(op, name, value)
    if low is not None and not value >= low:
        raise ValueError(f"{op}: {name} must be at least {low}, got {value}")


def integer(op, name, value, low=None, optional=False):
    """Refuse what is no int of 64 bits, or below `low`."""
    if value is None and optional:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{op}: {name} must be an int{' or None' if optional else ''}, got {type(value).__name__}")
    _fits(op, name, value)
    if low is not None and not value >= low:
        raise ValueError(f"{op}: {name} must be at least {low}, got {value}")


def _fits(op, name, value):
    if not -(2**63) <= value < 2**63:
        raise ValueError(f"{op}: {name} must be an int of 64 bits, or a float, got {value}")


def flags(op, **values):
    """Refuse what is not True or False."""
    for name, value in values.items():
        if not isinstance(value, bool):
            raise TypeError(f"{op}: {name} must be True or False, got {value!r}")
