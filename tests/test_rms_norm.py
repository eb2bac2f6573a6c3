import pytest
import torch
from _inputs import LAYOUTS, tensor
from _numerics import DTYPES, assert_close, check, evaluate, gradcheck, gradgradcheck, opcheck

HALF = (torch.float16, torch.bfloat16)


@pytest.fixture(scope="module")
def family(internals):
    return internals("rms_norm")


def norm(function):
    """rms_norm with weight and bias by position, so that both are differentiated."""
    return lambda x, weight=None, bias=None, **kw: function(x, weight, bias=bias, **kw)


def add_norm(function):
    return lambda x, r, weight=None, bias=None, **kw: function(x, r, weight, bias=bias, **kw)


# The reference first: it is the oracle of everything below.


def llama(x, weight, eps):
    h = x.to(torch.float32)
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps)
    return weight * h.to(x.dtype)


def gemma(x, weight, eps):
    h = x.float()
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps)
    return (h * (1.0 + weight.float())).type_as(x)


@pytest.mark.parametrize("dtype", DTYPES)
def test_reference_is_torch(family, dtype):
    x, w = tensor((4, 50), dtype), tensor((50,), dtype)
    (y,), grads = evaluate(family.rms_norm_reference, (x, w), {"eps": 1e-5}, [torch.ones_like(x)])
    torchs = lambda x, w: torch.nn.functional.rms_norm(x, (50,), w, 1e-5)  # noqa: E731
    (t,), theirs = evaluate(torchs, (x, w), {}, [torch.ones_like(x)])
    assert_close(y, t.double(), ulps=2)
    for g, h in zip(grads, theirs):
        assert_close(g, h.double(), ulps=4)  # torch's own rounding on top of ours


@pytest.mark.parametrize("dtype", (torch.float32, *HALF))
def test_reference_is_hugging_face(family, dtype):
    """Bit for bit: the two casting conventions of transformers' models."""
    x, w = tensor((16, 300), dtype), tensor((300,), dtype)
    assert torch.equal(family.rms_norm_reference(x, w, casting="llama"), llama(x, w, 1e-6))
    assert torch.equal(family.rms_norm_reference(x, w, casting="gemma", offset=1.0), gemma(x, w, 1e-6))
    wide = tensor((300,), torch.float32)
    mixed = family.rms_norm_reference(x, wide, casting="llama")
    assert mixed.dtype == torch.float32 and torch.equal(mixed, llama(x, wide, 1e-6))


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("casting, offset", [("llama", 0.0), ("gemma", 1.0)])
def test_rounding_order(kernel, family, device, dtype, casting, offset):
    """What a tolerance cannot see: nearly every element equals the convention's, the rest are one ulp away."""
    x, w = tensor((64, 300), dtype, device), tensor((300,), dtype, device)
    y = kernel.rms_norm(x, w, casting=casting, offset=offset)
    expected = family.rms_norm_reference(x, w, casting=casting, offset=offset)
    assert (y == expected).float().mean() >= 0.999
    ulp = (y.view(torch.int16).int() - expected.view(torch.int16).int()).abs()
    assert ulp.max() <= 1


@pytest.mark.kernels_ci
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", [{}, {"casting": "llama"}, {"offset": 1.0, "eps": None}, {"eps": 1.0}])
def test_matches_reference(kernel, family, device, dtype, options):
    tensors = tensor((5, 7, 100), dtype, device), tensor((100,), dtype, device), tensor((100,), dtype, device)
    check(norm(kernel.rms_norm), norm(family.rms_norm_reference), *tensors, **options)
    check(norm(kernel.rms_norm), norm(family.rms_norm_reference), tensors[0], **options)


def test_wide_gradient_of_zeros(kernel, family, device):
    """Rows, and parts of them, that no gradient flows into: as of padding."""
    x, dy, w = (tensor(s, torch.float32, device) for s in ((4, 40000), (4, 40000), (40000,)))
    dy[0] = 0.0
    dy[1, :20000] = 0.0
    dy[2, 20000:] = -0.0
    check(norm(kernel.rms_norm), norm(family.rms_norm_reference), x, w, grads=[dy])


