from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from _inputs import LAYOUTS, tensor
from _numerics import DTYPES, assert_close, check, evaluate, gradcheck, gradgradcheck, opcheck
from torch.utils.checkpoint import checkpoint

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of the NaN and inf that are meant

NAN, INF = float("nan"), float("inf")
GPT_OSS = {"interleaved": True, "limit": 7.0, "alpha": 1.702, "up_offset": 1.0}

# (function, its formula) of a packed tensor
NAMES = {
    "silu_and_mul": lambda a, b: F.silu(a) * b,
    "mul_and_silu": lambda a, b: a * F.silu(b),
    "gelu_and_mul": lambda a, b: F.gelu(a) * b,
    "mul_and_gelu": lambda a, b: a * F.gelu(b),
    "gelu_tanh_and_mul": lambda a, b: F.gelu(a, approximate="tanh") * b,
    "relu_and_mul": lambda a, b: F.relu(a) * b,
}
PAIRS = {
    "swiglu": lambda gate, up: F.silu(gate) * up,
    "geglu": lambda gate, up, approximate="none": F.gelu(gate, approximate=approximate) * up,
    "reglu": lambda gate, up: F.relu(gate) * up,
}


@pytest.fixture(scope="module")
def family(internals):
    return internals("gated")


@pytest.fixture
def hold(on_kernels):
    """`check`; on the CPU path by the error of PyTorch itself, whose float32 gelu there is 20 ulps off."""
    return lambda ours, formula, *tensors, **kw: check(
        ours, formula, *tensors, versus=None if on_kernels else formula, **kw
    )[0]


def gpt_oss(x):
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

    return GptOssExperts._apply_gate(SimpleNamespace(limit=7.0, alpha=1.702), x)


# The references first: they are the oracle of everything below.


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_reference_is_gpt_oss(family, dtype):
    """Bit for bit where nothing is rounded between: values and gradients."""
    x, dy = tensor((6, 80), dtype, scale=6.0), tensor((6, 40), dtype)
    x[0, :4] = torch.tensor([7.0, 7.0, 8.0, -8.0], dtype=dtype)
    ours = evaluate(lambda x: family.gated_reference(x, "silu", **GPT_OSS), (x,), {}, [dy])
    theirs = evaluate(gpt_oss, (x,), {}, [dy])
    assert torch.equal(ours[0][0], theirs[0][0]) and torch.equal(ours[1][0], theirs[1][0])


@pytest.mark.parametrize(
    "options", [{}, {"gate_first": False}, {"limit": 0.7}, {"interleaved": True, "up_offset": 1.0}]
)
def test_closed_form_gradient(family, internals, options):
    x, dy = tensor((3, 40), torch.float64), tensor((3, 20), torch.float64)
    defaults = {"gate_first": True, "interleaved": False, "limit": None, "up_offset": 0.0, **options}
    for name, (activation, a, b) in internals("_activation_math").ACTIVATIONS.items():
        _, (dx,) = evaluate(family.gated_reference, (x,), {"activation": name, **options}, [dy])
        order = [defaults[k] for k in ("gate_first", "interleaved", "limit")]
        ours = family._packed_bwd_reference(dy, x, activation, *order, a, b, defaults["up_offset"])
        assert_close(ours, dx, name=name)


@pytest.mark.kernels_ci
@pytest.mark.parametrize("name", NAMES)
def test_names(kernel, hold, device, name):
    def formula(x):
        return NAMES[name](*x.chunk(2, -1))

    for dtype in DTYPES:
        y = hold(getattr(kernel, name), formula, tensor((5, 7, 100), dtype, device))
        assert y.is_contiguous()


@pytest.mark.parametrize(
    "options",
    [
        GPT_OSS,
        {**GPT_OSS, "interleaved": False, "gate_first": False},
        {"limit": 0.3},
        {"alpha": -0.5},
        {"up_offset": 2},
    ],
)
def test_options(kernel, hold, family, device, options):
    for dtype in DTYPES:
        x = tensor((4, 90), dtype, device, scale=5.0)
        hold(lambda x: kernel.gated(x, "silu", **options), lambda x: family.gated_reference(x, "silu", **options), x)


