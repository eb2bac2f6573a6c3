"""Rows that Hopper GPUs split over programs that tell each other their sums: right, and the same each time."""

import pytest
import torch
from _inputs import tensor
from _numerics import assert_close, check

H200 = dict(multiprocessors=132, threads=2048, registers=65536, shared=233472)  # of a multiprocessor, the last three
OPS = {  # name: (tensors besides x and weights, how many weights, how it is called)
    "softmax": (0, 0, lambda k, x: k.softmax(x, -1)),
    "log_softmax": (0, 0, lambda k, x: k.log_softmax(x, -1)),
    "rms_norm": (0, 2, lambda k, x, w, b: k.rms_norm(x, w, bias=b, offset=1.0)),
    "layer_norm": (0, 2, lambda k, x, w, b: k.layer_norm(x, w, b)),
    "add_rms_norm": (1, 1, lambda k, x, r, w: k.add_rms_norm(x, r, w)),
    "add_layer_norm": (1, 2, lambda k, x, r, w, b: k.add_layer_norm(x, r, w, b)),
}


@pytest.fixture(scope="module")
def module(internals):
    return internals("_wide_sm90")


@pytest.fixture
def on_hopper(internals, device, on_kernels):
    if not on_kernels or internals("_rows").wide(2**17, torch.float32, device) is None:
        pytest.skip("needs a Hopper GPU and the Triton that its kernels are for")


@pytest.fixture
def taken(module, internals, monkeypatch):
    """The kinds that were done by the kernel. No call is the repeat of another test's."""
    monkeypatch.setattr(internals("_replay"), "_compiling", lambda: True)
    kinds, run = [], module.run

    def note(kind, *args, **options):
        result = run(kind, *args, **options)
        if result is not None:
            kinds.append((kind, options.get("backward", False)))
        return result

    monkeypatch.setattr(module, "run", note)
    return kinds