@pytest.mark.parametrize("N", [1, 3, 127, 128, 129, 1000, 4096, 16385, 65537, 262144])
def test_widths(kernel, family, device, N):
    x, w, b = (tensor(s, torch.float32, device) for s in ((3, N), (N,), (N,)))
    slack = 0.0
    if N == 1:  # dx cancels to about 0: what is left is the rounding of terms of about 3 * |w| / |x|
        slack = 16 * 2**-23 * float((3 * w / x).abs().max())
    check(norm(kernel.rms_norm), norm(family.rms_norm_reference), x, w, b, slack=slack)


@pytest.mark.parametrize("shape", [(0, 8), (2, 0, 8), (3, 0), (0, 0)])
def test_empty(kernel, family, device, shape):
    x, w, b = (tensor(s, torch.float32, device) for s in (shape, shape[-1:], shape[-1:]))
    check(norm(kernel.rms_norm), norm(family.rms_norm_reference), x, w, b)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(6, 40), (2, 3, 4, 36)])
def test_strides(kernel, family, device, layout, shape):
    x = tensor(shape, torch.float32, device, layout)
    w = tensor(shape[-1:], torch.float32, device, "columns_sliced")
    for dy in (tensor(shape, torch.float32, device), tensor(shape, torch.float32, device, layout)):
        (y,) = check(norm(kernel.rms_norm), norm(family.rms_norm_reference), x, w, grads=[dy])
        assert y.is_contiguous()


def test_permuted_gradient(kernel, family, device):
    """What the backward of an attention's (B, H, S, D) gives to a norm on (B, S, H, D)."""
    x, w = tensor((2, 5, 3, 16), torch.float32, device), tensor((16,), torch.float32, device)
    dy = tensor((2, 3, 5, 16), torch.float32, device).transpose(1, 2)
    check(norm(kernel.rms_norm), norm(family.rms_norm_reference), x, w, grads=[dy])
    check(norm(kernel.rms_norm), norm(family.rms_norm_reference), dy, w, grads=[x])


def test_many_permuted_dimensions(kernel, family, device):
    x = tensor((2, 2, 2, 2, 2, 8), torch.float32, device, "transposed")
    check(norm(kernel.rms_norm), norm(family.rms_norm_reference), x)


def test_trailing_dimensions(kernel, family, device):
    x, w, b = (tensor(s, torch.float32, device) for s in ((3, 4, 5, 6), (5, 6), (5, 6)))
    check(norm(kernel.rms_norm), norm(family.rms_norm_reference), x, w, b, dim=(-2, -1))
    check(norm(kernel.rms_norm), norm(family.rms_norm_reference), x[0, 0], w, dim=(-2, -1))


@pytest.mark.parametrize("x_dtype, w_dtype", [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)])
def test_mixed_dtypes(kernel, family, device, x_dtype, w_dtype):
    x, w = tensor((4, 64), x_dtype, device), tensor((64,), w_dtype, device)
    (y,) = check(norm(kernel.rms_norm), norm(family.rms_norm_reference), x, w)
    assert y.dtype == x_dtype
    y = kernel.rms_norm(x, w, casting="llama")
    assert y.dtype == torch.promote_types(x_dtype, w_dtype)
    assert_close(y, family.rms_norm_reference(x, w, casting="llama").double())  # in x's dtype: it is rounded on the way


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("N", [48, 40000])
def test_add(kernel, family, device, dtype, N):
    """Both results feed the loss: the gradient flows in through y and through the sum."""
    x, r, w = tensor((3, N), dtype, device), tensor((3, N), dtype, device), tensor((N,), dtype, device)
    y, total = check(add_norm(kernel.add_rms_norm), add_norm(rounded_sum(family, dtype)), x, r, w)
    assert torch.equal(total, x + r)
    assert torch.equal(y, kernel.rms_norm(x + r, w))


