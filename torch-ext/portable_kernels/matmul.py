"""Matrix products, with what follows them in the same launch: bias, activation, gate, residual.

    matmul:        y = activation(a @ b + bias) + residual
    linear:        y = activation(x @ weight.T + bias) + residual
    gated_linear:  y = activation(x @ weight_gate.T) * (x @ weight_up.T)

Products are summed in float32 (float64 for float64), and the result is rounded once. The kernels, and what picks one,
are in _matmul.py. Where a gradient is wanted, the launch also writes the products that the activation was applied to,
in the operands' dtype; the gradients are products by the same kernels.
"""

import os
from typing import Optional

import torch
from torch import Tensor

from . import _checks
from ._activation_math import ACTIVATIONS, FORMULAS
from ._dispatch import autocast, differentiable, use_kernel
from ._matmul import Product, product, sum_of_products
from ._ops import add_op_namespace_prefix
from ._replay import replayed
from ._rows import compute_dtype
from .activations import _activation_bwd
from .epilogues import _bias_act_bwd
from .gated import _gated_pair_bwd

SECOND_ORDER = "reference"

# Read once: torch.compile would not see it change.
_INVARIANT = os.environ.get("PORTABLE_KERNELS_BATCH_INVARIANT", "0") == "1"

_NONE = (None, 0.0, 0.0)  # no activation


def matmul_reference(
    a, b, *, bias=None, activation=None, residual=None, out_dtype=None, precision=None, batch_invariant=False
):
    """What `matmul` computes, in plain PyTorch."""
    return _fwd_reference(a, b, bias, residual, *_named(activation), out_dtype, None, False, False)[0]


def linear_reference(
    x, weight, bias=None, *, activation=None, residual=None, out_dtype=None, precision=None, batch_invariant=False
):
    """What `linear` computes, in plain PyTorch."""
    return matmul_reference(x, weight.mT, bias=bias, activation=activation, residual=residual, out_dtype=out_dtype)


def gated_linear_reference(x, weight_gate, weight_up, activation="silu", *, precision=None, batch_invariant=False):
    """What `gated_linear` computes, in plain PyTorch."""
    gate, up = _product_reference(x, weight_gate.mT), _product_reference(x, weight_up.mT)
    return _gate(gate, up, *_named(activation))


def _named(activation):
    return _NONE if activation is None else ACTIVATIONS[activation]


def _product_reference(a, b, out_dtype=None):
    """a @ b, summed in the wider of the dtypes."""
    if out_dtype is None or torch.promote_types(a.dtype, out_dtype) == a.dtype:
        return torch.matmul(a, b)
    with torch.autocast(a.device.type, enabled=False):
        return torch.matmul(a.to(out_dtype), b.to(out_dtype))


def _epilogue(z, a, bias, residual, activation, out_dtype):
    name, p, q = activation
    if bias is None and residual is None and name is None:
        return z.to(out_dtype)
    compute = compute_dtype(a)
    y = z.to(compute)
    if bias is not None:
        y = y + bias.to(compute)
    if name is not None:
        y = FORMULAS[name](y, p, q)
    if residual is not None:
        y = y + residual.to(compute)
    return y.to(out_dtype)


def _gate(gate, up, name, p, q):
    compute = compute_dtype(gate)
    return (FORMULAS[name](gate.to(compute), p, q) * up.to(compute)).to(gate.dtype)


def _out_dtype(a, residual, out_dtype):
    if out_dtype is not None:
        return out_dtype
    return a.dtype if residual is None else torch.promote_types(a.dtype, residual.dtype)


