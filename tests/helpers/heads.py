"""Heads of queries and of attention's output, for the ops that rotate and quantize them, and RoPE in float64."""

import ml_dtypes
import numpy as np


def random_heads(rng, tokens, heads, dim, powers=(-40, -20, -8, 0, 9, 100)):
    """`[tokens, heads, dim]` bfloat16, 8-bit integers times a power of two for each head; one head in eight is zero.

    At a position of `random_table` their rotation has at most 17 bits: no float32 rounding, so all must agree.
    """
    x = rng.integers(-255, 256, (tokens, heads, dim)) * np.exp2(rng.choice(powers, (tokens, heads, 1)))
    x[rng.random((tokens, heads)) < 0.125] = 0
    return x.astype(ml_dtypes.bfloat16)


def random_table(rng, rows):
    """`[rows, 64]` float32 of multiples of 1/128, from -1 to 1."""
    return (rng.integers(-128, 129, (rows, 64)) / 128).astype(np.float32)


def rotated(x, cos_sin, positions, *, inverse=False):
    """x with the last 64 channels of each head rotated, as float32; zeros where the position is outside the table."""
    positions = np.asarray(positions)
    inside = (positions >= 0) & (positions < len(cos_sin))
    angles = np.zeros((len(x), 1, 64)) if not len(cos_sin) else cos_sin[np.where(inside, positions, 0)][:, None, :]
    cos, sin = (np.asarray(a, np.float64) for a in (angles[..., :32], angles[..., 32:]))
    sin = -sin if inverse else sin
    with np.errstate(all="ignore"):
        x = np.array(x, np.float64)
        even, odd = x[..., -64::2].copy(), x[..., -63::2].copy()
        x[..., -64::2] = even * cos - odd * sin
        x[..., -63::2] = odd * cos + even * sin
        return np.where(inside[:, None, None], x, 0).astype(np.float32)
