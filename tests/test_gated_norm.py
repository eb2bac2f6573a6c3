import pytest
import torch
from _inputs import LAYOUTS, tensor
from _numerics import DTYPES, assert_close, check, evaluate, gradcheck, gradgradcheck, opcheck

HALF = (torch.float16, torch.bfloat16)


@pytest.fixture(scope="module")
def family(internals):
    return internals("gated_norm")


# The reference first: it is the oracle of everything below.


def huggingface(module, weight, **attributes):
    """A forward of one of transformers' classes, on the given weight."""
    import importlib

    name, cls = module
    layer = getattr(importlib.import_module(f"transformers.models.{name}.modeling_{name}"), cls)(
        weight.shape[0], **attributes
    )
    layer.weight = torch.nn.Parameter(weight)
    return layer


MODELS = [
    (("qwen3_next", "Qwen3NextRMSNormGated"), {}, {"casting": "before_weight"}),
    (("kimi_linear", "KimiLinearRMSNormGated"), {}, {"activation": "sigmoid"}),
    (("mamba2", "MambaRMSNormGated"), {}, {"casting": "before_weight", "norm_before_gate": False}),
    (("zamba2", "Zamba2RMSNormGated"), {"group_size": 50},
     {"casting": "before_weight", "norm_before_gate": False, "group_size": 50}),
]  # fmt: skip


@pytest.mark.parametrize("module, attributes, options", MODELS, ids=[m[0][0] for m in MODELS])
@pytest.mark.parametrize("dtype, w_dtype", [(d, d) for d in DTYPES[1:]] + [(torch.bfloat16, torch.float32)])
def test_is_hugging_face(family, device, module, attributes, options, dtype, w_dtype):
    """The reference bit for bit; the kernel but for a few elements of one ulp."""
    x, gate, w = tensor((16, 300), dtype), tensor((16, 300), dtype), tensor((300,), w_dtype)
    expected = huggingface(module, w, **attributes)(x, gate)
    y = family.rms_norm_gated_reference(x, gate, w, **options)
    assert y.dtype == expected.dtype and torch.equal(y, expected)
    y = family.rms_norm_gated(x.to(device), gate.to(device), w.to(device), **options)
    assert y.dtype == expected.dtype
    if dtype == torch.float32:
        assert_close(y, expected.double())
    else:  # a sum that differs in its last digit may round the other way before the weight, and again after it
        y, expected = y.cpu().double(), expected.double()
        assert ((y - expected).abs() <= 1e-6 * expected.abs()).float().mean() >= 0.995
        assert ((y - expected).abs() <= 2 * torch.finfo(dtype).eps * expected.abs()).all()


@pytest.mark.kernels_ci
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "options",
    [{}, {"norm_before_gate": False}, {"group_size": 20, "activation": "sigmoid", "eps": None},
     {"group_size": 50, "norm_before_gate": False, "activation": "gelu"}],
)  # fmt: skip
def test_matches_reference(family, device, dtype, options):
    x, gate, w = (tensor(s, dtype, device) for s in ((3, 5, 100), (3, 5, 100), (100,)))
    check(family.rms_norm_gated, family.rms_norm_gated_reference, x, gate, w, **options)
    check(family.rms_norm_gated, family.rms_norm_gated_reference, x, gate, **options)


@pytest.mark.parametrize("N", [1, 3, 127, 128, 129, 1000, 65537])
@pytest.mark.parametrize("norm_before_gate", [True, False])
def test_widths(family, device, N, norm_before_gate):
    x, gate, w = (tensor(s, torch.float32, device) for s in ((3, N), (3, N), (N,)))
    # N = 1: dx cancels to about 0; what is left is the rounding of larger terms.
    slack = 64 * 2**-23 * float(1 + (w / x).abs().max() + (w / gate).abs().max()) if N == 1 else 0.0
    check(
        family.rms_norm_gated, family.rms_norm_gated_reference, x, gate, w,
        slack=slack, norm_before_gate=norm_before_gate,
    )  # fmt: skip


