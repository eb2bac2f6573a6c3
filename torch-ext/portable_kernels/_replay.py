"""Calls like one that was made before, repeated without asking again.

What a call allocates and launches follows from the layout of its tensors and from its other arguments. The first call
of a kind is watched, and written down as a function of a few lines: allocations, launches of compiled kernels, ops of
PyTorch. Later ones run that, which takes the host a third of the time.
"""

import functools

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from . import _device
from ._triton import DESCRIPTORS, INTERPRET

_Tensor, _Parameter = torch.Tensor, torch.nn.Parameter
_VALUES = frozenset((int, float, bool, str, type(None), torch.dtype))
_LIMIT = 4096  # kinds of calls to one function
_REFUSED, _SAME = object(), object()


def _probe(find, missing):
    """A torch internal, or a stand-in that returns `missing`."""
    try:
        return find()
    except AttributeError:
        return lambda *_: missing


_dispatch_modes = _probe(lambda: torch._C._len_torch_dispatch_stack, 1)
_transforms = _probe(lambda: torch._C._are_functorch_transforms_active, True)
_jit_tracing = _probe(lambda: torch._C._get_tracing_state, True)
_autocast = _probe(lambda: torch._C._is_any_autocast_enabled, True)
_grad = torch.is_grad_enabled
_forward_ad = torch.autograd.forward_ad


def replayed(function):
    """`function`, which is pure, with calls of a kind that was seen before repeated.

    Only where nothing traces, transforms or differentiates: all that a call does is then seen by watching it.
    """
    known = {}

    @functools.wraps(function)
    def call(*args, **kwargs):
        if torch.compiler.is_compiling() or _dispatch_modes() or _transforms() or _jit_tracing():
            return function(*args, **kwargs)
        tensors = []
        key = _key(args, kwargs, tensors)
        if key is None:
            return function(*args, **kwargs)
        found = known.get(key)
        if found is None:
            if len(known) >= _LIMIT:  # sizes that never repeat
                known.clear()
            result, found = _watch(function, args, kwargs, tensors)
            known[key] = found
            return result
        if found is _REFUSED or _device.profiled():
            return function(*args, **kwargs)
        return found(*tensors)

    return call


def _key(args, kwargs, tensors):
    """All that decides what a call does, or None where that is not known. Its tensors are added to `tensors`, once."""
    key, places, learns = [], {}, _grad()
    for a in (*args, *kwargs.values()) if kwargs else args:
        kind = type(a)
        if kind is _Tensor or kind is _Parameter:
            if learns and a.requires_grad:
                return None
            place = places.setdefault(id(a), len(tensors))
            if place < len(tensors):
                key += (_SAME, place)
                continue
            index = a.get_device()
            if index < 0 and not (INTERPRET and a.is_cpu):  # a meta tensor's index is the CPU's
                return None
            try:
                key += (index, a.dtype, a.shape, a.stride(), a.data_ptr() % 16, a.is_neg())
            except RuntimeError:  # it has no memory: a batch of gradients, for one
                return None
            tensors.append(a)
        elif kind in _VALUES:
            key += (kind, a)  # 1, 1.0 and True are equal
        elif kind is tuple and all(type(v) in _VALUES for v in a):
            key += (kind, a)
        else:
            return None
    if not tensors or _forward_ad._current_level >= 0 or (not INTERPRET and index != _device.current()):
        return None
    if _autocast():
        device = tensors[0].device.type
        key.append(torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device))
    key += (_device.float32_precision(), *kwargs)
    return tuple(key)


def _watch(function, args, kwargs, tensors):
    """(result of the call, the function of its tensors that repeats it, or _REFUSED)."""
    watch = _Watch(tensors)
    _device.watching.by = watch
    try:
        with watch:
            result = function(*args, **kwargs)
    finally:
        _device.watching.by = None
    try:
        if not all(_device.runs_kernels(t.device) for t in tensors):
            raise _Unknown
        return result, watch.written(result)
    except _Unknown:
        return result, _REFUSED


_OF_DTYPES = (torch.ops.aten.promote_types.default, torch.ops.aten.result_type.Tensor)


class _Unknown(Exception):
    pass


