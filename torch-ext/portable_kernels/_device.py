"""What the device is and how to launch on it. The only file that asks which GPU this is."""

import functools
import threading
import warnings
from typing import NamedTuple

import torch
from torch.utils._python_dispatch import _disable_current_modes

from ._triton import ABSENT, DESCRIPTORS, DIRECT, INTERPRET, VERSION, TensorDescriptor, triton

KERNEL_DEVICES = ("cuda", "xpu")  # torch calls ROCm devices "cuda" too
FUSED = {"enable_fp_fusion": True}  # a * b + c in one instruction: Triton 3.9 warns that 3.10 will do so if asked only


class Device(NamedTuple):
    """Facts that plans are made from."""

    multiprocessors: int
    max_warps: int  # of one program
    shared_memory: int  # bytes that one program may use
    name: str = ""  # as the driver says it
    arch: str = ""  # "sm90", "gfx942", "xpu", "interpreter"
    descriptors: bool = False  # whether it copies tiles in bulk, by tensor descriptors, and this Triton says so to it
    tf32: bool = False  # whether products of float32 tiles may be asked for in tf32
    early: bool = False  # whether a kernel may come up before the one whose results it waits for has ended


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


# The index of the current device, by the quickest way that this torch has.
if hasattr(torch, "xpu") and torch.xpu.is_available():
    current = torch.xpu.current_device
else:
    current = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)


def _probe_precision():
    """A function that says how torch multiplies float32 on GPUs, "ieee" or "tf32", whichever way it was set."""
    # torch.get_float32_matmul_precision raises once torch.backends.cuda.matmul.fp32_precision was set.
    get = getattr(torch._C, "_get_fp32_precision_getter", None)
    if get is None:  # before torch 2.9
        return lambda: "ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32"
    return lambda: "tf32" if get("cuda", "matmul") == "tf32" else "ieee"


float32_precision = _probe_precision()


@functools.cache
def facts(device: torch.device) -> Device:
    if device.type == "cuda":
        props = torch.cuda.get_device_properties(device)
        shared = getattr(props, "shared_memory_per_block_optin", 0) or props.shared_memory_per_block
        if torch.version.hip:
            arch, tensor_copies, tf32 = props.gcnArchName.split(":")[0], False, False
        else:
            arch, tensor_copies, tf32 = f"sm{props.major}{props.minor}", props.major >= 9, props.major >= 8
        return Device(
            props.multi_processor_count, 1024 // props.warp_size, shared, props.name, arch,
            tensor_copies and TensorDescriptor is not None, tf32, tensor_copies,
        )  # fmt: skip
    if device.type == "xpu":
        props = torch.xpu.get_device_properties(device)
        return Device(props.gpu_subslice_count, 32, props.local_mem_size, props.name, "xpu")
    return Device(2, 32, 65536, "interpreter", "interpreter")  # few programs, but more than one


_compiled = {}  # what was launched before, by all that Triton specialises on
_kinds = {}  # functions that give it, by the kernel and the types of its arguments
watching = threading.local()  # .by: what writes down this thread's launches; .collect: what takes first ones over


def _integer(a):
    """What Triton specialises on in an integer: whether it is 1, whether 16 divides it, and its width."""
    if a == 1 or not -(2**31) <= a < 2**31:
        return a == 1, a % 16, a < 2**63
    return a % 16 == 0


@functools.lru_cache(4096)
def _integers(a):
    return tuple(map(_integer, a))


def _small(t):
    """Whether offsets in it fit 32 bits, which Triton relies on for AMD."""
    return t.untyped_storage().nbytes() < 2**31


def _kind_of(kernel, args):
    """A function of arguments of these types that gives what Triton specialises `kernel` on."""
    parts = []
    for i, (a, parameter) in enumerate(zip(args, kernel.params)):
        if isinstance(a, torch.Tensor):
            parts += [f"_{i}.dtype", f"_{i}.data_ptr() % 16", *[f"small(_{i})"] * (torch.version.hip is not None)]
        elif type(a) in DESCRIPTORS:
            parts += [f"_{i}.base.dtype", f"*_{i}.block_shape"]  # its sizes are values of run time
        elif type(a) is int and not parameter.is_constexpr:
            parts.append(f"integer(_{i})")
        elif type(a) is tuple and a and all(type(v) is int for v in a) and not parameter.is_constexpr:
            parts.append(f"integers(_{i})")
        elif type(a) is not float or parameter.is_constexpr:  # others are float32
            parts.append(f"_{i}")
    names = ", ".join(f"_{i}" for i in range(len(args)))
    return eval(  # noqa: S307
        f"lambda {names}: ({', '.join(parts)},)", {"integer": _integer, "integers": _integers, "small": _small}
    )


def key_of(kernel, device, args, options):
    """All that selects the compiled kernel, but for Triton's own settings."""
    types = (id(kernel), *map(type, args))
    kind = _kinds.get(types)
    if kind is None:
        kind = _kinds[types] = _kind_of(kernel, args)
    return (types, device.index, kind(*args), *options, *options.values())


