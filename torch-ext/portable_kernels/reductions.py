"""Reductions over any dimensions: sum, mean, amax, amin, argmax, argmin, var, std, logsumexp, vector_norm; and cumsum.

With torch's names, arguments and rules for NaN, ties and empty tensors. For each:

    x: any shape, float64 | float32 | float16 | bfloat16, any strides; integers and bool where it says so.
    dim: an int, a tuple, or None: all dimensions, as is an empty tuple. keepdim: reduced dimensions stay, of size 1.
    Returns: contiguous; x's dtype, or `dtype`, unless it says otherwise.
    Raises: TypeError: dtype or type not listed. ValueError: x has no dimension `dim`, or it is named twice; there is
        nothing to reduce where that has no answer (where torch raises IndexError or RuntimeError).
    Numerics: computed in float32, in float64 where x or `dtype` is, integers in int64, and rounded once. Sums are
        taken in an order that depends on sizes, strides and device alone. x is converted to `dtype` first.
    Autograd: first and second derivative, vmap; forward mode raises. The gradient is laid out as x, that of sum and
        mean is expanded.
"""

from typing import List, Optional, Tuple, Union

import torch
from torch import Tensor

from . import _checks
from ._dispatch import differentiable, use_kernel
from ._ops import add_op_namespace_prefix
from ._reductions import KINDS, reduce, reduce_backward, scan
from ._replay import replayed
from ._rows import compute_dtype

SECOND_ORDER = "reference"

_INTEGERS = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_INF = float("inf")
_NORMS = {0.0: "norm_0", 1.0: "norm_1", 2.0: "norm_2", _INF: "norm_inf", -_INF: "norm_-inf"}

_Dims = Union[int, Tuple[int, ...], None]


def reduction_reference(x, dims, keepdim, kind, param, dtype):
    """What every reduction of this file computes, in plain PyTorch. dims: a list; param: correction, or a norm's p."""
    x = x.to(_compute(x, dtype)) if x.is_floating_point() else x
    if kind == "logsumexp" and x.numel():  # the shift keeps digits of the gradient that torch's formula loses
        shift = _finite(x.detach().amax(dims, keepdim=True))
        y = torch.logsumexp(x - shift, dims, keepdim=True) + shift
        y = y if keepdim else y.squeeze(dims)
    elif kind in ("sum", "mean", "amax", "amin", "logsumexp"):
        y = getattr(torch, kind)(x, dims, keepdim)
    elif kind in ("argmax", "argmin"):
        y = getattr(torch, kind)(x, dims[0] if dims else None, keepdim)
    elif kind in ("var", "std"):
        x = x - _finite(x.detach().mean(dims, keepdim=True))  # as above
        y = getattr(torch, kind)(x, dims, correction=param, keepdim=keepdim)
    else:
        y = torch.linalg.vector_norm(x, param, dims or None, keepdim)  # None is right for a single number
    return y.to(dtype)


def cumsum_reference(x, dim, dtype=None, reverse=False):
    """What `cumsum` computes, in plain PyTorch; with `reverse`, from the end."""
    dtype = dtype or (x.dtype if x.is_floating_point() else torch.int64)
    x = x.to(_compute(x, dtype)) if x.is_floating_point() else x
    dim = dim % x.dim() if x.dim() else dim  # DTensors shard a negative one as if it were no sum
    y = x.flip(dim).cumsum(dim).flip(dim) if reverse and x.dim() else x.cumsum(dim)
    return y.to(dtype)


