"""Root-mean-square norm with a gate, as state-space and linear-attention layers end with it.

    y = x * rsqrt(mean(x^2) + eps) * weight * activation(gate)                      norm before gate
    y = h * rsqrt(mean(h^2) + eps) * weight,   h = x * activation(gate)             norm after gate

Dao and Gu, "Transformers are SSMs", 2024 (after the gate); Yang et al., "Gated Delta Networks", 2024 (before it). The
mean is over the row or over each `group_size` of its elements. Rows of any width; the weight's gradient is summed in a
fixed order.
"""

from typing import Optional

import torch
from torch import Tensor

from . import _checks, _norms
from ._activation_math import ACTIVATIONS, FORMULAS, activate, activate_gradient, gradient
from ._device import facts, launch
from ._dispatch import differentiable, use_kernel
from ._norms import add_to, fold, load_rows, load_scale
from ._ops import add_op_namespace_prefix
from ._replay import replayed
from ._rows import Plan, at, compute_dtype, first_row, inside, plan_forward, row_index, rows, sum_leading, warps
from ._triton import cdiv, next_power_of_2, round_to, scalar, tl, triton, triton_dtype

SECOND_ORDER = "reference"

_BEFORE_WEIGHT = {"before_weight": True, "after_weight": False}


def rms_norm_gated_reference(
    x, gate, weight=None, eps=1e-6, *, activation="silu", norm_before_gate=True, group_size=None, casting="after_weight"
):
    """What `rms_norm_gated` computes, in plain PyTorch."""
    size = x.shape[-1] if group_size is None else group_size
    return _reference(x, gate, weight, eps, activation, norm_before_gate, size, _BEFORE_WEIGHT[casting])[0]


def _reference(x, gate, weight, eps, activation, norm_first, size, before_weight):
    compute, product = compute_dtype(x, gate, weight), _product_dtype(x, weight)
    a = FORMULAS[ACTIVATIONS[activation][0]](gate.to(compute), *ACTIVATIONS[activation][1:])
    h = x.to(compute) if norm_first else x.to(compute) * a
    rstd = _rstd(h, size, eps)
    h = h * _spread(rstd, size)
    if before_weight:
        h = h.to(x.dtype).to(compute)
    if weight is not None:
        h = h * weight
    if before_weight and norm_first:
        h = h.to(product).to(compute)
    return (h * a if norm_first else h).to(_out_dtype(x, weight, norm_first, before_weight)), rstd


def _rstd(h, size, eps):
    groups = h.shape[-1] // size if size else 1
    mean_square = h.square().unflatten(-1, (groups, size)).mean(-1)
    return torch.rsqrt(mean_square + (torch.finfo(h.dtype).eps if eps is None else eps))


def _spread(t, size):
    """A number of each group, (..., groups), for each element, (..., N)."""
    return t.unsqueeze(-1).expand(*t.shape, size).flatten(-2)


def _product_dtype(x, weight):
    return x.dtype if weight is None else torch.promote_types(x.dtype, weight.dtype)


def _out_dtype(x, weight, norm_first, before_weight):
    """x's dtype, or what it is promoted to where the product with the weight is the last step."""
    return _product_dtype(x, weight) if before_weight and not norm_first else x.dtype


