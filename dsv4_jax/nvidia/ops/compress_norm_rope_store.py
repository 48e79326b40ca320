"""`compress_norm_rope_store` in CuTeDSL: the kernels of `compress`, with every row taken from the state cache."""

from dsv4_jax.nvidia.ops.compress import run


def implement(state_cache, kv_cache, metadata, norm_weight, cos_sin, kv_scale, *, config, platform):
    """See `dsv4_jax.compress_norm_rope_store`."""
    _, kv_cache = run(
        None, None, state_cache, kv_cache, metadata, norm_weight, cos_sin, kv_scale, config=config, save="none"
    )
    return (kv_cache,)
