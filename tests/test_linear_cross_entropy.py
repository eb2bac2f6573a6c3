import itertools

import pytest
import torch
import torch.nn.functional as F
from _inputs import LAYOUTS, tensor
from _numerics import DTYPES, assert_close, check, evaluate, gradcheck, gradgradcheck, opcheck

NAN, INF = float("nan"), float("inf")
OPTIONS = {"z_loss": 1e-2, "softcap": 2.0, "logit_scale": 1.5, "label_smoothing": 0.1}
REDUCTIONS = ("mean", "sum", "none")


@pytest.fixture(scope="module")
def family(internals):
    return internals("linear_cross_entropy")


@pytest.fixture(scope="module")
def core(internals):
    return internals("_linear_cross_entropy")


def with_bias(function):
    """The function with its three differentiable tensors by position."""
    return lambda x, w, t, b=None, **kw: function(x, w, t, linear_bias=b, **kw)


def make(T, H, V, dtype, device, ignored=1):
    x, w, b = tensor((T, H), dtype, device), tensor((V, H), dtype, device, scale=H**-0.5), tensor((V,), dtype, device)
    t = torch.randint(0, V, (T,))
    t[:ignored] = -100
    return x, w, t.to(device), b


def torchs_pair(x, w, t, b=None, chunk_bytes=None, **kw):
    return F.cross_entropy(F.linear(x, w, b).float(), t, **kw)


def test_reference_is_torch(family):
    x, w, t, b = make(5, 4, 7, torch.float64, "cpu")
    weight = torch.rand(7, dtype=torch.float64)
    for reduction, smoothing in itertools.product(REDUCTIONS, (0.0, 0.2)):
        kw = {"reduction": reduction, "label_smoothing": smoothing, "weight": weight}
        dloss = [torch.randn(5 if reduction == "none" else (), dtype=torch.float64)]
        (loss,), grads = evaluate(with_bias(family.linear_cross_entropy_reference), (x, w, t, b), kw, dloss)
        logits_loss = lambda x, w, t, b, **kw: F.cross_entropy(F.linear(x, w, b), t, **kw)  # noqa: E731
        (theirs,), expected = evaluate(logits_loss, (x, w, t, b), kw, dloss)
        assert_close(loss, theirs, dim=None)
        for i in (0, 1, 3):
            assert_close(grads[i], expected[i], dim=None)


@pytest.mark.kernels_ci
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("options", [{}, OPTIONS, {"weight": True, "z_loss": 0.1}])
def test_matches_reference(family, device, reduction, options):
    ours, reference = with_bias(family.linear_cross_entropy), with_bias(family.linear_cross_entropy_reference)
    for dtype in (torch.float64, torch.float32):
        args = make(7, 16, 50, dtype, device)
        kw = {**options, "reduction": reduction, "chunk_bytes": 3 * 50 * dtype.itemsize}  # 3, 3 and 1 rows
        if "weight" in options:
            kw["weight"] = torch.rand(50, dtype=torch.float64).to(dtype).to(device)
        (loss,) = check(ours, reference, *args, **kw)
        assert loss.dtype == dtype and loss.shape == ((7,) if reduction == "none" else ())
        check(ours, reference, *args[:3], **kw)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_half(family, device, dtype, reduction):
    """No further from float64 than torch's two functions: logits are rounded, sums over rows are not."""
    x, w, t, b = make(24, 16, 50, dtype, device)
    x, w = x.abs(), w.abs()  # sums of one sign: an accumulator in x's dtype would drift
    ours, reference = with_bias(family.linear_cross_entropy), with_bias(family.linear_cross_entropy_reference)
    kw = {"reduction": reduction, "chunk_bytes": 2 * 100}
    (loss,) = check(ours, reference, x, w, t, b, versus=torchs_pair, **kw)
    assert loss.dtype == torch.float32


def test_weight_gradient_is_summed_in_float32(family, device):
    """One row a chunk: 128, then ten times 0.5, of which each alone is lost to a sum in bfloat16."""
    x, w = torch.ones((11, 1), dtype=torch.bfloat16, device=device), torch.zeros((2, 1), device=device).bfloat16()
    t = torch.zeros(11, dtype=torch.int64, device=device)
    x[0] = 256
    w.requires_grad_()
    for reduction in ("sum", "none"):
        loss = family.linear_cross_entropy(x, w, t, reduction=reduction, chunk_bytes=4)
        (dw,) = torch.autograd.grad(loss.sum(), w)
        assert dw.flatten().tolist() == [-133.0, 133.0]


