"""Calls like one that was made before, repeated without asking again.

What a call allocates and launches follows from the layout of its tensors and from its other arguments. A call
of a kind that keeps coming is watched, and written down as a function of a few lines: allocations, launches of compiled
kernels, ops of PyTorch. Later ones run that, which takes the host a fifth of the time.
"""

import collections
import contextlib
import functools
import types

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from . import _device
from ._triton import DESCRIPTORS, INTERPRET

_TENSORS = frozenset((torch.Tensor, torch.nn.Parameter))
_VALUES = frozenset((int, float, bool, str, type(None), torch.dtype))
_LISTS = frozenset((tuple, list))
_HALVES = frozenset((torch.float16, torch.bfloat16))  # of which products have one precision
_LIMIT = 4096  # kinds of calls to one function
_SEEN = 16  # calls of a kind before one is watched, which takes the time of ten: sizes that a model's layers share once
_RECENT = 4  # kinds of calls that are looked for first: a model's layers are of few


def _probe(find, missing):
    """A torch internal, or a stand-in that returns `missing`."""
    try:
        return find()
    except AttributeError:
        return lambda *_: missing


_dispatch_modes = _probe(lambda: torch._C._len_torch_dispatch_stack, 1)
_transforms = _probe(lambda: torch._C._are_functorch_transforms_active, True)
_jit_tracing = _probe(lambda: torch._C._get_tracing_state, True)
_skip_code = _probe(lambda: torch._C._dynamo.eval_frame.skip_code, None)
_autocast = _probe(lambda: torch._C._is_any_autocast_enabled, True)
_saving = _probe(lambda: torch._C._autograd._top_saved_tensors_default_hooks, None)
_uncast = _probe(lambda: torch._C._DisableAutocast, contextlib.nullcontext())
_compiling = torch.compiler.is_compiling
_guards = getattr(getattr(getattr(torch._C, "_dynamo", None), "guards", None), "TensorGuards", None)


def _allocator(kind):
    """What inductor's code allocates with: (size, stride, dtype) on the current device; None where torch has none."""
    return getattr(getattr(getattr(torch._C, "_dynamo", None), "guards", None), f"_empty_strided_{kind}", None)


def replayed(function):
    """`function`, which is pure, with calls of a kind that was seen before repeated.

    Only where nothing traces or transforms: all that a call does is then seen by watching it. A call that gradients
    will flow through is repeated too, where its derivative is an op's own or PyTorch's.
    """
    signatures = {}  # by the types of the arguments: (what tells kinds apart, {kind: (repeat, its test, tests made)})
    recent = {}  # by the form of the arguments: what was repeated last, [(test, repeat), ...]

    @functools.wraps(function)
    def call(*args, **kwargs):
        if _compiling():
            return function(*args, **kwargs)
        form = (len(args), *kwargs) if kwargs else len(args)
        for is_alike, repeat in recent.get(form, ()):
            if is_alike(*args, **kwargs):
                return function(*args, **kwargs) if _device.profiled() else repeat(*args, **kwargs)
        if getattr(_device.watching, "within", False) or _dispatch_modes() or _transforms() or _jit_tracing():
            return function(*args, **kwargs)
        signature = (*map(type, args), *kwargs, *map(type, kwargs.values())) if kwargs else tuple(map(type, args))
        known = signatures.get(signature)
        if known is None:
            known = signatures[signature] = (_key_of(args, kwargs), {})
        key_of, known = known
        key = key_of(*args, **kwargs)
        if key is None:
            return function(*args, **kwargs)
        found = known.get(key, 0)
        if type(found) is int:  # how often it came
            if len(known) >= _LIMIT:  # sizes that never repeat
                known.clear()
            if found < _SEEN and not getattr(_device.watching, "now", False):
                known[key] = found + 1
                _device.watching.within = True  # calls that it is made of need not be counted
                try:
                    return function(*args, **kwargs)
                finally:
                    _device.watching.within = False
            result, repeat = _watch(function, args, kwargs)
            known[key] = repeat, _test_of(args, kwargs) if repeat else None, 1
            return result
        repeat, is_alike, tests = found
        if repeat is None or _device.profiled():
            return function(*args, **kwargs)
        last = recent.get(form, ())
        if any(is_alike is test for test, _ in last):  # it failed: inference mode, for one, is another state to guards
            is_alike = _test_of(args, kwargs) if tests < _RECENT else None
            known[key] = repeat, is_alike, tests + 1
        if is_alike is not None:
            recent[form] = ((is_alike, repeat), *last[: _RECENT - 1])
        return repeat(*args, **kwargs)

    def find(*args):
        """The repeat of a call like this one, which was made before; None where there is none."""
        key_of, known = signatures.get(tuple(map(type, args)), (lambda *_: None, {}))
        found = known.get(key_of(*args))
        return found[0] if type(found) is tuple else None

    call.find = find
    # A code object of its own: torch.compile counts recompilations by it, and would give up after eight functions.
    call.__code__ = call.__code__.replace(co_name=function.__name__)
    return call


