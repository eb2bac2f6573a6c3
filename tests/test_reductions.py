import pytest
import torch
from _inputs import LAYOUTS, amid, tensor, vast
from _numerics import DTYPES, assert_close, check, gradcheck, gradgradcheck, opcheck

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of the NaN and inf that are meant

NAN, INF = float("nan"), float("inf")


def norm(p):
    return lambda x, dim=None, **options: torch.linalg.vector_norm(x, p, dim, **options)


TORCH = {name: getattr(torch, name) for name in ("sum", "mean", "amax", "amin", "var", "std", "logsumexp")}
NORMS = {f"norm {p}": norm(p) for p in (1, 2, 3, 0.5, -1, INF, -INF)}
ALL = {**TORCH, **NORMS}
INDICES = ("argmax", "argmin")
SOME = ("sum", "amax", "std", "logsumexp")  # of every way to combine


@pytest.fixture(scope="module")
def family(internals):
    return internals("reductions")


@pytest.fixture(scope="module")
def function(family):
    def find(name):
        if not name.startswith("norm "):
            return getattr(family, name)
        return lambda x, dim=None, **options: family.vector_norm(x, float(name[5:]), dim, **options)

    return find


@pytest.fixture
def hold(function):
    """Hold a function and its gradient against torch's in float64."""

    def hold(name, x, dim=-1, grads=None, **options):
        ours, theirs = function(name), ALL[name]
        dims = list(range(x.dim())) if dim is None else dim
        # exp2(p * log2(x)) has the error of its exponent, which is what the logarithm's size adds to
        ulps = 64 if name in ("norm 3", "norm 0.5", "norm -1") and x.dtype == torch.float32 else None
        (y,) = check(
            lambda x: ours(x, dim, **options), lambda x: theirs(x, dims, **options), x, dim=None, grads=grads, ulps=ulps
        )
        assert y.is_contiguous() and y.dtype == x.dtype
        return y

    return hold


def values(name, shape, dtype, device, layout="contiguous"):
    """Normal values; with ties where those matter, and away from a pole."""
    x = tensor(shape, dtype, device, layout)
    if name in ("amax", "amin", "norm inf", "norm -inf", *INDICES):
        return (2 * x).round()
    return x.sign() * (x.abs() + 0.5) if name == "norm -1" else x


# The reference first, and the formula of the gradient.


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("keepdim", [False, True])
def test_reference_is_torch(family, name, keepdim):
    kind, param = name, 1.0
    if name.startswith("norm "):
        param = float(name[5:])
        kind = family._NORMS.get(param, "norm_p")
    for shape, dims in (((6, 50), [-1]), ((4, 3, 5), [-3, -1]), ((7,), [-1])):
        x = values(name, shape, torch.float64, "cpu").requires_grad_()
        y = ALL[name](x, dims, keepdim=keepdim)
        assert_close(family.reduction_reference(x, dims, keepdim, kind, param, x.dtype), y, dim=None)
        dy = torch.randn_like(y)
        expected = torch.autograd.grad(y, x, dy)[0]
        if name not in ("sum", "mean"):  # whose gradient is an expanded dy
            assert_close(family._bwd_reference(dy, x.detach(), None, dims, keepdim, kind, param), expected, dim=None)
        half = x.detach().bfloat16()
        y = family.reduction_reference(half, dims, keepdim, kind, param, torch.bfloat16)
        assert_close(y, ALL[name](half.double(), dims, keepdim=keepdim), dim=None)


def test_cumsum_reference_is_torch(family):
    for shape, dim in (((6, 50), -1), ((4, 3, 5), 0), ((), 0)):
        x = tensor(shape, torch.float64)
        assert torch.equal(family.cumsum_reference(x, dim), x.cumsum(dim))
        flipped = x.flip(dim).cumsum(dim).flip(dim) if x.dim() else x
        assert torch.equal(family.cumsum_reference(x, dim, reverse=True), flipped)


