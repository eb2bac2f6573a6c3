"""Puts this package's kernels into a loaded model of transformers, diffusers or PyTorch, and takes them out again.

    report = kernel.patching.patch_model(model)
    print(report)
    kernel.patching.unpatch_model(model)

A module is replaced where a small copy of it, with random weights, was seen to compute what a kernel computes: values,
gradients, and in bfloat16 the rounding. The others are left as they are, and the report says why.

Only the module's `forward` is set, to a method of that module: its class, weights, hooks and state dict stay, and a
deep copy is patched with its own weights. A pickle holds the model unpatched. Patch before FSDP and offloading.
"""

import copy
import functools
import inspect
import sys
import weakref
from collections.abc import Iterable
from types import FunctionType, MethodType
from typing import NamedTuple, Optional, Union

import torch
from torch import nn

from . import _patched_attention as attention
from . import _patched_forwards as forwards
from ._patch_trials import KINDS, ROTARY_KINDS, Kind, Unlike, Way, close, likeness, outcome, small_copy, spread_rows

DEFAULT_OPS = (*KINDS, "rotary", "loss")
OPS = (*DEFAULT_OPS, "attention")
_ROTARY = "apply_rotary_pos_emb"
_FUSED = Way("linear_cross_entropy", "in training the logits are not formed, and are None", forwards.CausalLM.forward)


class Replaced(NamedTuple):
    """A module that was replaced: its name in the model, its class, the op, and by which convention."""

    name: str
    cls: str
    op: str
    how: str


class Kept(NamedTuple):
    """A module that was left as it is, and why."""

    name: str
    cls: str
    why: str


class PatchReport:
    """What was done to a model, module by module: `replaced` and `kept`. As a context, it undoes that on leaving."""

    def __init__(self, model: nn.Module):
        self.replaced: list = []
        self.kept: list = []
        self._model = weakref.ref(model)
        self._modules: list = []
        self._files: list = []  # of functions

    def __str__(self):
        lines = [f"replaced {len(self.replaced)}, kept {len(self.kept)}"]
        lines += _grouped(self.replaced, lambda r: f"{r.cls}: {r.op}, {r.how}")
        lines += _grouped(self.kept, lambda k: f"{k.cls}: kept, {k.why}")
        return "\n".join(lines)

    def _add(self, name, module, op, how):
        self.replaced.append(Replaced(name, type(module).__name__, op, how))
        self._modules.append(weakref.ref(module))

    def __enter__(self) -> "PatchReport":
        return self

    def __exit__(self, *_):
        _restore([m for m in (ref() for ref in self._modules) if m is not None], self._model(), self._files)


def _grouped(entries, describe):
    groups: dict = {}
    for e in entries:
        groups.setdefault(describe(e), []).append(e.name or "(the model)")
    return [
        f"  {len(names)} x {text} ({names[0]}{', ...' if len(names) > 1 else ''})" for text, names in groups.items()
    ]


