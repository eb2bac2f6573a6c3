import pytest
import torch
from _inputs import LAYOUTS, tensor
from _numerics import DTYPES, assert_close, check, evaluate, gradcheck, gradgradcheck, opcheck

HALF = (torch.float16, torch.bfloat16)


@pytest.fixture(scope="module")
def family(internals):
    return internals("layer_norm")


def torchs(x, weight=None, bias=None, eps=1e-5):
    return torch.nn.functional.layer_norm(x, x.shape[-1:], weight, bias, eps)


def shifted(shape, dtype=torch.float32, device="cpu", layout="contiguous"):
    """Values around 3: a lane past the row's end that is centred too shows in the variance."""
    return tensor(shape, dtype, device, layout) + 3


@pytest.mark.parametrize("dtype", DTYPES)
def test_reference_is_torch(family, dtype, device):
    x, w, b = (tensor(s, dtype, device) for s in ((4, 50), (50,), (50,)))
    (y,), grads = evaluate(family.layer_norm_reference, (x, w, b), {}, [torch.ones_like(x)])
    (t,), theirs = evaluate(torchs, (x, w, b), {}, [torch.ones_like(x)])
    assert_close(y, t.double(), ulps=2)
    for g, h in zip(grads, theirs):
        assert_close(g, h.double(), ulps=4)  # torch's own rounding on top of ours


@pytest.mark.kernels_ci
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("present", [(True, True), (True, False), (False, True), (False, False)])
def test_matches_reference(kernel, family, device, dtype, present):
    x, w, b = shifted((5, 7, 100), dtype, device), tensor((100,), dtype, device), tensor((100,), dtype, device)
    w, b = (t if there else None for t, there in zip((w, b), present))
    check(kernel.layer_norm, family.layer_norm_reference, x, w, b)
    check(kernel.layer_norm, family.layer_norm_reference, x, w, b, eps=1.0)


def test_wide_gradient_of_zeros(kernel, family, device):
    """Rows, and parts of them, that no gradient flows into: as of padding."""
    x, dy, w = (tensor(s, torch.float32, device) for s in ((4, 40000), (4, 40000), (40000,)))
    dy[0] = 0.0
    dy[1, :20000] = 0.0
    dy[2, 20000:] = -0.0
    check(kernel.layer_norm, family.layer_norm_reference, x, w, grads=[dy])


@pytest.mark.parametrize("N", [1, 3, 5, 17, 127, 128, 129, 1000, 4096, 16385, 65537, 262144])
def test_widths(kernel, family, device, on_kernels, N):
    x, *params = shifted((3, N), device=device), *(tensor((N,), device=device) for _ in "wb")
    params = params if N < 100000 else []  # the interpreter takes seconds for that many columns
    versus = None if on_kernels or N > 5 else torchs  # dx of short rows nearly cancels
    # At N = 1 the terms of dx cancel altogether, and are as large as |w| / sqrt(eps).
    slack = 16 * 2**-23 * 3 * float(params[0].abs().max()) * 1e-5**-0.5 if N == 1 else 0.0
    check(kernel.layer_norm, family.layer_norm_reference, x, *params, versus=versus, slack=slack)


def large_mean(N):
    return 1e4 + 1e-3 * torch.randn(2, N)


