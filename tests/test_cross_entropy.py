import itertools

import pytest
import torch
import torch.nn.functional as F
from _inputs import LAYOUTS, tensor
from _numerics import DTYPES, assert_close, check, evaluate, gradcheck, gradgradcheck, opcheck
from _processes import in_two

NAN, INF = float("nan"), float("inf")
LOWEST = torch.finfo(torch.float32).min
OPTIONS = {"z_loss": 1e-2, "softcap": 2.0, "logit_scale": 1.5, "label_smoothing": 0.1}


@pytest.fixture(scope="module")
def family(internals):
    return internals("cross_entropy")


@pytest.fixture(scope="module")
def core(internals):
    return internals("_cross_entropy")


def labels(shape, classes, device, dtype=torch.int64, ignored=1):
    t = torch.randint(0, classes, shape)
    t.view(-1)[:ignored] = -100
    return t.to(dtype).to(device)


def with_lse(function):
    """(loss, lse): both are differentiated."""
    return lambda *args, **kw: function(*args, return_aux=True, **kw)[:2]


# The reference and the op beside torch, over every combination that torch has.


@pytest.mark.parametrize("shape", [(4, 5), (2, 5, 3), (7,)])
@pytest.mark.parametrize("soft", [False, True])
def test_numbers_of_torch(family, device, shape, soft):
    dim = min(1, len(shape) - 1)
    C = shape[dim]
    for weighted, smoothing, reduction in itertools.product((False, True), (0.0, 0.2), ("mean", "sum", "none")):
        x = tensor(shape, torch.float64, device)
        if soft:
            target = torch.rand(shape, dtype=torch.float64).to(device)
        else:
            target = labels([n for d, n in enumerate(shape) if d != dim], C, device, ignored=len(shape) > 1)
        weight = torch.rand(C, dtype=torch.float64).to(device) if weighted else None
        kw = {"weight": weight, "reduction": reduction, "label_smoothing": smoothing}
        dloss = torch.randn_like(F.cross_entropy(x, target, **kw))
        expected = evaluate(F.cross_entropy, (x, target), kw, [dloss])
        for function in (family.cross_entropy_reference, family.cross_entropy):
            for aux in (False, True):  # on the CPU path the one is torch's, the other ours
                ours = (lambda *a, f=function, **k: f(*a, return_aux=True, **k).loss) if aux else function
                (loss,), grads = evaluate(ours, (x, target), kw, [dloss])
                assert_close(loss, expected[0][0], dim=None)
                for a, b in zip(grads, expected[1]):
                    assert (a is None) == (b is None)
                    if a is not None:
                        assert_close(a, b, dim=None)


@pytest.mark.kernels_ci
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", [{}, OPTIONS, {"label_smoothing": 0.3, "reduction": "sum"}, {"reduction": "none"}])
def test_matches_reference(family, device, dtype, options):
    x, t = tensor((6, 100), dtype, device, scale=2.0), labels((6,), 100, device)
    check(family.cross_entropy, family.cross_entropy_reference, x, t, **options)
    weight = torch.rand(100).to(dtype).to(device)
    loss, lse = check(
        with_lse(family.cross_entropy), with_lse(family.cross_entropy_reference), x, t, weight=weight, **options
    )
    assert loss.dtype == lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    target = torch.softmax(tensor((6, 100), torch.float64), -1).to(dtype).to(device)
    check(family.cross_entropy, family.cross_entropy_reference, x, target, weight=weight, **options)


@pytest.mark.parametrize("N", [1, 3, 127, 128, 129, 1000, 4097, 65537, 262144])
def test_widths(family, device, N):
    x, t = tensor((3, N), torch.float32, device), labels((3,), N, device)
    t[2] = N - 1
    for options in ({}, OPTIONS) if N < 262144 else ({},):
        versus = family.cross_entropy_reference if N == 1 and options else None  # dx cancels to about 0 there
        check(family.cross_entropy, family.cross_entropy_reference, x, t, versus=versus, **options)
    if N < 5000:
        target = torch.softmax(tensor((3, N), torch.float64), -1).float().to(device)
        versus = family.cross_entropy_reference if N == 1 else None
        check(family.cross_entropy, family.cross_entropy_reference, x, target, versus=versus)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(6, 40), (2, 36, 3, 4), (3, 5000)])
