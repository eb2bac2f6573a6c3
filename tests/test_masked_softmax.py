import pytest
import torch
import torch.nn.functional as F
from _inputs import LAYOUTS, tensor
from _numerics import DTYPES, assert_close, evaluate, gradcheck, gradgradcheck, opcheck

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of the NaN and inf that are meant

NAN, INF = float("nan"), float("inf")
LOWEST = torch.finfo(torch.float32).min


@pytest.fixture(scope="module")
def family(internals):
    return internals("masked_softmax")


@pytest.fixture
def hold(family):
    """Hold the function and its gradients against the reference in float64.

    Gradients are held at the result as it was rounded. What their subtraction cancels may be far larger than what is
    left: an allowance in proportion to that is added to the policy's.
    """

    def hold(x, mask=None, dy=None, gradient=True, **options):
        x = x.detach()
        floating = mask is not None and mask.dtype != torch.bool
        dy = torch.randn_like(x) if dy is None else dy
        inputs = [t for t in (x, mask, dy) if t is not None]
        kept = [t.clone() for t in inputs]
        tensors = (x, mask) if floating else (x,)
        (y,), grads = evaluate(
            lambda x, m=mask: family.masked_softmax(x, m, **options), tensors, {}, [dy]
        )  # fmt: skip
        assert all(torch.equal(t.nan_to_num(1.5), k.nan_to_num(1.5)) for t, k in zip(inputs, kept)), "written to"
        assert y.dtype == x.dtype and y.is_contiguous()
        wide = [t.detach().cpu().double() if t.is_floating_point() else t.cpu() for t in (x, *inputs[1:-1])]
        assert_close(y, family.masked_softmax_reference(*wide, **options))
        if gradient:
            p, dp = y.detach().cpu().double(), dy.cpu().double()
            scale = options.get("scale", 1.0)
            size = p * (dp.abs() + (dp * p).abs().sum(-1, keepdim=True))
            slack = 4 * torch.finfo(torch.float64 if x.dtype == torch.float64 else torch.float32).eps * size
            dx, dm = family._bwd_reference(dp, p, scale, torch.float64)
            if family.use_kernel(x):
                assert_close(grads[0], dx, slack=abs(scale) * slack, name="dx")
                if floating and mask.shape == x.shape:
                    assert_close(grads[1], dm, slack=slack, name="dm")
            if floating and mask.shape != x.shape:  # summed by PyTorch from rounded terms
                eps = torch.finfo(mask.dtype).eps
                assert_close(grads[1], dm.sum_to_size(mask.shape), dim=None, ulps=16, slack=eps * x.numel() ** 0.5)
        return y, grads

    return hold


def mask_of(shape, device, share=0.4):
    return torch.rand(shape, device=device) > share


# The reference first: it is the oracle of everything below.


def test_reference_is_torch(family):
    """softmax where nothing is masked, and else what scaled_dot_product_attention weighs the values with."""
    x = tensor((2, 3, 5, 7), torch.float64)
    assert_close(family.masked_softmax_reference(x, scale=0.3), F.softmax(0.3 * x, -1))
    q, k = tensor((2, 3, 5, 4), torch.float64), tensor((2, 3, 7, 4), torch.float64)
    eye = torch.eye(7, dtype=torch.float64).expand(2, 3, 7, 7)
    boolean = mask_of((2, 1, 5, 7), "cpu")
    boolean[..., 0] = True
    for mask, causal in ((None, False), (None, True), (boolean, False), (tensor((5, 7), torch.float64), False)):
        (y,), grads = evaluate(
            lambda q, k, m=mask, c=causal: family.masked_softmax_reference(q @ k.mT, m, scale=0.5, causal=c),
            (q, k), {}, [x])  # fmt: skip
        (t,), expected = evaluate(
            lambda q, k, m=mask, c=causal: F.scaled_dot_product_attention(q, k, eye, m, is_causal=c, scale=0.5),
            (q, k), {}, [x])  # fmt: skip
        for mine, theirs in zip((y, *grads), (t, *expected)):
            assert_close(mine, theirs, slack=1e-15)


def test_closed_form_gradient(family):
    x, mask, dy = (tensor((4, 6), torch.float64) for _ in range(3))
    mask[1] = -INF
    (y,), grads = evaluate(family.masked_softmax_reference, (x, mask), {"scale": 0.7}, [dy])
    for mine, theirs in zip(family._bwd_reference(dy, y.detach(), 0.7, torch.float64), grads):
        assert_close(mine, theirs, slack=1e-15)
    assert torch.equal(y[1], torch.zeros(6).double()) and torch.equal(grads[0][1], y[1])


