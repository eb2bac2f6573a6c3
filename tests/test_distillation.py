import pytest
import torch
import torch.nn.functional as F
from _inputs import LAYOUTS, apart, tensor
from _numerics import DTYPES, ULPS, assert_close, evaluate, gradcheck, gradgradcheck, opcheck

NAN, INF = float("nan"), float("inf")
BETAS = (0, 0.3, 1)

# A probability has the relative error of its logarithm, which at 262144 classes is near -12 and off by 8 ulps of 1; in
# the gradient it is multiplied by a difference that may be small, where the probability is 10 times the usual.
WIDE = {**ULPS, torch.float32: 256, torch.float64: 256}


def check(function, reference, x, teacher, grads=None, **options):
    """Hold loss and gradients against `reference` in float64; the caller's tensors are left as they were."""
    if grads is None:
        grads = [torch.randn_like(function(x, teacher, **options))]
    before = [t.clone() for t in (x, teacher, *grads)]
    (loss,), found = evaluate(function, (x, teacher), options, grads)
    assert all(torch.equal(t, b) for t, b in zip((x, teacher, *grads), before)), "the caller's tensor was written to"
    wide = (x.double(), teacher.double())
    (oracle,), expected = evaluate(reference, wide, options, [g.double() for g in grads])
    assert_close(loss, oracle, dim=None, ulps=WIDE[loss.dtype])
    for t, a, b in zip((x, teacher), found, expected):
        assert a.dtype == t.dtype
        assert_close(a, b, ulps=WIDE[t.dtype], name="gradient")
    return loss


@pytest.fixture(scope="module")
def family(internals):
    return internals("distillation")


def trl(x, teacher, beta=0.5, temperature=1.0):
    """The loss of a row as TRL's GKDTrainer.generalized_jsd_loss has it, from kl_div."""
    p, q = torch.log_softmax(x / temperature, -1), torch.log_softmax(teacher / temperature, -1)
    if beta in (0, 1):
        log_input, log_target = (p, q) if beta == 0 else (q, p)
        return F.kl_div(log_input, log_target, reduction="none", log_target=True).sum(-1)
    share = torch.tensor(beta, dtype=p.dtype, device=p.device)
    m = torch.logsumexp(torch.stack([p + torch.log1p(-share), q + torch.log(share)]), 0)
    of_q, of_p = (F.kl_div(m, t, reduction="none", log_target=True).sum(-1) for t in (q, p))
    return share * of_q + (1 - share) * of_p


@pytest.mark.parametrize("beta", BETAS)
def test_reference_is_trl(family, device, beta):
    x, teacher = (tensor((4, 30), torch.float64, device) for _ in range(2))
    rows = evaluate(trl, (x, teacher), {"beta": beta, "temperature": 2.0}, [torch.ones(4, device=device).double()])
    for function in (family.distillation_jsd_reference, family.distillation_jsd):
        kw = {"beta": beta, "temperature": 2.0, "reduction": "none"}
        (loss,), grads = evaluate(function, (x, teacher), kw, [torch.ones(4, device=device).double()])
        assert_close(loss / 4, rows[0][0])  # times temperature^2
        for a, b in zip(grads, rows[1]):
            assert_close(a / 4, b)


@pytest.mark.kernels_ci
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_matches_reference(family, device, dtype, reduction):
    x, teacher = tensor((2, 3, 100), dtype, device), tensor((2, 3, 100), dtype, device)
    kw = {"temperature": 2.0, "reduction": reduction}
    loss = check(family.distillation_kl, family.distillation_kl_reference, x, teacher, **kw)
    assert loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    labels = torch.tensor([[0, -100, 1], [-100, 5, 2]], device=device)
    for beta in BETAS:
        check(family.distillation_jsd, family.distillation_jsd_reference, x, teacher, beta=beta, labels=labels, **kw)


@pytest.mark.parametrize("N", [1, 3, 127, 128, 129, 1000, 4097, 65537, 262144])
def test_widths(family, device, N):
    x, teacher = (tensor((2, N), torch.float32, device) for _ in range(2))
    for beta in (0, 0.5) if N < 65537 else (0.5,):
        check(family.distillation_jsd, family.distillation_jsd_reference, x, teacher, beta=beta)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(6, 40), (2, 3, 4, 36), (3, 5000)])
