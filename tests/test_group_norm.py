import pytest
import torch
from _inputs import LAYOUTS, tensor
from _numerics import DTYPES, assert_close, check, evaluate, gradcheck, gradgradcheck, opcheck


@pytest.fixture(scope="module")
def family(internals):
    return internals("group_norm")


@pytest.fixture(scope="module")
def pair(family):
    """The function and its reference, with weight and bias by position, so that both are differentiated."""
    return by_position(family.group_norm), by_position(family.group_norm_reference)


def by_position(function):
    return lambda x, weight=None, bias=None, *, groups=2, **kw: function(x, groups, weight, bias, **kw)


@pytest.fixture(params=["fused", "shares"])
def way(request, family, monkeypatch, on_kernels):
    """Both ways through the kernels, in tiles that are small beside the tensor."""
    if not on_kernels and request.param == "shares":
        pytest.skip("no kernels on this path")
    plan = family._plan

    def small(*args):
        fused, BLOCK_S = request.param == "fused", min(plan(*args).BLOCK_S, 16)
        return family.GroupPlan(fused, 2 if fused else 4, BLOCK_S, 2 * BLOCK_S, 1)

    monkeypatch.setattr(family, "_plan", small)
    return request.param


def drawn(shape, dtype, device, channels_last=False):
    x = tensor(shape, dtype, device)
    return x.contiguous(memory_format=torch.channels_last) if channels_last else x


def over(x):
    return tuple(range(1, x.dim()))


# The reference first: it is the oracle of everything below.