def test_strides(family, device, on_kernels, layout, shape):
    versus = None if on_kernels else F.cross_entropy  # torch's, which serves the other path, is less accurate
    x = tensor(shape, torch.float32, device, layout)
    t = labels((shape[0], *shape[2:]), shape[1], device)
    if layout != "contiguous":
        t = torch.stack([t, t + 1000], -1)[..., 0]
    dloss = tensor(t.shape, torch.float32, device, layout)
    for options in ({"reduction": "none"}, {"label_smoothing": 0.1, "reduction": "none"}):
        check(family.cross_entropy, family.cross_entropy_reference, x, t, grads=[dloss], versus=versus, **options)
    if shape[1] < 100:
        target = torch.softmax(tensor(shape, torch.float32, device, layout), 1)
        check(family.cross_entropy, family.cross_entropy_reference, x, target, grads=[dloss], reduction="none")


def test_permuted_dimensions(family, device):
    """A layout that no three strides describe, and (B, S, V) logits transposed for torch's convention."""
    x = tensor((2, 2, 2, 2, 2, 8), torch.float32, device).permute(4, 5, 2, 0, 3, 1)
    t = labels((2, 2, 2, 2, 2), 8, device)
    check(family.cross_entropy, family.cross_entropy_reference, x, t, reduction="none")
    logits = tensor((2, 3, 50), torch.bfloat16, device)
    check(family.cross_entropy, family.cross_entropy_reference, logits.transpose(1, 2), labels((2, 3), 50, device))


def test_far_rows(family, device):
    if device.type == "cpu":
        pytest.skip("4 GiB of memory: on a GPU only")
    x = torch.empty(2**31 + 64, dtype=torch.bfloat16, device=device).as_strided((2, 64), (2**31, 1))
    x.copy_(torch.randn(2, 64))
    t = torch.tensor([3, 60], device=device)
    near = x.contiguous()
    for y in (near, x.t().contiguous().t()):
        a, b = (evaluate(family.cross_entropy, (z, t), {"reduction": "none"}, [torch.ones(2, device=device)])
                for z in (x, y))  # fmt: skip
        if y is near:
            assert torch.equal(a[0][0], b[0][0]) and torch.equal(a[1][0], b[1][0])
        else:  # walked another way, so summed in another order
            torch.testing.assert_close((a[0][0], a[1][0]), (b[0][0], b[1][0]))


@pytest.mark.parametrize("shape", [(0, 5), (2, 5, 0), (3, 0)])
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_empty(family, device, shape, reduction):
    x = tensor(shape, torch.float32, device)
    t = torch.full((shape[0], *shape[2:]), -100, device=device)
    check(family.cross_entropy, F.cross_entropy, x, t, reduction=reduction)
    aux = family.cross_entropy(x, t, reduction=reduction, return_aux=True, z_loss=0.1)
    assert aux.lse.shape == t.shape and aux.accuracy.shape == aux.loss.shape