def test_mean_of_float16_keeps_small_gradients(family, device):
    """A gradient of 2^-11 / 4096 is below float16's smallest number until the rows are summed."""
    x, w = torch.ones((4096, 1), device=device).half(), torch.zeros((2048, 1), device=device).half()
    (dw,) = torch.autograd.grad(
        family.linear_cross_entropy(x[:4], w.requires_grad_(), torch.zeros(4, dtype=torch.int64, device=device)) / 1024,
        w,
    )
    assert_close(dw[1:], torch.full((2047, 1), 2.0**-21, dtype=torch.float64))


@pytest.mark.parametrize("V", [1, 3, 127, 128, 129, 1000, 5000, 65537])
def test_widths(family, device, V):
    args = make(3, 4, V, torch.float32, device, ignored=0)
    args[2][2] = V - 1
    ours, reference = with_bias(family.linear_cross_entropy), with_bias(family.linear_cross_entropy_reference)
    for kw in ({"reduction": "none"}, {"z_loss": 0.1, "softcap": 5.0, "label_smoothing": 0.1}):
        # One class: the gradients cancel to about 0. Many: x's gradient is torch's float32 sum of as many products.
        check(ours, reference, *args, slack=1e-6 if V == 1 else 0.0, ulps=64 if V > 10000 else None, **kw)


@pytest.mark.parametrize("T", [0, 1])
@pytest.mark.parametrize("ignored", [0, 1])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_few_rows(family, device, T, ignored, reduction):
    args = make(T, 4, 9, torch.float32, device, ignored=ignored)
    ours, reference = with_bias(family.linear_cross_entropy), with_bias(family.linear_cross_entropy_reference)
    check(ours, reference, *args, reduction=reduction, label_smoothing=0.1, z_loss=0.1)


def test_nothing_counts(family, device):
    """The mean is 0 / 0, and its gradient is 0 all the same: nothing of an ignored row arrives anywhere."""
    x, w, t, b = (v.requires_grad_() if v.is_floating_point() else v for v in make(5, 4, 9, torch.float32, device, 5))
    for kw in ({}, {"z_loss": 0.1}, {"weight": torch.rand(9).to(device)}):
        loss = family.linear_cross_entropy(x, w, t, linear_bias=b, chunk_bytes=72, **kw)
        assert loss.isnan()
        assert all((g == 0).all() for g in torch.autograd.grad(loss, (x, w, b), create_graph=True))
        assert all((g == 0).all() for g in torch.autograd.grad(loss, (x, w, b)))


def test_ignored_rows(family, device):
    x, w, _, b = make(6, 4, 9, torch.float32, device)
    t, counted = torch.tensor([3, 0, 3, 8, 2, 3], device=device), torch.tensor([1, 3, 4], device=device)
    x[2] = 1e30  # exp overflows unless it is not looked at
    for reduction in REDUCTIONS:
        kw = {"reduction": reduction, "z_loss": 0.1, "label_smoothing": 0.1, "ignore_index": 3, "chunk_bytes": 72}
        leaf = x.clone().requires_grad_()
        loss = family.linear_cross_entropy(leaf, w, t, linear_bias=b, **kw)
        alone = family.linear_cross_entropy(x[counted], w, t[counted], linear_bias=b, **kw)
        assert_close(loss[counted] if reduction == "none" else loss, alone.double(), dim=None)
        (dx,) = torch.autograd.grad(loss.sum(), leaf)
        assert (dx[[0, 2, 5]] == 0).all() and (dx[counted].abs().amax(1) > 0).all()


def test_special_values(family, device):
    x, w, t, b = make(4, 3, 300, torch.float32, device, ignored=0)
    x[0, 1], x[1, 0] = NAN, INF
    b[7] = -INF  # a class that is masked out
    t[2] = 8
    for function in (family.linear_cross_entropy, family.linear_cross_entropy_reference):
        (loss,), (dx, *_) = evaluate(
            with_bias(function), (x, w, t, b), {"reduction": "none"}, [torch.ones(4, device=device)]
        )
        assert loss.isnan().tolist() == [True, True, False, False]
        assert dx.isnan().all(1).tolist() == [True, True, False, False]


