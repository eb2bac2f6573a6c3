import math

import pytest
import torch
from _inputs import LAYOUTS, tensor
from _numerics import DTYPES, assert_close, check, evaluate, gradcheck, gradgradcheck, opcheck

INF = math.inf
NORMS = [{}, {"mode": "rsqrt", "eps": 1e-6}, {"p": 1}, {"p": INF}]


@pytest.fixture(scope="module")
def family(internals):
    return internals("normalize")


# The reference first: it is the oracle of everything below.


@pytest.mark.parametrize("p", [1, 2.0, 3, INF, 0.5])
@pytest.mark.parametrize("dim", [-1, 0, 1])
def test_reference_is_torch(family, p, dim):
    x = tensor((4, 5, 6), torch.float64)
    x[1] = 0.0
    dy = torch.randn_like(x)
    (y,), grads = evaluate(family.normalize_reference, (x,), {"p": p, "dim": dim}, [dy])
    (t,), theirs = evaluate(torch.nn.functional.normalize, (x,), {"p": p, "dim": dim}, [dy])
    assert_close(y, t)
    assert_close(grads[0], theirs[0])


def test_reference_is_hugging_face(family):
    x = tensor((4, 50))
    expected = x * torch.rsqrt((x * x).sum(dim=-1, keepdim=True) + 1e-6)  # l2norm of transformers' Qwen3-Next
    assert torch.equal(family.normalize_reference(x, eps=1e-6, mode="rsqrt"), expected)


@pytest.mark.kernels_ci
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", [*NORMS, {"p": 3.0}, {"eps": 20.0}, {"eps": 20.0, "p": INF}])
def test_matches_reference(family, device, dtype, options):
    x = tensor((3, 7, 100), dtype, device)
    (y,) = check(family.normalize, family.normalize_reference, x, **options)
    assert y.dtype == dtype


@pytest.mark.parametrize("N", [1, 3, 127, 128, 129, 1000, 65537, 262144])
@pytest.mark.parametrize("options", NORMS)
def test_widths(family, device, N, options):
    if N > 1000 and "mode" in options:
        pytest.skip("as p = 2")
    x = tensor((2, N), torch.float32, device)
    # N = 1: dx cancels to about 0; what is left is the rounding of terms of about 3 / |x|.
    slack = 16 * 2**-23 * float((3 / x).abs().max()) if N == 1 else 0.0
    check(family.normalize, family.normalize_reference, x, slack=slack, **options)


@pytest.mark.parametrize("dim", [0, 1, -2, 2])
@pytest.mark.parametrize("options", NORMS)
def test_dims(family, device, dim, options):
    x = tensor((5, 40, 6), torch.float32, device)
    check(family.normalize, family.normalize_reference, x, **{**options, "dim": dim})


def test_long_across(family, device):
    """Rows across memory that are looped over."""
    check(family.normalize, family.normalize_reference, tensor((3000, 5), torch.float32, device), dim=0)


@pytest.mark.parametrize("shape", [(0, 8), (2, 0, 8), (3, 0), (0, 0)])
def test_empty(family, device, shape):
    x = tensor(shape, torch.float32, device)
    check(family.normalize, family.normalize_reference, x)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(6, 40), (2, 3, 4, 36)])
def test_strides(family, device, layout, shape):
    x = tensor(shape, torch.float32, device, layout)
    for dy in (tensor(shape, torch.float32, device), tensor(shape, torch.float32, device, layout)):
        (y,) = check(family.normalize, family.normalize_reference, x, grads=[dy])
        assert y.is_contiguous()


def test_many_permuted_dimensions(family, device):
    x = tensor((2, 2, 2, 2, 2, 8), torch.float32, device, "transposed")
    check(family.normalize, family.normalize_reference, x)


def test_special_values(family, device):
    x = tensor((6, 33), torch.float32, device)
    x[0, 3], x[1, 4], x[2, 5] = float("nan"), INF, -INF
    x[3] = 0.0
    x[4] = 1e25  # squares overflow, as torch's
    x[5] = 1e-14  # the norm is below eps
    for p in (1, 2, INF):
        assert_close(family.normalize(x, p), torch.nn.functional.normalize(x.cpu(), p, -1).double())
    x = x[3:].clone()
    dy = torch.randn_like(x)
    for p in (1, INF):
        _, (dx,) = evaluate(family.normalize, (x,), {"p": p}, [dy])
        _, (expected,) = evaluate(torch.nn.functional.normalize, (x.double().cpu(),), {"p": p, "dim": -1}, [dy.cpu()])
        assert_close(dx, expected)


