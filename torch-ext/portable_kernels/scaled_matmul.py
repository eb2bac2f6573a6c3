"""Products of float8 matrices with scales, and quantisation to float8.

    out = (a * scale_a) @ (b * scale_b) + bias        x = q * scale, nearly

A scale serves a whole tensor, a row, 128 elements of a row, or a square of 128x128. Micikevicius et al., "FP8 Formats
for Deep Learning", 2022; the blocks are those of DeepSeek-V3, 2024. The four float8 types of PyTorch are known on
every device; where one is not native its values are converted to float16 or bfloat16, which hold them exactly.
"""

from typing import Optional

import torch
from torch import Tensor

from . import _checks, _fp8, _quantize, _scaled_matmul
from ._dispatch import differentiable
from ._ops import add_op_namespace_prefix
from ._replay import replayed
from ._rows import compute_dtype
from ._triton import cdiv

SECOND_ORDER = "refused"  # as is the first

_OUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_SCALINGS = ("tensor", "row", "block")
_BLOCKS = {(1, _quantize.GROUP): "block", (_quantize.GROUP, _quantize.GROUP): "square"}


def quantize_fp8_reference(x, dtype=torch.float8_e4m3fn, scaling="tensor", *, block=(1, 128)):
    """What `quantize_fp8` computes, in plain PyTorch."""
    h = x.to(compute_dtype(x))
    size = torch.where(h.isfinite(), h.abs(), 0.0)
    if scaling == "tensor":
        size = size.amax() if size.numel() else size.new_zeros(())
    elif scaling == "row":
        size = size.amax(-1, keepdim=True) if size.numel() else size.new_zeros((*x.shape[:-1], 1))
    else:
        size = _blocks(size, block).amax((-3, -1))
        size = size if x.dim() > 1 else size.squeeze(-2)
    largest = torch.finfo(dtype).max
    scale = (size / largest).float().clamp(torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max)
    scale = torch.where(size > 0, scale, 1.0)
    inverse = 1.0 / scale.to(h.dtype)
    h = h * (_per_element(inverse, x.shape, block) if scaling == "block" else inverse)
    return h.clamp(-largest, largest).float().to(dtype), scale


def _blocks(t, block):
    """(..., M, N) as (..., blocks, rows of a block, blocks, columns of a block), filled up with zeros."""
    t = t if t.dim() > 1 else t.unsqueeze(0)
    fill = [-size % width for size, width in zip(t.shape[-2:], block)]
    t = torch.nn.functional.pad(t, (0, fill[1], 0, fill[0]))
    return t.unflatten(-1, (-1 if t.shape[-1] else 0, block[1])).unflatten(-3, (-1 if t.shape[-2] else 0, block[0]))


def _per_element(scale, shape, block):
    """Scales of blocks, one for each element of `shape`."""
    scale = scale.repeat_interleave(block[1], -1)[..., : shape[-1]]
    return scale if len(shape) < 2 else scale.repeat_interleave(block[0], -2)[..., : shape[-2], :]


def scaled_matmul_reference(a, b, scale_a, scale_b, bias=None, out_dtype=torch.bfloat16, fast_accum=False):
    """What `scaled_matmul` computes, in plain PyTorch."""
    compute = torch.promote_types(scale_a.dtype, torch.float32)
    wide_a = a.to(compute) * _spread(_scale_rows(scale_a, *a.shape), *a.shape)
    wide_b = b.to(compute) * _spread(_scale_columns(scale_b, *b.shape), *b.t().shape).t()
    out = wide_a @ wide_b
    return (out if bias is None else out + bias.to(compute)).to(out_dtype)


def _scale_rows(scale, rows, K):
    """A scale as (rows or fewer, blocks of K or 1), or None where it fits no operand of (rows, K)."""
    if scale.numel() == 1:
        return scale.reshape(1, 1)
    blocks = cdiv(K, _quantize.GROUP)
    known = (rows, 1), (rows, blocks), (cdiv(rows, _quantize.GROUP), blocks)
    return scale if scale.shape in known else None


def _scale_columns(scale, K, columns):
    """A scale of (K, columns) as `_scale_rows` of the transpose."""
    return _scale_rows(scale if scale.dim() != 2 else scale.t(), columns, K)


def _spread(scale, rows, K):
    """A scale of `_scale_rows`, for each element of (rows, K)."""
    if scale.shape[0] not in (1, rows):
        scale = scale.repeat_interleave(_quantize.GROUP, 0)[:rows]
    return scale if scale.shape[1] == 1 else scale.repeat_interleave(_quantize.GROUP, 1)[:, :K]


