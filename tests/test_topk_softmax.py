import pytest
import torch
import torch.nn.functional as F
from _inputs import LAYOUTS, apart, tensor
from _numerics import DTYPES, assert_close, evaluate, gradcheck, gradgradcheck, opcheck

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of the NaN and inf that are meant

NAN, INF = float("nan"), float("inf")


@pytest.fixture(scope="module")
def family(internals):
    return internals("topk_softmax")


@pytest.fixture
def hold(family):
    """Hold weights, indices and the gradient against the reference in float64, with and without renormalisation.

    An allowance for what the subtraction of the gradient cancels is added to the policy's.
    """

    def hold(x, k, dtype=None):
        x = x.detach()
        kept = x.clone()
        dw = tensor((*x.shape[:-1], k), dtype or x.dtype, x.device)
        for renormalize in (False, True):
            options = {"k": k, "renormalize": renormalize}
            leaf = x.detach().requires_grad_()
            weights, indices = family.topk_softmax(leaf, dtype=dtype, **options)
            (dx,) = torch.autograd.grad(weights, leaf, dw)
            assert weights.dtype == (dtype or x.dtype) and indices.dtype == torch.int64 and dx.dtype == x.dtype
            assert weights.is_contiguous() and indices.is_contiguous() and torch.equal(x.detach(), kept)
            wide = x.detach().cpu().double().requires_grad_()
            expected, places = family.topk_softmax_reference(wide, **options)
            (slope,) = torch.autograd.grad(expected, wide, dw.cpu().double())
            assert torch.equal(indices.cpu(), places)
            assert_close(weights, expected)
            size = expected.detach().abs().amax(-1, keepdim=True)
            size = size * dw.cpu().double().abs().sum(-1, keepdim=True)
            eps = torch.finfo(torch.float64 if torch.float64 in (x.dtype, dtype) else torch.float32).eps
            assert_close(dx, slope, slack=4 * eps * size, name="dx")
        return weights, indices

    return hold


# The reference first: it is the oracle of everything below.


@pytest.mark.parametrize("renormalize", [False, True])
def test_reference_is_transformers(family, renormalize):
    """The router of Mixtral and of Qwen3-MoE."""
    x, dw = tensor((6, 16), torch.float64), tensor((6, 3), torch.float64)

    def router(x):
        weights, indices = torch.topk(F.softmax(x, dim=-1), 3, dim=-1)
        return (weights / weights.sum(-1, keepdim=True) if renormalize else weights), indices

    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    (w, i), (v, j) = family.topk_softmax_reference(a, 3, renormalize=renormalize), router(b)
    assert_close(w, v)
    assert torch.equal(i, j)
    (da,), (db,) = torch.autograd.grad(w, a, dw), torch.autograd.grad(v, b, dw)
    assert_close(da, db, slack=1e-15)
    assert_close(family._bwd_reference(dw, x, i, renormalize), db, slack=1e-15)


@pytest.mark.kernels_ci
@pytest.mark.parametrize("dtype", DTYPES)
def test_matches_reference(hold, device, dtype):
    hold(tensor((5, 7, 64), dtype, device), 6)
    hold(tensor((40, 8), dtype, device), 2)
    for other in (torch.float32, torch.bfloat16, torch.float64):
        hold(tensor((40, 8), dtype, device), 2, other)


@pytest.mark.parametrize(
    "N, k", [(1, 1), (3, 2), (8, 8), (127, 8), (128, 1), (129, 5), (1000, 3), (16384, 4), (16385, 2)]
)
def test_widths(hold, device, N, k):
    for dtype in (torch.float32, torch.bfloat16):
        hold(tensor((1 if N > 2000 else 40, N), dtype, device), k)


