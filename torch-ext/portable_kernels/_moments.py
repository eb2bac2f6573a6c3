"""Mean and squared deviations of rows, in one pass: Chan, Golub and LeVeque, "Updating formulae and a pairwise
algorithm for computing sample variances", 1979. Running values are kept for every GROUP neighbours, as in _online.py.
"""

from ._triton import tl, triton


@triton.jit
def within(N, start, BLOCK_N: tl.constexpr, GROUP: tl.constexpr):
    """How many elements of each group lie before N, (1, BLOCK_N // GROUP)."""
    left = N - start - tl.arange(0, BLOCK_N // GROUP) * GROUP
    return tl.minimum(tl.maximum(left, 0), GROUP)[None, :]


@triton.jit
def take_moments(x, mask, more, mean, squares, seen):
    """The moments of groups and how many each has seen, after `more` elements each besides; x is 0 where masked."""
    BLOCK_M: tl.constexpr = x.shape[0]
    GROUPS: tl.constexpr = mean.shape[1]
    if GROUPS == x.shape[1]:
        new = x
    else:
        GROUP: tl.constexpr = x.shape[1] // GROUPS
        shape: tl.constexpr = (BLOCK_M, GROUPS, GROUP)
        new = tl.sum(tl.reshape(x * (1.0 / GROUP), shape), axis=2)  # divided first: a sum may overflow
        new = new * (GROUP / tl.where(more == 0, 1.0, more))
        d = tl.where(mask, x - tl.reshape(tl.broadcast_to(new[:, :, None], shape), x.shape), 0.0)
        squares += tl.sum(tl.reshape(d * d, shape), axis=2)
    total = seen + more
    share = more / tl.where(total == 0, 1.0, total)
    delta = new - mean
    return mean + delta * share, squares + delta * (seen * share) * delta, total
