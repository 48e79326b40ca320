"""Triton: from a compressed window to its key: RMSNorm, RoPE, and what a kernel that stores it is launched with."""

import triton
import triton.language as tl

from dsv4_jax.cache import page_stride
from dsv4_jax.common.ops.helpers.rms_norm import rms_norm
from dsv4_jax.common.ops.helpers.rope import rope_factors, rotate


def key_arguments(kv_cache, norm_weight, cos_sin, kv_scale, config):
    """Arrays and constants for `launch`, of a kernel that finishes and stores keys."""
    arrays = {
        "kv_cache": kv_cache,
        "norm_weight": norm_weight,
        "cos_sin": cos_sin,
        # Triton wants an array for every pointer; another stands in for what is not read.
        "kv_scale": norm_weight if kv_scale is None else kv_scale,
    }
    constants = {
        "FORMAT": config.cache_format,
        "PAGE_BYTES": page_stride(kv_cache),
        "EPS": config.eps,
        "ROPE_DIM": config.rope_head_dim,
    }
    return arrays, constants


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