@pytest.mark.parametrize("itemsize", [2, 4])
def test_programs_of_a_row_run_at_once(module, itemsize):
    """Registers, shared memory and threads of a multiprocessor hold all that a plan puts there."""
    plans = [(p, back, kind) for back, table in ((False, module._FORWARD), (True, module._BACKWARD)) for kind in table
             for _, p in table[kind] if p]  # fmt: skip
    for plan, backward, kind in [*plans, (module._FEW, False, "add_rms_norm")]:
        tensors = 1 + (backward or kind.startswith("add"))
        warps = plan.programs * plan.num_warps
        schedulers = -(-warps // 4)
        assert schedulers * 32 * module.registers(plan) <= H200["registers"] // 4 and 32 * warps <= H200["threads"]
        ring = plan.SLOTS * tensors * plan.BLOCK_N * 2  # of float32 half as many columns
        assert plan.programs * (ring + 8 * plan.SLOTS + 1024 + 64) <= H200["shared"]
        assert plan.LAG < plan.SLOTS
        columns = plan.BLOCK_N * 2 // itemsize
        assert columns >= 8 * 32 * plan.num_warps
        assert -(-(2**18) // columns) <= plan.programs * H200["multiprocessors"]


def test_what_cannot_be_copied_in_bulk_is_left(module):
    x = torch.zeros(64, 40000, dtype=torch.bfloat16)
    assert module.bulk(x, (0, 0, 40000, 1), 64)
    assert module.bulk(x, (0, 0, 3, 1), 1)  # no step from row to row
    for strides in ((0, 0, 40001, 1), (0, 0, 0, 1), (0, 0, 1, 40000)):
        assert not module.bulk(x, strides, 64)
    assert not module.bulk(x.view(-1)[1:], (0, 0, 40000, 1), 63)
    assert not module.bulk(x.double(), (0, 0, 40000, 1), 64)


def arguments(op, M, N, dtype, device):
    extra, weights, call = OPS[op]
    rows = [tensor((M, N), dtype, device) for _ in range(1 + extra)]
    return rows + [tensor((N,), dtype, device) for _ in range(weights)], call


def reference_of(internals, op):
    """The op's reference, called as OPS calls the op. Sums with a residual are rounded as the op's are."""

    class References:
        def __getattr__(self, name):
            family = name.removeprefix("add_").removeprefix("log_")
            return getattr(internals(family), f"{name}_reference")

    return lambda *tensors: OPS[op][2](References(), *tensors)


CASES = [  # M, N, dtype
    (300, 32768, torch.bfloat16),
    (40, 131072, torch.bfloat16),
    (5, 128256, torch.bfloat16),  # part of a slice is past the row's end
    (33, 151936, torch.float16),
    (1, 262144, torch.bfloat16),
    (200, 20488, torch.float16),
    (20, 262144, torch.float32),
]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("op", [op for op in OPS if not op.startswith("add")])
def test_agrees(kernel, internals, device, on_hopper, taken, op, case):
    """With the float64 reference, values and gradients."""
    tensors, call = arguments(op, *case, device)
    check(lambda *t: call(kernel, *t), reference_of(internals, op), *tensors)
    if case[1] > 65536 and case[2] != torch.float32:
        assert taken == [(op, False), (op, False), (op, True)]


@pytest.mark.parametrize(
    "M, N, dtype", [(300, 32768, torch.bfloat16), (33, 151936, torch.float16), (8, 262144, torch.bfloat16)]
)
@pytest.mark.parametrize("op", ["add_rms_norm", "add_layer_norm"])
def test_residual(kernel, device, on_hopper, taken, op, M, N, dtype):
    """The sum exactly, and the norm of the sum to what another order of adding up changes; gradients through both."""
    (x, r, *params), call = arguments(op, M, N, dtype, device)
    x += 1000.0  # what the sum takes off again: a shift must be of the sum
    r -= 1000.0
    leaves = [t.requires_grad_() for t in (x, r, *params)]
    y, total = call(kernel, *leaves)
    assert (op[4:], False) in taken and torch.equal(total, x + r)
    dy, ds = torch.randn_like(y), torch.randn_like(y)
    found = torch.autograd.grad((y, total), leaves, (dy, ds))
    assert taken[-1] == (op[4:], True)
    wide = total.detach().cpu().double().requires_grad_()
    others = [t.detach().cpu().double().requires_grad_() for t in params]
    norm = torch.nn.functional.layer_norm if op == "add_layer_norm" else torch.nn.functional.rms_norm
    expected = norm(wide, (N,), *others, eps=1e-5 if op == "add_layer_norm" else 1e-6)
    grads = torch.autograd.grad(expected, (wide, *others), dy.cpu().double())
    eps = torch.finfo(dtype).eps
    assert torch.equal(found[0], found[1])
    pairs = ((y, expected), (found[0], grads[0] + ds.cpu().double()), *zip(found[2:], grads[1:]))
    for actual, exact in pairs:
        off = (actual.cpu().double() - exact.detach()).abs()
        assert (off <= 2 * eps * (exact.detach().abs() + exact.detach().square().mean().sqrt())).all()


@pytest.mark.parametrize("op", ["softmax", "log_softmax", "layer_norm", "rms_norm"])
def test_special_values(kernel, internals, device, on_hopper, taken, op):
    """Infinities, NaN, a row of -inf, the largest number, a mean far from zero, an outlier at the start of a slice."""
    M, N = 40, 131072
    x = torch.randn(M, N, dtype=torch.float64)
    x[0, 70000], x[1, 5], x[2, 130000] = float("inf"), float("-inf"), float("nan")
    x[3] = float("-inf")
    x[4, 9] = torch.finfo(torch.bfloat16).max
    x[5] = torch.finfo(torch.bfloat16).max
    x[6] += 1e4
    x[7, ::2048], x[8, 0] = 3e4, 3e4
    x[9] = 0.0
    x[10, :65536], x[10, 65536:] = 1.0, float("-inf")
    x[11] *= 1e-38
    x = x.to(torch.bfloat16).to(device)
    w = torch.ones(N, dtype=torch.bfloat16, device=device)
    calls = {
        "softmax": lambda k: k.softmax(x, -1), "log_softmax": lambda k: k.log_softmax(x, -1),
        "layer_norm": lambda k: k.layer_norm(x, w, w), "rms_norm": lambda k: k.rms_norm(x, w),
    }  # fmt: skip
    found = calls[op](kernel)
    assert taken == [(op, False)]
    functional = torch.nn.functional
    theirs = {
        "softmax": lambda t: functional.softmax(t, -1), "log_softmax": lambda t: functional.log_softmax(t, -1),
        "layer_norm": lambda t: functional.layer_norm(t, (N,), w.to(t), w.to(t)),
        "rms_norm": lambda t: functional.rms_norm(t, (N,), w.to(t), 1e-6),
    }[op]  # fmt: skip
    torchs, exact = theirs(x).float(), theirs(x.cpu().double())
    overflow = [4, 5] if "norm" in op else []  # whose squares float32 does not hold: as torch has it, or as it is
    for row in range(M):
        ours, exact_row = found[row].float().cpu(), exact[row]
        if row in overflow:
            assert torch.equal(ours.isnan(), torchs[row].cpu().isnan()) or not ours.isnan().any()
            continue
        assert torch.equal(ours.isnan(), exact_row.isnan()), (row, int(ours.isnan().sum()))
        finite = exact_row.isfinite()
        assert torch.equal(ours.isfinite(), finite) and torch.equal(
            ours[~finite & ~exact_row.isnan()].double(), exact_row[~finite & ~exact_row.isnan()]
        )
        off = (ours.double() - exact_row)[finite].abs()
        rms = exact_row[finite].square().mean().sqrt()
        assert (off <= 2 * 2**-7 * (exact_row[finite].abs() + rms) + 2**-133).all(), (row, off.max())


def test_rows_further_apart(kernel, internals, device, on_hopper, taken):
    """Rows of a wider tensor are read where they lie; rows one element off are left to the portable kernel."""
    whole = tensor((50, 150000), torch.bfloat16, device)
    for start, count in ((0, 1), (16, 1), (3, 0)):
        taken.clear()
        x = whole[:, start : start + 131072]
        check(lambda t: kernel.softmax(t, -1), lambda t: torch.nn.functional.softmax(t, -1), x)
        assert len(taken) == (3 if count else 1)  # the gradient's operands are contiguous


@pytest.mark.parametrize("op", ["softmax", "rms_norm", "add_layer_norm"])
def test_far_rows(kernel, internals, device, on_hopper, taken, op):
    """Past 2^31 elements: the last rows, and the sums over all rows that they alone are in."""
    M, N = 16500, 131072
    extra, weights, call = OPS[op]
    rows = [torch.zeros(M, N, dtype=torch.bfloat16, device=device) for _ in range(1 + extra)]
    for t in rows:
        t[-3:] = tensor((3, N), torch.bfloat16, device)
    params = [tensor((N,), torch.bfloat16, device) for _ in range(weights)]
    grads = torch.zeros(M, N, dtype=torch.bfloat16, device=device)
    grads[-3:] = tensor((3, N), torch.bfloat16, device)
    leaves = [t.requires_grad_() for t in (*rows, *params)]
    y = call(kernel, *leaves)
    y = y[0] if isinstance(y, tuple) else y
    found = torch.autograd.grad(y, leaves, grads)
    assert [back for _, back in taken] == [False, True]
    wide = [t.detach()[-3:].cpu().double().requires_grad_() for t in rows]
    wide += [t.detach().cpu().double().requires_grad_() for t in params]
    expected = reference_of(internals, op)(*wide)
    expected = expected[0] if isinstance(expected, tuple) else expected
    assert_close(y[-3:], expected)
    exact = torch.autograd.grad(expected, wide, grads[-3:].cpu().double())
    for i, (actual, e) in enumerate(zip(found, exact)):
        assert_close(actual[-3:] if i <= extra else actual, e, dim=-1 if i <= extra else None)


@pytest.mark.parametrize("op", [op for op in OPS if op != "log_softmax"])
def test_repeats_are_equal(kernel, device, on_hopper, op):
    """Bit for bit: one after the other, on two streams at once, and from graphs on two streams."""
    sets, results = [], []
    for scale in (1.0, 0.5):
        tensors, call = arguments(op, 300, 131072, torch.bfloat16, device)
        sets.append([t * scale for t in tensors])

    def run(tensors):
        leaves = [t.detach().requires_grad_() for t in tensors]  # new: a graph is captured of nothing that came before
        found = call(kernel, *leaves)
        found = found if isinstance(found, tuple) else (found,)
        grads = torch.autograd.grad(found, leaves, [f.detach() + 1.0 for f in found])
        return *(f.detach() for f in found), *grads

    results = [run(tensors) for tensors in sets]
    torch.cuda.synchronize()

    def same(again, which):
        return all(torch.equal(a, b) for a, b in zip(again, results[which]))

    assert all(same(run(sets[0]), 0) for _ in range(40))
    streams = [torch.cuda.Stream() for _ in sets]
    for _ in range(20):
        found = []
        for stream, tensors in zip(streams, sets):
            with torch.cuda.stream(stream):
                found.append(run(tensors))
        torch.cuda.synchronize()
        assert all(same(again, which) for which, again in enumerate(found))
        del found
    graphs = []
    for stream, tensors in zip(streams, sets):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            again = run(tensors)
        graphs.append((graph, again))
    for _ in range(40):
        for _, again in graphs:
            for t in again:
                t.fill_(torch.nan)
        torch.cuda.synchronize()
        for stream, (graph, _) in zip(streams, graphs):
            with torch.cuda.stream(stream):
                graph.replay()
        torch.cuda.synchronize()
        assert all(same(again, which) for which, (_, again) in enumerate(graphs))