def test_row_of_zeros_in_half(family, device):
    """torch's eps is 0 in float16, and its result NaN."""
    x = torch.zeros(2, 8, dtype=torch.float16, device=device)
    assert torch.equal(family.normalize(x), x)


@pytest.mark.parametrize("N", [40, 40000])
def test_ties_share_evenly(family, device, N):
    x = torch.randint(-3, 4, (3, N)).float().to(device)
    x[2] = 0.0
    dy = torch.randn_like(x)
    _, (dx,) = evaluate(family.normalize, (x,), {"p": INF}, [dy])
    _, (expected,) = evaluate(torch.nn.functional.normalize, (x.cpu().double(),), {"p": INF, "dim": -1}, [dy.cpu()])
    assert_close(dx, expected)


def test_scalar(family, device):
    x = torch.tensor(-3.0, device=device)
    assert family.normalize(x).item() == -1.0


def test_bad_input(family, device):
    x = tensor((4, 8), torch.float32, device)
    cases = [
        (TypeError, "normalize: x must be a tensor, got list", lambda: family.normalize([1.0])),
        (TypeError, "normalize: x must have dtype float64 | float32 | float16 | bfloat16, got int64",
         lambda: family.normalize(x.long())),
        (ValueError, "normalize: dim must be in -2 to 1 for x (4, 8), got 2", lambda: family.normalize(x, dim=2)),
        (TypeError, "normalize: dim must be an int, got float", lambda: family.normalize(x, dim=1.0)),
        (TypeError, "normalize: p must be a number, got str", lambda: family.normalize(x, "fro")),
        (ValueError, "normalize: eps must be at least 0, got -1", lambda: family.normalize(x, eps=-1)),
        (ValueError, "normalize: mode must be one of 'max', 'rsqrt', got 'min'",
         lambda: family.normalize(x, mode="min")),
        (ValueError, "normalize: p must be 2 with mode 'rsqrt', got 1", lambda: family.normalize(x, 1, mode="rsqrt")),
    ]  # fmt: skip
    for error, message, call in cases:
        with pytest.raises(error) as caught:
            call()
        assert str(caught.value).startswith(message)


def test_opcheck(family, device):
    x, across = (tensor((3, 40), torch.float32, device, layout) for layout in ("contiguous", "transposed"))
    for norm in ("root", "peak"):
        opcheck(family.normalize_fwd, (across.requires_grad_(), -1, 1e-12, norm))
        opcheck(family.normalize_bwd, (across.detach(), x.requires_grad_(), -2, 1e-12, norm))


def test_direct_launch_is_the_op(family, device, on_kernels):
    if not on_kernels:
        pytest.skip("no kernels on this path")
    x = tensor((5, 300), torch.bfloat16, device).requires_grad_()
    direct, registered = family.normalize(x), family.normalize_fwd(x, -1, 1e-12, "root")
    assert torch.equal(direct, registered)
    (a,), (b,) = (torch.autograd.grad(y, x, torch.ones_like(x)) for y in (direct, registered))
    assert torch.equal(a, b)


def test_compile(family, device, backend):
    def step(x):
        return (family.normalize(x * 2, 1) + family.normalize(x, dim=0, eps=1e-6, mode="rsqrt")).pow(3).sum()

    x = tensor((4, 64), torch.float32, device).requires_grad_()
    (expected,) = torch.autograd.grad(step(x), x)
    (actual,) = torch.autograd.grad(torch.compile(step, fullgraph=True, backend=backend)(x), x)
    assert_close(actual, expected.double())


def test_transforms(family, device):
    x = tensor((2, 3), torch.float64, device).requires_grad_()
    for options in NORMS:
        f = lambda x: family.normalize(x, **options)  # noqa: B023, E731
        assert gradcheck(f, x) and gradgradcheck(f, x)
    x = x.detach()
    loss = lambda f: lambda x: f(x).pow(3).sum()  # noqa: E731
    per_sample = torch.func.vmap(torch.func.grad(loss(family.normalize)))(x)
    assert_close(per_sample, torch.func.vmap(torch.func.grad(loss(family.normalize_reference)))(x))
    batch = torch.stack([x, 2 * x - 1], 1)
    assert torch.equal(torch.func.vmap(family.normalize, 1)(batch)[1], family.normalize(2 * x - 1))
    assert torch.func.jacrev(family.normalize)(x).shape == (2, 3, 2, 3)


def test_repeats_are_equal(family, device):
    x = tensor((40, 256), torch.bfloat16, device).requires_grad_()
    runs = [torch.autograd.grad(family.normalize(x), x, torch.ones_like(x))[0] for _ in range(2)]
    assert torch.equal(*runs)
