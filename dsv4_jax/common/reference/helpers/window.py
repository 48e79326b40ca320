"""From a window of states to a stored key in plain JAX: gather, softmax-sum, RMSNorm, RoPE, quantize, store."""

import jax.numpy as jnp

from dsv4_jax.common.reference.helpers import online
from dsv4_jax.common.reference.helpers.rms_norm import rms_norm
from dsv4_jax.common.reference.helpers.rope import rope


def store_keys(kv_score, ape, state_cache, kv_cache, metadata, norm_weight, cos_sin, kv_scale, *, config):
    """Makes the keys of the closing windows, quantizes and stores them."""
    if not (metadata.closing.size and kv_cache.size and cos_sin.size):
        return kv_cache
    keys, slots = normalized_keys(kv_score, ape, state_cache, metadata, norm_weight, cos_sin, config=config)
    values, scales = config.format.pack(keys, kv_scale)
    return config.format.store(kv_cache, values, scales, slots, config.kv_page_rows)


def normalized_keys(kv_score, ape, state_cache, metadata, norm_weight, cos_sin, *, config):
    """The keys of the windows that this batch closes.

    Args:
      kv_score: `[T, 2W]`; None if every row of a window comes from the state cache.
      ape: `[m, W]` float32, or None with `kv_score`.
      state_cache: `[pages, page_rows, config.state_width]` float32.
      metadata: `CompressorMetadata`.
      norm_weight: `[D]`.
      cos_sin: `[P, 64]` float32.
      config: `CompressorConfig`.

    Returns:
      keys `[N, D]` float32 and their cache slots `[N]` int32; -1 if the entry of `metadata.closing` names no window.
    """
    row, position, slot, in_batch = metadata.closing.T
    m, tokens = config.compress_ratio, metadata.positions.shape[0]
    # The plan is data and can be wrong: such an entry writes nothing.
    closes = (row >= 0) & (row < tokens) & (position >= 0) & ((position + 1) % m == 0)
    closes &= position // m * m < cos_sin.shape[0]
    if kv_score is not None:
        closes &= in_batch >= 1  # the closing token itself
    if config.state == "online":
        c = online.window_sums(kv_score, ape, state_cache, metadata, config)
    else:
        kv, score, present = _window(kv_score, ape, state_cache, metadata.window_slots, row, in_batch, config)
        c = _softmax_sum(kv, score, present)
        closes &= present.any(axis=1)
    keys = rms_norm(c, norm_weight, config.eps)
    # At the position of the window's first own token.
    return rope(keys, cos_sin, position // m * m), jnp.where(closes, slot, -1)


def _window(kv_score, ape, state_cache, slots, row, in_batch, config):
    """kv and score `[N, n, D]` of each window, and which of its rows exist, `[N, n]`."""
    m, d, w = config.compress_ratio, config.head_dim, config.width
    pages, page_rows, _ = state_cache.shape
    present = (slots >= 0) & (slots // page_rows < pages)
    if pages:
        rows = state_cache.at[jnp.where(present, slots // page_rows, pages), slots % page_rows]
        rows = rows.get(mode="fill", fill_value=0)
    else:
        rows = jnp.zeros((*slots.shape, 2 * w), jnp.float32)
    kv, score = _halves(rows, config)
    if kv_score is not None and kv_score.shape[0]:
        back = jnp.arange(config.window - 1, -1, -1, dtype=jnp.int32)
        taken = row[:, None] - back
        from_batch = (back < in_batch[:, None]) & (taken >= 0)
        batch_kv, batch_score = _halves(kv_score.at[jnp.maximum(taken, 0)].get(mode="clip"), config)
        bias = ape.reshape(m, -1, d)
        bias = jnp.concatenate([bias[:, i] for i in range(w // d)])
        kv = jnp.where(from_batch[..., None], batch_kv, kv)
        score = jnp.where(from_batch[..., None], batch_score + bias, score)
        present |= from_batch
    return kv, score, present


def _halves(rows, config):
    """The columns of kv and score that a window reads. With overlap, its older half reads the first D."""
    d, w, m = config.head_dim, config.width, config.compress_ratio
    rows = rows.astype(jnp.float32)
    if not config.overlap:
        return rows[..., :d], rows[..., w:]
    old, new = rows[:, :m], rows[:, m:]
    kv = jnp.concatenate([old[..., :d], new[..., d:w]], axis=1)
    return kv, jnp.concatenate([old[..., w : w + d], new[..., w + d :]], axis=1)


def _softmax_sum(kv, score, present):
    """Per channel, the sum over the window of softmax times kv."""
    score = jnp.where(present[..., None], score, -jnp.inf)
    weight = jnp.exp(score - score.max(axis=1, keepdims=True))
    return (weight * kv).sum(axis=1) / weight.sum(axis=1)
