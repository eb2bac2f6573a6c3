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
    "gelu": F.gelu,
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "softplus": F.softplus,
    "mish": F.mish,
    "hardswish": F.hardswish,
}
CASES = [
    *((name, {}) for name in TORCH),
    ("leaky_relu", {"negative_slope": 0.3}),
    ("gelu", {"approximate": "tanh"}),
    ("softplus", {"beta": 0.7, "threshold": 2.3}),  # neither is a float32
]


@pytest.fixture(scope="module")
def family(internals):
    return internals("activations")


def exact(math, name):
    """torch's function, of float64, with the closed-form gradient: some of torch's own cancel in float64 too."""

    def function(x, **options):
        tanh = options.get("approximate") == "tanh"
        activation, a, b = math.ACTIVATIONS["gelu_tanh" if tanh else name]
        a, b = options.get("negative_slope", options.get("beta", a)), options.get("threshold", b)

        class Exact(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                ctx.save_for_backward(x)
                if name == "gelu" and not tanh:
                    return x * torch.special.erfc(-x / 2**0.5) / 2
                if name == "gelu":
                    return x * torch.sigmoid((8 / torch.pi) ** 0.5 * (x + 0.044715 * x**3))
                return TORCH[name](x, **options)

            @staticmethod
            def backward(ctx, dy):
                return math.gradient(activation, dy, *ctx.saved_tensors, a, b)

        return Exact.apply(x)

    return function


@pytest.fixture
def hold(kernel, math, on_kernels):
    """Hold a function and its gradient: on the CPU path they are torch's, bit by bit."""

    def hold(name, x, grads=None, versus=None, **options):
        function = getattr(kernel, name)
        grads = [torch.randn_like(x)] if grads is None else grads
        if on_kernels or name in ("relu_squared", "quick_gelu"):  # which torch does not have
            return check(function, exact(math, name), x, grads=grads, versus=versus, **options)[0]
        (y,), (dx,) = evaluate(function, (x,), options, grads)
        (torchs,), (dtorchs,) = evaluate(TORCH[name], (x,), options, grads)
        assert torch.equal(y.nan_to_num(1.5), torchs.nan_to_num(1.5))
        assert torch.equal(dx.nan_to_num(1.5), dtorchs.nan_to_num(1.5))
        return y

    return hold


@pytest.fixture(scope="module")
def math(internals):
    return internals("_activation_math")


def values(dtype, device):
    """Rows of one size each, so that the tolerance of each is its own: ordinary, small, wide, huge."""
    x = torch.randn(4, 200, dtype=torch.float64)
    x[1] *= 1e-3
    x[2] = torch.linspace(-12, 12, 200)
    x[3] *= 1e4
    return x.to(dtype).to(device)


# The references first: they are the oracle of everything below.


def test_references_are_torch(family, math):
    x = values(torch.float64, "cpu")[:3]  # torch's second derivative of mish at -1e4 is NaN
    dy, ddx = torch.randn_like(x), torch.randn_like(x)
    for name, (activation, a, b) in math.ACTIVATIONS.items():
        torchs = TORCH.get(name) or (lambda x: F.gelu(x, approximate="tanh"))
        xs, dys = x.clone().requires_grad_(), dy.clone().requires_grad_()
        y = torchs(xs)
        assert_close(family.activation_reference(x, activation, a, b), y, ulps=2, name=name)
        (dx,) = torch.autograd.grad(y, xs, dys, create_graph=True)
        ours = math.gradient(activation, dys, xs, a, b)
        assert_close(ours, dx, dim=None, slack=1e-14, name=f"gradient of {name}")  # torch's own cancels
        if activation not in ("relu", "leaky_relu"):  # whose second derivative is 0
            for mine, theirs in zip(*(torch.autograd.grad(g, (dys, xs), ddx) for g in (ours, dx))):
                assert_close(mine, theirs, dim=None, slack=1e-14, name=f"second derivative of {name}")


@pytest.mark.kernels_ci
@pytest.mark.parametrize("name, options", CASES)
def test_matches_torch(hold, device, name, options):
    for dtype in DTYPES:
        hold(name, values(dtype, device), **options)
        tail = -torch.rand(200, dtype=torch.float64).mul(12).to(dtype).to(device)
        cancels = name == "gelu" and not options and dtype == torch.float64  # as torch's
        hold(name, tail, versus=F.gelu if cancels else None, **options)


@pytest.mark.parametrize("name, options", CASES)
def test_tails_are_relative(kernel, math, device, on_kernels, name, options):
    """Every element of a float32 result by its own size, however small, where PyTorch's own often are 0 or noise."""
    if not on_kernels:
        pytest.skip("PyTorch's functions serve this path")
    x = torch.cat([-torch.linspace(1e-3, 80, 500), torch.logspace(-44, 1.9, 500), -torch.logspace(-44, 0, 200)])
    x = x.to(device)[:, None]
    y = getattr(kernel, name)(x, **options)
    expected = exact(math, name)(x.double(), **options)
    # exp(v) magnifies the rounding of its argument v: of up to 87 in gelu's tanh form and quick_gelu.
    assert_close(y, expected, ulps=64 if "gelu" in name else 16, name=name)


@pytest.mark.parametrize("name, options", CASES)
def test_special_values(kernel, hold, math, device, on_kernels, name, options):
    """NaN, inf, kinks and huge values, forward and backward: each element as torch's is when alone."""
    points = [0.0, -0.0, 1.0, 3.0, -3.0, 20.0, 1e4, -1e4, 1e20, -1e20, INF, -INF, NAN]
    if name == "hardswish":
        points.remove(NAN)  # torch's own gradient there differs by vector width
    for dtype in DTYPES:
        x = torch.tensor(points, dtype=dtype)
        ones = torch.ones_like(x).to(device)
        if not on_kernels:
            hold(name, x.to(device), grads=[ones], **options)
            continue
        (y,), (dx,) = evaluate(getattr(kernel, name), (x.to(device),), options, [ones])
        reference = exact(math, name) if name in ("sigmoid", "tanh") else TORCH[name]
        alone = [evaluate(reference, (p.double(),), options, [torch.ones(()).double()]) for p in x]
        assert_close(y[:, None], torch.stack([results[0] for results, _ in alone])[:, None], name=name)
        assert_close(dx[:, None], torch.stack([grads[0] for _, grads in alone])[:, None], name=f"gradient of {name}")


def test_huge_values(kernel, device, on_kernels):
    """Where torch's tanh gelu has a gradient of NaN, and its hardswish overflows."""
    if not on_kernels:
        pytest.skip("PyTorch's functions serve this path")
    x = torch.tensor([1e20, -1e20, 1e38, -1e38], device=device)
    for name, options in (("gelu", {"approximate": "tanh"}), ("gelu", {}), ("hardswish", {}), ("quick_gelu", {})):
        (y,), (dx,) = evaluate(getattr(kernel, name), (x,), options, [torch.ones_like(x)])
        assert torch.equal(y, F.relu(x)) and torch.equal(dx, (x > 0).float())


def test_gradient_conventions(kernel, device):
    x = torch.tensor([0.0, -0.0, 3.0, -3.0, 20.0], device=device)
    for name, expected in (
        ("relu", [0, 0, 1, 0, 1]),
        ("leaky_relu", [0.01, 0.01, 1, 0.01, 1]),
        ("hardswish", [0.5, 0.5, 1, 0, 1]),
    ):
        (_,), (dx,) = evaluate(getattr(kernel, name), (x,), {}, [torch.ones_like(x)])
        assert dx.tolist() == pytest.approx(expected)
    # What relu closes stays closed to an infinite gradient.
    (_,), (dx,) = evaluate(kernel.relu, (-x.abs(),), {}, [torch.full_like(x, INF)])
    assert torch.equal(dx, torch.zeros_like(x))


def test_softplus_float64_threshold_is_float64(kernel, device):
    """0.3 as a float32 is larger than 0.3 as a float64."""
    x = torch.tensor([0.3, 0.30000001, 0.3 + 1e-15], dtype=torch.float64, device=device)
    assert torch.equal(kernel.softplus(x, threshold=0.3) == x, torch.tensor([False, True, True], device=device))


@pytest.mark.parametrize("N", [1, 3, 127, 128, 129, 1000, 2048, 2049, 65537, 262144])
def test_sizes(hold, device, N):
    hold("silu", tensor((N,), torch.float32, device))


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (0, 4), (2, 0, 3)])
def test_scalar_and_empty(hold, device, shape):
    x = tensor(shape, torch.float32, device)
    y = hold("gelu", x)
    assert y.shape == x.shape


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(6, 70), (3, 5, 4, 36)])
def test_strides(hold, device, layout, shape):
    x = tensor(shape, torch.float32, device, layout)
    for dy in (tensor(shape, torch.float32, device), tensor(shape, torch.float32, device, layout)):
        y = hold("silu", x, grads=[dy])
        if x.is_contiguous() or layout in ("transposed", "rows_sliced"):
            assert y.stride() == F.silu(x).stride()