def test_special_values(family, device):
    """NaN and inf where torch has them, loss and gradient, whatever the options."""
    x = torch.randn(10, 700)
    x[0, 3], x[1, 2], x[2], x[3, 4] = INF, NAN, -INF, -INF
    x[4, :3], x[5], x[6, 0], x[7, 0], x[7, 1] = 1e8, LOWEST, LOWEST, -2200.0, 890.0
    x[8, ::2], x[9, 1] = -INF, 2e35
    x, t = x.to(device), torch.tensor([1, 2, 3, 4, 1, 2, 0, 0, 5, 1], device=device)
    weight = torch.rand(700).to(device)
    soft = torch.softmax(torch.randn(10, 700), -1).to(device)
    ones = torch.ones(10, device=device)
    for target, kw in ((t, {}), (t, {"label_smoothing": 0.1}), (t, {"weight": weight}), (soft, {})):
        kw = {**kw, "reduction": "none"}
        (loss,), grads = evaluate(family.cross_entropy, (x, target), kw, [ones])
        (theirs,), expected = evaluate(F.cross_entropy, (x, target), kw, [ones])
        wide = [v.double() if v.is_floating_point() else v for v in (x, target)]
        options = {k: v.double() if k == "weight" else v for k, v in kw.items()}
        (exact,), slope = evaluate(F.cross_entropy, wide, options, [ones.double()])
        for a, b, e in ((loss, theirs, exact), (grads[0], expected[0], slope[0])):
            assert torch.equal(a.isnan(), b.isnan())
            # Where torch is 1e-6 off itself, as the gradient under smoothing is on some CPUs, that is no measure.
            allowed = 1e-6 + 4e-6 * e.abs() + (b.double() - e).abs()
            assert ((a == b) | a.isnan() | ((a.double() - e).abs() <= allowed)).all()
    assert loss[[0, 1, 2]].isnan().all()


@pytest.mark.parametrize("N", [2, 9000])
def test_large_logits(family, device, N):
    """No digit is lost to the size of the logits, in the loss or in the gradient."""
    x = torch.full((2, N), -INF)
    x[0, :2] = 1e8
    x[1, : N // 2], x[1, -1] = -2200.0, 890.0
    x, t = x.to(device), torch.tensor([1, N - 1], device=device)
    (loss,), (dx, _) = evaluate(family.cross_entropy, (x, t), {"reduction": "none"}, [torch.ones(2, device=device)])
    assert loss[0].item() == pytest.approx(0.6931471805599453, rel=2e-7) and loss[1] == 0
    assert torch.equal(dx[0, :2].cpu(), torch.tensor([0.5, -0.5])) and dx[1].abs().max() == 0


@pytest.mark.parametrize("soft", [False, True])
def test_maximum_that_rises(family, device, soft):
    """Each tile's maximum is above the last one's: what was summed is moved along, and keeps its digits."""
    x = (torch.arange(9000.0) / 7)[None].to(device)
    target = torch.full_like(x, 1 / 9000) if soft else torch.tensor([3], device=device)
    options = {"label_smoothing": 0.0 if soft else 0.9}
    expected = F.cross_entropy(x.double(), target.double() if soft else target, **options)
    assert_close(family.cross_entropy(x, target, **options), expected, dim=None)


def test_loss_needs_no_gradient_asked_for(family, device):
    x, t = tensor((4, 3), torch.float32, device), torch.zeros(4, dtype=torch.int64, device=device)
    with_grad = family.cross_entropy(x.clone().requires_grad_(), t)
    with torch.no_grad():
        assert torch.equal(family.cross_entropy(x, t), with_grad)
    with torch.inference_mode():
        assert torch.equal(family.cross_entropy(x, t), with_grad)


def test_ignored_rows(family, device):
    """Nothing of them in the loss, and a gradient of exactly 0, whatever they hold; only ignore_index is ignored."""
    x = tensor((5, 40), torch.float32, device)
    x[1], x[3, 2] = NAN, INF
    t = torch.tensor([7, 3, 0, 3, 39], device=device)
    counted = torch.tensor([0, 2, 4], device=device)
    for reduction in ("mean", "sum", "none"):
        kw = {"ignore_index": 3, "reduction": reduction, "label_smoothing": 0.1, "z_loss": 0.1, "softcap": 5.0}
        for aux in (False, True):
            y = x.clone().requires_grad_()
            loss = family.cross_entropy(y, t, return_aux=aux, **kw)
            loss = loss.loss if aux else loss
            alone = family.cross_entropy(x[counted], t[counted], **kw)
            assert_close(loss[counted] if reduction == "none" else loss, alone.double(), dim=None)
            (dx,) = torch.autograd.grad(loss.sum(), y)
            assert (dx[[1, 3]] == 0).all() and dx[counted].abs().amin() > 0
    none = torch.full_like(t, -100)
    for kw in ({}, {"label_smoothing": 0.1}, {"z_loss": 0.1, "weight": torch.rand(40).to(device)}):
        y = x.clone().requires_grad_()
        assert family.cross_entropy(y, none, **kw).isnan() and family.cross_entropy(y, none, reduction="sum", **kw) == 0
        (dx,) = torch.autograd.grad(family.cross_entropy(y, none, reduction="sum", **kw), y)
        assert (dx == 0).all()


def test_labels_out_of_range(family, core, device, on_kernels):
    """They raise on the CPU; in kernels their rows are NaN, and the column after the last is no class."""
    x = tensor((6, 5), torch.float32, device)
    t = torch.tensor([4, 5, -1, -100, 2**40, -4], device=device)
    if on_kernels:
        for kw in ({}, {"label_smoothing": 0.1, "return_aux": True}, {"weight": torch.rand(5).to(device)}):
            y = x.clone().requires_grad_()
            loss = family.cross_entropy(y, t, reduction="none", **kw)
            loss = loss.loss if "return_aux" in kw else loss
            assert loss.isnan().tolist() == [False, True, True, False, True, True] and loss[3] == 0
            (dx,) = torch.autograd.grad(loss.sum(), y)
            assert dx.isnan().all(1).tolist() == [False, True, True, False, True, True] and (dx[3] == 0).all()
        return
    for kw in ({}, {"z_loss": 0.1}, {"return_aux": True}):
        with pytest.raises(IndexError) as caught:
            family.cross_entropy(x, t, **kw)
        assert str(caught.value) == "cross_entropy: target must be in 0 to 4 or ignore_index, got 5"
    loss, _, _ = core.cross_entropy_fwd(x, t, None, -1, -100, 1.0, 0.0, None, 1.0, True, False)  # as on a GPU
    assert loss.isnan().tolist() == [False, True, True, False, True, True]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32])