@torch.library.custom_op(add_op_namespace_prefix("quantize_fp8_fwd"), mutates_args=())
def quantize_fp8_fwd(x: Tensor, dtype: torch.dtype, scaling: str) -> tuple[Tensor, Tensor]:
    return _quantize.quantize(x, dtype, scaling)


@quantize_fp8_fwd.register_fake
def _(x, dtype, scaling):
    scale = x.new_empty(_quantize.scale_shape(x.shape, scaling), dtype=torch.float32)
    return x.new_empty(x.shape, dtype=dtype), scale


def _quantize_reference(x, dtype, scaling):
    block = next((b for b, name in _BLOCKS.items() if name == scaling), None)
    return quantize_fp8_reference(x, dtype, scaling if block is None else "block", block=block)


_quantize_fp8 = differentiable(
    quantize_fp8_fwd,
    _quantize_reference,
    *_quantize.refuse_gradient("quantize_fp8"),
    rowwise=lambda x, dtype, scaling: None if scaling == "tensor" or x.dim() < 2 else [0],
)


@torch.library.custom_op(add_op_namespace_prefix("scaled_matmul_fwd"), mutates_args=())
def scaled_matmul_fwd(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, bias: Optional[Tensor], out_dtype: torch.dtype,
    fast_accum: bool,
) -> Tensor:  # fmt: skip
    scales = _scale_rows(scale_a, *a.shape), _scale_columns(scale_b, *b.shape)
    return _scaled_matmul.scaled_matmul(a, b, *scales, bias, out_dtype, fast_accum, given=(scale_a, scale_b))


@scaled_matmul_fwd.register_fake
def _(a, b, scale_a, scale_b, bias, out_dtype, fast_accum):
    return a.new_empty((a.shape[0], b.shape[1]), dtype=out_dtype)


_scaled_product = differentiable(
    scaled_matmul_fwd, scaled_matmul_reference, *_quantize.refuse_gradient("scaled_matmul")
)


@replayed
def scaled_matmul(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Optional[Tensor] = None,
    out_dtype: torch.dtype = torch.bfloat16,
    fast_accum: bool = False,
) -> Tensor:
    """Multiply two float8 matrices with scales.

    out = (a * scale_a) @ (b * scale_b) + bias, with each scale spread over the elements that share it

    Args:
        a: (M, K), float8_e4m3fn | float8_e5m2 | float8_e4m3fnuz | float8_e5m2fnuz, any strides.
        b: (K, N), of any of those types, any strides. Fastest as the transpose of a contiguous (N, K).
        scale_a: float32: one element, (M, 1), (M, ceil(K / 128)) or (ceil(M / 128), ceil(K / 128)).
        scale_b: float32: one element, (1, N), (ceil(K / 128), N) or (ceil(K / 128), ceil(N / 128)): the
            transpose of what `quantize_fp8` gives for (N, K).
        bias: (N,), float64 | float32 | float16 | bfloat16.
        out_dtype: bfloat16 | float16 | float32.
        fast_accum: let sums stay in Hopper's tensor cores, which keep about 14 bits of them. Without it they move to
            float32 every 128 elements of K. The same either way on other devices.
    Returns:
        (M, N), out_dtype, contiguous.
    Raises:
        TypeError: dtype not listed; a scale that is missing or not float32.   ValueError: shapes that do not fit.
    Numerics: products are exact, sums and scales in float32. Scales that a whole row shares are applied to its sums.
    Autograd: refused; an error when a gradient flows in.
    Source: torch._scaled_mm.
    """
    _check(a, b, scale_a, scale_b, bias, out_dtype, fast_accum)
    return _scaled_product(a, b, scale_a, scale_b, bias, out_dtype, fast_accum)


