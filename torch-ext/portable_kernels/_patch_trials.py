"""What a module computes, found by trying: a small copy of it, with random weights, beside the kernels' forwards."""

import contextlib
import inspect
import re
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn

from . import _patched_forwards as forwards


class Unlike(Exception):
    """This module computes something else."""


class Way(NamedTuple):
    """One of the things that a module may compute."""

    op: str
    how: str
    forward: Callable


class Kind(NamedTuple):
    """Modules that go by a name, what they may compute, and how to try that."""

    names: "re.Pattern"
    ways: tuple
    trial: Callable  # (module, dtype, dtype of the weights) -> (copy, arguments)
    exact: bool = False  # in bfloat16, the bits must be the module's own
    tokens: bool = False  # the arguments are (1, tokens, N), and one token is tried too


def small_copy(module, parameters, modules=None):
    """The module with other parameters, on the CPU; it shares the rest."""
    small = object.__new__(type(module))
    small.__dict__.update(module.__dict__)
    small.__dict__.pop("forward", None)
    small.__dict__["_parameters"] = parameters
    small.__dict__["_buffers"] = {k: None if b is None else b.clone() for k, b in module._buffers.items()}
    small.__dict__["_modules"] = {**module._modules, **(modules or {})}
    return small


def spread_rows(width, dtype):
    """Rows of several scales, so that eps, clamps and the tails of activations are seen."""
    count = max(8, 2048 // max(1, torch.Size(width).numel()))
    scales = torch.tensor([1.0, 1.0, 1e-3, 0.1, 3.0, 30.0, 1.0, 1.0]).repeat(-(-count // 8))[:count]
    return (torch.randn(count, *width) * scales.view(-1, *[1] * len(width))).to(dtype).unsqueeze(0).requires_grad_()


def _require_arguments(module, count):
    kinds = [p.kind for p in inspect.signature(type(module).forward).parameters.values()]
    if sum(k is inspect.Parameter.POSITIONAL_OR_KEYWORD for k in kinds) != 1 + count:  # and self
        raise Unlike("its forward takes other arguments")


def _norm_trial(module, dtype, weight_dtype, arguments=1):
    _require_arguments(module, arguments)
    if module._modules:
        raise Unlike("it has modules of its own")
    parameters = {
        k: None if p is None else nn.Parameter((torch.randn(p.shape) + 0.5).to(weight_dtype))
        for k, p in module._parameters.items()
    }
    shapes = [tuple(p.shape) for p in parameters.values() if p is not None]
    width = shapes[0] if shapes else tuple(getattr(module, "normalized_shape", (48,)))
    return small_copy(module, parameters), (spread_rows(width, dtype),)


def _gated_norm_trial(module, dtype, weight_dtype):
    small, (x,) = _norm_trial(module, dtype, weight_dtype, arguments=2)
    return small, (x, torch.randn(x.shape).to(dtype).requires_grad_())


def _group_norm_trial(module, dtype, weight_dtype):
    small, _ = _norm_trial(module, dtype, weight_dtype)
    x = torch.randn(2, module.num_channels, 5, 3).mul(torch.tensor([1.0, 1e-2]).view(2, 1, 1, 1))
    return small, (x.to(dtype).requires_grad_(),)


def _activation_trial(module, dtype, weight_dtype):
    _require_arguments(module, 1)
    if module._modules or any(p is not None for p in module._parameters.values()):
        raise Unlike("it has parameters or modules of its own")
    return small_copy(module, {}), (spread_rows((48,), dtype),)


def _mlp_trial(module, dtype, weight_dtype):
    _require_arguments(module, 1)
    if "proj" in module._modules:  # diffusers' gated activations
        parts = {"proj": nn.Linear(24, 80)}
    elif {"gate_proj", "up_proj", "down_proj"} <= set(module._modules):
        parts = {"gate_proj": nn.Linear(24, 40), "up_proj": nn.Linear(24, 40), "down_proj": nn.Linear(40, 24)}
    elif {"gate_up_proj", "down_proj"} <= set(module._modules):
        parts = {"gate_up_proj": nn.Linear(24, 80), "down_proj": nn.Linear(40, 24)}
    else:
        raise Unlike("it has no projections by the names of gated MLPs")
    if any(p is not None for p in module._parameters.values()):
        raise Unlike("it has parameters of its own")
    parts = {k: m.to(weight_dtype) for k, m in parts.items()}
    return small_copy(module, {}, parts), (spread_rows((24,), dtype),)


KINDS = {
    "mlp": Kind(
        re.compile(r"MLP|Mlp|FeedForward|^(GEGLU|SwiGLU)$"),
        (
            Way("swiglu", "projections called", forwards.Swiglu.forward),
            Way("geglu", "projections called", forwards.Geglu.forward),
            Way("silu_and_mul", "projections called", forwards.PackedSwiglu.forward),
            Way("gelu_and_mul", "projections called", forwards.PackedGeglu.forward),
            Way("gelu_tanh_and_mul", "projections called", forwards.PackedGegluTanh.forward),
            Way("mul_and_gelu", "projection called", forwards.ProjectedGeglu.forward),
            Way("mul_and_silu", "projection called", forwards.ProjectedSwiglu.forward),
        ),
        _mlp_trial,
        tokens=True,
    ),
    "rms_norm": Kind(
        re.compile(r"RMSNorm(?!Gated)|RmsNorm|T5LayerNorm"),
        (
            Way("rms_norm", "rounded before the weight", forwards.RmsNormBeforeWeight.forward),
            Way("rms_norm", "rounded once", forwards.RmsNormOnce.forward),
            Way("rms_norm", "1 + weight, rounded once", forwards.RmsNormOnePlusWeight.forward),
            Way("rms_norm", "rounded to the weight's dtype", forwards.RmsNormToWeight.forward),
        ),
        _norm_trial,
        exact=True,
        tokens=True,
    ),
    "rms_norm_gated": Kind(
        re.compile(r"RMSNormGated"),
        (
            Way("rms_norm_gated", "rounded before the weight, then gated", forwards.GatedRmsNormBeforeWeight.forward),
            Way("rms_norm_gated", "then gated, rounded once", forwards.GatedRmsNormOnce.forward),
            Way("rms_norm_gated", "gated, then rounded before the weight", forwards.GateFirstBeforeWeight.forward),
            Way("rms_norm_gated", "gated first, rounded once", forwards.GateFirstOnce.forward),
        ),
        _gated_norm_trial,
        exact=True,
        tokens=True,
    ),
    "layer_norm": Kind(
        re.compile(r"LayerNorm"),
        (Way("layer_norm", "rounded once", forwards.LayerNorm.forward),),
        _norm_trial,
        exact=True,
        tokens=True,
    ),
    "group_norm": Kind(
        re.compile(r"^GroupNorm$"),
        (Way("group_norm", "rounded once", forwards.GroupNorm.forward),),
        _group_norm_trial,
        exact=True,
    ),
    "activations": Kind(
        re.compile(r"GELU|GeLU|Gelu|SiLU|Silu|Mish|ReLUSquared|Swish"),
        (
            Way("silu", "rounded once", forwards.Silu.forward),
            Way("gelu", "exact form, rounded once", forwards.Gelu.forward),
            Way("gelu", "tanh form, rounded once", forwards.GeluTanh.forward),
            Way("quick_gelu", "rounded once", forwards.QuickGelu.forward),
            Way("relu_squared", "rounded once", forwards.ReluSquared.forward),
            Way("mish", "rounded once", forwards.Mish.forward),
        ),
        _activation_trial,
        tokens=True,
    ),
}


def _rotary_trial(table):
    def trial(dtype, table_dtype):
        angles = torch.rand(2, 5, 4) * 6
        q, k = (torch.randn(2, heads, 5, 8).to(dtype).requires_grad_() for heads in (4, 2))
        return None, (q, k, table(angles.cos()).to(table_dtype), table(angles.sin()).to(table_dtype))

    return trial


ROTARY_KINDS = (
    Kind(
        None,
        (
            Way("apply_rotary_pos_emb", "halves", forwards.Rotary.forward),
            Way("apply_rotary_pos_emb", "halves, rounded to the dtypes of q and k", forwards.RotaryRounded.forward),
            Way("apply_rotary_pos_emb", "pairs, by tables of halves", forwards.RotaryPairsOfHalves.forward),
        ),
        _rotary_trial(lambda t: t.repeat(1, 1, 2)),
    ),
    Kind(
        None,
        (
            Way("apply_rotary_pos_emb", "pairs", forwards.RotaryPairs.forward),
            Way("apply_rotary_pos_emb", "pairs, rounded to the dtypes of q and k", forwards.RotaryPairsRounded.forward),
        ),
        _rotary_trial(lambda t: t.repeat_interleave(2, -1)),
    ),
)


def likeness(module):
    """What tells modules apart that may compute different things."""
    simple = (int, float, str, bool, tuple, type(None), torch.dtype)
    attributes = tuple(
        (k, repr(v) if isinstance(v, simple) else id(v))
        for k, v in vars(module).items()
        if k not in ("training", "layer_idx") and (isinstance(v, simple) or not k.startswith("_"))
    )
    parameters = tuple((k, None if p is None else tuple(p.shape)) for k, p in module._parameters.items())
    return type(module), attributes, parameters, tuple((k, likeness(m)) for k, m in module._modules.items())


_TRIALS = (  # dtypes of the arguments and of the weights, and whether it is in training mode
    ((torch.float32, torch.float32), True),
    ((torch.float32, torch.float32), False),
    ((torch.bfloat16, torch.bfloat16), False),
    ((torch.bfloat16, torch.float32), True),
)


def outcome(original, kind, trial):
    """The way that computes what `original` does in every trial, or why there is none."""
    with contextlib.ExitStack() as stack:  # whatever the caller is in
        stack.enter_context(torch.random.fork_rng(devices=[]))
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(torch.autocast("cpu", enabled=False))
        stack.enter_context(torch.device("cpu"))
        torch.random.default_generator.manual_seed(0)
        cases = []
        try:
            for dtypes, training in _TRIALS:
                module, args = trial(*dtypes)
                if module is not None:
                    module.__dict__["training"] = training
                if kind.tokens and not training and dtypes[0] == torch.float32:
                    args = tuple(a[:, :1].detach().requires_grad_() for a in args)
                try:
                    expected = _with_gradients(original, module, args)
                except Exception as error:
                    if dtypes[1] == dtypes[0] == torch.float32:
                        raise Unlike(f"a small copy of it did not run: {str(error).splitlines()[0]}") from error
                    continue  # what its own forward refuses is not asked of ours
                cases.append((module, args, expected))
        except Unlike as reason:
            return str(reason)
        except Exception as error:
            return f"no small copy of it could be made: {error}"
        for way in kind.ways:
            try:
                if all(
                    _same(_with_gradients(way.forward, m, args), expected, args[0].dtype, kind.exact)
                    for m, args, expected in cases
                ):
                    return way
            except Exception:
                continue  # it does not have what this way reads
    return "no kernel computes the same"


def _with_gradients(forward, module, args):
    """(results, gradients of the arguments and parameters in float32, else ())."""
    results = forward(module, *args)
    results = results if isinstance(results, tuple) else (results,)
    wanted = [a for a in args if torch.is_tensor(a) and a.requires_grad]
    wanted += [] if module is None else [p for p in module.parameters() if p.requires_grad]
    if results[0].dtype != torch.float32 or any(w.dtype != torch.float32 for w in wanted):
        return results, ()
    grads = [torch.linspace(-0.5, 1.0, r.numel(), dtype=r.dtype).view(r.shape) for r in results]
    return results, torch.autograd.grad(results, wanted, grads, allow_unused=True)


def _same(ours, theirs, dtype, exact):
    (results, gradients), (expected, expected_gradients) = ours, theirs
    return (
        len(results) == len(expected)
        and all(close(a, b, dtype, exact) for a, b in zip(results, expected))
        and all(
            (a is None) == (b is None) and (a is None or close(a, b, dtype))
            for a, b in zip(gradients, expected_gradients)
        )
    )


def close(a, b, dtype, exact=False):
    """Whether a is b but for rounding, in a function of arguments of a dtype; exact: but for sums in another order."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    dtype = a.dtype if exact else dtype
    a, b = a.detach().double(), b.detach().double()
    rms = b.square().mean(-1 if b.dim() else (), keepdim=True).sqrt()
    # Some ulps: composed functions round at each step.
    if not ((a - b).abs() <= {torch.float32: 5e-5, torch.float16: 2.0**-8}.get(dtype, 2.0**-6) * (b.abs() + rms)).all():
        return False
    # Rounding at another place changes a quarter of the bits; sums in another order, one in a thousand.
    return not exact or dtype == torch.float32 or (a == b).double().mean() >= 0.99
