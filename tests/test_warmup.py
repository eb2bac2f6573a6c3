import torch
from _inputs import tensor


def test_warmup(kernel, device):
    """What was compiled need not be again; what the call computed meanwhile is zero, and after it is right."""
    x, w = tensor((3, 1111), torch.float16, device).requires_grad_(), tensor((1111,), torch.float16, device)
    seen = []

    def step(x, scale):
        y = kernel.rms_norm(kernel.silu(x), w)
        y.sum().backward()
        seen.append(y.detach() * scale)

    compiled = kernel.warmup(step, x, scale=1.0, jobs=4)
    assert compiled == (4 if device.type == "cuda" else 0) and len(seen) == 1
    assert kernel.warmup(step, x, scale=1.0) == 0
    x.grad = None
    step(x, 1.0)
    y = torch.nn.functional.silu(x.detach().float())
    y = torch.nn.functional.rms_norm(y, (1111,), w.float(), 1e-6)
    torch.testing.assert_close(seen[-1].float(), y, atol=1e-2, rtol=1e-2)
    assert x.grad.isfinite().all() and x.grad.any()


def test_stand_ins(internals):
    """What is kept of an argument is as small as can be, and what Triton specialises on is the same."""
    stand_in = internals("_warmup")._stand_in
    big = torch.zeros(10000, dtype=torch.float16)
    for t in (big, big[1:], big[3:], big[8:]):
        small = stand_in(t)
        assert small.dtype == t.dtype and small.data_ptr() % 16 == t.data_ptr() % 16 and small.numel() <= 16
    assert stand_in(3) == 3 and stand_in(None) is None