def patch_model(
    model: nn.Module, ops: Optional[Union[str, Iterable]] = None, *, self_check: bool = False
) -> PatchReport:
    """Replace the modules of a loaded model that compute what a kernel computes.

    Args:
        model: of transformers, diffusers, or any other; on any device, trained or not.
        ops: some of "mlp", "rms_norm", "rms_norm_gated", "layer_norm", "group_norm", "activations", "rotary", "loss",
            "attention"; None: all but the last. The part functions below do one each, and say what is special about it.
        self_check: also run one module of each kind that was replaced, with its own weights, on its device, against
            its own forward.
    Returns:
        A PatchReport: print it; or use it in a `with` statement, which undoes on leaving what this call did.
    Raises:
        TypeError, ValueError: model is no module; unknown op.   RuntimeError: the self-check found a difference; all
        that this call did is undone.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"patch_model: model must be a torch.nn.Module, got {type(model).__name__}")
    chosen = DEFAULT_OPS if ops is None else (ops,) if isinstance(ops, str) else tuple(ops)
    for op in chosen:
        if op not in OPS:
            raise ValueError(f"patch_model: ops must be of {', '.join(map(repr, OPS))}, got {op!r}")
    report = PatchReport(model)
    _patch_modules(model, {k: v for k, v in KINDS.items() if k in chosen}, report)
    if "rotary" in chosen:
        _patch_rotary(model, report)
    if "loss" in chosen:
        _patch_loss(model, report)
    if "attention" in chosen:
        _patch_attention(model, report)
    if self_check:
        _self_check(model, report)
    return report


def patch_rms_norm(model: nn.Module, *, self_check: bool = False) -> PatchReport:
    """Replace RMS norms: with weight, 1 + weight or none, and gated, each with its own rounding."""
    return patch_model(model, ("rms_norm", "rms_norm_gated"), self_check=self_check)


def patch_layer_norm(model: nn.Module, *, self_check: bool = False) -> PatchReport:
    """Replace layer norms, with and without weight and bias."""
    return patch_model(model, "layer_norm", self_check=self_check)


def patch_group_norm(model: nn.Module, *, self_check: bool = False) -> PatchReport:
    """Replace group norms."""
    return patch_model(model, "group_norm", self_check=self_check)


def patch_activations(model: nn.Module, *, self_check: bool = False) -> PatchReport:
    """Replace modules that are silu, gelu in either form, quick gelu, squared relu or mish. They then round once."""
    return patch_model(model, "activations", self_check=self_check)


def patch_mlp(model: nn.Module, *, self_check: bool = False) -> PatchReport:
    """Replace activation and product of gated MLPs; the projections are called, be they adapted or quantised."""
    return patch_model(model, "mlp", self_check=self_check)


def patch_rotary(model: nn.Module) -> PatchReport:
    """Replace apply_rotary_pos_emb in the modeling files of transformers that the model uses.

    It is a function of the file, so other models of that file get it too, until the last one that was patched is
    unpatched. Functions with other arguments are kept.
    """
    return patch_model(model, "rotary")


def patch_loss(model: nn.Module) -> PatchReport:
    """Replace transformers' loss of causal language models.

    Where the class computes logits from hidden states by `lm_head` and a softcap alone, a call with labels in training
    mode goes from hidden states to loss: its `logits` are None. Elsewhere, in evaluation mode, and where `lm_head` is
    adapted, quantised or hooked, the loss is measured on the logits in their own dtype, without the float32 copy.
    """
    return patch_model(model, "loss")


def patch_attention(model: nn.Module) -> PatchReport:
    """Replace PyTorch's attention in models of transformers: encoders' padding is masked in the kernel.

    It is for models whose attention is "sdpa", and gets the masks that this gets. Attention by name (see the guide)
    gathers the rows that are no padding first, and waits for the device to count them, which costs a small model more
    than its attention; it serves long padded prompts of decoders, caches in pages, soft caps and sinks. The config
    holds the attention's name: a pickle of the model is to be read where this was called before.
    """
    return patch_model(model, "attention")


def unpatch_model(model: nn.Module) -> None:
    """Undo all that patching did to the model; its forwards are those of its classes again."""
    _restore(list(model.modules()), model, list(_swaps))


def _patch_modules(model, kinds, report):
    outcomes, whole = {}, set()
    for name, module in list(model.named_modules()):
        cls = type(module).__name__
        reasons = []
        for kind in kinds.values():
            if not kind.names.search(cls):
                continue
            why = "its MLP is replaced whole" if id(module) in whole else _taken(module)
            if why is None:
                key = kind.names, likeness(module)
                if key not in outcomes:
                    outcomes[key] = outcome(type(module).forward, kind, lambda *dtypes: kind.trial(module, *dtypes))  # noqa: B023
                way = outcomes[key]
                if isinstance(way, Way):
                    module.forward = MethodType(way.forward, module)
                    report._add(name, module, way.op, way.how)
                    whole.update(id(getattr(module, a, None)) for a in ("act_fn", "activation_fn", "activation"))
                    break
                why = way
            reasons.append(why)
        else:
            if reasons:
                report.kept.append(Kept(name, cls, reasons[0]))


def _taken(module):
    """Why the module's forward may not be set, or None."""
    forward = module.__dict__.get("forward")
    if forward is None or getattr(forward, "__func__", None) is type(module).forward:
        return None
    return "it is patched already" if _ours(forward) else "its forward was set by something else"