@pytest.mark.kernels_ci
@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("dtype", DTYPES)
def test_matches_torch(hold, device, name, dtype):
    if dtype in (torch.float32, torch.float16):
        hold(name, values(name, (5, 7, 100), dtype, device))
    else:
        hold(name, values(name, (5, 7, 60), dtype, device), (0, 2), keepdim=True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_cumsum_matches_torch(family, device, dtype):
    for dim in (0, 1, -1):
        x = tensor((5, 37, 40), dtype, device)
        check(lambda x: family.cumsum(x, dim), lambda x: x.cumsum(dim), x, dim=dim)  # noqa: B023


@pytest.mark.parametrize("name", SOME)
@pytest.mark.parametrize("N", [1, 3, 127, 128, 129, 1000, 4097, 65537, 262144])
def test_widths(hold, device, name, N):
    """One row of the widest: shared by programs."""
    if N == 1 and name == "std":
        return  # no degrees of freedom: see test_moments
    hold(name, values(name, (1 if N > 20000 else 3, N), torch.float32, device))


@pytest.mark.parametrize("N", [1, 3, 127, 128, 129, 1000, 4097, 65537, 262144])
def test_widths_of_indices_and_scans(family, device, N):
    x = values("argmax", (1 if N > 20000 else 3, N), torch.float32, device)
    x[0, N // 3 :: 5] = 50.0
    assert torch.equal(family.argmax(x, 1), x.argmax(1)) and torch.equal(family.argmin(x, 1), x.argmin(1))
    x[0, N // 4 :] = NAN
    assert (family.argmax(x, 1)[0] == N // 4) and (family.argmin(x, 1)[0] == N // 4)
    x = tensor(x.shape, torch.float32, device)
    # The interpreter adds a tile up in one long chain, whose error is that of 4096 additions.
    check(lambda x: family.cumsum(x, 1), lambda x: x.cumsum(1), x, ulps=64)


def test_scans_of_three_splits(family, device, monkeypatch):
    """A program adds the sums of those before it, or after, and not what lies beside those."""
    monkeypatch.setattr(torch, "empty", amid(torch.empty))
    x = tensor((1, 24476), torch.float32, device)
    check(lambda x: family.cumsum(x, 1), lambda x: x.cumsum(1), x, ulps=64)  # as above


@pytest.mark.parametrize("name", ["norm inf", "std"])
@pytest.mark.parametrize(
    "shape, dim",
    [
        ((1000, 70), 0),  # dense across the rows, which programs share
        ((20, 3, 300), (0, 2)),  # two reduced groups, as of a channel
        ((2, 3, 5000), (0, 2)),  # the same, wider than a tile
        ((600, 3, 7), (0, 2)),  # many short runs
        ((2, 3, 4, 5, 6), (1, 3)),
        ((2, 3, 2, 3, 2, 3, 2), (0, 2, 4, 6)),  # does not collapse: copied
        ((40, 30), None),
        ((9, 1, 4), 1),
        ((6, 50), ()),
    ],
)
def test_shapes(hold, device, name, shape, dim):
    if name == "std" and shape == (9, 1, 4):
        return
    hold(name, values(name, shape, torch.float32, device), None if dim == () else dim)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(hold, family, device, layout):
    for name in ("amax", "std"):
        x = values(name, (6, 5, 40), torch.float32, device, layout)
        dy = tensor((6, 5), torch.float32, device, layout)
        hold(name, x, -1, [dy])
        hold(name, x, (0, -1), [dy[0]])
        hold(name, x.permute(0, 2, 1), 1, [dy[:1].expand(6, 5)])
    x = values("argmax", (6, 5, 40), torch.bfloat16, device, layout)
    assert torch.equal(family.argmax(x, 1), x.argmax(1)) and torch.equal(family.argmin(x), x.argmin())
    for dim in (0, 2):
        dy = tensor((6, 5, 40), torch.bfloat16, device, layout)
        check(lambda x: family.cumsum(x, dim), lambda x: x.cumsum(dim), x, dim=dim, grads=[dy])  # noqa: B023


@pytest.mark.parametrize("dtype", DTYPES)
def test_indices(family, device, dtype):
    x = values("argmax", (9, 4, 50), dtype, device)
    for name in INDICES:
        ours, theirs = getattr(family, name), getattr(torch, name)
        for dim in (0, 1, -1, None):
            for keepdim in (False, True):
                y = ours(x.requires_grad_(), dim, keepdim)
                assert y.dtype == torch.int64 and torch.equal(y, theirs(x, dim, keepdim)) and not y.requires_grad
        number = x[0, 0, 0]
        assert torch.equal(ours(number), theirs(number)) and torch.equal(ours(number, -1), theirs(number, -1))


def special_rows(N):
    x = torch.randn(9, N)
    x[0, 1], x[1, 2], x[2, N - 3] = NAN, INF, -INF
    x[3] = -INF
    x[4] = 0.0
    x[5, :2], x[5, 2] = INF, -INF
    x[6] = 2.0
    x[7, 3], x[7, N - 1] = INF, NAN
    x[8] = INF
    return x


@pytest.mark.parametrize(
    "N, name", [(N, name) for N in (40, 9000) for name in ((*(ALL if N == 40 else SOME), "cumsum", *INDICES))]
)
def test_special_values(function, device, N, name):
    """NaN, inf and rows of one value: the same as torch, in results and gradients."""
    ours, theirs = function(name), ALL.get(name) or getattr(torch, name)
    x = special_rows(N).requires_grad_()
    mine = x.detach().to(device).requires_grad_()
    for dim, leaf in ((1, mine), (0, mine.t())) if N < 100 else ((1, mine),):
        y, expected = ours(leaf, dim), theirs(x, 1)
        y = y.t() if y.dim() > 1 and dim == 0 else y
        if name in INDICES:
            assert torch.equal(y.cpu(), expected)
            continue
        atol = 1e-3 if name == "cumsum" else 1e-5  # sums that cancel
        torch.testing.assert_close(y.cpu(), expected, rtol=2e-4, atol=atol, equal_nan=True)
        # The gradient of a variance that is NaN is NaN or inf here and there: in torch's order of operations.
        rows = [4, 6] if name in ("var", "std") else range(9)
        (dx,), (want,) = torch.autograd.grad(y.sum(), mine), torch.autograd.grad(expected.sum(), x)
        torch.testing.assert_close(dx.cpu()[rows], want[rows], rtol=2e-4, atol=1e-5, equal_nan=True)


def test_empty(family, device):
    x = torch.empty(3, 0, device=device).requires_grad_()
    for name, expected in dict(sum=0.0, mean=NAN, var=NAN, std=NAN, logsumexp=-INF, vector_norm=0.0).items():
        y = getattr(family, name)(x, dim=1)
        assert torch.equal(y.cpu().nan_to_num(7.0), torch.full((3,), expected).nan_to_num(7.0)), name
        assert torch.autograd.grad(y.sum(), x)[0].shape == (3, 0)
        y = getattr(family, name)(x, dim=0, keepdim=True)
        assert y.shape == (1, 0) and torch.autograd.grad(y.sum(), x)[0].shape == (3, 0)
    assert family.cumsum(x, 1).shape == (3, 0) and family.argmax(x, 0).shape == (0,) == family.amin(x, 0).shape
    for name, call in {
        "amax": lambda: family.amax(x, 1),
        "amin": lambda: family.amin(x),
        "argmax": lambda: family.argmax(x, 1),
        "argmin": lambda: family.argmin(x),
        "vector_norm": lambda: family.vector_norm(x, INF, 1),
    }.items():
        with pytest.raises(ValueError, match=f"{name}: x must have elements to reduce, got shape .3, 0."):
            call()


@pytest.mark.parametrize("M, N", [(2, 100), (2, 9000), (1, 20000)])
def test_moments(hold, family, device, M, N):
    """A mean far larger than the spread costs no digits, first element near the mean or not."""
    x = 1e4 + 1e-3 * torch.randn(M, N, dtype=torch.float64)
    x[-1, 0] += 0.004  # four standard deviations
    for name in ("var", "std"):
        hold(name, x.float().to(device))
    x[-1, 0] += 5.0
    x = x.float().to(device)
    for correction in (0, 0.5, 3):
        found = family.var(x, 1, correction=correction)
        assert_close(found, torch.var(x.double(), 1, correction=correction), dim=None)
    one = x[:, :1].clone().requires_grad_()
    y = family.var(one, 1)
    assert y.isnan().all() and torch.autograd.grad(y.sum(), one)[0].isnan().all()
    assert torch.equal(family.std(one, 1, correction=0), torch.zeros(M, device=device))
    few = torch.randn(3, 4, device=device)
    for correction in (3, 3.5, 4, 9):  # as many as there are degrees of freedom, and more
        for name in ("var", "std"):
            ours, theirs = few.clone().requires_grad_(), few.cpu().double().requires_grad_()
            (y, oracle) = (getattr(f, name)(t, 1, correction=correction) for f, t in ((family, ours), (torch, theirs)))
            assert_close(y, oracle)
            grads = (torch.autograd.grad(t.sum(), leaf)[0] for t, leaf in ((y, ours), (oracle, theirs)))
            assert_close(*grads)


def test_logsumexp_of_large_values(family, device):
    x = torch.full((2, 5000), 1e4, device=device).requires_grad_()
    y = family.logsumexp(x, 1)
    assert_close(y, torch.logsumexp(x.double(), 1))
    assert_close(torch.autograd.grad(y.sum(), x)[0], torch.full((2, 5000), 1 / 5000.0))


def test_sums_do_not_overflow_halves(family, device):
    x = torch.full((3, 5000), 6e4, dtype=torch.float16, device=device)
    assert (family.mean(x, 1) == x[:, 0]).all() and family.sum(x, 1).isinf().all()
    assert_close(family.sum(x, 1, dtype=torch.float32), x.double().sum(1))
    ones = torch.ones(70000, dtype=torch.bfloat16, device=device)
    assert family.sum(ones).item() == 70144  # 70000 in bfloat16; a sum in bfloat16 stops at 256
    assert family.cumsum(ones, 0)[-1].item() == 70144


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64])
def test_integers(family, device, dtype):
    x = torch.randint(0, 2 if dtype == torch.bool else 100, (5, 300)).to(dtype).to(device)
    if dtype.is_signed:
        x = x - 99  # not what a masked load leaves, in max or min
        x[0, :2] = torch.iinfo(dtype).min
    for dim in (0, 1, None):
        every = () if dim is None else dim
        for name in ("amax", "amin"):
            assert torch.equal(getattr(family, name)(x, dim), getattr(torch, name)(x, every)), name
        assert torch.equal(family.sum(x, dim), torch.sum(x, every)) and family.sum(x, dim).dtype == torch.int64
        for name in INDICES if dtype != torch.bool else ():
            assert torch.equal(getattr(family, name)(x, dim), getattr(torch, name)(x, dim)), name
    assert torch.equal(family.cumsum(x, 1), x.cumsum(1)) and torch.equal(family.cumsum(x, 0), x.cumsum(0))
    assert_close(family.logsumexp(x, 1), torch.logsumexp(x.double(), 1))
    assert_close(family.mean(x, 1, dtype=torch.float32), x.double().mean(1))


def test_dtype(family, device):
    x = tensor((3, 50), torch.bfloat16, device)
    for name in ("sum", "mean", "vector_norm", "cumsum"):
        ours, theirs = getattr(family, name), getattr(torch.linalg if name == "vector_norm" else torch, name)
        for dtype in (torch.float32, torch.float64):
            (y,) = check(lambda x: ours(x, dim=1, dtype=dtype), lambda x: theirs(x, dim=1), x, dim=None)  # noqa: B023
            assert y.dtype == dtype
        narrow = ours(x.float(), dim=1, dtype=torch.float16)
        assert torch.equal(narrow, ours(x.half(), dim=1))
    assert torch.equal(family.sum(x, 1, dtype=torch.int64), x.long().sum(1))


def test_deterministic_and_the_same_without_gradients(function, device):
    for name in SOME:
        x = values(name, (1, 20000), torch.float32, device)
        y = function(name)(x, 1)
        assert torch.equal(y, function(name)(x, 1)), name
        with torch.no_grad():
            assert torch.equal(y, function(name)(x, 1)), name


def test_far_rows(family, device):
    if device.type == "cpu":
        pytest.skip("4 GiB of memory: on a GPU only")
    x = torch.zeros(2**31 + 5000, dtype=torch.bfloat16, device=device)
    x[-100], x[-90] = 3.0, 3.0
    assert family.sum(x).item() == 6.0 and family.argmax(x).item() == 2**31 + 4900
    assert family.cumsum(x.view(torch.int16) // 16448, 0)[-1].item() == 2


def test_far_strides(family, device, tmp_path):
    wide = vast(2**31 + 64, device, tmp_path).as_strided((2, 64), (2**31, 1))
    wide.copy_(torch.randn(2, 64))
    for dim in (0, 1):
        assert torch.equal(family.var(wide, dim), family.var(wide.contiguous(), dim))


def test_far_columns(family, device, tmp_path):
    """Elements of a row that lie past 2^31 elements, in one dimension and in two."""
    room = 2**31 // 39 + 8
    for shape, strides, dims in (((3, 40), (1, room), 1), ((40, 3, 2), (room, 2, 1), (0, 2))):
        far = vast(40 * room, device, tmp_path).as_strided(shape, strides)
        far.copy_(torch.randn(shape))
        near = far.contiguous()
        for of in (family.sum, family.amax, family.var):
            assert_close(of(far, dims), of(near.double(), dims))
    assert_close(family.cumsum(far, 0), family.cumsum(near.double(), 0), dim=0)


def test_bad_input(family, device):
    x = tensor((4, 8), torch.float32, device)
    floats = "float64 | float32 | float16 | bfloat16"
    cases = [
        (TypeError, "sum: x must be a tensor, got list", lambda: family.sum([1.0])),
        (TypeError, f"sum: x must have dtype {floats}, got complex64", lambda: family.sum(x.cfloat())),
        (TypeError, "amax: x must be a strided tensor", lambda: family.amax(x.to_sparse())),
        (TypeError, f"mean: x must have dtype {floats}, got int64", lambda: family.mean(x.long())),
        (TypeError, f"var: x must have dtype {floats}, got int64", lambda: family.var(x.long())),
        (TypeError, f"argmax: x must have dtype {floats}, got bool", lambda: family.argmax(x > 0)),
        (TypeError, f"mean: dtype must be {floats} or None, got torch.int8", lambda: family.mean(x, dtype=torch.int8)),
        (TypeError, "sum: dim must be an int, a tuple of them or None, got 1.0", lambda: family.sum(x, 1.0)),
        (TypeError, "sum: dim must be an int, a tuple of them or None, got True", lambda: family.sum(x, True)),
        (TypeError, "argmax: dim must be an int or None, got tuple", lambda: family.argmax(x, (0, 1))),
        (TypeError, "cumsum: dim must be an int, got NoneType", lambda: family.cumsum(x, None)),
        (ValueError, "sum: dim must be in -2 to 1 for x (4, 8), got (0, 2)", lambda: family.sum(x, (0, 2))),
        (ValueError, "sum: dim must be in -1 to 0 for x (), got 1", lambda: family.sum(x[0, 0], 1)),
        (ValueError, "amin: dim must name each dimension once, got (0, -2)", lambda: family.amin(x, (0, -2))),
        (TypeError, "std: correction must be a number, got NoneType", lambda: family.std(x, correction=None)),
        (TypeError, "vector_norm: ord must be a number, got str", lambda: family.vector_norm(x, "fro")),
    ]  # fmt: skip
    for error, message, call in cases:
        with pytest.raises(error) as caught:
            call()
        assert str(caught.value).startswith(message), str(caught.value)


def test_layout(internals):
    """Dimensions merge where all operands step evenly, and are taken in the order of memory."""
    layout_of = internals("_reductions").layout_of
    assert layout_of((2, 3, 4), (-1,), (12, 4, 1))[:5] == (1, 1, 6, 1, 4)
    assert layout_of((2, 3, 4), (-3, -1), (12, 4, 1))[:5] == (1, 1, 3, 2, 4)
    assert layout_of((2, 3, 4), (-3, -2), (1, 2, 6))[:5] == (1, 1, 4, 1, 6)
    assert layout_of((), (), ())[:5] == (1, 1, 1, 1, 1)
    assert layout_of((2,) * 7, (-7, -5, -3, -1), tuple(2**i for i in range(7))) is None
    for M, N in ((1, 10**6), (10**6, 3), (3, 10**6), (64, 64)):
        for strides in ((0, 0, N, 0, 1), (0, 0, 1, 0, M)):
            layout = internals("_reductions").Layout(1, 1, M, 1, N, (strides,))
            plans = [internals("_reductions").plan_tiles(layout, 132, 32)]
            plans += [internals("_reductions").plan_reduction(layout, 2, 132, 16, kind) for kind in ("sum", "max")]
            for plan, steps, split_steps, splits in plans:
                assert plan.BLOCK_M * plan.BLOCK_N <= 16384 and steps * plan.BLOCK_N >= N and plan.num_warps <= 16
                assert (splits - 1) * split_steps < steps <= splits * split_steps  # none is without elements


def test_opcheck(family, device):
    x = tensor((3, 4, 40), torch.float32, device).requires_grad_()
    across = tensor((3, 40), torch.bfloat16, device, "transposed").requires_grad_()
    number = tensor((), torch.float32, device).requires_grad_()
    for kind, param in (("sum", 0.0), ("amax", 0.0), ("std", 1.0), ("logsumexp", 0.0), ("norm_2", 2.0)):
        opcheck(family.reduction_fwd, (x, [-3, -1], True, kind, param, torch.float32, True))
        opcheck(family.reduction_fwd, (across, [-2], False, kind, param, torch.float64, True))
        opcheck(family.reduction_fwd, (x[:0], [-1], False, kind, param, torch.float32, False))
    opcheck(family.reduction_fwd, (number, [], False, "logsumexp", 0.0, torch.float32, True))
    opcheck(family.reduction_fwd, (x.detach(), [-1], False, "argmax", 0.0, torch.int64, True))
    opcheck(family.cumsum_fwd, (across, -2, torch.float32, False))
    opcheck(family.cumsum_fwd, (x, -1, torch.float32, True))
    y, stats = family.reduction_fwd(x.detach(), [-3, -1], False, "logsumexp", 0.0, torch.float32, True)
    opcheck(family.reduction_bwd, (y, x, stats, [-3, -1], False, "logsumexp", 0.0))


def test_direct_launch_is_the_op(family, device, on_kernels):
    if not on_kernels:
        pytest.skip("no kernels on this path")
    x = tensor((5, 300), torch.bfloat16, device).requires_grad_()
    for name in ("sum", "amax", "var", "logsumexp"):
        y = getattr(family, name)(x, 1)
        registered = family.reduction_fwd(x, [-1], False, name, 1.0, x.dtype, True)[0]
        assert torch.equal(y, registered)
        dy = torch.randn_like(y)
        assert torch.equal(torch.autograd.grad(y, x, dy)[0], torch.autograd.grad(registered, x, dy)[0])
    assert torch.equal(family.cumsum(x, 1), family.cumsum_fwd(x, -1, x.dtype, False))


def test_compile(family, device, backend):
    def step(x):
        y = family.cumsum(family.var(x * 2, 0), 0, dtype=torch.float32)
        return family.logsumexp(y) + family.argmax(y)

    x = tensor((4, 64), torch.float32, device).requires_grad_()
    compiled = torch.compile(step, fullgraph=True, backend=backend)
    expected, found = step(x), compiled(x)
    assert_close(found, expected.double())
    assert_close(torch.autograd.grad(found, x)[0], torch.autograd.grad(expected, x)[0].double(), ulps=32)


@pytest.mark.parametrize("name", [*ALL, "cumsum"])
def test_transforms(function, device, name):
    ours, theirs = function(name), ALL.get(name) or torch.cumsum
    x = tensor((2, 3), torch.float64, device).requires_grad_()
    dim = 0 if name == "cumsum" else (0, 1)
    assert gradcheck(ours, (x, 0)) and gradgradcheck(ours, (x, dim))
    x = x.detach()
    batch = torch.stack([x, 2 * x, 3 * x], 1)

    def loss(f):
        return lambda x: f(x, -1).pow(3).sum()

    per_sample = torch.func.vmap(torch.func.grad(loss(ours)), 1)(batch)
    assert_close(per_sample, torch.func.vmap(torch.func.grad(loss(theirs)), 1)(batch), dim=None)
    assert torch.equal(torch.func.vmap(lambda x: ours(x, 0), 1)(batch)[1], ours(2 * x, 0))
    if name not in ("var", "std"):
        numbers = torch.func.vmap(lambda x: ours(x, 0))(x[0])  # each is a row of one, not the batch a row
        assert_close(numbers, x[0].abs() if name.startswith("norm") else x[0], dim=None)
    assert_close(torch.func.jacrev(lambda x: ours(x, 1))(x), torch.func.jacrev(lambda x: theirs(x, 1))(x), dim=None)


def test_forward_mode_is_refused_not_lost(family, device, on_kernels):
    if not on_kernels:
        pytest.skip("PyTorch's own forward mode serves this path")
    x = tensor((2, 3), torch.float32, device)
    with pytest.raises(NotImplementedError):
        torch.func.jvp(lambda x: family.sum(x, -1), (x,), (x,))