@pytest.mark.parametrize("shape", [(2, 12, 5, 7), (3, 12), (2, 12, 33), (2, 12, 2, 3, 4)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_reference_is_torch(pair, dtype, shape):
    tensors = tensor(shape, dtype), tensor((12,), dtype), tensor((12,), dtype)
    dy = torch.randn_like(tensors[0])
    torchs = by_position(torch.nn.functional.group_norm)
    (y,), grads = evaluate(pair[1], tensors, {}, [dy])
    (t,), theirs = evaluate(torchs, tensors, {}, [dy])
    assert_close(y, t.double(), dim=over(y))
    for g, h in zip(grads, theirs):
        assert_close(g, h.double(), dim=None)
    silu = torch.nn.functional.silu(t)
    assert_close(pair[1](*tensors, activation="silu"), silu.double(), dim=over(y))


@pytest.mark.kernels_ci
@pytest.mark.parametrize("dtype, activation", list(zip(DTYPES, (None, "silu", None, "silu"))))
@pytest.mark.parametrize("channels_last", [False, True])
def test_matches_reference(pair, way, device, dtype, activation, channels_last):
    x = drawn((2, 6, 5, 7), dtype, device, channels_last)
    w, b = tensor((6,), dtype, device), tensor((6,), dtype, device)
    (y,) = check(*pair, x, w, b, dim=over(x), activation=activation)
    assert y.is_contiguous(memory_format=torch.channels_last if channels_last else torch.contiguous_format)
    if activation is None:
        check(*pair, x, dim=over(x), eps=0.1)


@pytest.mark.parametrize("shape", [(2, 4), (1, 4, 1, 1), (2, 12, 3), (2, 12, 129), (2, 8, 3, 3, 3), (3, 4, 1000)])
@pytest.mark.parametrize("groups", [1, 4])
def test_shapes(pair, device, shape, groups):
    x, w, b = (tensor(s, torch.float32, device) for s in (shape, shape[1:2], shape[1:2]))
    # A group of one element: dx cancels to 0; what is left is the rounding of larger terms.
    slack = 1e-3 if x[0].numel() == groups else 0.0
    check(*pair, x, w, b, dim=over(x), groups=groups, slack=slack)


@pytest.mark.parametrize("shape", [(1, 2, 65537), (2, 6, 100, 110), (1, 1, 300, 310)])
def test_large_groups(pair, device, shape):
    """Wider than a program takes: the plan's own ways, one program a group and shares of it."""
    x = tensor(shape, torch.float32, device)
    w = tensor(shape[1:2], torch.float32, device) if shape[1] > 1 else None  # torch's own dw is 1e-3 off on the CPU
    check(*pair, x, w, dim=over(x), groups=1)


@pytest.mark.parametrize("channels_last", [False, True])
def test_plan(family, internals, device, channels_last):
    for multiprocessors in (2, 132):
        facts = internals("_device").Device(multiprocessors, 16, 65536)
        for batch, C, S, groups in (
            (1, 128, 512 * 512, 32),
            (16, 320, 64 * 64, 32),
            (2, 1280, 64, 32),
            (1, 1, 10**7, 1),
        ):
            plan = family._plan(batch, C, S, groups, channels_last, facts)
            assert plan.num_warps <= 16
            assert plan.BLOCK_C * plan.BLOCK_S in (2048, 4096, 8192) or plan.BLOCK_C >= C // groups
            assert plan.CHUNK % plan.BLOCK_S == 0 and plan.CHUNK <= 64 * plan.BLOCK_S


@pytest.mark.parametrize("shape", [(0, 4, 3), (2, 4, 0), (0, 4)])
def test_empty(pair, device, shape):
    x, w, b = (tensor(s, torch.float32, device) for s in (shape, (4,), (4,)))
    check(*pair, x, w, b, dim=over(x))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_strides(pair, way, device, layout):
    shape = (2, 4, 5, 6)
    x, w = tensor(shape, torch.float32, device, layout), tensor((4,), torch.float32, device, "columns_sliced")
    for dy in (tensor(shape, torch.float32, device), tensor(shape, torch.float32, device, layout)):
        (y,) = check(*pair, x, w, w, dim=over(x), grads=[dy])
        assert y.is_contiguous()


def test_memory_formats_meet(pair, way, device):
    """A contiguous gradient of a channels-last result, and the other way round; a channels-last slice."""
    x, dy = drawn((2, 8, 5, 6), torch.float32, device, True), drawn((2, 8, 5, 6), torch.float32, device)
    for a, b in ((x, dy), (dy, x)):
        check(*pair, a, dim=over(x), grads=[b])
        dx = torch.autograd.grad(pair[0](a.requires_grad_()), a, b)[0]
        assert dx.stride() == a.stride()
        a.requires_grad_(False)
    (y,) = check(*pair, x[:, :, ::2], dim=over(x))
    assert y.is_contiguous(memory_format=torch.channels_last)
    expanded = dy[:, :, :1].expand(2, 8, 5, 6)
    check(*pair, x, dim=over(x), grads=[expanded])


def test_mixed_dtypes(pair, way, device):
    x, w = drawn((2, 8, 5, 6), torch.bfloat16, device), tensor((8,), torch.float32, device)
    (y,) = check(*pair, x, w, w, dim=over(x))
    assert y.dtype == torch.bfloat16


@pytest.mark.parametrize("channels_last", [False, True])
def test_mean_far_larger_than_the_spread(family, way, device, on_kernels, channels_last):
    if not on_kernels:
        pytest.skip("torch's own function serves this path")
    x = drawn((2, 4, 9, 10), torch.float32, device, channels_last) * 1e-2 + 100.0
    x[:, :, 4:] += 1.0
    check(family.group_norm, family.group_norm_reference, x, num_groups=2, dim=over(x))


@pytest.mark.parametrize("weight, bias", [(True, False), (False, True), (False, False)])
def test_one_of_weight_and_bias(family, device, weight, bias):
    """Also a bias alone, of which PyTorch's own function has no gradient."""
    x = tensor((3, 4, 9), torch.float32, device)
    w, b = (tensor((4,), torch.float32, device) if given else None for given in (weight, bias))
    functions = (lambda x, w, b, f=f: f(x, 2, w, b) for f in (family.group_norm, family.group_norm_reference))
    check(*functions, x, w, b, dim=over(x))


def test_special_values(pair, way, device, on_kernels):
    x = tensor((6, 4, 9), torch.float32, device)
    x[0, 0, 3], x[1, 1, 4], x[2, 2, 5] = float("nan"), float("inf"), -float("inf")
    x[3] = 0.0
    x[4] = 7.0 if on_kernels else 0.0  # a constant group gives its bias, but not in torch on the CPU
    b = tensor((4,), torch.float32, device)
    y = pair[0](x, None, b, groups=2)
    assert_close(y, torch.group_norm(x.cpu().double(), 2, None, b.cpu().double()))
    assert_close(y[4], b[:, None].expand(4, 9))


def test_half_does_not_overflow(pair, way, device):
    x = tensor((2, 4, 30), torch.float16, device, scale=1e4)
    check(*pair, x, dim=over(x))


def test_bad_input(family, device):
    x, w = tensor((2, 8, 3), torch.float32, device), tensor((8,), torch.float32, device)
    f = family.group_norm
    cases = [
        (TypeError, "x must be a tensor, got list", lambda: f([1.0], 2)),
        (TypeError, "x must have dtype float64 | float32 | float16 | bfloat16, got int64", lambda: f(x.long(), 2)),
        (ValueError, "x must have at least two dimensions, got (8,)", lambda: f(w, 2)),
        (ValueError, "num_groups must be an int that divides 8 channels, got 3", lambda: f(x, 3)),
        (ValueError, "num_groups must be an int that divides 8 channels, got 0", lambda: f(x, 0)),
        (ValueError, "weight must have shape (8,), got (7,)", lambda: f(x, 2, w[:7])),
        (ValueError, "bias must have shape (8,), got (8, 1)", lambda: f(x, 2, w, w[:, None])),
        (ValueError, "eps must be at least 0, got -1", lambda: f(x, 2, eps=-1)),
        (ValueError, "activation must be one of 'relu'", lambda: f(x, 2, activation="swish")),
        (ValueError, "weight must be on", lambda: f(x, 2, w.to("meta"))),
    ]
    for error, message, call in cases:
        with pytest.raises(error) as caught:
            call()
        assert str(caught.value).startswith(f"group_norm: {message}")


def test_opcheck(family, way, device):
    w = tensor((4,), torch.float32, device).requires_grad_()
    if way == "fused":
        x, activation = drawn((2, 4, 5, 3), torch.float32, device, True), "silu"
    else:
        x, activation = tensor((2, 4, 6), torch.float32, device, "transposed"), None
    x.requires_grad_()
    opcheck(family.group_norm_fwd, (x, 2, w, w, 1e-5, activation))
    stats = torch.rand(2, 2, 3, device=device)
    args = torch.randn_like(x), x, w, None, stats, 2, 1e-5, activation, way == "fused", False
    opcheck(family.group_norm_bwd, args)


def test_direct_launch_is_the_op(family, way, device, on_kernels):
    if not on_kernels:
        pytest.skip("no kernels on this path")
    x, w = drawn((2, 8, 5, 6), torch.bfloat16, device, True).requires_grad_(), tensor((8,), torch.bfloat16, device)
    w.requires_grad_()
    direct, registered = family.group_norm(x, 2, w, w), family.group_norm_fwd(x, 2, w, w, 1e-5, None)[0]
    assert torch.equal(direct, registered) and direct.stride() == registered.stride()
    pairs = zip(*(torch.autograd.grad(y, (x, w), torch.ones_like(x)) for y in (direct, registered)))
    assert all(torch.equal(a, b) for a, b in pairs)


def test_the_two_ways_agree(family, device, on_kernels, monkeypatch):
    if not on_kernels:
        pytest.skip("no kernels on this path")
    x, plan, found = tensor((2, 8, 30, 31), torch.float32, device), family._plan, []
    for fused in (True, False):
        monkeypatch.setattr(family, "_plan", lambda *args: plan(*args)._replace(FUSED=fused))  # noqa: B023
        found.append(family.group_norm(x, 2))
    assert_close(found[0], found[1].double(), dim=over(x))


def test_compile(family, device, backend):
    def step(x, w):
        return family.group_norm(x * 2, 2, w, w, activation="silu").pow(3).sum()

    tensors = drawn((2, 8, 5, 6), torch.float32, device, True), tensor((8,), torch.float32, device)
    tensors = [t.requires_grad_() for t in tensors]
    expected = torch.autograd.grad(step(*tensors), tensors)
    for a, b in zip(
        torch.autograd.grad(torch.compile(step, fullgraph=True, backend=backend)(*tensors), tensors), expected
    ):
        assert_close(a, b.double(), dim=None)


def test_transforms(pair, device):
    x, w, b = (tensor(s, torch.float64, device).requires_grad_() for s in ((1, 4, 2), (4,), (4,)))
    for activation in (None, "silu"):
        f = lambda x, w, b: pair[0](x, w, b, groups=2, activation=activation)  # noqa: B023, E731
        assert gradcheck(f, (x, w, b)) and gradgradcheck(f, (x, w, b))
    x, w = tensor((3, 1, 4, 5), torch.float64, device), w.detach()
    loss = lambda f: lambda w, x: f(x, w, groups=2).pow(3).sum()  # noqa: E731
    per_sample = [torch.func.vmap(torch.func.grad(loss(f)), (None, 0))(w, x) for f in pair]
    assert_close(*per_sample)


def test_repeats_are_equal(pair, way, device):
    tensors = drawn((2, 8, 20, 10), torch.bfloat16, device), *(tensor((8,), torch.bfloat16, device) for _ in range(2))
    runs = [evaluate(pair[0], tensors, {}, [torch.ones_like(tensors[0])])[1] for _ in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(*runs))