def test_small_numbers_are_in_order(hold, device):
    """Of bfloat16 far below what float16 and float32's normal numbers reach."""
    x = torch.tensor([0.0, 1e-30, 3e-30, -1e-30, 2e-39, 4e-39, -4e-39, -0.0], dtype=torch.bfloat16, device=device)
    _, indices = hold(torch.stack([x, x.flip(0)]), 8)
    assert indices.tolist() == [[2, 1, 5, 4, 0, 7, 6, 3], [5, 6, 2, 3, 0, 7, 1, 4]]


@pytest.mark.parametrize("dtype", DTYPES)
def test_ties_take_the_first(family, device, dtype):
    """The first of equals first, whatever the zeros' sign, and values as torch.topk's."""
    x = torch.randint(-2, 2, (200, 60)).to(device, dtype)
    x[0], x[1], x[2, ::2], x[2, 1::2] = 1.0, -INF, 0.0, -0.0
    x[3, 5:] = -INF
    weights, indices = family.topk_softmax(x, 8)
    expected = torch.sort(x.cpu(), descending=True, stable=True).indices[:, :8]
    assert torch.equal(indices.cpu(), expected)
    assert indices[0].tolist() == indices[1].tolist() == indices[2].tolist() == list(range(8))
    values = torch.topk(F.softmax(x.double(), -1), 8).values
    assert_close(weights, values)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("renormalize", [False, True])
def test_special_values(family, device, dtype, renormalize):
    """NaN and inf make the weights of their row NaN, as torch has it; indices stay valid and distinct."""
    x = tensor((5, 20), dtype, device)
    x[0, 7], x[1, 4], x[2], x[3, :] = NAN, INF, -INF, NAN
    weights, indices = family.topk_softmax(x, 6, renormalize=renormalize)
    assert weights[:4].isnan().all() and weights[4].isfinite().all()
    assert indices[0, 0] == 7 and indices[1, 0] == 4
    assert all(len(set(row)) == 6 and 0 <= min(row) and max(row) < 20 for row in indices.tolist())


@pytest.mark.parametrize("shape, k", [((0, 8), 2), ((2, 0, 8), 8), ((5,), 2), ((1,), 1)])
def test_empty_and_one_row(hold, device, shape, k):
    hold(tensor(shape, torch.float32, device), k)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(6, 40), (2, 3, 4, 36)])
def test_strides(hold, device, layout, shape):
    hold(tensor(shape, torch.float32, device, layout), 4)


def test_rows_that_do_not_join(hold, device):
    hold(apart(tensor((30, 36), torch.float32, device), (2, 5, 3)), 5)


def test_strided_gradients(family, device):
    x = tensor((6, 40), torch.float32, device).requires_grad_()
    weights, _ = family.topk_softmax(x, 4)
    for dw in (torch.ones((), device=device).expand(6, 4), tensor((6, 4), torch.float32, device, "transposed")):
        (dx,) = torch.autograd.grad(weights, x, dw, retain_graph=True)
        (expected,) = torch.autograd.grad(weights, x, dw.contiguous(), retain_graph=True)
        assert torch.equal(dx, expected)


def test_far_rows(family, device):
    if device.type == "cpu":
        pytest.skip("4 GiB of memory: on a GPU only")
    x = torch.empty(2**31 + 64, dtype=torch.bfloat16, device=device).as_strided((2, 64), (2**31, 1))
    x.copy_(torch.randn(2, 64))
    for far, near in zip(family.topk_softmax(x, 3), family.topk_softmax(x.contiguous(), 3)):
        assert torch.equal(far, near)


