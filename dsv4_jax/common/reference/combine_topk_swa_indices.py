"""`combine_topk_swa_indices` in plain JAX."""

import jax.numpy as jnp


def implement(
    topk_indices, query_start_loc, seq_lens, gather_lens, *, window_size, compress_ratio, topk, M, N, outputs
):
    """See `dsv4_jax.combine_topk_swa_indices`."""
    tokens, requests = topk_indices.shape[0], seq_lens.shape[0]
    indices, lens = outputs
    if requests == 0:
        return jnp.full(indices.shape, -1, jnp.int32), jnp.zeros(lens.shape, jnp.int32)
    token = query_start_loc[0] + jnp.arange(tokens, dtype=jnp.int32)
    ends = query_start_loc[1:]
    # Counted, not searched for: defined whatever the order of the ends.
    b = jnp.minimum((ends[None, :] <= token[:, None]).sum(axis=1, dtype=jnp.int32), requests - 1)
    seq_len, gather_len = seq_lens[b], gather_lens[b]
    after = ends[b] - token  # tokens from this one to the request's last
    valid = (query_start_loc[b] <= token) & (token < ends[b]) & (after >= 1) & (after <= seq_len)
    valid &= (gather_len >= 0) & (gather_len <= seq_len)
    position = jnp.where(valid, seq_len - after, -1)
    closed = ((position + 1) // compress_ratio)[:, None]  # keys whose tokens are all known to the query
    compressed = jnp.minimum(closed[:, 0], topk)
    window = jnp.minimum(position + 1, window_size)

    column = jnp.arange(indices.shape[1], dtype=jnp.int32)
    local = jnp.pad(topk_indices[:, :topk], [(0, 0), (0, indices.shape[1] - topk)])
    is_compressed = (column < compressed[:, None]) & (local >= 0) & (local < jnp.minimum(closed, N))
    gathered = position - window + 1 - (seq_len - gather_len) - compressed
    gathered = gathered[:, None] + column  # the row among the gathered tokens
    is_window = (column >= compressed[:, None]) & (column < (compressed + window)[:, None])
    is_window &= (gathered >= 0) & (gathered < M - N)
    row = jnp.where(is_window, N + gathered, jnp.where(is_compressed, local, -1))
    return jnp.where(row >= 0, row + (M * b)[:, None], -1), compressed + window