def test_label_dtypes(family, device, dtype):
    x, t = tensor((4, 100), torch.float32, device), torch.tensor([0, 99, 7, 50], device=device)
    assert torch.equal(family.cross_entropy(x, t.to(dtype)), family.cross_entropy(x, t))
    assert family.cross_entropy(x, t.to(dtype), ignore_index=99, reduction="none")[1] == 0


def test_mixed_dtypes(family, device):
    """A weight or target wider than the logits, which torch refuses or rounds."""
    x, t = tensor((4, 100), torch.bfloat16, device), labels((4,), 100, device)
    weight, soft = torch.rand(100).to(device), torch.softmax(tensor((4, 100), torch.float32, device), -1)
    check(family.cross_entropy, family.cross_entropy_reference, x, t, weight=weight)
    assert family.cross_entropy(x, t, weight=weight.double()).dtype == torch.float64
    check(family.cross_entropy, family.cross_entropy_reference, x, soft, weight=weight)
    assert family.cross_entropy(x, soft.double()).dtype == torch.float64


def test_aux(family, device):
    x, t = tensor((5, 30), torch.float32, device), labels((5,), 30, device)
    t[1], t[2] = x[1].argmax(), x[2].argmin()
    t[3], t[4] = x[3].argmax(), x[4].topk(2).indices[1]
    for reduction in ("mean", "sum", "none"):
        aux = family.cross_entropy(x, t, reduction=reduction, z_loss=0.5, return_aux=True)
        plain, counted = family.cross_entropy(x, t, reduction=reduction), t != -100
        hits = ((x.argmax(-1) == t) & counted).float()
        z = torch.where(counted, 0.5 * torch.logsumexp(x, -1) ** 2, 0.0)
        n = counted.sum() if reduction == "mean" else 1
        z, hits = (z, hits) if reduction == "none" else (z.sum() / n, hits.sum() / n)
        assert_close(aux.lse, torch.logsumexp(x.double(), -1))
        assert_close(aux.z_loss, z.double(), dim=None)
        assert_close(aux.loss - aux.z_loss, plain.double(), dim=None, ulps=64)  # what the subtraction leaves
        assert torch.equal(aux.accuracy, hits) and not aux.z_loss.requires_grad
    soft = torch.softmax(tensor((5, 9000), torch.float32, device), -1)
    wide = tensor((5, 9000), torch.float32, device)
    wide[0, soft[0].argmax()] = 50.0
    aux = family.cross_entropy(wide, soft, reduction="none", return_aux=True)
    assert torch.equal(aux.accuracy, (wide.argmax(-1) == soft.argmax(-1)).float()) and aux.accuracy[0] == 1
    wide[1, 5] = wide[1, 5 + 4096] = wide[2, 7] = wide[2, 7 + 4096] = 50.0  # of equal logits, either is the largest
    soft[1, 5], soft[2, 7 + 4096] = 1.0, 1.0
    assert family.cross_entropy(wide, soft, reduction="none", return_aux=True).accuracy.tolist() == [1, 1, 1, 0, 0]
    assert (family.cross_entropy(x, t, return_aux=True).z_loss == 0).all()


