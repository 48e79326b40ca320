"""`compress` in CuTeDSL: one launch, see `sparse_attn_compress_cutedsl`."""

from dsv4_jax.nvidia.ops import support


def implement(
    kv_score, ape, state_cache, kv_cache, metadata, norm_weight, cos_sin, kv_scale, *, config, save, platform
):
    """See `dsv4_jax.compress`."""
    return run(kv_score, ape, state_cache, kv_cache, metadata, norm_weight, cos_sin, kv_scale, config=config, save=save)


def run(*args, config, save):
    """Runs the kernels, or raises NotImplementedError that says why they cannot and what can."""
    if why := support.why_not(config):
        raise NotImplementedError(f"implementation='cutedsl': {why}")
    support.require_libraries()
    from dsv4_jax.nvidia.ops import sparse_attn_compress_cutedsl

    return sparse_attn_compress_cutedsl.run(*args, config=config, save=save)
