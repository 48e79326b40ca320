"""RMSNorm and RoPE in NumPy float64, each value with a worst-case float32 error, and the comparison with a result."""

import numpy as np

from helpers import oracle
from helpers.oracle import F32_MAX, TINY, U


def rms_norm(x, weight, eps):
    """x [..., D] normalized over its last axis: exact values and how far a float32 result may be off.

    The error of a sum of D squares, in any order, is at most D half-ulps; the root halves it. rsqrt may be off by two
    ulps on a GPU.
    """
    x, weight = (np.asarray(oracle.f32(a), np.float64) for a in (x, weight))
    finite = np.isfinite(x).all(axis=-1, keepdims=True)
    x = np.where(finite, x, np.nan)
    with np.errstate(all="ignore"):
        squares = (x * x).sum(axis=-1, keepdims=True)
        assert not (np.abs(squares / F32_MAX - 1) < 1e-3).any(), "a sum of squares at float32's edge: no one answer"
        overflow = squares > F32_MAX  # infinite in float32, its rsqrt is 0
        mean = squares / x.shape[-1] + eps
        exact = np.where(overflow, x * 0.0, x / np.sqrt(mean)) * weight
        relative = ((x.shape[-1] + 4) / 2 + 8) * U + TINY / mean
        error = np.where(overflow, 0, np.abs(exact) * relative + TINY * ((1 / np.sqrt(mean) + 1) * np.abs(weight) + 1))
    return exact, error


def rotate(x, error, angles):
    """RoPE of the last 64 channels of x [T, ..., D] by angles [T, 64], cos then sin; with the new error."""
    angles = np.asarray(oracle.f32(angles), np.float64).reshape(len(angles), *(1,) * (x.ndim - 2), 64)
    cos, sin = angles[..., :32], angles[..., 32:]
    x, error = np.array(x, np.float64), np.array(error, np.float64)
    even, odd, even_error, odd_error = (a[..., i::2].copy() for a in (x, error) for i in (-64, -63))
    with np.errstate(all="ignore"):
        x[..., -64::2], x[..., -63::2] = even * cos - odd * sin, odd * cos + even * sin
        for start, a, a_error, b, b_error in (
            (-64, even, even_error, odd, odd_error),
            (-63, odd, odd_error, even, even_error),
        ):
            error[..., start::2] = (a_error + 3 * U * np.abs(a)) * np.abs(cos) + 3 * TINY
            error[..., start::2] += (b_error + 3 * U * np.abs(b)) * np.abs(sin)
    return x, error


def assert_near(got, exact, error):
    """Holds a float32 or bfloat16 result to the exact values: none further off than float32's error, then rounded.

    Of bfloat16 codes at most 1 in 1000 (and always one) may be another than the exact value's: a few half-ulps of
    float32, 2^-16 of a bfloat16's, carry that share of values across a rounding edge.
    """
    got = np.asarray(got)
    assert got.shape == exact.shape
    nan = np.isnan(exact)
    if got.dtype == np.float32:
        assert (np.isnan(got) == nan).all()
        with np.errstate(invalid="ignore"):
            off = np.abs(got - exact) > error + U * np.abs(exact)
        assert not (off & (got != exact)).any(), np.argwhere(off)[:4]
        return
    code = got.view(np.uint16)
    assert (code[nan] == 0x7FC0).all()
    with np.errstate(invalid="ignore"):
        low, high, want = (oracle._ordered(oracle.bf16_code(a), 0x7FFF) for a in (exact - error, exact + error, exact))
    found = oracle._ordered(code, 0x7FFF)
    wrong = ((found < low) | (found > high)) & ~nan
    assert not wrong.any(), f"{wrong.sum()} values wrong, the first at {np.argwhere(wrong)[0]}"
    # What flushed to zero, or canceled, has no settled code: the bound alone holds.
    settled = error < np.abs(exact) * 2.0**-12
    differing = ((found != want) & ~nan & settled).sum()
    assert differing <= max(1, got.size // 1000), f"{differing} of {got.size} codes differ"
