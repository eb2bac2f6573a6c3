"""The kernels of group_norm.py, over (batch, channels, positions) of any strides.

Two ways: a program takes a group, or (moments, combine, apply; share) some channels of a chunk of positions.
"""

from ._activation_math import activate, activate_gradient
from ._triton import round_to, tl, triton


@triton.jit
def _at(ptr, strides, n, offs_c, offs_s):
    """Pointers to a (BLOCK_C, BLOCK_S) tile of an operand with the given (batch, channel, position) strides."""
    return ptr + n * strides[0] + (offs_c * strides[1])[:, None] + (offs_s * strides[2])[None, :]


@triton.jit
def _load(ptr, strides, n, offs_c, offs_s, mask, COMPUTE: tl.constexpr):
    return tl.load(_at(ptr, strides, n, offs_c, offs_s), mask=mask, other=0.0).to(COMPUTE)


@triton.jit
def _load_affine(w_ptr, b_ptr, offs_c, mask_c, COMPUTE: tl.constexpr):
    """weight and bias of channels, (BLOCK_C, 1)."""
    w = tl.full((1, 1), 1.0, COMPUTE)
    b = tl.full((1, 1), 0.0, COMPUTE)
    if w_ptr is not None:
        w = tl.load(w_ptr + offs_c, mask=mask_c, other=0.0).to(COMPUTE)[:, None]
    if b_ptr is not None:
        b = tl.load(b_ptr + offs_c, mask=mask_c, other=0.0).to(COMPUTE)[:, None]
    return w, b


