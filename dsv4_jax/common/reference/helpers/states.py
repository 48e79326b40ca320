"""Rows of the state cache, written in plain JAX."""

import jax.numpy as jnp


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
