"""How an op is called: launched directly in plain eager, through its registered op everywhere else.

A registered op costs tens of microseconds a call that a plain launch does not; a plain launch is invisible to
compilers, tracers, modes and transforms. `differentiable` gives an op both, with one derivative for the two.
"""

import functools
import sys

import torch

from ._device import KERNEL_DEVICES, runs_kernels, watching
from ._replay import replayed

_PLAIN = (torch.Tensor, torch.nn.Parameter)


def use_kernel(x):
    """True where `x` goes through the Triton kernels, False where it goes through PyTorch."""
    return runs_kernels(x.device)


def _probe(find, missing):
    """A torch internal, or a stand-in that returns `missing`: what makes every call take the registered op."""
    try:
        return find()
    except AttributeError:
        return lambda *_: missing


_dispatch_modes = _probe(lambda: torch._C._len_torch_dispatch_stack, 1)
transforms = _probe(lambda: torch._C._are_functorch_transforms_active, True)
_jit_tracing = _probe(lambda: torch._C._get_tracing_state, True)
_autocast = _probe(lambda: torch._C._is_any_autocast_enabled, True)
_old_batched = _probe(lambda: torch._C._functorch.is_legacy_batchedtensor, True)  # is_grads_batched


def _forward_ad():
    return torch.autograd.forward_ad._current_level >= 0


def is_plain(args):
    """True where these arguments can be computed on unseen: nothing traces, transforms or wraps them."""
    if _dispatch_modes() > (getattr(watching, "by", None) is not None) or transforms() or _jit_tracing():
        return False
    for t in args:
        if isinstance(t, torch.Tensor) and (
            type(t) not in _PLAIN or t.is_meta or t.is_neg() or t.is_conj() or _old_batched(t)
        ):
            return False
    return True


def _apply_of(function):
    """function.apply, which binds the arguments to forward's signature, found anew each time: 50 us a call.

    That serves transforms alone; without them this is all that it goes on to call.
    """
    return getattr(super(torch.autograd.Function, function), "apply", function.apply)


def _is_sharded(args):
    """Whether there is a DTensor among them."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and any(isinstance(t, module.DTensor) for t in args)


_RULES = {}  # by the name of an op: its reference, its rowwise


def _of_shards(op, args):
    """By the op on each process's own rows, else by the formula, whose operations PyTorch knows how to shard."""
    from . import _sharding

    reference, rowwise = _RULES[op._qualname]
    try:
        if _sharding.keeps_rows(reference, rowwise, args):
            _sharding.register(_overload(op._qualname), reference, rowwise)
            return _overload(op._qualname)(*args)
        return _as_given(reference, args)
    except Exception as error:
        raise NotImplementedError(
            f"{op._qualname.split('::')[1]}: DTensors must be placed so that PyTorch can shard its formula, and all "
            "tensors be DTensors, or be given as .to_local() or .full_tensor()"
        ) from error


def _learn_shards():
    """PyTorch told of every op, for torch.compile, which meets DTensors after it has read the call."""
    if "torch.distributed.tensor" in sys.modules:
        from . import _sharding

        for name, (reference, rowwise) in _RULES.items():
            _sharding.register(_overload(name), reference, rowwise)


_learn_shards._dynamo_marked_constant = True  # as torch.compiler.assume_constant_result does: run, not traced


def autocast_dtype(x):
    """The dtype that torch casts the operands of products on x's device to, None where it casts nothing."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if kind != "meta" and torch.is_autocast_enabled(kind) else None


def autocast(*tensors):
    """The operands of a product, cast as torch's own are. float64 stays, and so does None."""
    dtype = autocast_dtype(tensors[0])
    if dtype is None:
        return tensors
    return tuple(t if t is None or t.dtype == torch.float64 else t.to(dtype) for t in tensors)


def differentiable(op, reference, setup_context=None, backward=None, *, like=None, rowwise=None):
    """A function that calls `op`, with the same derivative on every way to it.

    Args:
        op: the CustomOpDef whose body launches kernels; its first argument is a tensor.
        reference: the same arguments to the same results in differentiable PyTorch; what the op computes where there
            are no kernels.
        setup_context, backward: as of torch.autograd.Function; left out, the derivative is that of the reference.
        like: what results of its shape lie like, as of torch.empty_like: an argument's position, or a function of the
            arguments. Others, and all where it is None, are contiguous.
        rowwise: given op's arguments, the positions of those tensors whose leading dimensions are independent rows.
            Under vmap one launch serves the batch when it is these that are batched; else the batch is looped over.
    Returns:
        A function of op's arguments, passed by position.
    """
    body = getattr(op, "_init_fn", op)
    if setup_context is None:
        setup_context, backward = _second_order(reference)
    op.register_autograd(backward, setup_context=setup_context)
    op.register_vmap(_vmap_rule(op, rowwise))

    def direct(*args):
        if use_kernel(args[0]):
            return body(*args)
        results = _as_given(reference, args)
        model = None if like is None else like(*args) if callable(like) else args[like]
        return tuple(_lay(t, model) for t in results) if isinstance(results, tuple) else _lay(results, model)

    op.register_kernel(("cpu", *KERNEL_DEVICES))(replayed(direct))  # compiled graphs call it, and repeat
    registered = _by_name(op)
    _RULES[op._qualname] = reference, rowwise

    @replayed
    def forward(*args):
        if is_plain(args):
            return direct(*args)
        return _of_shards(op, args) if _is_sharded(args) else registered(*args)

    function = type(
        body.__name__,
        (torch.autograd.Function,),
        {
            "generate_vmap_rule": True,
            "forward": staticmethod(forward),
            "setup_context": staticmethod(setup_context),
            "backward": staticmethod(backward),
        },
    )
    apply = _apply_of(function)

    @functools.lru_cache(4096)
    def known(repeat):
        """`apply` with the repeat as its forward, in one method: 7.2 us of an H200's host, where two take 9.4."""

        def forward(ctx, *args):
            results = repeat(*args)
            setup_context(ctx, args, results)
            return results

        methods = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
        return _apply_of(type(body.__name__, (torch.autograd.Function,), methods))

    def known_apply(*args):
        """`apply` for calls like this one, which was made: its forward is the repeat."""
        with torch.no_grad():
            repeat = forward.find(*args)
        return apply if repeat is None else known(repeat)

    def call(*args):
        if torch.compiler.is_compiling():
            _learn_shards()
            return registered(*args)
        if transforms() or _forward_ad():
            return function.apply(*args)
        if not _wants_grad(args):
            return forward(*args)
        watch = getattr(watching, "by", None)
        return apply(*args) if watch is None else watch.applied(apply, known_apply, args)

    return call


