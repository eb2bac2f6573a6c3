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


def operands(device, M, N, K, dtype=torch.float32, layout="contiguous"):
    return tensor((M, K), dtype, device, layout), tensor((K, N), dtype, device, layout)


@pytest.mark.kernels_ci
@pytest.mark.parametrize("dtype", DTYPES)
def test_matches_reference(op, reference, device, dtype):
    check(op, reference, *operands(device, 70, 65, 50, dtype), dim=None)


@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 5, 7), (65, 129, 33), (1, 200, 100), (0, 4, 5), (4, 3, 0)])
def test_shapes(op, reference, device, shape):
    check(op, reference, *operands(device, *shape), dim=None)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_strides(op, reference, device, layout):
    check(op, reference, *operands(device, 20, 33, 40, layout=layout), dim=None)


def test_special_values(op, device):
    a, b = operands(device, 5, 6, 7)
    a[0, 3], a[1, 4] = float("nan"), float("inf")
    assert_close(op(a, b), a.cpu().double() @ b.cpu().double())
    assert torch.equal(op(a, b).nan_to_num(), op(a, b).nan_to_num())


def test_bad_input(op, device):
    a, b = operands(device, 5, 6, 7)
    for error, message, call in [
        (TypeError, "my_op: a must have dtype", lambda: op(a.long(), b)),
        (
            TypeError,
            "my_op: b must have a's dtype torch.float32, got torch.float64",
            lambda: op(a, b.double()),
        ),
        (ValueError, "my_op: a and b must be (M, K) and (K, N), got (5, 7) and", lambda: op(a, a)),
    ]:
        with pytest.raises(error) as caught:
            call()
        assert str(caught.value).startswith(message)


def test_registration(op, family, device):
    a, b = (t.requires_grad_() for t in operands(device, 5, 6, 7))
    opcheck(family.my_op_fwd, (a, b))
    opcheck(family.my_op_fwd, (b.detach().t(), a.detach().t()))
    compiled = torch.compile(lambda a, b: op(2 * a, b).square(), fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(a, b), op(2 * a, b).square())


def test_transforms(op, device):
    a, b = (t.requires_grad_() for t in operands(device, 2, 3, 4, torch.float64))
    assert gradcheck(op, (a, b)) and gradgradcheck(op, (a, b))
    a, b = a.detach(), b.detach()
    assert torch.equal(torch.func.vmap(op, (0, None))(torch.stack([a, 2 * a]), b)[1], op(2 * a, b))
