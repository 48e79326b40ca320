"""The second of the two launches, see `compress`."""

from dsv4_jax.nvidia.ops import support


def implement(*args, config):
    """See `dsv4_jax.norm_rope_insert_sparse_attn_cutedsl`."""
    return (support.kernels(config).norm_rope_insert(*args, config=config),)