def test_widest(family, device):
    x, gate, w = (tensor(s, torch.float32, device) for s in ((1, 262144), (1, 262144), (262144,)))
    check(family.rms_norm_gated, family.rms_norm_gated_reference, x, gate, w)


def test_wide_groups_many_rows(family, device):
    """Each program takes several rows of a group too wide for registers."""
    x, gate, w = (tensor(s, torch.float32, device) for s in ((9, 40000), (9, 40000), (40000,)))
    check(family.rms_norm_gated, family.rms_norm_gated_reference, x, gate, w, group_size=20000)


@pytest.mark.parametrize("shape", [(0, 8), (2, 0, 8), (3, 0), (0, 0)])
def test_empty(family, device, shape):
    x, gate, w = (tensor(s, torch.float32, device) for s in (shape, shape, shape[-1:]))
    check(family.rms_norm_gated, family.rms_norm_gated_reference, x, gate, w)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_strides(family, device, layout):
    shape = (2, 3, 4, 36)
    x, gate = (tensor(shape, torch.float32, device, layout), tensor(shape, torch.float32, device))
    w = tensor((36,), torch.float32, device, "columns_sliced")
    for a, b, dy in ((x, gate, gate), (gate, x, x), (x, x.clone(), x)):
        (y,) = check(
            family.rms_norm_gated, family.rms_norm_gated_reference, a, b, w, grads=[dy.detach().clone()], group_size=12
        )
        assert y.is_contiguous()


def test_halves_of_a_projection(family, device):
    """x and gate read where they lie in one tensor."""
    packed = tensor((4, 5, 128), torch.float32, device)
    x, gate = packed.chunk(2, -1)
    check(family.rms_norm_gated, family.rms_norm_gated_reference, x, gate, grads=[packed[..., ::2]])


def test_mixed_dtypes(family, device):
    x, gate, w = (tensor((4, 64), torch.bfloat16, device), tensor((4, 64), torch.float32, device),
                  tensor((64,), torch.float32, device))  # fmt: skip
    (y,) = check(family.rms_norm_gated, family.rms_norm_gated_reference, x, gate, w)
    assert y.dtype == torch.bfloat16
    check(family.rms_norm_gated, family.rms_norm_gated_reference, gate, x, w.double())


def test_special_values(family, device):
    x, gate = tensor((6, 33), torch.float32, device), tensor((6, 33), torch.float32, device)
    x[0, 3], x[1, 4], gate[2, 5], gate[3, 5] = float("nan"), float("inf"), float("nan"), -float("inf")
    x[4] = 0.0
    for first in (True, False):
        y = family.rms_norm_gated(x, gate, norm_before_gate=first)
        expected = family.rms_norm_gated_reference(x.cpu(), gate.cpu(), norm_before_gate=first)
        assert_close(y, expected.double())


def test_half_does_not_overflow(family, device):
    x, gate = tensor((4, 64), torch.float16, device, scale=1e4), tensor((4, 64), torch.float16, device)
    check(family.rms_norm_gated, family.rms_norm_gated_reference, x, gate)


def test_bad_input(family, device):
    x, w = tensor((4, 8), torch.float32, device), tensor((8,), torch.float32, device)
    f = family.rms_norm_gated
    cases = [
        (TypeError, "x must be a tensor, got list", lambda: f([1.0], x)),
        (TypeError, "gate must be a tensor, got NoneType", lambda: f(x, None)),
        (TypeError, "gate must have dtype float64 | float32 | float16 | bfloat16, got int64", lambda: f(x, x.long())),
        (ValueError, "gate must have shape (4, 8), got (8,)", lambda: f(x, w)),
        (ValueError, "weight must have shape (8,), got (7,)", lambda: f(x, x, w[:7])),
        (ValueError, "x must have at least one dimension, got ()", lambda: f(x[0, 0], x[0, 0])),
        (ValueError, "eps must be at least 0, got -1", lambda: f(x, x, eps=-1)),
        (ValueError, "activation must be one of 'relu'", lambda: f(x, x, activation="swish")),
        (ValueError, "casting must be one of 'before_weight', 'after_weight', got 'x'", lambda: f(x, x, casting="x")),
        (ValueError, "group_size must be an int that divides 8, got 3", lambda: f(x, x, group_size=3)),
        (ValueError, "group_size must be an int that divides 8, got 0", lambda: f(x, x, group_size=0)),
        (ValueError, "weight must be on", lambda: f(x, x, w.to("meta"))),
    ]
    for error, message, call in cases:
        with pytest.raises(error) as caught:
            call()
        assert str(caught.value).startswith(f"rms_norm_gated: {message}")


