"""How close is close: so many units in the last place of the value, or of its row's root mean square."""

import torch

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
ULPS = {torch.float32: 16, torch.float16: 2, torch.bfloat16: 2}


def assert_close(actual, exact, terms=0.0):
    """Hold `actual` against the result in float64; NaN and inf have to be in the same places.

    terms: the size of what is added up, where that is larger than the sum.
    """
    assert actual.shape == exact.shape
    actual, rounded = actual.detach().cpu(), exact.detach().cpu().to(actual.dtype)
    finite = actual.isfinite() & rounded.isfinite()
    same = (actual == rounded) | (actual.isnan() & rounded.isnan())
    assert bool((finite | same).all()), "NaN or inf in other places"
    exact = torch.where(rounded.isfinite(), exact.detach().cpu(), 0.0)
    rms = exact.square().mean(-1, keepdim=True).sqrt() if exact.dim() else exact.abs()
    bound = ULPS[actual.dtype] * torch.finfo(actual.dtype).eps * (exact.abs() + rms + terms)
    wrong = finite & ((actual.double() - exact).abs() > bound + 1e-45)
    assert not wrong.any(), f"{int(wrong.sum())} of {wrong.numel()} wrong, first at {wrong.nonzero()[0].tolist()}"


def check(function, reference, *tensors, terms=0.0):
    """function(*tensors) and its gradients against `reference` in float64; the tensors are left as they were.

    terms: of the gradients, as of `assert_close`.
    """
    before = [t.clone() for t in tensors]
    leaves = [t.detach().requires_grad_() for t in tensors]
    wide = [t.detach().double().requires_grad_() for t in tensors]
    y, exact = function(*leaves), reference(*wide)
    assert_close(y, exact)
    dy = torch.randn_like(exact).to(y.dtype)
    grads = torch.autograd.grad(y, leaves, dy)
    for g, e in zip(grads, torch.autograd.grad(exact, wide, dy.double())):
        assert_close(g, e, terms)
    assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(tensors, before))