def _key_of(args, kwargs):
    """A function of arguments of these types that gives all that decides what a call does, or None: not known."""
    given = [*((f"_{i}", a) for i, a in enumerate(args)), *kwargs.items()]
    tensors = [name for name, a in given if type(a) in _TENSORS]
    names = [name for name, _ in given]
    if not tensors or not all(type(a) in _TENSORS or type(a) in _VALUES or type(a) in _LISTS for _, a in given):
        return lambda *_, **__: None
    first, device = tensors[0], "is_cpu" if INTERPRET else "get_device()"  # a meta tensor's index is the CPU's
    parts, lists = [], [name for name, a in given if type(a) in _LISTS]
    for t in tensors:
        parts += [
            f"{t}.{device}", f"{t}.dtype", f"{t}.shape", f"{t}.stride()", f"{t}.data_ptr() % 16", f"{t}.is_neg()",
            f"learns and {t}.requires_grad",
        ]  # fmt: skip
    parts += [f"{a} is {b}" for i, a in enumerate(tensors) for b in tensors[:i]]
    parts += [f"{n} or repr({n})" if type(a) is float else n for n, a in given if type(a) in _VALUES]  # 0.0 == -0.0
    parts += [f"len({name}), *map(repr, {name})" for name in lists]  # 1, 1.0 and True are equal
    here = f"not {first}.is_cpu" if INTERPRET else f"{first}.get_device() < 0 or {first}.get_device() != current()"
    there = "".join(f" or not VALUES.issuperset(map(type, {name}))" for name in lists)
    source = f"""def key({", ".join(names)}):
    if {here} or forward_ad._current_level >= 0{there}:
        return None
    learns = grad()
    try:
        return ({", ".join(parts)}, autocast() and casts({first}), float32())
    except RuntimeError:  # a tensor has no memory: a batch of gradients, for one
        return None
"""
    values = {
        "current": _device.current, "forward_ad": torch.autograd.forward_ad, "VALUES": _VALUES, "autocast": _autocast,
        "grad": torch.is_grad_enabled, "casts": _casts, "float32": _device.float32_precision,
    }  # fmt: skip
    return _written(source, values)


def _test_of(args, kwargs):
    """A function of arguments of this form that tells quickly whether a call is of this one's kind; None if it cannot.

    PyTorch's guards compare types, devices, dtypes, layouts, bits and gradients, and by the dispatcher's keys what
    traces, transforms, watches or casts, in a fifth of the time that the key takes. They take no tensor twice.
    """
    given = [*((f"_{i}", a) for i, a in enumerate(args)), *kwargs.items()]
    tensors = {name: a for name, a in given if type(a) in _TENSORS}
    rest = {name: a for name, a in given if name not in tensors}
    if _guards is None or _autocast():
        return None
    values = {
        "GUARD": _guards(*tensors.values(), dynamic_dims_sizes=None, dynamic_dims_strides=None).check,
        "Tensor": torch.Tensor, "Parameter": torch.nn.Parameter, "AD": torch.autograd.forward_ad,
        "CURRENT": _device.current, "GRAD": torch.is_grad_enabled, "LEARNS": torch.is_grad_enabled(),
        "FLOAT32": _device.float32_precision, "PRECISION": _device.float32_precision(),
        **{f"GIVEN{name}": a for name, a in rest.items()},
    }  # fmt: skip
    # Guards end the process where a tensor has no strides: nested ones, and those without memory, which raise here.
    tests = [f"type({t}) is {type(a).__name__} and not {t}.is_nested" for t, a in tensors.items()]
    tests += [f"not ({' | '.join(f'{t}.data_ptr()' for t in tensors)}) % 16"]
    tests += [f"GUARD({', '.join(tensors)})", "AD._current_level < 0"]
    tests += [f"CURRENT() == {next(iter(tensors.values())).get_device()}"] * (not INTERPRET)
    tests += ["GRAD() is LEARNS"] * any(t.requires_grad for t in tensors.values())
    tests += ["FLOAT32() == PRECISION"] * any(
        t.is_floating_point() and t.dtype not in _HALVES for t in tensors.values()
    )
    for n, a in rest.items():
        kind = type(a).__name__
        values[f"TYPES{n}"], values[f"REPR{n}"] = [*map(type, a)] if type(a) in _LISTS else None, repr(a)
        if type(a) in _LISTS:
            tests += [f"type({n}) is {kind} and [*map(type, {n})] == TYPES{n} and repr({n}) == REPR{n}"]
        elif type(a) in (int, float, str):
            sign = f" and repr({n}) == REPR{n}" * (type(a) is float and a == 0)  # 0.0 == -0.0
            tests += [f"({n} is GIVEN{n} or type({n}) is {kind} and {n} == GIVEN{n}{sign})"]
        else:
            tests += [f"{n} is GIVEN{n}"]
    source = f"""def is_alike({", ".join(name for name, _ in given)}):
    try:
        return {" and ".join(tests)}
    except RuntimeError:
        return False
"""
    is_alike = _written(source, values)
    return is_alike if is_alike(*args, **kwargs) else None