def one_off(N):
    x = torch.full((1, N), 256.0)
    x[0, N // 3] = 255
    return x


def outliers(N):
    x = torch.randn(3, N)
    x[0, 0] = x[1, N // 2] = x[2, -1] = 1e5
    return x


def steps(N):
    """The start of a row says little about the rest."""
    x = large_mean(N)
    x[:, : N // 2 + 1] -= 1e4
    x[1] = x[1].flip(0)
    return x


HARD = {
    "large_mean": lambda: large_mean(1000),
    "large_integers": lambda: torch.tensor([[40000.0, 40001.0, 40002.0, 40003.0]]),
    "one_off": lambda: one_off(10240),
    "outliers": lambda: outliers(1000),
    "tiny": lambda: 1e-20 * torch.randn(2, 100),
    "wide": lambda: torch.cat([f(16500) for f in (large_mean, one_off, outliers, steps)]),  # looped over
}


@pytest.mark.parametrize("name", HARD)
def test_hard_rows(kernel, family, device, on_kernels, name):
    x, eps = HARD[name]().to(device), 1e-12
    N = x.shape[-1]
    w, b = tensor((N,), device=device), tensor((N,), device=device)
    ulps = None if on_kernels else 128  # torch's own gradient, of a row where one value in 16500 differs
    check(kernel.layer_norm, family.layer_norm_reference, x, w, b, ulps=ulps, eps=eps)


@pytest.mark.parametrize("N", [5, 127, 17000])
def test_constant_rows(kernel, device, on_kernels, N):
    values = [0.1, 1234.0, -1.0, 0.0, 1e38] if on_kernels else [0.1, 1234.0, -1.0, 0.0]  # torch's own: NaN for 1e38
    x = torch.tensor(values, device=device)[:, None].repeat(1, N).requires_grad_()
    b = tensor((N,), device=device)
    y = kernel.layer_norm(x, None, b)
    # Normalised values have unit scale: one ulp of that, where the rounding of the mean leaves something.
    assert_close(y, b.double().expand(x.shape), slack=2**-23)
    (dx,) = torch.autograd.grad(y, x, torch.randn_like(y))
    assert dx.isfinite().all()


@pytest.mark.parametrize("N", [33, 17000])
def test_special_values(kernel, device, on_kernels, N):
    x = tensor((7, N), device=device)
    x[0, 3], x[1, 4], x[2, 5] = float("nan"), float("inf"), -float("inf")
    x[3] = -float("inf")
    x[4] *= 3e-3  # variance about eps
    x[5] *= 1e25  # squares overflow
    x[6] = x[6].abs() * 1e37  # and so does the sum of a row
    x.requires_grad_()
    y = kernel.layer_norm(x)
    assert_close(y[:5], torchs(x[:5].detach().cpu()).double())
    if on_kernels:  # torch's own: NaN or 0, by the width
        assert (y[5:] == 0).all()
    (dx,) = torch.autograd.grad(y, x, torch.ones_like(y))
    assert dx[:4].isnan().all() and dx[4].isfinite().all()


def test_half_does_not_overflow(kernel, family, device):
    x = tensor((4, 64), torch.float16, device, scale=1e4)
    check(kernel.layer_norm, family.layer_norm_reference, x)


def test_gradients_of_many_rows(kernel, family, device):
    """A sum of 1000 ones in bfloat16 would stay at 256."""
    x, w, b = shifted((1000, 16), torch.bfloat16, device), *(tensor((16,), torch.bfloat16, device) for _ in "wb")
    check(kernel.layer_norm, family.layer_norm_reference, x, w, b, grads=[torch.ones_like(x)])


def test_gradients_of_many_wide_rows(kernel, family, device):
    """More than one partial sum of a column, each over several tiles, of operands that lie differently."""
    x, w, b = shifted((66, 16400), device=device, layout="transposed"), *(tensor((16400,), device=device) for _ in "wb")
    check(kernel.layer_norm, family.layer_norm_reference, x, w, b, grads=[tensor(x.shape, device=device)])


@pytest.mark.parametrize("shape", [(0, 8), (2, 0, 8), (3, 0), (0, 0)])
def test_empty(kernel, family, device, shape):
    x, w, b = (tensor(s, device=device) for s in (shape, shape[-1:], shape[-1:]))
    check(kernel.layer_norm, family.layer_norm_reference, x, w, b)
    check(kernel.add_layer_norm, family.add_layer_norm_reference, x, x, w, b)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(6, 40), (2, 3, 4, 36)])
def test_strides(kernel, family, device, layout, shape):
    x = tensor(shape, device=device, layout=layout)
    w, b = (tensor(shape[-1:], device=device, layout="columns_sliced") for _ in "wb")
    for dy in (tensor(shape, device=device), tensor(shape, device=device, layout=layout)):
        (y,) = check(kernel.layer_norm, family.layer_norm_reference, x, w, b, grads=[dy])
        assert y.is_contiguous()


def test_add_strides(kernel, family, device):
    x, r, dy = (tensor((2, 5, 3, 16), device=device), *(tensor((2, 3, 5, 16), device=device) for _ in range(2)))
    r, dy = r.transpose(1, 2), dy.transpose(1, 2)
    results = check(kernel.add_layer_norm, rounded_sum(family, torch.float32), x, r, grads=[dy, x])
    assert all(t.is_contiguous() for t in results)
    check(kernel.add_layer_norm, rounded_sum(family, torch.float32), r, x, grads=[x, dy])


def test_many_permuted_dimensions(kernel, family, device):
    x = shifted((2, 2, 2, 2, 2, 8), device=device, layout="transposed")
    check(kernel.layer_norm, family.layer_norm_reference, x)


def test_trailing_dimensions(kernel, family, device):
    x, w, b = (tensor(s, device=device) for s in ((3, 4, 5, 6), (5, 6), (5, 6)))
    check(kernel.layer_norm, family.layer_norm_reference, x, w, b, dim=(-2, -1))
    check(kernel.layer_norm, family.layer_norm_reference, x, None, b, dim=(-2, -1))
    check(kernel.layer_norm, family.layer_norm_reference, x[0, 0], w, dim=(-2, -1))
    expected = torch.nn.functional.layer_norm(x, (5, 6), w, b)
    assert_close(kernel.layer_norm(x, w, b), expected.double(), dim=(-2, -1))


@pytest.mark.parametrize(
    "x_dtype, w_dtype, b_dtype",
    [
        (torch.bfloat16, torch.float32, torch.float32),
        (torch.float32, torch.bfloat16, torch.float64),
        (torch.float16, torch.float32, torch.bfloat16),
    ],
)
def test_mixed_dtypes(kernel, family, device, x_dtype, w_dtype, b_dtype):
    x, w, b = shifted((4, 64), x_dtype, device), tensor((64,), w_dtype, device), tensor((64,), b_dtype, device)
    (y,) = check(kernel.layer_norm, family.layer_norm_reference, x, w, b)
    assert y.dtype == x_dtype


def rounded_sum(family, dtype):
    """The reference whose sum is rounded as the kernel's is, passing gradients straight through the rounding."""

    def function(x, r, weight=None, bias=None, **kw):
        exact = x + r
        total = exact + (exact.detach().to(dtype).double() - exact.detach())
        return family.layer_norm_reference(total, weight, bias, **kw), total

    return function


@pytest.mark.parametrize("N, dtype", [*((48, d) for d in DTYPES), (16500, torch.float64), (16500, torch.bfloat16)])
def test_add(kernel, family, device, N, dtype):
    """Both results feed the loss: the gradient flows in through y and through the sum."""
    x, r, w, b = shifted((3, N), dtype, device), *(tensor(s, dtype, device) for s in ((3, N), (N,), (N,)))
    y, total = check(kernel.add_layer_norm, rounded_sum(family, dtype), x, r, w, b)
    assert torch.equal(total, x + r)
    assert torch.equal(y, kernel.layer_norm(x + r, w, b))


def test_add_residual_dtype(kernel, family, device):
    x, r, w = (tensor(s, torch.bfloat16, device) for s in ((4, 64), (4, 64), (64,)))
    for dtype in (torch.float32, torch.float64):
        y, total = kernel.add_layer_norm(x, r, w, residual_dtype=dtype)
        assert y.dtype == torch.bfloat16 and total.dtype == dtype
        assert torch.equal(total, x.to(dtype) + r.to(dtype))
        assert_close(y, family.layer_norm_reference(total.double(), w.double()))
    _, total = kernel.add_layer_norm(x, r.float(), w)
    assert total.dtype == torch.float32


def test_add_one_result_used(kernel, device):
    for pick in (0, 1):
        x, r = (tensor((3, 16), device=device).requires_grad_() for _ in range(2))
        kernel.add_layer_norm(x, r)[pick].square().sum().backward()
        total = (x + r).detach().requires_grad_()
        (kernel.layer_norm(total) if pick == 0 else total).square().sum().backward()
        assert torch.equal(x.grad, total.grad) and torch.equal(r.grad, total.grad)
        assert x.grad.data_ptr() != r.grad.data_ptr()


def test_some_gradients_wanted(kernel, device):
    """Only what is asked for is computed, and it does not depend on what else is."""
    x, w, b = (tensor(s, device=device).requires_grad_() for s in ((5, 40), (40,), (40,)))
    full = torch.autograd.grad(kernel.layer_norm(x, w, b).square().sum(), (x, w, b))
    for i, t in enumerate((x, w, b)):
        others = [t.detach() if j != i else t for j, t in enumerate((x, w, b))]
        (alone,) = torch.autograd.grad(kernel.layer_norm(*others).square().sum(), t)
        assert torch.equal(alone, full[i])


def test_bad_input(kernel, device):
    x, w = tensor((4, 8), device=device), tensor((8,), device=device)
    cases = [
        (TypeError, "layer_norm: x must be a tensor, got list", lambda: kernel.layer_norm([1.0])),
        (TypeError, "layer_norm: x must have dtype float64 | float32 | float16 | bfloat16, got int64",
         lambda: kernel.layer_norm(x.long())),
        (TypeError, "layer_norm: weight must be a tensor, got tuple", lambda: kernel.layer_norm(x, (8,))),
        (TypeError, "layer_norm: bias must be a tensor, got float", lambda: kernel.layer_norm(x, w, 1e-5)),
        (ValueError, "layer_norm: weight must have shape (8,), got (7,)", lambda: kernel.layer_norm(x, w[:7])),
        (ValueError, "layer_norm: bias must have shape (8,), got (1, 8)", lambda: kernel.layer_norm(x, w, w[None])),
        (ValueError, "layer_norm: bias must have shape (8,), got (7,)", lambda: kernel.layer_norm(x, None, w[:7])),
        (ValueError, "layer_norm: weight must have 1 to x.dim() dimensions, got 3",
         lambda: kernel.layer_norm(x, w[None, None])),
        (ValueError, "layer_norm: bias must have 1 to x.dim() dimensions, got 0",
         lambda: kernel.layer_norm(x, None, w[0])),
        (ValueError, "layer_norm: weight must have 1 to x.dim() dimensions, got 1 for x ()",
         lambda: kernel.layer_norm(x[0, 0])),
        (ValueError, "layer_norm: eps must be at least 0, got -1", lambda: kernel.layer_norm(x, eps=-1)),
        (ValueError, "layer_norm: eps must be at least 0, got nan", lambda: kernel.layer_norm(x, eps=float("nan"))),
        (TypeError, "layer_norm: eps must be a number, got NoneType", lambda: kernel.layer_norm(x, eps=None)),
        (ValueError, "add_layer_norm: residual must have shape (4, 8), got (8,)", lambda: kernel.add_layer_norm(x, w)),
        (TypeError, "add_layer_norm: residual must be a tensor, got NoneType", lambda: kernel.add_layer_norm(x, None)),
        (TypeError, "add_layer_norm: residual_dtype must be a floating dtype or None, got torch.int8",
         lambda: kernel.add_layer_norm(x, x, residual_dtype=torch.int8)),
        (ValueError, "layer_norm: weight must be on", lambda: kernel.layer_norm(x, w.to("meta"))),
    ]  # fmt: skip
    for error, message, call in cases:
        with pytest.raises(error) as caught:
            call()
        assert str(caught.value).startswith(message)


def test_opcheck(family, device):
    x, w, t = tensor((3, 40), device=device), tensor((40,), device=device), tensor((40, 3), device=device).t()
    x, w = x.requires_grad_(), w.requires_grad_()
    opcheck(family.layer_norm_fwd, (x, w, None, 1e-5))
    opcheck(family.layer_norm_fwd, (t, None, w.double(), 1.0))
    opcheck(family.add_layer_norm_fwd, (x, t, w, None, 1e-5, torch.float64))
    stats = family.layer_norm_fwd(t, w, w, 1e-5)[1].detach()
    opcheck(family.layer_norm_bwd, (x, None, t, w, w, stats, 1e-5, True, True))
    opcheck(family.layer_norm_bwd, (x, x, t, None, None, stats, 1e-5, False, False))


def test_direct_launch_is_the_op(kernel, family, device, on_kernels):
    if not on_kernels:
        pytest.skip("no kernels on this path")
    x, w = tensor((5, 300), torch.bfloat16, device), tensor((300,), torch.bfloat16, device)
    assert torch.equal(kernel.layer_norm(x, w), family.layer_norm_fwd(x, w, None, 1e-5)[0])
    x.requires_grad_(), w.requires_grad_()
    direct = torch.autograd.grad(kernel.layer_norm(x, w), (x, w), torch.ones_like(x))
    registered = torch.autograd.grad(family.layer_norm_fwd(x, w, None, 1e-5)[0], (x, w), torch.ones_like(x))
    assert all(torch.equal(a, b) for a, b in zip(direct, registered))


def test_compile(kernel, device, backend):
    def step(x, r, w, b):
        y, total = kernel.add_layer_norm(x * 2, r, w, b)
        return kernel.layer_norm(y + total, w).square().sum()

    tensors = [tensor(s, device=device).requires_grad_() for s in ((4, 64), (4, 64), (64,), (64,))]
    compiled = torch.compile(step, fullgraph=True, backend=backend)
    expected = torch.autograd.grad(step(*tensors), tensors)
    for a, e in zip(torch.autograd.grad(compiled(*tensors), tensors), expected):
        assert_close(a, e.double())
    with pytest.raises(ValueError, match="weight must have shape"):
        torch.compile(step)(tensors[0], tensors[1], tensors[2][:3], None)


def test_transforms(kernel, family, device):
    x, r, w, b = (tensor(s, torch.float64, device).requires_grad_() for s in ((2, 3), (2, 3), (3,), (3,)))
    for f, tensors in ((kernel.layer_norm, (x, w, b)), (kernel.add_layer_norm, (x[:1], r[:1], w))):
        assert gradcheck(f, tensors) and gradgradcheck(f, tensors)
    x, w = x.detach(), w.detach()

    def losses(norm):
        return lambda w, x: norm(x, w).square().sum()

    per_sample = torch.func.vmap(torch.func.grad(losses(kernel.layer_norm)), (None, 0))(w, x)
    expected = torch.func.vmap(torch.func.grad(losses(family.layer_norm_reference)), (None, 0))(w, x)
    assert_close(per_sample, expected)
    x, w = tensor((2, 7), torch.float64, device), tensor((7,), torch.float64, device)
    batch = torch.stack([x, 2 * x], 1)
    assert_close(
        torch.func.vmap(kernel.layer_norm, (1, None))(batch, w)[1], kernel.layer_norm(2 * x, w)
    )  # on the CPU vmap takes the formula, not torch's function
    grads = torch.func.vmap(torch.func.grad(losses(kernel.layer_norm), 1), (None, 1))(w, batch)
    assert_close(grads[1], torch.func.grad(losses(family.layer_norm_reference), 1)(w, 2 * x))
    assert torch.func.jacrev(kernel.layer_norm)(x).shape == (2, 7, 2, 7)


def test_second_derivative_is_torchs(kernel, device):
    x, w, b, dy = (tensor(s, torch.float64, device).requires_grad_() for s in ((3, 7), (7,), (7,), (3, 7)))
    found = []
    for f in (kernel.layer_norm, torchs):
        dx, dw = torch.autograd.grad(f(x, w, b), (x, w), dy, create_graph=True)
        found.append(torch.autograd.grad(dx.square().sum() + dw.square().sum(), (x, w, dy)))
    for ours, theirs in zip(*found):
        assert_close(ours, theirs)


def test_forward_mode_is_refused_not_lost(kernel, device, on_kernels):
    if not on_kernels:
        pytest.skip("PyTorch's own forward mode serves this path")
    x = tensor((2, 3), device=device)
    with pytest.raises(NotImplementedError):
        torch.func.jvp(kernel.layer_norm, (x,), (x,))


def test_repeats_are_equal(kernel, device):
    x, w, b = (tensor(s, torch.bfloat16, device).requires_grad_() for s in ((40, 256), (256,), (256,)))
    runs = [torch.autograd.grad(kernel.layer_norm(x, w, b), (x, w, b), torch.ones_like(x)) for _ in range(3)]
    assert all(torch.equal(a, b) for run in runs for a, b in zip(run, runs[0]))


def test_nested_jacobians(kernel, family, device):
    x, w = tensor((2, 3), torch.float64, device), tensor((3,), torch.float64, device)

    def crossed(f):
        return torch.func.jacrev(torch.func.jacrev(lambda x, w: f(x, w).sin().sum(), 1), 0)(x, w)

    assert_close(crossed(kernel.layer_norm), crossed(family.layer_norm_reference), dim=None)


def test_residual_stream_stays_frozen(kernel, device):
    x, w = tensor((3, 16), device=device), tensor((16,), device=device).requires_grad_()
    y, total = kernel.add_layer_norm(x, x, w)
    assert y.requires_grad and not total.requires_grad
