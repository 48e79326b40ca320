"""`prepare_megamoe_inputs` in plain JAX."""

import jax.numpy as jnp
from jax import lax

from dsv4_jax.cache import e8m0, quantize_fp8

BLOCK = 32  # channels under one scale


def implement(hidden, topk_weights, topk_ids, is_padding, *, outputs):
    """See `dsv4_jax.prepare_megamoe_inputs`."""
    tokens, width = hidden.shape
    codes, exponents = quantize_fp8(hidden.astype(jnp.float32), BLOCK)
    x = lax.bitcast_convert_type(codes, jnp.float8_e4m3fn)
    scales = lax.bitcast_convert_type(e8m0(exponents).reshape(tokens, width // (4 * BLOCK), 4), jnp.int32)
    ids = jnp.maximum(topk_ids, -1)
    if is_padding is not None:
        ids = jnp.where(is_padding[:, None], -1, ids)
        topk_weights = jnp.where(is_padding[:, None], 0.0, topk_weights)
    return x, scales, ids, topk_weights