def _ours(forward):
    return isinstance(forward, MethodType) and forward.__func__.__module__ == forwards.__name__


class _Swap(NamedTuple):
    target: Union[nn.Module, FunctionType]
    how: str
    models: weakref.WeakSet


_swaps: dict = {}  # modeling file -> _Swap


def _rotary_way(target):
    """How the function rotates, or why it is kept."""
    why = _taken(target) if isinstance(target, nn.Module) else None
    original = MethodType(type(target).forward, target) if isinstance(target, nn.Module) else target
    if why:
        return why
    if list(inspect.signature(original).parameters) != ["q", "k", "cos", "sin", "unsqueeze_dim"]:
        return "it takes other arguments"
    for kind in ROTARY_KINDS:
        way = outcome(lambda _, *args: original(*args), kind, kind.trial)
        if isinstance(way, Way):
            break
    return way


def _patch_rotary(model, report):
    for file in dict.fromkeys(type(m).__module__ for m in model.modules()):
        target = getattr(sys.modules.get(file), _ROTARY, None)
        if target is None or file == __name__:
            continue
        name = f"{file}.{_ROTARY}"
        if file not in _swaps:
            way = _rotary_way(target)
            if not isinstance(way, Way):
                report.kept.append(Kept(name, _ROTARY, way))
                continue
            if isinstance(target, nn.Module):  # the kernels library makes one of the function
                target.forward = MethodType(way.forward, target)
            else:
                setattr(sys.modules[file], _ROTARY, functools.partial(way.forward, None))
            _swaps[file] = _Swap(target, way.how, weakref.WeakSet())
        elif model in _swaps[file].models:
            report.kept.append(Kept(name, _ROTARY, "it is patched already"))
            continue
        _swaps[file].models.add(model)
        report._files.append(file)
        report.replaced.append(Replaced(name, _ROTARY, _ROTARY, f"{_swaps[file].how}; for all models of the file"))


class _Body(nn.Module):
    """Stands in for the layers of a language model; remembers what it was asked."""

    def forward(self, **kwargs):
        self.asked = {k: v for k, v in kwargs.items() if v is not None}
        return sys.modules["transformers.modeling_outputs"].BaseModelOutputWithPast(last_hidden_state=self.hidden)


def _patch_loss(model, report):
    for name, module in model.named_modules():
        cls = type(module).__name__
        if "lm_head" not in module._modules or not hasattr(module, "loss_function"):
            continue
        why = _taken(module) or _fused(module)
        if why is None:
            module.forward = MethodType(_FUSED.forward, module)
            report._add(name, module, _FUSED.op, _FUSED.how)
        else:
            report.kept.append(Kept(name, cls, f"as to linear_cross_entropy: {why}"))
        original = module.loss_function
        if "_loss_function" in vars(module):
            ours = isinstance(original, forwards.CausalLoss)
            why = "it is patched already" if ours else "its loss_function was set by something else"
        else:
            why = _causal(original)
        if why is None:
            module.loss_function = forwards.CausalLoss(original)
            report._add(name, module, "cross_entropy", "of logits in their own dtype")
        else:
            report.kept.append(Kept(name, cls, f"as to cross_entropy: {why}"))


def _patch_attention(model, report):
    found = attention.use(model)
    for name, module in found:
        report._add(name, module, "scaled_dot_product_attention", "with the mask of PyTorch's, or of padding alone")
    if not found:
        kept = getattr(getattr(model, "config", None), "_attn_implementation", None)
        report.kept.append(Kept("", type(model).__name__, f"its attention is {kept}, not sdpa"))


def _causal(original):
    """None where the loss function is that of causal language models, else why not."""

    def trial(dtype, _, ignore_index):
        logits = torch.randn(2, 6, 40, dtype=dtype, requires_grad=True)
        return None, (logits, _labels(ignore_index), 40)

    def run(function, _, *args, options):
        return function(*args, **options)

    for options in ({}, {"num_items_in_batch": 7}, {"ignore_index": 3}):
        found = _agrees(
            functools.partial(run, original, options=options),
            functools.partial(run, forwards.CausalLoss(original), options=options),
            functools.partial(trial, ignore_index=options.get("ignore_index", -100)),
        )
        if found is not None:
            return f"{getattr(original, '__name__', type(original).__name__)}: {found}"
    return None


