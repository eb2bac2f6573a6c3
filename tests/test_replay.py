"""Calls of a kind that was seen before are repeated: with functions that count how often they are really called."""

import inspect
import threading

import numpy
import pytest
import torch


@pytest.fixture
def replayed(internals, monkeypatch, device):
    """replayed(function), and .calls on the result: the arguments of the calls that were not repeats."""
    module = internals("_replay")
    monkeypatch.setattr(module._device, "runs_kernels", lambda device: True)
    monkeypatch.setattr(module, "INTERPRET", device.type == "cpu")

    def wrap(function):
        calls = []

        def noted(*args, **kwargs):
            calls.append((args, kwargs))
            return function(*args, **kwargs)

        wrapped = module.replayed(noted)
        wrapped.calls = calls
        return wrapped

    return wrap


def scaled(x, w, factor=2.0):
    """Memory of its own, an op that writes to it, a view, and a sum."""
    y = torch.empty_like(x)
    torch.mul(x, w, out=y)
    total = y.new_zeros(()).add_(y.sum())
    return y.flatten()[: x.shape[0]] * factor, None, total


def same(actual, expected):
    pairs = [(a, e) for a, e in zip(actual, expected) if not a is e is None]
    return all(a is not None and e is not None and torch.equal(a, e) for a, e in pairs)


def test_a_repeat_computes_on_what_it_is_given(replayed, device):
    f = replayed(scaled)
    for _ in range(3):
        x, w = torch.randn(4, 6, device=device), torch.randn(6, device=device)
        kept = x.clone()
        assert same(f(x, w), scaled(x, w)) and torch.equal(x, kept)
    assert len(f.calls) == 1
    x, w = torch.randn(4, 6, device=device), torch.randn(6, device=device)
    first = f(x, w)
    copy = [None if t is None else t.clone() for t in first]
    f(x + 1, w)
    assert same(first, copy), "a repeat wrote to an earlier result"


@pytest.mark.parametrize(
    "what, x, options",
    [
        ("dtype", torch.zeros(4, 6, dtype=torch.float64), {}),
        ("shape", torch.zeros(5, 6), {}),
        ("strides", torch.zeros(6, 4).t(), {}),
        ("alignment", torch.zeros(25)[1:].view(4, 6), {}),
        ("a value", torch.zeros(4, 6), {"factor": 3.0}),
        ("a value's type", torch.zeros(4, 6), {"factor": 2}),
        ("a keyword", torch.zeros(4, 6), {"factor": 2.0}),
    ],
)
def test_another_kind_of_call_is_made(replayed, device, what, x, options):
    f = replayed(scaled)
    w = torch.zeros(6, device=device)
    for _ in range(3):
        f(torch.zeros(4, 6, device=device), w, **({} if what == "a keyword" else dict.fromkeys(options, 2.0)))
    if what != "alignment":
        x = x.to(device)
    else:
        x = torch.zeros(25, device=device)[1:].view(4, 6)
    f(x, w.to(x.dtype), **options)
    assert len(f.calls) == 2, what


def test_global_settings_are_of_the_kind(replayed, device):
    f = replayed(lambda a, b: a @ b)
    a, b = torch.randn(4, 4, device=device), torch.randn(4, 4, device=device)
    f(a, b), f(a, b), f(a, b)
    with torch.autocast(device.type, torch.bfloat16):
        assert f(a, b).dtype == torch.bfloat16 and f(a, b).dtype == torch.bfloat16
    assert f(a, b).dtype == torch.float32 and len(f.calls) == 2


def test_precision_of_float32_is_of_the_kind(replayed, device):
    f = replayed(lambda a, b: a @ b)
    a, b = torch.randn(4, 4, device=device), torch.randn(4, 4, device=device)
    before = torch.get_float32_matmul_precision()
    try:
        for precision in ("highest", "high", "highest", "high"):
            torch.set_float32_matmul_precision(precision)
            f(a, b), f(a, b), f(a, b)
    finally:
        torch.set_float32_matmul_precision(before)
    assert len(f.calls) == 2