@pytest.mark.parametrize("op", ["rms_norm", "layer_norm"])
def test_wide_rows_repeat(kernel, internals, device, op):
    """Wide rows may be split over programs that wait for each other: right, and the same bits each time."""
    rows, reference = 700 if device.type == "cuda" else 2, getattr(internals(op), f"{op}_reference")
    x, w, dy = (tensor(s, torch.bfloat16, device) for s in ((rows, 33000), (33000,), (rows, 33000)))
    check(getattr(kernel, op), reference, x, w, grads=[dy])
    x.requires_grad_(), w.requires_grad_()
    grads = [torch.autograd.grad(getattr(kernel, op)(x, w), (x, w), dy) for _ in range(20 if rows > 2 else 2)]
    assert all(torch.equal(a, b) for again in grads[1:] for a, b in zip(again, grads[0]))


def rounded_sum(family, dtype):
    """The reference whose sum is rounded as the kernel's is, passing gradients straight through the rounding."""

    def function(x, r, weight, bias=None, **kw):
        exact = x + r
        total = exact + (exact.detach().to(dtype).double() - exact.detach())
        return family.rms_norm_reference(total, weight, bias=bias, **kw), total

    return function


def test_add_residual_dtype(kernel, family, device):
    x, r, w = (tensor(s, torch.bfloat16, device) for s in ((4, 64), (4, 64), (64,)))
    y, total = kernel.add_rms_norm(x, r, w, residual_dtype=torch.float32)
    assert y.dtype == torch.bfloat16 and total.dtype == torch.float32
    assert torch.equal(total, x.float() + r.float())
    assert_close(y, family.rms_norm_reference(total.double(), w.double()))


def test_add_one_result_used(kernel, device):
    for pick in (0, 1):
        x, r = (tensor((3, 16), torch.float32, device).requires_grad_() for _ in range(2))
        kernel.add_rms_norm(x, r)[pick].square().sum().backward()
        total = (x + r).detach().requires_grad_()
        (kernel.rms_norm(total) if pick == 0 else total).square().sum().backward()
        assert torch.equal(x.grad, total.grad) and torch.equal(r.grad, total.grad)
        assert x.grad.data_ptr() != r.grad.data_ptr()


def test_quantize_sums_wide_rows_in_float32(kernel, device):
    x = torch.full((2, 40000), 1.1, device=device)
    _, scale = kernel.rms_norm(x, quantize="fp8")
    wide = x.double()[:, :1]
    assert_close(scale, wide * torch.rsqrt(wide.square() + 1e-6) / 448, ulps=4)


def test_special_values(kernel, family, device):
    x = tensor((7, 33), torch.float32, device)
    x[0, 3], x[1, 4], x[2, 5] = float("nan"), float("inf"), -float("inf")
    x[3] = 0.0
    x[4] = 1e25  # squares overflow, as torch's
    x[5] = 1e-3  # rms about eps
    y = kernel.rms_norm(x)
    # torch on the CPU; on a GPU it makes a whole row NaN where one element is infinite.
    assert_close(y, torch.nn.functional.rms_norm(x.cpu(), (33,), eps=1e-6).double())


def test_half_does_not_overflow(kernel, family, device):
    x = tensor((4, 64), torch.float16, device, scale=1e4)
    check(norm(kernel.rms_norm), norm(family.rms_norm_reference), x)


def test_offset_is_added_in_float32(kernel, family, device):
    """0.00390625 + 1 rounds to 1 in bfloat16."""
    x, w = tensor((4, 64), torch.bfloat16, device), torch.full((64,), 0.00390625, dtype=torch.bfloat16, device=device)
    check(norm(kernel.rms_norm), norm(family.rms_norm_reference), x, w, offset=1.0)