@pytest.mark.kernels_ci
@pytest.mark.parametrize("dtype", DTYPES)
def test_matches_reference(hold, device, dtype):
    x = tensor((2, 3, 5, 40), dtype, device, scale=3.0)
    for mask in (
        None,
        mask_of((2, 1, 1, 40), device),
        tensor((3, 5, 40), dtype, device),
        tensor(x.shape, dtype, device),
    ):
        for causal in (False, True, "lower_right"):
            hold(x, mask, scale=0.3, causal=causal)
    for other in (torch.float32, torch.bfloat16, torch.float64):
        hold(x, tensor(x.shape, other, device), scale=-0.3)


@pytest.mark.parametrize("N", [1, 3, 127, 128, 129, 1000, 32769, 262144])
def test_widths(hold, device, on_kernels, N):
    if N > 2**17 and not on_kernels:
        pytest.skip("PyTorch's own sum of so many exponentials is off by 30 ulps on some CPUs")
    x = tensor((1 if N > 2000 else 3, N), torch.float32, device, scale=2.0)
    hold(x, mask_of((N,), device), scale=0.5)
    hold(x, tensor((1, N), torch.float32, device), gradient=N < 20000)


@pytest.mark.parametrize("shape", [(4, 9), (9, 4), (3, 5, 5), (1, 6), (6, 1), (2, 33000)])
def test_causal(hold, family, device, shape):
    """Which keys each query sees, where there are more or fewer of them."""
    S, N = shape[-2:]
    x = tensor(shape, torch.float32, device)
    i, j = torch.arange(S, device=device)[:, None], torch.arange(N, device=device)
    for causal, seen in ((True, j <= i), ("upper_left", j <= i), ("lower_right", j <= i + N - S)):
        y, _ = hold(x, causal=causal)
        assert torch.equal(y != 0, seen.expand(shape) & (y != 0)) and torch.equal(
            (y != 0).any(-1), seen.any(-1).expand(shape[:-1])
        )
        assert_close(y, family.masked_softmax(x, seen).double())


@pytest.mark.parametrize("N", [7, 33000])
def test_fully_masked_rows(family, device, N):
    """0, with a gradient of 0, however they come to be masked."""
    x, dy = tensor((3, N), torch.float32, device), tensor((3, N), torch.float32, device)
    boolean = torch.ones(3, N, dtype=torch.bool, device=device)
    boolean[1] = False
    added = torch.zeros(3, N, device=device).masked_fill(~boolean, -INF)
    for values, options in (
        (x, {"mask": boolean}),
        (x, {"mask": added}),
        (x.masked_fill(~boolean, -INF), {}),
        (x.masked_fill(~boolean, NAN), {"mask": boolean}),  # what a bool mask hides does not count
        (x.masked_fill(~boolean, INF), {"mask": boolean}),
    ):
        (y,), (dx,) = evaluate(family.masked_softmax, (values,), options, [dy])
        assert torch.equal(y[1], torch.zeros_like(y[1])) and torch.equal(dx[1], y[1])
        assert_close(y[::2], F.softmax(x[::2].double(), -1))
        assert dx.isfinite().all()
    y = family.masked_softmax(tensor((4, 2), torch.float32, device), causal="lower_right")
    assert torch.equal(y[:2], torch.zeros_like(y[:2])) and y[2, 1] == 0 and (y.sum(-1)[2:] - 1).abs().max() < 1e-6


@pytest.mark.parametrize("N", [33, 33000])
def test_special_values(family, device, N):
    x = tensor((7, N), torch.float32, device)
    x[0, 1], x[1, 2], x[2, N - 3] = NAN, INF, -INF
    x[3] = LOWEST
    x[4, : N // 2] = -INF
    x[5, 0], x[5, 1] = -LOWEST, LOWEST
    x[6] = torch.linspace(-100.0, 100.0, N)  # a new maximum at every step
    y = family.masked_softmax(x)
    assert_close(y, F.softmax(x.double(), -1))
    assert y[:2].isnan().all() and not y[2:].isnan().any()
    # Masks as transformers makes them: the lowest finite number, which leaves a row of nothing else uniform.
    low = torch.full((N,), LOWEST, device=device)
    assert_close(family.masked_softmax(x[6:] / 100, low), torch.full((1, N), 1 / N).double())


@pytest.mark.parametrize("shape", [(0, 8), (2, 0, 8), (3, 0), (0,), (0, 0)])
def test_empty(hold, device, shape):
    x = tensor(shape, torch.float32, device)
    hold(x)
    hold(x, mask_of(shape, device), causal=len(shape) > 1)
    hold(x, tensor(shape, torch.float32, device))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(6, 40), (2, 3, 4, 36)])
