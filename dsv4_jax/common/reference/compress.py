"""`compress` in plain JAX."""

import jax
import jax.numpy as jnp

from dsv4_jax.common.reference.helpers import online
from dsv4_jax.common.reference.helpers.states import set_rows, store_states
from dsv4_jax.common.reference.helpers.window import store_keys


def implement(kv_score, ape, state_cache, kv_cache, metadata, norm_weight, cos_sin, kv_scale, *, config, save):
    """See `dsv4_jax.compress`."""
    if kv_score.shape[0] == 0:
        return state_cache, kv_cache
    kv_cache = store_keys(kv_score, ape, state_cache, kv_cache, metadata, norm_weight, cos_sin, kv_scale, config=config)
    states = None
    if config.state == "online":
        states = online.saved_states(kv_score, ape, state_cache, metadata, config)
    # The windows are read before the states are written, so that XLA need not copy the state cache.
    state_cache, kv_cache, states = jax.lax.optimization_barrier((state_cache, kv_cache, states))
    if states is not None:
        return set_rows(state_cache, *states), kv_cache
    if save == "all":
        row, positions, slots = slice(None), metadata.positions, metadata.slot_mapping
    else:
        row, positions, slots = metadata.saving.T
        slots = jnp.where((row >= 0) & (row < kv_score.shape[0]), slots, -1)
    kv, score = jnp.split(kv_score[row], 2, axis=1)
    return (store_states(state_cache, kv, score, ape, positions, slots), kv_cache)
