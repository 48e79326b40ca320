"""`compress_norm_rope_store` in CuTeDSL: the kernels of `compress`, with every row taken from the state cache."""

from dsv4_jax.nvidia.ops import compress


def implement(state_cache, kv_cache, metadata, norm_weight, cos_sin, kv_scale, *, config):
    """See `dsv4_jax.compress_norm_rope_store`."""
    args = None, None, state_cache, kv_cache, metadata, norm_weight, cos_sin, kv_scale
    _, kv_cache = compress.implement(*args, config=config, save="none")
    return (kv_cache,)
