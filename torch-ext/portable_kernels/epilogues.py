"""What follows a linear layer or ends a branch, in one pass: an activation of x + bias, a residual plus x * scale.

    bias_act:            y = activation(x + bias)
    residual_scale_add:  y = residual + x * scale

The bias and the scale are parameters of the last dimension; the scale may be one number. Their gradients are summed in
float32 (float64) in a fixed order. The second is LayerScale (Touvron et al., "Going deeper with Image Transformers",
2021).
"""

from typing import Optional

import torch
from torch import Tensor

from . import _checks, _norms
from ._activation_math import ACTIVATIONS, FORMULAS, activate, activate_gradient, gradient
from ._device import facts, launch
from ._dispatch import differentiable, use_kernel
from ._norms import load_rows
from ._ops import add_op_namespace_prefix
from ._pointwise import elements, plan
from ._replay import replayed
from ._rows import compute_dtype, first_row, inside, rows, sum_leading, warps
from ._triton import cdiv, next_power_of_2, round_to, scalar, tl, triton, triton_dtype

SECOND_ORDER = "reference"


def bias_act_reference(x, bias, activation):
    """What `bias_act` computes, in plain PyTorch."""
    return _bias_act_reference(x, bias, *ACTIVATIONS[activation])


def residual_scale_add_reference(x, residual, scale):
    """What `residual_scale_add` computes, in plain PyTorch."""
    compute = compute_dtype(x, residual, scale)
    y = residual.to(compute) + x.to(compute) * scale.to(compute)
    return y.to(torch.promote_types(x.dtype, residual.dtype))


def _bias_act_reference(x, bias, activation, a, b):
    compute = compute_dtype(x, bias)
    return FORMULAS[activation](x.to(compute) + bias.to(compute), a, b).to(x.dtype)


def _bias_act_bwd_reference(dy, x, bias, activation, a, b, need_db):
    compute = compute_dtype(x, bias)
    dx = gradient(activation, dy.to(compute), x.to(compute) + bias.to(compute), a, b)
    return dx.to(x.dtype), sum_leading(dx, 1).to(bias.dtype) if need_db else x.new_empty(0)


def _residual_scale_add_bwd_reference(dy, x, scale, need_dscale):
    compute = compute_dtype(dy, x, scale)
    dx = (dy.to(compute) * scale.to(compute)).to(x.dtype)
    if not need_dscale:
        return dx, x.new_empty(0)
    return dx, (dy.to(compute) * x.to(compute)).sum_to_size(scale.shape).to(scale.dtype)


