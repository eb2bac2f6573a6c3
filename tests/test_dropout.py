import pytest
import torch
import torch.nn.functional as F
from _inputs import LAYOUTS, few, tensor
from _numerics import DTYPES, assert_close, check, evaluate, gradcheck, gradgradcheck, opcheck

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of the NaN and inf that are meant

NAN, INF = float("nan"), float("inf")


@pytest.fixture(scope="module")
def family(internals):
    return internals("dropout")


@pytest.fixture
def hold(family):
    """Hold dropout, or dropout_add where there is a residual, and all gradients against the reference in float64."""

    def hold(x, residual=None, p=0.3, seed=11, grads=None):
        number = torch.tensor(seed)
        if residual is None:
            y = check(
                lambda x: family.dropout(x, p, seed=seed),
                lambda x: family.dropout_reference(x, number, p),
                x,
                grads=grads,
            )[0]
        else:
            y = check(
                lambda x, r: family.dropout_add(x, r, p, seed=seed),
                lambda x, r: family.dropout_add_reference(x, r, number, p),
                x,
                residual,
                grads=grads,
            )[0]
        assert y.dtype == (x.dtype if residual is None else torch.promote_types(x.dtype, residual.dtype))
        return y

    return hold


def philox(seed, draw):
    """Philox 4x32-10 in Python's integers: the four words of a draw."""
    word = 2**32 - 1
    c = [draw & word, draw >> 32, 0, 0]
    k0, k1 = seed & word, (seed >> 32) & word
    for i in range(10):
        a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        keys = (k0 + i * 0x9E3779B9) & word, (k1 + i * 0xBB67AE85) & word
        c = [(b >> 32) ^ c[1] ^ keys[0], b & word, (a >> 32) ^ c[3] ^ keys[1], a & word]
    return c


