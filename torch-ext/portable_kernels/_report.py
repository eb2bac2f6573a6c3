"""What runs where, in words."""

import inspect
import platform
import sys
import textwrap
from typing import Optional, Union

import torch

from ._device import KERNEL_DEVICES, path
from ._triton import ABSENT, VERSION


def report(device: Optional[Union[str, torch.device]] = None) -> str:
    """Say which path each op takes on a device, and why.

    Args:
        device: None = the accelerator that torch sees, else the CPU.
    Returns:
        Text of a few lines; `print` it.
    """
    if device is None:
        kinds = [kind for kind in KERNEL_DEVICES if getattr(torch, kind).is_available()]
        device = f"{kinds[0]}:{getattr(torch, kinds[0]).current_device()}" if kinds else "cpu"
    try:
        device = torch.device(device)
    except (RuntimeError, TypeError):
        raise ValueError(f"report: device must be a torch.device or its name, got {device!r}") from None
    if device.type in KERNEL_DEVICES and not getattr(torch, device.type).is_available():
        raise ValueError(f"report: device must be one that torch sees, got {str(device)!r}")
    package = sys.modules[__package__]
    ops = [n for n in package.__all__ if inspect.isfunction(getattr(package, n)) and n not in ("report", "warmup")]
    triton = f"no Triton ({ABSENT})" if ABSENT else f"Triton {VERSION}"
    return "\n".join(
        [
            f"{package.__name__} on {device}: Python {platform.python_version()}, torch {torch.__version__}, {triton}",
            f"{path(device)}:",
            textwrap.fill(", ".join([*ops, "reductions"]), 100, initial_indent="  ", subsequent_indent="  "),
        ]
    )