@triton.jit(do_not_specialize=["M", "n_tiles"])
def _epilogue_fwd_kernel(
    y_ptr, x_ptr, p_ptr, r_ptr, B, M, N, n_tiles, y_strides, x_strides, p_strides, r_strides, a, b,
    ACROSS: tl.constexpr, ACTIVATION: tl.constexpr, PRECISE: tl.constexpr, COMPUTE: tl.constexpr, WHOLE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """A program owns BLOCK_N columns of every num_programs(1)-th row tile. p: the bias of an activation, or the scale
    of x, with strides of 0 along the dimensions that it lacks; it is read once, but where it lies ACROSS the rows."""
    tile_m = tl.arange(0, BLOCK_M)
    offs_n = tl.cast(tl.program_id(0), tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    p = tl.zeros((1, 1), COMPUTE)
    if not ACROSS:
        one = tl.arange(0, 1)
        p = load_rows(p_ptr, p_strides, 0, 0, 0, one, offs_n, inside(one, offs_n, 1, N, WHOLE), COMPUTE)
    for tile in range(tl.program_id(1), n_tiles, tl.num_programs(1)):
        outer_a, outer_b, m = first_row(tile, B, M, BLOCK_M)
        mask = inside(tile_m, offs_n, M - m, N, WHOLE)
        x = load_rows(x_ptr, x_strides, outer_a, outer_b, m, tile_m, offs_n, mask, COMPUTE)
        q = p
        if ACROSS:
            q = load_rows(p_ptr, p_strides, outer_a, outer_b, m, tile_m, offs_n, mask, COMPUTE)
        if r_ptr is None:
            y = activate(x + q, a, b, ACTIVATION, PRECISE)
        else:
            y = load_rows(r_ptr, r_strides, outer_a, outer_b, m, tile_m, offs_n, mask, COMPUTE) + x * q
        row = y_ptr + outer_a * y_strides[0] + outer_b * y_strides[1] + m * y_strides[2]
        cells = (tl.cast(tile_m, tl.int64) * y_strides[2])[:, None] + (offs_n * y_strides[3])[None, :]
        tl.store(row + cells, round_to(y, y_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["M", "n_tiles"])
def _epilogue_bwd_kernel(
    dy_ptr, x_ptr, p_ptr, dx_ptr, dp_ptr, B, M, N, n_tiles, dy_strides, x_strides, p_stride, a, b,
    ACTIVATION: tl.constexpr, PRECISE: tl.constexpr, COMPUTE: tl.constexpr, WHOLE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A program owns BLOCK_N columns of every num_programs(1)-th row tile, and their share of the parameter's sum."""
    pid_m = tl.program_id(1)
    tile_m = tl.arange(0, BLOCK_M)
    offs_n = tl.cast(tl.program_id(0), tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    p = tl.load(p_ptr + (offs_n * p_stride)[None, :], mask=(offs_n < N)[None, :], other=0.0).to(COMPUTE)
    dp = tl.zeros((BLOCK_M, BLOCK_N), COMPUTE)
    for tile in tl.range(pid_m, n_tiles, tl.num_programs(1), num_stages=STAGES):
        outer_a, outer_b, m = first_row(tile, B, M, BLOCK_M)
        mask = inside(tile_m, offs_n, M - m, N, WHOLE)
        dy = load_rows(dy_ptr, dy_strides, outer_a, outer_b, m, tile_m, offs_n, mask, COMPUTE)
        x = load_rows(x_ptr, x_strides, outer_a, outer_b, m, tile_m, offs_n, mask, COMPUTE)
        if ACTIVATION is None:
            dx = dy * p
            dp += dy * x
        else:
            dx = activate_gradient(dy, x + p, a, b, ACTIVATION, PRECISE)
            dp += tl.where(mask, dx, 0.0)
        row = dx_ptr + ((outer_a * B + outer_b) * M + m) * N
        cells = tl.cast(tile_m, tl.int64)[:, None] * N + offs_n[None, :]
        tl.store(row + cells, round_to(dx, dx_ptr.dtype.element_ty), mask=mask)
    if dp_ptr is not None:
        dp = round_to(tl.sum(dp, axis=0), dp_ptr.dtype.element_ty)
        tl.store(dp_ptr + tl.cast(pid_m, tl.int64) * N + offs_n, dp, mask=offs_n < N)


def _whole(layout, tile):
    return layout.N % tile.BLOCK_N == 0 and layout.M % tile.BLOCK_M == 0


def _options(compute, activation, operands):
    precise = compute == torch.float32 and any(t is not None and t.dtype == torch.float32 for t in operands)
    return {"ACTIVATION": activation, "PRECISE": precise, "COMPUTE": triton_dtype(compute)}


def _plan(layout):
    """(tile, programs a multiprocessor). A thread has two rows, so that the bias serves twice: 0.96 and 0.94 of a copy
    for gelu at 16384 x 14336 and 32768 x 4096, H200 bf16."""
    tile = plan(layout)
    if layout.M > 1 and layout.N >= 1024 and all(s[3] <= 1 for s in layout.strides):
        tile = tile._replace(BLOCK_M=2, BLOCK_N=1024)
    return tile, 256


def _forward(x, param, residual, dtype, activation, a, b):
    y = torch.empty_like(x, dtype=dtype)
    if y.numel():
        compute = compute_dtype(x, param, residual)
        inputs = [x, param.expand(x.shape)] + ([] if residual is None else [residual])
        layout, operands = elements(y, *inputs)
        if residual is None:
            operands, layout = (*operands, None), layout._replace(strides=(*layout.strides, layout.strides[0]))
        tile, programs = _plan(layout)
        tiles_n = cdiv(layout.N, tile.BLOCK_N)
        parts = min(layout.blocks(tile.BLOCK_M), cdiv(programs * facts(x.device).multiprocessors, tiles_n))
        launch(
            _epilogue_fwd_kernel,
            (tiles_n, parts),
            x.device,
            (*operands, layout.B, layout.M, layout.N, layout.blocks(tile.BLOCK_M), *layout.strides,
             scalar(a, compute), scalar(b, compute)),
            ACROSS=any(layout.strides[2][:3]), **_options(compute, activation, (y, *inputs[1:])),
            WHOLE=_whole(layout, tile), **tile._asdict(),
        )  # fmt: skip
    return y


def _backward_plan(layout, itemsize, scaled, device):
    """(tile, parts). Of a copy, H200 bf16: gelu 0.85 and 0.93 at widths of 14336 and 4096; a scale 0.94."""
    tile = _norms.BackwardPlan(1, 1024, False, 3, warps(2, device.max_warps), 8)
    if scaled:  # with the tile above 0.92
        tile = tile._replace(BLOCK_N=2048, num_warps=warps(4, device.max_warps), programs=4)
    if itemsize > 4:
        tile = tile._replace(STAGES=2)
    if layout.A * layout.B == 1 and layout.M <= 64:  # a tile has all rows, and no sum is left for another launch
        BLOCK_M = next_power_of_2(layout.M)
        BLOCK_N = min(next_power_of_2(layout.N), 4096 // BLOCK_M, 512)
        while BLOCK_N > 32 and cdiv(layout.N, BLOCK_N) < device.multiprocessors:  # 16 x 4096: 0.79; in 16 programs 0.55
            BLOCK_N //= 2
        num_warps = warps(4, device.max_warps)
        return tile._replace(BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, STAGES=1, num_warps=num_warps), 1
    if any(s[3] == 1 and s[2] % 8 for s in layout.strides):  # no loads of 16 bytes. 1823 x 781: 0.67; as others 0.42
        tile = tile._replace(BLOCK_M=8, BLOCK_N=256, STAGES=1, num_warps=warps(4, device.max_warps), programs=4)
    # What is contiguous along M is read in lines.
    BLOCK_N = min(next_power_of_2(layout.N), tile.BLOCK_N if all(s[3] == 1 for s in layout.strides) else 64)
    tile = tile._replace(BLOCK_M=tile.BLOCK_M * tile.BLOCK_N // BLOCK_N, BLOCK_N=BLOCK_N)
    parts = cdiv(tile.programs * device.multiprocessors, cdiv(layout.N, BLOCK_N))
    return tile, min(layout.blocks(tile.BLOCK_M), parts)


def _backward(dy, x, param, need_dp, activation, a, b):
    """Gradients of x, contiguous, and of the parameter, empty where it is not needed."""
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not x.numel():
        return dx, param.new_zeros(param.shape) if need_dp else x.new_empty(0)
    compute = compute_dtype(dy, x, param)
    layout, (dy, x) = rows(dy, x)
    tile, parts = _backward_plan(layout, dy.element_size() + x.element_size(), activation is None, facts(x.device))
    each = param.numel() == layout.N  # column has a number of its own
    dp = None
    if need_dp:
        alone = each and parts == 1
        dp = torch.empty((parts, layout.N), dtype=param.dtype if alone else compute, device=x.device)
    launch(
        _epilogue_bwd_kernel,
        (cdiv(layout.N, tile.BLOCK_N), parts),
        x.device,
        (dy, x, param, dx, dp, layout.B, layout.M, layout.N, layout.blocks(tile.BLOCK_M), *layout.strides,
         param.stride(0) if param.numel() > 1 else 0, scalar(a, compute), scalar(b, compute)),
        **_options(compute, activation, (dx, param if need_dp else None)),
        WHOLE=_whole(layout, tile), BLOCK_M=tile.BLOCK_M, BLOCK_N=tile.BLOCK_N, STAGES=tile.STAGES,
        num_warps=tile.num_warps,
    )  # fmt: skip
    if not need_dp:
        return dx, x.new_empty(0)
    if each and parts > 1:
        (dp,) = _norms.sum_parts((dp, param.dtype))
    elif not each:
        dp = dp.sum().to(param.dtype)
    return dx, dp.view(param.shape)


def _fake_backward(x, param, need_dp):
    return x.new_empty(x.shape), x.new_empty(param.shape, dtype=param.dtype) if need_dp else x.new_empty(0)


@torch.library.custom_op(add_op_namespace_prefix("bias_act_fwd"), mutates_args=())
def bias_act_fwd(x: Tensor, bias: Tensor, activation: str, a: float, b: float) -> Tensor:
    return _forward(x, bias, None, x.dtype, activation, a, b)


@bias_act_fwd.register_fake
def _(x, bias, activation, a, b):
    return torch.empty_like(x)


@torch.library.custom_op(add_op_namespace_prefix("bias_act_bwd"), mutates_args=())
def bias_act_bwd(
    dy: Tensor, x: Tensor, bias: Tensor, activation: str, a: float, b: float, need_db: bool
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return _backward(dy, x, bias, need_db, activation, a, b)


@bias_act_bwd.register_fake
def _(dy, x, bias, activation, a, b, need_db):
    return _fake_backward(x, bias, need_db)


def _rows_of_bwd(dy, x, param, *rest):
    return None if rest[-1] else [0, 1]


_bias_act_bwd = differentiable(bias_act_bwd, _bias_act_bwd_reference, rowwise=_rows_of_bwd)


def _bias_act_setup_context(ctx, inputs, output):
    x, bias, *ctx.params = inputs
    ctx.save_for_backward(x, bias)


def _bias_act_backward(ctx, dy):
    need_db = ctx.needs_input_grad[1]
    dx, db = _bias_act_bwd(dy, *ctx.saved_tensors, *ctx.params, need_db)
    return dx, db if need_db else None, None, None, None


_bias_act = differentiable(
    bias_act_fwd, _bias_act_reference, _bias_act_setup_context, _bias_act_backward, like=0, rowwise=lambda *_: [0]
)


@torch.library.custom_op(add_op_namespace_prefix("residual_scale_add_fwd"), mutates_args=())
def residual_scale_add_fwd(x: Tensor, residual: Tensor, scale: Tensor) -> Tensor:
    return _forward(x, scale, residual, torch.promote_types(x.dtype, residual.dtype), None, 0.0, 0.0)


@residual_scale_add_fwd.register_fake
def _(x, residual, scale):
    return torch.empty_like(x, dtype=torch.promote_types(x.dtype, residual.dtype))


@torch.library.custom_op(add_op_namespace_prefix("residual_scale_add_bwd"), mutates_args=())
def residual_scale_add_bwd(dy: Tensor, x: Tensor, scale: Tensor, need_dscale: bool) -> tuple[Tensor, Tensor]:
    return _backward(dy, x, scale, need_dscale, None, 0.0, 0.0)


@residual_scale_add_bwd.register_fake
def _(dy, x, scale, need_dscale):
    return _fake_backward(x, scale, need_dscale)


_residual_scale_add_bwd = differentiable(
    residual_scale_add_bwd, _residual_scale_add_bwd_reference, rowwise=_rows_of_bwd
)


def _residual_scale_add_setup_context(ctx, inputs, output):
    x, residual, scale = inputs
    ctx.dtype = residual.dtype
    ctx.save_for_backward(x, scale)


def _residual_scale_add_backward(ctx, dy):
    need_dx, need_dr, need_dscale = ctx.needs_input_grad
    dx = dscale = None
    if need_dx or need_dscale:
        dx, dscale = _residual_scale_add_bwd(dy, *ctx.saved_tensors, need_dscale)
    return dx, dy.to(ctx.dtype) if need_dr else None, dscale if need_dscale else None


_residual_scale_add = differentiable(
    residual_scale_add_fwd,
    residual_scale_add_reference,
    _residual_scale_add_setup_context,
    _residual_scale_add_backward,
    like=0,
    rowwise=lambda *_: [0, 1],
)


@replayed
def bias_act(x: Tensor, bias: Tensor, activation: str) -> Tensor:
    """Add a bias and apply an activation, in one pass.

    y = activation(x + bias)

    Args:
        x: (..., N), float64 | float32 | float16 | bfloat16, any strides.
        bias: (N,), of any of those dtypes.
        activation: "gelu", "gelu_tanh", "silu", "relu" or another function of activations.py, with its default
            parameters.
    Returns:
        (..., N), dtype of x; with its strides where it is dense.
    Raises:
        TypeError: dtype not listed.   ValueError: bias is not (N,); unknown activation.
    Numerics: computed in float32, in float64 where an argument is float64, and rounded once: x + bias is not rounded.
        The gradient of the bias is deterministic. Autograd: first and second derivative, vmap; forward mode raises.
    Source: torch.nn.functional.linear's bias, then torch.nn.functional's activation.
    """
    _checks.tensors("bias_act", x, bias=bias)
    _given("bias_act", "bias", bias)
    if not x.dim():
        raise ValueError("bias_act: x must have at least one dimension, got shape ()")
    _checks.shape("bias_act", "bias", bias, x.shape[-1:])
    _checks.choice("bias_act", "activation", activation, ACTIVATIONS)
    params = ACTIVATIONS[activation]
    return _bias_act(x, bias, *params) if use_kernel(x) else _bias_act_reference(x, bias, *params)


@replayed
def residual_scale_add(x: Tensor, residual: Tensor, scale: Tensor) -> Tensor:
    """Add to a residual a branch times a scale of each channel (LayerScale) or of all, in one pass.

    y = residual + x * scale

    Args:
        x, residual: of one shape (..., N), float64 | float32 | float16 | bfloat16, any strides.
        scale: (N,), (1,) or (), of any of those dtypes.
    Returns:
        (..., N), of the dtype that x and residual promote to; with x's strides where it is dense.
    Raises:
        TypeError: dtype not listed.   ValueError: residual is not of x's shape; scale of another shape than these.
    Numerics: as `bias_act`; the product is not rounded. Autograd: as `bias_act`.
    Source: Touvron et al. 2021.
    """
    op = "residual_scale_add"
    _checks.tensors(op, x, residual=residual, scale=scale)
    _given(op, "residual", residual)
    _given(op, "scale", scale)
    _checks.shape(op, "residual", residual, x.shape)
    if tuple(scale.shape) not in ((), (1,) if x.dim() else (), tuple(x.shape[-1:])):
        raise ValueError(f"{op}: scale must have shape {tuple(x.shape[-1:])}, (1,) or (), got {tuple(scale.shape)}")
    if use_kernel(x):
        return _residual_scale_add(x, residual, scale)
    return residual_scale_add_reference(x, residual, scale)


def _given(op, name, t: Optional[Tensor]):
    if t is None:
        raise TypeError(f"{op}: {name} must be a tensor, got NoneType")