def _fused(model):
    """None where the class's forward is body, head, softcap and loss and no more, else why not."""
    if "model" not in model._modules:
        return "it has no model"
    asked = [list(inspect.signature(f).parameters) for f in (type(model).forward, _FUSED.forward)]
    if asked[0] != asked[1]:
        return "its forward takes other arguments"

    def trial(dtype, weight_dtype):
        body, head = _Body(), nn.Linear(16, 40, bias=model.lm_head.bias is not None, dtype=weight_dtype)
        nn.init.normal_(head.weight)
        body.hidden = torch.randn(2, 6, 16, dtype=dtype, requires_grad=True)
        small = small_copy(model, {}, {"model": body, "lm_head": head})
        small.__dict__.update(config=copy.copy(model.config), vocab_size=40)
        small.config.vocab_size = 40
        small.__dict__.pop("_loss_function", None)
        return small, (body.hidden, _labels(-100))

    def run(forward, module, _, labels, options):
        y = forward(module, input_ids=labels, attention_mask=labels, labels=labels, **options)
        if set(module.model.asked) != {"input_ids", "attention_mask", *options} or set(y) - {"loss", "logits"}:
            raise Unlike
        return y.loss

    for options in ({}, {"num_items_in_batch": 7}):
        found = _agrees(
            functools.partial(run, type(model).forward, options=options),
            functools.partial(run, _FUSED.forward, options=options),
            trial,
        )
        if found is not None:
            return found
    return None


def _labels(ignore_index):
    labels = torch.randint(40, (2, 6))
    labels[0, :3] = ignore_index
    return labels


def _agrees(original, ours, trial):
    """None, or why not."""
    found = outcome(original, Kind(None, (Way("", "", ours),), trial), trial)
    return None if isinstance(found, Way) else found


def _restore(modules, model, files):
    for module in modules:
        attention.switch(module, attention.NAME, "sdpa")
        _restore_forward(module)
        if isinstance(vars(module).get("_loss_function"), forwards.CausalLoss):
            del module._loss_function
    for file in files:
        swap = _swaps.get(file)
        if swap is None or model not in swap.models:
            continue
        swap.models.discard(model)
        if not swap.models:
            del _swaps[file]
            if isinstance(swap.target, nn.Module):
                _restore_forward(swap.target)
            else:
                setattr(sys.modules[file], _ROTARY, swap.target)


def _restore_forward(module):
    if _ours(module.__dict__.get("forward")):
        del module.forward
    if _ours(module.__dict__.get("_old_forward")):  # accelerate keeps there what its hooks wrap
        module._old_forward = MethodType(type(module).forward, module)


def _self_check(model, report):
    """Run one module of each kind that was replaced against its class's forward; on a difference undo all and raise."""
    modules, seen = dict(model.named_modules()), set()
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        for r in report.replaced:
            module = modules.get(r.name)
            kind = next((k for k in KINDS.values() for w in k.ways if (w.op, w.how) == (r.op, r.how)), None)
            if kind is None or module is None or r[1:] in seen:
                continue
            seen.add(r[1:])
            weight = next(module.parameters(), next(model.parameters(), torch.zeros(())))
            args = _self_check_arguments(kind, module)
            if args is None or weight.is_meta:
                continue
            dtype = weight.dtype if weight.is_floating_point() else torch.float32
            args = [x.detach().to(weight.device, dtype) for x in args]
            modes = [(m, m.training) for m in module.modules()]
            module.eval()
            try:
                same = close(module.forward(*args), type(module).forward(module, *args), dtype)
            finally:
                for m, training in modes:
                    m.training = training
            if not same:
                report.__exit__()
                raise RuntimeError(
                    f"patch_model: {r.op} must agree with {r.cls} on random input, got another result in {r.name!r}"
                )


def _self_check_arguments(kind, module):
    if kind is not KINDS["mlp"]:
        return kind.trial(module, torch.float32, torch.float32)[1]
    first = next(m for name in ("gate_proj", "gate_up_proj", "proj") for m in [getattr(module, name, None)] if m)
    width = getattr(first, "in_features", None)
    return None if width is None else (spread_rows((width,), torch.float32),)
