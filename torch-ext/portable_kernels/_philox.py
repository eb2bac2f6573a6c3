"""Philox 4x32-10, in PyTorch and in kernels: the random words that Triton's tl.philox draws."""

import torch

from ._triton import tl, triton

WORD = 0xFFFFFFFF


def philox(c0, c1, c2, c3, seed):
    """The four words of every draw, stacked last, as int64.

    Products wrap at 2^64, and a word is what `& WORD` leaves.
    """
    k0, k1 = seed.reshape(()) & WORD, (seed.reshape(()) >> 32) & WORD
    for _ in range(10):
        a, b = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1 = ((b >> 32) & WORD) ^ c1 ^ k0, b & WORD
        c2, c3 = ((a >> 32) & WORD) ^ c3 ^ k1, a & WORD
        k0, k1 = (k0 + 0x9E3779B9) & WORD, (k1 + 0xBB67AE85) & WORD
    return torch.stack((c0, c1, c2, c3), -1)


@triton.jit
def draw(seed, low, high):
    """The four words of the draws (low, high, 0, 0), as `philox`, of uint32 and an int64 seed.

    Products of 64 bits: one instruction gives both halves, where tl.philox multiplies twice.
    """
    k0 = seed.to(tl.uint32)
    k1 = (seed >> 32).to(tl.uint32)
    c0 = low
    c1 = high
    c2 = low * 0
    c3 = c2
    for _ in tl.static_range(10):
        a = c0.to(tl.uint64) * 0xD2511F53
        b = c2.to(tl.uint64) * 0xCD9E8D57
        c0 = (b >> 32).to(tl.uint32) ^ c1 ^ k0
        c1 = b.to(tl.uint32)
        c2 = (a >> 32).to(tl.uint32) ^ c3 ^ k1
        c3 = a.to(tl.uint32)
        k0 += 0x9E3779B9
        k1 += 0xBB67AE85
    return c0, c1, c2, c3
