"""`compress_norm_rope_store` in plain JAX."""

from dsv4_jax.common.reference.helpers.window import store_keys


def implement(state_cache, kv_cache, metadata, norm_weight, cos_sin, kv_scale, *, config):
    """See `dsv4_jax.compress_norm_rope_store`."""
    return (store_keys(None, None, state_cache, kv_cache, metadata, norm_weight, cos_sin, kv_scale, config=config),)