@replayed
def quantize_fp8(
    x: Tensor,
    dtype: torch.dtype = torch.float8_e4m3fn,
    scaling: str = "tensor",
    *,
    block: tuple[int, int] = (1, 128),
) -> tuple[Tensor, Tensor]:
    """Round to float8 after division by a scale that fills its range.

    scale = max |x| / finfo(dtype).max, of the elements that share it;   q = round(x / scale)

    Args:
        x: (..., N), float64 | float32 | float16 | bfloat16, any strides.
        dtype: float8_e4m3fn | float8_e5m2 | float8_e4m3fnuz | float8_e5m2fnuz.
        scaling: what shares a scale: "tensor", "row" (the last dimension) or "block".
        block: with "block", (1, 128): 128 elements of a row, as activations are scaled; (128, 128): squares of the
            last two dimensions, as weights are. The last block of a dimension may be smaller.
    Returns:
        (q, scale): q of x's shape, contiguous; scale float32, of shape () for "tensor", (..., 1) for "row",
        (..., ceil(N / 128)) or (..., ceil(M / 128), ceil(N / 128)) for "block".
    Raises:
        TypeError: dtype not listed.   ValueError: unknown scaling or block; too few dimensions.
    Numerics: scales come from the finite elements. Infinities saturate, NaN stays NaN; zeros alone give the scale 1,
        and no scale is below 2^-126. The same bits on every device: x is multiplied by the scale's rounded inverse.
    Autograd: refused; an error when a gradient flows in.
    Source: Micikevicius et al., "FP8 formats for deep learning", 2022; blocks: DeepSeek-V3 technical report, 2024.
    """
    _checks.tensors("quantize_fp8", x)
    _fp8_dtype("quantize_fp8", "dtype", dtype)
    _checks.choice("quantize_fp8", "scaling", scaling, _SCALINGS)
    kind = scaling
    _checks.choice("quantize_fp8", "block", tuple(block) if isinstance(block, list) else block, _BLOCKS)
    if scaling == "block":
        kind = _BLOCKS[tuple(block)]
    least = {"tensor": 0, "square": 2}.get(kind, 1)
    if x.dim() < least:
        raise ValueError(f"quantize_fp8: x must have at least {least} dimensions for this scaling, got {x.dim()}")
    return _quantize_fp8(x, dtype, kind)


def _fp8_dtype(op, name, dtype):
    if dtype not in _fp8.DTYPES:
        allowed = " | ".join(str(d).replace("torch.", "") for d in _fp8.DTYPES)
        raise TypeError(f"{op}: {name} must be {allowed}, got {str(dtype).replace('torch.', '')}")


def _check(a, b, scale_a, scale_b, bias, out_dtype, fast_accum):
    op = "scaled_matmul"
    for name, t in (("a", a), ("b", b), ("scale_a", scale_a), ("scale_b", scale_b)):
        if not isinstance(t, Tensor):
            raise TypeError(f"{op}: {name} must be a tensor, got {type(t).__name__}")
        if name in ("a", "b"):
            _fp8_dtype(op, name, t.dtype)
        elif t.dtype != torch.float32:
            raise TypeError(f"{op}: {name} must have dtype float32, got {str(t.dtype).replace('torch.', '')}")
        if t.layout is not torch.strided or t.is_nested:
            kind = "a nested one" if t.is_nested else f"layout {t.layout}"
            raise TypeError(f"{op}: {name} must be a strided tensor, got {kind}")
        if t.device != a.device:
            raise ValueError(f"{op}: {name} must be on {a.device} as a is, got {t.device}")
    if a.dim() != 2 or b.dim() != 2 or a.shape[1] != b.shape[0]:
        raise ValueError(f"{op}: a and b must have shapes (M, K) and (K, N), got {tuple(a.shape)} and {tuple(b.shape)}")
    (M, K), N = a.shape, b.shape[1]
    if _scale_rows(scale_a, M, K) is None:
        G = _quantize.GROUP
        raise ValueError(
            f"{op}: scale_a must have one element or shape {(M, 1)}, {(M, cdiv(K, G))} or {(cdiv(M, G), cdiv(K, G))} "
            f"for a {tuple(a.shape)}, got {tuple(scale_a.shape)}"
        )
    if _scale_columns(scale_b, K, N) is None:
        G = _quantize.GROUP
        raise ValueError(
            f"{op}: scale_b must have one element or shape {(1, N)}, {(cdiv(K, G), N)} or {(cdiv(K, G), cdiv(N, G))} "
            f"for b {tuple(b.shape)}, got {tuple(scale_b.shape)}"
        )
    if bias is not None:
        _checks.tensors(op, bias, first="bias")
        _checks.shape(op, "bias", bias, (N,))
        if bias.device != a.device:
            raise ValueError(f"{op}: bias must be on {a.device} as a is, got {bias.device}")
    if out_dtype not in _OUT_DTYPES:
        raise TypeError(f"{op}: out_dtype must be bfloat16 | float16 | float32, got {out_dtype}")
    _checks.flags(op, fast_accum=fast_accum)
