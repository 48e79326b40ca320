"""The ops around the compressor as workloads: for each a function of T that makes what the timer runs."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from dsv4_jax.cache import CACHE_FORMATS
from dsv4_jax.common.reference.combine_topk_swa_indices import combine_topk_swa_indices
from dsv4_jax.common.reference.compute_global_topk_indices_and_lens import compute_global_topk_indices_and_lens
from dsv4_jax.common.reference.fused_q_kv_rmsnorm import fused_q_kv_rmsnorm
from dsv4_jax.common.reference.fused_qnorm_rope_kv_rope_quant_insert import fused_qnorm_rope_kv_rope_quant_insert
from dsv4_jax.common.reference.prepare_megamoe_inputs import prepare_megamoe_inputs

# Of DeepSeek-V4 Flash.
HIDDEN = 4096
EXPERTS, EXPERTS_PER_TOKEN = 256, 6
HEADS, HEAD_DIM, ROPE_DIM, Q_LORA_RANK = 64, 512, 64, 1024
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


def _fused_q_kv_rmsnorm(tokens, key):
    keys = jax.random.split(key, 4)
    inputs = (
        jax.random.normal(keys[0], (tokens, Q_LORA_RANK), jnp.bfloat16),
        jax.random.normal(keys[1], (tokens, HEAD_DIM), jnp.bfloat16),
        jax.random.uniform(keys[2], (Q_LORA_RANK,)),
        jax.random.uniform(keys[3], (HEAD_DIM,)),
    )
    return _once_each(lambda inputs: fused_q_kv_rmsnorm(*inputs), inputs)


def _fused_qnorm_rope_kv_rope_quant_insert(tokens, key):
    """Keys of one request, into pages in any order."""
    keys = jax.random.split(key, 4)
    fmt = CACHE_FORMATS["fp8_ds_mla"]
    pages = -(-tokens // PAGE_ROWS)
    table = jax.random.permutation(keys[3], pages).astype(jnp.int32)
    positions = jnp.arange(tokens, dtype=jnp.int32)
    inputs = (
        jax.random.normal(keys[0], (tokens, HEADS, HEAD_DIM), jnp.bfloat16),
        jax.random.normal(keys[1], (tokens, HEAD_DIM), jnp.bfloat16),
        table[positions // PAGE_ROWS] * PAGE_ROWS + positions % PAGE_ROWS,
        positions,
        jax.random.normal(keys[2], (tokens, ROPE_DIM)),
    )
    q, kv, slots, _, cos_sin = inputs
    carry = jnp.zeros_like(q), fmt.allocate(pages, PAGE_ROWS)

    def run(carry, inputs):
        q, kv, *where = inputs
        return fused_qnorm_rope_kv_rope_quant_insert(q, kv, carry[1], *where, page_rows=PAGE_ROWS)

    moved = 2 * q.nbytes + kv.nbytes + tokens * fmt.row_bytes + 2 * slots.nbytes + cos_sin.nbytes
    return Workload(run, carry, inputs, moved)


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
    "fused_q_kv_rmsnorm": _fused_q_kv_rmsnorm,
    "fused_qnorm_rope_kv_rope_quant_insert": _fused_qnorm_rope_kv_rope_quant_insert,
    "prepare_megamoe_inputs": _prepare_megamoe_inputs,
}
