import pytest
import torch
import torch.nn.functional as F
from _inputs import LAYOUTS, tensor
from _numerics import DTYPES, assert_close, check, evaluate, gradcheck, gradgradcheck, opcheck

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of the NaN and inf that are meant

NAN, INF = float("nan"), float("inf")

TORCH = {
    "relu": F.relu,
    "relu_squared": lambda x: F.relu(x).square(),
    "leaky_relu": F.leaky_relu,
    "silu": F.silu,
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "softplus": F.softplus,
    "mish": F.mish,
    "hardswish": F.hardswish,
}


@pytest.fixture(scope="module")
def family(internals):
    return internals("epilogues")


def rounding(x):
    """What a sum over the rows may lose where its terms cancel. Theirs is a size of about 1."""
    eps = torch.finfo(torch.float64 if x.dtype == torch.float64 else torch.float32).eps
    return 4 * eps * max(x.numel(), 1) ** 0.5


@pytest.fixture
def hold_bias_act(family):
    def hold(x, bias, activation="silu", **options):
        y = check(
            lambda x, b: family.bias_act(x, b, activation),
            lambda x, b: family.bias_act_reference(x, b, activation),
            x,
            bias,
            dim=None,
            slack=rounding(x),
            **options,
        )[0]
        assert y.dtype == x.dtype
        return y

    return hold


@pytest.fixture
def hold_residual(family):
    def hold(x, residual, scale, **options):
        ours, reference = family.residual_scale_add, family.residual_scale_add_reference
        y = check(ours, reference, x, residual, scale, dim=None, slack=rounding(x), **options)[0]
        assert y.dtype == torch.promote_types(x.dtype, residual.dtype)
        return y

    return hold


# The references first: they are the oracle of everything below.


def test_references_are_what_people_write(family, internals):
    x, r = tensor((3, 5, 8), torch.float64), tensor((3, 5, 8), torch.float64)
    dy = torch.randn_like(x)
    assert set(TORCH) == set(internals("_activation_math").ACTIVATIONS)
    for name, function in TORCH.items():
        (y,), grads = evaluate(family.bias_act_reference, (x, r[0, 0]), {"activation": name}, [dy])
        (t,), expected = evaluate(lambda x, b, f=function: f(x + b), (x, r[0, 0]), {}, [dy])
        closed = family._bias_act_bwd_reference(dy, x, r[0, 0], *internals("_activation_math").ACTIVATIONS[name], True)
        for mine, again, theirs in zip((y, *grads), (y, *closed), (t, *expected)):
            assert_close(mine, theirs, dim=None, slack=1e-14)
            assert_close(again, theirs, dim=None, slack=1e-14)
    for scale in (r[0, 0], r[0, 0, 0], r[0, 0, :1]):
        (y,), grads = evaluate(family.residual_scale_add_reference, (x, r, scale), {}, [dy])
        (t,), expected = evaluate(lambda x, r, s: r + x * s, (x, r, scale), {}, [dy])
        dx, ds = family._residual_scale_add_bwd_reference(dy, x, scale, True)
        for mine, theirs in zip((y, *grads, dx, ds), (t, *expected, expected[0], expected[2])):
            assert_close(mine, theirs, dim=None)


@pytest.mark.kernels_ci
@pytest.mark.parametrize("dtype", DTYPES)
def test_bias_act_matches_reference(hold_bias_act, device, dtype):
    x = tensor((5, 7, 40), dtype, device, scale=2.0)
    for activation in TORCH:
        hold_bias_act(x, tensor((40,), dtype, device), activation)
    for other in (torch.float32, torch.bfloat16, torch.float64):
        hold_bias_act(x, tensor((40,), other, device))


@pytest.mark.kernels_ci
@pytest.mark.parametrize("dtype", DTYPES)
def test_residual_scale_add_matches_reference(hold_residual, device, dtype):
    x, r = tensor((5, 7, 40), dtype, device), tensor((5, 7, 40), dtype, device)
    for shape in ((40,), (), (1,)):
        hold_residual(x, r, tensor(shape, dtype, device))
    hold_residual(x, r, tensor((40,), torch.float32, device))
    hold_residual(x, tensor((5, 7, 40), torch.float32, device), tensor((40,), dtype, device))
    hold_residual(tensor((5, 7, 40), torch.bfloat16, device), r, tensor((40,), torch.float64, device))


