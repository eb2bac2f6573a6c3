import pytest
import torch
from _check import DTYPES, assert_close, check


@pytest.fixture
def op(kernel):
    return kernel.my_op


def reference(a, b):
    return a @ b


def operands(device, M, N, K, dtype=torch.float32):
    return torch.randn(M, K, device=device).to(dtype), torch.randn(K, N, device=device).to(dtype)


@pytest.mark.kernels_ci
@pytest.mark.parametrize("dtype", DTYPES)
def test_matches_reference(op, device, dtype):
    check(op, reference, *operands(device, 70, 65, 50, dtype))


@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 5, 7), (65, 129, 33), (1, 200, 100), (0, 4, 5), (4, 3, 0)])
def test_shapes(op, device, shape):
    check(op, reference, *operands(device, *shape))


def test_strides(op, device):
    a, b = operands(device, 40, 30, 20)
    for x, y in ((b.t(), a.t()), (a[::2], b[:, ::3]), (a[:1].expand(9, 20), b), (a[:, ::2], b[::2])):
        check(op, reference, x, y)


def test_special_values(op, device):
    a, b = operands(device, 5, 6, 7)
    a[0, 3], a[1, 4] = float("nan"), float("inf")
    assert_close(op(a, b), reference(a.cpu().double(), b.cpu().double()))
    a[0, 3], a[1, 4] = 0.0, 0.0
    assert torch.equal(op(a, b), op(a, b))


def test_registration(op, kernel, device):
    a, b = (t.requires_grad_() for t in operands(device, 5, 6, 7))
    ops = kernel._ops.ops
    torch.library.opcheck(ops.my_op_fwd.default, (a, b))
    torch.library.opcheck(ops.my_op_fwd.default, (b.detach().t(), a.detach().t()))
    y = torch.compile(op, fullgraph=True, backend="aot_eager")(a, b)
    assert torch.equal(y, op(a, b))
    with pytest.raises(ValueError, match=r"my_op: a and b must be \(M, K\) and \(K, N\), got"):
        op(a, a)