def test_every_option_changes_something(family, device):
    x, t = tensor((4, 10), torch.float32, device), torch.tensor([1, 2, 3, 4], device=device)
    weight = torch.rand(10).to(device)
    plain = family.cross_entropy(x, t)
    for kw in ({"weight": weight}, {"ignore_index": 3}, {"reduction": "sum"}, {"label_smoothing": 0.1}, {"z_loss": 0.1},
               {"softcap": 1.0}, {"logit_scale": 2.0}, {"logit_scale": -1.0}):  # fmt: skip
        assert not torch.allclose(family.cross_entropy(x, t, **kw), plain), kw
        check(family.cross_entropy, family.cross_entropy_reference, x, t, **kw)


def test_softcap_far_out(family, device):
    """Beyond twice the cap, which a product with tanh in the wrong place does not bound."""
    x = torch.linspace(-124.0, 124.0, 100, device=device).repeat(2, 1)
    t = torch.tensor([0, 99], device=device)
    # A probability is exp(a - b) of two numbers near 30, each half an ulp of 30 off: that much is its relative error.
    check(family.cross_entropy, family.cross_entropy_reference, x, t, softcap=30.0, reduction="none", ulps=30)
    assert family.cross_entropy(x, t, softcap=30.0, reduction="none")[0] < 65


def test_nothing_of_the_logits_size_is_kept(family, device, on_kernels):
    if not on_kernels:
        pytest.skip("torch's own function serves this path")
    x, t = tensor((4, 300), torch.bfloat16, device).requires_grad_(), labels((4,), 300, device)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda s: kept.append(s) or s, lambda s: s):
        loss = family.cross_entropy(x, t, z_loss=0.1, label_smoothing=0.1)
    assert all(s.data_ptr() == x.data_ptr() or s.numel() <= 16 for s in kept) and kept
    loss.backward()


def test_repeats_are_equal(family, device):
    x, t = tensor((40, 256), torch.bfloat16, device), labels((40,), 256, device)
    runs = [evaluate(family.cross_entropy, (x, t), {}, [torch.ones((), device=device)]) for _ in range(3)]
    assert all(torch.equal(r[0][0], runs[0][0][0]) and torch.equal(r[1][0], runs[0][1][0]) for r in runs)


