"""`norm_rope_insert_sparse_attn_cutedsl`: the second of two launches, from compressed windows to stored keys."""

import jax

from dsv4_jax import checks
from dsv4_jax.api.compress_norm_rope_store import check_store
from dsv4_jax.config import CompressorConfig
from dsv4_jax.metadata import CompressorMetadata
from dsv4_jax.nvidia import support
from dsv4_jax.op import Op


def norm_rope_insert_sparse_attn_cutedsl(
    compressed: jax.Array,
    state_cache: jax.Array,
    kv_cache: jax.Array,
    metadata: CompressorMetadata,
    norm_weight: jax.Array,
    cos_sin: jax.Array,
    *,
    config: CompressorConfig,
    kv_scale: jax.Array | float | None = None,
) -> jax.Array:
    """The second of two launches: RMSNorm, RoPE, quantize, store.

    After `compress_kv_sparse_attn_cutedsl`, the cache holds the bytes of `compress_norm_rope_store`.

    Args:
      compressed: `[N, 512]` float32, one row per entry of `metadata.closing`.
      state_cache: the one that `compressed` was made from; only its number of pages is used.
      kv_cache: the cache of `config.format`; updated in place when donated.
      metadata: this step's `CompressorMetadata`.
      norm_weight: `[D]` float32 or bfloat16.
      cos_sin: `[P, 64]` float32, cos then sin, as `Yarn.table` makes it.
      config: the compressor.
      kv_scale: `[]` float32, the divisor of values; needed for the format `fp8`, None for all others.

    Returns:
      The cache.

    Raises:
      NotImplementedError: the compressor, the GPU or the installation does not fit; says what to use instead.
      TypeError, ValueError: an argument is not as above.
    """
    args = check_store(state_cache, kv_cache, metadata, norm_weight, cos_sin, config, kv_scale)
    compressed = checks.array("compressed", compressed, (args[2].closing.shape[0], config.head_dim))
    (kv_cache,) = OP(compressed, *args, implementation="cutedsl", config=config)
    return kv_cache


def _cutedsl():
    from dsv4_jax.nvidia.ops.compress import implement_norm_rope_insert

    return implement_norm_rope_insert


OP = Op("norm_rope_insert_sparse_attn_cutedsl", updates=(2,), cutedsl=_cutedsl, why_not=support.why_not)
