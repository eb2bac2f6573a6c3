"""The kernels of modulated_norm.py.

scale, shift and gate come with strides of x's rows, 0 where rows share them. SHARED says that all rows of one (a, b)
share all three.
"""

from ._norms import add_to, load_scale
from ._rows import at, row_index
from ._triton import round_to, tl, triton


@triton.jit
def _load(ptr, strides, a, b, offs_m, offs_n, mask, COMPUTE: tl.constexpr):
    return tl.load(at(ptr, strides, a, b, offs_m, offs_n), mask=mask, other=0.0).to(COMPUTE)


@triton.jit
def _load_shared(ptr, strides, a, b, offs_m, offs_n, mask, mask_n, SHARED: tl.constexpr, COMPUTE: tl.constexpr):
    """scale, shift or gate: one row where all rows of the tile share it."""
    if SHARED:
        return _load(ptr, strides, a, b, tl.zeros((1,), tl.int64), offs_n, mask_n[None, :], COMPUTE)
    else:
        return _load(ptr, strides, a, b, offs_m, offs_n, mask, COMPUTE)


@triton.jit
def _load_total(
    x_ptr, r_ptr, gate_ptr, s_ptr, x_strides, r_strides, gate_strides, a, b, offs_m, offs_n, mask, mask_n,
    SHARED: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    """The rows to normalise: x, or residual + gate * x as rounded in the sum that is returned."""
    x = _load(x_ptr, x_strides, a, b, offs_m, offs_n, mask, COMPUTE)
    if r_ptr is not None:
        if gate_ptr is not None:
            x *= _load_shared(gate_ptr, gate_strides, a, b, offs_m, offs_n, mask, mask_n, SHARED, COMPUTE)
        x += _load(r_ptr, r_strides, a, b, offs_m, offs_n, mask, COMPUTE)
        x = round_to(x, s_ptr.dtype.element_ty).to(COMPUTE)
    return x


@triton.jit
def _store_modulated(
    x, mean, rest, rstd, scale_ptr, shift_ptr, w_ptr, y_ptr, s_ptr, scale_strides, shift_strides,
    a, b, offs_m, out, offs_n, mask, mask_n, SHARED: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    y = ((x - mean[:, None]) - rest[:, None]) * rstd[:, None] * load_scale(w_ptr, 0.0, offs_n, mask_n, COMPUTE)
    y *= 1.0 + _load_shared(scale_ptr, scale_strides, a, b, offs_m, offs_n, mask, mask_n, SHARED, COMPUTE)
    if shift_ptr is not None:
        y += _load_shared(shift_ptr, shift_strides, a, b, offs_m, offs_n, mask, mask_n, SHARED, COMPUTE)
    tl.store(y_ptr + out[:, None] + offs_n[None, :], round_to(y, y_ptr.dtype.element_ty), mask=mask)
    if s_ptr is not None:
        tl.store(s_ptr + out[:, None] + offs_n[None, :], round_to(x, s_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["M"])
def _modulated_norm_fwd_kernel(
    x_ptr, r_ptr, gate_ptr, scale_ptr, shift_ptr, w_ptr, y_ptr, s_ptr, stats_ptr, B, M, N,
    x_strides, r_strides, gate_strides, scale_strides, shift_strides, eps,
    LAYER: tl.constexpr, SHARED: tl.constexpr, COMPUTE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ONE_PASS: tl.constexpr,
):  # fmt: skip
    a, b, offs_m = row_index(tl.program_id(0), B, M, BLOCK_M)
    mask_m = offs_m < M
    out_m = (a * B + b) * M + offs_m
    offs_n = tl.arange(0, BLOCK_N)
    mask_n = offs_n < N
    mask = mask_m[:, None] & mask_n[None, :]
    x = _load_total(
        x_ptr, r_ptr, gate_ptr, s_ptr, x_strides, r_strides, gate_strides, a, b, offs_m, offs_n, mask, mask_n,
        SHARED, COMPUTE,
    )  # fmt: skip
    one = tl.full((), 1.0, COMPUTE)
    mean = tl.zeros((BLOCK_M,), COMPUTE)
    rest = mean
    if LAYER:  # the mean of the first block, rounded; the rest is what every row's is away from it
        mean = tl.sum(x * (one / tl.minimum(N, BLOCK_N)), axis=1)
    if ONE_PASS:
        d = tl.where(mask, x - mean[:, None], 0.0)
        if LAYER:
            rest = tl.sum(d * (one / N), axis=1)
        variance = tl.sum(d * d, axis=1) / N
    else:
        sums = tl.zeros((BLOCK_M, BLOCK_N), COMPUTE)
        squares = tl.zeros((BLOCK_M, BLOCK_N), COMPUTE)
        for start in range(0, N, BLOCK_N):
            cols = start + offs_n
            mask = mask_m[:, None] & (cols < N)[None, :]
            x = _load_total(
                x_ptr, r_ptr, gate_ptr, s_ptr, x_strides, r_strides, gate_strides, a, b, offs_m, cols, mask, cols < N,
                SHARED, COMPUTE,
            )  # fmt: skip
            d = tl.where(mask, x - mean[:, None], 0.0)
            sums += d
            squares += d * d
        if LAYER:
            rest = tl.sum(sums * (one / N), axis=1)
        variance = tl.sum(squares, axis=1) / N
    # The first block is a large part of the row, so that its mean is too near the row's for this to cancel.
    square = rest * rest
    variance = tl.where(square < variance, variance - square, variance)  # not inf - inf, nor below 0
    rstd = tl.rsqrt(variance + eps)
    tl.store(stats_ptr + out_m * 3, mean, mask=mask_m)
    tl.store(stats_ptr + out_m * 3 + 1, rest, mask=mask_m)
    tl.store(stats_ptr + out_m * 3 + 2, rstd, mask=mask_m)
    if ONE_PASS:
        _store_modulated(
            x, mean, rest, rstd, scale_ptr, shift_ptr, w_ptr, y_ptr, s_ptr, scale_strides, shift_strides,
            a, b, offs_m, out_m * N, offs_n, mask, mask_n, SHARED, COMPUTE,
        )  # fmt: skip
    else:
        for start in range(0, N, BLOCK_N):
            cols = start + offs_n
            mask = mask_m[:, None] & (cols < N)[None, :]
            x = _load_total(
                x_ptr, r_ptr, gate_ptr, s_ptr, x_strides, r_strides, gate_strides, a, b, offs_m, cols, mask, cols < N,
                SHARED, COMPUTE,
            )  # fmt: skip
            _store_modulated(
                x, mean, rest, rstd, scale_ptr, shift_ptr, w_ptr, y_ptr, s_ptr, scale_strides, shift_strides,
                a, b, offs_m, out_m * N, cols, mask, cols < N, SHARED, COMPUTE,
            )  # fmt: skip


@triton.jit
def _load_gradient(
    dy_ptr, h_ptr, scale_ptr, w_ptr, dy_strides, h_strides, scale_strides, mean, rest, rstd,
    a, b, offs_m, offs_n, mask, mask_n, SHARED: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    """dy, the normalised rows, 1 + scale, and the gradient of the normalised rows."""
    dy = _load(dy_ptr, dy_strides, a, b, offs_m, offs_n, mask, COMPUTE)
    h = _load(h_ptr, h_strides, a, b, offs_m, offs_n, mask, COMPUTE)
    xhat = tl.where(mask, ((h - mean[:, None]) - rest[:, None]) * rstd[:, None], 0.0)
    factor = 1.0 + _load_shared(scale_ptr, scale_strides, a, b, offs_m, offs_n, mask, mask_n, SHARED, COMPUTE)
    return dy, xhat, factor, dy * factor * load_scale(w_ptr, 0.0, offs_n, mask_n, COMPUTE)


@triton.jit
def _store_dx(
    dh, ds_ptr, x_ptr, gate_ptr, dh_ptr, dx_ptr, ds_strides, x_strides, gate_strides,
    a, b, offs_m, out, offs_n, mask, mask_n, SHARED: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    """Gradients of s and of x; the result is the gradient of gate before it is summed."""
    if ds_ptr is not None:
        dh += _load(ds_ptr, ds_strides, a, b, offs_m, offs_n, mask, COMPUTE)
    cells = out[:, None] + offs_n[None, :]
    tl.store(dh_ptr + cells, round_to(dh, dh_ptr.dtype.element_ty), mask=mask)
    if gate_ptr is not None:
        gate = _load_shared(gate_ptr, gate_strides, a, b, offs_m, offs_n, mask, mask_n, SHARED, COMPUTE)
        tl.store(dx_ptr + cells, round_to(dh * gate, dx_ptr.dtype.element_ty), mask=mask)
        return dh * _load(x_ptr, x_strides, a, b, offs_m, offs_n, mask, COMPUTE)
    else:
        return dh


@triton.jit
def _store_each(ptr, values, out, offs_n, mask):
    if ptr is not None:
        tl.store(ptr + out[:, None] + offs_n[None, :], round_to(values, ptr.dtype.element_ty), mask=mask)


@triton.jit
def _add_sum(ptr, values, offs_n, mask_n):
    if ptr is not None:
        add_to(ptr, tl.sum(values, axis=0), offs_n, mask_n)


@triton.jit(do_not_specialize=["M", "parts"])
def _modulated_norm_bwd_kernel(
    dy_ptr, ds_ptr, h_ptr, x_ptr, gate_ptr, scale_ptr, w_ptr, stats_ptr,
    dh_ptr, dx_ptr, dscale_ptr, dshift_ptr, dgate_ptr, dw_ptr, B, M, N, parts,
    dy_strides, ds_strides, h_strides, x_strides, gate_strides, scale_strides,
    LAYER: tl.constexpr, SHARED: tl.constexpr, COMPUTE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ONE_PASS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A program walks every parts-th row tile of one (a, b). What is summed over rows it keeps in registers, or with
    rows too wide for that in memory that starts at 0.

    SHARED: dscale (before the weight), dshift and dgate are such sums, and dw follows from dscale.
    Else: they are of each row, and dw alone is such a sum.
    """
    pid = tl.program_id(0)
    tiles_m = (M - 1) // BLOCK_M + 1
    outer = pid // parts
    offs_n = tl.arange(0, BLOCK_N)
    part = tl.cast(pid, tl.int64) * N
    if dw_ptr is not None:
        dw_ptr += part
    if SHARED:
        if dscale_ptr is not None:
            dscale_ptr += part
        if dshift_ptr is not None:
            dshift_ptr += part
        if dgate_ptr is not None:
            dgate_ptr += part
    if ONE_PASS:
        acc = tl.zeros((BLOCK_N,), COMPUTE)  # of scale, or of the weight
        acc_shift = tl.zeros((BLOCK_N,), COMPUTE)
        acc_gate = tl.zeros((BLOCK_N,), COMPUTE)
    for tile in tl.range(pid % parts, tiles_m, parts, num_stages=STAGES):
        a, b, offs_m = row_index(outer * tiles_m + tile, B, M, BLOCK_M)
        mask_m = offs_m < M
        out_m = (a * B + b) * M + offs_m
        mean = tl.load(stats_ptr + out_m * 3, mask=mask_m, other=0.0)
        rest = tl.load(stats_ptr + out_m * 3 + 1, mask=mask_m, other=0.0)
        rstd = tl.load(stats_ptr + out_m * 3 + 2, mask=mask_m, other=0.0)
        if ONE_PASS:
            mask_n = offs_n < N
            mask = mask_m[:, None] & mask_n[None, :]
            dy, xhat, factor, g = _load_gradient(
                dy_ptr, h_ptr, scale_ptr, w_ptr, dy_strides, h_strides, scale_strides, mean, rest, rstd,
                a, b, offs_m, offs_n, mask, mask_n, SHARED, COMPUTE,
            )  # fmt: skip
            dh = g - xhat * (tl.sum(g * xhat, axis=1) / N)[:, None]
            if LAYER:
                dh -= (tl.sum(g, axis=1) / N)[:, None]
            dgate = _store_dx(
                dh * rstd[:, None], ds_ptr, x_ptr, gate_ptr, dh_ptr, dx_ptr, ds_strides, x_strides, gate_strides,
                a, b, offs_m, out_m * N, offs_n, mask, mask_n, SHARED, COMPUTE,
            )  # fmt: skip
            if SHARED:
                if dscale_ptr is not None:
                    acc += tl.sum(dy * xhat, axis=0)
                if dshift_ptr is not None:
                    acc_shift += tl.sum(dy, axis=0)
                if dgate_ptr is not None:
                    acc_gate += tl.sum(dgate, axis=0)
            else:
                w = load_scale(w_ptr, 0.0, offs_n, mask_n, COMPUTE)
                _store_each(dscale_ptr, dy * xhat * w, out_m * N, offs_n, mask)
                _store_each(dshift_ptr, dy, out_m * N, offs_n, mask)
                _store_each(dgate_ptr, dgate, out_m * N, offs_n, mask)
                if dw_ptr is not None:
                    acc += tl.sum(dy * xhat * factor, axis=0)
        else:
            sums = tl.zeros((BLOCK_M, BLOCK_N), COMPUTE)
            products = tl.zeros((BLOCK_M, BLOCK_N), COMPUTE)
            for start in range(0, N, BLOCK_N):
                cols = start + offs_n
                mask = mask_m[:, None] & (cols < N)[None, :]
                _, xhat, _, g = _load_gradient(
                    dy_ptr, h_ptr, scale_ptr, w_ptr, dy_strides, h_strides, scale_strides, mean, rest, rstd,
                    a, b, offs_m, cols, mask, cols < N, SHARED, COMPUTE,
                )  # fmt: skip
                sums += g
                products += g * xhat
            average = (tl.sum(sums, axis=1) / N)[:, None]
            projection = (tl.sum(products, axis=1) / N)[:, None]
            for start in range(0, N, BLOCK_N):
                cols = start + offs_n
                mask_n = cols < N
                mask = mask_m[:, None] & mask_n[None, :]
                dy, xhat, factor, g = _load_gradient(
                    dy_ptr, h_ptr, scale_ptr, w_ptr, dy_strides, h_strides, scale_strides, mean, rest, rstd,
                    a, b, offs_m, cols, mask, mask_n, SHARED, COMPUTE,
                )  # fmt: skip
                dh = g - xhat * projection
                if LAYER:
                    dh -= average
                dgate = _store_dx(
                    dh * rstd[:, None], ds_ptr, x_ptr, gate_ptr, dh_ptr, dx_ptr, ds_strides, x_strides, gate_strides,
                    a, b, offs_m, out_m * N, cols, mask, mask_n, SHARED, COMPUTE,
                )  # fmt: skip
                if SHARED:
                    _add_sum(dscale_ptr, dy * xhat, cols, mask_n)
                    _add_sum(dshift_ptr, dy, cols, mask_n)
                    _add_sum(dgate_ptr, dgate, cols, mask_n)
                else:
                    w = load_scale(w_ptr, 0.0, cols, mask_n, COMPUTE)
                    _store_each(dscale_ptr, dy * xhat * w, out_m * N, cols, mask)
                    _store_each(dshift_ptr, dy, out_m * N, cols, mask)
                    _store_each(dgate_ptr, dgate, out_m * N, cols, mask)
                    _add_sum(dw_ptr, dy * xhat * factor, cols, mask_n)
    if ONE_PASS:
        mask_n = offs_n < N
        if SHARED:
            if dscale_ptr is not None:
                tl.store(dscale_ptr + offs_n, acc, mask=mask_n)
            if dshift_ptr is not None:
                tl.store(dshift_ptr + offs_n, acc_shift, mask=mask_n)
            if dgate_ptr is not None:
                tl.store(dgate_ptr + offs_n, acc_gate, mask=mask_n)
        else:
            if dw_ptr is not None:
                tl.store(dw_ptr + offs_n, acc, mask=mask_n)
