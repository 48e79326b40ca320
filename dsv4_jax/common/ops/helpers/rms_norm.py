"""Triton: RMSNorm."""

import triton
import triton.language as tl


@triton.jit
def rms_norm(x, weight, EPS: tl.constexpr, WIDTH: tl.constexpr):
    """x float32, normalized over its last axis: WIDTH channels, then zeros.

    A channel that is not finite makes all of its row NaN.
    """
    x = tl.where(tl.abs(x) < float("inf"), x, float("nan"))
    mean = tl.sum(x * x, axis=len(x.shape) - 1, keep_dims=True) / WIDTH
    return x * tl.rsqrt(mean + EPS) * weight
