"""The online state: the maximum of an open window's scores and sums over its rows, instead of the rows themselves.

A state row is `[maximum, sum, weighted]`, each `[W]` float32. Per channel, these are the largest score,
`Σ exp(score - maximum)` and `Σ exp(score - maximum) · kv`. Before any row, the state is `[-inf, 0, 0]`. The window's
softmax-sum is `weighted / sum`.
"""

import jax
import jax.numpy as jnp


def window_sums(kv_score, ape, state_cache, metadata, config) -> jax.Array:
    """The softmax-sum `[N, W]` of each window in `metadata.closing`."""
    row, position, _, in_batch = metadata.closing.T
    before = jnp.where(in_batch < config.compress_ratio, metadata.window_slots[:, 0], -1)
    _, total, weighted = _states(kv_score, ape, state_cache, row, position, in_batch, before, config)
    return weighted / total


def saved_states(kv_score, ape, state_cache, metadata, config) -> tuple[jax.Array, jax.Array]:
    """The states `[S, 3W]` after the tokens in `metadata.saving`, and their slots `[S]`; -1 for no state."""
    row, position, slot, in_batch = metadata.saving.T
    # The state before lies in the same page.
    page_rows = config.page_rows
    before = slot // page_rows * page_rows + (position - in_batch) % page_rows
    before = jnp.where((slot >= 0) & (in_batch <= position % config.compress_ratio), before, -1)
    states = _states(kv_score, ape, state_cache, row, position, in_batch, before, config)
    real = (row >= 0) & (row < kv_score.shape[0]) & (position >= 0) & (in_batch >= 1)
    return jnp.concatenate(states, axis=1), jnp.where(real, slot, -1)


def _states(kv_score, ape, state_cache, row, position, in_batch, before, config):
    """Maximum, sum and weighted sum `[N, W]` of windows up to a batch row.

    Args:
      row, position: `[N]`, of the last row.
      in_batch: `[N]`, how many of the window's rows up to this one are in the batch.
      before: `[N]`, slot of the state before them, -1 where there is none.
    """
    m, w = config.compress_ratio, config.width
    pages, page_rows, _ = state_cache.shape
    inside = (before >= 0) & (before // page_rows < pages)
    history = jnp.zeros((before.shape[0], 3 * w), jnp.float32)
    if pages:
        history = state_cache.at[jnp.where(inside, before // page_rows, pages), before % page_rows]
        history = history.get(mode="fill", fill_value=0)
    maximum, total, weighted = jnp.split(history, 3, axis=1)
    maximum = jnp.where(inside[:, None], maximum, -jnp.inf)

    back = jnp.arange(min(m, kv_score.shape[0]), dtype=jnp.int32)
    taken, element = row[:, None] - back, position[:, None] % m - back
    present = ((back < in_batch[:, None]) & (taken >= 0) & (element >= 0))[..., None]
    rows = kv_score.at[jnp.maximum(taken, 0)].get(mode="clip").astype(jnp.float32)
    kv = jnp.where(present, rows[..., :w], 0)
    score = jnp.where(present, rows[..., w:] + ape[jnp.maximum(element, 0)], -jnp.inf)

    largest = jnp.maximum(maximum, score.max(axis=1))
    # Where all scores are -inf so is the maximum, and their weights are 0.
    base = jnp.where(largest == -jnp.inf, 0, largest)
    share, weight = jnp.exp(maximum - base), jnp.exp(score - base[:, None])
    return largest, share * total + weight.sum(axis=1), share * weighted + (weight * kv).sum(axis=1)
