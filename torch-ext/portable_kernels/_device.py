"""What the device is and how to launch on it. The only file that asks which GPU this is."""

import functools
import warnings
from typing import NamedTuple

import torch

from ._triton import ABSENT, INTERPRET, VERSION

KERNEL_DEVICES = ("cuda", "xpu")  # torch calls ROCm devices "cuda" too


class Device(NamedTuple):
    """Facts that plans are made from."""

    multiprocessors: int
    max_warps: int  # of one program
    shared_memory: int  # bytes that one program may use


def runs_kernels(device: torch.device) -> bool:
    """True where tensors of this device go through the Triton kernels."""
    return not ABSENT and (device.type in KERNEL_DEVICES or (INTERPRET and device.type == "cpu"))


def path(device: torch.device) -> str:
    """Which path the ops take on `device`, and why, in words."""
    if runs_kernels(device):
        if INTERPRET:
            return f"Triton {VERSION} kernels in the interpreter (TRITON_INTERPRET=1)"
        return f"Triton {VERSION} kernels on {getattr(torch, device.type).get_device_name(device)}"
    if device.type in KERNEL_DEVICES:
        return f"PyTorch: Triton cannot be imported ({ABSENT})"
    return f"PyTorch: no Triton kernels for {device.type} tensors"


@functools.cache
def facts(device: torch.device) -> Device:
    if device.type == "cuda":
        props = torch.cuda.get_device_properties(device)
        shared = getattr(props, "shared_memory_per_block_optin", 0) or props.shared_memory_per_block
        return Device(props.multi_processor_count, 1024 // props.warp_size, shared)
    if device.type == "xpu":
        props = torch.xpu.get_device_properties(device)
        return Device(props.gpu_subslice_count, 32, props.local_mem_size)
    return Device(2, 32, 65536)  # the interpreter: few programs, but more than one


def launch(kernel, grid, device: torch.device, args, **options):
    """Launch `kernel` over `grid` with positional `args`, on `device` whichever device is current."""
    if device.type == "cpu":  # the interpreter: numpy warns of NaN where a GPU does not
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            return kernel[grid](*args, **options)
    backend = getattr(torch, device.type)
    if device.index == backend.current_device():
        return kernel[grid](*args, **options)
    with backend.device(device):
        return kernel[grid](*args, **options)
