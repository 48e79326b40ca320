"""`sparse_mla_prefill` in plain JAX."""

import jax.numpy as jnp

from dsv4_jax.common.reference.helpers.attention import attend, finish


def implement(q, kv, indices, lens, sink, positions, cos_sin, *, softmax_scale, **rest):
    """See `dsv4_jax.sparse_mla_prefill`."""

    def load(rows):
        indices, length = rows
        if kv.size == 0:
            return jnp.zeros((*indices.shape, q.shape[-1]), jnp.bfloat16), jnp.zeros(indices.shape, bool)
        counts = (jnp.arange(indices.shape[0]) < length) & (indices >= 0) & (indices < kv.shape[0])
        # A gather counts negative indices from the end; one past the end is filled.
        keys = kv.at[jnp.where(counts, indices, kv.shape[0])].get(mode="fill", fill_value=0)
        return keys, counts

    o, lse = attend(q, sink, (indices, lens), load, softmax_scale=softmax_scale)
    return finish(o, lse, positions, cos_sin, **rest)
