"""Division of rows by their norm, over any dimension.

    y = x / max(||x||_p, eps)              mode "max", as torch.nn.functional.normalize
    y = x * rsqrt(sum(x^2) + eps)          mode "rsqrt", as the query and key norms of linear attention

Rows of any width, read in place whichever way they lie. p = 1, 2 and inf have kernels; another p is composed of
PyTorch's own operations.
"""

import math

import torch
from torch import Tensor

from . import _checks
from ._device import facts, launch
from ._dispatch import differentiable, use_kernel
from ._ops import add_op_namespace_prefix
from ._replay import replayed
from ._rows import at, compute_dtype, plan_any_dim, row_index, rows
from ._triton import round_to, scalar, tl, triton, triton_dtype

SECOND_ORDER = "reference"

_MODES = ("max", "rsqrt")
_NORMS = {1.0: "sum", 2.0: "root", math.inf: "peak"}  # of p with kernels


def normalize_reference(x, p=2.0, dim=-1, eps=1e-12, *, mode="max"):
    """What `normalize` computes, in plain PyTorch."""
    h = x.to(compute_dtype(x))
    if mode == "rsqrt":
        return (h * torch.rsqrt(h.square().sum(dim, keepdim=True) + eps)).to(x.dtype)
    # vector_norm adds absolute values one by one on the CPU
    size = h.abs().sum(dim, keepdim=True) if p == 1 else torch.linalg.vector_norm(h, p, dim, keepdim=True)
    return (h / size.clamp_min(eps)).to(x.dtype)


def _fwd_reference(x, dim, eps, norm):
    if norm == "rsqrt":
        return normalize_reference(x, 2.0, dim, eps, mode="rsqrt")
    return normalize_reference(x, next(p for p in _NORMS if _NORMS[p] == norm), dim, eps)


def _bwd_reference(dy, x, dim, eps, norm):
    compute = compute_dtype(x)
    dy, h = dy.to(compute), x.to(compute)
    if norm in ("root", "rsqrt"):
        squares = h.square().sum(dim, keepdim=True)
        if norm == "rsqrt":
            r = torch.rsqrt(squares + eps)
            return (r * dy - h * r**3 * (h * dy).sum(dim, keepdim=True)).to(x.dtype)
        empty = squares == 0
        size = torch.sqrt(torch.where(empty, 1.0, squares))
        size, direction = torch.where(empty, 0.0, size), h / size
    elif norm == "sum":
        size, direction = h.abs().sum(dim, keepdim=True), h.sign()
    else:
        size = h.abs().amax(dim, keepdim=True)
        peak = (h.abs() == size).to(compute)
        direction = h.sign() * peak / peak.sum(dim, keepdim=True)
    d = size.clamp_min(eps)
    along = torch.where(size < eps, 0.0, direction * (h * dy).sum(dim, keepdim=True))
    return ((dy - along / d) / d).to(x.dtype)


@triton.jit
def _load(ptr, strides, a, b, offs_m, offs_n, mask, COMPUTE: tl.constexpr):
    return tl.load(at(ptr, strides, a, b, offs_m, offs_n), mask=mask, other=0.0).to(COMPUTE)


@triton.jit
def _measure(x, sizes, NORM: tl.constexpr):
    """`sizes`, each lane's share of a norm, with x taken in. NaN stays, in the sums and as a maximum."""
    if NORM == "peak":
        size = tl.abs(x)
        sizes = tl.where((size > sizes) | (x != x), size, sizes)
    elif NORM == "sum":
        sizes += tl.abs(x)
    else:
        sizes += x * x
    return sizes


@triton.jit
def _size(sizes, NORM: tl.constexpr):
    """The norm of each row, (BLOCK_M, 1), or its square for "rsqrt"."""
    if NORM == "peak":
        broken = tl.max((sizes != sizes).to(tl.int32), axis=1) > 0  # tl.max may drop a NaN
        size = tl.where(broken, float("nan"), tl.max(tl.where(sizes == sizes, sizes, 0.0), axis=1))
    else:
        size = tl.sum(sizes, axis=1)
        if NORM == "root":
            size = tl.sqrt(size)
    return size[:, None]


@triton.jit
def _divisor(size, eps, NORM: tl.constexpr, COMPUTE: tl.constexpr):
    """What x is divided by, and whether it depends on x."""
    eps = tl.full((1, 1), eps, COMPUTE)  # a float64 constant would be compared as float32
    if NORM == "rsqrt":
        return tl.sqrt(size + eps), size == size
    else:
        return tl.where(size < eps, eps, size), size >= eps


