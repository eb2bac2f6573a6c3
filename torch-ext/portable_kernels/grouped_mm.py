"""Products of groups of rows, or of shares of K, with a matrix each: what mixtures of experts do with their tokens.

    2-D x 3-D   (T, K) x (G, K, N) -> (T, N)      rows of group g times b[g]
    3-D x 2-D   (G, M, K) x (K, T) -> (M, T)      a[g] times columns of group g
    2-D x 2-D   (M, T) x (T, N) -> (G, M, N)      a product over each group's share of T
    3-D x 3-D   (G, M, K) x (G, K, N) -> (G, M, N)

Group g of T ends at offs[g] and begins where the one before it ends. offs stays on the device.
"""

from typing import Optional

import torch
from torch import Tensor

from . import _checks, _grouped_mm
from ._dispatch import differentiable
from ._ops import add_op_namespace_prefix
from ._replay import replayed
from ._rows import compute_dtype

SECOND_ORDER = "kernels"  # the gradients are grouped products again


def grouped_mm_reference(a, b, *, offs=None, bias=None, out_dtype=None):
    """What `grouped_mm` computes, in plain PyTorch."""
    return _fwd_reference(a, b, offs, bias, out_dtype or a.dtype)


def _fwd_reference(a, b, offs, bias, out_dtype):
    wide = compute_dtype(a)
    if offs is None:
        out = a.to(wide) @ b.to(wide)
        return (out if bias is None else out + (bias if bias.dim() == 1 else bias.unsqueeze(1))).to(out_dtype)
    T = a.shape[0] if a.dim() == 2 and b.dim() == 3 else b.shape[-1] if a.dim() == 3 else a.shape[1]
    groups, start = [], 0
    for g, end in enumerate(offs.tolist()):
        start, end = min(max(start, 0), T), min(max(end, 0), T)
        part = slice(start, max(start, end))
        if a.dim() == 3:
            left, right = a[g], b[:, part]
        else:
            left, right = (a[:, part], b[part]) if b.dim() == 2 else (a[part], b[g])
        out = left.to(wide) @ right.to(wide)
        groups.append((out if bias is None else out + (bias if bias.dim() == 1 else bias[g])).to(out_dtype))
        start = end
    shape = _shape(a, b, offs)
    if a.dim() == b.dim():
        return torch.stack(groups) if groups else a.new_zeros(shape, dtype=out_dtype)
    along = 0 if a.dim() == 2 else 1
    rest = [n - (along == d) * sum(t.shape[d] for t in groups) for d, n in enumerate(shape)]
    return torch.cat([*groups, a.new_zeros(rest, dtype=out_dtype)], along)


def _shape(a, b, offs):
    if a.dim() != b.dim():
        return (a.shape[0], b.shape[2]) if a.dim() == 2 else (a.shape[1], b.shape[1])
    return (a.shape[0] if offs is None else offs.shape[0], a.shape[-2], b.shape[-1])


@torch.library.custom_op(add_op_namespace_prefix("grouped_mm_fwd"), mutates_args=())
def grouped_mm_fwd(
    a: Tensor, b: Tensor, offs: Optional[Tensor], bias: Optional[Tensor], out_dtype: torch.dtype
) -> Tensor:
    out = torch.empty(_shape(a, b, offs), dtype=out_dtype, device=a.device)
    if not out.numel():
        return out
    if bias is not None and bias.dim() == 1:
        bias = bias.unsqueeze(0).expand(1 if offs is None else offs.shape[0], -1)
    offs = offs if offs is None else offs.contiguous()
    if offs is None:
        # Every group has as many rows: the matrices below each other, with offsets that count them.
        G, M, K = a.shape
        offs = torch.arange(M, G * M + 1, M, dtype=torch.int64, device=a.device)
        bias = None if bias is None else bias.expand(G, -1)
        _grouped_mm.rows_in_groups(a.reshape(G * M, K), b, offs, bias, out.view(G * M, -1))
    elif a.dim() == b.dim():
        return _grouped_mm.shares_of_k(a, b, offs, bias, out)
    elif a.dim() == 2:
        _grouped_mm.rows_in_groups(a, b, offs, bias, out)
    else:  # the transpose of the above
        _grouped_mm.rows_in_groups(b.t(), a.mT, offs, bias, out.t())
    return out


@grouped_mm_fwd.register_fake
def _(a, b, offs, bias, out_dtype):
    return a.new_empty(_shape(a, b, offs), dtype=out_dtype)


def _setup_context(ctx, inputs, output):
    a, b, offs, bias, _ = inputs
    ctx.save_for_backward(a, b, offs)
    ctx.bias = None if bias is None else (bias.dim(), bias.dtype)