def test_labels_out_of_range(family, device, on_kernels):
    x, w, t, b = make(4, 3, 9, torch.float32, device)
    t[1], t[2] = 9, -1
    x.requires_grad_()
    if on_kernels:
        loss = family.linear_cross_entropy(x, w, t, reduction="none")
        assert loss.isnan().tolist() == [False, True, True, False]
        (dx,) = torch.autograd.grad(loss.sum(), x)
        assert dx.isnan().all(1).tolist() == [False, True, True, False]
        assert family.token_log_probs(x, w, t).isnan().tolist() == [True, True, True, False]
        return
    with pytest.raises(IndexError, match="linear_cross_entropy: target must be in 0 to 8 or ignore_index, got 9"):
        family.linear_cross_entropy(x, w, t)
    with pytest.raises(IndexError, match="token_log_probs: ids must be in 0 to 8, got -100"):
        family.token_log_probs(x, w, t)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_strides(family, device, layout):
    x, w, b = (tensor(s, torch.float32, device, layout) for s in ((6, 8), (20, 8), (20,)))
    if layout == "expanded":  # equal classes, of which the gradients cancel
        w = tensor((20, 8), torch.float32, device)
    t = torch.stack([torch.randint(0, 20, (6,)), torch.full((6,), 99)], -1).to(device)[:, 0]
    ours, reference = with_bias(family.linear_cross_entropy), with_bias(family.linear_cross_entropy_reference)
    check(ours, reference, x, w, t, b, chunk_bytes=320)
    check(
        ours,
        reference,
        x,
        w,
        t,
        b,
        chunk_bytes=320,
        reduction="none",
        grads=[tensor((6,), device=device, layout=layout)],
    )


def test_shapes(family, device):
    x, w, t, _ = make(6, 4, 9, torch.float32, device)
    for shape in ((2, 3), (6, 1), (1, 2, 3)):
        loss = family.linear_cross_entropy(x.view(*shape, 4), w, t.view(shape), reduction="none")
        assert torch.equal(loss, family.linear_cross_entropy(x, w, t, reduction="none").view(shape))
        assert family.token_log_probs(x.view(*shape, 4), w, t.view(shape).clamp(min=0)).shape == shape
    assert family.linear_cross_entropy(x[1], w, t[1], reduction="none").shape == ()
    for dtype in (torch.uint8, torch.int32):
        assert torch.equal(family.linear_cross_entropy(x[1:], w, t[1:].to(dtype)),
                           family.linear_cross_entropy(x[1:], w, t[1:]))  # fmt: skip


def test_probabilities(family, device):
    x, w, _, b = make(6, 4, 9, torch.float32, device)
    soft = torch.softmax(tensor((6, 9), torch.float32, device), -1)
    ours, reference = with_bias(family.linear_cross_entropy), with_bias(family.linear_cross_entropy_reference)
    for reduction in REDUCTIONS:
        check(ours, reference, x, w, soft, b, reduction=reduction, label_smoothing=0.1, z_loss=0.1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("V", [50, 5000])
def test_token_log_probs(family, device, dtype, V):
    x, w, t, _ = make(5, 16, V, dtype, device, ignored=0)
    versus = None if dtype.itemsize > 2 else family.token_log_probs_reference
    for kw in ({}, {"return_entropy": True, "temperature": 0.7}):
        results = check(
            family.token_log_probs, family.token_log_probs_reference, x, w, t, chunk_bytes=2 * V * dtype.itemsize,
            versus=versus, **kw,
        )  # fmt: skip
        assert all(r.dtype == (dtype if dtype == torch.float64 else torch.float32) for r in results)


def test_one_result_used(family, device):
    """The entropy alone, and the log-probability alone, of a call that gives both."""
    x, w, t, _ = make(5, 16, 50, torch.float32, device, ignored=0)
    for pick in (0, 1):

        def one(function, pick=pick):
            return lambda *args: function(*args, return_entropy=True)[pick]

        check(one(family.token_log_probs), one(family.token_log_probs_reference), x, w, t)


def test_entropy_of_certain_rows(family, device):
    """Of a class that has all the probability: 0, with a gradient of 0, though 0 * log(0) is in it."""
    x, w = torch.eye(2, device=device)[:1] * 500, torch.eye(2, device=device)
    (_, entropy), (dx, *_) = evaluate(
        family.token_log_probs, (x, w, torch.zeros(1, dtype=torch.int64, device=device)), {"return_entropy": True},
        [torch.zeros(1, device=device), torch.ones(1, device=device)],
    )  # fmt: skip
    assert entropy.item() == 0 and (dx == 0).all()


def test_logits_are_never_whole(family, device, monkeypatch):
    """The largest tensor beside arguments and gradients is one chunk, forward and backward, whatever the reduction."""
    x, w, t, b = make(40, 4, 64, torch.float32, device)
    seen = []
    real = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, **kw: seen.append(real(*a, **kw)) or seen[-1])
    x.requires_grad_()
    for reduction in REDUCTIONS:
        family.linear_cross_entropy(x, w, t, reduction=reduction, chunk_bytes=8 * 64 * 4).sum().backward()
    sizes = [s.numel() for s in seen]
    assert max(sizes) == 8 * 64 and sizes.count(8 * 64) == 4  # one piece of memory a pass