def test_bad_input(family, device):
    x, t = tensor((4, 8), torch.float32, device), torch.zeros(4, dtype=torch.int64, device=device)
    w = torch.rand(8).to(device)
    f = family.cross_entropy
    cases = [
        (TypeError, "x must be a tensor, got list", lambda: f([1.0], t)),
        (TypeError, "x must have dtype float64 | float32 | float16 | bfloat16, got int64", lambda: f(t, t)),
        (ValueError, "x must have 1 or more dimensions, got 0", lambda: f(x[0, 0], t[0])),
        (TypeError, "target must be a tensor, got NoneType", lambda: f(x, None)),
        (TypeError, "target must have an integer dtype, got bool", lambda: f(x, t.bool())),
        (ValueError, "target must have shape (4,), got (3,)", lambda: f(x, t[:3])),
        (ValueError, "target of probabilities must have shape (4, 8), got (4,)", lambda: f(x, t.float())),
        (ValueError, "target must be on", lambda: f(x, t.to("meta"))),
        (ValueError, "ignore_index must be negative with a target of probabilities, got 1",
         lambda: f(x, x, ignore_index=1)),
        (TypeError, "ignore_index must be an int, got float", lambda: f(x, t, ignore_index=1.0)),
        (ValueError, "weight must have shape (8,), got (7,)", lambda: f(x, t, w[:7])),
        (ValueError, "weight must not require a gradient", lambda: f(x, t, w.clone().requires_grad_())),
        (ValueError, "reduction must be one of 'none', 'mean', 'sum', got 'batchmean'",
         lambda: f(x, t, reduction="batchmean")),
        (ValueError, "label_smoothing must be at most 1, got 1.5", lambda: f(x, t, label_smoothing=1.5)),
        (ValueError, "label_smoothing must be at least 0, got -1", lambda: f(x, t, label_smoothing=-1)),
        (ValueError, "softcap must be above 0 or None, got 0", lambda: f(x, t, softcap=0.0)),
        (TypeError, "z_loss must be a number, got str", lambda: f(x, t, z_loss="1")),
        (TypeError, "logit_scale must be a number, got NoneType", lambda: f(x, t, logit_scale=None)),
    ]  # fmt: skip
    for error, message, call in cases:
        with pytest.raises(error) as caught:
            call()
        assert str(caught.value).startswith(f"cross_entropy: {message}"), str(caught.value)
    with pytest.raises(TypeError, match="vocab_parallel_cross_entropy: target must have an integer dtype, got float32"):
        family.vocab_parallel_cross_entropy(x, x)


def test_opcheck(core, device):
    x, t = tensor((3, 40), torch.float32, device).requires_grad_(), labels((3,), 40, device)
    far = tensor((2, 40, 3), torch.float32, device, "transposed").requires_grad_()
    soft, w = torch.rand(2, 40, 3).to(device).requires_grad_(), torch.rand(40).to(device)
    opcheck(core.cross_entropy_fwd, (x, t, None, -1, -100, 1.0, 0.0, None, 1.0, True, False))
    opcheck(core.cross_entropy_fwd, (far, soft, w, -2, -100, 0.9, 0.1, 2.0, 1.5, False, False))
    dloss, stats = torch.rand(3, device=device), torch.rand(3, 4, device=device)
    args = (None, -1, -100, 1.0, 0.0, None, 1.0, 0.0)
    opcheck(core.cross_entropy_bwd, (dloss, None, x, t, None, stats, *args, False, False))
    opcheck(core.cross_entropy_bwd, (dloss, dloss, x, t, None, stats, *args, True, False))
    for z_loss, aux in ((0.0, False), (0.1, True)):
        args = (-1, -100, 1.0, 0.0, None, 1.0)
        opcheck(core.cross_entropy_total_fwd, (x, t, None, *args, not aux, "mean", z_loss, aux))
        whole = (dloss[0].expand(3), None, x, t, None, stats, torch.tensor([2.0, 2.0, 0.0, 0.0], device=device))
        opcheck(core.cross_entropy_bwd, (*whole, *args, z_loss, False, False))
    dloss, stats = torch.rand(2, 3, device=device), torch.rand(2, 3, 4, device=device)
    opcheck(
        core.cross_entropy_bwd,
        (dloss, dloss, far, soft, w, stats, None, -2, -100, 0.9, 0.1, 2.0, 1.5, 0.0, False, True),
    )