def test_every_activation(kernel, hold, family, internals, device):
    x = tensor((4, 62), torch.float32, device, scale=2.0)
    for name in internals("_activation_math").ACTIVATIONS:
        hold(lambda x: kernel.gated(x, name), lambda x: family.gated_reference(x, name), x)  # noqa: B023


def test_gated_is_the_names(kernel, device):
    x = tensor((4, 62), torch.bfloat16, device)
    assert torch.equal(kernel.gated(x, "silu"), kernel.silu_and_mul(x))
    assert torch.equal(kernel.gated(x, "gelu", gate_first=False), kernel.mul_and_gelu(x))
    assert torch.equal(kernel.gated(x, "gelu_tanh"), kernel.gelu_tanh_and_mul(x))
    gate, up = x.chunk(2, -1)
    assert torch.equal(kernel.swiglu(gate, up), kernel.silu_and_mul(x))
    assert_close(kernel.gated(x, "sigmoid", gate_first=False), F.glu(x.double()))
    pairs = torch.stack([gate, up], -1).flatten(-2)
    assert torch.equal(kernel.gated(pairs, "silu", interleaved=True), kernel.silu_and_mul(x))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rounded_once(kernel, family, device, dtype):
    """Nearly every element is the float64 result rounded; activation(gate) rounded first would miss a third."""
    x = tensor((64, 600), dtype, device)
    expected = family.gated_reference(x.double(), "silu").to(dtype)
    assert (kernel.silu_and_mul(x) == expected).float().mean() > 0.999
    gate, up = x.chunk(2, -1)
    assert (F.silu(gate) * up == expected).float().mean() < 0.8


@pytest.mark.parametrize("name, options", [*((n, {}) for n in PAIRS), ("geglu", {"approximate": "tanh"})])
def test_pairs(kernel, hold, device, name, options):
    for dtype in DTYPES:
        gate, up = tensor((5, 7, 50), dtype, device), tensor((5, 7, 50), dtype, device)
        hold(getattr(kernel, name), PAIRS[name], gate, up, **options)


@pytest.mark.parametrize("dtypes", [(torch.bfloat16, torch.float32), (torch.float64, torch.float16)])
def test_pairs_promote(kernel, hold, device, dtypes):
    for one, two in (dtypes, reversed(dtypes)):
        y = hold(kernel.swiglu, PAIRS["swiglu"], tensor((3, 40), one, device), tensor((3, 40), two, device))
        assert y.dtype == torch.promote_types(one, two)


@pytest.mark.parametrize("N", [1, 3, 127, 128, 129, 1000, 65537, 262144])
def test_widths(kernel, hold, device, N):
    x = tensor((1 if N > 1000 else 3, 2 * N), torch.float32, device)
    hold(kernel.silu_and_mul, lambda x: F.silu(x[..., :N]) * x[..., N:], x)


@pytest.mark.parametrize("shape", [(0,), (0, 8), (2, 0, 8), (3, 0), (8,)])
def test_empty_and_flat(kernel, device, shape):
    x, n = tensor(shape, torch.float32, device), shape[-1] // 2
    check(kernel.silu_and_mul, lambda x: F.silu(x[..., :n]) * x[..., n:], x)
    check(kernel.swiglu, PAIRS["swiglu"], x, x.clone())


def test_pair_of_scalars(kernel, hold, device):
    gate, up = tensor((), torch.float32, device), tensor((), torch.float32, device)
    assert kernel.swiglu(gate, up).shape == ()
    hold(kernel.swiglu, PAIRS["swiglu"], gate, up, dim=None)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(6, 40), (2, 3, 4, 36)])
