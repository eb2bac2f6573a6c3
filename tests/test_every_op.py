"""What a user can do to any op, done to all of them: every public function, by its typical call in `_calls.py`.

PROOF=1 runs everything (`make proof`); without it what takes long is done to one function of each family.
"""

import contextlib
import copy
import gc
import inspect
import os
import subprocess
import sys
import time
import tracemalloc
import types

import pytest
import torch
from _calls import NAMES, NO_GRADIENT, PROCESSES, RANDOM, TORCHS, arguments, find, floats, leaves, on_tensors
from _inputs import LAYOUTS, amid, apart, relaid, vast
from _numerics import DTYPES, assert_close, gradcheck, gradgradcheck, opcheck
from test_package import FAMILIES, MODULES, public_functions

PROOF = os.environ.get("PROOF") == "1"
PUBLIC = [f"{f}.{n}" if f in MODULES else n for f in FAMILIES for n in public_functions(f)]
FIRST = [f"{f}.{n}" if f in MODULES else n for f in FAMILIES for n in public_functions(f)[:1]]
INTERPRET = os.environ.get("TRITON_INTERPRET") == "1"
ALL_LAYOUTS = (*LAYOUTS, "padded", "odd")
SQUARE = {  # not of rows that stand alone
    "matmul", "linear", "gated_linear", "grouped_mm", "scaled_matmul", "linear_cross_entropy", "token_log_probs",
    "scaled_dot_product_attention", "flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache",
    "apply_rotary_pos_emb", "rotary", "qk_norm_rotary",
}  # fmt: skip
LEARN = [n for n in NAMES if n not in NO_GRADIENT]


def sample(names, step=1):
    """All of them where PROOF is set; else of each family the first, and of those every step-th."""
    return pytest.mark.parametrize("name", names if PROOF else [n for n in names if n in FIRST][::step])


# The interpreter takes ten times as long.
every = pytest.mark.parametrize("name", NAMES) if not INTERPRET else sample(NAMES, 2)
learning = pytest.mark.parametrize("name", LEARN) if not INTERPRET else sample(LEARN, 2)
some, some_learning = (sample(names, 4 if INTERPRET else 1) for names in (NAMES, LEARN))


def test_every_function_has_a_call():
    assert sorted([*NAMES, *PROCESSES]) == sorted(PUBLIC)


@pytest.fixture
def call(kernel, name, device):
    return Call(kernel, name, device)


class Call:
    """One function with its arguments."""

    def __init__(self, kernel, name, device, dtype=torch.float32, **sizes):
        self.kernel, self.name, self.device, self.dtype, self.sizes = kernel, name, device, dtype, sizes
        self.function = find(kernel, name)
        self.given = arguments(name, dtype, device, **sizes)
        self.names = leaves(name, self.given)

    def again(self, dtype=torch.float32, **sizes):
        return Call(self.kernel, self.name, self.device, dtype, **sizes)

    @property
    def tensors(self):
        """The names of all its tensors."""
        return [key for key, t in self.given.items() if isinstance(t, torch.Tensor)]

    def inputs(self):
        """Fresh leaves."""
        return [self.given[n].detach().clone().requires_grad_() for n in self.names]

    def of(self, *tensors):
        """The call on these tensors, for those that have gradients: what is floating of its results, as a tuple."""
        return floats(on_tensors(self.function, self.given, self.names)(*tensors))

    def results(self):
        results = self.function(**self.given)
        return results if isinstance(results, tuple) else (results,)

    def gradients(self, tensors=None, **options):
        tensors = self.inputs() if tensors is None else tensors
        return backward(self.of(*tensors), tensors, **options)


def backward(results, tensors, **options):
    grads = into(results)
    return torch.autograd.grad([r for r in results if r.requires_grad], tensors, grads, allow_unused=True, **options)


def into(results):
    """Gradients that flow into the results, the same each time."""
    torch.manual_seed(1)
    return [torch.randn(r.shape, dtype=torch.float64).to(r) for r in results if r.requires_grad]


def equal(ours, theirs):
    """The same bits, NaN or not."""
    pairs = [(a, b) for a, b in zip(ours, theirs, strict=True) if a is not None or b is not None]
    return all(a.dtype == b.dtype and torch.equal(bits(a), bits(b)) for a, b in pairs)


def bits(t):
    return t.detach().contiguous().reshape(-1).view(torch.uint8)


def close(ours, theirs):
    for a, b in zip(ours, theirs, strict=True):
        if a is not None and a.dtype in (torch.bfloat16, torch.float16):  # rounded after sums in another order
            assert_close(a, b.double(), dim=None)
        elif a is not None or b is not None:
            a, b = (t if t.dtype in (torch.float32, torch.float64) else t.float() for t in (a, b))
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5, equal_nan=True)


# Calls and derivatives


