"""The first of the two launches, see `compress`."""

from dsv4_jax.nvidia.ops import support


def implement(state_cache, metadata, *, config, outputs):
    """See `dsv4_jax.compress_kv_sparse_attn_cutedsl`."""
    return (support.kernels(config).compress_kv(state_cache, metadata, config=config),)