@functools.lru_cache(4096)
def _code(source):
    """The code of the function that `source` defines, which torch.compile is not to look into."""
    (code,) = (c for c in compile(source, "<repeat>", "exec").co_consts if isinstance(c, types.CodeType))
    _skip_code(code)
    return code


def _written(source, values):
    """The function that `source` defines. Calls that differ in `values` alone share its code."""
    return types.FunctionType(_code(source), {"__builtins__": __builtins__, **values})  # torch.compile looks for them


def _casts(t):
    device = t.device.type
    return torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device)


def _watch(function, args, kwargs):
    """(result of the call, the function that repeats it, or None)."""
    watch = _Watch(args, kwargs)
    _device.watching.by = watch
    try:
        with watch.hooks(), watch:
            result = function(*args, **kwargs)
    finally:
        _device.watching.by = None
    try:
        return result, watch.written(result)
    except _Unknown:
        return result, None


_OF_DTYPES = (torch.ops.aten.promote_types.default, torch.ops.aten.result_type.Tensor)

# Called by PyTorch's own names, which takes half as long.
_NAMED = {
    getattr(torch.ops.aten, n).default: getattr(torch, n) for n in ("mm", "addmm", "_scaled_mm") if hasattr(torch, n)
}
_NAMED[torch.ops.aten.transpose.int] = torch.transpose
_TURNS = (torch.ops.aten.t.default, torch.ops.aten.transpose.int)
_PRODUCTS = {torch.ops.aten.mm.default: 2, torch.ops.aten.addmm.default: 1}  # which F.linear is, and the dims it takes
_NAMED[torch.ops.aten.copy_.default] = torch.Tensor.copy_


class _Unknown(Exception):
    pass


def _described(kind, fields, base):
    """A tensor descriptor without the checks that one of the same layout has passed."""
    descriptor = object.__new__(kind)
    vars(descriptor).update(fields, base=base)
    return descriptor


