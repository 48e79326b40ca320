"""The CuTeDSL kernels by the names that other systems give them; imports neither cutlass nor torch."""

import jax
import jax.numpy as jnp

from dsv4_jax import checks
from dsv4_jax.common.reference.compress_norm_rope_store import check_store, checked_metadata, compress_norm_rope_store
from dsv4_jax.config import CompressorConfig
from dsv4_jax.metadata import CompressorMetadata
from dsv4_jax.op import Op


def compress_norm_rope_store_cutedsl(*args, **options) -> jax.Array:
    """`compress_norm_rope_store` by its CuTeDSL kernels; takes the same arguments but `implementation`.

    Serves compressors of head_dim 512 (CSA, HCA) on NVIDIA GPUs of compute capability 9.0 and newer.

    Raises:
      NotImplementedError: says what is missing for the compressor, the GPU or the installation, and what would do.
    """
    return compress_norm_rope_store(*args, implementation="cutedsl", **options)


def fused_kv_compress_norm_rope_insert_sparse_attn_cutedsl(*args, **options) -> jax.Array:
    """One launch from the state cache to the stored keys: another name of `compress_norm_rope_store_cutedsl`."""
    return compress_norm_rope_store_cutedsl(*args, **options)


_compress_kv = Op(
    "compress_kv_sparse_attn_cutedsl",
    outputs=lambda state_cache, metadata, *, config: (
        jax.ShapeDtypeStruct((metadata.closing.shape[0], config.head_dim), jnp.float32),
    ),
)


def compress_kv_sparse_attn_cutedsl(
    state_cache: jax.Array, metadata: CompressorMetadata, *, config: CompressorConfig
) -> jax.Array:
    """The first of two launches: the gated softmax-sum over each closing window, before RMSNorm.

    Channel d is `sum(kv[i, d] * p[i, d])`, p being the softmax over the window's rows i of the scores that
    `save_partial_states` has stored with their bias. `norm_rope_insert_sparse_attn_cutedsl` makes keys of it.

    Args:
      state_cache: `[pages, page_rows, 2W]` float32; holds the states of the windows.
      metadata: this step's `CompressorMetadata`.
      config: the compressor, of head_dim 512.

    Returns:
      `[N, 512]` float32, a row for each entry of `metadata.closing`; NaN where a channel is not finite. Rows of entries
      that name no window are undefined.

    Raises:
      NotImplementedError: says what is missing for the compressor, the GPU or the installation, and what would do.
      TypeError, ValueError: for an argument that is not as above.
    """
    checks.instance("config", config, CompressorConfig)
    checks.instance("metadata", metadata, CompressorMetadata)
    if metadata.layout != config.layout:
        raise ValueError(f"metadata was built for the layout {metadata.layout}; config has {config.layout}")
    state_cache = checks.array("state_cache", state_cache, ("pages", config.page_rows, config.state_width))
    (rows,) = _compress_kv(state_cache, checked_metadata(metadata, config), implementation="cutedsl", config=config)
    return rows


_norm_rope_insert = Op("norm_rope_insert_sparse_attn_cutedsl", updates=(2,))


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
      compressed: `[N, 512]` float32, a row for each entry of `metadata.closing`.
      state_cache: what `compressed` was made from; only its number of pages counts.
      kv_cache: the cache of `config.format`; updated in place when donated.
      metadata, norm_weight, cos_sin, config, kv_scale: as of `compress_norm_rope_store`.

    Returns:
      The cache.

    Raises:
      NotImplementedError: says what is missing for the compressor, the GPU or the installation, and what would do.
      TypeError, ValueError: for an argument that is not as above.
    """
    args = check_store(state_cache, kv_cache, metadata, norm_weight, cos_sin, config, kv_scale)
    compressed = checks.array("compressed", compressed, (args[2].closing.shape[0], config.head_dim))
    (kv_cache,) = _norm_rope_insert(compressed, *args, implementation="cutedsl", config=config)
    return kv_cache
