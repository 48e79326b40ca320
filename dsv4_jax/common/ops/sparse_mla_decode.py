"""`sparse_mla_decode` in Triton."""

from dsv4_jax.common.ops.helpers import attention
from dsv4_jax.common.ops.helpers.attention import Rows


def implement(
    q, window_cache, window_indices, window_lens, sink, cache, indices, lens, kv_scale, positions, cos_sin,
    *, window_page_rows, page_rows, **rest,
):  # fmt: skip
    """See `dsv4_jax.sparse_mla_decode`."""
    rows = [Rows(window_cache, window_page_rows, window_indices, window_lens)]
    if cache is not None:
        rows.append(Rows(cache, page_rows, indices, lens))
    return attention.implement(q, sink, rows, kv_scale, positions, cos_sin, **rest)