@triton.jit
def _normalize_fwd_kernel(
    x_ptr, y_ptr, B, M, N, x_strides, y_strides, eps,
    NORM: tl.constexpr, COMPUTE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ONE_PASS: tl.constexpr,
):  # fmt: skip
    a, b, offs_m = row_index(tl.program_id(0), B, M, BLOCK_M)
    mask_m = (offs_m < M)[:, None]
    offs_n = tl.arange(0, BLOCK_N)
    sizes = tl.zeros((BLOCK_M, BLOCK_N), COMPUTE)
    if ONE_PASS:
        mask = mask_m & (offs_n < N)[None, :]
        x = _load(x_ptr, x_strides, a, b, offs_m, offs_n, mask, COMPUTE)
        d, _ = _divisor(_size(_measure(x, sizes, NORM), NORM), eps, NORM, COMPUTE)
        tl.store(at(y_ptr, y_strides, a, b, offs_m, offs_n), round_to(x / d, y_ptr.dtype.element_ty), mask=mask)
    else:
        for start in range(0, N, BLOCK_N):
            mask = mask_m & (offs_n < N - start)[None, :]
            sizes = _measure(_load(x_ptr, x_strides, a, b, offs_m, start + offs_n, mask, COMPUTE), sizes, NORM)
        d, _ = _divisor(_size(sizes, NORM), eps, NORM, COMPUTE)
        for start in range(0, N, BLOCK_N):
            cols = start + offs_n
            mask = mask_m & (offs_n < N - start)[None, :]
            x = _load(x_ptr, x_strides, a, b, offs_m, cols, mask, COMPUTE)
            tl.store(at(y_ptr, y_strides, a, b, offs_m, cols), round_to(x / d, y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _store_dx(
    dy, x, size, d, depends, dot, ties, dx_ptr, dx_strides, a, b, offs_m, offs_n, mask, NORM: tl.constexpr
):  # fmt: skip
    """dot: the sum of x / d * dy."""
    if NORM == "sum":
        direction = tl.where(x > 0, 1.0, tl.where(x < 0, -1.0, x))
    elif NORM == "peak":
        direction = tl.where(tl.abs(x) == size, tl.where(x > 0, 1.0, tl.where(x < 0, -1.0, x)) / ties, 0.0)
    else:
        direction = x / d
    dx = (dy - tl.where(depends, direction * dot, 0.0)) / d
    tl.store(at(dx_ptr, dx_strides, a, b, offs_m, offs_n), round_to(dx, dx_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _normalize_bwd_kernel(
    dy_ptr, x_ptr, dx_ptr, B, M, N, dy_strides, x_strides, dx_strides, eps,
    NORM: tl.constexpr, COMPUTE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ONE_PASS: tl.constexpr,
):  # fmt: skip
    """Ties of the largest share its gradient evenly."""
    a, b, offs_m = row_index(tl.program_id(0), B, M, BLOCK_M)
    mask_m = (offs_m < M)[:, None]
    offs_n = tl.arange(0, BLOCK_N)
    sizes = tl.zeros((BLOCK_M, BLOCK_N), COMPUTE)
    ties = tl.full((1, 1), 1.0, COMPUTE)
    if ONE_PASS:
        mask = mask_m & (offs_n < N)[None, :]
        x = _load(x_ptr, x_strides, a, b, offs_m, offs_n, mask, COMPUTE)
        dy = _load(dy_ptr, dy_strides, a, b, offs_m, offs_n, mask, COMPUTE)
        size = _size(_measure(x, sizes, NORM), NORM)
        d, depends = _divisor(size, eps, NORM, COMPUTE)
        dot = tl.sum(x * dy, axis=1)[:, None] / d
        if NORM == "peak":
            ties = tl.sum((mask & (tl.abs(x) == size)).to(COMPUTE), axis=1)[:, None]
        _store_dx(dy, x, size, d, depends, dot, ties, dx_ptr, dx_strides, a, b, offs_m, offs_n, mask, NORM)
    else:
        dots = tl.zeros((BLOCK_M, BLOCK_N), COMPUTE)
        counts = tl.zeros((BLOCK_M, BLOCK_N), COMPUTE)  # of each lane's largest
        for start in range(0, N, BLOCK_N):
            cols = start + offs_n
            mask = mask_m & (offs_n < N - start)[None, :]
            x = _load(x_ptr, x_strides, a, b, offs_m, cols, mask, COMPUTE)
            dots += x * _load(dy_ptr, dy_strides, a, b, offs_m, cols, mask, COMPUTE)
            if NORM == "peak":
                equal = (mask & (tl.abs(x) == sizes)).to(COMPUTE)
                counts = tl.where(tl.abs(x) > sizes, 1.0, counts + equal)
            sizes = _measure(x, sizes, NORM)
        size = _size(sizes, NORM)
        d, depends = _divisor(size, eps, NORM, COMPUTE)
        dot = tl.sum(dots, axis=1)[:, None] / d
        if NORM == "peak":
            ties = tl.sum(tl.where(sizes == size, counts, 0.0), axis=1)[:, None]
        for start in range(0, N, BLOCK_N):
            cols = start + offs_n
            mask = mask_m & (offs_n < N - start)[None, :]
            x = _load(x_ptr, x_strides, a, b, offs_m, cols, mask, COMPUTE)
            dy = _load(dy_ptr, dy_strides, a, b, offs_m, cols, mask, COMPUTE)
            _store_dx(dy, x, size, d, depends, dot, ties, dx_ptr, dx_strides, a, b, offs_m, cols, mask, NORM)


def _launch(kernel, operands, dim, eps, norm):
    """The last operand is contiguous, so that `rows` leaves it in place, and is written."""
    compute = compute_dtype(operands[-1])
    layout, operands = rows(*operands, dim=dim)
    device = operands[0].device
    plan = plan_any_dim(layout, max(t.element_size() for t in operands), facts(device).max_warps)
    launch(
        kernel,
        (layout.blocks(plan.BLOCK_M),),
        device,
        (*operands, layout.B, layout.M, layout.N, *layout.strides, scalar(eps, compute)),
        NORM=norm, COMPUTE=triton_dtype(compute), **plan._asdict(),
    )  # fmt: skip


@torch.library.custom_op(add_op_namespace_prefix("normalize_fwd"), mutates_args=())
def normalize_fwd(x: Tensor, dim: int, eps: float, norm: str) -> Tensor:
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel():
        _launch(_normalize_fwd_kernel, (x, y), dim, eps, norm)
    return y


@normalize_fwd.register_fake
def _(x, dim, eps, norm):
    return x.new_empty(x.shape)


@torch.library.custom_op(add_op_namespace_prefix("normalize_bwd"), mutates_args=())
def normalize_bwd(dy: Tensor, x: Tensor, dim: int, eps: float, norm: str) -> Tensor:
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel():
        _launch(_normalize_bwd_kernel, (dy, x, dx), dim, eps, norm)
    return dx


@normalize_bwd.register_fake
def _(dy, x, dim, eps, norm):
    return x.new_empty(x.shape)


def _rows_of(*positions):
    # A batch of single numbers has its batch dimension where `dim` would look for the row.
    return lambda x, *_: list(positions) if x.dim() > 1 else None


_normalize_bwd = differentiable(normalize_bwd, _bwd_reference, rowwise=_rows_of(0, 1))


def _setup_context(ctx, inputs, output):
    x, *ctx.params = inputs
    ctx.save_for_backward(x)


def _backward(ctx, dy):
    return _normalize_bwd(dy, *ctx.saved_tensors, *ctx.params), None, None, None


_normalize = differentiable(normalize_fwd, _fwd_reference, _setup_context, _backward, rowwise=_rows_of(0))


@replayed
def normalize(x: Tensor, p: float = 2.0, dim: int = -1, eps: float = 1e-12, *, mode: str = "max") -> Tensor:
    """Divide rows by their norm.

    y = x / max(||x||_p, eps), or with mode "rsqrt" y = x * rsqrt(sum(x^2) + eps), over `dim`

    Args:
        x: float64 | float32 | float16 | bfloat16, any shape and strides.
        p: the exponent of the norm, inf included; 2 with mode "rsqrt".
        dim: the dimension that is reduced; from the last where negative. torch.nn.functional.normalize takes 1.
        eps: the least divisor, or what is added inside the square root.
        mode: "max" or "rsqrt" (the l2norm of flash-linear-attention and Qwen3-Next, there with eps=1e-6).
    Returns:
        Of x's shape and dtype, contiguous.
    Raises:
        TypeError: dtype not listed.   ValueError: x has no dimension `dim`; unknown mode; negative eps; p is not 2
            with mode "rsqrt".
    Numerics: computed in float32, float64 in float64, and rounded once; torch rounds the norm itself to half precision.
        A row of zeros gives zeros, and gradients as if it were divided by eps. For p = inf, ties share the gradient
        evenly. Autograd: first and second derivative, vmap; forward mode raises.
    Source: torch.nn.functional.normalize.
    """
    op = "normalize"
    _checks.tensors(op, x)
    _checks.number(op, "p", p)
    _checks.number(op, "eps", eps, low=0)
    _checks.choice(op, "mode", mode, _MODES)
    if mode == "rsqrt" and p != 2:
        raise ValueError(f"{op}: p must be 2 with mode 'rsqrt', got {p}")
    _checks.integer(op, "dim", dim)
    ndim = max(x.dim(), 1)  # a single number is a row of one
    if not -ndim <= dim < ndim:
        raise ValueError(f"{op}: dim must be in {-ndim} to {ndim - 1} for x {tuple(x.shape)}, got {dim}")
    dim = dim if dim < 0 else dim - ndim  # from the last: a vmapped dimension comes first
    if use_kernel(x) and float(p) in _NORMS:
        return _normalize(x, dim, float(eps), "rsqrt" if mode == "rsqrt" else _NORMS[float(p)])
    return normalize_reference(x, p, dim, eps, mode=mode).contiguous()
