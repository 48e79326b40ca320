"""`compress_kv_sparse_attn_cutedsl`: the first of two launches, from the state cache to compressed windows."""

import jax
import jax.numpy as jnp

from dsv4_jax import checks
from dsv4_jax.config import CompressorConfig
from dsv4_jax.metadata import CompressorMetadata, checked_metadata
from dsv4_jax.nvidia import support
from dsv4_jax.op import Op


def compress_kv_sparse_attn_cutedsl(
    state_cache: jax.Array, metadata: CompressorMetadata, *, config: CompressorConfig
) -> jax.Array:
    """The first of two launches: the gated softmax-sum over each window that closes, before RMSNorm.

    Channel d is `sum(kv[i, d] * p[i, d])` over the window's rows i. p is the softmax of the scores that
    `save_partial_states` stored, which include the position bias. `norm_rope_insert_sparse_attn_cutedsl` makes the
    keys.

    Args:
      state_cache: `[pages, page_rows, 2W]` float32; holds the states of the windows.
      metadata: this step's `CompressorMetadata`.
      config: the compressor; its head_dim must be 512.

    Returns:
      `[N, 512]` float32, one row per entry of `metadata.closing`. A channel that is not finite is NaN. A row whose
      entry names no window is undefined.

    Raises:
      NotImplementedError: the compressor, the GPU or the installation does not fit; says what to use instead.
      TypeError, ValueError: an argument is not as above.
    """
    metadata = checked_metadata(metadata, config)
    state_cache = checks.array("state_cache", state_cache, ("pages", config.page_rows, config.state_width))
    (rows,) = OP(state_cache, metadata, implementation="cutedsl", config=config)
    return rows


def _outputs(state_cache, metadata, *, config):
    return (jax.ShapeDtypeStruct((metadata.closing.shape[0], config.head_dim), jnp.float32),)


def _cutedsl():
    from dsv4_jax.nvidia.ops.compress import implement_compress_kv

    return implement_compress_kv


OP = Op("compress_kv_sparse_attn_cutedsl", outputs=_outputs, cutedsl=_cutedsl, why_not=support.why_not)
