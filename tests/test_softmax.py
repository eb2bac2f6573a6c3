import pytest
import torch
from _inputs import LAYOUTS, tensor
from _numerics import DTYPES, assert_close, evaluate, gradcheck, gradgradcheck, opcheck

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of the NaN and inf that are meant

NAMES = ("softmax", "log_softmax")
NAN, INF = float("nan"), float("inf")
LOWEST = torch.finfo(torch.float32).min


@pytest.fixture(scope="module")
def family(internals):
    return internals("softmax")


@pytest.fixture
def hold(kernel, family, on_kernels):
    """Hold a function and its gradient against float64, or where there are no kernels against torch, bit by bit.

    The gradient is held against the formula at the result as it was rounded. What its subtraction cancels may be far
    larger than what is left: an allowance in proportion to that is added to the policy's.
    """

    def hold(name, x, dim=-1, dy=None, dtype=None, gradient=True):
        ours, reference = getattr(kernel, name), getattr(family, f"{name}_reference")
        x = x.detach()
        dy = torch.randn_like(x, dtype=dtype or x.dtype) if dy is None else dy
        kept = x.clone(), dy.clone()
        (y,), (dx,) = evaluate(ours, (x,), {"dim": dim, "dtype": dtype}, [dy])
        assert all(torch.equal(t.nan_to_num(1.5), k.nan_to_num(1.5)) for t, k in zip((x, dy), kept)), "input written to"
        assert y.dtype == (dtype or x.dtype) and dx.dtype == x.dtype and y.is_contiguous()
        if not on_kernels:
            torchs = evaluate(getattr(torch.nn.functional, name), (x,), {"dim": dim, "dtype": dtype}, [dy])
            for mine, theirs in zip((y, dx), (torchs[0][0], torchs[1][0])):
                assert torch.equal(mine.nan_to_num(1.5), theirs.nan_to_num(1.5))
            return y
        assert_close(y, reference(x.to(y.dtype).double(), dim), dim=dim, name=name)
        if gradient:
            dy, p = dy.double(), y.detach().double()
            expected = family._bwd_reference(dy, p, dim, torch.float64, name == "log_softmax")
            if name == "softmax":
                size = p * (dy.abs() + (dy * p).abs().sum(dim, keepdim=True))
            else:
                size = dy.abs() + p.exp() * dy.abs().sum(dim, keepdim=True)
            slack = 4 * torch.finfo(family.compute_dtype(y)).eps * size.nan_to_num(0.0, 0.0).cpu()
            assert_close(dx, expected, dim=dim, slack=slack, name=f"gradient of {name}")
        return y

    return hold


# The reference first: it is the oracle of everything below.


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_reference_is_torch(family, name, dtype):
    reference, torchs = getattr(family, f"{name}_reference"), getattr(torch.nn.functional, name)
    for shape, dim in (((6, 50), -1), ((4, 30, 5), 1), ((), 0), ((3, 0), 1), ((0, 3), 1)):
        x, dy = tensor(shape, dtype), tensor(shape, dtype)
        (y,), (dx,) = evaluate(reference, (x,), {"dim": dim}, [dy])
        (t,), (dt,) = evaluate(torchs, (x,), {"dim": dim}, [dy])
        assert_close(y, t.double(), dim=dim, ulps=4 if dtype.itemsize < 4 else 16)  # torch's rounding on top of ours
        if dtype == torch.float64:
            assert_close(dx, dt, dim=dim)
            log = name == "log_softmax"
            assert_close(family._bwd_reference(dy, y.detach(), dim, dtype, log), dt, dim=dim)


@pytest.mark.parametrize("name", NAMES)
def test_reference_of_special_values(family, name):
    x = special_rows(33)
    y = getattr(family, f"{name}_reference")(x, -1)
    assert_close(y, getattr(torch.nn.functional, name)(x.double(), -1))


@pytest.mark.kernels_ci
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_matches_reference(hold, device, name, dtype):
    hold(name, tensor((5, 7, 100), dtype, device, scale=3.0))
    hold(name, tensor((5, 100, 7), dtype, device, scale=3.0), dim=1)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("N", [1, 3, 127, 128, 129, 1000, 1025, 16385, 65537, 262144])
