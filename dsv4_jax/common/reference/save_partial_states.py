"""`save_partial_states`: a token's kv and biased score go into its row of the state cache."""

import jax
import jax.numpy as jnp

from dsv4_jax import checks
from dsv4_jax.op import Op

_op = Op("save_partial_states", updates=(4,))


def save_partial_states(
    kv: jax.Array,
    score: jax.Array,
    ape: jax.Array,
    positions: jax.Array,
    state_cache: jax.Array,
    slot_mapping: jax.Array,
    *,
    compress_ratio: int,
    implementation: str | None = None,
) -> jax.Array:
    """Writes `kv[t]` and `score[t] + ape[positions[t] % compress_ratio]` at each token's slot.

    Args:
      kv: `[T, W]` float32 or bfloat16.
      score: `[T, W]`, of kv's dtype.
      ape: `[compress_ratio, W]` float32, the position bias.
      positions: `[T]` int32; a token with a negative position writes nothing.
      state_cache: `[pages, page_rows, 2W]` float32, kv in the first half of a row; updated in place when donated.
      slot_mapping: `[T]` int32, `page * page_rows + row`, distinct; a slot outside the cache writes nothing.
      compress_ratio: m.
      implementation: "xla", "triton" or None: the platform switch chooses.

    Returns:
      The state cache.
    """
    checks.at_least("compress_ratio", compress_ratio, 1)
    tokens, width = checks.array("kv", kv, ("T", "W"), checks.FLOATS).shape
    kv = jnp.asarray(kv)
    score = checks.array("score", score, (tokens, width), (kv.dtype,))
    ape = checks.array("ape", ape, (compress_ratio, width))
    positions = checks.integers("positions", positions, (tokens,))
    state_cache = checks.array("state_cache", state_cache, ("pages", "page_rows", 2 * width))
    slot_mapping = checks.integers("slot_mapping", slot_mapping, (tokens,))
    (state_cache,) = _op(kv, score, ape, positions, state_cache, slot_mapping, implementation=implementation)
    return state_cache


def implement(kv, score, ape, positions, state_cache, slot_mapping):
    """The op in plain JAX."""
    return (store_states(state_cache, kv, score, ape, positions, slot_mapping),)


def store_states(state_cache, kv, score, ape, positions, slots):
    """Writes kv and the biased score at their slots; a slot outside the cache or a negative position writes nothing."""
    score = score.astype(jnp.float32) + ape[positions % ape.shape[0]]
    rows = jnp.concatenate([kv.astype(jnp.float32), score], axis=1)
    return set_rows(state_cache, rows, jnp.where(positions >= 0, slots, -1))


def set_rows(state_cache, rows, slots):
    """Writes state rows at their slots; a slot outside the cache writes nothing."""
    pages, page_rows, _ = state_cache.shape
    inside = (slots >= 0) & (slots // page_rows < pages)
    page = jnp.where(inside, slots // page_rows, pages)
    return state_cache.at[page, slots % page_rows].set(rows, mode="drop", unique_indices=True)
