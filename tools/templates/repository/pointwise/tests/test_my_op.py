import pytest
import torch
from _check import DTYPES, assert_close, check


@pytest.fixture
def op(kernel):
    return kernel.my_op


def reference(x):
    return x * torch.sigmoid(x)


@pytest.mark.kernels_ci
@pytest.mark.parametrize("dtype", DTYPES)
def test_matches_reference(op, device, dtype):
    check(op, reference, (4 * torch.randn(3, 4, 100, device=device)).to(dtype))


@pytest.mark.parametrize("shape", [(), (1,), (3, 5), (1025,), (0, 8)])
def test_shapes(op, device, shape):
    check(op, reference, torch.randn(shape, device=device))


def test_strides(op, device):
    x = torch.randn(6, 40, device=device)
    permuted = torch.randn(2, 3, 4, 5, device=device).transpose(1, 3)
    for layout in (x.t(), x[::2], x[:, ::3], x[:1].expand(4, 40), permuted):
        check(op, reference, layout)


def test_special_values(op, device):
    x = torch.tensor([float("nan"), float("inf"), 1e30, -1e30, -90.0, 0.0], device=device)
    assert_close(op(x), reference(x.cpu().double()))
    first, second = op(x), op(x)
    assert torch.equal(first.nan_to_num(), second.nan_to_num())


def test_registration(op, kernel, device):
    x = torch.randn(3, 40, device=device, requires_grad=True)
    ops = kernel._ops.ops
    torch.library.opcheck(ops.my_op_fwd.default, (x,))
    torch.library.opcheck(ops.my_op_bwd.default, (x.detach().t(), x.detach().t()))
    y = torch.compile(op, fullgraph=True, backend="aot_eager")(x)
    assert torch.equal(y, op(x))
    with pytest.raises(TypeError, match="my_op: x must be a float32, float16 or bfloat16 tensor"):
        op(x.long())