def test_tiles(hold, device):
    """More than one tile of rows and of columns, by rows and across them."""
    hold("silu", tensor((5, 1025), torch.float32, device, "columns_sliced"))
    hold("silu", tensor((80, 65), torch.float32, device, "rows_sliced"))
    hold("silu", tensor((80, 65), torch.float32, device), grads=[tensor((80, 65), torch.float32, device, "transposed")])


def test_channels_last(hold, device):
    x = tensor((2, 8, 5, 5), torch.float32, device).to(memory_format=torch.channels_last)
    y = hold("hardswish", x)
    assert y.is_contiguous(memory_format=torch.channels_last)


def test_many_permuted_dimensions(hold, device):
    """More dimensions that do not merge than the kernels walk: copied, once."""
    shape = (2, 3, 2, 3, 2, 4)
    x, dy = tensor(shape, torch.float32, device), tensor(shape, torch.float32, device, "transposed")
    hold("silu", x, grads=[dy])
    hold("silu", dy[:, ::2], grads=[x[:, ::2]])


def test_beyond_32_bits(kernel, device):
    if device.type == "cpu":
        pytest.skip("8 GB of values")
    x = torch.zeros(2**31 + 5000, dtype=torch.bfloat16, device=device)
    x[-4000:] = tensor((4000,), torch.bfloat16, device)
    assert_close(kernel.silu(x)[-4000:], F.silu(x[-4000:].double()))
    rows = x.new_zeros((2, 2**31 + 5016))[:, :-16]  # of more numbers each
    rows[1, -4000:] = x[-4000:]
    assert torch.equal(kernel.silu(rows)[1, -4000:], kernel.silu(x[-4000:]))
    wide = x.as_strided((3, 64), (2**30, 7))
    wide.copy_(tensor((3, 64), torch.bfloat16, device))
    assert_close(kernel.silu(wide), F.silu(wide.double()))