def test_gradients_are_not_repeated_past(replayed, device):
    f = replayed(lambda x: x * 2)
    x = torch.randn(3, device=device)
    f(x), f(x), f(x)
    y = f(x.requires_grad_())
    (dx,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(dx, torch.full_like(x, 2)) and len(f.calls) == 2
    with torch.no_grad():
        assert not f(x).requires_grad
    with torch.inference_mode():
        assert f(x).is_inference()


@pytest.mark.parametrize(
    "function",
    [
        lambda x, w: (x * w).sum(),
        lambda x, w: x.detach() * x + (2 * w.detach()).detach() * w,
        lambda x, w: torch.relu(x.view(2, 3)[1] * w[3:]).exp(),
        lambda x, w: x.sin().detach_() * w,
        lambda x, w: x.mul(2).add_(w).cos_(),
    ],
)
def test_gradients_of_a_repeat_are_pytorchs(replayed, device, function):
    f = replayed(function)
    for learns in ((True, True), (True, False), (False, True), (True, True), (False, True)):
        pairs = [torch.randn(6, device=device).requires_grad_(g) for g in learns]
        y, expected = f(*pairs), function(*pairs)
        assert torch.equal(y, expected) and y.requires_grad == expected.requires_grad
        if y.requires_grad:
            of = [t for t in pairs if t.requires_grad]
            got, wanted = (torch.autograd.grad(t.sum(), of, allow_unused=True) for t in (y, expected))
            assert same(got, wanted)


def test_a_graph_that_is_broken_is_not_repeated(replayed, device):
    def function(x):
        with torch.no_grad():
            return x * 2

    f, x = replayed(function), torch.randn(3, device=device, requires_grad=True)
    assert not any(f(x).requires_grad for _ in range(3)) and len(f.calls) == 3


def test_a_graph_where_gradients_are_off(replayed, device):
    def function(x):
        with torch.enable_grad():
            return x * 2

    f, x = replayed(function), torch.randn(3, device=device, requires_grad=True)
    with torch.no_grad():
        assert all(f(x).requires_grad for _ in range(3))


def test_hooks_on_saved_tensors_are_not_of_the_call(replayed, device):
    """They see what each call saves, and what they do themselves is not done again without them."""
    packed, noise = [], torch.zeros(3, device=device)

    def pack(t):
        packed.append(t)
        noise.copy_(torch.empty_like(t).uniform_())
        return torch.zeros_like(t).copy_(t)

    f, x = replayed(lambda x: x.sin() * x), torch.randn(3, device=device, requires_grad=True)
    counts = []
    for _ in range(3):
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            y = f(x)
        (dx,) = torch.autograd.grad(y.sum(), x)
        assert torch.equal(dx, x.sin() + x.cos() * x)
        counts.append(len(packed))
    assert counts[2] - counts[1] == counts[1] - counts[0] == counts[0] > 0 and len(f.calls) == 1
    noise.zero_()
    f(x)
    assert len(packed) == counts[2] and not noise.any()


def test_autocast_may_be_off_in_a_call(replayed, device):
    def function(a, b):
        with torch.autocast(a.device.type, enabled=False):
            return a @ b

    f, a = replayed(function), torch.randn(4, 4, device=device)
    with torch.autocast(device.type, torch.bfloat16):
        assert all(f(a, a + 1).dtype == torch.float32 for _ in range(3)) and len(f.calls) == 1


def test_zeros_have_signs(replayed, device):
    for f, of in ((lambda x, v: x * v, float), (lambda x, v: x * v[0], lambda v: [v])):
        f, x = replayed(f), torch.ones(3, device=device)
        for v in (0.0, 0.0, -0.0, -0.0, 0.0):
            assert torch.signbit(f(x, of(v))).tolist() == [str(v) == "-0.0"] * 3
        assert len(f.calls) == 2


def test_one_tensor_twice(replayed, device):
    """Which of two arguments an op was given cannot be told when they are one: that is a kind of its own."""
    f = replayed(lambda a, b, c: (a - 2 * b + 3 * c, b))
    x, y, z = (torch.randn(3, device=device) for _ in range(3))
    for n, (a, b, c) in enumerate([(x, x, y), (x, y, x), (y, x, x), (x, x, x), (x, y, z)], 1):
        others = {id(t): t + 1 for t in (x, y, z)}
        for call in ((a, b, c), tuple(others[id(t)] for t in (a, b, c))):
            got, second = f(*call)
            assert torch.equal(got, call[0] - 2 * call[1] + 3 * call[2]) and second is call[1]
        assert len(f.calls) == n


def test_what_depends_on_values_is_not_repeated(replayed, device):
    functions = [
        lambda x: x * 2 if x.sum() > 0 else x,
        lambda x: x[x > 0],
        lambda x: x * x.max().item(),
        lambda x: x * len(x.nonzero()),
        lambda x: x * len(torch.argwhere(x > 0)),
    ]
    for function in functions:
        f = replayed(function)
        for x in (torch.ones(3, device=device), -torch.ones(3, device=device), torch.eye(3, device=device)[0]):
            assert torch.equal(f(x), function(x))
        assert len(f.calls) == 3
        with torch.inference_mode():  # in which some ops are not taken apart
            f = replayed(function)
            for x in (torch.ones(3, device=device), -torch.ones(3, device=device), torch.eye(3, device=device)[0]):
                assert torch.equal(f(x), function(x))


def test_a_tensor_of_its_own_is_not_repeated(replayed, device):
    """A tensor that is no argument may be another by the next call."""
    state = {"t": torch.ones(3, device=device)}
    f = replayed(lambda x: x + state["t"])
    f(torch.zeros(3, device=device))
    state["t"] = torch.full((3,), 5.0, device=device)
    assert f(torch.zeros(3, device=device))[0] == 5


def test_where_memory_starts_is_not_of_the_kind(replayed, device):
    f, x = replayed(lambda x: x.as_strided((2,), (1,), x.storage_offset())), torch.arange(32.0, device=device)
    assert all(torch.equal(f(x[n:][:4]), x[n:][:2]) for n in (0, 16, 0, 16))


@pytest.mark.parametrize("function", [lambda x: torch.max(x, 0), lambda x: (x, (x + 1, 2)), lambda x: [x.shape[0]]])
def test_results_are_of_the_same_types(replayed, device, function):
    f, x = replayed(function), torch.ones(3, device=device)
    first = function(x)
    for _ in range(3):
        got = f(x)
        assert type(got) is type(first) and list(map(type, got)) == list(map(type, first))
    if type(got) is list:
        got.append(1)
        assert f(x) == first


def test_results_lie_as_the_calls_do(replayed, device):
    """Memory that is given as a view alone is made that way; what else looks at it sees it as it was."""

    def turned(x):
        y = x.new_empty(3, 4)
        return y.t()

    def filled(x):
        y = x.new_empty(3, 4)
        y.copy_(x)
        return y.t()

    def changed(x):
        y = x.new_empty(3, 4).t()
        y.copy_(x.t()).mul_(2)
        return y.add_(1)

    x = torch.randn(3, 4, device=device)
    f = replayed(changed)
    assert all(torch.equal(f(x), x.t() * 2 + 1) for _ in range(3)) and len(f.calls) == 1
    for function in (turned, filled, lambda x: (y := x.new_zeros(3, 4)) is None or (y.t(), y), lambda x: x.t()):
        f, first = replayed(function), None
        for _ in range(3):
            got = f(x)
            first = got if first is None else first
            for a, b in zip(got if type(got) is tuple else (got,), first if type(first) is tuple else (first,)):
                assert a.shape == b.shape and a.stride() == b.stride()
        assert len(f.calls) == 1 and (function is not filled or torch.equal(f(x), x.t()))


@pytest.mark.parametrize(
    "function",
    [
        lambda x, w, b: torch.addmm(b, x, w.t()),
        lambda x, w, b: x @ w.mT,
        lambda x, w, b: torch.addmm(b[:3, None], x, w.t()),
        lambda x, w, b: torch.addmm(b, x, w.t(), beta=2),
        lambda x, w, b: (w.t() @ x[:, :5].t(), x @ w.t().contiguous()),
    ],
)
def test_products_with_turned_matrices(replayed, device, function):
    f = replayed(function)
    for grad in (False, True):
        for _ in range(3):
            tensors = [torch.randn(s, device=device, requires_grad=grad) for s in ((3, 5), (5, 5), (5,))]
            got, expected = (g(*tensors) for g in (f, function))
            got, expected = ((t if type(t) is tuple else (t,)) for t in (got, expected))
            assert same(got, expected)
            if grad:
                a, b = (torch.autograd.grad(t[0].sum(), tensors, allow_unused=True) for t in (got, expected))
                assert same([t for t in a if t is not None], [t for t in b if t is not None])
    assert len(f.calls) == 2


def test_draws_anew(replayed, device):
    f = replayed(lambda x: torch.randint(2**40, (4,), device=x.device))
    x = torch.zeros(3, device=device)
    torch.manual_seed(0)
    drawn = [f(x) for _ in range(3)]
    torch.manual_seed(0)
    assert all(torch.equal(t, torch.randint(2**40, (4,), device=device)) for t in drawn) and len(f.calls) == 1


def test_draws_as_many(replayed, device):
    f = replayed(lambda x: (torch.rand_like(x), torch.rand_like(x))[1])  # one of them is for nothing
    x = torch.zeros(3, device=device)
    torch.manual_seed(0)
    drawn = [f(x) for _ in range(3)]
    torch.manual_seed(0)
    assert all(torch.equal(t, [torch.rand_like(x) for _ in range(2)][1]) for t in drawn) and len(f.calls) == 1


def test_errors_are_raised_each_time(replayed, device):
    def refuse(x):
        raise ValueError("no")

    f = replayed(refuse)
    for _ in range(3):
        with pytest.raises(ValueError):
            f(torch.zeros(3, device=device))
    assert len(f.calls) == 3


def test_arguments_that_are_not_understood(replayed, device):
    f = replayed(lambda x, sizes: x.reshape(sizes))
    x = torch.zeros(4, device=device)
    for sizes in ([2, 2], [4, 1], (2, 2), (2, 2), [2, 2]):
        assert f(x, sizes).shape == tuple(sizes)
    assert len(f.calls) == 3
    f = replayed(lambda x, sizes: x.expand(sizes))
    sizes = [3, 4]
    f(x, sizes)
    sizes[0] = 5  # a list may change after it was given
    assert f(x, sizes).shape == (5, 4) and f(x, [3, 4]).shape == (3, 4) and len(f.calls) == 2
    f = replayed(lambda x, other: x * other["factor"])
    assert all(f(x + 1, {"factor": n})[0] == n for n in range(3)) and len(f.calls) == 3


def test_modes_and_transforms_see_every_call(replayed, device):
    from torch.utils._python_dispatch import TorchDispatchMode

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    f, seen, x = replayed(lambda x: x.sin()), [], torch.randn(3, device=device)
    f(x), f(x), f(x)
    with Seen():
        f(x)
    assert len(seen) == 1 and len(f.calls) == 2
    assert torch.equal(torch.func.grad(lambda x: f(x).sum())(x), x.cos())
    assert torch.equal(torch.func.vmap(f)(x), x.sin())
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        assert torch.equal(torch.autograd.forward_ad.unpack_dual(f(dual)).tangent, x.cos())


def test_what_comes_again_is_known_at_once(replayed, internals, device, monkeypatch):
    """By one test, in whichever state of PyTorch's it comes; the key that names its kind is not formed."""
    module, asked = internals("_replay"), []
    if module._guards is None:
        pytest.skip("this PyTorch has no guards")
    key_of = module._key_of
    monkeypatch.setattr(
        module, "_key_of", lambda *given: lambda *args, **kwargs: asked.append(args) or key_of(*given)(*args, **kwargs)
    )
    f = replayed(lambda x, factor, shift=0.0: x * factor + shift)
    states = [torch.enable_grad, torch.no_grad, torch.inference_mode]
    kinds = [((torch.randn(3, device=device), 2.0), {}), ((torch.randn(4, device=device), 3), {"shift": 1.0})]
    for _ in range(4):
        before = len(asked)
        for state in states:
            with state():
                for args, options in kinds:
                    assert torch.equal(f(*args, **options), args[0] * args[1] + options.get("shift", 0.0))
    assert len(asked) == before and len(f.calls) == 2
    f = replayed(lambda x, factor, axes, sizes: (x * factor).sum(axes).expand(sizes))
    for _ in range(4):  # other objects each time
        before = len(asked)
        f(torch.randn(2, 3, device=device), float("0.0"), tuple([0, 1]), [2, 2])
    assert len(asked) == before and len(f.calls) == 1


def test_tensors_without_strides_or_memory(replayed, device):
    """PyTorch's guards end the process on some of these."""
    f, x = replayed(lambda x: x + 0 if x.layout == torch.strided and not x.is_nested else None), torch.eye(3).to(device)
    assert all(torch.equal(f(x), x) for _ in range(3))
    others = [x.to_sparse(), x.to_sparse_csr(), torch.nested.nested_tensor([x[0], x[1, :2]])]
    others += [torch.nested.nested_tensor([x[0], x[1, :2]], layout=torch.jagged)]
    others += [x.to_mkldnn()] if device.type == "cpu" and torch.backends.mkldnn.is_available() else []
    assert all(f(t) is None for t in others) and f(x.to("meta")).is_meta
    for t in (None, 1.0, "x", [x]):
        with pytest.raises(AttributeError):
            f(t)
    assert torch.equal(f(x), x)


def test_tests_that_never_hold_are_given_up(replayed, internals, device, monkeypatch):
    module, made = internals("_replay"), []
    monkeypatch.setattr(module, "_test_of", lambda *call: made.append(call) or (lambda *_: False))
    f, x = replayed(lambda x: x + 1), torch.zeros(3, device=device)
    assert all(f(x).eq(1).all() for _ in range(20)) and len(f.calls) == 1 and len(made) < 8


def test_threads(replayed, device):
    f, wrong = replayed(scaled), []

    def work(seed):
        generator = torch.Generator().manual_seed(seed)
        for i in range(50):
            x, w = (torch.randn(s, generator=generator).to(device) for s in ((2 + i % 5, 6), (6,)))
            if not same(f(x, w), scaled(x, w)):
                wrong.append((seed, i))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


def test_memory_of_a_repeat_is_the_callers(replayed, device):
    """Nothing that a call was given, or gave, is kept."""
    import weakref

    f = replayed(scaled)
    x, w = torch.randn(4, 6, device=device), torch.randn(6, device=device)
    result = f(x, w)
    gone = [weakref.ref(t) for t in (x, w, result[0], result[2])]
    del x, w, result
    f.calls.clear()
    assert all(t() is None for t in gone)


def test_other_devices_are_other_kinds(replayed, device):
    f = replayed(lambda x, w: (x + 1, w * 2))
    x = torch.zeros(3, device=device)
    f(x, x.clone()), f(x, x.clone())
    f(x, x.to("meta"))
    assert len(f.calls) == 2


def test_kinds_that_come_once_are_not_watched(replayed, internals, device, monkeypatch):
    monkeypatch.setattr(internals("_replay"), "_SEEN", 2)
    f, x = replayed(lambda x: x + 1), torch.zeros(3, device=device)
    assert all(torch.equal(f(x + n), x + n + 1) for n in range(6)) and len(f.calls) == 3
    f(torch.zeros(4, device=device))
    assert len(f.calls) == 4


def test_kinds_are_forgotten(replayed, internals, device, monkeypatch):
    monkeypatch.setattr(internals("_replay"), "_LIMIT", 8)
    f = replayed(lambda x: x + 1)
    for n in range(1, 40):
        assert f(torch.zeros(n, device=device)).shape == (n,)
    f(torch.zeros(39, device=device))
    assert len(f.calls) == 39


def test_signatures_are_those_of_the_functions(kernel):
    assert list(inspect.signature(kernel.rms_norm).parameters)[:3] == ["x", "weight", "eps"]
    assert kernel.rms_norm.__name__ == "rms_norm" and kernel.rms_norm.__doc__


def test_numbers_of_numpy(kernel, device, recwarn):
    """They have no kind of their own, and are numbers like others."""
    x, eps = torch.randn(4, 6, device=device), numpy.float32(0.5)
    assert all(torch.equal(kernel.rms_norm(x, None, eps), kernel.rms_norm(x, None, 0.5)) for _ in range(3))
    assert not [w for w in recwarn if issubclass(w.category, RuntimeWarning)]


def test_public_functions_repeat(kernel, device, on_kernels, internals, monkeypatch):
    if not on_kernels:
        pytest.skip("kernels alone are repeated")
    watch = internals("_replay")._watch
    watched = []
    monkeypatch.setattr(internals("_replay"), "_watch", lambda *a: watched.append(a) or watch(*a))
    x, w = torch.randn(5, 37, device=device), torch.randn(37, device=device)
    for f in (lambda: kernel.rms_norm(x, w), lambda: kernel.softmax(x, -1), lambda: kernel.silu_and_mul(x[:, 1:]),
              lambda: kernel.layer_norm(x, w, w.clone()), lambda: kernel.reductions.sum(x, 0)):  # fmt: skip
        first = f()
        count = len(watched)
        assert torch.equal(f(), first) and torch.equal(f(), first) and len(watched) == count


def test_public_functions_repeat_with_gradients(kernel, device, on_kernels, internals, monkeypatch):
    if not on_kernels:
        pytest.skip("kernels alone are repeated")
    watch, watched = internals("_replay")._watch, []
    monkeypatch.setattr(internals("_replay"), "_watch", lambda *a: watched.append(a) or watch(*a))
    w, target = torch.randn(38, device=device), torch.arange(5, device=device)
    functions = [
        lambda x, w: kernel.rms_norm(x, w), lambda x, w: kernel.layer_norm(x, w, bias=w), lambda x, w: kernel.silu(x),
        lambda x, w: kernel.softmax(x[:, 1:], -1), lambda x, w: kernel.add_rms_norm(x, x * 2, w)[1],
        lambda x, w: kernel.cross_entropy(x, target, weight=w.detach().abs()), lambda x, w: kernel.linear(x, w[None]),
    ]  # fmt: skip
    for function in functions:
        counts = []
        for _ in range(3):
            x = torch.randn(5, 38, device=device)
            leaves = [t.clone().requires_grad_() for t in (x, w)]
            y = function(*leaves)
            dy = torch.randn_like(y)
            got = torch.autograd.grad(y, leaves, dy, allow_unused=True)
            counts.append(len(watched))
            with torch.inference_mode():
                kept = function(x, w)
            assert kept.is_inference() and torch.equal(y, kept)
            monkeypatch.setattr(internals("_replay"), "_LIMIT", 0)  # the next call is watched
            wide = [t.detach().clone().requires_grad_() for t in leaves]
            expected = torch.autograd.grad(function(*wide), wide, dy, allow_unused=True)
            monkeypatch.setattr(internals("_replay"), "_LIMIT", 4096)
            assert same(got, expected)
        assert counts[2] == counts[1], "watched again"


def test_registered_ops_repeat(kernel, device, on_kernels, internals, monkeypatch):
    """As compiled graphs call them, whatever gradients are asked for outside."""
    if not on_kernels:
        pytest.skip("kernels alone are repeated")
    op = internals("_dispatch")._overload(internals("rms_norm").rms_norm_fwd._qualname)
    launches = []
    launch = internals("_device").launch
    monkeypatch.setattr(internals("rms_norm"), "launch", lambda *a, **o: launches.append(a) or launch(*a, **o))
    w = torch.randn(41, device=device, requires_grad=True)
    for state in (torch.no_grad, torch.enable_grad, torch.inference_mode):
        with state():
            for n in range(4):
                x = torch.randn(5, 41, device=device)
                y, rstd = op(x, w, None, 1e-6, 0.0, False)
                assert torch.equal(y, kernel.rms_norm(x, w)) and y.requires_grad == (state is torch.enable_grad)
                assert y.data_ptr() != rstd.data_ptr() and len(launches) <= 4
                launches.clear() if n == 1 else None
            assert not launches, "made again"