def elementwise(*positions):
    """A `rowwise` for tensors of one shape at these positions, of which each number is a row."""

    def rowwise(*_):
        return list(positions)

    rowwise.every = True
    return rowwise


def undifferentiable(op, reference, mutates=()):
    """A function that calls `op`, which has no derivative: a backward through it raises.

    Args:
        op, reference: as of `differentiable`.
        mutates: the positions of the tensors that op writes to. Their versions move on every way.
    """
    body = getattr(op, "_init_fn", op)

    def direct(*args):
        if use_kernel(args[0]):
            return body(*args)
        results = _as_given(reference, args)
        return tuple(t.contiguous() for t in results) if isinstance(results, tuple) else results

    op.register_kernel("cpu")(direct)
    registered = _by_name(op)

    @replayed
    def forward(*args):
        return direct(*args) if is_plain(args) else registered(*args)

    def call(*args):
        if torch.compiler.is_compiling() or transforms() or _forward_ad() or _wants_grad(args):
            return registered(*args)
        results = forward(*args)
        for i in mutates:
            if not args[i].is_inference():
                torch.autograd.graph.increment_version(args[i])
        return results

    return call


def _lay(t, model):
    if model is None or t.shape != model.shape:
        return t.contiguous()
    out = torch.empty_like(model, dtype=t.dtype)
    return t if t.stride() == out.stride() else out.copy_(t)


def _as_given(reference, args):
    """What the reference gives, its products in the dtypes that it asks for: what autocast casts is cast by now."""
    if not _autocast():
        return reference(*args)
    with torch.autocast(args[0].device.type, enabled=False):
        return reference(*args)


def _wants_grad(args):
    if torch.is_grad_enabled():
        for t in args:
            if isinstance(t, torch.Tensor) and t.requires_grad:
                return True
    return False


def _second_order(reference):
    """setup_context and backward of an op, by differentiating its PyTorch formula."""

    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*(a for a in inputs if isinstance(a, torch.Tensor)))
        ctx.rest = [None if isinstance(a, torch.Tensor) else (a,) for a in inputs]

    def backward(ctx, *grads):
        saved = ctx.saved_tensors
        wanted = [i for i, t in enumerate(t for t, r in zip(ctx.needs_input_grad, ctx.rest) if r is None) if t]

        def of_wanted(*tensors):
            full = list(saved)
            for i, t in zip(wanted, tensors):
                full[i] = t
            full = iter(full)
            return reference(*(next(full) if r is None else r[0] for r in ctx.rest))

        results, vjp = _as_given(functools.partial(torch.func.vjp, of_wanted), [saved[i] for i in wanted])
        given = iter(vjp(grads if isinstance(results, tuple) else grads[0]))
        needed = iter(ctx.needs_input_grad)
        return tuple(next(given) if next(needed) else None for r in ctx.rest)

    return setup_context, backward


def _by_name(op):
    """A call of what is registered under op's name by then.

    Variants of one build share their names, and each that is loaded frees what the one before registered.
    """
    name = op._qualname
    return lambda *args: _overload(name)(*args)


def _overload(qualname):
    namespace, name = qualname.split("::")
    return getattr(getattr(torch.ops, namespace), name).default


def _vmap_rule(op, rowwise):
    op = _by_name(op)

    def rule(info, in_dims, *args):
        batched = [i for i, d in enumerate(in_dims) if d is not None and isinstance(args[i], torch.Tensor)]
        if rowwise is not None and batched == rowwise(*args):
            out = op(*(a.movedim(d, 0) if i in batched else a for i, (a, d) in enumerate(zip(args, in_dims))))
            return out, tuple(0 for _ in out) if isinstance(out, tuple) else 0
        size = info.batch_size
        if not size:  # one example, for shapes and dtypes, of which nothing is kept
            args = [
                a.new_zeros((1, *a.movedim(d, 0).shape[1:])) if i in batched else a
                for i, (a, d) in enumerate(zip(args, in_dims))
            ]
            in_dims = [0 if i in batched else d for i, d in enumerate(in_dims)]
        outs = [
            op(*(a.select(d, n) if i in batched else a for i, (a, d) in enumerate(zip(args, in_dims))))
            for n in range(max(size, 1))
        ]
        if isinstance(outs[0], tuple):
            return tuple(torch.stack(o)[:size] for o in zip(*outs)), tuple(0 for _ in outs[0])
        return torch.stack(outs)[:size], 0

    return rule