def test_bad_input(kernel, device):
    x, w = tensor((4, 8), torch.float32, device), tensor((8,), torch.float32, device)
    cases = [
        (TypeError, "rms_norm: x must be a tensor, got list", lambda: kernel.rms_norm([1.0])),
        (TypeError, "rms_norm: x must have dtype float64 | float32 | float16 | bfloat16, got int64",
         lambda: kernel.rms_norm(x.long())),
        (TypeError, "rms_norm: weight must be a tensor, got float", lambda: kernel.rms_norm(x, 1.0)),
        (ValueError, "rms_norm: weight must have shape (8,), got (7,)", lambda: kernel.rms_norm(x, w[:7])),
        (ValueError, "rms_norm: bias must have shape (8,), got (1, 8)", lambda: kernel.rms_norm(x, w, bias=w[None])),
        (ValueError, "rms_norm: weight must have 1 to x.dim() dimensions, got 3",
         lambda: kernel.rms_norm(x, w[None, None])),
        (ValueError, "rms_norm: weight must have 1 to x.dim() dimensions, got 1 for x ()",
         lambda: kernel.rms_norm(x[0, 0])),
        (ValueError, "rms_norm: eps must be at least 0, got -1", lambda: kernel.rms_norm(x, eps=-1)),
        (TypeError, "rms_norm: eps must be a number or None, got str", lambda: kernel.rms_norm(x, eps="1")),
        (ValueError, "rms_norm: casting must be one of 'before_weight', 'llama', 'after_weight', 'gemma', got 'bert'",
         lambda: kernel.rms_norm(x, casting="bert")),
        (ValueError, "add_rms_norm: residual must have shape (4, 8), got (8,)", lambda: kernel.add_rms_norm(x, w)),
        (TypeError, "add_rms_norm: residual_dtype must be a floating dtype or None, got torch.int8",
         lambda: kernel.add_rms_norm(x, x, residual_dtype=torch.int8)),
        (ValueError, "rms_norm: weight must be on", lambda: kernel.rms_norm(x, w.to("meta"))),
    ]  # fmt: skip
    for error, message, call in cases:
        with pytest.raises(error) as caught:
            call()
        assert str(caught.value).startswith(message)


def test_opcheck(family, device):
    x, w = tensor((3, 40), torch.float32, device), tensor((40,), torch.float32, device)
    x, w, transposed = x.requires_grad_(), w.requires_grad_(), tensor((3, 40), torch.float32, device, "transposed")
    opcheck(family.rms_norm_fwd, (x, w, None, 1e-6, 0.0, False))
    opcheck(family.rms_norm_fwd, (transposed, w, w, None, 1.0, True))
    opcheck(family.add_rms_norm_fwd, (x, transposed, w, None, 1e-6, 0.0, True, torch.float64))
    rstd = torch.rand(3, device=device)
    dtype = torch.float32
    opcheck(family.rms_norm_bwd, (x, None, transposed, w, w, rstd, 1e-6, 0.0, False, dtype, True, True))
    opcheck(family.rms_norm_bwd, (x, x, transposed, None, None, rstd, 1e-6, 0.0, False, dtype, False, False))


def test_direct_launch_is_the_op(kernel, family, device, on_kernels):
    if not on_kernels:
        pytest.skip("no kernels on this path")
    x, w = tensor((5, 300), torch.bfloat16, device), tensor((300,), torch.bfloat16, device)
    y, rstd = family.rms_norm_fwd(x, w, None, 1e-6, 0.0, False)
    assert torch.equal(kernel.rms_norm(x, w), y)
    x.requires_grad_(), w.requires_grad_()
    direct = torch.autograd.grad(kernel.rms_norm(x, w), (x, w), torch.ones_like(x))
    registered = torch.autograd.grad(family.rms_norm_fwd(x, w, None, 1e-6, 0.0, False)[0], (x, w), torch.ones_like(x))
    assert all(torch.equal(a, b) for a, b in zip(direct, registered))


def test_compile(kernel, device):
    def step(x, r, w):
        y, total = kernel.add_rms_norm(x * 2, r, w)
        return kernel.rms_norm(y + total, w).square().sum()

    tensors = [tensor(s, torch.float32, device).requires_grad_() for s in ((4, 64), (4, 64), (64,))]
    compiled = torch.compile(step, fullgraph=True)
    expected = torch.autograd.grad(step(*tensors), tensors)
    for a, b in zip(torch.autograd.grad(compiled(*tensors), tensors), expected):
        assert_close(a, b.double())
    with pytest.raises(ValueError, match="weight must have shape"):
        torch.compile(step)(tensors[0], tensors[1], tensors[2][:3])