def test_strides(family, device, layout, shape):
    x, teacher = tensor(shape, torch.float32, device, layout), tensor(shape, torch.float32, device)
    dloss = tensor(shape[:-1], torch.float32, device, layout)
    check(family.distillation_kl, family.distillation_kl_reference, x, teacher, grads=[dloss], reduction="none")
    check(family.distillation_jsd, family.distillation_jsd_reference, teacher, x, grads=[dloss], reduction="none")


def test_labels_that_lie_apart(family, device):
    x, teacher = (tensor((2, 3, 4, 36), torch.float32, device) for _ in range(2))
    labels = apart(torch.arange(24).where(torch.rand(24) < 0.5, -100).to(device), (2, 3, 4))
    check(family.distillation_jsd, family.distillation_jsd_reference, x, teacher, labels=labels)


def test_permuted_dimensions(family, device):
    x = tensor((2, 2, 2, 2, 2, 8), torch.float32, device).permute(4, 2, 0, 3, 1, 5)
    labels = torch.randint(-1, 2, (2, 2, 2, 2, 2)).to(device)
    kw = {"labels": labels, "ignore_index": 0, "reduction": "none"}
    check(family.distillation_kl, family.distillation_kl_reference, x, tensor(x.shape, x.dtype, device), **kw)


@pytest.mark.parametrize("shape", [(0, 5), (2, 0, 5), (3, 0)])
def test_empty(family, device, shape):
    x, teacher = tensor(shape, torch.float32, device), tensor(shape, torch.float32, device)
    for reduction in ("none", "sum", "mean"):
        check(family.distillation_kl, family.distillation_kl_reference, x, teacher, reduction=reduction)


def test_mixed_dtypes(family, device):
    x, teacher = tensor((4, 50), torch.bfloat16, device), tensor((4, 50), torch.float32, device)
    check(family.distillation_kl, family.distillation_kl_reference, x, teacher)
    assert family.distillation_kl(x, teacher.double()).dtype == torch.float64