@pytest.mark.parametrize("N", [1, 3, 127, 128, 129, 1000, 5000])
def test_widths(hold_bias_act, hold_residual, device, N):
    x, r, p = tensor((2, N), torch.float32, device), tensor((2, N), torch.float32, device), tensor((N,), device=device)
    hold_bias_act(x, p)
    hold_residual(x, r, p)


@pytest.mark.parametrize("shape", [(300, 3), (100, 130), (150, 40), (4000, 1), (7,)])
def test_many_rows(hold_bias_act, hold_residual, internals, device, monkeypatch, shape):
    """Programs that walk several row tiles: three a column tile, or fewer."""
    module = internals("epilogues")
    monkeypatch.setattr(module, "_plan", lambda layout, plan=module._plan: (plan(layout)[0], 3))
    one = lambda device, facts=module.facts: facts(device)._replace(multiprocessors=1)  # noqa: E731
    monkeypatch.setattr(module, "facts", one)
    x, r, p = tensor(shape, device=device), tensor(shape, device=device), tensor(shape[-1:], device=device)
    hold_bias_act(x, p)
    hold_residual(x, r, p)
    hold_residual(x, r, p[0])


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 4), (2, 0, 3)])
def test_empty(hold_bias_act, hold_residual, device, shape):
    x, p = tensor(shape, device=device), tensor(shape[-1:], device=device)
    hold_bias_act(x, p)
    hold_residual(x, x.clone(), p)
    hold_residual(x, x.clone(), torch.ones((), device=device))


def test_single_number(hold_residual, device):
    hold_residual(*(tensor((), device=device) for _ in range(3)))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(6, 70), (3, 5, 4, 36)])
def test_strides(hold_bias_act, hold_residual, device, layout, shape):
    x, plain = tensor(shape, torch.float32, device, layout), tensor(shape, torch.float32, device)
    p = tensor((2 * shape[-1],), device=device)[::2]
    for dy in (plain, tensor(shape, torch.float32, device, layout)):
        y = hold_bias_act(x, p, grads=[dy])
        assert y.stride() == torch.empty_like(x).stride()
        hold_residual(plain, x, p, grads=[dy])
        hold_residual(x, plain, p[1], grads=[dy])
    hold_residual(x, plain, torch.ones((), device=device).expand(shape[-1]))


def test_many_permuted_dimensions(hold_bias_act, hold_residual, device):
    """More dimensions that do not merge than the kernels walk: copied, once."""
    shape = (2, 3, 2, 3, 2, 4)
    x, dy = tensor(shape, torch.float32, device), tensor(shape, torch.float32, device, "transposed")
    p = tensor((4,), device=device)
    hold_bias_act(dy, p, grads=[x])
    hold_residual(x[:, ::2], dy[:, ::2], p, grads=[dy[:, ::2]])


def test_beyond_32_bits(family, device):
    if device.type == "cpu":
        pytest.skip("8 GB of values")
    x = torch.empty(2**31 + 64, dtype=torch.bfloat16, device=device).as_strided((2, 64), (2**31, 1))
    x.copy_(torch.randn(2, 64))
    p = tensor((64,), device=device)
    for function in (lambda x: family.bias_act(x, p, "gelu"), lambda x: family.residual_scale_add(x, x, p)):
        for a, b in zip(*(evaluate(function, (t,), {}, [x]) for t in (x, x.contiguous()))):
            assert torch.equal(a[0], b[0])


def test_special_values(family, device):
    """NaN and inf stay in their own element, and reach the gradient of their own column alone."""
    x, p = tensor((70, 6), device=device), tensor((6,), device=device)
    x[3, 1] = NAN
    for name in ("gelu", "relu"):
        (y,), (dx, db) = evaluate(family.bias_act, (x, p), {"activation": name}, [torch.ones_like(x)])
        assert torch.equal(y.isnan(), x.isnan()) and db[[0, 2, 3, 4, 5]].isfinite().all()
        (y,), (dx, db) = evaluate(family.bias_act, (p.expand(70, 6), p), {"activation": name}, [x])
        assert y.isfinite().all() and torch.equal(dx.isnan(), x.isnan()) and torch.equal(db.isnan(), x.isnan().any(0))
    x[4, 2], x[5, 3] = INF, -INF
    (y,), (dx, dr, ds) = evaluate(family.residual_scale_add, (x, x.flip(0), p), {}, [torch.ones_like(x)])
    assert torch.equal(ds.isfinite(), torch.tensor([True, False, False, False, True, True], device=device))
    assert y.isnan().sum() == 2 and y.isinf().sum() == 4 and dx.isfinite().all()