def kept(seed, p, indices):
    return [philox(seed, i // 4)[i % 4] >= round(p * 2**32) for i in indices]


# The reference first: it is the oracle of everything below.


def test_philox(family):
    assert philox(0, 0) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]  # the known answer of its authors
    for seed in (0, 1, -1, 2**63 - 1, -(2**63), 0x123456789ABCDEF):
        words = family._words(4097, torch.tensor(seed)).tolist()
        assert words == [w for draw in range(1025) for w in philox(seed, draw)][:4097]


def test_reference_is_torch_given_the_mask(family):
    x, r, seed = tensor((5, 7), torch.float64), tensor((5, 7), torch.float64), torch.tensor(3)
    mask = torch.tensor(kept(3, 0.3, range(35))).view(5, 7)
    assert_close(family.dropout_reference(x, seed, 0.3), x * mask / 0.7)
    assert_close(family.dropout_add_reference(x, r, seed, 0.3), x * mask / 0.7 + r)


@pytest.mark.parametrize("seed", [0, 1, -1, 2**63 - 1, -(2**63), 2**32])
@pytest.mark.parametrize("shape", [(5, 7), (37,), (3, 36)])
def test_mask_follows_from_seed_and_index(family, device, seed, shape):
    """The same on every path and for every layout, and as long as the 32 bits of a word allow in p."""
    for layout, p in (("contiguous", 0.1), ("transposed", 0.5), ("columns_sliced", 0.999)):
        x = tensor(shape, torch.float32, device, layout).fill_(1)
        y = family.dropout(x, p, seed=seed)
        assert (y != 0).flatten().tolist() == kept(seed, p, range(x.numel()))
    assert torch.equal(y, family.dropout(x, p, seed=torch.tensor([[seed]], device=device)))


def test_mask_beyond_32_bits(family, device):
    if device.type == "cpu":
        pytest.skip("8 GB of values")
    x = torch.ones(2**32 + 4096, dtype=torch.bfloat16, device=device)
    y = family.dropout(x, 0.5, seed=5)
    for start in (0, 2**31 - 8, 2**31 + 8, 2**32 + 8):
        assert (y[start : start + 64] != 0).tolist() == kept(5, 0.5, range(start, start + 64))
    del y
    wide = x.as_strided((3, 64), (2**31, 7))
    assert torch.equal(family.dropout(wide, 0.5, seed=5), family.dropout(wide.contiguous(), 0.5, seed=5))


@pytest.mark.kernels_ci
@pytest.mark.parametrize("dtype", DTYPES)
def test_matches_reference(hold, device, dtype):
    x = tensor((5, 7, 36), dtype, device, scale=3.0)
    hold(x)
    hold(x, tensor((5, 7, 36), dtype, device))
    for other in (torch.float32, torch.bfloat16, torch.float64):
        hold(x, tensor((5, 7, 36), other, device))


@pytest.mark.parametrize("N", [1, 3, 127, 128, 129, 1000, 2049, 65537])
def test_sizes(hold, device, N):
    y = hold(tensor((N,), torch.float32, device))
    if N > 1000:
        rate = (y == 0).float().mean().item()
        assert abs(rate - 0.3) < 5 * (0.3 * 0.7 / N) ** 0.5


@pytest.mark.parametrize("shape", [(), (1, 1), (0,), (3, 0), (0, 4), (2, 0, 3)])
def test_scalar_and_empty(hold, device, shape):
    hold(tensor(shape, torch.float32, device))
    hold(tensor(shape, torch.float32, device), tensor(shape, torch.float32, device))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", few([(6, 70), (2, 1, 40), (3, 5, 4, 36)]))
def test_strides(hold, device, layout, shape):
    x, plain = tensor(shape, torch.float32, device, layout), tensor(shape, torch.float32, device)
    expected = hold(x.contiguous())
    for dy in (plain, tensor(shape, torch.float32, device, layout)):
        y = hold(x, grads=[dy])
        assert torch.equal(y, expected) and y.stride() == torch.empty_like(x).stride()
        hold(plain, x, grads=[dy])
        hold(x, dy)


def test_tiles(hold, device):
    """More than one tile of rows and of columns, with the draws along rows, across them, and cut by their ends."""
    for N in (1028, 1025):
        hold(tensor((5, N), torch.float32, device, "rows_sliced"))
        hold(tensor((5, N), torch.float32, device, "columns_sliced"))
    hold(tensor((80, 68), torch.float32, device, "transposed"))
    hold(tensor((80, 67), torch.float32, device, "transposed"))
    hold(tensor((2, 8, 5, 5), torch.float32, device).to(memory_format=torch.channels_last))


def test_many_permuted_dimensions(hold, device):
    """More dimensions that do not merge than the kernel walks: copied, once."""
    shape = (2, 3, 2, 3, 2, 4)
    x, dy = tensor(shape, torch.float32, device), tensor(shape, torch.float32, device, "transposed")
    y = hold(dy[..., ::2], x[..., ::2], grads=[x[..., ::2]])
    assert y.stride() == torch.empty_like(dy[..., ::2]).stride()


def test_ends_of_p(family, device):
    x = tensor((4, 9), torch.float32, device).requires_grad_()
    x.data[0, 0], x.data[1, 1], x.data[2, 2] = NAN, INF, -INF
    r = tensor((4, 9), torch.float32, device)
    for call in (
        lambda: family.dropout(x, 0.0),
        lambda: family.dropout(x, 0.5, False),
        lambda: family.dropout(x, 1, False),
    ):
        assert call() is x
    assert torch.equal(family.dropout_add(r, r, 0), r + r) and torch.equal(family.dropout_add(r, r, 0.5, False), r + r)
    for y, rest in ((family.dropout(x, 1.0), torch.zeros_like(r)), (family.dropout_add(x, r, 1), r)):
        assert torch.equal(y, rest)  # NaN and inf are dropped too
        (dx,) = torch.autograd.grad(y, x, torch.full_like(y, INF))
        assert torch.equal(dx, torch.zeros_like(dx))
    p = philox(6, 0)[0] / 2**32  # the first word itself: kept, and dropped by the next larger p
    one = torch.ones(1, dtype=torch.float64, device=device)
    assert family.dropout(one, p, seed=6).all() and not family.dropout(one, p + 2**-32, seed=6).any()
    for p in (1e-12, 1 - 1e-12):  # finer than a word
        y = family.dropout(torch.ones(1000, device=device, dtype=torch.float64), p, seed=1)
        assert (y == (0 if p > 0.5 else 1 / (1 - p))).all()


def test_special_values(family, device):
    """What is kept stays NaN or inf, what is dropped is 0, forward and backward."""
    x = torch.tensor([NAN, INF, -INF, 1.0] * 25, device=device)
    mask = torch.tensor(kept(9, 0.5, range(100)), device=device)
    (y,), (dx,) = evaluate(lambda x: family.dropout(x, 0.5, seed=9), (torch.ones_like(x),), {}, [x])
    for found in (family.dropout(x, 0.5, seed=9), dx):
        assert torch.equal(found.nan_to_num(7.0), torch.where(mask, 2 * x, 0.0).nan_to_num(7.0))


def test_rate_and_independence(family, device):
    """Each share of kept pairs lies within 5 standard deviations of what independent draws give."""
    n = 60000
    ones = torch.ones(n, device=device)
    for p in (0.1, 0.5, 0.9):
        a, b = (family.dropout(ones, p, seed=seed) != 0 for seed in (1, 2))
        q = 1 - p
        for both in (
            *(a[lag:] & a[:-lag] for lag in (1, 2, 3, 4, 8, 64, 256, 1024, 2048, 4096)),
            a & b,  # neighbouring seeds
            *(a[i::4] & a[(i + 1) % 4 :: 4] for i in range(4)),  # words of a draw
        ):
            rate = both.double().mean().item()
            assert abs(rate - q * q) < 5 * (q * q * (1 - q * q) / both.numel()) ** 0.5
        for i in range(4):
            assert abs(a[i::4].double().mean().item() - q) < 5 * (p * q / (n // 4)) ** 0.5


def test_follows_the_generator(family, device):
    x = torch.ones(200, device=device)
    torch.manual_seed(5)
    first, second = family.dropout(x), family.dropout(x)
    torch.manual_seed(5)
    assert torch.equal(family.dropout(x), first) and torch.equal(family.dropout(x), second)
    assert not torch.equal(first, second)


def test_checkpoint_replays(family, device):
    from torch.utils.checkpoint import checkpoint

    x = torch.ones(300, device=device, requires_grad=True)
    y = checkpoint(lambda x: family.dropout(x * 1, 0.5) * x, x, use_reentrant=False)
    (dx,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(dx, 2 * y)  # y = m x^2


def test_backward_replays(family, device):
    x, r = (torch.ones(40, 30, device=device, requires_grad=True) for _ in range(2))
    y = family.dropout_add(x, r, 0.5)
    dx, dr = torch.autograd.grad(y, (x, r), torch.ones((), device=device).expand(40, 30), retain_graph=True)
    assert torch.equal(dx, y - 1) and torch.equal(dr, torch.ones_like(r))
    again = torch.autograd.grad(y, x, torch.ones_like(y))[0]
    assert torch.equal(again, dx) and again.data_ptr() != dx.data_ptr()


def test_cuda_graph(family, device):
    if device.type != "cuda":
        pytest.skip("CUDA graphs")
    x = torch.ones(5000, device=device)
    family.dropout(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = family.dropout(x)
    graph.replay()
    first = y.clone()
    graph.replay()
    assert not torch.equal(first, y) and 0.4 < (y == 0).float().mean() < 0.6


def test_bad_input(family, device):
    x = tensor((4, 8), torch.float32, device)
    meta, short = torch.zeros((), dtype=torch.int64, device="meta"), torch.zeros((), dtype=torch.int32)
    cases = [
        (TypeError, "x must be a tensor, got list", [1.0], {}),
        (TypeError, "x must have dtype float64 | float32 | float16 | bfloat16, got int64", x.long(), {}),
        (ValueError, "p must be in [0, 1], got -0.1", x, {"p": -0.1}),
        (ValueError, "p must be in [0, 1], got 1.5", x, {"p": 1.5}),
        (ValueError, "p must be in [0, 1], got nan", x, {"p": NAN, "training": False}),
        (TypeError, "p must be a number, got Tensor", x, {"p": x}),
        (TypeError, "training must be True or False, got 0", x, {"training": 0}),
        (TypeError, "seed must be an int, an int64 tensor or None, got float", x, {"seed": 0.5}),
        (TypeError, "seed must be an int, an int64 tensor or None, got bool", x, {"seed": True}),
        (TypeError, "seed must have dtype int64, got int32", x, {"seed": short}),
        (ValueError, "seed must have one element, got shape (2,)", x, {"seed": torch.tensor([1, 2])}),
        (ValueError, "seed must be on", x, {"seed": meta}),
        (ValueError, "seed must fit in 64 bits, got 9223372036854775808", x, {"seed": 2**63}),
    ]
    for error, message, bad, options in cases:
        for name, others in (("dropout", ()), ("dropout_add", (x,))):
            with pytest.raises(error) as caught:
                getattr(family, name)(bad, *others, **options)
            assert str(caught.value).startswith(f"{name}: {message}")
    for error, message, residual in (
        (ValueError, "dropout_add: residual must have shape (4, 8), got (8,)", x[0]),
        (TypeError, "dropout_add: residual must be a tensor, got NoneType", None),
        (TypeError, "dropout_add: residual must have dtype", x.int()),
    ):
        with pytest.raises(error) as caught:
            family.dropout_add(x, residual)
        assert str(caught.value).startswith(message)


@pytest.mark.parametrize("layout", ["contiguous", "transposed", "columns_sliced", "expanded"])
def test_opcheck(family, device, layout):
    x = tensor((3, 5, 4), torch.float32, device, layout).requires_grad_()
    r = tensor((3, 5, 4), torch.bfloat16, device).requires_grad_()
    seed = torch.tensor(4, device=device)
    opcheck(family.dropout_fwd, (x, None, seed, 0.5, torch.float32))
    opcheck(family.dropout_fwd, (r, x, seed, 0.5, torch.float32))


def test_direct_launch_is_the_op(family, device):
    x = tensor((5, 300), torch.bfloat16, device).requires_grad_()
    r, seed = tensor((5, 300), torch.float32, device), torch.tensor(4, device=device)
    direct = family.dropout_add(x, r, 0.5, seed=seed)
    op = family.dropout_fwd(x, r, seed, 0.5, torch.float32)
    assert torch.equal(direct, op)
    assert torch.equal(*(torch.autograd.grad(y, x, r)[0] for y in (direct, op)))


def test_compile(family, device, backend):
    def step(x, r, seed):
        y = family.dropout_add(family.dropout(x * 2, 0.2, seed=seed), r, 0.5, seed=3)
        return y.t().sum(1)

    x, r = (tensor((8, 16), torch.float32, device).requires_grad_() for _ in range(2))
    seed = torch.tensor(4, device=device)
    dy = torch.randn(16, device=device)
    (y,), grads = evaluate(lambda x, r: step(x, r, seed), (x, r), {}, [dy])
    (z,), found = evaluate(
        lambda x, r: torch.compile(step, fullgraph=True, backend=backend)(x, r, seed), (x, r), {}, [dy]
    )
    for a, b in zip((y, *grads), (z, *found)):
        assert_close(b, a.double(), dim=None)


def test_compile_draws(family, device, backend):
    """A mask a call, the same in the backward, from torch's generator."""
    x = torch.ones(64, 16, device=device, requires_grad=True)
    step = torch.compile(lambda x: family.dropout(x * 1, 0.5), fullgraph=True, backend=backend)
    torch.manual_seed(1)
    first, second = step(x), step(x)
    torch.manual_seed(1)
    assert torch.equal(first, step(x)) and not torch.equal(first, second)
    for y in (first, second):
        assert torch.equal(torch.autograd.grad(y, x, torch.ones_like(y))[0], y)


def test_derivatives(family, device):
    x, r = (tensor((2, 5), torch.float64, device).requires_grad_() for _ in range(2))
    for function, inputs in (
        (lambda x: family.dropout(x, 0.4, seed=1).square(), (x,)),
        (lambda x, r: family.dropout_add(x, r, 0.4, seed=1).square(), (x, r)),
    ):
        assert gradcheck(function, inputs) and gradgradcheck(function, inputs)


def test_transforms(family, device):
    x = tensor((3, 5, 4), torch.float64, device)
    one = family.dropout(torch.ones_like(x[0]), 0.5, seed=2)

    def loss(x):
        return family.dropout(x, 0.5, seed=2).pow(3).sum()

    assert_close(torch.func.grad(loss)(x[0]), 3 * one * (one * x[0]).square())
    assert_close(torch.func.vmap(torch.func.grad(loss))(x), 3 * one * (one * x).square())
    across = torch.func.vmap(lambda x: family.dropout(x, 0.5, seed=2), 1, 1)(x.transpose(0, 1))
    assert torch.equal(across.transpose(0, 1), one * x)
    draw = torch.func.vmap(family.dropout, randomness="same")(torch.ones_like(x))
    assert torch.equal(draw[0], draw[1]) and torch.equal(draw[0], draw[2])
    draw = torch.func.vmap(family.dropout, randomness="different")(torch.ones(3, 100, device=device))
    assert not torch.equal(draw[0], draw[1])
    with pytest.raises(RuntimeError, match="randomness"):
        torch.func.vmap(family.dropout)(x)


def test_forward_mode_is_refused_not_lost(family, device):
    x = tensor((2, 3), torch.float32, device)
    with pytest.raises((NotImplementedError, RuntimeError)):
        torch.func.jvp(lambda x: family.dropout(x, seed=1), (x,), (x,))


def test_torch_agrees_on_the_scale(family, device):
    x = torch.ones(4000, device=device)
    assert family.dropout(x, 0.1).max() == F.dropout(x, 0.1).max()
