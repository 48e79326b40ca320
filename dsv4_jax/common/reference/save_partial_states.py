"""`save_partial_states` in plain JAX."""

from dsv4_jax.common.reference.helpers.states import store_states


def implement(kv, score, ape, positions, state_cache, slot_mapping):
    """See `dsv4_jax.save_partial_states`."""
    return (store_states(state_cache, kv, score, ape, positions, slot_mapping),)
