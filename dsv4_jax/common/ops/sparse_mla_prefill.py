"""`sparse_mla_prefill` in Triton: the gathered buffer is a bfloat16 cache whose pages have one row."""

from dsv4_jax.common.ops.helpers import attention
from dsv4_jax.common.ops.helpers.attention import Rows


def implement(q, kv, indices, lens, sink, positions, cos_sin, **rest):
    """See `dsv4_jax.sparse_mla_prefill`."""
    rows = [Rows(kv, 1, indices, lens)]
    return attention.implement(q, sink, rows, None, positions, cos_sin, cache_format="bf16", **rest)
