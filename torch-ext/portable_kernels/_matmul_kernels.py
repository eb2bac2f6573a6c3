"""The kernels of matrix products with an epilogue.

    y = activation(a @ b + bias) + residual        gated: y = activation(a @ b) * (a @ b2)

Operands are outer x inner matrices, by (outer, inner, row, column) strides. z and z2 are the products themselves, where
they are to be saved. With SPLIT_K a program sums one share of K, and the last kernel adds the shares up in their order.
"""

from ._activation_math import activate
from ._tiles import columns, dot, tile_of
from ._triton import round_to, tl, triton


@triton.jit
def _place(ptr, strides, i, j, offs_m, offs_n):
    """Pointers to a tile of an operand with the given (outer, inner, m, n) strides; all offsets int64."""
    return ptr + (i * strides[0] + j * strides[1]) + (offs_m * strides[2])[:, None] + (offs_n * strides[3])[None, :]


@triton.jit
def _finish(
    acc, acc2, y_desc, z_desc, z2_desc, y_ptr, z_ptr, z2_ptr, bias_ptr, residual_ptr, y_strides, bias_stride,
    residual_strides, i, j, start_m, start_n, M, N, p, q,
    ACTIVATION: tl.constexpr, PRECISE: tl.constexpr, BIAS_M: tl.constexpr, BATCHED: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """The epilogue of a (ROWS, COLS) tile of sums, and its results to memory."""
    offs_m = tl.cast(start_m, tl.int64) + tl.arange(0, ROWS)
    offs_n = tl.cast(start_n, tl.int64) + tl.arange(0, COLS)
    mask = (offs_m < M)[:, None] & (offs_n < N)[None, :]
    if z_ptr is not None:
        _store(acc, z_desc, z_ptr, y_strides, i, j, start_m, start_n, offs_m, offs_n, mask, BATCHED)
    if z2_ptr is not None:
        _store(acc2, z2_desc, z2_ptr, y_strides, i, j, start_m, start_n, offs_m, offs_n, mask, BATCHED)
    y = acc
    if bias_ptr is not None:
        if BIAS_M:
            y += tl.load(bias_ptr + offs_m * bias_stride, mask=offs_m < M, other=0.0).to(acc.dtype)[:, None]
        else:
            y += tl.load(bias_ptr + offs_n * bias_stride, mask=offs_n < N, other=0.0).to(acc.dtype)[None, :]
    if ACTIVATION is not None:
        y = activate(y, p, q, ACTIVATION, PRECISE)
    if acc2 is not None:
        y *= acc2
    if residual_ptr is not None:
        y += tl.load(_place(residual_ptr, residual_strides, i, j, offs_m, offs_n), mask=mask, other=0.0).to(acc.dtype)
    _store(y, y_desc, y_ptr, y_strides, i, j, start_m, start_n, offs_m, offs_n, mask, BATCHED)


@triton.jit
def _store(x, desc, ptr, strides, i, j, start_m, start_n, offs_m, offs_n, mask, BATCHED: tl.constexpr):
    x = round_to(x, ptr.dtype.element_ty)
    if desc is None:
        tl.store(_place(ptr, strides, i, j, offs_m, offs_n), x, mask=mask)
    elif BATCHED:
        desc.store([i.to(tl.int32), j.to(tl.int32), start_m, start_n], x.reshape((1, 1, x.shape[0], x.shape[1])))
    else:
        desc.store([start_m, start_n], x)


@triton.jit
def _store_parts(acc, acc2, part_ptr, part, start_m, start_n, M, N, ROWS: tl.constexpr, COLS: tl.constexpr):
    """One share of K's sums to (parts, 1 or 2, M, N)."""
    offs_m = tl.cast(start_m, tl.int64) + tl.arange(0, ROWS)
    offs_n = tl.cast(start_n, tl.int64) + tl.arange(0, COLS)
    mask = (offs_m < M)[:, None] & (offs_n < N)[None, :]
    at = offs_m[:, None] * N + offs_n[None, :]
    size = tl.cast(M, tl.int64) * N
    if acc2 is None:
        tl.store(part_ptr + part * size + at, acc, mask=mask)
    else:
        tl.store(part_ptr + part * 2 * size + at, acc, mask=mask)
        tl.store(part_ptr + (part * 2 + 1) * size + at, acc2, mask=mask)


@triton.jit(do_not_specialize=["inner", "M", "tiles_m", "tiles_n"])
def _matmul_fwd_kernel_pointers(
    a_ptr, b_ptr, b2_ptr, y_ptr, z_ptr, z2_ptr, bias_ptr, residual_ptr, part_ptr, inner, M, N, K, tiles_m, tiles_n,
    a_strides, b_strides, b2_strides, y_strides, bias_stride, residual_strides, p, q,
    ACTIVATION: tl.constexpr, PRECISE: tl.constexpr, BIAS_M: tl.constexpr,
    PRECISION: tl.constexpr, COMPUTE: tl.constexpr,
    EVEN_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr, SPLIT_K: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """A tile of the result a program, or one share of K of it."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    pid = tl.program_id(0)
    tiles = tiles_m * tiles_n
    pid_m, pid_n = tile_of(pid % tiles, tiles_m, tiles_n, GROUP_M)
    part = (pid // tiles).to(tl.int64)
    batch = part // SPLIT_K
    i, j = batch // inner, batch % inner
    share = tl.cdiv(tl.cdiv(K, BLOCK_K), SPLIT_K) * BLOCK_K
    first = (part % SPLIT_K).to(tl.int32) * share
    last = min(first + share, K)

    offs_m = pid_m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = pid_n.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_K)
    in_m = (offs_m < M)[:, None]
    in_n = (offs_n < N)[None, :]
    ks = offs_k.to(tl.int64) + first
    a_ptrs = _place(a_ptr, a_strides, i, j, offs_m, ks)
    b_ptrs = _place(b_ptr, b_strides, i, j, ks, offs_n)
    acc = tl.zeros((BLOCK_M, BLOCK_N), COMPUTE)
    acc2 = None
    if b2_ptr is not None:
        b2_ptrs = _place(b2_ptr, b2_strides, i, j, ks, offs_n)
        acc2 = tl.zeros((BLOCK_M, BLOCK_N), COMPUTE)
    for k in range(first, last, BLOCK_K):
        mask_a, mask_b = in_m, in_n
        if not EVEN_K:
            mask_a = mask_a & (offs_k < last - k)[None, :]
            mask_b = mask_b & (offs_k < last - k)[:, None]
        a = tl.load(a_ptrs, mask=mask_a, other=0.0)
        b = tl.load(b_ptrs, mask=mask_b, other=0.0)
        acc = dot(a, b, acc, PRECISION)
        a_ptrs += tl.cast(a_strides[3], tl.int64) * BLOCK_K
        b_ptrs += tl.cast(b_strides[2], tl.int64) * BLOCK_K
        if b2_ptr is not None:
            acc2 = dot(a, tl.load(b2_ptrs, mask=mask_b, other=0.0), acc2, PRECISION)
            b2_ptrs += tl.cast(b2_strides[2], tl.int64) * BLOCK_K
    if SPLIT_K > 1:
        _store_parts(acc, acc2, part_ptr, part, pid_m * BLOCK_M, pid_n * BLOCK_N, M, N, BLOCK_M, BLOCK_N)
    else:
        _finish(
            acc, acc2, None, None, None, y_ptr, z_ptr, z2_ptr, bias_ptr, residual_ptr, y_strides, bias_stride,
            residual_strides, i, j, pid_m * BLOCK_M, pid_n * BLOCK_N, M, N, p, q,
            ACTIVATION, PRECISE, BIAS_M, False, BLOCK_M, BLOCK_N,
        )  # fmt: skip


@triton.jit
def _tile(desc, i, j, row, col, BATCHED: tl.constexpr, TURNED: tl.constexpr):
    """The tile at (row, col) of an operand, which lies transposed in memory where TURNED."""
    if TURNED:
        row, col = col, row
    if BATCHED:
        tile = desc.load([i.to(tl.int32), j.to(tl.int32), row, col])
        tile = tile.reshape((tile.shape[2], tile.shape[3]))
    else:
        tile = desc.load([row, col])
    return tile.T if TURNED else tile


@triton.jit(do_not_specialize=["work", "inner", "M", "tiles_m", "tiles_n"])
def _matmul_fwd_kernel_descriptors(
    a_desc, b_desc, b2_desc, y_desc, z_desc, z2_desc, y_ptr, z_ptr, z2_ptr, bias_ptr, residual_ptr, part_ptr,
    work, inner, M, N, K, tiles_m, tiles_n, y_strides, bias_stride, residual_strides, p, q,
    A_BATCHED: tl.constexpr, B_BATCHED: tl.constexpr, BATCHED: tl.constexpr,
    A_TURNED: tl.constexpr, B_TURNED: tl.constexpr,
    ACTIVATION: tl.constexpr, PRECISE: tl.constexpr, BIAS_M: tl.constexpr,
    PRECISION: tl.constexpr, COMPUTE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr, SPLIT_K: tl.constexpr, SUBTILES: tl.constexpr, FLATTEN: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Programs that walk tiles of the result, or shares of K of them. What lies past an operand's end reads as 0."""
    if EARLY:  # the kernel that adds up the shares may come up meanwhile
        tl.extra.cuda.gdc_launch_dependents()
    tiles = tiles_m * tiles_n
    steps = tl.cdiv(tl.cdiv(K, BLOCK_K), SPLIT_K)
    for item in tl.range(tl.program_id(0), work, tl.num_programs(0), flatten=FLATTEN):
        pid_m, pid_n = tile_of(item % tiles, tiles_m, tiles_n, GROUP_M)
        part = (item // tiles).to(tl.int64)
        batch = part // SPLIT_K
        i, j = batch // inner, batch % inner
        first = (part % SPLIT_K).to(tl.int32) * steps
        start_m, start_n = pid_m * BLOCK_M, pid_n * BLOCK_N
        acc = tl.zeros((BLOCK_M, BLOCK_N), COMPUTE)
        if b2_desc is not None:
            acc2 = tl.zeros((BLOCK_M, BLOCK_N), COMPUTE)
        for step in range(steps):
            k = (first + step) * BLOCK_K
            a = _tile(a_desc, i, j, start_m, k, A_BATCHED, A_TURNED)
            b = _tile(b_desc, i, j, k, start_n, B_BATCHED, B_TURNED)
            acc = dot(a, b, acc, PRECISION)
            if b2_desc is not None:
                acc2 = dot(a, _tile(b2_desc, i, j, k, start_n, B_BATCHED, B_TURNED), acc2, PRECISION)
        for part_n in tl.static_range(SUBTILES):
            x = columns(acc, part_n, SUBTILES)
            x2 = None
            if b2_desc is not None:
                x2 = columns(acc2, part_n, SUBTILES)
            n = start_n + part_n * (BLOCK_N // SUBTILES)
            if SPLIT_K > 1:
                _store_parts(x, x2, part_ptr, part, start_m, n, M, N, BLOCK_M, BLOCK_N // SUBTILES)
            else:
                _finish(
                    x, x2, y_desc, z_desc, z2_desc, y_ptr, z_ptr, z2_ptr, bias_ptr, residual_ptr,
                    y_strides, bias_stride, residual_strides, i, j, start_m, n, M, N, p, q,
                    ACTIVATION, PRECISE, BIAS_M, BATCHED, BLOCK_M, BLOCK_N // SUBTILES,
                )  # fmt: skip


@triton.jit
def _row(ptr, strides, m, ks, mask, COMPUTE: tl.constexpr):
    return tl.load(ptr + m * strides[2] + ks * strides[3], mask=mask, other=0.0).to(COMPUTE)[None, :]


@triton.jit
def _row_sums(
    a_ptr, b_ptr, a_strides, b_strides, first, last, offs_n, N,
    M: tl.constexpr, COMPUTE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Products of four rows of a (the first M of them count) and columns offs_n of b, each element of b read once."""
    offs_k = tl.arange(0, BLOCK_K)
    acc0 = tl.zeros((BLOCK_N, BLOCK_K), COMPUTE)
    acc1, acc2, acc3 = acc0, acc0, acc0
    for k in tl.range(first, last, BLOCK_K, num_stages=STAGES):
        in_k = offs_k < last - k
        ks = offs_k.to(tl.int64) + k
        mask = (offs_n < N)[:, None] & in_k[None, :]
        b_ptrs = b_ptr + (offs_n * b_strides[3])[:, None] + (ks * b_strides[2])[None, :]
        b = tl.load(b_ptrs, mask=mask, other=0.0).to(COMPUTE)
        acc0 += b * _row(a_ptr, a_strides, 0, ks, in_k, COMPUTE)
        if M > 1:
            acc1 += b * _row(a_ptr, a_strides, 1, ks, in_k, COMPUTE)
        if M > 2:
            acc2 += b * _row(a_ptr, a_strides, 2, ks, in_k, COMPUTE)
        if M > 3:
            acc3 += b * _row(a_ptr, a_strides, 3, ks, in_k, COMPUTE)
    return tl.sum(acc0, 1)[None, :], tl.sum(acc1, 1)[None, :], tl.sum(acc2, 1)[None, :], tl.sum(acc3, 1)[None, :]


@triton.jit(do_not_specialize=["inner", "N", "tiles_n"])
def _matmul_fwd_kernel_rows(
    a_ptr, b_ptr, b2_ptr, y_ptr, z_ptr, z2_ptr, bias_ptr, residual_ptr, part_ptr, inner, N, K, tiles_n,
    a_strides, b_strides, b2_strides, y_strides, bias_stride, residual_strides, p, q,
    ACTIVATION: tl.constexpr, PRECISE: tl.constexpr, BIAS_M: tl.constexpr, COMPUTE: tl.constexpr, M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT_K: tl.constexpr, STAGES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """BLOCK_N columns of the result's one to four rows a program, or one share of K of them."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    pid = tl.program_id(0)
    part = (pid // tiles_n).to(tl.int64)
    batch = part // SPLIT_K
    i, j = batch // inner, batch % inner
    share = tl.cdiv(tl.cdiv(K, BLOCK_K), SPLIT_K) * BLOCK_K
    first = (part % SPLIT_K).to(tl.int32) * share
    last = min(first + share, K)
    start_n = (pid % tiles_n) * BLOCK_N
    offs_n = start_n.to(tl.int64) + tl.arange(0, BLOCK_N)
    a_ptr += i * a_strides[0] + j * a_strides[1]
    b_ptr += i * b_strides[0] + j * b_strides[1]
    sums = _row_sums(a_ptr, b_ptr, a_strides, b_strides, first, last, offs_n, N, M, COMPUTE, BLOCK_N, BLOCK_K, STAGES)
    if b2_ptr is not None:
        b2_ptr += i * b2_strides[0] + j * b2_strides[1]
        sums2 = _row_sums(
            a_ptr, b2_ptr, a_strides, b2_strides, first, last, offs_n, N, M, COMPUTE, BLOCK_N, BLOCK_K, STAGES
        )
    for m in tl.static_range(M):
        x2 = None
        if b2_ptr is not None:
            x2 = sums2[m]
        if SPLIT_K > 1:
            _store_parts(sums[m], x2, part_ptr, part, m, start_n, M, N, 1, BLOCK_N)
        else:
            _finish(
                sums[m], x2, None, None, None, y_ptr, z_ptr, z2_ptr, bias_ptr, residual_ptr, y_strides, bias_stride,
                residual_strides, i, j, m, start_n, M, N, p, q, ACTIVATION, PRECISE, BIAS_M, False, 1, BLOCK_N,
            )  # fmt: skip


@triton.jit
def _sum_parts(ptr, at, step, mask, COMPUTE: tl.constexpr, SPLIT_K: tl.constexpr):
    x = tl.load(ptr + at, mask=mask, other=0.0).to(COMPUTE)
    for s in tl.static_range(1, SPLIT_K):
        x += tl.load(ptr + at + tl.cast(step, tl.int64) * s, mask=mask, other=0.0).to(COMPUTE)
    return x


@triton.jit(do_not_specialize=["inner", "M"])
def _matmul_fwd_kernel_parts(
    part_ptr, part2_ptr, y_ptr, z_ptr, z2_ptr, bias_ptr, residual_ptr, step, inner, M, N, tiles_m, tiles_n,
    y_strides, bias_stride, residual_strides, p, q,
    ACTIVATION: tl.constexpr, PRECISE: tl.constexpr, BIAS_M: tl.constexpr, COMPUTE: tl.constexpr, SPLIT_K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Adds up the shares of K, which lie `step` apart, in their order."""
    pid = tl.program_id(0)
    tiles = tiles_m * tiles_n
    batch = (pid // tiles).to(tl.int64)
    start_m = (pid % tiles) // tiles_n * BLOCK_M
    start_n = (pid % tiles) % tiles_n * BLOCK_N
    offs_m = start_m.to(tl.int64) + tl.arange(0, BLOCK_M)
    offs_n = start_n.to(tl.int64) + tl.arange(0, BLOCK_N)
    mask = (offs_m < M)[:, None] & (offs_n < N)[None, :]
    at = batch * SPLIT_K * step + offs_m[:, None] * N + offs_n[None, :]
    if EARLY:  # this was launched while the shares were still at work
        tl.extra.cuda.gdc_wait()
    x = _sum_parts(part_ptr, at, step, mask, COMPUTE, SPLIT_K)
    x2 = None
    if part2_ptr is not None:
        x2 = _sum_parts(part2_ptr, at, step, mask, COMPUTE, SPLIT_K)
    _finish(
        x, x2, None, None, None, y_ptr, z_ptr, z2_ptr, bias_ptr, residual_ptr, y_strides, bias_stride,
        residual_strides, batch // inner, batch % inner, start_m, start_n, M, N, p, q,
        ACTIVATION, PRECISE, BIAS_M, False, BLOCK_M, BLOCK_N,
    )  # fmt: skip
