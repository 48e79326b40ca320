"""`dequantize_and_gather_k_cache` in plain JAX."""

import jax.numpy as jnp

from dsv4_jax.cache import CACHE_FORMATS


def implement(
    cache, seq_lens, block_table, gather_lens, offset, out, kv_scale, *, cache_format, page_rows
):  # fmt: skip
    """See `dsv4_jax.dequantize_and_gather_k_cache`."""
    columns = block_table.shape[1]
    if not (out.size and cache.size and columns):
        return (out,)
    pages = cache.shape[0]
    seq_lens, gather_lens = seq_lens[:, None], gather_lens[:, None]
    i = jnp.arange(out.shape[1], dtype=jnp.int32) - offset
    row = seq_lens - gather_lens + i
    wanted = (offset >= 0) & (i >= 0) & (i < gather_lens) & (seq_lens >= 0) & (row >= 0)
    column = row // page_rows
    page = jnp.take_along_axis(block_table, jnp.clip(column, 0, columns - 1), axis=1)
    wanted &= (column < columns) & (page >= 0) & (page < pages)
    slots = jnp.where(wanted, page * page_rows + row % page_rows, -1)
    keys = CACHE_FORMATS[cache_format].unpack(
        cache, slots.reshape(-1), page_rows, scale=kv_scale, dtype=jnp.bfloat16
    )  # fmt: skip
    return (jnp.where(wanted[..., None], keys.reshape(out.shape), out),)