def test_strides(kernel, hold, family, device, layout, shape):
    half = (*shape[:-1], shape[-1] // 2)
    x = tensor(shape, torch.float32, device, layout)
    for i, dy in enumerate((tensor(half, torch.float32, device), tensor(half, torch.float32, device, layout))):
        options = {"interleaved": i == 0, "limit": 0.8}
        y = hold(
            lambda x: kernel.gated(x, "gelu", **options),  # noqa: B023
            lambda x: family.gated_reference(x, "gelu", **options),  # noqa: B023
            x,
            grads=[dy],
        )
        assert y.is_contiguous()
    gate, up = tensor(half, torch.float32, device, layout), tensor(half, torch.float32, device)
    for one, two in ((gate, up), (up, gate), (gate, gate * 2)):
        y = hold(kernel.swiglu, PAIRS["swiglu"], one, two, grads=[dy])
        assert not one.is_contiguous() or y.is_contiguous()


def test_many_permuted_dimensions(kernel, hold, device):
    """More dimensions that do not merge than the kernels walk: inputs are copied, results land where they belong."""
    shape = (2, 3, 2, 3, 2, 4)
    x, dy = tensor(shape, torch.float32, device, "transposed"), tensor((*shape[:-1], 2), torch.float32, device)
    hold(kernel.silu_and_mul, lambda x: F.silu(x[..., :2]) * x[..., 2:], x, grads=[dy])
    dy = tensor((*shape[:-1], 2), torch.float32, device, "transposed")
    hold(kernel.silu_and_mul, lambda x: F.silu(x[..., :2]) * x[..., 2:], x.contiguous(), grads=[dy])
    gate, up = tensor(shape, torch.float32, device, "transposed"), tensor(shape, torch.float32, device)
    hold(kernel.swiglu, PAIRS["swiglu"], gate, up, grads=[up])
    hold(kernel.swiglu, PAIRS["swiglu"], up[:, :, :, ::2], gate[:, :, :, ::2], grads=[gate[:, :, :, ::2]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_at_the_limit(kernel, device, dtype):
    """The clamp passes gradients at the limit itself, as torch's; 6.7 is no float32, and 8 ulps of one are beyond."""
    limit = 6.7
    at = torch.tensor(limit, dtype=dtype).item()
    beyond = at * (1 + 8 * torch.finfo(dtype).eps)
    x = torch.tensor([[at, at], [at, -at], [beyond, 1.0], [1.0, beyond], [1.0, -beyond], [-20.0, 1.0]], dtype=dtype)
    limit = at
    _, (dx,) = evaluate(
        lambda x: kernel.gated(x, "relu", limit=limit), (x.to(device),), {}, [torch.ones(6, 1, dtype=dtype).to(device)]
    )
    expected = torch.tensor([[at, at], [-at, at], [0, at], [at, 0], [-at, 0], [0, 0]], dtype=dtype)
    assert torch.equal(dx.cpu(), expected)


def test_special_values(kernel, device):
    points = torch.tensor([0.0, 1.0, -1.0, 1e4, -1e4, INF, -INF, NAN])
    x = torch.cartesian_prod(points, points).to(device)
    for name in ("silu", "relu", "gelu_tanh"):
        for options in ({}, {"limit": 7.0}):
            act = {"silu": F.silu, "relu": F.relu, "gelu_tanh": lambda g: F.gelu(g, approximate="tanh")}[name]

            def formula(x):
                gate, up = x[:, :1], x[:, 1:]
                if options:  # noqa: B023
                    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
                return act(gate) * up  # noqa: B023

            dy = torch.ones(64, 1, device=device)
            (y,), (dx,) = evaluate(kernel.gated, (x,), {"activation": name, **options}, [dy])
            (expected,), (dexpected,) = evaluate(formula, (x.cpu().double(),), {}, [dy.cpu().double()])
            assert_close(y, expected, name=f"{name} {options}")
            assert_close(dx, dexpected, name=f"gradient of {name} {options}")


def test_pairs_beyond_32_bits(kernel, device):
    if device.type == "cpu":
        pytest.skip("8 GB of values")
    x = torch.zeros((2, 2**31 + 5016), dtype=torch.bfloat16, device=device)[:, :-16]
    x[1, -4000:] = tensor((4000,), torch.bfloat16, device)
    near = x[1:, -4000:].contiguous()
    far = kernel.gated(x, "silu", interleaved=True)[1:, -2000:]
    assert torch.equal(far, kernel.gated(near, "silu", interleaved=True))


def test_bad_input(kernel, device):
    x = tensor((4, 8), torch.float32, device)
    cases = [
        (TypeError, "silu_and_mul: x must be a tensor, got NoneType", lambda: kernel.silu_and_mul(None)),
        (TypeError, "mul_and_gelu: x must have dtype float64 | float32 | float16 | bfloat16, got int64",
         lambda: kernel.mul_and_gelu(x.long())),
        (ValueError, "relu_and_mul: x must have an even last dimension, got (4, 7)",
         lambda: kernel.relu_and_mul(x[:, :7])),
        (ValueError, "gated: x must have an even last dimension, got ()", lambda: kernel.gated(x[0, 0], "silu")),
        (ValueError, "gated: activation must be one of 'relu', 'relu_squared', 'leaky_relu', 'silu', 'quick_gelu'",
         lambda: kernel.gated(x, "swish")),
        (TypeError, "gated: gate_first must be True or False, got 'no'",
         lambda: kernel.gated(x, "silu", gate_first="no")),
        (ValueError, "gated: activation must be one of", lambda: kernel.gated(x, ["silu"])),
        (TypeError, "swiglu: up must be a tensor, got NoneType", lambda: kernel.swiglu(x, None)),
        (ValueError, "gated: limit must be in the range of float64", lambda: kernel.gated(x, "silu", limit=10**400)),
        (ValueError, "gated: limit must be at least 0, got -7.0", lambda: kernel.gated(x, "silu", limit=-7.0)),
        (TypeError, "gated: alpha must be a number or None, got str", lambda: kernel.gated(x, "silu", alpha="1")),
        (ValueError, "gated: alpha must be None unless activation is 'silu', got 1.702 with 'gelu'",
         lambda: kernel.gated(x, "gelu", alpha=1.702)),
        (TypeError, "gated: up_offset must be a number, got NoneType", lambda: kernel.gated(x, "silu", up_offset=None)),
        (TypeError, "swiglu: gate must be a tensor, got int", lambda: kernel.swiglu(1, x)),
        (TypeError, "reglu: up must have dtype", lambda: kernel.reglu(x, x.bool())),
        (ValueError, "swiglu: up must have shape (4, 8), got (8,)", lambda: kernel.swiglu(x, x[0])),
        (ValueError, "swiglu: up must be on", lambda: kernel.swiglu(x, x.to("meta"))),
        (ValueError, "geglu: approximate must be one of 'none', 'tanh', got 'erf'", lambda: kernel.geglu(x, x, "erf")),
    ]  # fmt: skip
    for error, message, call in cases:
        with pytest.raises(error) as caught:
            call()
        assert str(caught.value).startswith(message)


@pytest.mark.parametrize("layout", ["transposed", "expanded"])
def test_opcheck(family, device, layout):
    x = tensor((3, 4, 6), torch.float32, device, layout).requires_grad_()
    dy = tensor((3, 4, 3), torch.float32, device).requires_grad_()
    opcheck(family.gated_fwd, (x, "silu", True, True, 0.7, 1.702, 0.0, 1.0))
    opcheck(family.gated_bwd, (dy, x, "silu", False, False, None, 1.0, 0.0, 0.0))
    gate, up = tensor((3, 4, 3), torch.float32, device, layout).requires_grad_(), tensor((3, 4, 3), device=device)
    opcheck(family.gated_pair_fwd, (gate, up, "gelu", 0.0, 0.0))
    opcheck(family.gated_pair_bwd, (dy, gate, up.double(), "gelu", 0.0, 0.0))


def test_direct_launch_is_the_op(kernel, family, device, on_kernels):
    if not on_kernels:
        pytest.skip("no kernels on this path")
    x, gate, up = (tensor((5, n), torch.bfloat16, device).requires_grad_() for n in (300, 70, 70))
    direct, op = kernel.silu_and_mul(x), family.gated_fwd(x, "silu", True, False, None, 1.0, 0.0, 0.0)
    assert torch.equal(direct, op)
    assert torch.equal(*(torch.autograd.grad(y, x, torch.ones_like(y))[0] for y in (direct, op)))
    direct, op = kernel.geglu(gate, up), family.gated_pair_fwd(gate, up, "gelu", 0.0, 0.0)
    assert torch.equal(direct, op)
    grads = [torch.autograd.grad(y, (gate, up), torch.ones_like(y)) for y in (direct, op)]
    assert all(torch.equal(a, b) for a, b in zip(*grads))


def test_compile(kernel, device, backend):
    def step(x, up):
        y = kernel.gated(x * 2, "silu", **GPT_OSS)
        return kernel.geglu(kernel.silu_and_mul(y), up).square().sum()

    x, up = tensor((4, 64), torch.float32, device).requires_grad_(), tensor((4, 16), device=device).requires_grad_()
    expected = torch.autograd.grad(step(x, up), (x, up))
    compiled = torch.compile(step, fullgraph=True, backend=backend)
    for a, b in zip(torch.autograd.grad(compiled(x, up), (x, up)), expected):
        assert_close(a, b.double())
    with pytest.raises(Exception, match="even last dimension"):
        torch.compile(kernel.silu_and_mul, fullgraph=True, backend=backend)(x[:, :3])


def test_derivatives(kernel, device):
    x, up = tensor((2, 4), torch.float64, device).requires_grad_(), tensor((2, 4), torch.float64, device)

    def packed(x):
        return kernel.gated(x, "silu", **{**GPT_OSS, "limit": 0.9})

    assert gradcheck(packed, x) and gradgradcheck(packed, x)
    assert gradcheck(kernel.mul_and_gelu, x) and gradgradcheck(kernel.mul_and_gelu, x)
    pair = x, up.requires_grad_()
    assert gradcheck(kernel.geglu, pair) and gradgradcheck(kernel.geglu, pair)
    one = (x, up.detach())  # the second derivative when only the gate needs a gradient
    assert gradcheck(kernel.swiglu, one) and gradgradcheck(kernel.swiglu, one)


def test_transforms(kernel, family, device):
    x = tensor((3, 4, 6), torch.float64, device)
    for ours, reference in (
        (kernel.silu_and_mul, lambda x: family.gated_reference(x, "silu")),
        (lambda x: kernel.swiglu(x[..., ::2], x[..., 3:]), lambda x: F.silu(x[..., ::2]) * x[..., 3:]),
    ):
        grad, expected = (torch.func.grad(lambda x: f(x).square().sum()) for f in (ours, reference))  # noqa: B023
        assert_close(grad(x), expected(x))
        assert_close(torch.func.vmap(grad, 1, 1)(x), torch.func.vmap(expected, 1, 1)(x))
        assert torch.equal(torch.func.vmap(ours, 1, 1)(x), ours(x))
        assert_close(torch.func.jacrev(ours)(x[0, 0]), torch.func.jacrev(reference)(x[0, 0]))


def test_forward_mode_is_refused_not_lost(kernel, device, on_kernels):
    if not on_kernels:
        pytest.skip("PyTorch's own forward mode serves this path")
    x = tensor((2, 4), torch.float32, device)
    with pytest.raises(NotImplementedError):
        torch.func.jvp(kernel.silu_and_mul, (x,), (x,))


def test_backward_twice_and_checkpoint(kernel, device):
    """Nothing that was saved is written to, and gradients do not share memory."""
    gate, up, dy = (tensor((40, 16), torch.float32, device) for _ in range(3))
    gate.requires_grad_(), up.requires_grad_()
    y = kernel.swiglu(gate, up)
    runs = [torch.autograd.grad(y, (gate, up), dy, retain_graph=True) for _ in range(2)]
    for reentrant in (True, False):
        again = checkpoint(kernel.swiglu, gate, up, use_reentrant=reentrant)
        gate.grad = up.grad = None
        again.backward(dy)
        runs.append((gate.grad, up.grad))
    assert all(torch.equal(a, b) for run in runs for a, b in zip(run, runs[0]))
    assert len({g.data_ptr() for run in runs for g in run}) == 8
