"""What kernels of matrix products share: the order that programs walk tiles in, the product of two tiles, and parts of
one."""

from ._triton import INTERPRET, tl, triton

_UPCASTS = tl.constexpr(INTERPRET)  # the interpreter's product of two bfloat16 tiles is wrong


@triton.jit
def tile_of(tile, tiles_m, tiles_n, GROUP_M: tl.constexpr):
    """(pid_m, pid_n) of a tile, GROUP_M rows of tiles at a time: those at work together share operands in L2."""
    width = GROUP_M * tiles_n
    group = tile // width
    rows = min(tiles_m - group * GROUP_M, GROUP_M)
    place = tile % width
    return group * GROUP_M + place % rows, place // rows


@triton.jit
def dot(a, b, acc, PRECISION: tl.constexpr):
    """acc + a @ b. PRECISION: how float32 operands are multiplied, "ieee" or "tf32"."""
    if _UPCASTS and a.dtype == tl.bfloat16:
        a, b = a.to(tl.float32), b.to(tl.float32)
    if a.dtype == tl.float32 and PRECISION == "ieee":  # a sum of sums: one chain along K rounds more
        # Triton makes the addition part of the product again, but where something is said of its inner sums.
        part = tl.dot(a, b, input_precision=PRECISION, max_num_imprecise_acc=1, out_dtype=acc.dtype)
        return acc + part
    return tl.dot(a, b, acc, input_precision=PRECISION, out_dtype=acc.dtype)


@triton.jit
def columns(x, which: tl.constexpr, SUBTILES: tl.constexpr):
    """One of 1, 2 or 4 equal parts of a tile's columns."""
    if SUBTILES > 1:
        x = _halves(x)[2 * which // SUBTILES]
    if SUBTILES > 2:
        x = _halves(x)[which % 2]
    return x


@triton.jit
def _halves(x):
    return tl.split(tl.permute(tl.reshape(x, (x.shape[0], 2, x.shape[1] // 2)), (0, 2, 1)))