def test_direct_launch_is_the_op(family, core, device, on_kernels):
    if not on_kernels:
        pytest.skip("no kernels on this path")
    x, t = tensor((5, 300), torch.bfloat16, device).requires_grad_(), labels((5,), 300, device)
    loss, _, _ = core.cross_entropy_fwd(x, t, None, -1, -100, 1.0, 0.0, None, 1.0, True, False)
    direct = family.cross_entropy(x, t, reduction="none")
    assert torch.equal(direct, loss)
    dloss = torch.rand(5, device=device)
    assert torch.equal(torch.autograd.grad(direct, x, dloss)[0], torch.autograd.grad(loss, x, dloss)[0])


def test_compile(family, device):
    def step(x, t, soft):
        aux = family.cross_entropy(x * 2, t, z_loss=0.1, label_smoothing=0.1, return_aux=True)
        return aux.loss + aux.lse.sum() + family.cross_entropy(x, t) + family.cross_entropy(x, soft)

    x, t = tensor((4, 64), torch.float32, device).requires_grad_(), labels((4,), 64, device)
    soft = torch.softmax(tensor((4, 64), torch.float32, device), -1).requires_grad_()
    expected = torch.autograd.grad(step(x, t, soft), (x, soft))
    found = torch.autograd.grad(torch.compile(step, fullgraph=True)(x, t, soft), (x, soft))
    for a, b in zip(found, expected):
        assert_close(a, b.double())


def test_transforms(family, device):
    x, t = tensor((3, 4), torch.float64, device).requires_grad_(), torch.tensor([1, -100, 3], device=device)
    soft = torch.rand(3, 4, dtype=torch.float64).to(device).requires_grad_()

    def hard_loss(x):
        aux = family.cross_entropy(x, t, z_loss=0.1, softcap=2.0, label_smoothing=0.1, return_aux=True)
        return aux.loss, aux.lse

    def soft_loss(x, soft):
        return family.cross_entropy(x, soft, softcap=2.0, label_smoothing=0.1, reduction="none")

    for function, inputs in ((hard_loss, (x,)), (soft_loss, (x, soft))):
        assert gradcheck(function, inputs) and gradgradcheck(function, inputs)
    x = x.detach()
    batch, targets = torch.stack([x, 2 * x]), torch.stack([t, t.flip(0)])
    for kw in ({}, {"z_loss": 0.1}):
        per_sample = torch.func.vmap(torch.func.grad(lambda x, t, kw=kw: family.cross_entropy(x, t, **kw)))
        found = per_sample(batch, targets)
        for i in range(2):
            y = batch[i].clone().requires_grad_()
            assert_close(found[i], torch.autograd.grad(family.cross_entropy_reference(y, targets[i], **kw), y)[0])
    single = torch.func.vmap(family.cross_entropy)(x, torch.tensor([1, 2, 3], device=device))  # rows of (C,)
    assert_close(single, family.cross_entropy_reference(x, torch.tensor([1, 2, 3], device=device), reduction="none"))


def test_plan(internals):
    """Tiles span rows where memory does, and hold 4096 elements at most."""
    rows, losses = internals("_rows").Rows, internals("_losses")
    for N in (1, 64, 100, 1000, 10**6):
        along = losses.plan(rows(1, 1, 999, N, ((0, 0, N, 1), (0, 0, 0, 0))), 32)
        assert along.BLOCK_M * along.BLOCK_N <= 4096 and along.num_warps <= 16
        across = losses.plan(rows(1, 8, 999, N, ((0, N * 999, 1, 999),)), 16)
        assert across.BLOCK_M >= 32 and across.BLOCK_M * across.BLOCK_N <= 4096