@torch.library.custom_op(add_op_namespace_prefix("matmul_fwd"), mutates_args=())
def matmul_fwd(
    a: Tensor, b: Tensor, bias: Optional[Tensor], residual: Optional[Tensor], activation: Optional[str], p: float,
    q: float, out_dtype: Optional[torch.dtype], precision: str, invariant: bool, save: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(y, a @ b), the second empty unless it is to be saved. Operands have two dimensions or more."""
    out_dtype = _out_dtype(a, residual, out_dtype)
    y, z, _ = product(a, b, None, bias, residual, Product(activation, p, q, out_dtype, precision, invariant, save))
    return y, z if save else a.new_empty(0)


def _shape(a, b):
    return (*torch.broadcast_shapes(a.shape[:-2], b.shape[:-2]), a.shape[-2], b.shape[-1])


@matmul_fwd.register_fake
def _(a, b, bias, residual, activation, p, q, out_dtype, precision, invariant, save):
    y = a.new_empty(_shape(a, b), dtype=_out_dtype(a, residual, out_dtype))
    return y, a.new_empty(y.shape if save else (0,))


def _fwd_reference(a, b, bias, residual, activation, p, q, out_dtype, precision, invariant, save):
    out_dtype = _out_dtype(a, residual, out_dtype)
    z = _product_reference(a, b, out_dtype)
    y = _epilogue(z, a, bias, residual, (activation, p, q), out_dtype)
    return y.clone() if y is z else y, z.to(a.dtype) if save else a.new_empty(0)


def _setup_context(ctx, inputs, output):
    a, b, bias, residual, *ctx.params = inputs
    ctx.residual_dtype = None if residual is None else residual.dtype
    ctx.save_for_backward(a, b, bias, output[1])
    ctx.set_materialize_grads(False)
    if not ctx.params[-1]:
        ctx.mark_non_differentiable(output[1])


def _backward(ctx, dy, dz):
    a, b, bias, z = ctx.saved_tensors
    activation, p, q, _, precision, _, save = ctx.params
    need_a, need_b, need_bias, need_residual = ctx.needs_input_grad[:4]
    dresidual = dy.to(ctx.residual_dtype) if need_residual and dy is not None else None
    dbias = None
    if dy is not None and (need_a or need_b or need_bias):
        if activation is not None:
            z = z if save else _product(a, b, precision)
            if bias is None:
                dacc = _activation_bwd(dy, z, activation, p, q)
            else:
                dacc, dbias = _bias_act_bwd(dy, z, bias, activation, p, q, need_bias)
        else:
            dacc = dy.to(a.dtype)
            if need_bias:
                dbias = dy.sum(tuple(range(dy.dim() - 1)), dtype=compute_dtype(dy)).to(bias.dtype)
        dz = dacc if dz is None else dacc + dz
    da, db = _operand_gradients(dz, a, b, precision, need_a, need_b)
    return da, db, dbias if need_bias else None, dresidual, *(None,) * 7


def _operand_gradients(dz, a, b, precision, need_a, need_b):
    """Gradients of a and b, given that of a @ b. That of b lies as b does where it is a transposed matrix."""
    da = db = None
    if dz is None:
        return da, db
    if need_a:
        da = _product(dz, b.mT, precision).sum_to_size(a.shape)
    if need_b:
        if b.dim() == 2 and a.dim() > 2:  # one product over all rows of all matrices
            a, dz = a.flatten(0, -2), dz.flatten(0, -2)
        if b.stride(-2) == 1 and b.stride(-1) != 1:
            db = _product(dz.mT, a, precision).mT.sum_to_size(b.shape)
        else:
            db = _product(a.mT, dz, precision).sum_to_size(b.shape)
    return da, db


def _rows_of_fwd(a, b, bias, residual, *_):
    """Under vmap over a, whose matrices are then of one dimension more, while the batch of b stays where it was."""
    return None if a.dim() - 1 < b.dim() else [0] if residual is None else [0, 3]


_matmul = differentiable(matmul_fwd, _fwd_reference, _setup_context, _backward, rowwise=_rows_of_fwd)


def _product(a, b, precision):
    """a @ b, differentiable."""
    return _matmul(a, b, None, None, *_NONE, a.dtype, precision, False, False)[0]


@torch.library.custom_op(add_op_namespace_prefix("sum_of_products_fwd"), mutates_args=())
def sum_of_products_fwd(a: Tensor, b: Tensor, a2: Tensor, b2: Tensor, precision: str) -> Tensor:
    """a @ b + a2 @ b2, b and b2 of two dimensions."""
    y = sum_of_products(a.flatten(0, -2), b, a2.flatten(0, -2), b2, precision)
    return y.view(*a.shape[:-1], b.shape[-1])


@sum_of_products_fwd.register_fake
def _(a, b, a2, b2, precision):
    return a.new_empty((*a.shape[:-1], b.shape[-1]))


_sum_of_products = differentiable(
    sum_of_products_fwd, lambda a, b, a2, b2, _: torch.matmul(a, b) + torch.matmul(a2, b2), rowwise=lambda *_: [0, 2]
)


@torch.library.custom_op(add_op_namespace_prefix("gated_linear_fwd"), mutates_args=())
def gated_linear_fwd(
    x: Tensor, weight_gate: Tensor, weight_up: Tensor, activation: str, p: float, q: float, precision: str,
    invariant: bool, save: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(y, gate, up), the last two empty unless they are to be saved."""
    how = Product(activation, p, q, x.dtype, precision, invariant, save)
    y, gate, up = product(x, weight_gate.mT, weight_up.mT, None, None, how)
    return y, gate if save else x.new_empty(0), up if save else x.new_empty(0)


@gated_linear_fwd.register_fake
def _(x, weight_gate, weight_up, activation, p, q, precision, invariant, save):
    shape = (*x.shape[:-1], weight_gate.shape[0])
    saved = shape if save else (0,)
    return x.new_empty(shape), x.new_empty(saved), x.new_empty(saved)


def _gated_fwd_reference(x, weight_gate, weight_up, activation, p, q, precision, invariant, save):
    gate, up = _product_reference(x, weight_gate.mT), _product_reference(x, weight_up.mT)
    y = _gate(gate, up, activation, p, q)
    return (y, gate, up) if save else (y, x.new_empty(0), x.new_empty(0))


def _gated_setup_context(ctx, inputs, output):
    x, weight_gate, weight_up, *ctx.params = inputs
    ctx.save_for_backward(x, weight_gate, weight_up, *output[1:])
    ctx.set_materialize_grads(False)
    if not ctx.params[-1]:
        ctx.mark_non_differentiable(*output[1:])


def _gated_backward(ctx, dy, dgate, dup):
    x, weight_gate, weight_up, gate, up = ctx.saved_tensors
    activation, p, q, precision, _, save = ctx.params
    need_x, need_gate, need_up = ctx.needs_input_grad[:3]
    if dy is not None:
        if not save:
            gate, up = _product(x, weight_gate.mT, precision), _product(x, weight_up.mT, precision)
        found = _gated_pair_bwd(dy, gate, up, activation, p, q)
        dgate, dup = (d if extra is None else d + extra for d, extra in zip(found, (dgate, dup)))
    if dgate is None and dup is None:  # nothing flows in
        return (None,) * 9
    dx = None
    if need_x and dgate is not None and dup is not None:
        dx = _sum_of_products(dgate, weight_gate, dup, weight_up, precision)
    elif need_x:
        dx = _product(dup, weight_up, precision) if dgate is None else _product(dgate, weight_gate, precision)
    _, dweight_gate = _operand_gradients(dgate, x, weight_gate.mT, precision, False, need_gate)
    _, dweight_up = _operand_gradients(dup, x, weight_up.mT, precision, False, need_up)
    weights = (None if d is None else d.mT for d in (dweight_gate, dweight_up))
    return dx, *weights, *(None,) * 6


_gated_linear = differentiable(
    gated_linear_fwd, _gated_fwd_reference, _gated_setup_context, _gated_backward, rowwise=lambda *_: [0]
)


@replayed
def matmul(
    a: Tensor,
    b: Tensor,
    *,
    bias: Optional[Tensor] = None,
    activation: Optional[str] = None,
    residual: Optional[Tensor] = None,
    out_dtype: Optional[torch.dtype] = None,
    precision: Optional[str] = None,
    batch_invariant: bool = False,
) -> Tensor:
    """Multiply matrices, and add a bias, apply an activation and add a residual in the same launch.

    y = activation(a @ b + bias) + residual

    Args:
        a, b: (..., M, K) and (..., K, N) whose leading dimensions broadcast, or vectors, as torch.matmul; of one dtype,
            float64 | float32 | float16 | bfloat16, any strides.
        bias: (N,), of any of those dtypes.
        activation: "gelu", "gelu_tanh", "silu", "relu" or another function of activations.py, with its default
            parameters.
        residual: of the result's shape, any of those dtypes and strides.
        out_dtype: dtype of the result; None = a's, or what that and the residual's promote to.
        precision: how float32 is multiplied, "ieee" or "tf32"; None = as torch is set, by set_float32_matmul_precision
            or torch.backends.cuda.matmul. Where the device has no tf32, ieee.
        batch_invariant: a row's bits do not depend on how many rows come with it, at some cost in speed. The
            environment's PORTABLE_KERNELS_BATCH_INVARIANT=1 asks it of every call.
    Returns:
        (..., M, N), contiguous.
    Raises:
        TypeError: dtype not listed; a and b of different dtypes.   ValueError: shapes that do not fit; unknown
        activation or precision.
    Numerics: products are summed in float32 (float64 for float64); bias, activation and residual follow unrounded, and
        the result is rounded once. Deterministic. On a CPU, a @ b is torch's, and is rounded first. Autocast: a, b and
        bias are cast, as by torch.matmul. Copied are batches of three or more dimensions that do not lie evenly, as by
        torch, and for more than 64 rows of 16 bits, on NVIDIA GPUs since Hopper, operands whose rows do not start at
        multiples of 16 bytes.
    Autograd: any derivative, vmap; forward mode raises. Where an activation is differentiated, a @ b is kept in a's
        dtype.
    Source: torch.matmul.
    """
    op = "matmul"
    _checks.tensors(op, a, first="a", b=b, bias=bias, residual=residual)
    _checks.given(op, b=b)
    if not a.dim() or not b.dim():
        raise ValueError(f"{op}: a and b must have 1 or more dimensions, got shapes {_sizes(a)} and {_sizes(b)}")
    left, right = a.unsqueeze(0) if a.dim() == 1 else a, b.unsqueeze(1) if b.dim() == 1 else b
    if left.shape[-1] != right.shape[-2]:
        raise ValueError(
            f"{op}: b must have {left.shape[-1]} rows as a has columns, got shapes {_sizes(a)}, {_sizes(b)}"
        )
    try:
        shape = list(_shape(left, right))
    except RuntimeError:
        raise ValueError(f"{op}: a and b must have batches that broadcast, got {_sizes(a)}, {_sizes(b)}") from None
    vectors = [d for d, t in ((-1, b), (-2, a)) if t.dim() == 1]
    full = tuple(shape)
    for d in vectors:
        del shape[d + len(shape)]
    if bias is not None and b.dim() == 1:
        raise ValueError(f"{op}: bias must be None where b is a vector, got shape {_sizes(bias)}")
    _checks.shape(op, "residual", residual, shape)
    residual = residual if residual is None or not vectors else residual.reshape(full)
    y = _call(op, ("a", "b"), left, right, bias, activation, residual, out_dtype, precision, batch_invariant)
    return y.reshape(shape) if vectors else y


@replayed
def linear(
    x: Tensor,
    weight: Tensor,
    bias: Optional[Tensor] = None,
    *,
    activation: Optional[str] = None,
    residual: Optional[Tensor] = None,
    out_dtype: Optional[torch.dtype] = None,
    precision: Optional[str] = None,
    batch_invariant: bool = False,
) -> Tensor:
    """Apply a linear layer, and what follows it, in the same launch.

    y = activation(x @ weight.T + bias) + residual

    Args:
        x: (..., K), float64 | float32 | float16 | bfloat16, any strides.
        weight: (N, K), of x's dtype.
        bias, activation, residual, out_dtype, precision, batch_invariant: as `matmul`.
    Returns:
        (..., N), contiguous.
    Raises, Numerics, Autograd: as `matmul`.
    Source: torch.nn.functional.linear.
    """
    op = "linear"
    _checks.tensors(op, x, weight=weight, bias=bias, residual=residual)
    _layer_shapes(op, x, weight=weight)
    _checks.shape(op, "residual", residual, (*x.shape[:-1], weight.shape[0]))
    wide = x if x.dim() > 1 else x.unsqueeze(0)
    residual = residual if residual is None or x.dim() > 1 else residual.unsqueeze(0)
    y = _call(op, ("x", "weight"), wide, weight.mT, bias, activation, residual, out_dtype, precision, batch_invariant)
    return y if x.dim() > 1 else y.squeeze(0)


@replayed
def gated_linear(
    x: Tensor,
    weight_gate: Tensor,
    weight_up: Tensor,
    activation: str = "silu",
    *,
    precision: Optional[str] = None,
    batch_invariant: bool = False,
) -> Tensor:
    """Apply two linear layers and multiply one by an activation of the other, in one launch (SwiGLU, GEGLU).

    y = activation(x @ weight_gate.T) * (x @ weight_up.T)

    Args:
        x: (..., K), float64 | float32 | float16 | bfloat16, any strides.
        weight_gate, weight_up: (N, K), of x's dtype.
        activation, precision, batch_invariant: as `matmul`.
    Returns:
        (..., N), dtype of x, contiguous.
    Raises, Numerics, Autograd: as `matmul`; both products are kept where a gradient is wanted.
    Source: Shazeer, "GLU variants improve transformer", 2020.
    """
    op = "gated_linear"
    _checks.tensors(op, x, weight_gate=weight_gate, weight_up=weight_up)
    _layer_shapes(op, x, weight_gate=weight_gate, weight_up=weight_up)
    _checks.shape(op, "weight_up", weight_up, weight_gate.shape)
    _checks.choice(op, "activation", activation, ACTIVATIONS)
    _checks.flags(op, batch_invariant=batch_invariant)
    x, weight_gate, weight_up = autocast(x, weight_gate, weight_up)
    _one_dtype(op, x=x, weight_gate=weight_gate, weight_up=weight_up)
    precision = _precision(op, precision)
    activation = ACTIVATIONS[activation]
    if not use_kernel(x):
        return _gated_fwd_reference(x, weight_gate, weight_up, *activation, precision, False, False)[0]
    wide = x if x.dim() > 1 else x.unsqueeze(0)
    invariant = batch_invariant or _INVARIANT
    save = _wants_grad(x, weight_gate, weight_up)
    y = _gated_linear(wide, weight_gate, weight_up, *activation, precision, invariant, save)[0]
    return y if x.dim() > 1 else y.squeeze(0)


def _call(op, names, a, b, bias, activation, residual, out_dtype, precision, batch_invariant):
    """The product of two operands of two dimensions or more, whose shapes fit."""
    _checks.shape(op, "bias", bias, (b.shape[-1],))
    if activation is not None:
        _checks.choice(op, "activation", activation, ACTIVATIONS)
    if out_dtype is not None:
        _checks.choice(op, "out_dtype", out_dtype, _checks.FLOATS)
    _checks.flags(op, batch_invariant=batch_invariant)
    a, b, bias = autocast(a, b, bias)
    _one_dtype(op, **dict(zip(names, (a, b))))
    precision = _precision(op, precision)
    activation = _named(activation)
    if not use_kernel(a):
        return _fwd_reference(a, b, bias, residual, *activation, out_dtype, precision, False, False)[0].contiguous()
    save = activation[0] is not None and _wants_grad(a, b, bias)
    return _matmul(a, b, bias, residual, *activation, out_dtype, precision, batch_invariant or _INVARIANT, save)[0]


def _wants_grad(*tensors):
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def _precision(op, precision):
    """What the ops take: "" is what torch says by the time that they run."""
    if precision is not None:
        _checks.choice(op, "precision", precision, ("ieee", "tf32"))
    return precision or ""


def _one_dtype(op, **tensors):
    (first, x), *others = tensors.items()
    for name, t in others:
        if t.dtype != x.dtype:
            ours, theirs = (str(o.dtype).replace("torch.", "") for o in (x, t))
            raise TypeError(f"{op}: {name} must have {first}'s dtype {ours}, got {theirs}")


def _layer_shapes(op, x, **weights):
    _checks.given(op, **weights)
    if not x.dim():
        raise ValueError(f"{op}: x must have 1 or more dimensions, got shape ()")
    for name, weight in weights.items():
        if weight.dim() != 2 or weight.shape[1] != x.shape[-1]:
            raise ValueError(
                f"{op}: {name} must have shape (N, {x.shape[-1]}) as x has {_sizes(x)}, got {_sizes(weight)}"
            )


def _sizes(t):
    return tuple(t.shape)