def test_bad_input(kernel, device):
    x = tensor((4, 8), torch.float32, device)
    cases = [
        (TypeError, "silu: x must be a tensor, got list", lambda: kernel.silu([1.0])),
        (TypeError, "relu: x must have dtype float64 | float32 | float16 | bfloat16, got int64",
         lambda: kernel.relu(x.long())),
        (TypeError, "tanh: x must have dtype float64 | float32 | float16 | bfloat16, got complex64",
         lambda: kernel.tanh(x.to(torch.complex64))),
        (TypeError, "mish: x must be a strided tensor, got layout torch.sparse_coo",
         lambda: kernel.mish(x.to_sparse())),
        (ValueError, "gelu: approximate must be one of 'none', 'tanh', got 'erf'", lambda: kernel.gelu(x, "erf")),
        (TypeError, "leaky_relu: negative_slope must be a number, got str", lambda: kernel.leaky_relu(x, "0.1")),
        (TypeError, "softplus: beta must be a number, got Tensor", lambda: kernel.softplus(x, x)),
        (TypeError, "softplus: threshold must be a number, got NoneType", lambda: kernel.softplus(x, threshold=None)),
    ]  # fmt: skip
    for error, message, call in cases:
        with pytest.raises(error) as caught:
            call()
        assert str(caught.value).startswith(message)


