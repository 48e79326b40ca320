"""`compress`: from the projection's output to states saved and keys stored, in one pass."""

import jax
import jax.numpy as jnp

from dsv4_jax import checks
from dsv4_jax.common.reference.compress_norm_rope_store import check_store, store_keys
from dsv4_jax.common.reference.helpers import online
from dsv4_jax.common.reference.save_partial_states import set_rows, store_states
from dsv4_jax.config import CompressorConfig
from dsv4_jax.metadata import CompressorMetadata
from dsv4_jax.op import Op

_op = Op("compress", updates=(2, 3))


def compress(
    kv_score: jax.Array,
    ape: jax.Array,
    state_cache: jax.Array,
    kv_cache: jax.Array,
    metadata: CompressorMetadata,
    norm_weight: jax.Array,
    cos_sin: jax.Array,
    *,
    config: CompressorConfig,
    save: str = "tail",
    kv_scale: jax.Array | float | None = None,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Saves states and stores the keys of closed windows, each input read once.

    Rows of a window that are in this batch come from `kv_score`, older ones from the state cache. The keys are those of
    `save_partial_states` followed by `compress_norm_rope_store`, up to the order in which float32 sums are made, which
    may differ by a batch's shapes (docs/compressor.md says how far that goes). No slot that this call writes may hold a
    row that one of its windows still needs.

    Args:
      kv_score: `[T, 2W]` float32 or bfloat16, the projection's output: kv in the first half, score in the second.
      ape: `[m, W]` float32, the position bias.
      state_cache: `[pages, page_rows, config.state_width]` float32; updated in place when donated.
      kv_cache: the cache of `config.format`; updated in place when donated.
      metadata: this step's `CompressorMetadata`.
      norm_weight: `[D]` float32 or bfloat16.
      cos_sin: `[P, 64]` float32, cos then sin, as `Yarn.table` makes it.
      config: the compressor.
      save: "tail" saves the states that a later step can need; "all" saves every token's, for prefixes that requests
        share; the online state has no rows to share.
      kv_scale: `[]` float32, what values are divided by; for the format `fp8` alone, and needed there.
      implementation: "xla", "triton", "cutedsl" or None: the platform switch chooses.

    Returns:
      The state cache and the cache.
    """
    checks.one_of("save", save, ("tail", "all"))
    checks.instance("config", config, CompressorConfig)
    if config.state == "online" and save == "all":
        raise ValueError(
            "save is 'all'; with the online state it must be 'tail': there are no rows to share, and a prefix that is "
            "shared up to a multiple of the compress ratio needs no state"
        )
    state_cache, kv_cache, metadata, norm_weight, cos_sin, kv_scale = check_store(
        state_cache, kv_cache, metadata, norm_weight, cos_sin, config, kv_scale
    )
    tokens = metadata.positions.shape[0]
    kv_score = checks.array("kv_score", kv_score, (tokens, 2 * config.width), checks.FLOATS)
    ape = checks.array("ape", ape, (config.compress_ratio, config.width))
    state_cache, kv_cache = _op(
        kv_score,
        ape,
        state_cache,
        kv_cache,
        metadata,
        norm_weight,
        cos_sin,
        kv_scale,
        implementation=implementation,
        config=config,
        save=save,
    )
    return state_cache, kv_cache


def implement(kv_score, ape, state_cache, kv_cache, metadata, norm_weight, cos_sin, kv_scale, *, config, save):
    """The op in plain JAX."""
    if kv_score.shape[0] == 0:
        return state_cache, kv_cache
    kv_cache = store_keys(kv_score, ape, state_cache, kv_cache, metadata, norm_weight, cos_sin, kv_scale, config=config)
    states = None
    if config.state == "online":
        states = online.saved_states(kv_score, ape, state_cache, metadata, config)
    # The windows are read before the states are written, so that XLA need not copy the state cache.
    state_cache, kv_cache, states = jax.lax.optimization_barrier((state_cache, kv_cache, states))
    if states is not None:
        return set_rows(state_cache, *states), kv_cache
    if save == "all":
        row, positions, slots = slice(None), metadata.positions, metadata.slot_mapping
    else:
        row, positions, slots = metadata.saving.T
        slots = jnp.where((row >= 0) & (row < kv_score.shape[0]), slots, -1)
    kv, score = jnp.split(kv_score[row], 2, axis=1)
    return (store_states(state_cache, kv, score, ape, positions, slots), kv_cache)
