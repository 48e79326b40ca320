"""The ops around the compressor as workloads: for each a function of T that makes what the timer runs."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from dsv4_jax.common.reference.combine_topk_swa_indices import combine_topk_swa_indices
from dsv4_jax.common.reference.compute_global_topk_indices_and_lens import compute_global_topk_indices_and_lens
from dsv4_jax.common.reference.prepare_megamoe_inputs import prepare_megamoe_inputs

# Of DeepSeek-V4 Flash.
HIDDEN = 4096
EXPERTS, EXPERTS_PER_TOKEN = 256, 6
TOPK, WINDOW, RATIO, PAGE_ROWS = 512, 128, 4, 64


class Workload(NamedTuple):
    """One op on one batch.

    Attributes:
      run: `run(carry, inputs) -> carry`; the carry is what the op updates in place, or what it returned last.
      carry, inputs: pytrees.
      bytes: that the op must read and write.
    """

    run: Callable
    carry: object
    inputs: object
    bytes: int


def once_each(op: Callable) -> Callable:
    """`op(inputs) -> results` as `run`: tied to the last call's results, so that XLA does every call of a chain."""

    def run(carry, inputs):
        _, inputs = jax.lax.optimization_barrier((carry, inputs))
        return op(inputs)

    return run


def _combine_topk_swa_indices(tokens, key):
    """One request that has TOPK compressed rows before this batch."""
    before = TOPK * RATIO
    gathered, compressed = tokens + WINDOW - 1, (before + tokens) // RATIO
    inputs = (
        jax.random.randint(key, (tokens, TOPK), 0, compressed, jnp.int32),
        jnp.array([0, tokens], jnp.int32),
        jnp.array([before + tokens], jnp.int32),
        jnp.array([gathered], jnp.int32),
    )

    def op(inputs):
        topk, starts, seq_lens, gather_lens = inputs
        buffer = compressed + gathered, compressed
        return combine_topk_swa_indices(topk, starts, seq_lens, gather_lens, WINDOW, RATIO, TOPK, *buffer)

    return _once_each(op, inputs)


def _compute_global_topk_indices_and_lens(tokens, key):
    """One request that has at least TOPK compressed rows."""
    keys = jax.random.split(key, 2)
    pages = max(TOPK, tokens // RATIO) // PAGE_ROWS
    inputs = (
        jax.random.randint(keys[0], (tokens, TOPK), 0, pages * PAGE_ROWS, jnp.int32),
        jnp.zeros(tokens, jnp.int32),
        jax.random.permutation(keys[1], pages).astype(jnp.int32)[None],
        jnp.ones(tokens, bool),
    )

    def op(inputs):
        topk, token_to_req, block_table, is_valid_token = inputs
        return compute_global_topk_indices_and_lens(topk, token_to_req, block_table, PAGE_ROWS, is_valid_token)

    return _once_each(op, inputs)


def _prepare_megamoe_inputs(tokens, key):
    keys = jax.random.split(key, 3)
    inputs = (
        jax.random.normal(keys[0], (tokens, HIDDEN), jnp.bfloat16),
        jax.random.uniform(keys[1], (tokens, EXPERTS_PER_TOKEN)),
        jax.random.randint(keys[2], (tokens, EXPERTS_PER_TOKEN), 0, EXPERTS, jnp.int32),
        jnp.zeros(tokens, bool),
    )
    return _once_each(lambda inputs: prepare_megamoe_inputs(*inputs), inputs)


def _once_each(op, inputs):
    """The workload of an op that reads all its inputs once, and returns new arrays."""
    carry = op(inputs)
    moved = sum(array.nbytes for array in jax.tree.leaves((inputs, carry)))
    return Workload(once_each(op), carry, inputs, moved)


# Name of the op to a function `(tokens, key) -> Workload` on fresh random data; sorted by name.
WORKLOADS: dict[str, Callable] = {
    "combine_topk_swa_indices": _combine_topk_swa_indices,
    "compute_global_topk_indices_and_lens": _compute_global_topk_indices_and_lens,
    "prepare_megamoe_inputs": _prepare_megamoe_inputs,
}