def test_chunk_rows(core):
    """Even chunks, whole multiples of 128 rows where there is room, one row at least."""
    assert core.chunk_rows(8192, 4096, 128256, 2, None) == 2048
    assert core.chunk_rows(8191, 4096, 128256, 2, None) == 2048
    assert core.chunk_rows(2100, 4096, 128256, 2, None) == 1152
    assert core.chunk_rows(8192, 4096, 32000, 2, None) == 4096
    assert core.chunk_rows(8192, 64, 1000, 2, None) == 1024
    assert core.chunk_rows(7, 4, 50, 2, 300) == 3 and core.chunk_rows(7, 4, 50, 2, 1) == 1
    assert core.chunk_rows(0, 4, 50, 2, None) >= 1 and core.chunk_rows(5, 4, 0, 2, None) >= 1
    for T, V, chunk_bytes in itertools.product((1, 127, 129, 5000), (1, 2048, 10**6), (1, 10**5, 10**8)):
        step = core.chunk_rows(T, 64, V, 2, chunk_bytes)
        assert step == 1 or step * V * 2 <= chunk_bytes


def test_what_is_not_needed_is_not_made(family, device):
    x, w, t, b = make(4, 4, 9, torch.float32, device)
    kept = []
    for needed in (x, w, b):
        needed.requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(lambda s: kept.append(s) or s, lambda s: s):
            loss = family.linear_cross_entropy(x, w, t, linear_bias=b)
        (grad,) = torch.autograd.grad(loss, needed)
        expected = torch.autograd.grad(family.linear_cross_entropy_reference(x, w, t, linear_bias=b), needed)[0]
        assert_close(grad, expected.double(), dim=None, ulps=32)
        needed.requires_grad_(False)
    with torch.no_grad():
        assert torch.equal(family.linear_cross_entropy(x.requires_grad_(), w, t, linear_bias=b), loss)
    with torch.inference_mode():
        assert torch.equal(family.linear_cross_entropy(x, w, t, linear_bias=b), loss)


def test_backward_twice_and_accumulated(family, device):
    x, w, t, _ = make(6, 4, 9, torch.bfloat16, device)
    x.requires_grad_(), w.requires_grad_()
    loss = family.linear_cross_entropy(x, w, t)
    first = torch.autograd.grad(loss, (x, w), torch.tensor(3.0, device=device), retain_graph=True)
    again = torch.autograd.grad(loss, (x, w), torch.tensor(3.0, device=device))
    assert all(torch.equal(a, b) for a, b in zip(first, again))


def test_every_option_changes_something(family, device):
    x, w, t, b = make(5, 4, 9, torch.float32, device)
    t[1] = 3
    plain = family.linear_cross_entropy(x, w, t)
    for kw in ({"linear_bias": b}, {"weight": torch.rand(9).to(device)}, {"ignore_index": 3}, {"reduction": "sum"},
               {"label_smoothing": 0.1}, {"z_loss": 0.1}, {"softcap": 1.0}, {"logit_scale": 2.0}):  # fmt: skip
        if "ignore_index" in kw:
            t = t.clamp(min=0)
        assert not torch.allclose(family.linear_cross_entropy(x, w, t, **kw), plain), kw


