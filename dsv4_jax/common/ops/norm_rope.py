"""Triton: RMSNorm and RoPE of a compressed window."""

import triton
import triton.language as tl

from dsv4_jax.common.ops.rope import rope_factors, rotate


@triton.jit
def norm_rope(
    c, position, norm_weight, cos_sin,
    EPS: tl.constexpr, HEAD_DIM: tl.constexpr, RATIO: tl.constexpr, ROPE_DIM: tl.constexpr,
):  # fmt: skip
    """The finished key `[HEAD_DIM]` float32. A channel of c that is not finite makes all of it NaN."""
    # All loads come before the sum, whose barrier they would wait behind.
    weight = tl.load(norm_weight + tl.arange(0, HEAD_DIM)).to(tl.float32)
    # At the position of the window's first own token.
    cos, sin = rope_factors(cos_sin, position // RATIO * RATIO, HEAD_DIM, ROPE_DIM)
    return rotate(normalise(c, weight, EPS, HEAD_DIM), cos, sin, HEAD_DIM, ROPE_DIM)


@triton.jit
def normalise(c, weight, EPS: tl.constexpr, HEAD_DIM: tl.constexpr):
    c = tl.where(tl.abs(c) < float("inf"), c, float("nan"))
    return c * tl.rsqrt(tl.sum(c * c, axis=0) / HEAD_DIM + EPS) * weight