def test_opcheck(family, device):
    x, gate, w = (tensor(s, torch.float32, device).requires_grad_() for s in ((3, 40), (3, 40), (40,)))
    across = tensor((3, 40), torch.bfloat16, device, "transposed")
    opcheck(family.rms_norm_gated_fwd, (x, across, w, 1e-6, "silu", True, 40, False))
    opcheck(family.rms_norm_gated_fwd, (across, gate, w, None, "sigmoid", False, 20, True))
    rstd = torch.rand(3, 2, device=device)
    opcheck(family.rms_norm_gated_bwd, (x, across, gate, w, rstd, 1e-6, "silu", True, 20, True))
    opcheck(family.rms_norm_gated_bwd, (x, x, gate, None, rstd, 1e-6, "silu", False, 20, False))


def test_direct_launch_is_the_op(family, device, on_kernels):
    if not on_kernels:
        pytest.skip("no kernels on this path")
    tensors = [tensor(s, torch.bfloat16, device).requires_grad_() for s in ((5, 300), (5, 300), (300,))]
    direct = family.rms_norm_gated(*tensors)
    registered = family.rms_norm_gated_fwd(*tensors, 1e-6, "silu", True, 300, False)[0]
    assert torch.equal(direct, registered)
    pairs = zip(*(torch.autograd.grad(y, tensors, torch.ones_like(y)) for y in (direct, registered)))
    assert all(torch.equal(a, b) for a, b in pairs)


def test_compile(family, device, backend):
    def step(x, gate, w):
        return family.rms_norm_gated(x * 2, gate, w, group_size=32, norm_before_gate=False).square().sum()

    tensors = [tensor(s, torch.float32, device).requires_grad_() for s in ((4, 64), (4, 64), (64,))]
    expected = torch.autograd.grad(step(*tensors), tensors)
    for a, b in zip(
        torch.autograd.grad(torch.compile(step, fullgraph=True, backend=backend)(*tensors), tensors), expected
    ):
        assert_close(a, b.double())


def test_transforms(family, device):
    x, gate, w = (tensor(s, torch.float64, device).requires_grad_() for s in ((2, 4), (2, 4), (4,)))
    for options in ({}, {"norm_before_gate": False, "group_size": 2}):
        f = lambda x, gate, w: family.rms_norm_gated(x, gate, w, **options)  # noqa: B023, E731
        assert gradcheck(f, (x, gate, w)) and gradgradcheck(f, (x, gate, w))
    x, gate, w = x.detach(), gate.detach(), w.detach()
    loss = lambda f: lambda w, x, gate: f(x, gate, w).square().sum()  # noqa: E731
    per_sample = [
        torch.func.vmap(torch.func.grad(loss(f)), (None, 0, 0))(w, x, gate)
        for f in (family.rms_norm_gated, family.rms_norm_gated_reference)
    ]
    assert_close(*per_sample)
    batch = torch.stack([x, 2 * x], 1)
    y = torch.func.vmap(family.rms_norm_gated, (1, 1))(batch, batch)
    assert torch.equal(y[1], family.rms_norm_gated(2 * x, 2 * x))


def test_repeats_are_equal(family, device):
    tensors = [tensor(s, torch.bfloat16, device).requires_grad_() for s in ((40, 256), (40, 256), (256,))]
    runs = []
    for _ in range(2):
        _, grads = evaluate(family.rms_norm_gated, tensors, {}, [torch.ones_like(tensors[0])])
        runs.append(grads)
    assert all(torch.equal(a, b) for a, b in zip(*runs))