@pytest.mark.parametrize("P", [1, 9, 8193, 16385])
def test_total(internals, device, on_kernels, P):
    """Sums over any number of programs, by a number of steps."""
    if not on_kernels:
        pytest.skip("no kernels on this path")
    losses = internals("_losses")
    parts = torch.rand(5, P).to(device)
    loss, weights, rows, squares, hits = parts.double().sum(1)
    for reduction, whole, count in (("mean", weights, rows), ("sum", 1.0, 1.0)):
        total, counts = losses.total(parts, reduction, 0.1)
        assert_close(total, loss / whole + 0.1 * squares / count, dim=None)
        expected = [
            torch.as_tensor(v, dtype=torch.float64) for v in (whole, count, 0.1 * squares / count, hits / count)
        ]
        for a, b in zip(counts, expected):
            assert_close(a, b.to(device), dim=None)
        total, counts = losses.total(parts[:2].contiguous(), reduction)
        assert_close(total, loss / whole, dim=None)
        assert_close(counts, expected[0].to(device)[None], dim=None)


# Two processes, each with half the classes.

VOCAB_CASES = ({}, OPTIONS, {"ignore_index": 3, "reduction": "none"}, {"reduction": "sum", "z_loss": 0.1})


def run_rank(kernel, device):
    import importlib

    rank, family = torch.distributed.get_rank(), importlib.import_module(f"{kernel.__name__}.cross_entropy")
    torch.manual_seed(0)
    mine = slice(10 * rank, 10 * rank + 10)
    for options in VOCAB_CASES:
        x = torch.randn(7, 20)
        x[5, 3] = 1e8  # large logits lose no digits between the ranks either
        x, t = x.to(device).requires_grad_(), torch.tensor([0, 3, 9, 10, 19, 3, -100], device=device)
        t = torch.where(t == -100, options.get("ignore_index", -100), t)
        part = x[:, mine].detach().clone().requires_grad_()
        whole = family.cross_entropy(x, t, return_aux=True, **options)
        ours = family.vocab_parallel_cross_entropy(part, t, return_aux=True, **options)
        dloss = torch.rand_like(whole.loss)
        (dx,) = torch.autograd.grad((whole.loss * dloss).sum() + whole.lse.sin().sum(), x)
        (dpart,) = torch.autograd.grad((ours.loss * dloss).sum() + ours.lse.sin().sum(), part, create_graph=True)
        for a, b in zip((*ours, dpart), (*whole, dx[:, mine])):
            torch.testing.assert_close(a, b, rtol=4e-6, atol=1e-6)
        try:
            dpart.sum().backward()
            raise AssertionError("the second derivative is lost, not refused")
        except RuntimeError as error:
            assert "twice" in str(error)
    t[2], t[3] = 20, -1
    loss = family.vocab_parallel_cross_entropy(part, t, reduction="none")
    assert loss.isnan().tolist() == [False, False, True, True, False, False, False]


def test_vocab_parallel(kernel, tmp_path):
    in_two(run_rank, tmp_path)


def test_vocab_parallel_compiles(family, device, tmp_path, backend):
    """Over a group of one, whose results are those of cross_entropy."""
    if not torch.distributed.is_available() or torch.distributed.is_initialized():
        pytest.skip("torch without distributed")
    x, t = tensor((4, 64), torch.float32, device).requires_grad_(), labels((4,), 64, device)
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'one'}", rank=0, world_size=1)
    try:
        step = torch.compile(
            lambda x: family.vocab_parallel_cross_entropy(x, t, z_loss=0.1), fullgraph=True, backend=backend
        )
        loss = step(x)
        expected = family.cross_entropy(x, t, z_loss=0.1)
        assert_close(loss, expected.double())
        assert_close(torch.autograd.grad(loss, x)[0], torch.autograd.grad(expected, x)[0].double())
    finally:
        torch.distributed.destroy_process_group()