def remember(key, kernel, compiled, args, options):
    """Have launches of this key go to the compiled kernel."""
    if len(_compiled) >= 4096:  # sizes that never repeat
        _compiled.clear()
    run, before = compiled.run, (compiled.packed_metadata, None, None, None)
    if DIRECT and hasattr(run, "launch_pdl") and not (run.global_scratch_size or run.profile_scratch_size):
        before = (run.launch_cooperative_grid, run.launch_pdl, None, None, *before)
        run = run.launch  # what run itself calls, once it has made room that none is asked for
    rest = tuple(options[name] for name in kernel.arg_names[len(args) :])
    stream = triton.runtime.driver.active.get_current_stream
    found = _compiled[key] = (run, compiled.function, before, rest, stream, kernel)
    return found


def _fillers(run):
    """(Triton's C launcher, [what gives, of a descriptor, the call that makes what the launcher takes, ...]).

    A launcher of kernels that take descriptors is wrapped in Python that makes them anew, argument by argument.
    """
    wrapped = dict(
        zip(getattr(getattr(run, "__code__", None), "co_freevars", ()), getattr(run, "__closure__", ()) or ())
    )
    if not DIRECT or not {"launcher", "tensordesc_meta"} <= wrapped.keys():
        return run, ()
    metas = wrapped["tensordesc_meta"].cell_contents
    if not all(metas) or any(meta["fp4_padded"] for meta in metas):
        return run, ()
    fill, dtypes = triton.runtime.driver.active.utils.fill_tma_descriptor, run.__globals__["TMA_DTYPE_DEVICE_TO_HOST"]

    def filler(meta):
        of_kernel = (meta["swizzle"], meta["elem_size"], dtypes[meta["elem_type"]], meta["block_size"])
        return lambda d: (
            fill, (*of_kernel, d.shape, d.strides, int(d.padding == "nan")), (*d.shape, *d.strides)
        )  # fmt: skip

    return wrapped["launcher"].cell_contents, list(map(filler, metas))


def launch(kernel, grid, device: torch.device, args, **options):
    """Launch `kernel` over `grid` with positional `args`, on `device` whichever device is current.

    Triton's own launch works out anew which compiled kernel the arguments select. Here the same question is one
    dictionary lookup, three times as quick: tensors by dtype and alignment, integers by what divides them, all else
    by value.
    """
    if device.type == "cpu":  # the interpreter: numpy warns of NaN where a GPU does not
        with warnings.catch_warnings(), _disable_current_modes():
            warnings.simplefilter("ignore", RuntimeWarning)
            kernel[grid](*args, **options)
        _watched(None, kernel, grid, device, args, options)
        return
    if device.index != current():
        with getattr(torch, device.type).device(device):
            launch(kernel, grid, device, args, **options)
        return
    key = key_of(kernel, device, args, options)
    found = _compiled.get(key)
    if found is None and getattr(watching, "collect", None):  # warmup wants them all before the first is compiled
        watching.collect(key, kernel, grid, device, args, options)
        return
    if found is None or profiled():
        found = remember(key, kernel, kernel[grid](*args, **FUSED, **options), args, options)
        _watched(found, kernel, grid, device, args, options)
        return
    run, function, before, rest, stream, _ = found
    size = len(grid)
    run(
        grid[0], grid[1] if size > 1 else 1, grid[2] if size > 2 else 1,
        stream(device.index), function, *before, *args, *rest,
    )  # fmt: skip
    _watched(found, kernel, grid, device, args, options)


def quickest(device: torch.device, functions):
    """Which of `functions` takes the device the least time; None where that cannot be measured, or not now."""
    backend = getattr(torch, device.type)
    if device.type not in KERNEL_DEVICES or getattr(backend, "is_current_stream_capturing", bool)():
        return None
    watch, watching.by = getattr(watching, "by", None), None
    try:
        with _disable_current_modes(), backend.device(device):
            cold = torch.empty(2**28, dtype=torch.int8, device=device)  # what evicts operands from the cache
            took = []
            for function in functions:
                function()
                events = []
                for _ in range(5):
                    cold.zero_()
                    events.append([backend.Event(enable_timing=True) for _ in range(2)])
                    events[-1][0].record()
                    function()
                    events[-1][1].record()
                backend.synchronize()
                took.append(sorted(start.elapsed_time(end) for start, end in events)[2])
    finally:
        watching.by = watch
    return took.index(min(took))


def _watched(found, kernel, grid, device, args, options):
    """Tell who watches how to launch the same again."""
    watch = getattr(watching, "by", None)
    if watch is None:
        return
    if found is None:
        watch.launched(
            lambda v, a: f"{v(launch)}({v(kernel)}, {v(grid)}, {v(device)}, ({a},), **{v(options)})", args, False
        )
        return
    run, function, before, rest, stream, _ = found
    run, fillers = _fillers(run)

    def text(v, given):
        sizes, before_given, rest_given = (", ".join(map(v, values)) for values in ((*grid, 1, 1)[:3], before, rest))
        rest_given = f", {rest_given}" if rest else ""
        return f"{v(run)}({sizes}, {v(stream)}({device.index}), {v(function)}, {before_given}, {given}{rest_given})"

    watch.launched(text, args, True, fillers)


def profiled():
    """Whether a profiler wants to hear of launches: then Triton does them."""
    hook = triton.knobs.runtime.launch_enter_hook
    return hook is not None and bool(getattr(hook, "calls", True))