def test_autocast(family, device):
    x, w, t, b = make(6, 8, 20, torch.float32, device)
    leaves = [v.requires_grad_() for v in (x, w, b)]
    with torch.autocast(device.type, torch.bfloat16):
        loss = family.linear_cross_entropy(x, w, t, linear_bias=b)
        logp = family.token_log_probs(x, w, t.clamp(min=0))
    expected = family.linear_cross_entropy(*(v.bfloat16() for v in (x, w)), t, linear_bias=b.bfloat16())
    assert torch.equal(loss, expected) and logp.dtype == torch.float32
    grads = torch.autograd.grad(loss, leaves)
    assert all(g.dtype == torch.float32 for g in grads)


def test_bad_input(family, device):
    x, w, t, b = make(4, 8, 9, torch.float32, device)
    f, g = family.linear_cross_entropy, family.token_log_probs
    cases = [
        (TypeError, "linear_cross_entropy: x must be a tensor, got list", lambda: f([1.0], w, t)),
        (TypeError, "linear_cross_entropy: linear_weight must have x's dtype float32, got bfloat16",
         lambda: f(x, w.bfloat16(), t)),
        (ValueError, "linear_cross_entropy: linear_weight must have shape (V, 8), got (9, 7)",
         lambda: f(x, w[:, :7], t)),
        (ValueError, "linear_cross_entropy: linear_bias must have shape (9,), got (8,)",
         lambda: f(x, w, t, linear_bias=b[:8])),
        (ValueError, "linear_cross_entropy: weight must have shape (9,), got (8,)", lambda: f(x, w, t, weight=b[:8])),
        (ValueError, "linear_cross_entropy: weight must not require a gradient",
         lambda: f(x, w, t, weight=b.clone().requires_grad_())),
        (ValueError, "linear_cross_entropy: target must have shape (4,), got (3,)", lambda: f(x, w, t[:3])),
        (ValueError, "linear_cross_entropy: target of probabilities must have shape (4, 9), got (4,)",
         lambda: f(x, w, t.float())),
        (TypeError, "linear_cross_entropy: target must be a tensor, got NoneType", lambda: f(x, w, None)),
        (ValueError, "linear_cross_entropy: reduction must be one of", lambda: f(x, w, t, reduction="max")),
        (ValueError, "linear_cross_entropy: chunk_bytes must be at least 1, got 0", lambda: f(x, w, t, chunk_bytes=0)),
        (TypeError, "linear_cross_entropy: chunk_bytes must be an int or None, got float",
         lambda: f(x, w, t, chunk_bytes=1e6)),
        (ValueError, "linear_cross_entropy: softcap must be above 0 or None, got 0", lambda: f(x, w, t, softcap=0.0)),
        (ValueError, "token_log_probs: ids must have shape (4,), got (3,)", lambda: g(x, w, t[:3])),
        (TypeError, "token_log_probs: ids must have an integer dtype, got float32", lambda: g(x, w, t.float())),
        (ValueError, "token_log_probs: temperature must be above 0, got 0", lambda: g(x, w, t, temperature=0)),
    ]  # fmt: skip
    for error, message, call in cases:
        with pytest.raises(error) as caught:
            call()
        assert str(caught.value).startswith(message), str(caught.value)


def test_opcheck(core, device):
    x, w, t, b = make(5, 4, 9, torch.float32, device)
    leaves = [v.requires_grad_() for v in (x, w, b)]
    weight = torch.rand(9).to(device)
    params = (-100, 0.9, 0.1 / 9, 2.0, 1.5)
    for reduction, entropy, needs in (("mean", False, (True,) * 3), ("none", False, (False,) * 3)):
        opcheck(core.linear_cross_entropy_fwd, (x, w, t, b, weight, *params, 0.1, reduction, 72, entropy, *needs))
    plain = (-100, 1.0, 0.0, None, 1.0)
    opcheck(core.linear_cross_entropy_fwd, (x, w, t, None, None, *plain, 0.0, "none", 72, True, False, False, False))
    stats = core.linear_cross_entropy_fwd(x, w, t, b, weight, *params, 0.1, "none", 72, False, *(False,) * 3)[2]
    rows = torch.rand(5).to(device)
    leaves = [v.detach() for v in leaves]
    opcheck(
        core.linear_cross_entropy_bwd,
        (x, w, t, b, weight, stats.detach(), rows, rows, None, *params, 72, True, True, True),
    )
    opcheck(
        core.linear_cross_entropy_bwd,
        (x, w, t, None, None, stats.detach(), rows, None, rows, *plain, 72, True, False, False),
    )


