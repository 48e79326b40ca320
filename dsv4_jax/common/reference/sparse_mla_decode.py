"""`sparse_mla_decode` in plain JAX."""

import jax.numpy as jnp

from dsv4_jax.cache import CACHE_FORMATS
from dsv4_jax.common.reference.helpers.attention import attend, finish


def implement(
    q, window_cache, window_indices, window_lens, sink, cache, indices, lens, kv_scale, positions, cos_sin,
    *, cache_format, window_page_rows, page_rows, softmax_scale, **rest,
):  # fmt: skip
    """See `dsv4_jax.sparse_mla_decode`."""
    fmt = CACHE_FORMATS[cache_format]

    def load_from(cache, page_rows, indices, length):
        if cache.size == 0:
            return jnp.zeros((*indices.shape, q.shape[-1]), jnp.bfloat16), jnp.zeros(indices.shape, bool)
        counts = (jnp.arange(indices.shape[0]) < length) & (indices >= 0) & (indices // page_rows < cache.shape[0])
        slots = jnp.where(counts, indices, -1)
        return fmt.unpack(cache, slots, page_rows, scale=kv_scale, dtype=jnp.bfloat16), counts

    def load(rows):
        keys, counts = load_from(window_cache, window_page_rows, *rows["window"])
        if cache is None:
            return keys, counts
        more, more_count = load_from(cache, page_rows, *rows["second"])
        return jnp.concatenate([keys, more]), jnp.concatenate([counts, more_count])

    rows = {"window": (window_indices, window_lens)}
    if cache is not None:
        rows["second"] = (indices, lens)
    o, lse = attend(q, sink, rows, load, softmax_scale=softmax_scale)
    return finish(o, lse, positions, cos_sin, **rest)
