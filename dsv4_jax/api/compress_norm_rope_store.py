"""`compress_norm_rope_store`: turns the windows that close into keys, from the state cache alone."""

import jax
import jax.numpy as jnp

from dsv4_jax import checks
from dsv4_jax.common.reference import compress_norm_rope_store as reference
from dsv4_jax.config import CompressorConfig
from dsv4_jax.metadata import CompressorMetadata, checked_metadata
from dsv4_jax.nvidia import support
from dsv4_jax.op import Op
from dsv4_jax.platforms import Implementation


def compress_norm_rope_store(
    state_cache: jax.Array,
    kv_cache: jax.Array,
    metadata: CompressorMetadata,
    norm_weight: jax.Array,
    cos_sin: jax.Array,
    *,
    config: CompressorConfig,
    kv_scale: jax.Array | float | None = None,
    implementation: Implementation | None = None,
) -> jax.Array:
    """Gated softmax over each window that closes, RMSNorm, RoPE, quantize, store.

    The state cache must hold all rows of each window; `compress` can also take them from the batch. A window writes
    nothing if its position is past the RoPE table, or if it has no row at all.

    Args:
      state_cache: `[pages, page_rows, 2W]` float32.
      kv_cache: the cache of `config.format`; updated in place when donated.
      metadata: this step's `CompressorMetadata`.
      norm_weight: `[D]` float32 or bfloat16.
      cos_sin: `[P, 64]` float32, cos then sin, as `Yarn.table` makes it.
      config: the compressor.
      kv_scale: `[]` float32, the divisor of values; needed for the format `fp8`, None for all others.
      implementation: "xla", "triton" or "cutedsl"; None lets the platform switch choose.

    Returns:
      The cache.
    """
    args = check_store(state_cache, kv_cache, metadata, norm_weight, cos_sin, config, kv_scale)
    if config.state != "rows":
        raise ValueError(f"config.state is {config.state!r}; it must be 'rows': compress alone keeps the online state")
    (kv_cache,) = OP(*args, implementation=implementation, config=config)
    return kv_cache


def compress_norm_rope_store_triton(*args, **options) -> jax.Array:
    """`compress_norm_rope_store` with Triton's kernels; takes the same arguments except `implementation`."""
    return compress_norm_rope_store(*args, implementation="triton", **options)


def compress_norm_rope_store_cutedsl(*args, **options) -> jax.Array:
    """`compress_norm_rope_store` with CuTeDSL's kernels; takes the same arguments except `implementation`.

    For compressors with head_dim 512 (CSA, HCA), on NVIDIA GPUs of compute capability 9.0 or newer.

    Raises:
      NotImplementedError: the compressor, the GPU or the installation does not fit; says what to use instead.
    """
    return compress_norm_rope_store(*args, implementation="cutedsl", **options)


def fused_kv_compress_norm_rope_insert_sparse_attn_cutedsl(*args, **options) -> jax.Array:
    """Another name of `compress_norm_rope_store_cutedsl`: one launch from the state cache to the stored keys."""
    return compress_norm_rope_store_cutedsl(*args, **options)


def check_store(state_cache, kv_cache, metadata, norm_weight, cos_sin, config, kv_scale) -> tuple:
    """Checks the arguments that all key-storing ops share; returns them as arrays, without the config."""
    metadata = checked_metadata(metadata, config)
    state_cache = checks.array("state_cache", state_cache, ("pages", config.page_rows, config.state_width))
    config.format.check_cache("kv_cache", kv_cache, config.kv_page_rows)
    norm_weight = checks.array("norm_weight", norm_weight, (config.head_dim,), checks.FLOATS)
    cos_sin = checks.array("cos_sin", cos_sin, ("P", config.rope_head_dim))
    kv_scale = config.format.check_scale("kv_scale", kv_scale)
    return state_cache, jnp.asarray(kv_cache), metadata, norm_weight, cos_sin, kv_scale


# Both run the kernels of `compress`; every row comes from the state cache.


def _triton():
    from dsv4_jax.common.ops.compress import implement_store

    return implement_store


def _cutedsl():
    from dsv4_jax.nvidia.ops.compress import implement_store

    return implement_store


OP = Op(
    "compress_norm_rope_store",
    updates=(1,),
    xla=reference.implement,
    triton=_triton,
    cutedsl=_cutedsl,
    why_not=support.why_not,
    fp8=lambda *, config, **_: config.format.fp8,
)