class _Watch(TorchDispatchMode):
    """Writes down what a call does. Tensors have names; their ids are theirs as long as this keeps them."""

    def __init__(self, tensors):
        super().__init__()
        self.names = {id(t): f"a{i}" for i, t in enumerate(tensors)}
        self.parameters = tuple(self.names.values())
        self.kept = list(tensors)
        self.lines = []  # (names made, names used, text, whether it has effects)
        self.roots = {}  # of a view: (name of what it is a view of, bytes from its start)
        self.values = {"torch": torch, "stream": None}
        self.refused = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        outs = out if isinstance(out, (tuple, list)) else (out,)
        if func in _OF_DTYPES:
            return out
        tags = func.tags
        if func is torch.ops.aten.detach.default and self.names.get(id(args[0]), "a")[0] == "t":
            self.names[id(out)] = self.names[id(args[0])]  # of memory made here, as torch.empty does by itself
            self.kept.append(out)
            return out
        if (
            not all(isinstance(t, torch.Tensor) for t in outs)
            or torch.Tag.data_dependent_output in tags
            or torch.Tag.dynamic_output_shape in tags
        ):
            self.refused = True
            return out
        used = []
        try:
            text = f"{self.value(func)}({self.arguments(args, kwargs, used)})"
            made = []
            for t in outs:
                if id(t) not in self.names:  # an op in place returns what it was given
                    made.append(self.name(t))
            if made and str(func).startswith(("aten.empty", "aten.new_empty")):
                text, used = self.allocation(outs[0])
            source = next((a for a in args if isinstance(a, torch.Tensor)), None)
            if func.is_view and made and len(outs) == 1 and source.dtype == outs[0].dtype:
                root, offset = self.roots.get(self.names[id(source)], (self.names[id(source)], 0))
                self.roots[made[0]] = (root, offset + outs[0].data_ptr() - source.data_ptr())
            listed = [self.names[id(t)] for t in outs]
            head = ", ".join(listed) + ("," if isinstance(out, (tuple, list)) else "")
            self.lines.append((listed, used, f"{head} = {text}", func._schema.is_mutable or not made))
        except _Unknown:
            self.refused = True
        return out

    def name(self, t):
        self.kept.append(t)
        return self.names.setdefault(id(t), f"t{len(self.names)}")

    def value(self, v):
        if v is None or type(v) in (int, bool, str):
            return repr(v)
        name = f"v{len(self.values)}"
        self.values[name] = v
        return name

    def operand(self, v, used):
        if isinstance(v, torch.Tensor):
            if id(v) not in self.names:
                raise _Unknown
            used.append(self.names[id(v)])
            return used[-1]
        if isinstance(v, (tuple, list)) and any(isinstance(t, torch.Tensor) for t in v):
            return "[" + ", ".join(self.operand(t, used) for t in v) + "]"
        return self.value(v)

    def arguments(self, args, kwargs, used):
        given = [self.operand(a, used) for a in args]
        return ", ".join([*given, *(f"{k}={self.operand(a, used)}" for k, a in kwargs.items())])

    def allocation(self, t):
        """The cheapest way to make memory that lies like t's."""
        for like, name in zip(self.kept, self.parameters):
            if like.shape == t.shape and like.stride() == t.stride() and like.is_contiguous() and like.numel():
                same = like.dtype == t.dtype
                return f"torch.empty_like({name}{'' if same else f', dtype={self.value(t.dtype)}'})", [name]
        size, options = self.value(tuple(t.shape)), f"dtype={self.value(t.dtype)}, device={self.value(t.device)}"
        if t.is_contiguous():
            return f"torch.empty({size}, {options})", []
        return f"torch.empty_strided({size}, {self.value(t.stride())}, {options})", []

    def launched(self, launch, args):
        """`launch` is the text before the kernel's arguments; its values are named already."""
        used = []
        try:
            given = [self.kernel_argument(a, used) for a in args]
            self.lines.append(((), used, launch(self.value, ", ".join(given)), True))
        except _Unknown:
            self.refused = True

    def kernel_argument(self, a, used):
        if isinstance(a, torch.Tensor):
            name = self.names.get(id(a))
            if name is None:
                raise _Unknown
            root, offset = self.roots.get(name, (name, 0))
            if offset:  # a kernel is given an address
                root, offset = name, 0
            used.append(root)
            return root
        if type(a) in DESCRIPTORS:
            rest = ", ".join(self.value(list(v)) for v in (a.shape, a.strides, a.block_shape))
            if hasattr(a, "layout"):
                rest += f", {self.value(a.layout)}"
            return f"{self.value(type(a))}({self.operand(a.base, used)}, {rest})"
        return self.value(a)

    def written(self, result):
        """The function of the call's tensors that does the same."""
        if self.refused:
            raise _Unknown
        used = []
        if isinstance(result, tuple):
            parts = ", ".join(self.operand(r, used) for r in result)
            plain = type(result) is tuple
            text = f"({parts},)" if plain else f"{self.value(type(result))}({parts})"
        else:
            text = self.operand(result, used)
        needed, body = set(used), []
        for made, uses, line, effects in reversed(self.lines):
            if effects or needed.intersection(made):
                needed.update(uses)
                body.append(line)
        body = "".join(f"    {line}\n" for line in reversed(body))
        source = f"def replay({', '.join(self.parameters)}):\n{body}    return {text}\n"
        exec(source, self.values)  # noqa: S102
        return self.values["replay"]