def _fwd_reference(x, dims, keepdim, kind, param, dtype, need_stats):
    y = reduction_reference(x, dims, keepdim, kind, param, dtype)
    if not (need_stats and KINDS[kind].stats):
        return y, x.new_empty(0, dtype=_compute(x, dtype))
    x = x.detach().to(_compute(x, dtype))
    value = reduction_reference(x, dims, True, kind, param, x.dtype)
    if kind in ("var", "std"):
        stats = torch.stack([x.mean(dims, keepdim=True), torch.zeros_like(value), value], -1)
    elif kind == "logsumexp":
        stats = torch.stack([value, torch.zeros_like(value)], -1)
    elif kind in ("norm_2", "norm_p"):
        stats = value[..., None]
    else:
        ties = (x.abs() if kind.startswith("norm") else x) == value
        stats = torch.stack([value, ties.to(x.dtype).sum(dims, keepdim=True)], -1)
    return y, stats.reshape(*y.shape, KINDS[kind].stats)


def _bwd_reference(dy, x, stats, dims, keepdim, kind, param):
    dtype, x = x.dtype, x.to(compute_dtype(x, dy))
    g = _unsqueezed(dy, x.dim(), dims, keepdim).to(x.dtype)
    y = reduction_reference(x, dims, True, kind, param, x.dtype)  # not from stats: it has a derivative
    if kind in ("amax", "amin"):
        mask = (x == y).to(x.dtype)
        dx = mask * (g / mask.sum(dims, keepdim=True))
    elif kind in ("norm_inf", "norm_-inf"):
        mask = x.abs() == y
        dx = torch.where(mask, x.sign() * (g / mask.to(x.dtype).sum(dims, keepdim=True)), torch.zeros_like(x))
    elif kind == "logsumexp":
        dx = g * torch.exp(x - y)
    elif kind in ("var", "std"):
        d = x - x.detach().mean(dims, keepdim=True)
        d = d - _finite(d.mean(dims, keepdim=True))
        if kind == "std":
            g = torch.where(y == 0, torch.zeros_like(g), 0.5 * g / torch.where(y == 0, torch.ones_like(y), y))
        dx = d * (g * _twice_over_freedom(_count(x.shape, dims), param))
    elif kind == "norm_1":
        dx = x.sign() * g
    else:
        zero = (y == 0) | ((x == 0) & (param < 1))
        ratio = torch.where(zero, torch.ones_like(x), x) / torch.where(y == 0, torch.ones_like(y), y)
        power = ratio if kind == "norm_2" else ratio.sign() * ratio.abs() ** (param - 1)
        dx = torch.where(zero, torch.zeros_like(x), power * g)
    return dx.to(dtype)


def _finite(t):
    """t, or 0 where it is not finite, which nothing is to be shifted by."""
    return torch.where(t.isfinite(), t, torch.zeros_like(t))


def _compute(x, dtype):
    """The dtype that x is reduced in, to a result of `dtype`."""
    if not x.is_floating_point():
        return torch.int64
    return torch.float64 if torch.float64 in (x.dtype, dtype) else torch.float32


def _twice_over_freedom(count, correction):
    """As in torch: infinite where there are none, gradients are inf, and NaN at the mean; negative where fewer."""
    return 2.0 / (count - correction) if count != correction else _INF


def _count(shape, dims):
    return torch.Size([shape[d] for d in dims]).numel()


def _result_shape(shape, dims, keepdim):
    reduced = {d % len(shape) for d in dims} if shape else ()
    return [1 if d in reduced else n for d, n in enumerate(shape) if keepdim or d not in reduced]


def _unsqueezed(t, ndim, dims, keepdim):
    """A tensor of the result's shape, with the reduced dimensions in place."""
    if not keepdim:
        for d in sorted(d % ndim for d in dims):
            t = t.unsqueeze(d)
    return t


@torch.library.custom_op(add_op_namespace_prefix("reduction_fwd"), mutates_args=())
def reduction_fwd(
    x: Tensor, dims: List[int], keepdim: bool, kind: str, param: float, dtype: torch.dtype, need_stats: bool
) -> Tuple[Tensor, Tensor]:
    """(result, what the backward needs of each row). param: the correction of var and std, the p of a norm."""
    y, stats = _empty(x, dims, keepdim, kind, param, dtype, need_stats)
    if x.numel():
        reduce(x, tuple(dims), y, stats if stats.numel() else None, kind, param, _compute(x, dtype))
    elif y.numel():
        y.fill_(-_INF if kind == "logsumexp" else torch.nan if kind in ("mean", "var", "std") else 0)
        stats.zero_()  # of rows without elements
    return y, stats