def test_direct_call_is_the_op(family, core, device):
    x, w, t, _ = make(5, 8, 60, torch.bfloat16, device)
    rest = (t, None, None, -100, 1.0, 0.0, None, 1.0, 0.0, "mean", None, False, True, True, False)
    x.requires_grad_(), w.requires_grad_()
    loss, registered = family.linear_cross_entropy(x, w, t), core.linear_cross_entropy_fwd(x, w, *rest)[0]
    assert torch.equal(loss, registered)
    direct, registered = torch.autograd.grad(loss, (x, w)), torch.autograd.grad(registered, (x, w))
    assert all(torch.equal(a, b) for a, b in zip(direct, registered))


def test_compile(family, device, backend):
    def step(x, w, t, b):
        loss = family.linear_cross_entropy(x * 2, w, t, linear_bias=b, z_loss=0.1, chunk_bytes=200)
        rows = family.linear_cross_entropy(x, w, t, reduction="none", chunk_bytes=200)
        logp, entropy = family.token_log_probs(x, w, t, return_entropy=True)
        return loss + (rows * x[:, 0]).sum() + logp.sum() + entropy.square().sum()

    x, w, t, b = make(6, 8, 20, torch.float32, device, ignored=0)
    leaves = [v.requires_grad_() for v in (x, w, b)]
    expected = torch.autograd.grad(step(x, w, t, b), leaves)
    found = torch.autograd.grad(torch.compile(step, fullgraph=True, backend=backend)(x, w, t, b), leaves)
    for a, e in zip(found, expected):
        assert_close(a, e.double(), dim=None)


def test_transforms(family, device):
    x, w, t, b = make(2, 2, 3, torch.float64, device)
    leaves = [v.requires_grad_() for v in (x, w, b)]
    kw = {"z_loss": 0.1, "softcap": 2.0, "label_smoothing": 0.1}
    kw["weight"] = torch.rand(3, dtype=torch.float64).to(device)
    for reduction in ("mean", "none"):

        def loss(x, w, b, reduction=reduction):
            return family.linear_cross_entropy(x, w, t, linear_bias=b, reduction=reduction, **kw)

        assert gradcheck(loss, leaves) and gradgradcheck(loss, leaves)

    def logp(x, w):
        return family.token_log_probs(x, w, t.clamp(min=0), temperature=0.7, return_entropy=True)

    assert gradcheck(logp, leaves[:2]) and gradgradcheck(logp, leaves[:2])
    x, w, t = (v.detach() for v in make(3, 2, 4, torch.float64, device)[:3])
    batch, targets = torch.stack([x, 2 * x]), torch.stack([t, t.flip(0)])
    for f in (family.linear_cross_entropy, family.linear_cross_entropy_reference):
        per_sample = torch.func.vmap(torch.func.grad(f, argnums=1), (0, None, 0))(batch, w, targets)
        if f is family.linear_cross_entropy:
            found = per_sample
    assert_close(found, per_sample, dim=None)
    hessian = torch.func.jacrev(torch.func.jacrev(lambda w: family.linear_cross_entropy(x, w, t)))(w)
    expected = torch.func.hessian(lambda w: family.linear_cross_entropy_reference(x, w, t))(w)
    assert_close(hessian, expected, dim=None)


def test_no_sync(family, device):
    if device.type != "cuda":
        pytest.skip("asks CUDA")
    x, w, t, b = make(300, 16, 1000, torch.bfloat16, device)
    leaves = [v.requires_grad_() for v in (x, w, b)]

    def step():
        for reduction in REDUCTIONS:
            kw = {"reduction": reduction, "z_loss": 0.1, "weight": weight, "chunk_bytes": 2 * 1000 * 128}
            torch.autograd.grad(family.linear_cross_entropy(x, w, t, linear_bias=b, **kw).sum(), leaves)

    weight = torch.rand(1000, device=device)
    step()
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode(before)
