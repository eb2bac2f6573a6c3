"""Philox 4x32-10 in PyTorch: the random words that Triton's tl.philox draws in kernels."""

import torch

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