@every
def test_repeats_are_equal(call):
    """Three calls: watched, repeated, and by the op; forward and backward; inputs as they were."""
    before = copy.deepcopy(call.given)
    first = call.results()
    assert equal(first, call.results()) and equal(first, call.results())
    with torch.inference_mode():
        assert equal(first, call.results())
    if call.names:
        grads = call.gradients()
        assert equal(grads, call.gradients()) and equal(grads, call.gradients())
    assert equal([before[t] for t in call.tensors], [call.given[t] for t in call.tensors])
    assert all(call.given[t]._version == 0 for t in call.tensors if not call.given[t].is_inference())


@some_learning
def test_gradients_in_float64(call, internals):
    call = call.again(torch.float64, rows=3)
    tensors = call.inputs()
    assert gradcheck(call.of, tensors)
    if internals(call.function.__module__.rpartition(".")[2]).SECOND_ORDER == "refused":
        with pytest.raises((RuntimeError, NotImplementedError)):
            grads = call.gradients(tensors, create_graph=True)
            torch.autograd.grad(grads[0].sum(), tensors)
    else:
        assert gradgradcheck(call.of, tensors)


@some_learning
def test_uses_of_a_graph(call, on_kernels):
    """Kept and walked twice, one gradient for two backwards, recomputed, packed away, and through hooks."""
    tensors, expected = call.inputs(), call.gradients()
    results = call.of(*tensors)
    for _ in range(2):
        assert equal(backward(results, tensors, retain_graph=True), expected)

    g, others = into(results), call.inputs()
    kept = copy.deepcopy(g)
    torch.autograd.backward([r for r in results if r.requires_grad], g)
    torch.autograd.backward([r for r in call.of(*others) if r.requires_grad], g)
    assert equal([t.grad for t in tensors], expected) and equal([t.grad for t in others], expected)
    memory = [t.data_ptr() for t in (*(t.grad for t in (*tensors, *others)), *g) if t is not None]
    assert equal(g, kept) and len(set(memory)) == len(memory), "gradients share memory"

    for reentrant in (False, True):
        tensors = call.inputs()
        again = torch.utils.checkpoint.checkpoint(call.of, *tensors, use_reentrant=reentrant)
        if reentrant:
            torch.autograd.backward([r for r in again if r.requires_grad], into(again))
            assert equal([t.grad for t in tensors], expected)
        else:
            assert equal(backward(again, tensors), expected)

    tensors = call.inputs()
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda t: t):
        results = call.of(*tensors)
    grads = backward(results, tensors)
    assert equal(grads, expected) if on_kernels else close(grads, expected) is None

    tensors, seen = call.inputs(), []
    results = call.of(*tensors)
    for r in results:
        if r.requires_grad:
            r.register_hook(lambda g: relaid(g, "transposed"))
    for t in tensors:
        t.register_hook(seen.append)
    close(backward(results, tensors), expected)
    assert len(seen) == sum(g is not None for g in expected)


# Tracers, transforms and modes


