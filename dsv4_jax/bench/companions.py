"""The ops around the compressor as workloads: for each a function of T that makes what the timer runs."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from dsv4_jax.cache import CACHE_FORMATS
from dsv4_jax.common.reference.combine_topk_swa_indices import combine_topk_swa_indices
from dsv4_jax.common.reference.compute_global_topk_indices_and_lens import compute_global_topk_indices_and_lens
from dsv4_jax.common.reference.dequantize_and_gather_k_cache import dequantize_and_gather_k_cache
from dsv4_jax.common.reference.fused_indexer_q_rope_quant import fused_indexer_q_rope_quant
from dsv4_jax.common.reference.fused_inv_rope_fp8_quant import fused_inv_rope_fp8_quant
from dsv4_jax.common.reference.fused_q_kv_rmsnorm import fused_q_kv_rmsnorm
from dsv4_jax.common.reference.fused_qnorm_rope_kv_rope_quant_insert import fused_qnorm_rope_kv_rope_quant_insert
from dsv4_jax.common.reference.prepare_megamoe_inputs import prepare_megamoe_inputs
from dsv4_jax.common.reference.quantize_and_insert_k_cache import quantize_and_insert_k_cache

# Of DeepSeek-V4 Flash.
HIDDEN = 4096
EXPERTS, EXPERTS_PER_TOKEN = 256, 6
HEADS, HEAD_DIM, ROPE_DIM, Q_LORA_RANK = 64, 512, 64, 1024
INDEX_HEADS, INDEX_HEAD_DIM, OUTPUT_GROUPS = 64, 128, 8
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
    """`op(inputs) -> results` as `run`, whose smallest input waits for the last call's results.

    So XLA does every call of a chain, one after the other: a barrier it drops before it looks for equal calls.
    """

    def run(carry, inputs):
        last = jax.tree.leaves(carry)[0]
        never = last[(0,) * last.ndim].astype(jnp.float32) == 0.12345  # which no result is, but XLA cannot know
        leaves, tree = jax.tree.flatten(inputs)
        smallest = min(range(len(leaves)), key=lambda i: leaves[i].nbytes)
        leaves[smallest] = jnp.where(never, jnp.zeros_like(leaves[smallest]), leaves[smallest])
        return op(jax.tree.unflatten(tree, leaves))

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


def _dequantize_and_gather_k_cache(tokens, key, cache_format="fp8_ds_mla"):
    """All rows of four requests, of T together, from pages in any order."""
    keys = jax.random.split(key, 2)
    fmt = CACHE_FORMATS[cache_format]
    rows = -(-tokens // 4)
    columns = -(-rows // PAGE_ROWS)
    cache = fmt.allocate(4 * columns, PAGE_ROWS)
    bits = jax.random.bits(keys[0], cache.shape, f"uint{8 * cache.dtype.itemsize}")
    inputs = (
        jax.lax.bitcast_convert_type(bits, cache.dtype),
        jnp.full(4, rows, jnp.int32),
        jax.random.permutation(keys[1], 4 * columns).astype(jnp.int32).reshape(4, columns),
    )
    carry = jnp.zeros((4, rows, fmt.head_dim), jnp.bfloat16)
    options = {"page_rows": PAGE_ROWS, "cache_format": cache_format, "kv_scale": 0.5 if fmt.needs_scale else None}

    def run(carry, inputs):
        return dequantize_and_gather_k_cache(*inputs, out=carry, **options)

    return Workload(run, carry, inputs, carry.nbytes + 4 * rows * fmt.row_bytes + inputs[2].nbytes)


def _fused_indexer_q_rope_quant(tokens, key, use_fp4=False):
    keys = jax.random.split(key, 3)
    inputs = (
        jnp.arange(tokens, dtype=jnp.int32),
        jax.random.normal(keys[0], (tokens, INDEX_HEADS, INDEX_HEAD_DIM), jnp.bfloat16),
        jax.random.normal(keys[1], (tokens, ROPE_DIM)),
        jax.random.normal(keys[2], (tokens, INDEX_HEADS), jnp.bfloat16),
    )
    options = {"softmax_scale": INDEX_HEAD_DIM**-0.5, "head_scale": INDEX_HEADS**-0.5, "use_fp4": use_fp4}
    return _once_each(lambda inputs: fused_indexer_q_rope_quant(*inputs, **options), inputs)


def _fused_inv_rope_fp8_quant(tokens, key, **options):
    keys = jax.random.split(key, 2)
    inputs = (
        jax.random.normal(keys[0], (tokens, HEADS, HEAD_DIM), jnp.bfloat16),
        jnp.arange(tokens, dtype=jnp.int32),
        jax.random.normal(keys[1], (tokens, ROPE_DIM)),
    )
    options |= {"n_groups": OUTPUT_GROUPS, "heads_per_group": HEADS // OUTPUT_GROUPS}
    return _once_each(lambda inputs: fused_inv_rope_fp8_quant(*inputs, **options), inputs)


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


def _quantize_and_insert_k_cache(tokens, key, cache_format="fp8_ds_mla"):
    """Keys into pages in any order."""
    keys = jax.random.split(key, 2)
    fmt = CACHE_FORMATS[cache_format]
    pages = -(-tokens // PAGE_ROWS)
    row = jnp.arange(tokens, dtype=jnp.int32)
    table = jax.random.permutation(keys[1], pages).astype(jnp.int32)
    inputs = (
        jax.random.normal(keys[0], (tokens, fmt.head_dim), jnp.bfloat16),
        table[row // PAGE_ROWS] * PAGE_ROWS + row % PAGE_ROWS,
    )
    options = {"page_rows": PAGE_ROWS, "cache_format": cache_format, "kv_scale": 0.5 if fmt.needs_scale else None}

    def run(carry, inputs):
        k, slots = inputs
        return quantize_and_insert_k_cache(k, carry, slots, **options)

    k, slots = inputs
    moved = k.nbytes + slots.nbytes + tokens * fmt.row_bytes
    return Workload(run, fmt.allocate(pages, PAGE_ROWS), inputs, moved)


def _once_each(op, inputs):
    """The workload of an op that reads all its inputs once, and returns new arrays."""
    carry = op(inputs)
    moved = sum(array.nbytes for array in jax.tree.leaves((inputs, carry)))
    return Workload(once_each(op), carry, inputs, moved)


# Name of the op to a function `(tokens, key) -> Workload` on fresh random data; sorted by name.
WORKLOADS: dict[str, Callable] = {
    "combine_topk_swa_indices": _combine_topk_swa_indices,
    "compute_global_topk_indices_and_lens": _compute_global_topk_indices_and_lens,
    "dequantize_and_gather_k_cache": _dequantize_and_gather_k_cache,
    "fused_indexer_q_rope_quant": _fused_indexer_q_rope_quant,
    "fused_inv_rope_fp8_quant": _fused_inv_rope_fp8_quant,
    "fused_q_kv_rmsnorm": _fused_q_kv_rmsnorm,
    "fused_qnorm_rope_kv_rope_quant_insert": _fused_qnorm_rope_kv_rope_quant_insert,
    "prepare_megamoe_inputs": _prepare_megamoe_inputs,
    "quantize_and_insert_k_cache": _quantize_and_insert_k_cache,
}