def test_strides(hold, device, layout, shape):
    x = tensor(shape, torch.float32, device, layout)
    plain = tensor(shape, torch.float32, device)
    hold(x, dy=plain, causal=True)
    hold(plain, x, dy=tensor(shape, torch.float32, device, layout), causal=True)
    hold(x, mask_of(shape[::-1], device).permute(*reversed(range(len(shape)))))


@pytest.mark.parametrize(
    "mask_shape",
    [(), (1,), (40,), (5, 1), (5, 40), (3, 1, 1), (2, 1, 1, 40), (2, 1, 5, 40), (1, 3, 5, 40), (2, 3, 1, 1)],
)
def test_masks_broadcast(hold, device, mask_shape):
    x = tensor((2, 3, 5, 40), torch.float32, device)
    hold(x, mask_of(mask_shape, device), causal="lower_right")
    hold(x, tensor(mask_shape, torch.float32, device), causal=True)


def test_heads_of_a_row_together(family, device, on_kernels, monkeypatch):
    """The order of programs that a large mask of all heads asks for."""
    for shape, mask_shape in (((2, 3, 5, 40), (2, 1, 5, 40)), ((1, 4, 33, 5000), (33, 5000))):
        x, mask = tensor(shape, torch.float32, device), mask_of(mask_shape, device)
        monkeypatch.setattr(family, "_together", lambda *_: False)
        expected = family.masked_softmax(x, mask, causal=True)
        monkeypatch.setattr(family, "_together", lambda *_: True)
        assert torch.equal(family.masked_softmax(x, mask, causal=True), expected)


def test_permuted_heads(hold, device):
    x = tensor((2, 5, 3, 16), torch.float32, device).transpose(1, 2)
    hold(x, mask_of((2, 1, 5, 16), device), dy=tensor((16, 5, 3, 2), torch.float32, device).permute(3, 2, 1, 0))
    many = tensor((2, 2, 2, 2, 2, 8), torch.float32, device).permute(4, 2, 0, 5, 3, 1)
    hold(many, mask_of((2, 1, 8, 2, 2), device))


def test_far_rows(family, device):
    if device.type == "cpu":
        pytest.skip("4 GiB of memory: on a GPU only")
    x = torch.empty(2**31 + 64, dtype=torch.bfloat16, device=device).as_strided((2, 64), (2**31, 1))
    x.copy_(torch.randn(2, 64))
    assert torch.equal(family.masked_softmax(x, causal=True), family.masked_softmax(x.contiguous(), causal=True))
    mask = (x > 0).new_zeros(2**31 + 64).as_strided((2, 64), (2**31, 1)).copy_(x > 0)
    assert torch.equal(family.masked_softmax(x, mask), family.masked_softmax(x.contiguous(), mask.contiguous()))


def test_bad_input(family, device):
    x = tensor((4, 8), torch.float32, device)
    floats = "float64 | float32 | float16 | bfloat16"
    far = torch.ones(8, dtype=torch.bool, device="meta")
    cases = [
        (TypeError, "x must be a tensor, got list", lambda: family.masked_softmax([1.0])),
        (TypeError, f"x must have dtype {floats}, got int64", lambda: family.masked_softmax(x.long())),
        (TypeError, f"mask must have dtype {floats}, got int64", lambda: family.masked_softmax(x, x.long())),
        (TypeError, "mask must be a tensor, got list", lambda: family.masked_softmax(x, [True])),
        (ValueError, f"mask must be on {device} as x is, got meta", lambda: family.masked_softmax(x, far)),
        (ValueError, "mask must broadcast to (4, 8), got (3, 8)", lambda: family.masked_softmax(x, x[:3])),
        (ValueError, "mask must broadcast to (4, 8), got (1, 4, 8)", lambda: family.masked_softmax(x, x[None])),
        (TypeError, "scale must be a number, got Tensor", lambda: family.masked_softmax(x, scale=x)),
        (ValueError, "causal must be one of 'upper_left', 'lower_right', got 'left'",
         lambda: family.masked_softmax(x, causal="left")),
        (ValueError, "x must have at least 2 dimensions, got shape (8,)",
         lambda: family.masked_softmax(x[0], causal=True)),
        (ValueError, "x must have at least 1 dimensions, got shape ()", lambda: family.masked_softmax(x[0, 0])),
    ]  # fmt: skip
    for error, message, call in cases:
        with pytest.raises(error) as caught:
            call()
        assert str(caught.value).startswith(f"masked_softmax: {message}")


