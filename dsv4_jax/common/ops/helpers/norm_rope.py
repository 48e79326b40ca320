"""Triton: from a compressed window to its key: RMSNorm, RoPE, and what a kernel that stores it is launched with."""

import triton
import triton.language as tl

from dsv4_jax.cache import page_stride
from dsv4_jax.common.ops.helpers.aggregates import Factors
from dsv4_jax.common.ops.helpers.rms_norm import rms_norm
from dsv4_jax.common.ops.helpers.rope import rope_factors, rotate


def key_arguments(kv_cache, norm_weight, cos_sin, kv_scale, config):
    """Arrays and constants for `launch`, of a kernel that finishes and stores keys."""
    arrays = {"kv_cache": kv_cache, "norm_weight": norm_weight, "cos_sin": cos_sin, "kv_scale": kv_scale}
    constants = {
        "FORMAT": config.cache_format,
        "PAGE_BYTES": page_stride(kv_cache),
        "EPS": config.eps,
        "ROPE_DIM": config.rope_head_dim,
    }
    return arrays, constants


@triton.jit
def load_factors(norm_weight, cos_sin, position, shape, ROPE_DIM: tl.constexpr):
    """The factors of the key that a position closes. Load them before the window, so that they arrive with it."""
    weight = tl.load(norm_weight + tl.arange(0, shape.HEAD_DIM)).to(tl.float32)
    # A key is rotated to the position of its window's first own token.
    cos, sin = rope_factors(cos_sin, position // shape.RATIO * shape.RATIO, shape.HEAD_DIM, ROPE_DIM)
    return Factors(weight, cos, sin)


@triton.jit
def norm_rope(c, factors, EPS: tl.constexpr, HEAD_DIM: tl.constexpr, ROPE_DIM: tl.constexpr):
    """The finished key `[HEAD_DIM]` float32. A channel of c that is not finite makes all of it NaN."""
    return rotate(rms_norm(c, factors.weight, EPS, HEAD_DIM), factors.cos, factors.sin, HEAD_DIM, ROPE_DIM)
