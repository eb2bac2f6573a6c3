import pytest
import torch
from _check import DTYPES, assert_close, check


def reference(x):
    return x.square().mean(-1)


@pytest.mark.kernels_ci
@pytest.mark.parametrize("dtype", DTYPES)
def test_matches_reference(kernel, device, dtype):
    check(kernel.my_op, reference, torch.randn(3, 4, 100, device=device).to(dtype))


@pytest.mark.parametrize("shape", [(1, 1), (2, 3), (3, 129), (5, 781), (2, 10001), (0, 8), (7,)])
def test_shapes(kernel, device, shape):
    check(kernel.my_op, reference, torch.randn(shape, device=device))


def test_strides(kernel, device):
    x = torch.randn(6, 40, device=device)
    for layout in (
        x.t(),
        x[::2],
        x[:, ::3],
        x[:1].expand(4, 40),
        torch.randn(2, 3, 4, 5, device=device).transpose(1, 3),
    ):
        check(kernel.my_op, reference, layout)


def test_special_values(kernel, device):
    x = torch.randn(5, 33, device=device)
    x[0, 3], x[1, 4], x[2] = float("nan"), float("inf"), 1e25
    assert_close(kernel.my_op(x), reference(x.cpu()).double())
    assert kernel.my_op(torch.empty(2, 0, device=device)).isnan().all()
    first, second = kernel.my_op(x), kernel.my_op(x)
    assert torch.equal(first.nan_to_num(), second.nan_to_num())


def test_registration(kernel, device):
    x = torch.randn(3, 40, device=device, requires_grad=True)
    torch.library.opcheck(kernel._ops.ops.my_op_fwd.default, (x,))
    torch.library.opcheck(kernel._ops.ops.my_op_bwd.default, (x.detach()[:, 0], x.detach()))
    y = torch.compile(kernel.my_op, fullgraph=True, backend="aot_eager")(x)
    assert torch.equal(y, kernel.my_op(x))
    with pytest.raises(TypeError, match="my_op: x must be a float32, float16 or bfloat16 tensor, got torch.int64"):
        kernel.my_op(x.long())
