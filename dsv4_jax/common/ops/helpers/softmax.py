"""Triton: softmax-sums over rows, for each channel: the largest score, the sum of weights, the weighted sum of kv."""

import triton
import triton.language as tl


@triton.jit
def fold(kv, score):
    """The softmax-sum of rows `[rows, channels]`. Without a row that is there, its sums are 0."""
    # A thread holds 8 rows of a tall tile, each so far from the next: it folds these, then threads merge.
    HELD: tl.constexpr = 8 if kv.shape[0] > 16 else kv.shape[0]
    kv = tl.reshape(kv, (HELD, kv.shape[0] // HELD, kv.shape[1]))
    score = tl.reshape(score, (HELD, score.shape[0] // HELD, score.shape[1]))
    maximum = tl.max(score, axis=0)
    weight = _exp(score - _finite(maximum)[None, :, :])
    parts = maximum, tl.sum(weight, axis=0), tl.sum(weight * kv, axis=0)
    return tl.reduce(parts, 0, merge)


@triton.jit
def softmax_sum(kv, score):
    """Softmax over the rows of `[rows, channels]` for each channel, times kv. NaN where no row is there."""
    _, total, weighted = fold(kv, score)
    return weighted / total


@triton.jit
def merge(maximum, total, weighted, other_maximum, other_total, other_weighted):
    """The softmax-sum of the rows of both. A NaN is kept by the sums, whatever the maximum does with it."""
    largest = tl.maximum(maximum, other_maximum)
    share = _exp(maximum - _finite(largest))
    other_share = _exp(other_maximum - _finite(largest))
    total = share * total + other_share * other_total
    return largest, total, share * weighted + other_share * other_weighted


@triton.jit
def _exp(x):
    # By tl.exp2, which takes a subnormal result for 0: a weight beside the largest, which is 1. tl.exp does not, and
    # takes three instructions more.
    return tl.exp2(x * 1.4426950408889634)


@triton.jit
def _finite(maximum):
    """What scores are taken relative to: where all are -inf, 0, so that their weights are 0."""
    return tl.where(maximum == float("-inf"), 0.0, maximum)