@pytest.mark.parametrize("layout", ["transposed", "columns_sliced", "expanded"])
def test_opcheck(family, device, layout):
    x = tensor((3, 5, 4), torch.float32, device, layout).requires_grad_()
    dy = tensor((3, 5, 4), torch.float32, device).requires_grad_()
    opcheck(family.activation_fwd, (x, "silu", 1.0, 0.0))
    opcheck(family.activation_bwd, (dy, x, "softplus", 0.7, 2.0))


def test_direct_launch_is_the_op(kernel, family, math, device, on_kernels):
    if not on_kernels:
        pytest.skip("no kernels on this path")
    x = tensor((5, 300), torch.bfloat16, device).requires_grad_()
    for name, (activation, a, b) in math.ACTIVATIONS.items():
        direct = getattr(kernel, name)(x) if hasattr(kernel, name) else kernel.gelu(x, "tanh")
        op = family.activation_fwd(x, activation, a, b)
        assert torch.equal(direct, op)
        grads = (torch.autograd.grad(y, x, torch.ones_like(x))[0] for y in (direct, op))
        assert torch.equal(*grads)


def test_compile_of_many(kernel, device):
    """Functions compiled by themselves, more than torch.compile would recompile one function."""
    x = torch.randn(5, 6, device=device)
    names = "relu silu gelu sigmoid tanh softplus mish hardswish quick_gelu relu_squared"
    for name in names.split():
        function = getattr(kernel, name)
        assert torch.equal(torch.compile(function, backend="eager", fullgraph=True)(x), function(x))


def test_compile(kernel, device, backend):
    def step(x):
        y = kernel.gelu(kernel.silu(x * 2), approximate="tanh") + kernel.softplus(x.t(), beta=0.5).t()
        return kernel.relu_squared(y[:, :5]).sum()  # two sizes in one graph

    x = tensor((8, 16), torch.float32, device).requires_grad_()
    (expected,) = torch.autograd.grad(step(x), x)
    compiled = torch.compile(step, fullgraph=True, backend=backend)
    (dx,) = torch.autograd.grad(compiled(x), x)
    assert_close(dx, expected.double())
    with pytest.raises(Exception, match="approximate must be one of"):
        torch.compile(lambda x: kernel.gelu(x, "erf"), fullgraph=True, backend=backend)(x)


@pytest.mark.parametrize("name, options", CASES)
def test_derivatives(kernel, device, name, options):
    x = tensor((2, 3), torch.float64, device).requires_grad_()  # away from kinks: normal values

    def function(x):
        return getattr(kernel, name)(x, **options)

    assert gradcheck(function, x) and gradgradcheck(function, x)


def test_transforms(kernel, device):
    x = tensor((3, 4, 5), torch.float64, device)

    def loss(x):
        return kernel.mish(x).square().sum()

    def torchs(x):
        return F.mish(x).square().sum()

    assert_close(torch.func.grad(loss)(x), torch.func.grad(torchs)(x))
    assert_close(torch.func.vmap(torch.func.grad(loss), 1)(x), torch.func.vmap(torch.func.grad(torchs), 1)(x))
    assert torch.equal(torch.func.vmap(kernel.mish, 2, 2)(x), kernel.mish(x))
    assert_close(torch.func.jacrev(kernel.mish)(x[0, 0]), torch.func.jacrev(F.mish)(x[0, 0]))
    hessian = torch.func.jacrev(torch.func.grad(loss))(x[0, 0])
    assert_close(hessian, torch.func.hessian(torchs)(x[0, 0]))


def test_forward_mode_is_refused_not_lost(kernel, device, on_kernels):
    if not on_kernels:
        pytest.skip("PyTorch's own forward mode serves this path")
    x = tensor((2, 3), torch.float32, device)
    with pytest.raises(NotImplementedError):
        torch.func.jvp(kernel.silu, (x,), (x,))


def test_backward_twice(kernel, device):
    """Nothing that was saved is written to, and the two gradients do not share memory."""
    x, dy = tensor((40, 16), torch.float32, device).requires_grad_(), tensor((40, 16), torch.float32, device)
    y = kernel.gelu(x)
    first, second = (torch.autograd.grad(y, x, dy, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second) and first.data_ptr() != second.data_ptr()
