import pytest
import torch
from _inputs import LAYOUTS, few, tensor, vast
from _numerics import DTYPES, assert_close, check, evaluate, gradcheck, gradgradcheck, opcheck

NAMES = ("modulated_layer_norm", "modulated_rms_norm")


@pytest.fixture(scope="module")
def family(internals):
    return internals("modulated_norm")


@pytest.fixture(params=NAMES)
def pair(request, family):
    """The function and its reference, with all tensors by position, so that all are differentiated."""
    return by_position(getattr(family, request.param)), by_position(getattr(family, f"{request.param}_reference"))


def by_position(function):
    return lambda x, scale, shift=None, weight=None, **kw: function(x, scale, shift, weight=weight, **kw)


def with_residual(function):
    def call(x, residual, gate, scale, shift, weight=None, **kw):
        return function(x, scale, shift, weight, residual=residual, gate=gate, **kw)

    return call


def rounded_sum(reference, dtype):
    """The reference whose sum is rounded as the kernel's is, passing gradients straight through the rounding."""

    def call(x, residual, gate, scale, shift, weight=None, **kw):
        if gate is not None and gate.dim() < x.dim():
            gate = gate[:, None]
        exact = residual + (x if gate is None else gate * x)
        total = exact + (exact.detach().to(dtype).double() - exact.detach())
        return reference(total, scale, shift, weight, **kw), total

    return call


# The reference first: it is the oracle of everything below.


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_reference_is_diffusers(family, dtype):
    """AdaLayerNormZero and the block around it, as diffusers writes them."""
    hidden, attended = tensor((2, 5, 40), dtype), tensor((2, 5, 40), dtype)
    emb = tensor((2, 6 * 40), dtype)
    shift_msa, scale_msa, gate_msa, shift_mlp, scale_mlp, _ = emb.chunk(6, dim=1)
    norm = torch.nn.LayerNorm(40, elementwise_affine=False, eps=1e-6)
    expected = norm(hidden) * (1 + scale_msa[:, None]) + shift_msa[:, None]
    assert_close(family.modulated_layer_norm_reference(hidden, scale_msa, shift_msa), expected.double(), ulps=64)
    hidden_ = hidden + gate_msa.unsqueeze(1) * attended
    expected = norm(hidden_) * (1 + scale_mlp[:, None]) + shift_mlp[:, None]
    y, total = family.modulated_layer_norm_reference(
        attended, scale_mlp, shift_mlp, residual=hidden, gate=gate_msa.unsqueeze(1)
    )
    assert_close(y, expected.double(), ulps=64)
    assert_close(total, hidden_.double())
    w = tensor((40,), dtype)
    expected = torch.nn.functional.rms_norm(hidden, (40,), w, 1e-5) * (1 + scale_msa.unsqueeze(1))
    assert_close(family.modulated_rms_norm_reference(hidden, scale_msa, eps=1e-5, weight=w), expected.double(), ulps=64)