def test_gradients_are_the_same_each_time(family, device):
    x, p, dy = tensor((900, 40), device=device), tensor((40,), device=device), tensor((900, 40), device=device)
    first, second = (evaluate(family.bias_act, (x, p), {"activation": "gelu"}, [dy])[1] for _ in range(2))
    assert torch.equal(first[1], second[1]) and torch.equal(first[0], second[0])


def test_bias_gradient_is_summed_in_float32(family, device):
    """4096 ones in float16: 2048 + 1 is 2048 there."""
    x, p = torch.ones(4096, 2, dtype=torch.float16, device=device), torch.ones(2, dtype=torch.float16, device=device)
    _, (_, db) = evaluate(family.bias_act, (x, p), {"activation": "relu"}, [x])
    _, (_, _, ds) = evaluate(family.residual_scale_add, (x, x, p), {}, [x])
    _, (_, _, whole) = evaluate(family.residual_scale_add, (x, x, p[0]), {}, [x])
    assert torch.equal(db, 4096 * p) and torch.equal(ds, 4096 * p) and whole == 8192


def test_only_what_is_wanted(family, device):
    x, p, dy = tensor((5, 6), device=device), tensor((6,), device=device), tensor((5, 6), device=device)
    for wanted in range(3):
        tensors = [t.clone().requires_grad_(i == wanted) for i, t in enumerate((x, dy, p))]
        (found,) = torch.autograd.grad(family.residual_scale_add(*tensors), tensors[wanted], dy)
        assert_close(found, (dy * p, dy, (dy * x).sum(0))[wanted].double(), dim=None)
    bias = p.clone().requires_grad_()
    assert torch.autograd.grad(family.bias_act(x, bias, "relu"), bias, dy)[0].shape == (6,)


def test_bad_input(family, device):
    x, p = tensor((4, 8), torch.float32, device), torch.ones(8, device=device)
    act, add = family.bias_act, family.residual_scale_add
    floats = "float64 | float32 | float16 | bfloat16"
    cases = [
        (TypeError, "bias_act: x must be a tensor, got list", lambda: act([1.0], p, "relu")),
        (TypeError, f"bias_act: x must have dtype {floats}, got int64", lambda: act(x.long(), p, "relu")),
        (TypeError, f"bias_act: bias must have dtype {floats}, got int64", lambda: act(x, p.long(), "relu")),
        (TypeError, "bias_act: bias must be a tensor, got NoneType", lambda: act(x, None, "relu")),
        (ValueError, "bias_act: bias must have shape (8,), got (4,)", lambda: act(x, p[:4], "relu")),
        (ValueError, "bias_act: x must have at least one dimension", lambda: act(x[0, 0], p[:1], "relu")),
        (ValueError, "bias_act: activation must be one of 'relu'", lambda: act(x, p, "swish")),
        (TypeError, "residual_scale_add: residual must be a tensor", lambda: add(x, None, p)),
        (TypeError, "residual_scale_add: scale must be a tensor, got float", lambda: add(x, x, 0.5)),
        (TypeError, "residual_scale_add: scale must be a tensor, got NoneType", lambda: add(x, x, None)),
        (ValueError, "residual_scale_add: residual must have shape (4, 8), got (8,)", lambda: add(x, p, p)),
        (ValueError, "residual_scale_add: scale must have shape (8,), (1,) or (), got (4,)", lambda: add(x, x, p[:4])),
        (ValueError, "residual_scale_add: scale must have shape (8,), (1,) or (), got (4, 8)", lambda: add(x, x, x)),
    ]
    for error, message, call in cases:
        with pytest.raises(error) as caught:
            call()
        assert str(caught.value).startswith(message)