@triton.jit
def _store_y(
    x, mean, rest, rstd, w_ptr, b_ptr, y_ptr, y_strides, n, offs_c, offs_s, mask_c, mask, alpha, beta,
    ACTIVATION: tl.constexpr, PRECISE: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    w, b = _load_affine(w_ptr, b_ptr, offs_c, mask_c, COMPUTE)
    y = ((x - mean) - rest) * rstd * w + b
    if ACTIVATION is not None:
        y = activate(y, alpha, beta, ACTIVATION, PRECISE)
    tl.store(_at(y_ptr, y_strides, n, offs_c, offs_s), round_to(y, y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _without_square(total, rest, count):
    """The sum of squares around the mean, from that around a number `rest` away from it; not inf - inf, nor below 0."""
    square = rest * rest * count
    return tl.where(square < total, total - square, total)


@triton.jit
def _group_norm_fwd_kernel(
    x_ptr, w_ptr, b_ptr, y_ptr, stats_ptr, C, S, groups, x_strides, y_strides, eps, alpha, beta,
    ACTIVATION: tl.constexpr, PRECISE: tl.constexpr, COMPUTE: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """A program normalises a group."""
    pid = tl.program_id(0)
    n = tl.cast(pid // groups, tl.int64)
    width = C // groups
    first = tl.cast(pid % groups, tl.int64) * width
    offs_c = tl.arange(0, BLOCK_C)
    offs_s = tl.cast(tl.arange(0, BLOCK_S), tl.int64)
    mask = (offs_c < width)[:, None] & (offs_s < S)[None, :]
    x = _load(x_ptr, x_strides, n, first + offs_c, offs_s, mask, COMPUTE)
    one = tl.full((), 1.0, COMPUTE)
    mean = tl.sum(x * (one / (tl.minimum(width, BLOCK_C) * tl.minimum(S, BLOCK_S))))  # of the first tile, rounded
    sums = tl.zeros((BLOCK_C, BLOCK_S), COMPUTE)
    squares = tl.zeros((BLOCK_C, BLOCK_S), COMPUTE)
    for c in range(0, width, BLOCK_C):
        for s in range(0, S, BLOCK_S):
            mask = (c + offs_c < width)[:, None] & (s + offs_s < S)[None, :]
            d = _load(x_ptr, x_strides, n, first + c + offs_c, s + offs_s, mask, COMPUTE)
            d = tl.where(mask, d - mean, 0.0)
            sums += d
            squares += d * d
    rest = tl.sum(sums * (one / (width * S)))
    total = _without_square(tl.sum(squares * (one / (width * S))), rest, 1.0)
    rstd = tl.rsqrt(total + eps)
    tl.store(stats_ptr + pid * 3, mean)
    tl.store(stats_ptr + pid * 3 + 1, rest)
    tl.store(stats_ptr + pid * 3 + 2, rstd)
    last_c, last_s = (width - 1) // BLOCK_C * BLOCK_C, (S - 1) // BLOCK_S * BLOCK_S
    for c_back in range(0, width, BLOCK_C):  # backwards: the cache has what was read last
        for s_back in range(0, S, BLOCK_S):
            c, s = last_c - c_back, last_s - s_back
            mask_c = c + offs_c < width
            mask = mask_c[:, None] & (s + offs_s < S)[None, :]
            x = _load(x_ptr, x_strides, n, first + c + offs_c, s + offs_s, mask, COMPUTE)
            _store_y(
                x, mean, rest, rstd, w_ptr, b_ptr, y_ptr, y_strides, n, first + c + offs_c, s + offs_s, mask_c, mask,
                alpha, beta, ACTIVATION, PRECISE, COMPUTE,
            )  # fmt: skip


@triton.jit
def _share(pid, C, S, CHUNK: tl.constexpr, BLOCK_C: tl.constexpr):
    """(n, offs_c, chunk): the channels and the chunk of positions that are this program's."""
    chunks = (S - 1) // CHUNK + 1
    blocks = (C - 1) // BLOCK_C + 1
    block = pid // chunks
    offs_c = tl.cast(block % blocks, tl.int64) * BLOCK_C + tl.arange(0, BLOCK_C)
    return tl.cast(block // blocks, tl.int64), offs_c, pid % chunks


@triton.jit
def _group_norm_fwd_kernel_moments(
    x_ptr, parts_ptr, C, S, x_strides,
    COMPUTE: tl.constexpr, CHUNK: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Of each channel and chunk the mean as two numbers and the sum of squares around it."""
    n, offs_c, chunk = _share(tl.program_id(0), C, S, CHUNK, BLOCK_C)
    begin = tl.cast(chunk, tl.int64) * CHUNK
    end = tl.minimum(begin + CHUNK, S)
    offs_s = begin + tl.arange(0, BLOCK_S)
    mask_c = offs_c < C
    mask = mask_c[:, None] & (offs_s < end)[None, :]
    one = tl.full((), 1.0, COMPUTE)
    x = _load(x_ptr, x_strides, n, offs_c, offs_s, mask, COMPUTE)
    mean = tl.sum(x * (one / tl.minimum(end - begin, BLOCK_S)), axis=1)  # of the first tile, rounded
    sums = tl.zeros((BLOCK_C, BLOCK_S), COMPUTE)
    squares = tl.zeros((BLOCK_C, BLOCK_S), COMPUTE)
    for s in range(0, CHUNK, BLOCK_S):
        mask = mask_c[:, None] & (s + offs_s < end)[None, :]
        d = _load(x_ptr, x_strides, n, offs_c, s + offs_s, mask, COMPUTE)
        d = tl.where(mask, d - mean[:, None], 0.0)
        sums += d
        squares += d * d
    count = end - begin
    rest = tl.sum(sums * (one / count), axis=1)
    total = _without_square(tl.sum(squares, axis=1), rest, count)
    part = ((n * C + offs_c) * ((S - 1) // CHUNK + 1) + chunk) * 3
    tl.store(parts_ptr + part, mean, mask=mask_c)
    tl.store(parts_ptr + part + 1, rest, mask=mask_c)
    tl.store(parts_ptr + part + 2, total, mask=mask_c)


@triton.jit
def _load_part(parts_ptr, first, offs, n_parts, S, CHUNK: tl.constexpr):
    """(mean, rest, sum of squares, count) of parts; zeros past their end."""
    mask = offs < n_parts
    chunks = (S - 1) // CHUNK + 1
    mean = tl.load(parts_ptr + (first + offs) * 3, mask=mask, other=0.0)
    rest = tl.load(parts_ptr + (first + offs) * 3 + 1, mask=mask, other=0.0)
    total = tl.load(parts_ptr + (first + offs) * 3 + 2, mask=mask, other=0.0)
    count = tl.minimum(S - (offs % chunks) * CHUNK, CHUNK)
    return mean, rest, total, tl.where(mask, count, 0)


@triton.jit
def _group_norm_fwd_kernel_combine(
    parts_ptr, stats_ptr, C, S, groups, eps, COMPUTE: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr
):
    """A program makes the moments of a group from its parts."""
    pid = tl.program_id(0)
    n_parts = (C // groups) * ((S - 1) // CHUNK + 1)
    first = tl.cast(pid, tl.int64) * n_parts
    share = tl.full((), 1.0, COMPUTE) / (C // groups) / S  # of one element in a mean
    pivot = tl.load(parts_ptr + first * 3)
    sums = tl.zeros((BLOCK,), COMPUTE)
    for start in range(0, n_parts, BLOCK):
        mean, rest, _, count = _load_part(parts_ptr, first, start + tl.arange(0, BLOCK), n_parts, S, CHUNK)
        sums += tl.where(count > 0, (mean - pivot) + rest, 0.0) * (count * share)
    away = tl.sum(sums)
    group_mean = pivot + away
    group_rest = (pivot - group_mean) + away
    squares = tl.zeros((BLOCK,), COMPUTE)
    for start in range(0, n_parts, BLOCK):
        mean, rest, total, count = _load_part(parts_ptr, first, start + tl.arange(0, BLOCK), n_parts, S, CHUNK)
        d = tl.where(count > 0, ((mean - group_mean) + rest) - group_rest, 0.0)
        squares += total * share + d * d * (count * share)
    tl.store(stats_ptr + pid * 3, group_mean)
    tl.store(stats_ptr + pid * 3 + 1, group_rest)
    tl.store(stats_ptr + pid * 3 + 2, tl.rsqrt(tl.sum(squares) + eps))


@triton.jit
def _load_stats(stats_ptr, n, groups, offs_g, mask_c):
    """Two parts of the mean, and rstd, of the groups of channels, (BLOCK_C, 1)."""
    at = stats_ptr + (n * groups + offs_g) * 3
    mean = tl.load(at, mask=mask_c, other=0.0)
    rest = tl.load(at + 1, mask=mask_c, other=0.0)
    return mean[:, None], rest[:, None], tl.load(at + 2, mask=mask_c, other=0.0)[:, None]


@triton.jit
def _group_norm_fwd_kernel_apply(
    x_ptr, w_ptr, b_ptr, y_ptr, stats_ptr, C, S, groups, x_strides, y_strides, alpha, beta,
    ACTIVATION: tl.constexpr, PRECISE: tl.constexpr, COMPUTE: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    # Backwards: the cache has what was read last.
    n, offs_c, tile = _share(tl.num_programs(0) - 1 - tl.program_id(0), C, S, BLOCK_S, BLOCK_C)
    offs_s = tl.cast(tile, tl.int64) * BLOCK_S + tl.arange(0, BLOCK_S)
    mask_c = offs_c < C
    mask = mask_c[:, None] & (offs_s < S)[None, :]
    mean, rest, rstd = _load_stats(stats_ptr, n, groups, offs_c // (C // groups), mask_c)
    x = _load(x_ptr, x_strides, n, offs_c, offs_s, mask, COMPUTE)
    _store_y(
        x, mean, rest, rstd, w_ptr, b_ptr, y_ptr, y_strides, n, offs_c, offs_s, mask_c, mask,
        alpha, beta, ACTIVATION, PRECISE, COMPUTE,
    )  # fmt: skip


@triton.jit
def _load_gradient(
    dy_ptr, x_ptr, dy_strides, x_strides, mean, rest, rstd, w, b, n, offs_c, offs_s, mask, alpha, beta,
    ACTIVATION: tl.constexpr, PRECISE: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    """The gradient before the activation, and x normalised."""
    dy = _load(dy_ptr, dy_strides, n, offs_c, offs_s, mask, COMPUTE)
    x = _load(x_ptr, x_strides, n, offs_c, offs_s, mask, COMPUTE)
    xhat = tl.where(mask, ((x - mean) - rest) * rstd, 0.0)
    if ACTIVATION is not None:
        dy = activate_gradient(dy, xhat * w + b, alpha, beta, ACTIVATION, PRECISE)
    return dy, xhat


@triton.jit
def _group_norm_bwd_kernel(
    dy_ptr, x_ptr, w_ptr, b_ptr, stats_ptr, dx_ptr, sums_ptr, products_ptr, C, S, groups,
    dy_strides, x_strides, dx_strides, alpha, beta,
    ACTIVATION: tl.constexpr, PRECISE: tl.constexpr, COMPUTE: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """A program takes a group: the sums over each channel, from them those of the group, and dx."""
    pid = tl.program_id(0)
    n = tl.cast(pid // groups, tl.int64)
    width = C // groups
    first = tl.cast(pid % groups, tl.int64) * width
    mean = tl.load(stats_ptr + pid * 3)
    rest = tl.load(stats_ptr + pid * 3 + 1)
    rstd = tl.load(stats_ptr + pid * 3 + 2)
    offs_s = tl.cast(tl.arange(0, BLOCK_S), tl.int64)
    average = tl.zeros((), COMPUTE)
    projection = tl.zeros((), COMPUTE)
    for c in range(0, width, BLOCK_C):
        offs_c = first + c + tl.arange(0, BLOCK_C)
        mask_c = offs_c < first + width
        w, b = _load_affine(w_ptr, b_ptr, offs_c, mask_c, COMPUTE)
        sums = tl.zeros((BLOCK_C, BLOCK_S), COMPUTE)
        products = tl.zeros((BLOCK_C, BLOCK_S), COMPUTE)
        for s in range(0, S, BLOCK_S):
            mask = mask_c[:, None] & (s + offs_s < S)[None, :]
            dz, xhat = _load_gradient(
                dy_ptr, x_ptr, dy_strides, x_strides, mean, rest, rstd, w, b, n, offs_c, s + offs_s, mask,
                alpha, beta, ACTIVATION, PRECISE, COMPUTE,
            )  # fmt: skip
            sums += dz
            products += dz * xhat
        channel_sums = tl.sum(sums, axis=1)
        channel_products = tl.sum(products, axis=1)
        tl.store(sums_ptr + n * C + offs_c, channel_sums, mask=mask_c)
        tl.store(products_ptr + n * C + offs_c, channel_products, mask=mask_c)
        average += tl.sum(channel_sums[:, None] * w) / (width * S)
        projection += tl.sum(channel_products[:, None] * w) / (width * S)
    last_c, last_s = (width - 1) // BLOCK_C * BLOCK_C, (S - 1) // BLOCK_S * BLOCK_S
    for c_back in range(0, width, BLOCK_C):  # backwards: the cache has what was read last
        offs_c = first + (last_c - c_back) + tl.arange(0, BLOCK_C)
        mask_c = offs_c < first + width
        w, b = _load_affine(w_ptr, b_ptr, offs_c, mask_c, COMPUTE)
        for s_back in range(0, S, BLOCK_S):
            s = last_s - s_back
            mask = mask_c[:, None] & (s + offs_s < S)[None, :]
            dz, xhat = _load_gradient(
                dy_ptr, x_ptr, dy_strides, x_strides, mean, rest, rstd, w, b, n, offs_c, s + offs_s, mask,
                alpha, beta, ACTIVATION, PRECISE, COMPUTE,
            )  # fmt: skip
            dx = (dz * w - average - xhat * projection) * rstd
            dx = round_to(dx, dx_ptr.dtype.element_ty)
            tl.store(_at(dx_ptr, dx_strides, n, offs_c, s + offs_s), dx, mask=mask)


@triton.jit
def _sum_of_channels(parts_ptr, w, n, offs_c, mask_c, C, chunks, BLOCK_P: tl.constexpr, COMPUTE: tl.constexpr):
    """The sum of some channels' parts, each times its weight."""
    sums = tl.zeros((BLOCK_P, offs_c.shape[0]), COMPUTE)
    for start in range(0, chunks, BLOCK_P):
        offs_p = start + tl.arange(0, BLOCK_P)
        mask = (offs_p < chunks)[:, None] & mask_c[None, :]
        sums += tl.load(parts_ptr + (n * chunks + offs_p)[:, None] * C + offs_c[None, :], mask=mask, other=0.0)
    return tl.sum(tl.sum(sums, axis=0) * w)


@triton.jit(do_not_specialize=["chunks"])
def _group_norm_bwd_kernel_means(
    sums_ptr, products_ptr, w_ptr, averages_ptr, projections_ptr, C, S, groups, chunks,
    COMPUTE: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """A program makes the means of a group from the parts of its channels."""
    pid = tl.program_id(0)
    n = tl.cast(pid // groups, tl.int64)
    width = C // groups
    average = tl.zeros((), COMPUTE)
    projection = tl.zeros((), COMPUTE)
    for c in range(0, width, BLOCK_C):
        offs = c + tl.arange(0, BLOCK_C)
        mask_c = offs < width
        offs_c = tl.cast(pid % groups, tl.int64) * width + offs
        w = tl.full((BLOCK_C,), 1.0, COMPUTE)
        if w_ptr is not None:
            w = tl.load(w_ptr + offs_c, mask=mask_c, other=0.0).to(COMPUTE)
        average += _sum_of_channels(sums_ptr, w, n, offs_c, mask_c, C, chunks, BLOCK_P, COMPUTE)
        projection += _sum_of_channels(products_ptr, w, n, offs_c, mask_c, C, chunks, BLOCK_P, COMPUTE)
    tl.store(averages_ptr + pid, average / width / S)
    tl.store(projections_ptr + pid, projection / width / S)


@triton.jit
def _group_norm_bwd_kernel_share(
    dy_ptr, x_ptr, w_ptr, b_ptr, stats_ptr, averages_ptr, projections_ptr, dx_ptr, sums_ptr, products_ptr, C, S, groups,
    dy_strides, x_strides, dx_strides, alpha, beta,
    ACTIVATION: tl.constexpr, PRECISE: tl.constexpr, COMPUTE: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """A program takes BLOCK_C channels of a chunk: their sums where dx is None, else dx by the groups' means."""
    pid = tl.program_id(0)
    if dx_ptr is not None:  # backwards: the cache has what was read last
        pid = tl.num_programs(0) - 1 - pid
    n, offs_c, chunk = _share(pid, C, S, CHUNK, BLOCK_C)
    offs_s = tl.cast(chunk, tl.int64) * CHUNK + tl.arange(0, BLOCK_S)
    mask_c = offs_c < C
    offs_g = offs_c // (C // groups)
    mean, rest, rstd = _load_stats(stats_ptr, n, groups, offs_g, mask_c)
    w, b = _load_affine(w_ptr, b_ptr, offs_c, mask_c, COMPUTE)
    if dx_ptr is None:
        sums = tl.zeros((BLOCK_C, BLOCK_S), COMPUTE)
        products = tl.zeros((BLOCK_C, BLOCK_S), COMPUTE)
    else:
        average = tl.load(averages_ptr + n * groups + offs_g, mask=mask_c, other=0.0)[:, None]
        projection = tl.load(projections_ptr + n * groups + offs_g, mask=mask_c, other=0.0)[:, None]
    for s in range(0, CHUNK, BLOCK_S):
        mask = mask_c[:, None] & (s + offs_s < S)[None, :]
        dz, xhat = _load_gradient(
            dy_ptr, x_ptr, dy_strides, x_strides, mean, rest, rstd, w, b, n, offs_c, s + offs_s, mask,
            alpha, beta, ACTIVATION, PRECISE, COMPUTE,
        )  # fmt: skip
        if dx_ptr is None:
            sums += dz
            products += dz * xhat
        else:
            dx = round_to((dz * w - average - xhat * projection) * rstd, dx_ptr.dtype.element_ty)
            tl.store(_at(dx_ptr, dx_strides, n, offs_c, s + offs_s), dx, mask=mask)
    if dx_ptr is None:
        part = (n * ((S - 1) // CHUNK + 1) + chunk) * C + offs_c
        tl.store(sums_ptr + part, tl.sum(sums, axis=1), mask=mask_c)
        tl.store(products_ptr + part, tl.sum(products, axis=1), mask=mask_c)
