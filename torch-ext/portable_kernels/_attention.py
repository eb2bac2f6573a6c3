"""What the attention kernels share: sequences, which keys a query sees, scores, dropped probabilities."""

import torch

from ._triton import tl, triton

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
LOWEST = tl.constexpr(-3.4028234663852886e38)  # where a running maximum starts: -inf - -inf would be NaN


@triton.jit
def sequence(cu_ptr, b, S):
    """(first row, rows) of sequence b: of S rows each where cu_ptr is None."""
    if cu_ptr is None:
        return tl.zeros((), tl.int64), S
    else:
        first = tl.load(cu_ptr + b).to(tl.int64)
        return first, (tl.load(cu_ptr + b + 1).to(tl.int64) - first).to(tl.int32)


@triton.jit
def tile_and_head(tiles, heads, at_once, LAST_FIRST: tl.constexpr):
    """(tile, head) of this program. Programs walk all tiles of `at_once` heads, whose keys and values L2 holds, then
    those of the next: the longest tiles first, so that none starts when the others end."""
    program = tl.program_id(0)
    first = program // (tiles * at_once) * at_once
    count = min(heads - first, at_once)
    place = program % (tiles * at_once)
    tile = place // count
    if LAST_FIRST:
        tile = tiles - 1 - tile
    return tile, first + place % count


