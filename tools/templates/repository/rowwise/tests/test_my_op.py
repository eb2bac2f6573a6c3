import pytest
import torch
from _check import DTYPES, assert_close, check


@pytest.fixture
def op(kernel):
    return kernel.my_op


def reference(x):
    return torch.softmax(x, -1)


def hold(op, x):
    """y * (dy - sum(dy * y)) is a difference of terms of about 1 / N."""
    check(op, reference, x, terms=1 / max(x.shape[-1], 1))


@pytest.mark.kernels_ci
@pytest.mark.parametrize("dtype", DTYPES)
def test_matches_reference(op, device, dtype):
    x = torch.randn(3, 4, 100, device=device).to(dtype)
    assert_close(op(x), reference(x.double()))
    if dtype == torch.float32:  # in 16 bits the gradient is that of the rounded result
        hold(op, x)


@pytest.mark.parametrize("shape", [(1, 1), (2, 3), (3, 129), (5, 781), (0, 8), (2, 0), (7,)])
def test_shapes(op, device, shape):
    hold(op, torch.randn(shape, device=device))


def test_strides(op, device):
    x = torch.randn(6, 40, device=device)
    permuted = torch.randn(2, 3, 4, 5, device=device).transpose(1, 3)
    for layout in (x.t(), x[::2], x[:, ::3], x[:1].expand(4, 40), permuted):
        hold(op, layout)


def test_special_values(op, device):
    x = torch.randn(5, 33, device=device)
    x[0, 3], x[1, 4], x[2] = float("nan"), float("inf"), -float("inf")
    x[3] = 1e30
    assert_close(op(x), reference(x.cpu().double()))
    first, second = op(x), op(x)
    assert torch.equal(first.nan_to_num(), second.nan_to_num())


def test_registration(op, kernel, device):
    x = torch.randn(3, 40, device=device, requires_grad=True)
    ops = kernel._ops.ops
    torch.library.opcheck(ops.my_op_fwd.default, (x,))
    torch.library.opcheck(ops.my_op_bwd.default, (x.detach().t(), x.detach().t().contiguous()))
    y = torch.compile(op, fullgraph=True, backend="aot_eager")(x)
    assert torch.equal(y, op(x))
    with pytest.raises(TypeError, match="my_op: x must be a float32, float16 or bfloat16 tensor"):
        op(x.long())