def test_widths(hold, device, name, N):
    hold(name, tensor((1 if N > 20000 else 3, N), torch.float32, device, scale=2.0))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "shape, dim",
    [
        ((100, 70), 0),
        ((3, 40, 5), 1),
        ((2, 257, 33), -2),
        ((3, 1, 4), 1),
        ((2, 600, 40), 1),  # looped over, across the rows
        ((9000, 3), 0),  # the same, fewer rows than a tile would like
        ((2, 3, 4, 5), 1),
        ((), 0),
        ((), -1),
    ],
)
def test_dims(hold, device, name, shape, dim):
    hold(name, tensor(shape, torch.float32, device), dim)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", [(0, 8), (2, 0, 8), (3, 0), (0,), (0, 0)])
def test_empty(hold, device, name, shape):
    for dim in range(len(shape)):
        hold(name, tensor(shape, torch.float32, device), dim)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape, dim", [((6, 40), 0), ((6, 40), 1), ((2, 3, 4, 36), 1), ((2, 3, 4, 36), 3)])
def test_strides(hold, device, name, layout, shape, dim):
    x = tensor(shape, torch.float32, device, layout)
    for dy in (tensor(shape, torch.float32, device), tensor(shape, torch.float32, device, layout)):
        hold(name, x, dim, dy)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape, dim", [((33, 700), 1), ((2, 17000), 1), ((700, 33), 0)])
@pytest.mark.parametrize("layout", ["transposed", "columns_sliced"])
def test_strides_of_wide_rows(hold, device, name, layout, shape, dim):
    """One operand along the rows, another across them."""
    hold(name, tensor(shape, torch.float32, device, layout), dim, tensor(shape, torch.float32, device, layout))


def test_permuted_dimensions(hold, device):
    dy = tensor((2, 3, 5, 16), torch.float32, device).transpose(1, 2)
    hold("softmax", tensor((2, 5, 3, 16), torch.float32, device), -1, dy)
    hold("softmax", dy, -1)
    many = tensor((2, 2, 2, 2, 2, 8), torch.float32, device).permute(4, 2, 0, 5, 3, 1)
    hold("softmax", many, 3)


def test_gradient_of_sum_and_of_one_element(hold, device):
    """Expanded over everything, and one-hot: what losses send back."""
    x = tensor((4, 300), torch.float32, device)
    for name in NAMES:
        hold(name, x, -1, torch.ones((), device=device).expand(4, 300))
        hold(name, x, 0, torch.nn.functional.one_hot(torch.arange(4, device=device), 300).float())


def test_far_rows(kernel, device):
    if device.type == "cpu":
        pytest.skip("4 GiB of memory: on a GPU only")
    x = torch.empty(2**31 + 64, dtype=torch.bfloat16, device=device).as_strided((2, 64), (2**31, 1))
    x.copy_(torch.randn(2, 64))
    assert torch.equal(kernel.softmax(x, -1), kernel.softmax(x.contiguous(), -1))
    assert torch.equal(kernel.softmax(x.t(), 0), kernel.softmax(x.contiguous().t(), 0))