def _empty(x, dims, keepdim, kind, param, dtype, need_stats):
    y = x.new_empty(_result_shape(x.shape, dims, keepdim), dtype=dtype)
    width = KINDS[kind].stats
    shape = (*y.shape, width) if width and need_stats else 0
    return y, x.new_empty(shape, dtype=_compute(x, dtype))


reduction_fwd.register_fake(_empty)


@torch.library.custom_op(add_op_namespace_prefix("reduction_bwd"), mutates_args=())
def reduction_bwd(
    dy: Tensor, x: Tensor, stats: Tensor, dims: List[int], keepdim: bool, kind: str, param: float
) -> Tensor:
    """The gradient of x, in its dtype."""
    dx = torch.empty_like(x)
    if dx.numel():
        factor = _twice_over_freedom(_count(x.shape, dims), param) if kind in ("var", "std") else 0.0
        dy = _unsqueezed(dy, x.dim(), dims, keepdim)
        reduce_backward(dy, x, stats, tuple(dims), dx, kind, param, factor)
    return dx


@reduction_bwd.register_fake
def _(dy, x, stats, dims, keepdim, kind, param):
    return torch.empty_like(x)


_reduction_bwd = differentiable(
    reduction_bwd, _bwd_reference, like=1, rowwise=lambda dy, x, stats, dims, *_: [0, 1, 2] if dims else None
)


def _setup_context(ctx, inputs, output):
    x, ctx.dims, ctx.keepdim, ctx.kind, ctx.param, *_ = inputs
    ctx.shape, ctx.dtype = x.shape, x.dtype
    ctx.linear = ctx.kind in ("sum", "mean")
    ctx.save_for_backward(*(() if ctx.linear else (x, output[1])))
    ctx.mark_non_differentiable(*(output if ctx.kind.startswith("arg") else output[1:]))


def _backward(ctx, dy, _):
    if ctx.linear:
        dy = _unsqueezed(dy, len(ctx.shape), ctx.dims, ctx.keepdim)
        if ctx.kind == "mean":
            dy = dy.to(compute_dtype(dy)) / max(_count(ctx.shape, ctx.dims), 1)
        dx = dy.to(ctx.dtype).expand(ctx.shape)
    else:
        x, stats = ctx.saved_tensors
        dx = _reduction_bwd(dy, x, stats, ctx.dims, ctx.keepdim, ctx.kind, ctx.param)
    return dx, None, None, None, None, None, None


_reduction = differentiable(
    reduction_fwd, _fwd_reference, _setup_context, _backward, rowwise=lambda x, dims, *_: [0] if dims else None
)


@torch.library.custom_op(add_op_namespace_prefix("cumsum_fwd"), mutates_args=())
def cumsum_fwd(x: Tensor, dim: int, dtype: torch.dtype, reverse: bool) -> Tensor:
    y = torch.empty(x.shape, dtype=dtype, device=x.device)
    if x.numel():
        scan(x, dim, y, reverse, _compute(x, dtype))
    return y


@cumsum_fwd.register_fake
def _(x, dim, dtype, reverse):
    return x.new_empty(x.shape, dtype=dtype)


def _cumsum_setup_context(ctx, inputs, output):
    x, ctx.dim, _, ctx.reverse = inputs
    ctx.dtype = x.dtype


def _cumsum_backward(ctx, dy):
    return _cumsum(dy, ctx.dim, ctx.dtype, not ctx.reverse), None, None, None


_cumsum = differentiable(
    cumsum_fwd, cumsum_reference, _cumsum_setup_context, _cumsum_backward,
    rowwise=lambda x, *_: [0] if x.dim() > 1 else None,
)  # fmt: skip


