"""Triton: RMSNorm and RoPE of a compressed window."""

import triton
import triton.language as tl

from dsv4_jax.common.ops.rms_norm import rms_norm
from dsv4_jax.common.ops.rope import rope_factors, rotate


@triton.jit
def key_factors(position, norm_weight, cos_sin, HEAD_DIM: tl.constexpr, RATIO: tl.constexpr, ROPE_DIM: tl.constexpr):
    """Norm weight, cos and sin of the key that a position closes; loaded before the window, they arrive with it."""
    weight = tl.load(norm_weight + tl.arange(0, HEAD_DIM)).to(tl.float32)
    # At the position of the window's first own token.
    cos, sin = rope_factors(cos_sin, position // RATIO * RATIO, HEAD_DIM, ROPE_DIM)
    return weight, cos, sin


@triton.jit
def norm_rope(c, weight, cos, sin, EPS: tl.constexpr, HEAD_DIM: tl.constexpr, ROPE_DIM: tl.constexpr):
    """The finished key `[HEAD_DIM]` float32. A channel of c that is not finite makes all of it NaN."""
    return rotate(rms_norm(c, weight, EPS, HEAD_DIM), cos, sin, HEAD_DIM, ROPE_DIM)