def test_opcheck(family, device):
    x = tensor((3, 40), torch.float32, device).requires_grad_()
    across = tensor((3, 40), torch.bfloat16, device, "transposed").requires_grad_()
    mask = tensor((1, 40), torch.float32, device).expand(3, 40).requires_grad_()
    opcheck(family.masked_softmax_fwd, (x, mask, 0.5, None))
    opcheck(family.masked_softmax_fwd, (across, mask > 0, 0.5, 0))
    opcheck(family.masked_softmax_fwd, (across, None, 1.0, -2))
    for mask_dtype in (None, torch.float16):
        opcheck(family.masked_softmax_bwd, (x, x.detach() * 2, 0.5, mask_dtype))
        opcheck(family.masked_softmax_bwd, (across, across.detach(), 0.5, mask_dtype))


def test_direct_launch_is_the_op(family, device, on_kernels):
    if not on_kernels:
        pytest.skip("no kernels on this path")
    x, mask = (
        tensor((5, 300), torch.bfloat16, device).requires_grad_(),
        tensor((5, 300), device=device).requires_grad_(),
    )
    direct, op = family.masked_softmax(x, mask, scale=0.5, causal=True), family.masked_softmax_fwd(x, mask, 0.5, 0)
    assert torch.equal(direct, op)
    grads = (torch.autograd.grad(y, (x, mask), x) for y in (direct, op))
    assert all(torch.equal(*pair) for pair in zip(*grads))


def test_compile(family, device, backend):
    def step(x, mask, boolean):
        y = family.masked_softmax(x * 2, mask, scale=0.5, causal=True)
        return (y + family.masked_softmax(x, boolean, causal="lower_right")).square().sum(-1)

    x, mask = tensor((2, 4, 16), device=device), tensor((16,), device=device)
    boolean, dy = mask_of((4, 1), device), torch.randn(2, 4, device=device)
    (y,), grads = evaluate(lambda x, m: step(x, m, boolean), (x, mask), {}, [dy])
    compiled = torch.compile(step, fullgraph=True, backend=backend)
    (z,), found = evaluate(lambda x, m: compiled(x, m, boolean), (x, mask), {}, [dy])
    for a, b in zip((y, *grads), (z, *found)):
        assert_close(b, a.double(), dim=None)


def test_derivatives(family, device):
    x, mask = (tensor((2, 3), torch.float64, device).requires_grad_() for _ in range(2))
    small = tensor((3,), torch.float64, device).requires_grad_()
    boolean = torch.tensor([[True, False, True], [False, False, False]], device=device)
    for function, inputs in (
        (lambda x: family.masked_softmax(x, boolean, scale=0.7), (x,)),
        (lambda x, m: family.masked_softmax(x, m, scale=0.7, causal=True), (x, mask)),
        (lambda x, m: family.masked_softmax(x, m), (x, small)),
    ):
        assert gradcheck(function, inputs) and gradgradcheck(function, inputs)


def test_transforms(family, device):
    x, mask = tensor((3, 4, 5), torch.float64, device), tensor((4, 5), torch.float64, device)

    def loss(function, causal):
        return lambda x, m: function(x, m, scale=0.6, causal=causal).pow(3).sum()

    for causal in (False, "lower_right"):
        mine, theirs = (loss(f, causal) for f in (family.masked_softmax, family.masked_softmax_reference))
        for dims, args in (((0, None), (x, mask)), ((1, None), (x.transpose(0, 1), mask)), ((0, 0), (x, x.flip(0)))):
            found, expected = (torch.func.vmap(torch.func.grad(f, (0, 1)), dims)(*args) for f in (mine, theirs))
            for a, b in zip(found, expected):
                assert_close(a, b, dim=None, slack=1e-15)
    rows = torch.func.vmap(lambda x, m: family.masked_softmax(x, m))(x[0], mask > 0)
    assert_close(rows, family.masked_softmax(x[0], mask > 0))


def test_forward_mode_is_refused_not_lost(family, device, on_kernels):
    if not on_kernels:
        pytest.skip("PyTorch's own forward mode serves this path")
    x = tensor((2, 3), torch.float32, device)
    with pytest.raises(NotImplementedError):
        torch.func.jvp(family.masked_softmax, (x,), (x,))
