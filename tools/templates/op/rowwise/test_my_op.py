import pytest
import torch
from _inputs import LAYOUTS, tensor
from _numerics import DTYPES, assert_close, check, gradcheck, gradgradcheck, opcheck


@pytest.fixture(scope="module")
def op(kernel):
    return kernel.my_op


@pytest.fixture(scope="module")
def family(internals):
    return internals("my_op")


@pytest.fixture(scope="module")
def reference(family):
    return family.my_op_reference


def test_reference(reference):
    x = tensor((4, 50), torch.float64)
    assert_close(reference(x), torch.nn.functional.rms_norm(x, (50,), eps=1e-6))


@pytest.mark.kernels_ci
@pytest.mark.parametrize("dtype", DTYPES)
def test_matches_reference(op, reference, device, dtype):
    check(op, reference, tensor((5, 7, 100), dtype, device))


@pytest.mark.parametrize("N", [3, 127, 128, 129, 1000, 65537])
def test_widths(op, reference, device, N):
    check(op, reference, tensor((3, N), torch.float32, device))


@pytest.mark.parametrize("shape", [(0, 8), (2, 0, 8), (3, 0)])
def test_empty(op, reference, device, shape):
    check(op, reference, tensor(shape, torch.float32, device))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_strides(op, reference, device, layout):
    x = tensor((2, 3, 4, 36), torch.float32, device, layout)
    check(op, reference, x)
    check(op, reference, tensor(x.shape, torch.float32, device), grads=[x])


def test_special_values(op, reference, device):
    x = tensor((4, 33), torch.float32, device)
    x[0, 3], x[1, 4], x[2] = float("nan"), float("inf"), 0.0
    assert_close(op(x), reference(x.cpu()).double())
    assert torch.equal(op(x).nan_to_num(), op(x).nan_to_num())


def test_bad_input(op, device):
    x = tensor((2, 3), torch.float32, device)
    with pytest.raises(TypeError, match="my_op: x must have dtype"):
        op(x.long())
    with pytest.raises(ValueError, match="my_op: eps must be at least 0, got -1"):
        op(x, eps=-1)
    with pytest.raises(ValueError, match="my_op: x must have a last dimension"):
        op(x[0, 0])


def test_registration(op, family, device):
    x, dy = (tensor((3, 40), torch.float32, device, how).requires_grad_() for how in ("contiguous", "transposed"))
    opcheck(family.my_op_fwd, (x, 1e-6))
    opcheck(family.my_op_bwd, (dy, x, torch.rand(3, device=device), 1e-6))
    compiled = torch.compile(lambda x: op(2 * x).square(), fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), op(2 * x).square())


def test_transforms(op, device):
    x = tensor((2, 3), torch.float64, device).requires_grad_()
    assert gradcheck(op, x) and gradgradcheck(op, x)
    batch = torch.stack([x.detach(), 2 * x.detach()], 1)
    assert torch.equal(torch.func.vmap(op, 1)(batch)[1], op(2 * x.detach()))