def _plan(N, max_warps):
    BLOCK_N = next_power_of_2(N)
    if BLOCK_N <= 512:  # a warp has rows of its own: 0.97 of a copy at 128, H200 bf16; 4 warps a tile 0.94
        return Plan(1024 // max(BLOCK_N, 32), BLOCK_N, True, 1)
    return plan_forward(N, max_warps)  # 1.02 at 4096


def _plan_backward(N, itemsize, device):
    BLOCK_N = next_power_of_2(N)
    if BLOCK_N <= 512:  # 0.92 of a copy at 128 and 256; a warp with rows of its own, 3 stages, 0.91 and 0.89
        plan = _norms.BackwardPlan(1024 // max(BLOCK_N, 32), BLOCK_N, True, 3, warps(4, device.max_warps), 4)
        fits = 4 * (2 * itemsize + 4) * plan.BLOCK_M * BLOCK_N <= device.shared_memory  # of 4 programs
        return plan if fits else plan._replace(STAGES=1)
    return _norms.plan_backward(N, itemsize, device)  # 0.93 at 4096


@triton.jit
def _load(x_ptr, gate_ptr, x_strides, gate_strides, outer_a, outer_b, offs_m, offs_n, mask, COMPUTE: tl.constexpr):
    x = tl.load(at(x_ptr, x_strides, outer_a, outer_b, offs_m, offs_n), mask=mask, other=0.0).to(COMPUTE)
    gate = tl.load(at(gate_ptr, gate_strides, outer_a, outer_b, offs_m, offs_n), mask=mask, other=0.0).to(COMPUTE)
    return x, gate


@triton.jit
def _store_normed(
    h, activated, rstd, w_ptr, y_ptr, x_ptr, out, offs_n, N, mask,
    NORM_FIRST: tl.constexpr, BEFORE_WEIGHT: tl.constexpr, PRODUCT: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    y = h * rstd[:, None]
    if BEFORE_WEIGHT:
        y = round_to(y, x_ptr.dtype.element_ty).to(COMPUTE)
    y = y * load_scale(w_ptr, 0.0, offs_n, offs_n < N, COMPUTE)
    if NORM_FIRST:
        if BEFORE_WEIGHT:
            y = round_to(y, PRODUCT).to(COMPUTE)
        y = y * activated
    tl.store(y_ptr + out[:, None] + offs_n[None, :], round_to(y, y_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["M"])
def _rms_norm_gated_fwd_kernel(
    x_ptr, gate_ptr, w_ptr, y_ptr, rstd_ptr, B, M, N, groups, x_strides, gate_strides, eps, alpha, beta,
    ACTIVATION: tl.constexpr, PRECISE: tl.constexpr, NORM_FIRST: tl.constexpr, BEFORE_WEIGHT: tl.constexpr,
    PRODUCT: tl.constexpr, COMPUTE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ONE_PASS: tl.constexpr,
):  # fmt: skip
    """A program normalises one group, of N elements, of BLOCK_M rows."""
    group = tl.cast(tl.program_id(0) % groups, tl.int64)
    outer_a, outer_b, offs_m = row_index(tl.program_id(0) // groups, B, M, BLOCK_M)
    x_ptr += group * N * x_strides[3]
    gate_ptr += group * N * gate_strides[3]
    if w_ptr is not None:
        w_ptr += group * N
    mask_m = offs_m < M
    out_m = ((outer_a * B + outer_b) * M + offs_m) * groups + group
    offs_n = tl.arange(0, BLOCK_N)
    if ONE_PASS:
        mask = mask_m[:, None] & (offs_n < N)[None, :]
        x, gate = _load(x_ptr, gate_ptr, x_strides, gate_strides, outer_a, outer_b, offs_m, offs_n, mask, COMPUTE)
        activated = activate(gate, alpha, beta, ACTIVATION, PRECISE)
        h = x if NORM_FIRST else x * activated
        total = tl.sum(h * h, axis=1)
    else:
        squares = tl.zeros((BLOCK_M, BLOCK_N), COMPUTE)
        for start in range(0, N, BLOCK_N):
            cols = start + offs_n
            mask = mask_m[:, None] & (cols < N)[None, :]
            x, gate = _load(x_ptr, gate_ptr, x_strides, gate_strides, outer_a, outer_b, offs_m, cols, mask, COMPUTE)
            h = x if NORM_FIRST else x * activate(gate, alpha, beta, ACTIVATION, PRECISE)
            squares += h * h
        total = tl.sum(squares, axis=1)
    rstd = tl.rsqrt(total / N + eps)
    tl.store(rstd_ptr + out_m, rstd, mask=mask_m)
    if ONE_PASS:
        _store_normed(
            h, activated, rstd, w_ptr, y_ptr, x_ptr, out_m * N, offs_n, N, mask,
            NORM_FIRST, BEFORE_WEIGHT, PRODUCT, COMPUTE,
        )  # fmt: skip
    else:
        for start in range(0, N, BLOCK_N):
            cols = start + offs_n
            mask = mask_m[:, None] & (cols < N)[None, :]
            x, gate = _load(x_ptr, gate_ptr, x_strides, gate_strides, outer_a, outer_b, offs_m, cols, mask, COMPUTE)
            activated = activate(gate, alpha, beta, ACTIVATION, PRECISE)
            h = x if NORM_FIRST else x * activated
            _store_normed(
                h, activated, rstd, w_ptr, y_ptr, x_ptr, out_m * N, cols, N, mask,
                NORM_FIRST, BEFORE_WEIGHT, PRODUCT, COMPUTE,
            )  # fmt: skip


@triton.jit
def _normed_and_gradient(
    dy, x, gate, rstd, scale, alpha, beta,
    ACTIVATION: tl.constexpr, PRECISE: tl.constexpr, NORM_FIRST: tl.constexpr,
):  # fmt: skip
    """activation(gate), what was normalised, normalised, and the gradient that reaches it before the weight."""
    activated = activate(gate, alpha, beta, ACTIVATION, PRECISE)
    if NORM_FIRST:
        return activated, x * rstd[:, None], dy * activated, dy * activated * scale
    else:
        return activated, x * activated * rstd[:, None], dy, dy * scale


@triton.jit
def _store_gradients(
    dy, x, gate, activated, xhat, g, projection, rstd, scale, alpha, beta, dx_ptr, dgate_ptr, out, offs_n, mask,
    ACTIVATION: tl.constexpr, PRECISE: tl.constexpr, NORM_FIRST: tl.constexpr,
):  # fmt: skip
    dx = (g - xhat * projection[:, None]) * rstd[:, None]
    if NORM_FIRST:
        dactivated = dy * xhat * scale
    else:
        dactivated = dx * x
        dx = dx * activated
    dgate = activate_gradient(dactivated, gate, alpha, beta, ACTIVATION, PRECISE)
    cells = out[:, None] + offs_n[None, :]
    tl.store(dx_ptr + cells, round_to(dx, dx_ptr.dtype.element_ty), mask=mask)
    tl.store(dgate_ptr + cells, round_to(dgate, dgate_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["M", "n_tiles"])
def _rms_norm_gated_bwd_kernel(
    dy_ptr, x_ptr, gate_ptr, w_ptr, rstd_ptr, dx_ptr, dgate_ptr, dw_ptr, B, M, N, groups, n_tiles,
    dy_strides, x_strides, gate_strides, alpha, beta,
    ACTIVATION: tl.constexpr, PRECISE: tl.constexpr, NORM_FIRST: tl.constexpr, COMPUTE: tl.constexpr,
    WHOLE: tl.constexpr, KEEP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ONE_PASS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Each program walks row tiles of one group and sums its share of the weight's gradient: in registers, or with
    rows too wide for that in its own row of dw, which starts at 0."""
    group = tl.cast(tl.program_id(0) % groups, tl.int64)
    first, step = tl.program_id(0) // groups, tl.num_programs(0) // groups
    dy_ptr += group * N * dy_strides[3]
    x_ptr += group * N * x_strides[3]
    gate_ptr += group * N * gate_strides[3]
    if w_ptr is not None:
        w_ptr += group * N
    if dw_ptr is not None:
        dw_ptr += (first * groups + group) * N
    tile_m, offs_n = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    if ONE_PASS:
        scale = load_scale(w_ptr, 0.0, offs_n, offs_n < N, COMPUTE, BLOCK_M if KEEP > 1 else 1)
        dw = tl.zeros((KEEP, BLOCK_N), COMPUTE)
    for tile in tl.range(first, n_tiles, step, num_stages=STAGES):
        outer_a, outer_b, m = first_row(tile, B, M, BLOCK_M)
        offs_m = m + tile_m
        mask_m = offs_m < M
        out_m = ((outer_a * B + outer_b) * M + offs_m) * groups + group
        rstd = tl.load(rstd_ptr + out_m, mask=mask_m, other=0.0)
        if ONE_PASS:
            mask = inside(tile_m, offs_n, M - m, N, WHOLE)
            dy = load_rows(dy_ptr, dy_strides, outer_a, outer_b, m, tile_m, offs_n, mask, COMPUTE)
            x = load_rows(x_ptr, x_strides, outer_a, outer_b, m, tile_m, offs_n, mask, COMPUTE)
            gate = load_rows(gate_ptr, gate_strides, outer_a, outer_b, m, tile_m, offs_n, mask, COMPUTE)
            activated, xhat, dscaled, g = _normed_and_gradient(
                dy, x, gate, rstd, scale, alpha, beta, ACTIVATION, PRECISE, NORM_FIRST
            )
            projection = tl.sum(g * xhat, axis=1) / N
            _store_gradients(
                dy, x, gate, activated, xhat, g, projection, rstd, scale, alpha, beta, dx_ptr, dgate_ptr,
                out_m * N, offs_n, mask, ACTIVATION, PRECISE, NORM_FIRST,
            )  # fmt: skip
            if dw_ptr is not None:
                dw += fold(dscaled * xhat, KEEP)
        else:
            products = tl.zeros((BLOCK_M, BLOCK_N), COMPUTE)
            for start in range(0, N, BLOCK_N):
                cols = start + offs_n
                mask = mask_m[:, None] & (cols < N)[None, :]
                scale = load_scale(w_ptr, 0.0, cols, cols < N, COMPUTE)
                dy = tl.load(at(dy_ptr, dy_strides, outer_a, outer_b, offs_m, cols), mask=mask, other=0.0).to(COMPUTE)
                x, gate = _load(x_ptr, gate_ptr, x_strides, gate_strides, outer_a, outer_b, offs_m, cols, mask, COMPUTE)
                _, xhat, _, g = _normed_and_gradient(
                    dy, x, gate, rstd, scale, alpha, beta, ACTIVATION, PRECISE, NORM_FIRST
                )
                products += g * xhat
            projection = tl.sum(products, axis=1) / N
            for start in range(0, N, BLOCK_N):
                cols = start + offs_n
                mask = mask_m[:, None] & (cols < N)[None, :]
                scale = load_scale(w_ptr, 0.0, cols, cols < N, COMPUTE)
                dy = tl.load(at(dy_ptr, dy_strides, outer_a, outer_b, offs_m, cols), mask=mask, other=0.0).to(COMPUTE)
                x, gate = _load(x_ptr, gate_ptr, x_strides, gate_strides, outer_a, outer_b, offs_m, cols, mask, COMPUTE)
                activated, xhat, dscaled, g = _normed_and_gradient(
                    dy, x, gate, rstd, scale, alpha, beta, ACTIVATION, PRECISE, NORM_FIRST
                )
                _store_gradients(
                    dy, x, gate, activated, xhat, g, projection, rstd, scale, alpha, beta, dx_ptr, dgate_ptr,
                    out_m * N, cols, mask, ACTIVATION, PRECISE, NORM_FIRST,
                )  # fmt: skip
                if dw_ptr is not None:
                    add_to(dw_ptr, tl.sum(dscaled * xhat, axis=0), cols, cols < N)
    if ONE_PASS:
        if dw_ptr is not None:
            tl.store(dw_ptr + offs_n, tl.sum(dw, axis=0), mask=offs_n < N)


def _groups(x, size):
    return x.shape[-1] // size if size else 1


def _options(x, gate, weight, activation):
    """The compute dtype, what a launch takes of it, and the activation's numbers."""
    compute = compute_dtype(x, gate, weight)
    kind, alpha, beta = ACTIVATIONS[activation]
    precise = compute == torch.float32 and torch.float32 in (x.dtype, gate.dtype)
    options = {"ACTIVATION": kind, "PRECISE": precise, "COMPUTE": triton_dtype(compute)}
    return compute, options, (scalar(alpha, compute), scalar(beta, compute))


def _rows_of_groups(groups, *operands):
    """As `rows`, N being a group's size: kernels step from group to group themselves."""
    layout, operands = rows(*operands)
    return layout._replace(N=layout.N // groups), operands


@torch.library.custom_op(add_op_namespace_prefix("rms_norm_gated_fwd"), mutates_args=())
def rms_norm_gated_fwd(
    x: Tensor, gate: Tensor, weight: Optional[Tensor], eps: Optional[float], activation: str, norm_first: bool,
    size: int, before_weight: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    compute, options, numbers = _options(x, gate, weight, activation)
    groups = _groups(x, size)
    y = torch.empty(x.shape, dtype=_out_dtype(x, weight, norm_first, before_weight), device=x.device)
    rstd = torch.empty((*x.shape[:-1], groups), dtype=compute, device=x.device)
    if y.numel():
        layout, (x, gate) = _rows_of_groups(groups, x, gate)
        plan = _plan(layout.N, facts(x.device).max_warps)
        launch(
            _rms_norm_gated_fwd_kernel,
            (layout.blocks(plan.BLOCK_M) * groups,),
            x.device,
            (x, gate, _norms.packed(weight), y, rstd, layout.B, layout.M, layout.N, groups, *layout.strides,
             scalar(torch.finfo(compute).eps if eps is None else eps, compute), *numbers),
            NORM_FIRST=norm_first, BEFORE_WEIGHT=before_weight, PRODUCT=triton_dtype(_product_dtype(x, weight)),
            **options, **plan._asdict(),
        )  # fmt: skip
    else:
        rstd.fill_(torch.nan)
    return y, rstd


@rms_norm_gated_fwd.register_fake
def _(x, gate, weight, eps, activation, norm_first, size, before_weight):
    y = x.new_empty(x.shape, dtype=_out_dtype(x, weight, norm_first, before_weight))
    return y, x.new_empty((*x.shape[:-1], _groups(x, size)), dtype=compute_dtype(x, gate, weight))


@torch.library.custom_op(add_op_namespace_prefix("rms_norm_gated_bwd"), mutates_args=())
def rms_norm_gated_bwd(
    dy: Tensor, x: Tensor, gate: Tensor, weight: Optional[Tensor], rstd: Tensor, eps: Optional[float],
    activation: str, norm_first: bool, size: int, need_dw: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of x, gate and weight; the last empty where it is not needed."""
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    dgate = torch.empty(x.shape, dtype=gate.dtype, device=x.device)
    dw = rstd.new_zeros((1, x.shape[-1])) if need_dw else None
    if dx.numel():
        compute, options, numbers = _options(x, gate, weight, activation)
        groups = _groups(x, size)
        layout, (dy, x, gate) = _rows_of_groups(groups, dy, x, gate)
        device = facts(x.device)
        plan = _plan_backward(layout.N, dy.element_size() + x.element_size() + gate.element_size(), device)
        n_tiles = layout.blocks(plan.BLOCK_M)
        programs = min(n_tiles, cdiv(plan.programs * device.multiprocessors, groups))
        if need_dw:
            dw = (rstd.new_empty if plan.ONE_PASS else rstd.new_zeros)((programs, groups * layout.N))
        launch(
            _rms_norm_gated_bwd_kernel,
            (programs * groups,),
            x.device,
            (dy, x, gate, _norms.packed(weight), rstd, dx, dgate, dw, layout.B, layout.M, layout.N, groups, n_tiles,
             *layout.strides, *numbers),
            NORM_FIRST=norm_first, WHOLE=layout.N == plan.BLOCK_N and layout.M % plan.BLOCK_M == 0,
            KEEP=_norms.side_by_side(plan), BLOCK_M=plan.BLOCK_M, BLOCK_N=plan.BLOCK_N, ONE_PASS=plan.ONE_PASS,
            STAGES=plan.STAGES, num_warps=plan.num_warps, **options,
        )  # fmt: skip
    return dx, dgate, _norms.sum_parts((dw, weight.dtype))[0] if need_dw else x.new_empty(0)


@rms_norm_gated_bwd.register_fake
def _(dy, x, gate, weight, rstd, eps, activation, norm_first, size, need_dw):
    dw = weight.new_empty(weight.shape) if need_dw else x.new_empty(0)
    return x.new_empty(x.shape), x.new_empty(x.shape, dtype=gate.dtype), dw


def _fwd_reference(x, gate, weight, eps, activation, norm_first, size, before_weight):
    return _reference(x, gate, weight, eps, activation, norm_first, size, before_weight)


def _bwd_reference(dy, x, gate, weight, rstd, eps, activation, norm_first, size, need_dw):
    compute = rstd.dtype
    kind, alpha, beta = ACTIVATIONS[activation]
    dy, h, gate_ = dy.to(compute), x.to(compute), gate.to(compute)
    a = FORMULAS[kind](gate_, alpha, beta)
    h = h if norm_first else h * a
    rstd = _spread(_rstd(h, size, eps), size)  # not the argument: it has a derivative
    xhat = h * rstd
    dscaled = dy * a if norm_first else dy
    g = dscaled if weight is None else dscaled * weight
    groups = (_groups(x, size), size)
    dh = (g - xhat * _spread((g * xhat).unflatten(-1, groups).mean(-1), size)) * rstd
    if norm_first:
        da = dy * xhat if weight is None else dy * xhat * weight
    else:
        dh, da = dh * a, dh * x
    dw = sum_leading(dscaled * xhat, 1).to(weight.dtype) if need_dw else x.new_empty(0)
    return dh.to(x.dtype), gradient(kind, da, gate_, alpha, beta).to(gate.dtype), dw


def _rows_of_bwd(dy, x, gate, weight, rstd, eps, activation, norm_first, size, need_dw):
    return None if need_dw else [0, 1, 2, 4]


_rms_norm_gated_bwd = differentiable(rms_norm_gated_bwd, _bwd_reference, rowwise=_rows_of_bwd)


def _setup_context(ctx, inputs, output):
    x, gate, weight, *ctx.params, _ = inputs
    ctx.save_for_backward(x, gate, weight, output[1])
    ctx.mark_non_differentiable(output[1])


def _backward(ctx, dy, _):
    need_dw = ctx.needs_input_grad[2]
    dx, dgate, dw = _rms_norm_gated_bwd(dy, *ctx.saved_tensors, *ctx.params, need_dw)
    return dx, dgate, dw if need_dw else None, None, None, None, None, None


_rms_norm_gated = differentiable(
    rms_norm_gated_fwd, _fwd_reference, _setup_context, _backward, rowwise=lambda *_: [0, 1]
)


@replayed
def rms_norm_gated(
    x: Tensor,
    gate: Tensor,
    weight: Optional[Tensor] = None,
    eps: Optional[float] = 1e-6,
    *,
    activation: str = "silu",
    norm_before_gate: bool = True,
    group_size: Optional[int] = None,
    casting: str = "after_weight",
) -> Tensor:
    """Normalise rows by their root mean square, and multiply them by an activation of a gate.

    Before the gate: y = x * rsqrt(mean(x^2) + eps) * weight * activation(gate). After it, x * activation(gate) is
    what is normalised, and then multiplied by the weight.

    Args:
        x: (..., N), float64 | float32 | float16 | bfloat16, any strides.
        gate: of x's shape, of any of those dtypes and any strides.
        weight: (N,), of any of those dtypes.
        eps: added inside the square root; None = finfo(compute dtype).eps.
        activation: "silu", "sigmoid" or another function of activations.py, with its default parameters.
        norm_before_gate: which of the two forms (Qwen3-Next, Kimi Linear: True; Mamba 2, Zamba 2, Nemotron-H: False).
        group_size: how many neighbouring elements share a mean; None = N.
        casting: where the result is rounded. "after_weight": once, to x's dtype (Kimi Linear). "before_weight": the
            normalised row is rounded to x's dtype before the weight; before the gate the product with the weight is
            rounded too (Qwen3-Next), after it the result has the dtype that x and weight promote to (Mamba 2).
    Returns:
        (..., N), contiguous.
    Raises:
        TypeError: dtype not listed.   ValueError: gate is not of x's shape, or weight not (N,); group_size does not
            divide N; unknown activation or casting; negative eps.
    Numerics: sums, products and the activation in float32, in float64 where an argument is float64. The weight's
        gradient is deterministic. Autograd: first and second derivative, vmap; forward mode raises.
    Source: Dao and Gu 2024; Yang et al. 2024.
    """
    op = "rms_norm_gated"
    _checks.tensors(op, x, gate=gate, weight=weight)
    if gate is None:
        raise TypeError(f"{op}: gate must be a tensor, got NoneType")
    if not x.dim():
        raise ValueError(f"{op}: x must have at least one dimension, got ()")
    _checks.shape(op, "gate", gate, x.shape)
    _checks.shape(op, "weight", weight, x.shape[-1:])
    _checks.number(op, "eps", eps, low=0, optional=True)
    _checks.choice(op, "activation", activation, ACTIVATIONS)
    _checks.choice(op, "casting", casting, _BEFORE_WEIGHT)
    _checks.flags(op, norm_before_gate=norm_before_gate)
    if group_size is not None and (not isinstance(group_size, int) or group_size < 1 or x.shape[-1] % group_size):
        raise ValueError(f"{op}: group_size must be an int that divides {x.shape[-1]}, got {group_size}")
    size = x.shape[-1] if group_size is None else group_size
    params = (x, gate, weight, eps, activation, norm_before_gate, size, _BEFORE_WEIGHT[casting])
    return _rms_norm_gated(*params)[0] if use_kernel(x) else _reference(*params)[0].contiguous()