@pytest.mark.parametrize("layout", ["contiguous", "transposed", "columns_sliced", "expanded"])
def test_opcheck(family, device, layout):
    x = tensor((3, 5, 4), torch.float32, device, layout).requires_grad_()
    r = tensor((3, 5, 4), torch.float64, device).requires_grad_()
    p = tensor((4,), torch.float32, device).requires_grad_()
    opcheck(family.bias_act_fwd, (x, p, "silu", 1.0, 0.0))
    opcheck(family.bias_act_bwd, (x.detach(), x, p, "silu", 1.0, 0.0, layout != "expanded"))
    opcheck(family.residual_scale_add_fwd, (x, r, p))
    opcheck(family.residual_scale_add_bwd, (r, x, p[:1], layout != "expanded"))


def test_direct_launch_is_the_op(family, device, on_kernels):
    if not on_kernels:
        pytest.skip("no kernels on this path")
    x, p = tensor((50, 60), torch.bfloat16, device).requires_grad_(), tensor((60,), device=device).requires_grad_()
    r = tensor((50, 60), torch.float32, device)
    for direct, op in (
        (family.bias_act(x, p, "gelu"), family.bias_act_fwd(x, p, "gelu", 0.0, 0.0)),
        (family.residual_scale_add(x, r, p), family.residual_scale_add_fwd(x, r, p)),
    ):
        assert torch.equal(direct, op)
        grads = (torch.autograd.grad(y, (x, p), torch.ones_like(y)) for y in (direct, op))
        assert all(torch.equal(*pair) for pair in zip(*grads))


def test_compile(family, device, backend):
    def step(x, r, p):
        return family.residual_scale_add(family.bias_act(x * 2, p, "gelu"), r, p).t().sum(1)

    tensors = tensor((8, 16), device=device), tensor((8, 16), device=device), tensor((16,), device=device)
    dy = torch.randn(16, device=device)
    (y,), grads = evaluate(step, tensors, {}, [dy])
    (z,), found = evaluate(torch.compile(step, fullgraph=True, backend=backend), tensors, {}, [dy])
    for a, b in zip((y, *grads), (z, *found)):
        assert_close(b, a.double(), dim=None)


@pytest.mark.parametrize("activation", ["silu", "gelu", "tanh", "relu_squared"])
def test_derivatives_of_bias_act(family, device, activation):
    x, p = (tensor(s, torch.float64, device).requires_grad_() for s in ((2, 3), (3,)))

    def function(x, p):
        return family.bias_act(x, p, activation)

    assert gradcheck(function, (x, p)) and gradgradcheck(function, (x, p))


@pytest.mark.parametrize("shape", [(3,), (), (1,)])
def test_derivatives_of_residual_scale_add(family, device, shape):
    tensors = [tensor(s, torch.float64, device).requires_grad_() for s in ((2, 3), (2, 3), shape)]
    assert gradcheck(family.residual_scale_add, tensors)
    assert gradgradcheck(family.residual_scale_add, tensors)


def test_transforms(family, device):
    x, p = tensor((3, 5, 4), torch.float64, device), tensor((4,), torch.float64, device)

    def loss(x, p):
        return family.residual_scale_add(family.bias_act(x, p, "silu"), x, p).pow(2).sum()

    def torchs(x, p):
        return (x + F.silu(x + p) * p).pow(2).sum()

    for mine, theirs in zip(*(torch.func.grad(f, (0, 1))(x, p) for f in (loss, torchs))):
        assert_close(mine, theirs, dim=None)
    for dims in ((0, None), (1, None), (2, 0)):
        per_sample = tensor((4, 4), torch.float64, device) if dims[1] == 0 else p
        xs = x.movedim(2, 0).expand(4, 3, 5).unsqueeze(-1).expand(4, 3, 5, 4).movedim(0, 2) if dims[1] == 0 else x
        for mine, theirs in zip(*(torch.func.vmap(torch.func.grad(f, (0, 1)), dims)(xs, per_sample)
                                  for f in (loss, torchs))):  # fmt: skip
            assert_close(mine, theirs, dim=None)
    rows = torch.func.vmap(lambda x: family.bias_act(x, p, "silu"), 1, 1)(x)
    assert torch.equal(rows, family.bias_act(x, p, "silu"))


def test_forward_mode_is_refused_not_lost(family, device, on_kernels):
    if not on_kernels:
        pytest.skip("PyTorch's own forward mode serves this path")
    x = tensor((2, 3), torch.float32, device)
    with pytest.raises(NotImplementedError):
        torch.func.jvp(lambda x: family.bias_act(x, x[0], "relu"), (x,), (x,))