@triton.jit
def spans(first, last, S, offset, left, right, BLOCK: tl.constexpr):
    """(begin, whole_begin, whole_end, end): what some of first..last sees lies from begin to end, and what all of them
    see from whole_begin to whole_end. Row i sees i + offset - left to i + offset + right, of S."""
    begin = tl.zeros((), tl.int32)
    whole_begin = begin
    end = S + begin
    whole_end = end
    if right is not None:
        end = max(min(last + offset + right + 1, S), 0)
        whole_end = max(min(first + offset + right + 1, S), 0)
    if left is not None:
        begin = max(first + offset - left, 0) // BLOCK * BLOCK
        whole_begin = (max(last + offset - left, 0) + BLOCK - 1) // BLOCK * BLOCK
        whole_begin = max(min(whole_begin, (end + BLOCK - 1) // BLOCK * BLOCK), begin)
    return begin, whole_begin, max(whole_end // BLOCK * BLOCK, whole_begin), end


@triton.jit
def load_tile(
    x, stride, b, h, first, n, S, pages_ptr, page_size,
    D: tl.constexpr, EDGE: tl.constexpr, DESC: tl.constexpr, PACKED: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Rows n.. of a sequence, (BLOCK, BLOCK_D): zeros after its S rows (unless not EDGE) and after D.

    x: a descriptor of (B, H, rows, D); or a pointer to the head's first row, or to page 0 where rows lie in pages.
    """
    rows = n + tl.arange(0, BLOCK)
    if DESC:
        tile = tl.reshape(x.load([b, h, first.to(tl.int32) + n, 0]), (BLOCK, BLOCK_D))
        if PACKED and EDGE:  # what follows is another sequence, of which not even a NaN may show
            tile = tl.where((rows < S)[:, None], tile, tl.zeros_like(tile))
        return tile
    else:
        offs_d = tl.arange(0, BLOCK_D)
        mask = (rows < S)[:, None] & (offs_d < D)[None, :]
        if pages_ptr is not None:
            page = tl.load(pages_ptr + rows // page_size, mask=rows < S, other=0).to(tl.int64)
            at = x + (page * stride[0] + (rows % page_size).to(tl.int64) * stride[2])[:, None] + offs_d[None, :]
        else:
            at = x + tl.cast(n, tl.int64) * stride[2]
            at += tl.arange(0, BLOCK).to(tl.int64)[:, None] * stride[2] + offs_d[None, :]
        if EDGE or D != BLOCK_D or pages_ptr is not None:
            return tl.load(at, mask=mask, other=0.0)
        else:
            return tl.load(at)


@triton.jit
def _tanh(x, PRECISE: tl.constexpr):
    if PRECISE:
        e = tl.exp2(tl.abs(x) * -2.8853900817779268)
        z = x * x
        near = tl.abs(x) < 0.4  # Lambert's continued fraction: 1e-9 off there, where 1 - e would cancel
        t = tl.where(near, x * (105.0 + 10.0 * z), tl.where(x < 0, e - 1.0, 1.0 - e))
        return t / tl.where(near, 105.0 + z * (45.0 + z), 1.0 + e)
    else:
        return 1.0 - 2.0 / (1.0 + tl.exp2(x * 2.8853900817779268))


@triton.jit
def scores(
    product, i, j, Sq, Sk, offset, mask_ptr, mask_strides, slope, scale, softcap, left, right,
    FOLD: tl.constexpr, EDGE: tl.constexpr, PRECISE: tl.constexpr,
):  # fmt: skip
    """(scores of queries i and keys j, the derivative of the soft cap). i and j: indices that broadcast to the tile.

    With FOLD they still lack the factor `scale`, which the exponential takes in.
    """
    s = product
    gain = 1.0
    if not FOLD:
        s = s * scale
        if softcap is not None:
            t = _tanh(s / softcap, PRECISE)
            s = t * softcap
            gain = (1.0 - t) * (1.0 + t)
        if slope is not None:
            s -= slope * tl.abs(i + offset - j).to(tl.float32)
    if mask_ptr is not None:
        if len(mask_strides) == 3:  # the same for all queries: a line of the tile
            m = tl.load(mask_ptr + j.to(tl.int64) * mask_strides[2], mask=j < Sk, other=0)
        else:
            at = mask_ptr + i.to(tl.int64) * mask_strides[2] + j.to(tl.int64) * mask_strides[3]
            m = tl.load(at, mask=(i < Sq) & (j < Sk), other=0)
        if mask_ptr.dtype.element_ty == tl.uint8:  # what PyTorch calls bool
            s = tl.where(m != 0, s, float("-inf"))
        else:
            s += m.to(tl.float32)
    if EDGE:
        s = tl.where(seen(i, j, Sk, offset, left, right), s, float("-inf"))
    return s, gain


@triton.jit
def seen(i, j, Sk, offset, left, right):
    """Whether query i sees key j."""
    mask = j < Sk
    if right is not None:
        mask = mask & (j <= i + offset + right)
    if left is not None:
        mask = mask & (j >= i + offset - left)
    return mask


@triton.jit
def kept(seed_ptr, head, i, n, threshold, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TURNED: tl.constexpr):
    """Which probabilities of queries i, (BLOCK_M,), and keys n.. are kept: (BLOCK_M, BLOCK_N), or TURNED.

    Four neighbouring keys share a draw of Philox, numbered by (key / 4, query, head).
    """
    four = n // 4 + tl.arange(0, BLOCK_N // 4)
    if TURNED:
        zero = i[None, :] * 0 + four[:, None] * 0
        key = zero + four[:, None]
        query = zero + i[None, :]
    else:
        zero = i[:, None] * 0 + four[None, :] * 0
        key = zero + four[None, :]
        query = zero + i[:, None]
    zero = zero.to(tl.uint32)
    w0, w1, w2, w3 = tl.philox(
        tl.load(seed_ptr), key.to(tl.uint32), query.to(tl.uint32), zero + head.to(tl.uint32), zero
    )
    k0 = (w0.to(tl.int64) >= threshold).to(tl.int8)
    k1 = (w1.to(tl.int64) >= threshold).to(tl.int8)
    k2 = (w2.to(tl.int64) >= threshold).to(tl.int8)
    k3 = (w3.to(tl.int64) >= threshold).to(tl.int8)
    all_four = tl.join(tl.join(k0, k2), tl.join(k1, k3))
    if TURNED:
        all_four = tl.permute(tl.reshape(all_four, (BLOCK_N // 4, BLOCK_M, 4)), (0, 2, 1))
        return tl.reshape(all_four, (BLOCK_N, BLOCK_M)) != 0
    else:
        return tl.reshape(all_four, (BLOCK_M, BLOCK_N)) != 0


def fold(scale, softcap, alibi, mask):
    """Whether scores are products times `scale` and nothing more, so that the exponential takes the factor in."""
    return scale > 0 and not softcap and alibi is None and (mask is None or mask.dtype == torch.bool)


def options(scale, softcap, left, right, seed, dropout_p):
    """The scalars of every kernel: None for what is not asked for."""
    return (
        float(scale), float(softcap) if softcap else None, left if left >= 0 else None, right if right >= 0 else None,
        None if seed is None else round(dropout_p * 2**32),
    )  # fmt: skip


def strides(t, packed):
    """(batch, head, row) strides of a (B, S, H, D) tensor, or of a packed (T, H, D) one."""
    return (0, t.stride(1), t.stride(0)) if packed else (t.stride(0), t.stride(2), t.stride(1))


def unit_last_stride(t):
    """The tensor, copied where its last dimension is strided (or expanded)."""
    return t if t.stride(-1) == 1 or t.shape[-1] == 1 else t.contiguous()


def keep_scale(p):
    return 0.0 if p == 1 else 1.0 / (1.0 - p)
