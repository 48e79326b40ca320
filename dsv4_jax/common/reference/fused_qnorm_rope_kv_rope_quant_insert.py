"""`fused_qnorm_rope_kv_rope_quant_insert` in plain JAX."""

import jax.numpy as jnp

from dsv4_jax.cache import CACHE_FORMATS, bf16
from dsv4_jax.common.reference.helpers.rms_norm import rms_norm
from dsv4_jax.common.reference.helpers.rope import rope


def implement(
    q, kv, cache, slots, positions, cos_sin, kv_scale, *, eps, padded_heads, cache_format, page_rows, outputs
):
    """See `dsv4_jax.fused_qnorm_rope_kv_rope_quant_insert`."""
    tokens, heads, _ = q.shape
    if tokens == 0 or cos_sin.shape[0] == 0:
        return cache, jnp.zeros(outputs[0].shape, outputs[0].dtype)
    inside = (positions >= 0) & (positions < cos_sin.shape[0])
    if cache.size:
        fmt = CACHE_FORMATS[cache_format]
        keys = rope(kv.astype(jnp.float32), cos_sin, positions)
        cache = fmt.store(cache, *fmt.pack(keys, kv_scale), jnp.where(inside, slots, -1), page_rows)
    queries = bf16(rope(rms_norm(q, None, eps), cos_sin, positions))
    queries = jnp.where(inside[:, None, None], queries, 0)
    return cache, jnp.pad(queries, [(0, 0), (0, padded_heads - heads), (0, 0)])
