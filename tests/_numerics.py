"""The one tolerance policy: results are held against the reference run in float64.

The oracle is rounded to the result's dtype first (an overflow to inf must match), NaN and inf positions must match,
and elsewhere

    |actual - oracle| <= ulps * (eps(dtype) * (|oracle| + rms of the oracle over the reduced slice) + tiny(dtype))

Nothing loosens by environment. A case that is ill-conditioned says `versus=`: no more than that function's own error
in the same dtype, plus one ulp.
"""

import os
from functools import partial

import torch

ULPS = {torch.float64: 64, torch.float32: 16, torch.float16: 2, torch.bfloat16: 2}
DTYPES = tuple(ULPS)
gradcheck = partial(torch.autograd.gradcheck, fast_mode=True)  # along drawn directions, not each number by itself
gradgradcheck = partial(torch.autograd.gradgradcheck, fast_mode=True)
_TINY = {torch.float64: 2.0**-1074, torch.float32: 2.0**-149, torch.float16: 2.0**-24, torch.bfloat16: 2.0**-133}


def assert_close(actual, oracle, *, dim=-1, ulps=None, slack=0.0, name="result"):
    """Hold `actual` against the float64 `oracle`.

    Args:
        dim: the dimension or dimensions the op reduces over; None = all (weight gradients).
        ulps: a bound other than the policy's; say why beside it.
        slack: added to the bound, elementwise.
    """
    assert actual.shape == oracle.shape, f"{name}: shape {tuple(actual.shape)}, expected {tuple(oracle.shape)}"
    dtype = actual.dtype
    actual, oracle = actual.detach().cpu(), oracle.detach().cpu().double()
    rounded = oracle.to(dtype)
    for what, test in (("NaN", torch.isnan), ("+inf", torch.isposinf), ("-inf", torch.isneginf)):
        wrong = test(actual) != test(rounded)
        assert not wrong.any(), f"{name}: {what} differs, first at {_first(wrong, actual, oracle)}"
    error, bound = _error_and_bound(actual, oracle, dim)
    bound = (ULPS[dtype] if ulps is None else ulps) * bound + slack
    wrong = error > bound
    if wrong.any():
        worst = (error / bound).nan_to_num(0.0).argmax()
        index = tuple(int(i) for i in torch.unravel_index(worst, actual.shape))
        raise AssertionError(
            f"{name} ({dtype}): {int(wrong.sum())} of {wrong.numel()} elements off, worst at {index}: "
            f"{actual[index].item()!r}, expected {oracle[index].item()!r}, "
            f"{float((error / bound)[index]):.3g} times the bound"
        )


def _error_and_bound(actual, oracle, dim):
    dtype = actual.dtype
    finite = torch.where(oracle.to(dtype).isfinite() & oracle.isfinite(), oracle, torch.zeros_like(oracle))
    dims = tuple(range(oracle.dim())) if dim is None else dim
    rms = finite.square().mean(dims, keepdim=True).sqrt() if oracle.dim() else finite.abs()
    error = torch.where(actual.isfinite(), (actual.double() - oracle).abs(), torch.zeros_like(oracle))
    return error, torch.finfo(dtype).eps * (finite.abs() + rms) + _TINY[dtype]


def _first(wrong, actual, oracle):
    index = tuple(int(i) for i in wrong.nonzero()[0])
    return f"{index}: {actual[index].item()!r}, expected {oracle[index].item()!r}"


def evaluate(function, tensors, options, grads):
    """(results, gradients of every tensor) of function(*tensors, **options), with `grads` flowing into the results.

    None among the tensors is passed on; its gradient is None.
    """
    leaves = [t if t is None else t.detach().requires_grad_(t.is_floating_point()) for t in tensors]
    results = function(*leaves, **options)
    results = results if isinstance(results, tuple) else (results,)
    if grads is None:
        return results, None
    wanted = [t for t in leaves if t is not None and t.requires_grad]
    found = iter(torch.autograd.grad(results, wanted, grads, allow_unused=True))
    return results, [None if t is None or not t.requires_grad else next(found) for t in leaves]


def check(function, reference, *tensors, dim=-1, grads=None, ulps=None, versus=None, slack=0.0, **options):
    """Hold function(*tensors, **options), and the gradient of every tensor, against `reference` in float64.

    Also: the caller's tensors and incoming gradients are left as they were.

    Args:
        dim: what the op reduces over, for results and for gradients of their shape. Other gradients take all.
        grads: incoming gradients; None draws them.
        versus: for ill-conditioned cases, a function of the same arguments whose error is the measure.
        slack: added to every bound, where terms cancel that are larger than the result.
    Returns:
        The results.
    """
    if grads is None:
        with torch.no_grad():
            shaped = function(*tensors, **options)
        grads = [torch.randn_like(r) for r in (shaped if isinstance(shaped, tuple) else (shaped,))]
    before = [None if t is None else t.detach().clone() for t in (*tensors, *grads)]
    results, found = evaluate(function, tensors, options, grads)
    for t, copy in zip((*tensors, *grads), before):
        assert t is None or torch.equal(_bits(t), _bits(copy)), "the caller's tensor was written to"

    # On the CPU: torch's GPU functions are not always float64 throughout (hardswish divides by a float32 6).
    wide = [None if t is None else t.detach().cpu().double() if t.is_floating_point() else t.cpu() for t in tensors]
    wide_options = {
        k: torch.float64 if isinstance(v, torch.dtype) else v.cpu() if isinstance(v, torch.Tensor) else v
        for k, v in options.items()
    }
    oracle, oracle_grads = evaluate(reference, wide, wide_options, [g.cpu().double() for g in grads])
    measured = None if versus is None else evaluate(versus, tensors, options, grads)

    def hold(name, actual, expected, theirs):
        over = dim if actual.shape == results[0].shape else None
        if versus is None:
            assert_close(actual, expected, dim=over, ulps=ulps, slack=slack, name=name)
        else:
            error = (theirs.double().cpu() - expected).abs().nan_to_num(0.0, 0.0, 0.0).max().item()
            assert_close(actual, expected, dim=over, ulps=1, slack=slack + error, name=name)

    for i, (r, o) in enumerate(zip(results, oracle)):
        hold(f"result {i}", r, o, measured and measured[0][i])
    for i, (t, g, o) in enumerate(zip(tensors, found, oracle_grads)):
        if t is not None and t.is_floating_point():
            assert g.dtype == t.dtype, f"gradient {i}: dtype {g.dtype}, expected {t.dtype}"
            hold(f"gradient {i}", g, o, measured and measured[1][i])
    return results


def _bits(t):
    return t.detach().nan_to_num(nan=12345.0)


def opcheck(op, args, traced=False):
    """torch.library.opcheck.

    To trace an op at symbolic sizes takes seconds: on the CPU it is done where PROOF is set, and once to each op by
    test_every_op, which says traced=True.
    """
    tensors = [a for a in args if isinstance(a, torch.Tensor)]
    tests = ["test_autograd_registration", "test_faketensor"]
    if not any(t.is_floating_point() and t.dtype.itemsize == 1 for t in tensors):
        tests.append("test_schema")  # it compares arguments by operations that PyTorch lacks for float8
    if traced or "PROOF" in os.environ or any(t.device.type != "cpu" for t in tensors):
        tests.append("test_aot_dispatch_dynamic")
    torch.library.opcheck(op, args, test_utils=tests)