def test_single_numbers(family, device):
    x, teacher = tensor((30,), torch.float32, device), tensor((30,), torch.float32, device)
    check(family.distillation_jsd, family.distillation_jsd_reference, x, teacher)


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("N", [8, 6000])
def test_special_values(family, device, beta, N):
    """A probability of 0 adds nothing; one that the other does not have is infinitely far, but not from a mixture."""
    x, teacher = torch.randn(7, N), torch.randn(7, N)
    x[0, 1], teacher[1, 2], x[2] = NAN, INF, -INF
    x[3, : N // 2] = teacher[3, : N // 2] = -INF  # as masked vocabularies are
    x[4, 0], teacher[5, 0] = -INF, -INF
    x[6], teacher[6] = x[6] + 1e4, teacher[6] - 1e4
    x, teacher = x.to(device), teacher.to(device)
    kw = {"beta": beta, "reduction": "none"}
    (loss,), grads = evaluate(family.distillation_jsd, (x, teacher), kw, [torch.ones(7, device=device)])
    reference = family.distillation_jsd_reference
    (expected,), wanted = evaluate(reference, (x.double(), teacher.double()), kw, [torch.ones(7, device=device)])
    assert loss[:3].isnan().all() and not loss[3:].isnan().any()
    assert loss[4].isinf() == (beta == 0) and loss[5].isinf() == (beta == 1) and loss[3].isfinite()
    # Row 6 is what is left of float32 logits near 1e4.
    assert_close(loss[:6], expected[:6], ulps=WIDE[loss.dtype])
    torch.testing.assert_close(loss[6].double(), expected[6], rtol=1e-4, atol=1e-4)
    for a, b in zip(grads, wanted):
        for row in (3, 5 if beta == 0 else 4):
            assert_close(a[row], b[row], ulps=WIDE[a.dtype])
        assert a[3, : N // 2].abs().max() == 0 and a[:2].isnan().all()


def test_same_logits(family, device):
    """No divergence from itself, or from a shift of itself."""
    x = tensor((3, 1000), torch.float32, device)
    for beta in BETAS:
        loss = family.distillation_jsd(x, x, beta=beta, reduction="none")
        assert loss.abs().max() < 2e-6 and family.distillation_jsd(x, x + 64, beta=beta).abs() < 1e-5


def test_ignored_rows(family, device):
    x, teacher = tensor((4, 40), torch.float32, device), tensor((4, 40), torch.float32, device)
    x[1], teacher[3, 0] = NAN, INF
    labels, counted = torch.tensor([5, -1, 0, -1], device=device), torch.tensor([0, 2], device=device)
    for beta in BETAS:
        for reduction in ("mean", "sum"):
            kw = {"beta": beta, "reduction": reduction, "temperature": 3.0}
            (loss,), grads = evaluate(
                lambda x, t, **kw: family.distillation_jsd(x, t, labels=labels, ignore_index=-1, **kw),
                (x, teacher), kw, [torch.ones((), device=device)],
            )  # fmt: skip
            assert_close(loss, family.distillation_jsd(x[counted], teacher[counted], **kw).double())
            assert all((g[[1, 3]] == 0).all() and g[counted].abs().amin() > 0 for g in grads)
    none = torch.full_like(labels, -100)
    assert family.distillation_kl(x, teacher, labels=none).isnan()
    assert family.distillation_kl(x, teacher, labels=none, reduction="sum") == 0


def test_teacher_without_gradient(family, device):
    """What training does: the student's gradient alone, and the same."""
    x, teacher = tensor((3, 50), torch.float32, device), tensor((3, 50), torch.float32, device)
    for beta in BETAS:
        a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
        family.distillation_jsd(a, teacher, beta=beta).backward()
        family.distillation_jsd(b, teacher.clone().requires_grad_(), beta=beta).backward()
        assert torch.equal(a.grad, b.grad)
    with torch.no_grad():
        assert torch.equal(family.distillation_kl(x, teacher), family.distillation_kl(a, teacher))


def test_nothing_of_the_logits_size_is_kept(family, device):
    x, teacher = tensor((4, 300), torch.bfloat16, device).requires_grad_(), tensor((4, 300), torch.bfloat16, device)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda s: kept.append(s) or s, lambda s: s):
        loss = family.distillation_jsd(x, teacher)
    assert kept and all(s.data_ptr() in (x.data_ptr(), teacher.data_ptr()) or s.numel() <= 24 for s in kept)
    loss.backward()


def test_bad_input(family, device):
    x, labels = tensor((4, 8), torch.float32, device), torch.zeros(4, dtype=torch.int64, device=device)
    kl, jsd = family.distillation_kl, family.distillation_jsd
    cases = [
        (TypeError, "distillation_kl: x must be a tensor, got list", lambda: kl([1.0], x)),
        (TypeError, "distillation_kl: teacher must be a tensor, got NoneType", lambda: kl(x, None)),
        (TypeError, "distillation_kl: teacher must have dtype", lambda: kl(x, x.long())),
        (ValueError, "distillation_kl: teacher must have shape (4, 8), got (4, 7)", lambda: kl(x, x[:, :7])),
        (ValueError, "distillation_kl: x must have 1 or more dimensions, got 0", lambda: kl(x[0, 0], x[0, 0])),
        (ValueError, "distillation_kl: temperature must be above 0, got 0", lambda: kl(x, x, temperature=0)),
        (TypeError, "distillation_kl: temperature must be a number, got NoneType",
         lambda: kl(x, x, temperature=None)),
        (ValueError, "distillation_kl: labels must have shape (4,), got (3,)", lambda: kl(x, x, labels=labels[:3])),
        (TypeError, "distillation_kl: labels must have an integer dtype, got bool",
         lambda: kl(x, x, labels=labels.bool())),
        (TypeError, "distillation_kl: ignore_index must be an int, got bool", lambda: kl(x, x, ignore_index=True)),
        (ValueError, "distillation_jsd: reduction must be one of 'none', 'mean', 'sum', got 'batchmean'",
         lambda: jsd(x, x, reduction="batchmean")),
        (ValueError, "distillation_jsd: beta must be at most 1, got 2", lambda: jsd(x, x, beta=2)),
        (ValueError, "distillation_jsd: beta must be at least 0, got -0.5", lambda: jsd(x, x, beta=-0.5)),
    ]  # fmt: skip
    for error, message, call in cases:
        with pytest.raises(error) as caught:
            call()
        assert str(caught.value).startswith(message), str(caught.value)


def test_opcheck(family, device):
    x, teacher = tensor((3, 40), torch.float32, device).requires_grad_(), tensor((3, 40), torch.bfloat16, device)
    far, labels = (
        tensor((3, 40), torch.float32, device, "transposed").requires_grad_(),
        torch.zeros(3).long().to(device),
    )
    opcheck(family.distillation_fwd, (x, teacher, None, -100, 0.0, 1.0))
    opcheck(family.distillation_fwd, (x, far, labels, -100, 0.5, 2.0))
    dloss, stats = torch.rand(3, device=device), torch.rand(3, 6, device=device)
    opcheck(family.distillation_bwd, (dloss, x, teacher, None, stats, None, -100, 0.0, 1.0, True, False))
    opcheck(family.distillation_bwd, (dloss, x, far, labels, stats, None, -100, 0.5, 2.0, True, True))
    count = torch.full((1,), 2.0, device=device)
    opcheck(family.distillation_bwd, (dloss, x, far, labels, stats, count, -100, 0.0, 2.0, False, True))
    opcheck(family.distillation_total_fwd, (x, far, labels, -100, 0.5, 2.0, "mean"))


def test_direct_launch_is_the_op(family, device, on_kernels):
    if not on_kernels:
        pytest.skip("no kernels on this path")
    x, teacher = tensor((5, 300), torch.bfloat16, device).requires_grad_(), tensor((5, 300), torch.bfloat16, device)
    direct = family.distillation_jsd(x, teacher, reduction="none")
    loss, _ = family.distillation_fwd(x, teacher, None, -100, 0.5, 1.0)
    dloss = torch.rand(5, device=device)
    assert torch.equal(direct, loss)
    assert torch.equal(torch.autograd.grad(direct, x, dloss)[0], torch.autograd.grad(loss, x, dloss)[0])


def test_compile(family, device, backend):
    def step(x, teacher, labels):
        jsd = family.distillation_jsd(x * 2, teacher, beta=0.3, labels=labels)
        return jsd + family.distillation_kl(x, teacher, temperature=2.0)

    x, teacher = (tensor((4, 64), torch.float32, device).requires_grad_() for _ in range(2))
    labels = torch.tensor([0, -100, 1, 2], device=device)
    expected = torch.autograd.grad(step(x, teacher, labels), (x, teacher))
    found = torch.autograd.grad(torch.compile(step, fullgraph=True, backend=backend)(x, teacher, labels), (x, teacher))
    for a, b in zip(found, expected):
        assert_close(a, b.double())


@pytest.mark.parametrize("beta", BETAS)
def test_transforms(family, device, beta):
    x, teacher = (tensor((2, 3), torch.float64, device).requires_grad_() for _ in range(2))

    def function(x, teacher):
        return family.distillation_jsd(x, teacher, beta=beta, temperature=1.5, reduction="none")

    assert gradcheck(function, (x, teacher)) and gradgradcheck(function, (x, teacher))
    x, teacher = x.detach(), teacher.detach()
    assert_close(torch.func.vmap(lambda a, b: function(a, b))(x, teacher), function(x, teacher))
    labels = torch.tensor([3, -100], device=device)

    def loss(x, teacher, label):
        return family.distillation_jsd(x, teacher, beta=beta, labels=label, reduction="sum")

    per_row = torch.func.vmap(torch.func.grad(loss))(x, teacher, labels)
    y = x.clone().requires_grad_()
    reference = family.distillation_jsd_reference(y, teacher, beta=beta, labels=labels, reduction="sum")
    assert_close(per_row, torch.autograd.grad(reference, y)[0])