@replayed
def sum(x: Tensor, dim: _Dims = None, keepdim: bool = False, *, dtype: Optional[torch.dtype] = None) -> Tensor:
    """Add up. Integers and bool: int64, unless `dtype` says otherwise."""
    x, dtype = _converted("sum", x, dtype)
    return _call("sum", x, dim, keepdim, "sum", dtype=dtype)


@replayed
def mean(x: Tensor, dim: _Dims = None, keepdim: bool = False, *, dtype: Optional[torch.dtype] = None) -> Tensor:
    """Add up and divide by the number of elements, NaN where there are none. Integers and bool: with a `dtype`."""
    if dtype is None:
        _checks.tensors("mean", x)
    x, dtype = _converted("mean", x, dtype)
    return _call("mean", x, dim, keepdim, "mean", dtype=dtype)


@replayed
def amax(x: Tensor, dim: _Dims = None, keepdim: bool = False) -> Tensor:
    """The largest element, or NaN if there is one. Elements that tie share the gradient evenly. Integers, bool too."""
    return _call("amax", x, dim, keepdim, "amax", integers=_INTEGERS, nonempty=True)


@replayed
def amin(x: Tensor, dim: _Dims = None, keepdim: bool = False) -> Tensor:
    """The smallest element, as `amax`."""
    return _call("amin", x, dim, keepdim, "amin", integers=_INTEGERS, nonempty=True)


@replayed
def argmax(x: Tensor, dim: Optional[int] = None, keepdim: bool = False) -> Tensor:
    """The index (int64) of the first NaN, else of the first of the largest elements. Integers too.

    dim: an int, or None: the index is into x as if it was flattened.
    """
    return _arg("argmax", x, dim, keepdim)


@replayed
def argmin(x: Tensor, dim: Optional[int] = None, keepdim: bool = False) -> Tensor:
    """The index of the smallest element, as `argmax`."""
    return _arg("argmin", x, dim, keepdim)


@replayed
def var(x: Tensor, dim: _Dims = None, *, correction: float = 1, keepdim: bool = False) -> Tensor:
    """The sum of squared deviations from the mean, over the number of elements less `correction`.

    No digits are lost to a mean far larger than the spread. NaN where a single element leaves no degrees of freedom.
    """
    _checks.number("var", "correction", correction)
    return _call("var", x, dim, keepdim, "var", correction)


@replayed
def std(x: Tensor, dim: _Dims = None, *, correction: float = 1, keepdim: bool = False) -> Tensor:
    """The square root of `var`. The gradient is 0 where the result is."""
    _checks.number("std", "correction", correction)
    return _call("std", x, dim, keepdim, "std", correction)


@replayed
def logsumexp(x: Tensor, dim: _Dims = None, keepdim: bool = False) -> Tensor:
    """log(sum(exp(x))), without overflow; -inf of nothing and of nothing but -inf. Integers and bool: in float32."""
    if isinstance(x, Tensor) and x.dtype in _INTEGERS:
        x = x.to(torch.float32)
    return _call("logsumexp", x, dim, keepdim, "logsumexp")


@replayed
def vector_norm(
    x: Tensor, ord: float = 2, dim: _Dims = None, keepdim: bool = False, *, dtype: Optional[torch.dtype] = None
) -> Tensor:
    """sum(|x|^ord)^(1/ord); the largest |x| where ord is inf, the smallest where -inf, how many are not 0 where 0.

    The gradient is 0 where the norm is, and elements that tie share it evenly; ord = 0 has none.
    """
    _checks.number("vector_norm", "ord", ord)
    _checks.tensors("vector_norm", x)
    x, dtype = _converted("vector_norm", x, dtype)
    ord = float(ord)
    kind = _NORMS.get(ord, "norm_p")
    x = x.detach() if kind == "norm_0" else x  # torch's has no derivative either
    return _call("vector_norm", x, dim, keepdim, kind, ord, dtype=dtype, nonempty=ord < 0 or ord == _INF)


