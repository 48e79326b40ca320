"""`compute_global_topk_indices_and_lens` in plain JAX."""

import jax.numpy as jnp


def implement(topk_indices, token_to_req, block_table, is_valid_token, *, page_rows, outputs):
    """See `dsv4_jax.compute_global_topk_indices_and_lens`."""
    requests, columns = block_table.shape
    if block_table.size == 0:
        return jnp.full_like(topk_indices, -1), jnp.zeros_like(token_to_req)
    req, column = token_to_req[:, None], topk_indices // page_rows
    inside = (topk_indices >= 0) & (column < columns) & (req >= 0) & (req < requests)
    page = block_table[jnp.where(inside, req, 0), jnp.where(inside, column, 0)]
    inside &= (page >= 0) & (page <= last_page(page_rows))
    indices = jnp.where(inside, page * page_rows + topk_indices % page_rows, -1)
    return indices, jnp.where(is_valid_token, inside.sum(axis=1, dtype=jnp.int32), 0)


def last_page(page_rows: int) -> int:
    """The last page all of whose rows have an int32 number."""
    return 2**31 // page_rows - 1
