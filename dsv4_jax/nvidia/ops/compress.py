"""`compress` in CuTeDSL: one launch, see `sparse_attn_compress_cutedsl`."""

from dsv4_jax.nvidia.ops import support


def implement(*args, config, save, platform):
    """See `dsv4_jax.compress`; raises NotImplementedError that says why the kernels cannot run and what can."""
    return support.kernels(config).run(*args, config=config, save=save)