@some
def test_ops(call, internals, monkeypatch):
    """Every op of the package that the call comes to, forward and backward, by torch.library.opcheck."""
    for name, module in list(sys.modules.items()):  # those that leave the CPU to PyTorch come to theirs
        if name.startswith(call.kernel.__name__) and not name.endswith(("._dispatch", "linear_cross_entropy")):
            monkeypatch.setattr(module, "use_kernel", lambda x: True, raising=False)
    namespace = internals("_ops").add_op_namespace_prefix("")[: -len("::")]
    seen = {}

    class Record(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func.namespace == namespace:
                seen.setdefault(func, tuple(a.detach().clone() if isinstance(a, torch.Tensor) else a for a in args))
            return func(*args, **(kwargs or {}))

    with Record():
        if call.names:
            call.gradients()
        else:
            call.results()
    assert seen
    for op, args in seen.items():
        opcheck(op, args, traced=True)


@some
def test_compile(call):
    """Without a graph break, at one size, at a second, and then at any without compiling again."""
    torch._dynamo.reset()
    compiled = torch.compile(call.function, fullgraph=True, backend="aot_eager")
    for rows in (4, 6, 10):
        now = call.again(rows=rows)
        guard = torch._dynamo.config.patch(error_on_recompile=rows == 10)
        with guard:
            if now.names:
                tensors = now.inputs()
                now.function, eager = compiled, now.function
                grads = now.gradients(tensors)
                now.function = eager
                close(grads, now.gradients())
            close(as_tuple(compiled(**now.given)), now.results())


def as_tuple(results):
    return results if isinstance(results, tuple) else (results,)


@some
def test_export(call):
    class Model(torch.nn.Module):
        def forward(self, *tensors):
            return call.of(*tensors) if call.names else call.function(**call.given)

    if not call.names:
        pytest.skip("no arguments to export")
    tensors = [call.given[n] for n in call.names]
    program = torch.export.export(Model(), tuple(tensors))
    close(program.module()(*tensors), call.of(*tensors))


@every
def test_fake_and_meta(call):
    """Results and gradients of the same shapes, strides and dtypes, from no values."""
    expected = call.results()
    lies = lambda ts: [t if t is None else (t.dtype, t.shape, t.stride()) for t in ts]  # noqa: E731
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = call.again()
        fake.given = {k: mode.from_tensor(t) if isinstance(t, torch.Tensor) else t for k, t in call.given.items()}
        assert lies(fake.results()) == lies(expected)
    meta = call.again()
    meta.given = {k: t.to("meta") if isinstance(t, torch.Tensor) else t for k, t in call.given.items()}
    assert lies(meta.results()) == lies(expected)


@some
def test_vmap(call):
    keys = call.tensors
    batch = [call.again() for _ in range(3)]
    for i, c in enumerate(batch):
        for k in call.names:
            c.given[k] = c.given[k] * (1 + i) / 2
    single = lambda *ts: floats(on_tensors(call.function, call.given, keys)(*ts))  # noqa: E731
    stacked = [torch.stack([c.given[k] for c in batch]) for k in keys]
    together = torch.func.vmap(single)(*stacked)
    for i, c in enumerate(batch):
        close([t[i] for t in together], floats(c.results()))


@some_learning
def test_functional_derivatives(call):
    tensors = [call.given[n] for n in call.names]
    results, vjp = torch.func.vjp(call.of, *tensors)
    cotangents = [tuple(torch.randn_like(r) for r in results) for _ in range(2)]
    rows = torch.func.vmap(vjp)(tuple(torch.stack(c) for c in zip(*cotangents)))
    for i, c in enumerate(cotangents):
        leaves = call.inputs()
        grads = torch.autograd.grad(call.of(*leaves), leaves, c, allow_unused=True, materialize_grads=True)
        close([r[i] for r in rows], grads)


@learning
def test_forward_mode(call, on_kernels):
    """Refused on the kernels, never a silent zero; PyTorch's own elsewhere."""
    tensors = tuple(call.given[n] for n in call.names)
    if on_kernels:
        with pytest.raises(NotImplementedError):
            torch.func.jvp(call.of, tensors, tensors)
        return
    with contextlib.suppress(NotImplementedError):
        call = call.again(torch.float64)
        tensors = tuple(call.given[n] for n in call.names)
        _, tangents = torch.func.jvp(call.of, tensors, tensors)
        h = 1e-6
        up, down = (call.of(*[t * (1 + s) for t in tensors]) for s in (h, -h))
        close(tangents, [(a - b) / (2 * h) for a, b in zip(up, down)])


@every
def test_autocast(call, internals, device):
    """Products take the dtype of autocast, losses stay in float32, all else follows its inputs."""
    module = internals(call.function.__module__.rpartition(".")[2])
    with torch.autocast(device.type, dtype=torch.bfloat16):
        results = call.results()
    casts = hasattr(module, "autocast") and call.name not in ("linear_cross_entropy", "token_log_probs")
    if casts:
        assert all(r.dtype == torch.bfloat16 for r in floats(results))
    else:
        assert [r.dtype for r in results] == [r.dtype for r in call.results()]
        if not hasattr(module, "autocast"):
            assert equal(results, call.results())


@every
def test_deterministic_algorithms(call):
    torch.use_deterministic_algorithms(True)
    try:
        call.gradients() if call.names else call.results()
    finally:
        torch.use_deterministic_algorithms(True, warn_only=True)


# Values and layouts


@every
def test_no_rows(call):
    """PyTorch's results, and gradients that are empty, or zero for what all rows share."""
    call = call.again(rows=0)
    expected = call.results() if call.name in RANDOM else as_tuple(TORCHS[call.name](**call.given))
    for a, b in zip(call.results(), expected, strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        near(a, b)
    if call.names:
        tensors = call.inputs()
        for t, g in zip(tensors, call.gradients(tensors)):
            assert g is None or (g.shape == t.shape and not g.nan_to_num(0.0).any())


@some
def test_layouts(call):
    """Operands and gradients that lie in any way give what contiguous ones give."""
    for layout in ALL_LAYOUTS:
        for only in (None, *call.names[:1]) if call.names else (None,):
            hold_layouts(call, {n: layout for n in call.tensors if only in (None, n)}, layout)


def hold_layouts(call, layouts, of_gradients):
    """The call with tensors relaid, beside the same values in contiguous memory; so for the gradients."""
    there, here = call.again(call.dtype, **call.sizes), call.again(call.dtype, **call.sizes)
    for key, layout in layouts.items():
        t = relaid(call.given[key], layout)
        there.given[key], here.given[key] = t, t.contiguous()
    for a, b in zip(there.results(), here.results(), strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        near(a, b)
    if not call.names:
        return
    kept = {key: t.detach().clone() for key, t in there.given.items() if isinstance(t, torch.Tensor)}
    grads = []
    for c in (there, here):
        tensors = [c.given[n].detach().requires_grad_() for n in c.names]
        results = c.of(*tensors)
        given = [relaid(g, of_gradients) for g in into(results)]
        grads.append(torch.autograd.grad(
            [r for r in results if r.requires_grad], tensors, given, allow_unused=True))  # fmt: skip
    # Of a softmax that is nearly 0 and 1, what is left of terms as large as products of three operands.
    cancel = 128 if "attention" in call.name or "attn" in call.name else 1
    largest = max(float(g.abs().max()) for g in given)
    more = call.again(call.dtype, **{**call.sizes, "rows": call.sizes.get("rows", 4) + 2}).given
    for name, a, b in zip(there.names, *grads):
        if a is not None or b is not None:
            shared = more[name].shape == a.shape  # a sum over all rows, which may leave little of one of its own
            near(a, b, slack=cancel * torch.finfo(a.dtype).eps * largest, shared=shared)
    assert equal([there.given[key] for key in kept], kept.values())


def near(a, b, slack=0.0, shared=False):
    """Sums of other orders, rounded."""
    if a.dtype in DTYPES and a.numel():
        assert_close(a, b.double(), dim=None if shared or a.dim() < 2 else -1, slack=slack)
    else:
        assert equal([a], [b])


BATCHES = {"cross_entropy", "group_norm"}  # whose dimension 1 is special


@sample([n for n in NAMES if n not in SQUARE | RANDOM | BATCHES])
def test_awkward_rows(call, internals, monkeypatch):
    """Rows of three dimensions that lie apart, more tiles than programs, NaN beside what is allocated."""
    flat, there = call.again(rows=70), call.again(rows=70)
    for key in there.tensors:
        if there.given[key].shape[:1] == (70,):
            there.given[key] = apart(there.given[key], (2, 5, 7))
    expected = flat.results(), flat.gradients() if flat.names else ()
    for name, module in list(sys.modules.items()):
        if name.startswith(call.kernel.__name__) and hasattr(module, "facts"):
            one = lambda device, facts=module.facts: facts(device)._replace(multiprocessors=1)  # noqa: E731
            monkeypatch.setattr(module, "facts", one)
    monkeypatch.setattr(internals("_replay"), "_compiling", lambda: True)  # nothing that is written down
    new = amid(torch.empty)
    monkeypatch.setattr(torch, "empty", new)
    like = lambda t, *shape, **how: new(*shape, **{"dtype": t.dtype, "device": t.device, **how})  # noqa: E731
    monkeypatch.setattr(torch.Tensor, "new_empty", like)
    tensors = [there.given[n].detach().requires_grad_() for n in there.names]
    found = there.results(), there.gradients(tensors) if there.names else ()
    for ours, theirs in zip(found, expected):
        for a, b in zip(ours, theirs, strict=True):
            if a is not None or b is not None:
                near(a.reshape(b.shape), b)


MODULATED = ["modulated_rms_norm"]  # PROOF=1, or a GPU: all


@pytest.mark.parametrize(
    "name", [n for n in LEARN if n not in SQUARE | RANDOM] if PROOF or not INTERPRET else MODULATED
)
def test_many_batches(call, device, on_kernels, monkeypatch):
    """Of 65537 batches of two rows: GPUs refuse launches of as many programs in their second or third dimension."""
    if not on_kernels or (device.type == "cpu" and not PROOF and call.name != "modulated_rms_norm"):
        pytest.skip("on a GPU, or with PROOF=1")
    call, grids = call.again(rows=2**17 + 2, columns=64), []
    for key in call.tensors:
        if call.given[key].shape[:1] == (2**17 + 2,) and call.name not in BATCHES:
            call.given[key] = apart(call.given[key], (2**16 + 1, 2))
    if device.type == "cpu":  # in the interpreter nothing of it runs
        for name, module in list(sys.modules.items()):
            if name.startswith(call.kernel.__name__) and hasattr(module, "launch"):
                monkeypatch.setattr(module, "launch", lambda kernel, grid, *_, **__: grids.append(grid))
    everything(call, [call.given[n].detach().requires_grad_() for n in call.names])
    assert all(n < 2**16 for grid in grids for n in grid[1:])


SPECIAL = [torch.nan, torch.inf, -torch.inf, 0.0, -0.0, 3e38, -3e38, 1e-40, 2.0**-126]
OTHERWISE = {  # rows where the result is not PyTorch's on purpose, and why
    "distillation_jsd": ([2], "where a probability is 0 so is the term"),
    "masked_softmax": ([10], "a row without anything but -inf gives 0"),
    "quantize_fp8": (None, "scales come from the finite elements"),
    "layer_norm": ([5, 6], "squares overflow: PyTorch's own result is NaN once the mean is off"),
    "add_layer_norm": ([5, 6], "as layer_norm"),
    "reductions.std": ([5, 6], "the variance overflows; PyTorch's CPU sums in float64"),
    "flash_attn_varlen_func": ([5, 6], "scores overflow or not, by the order of their factors"),
    "reductions.cumsum": (None, "a sum of the largest numbers may overflow or not, by its order"),
}


def special(call, skipped):
    """(a call with special values in one of its inputs, its arguments for PyTorch in float32 and in float64, the rows
    to compare); skips the test where PyTorch has nothing to compare with."""
    rows = len(SPECIAL) + 3
    call = call.again(rows=rows)
    key = next(n for n in call.tensors if call.given[n].dim() > 1)
    if call.name in RANDOM or call.given[key].dtype != torch.float32:
        pytest.skip("PyTorch has nothing to compare with")
    t = call.given[key]
    dim = t.shape.index(rows)
    for i, value in enumerate(SPECIAL):
        t.select(dim, i)[..., 5] = value
    t.select(dim, rows - 3)[:] = torch.inf
    t.select(dim, rows - 2)[:] = -torch.inf
    cpu = {k: v.cpu() if isinstance(v, torch.Tensor) else v for k, v in call.given.items()}
    double = {k: v.double() if isinstance(v, torch.Tensor) and v.is_floating_point() else v for k, v in cpu.items()}
    return call, (cpu, double), [i for i in range(rows) if i not in skipped]


def hold_special(actual, others, compared, tolerance):
    """Elementwise what one of the others is, or no further from the last, the exact one, than another of them."""
    actual, others = actual.cpu(), [o.to(actual.dtype) for o in others]
    off = (actual - others[-1]).abs()
    right = torch.zeros_like(actual, dtype=torch.bool)
    for o in others:
        right |= torch.isclose(actual, o, tolerance, tolerance, equal_nan=True) | (off <= (o - others[-1]).abs())
    dim = next((d for d, n in enumerate(right.shape) if n == len(SPECIAL) + 3), None)
    if dim is not None:
        right = right.index_select(dim, torch.tensor(compared))
    assert right.all(), f"first at {tuple((~right).nonzero()[0].tolist())} of rows {compared}"


GRADIENTS_OTHERWISE = {
    "masked_softmax": ([0, 1, 9, 10], "a row of NaN: also where it is masked, which is read in the forward alone"),
    "distillation_jsd": ([2], "where a probability is 0 so is the term"),
    "distillation_kl": ([5], "of terms of 3e38 little is left: PyTorch's own two differ in their second digit"),
    **dict.fromkeys(
        ("scaled_dot_product_attention", "flash_attn_func"), ([5, 6], "scores overflow or not, by the order of factors")
    ),
    **dict.fromkeys(("layer_norm", "add_layer_norm", "modulated_layer_norm"), ([5, 6], "the squares overflow")),
}


@every
def test_special_values(call):
    """NaN and infinities come out where they do of PyTorch's formula, in float32 or in float64."""
    skipped, why = OTHERWISE.get(call.name, ([], ""))
    if skipped is None:
        pytest.skip(why)
    call, given, compared = special(call, skipped)
    known = [as_tuple(TORCHS[call.name](**given[0]))]
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):  # PyTorch's quick one gives 0 for NaN
        known += [as_tuple(TORCHS[call.name](**g)) for g in given]
    for actual, *others in zip(call.results(), *known, strict=True):
        if actual.is_floating_point():  # an index of one among equals, or among NaN, is no promise of PyTorch's
            hold_special(actual, others, compared, 1e-5)


@learning
def test_special_gradients(call):
    """They come to the gradients as they do of PyTorch's formula, in float32 or in float64."""
    skipped, why = GRADIENTS_OTHERWISE.get(call.name) or OTHERWISE.get(call.name, ([], ""))
    if skipped is None:
        pytest.skip(why)
    call, given, compared = special(call, skipped)
    known = []
    for g in given:
        tensors = [g[n].detach().requires_grad_() for n in call.names]
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            known.append(backward(floats(on_tensors(TORCHS[call.name], g, call.names)(*tensors)), tensors))
    for actual, *others in zip(call.gradients(), *known, strict=True):
        if actual is not None:
            hold_special(actual, others, compared, 1e-4)


# Hostile input

WRONG = (
    object(),
    "wrong",
    [],
    [1.0],
    {},
    None,
    True,
    -1,
    2**70,
    1.5,
    torch.nan,
    torch.inf,
    torch.int8,
    torch.float8_e5m2,
    (1, 2),
)
TENSORS = {
    "int64": lambda t: t.to(torch.int64),
    "bool": lambda t: t.to(torch.bool),
    "complex64": lambda t: t.to(torch.complex64),
    "float8": lambda t: t.to(torch.float8_e5m2),
    "meta": lambda t: t.to("meta"),
    "sparse": lambda t: t.float().to_sparse(),
    "nested": lambda t: torch.nested.nested_tensor([t.float(), t.float()]),
    "one dimension more": lambda t: t[None],
    "none": lambda t: t.flatten()[0],
    "flat": lambda t: t.flatten(),
    "shorter": lambda t: t[..., :-1] if t.dim() else t,
    "fewer": lambda t: t[:-1] if t.dim() else t,
    "of nothing": lambda t: t[..., :0] if t.dim() else t,
    "no rows": lambda t: t[:0] if t.dim() else t,
}


@every
def test_hostile_input(call, monkeypatch):
    """Each argument replaced by what it may not be: an error in the house's form before anything is launched, or a
    result, where the argument may be that."""
    launched, wrong = [], []
    for name, module in list(sys.modules.items()):
        if name.startswith(call.kernel.__name__) and hasattr(module, "launch"):
            launch = module.launch
            monkeypatch.setattr(module, "launch", lambda *a, launch=launch, **k: launched.append(a) or launch(*a, **k))
    said = f"{call.name.rpartition('.')[2]}: "
    for key in inspect.signature(call.function).parameters:
        values = [(repr(w)[:20], w) for w in WRONG]
        if isinstance(call.given.get(key), torch.Tensor):
            values += [(how, change(call.given[key])) for how, change in TENSORS.items()]
        for how, value in values:
            if key == "q" and "cu_seqlens_q" in call.given and how in ("fewer", "no rows"):
                continue  # its rows are what cu_seqlens says, which is not read before the launch
            launched.clear()
            try:
                call.function(**{**call.given, key: value})
            except (TypeError, ValueError, NotImplementedError, IndexError) as error:
                if not str(error).startswith(said) or launched:
                    wrong.append(f"{key} = {how}: {error!r:.150}{' after a launch' * bool(launched)}")
            except Exception as error:
                wrong.append(f"{key} = {how}: {error!r:.150}")
            else:
                if isinstance(value, dict) or type(value) is object or value == "wrong":
                    wrong.append(f"{key} = {how}: taken")
    assert not wrong, "\n".join(wrong)


# Processes and threads

THREADS = """
import os, sys, threading
sys.path[:0] = {paths!r}
import torch
from _calls import arguments, find
from kernels import get_kernel

repo_id, version = os.environ["PORTABLE_KERNELS_TESTED"].split("@")
kernel = get_kernel(repo_id, version=int(version))
names, device = ["softmax", "rms_norm", "linear"], torch.device({device!r})
given = {{n: arguments(n, device=device) for n in names}}
start, found = threading.Barrier(4), [{{}} for _ in range(4)]

def work(mine):
    start.wait()
    for n in names:
        x, *rest = (t.clone() if isinstance(t, torch.Tensor) else t for t in given[n].values())
        x.requires_grad_()
        y = find(kernel, n)(x, *rest)
        mine[n] = y, torch.autograd.grad(y.sum(), x)[0]

threads = [threading.Thread(target=work, args=(mine,)) for mine in found]
[t.start() for t in threads], [t.join() for t in threads]
for n in names:
    alone = found[0][n]
    for mine in found:
        assert all(torch.equal(a, b) for a, b in zip(mine[n], alone)), n
    torch.testing.assert_close(alone[0], find(kernel, n)(**given[n]))
print("threads agree")
"""


def test_threads_that_are_first(kernel, device, tmp_path):
    """Four threads come to each op at once, in a process and with a cache where nothing was compiled."""
    if INTERPRET:
        pytest.skip("Triton's interpreter is not for threads")
    program = THREADS.format(paths=[p for p in sys.path if p.endswith("tests")], device=str(device))
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True,
        env={**os.environ, "TRITON_CACHE_DIR": str(tmp_path)},
    )  # fmt: skip
    assert "threads agree" in done.stdout, done.stdout + done.stderr


class Calls(torch.utils.data.Dataset):
    def __init__(self, calls):
        self.calls = calls

    def __len__(self):
        return len(self.calls)

    def __getitem__(self, i):
        return self.calls[i].results()


def test_workers_after_fork(kernel, device):
    """A DataLoader's workers come to every op on the CPU after the parent has come to it on its device."""
    names = [n for n in NAMES if n in FIRST or not INTERPRET]
    for name in names:
        Call(kernel, name, device).results()
    data = Calls([Call(kernel, name, "cpu") for name in names])
    loader = torch.utils.data.DataLoader(data, batch_size=None, num_workers=2, multiprocessing_context="fork")
    for results, expected in zip(loader, data, strict=True):
        close(results, expected)


PICKLED = """
import os, sys
sys.path[:0] = {paths!r}
import torch
from _calls import find
from kernels import get_kernel

repo_id, version = os.environ["PORTABLE_KERNELS_TESTED"].split("@")
kernel = get_kernel(repo_id, version=int(version))
functions, layer, given, normed, forwarded = torch.load({file!r}, weights_only=False)
for name, function in functions.items():
    assert function is find(kernel, name), name
assert torch.equal(functions["rms_norm"](**given), normed)
assert layer.forward.__func__ is torch.nn.RMSNorm.forward
torch.testing.assert_close(layer(given["x"]), forwarded)
print("as they were")
"""


def test_pickles_go_to_other_processes(kernel, device, tmp_path):
    """Functions, where get_kernel was called. A layer goes with its own forward, as Python pickles methods by name."""
    given = arguments("rms_norm", device=device)
    layer = torch.nn.RMSNorm(128, eps=1e-6, device=device)
    layer.variance_epsilon, layer.weight.data = layer.eps, given["weight"]
    layer.forward = types.MethodType(kernel.layers.RMSNorm.forward, layer)  # as `kernelize` does
    functions = {name: find(kernel, name) for name in NAMES}
    saved = functions, layer, given, kernel.rms_norm(**given), layer(given["x"])
    torch.save(saved, tmp_path / "pickles")
    program = PICKLED.format(paths=[p for p in sys.path if p.endswith("tests")], file=str(tmp_path / "pickles"))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "as they were" in done.stdout, done.stdout + done.stderr


@pytest.mark.skipif(INTERPRET, reason="Triton's interpreter takes minutes")
@pytest.mark.parametrize("name", ["rms_norm"] + PROOF * ["reductions.sum", "cross_entropy", "swiglu"])
def test_calls_leave_nothing_behind(call):
    """10,000 calls and their gradients: a byte each would be too much."""
    calls = [call.again(rows=rows) for rows in (3, 4, 5, 6, 7)]
    inputs = [(c, c.inputs()) for c in calls]

    def repeat(n):
        for i in range(n):
            everything(*inputs[i % len(inputs)])

    def traced():
        """Without Python's cache of attributes, which keeps 4096 names: torch makes them anew at each
        autograd.Function's call, 180 KB in all."""
        gc.collect()
        (getattr(sys, "_clear_internal_caches", None) or sys._clear_type_cache)()
        return tracemalloc.get_traced_memory()[0]

    repeat(200)
    tracemalloc.start()
    try:
        before = traced()
        repeat(10_000)
        assert traced() - before < 10_000
    finally:
        tracemalloc.stop()


# On a GPU


@pytest.fixture
def gpu(device):
    if device.type == "cpu":
        pytest.skip("needs a GPU")
    return getattr(torch, device.type)


def everything(call, tensors):
    """Results and gradients of the call on these tensors."""
    if not call.names:
        return call.results()
    results = call.of(*tensors)
    return (*results, *torch.autograd.grad(
        [r for r in results if r.requires_grad], tensors, [torch.ones_like(r) for r in results if r.requires_grad],
        allow_unused=True))  # fmt: skip


@every
def test_graph_capture(gpu, call):
    """Captured with its gradients and allocations; replayed on other values."""
    tensors = call.inputs()
    side = gpu.Stream()
    side.wait_stream(gpu.current_stream())
    with gpu.stream(side):
        for _ in range(3):
            everything(call, tensors)
    gpu.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = everything(call, tensors)
    for scale in (0.5, 1.5):
        with torch.no_grad():
            for t, n in zip(tensors, call.names):
                t.copy_(call.given[n] * scale)
        graph.replay()
        fresh = [t.detach().clone().requires_grad_() for t in tensors]
        assert equal(captured, everything(call, fresh))


@every
def test_streams_and_syncs(gpu, call):
    """What another stream writes is waited for, and the host waits for nothing."""
    tensors = call.inputs()
    expected = everything(call, tensors)
    everything(call, tensors)
    side = gpu.Stream()
    gpu.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with gpu.stream(side):
            late = [torch.zeros_like(t) for t in tensors]
            torch.cuda._sleep(20_000_000)
            for t, value in zip(late, tensors):
                t.copy_(value.detach())
            results = everything(call, [t.requires_grad_() for t in late])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    gpu.synchronize()
    assert equal(results, expected)


@every
def test_second_device(gpu, call):
    if gpu.device_count() < 2:
        pytest.skip("needs two GPUs")
    there = call.again()
    there.given = {
        k: v.to(f"{call.device.type}:1") if isinstance(v, torch.Tensor) else v for k, v in call.given.items()
    }
    expected, results = everything(call, call.inputs()), everything(there, there.inputs())
    assert gpu.current_device() == 0
    assert all(a is b is None or b.device.index == 1 for a, b in zip(expected, results))
    assert equal(expected, [t if t is None else t.to(call.device) for t in results])


@every
def test_memory(gpu, call):
    """No hidden copy of an operand that may lie as it likes, and no growth."""
    call = call.again(torch.bfloat16, rows=4096, columns=2048) if call.name not in SQUARE else call
    for layout in ("contiguous", "padded", "transposed"):
        given = {k: relaid(v, layout) if isinstance(v, torch.Tensor) else v for k, v in call.given.items()}
        call.function(**given)
        gpu.synchronize()
        before = gpu.memory_allocated()
        gpu.reset_peak_memory_stats()
        results = as_tuple(call.function(**given))
        made = sum(r.untyped_storage().nbytes() for r in results if r is not None)
        extra = gpu.max_memory_allocated() - before - made
        operands = sum(v.numel() * v.element_size() for v in given.values() if isinstance(v, torch.Tensor))
        assert extra <= max(operands // 16, 2**21), f"{layout}: {extra / operands:.2f} of the operands"
        del results
    small = call.again(rows=4)
    tensors = small.inputs()
    for n in range(1000 if PROOF else 100):
        everything(small, tensors)
        if n == 5:
            gc.collect()
            before = gpu.memory_allocated()
    gc.collect()
    for _ in range(500):  # autograd's own thread may hold the last gradients for a moment
        if gpu.memory_allocated() <= before:
            break
        time.sleep(0.01)
    assert gpu.memory_allocated() <= before


def stretched(call, size, last, tmp_path):
    """The call on tensors whose last, or else first, dimension of that size has its end past 2^31 elements."""
    room = 2**31 // (size - 1) + 128
    there, space = call.again(call.dtype, **call.sizes), vast(size * room, call.device, tmp_path)
    used = 0
    for n in call.names:
        t = call.given[n]
        dims = [d for d, extent in enumerate(t.shape) if extent == size]
        if not dims:
            continue
        dim = dims[-1 if last else 0]
        rest = t.select(dim, 0)
        strides = list(rest.contiguous().stride())
        strides.insert(dim, room)
        there.given[n] = torch.as_strided(space, t.shape, strides, used).copy_(t)
        used += rest.numel()
    if not used:
        pytest.skip("no rows")
    for a, b in zip(everything(there, [there.given[n].detach().requires_grad_() for n in there.names]),
                    everything(call, call.inputs())):  # fmt: skip
        if a is not None:
            near(a, b)


@pytest.mark.parametrize("name", NAMES)
def test_strides_past_32_bits(call, on_kernels, tmp_path):
    """Rows of which the last begin past 2^31 elements."""
    if not on_kernels:
        pytest.skip("no kernels on this path")
    stretched(call.again(torch.bfloat16, rows=8), 8, False, tmp_path)


@sample([n for n in NAMES if n not in SQUARE | RANDOM | BATCHES])
def test_batches_past_32_bits(call, on_kernels, tmp_path):
    """Batches of two by two rows, of which the last begins past 2^31 elements."""
    if not on_kernels:
        pytest.skip("no kernels on this path")
    flat, there = (call.again(torch.bfloat16, rows=12) for _ in range(2))
    room, used = 2**30 + 64, 0
    space = vast(2 * room + 2**20, call.device, tmp_path)
    for key in there.tensors:
        t = flat.given[key]
        if t.shape[:1] == (12,):
            there.given[key] = t.unflatten(0, (3, 2, 2))
            if t.dtype == space.dtype:
                width = t[0].numel()
                strides = room, 3 * width, width, *t[0].contiguous().stride()
                there.given[key] = space.as_strided((3, 2, 2, *t.shape[1:]), strides, used).copy_(there.given[key])
                used += 8 * width
    leaves = [[c.given[n].detach().requires_grad_() for n in c.names] for c in (there, flat)]
    for a, b in zip(everything(there, leaves[0]), everything(flat, leaves[1]), strict=True):
        if a is not None:
            near(a.reshape(b.shape), b)


@some
def test_columns_past_32_bits(call, on_kernels, tmp_path):
    """Columns of which the last lie past 2^31 elements."""
    if not on_kernels:
        pytest.skip("no kernels on this path")
    stretched(call.again(torch.bfloat16, rows=4, columns=128), 128, True, tmp_path)


@pytest.mark.skipif(not PROOF, reason="PROOF=1: tens of GB")
@pytest.mark.parametrize("name", [n for n in LEARN if n not in SQUARE and n not in RANDOM])
def test_rows_past_32_bits(gpu, call):
    """More than 2^31 elements: the last rows are what they are alone."""
    rows = 2**31 // 4096 + 2
    given = call.again(torch.bfloat16, rows=2, columns=4096).given
    if not any(isinstance(v, torch.Tensor) and 2 in v.shape[:1] for v in given.values()):
        pytest.skip("no rows")
    large, last = {}, {}
    for key, v in given.items():
        if isinstance(v, torch.Tensor) and v.dim() and v.shape[0] == 2:
            fill = torch.empty((rows, *v.shape[1:]), dtype=v.dtype, device=v.device)
            large[key] = fill.zero_()
            large[key][-2:] = v
        else:
            large[key] = v
        last[key] = v
    there, here = call.again(), call.again()
    there.given, here.given = large, last
    tensors = [[c.given[n].detach().requires_grad_() for n in c.names] for c in (there, here)]
    for a, b in zip(everything(there, tensors[0]), everything(here, tensors[1])):
        if a is not None and b is not None and a.shape[:1] == (rows,):
            near(a[-2:], b)


@pytest.mark.skipif(not PROOF, reason="PROOF=1: wide")
@pytest.mark.parametrize("name", [n for n in LEARN if n not in SQUARE and n not in RANDOM])
def test_widths_past_2_to_20(gpu, call):
    """Rows wider than 2^20, beside PyTorch in float64."""
    call = call.again(rows=2, columns=128)
    if call.name in ("topk_softmax",):
        pytest.skip("at most 2^16 experts")
    for key, v in call.given.items():
        if isinstance(v, torch.Tensor) and v.is_floating_point() and v.shape[-1:] == (128,):
            call.given[key] = torch.randn((*v.shape[:-1], 2**20 + 64), device=v.device)
        elif isinstance(v, torch.Tensor) and v.dtype == torch.bool:
            call.given[key] = torch.rand((*v.shape[:-1], 2**20 + 64), device=v.device) < 0.7
    double = {
        k: v.double() if isinstance(v, torch.Tensor) and v.is_floating_point() else v for k, v in call.given.items()
    }
    for a, b in zip(call.results(), as_tuple(TORCHS[call.name](**double))):
        assert_close(a, b)