@pytest.mark.kernels_ci
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", few([(2, 70), (2, 1, 70), (2, 5, 70), (70,), (1, 5, 70)]))
def test_matches_reference(pair, device, dtype, shape):
    function, reference = pair
    x, scale, shift = (tensor(s, dtype, device) for s in ((2, 5, 70), shape, shape))
    w = tensor((70,), dtype, device)
    check(function, reference, x, scale, shift, w)
    check(function, reference, x, scale, eps=0.1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gate_shape", [None, (2, 70), (2, 5, 70)])
def test_residual(pair, device, dtype, gate_shape):
    """Both results feed the loss; the gate is shared as scale and shift are, or is of each token as they are not."""
    function, reference = pair
    x, residual, scale, shift, w = (
        tensor(s, dtype, device) for s in ((2, 5, 70), (2, 5, 70), (2, 70), (2, 1, 70), (70,))
    )
    gate = None if gate_shape is None else tensor(gate_shape, dtype, device)
    tensors = x, residual, gate, scale, shift, w
    y, total = check(with_residual(function), rounded_sum(reference, dtype), *tensors)
    assert_close(y, function(total, scale, shift, w))  # other tiles, whose sums have another order


def test_far_samples(pair, device, tmp_path):
    """Samples that lie 2^25 elements apart, and their modulations: those from the 64th on begin past 2^31."""
    room = 2**25
    space = vast(66 * room, device, tmp_path)
    far = [
        torch.as_strided(space, (66, 2, 16), (room, 16, 1), 0), torch.as_strided(space, (66, 16), (room, 1), 32),
    ]  # fmt: skip
    near = [tensor(t.shape, torch.bfloat16, device) for t in far]
    for t, n in zip(far, near):
        t.copy_(n)
    results = [evaluate(pair[0], t, {}, [near[0]]) for t in (far, near)]
    for a, b in zip((*results[0][0], *results[0][1]), (*results[1][0], *results[1][1])):
        assert_close(a, b.double(), dim=None)  # rows may be tiled otherwise


@pytest.mark.parametrize("N", [1, 3, 127, 128, 129, 1000, 65537])
def test_widths(pair, device, N):
    function, reference = pair
    x, scale, shift, w = (tensor(s, torch.float32, device) for s in ((1, 3, N), (1, N), (1, N), (N,)))
    # N = 1: dx cancels to about 0; what is left is the rounding of larger terms.
    slack = 64 * 2**-23 * float(1 + (w * (1 + scale) / x).abs().max()) * 1e3 if N == 1 else 0.0
    check(function, reference, x, scale, shift, w, slack=slack)


@pytest.mark.parametrize("gate_shape", [(2, 20000), (2, 3, 20000)])
def test_wide_rows_with_all_gradients(pair, device, gate_shape):
    """Sums over rows in memory: several rows a program."""
    function, reference = pair
    shapes = (2, 3, 20000), (2, 3, 20000), gate_shape, (2, 20000), (2, 20000), (20000,)
    tensors = [tensor(s, torch.float32, device) for s in shapes]
    check(with_residual(function), rounded_sum(reference, torch.float32), *tensors)


def test_widest(pair, device):
    function, reference = pair
    tensors = [tensor(s, torch.float32, device) for s in ((1, 262144), (1, 262144), (262144,))]
    check(function, reference, *tensors)


def test_many_rows_a_program(pair, device):
    function, reference = pair
    tensors = [tensor(s, torch.float32, device) for s in ((2, 70, 300), (2, 300), (2, 300), (300,))]
    check(function, reference, *tensors)


@pytest.mark.parametrize("shape", [(0, 4, 8), (2, 0, 8), (2, 3, 0)])
def test_empty(pair, device, shape):
    function, reference = pair
    modulation = (shape[0], shape[-1])
    tensors = [tensor(s, torch.float32, device) for s in (shape, modulation, modulation, shape[-1:])]
    check(function, reference, *tensors)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_strides(pair, device, layout):
    function, reference = pair
    shape = (2, 3, 4, 36)
    x, scale, shift = (tensor(s, torch.float32, device, layout) for s in (shape, (2, 1, 4, 36), shape))
    w = tensor((36,), torch.float32, device, "columns_sliced")
    for dy in (tensor(shape, torch.float32, device), tensor(shape, torch.float32, device, layout)):
        (y,) = check(function, reference, x, scale, shift, w, grads=[dy])
        assert y.is_contiguous()


def test_frames(pair, device):
    """Video: a scale for each frame, a shift for each sample, of one embedding read where it lies."""
    function, reference = pair
    emb = tensor((2, 3, 1, 80), torch.float32, device)
    x, shift = tensor((2, 3, 4, 40), torch.float32, device), tensor((2, 40), torch.float32, device)
    check(function, reference, x, emb[..., 40:], shift)


def test_expanded_scale_has_a_gradient_of_its_shape(pair, device):
    function, reference = pair
    x, scale = tensor((2, 3, 40), torch.float32, device), tensor((2, 1, 40), torch.float32, device).expand(2, 3, 40)
    check(function, reference, x, scale)


def test_many_permuted_dimensions(pair, device):
    function, reference = pair
    x = tensor((2, 2, 2, 2, 2, 8), torch.float32, device, "transposed")
    check(function, reference, x, tensor((2, 8), torch.float32, device))


def test_mixed_dtypes(pair, device):
    function, reference = pair
    x = tensor((2, 3, 64), torch.bfloat16, device)
    scale, shift, w = (tensor(s, torch.float32, device) for s in ((2, 64), (2, 64), (64,)))
    (y,) = check(function, reference, x, scale, shift, w)
    assert y.dtype == torch.bfloat16
    y, total = with_residual(function)(x, x.float(), None, scale, shift)
    assert y.dtype == torch.bfloat16 and total.dtype == torch.float32


def test_mean_far_larger_than_the_spread(family, device):
    x = tensor((2, 3, 300), torch.float32, device, scale=1e-2) + 100.0
    scale = tensor((2, 300), torch.float32, device)
    check(family.modulated_layer_norm, family.modulated_layer_norm_reference, x, scale)
    x = tensor((1, 20000), torch.float32, device, scale=1e-2) + 100.0
    x[:, 9000:] += 1.0
    check(family.modulated_layer_norm, family.modulated_layer_norm_reference, x, x[0, None] * 1e-2)


def test_special_values(family, device):
    x = tensor((6, 33), torch.float32, device)
    x[0, 3], x[1, 4], x[2, 5] = float("nan"), float("inf"), -float("inf")
    x[3] = 0.0
    scale = tensor((33,), torch.float32, device)
    for name in NAMES:
        y = getattr(family, name)(x, scale)
        assert_close(y, getattr(family, f"{name}_reference")(x.cpu().double(), scale.cpu().double()))


def test_one_result_used(family, device):
    for pick in (0, 1):
        x, r = (tensor((3, 16), torch.float32, device).requires_grad_() for _ in range(2))
        scale = tensor((16,), torch.float32, device)
        family.modulated_layer_norm(x, scale, residual=r)[pick].square().sum().backward()
        total = (x + r).detach().requires_grad_()
        (family.modulated_layer_norm(total, scale) if pick == 0 else total).square().sum().backward()
        assert torch.equal(x.grad, total.grad) and torch.equal(r.grad, total.grad)
        assert x.grad.data_ptr() != r.grad.data_ptr()


@pytest.mark.parametrize("name", NAMES)
def test_bad_input(family, device, name):
    f = getattr(family, name)
    x, s = tensor((2, 3, 8), torch.float32, device), tensor((2, 8), torch.float32, device)
    rule = "must have shape (N,), (B, N), or x.dim() dimensions of x's size or 1 and then N, got"
    cases = [
        (TypeError, "x must be a tensor, got list", lambda: f([1.0], s)),
        (TypeError, "scale must be a tensor, got NoneType", lambda: f(x, None)),
        (TypeError, "shift must have dtype float64 | float32 | float16 | bfloat16, got int64",
         lambda: f(x, s, s.long())),
        (ValueError, "x must have at least one dimension, got ()", lambda: f(x[0, 0, 0], s)),
        (ValueError, f"scale {rule} (3, 8) for x (2, 3, 8)", lambda: f(x, x[0])),
        (ValueError, f"shift {rule} (7,) for x (2, 3, 8)", lambda: f(x, s, s[0, :7])),
        (ValueError, f"gate {rule} (2, 3, 1) for x (2, 3, 8)", lambda: f(x, s, residual=x, gate=x[..., :1])),
        (ValueError, "gate must be None without a residual, got (2, 8)", lambda: f(x, s, gate=s)),
        (ValueError, "residual must have shape (2, 3, 8), got (2, 8)", lambda: f(x, s, residual=s)),
        (ValueError, "weight must have shape (8,), got (7,)", lambda: f(x, s, weight=s[0, :7])),
        (ValueError, "eps must be at least 0, got -1", lambda: f(x, s, eps=-1)),
        (ValueError, "scale must be on", lambda: f(x, s.to("meta"))),
    ]  # fmt: skip
    for error, message, call in cases:
        with pytest.raises(error) as caught:
            call()
        assert str(caught.value).startswith(f"{name}: {message}")


def test_opcheck(family, device):
    x, r, s, g = (
        tensor(shape, torch.float32, device).requires_grad_() for shape in ((2, 3, 40), (2, 3, 40), (2, 1, 40), (40,))
    )
    w, stats = g.detach(), torch.rand(2, 3, 3, device=device)
    opcheck(family.modulated_norm_fwd, (x, None, None, s, s, None, 1e-6, True))
    opcheck(family.modulated_norm_fwd, (x, r.double(), s, x, None, w, 1e-6, False))
    full = (x, r, r, x, s, s, s, w, stats, 1e-6, True, True, True, True, True)
    opcheck(family.modulated_norm_bwd, full)
    opcheck(
        family.modulated_norm_bwd, (x, None, r, None, None, x, s, None, stats, 1e-6, False, False, True, True, False)
    )


def test_direct_launch_is_the_op(family, device, on_kernels):
    if not on_kernels:
        pytest.skip("no kernels on this path")
    x, s, w = (tensor(shape, torch.bfloat16, device).requires_grad_() for shape in ((2, 5, 300), (2, 1, 300), (300,)))
    direct = family.modulated_layer_norm(x, s, s, weight=w)
    registered = family.modulated_norm_fwd(x, None, None, s, s, w, 1e-6, True)[0]
    assert torch.equal(direct, registered)
    pairs = zip(*(torch.autograd.grad(y, (x, s, w), torch.ones_like(x)) for y in (direct, registered)))
    assert all(torch.equal(a, b) for a, b in pairs)


def test_compile(family, device, backend):
    def step(x, r, s):
        scale, shift, gate = s.chunk(3, -1)
        y, total = family.modulated_layer_norm(x * 2, scale, shift, residual=r, gate=gate)
        return family.modulated_rms_norm(y + total, scale).pow(3).sum()

    tensors = [tensor(s, torch.float32, device).requires_grad_() for s in ((2, 4, 64), (2, 4, 64), (2, 192))]
    expected = torch.autograd.grad(step(*tensors), tensors)
    for a, b in zip(
        torch.autograd.grad(torch.compile(step, fullgraph=True, backend=backend)(*tensors), tensors), expected
    ):
        assert_close(a, b.double(), dim=None, ulps=64)  # two norms, whose gradients cancel


def test_transforms(pair, device):
    function, reference = pair
    tensors = [
        tensor(s, torch.float64, device).requires_grad_() for s in ((1, 2, 3), (1, 2, 3), (1, 3), (1, 3), (1, 3))
    ]
    residual = with_residual(function)
    assert gradcheck(residual, tensors) and gradgradcheck(residual, tensors)
    x, scale, w = (tensor(s, torch.float64, device).requires_grad_() for s in ((2, 3), (2, 3), (3,)))
    short = lambda x, scale, w: function(x, scale, weight=w)  # noqa: E731
    assert gradcheck(short, (x, scale, w)) and gradgradcheck(short, (x, scale, w))
    x, scale = tensor((3, 2, 4), torch.float64, device), tensor((4,), torch.float64, device)
    loss = lambda f: lambda scale, x: f(x, scale).pow(3).sum()  # noqa: E731
    per_sample = [torch.func.vmap(torch.func.grad(loss(f)), (None, 0))(scale, x) for f in (function, reference)]
    assert_close(*per_sample)


def test_repeats_are_equal(family, device):
    tensors = [tensor(s, torch.bfloat16, device) for s in ((2, 40, 256), (2, 256), (2, 256))]
    runs = [evaluate(family.modulated_layer_norm, tensors, {}, [torch.ones_like(tensors[0])])[1] for _ in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(*runs))
