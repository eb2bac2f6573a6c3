"""Compile what a model will need before its first step, many kernels at once."""

import os
from concurrent.futures import ThreadPoolExecutor
from typing import Callable, Optional

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ._device import FUSED, remember, watching
from ._ops import add_op_namespace_prefix

_NAMESPACE = add_op_namespace_prefix("").partition("::")[0]


class _Recorder(TorchDispatchMode):
    """Ops of this package hand the kernels that are not compiled to `collect`, and give zeros."""

    def __init__(self, collect):
        super().__init__()
        self.collect = collect

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace != _NAMESPACE:
            return func(*args, **(kwargs or {}))
        watching.collect = self.collect
        try:
            results = func(*args, **(kwargs or {}))
        finally:
            watching.collect = None
        for t in results if isinstance(results, (tuple, list)) else (results,):
            if isinstance(t, torch.Tensor):
                t.zero_()  # memory as it was found might hold indices that are none
        return results


def warmup(call: Callable, *args, jobs: Optional[int] = None, **kwargs) -> int:
    """Compile the kernels that `call(*args, **kwargs)` will launch, many at once.

    The call runs once, but without this package's kernels that are not compiled yet: its ops give zeros. So what the
    call returns is dropped, and what it changes is to be set back: no optimizer's step, and gradients zeroed after.

        kernel.warmup(lambda: model(**batch).loss.backward())
        model.zero_grad()

    Args:
        call: a model, or any function; of the sizes and dtypes, and with the gradients, of what comes later.
        jobs: how many kernels to compile at once; None: as many as there are processors.
    Returns:
        How many kernels were compiled: 0 on a CPU.
    """
    found = {}

    def compile_later(key, kernel, grid, device, args, options):
        if key not in found:
            found[key] = pool.submit(_compile, key, kernel, grid, device, [_stand_in(a) for a in args], options)

    with ThreadPoolExecutor(jobs or os.cpu_count() or 1) as pool, _Recorder(compile_later):
        call(*args, **kwargs)
    for future in found.values():
        future.result()  # raises what the compiler did
    return len(found)


def _compile(key, kernel, grid, device, args, options):
    with getattr(torch, device.type).device(device):
        remember(key, kernel, kernel.warmup(*args, grid=grid, **FUSED, **options), args, options)


def _stand_in(a):
    """A small tensor that Triton compiles the same code for, so that the argument need not be kept."""
    if not isinstance(a, torch.Tensor):
        return a
    return a.new_empty(16)[a.data_ptr() % 16 // a.element_size() :]