def test_bad_input(family, device):
    x = tensor((4, 8), torch.float32, device)
    floats = "float64 | float32 | float16 | bfloat16"
    cases = [
        (TypeError, "x must be a tensor, got list", lambda: family.topk_softmax([1.0], 1)),
        (TypeError, f"x must have dtype {floats}, got int64", lambda: family.topk_softmax(x.long(), 1)),
        (TypeError, f"dtype must be {floats} or None, got torch.int8",
         lambda: family.topk_softmax(x, 1, dtype=torch.int8)),
        (ValueError, "x must have at least one dimension, got shape ()", lambda: family.topk_softmax(x[0, 0], 1)),
        (TypeError, "k must be an int, got float", lambda: family.topk_softmax(x, 1.0)),
        (TypeError, "k must be an int, got bool", lambda: family.topk_softmax(x, True)),
        (ValueError, "k must be in 1 to 8 for x (4, 8), got 0", lambda: family.topk_softmax(x, 0)),
        (ValueError, "k must be in 1 to 8 for x (4, 8), got 9", lambda: family.topk_softmax(x, 9)),
        (TypeError, "renormalize must be True or False, got 1", lambda: family.topk_softmax(x, 2, renormalize=1)),
    ]  # fmt: skip
    for error, message, call in cases:
        with pytest.raises(error) as caught:
            call()
        assert str(caught.value).startswith(f"topk_softmax: {message}")


def test_opcheck(family, device):
    x = tensor((3, 40), torch.float32, device).requires_grad_()
    across = tensor((3, 40), torch.bfloat16, device, "transposed").requires_grad_()
    for renormalize in (False, True):
        opcheck(family.topk_softmax_fwd, (x, 3, renormalize, torch.float32))
        opcheck(family.topk_softmax_fwd, (across, 3, renormalize, torch.float32))
        _, indices = family.topk_softmax(x.detach(), 3)
        opcheck(family.topk_softmax_bwd, (x[:, :3].detach(), x, indices, renormalize))


def test_direct_launch_is_the_op(family, device, on_kernels):
    if not on_kernels:
        pytest.skip("no kernels on this path")
    x = tensor((50, 60), torch.bfloat16, device).requires_grad_()
    dw = tensor((50, 4), torch.float32, device)
    direct = family.topk_softmax(x, 4, renormalize=True, dtype=torch.float32)
    op = family.topk_softmax_fwd(x, 4, True, torch.float32)
    assert all(torch.equal(*pair) for pair in zip(direct, op))
    assert torch.equal(*(torch.autograd.grad(r[0], x, dw)[0] for r in (direct, op)))


def test_compile(family, device, backend):
    def step(x):
        weights, indices = family.topk_softmax(x * 2, 3, renormalize=True)
        return weights * indices

    x, dy = tensor((8, 16), device=device), torch.randn(8, 3, device=device)
    (y,), (dx,) = evaluate(step, (x,), {}, [dy])
    (z,), (dz,) = evaluate(torch.compile(step, fullgraph=True, backend=backend), (x,), {}, [dy])
    assert_close(z, y.double())
    assert_close(dz, dx.double(), slack=1e-6)


@pytest.mark.parametrize("renormalize", [False, True])
def test_derivatives(family, device, renormalize):
    x = tensor((2, 5), torch.float64, device).requires_grad_()

    def function(x):
        return family.topk_softmax(x, 3, renormalize=renormalize)[0]

    assert gradcheck(function, x) and gradgradcheck(function, x)


def test_transforms(family, device):
    x = tensor((3, 4, 6), torch.float64, device)

    def loss(function):
        return lambda x: function(x, 2)[0].pow(3).sum()

    mine, theirs = (loss(f) for f in (family.topk_softmax, family.topk_softmax_reference))
    for dim in (0, 1):
        found, expected = (torch.func.vmap(torch.func.grad(f), dim)(x) for f in (mine, theirs))
        assert_close(found, expected, slack=1e-15)
    weights, indices = torch.func.vmap(lambda x: family.topk_softmax(x, 2))(x)
    assert torch.equal(weights, family.topk_softmax(x, 2)[0]) and torch.equal(indices, family.topk_softmax(x, 2)[1])


def test_forward_mode_is_refused_not_lost(family, device, on_kernels):
    if not on_kernels:
        pytest.skip("PyTorch's own forward mode serves this path")
    x = tensor((2, 3), torch.float32, device)
    with pytest.raises(NotImplementedError):
        torch.func.jvp(lambda x: family.topk_softmax(x, 2)[0], (x,), (x,))
