"""`compress_norm_rope_store`: windows that this step closes, read from the state cache, become keys in the cache."""

import jax
import jax.numpy as jnp

from dsv4_jax import checks
from dsv4_jax.common.reference.helpers.window import normalized_keys
from dsv4_jax.config import CompressorConfig
from dsv4_jax.metadata import CompressorMetadata
from dsv4_jax.op import Op

_op = Op("compress_norm_rope_store", updates=(1,))


def compress_norm_rope_store(
    state_cache: jax.Array,
    kv_cache: jax.Array,
    metadata: CompressorMetadata,
    norm_weight: jax.Array,
    cos_sin: jax.Array,
    *,
    config: CompressorConfig,
    kv_scale: jax.Array | float | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """Gated softmax over each closed window, RMSNorm, RoPE, quantize, store.

    The states of the whole window must be in the state cache; `compress` also takes them from the batch. A window
    whose position lies past the RoPE table, or that has no row at all, writes nothing.

    Args:
      state_cache: `[pages, page_rows, 2W]` float32.
      kv_cache: the cache of `config.format`; updated in place when donated.
      metadata: this step's `CompressorMetadata`.
      norm_weight: `[D]` float32 or bfloat16.
      cos_sin: `[P, 64]` float32, cos then sin, as `Yarn.table` makes it.
      config: the compressor.
      kv_scale: `[]` float32, what values are divided by; for the format `fp8` alone, and needed there.
      implementation: "xla", "triton", "cutedsl" or None: the platform switch chooses.

    Returns:
      The cache.
    """
    args = check_store(state_cache, kv_cache, metadata, norm_weight, cos_sin, config, kv_scale)
    if config.state != "rows":
        raise ValueError(f"config.state is {config.state!r}; it must be 'rows': compress alone keeps the online state")
    (kv_cache,) = _op(*args, implementation=implementation, config=config)
    return kv_cache


def compress_norm_rope_store_triton(*args, **options) -> jax.Array:
    """`compress_norm_rope_store` by its Triton kernels; takes the same arguments but `implementation`."""
    return compress_norm_rope_store(*args, implementation="triton", **options)


def implement(state_cache, kv_cache, metadata, norm_weight, cos_sin, kv_scale, *, config):
    """The op in plain JAX."""
    return (store_keys(None, None, state_cache, kv_cache, metadata, norm_weight, cos_sin, kv_scale, config=config),)


def store_keys(kv_score, ape, state_cache, kv_cache, metadata, norm_weight, cos_sin, kv_scale, *, config):
    """Makes the keys of the closing windows, quantizes and stores them."""
    if not (metadata.closing.size and kv_cache.size and cos_sin.size):
        return kv_cache
    keys, slots = normalized_keys(kv_score, ape, state_cache, metadata, norm_weight, cos_sin, config=config)
    values, scales = config.format.pack(keys, kv_scale)
    return config.format.store(kv_cache, values, scales, slots, config.kv_page_rows)


def check_store(state_cache, kv_cache, metadata, norm_weight, cos_sin, config, kv_scale):
    """Checks the arguments that both compressing ops have; returns them as arrays."""
    checks.instance("config", config, CompressorConfig)
    checks.instance("metadata", metadata, CompressorMetadata)
    if metadata.layout != config.layout:
        names = "(compress_ratio, overlap, page_rows, kv_page_rows, state)"
        raise ValueError(f"metadata was built for {names} = {metadata.layout}; config has {config.layout}")
    state_cache = checks.array("state_cache", state_cache, ("pages", config.page_rows, config.state_width))
    if not hasattr(kv_cache, "dtype"):
        raise TypeError(f"kv_cache is a {type(kv_cache).__name__}; it must be an array")
    config.format.check_cache("kv_cache", kv_cache, config.kv_page_rows)
    norm_weight = checks.array("norm_weight", norm_weight, (config.head_dim,), checks.FLOATS)
    cos_sin = checks.array("cos_sin", cos_sin, ("P", config.rope_head_dim))
    if config.format.needs_scale == (kv_scale is None):
        must = "a float32 scalar" if config.format.needs_scale else "None"
        raise ValueError(f"kv_scale is {kv_scale!r}; for the cache format {config.cache_format} it must be {must}")
    if isinstance(kv_scale, int | float):
        kv_scale = jnp.float32(kv_scale)
    if kv_scale is not None:
        kv_scale = checks.array("kv_scale", kv_scale, ())
    return state_cache, jnp.asarray(kv_cache), checked_metadata(metadata, config), norm_weight, cos_sin, kv_scale


def checked_metadata(metadata, config):
    """The metadata as int32, its arrays' shapes in agreement with each other and with the compressor."""
    online = config.state == "online"
    (tokens,) = checks.integers("metadata.positions", metadata.positions, ("T",)).shape
    requests, _ = checks.integers("metadata.block_table", metadata.block_table, ("R", "B")).shape
    windows, _ = checks.integers("metadata.closing", metadata.closing, ("N", 4)).shape
    shapes = {
        "positions": (tokens,),
        "token_to_req": (tokens,),
        "query_start_loc": (requests + 1,),
        "slot_mapping": (tokens,),
        "block_table": (requests, 1 if online else "B"),
        "kv_slot_mapping": (tokens,),
        "closing": (windows, 4),
        "window_slots": (windows, 1 if online else config.window),
        "saving": ("S", 4 if online else 3),
    }
    if online:
        shapes["runs"] = (requests, 4)
    arrays = {
        name: checks.integers(f"metadata.{name}", getattr(metadata, name), shape) for name, shape in shapes.items()
    }
    return CompressorMetadata(**arrays, layout=metadata.layout)