def special_rows(N):
    x = torch.randn(11, N)
    x[0, 1], x[1, 2], x[2, N - 3] = NAN, INF, -INF
    x[3] = -INF
    x[4, : N // 2] = -INF
    x[5, :2] = INF
    x[6] = LOWEST
    x[7, 0], x[7, 1] = -LOWEST, LOWEST
    x[8, :-1], x[8, -1] = -INF, LOWEST
    x[9, 0] = 200.0  # a shift by anything but the maximum overflows
    x[10] = torch.linspace(-100.0, 100.0, N)  # a new maximum at every step
    return x


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("N, dim", [(33, 0), (33, 1), (700, 0), (17000, 1)])
def test_special_values(hold, device, name, N, dim):
    x = special_rows(N).to(device)
    y = hold(name, x if dim else x.t().contiguous(), dim)
    y = y if dim else y.t()
    assert y[[0, 1, 3, 5]].isnan().all() and not y[[2, 4, 6, 7, 8, 9, 10]].isnan().any()


@pytest.mark.parametrize("N", [8, 17000])
def test_log_softmax_of_large_logits(kernel, device, on_kernels, N):
    """No digit is lost to the size of the maximum: every element to 2 ulps of itself, not of the row."""
    x = torch.full((2, N), -INF)
    x[0, :2] = 1e8
    x[1, : N // 2], x[1, -4:] = torch.linspace(-2200.0, 889.0, N // 2), 890.0
    y = kernel.log_softmax(x.to(device), -1).cpu()
    expected = torch.log_softmax(x.double(), -1)
    finite = expected.isfinite()
    error = (y.double() - expected)[finite].abs() / expected[finite].abs()
    assert torch.equal(finite, y.isfinite()) and error.max() <= 2 * torch.finfo(torch.float32).eps


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "x_dtype, dtype, N",
    [
        (torch.bfloat16, torch.float32, 50),
        (torch.float16, torch.float64, 50),
        (torch.float32, torch.bfloat16, 17000),
        (torch.float64, torch.float16, 50),
        (torch.bfloat16, torch.float16, 50),
    ],
)
def test_dtype(hold, kernel, device, name, x_dtype, dtype, N):
    x = tensor((3, N), x_dtype, device, scale=3.0)
    x[1, 0] = 7e4  # overflows float16
    y = hold(name, x, dtype=dtype, gradient=dtype != torch.float16)
    assert torch.equal(y.nan_to_num(1.5), getattr(kernel, name)(x.to(dtype), -1).nan_to_num(1.5)), "not as converted"


@pytest.mark.parametrize("name", NAMES)
def test_integers(kernel, device, name):
    for x in (torch.tensor([[1, 2, 4]]), torch.tensor([[True, False]]), torch.tensor([[250, 255]], dtype=torch.uint8)):
        y = getattr(kernel, name)(x.to(device), 1, torch.float32)
        assert y.dtype == torch.float32
        assert_close(y, getattr(torch.nn.functional, name)(x.double(), 1))


def test_dtype_survives_autocast(kernel, device):
    x = tensor((2, 8), torch.bfloat16, device)
    with torch.autocast(device.type, torch.bfloat16):
        assert kernel.softmax(x, -1).dtype == kernel.log_softmax(x, -1).dtype == torch.bfloat16


def test_bad_input(kernel, device):
    x = tensor((4, 8), torch.float32, device)
    for name in NAMES:
        function = getattr(kernel, name)
        floats = "float64 | float32 | float16 | bfloat16"
        cases = [
            (TypeError, "x must be a tensor, got list", lambda f=function: f([1.0], 0)),
            (TypeError, f"x must have dtype {floats}, got int64", lambda f=function: f(x.long(), 0)),
            (TypeError, f"x must have dtype {floats}, got complex64", lambda f=function: f(x.cfloat(), 0, x.dtype)),
            (TypeError, f"dtype must be {floats} or None, got torch.int8", lambda f=function: f(x, 0, torch.int8)),
            (TypeError, f"dtype must be {floats} or None, got float32", lambda f=function: f(x, 0, "float32")),
            (TypeError, "x must be a strided tensor", lambda f=function: f(x.to_sparse(), 0)),
            (TypeError, "dim must be an int, got NoneType", lambda f=function: f(x, None)),
            (TypeError, "dim must be an int, got bool", lambda f=function: f(x, True)),
            (ValueError, "dim must be in -2 to 1 for x (4, 8), got 2", lambda f=function: f(x, 2)),
            (ValueError, "dim must be in -2 to 1 for x (4, 8), got -3", lambda f=function: f(x, -3)),
            (ValueError, "dim must be in -1 to 0 for x (), got 1", lambda f=function: f(x[0, 0], 1)),
        ]
        for error, message, call in cases:
            with pytest.raises(error) as caught:
                call()
            assert str(caught.value).startswith(f"{name}: {message}")


def test_plan(internals):
    """Tiles span rows where memory does, and what is turned fits the smallest shared memory."""
    Rows, plan_any_dim = internals("_rows").Rows, internals("_rows").plan_any_dim
    for N in (1, 64, 100, 1000, 10**6):
        assert plan_any_dim(Rows(1, 1, 999, N, ((0, 0, N, 1),)), 4, 32).ONE_PASS == (N < 10**6)
        for M, itemsize in ((3, 4), (40, 2), (10**6, 8)):
            plan = plan_any_dim(Rows(1, 8, M, N, ((0, N * M, 1, M), (0, N * M, N, 1))), itemsize, 16)
            assert plan.BLOCK_M >= min(M, 32)
            assert plan.BLOCK_M * plan.BLOCK_N * itemsize <= 32768 and plan.num_warps <= 16
            assert plan.ONE_PASS == (plan.BLOCK_N >= N)
    for module in ("softmax", "rms_norm", "layer_norm", "masked_softmax"):
        for N in (1, 100, 1000, 5000, 16384, 20000, 10**5, 10**6):
            for max_warps in (16, 32):
                plan = internals(module)._plan(N, max_warps)
                assert 1 <= plan.num_warps <= max_warps and plan.ONE_PASS == (plan.BLOCK_N >= N)


def test_opcheck(family, device):
    x = tensor((3, 40), torch.float32, device).requires_grad_()
    across = tensor((3, 40), torch.bfloat16, device, "transposed").requires_grad_()
    number = tensor((), torch.float32, device).requires_grad_()
    for log in (False, True):
        opcheck(family.softmax_fwd, (x, -1, torch.float32, log))
        opcheck(family.softmax_fwd, (across, -2, torch.float32, log))
        opcheck(family.softmax_fwd, (number, -1, torch.float32, log))
        opcheck(family.softmax_bwd, (x, x.detach() * 2, -1, torch.float32, log))
        opcheck(family.softmax_bwd, (across, across.detach(), -2, torch.float32, log))
    opcheck(family.softmax_fwd, (x[:0], -1, torch.float64, False))


@pytest.mark.parametrize("name", NAMES)
def test_direct_launch_is_the_op(kernel, family, device, on_kernels, name):
    if not on_kernels:
        pytest.skip("no kernels on this path")
    x = tensor((5, 300), torch.bfloat16, device).requires_grad_()
    dy = tensor((5, 300), torch.float32, device)
    y = getattr(kernel, name)(x, 0, torch.float32)
    registered = family.softmax_fwd(x, -2, torch.float32, name == "log_softmax")
    assert torch.equal(y, registered)
    assert torch.equal(torch.autograd.grad(y, x, dy)[0], torch.autograd.grad(registered, x, dy)[0])


def test_compile(kernel, device, backend):
    def step(x):
        return (kernel.log_softmax(x * 2, 1) + kernel.softmax(x, 0, torch.float32)).square().sum()

    x = tensor((4, 64), torch.bfloat16, device).requires_grad_()
    compiled = torch.compile(step, fullgraph=True, backend=backend)
    (expected,) = torch.autograd.grad(step(x), x)
    (found,) = torch.autograd.grad(compiled(x), x)
    assert_close(found, expected.double(), ulps=4)  # the sums in bfloat16 are fused or not
    with pytest.raises(ValueError, match="dim must be in -1 to 0"):
        torch.compile(step)(x[0])


@pytest.mark.parametrize("name", NAMES)
def test_transforms(kernel, family, device, name):
    function, reference = getattr(kernel, name), getattr(family, f"{name}_reference")
    x = tensor((2, 3), torch.float64, device).requires_grad_()
    for dim in (0, 1):
        assert gradcheck(function, (x, dim)) and gradgradcheck(function, (x, dim))
    assert gradcheck(lambda x: function(x, 0, torch.float64), tensor((3,), torch.float64, device).requires_grad_())
    x = x.detach()

    def loss(function):
        return lambda x: function(x, -1).pow(3).sum()

    batch = torch.stack([x, 2 * x, 3 * x], 1)
    per_sample = torch.func.vmap(torch.func.grad(loss(function)), 1)(batch)
    expected = torch.func.vmap(torch.func.grad(loss(reference)), 1)(batch)
    assert_close(per_sample, expected, ulps=1024)  # gradients nearly cancel where one probability is nearly 1
    assert torch.equal(torch.func.vmap(lambda x: function(x, 0), 1)(batch)[1], function(2 * x, 0))
    numbers = torch.func.vmap(lambda x: function(x, 0))(x[0])  # each is a row of one, not the batch a row
    assert torch.equal(numbers, torch.full_like(x[0], 0.0 if name == "log_softmax" else 1.0))
    jacobian = torch.func.jacrev(lambda x: function(x, 1))(x)
    assert_close(jacobian, torch.func.jacrev(lambda x: reference(x, 1))(x))


def test_forward_mode_is_refused_not_lost(kernel, device, on_kernels):
    if not on_kernels:
        pytest.skip("PyTorch's own forward mode serves this path")
    x = tensor((2, 3), torch.float32, device)
    with pytest.raises(NotImplementedError):
        torch.func.jvp(lambda x: kernel.softmax(x, -1), (x,), (x,))
