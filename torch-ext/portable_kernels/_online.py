"""The maximum of a row and the sum of its exponentials, in one pass: "Online normalizer calculation for softmax" by
Milakov and Gimelshein, 2018. Running values are kept for every GROUP neighbours that a thread loads at once.

A maximum starts at the lowest finite number, not at -inf: this keeps -inf - -inf out of groups that have seen only -inf
or nothing. They sum to 0. NaN where torch has it: a maximum may drop a NaN, but exp(NaN) stays in the sum, as does
inf - inf.
"""

import torch

from ._triton import exp, tl, triton


def neighbours(stride, itemsize, width=16):
    """How many neighbours of a row `width` wide a thread loads at once; stride: of the row's elements."""
    return min(16 // itemsize, width) if stride == 1 else 1


def lowest(dtype):
    return torch.finfo(dtype).min


@triton.jit
def grouped(x, GROUP: tl.constexpr):
    """(BLOCK_M, BLOCK_N) as (BLOCK_M, BLOCK_N // GROUP, GROUP)."""
    return tl.reshape(x, (x.shape[0], x.shape[1] // GROUP, GROUP))


@triton.jit
def take(groups, peaks, sums):
    """The running maxima and sums, after `groups` too."""
    top = tl.maximum(peaks, tl.max(groups, axis=2))
    return top, sums * exp(peaks - top) + tl.sum(exp(groups - top[:, :, None]), axis=2)


@triton.jit
def take_several(x, peaks, sums, GROUP: tl.constexpr):
    """As `take` of several groups for each state: those that a thread loads at a time."""
    STATES: tl.constexpr = peaks.shape[1]
    x = tl.reshape(x, (x.shape[0], x.shape[1] // (STATES * GROUP), STATES, GROUP))
    top = tl.maximum(peaks, tl.max(tl.max(x, axis=3), axis=1))
    new = tl.sum(tl.sum(exp(x - top[:, None, :, None]), axis=3), axis=1)
    return top, sums * exp(peaks - top) + new


@triton.jit
def finish(peaks, sums):
    """Maximum and sum of each row."""
    peak = tl.max(peaks, axis=1)
    return peak, tl.sum(sums * exp(peaks - peak[:, None]), axis=1)