class _Watch(TorchDispatchMode):
    """Writes down what a call does. Tensors have names; their ids are theirs as long as this keeps them."""

    def __init__(self, args, kwargs):
        super().__init__()
        given = [*((f"_{i}", a) for i, a in enumerate(args)), *kwargs.items()]
        self.parameters = [name for name, _ in given]
        self.tensors = {name: a for name, a in given if isinstance(a, torch.Tensor)}
        self.names = {id(t): name for name, t in self.tensors.items()}
        self.kept = list(self.tensors.values())
        self.lines = []  # (names made, names used, text, whether it has effects)
        self.roots = {}  # of a view: (name of what it is a view of, bytes from its start)
        self.allocated = {}  # where in `lines` memory is made, by its name
        self.laid = {}  # by the place of its line: (a view of all of such memory, its name, the memory's)
        self.turned = {}  # of a transposed matrix, by its id: the matrix
        self.asked = collections.Counter()  # how often a name is used other than by its address
        self.learns, self.casts = torch.is_grad_enabled(), _autocast()
        self.learning = []  # (tensor, whether gradients flow into it)
        self.values = {}
        self.refused = False

    def __torch_dispatch__(self, func, kinds, args=(), kwargs=None):
        kwargs = kwargs or {}
        if torch.is_inference_mode_enabled() and func._can_decompose():  # elsewhere autograd has done that
            with self:
                return func.decompose(*args, **kwargs)
        out = func(*args, **kwargs)
        outs = out if isinstance(out, (tuple, list)) else (out,)
        if func in _OF_DTYPES:
            return out
        tags = func.tags
        given = [t for t in (*args, *kwargs.values()) if isinstance(t, torch.Tensor)]
        learns = any(t.requires_grad for t in given)
        if func is torch.ops.aten.detach.default and not learns and self.names.get(id(args[0]), "").startswith("_t"):
            self.names[id(out)] = self.names[id(args[0])]  # of memory made here, as torch.empty does by itself
            self.kept.append(out)
            return out
        if (
            (learns and ((self.learns and func._schema.is_mutable) or torch.is_grad_enabled() != self.learns))
            or func is torch.ops.aten.as_strided.default  # counts from the start of memory
            or not all(isinstance(t, torch.Tensor) for t in outs)
            or torch.Tag.data_dependent_output in tags
            or torch.Tag.dynamic_output_shape in tags
        ):
            self.refused = True
            return out
        if func in _TURNS and out.dim() == 2 and out.stride() == args[0].stride()[::-1]:
            self.turned[id(out)] = args[0]
        try:
            used = []
            called, operands = _NAMED.get(func, func), args
            if func in _PRODUCTS and args[0].dim() == _PRODUCTS[func] and not kwargs and id(args[-1]) in self.turned:
                called = torch.nn.functional.linear  # which turns the matrix itself, without Python
                operands = (args[-2], self.turned[id(args[-1])], *args[:-2])
            text = f"{self.value(called)}({self.arguments(operands, kwargs, used)})"
            made = [self.name(t) for t in outs if id(t) not in self.names]  # an op in place returns what it was given
            if made and str(func).startswith(("aten.empty", "aten.new_empty")):
                text, used = self.allocation(outs[0]), []
                self.allocated[made[0]] = len(self.lines)
            if func.is_view and made and len(outs) == 1:
                base = self.names[id(given[0])]
                root, offset = self.roots.get(base, (base, 0))
                self.roots[made[0]] = (root, offset + out.data_ptr() - given[0].data_ptr())
                if base in self.allocated and out.dtype == given[0].dtype and out.numel() == given[0].numel():
                    self.laid[len(self.lines)] = (out, made[0], base)
            self.note(out, used, text, func._schema.is_mutable or torch.Tag.nondeterministic_seeded in tags or not made)
            learns = learns and self.learns and func is not torch.ops.aten.detach.default
            self.learning += [(t, learns and t.is_floating_point()) for t in outs if self.names[id(t)] in made]
        except _Unknown:
            self.refused = True
        return out

    def applied(self, apply, known, args):
        """apply(*args) of an autograd.Function, unwatched, for it is called again as a whole.

        known: gives the quickest way to apply it, once it was applied.
        """
        with self.unwatched():
            _device.watching.now = True  # what it is made of is written down too
            try:
                out = apply(*args)
            finally:
                _device.watching.now = False
            apply = known(*args)
        try:
            if not self.learns:
                raise _Unknown
            used = []
            text = f"{self.value(apply)}({self.arguments(args, {}, used)})"
            for t in out if isinstance(out, tuple) else (out,):
                self.name(t)
            self.note(out, used, text, True)
        except _Unknown:
            self.refused = True
        return out

    @contextlib.contextmanager
    def unwatched(self):
        _device.watching.by = None
        try:
            with _disable_current_modes():
                yield
        finally:
            _device.watching.by = self

    def hooks(self):
        """What keeps hooks on saved tensors, which repeats call anew, from being written down."""
        found = _saving(True)
        if found is None:
            return contextlib.nullcontext()
        pack, unpack = found
        return torch.autograd.graph.saved_tensors_hooks(self.unwatched()(pack), unpack)

    def note(self, out, used, text, effects):
        several = isinstance(out, (tuple, list))
        made = [self.names[id(t)] for t in (out if several else (out,))]
        self.lines.append((made, used, f"{', '.join(made)}{',' * several} = {text}", effects))

    def name(self, t):
        self.kept.append(t)
        return self.names.setdefault(id(t), f"_t{len(self.names)}")

    def value(self, v):
        if v is None or type(v) in (bool, str):
            return repr(v)
        name = f"_v{len(self.values)}"
        self.values[name] = v
        return name

    def operand(self, v, used):
        if isinstance(v, torch.Tensor):
            if id(v) not in self.names:
                raise _Unknown
            used.append(self.names[id(v)])
            self.asked[used[-1]] += 1
            return used[-1]
        if isinstance(v, (tuple, list)) and any(isinstance(t, torch.Tensor) for t in v):
            return "[" + ", ".join(self.operand(t, used) for t in v) + "]"
        return self.value(list(v) if type(v) is list else v)  # a list of its own

    def arguments(self, args, kwargs, used):
        given = [self.operand(a, used) for a in args]
        return ", ".join([*given, *(f"{k}={self.operand(a, used)}" for k, a in kwargs.items())])

    def allocation(self, t):
        """The quickest way to make memory that lies like t's."""
        like = f"{self.value(tuple(t.shape))}, {self.value(t.stride())}"
        quick = _allocator(t.device.type)
        if quick is not None and (t.is_cpu or t.get_device() == _device.current()):
            return f"{self.value(quick)}({like}, {self.value(t.dtype)})"
        make = self.value(torch.empty_strided)
        return f"{make}({like}, dtype={self.value(t.dtype)}, device={self.value(t.device)})"

    def launched(self, launch, args, addresses, fillers=()):
        """`launch` makes the text of the kernel's arguments, which are text, that of the launch.

        addresses: whether it takes those of tensors in their place.   fillers: what makes of each descriptor, in their
        order, what the launch takes in its place; where there are none, it takes descriptors.
        """
        used, fillers = [], iter(fillers)
        try:
            given = [self.kernel_argument(a, used, addresses, fillers) for a in args]
            self.lines.append(((), used, launch(self.value, ", ".join(given)), True))
        except _Unknown:
            self.refused = True

    def address(self, t, used):
        name = self.names.get(id(t))
        if name is None:
            raise _Unknown
        root, offset = self.roots.get(name, (name, 0))
        used.append(root)
        return f"{root}.data_ptr()" + (f" + {self.value(offset)}" if offset else "")

    def kernel_argument(self, a, used, addresses, fillers):
        if isinstance(a, torch.Tensor):
            if addresses:
                return self.address(a, used)
            if id(a) not in self.names:
                raise _Unknown
            used.append(self.names[id(a)])
            return used[-1]
        if type(a) in DESCRIPTORS:
            fill = next(fillers, None)
            if fill is not None:
                function, options, rest = fill(a)
                parts = (self.address(a.base, used), *map(self.value, options))
                return f"{self.value(function)}({', '.join(parts)}), {', '.join(map(self.value, rest))}"
            fields = {k: v for k, v in vars(a).items() if k != "base"}
            return (
                f"{self.value(_described)}({self.value(type(a))}, {self.value(fields)}, {self.operand(a.base, used)})"
            )
        return self.value(a)

    def written(self, result):
        """The function of the call's tensors that does the same."""
        if self.refused or (self.learns and any(t.requires_grad != learns for t, learns in self.learning)):  # detach_
            raise _Unknown
        used, several = [], isinstance(result, tuple)
        if not all(isinstance(r, torch.Tensor) or type(r) in _VALUES for r in (result if several else (result,))):
            raise _Unknown
        if several:
            parts = ", ".join(self.operand(r, used) for r in result)
            plain = type(result) is tuple
            if not plain and not hasattr(result, "_fields"):
                raise _Unknown
            text = f"({parts},)" if plain else f"{self.value(type(result))}({parts})"
        else:
            text = self.operand(result, used)
        for i, (view, name, memory) in self.laid.items():
            if self.asked[memory] == 1:  # for the view: memory may as well be made that way
                made = self.allocated[memory]
                for at, line in ((made, f"{memory} = {self.allocation(view)}"), (i, f"{name} = {memory}")):
                    self.lines[at] = (*self.lines[at][:2], line, self.lines[at][3])
        needed, body, kept = set(used), [], {*used, *self.tensors}
        for made, uses, line, effects in reversed(self.lines):
            if effects or needed.intersection(made):
                needed.update(uses)
                ends = sorted({*made, *uses} - kept)  # its last use: memory goes back as soon as in the call itself
                kept.update(ends)
                body.append(line + (f"; del {', '.join(ends)}" if ends else ""))
        body = [*reversed(body), f"return {text}"]
        if self.casts:  # what autocast casts is cast by now
            body = [f"with {self.value(_uncast)}():", *(f"    {line}" for line in body)]
        source = f"def replay({', '.join(self.parameters)}):\n" + "".join(f"    {line}\n" for line in body)
        return _written(source, self.values)