def test_transforms(kernel, family, device):
    x, r, w, b = (tensor(s, torch.float64, device).requires_grad_() for s in ((2, 3), (2, 3), (3,), (3,)))

    def one(x, w, b):
        return kernel.rms_norm(x, w, bias=b, offset=1.0)

    def two(x, r, w):
        return kernel.add_rms_norm(x, r, w)

    assert gradcheck(one, (x, w, b)) and gradgradcheck(one, (x, w, b))
    assert gradcheck(two, (x, r, w)) and gradgradcheck(two, (x, r, w))
    x, w = x.detach(), w.detach()

    def loss(w, x):
        return kernel.rms_norm(x, w).square().sum()

    def reference_loss(w, x):
        return family.rms_norm_reference(x, w).square().sum()

    per_sample = torch.func.vmap(torch.func.grad(loss), (None, 0))(w, x)
    assert_close(per_sample, torch.func.vmap(torch.func.grad(reference_loss), (None, 0))(w, x))
    batch = torch.stack([x, 2 * x], 1)
    assert torch.equal(torch.func.vmap(kernel.rms_norm, (1, None))(batch, w)[1], kernel.rms_norm(2 * x, w))
    assert torch.func.jacrev(kernel.rms_norm)(x).shape == (2, 3, 2, 3)


def test_forward_mode_is_refused_not_lost(kernel, device, on_kernels):
    if not on_kernels:
        pytest.skip("PyTorch's own forward mode serves this path")
    x = tensor((2, 3), torch.float32, device)
    with pytest.raises(NotImplementedError):
        torch.func.jvp(kernel.rms_norm, (x,), (x,))


def test_repeats_are_equal(kernel, device):
    x, w = (tensor(s, torch.bfloat16, device).requires_grad_() for s in ((40, 256), (256,)))
    runs = [torch.autograd.grad(kernel.rms_norm(x, w), (x, w), torch.ones_like(x)) for _ in range(3)]
    assert all(torch.equal(a, b) for run in runs for a, b in zip(run, runs[0]))


def test_residual_stream_stays_frozen(kernel, device):
    """Where only the weight learns, the sum has no gradient to give, as in torch."""
    x, w = tensor((3, 16), torch.float32, device), tensor((16,), torch.float32, device).requires_grad_()
    y, total = kernel.add_rms_norm(x, x, w)
    assert y.requires_grad and not total.requires_grad
    (dw,) = torch.autograd.grad(y.sum(), w)
    assert torch.equal(dw, torch.autograd.grad(kernel.rms_norm(x + x, w).sum(), w)[0])


def test_batches_of_gradients(kernel, device):
    x = tensor((3, 8), torch.float32, device).requires_grad_()
    y, dy = kernel.rms_norm(x), torch.randn(4, 3, 8, device=device)
    (dx,) = torch.autograd.grad(y, x, dy, is_grads_batched=True, retain_graph=True)
    for d, g in zip(dx, dy):
        assert_close(d, torch.autograd.grad(y, x, g, retain_graph=True)[0].double())


def test_vmap_of_nothing(kernel, device):
    x, w = torch.zeros(0, 2, 3, device=device), torch.zeros(0, 3, device=device)
    assert torch.func.vmap(kernel.rms_norm)(x, w).shape == (0, 2, 3)


def test_rows_of_nothing(kernel, device):
    for eps in (0, 1e-6, None):
        assert kernel.rms_norm(torch.zeros(3, 0, device=device), eps=eps).shape == (3, 0)


def test_wide_residual(kernel, device):
    x, r = tensor((3, 16), torch.float32, device), tensor((3, 16), torch.float32, device)
    total = kernel.add_rms_norm(x, r, residual_dtype=torch.float64)[1]
    assert torch.equal(total, x.double() + r.double())


