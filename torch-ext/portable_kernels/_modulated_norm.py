"""The kernels of modulated_norm.py.

scale, shift and gate come with strides of x's rows, 0 where rows share them. SHARED says that all rows of one (a, b)
share all three. WHOLE says that no tile ends past its rows: nothing is masked then.

A program that holds its rows has BLOCK_N columns of them, and TAIL more where TAIL is not 0: 3072 is 2048 and 1024, and
no lane works for columns that are not there.
"""

from ._norms import add_to, load_rows, load_scale, two_sums
from ._rows import first_row, inside
from ._triton import round_to, tl, triton


@triton.jit
def _load_shared(
    ptr, strides, a, b, m, offs_m, offs_n, N, mask, SHARED: tl.constexpr, WHOLE: tl.constexpr, COMPUTE: tl.constexpr
):
    """scale, shift or gate: one row where all rows of the tile share it."""
    if SHARED:
        first = tl.arange(0, 1)
        return load_rows(ptr, strides, a, b, 0, first, offs_n, inside(first, offs_n, 1, N, WHOLE), COMPUTE)
    else:
        return load_rows(ptr, strides, a, b, m, offs_m, offs_n, mask, COMPUTE)


@triton.jit
def _load_factor(
    scale_ptr, scale_strides, w_ptr, a, b, m, offs_m, offs_n, N, mask,
    SHARED: tl.constexpr, WHOLE: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    """What multiplies normalised rows."""
    factor = 1.0 + _load_shared(scale_ptr, scale_strides, a, b, m, offs_m, offs_n, N, mask, SHARED, WHOLE, COMPUTE)
    if w_ptr is not None:
        factor *= load_scale(w_ptr, 0.0, offs_n, offs_n < N, COMPUTE)
    return factor


@triton.jit
def _load_total(
    x_ptr, r_ptr, gate_ptr, s_ptr, x_strides, r_strides, gate_strides, a, b, m, offs_m, offs_n, N, mask,
    SHARED: tl.constexpr, WHOLE: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    """The rows to normalise: x, or residual + gate * x as rounded in the sum that is returned."""
    x = load_rows(x_ptr, x_strides, a, b, m, offs_m, offs_n, mask, COMPUTE)
    if r_ptr is not None:
        if gate_ptr is not None:
            x *= _load_shared(gate_ptr, gate_strides, a, b, m, offs_m, offs_n, N, mask, SHARED, WHOLE, COMPUTE)
        x += load_rows(r_ptr, r_strides, a, b, m, offs_m, offs_n, mask, COMPUTE)
        x = round_to(x, s_ptr.dtype.element_ty).to(COMPUTE)
    return x


@triton.jit
def _normed(x, mean, rest, rstd, LAYER: tl.constexpr):
    if LAYER:
        return (x - mean[:, None]) * rstd[:, None] - (rest * rstd)[:, None]
    else:
        return x * rstd[:, None]


@triton.jit
def _load_modulation(
    scale_ptr, shift_ptr, w_ptr, scale_strides, shift_strides, a, b, m, offs_m, offs_n, N, mask,
    SHARED: tl.constexpr, WHOLE: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    """What multiplies normalised rows, and what is added to them."""
    factor = _load_factor(scale_ptr, scale_strides, w_ptr, a, b, m, offs_m, offs_n, N, mask, SHARED, WHOLE, COMPUTE)
    if shift_ptr is None:
        return factor, tl.zeros((1, 1), COMPUTE)
    else:
        shift = _load_shared(shift_ptr, shift_strides, a, b, m, offs_m, offs_n, N, mask, SHARED, WHOLE, COMPUTE)
        return factor, shift


@triton.jit
def _store_modulated(
    x, mean, rest, rstd, factor, shift, y_ptr, s_ptr, offs_m, out, offs_n, N, mask, LAYER: tl.constexpr
):
    y = _normed(x, mean, rest, rstd, LAYER) * factor + shift
    cells = out + offs_m[:, None] * N + offs_n[None, :]
    tl.store(y_ptr + cells, round_to(y, y_ptr.dtype.element_ty), mask=mask)
    if s_ptr is not None:
        tl.store(s_ptr + cells, round_to(x, s_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _store_stats(stats_ptr, mean, rest, rstd, offs_m, mask_m):
    tl.store(stats_ptr + offs_m * 3, mean, mask=mask_m)
    tl.store(stats_ptr + offs_m * 3 + 1, rest, mask=mask_m)
    tl.store(stats_ptr + offs_m * 3 + 2, rstd, mask=mask_m)


@triton.jit
def _load_stats(stats_ptr, offs_m, mask_m):
    mean = tl.load(stats_ptr + offs_m * 3, mask=mask_m, other=0.0)
    rest = tl.load(stats_ptr + offs_m * 3 + 1, mask=mask_m, other=0.0)
    return mean, rest, tl.load(stats_ptr + offs_m * 3 + 2, mask=mask_m, other=0.0)


@triton.jit
def _rstd(rest, mean_square, eps):
    """mean_square is around a number `rest` away from the mean: the mean of a large part of the row, so that it is too
    near the row's for this to cancel."""
    square = rest * rest
    return tl.rsqrt(tl.where(square < mean_square, mean_square - square, mean_square) + eps)  # not inf - inf


@triton.jit(do_not_specialize=["M"])
def _modulated_norm_fwd_kernel(
    x_ptr, r_ptr, gate_ptr, scale_ptr, shift_ptr, w_ptr, y_ptr, s_ptr, stats_ptr, B, M, N,
    x_strides, r_strides, gate_strides, scale_strides, shift_strides, eps,
    LAYER: tl.constexpr, SHARED: tl.constexpr, WHOLE: tl.constexpr, COMPUTE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    """A program holds BLOCK_M rows."""
    a, b, m = first_row(tl.program_id(0), B, M, BLOCK_M)
    row = (a * B + b) * M + m
    offs_m, offs_n = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    mask = inside(offs_m, offs_n, M - m, N, WHOLE)
    x = _load_total(
        x_ptr, r_ptr, gate_ptr, s_ptr, x_strides, r_strides, gate_strides, a, b, m, offs_m, offs_n, N, mask,
        SHARED, WHOLE, COMPUTE,
    )  # fmt: skip
    if r_ptr is None:  # before the sums: the wait for x covers that for these. With a residual registers do not do
        factor, shift = _load_modulation(
            scale_ptr, shift_ptr, w_ptr, scale_strides, shift_strides, a, b, m, offs_m, offs_n, N, mask,
            SHARED, WHOLE, COMPUTE,
        )  # fmt: skip
    if TAIL:
        offs_t = BLOCK_N + tl.arange(0, TAIL)
        mask_t = inside(offs_m, offs_t, M - m, N, WHOLE)
        x_t = _load_total(
            x_ptr, r_ptr, gate_ptr, s_ptr, x_strides, r_strides, gate_strides, a, b, m, offs_m, offs_t, N, mask_t,
            SHARED, WHOLE, COMPUTE,
        )  # fmt: skip
        if r_ptr is None:
            factor_t, shift_t = _load_modulation(
                scale_ptr, shift_ptr, w_ptr, scale_strides, shift_strides, a, b, m, offs_m, offs_t, N, mask_t,
                SHARED, WHOLE, COMPUTE,
            )  # fmt: skip
    one = tl.full((), 1.0, COMPUTE)
    mean = tl.zeros((BLOCK_M,), COMPUTE)
    rest = mean
    if LAYER:  # the mean of the first block, rounded; the rest is what the row's is away from it
        mean = tl.sum(x * (one / tl.minimum(N, BLOCK_N)), axis=1)
        d = tl.where(mask, x - mean[:, None], 0.0)
        rest, square = two_sums(d * (one / N), d * d)
        if TAIL:
            d = tl.where(mask_t, x_t - mean[:, None], 0.0)
            rest_t, square_t = two_sums(d * (one / N), d * d)
            rest += rest_t
            square += square_t
    else:
        square = tl.sum(x * x, axis=1)
        if TAIL:
            square += tl.sum(x_t * x_t, axis=1)
    rstd = _rstd(rest, square / N, eps)
    _store_stats(stats_ptr + row * 3, mean, rest, rstd, offs_m, offs_m < M - m)
    if r_ptr is not None:
        factor, shift = _load_modulation(
            scale_ptr, shift_ptr, w_ptr, scale_strides, shift_strides, a, b, m, offs_m, offs_n, N, mask,
            SHARED, WHOLE, COMPUTE,
        )  # fmt: skip
    _store_modulated(x, mean, rest, rstd, factor, shift, y_ptr, s_ptr, offs_m, row * N, offs_n, N, mask, LAYER)
    if TAIL:
        if r_ptr is not None:
            factor_t, shift_t = _load_modulation(
                scale_ptr, shift_ptr, w_ptr, scale_strides, shift_strides, a, b, m, offs_m, offs_t, N, mask_t,
                SHARED, WHOLE, COMPUTE,
            )  # fmt: skip
        _store_modulated(
            x_t, mean, rest, rstd, factor_t, shift_t, y_ptr, s_ptr, offs_m, row * N, offs_t, N, mask_t, LAYER
        )


@triton.jit(do_not_specialize=["M"])
def _modulated_norm_fwd_kernel_wide(
    x_ptr, r_ptr, gate_ptr, scale_ptr, shift_ptr, w_ptr, y_ptr, s_ptr, stats_ptr, B, M, N,
    x_strides, r_strides, gate_strides, scale_strides, shift_strides, eps,
    LAYER: tl.constexpr, SHARED: tl.constexpr, COMPUTE: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """A program walks a row twice."""
    a, b, m = first_row(tl.program_id(0), B, M, 1)
    row = (a * B + b) * M + m
    offs_m = tl.arange(0, 1)
    one = tl.full((), 1.0, COMPUTE)
    mean = tl.zeros((1,), COMPUTE)
    sums = tl.zeros((1, BLOCK_N), COMPUTE)
    squares = tl.zeros((1, BLOCK_N), COMPUTE)
    for start in range(0, N, BLOCK_N):
        offs_n = start + tl.arange(0, BLOCK_N)
        mask = inside(offs_m, offs_n, 1, N, False)
        x = _load_total(
            x_ptr, r_ptr, gate_ptr, s_ptr, x_strides, r_strides, gate_strides, a, b, m, offs_m, offs_n, N, mask,
            SHARED, False, COMPUTE,
        )  # fmt: skip
        if LAYER:
            if start == 0:
                mean = tl.sum(x * (one / tl.minimum(N, BLOCK_N)), axis=1)
            x = tl.where(mask, x - mean[:, None], 0.0)
        sums += x
        squares += x * x
    rest = tl.sum(sums * (one / N), axis=1) if LAYER else mean
    rstd = _rstd(rest, tl.sum(squares, axis=1) / N, eps)
    _store_stats(stats_ptr + row * 3, mean, rest, rstd, offs_m, offs_m < 1)
    for start in range(0, N, BLOCK_N):
        offs_n = start + tl.arange(0, BLOCK_N)
        mask = inside(offs_m, offs_n, 1, N, False)
        x = _load_total(
            x_ptr, r_ptr, gate_ptr, s_ptr, x_strides, r_strides, gate_strides, a, b, m, offs_m, offs_n, N, mask,
            SHARED, False, COMPUTE,
        )  # fmt: skip
        factor, shift = _load_modulation(
            scale_ptr, shift_ptr, w_ptr, scale_strides, shift_strides, a, b, m, offs_m, offs_n, N, mask,
            SHARED, False, COMPUTE,
        )  # fmt: skip
        _store_modulated(x, mean, rest, rstd, factor, shift, y_ptr, s_ptr, offs_m, row * N, offs_n, N, mask, LAYER)


@triton.jit
def _load_gradient(
    dy_ptr, h_ptr, dy_strides, h_strides, factor, mean, rest, rstd, a, b, m, offs_m, offs_n, mask,
    LAYER: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    """dy, the normalised rows, and the gradient of those."""
    dy = load_rows(dy_ptr, dy_strides, a, b, m, offs_m, offs_n, mask, COMPUTE)
    h = load_rows(h_ptr, h_strides, a, b, m, offs_m, offs_n, mask, COMPUTE)
    xhat = _normed(h, mean, rest, rstd, LAYER)
    if LAYER:
        xhat = tl.where(mask, xhat, 0.0)
    return dy, xhat, dy * factor


@triton.jit
def _store_dx(
    g, xhat, average, projection, rstd, ds_ptr, x_ptr, gate_ptr, dh_ptr, dx_ptr, ds_strides, x_strides, gate_strides,
    a, b, m, offs_m, out, offs_n, N, mask,
    LAYER: tl.constexpr, SHARED: tl.constexpr, WHOLE: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    """Gradients of s and of x; the result is the gradient of gate before it is summed."""
    dh = g * rstd[:, None] - xhat * (projection * rstd)[:, None]
    if LAYER:
        dh -= (average * rstd)[:, None]
    if ds_ptr is not None:
        dh += load_rows(ds_ptr, ds_strides, a, b, m, offs_m, offs_n, mask, COMPUTE)
    cells = out + offs_m[:, None] * N + offs_n[None, :]
    tl.store(dh_ptr + cells, round_to(dh, dh_ptr.dtype.element_ty), mask=mask)
    if gate_ptr is not None:
        gate = _load_shared(gate_ptr, gate_strides, a, b, m, offs_m, offs_n, N, mask, SHARED, WHOLE, COMPUTE)
        tl.store(dx_ptr + cells, round_to(dh * gate, dx_ptr.dtype.element_ty), mask=mask)
        return dh * load_rows(x_ptr, x_strides, a, b, m, offs_m, offs_n, mask, COMPUTE)
    else:
        return dh


@triton.jit
def _store_each(ptr, values, out, offs_m, offs_n, N, mask):
    if ptr is not None:
        cells = out + offs_m[:, None] * N + offs_n[None, :]
        tl.store(ptr + cells, round_to(values, ptr.dtype.element_ty), mask=mask)


@triton.jit
def _store_sums(ptr, sums, part, offs_n, N):
    if ptr is not None:
        tl.store(ptr + part + offs_n, tl.sum(sums, axis=0), mask=offs_n < N)


@triton.jit
def _means(g, xhat, N, LAYER: tl.constexpr):
    """Of rows, the means of their gradient and of its product with them; the first is 0 where nobody asks."""
    if LAYER:
        average, projection = two_sums(g, g * xhat)
        return average / N, projection / N
    else:
        projection = tl.sum(g * xhat, axis=1) / N
        return projection * 0.0, projection


@triton.jit(do_not_specialize=["M", "parts"])
def _modulated_norm_bwd_kernel(
    dy_ptr, ds_ptr, h_ptr, x_ptr, gate_ptr, scale_ptr, w_ptr, stats_ptr,
    dh_ptr, dx_ptr, dscale_ptr, dshift_ptr, dgate_ptr, dw_ptr, B, M, N, parts,
    dy_strides, ds_strides, h_strides, x_strides, gate_strides, scale_strides,
    LAYER: tl.constexpr, SHARED: tl.constexpr, WHOLE: tl.constexpr, COMPUTE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TAIL: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A program walks every parts-th tile of the rows of one (a, b), and keeps in registers what is summed over them.

    SHARED: dscale (before the weight), dshift and dgate are such sums, and dw follows from dscale.
    Else: they are of each row, and dw alone is such a sum. TAIL is then 0.
    """
    pid = tl.program_id(0)
    outer = tl.cast(pid // parts, tl.int64)
    a, b = outer // B, outer % B
    offs_m, offs_n = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    every = offs_m[:, None] >= 0
    if SHARED:
        factor = _load_factor(
            scale_ptr, scale_strides, w_ptr, a, b, 0, offs_m, offs_n, N, every, SHARED, WHOLE, COMPUTE
        )
    if TAIL:
        offs_t = BLOCK_N + tl.arange(0, TAIL)
        factor_t = _load_factor(
            scale_ptr, scale_strides, w_ptr, a, b, 0, offs_m, offs_t, N, every, SHARED, WHOLE, COMPUTE
        )
        acc_t = tl.zeros((BLOCK_M, TAIL), COMPUTE)
        acc_shift_t = tl.zeros((BLOCK_M, TAIL), COMPUTE)
        acc_gate_t = tl.zeros((BLOCK_M, TAIL), COMPUTE)
    acc = tl.zeros((BLOCK_M, BLOCK_N), COMPUTE)  # of scale, or of the weight
    acc_shift = tl.zeros((BLOCK_M, BLOCK_N), COMPUTE)
    acc_gate = tl.zeros((BLOCK_M, BLOCK_N), COMPUTE)
    for tile in tl.range(pid % parts, (M - 1) // BLOCK_M + 1, parts, num_stages=STAGES):
        m = tl.cast(tile, tl.int64) * BLOCK_M
        row = outer * M + m
        mean, rest, rstd = _load_stats(stats_ptr + row * 3, offs_m, offs_m < M - m)
        mask = inside(offs_m, offs_n, M - m, N, WHOLE)
        if not SHARED:
            w = load_scale(w_ptr, 0.0, offs_n, offs_n < N, COMPUTE)
            scale = 1.0 + load_rows(scale_ptr, scale_strides, a, b, m, offs_m, offs_n, mask, COMPUTE)
            factor = scale * w
        dy, xhat, g = _load_gradient(
            dy_ptr, h_ptr, dy_strides, h_strides, factor, mean, rest, rstd, a, b, m, offs_m, offs_n, mask,
            LAYER, COMPUTE,
        )  # fmt: skip
        average, projection = _means(g, xhat, N, LAYER)
        if TAIL:
            mask_t = inside(offs_m, offs_t, M - m, N, WHOLE)
            dy_t, xhat_t, g_t = _load_gradient(
                dy_ptr, h_ptr, dy_strides, h_strides, factor_t, mean, rest, rstd, a, b, m, offs_m, offs_t, mask_t,
                LAYER, COMPUTE,
            )  # fmt: skip
            average_t, projection_t = _means(g_t, xhat_t, N, LAYER)
            average += average_t
            projection += projection_t
            dgate = _store_dx(
                g_t, xhat_t, average, projection, rstd, ds_ptr, x_ptr, gate_ptr, dh_ptr, dx_ptr, ds_strides, x_strides,
                gate_strides, a, b, m, offs_m, row * N, offs_t, N, mask_t, LAYER, SHARED, WHOLE, COMPUTE,
            )  # fmt: skip
            acc_t += dy_t * xhat_t
            acc_shift_t += dy_t
            acc_gate_t += dgate
        dgate = _store_dx(
            g, xhat, average, projection, rstd, ds_ptr, x_ptr, gate_ptr, dh_ptr, dx_ptr, ds_strides, x_strides,
            gate_strides, a, b, m, offs_m, row * N, offs_n, N, mask, LAYER, SHARED, WHOLE, COMPUTE,
        )  # fmt: skip
        if SHARED:
            acc += dy * xhat
            acc_shift += dy
            acc_gate += dgate
        else:
            _store_each(dscale_ptr, dy * xhat * w, row * N, offs_m, offs_n, N, mask)
            _store_each(dshift_ptr, dy, row * N, offs_m, offs_n, N, mask)
            _store_each(dgate_ptr, dgate, row * N, offs_m, offs_n, N, mask)
            acc += dy * xhat * scale
    part = tl.cast(pid, tl.int64) * N
    if SHARED:
        _store_sums(dscale_ptr, acc, part, offs_n, N)
        _store_sums(dshift_ptr, acc_shift, part, offs_n, N)
        _store_sums(dgate_ptr, acc_gate, part, offs_n, N)
    else:
        _store_sums(dw_ptr, acc, part, offs_n, N)
    if TAIL:
        _store_sums(dscale_ptr, acc_t, part, offs_t, N)
        _store_sums(dshift_ptr, acc_shift_t, part, offs_t, N)
        _store_sums(dgate_ptr, acc_gate_t, part, offs_t, N)


@triton.jit
def _add_sum(ptr, values, part, offs_n, mask_n):
    if ptr is not None:
        add_to(ptr + part, tl.sum(values, axis=0), offs_n, mask_n)


@triton.jit(do_not_specialize=["M", "parts"])
def _modulated_norm_bwd_kernel_wide(
    dy_ptr, ds_ptr, h_ptr, x_ptr, gate_ptr, scale_ptr, w_ptr, stats_ptr,
    dh_ptr, dx_ptr, dscale_ptr, dshift_ptr, dgate_ptr, dw_ptr, B, M, N, parts,
    dy_strides, ds_strides, h_strides, x_strides, gate_strides, scale_strides,
    LAYER: tl.constexpr, SHARED: tl.constexpr, COMPUTE: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """As the kernel above, of rows that registers do not hold: sums are in memory, which starts at 0."""
    pid = tl.program_id(0)
    outer = tl.cast(pid // parts, tl.int64)
    a, b = outer // B, outer % B
    part = tl.cast(pid, tl.int64) * N
    offs_m = tl.arange(0, 1)
    for m in range(pid % parts, M, parts):
        row = outer * M + m
        mean, rest, rstd = _load_stats(stats_ptr + row * 3, offs_m, offs_m < 1)
        sums = tl.zeros((1, BLOCK_N), COMPUTE)
        products = tl.zeros((1, BLOCK_N), COMPUTE)
        for start in tl.range(0, N, BLOCK_N, num_stages=STAGES):
            offs_n = start + tl.arange(0, BLOCK_N)
            mask = inside(offs_m, offs_n, 1, N, False)
            factor = _load_factor(
                scale_ptr, scale_strides, w_ptr, a, b, m, offs_m, offs_n, N, mask, SHARED, False, COMPUTE
            )
            _, xhat, g = _load_gradient(
                dy_ptr, h_ptr, dy_strides, h_strides, factor, mean, rest, rstd, a, b, m, offs_m, offs_n, mask,
                LAYER, COMPUTE,
            )  # fmt: skip
            sums += g
            products += g * xhat
        average = tl.sum(sums, axis=1) / N
        projection = tl.sum(products, axis=1) / N
        for start in tl.range(0, N, BLOCK_N, num_stages=STAGES):
            offs_n = start + tl.arange(0, BLOCK_N)
            mask_n = offs_n < N
            mask = inside(offs_m, offs_n, 1, N, False)
            w = load_scale(w_ptr, 0.0, offs_n, mask_n, COMPUTE)
            scale = 1.0 + _load_shared(
                scale_ptr, scale_strides, a, b, m, offs_m, offs_n, N, mask, SHARED, False, COMPUTE
            )  # fmt: skip
            dy, xhat, g = _load_gradient(
                dy_ptr, h_ptr, dy_strides, h_strides, scale * w, mean, rest, rstd, a, b, m, offs_m, offs_n, mask,
                LAYER, COMPUTE,
            )  # fmt: skip
            dgate = _store_dx(
                g, xhat, average, projection, rstd, ds_ptr, x_ptr, gate_ptr, dh_ptr, dx_ptr, ds_strides, x_strides,
                gate_strides, a, b, m, offs_m, row * N, offs_n, N, mask, LAYER, SHARED, False, COMPUTE,
            )  # fmt: skip
            if SHARED:
                _add_sum(dscale_ptr, dy * xhat, part, offs_n, mask_n)
                _add_sum(dshift_ptr, dy, part, offs_n, mask_n)
                _add_sum(dgate_ptr, dgate, part, offs_n, mask_n)
            else:
                _store_each(dscale_ptr, dy * xhat * w, row * N, offs_m, offs_n, N, mask)
                _store_each(dshift_ptr, dy, row * N, offs_m, offs_n, N, mask)
                _store_each(dgate_ptr, dgate, row * N, offs_m, offs_n, N, mask)
                _add_sum(dw_ptr, dy * xhat * scale, part, offs_n, mask_n)
