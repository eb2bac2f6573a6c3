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
    assert_close(reference(x), torch.nn.functional.silu(x))


@pytest.mark.kernels_ci
@pytest.mark.parametrize("dtype", DTYPES)
def test_matches_reference(op, reference, device, dtype):
    check(op, reference, tensor((5, 7, 100), dtype, device, scale=4.0))


@pytest.mark.parametrize("shape", [(), (1,), (3, 5), (2049,), (0, 8)])
def test_shapes(op, reference, device, shape):
    check(op, reference, tensor(shape, torch.float32, device), dim=None)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_strides(op, reference, device, layout):
    check(op, reference, tensor((2, 3, 4, 36), torch.float32, device, layout))


def test_special_values(op, device):
    x = torch.tensor([float("nan"), float("inf"), 1e30, -1e30, -90.0, 0.0], device=device)
    assert_close(op(x), torch.nn.functional.silu(x.cpu().double()))
    assert torch.equal(op(x).nan_to_num(), op(x).nan_to_num())


def test_bad_input(op, device):
    with pytest.raises(TypeError, match="my_op: x must have dtype float64"):
        op(tensor((2, 3), torch.float32, device).long())


def test_registration(op, family, device):
    x, dy = (tensor((3, 40), torch.float32, device, how).requires_grad_() for how in ("contiguous", "transposed"))
    opcheck(family.my_op_fwd, (x,))
    opcheck(family.my_op_bwd, (dy, x))
    compiled = torch.compile(lambda x: op(2 * x).square(), fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), op(2 * x).square())


def test_transforms(op, device):
    x = tensor((2, 3), torch.float64, device).requires_grad_()
    assert gradcheck(op, x) and gradgradcheck(op, x)
    batch = torch.stack([x.detach(), 2 * x.detach()], 1)
    assert torch.equal(torch.func.vmap(op, 1)(batch)[1], op(2 * x.detach()))