@pytest.mark.parametrize("quantize", ["fp8", torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz])
@pytest.mark.parametrize("casting", ["after_weight", "before_weight"])
def test_quantize(kernel, family, device, quantize, casting):
    """Near the exact norm, and what quantize_fp8 makes of a norm in float32, but for sums in another order."""
    options = {"offset": 1.0, "casting": casting}
    for shape, dtype in zip(((5, 300), (2, 3, 40), (3, 129), (2, 40000)), DTYPES):
        x = tensor(shape, dtype, device, scale=3.0)
        w, b = (tensor(shape[-1:], dtype, device) for _ in range(2))
        before = x.clone()
        q, scale = kernel.rms_norm(x, w, bias=b, quantize=quantize, **options)
        assert q.dtype == (torch.float8_e4m3fn if quantize == "fp8" else quantize) and q.is_contiguous()
        assert scale.dtype == torch.float32 and scale.shape == (*shape[:-1], 1) and torch.equal(x, before)
        r, expected = family.rms_norm_reference(x.cpu(), w.cpu(), bias=b.cpu(), quantize=quantize, **options)
        # before_weight rounds to x's dtype on the way, and an element may come out on the other side.
        assert_close(scale, expected.double(), ulps=16 if casting == "after_weight" else 2**17)
        assert (q.cpu().float() == r.float()).float().mean() > 0.98
        codes = q.cpu().view(torch.uint8).int(), r.view(torch.uint8).int()
        assert ((codes[0] - codes[1]).abs() % 127 <= 1).all()  # neighbours, or the two zeros
        if casting == "after_weight":
            exact = family.rms_norm_reference(x.cpu().double(), w.cpu().double(), bias=b.cpu().double(), offset=1.0)
            step = 2.0 ** -(4 if "e4m3" in str(q.dtype) else 3)
            smallest = scale.cpu().double() * 2.0 ** -(10 if "e4m3" in str(q.dtype) else 17)
            assert ((q.cpu().double() * scale.cpu() - exact).abs() <= step * exact.abs() * 1.001 + smallest).all()


def test_quantize_shapes_and_values(kernel, family, device):
    x, w = tensor((4, 5, 6), torch.float32, device, "transposed"), tensor((5, 6), torch.float32, device)
    q, scale = kernel.rms_norm(x, w, quantize="fp8")
    r, expected = family.rms_norm_reference(x.cpu(), w.cpu(), quantize="fp8")
    assert q.shape == (4, 5, 6) and scale.shape == (4, 1, 1)
    assert_close(scale, expected.double(), dim=0)
    x = tensor((4, 64), torch.float32, device)
    x[0, 3], x[1] = float("nan"), 0.0
    q, scale = kernel.rms_norm(x, quantize="fp8")
    assert q[0].float().isnan().all() and (q[1].float() == 0).all() and (scale[:2] == 1).all()
    assert q[2:].float().isfinite().all() and (q[2:].float().abs().amax(1) == 448).all()
    for shape in ((0, 8), (3, 0)):
        q, scale = kernel.rms_norm(torch.zeros(shape, device=device), quantize="fp8")
        assert q.shape == shape and scale.shape == (shape[0], 1)


def test_quantize_as_an_op(kernel, family, device, backend):
    x, w = tensor((3, 40), torch.float32, device), tensor((40,), torch.float32, device)
    args = (x, w, None, 1e-6, 0.0, False, torch.float8_e4m3fn)
    opcheck(family.rms_norm_quantize_fwd, args)
    for direct, registered in zip(kernel.rms_norm(x, w, quantize="fp8"), family.rms_norm_quantize_fwd(*args)):
        assert torch.equal(direct.float(), registered.float())
    compiled = torch.compile(lambda x: kernel.rms_norm(x * 2, w, quantize="fp8"), fullgraph=True, backend=backend)
    assert torch.equal(compiled(x)[0].float(), kernel.rms_norm(x * 2, w, quantize="fp8")[0].float())
    q, scale = torch.func.vmap(lambda t: kernel.rms_norm(t, w, quantize="fp8"))(torch.stack([x, 2 * x]))
    assert torch.equal(q[1].float(), kernel.rms_norm(2 * x, w, quantize="fp8")[0].float()) and scale.shape == (2, 3, 1)
    q, scale = kernel.rms_norm(x.requires_grad_(), w, quantize="fp8")
    with pytest.raises(NotImplementedError, match="rms_norm: has no gradient"):
        (q.float() * scale).sum().backward()
    with pytest.raises(ValueError, match="rms_norm: quantize must be 'fp8', a float8 dtype or None, got 'int8'"):
        kernel.rms_norm(x, w, quantize="int8")