def _backward(ctx, dy):
    a, b, offs = ctx.saved_tensors
    needs = ctx.needs_input_grad
    dy = dy.to(a.dtype)
    da = _grouped_mm_op(dy, b.mT, offs, None, a.dtype) if needs[0] else None
    db = _grouped_mm_op(a.mT, dy, offs, None, b.dtype) if needs[1] else None
    dbias = None
    if needs[3]:
        ndim, dtype = ctx.bias
        # The sum of a group's rows is a product with ones.
        ones = dy.new_ones(1).expand(*a.shape[:-2], 1, dy.shape[-2]) if a.dim() == 3 or b.dim() == 3 else None
        if ones is None:
            dbias = dy.sum(-2, dtype=compute_dtype(dy))
        else:
            dbias = _grouped_mm_op(ones, dy, offs, None, compute_dtype(dy)).squeeze(-2)
        dbias = (dbias if ndim == 2 else dbias.sum(0)).to(dtype)
    return da, db, None, dbias, None


_grouped_mm_op = differentiable(grouped_mm_fwd, _fwd_reference, _setup_context, _backward)


@replayed
def grouped_mm(
    a: Tensor,
    b: Tensor,
    *,
    offs: Optional[Tensor] = None,
    bias: Optional[Tensor] = None,
    out_dtype: Optional[torch.dtype] = None,
) -> Tensor:
    """Multiply each group of rows, or each share of K, with a matrix of its own.

    Args:
        a, b: 2-D or 3-D, of one dtype, float64 | float32 | float16 | bfloat16, any strides: (T, K) and (G, K, N);
            (G, M, K) and (K, T); (M, T) and (T, N); or (G, M, K) and (G, K, N).
        offs: (G,), int32 | int64, on the device: where each group of T ends; None where both are 3-D. They never fall.
            A group may be empty, and what lies past T is left out.
        bias: (N,) or (G, N), added to every row of a group's result. Not where T is the result's last dimension.
        out_dtype: dtype of the result; None = a's.
    Returns:
        (T, N), (M, T) or (G, M, N), contiguous. What lies past the last offset is 0, and so is its gradient.
    Raises:
        TypeError: dtype not listed; a and b of different dtypes.   ValueError: shapes that do not fit.
    Numerics: sums in float32, or float64; float32 operands are multiplied as torch's are set to be.
    Autograd: any order; deterministic; forward mode raises. Source: torch.nn.functional.grouped_mm.
    """
    _check(a, b, offs, bias, out_dtype)
    return _grouped_mm_op(a, b, offs, bias, a.dtype if out_dtype is None else out_dtype)


def _check(a, b, offs, bias, out_dtype):
    op = "grouped_mm"
    _checks.tensors(op, a, b=b, bias=bias, first="a")
    _checks.given(op, b=b)
    if a.dtype != b.dtype:
        raise TypeError(f"{op}: b must have a's dtype {a.dtype}, got {b.dtype}")
    shapes = f"{tuple(a.shape)} and {tuple(b.shape)}"
    if a.dim() not in (2, 3) or b.dim() not in (2, 3):
        raise ValueError(f"{op}: a and b must have 2 or 3 dimensions, got shapes {shapes}")
    if a.shape[-1] != b.shape[-2]:
        raise ValueError(f"{op}: a's columns must be as many as b's rows, got shapes {shapes}")
    batched = [t.shape[0] for t in (a, b) if t.dim() == 3]
    if len(batched) == 2:
        if offs is not None:
            raise ValueError(f"{op}: offs must be None where a and b are 3-D, got a {type(offs).__name__}")
        if batched[0] != batched[1]:
            raise ValueError(f"{op}: a and b must have as many groups, got shapes {shapes}")
    elif not isinstance(offs, Tensor):
        raise TypeError(f"{op}: offs must be a tensor where a or b is 2-D, got {type(offs).__name__}")
    else:
        if offs.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"{op}: offs must have dtype int32 | int64, got {str(offs.dtype).replace('torch.', '')}")
        if offs.dim() != 1 or (batched and offs.shape[0] != batched[0]):
            expected = f"({batched[0]},)" if batched else "(groups,)"
            raise ValueError(f"{op}: offs must have shape {expected}, got {tuple(offs.shape)}")
        if offs.device != a.device:
            raise ValueError(f"{op}: offs must be on {a.device} as a is, got {offs.device}")
    if bias is not None:
        if a.dim() == 3 and b.dim() == 2:
            raise NotImplementedError(f"{op}: bias of a result with groups of columns; add it to the result")
        G, N = (batched or offs.shape)[0], b.shape[-1]
        if bias.shape not in ((N,), (G, N)):
            raise ValueError(f"{op}: bias must have shape {(N,)} or {(G, N)}, got {tuple(bias.shape)}")
    if out_dtype is not None and out_dtype not in _checks.FLOATS:
        raise TypeError(f"{op}: out_dtype must be a floating dtype or None, got {out_dtype}")