@replayed
def cumsum(x: Tensor, dim: int, *, dtype: Optional[torch.dtype] = None) -> Tensor:
    """Running sums along a dimension. Integers and bool: int64, unless `dtype` says otherwise."""
    x, dtype = _converted("cumsum", x, dtype)
    _check_tensor("cumsum", x, _INTEGERS)
    _checks.integer("cumsum", "dim", dim)
    dims = _dims("cumsum", x, dim)
    dtype = dtype or (x.dtype if x.is_floating_point() else torch.int64)
    dim = dims[0] if dims else -1
    return _cumsum(x, dim, dtype, False) if use_kernel(x) else cumsum_reference(x, dim, dtype).contiguous()


def _call(op, x, dim, keepdim, kind, param=0.0, *, dtype=None, integers=(), nonempty=False):
    _check_tensor(op, x, _INTEGERS if kind == "sum" else integers)
    _checks.flags(op, keepdim=keepdim)
    dims = _dims(op, x, dim)
    if nonempty:
        _check_elements(op, x, dims)
    dtype = dtype or (torch.int64 if kind == "sum" and not x.is_floating_point() else x.dtype)
    if use_kernel(x):
        return _reduction(x, dims, keepdim, kind, float(param), dtype, torch.is_grad_enabled())[0]
    return reduction_reference(x, dims, keepdim, kind, param, dtype).contiguous()


def _arg(op, x, dim, keepdim):
    _check_tensor(op, x, _INTEGERS[1:])
    _checks.integer(op, "dim", dim, optional=True)
    _checks.flags(op, keepdim=keepdim)
    if dim is None:
        _check_elements(op, x, range(x.dim()))
        y = _call(op, x.reshape(-1), 0, False, op, dtype=torch.int64, integers=_INTEGERS, nonempty=True)
        return y.view((1,) * x.dim()) if keepdim else y
    return _call(op, x.detach(), dim, keepdim, op, dtype=torch.int64, integers=_INTEGERS, nonempty=True)


def _converted(op, x, dtype):
    """x, and the dtype that it is summed as; converted here where kernels would not read it so."""
    if dtype is None or not isinstance(x, Tensor):
        return x, dtype
    if dtype not in (*_checks.FLOATS, *_INTEGERS[1:]) or (op in ("mean", "vector_norm") and dtype in _INTEGERS):
        raise TypeError(f"{op}: dtype must be float64 | float32 | float16 | bfloat16 or None, got {dtype}")
    if x.dtype in _checks.FLOATS and torch.promote_types(x.dtype, dtype) == dtype:
        return x, dtype
    return x.to(dtype), dtype


def _check_elements(op, x, dims):
    if 0 in [x.shape[d] for d in dims]:
        raise ValueError(f"{op}: x must have elements to reduce, got shape {tuple(x.shape)}")


def _check_tensor(op, x, integers):
    if not (integers and isinstance(x, Tensor) and x.dtype in integers and x.layout is torch.strided):
        _checks.tensors(op, x)


def _dims(op, x, dim):
    """The dimensions as a list, counted from the last (a vmapped dimension comes first). Of a single number: none."""
    if dim is None or (isinstance(dim, (tuple, list)) and not dim):
        return list(range(-x.dim(), 0))
    given = [dim] if isinstance(dim, int) else dim
    if not isinstance(given, (tuple, list)) or any(isinstance(d, bool) or not isinstance(d, int) for d in given):
        raise TypeError(f"{op}: dim must be an int, a tuple of them or None, got {dim!r}")
    ndim = max(x.dim(), 1)
    if any(not -ndim <= d < ndim for d in given):
        raise ValueError(f"{op}: dim must be in {-ndim} to {ndim - 1} for x {tuple(x.shape)}, got {dim}")
    dims = sorted({d % ndim - ndim for d in given})
    if len(dims) < len(given):
        raise ValueError(f"{op}: dim must name each dimension once, got {dim}")
    return dims if x.dim() else []
