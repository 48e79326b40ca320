"""`fused_indexer_q_rope_quant` in plain JAX."""

import jax.numpy as jnp
from jax import lax

from dsv4_jax.cache import CACHE_FORMATS
from dsv4_jax.common.reference.helpers.rope import rope


def implement(positions, q, cos_sin, weights, *, softmax_scale, head_scale, use_fp4, outputs):
    """See `dsv4_jax.fused_indexer_q_rope_quant`."""
    if q.size == 0 or cos_sin.shape[0] == 0:
        return tuple(jnp.zeros(s.shape, s.dtype) for s in outputs)
    values, scales = CACHE_FORMATS["indexer_mxfp4" if use_fp4 else "indexer_fp8"].pack(
        rope(q.astype(jnp.float32), cos_sin, positions)
    )
    inside = ((positions >= 0) & (positions < cos_sin.shape[0]))[:, None]
    values = jnp.where(inside[:, :, None], values, 0)
    scales = lax.bitcast_convert_type(scales, jnp.int32 if use_fp4 else jnp.float32)
    weights = weights.astype(jnp.float32)
    if not use_fp4:
        values = lax.bitcast_convert_type(values, jnp.float8_e4m3fn)
        weights = weights * scales
    # The barrier, since XLA would multiply the two numbers first, which rounds otherwise.
    weights = lax.optimization_barrier(weights * softmax_scale) * head_scale
    weights = jnp.where(inside, jnp.where(jnp.isnan(weights), jnp.nan, weights), 0.0)
    return (values, jnp.where(inside, scales, 0), weights) if use_fp4 else (values, weights)
