"""The table of what is measured: an entry per op, with its inputs, its bytes and operations, and the call.

An op is added by one function under `@op(...)`: it draws the inputs of a case and returns a `Workload`.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import dsv4_jax
from bench import batches
from dsv4_jax import CACHE_FORMATS, CompressorConfig

CONFIGS = {
    "csa": CompressorConfig.csa(),
    "hca": CompressorConfig.hca(),
    "hca_online": CompressorConfig.hca(state="online"),
    "indexer_fp8": CompressorConfig.indexer("indexer_fp8"),
    "indexer_mxfp4": CompressorConfig.indexer("indexer_mxfp4"),
    "csa_bf16": CompressorConfig.csa("bf16"),
    "csa_fp8": CompressorConfig.csa("fp8"),
    "hca_bf16": CompressorConfig.hca("bf16"),
    "hca_fp8": CompressorConfig.hca("fp8"),
}
COMPRESSORS = ("csa", "hca", "hca_online", "indexer_fp8", "indexer_mxfp4")  # measured by default
WITH_ROWS = tuple(name for name, config in CONFIGS.items() if config.state == "rows")

PREFILL = (("prefill", 2048), ("prefill", 8192), ("prefill", 65536))
REPORT = (*PREFILL, ("decode", 1), ("decode", 512), ("closing", 512))
TOKENS = (("tokens", 64), ("tokens", 8192))

# DeepSeek-V4 Flash.
HIDDEN = 4096
EXPERTS, EXPERTS_PER_TOKEN = 256, 6
HEADS, HEAD_DIM, ROPE_DIM, Q_LORA_RANK = 64, 512, 64, 1024
INDEX_HEADS, INDEX_HEAD_DIM, OUTPUT_GROUPS = 64, 128, 8
TOPK, WINDOW, RATIO, PAGE_ROWS = 512, 128, 4, 64
FP8 = CACHE_FORMATS["fp8_ds_mla"]


class Workload(NamedTuple):
    """One op on one batch of fresh data.

    Attributes:
      run: `run(carry, inputs) -> carry`. The carry is what the op updates in place, and what it returned last.
      carry, inputs: pytrees of arrays.
      bytes: that the op must move: each input read once, each result written once.
      operations: floating-point operations of matrix products in bfloat16, two per multiply-add; in fp8 half as many.
    """

    run: Callable
    carry: object
    inputs: object
    bytes: int
    operations: int = 0


class Case(NamedTuple):
    """One measurement: an op, a kind of batch and its tokens, and where the op has them, compressor and dtype.

    `dtype` is that of `kv_score`. Without `implementation`, the platform switch chooses.
    """

    op: str
    kind: str
    tokens: int
    compressor: str = "-"
    dtype: str = "-"
    implementation: str | None = None

    @property
    def config(self) -> CompressorConfig:
        return CONFIGS[self.compressor]

    def batch(self) -> batches.Batch:
        return batches.build(self.config, self.kind, self.tokens)

    def workload(self, seed: int = 0) -> Workload:
        """The op on fresh data. Other seeds share metadata and RoPE table, as a model's layers do."""
        return OPS[self.op].make(self, Draw(seed))


class Op(NamedTuple):
    """An entry of the table: what makes a workload, the default batches, and the compressors that the op serves."""

    make: Callable[[Case, "Draw"], Workload]
    batches: tuple[tuple[str, int], ...]
    compressors: tuple[str, ...]

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of batches that the op takes."""
        return batches.KINDS if self.compressors else tuple(dict.fromkeys(kind for kind, _ in self.batches))


OPS: dict[str, Op] = {}


def op(default_batches=TOKENS, compressors=()):
    """Enters a function `(case, draw) -> Workload` in the table under its own name."""

    def enter(make):
        OPS[make.__name__] = Op(make, default_batches, tuple(compressors))
        return make

    return enter


class Draw:
    """Random arrays on the device: a million random numbers over and over, as JAX's generators take long to compile."""

    def __init__(self, seed: int):
        self._rng = np.random.default_rng(seed)

    def normal(self, *shape: int, dtype="float32") -> jax.Array:
        return _stretched(_numbers()[0], self._rng.integers(1 << 20), shape, dtype)

    def integers(self, below: int, *shape: int, dtype="int32") -> jax.Array:
        return _stretched(_numbers()[1] % below, self._rng.integers(1 << 20), shape, dtype)

    def permutation(self, n: int) -> jax.Array:
        return jnp.asarray(self._rng.permutation(n), jnp.int32)


@functools.cache
def _numbers():
    rng = np.random.default_rng(0)
    return jnp.asarray(rng.standard_normal(1 << 20, np.float32)), jnp.asarray(rng.integers(1 << 31, size=1 << 20), "u4")


@functools.partial(jax.jit, static_argnums=(2, 3))
def _stretched(numbers, shift, shape, dtype):
    return jnp.resize(jnp.roll(numbers, shift), shape).astype(dtype)


def workload(case, function, arguments, *, updates=None, bytes=None, operations=0, **options) -> Workload:
    """The workload of one of the package's functions.

    Args:
      case: the case; its implementation is passed to the function.
      function: takes the arguments by their names.
      arguments: name to array, or pytree of arrays.
      updates: name of an argument that is updated in place, to its place among the results.
      bytes: needed with `updates`; without, all inputs and all results count.
      operations: as in `Workload`.
      **options: static arguments.
    """
    updates = updates or {}
    inputs = {name: value for name, value in arguments.items() if name not in updates}
    function = functools.partial(function, **options, implementation=case.implementation)

    def run(carry, inputs):
        if not updates:
            inputs = wait_for(carry, inputs)
        return jax.tree.leaves(function(**{name: carry[place] for name, place in updates.items()}, **inputs))

    results = jax.eval_shape(lambda arguments: jax.tree.leaves(function(**arguments)), arguments)
    carry = [jnp.zeros(result.shape, result.dtype) for result in results]
    for name, place in updates.items():
        carry[place] = arguments[name]
    return Workload(run, carry, inputs, _nbytes((inputs, carry)) if bytes is None else bytes, operations)


def wait_for(carry, inputs):
    """The inputs, the smallest of which waits for the last call's results.

    So XLA makes every call of a chain, one after the other. It drops a barrier before it looks for equal calls.
    """
    last = jax.tree.leaves(carry)[0]
    never = last[(0,) * last.ndim].astype(jnp.float32) == 0.12345  # which no result is, but XLA cannot know
    leaves, tree = jax.tree.flatten(inputs)
    smallest = min(range(len(leaves)), key=lambda i: leaves[i].nbytes)
    leaves[smallest] = jnp.where(never, jnp.zeros_like(leaves[smallest]), leaves[smallest])
    return jax.tree.unflatten(tree, leaves)


def _nbytes(tree):
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


# The compressor's ops.


@op(REPORT, CONFIGS)
def compress(case, draw, save="tail"):
    c, plan = case.config, case.batch().host
    batch = case.tokens * 2 * c.width * jnp.dtype(case.dtype).itemsize
    if plan.runs is not None:
        history = int((plan.runs[:, 3] >= 0).sum()) * c.state_width * 4
    else:
        old = np.arange(c.window) < c.window - plan.closing[:, 3:]
        history = int(((plan.window_slots >= 0) & old).sum()) * 2 * c.head_dim * 4
    saved = (case.tokens if save == "all" else int((plan.saving[:, 0] >= 0).sum())) * c.state_width * 4
    arguments = {
        "kv_score": draw.normal(case.tokens, 2 * c.width, dtype=case.dtype),
        "ape": draw.normal(c.compress_ratio, c.width),
        **_stored(case, draw),
    }
    return workload(
        case,
        dsv4_jax.compress,
        arguments,
        updates={"state_cache": 0, "kv_cache": 1},
        bytes=batch + history + saved + _key_bytes(case),
        save=save,
        **_options(c),
    )


@op(PREFILL, WITH_ROWS)
def compress_all(case, draw):
    """`compress(save="all")`."""
    return compress(case, draw, save="all")


@op((*PREFILL, ("closing", 512)), WITH_ROWS)
def store(case, draw):
    """`compress_norm_rope_store`."""
    arguments = _stored(case, draw)
    carry = arguments.pop("state_cache"), arguments.pop("kv_cache")
    options = _options(case.config) | {"implementation": case.implementation}

    def run(carry, inputs):
        # The barrier ties the states to the cache: without, XLA would do equal calls' first halves once.
        states, cache = jax.lax.optimization_barrier(carry)
        return states, dsv4_jax.compress_norm_rope_store(states, cache, **inputs, **options)

    rows = int((case.batch().host.window_slots >= 0).sum())
    return Workload(run, carry, arguments, rows * 2 * case.config.head_dim * 4 + _key_bytes(case))


@op(PREFILL, WITH_ROWS)
def save(case, draw):
    """`save_partial_states`."""
    c, batch = case.config, case.batch()
    half = case.tokens, c.width
    arguments = {
        "kv": draw.normal(*half, dtype=case.dtype),
        "score": draw.normal(*half, dtype=case.dtype),
        "ape": draw.normal(c.compress_ratio, c.width),
        "positions": batch.device.positions,
        "state_cache": draw.normal(batch.pages, c.page_rows, c.state_width),
        "slot_mapping": batch.device.slot_mapping,
    }
    return workload(
        case,
        dsv4_jax.save_partial_states,
        arguments,
        updates={"state_cache": 0},
        bytes=case.tokens * (2 * c.width * jnp.dtype(case.dtype).itemsize + c.state_width * 4),
        compress_ratio=c.compress_ratio,
    )


def _stored(case, draw):
    """The arguments that `compress` and `compress_norm_rope_store` share."""
    c, batch = case.config, case.batch()
    return {
        "state_cache": draw.normal(batch.pages, c.page_rows, c.state_width),
        "kv_cache": c.format.allocate(batch.kv_pages, c.kv_page_rows),
        "metadata": batch.device,
        "norm_weight": 1 + 0.1 * draw.normal(c.head_dim),
        "cos_sin": _rope_table(c.rope, 1 << int(batch.host.positions.max()).bit_length()),
    }


@functools.lru_cache(maxsize=32)
def _rope_table(rope, positions):
    return jnp.asarray(rope.table(positions))


def _options(config) -> dict[str, Any]:
    return {"config": config, "kv_scale": 0.02 if config.format.needs_scale else None}


def _key_bytes(case):
    return int((case.batch().host.closing[:, 0] >= 0).sum()) * case.config.format.row_bytes


# The ops around it.


@op()
def combine_topk_swa_indices(case, draw):
    """One request that has TOPK compressed rows before this batch."""
    before = TOPK * RATIO
    gathered, compressed = case.tokens + WINDOW - 1, (before + case.tokens) // RATIO
    arguments = {
        "topk_indices": draw.integers(compressed, case.tokens, TOPK),
        "query_start_loc": jnp.array([0, case.tokens], jnp.int32),
        "seq_lens": jnp.array([before + case.tokens], jnp.int32),
        "gather_lens": jnp.array([gathered], jnp.int32),
    }
    sizes = {"window_size": WINDOW, "compress_ratio": RATIO, "topk": TOPK, "M": compressed + gathered, "N": compressed}
    return workload(case, dsv4_jax.combine_topk_swa_indices, arguments, **sizes)


@op()
def compute_global_topk_indices_and_lens(case, draw):
    """One request that has at least TOPK compressed rows."""
    pages = max(TOPK, case.tokens // RATIO) // PAGE_ROWS
    arguments = {
        "topk_indices": draw.integers(pages * PAGE_ROWS, case.tokens, TOPK),
        "token_to_req": jnp.zeros(case.tokens, jnp.int32),
        "block_table": draw.permutation(pages)[None],
        "is_valid_token": jnp.ones(case.tokens, bool),
    }
    return workload(case, dsv4_jax.compute_global_topk_indices_and_lens, arguments, page_rows=PAGE_ROWS)


@op()
def dequantize_and_gather_k_cache(case, draw):
    """All rows of four requests, T together, from pages in any order."""
    rows = -(-case.tokens // 4)
    columns = -(-rows // PAGE_ROWS)
    arguments = {
        "cache": draw.integers(256, *FP8.allocate(4 * columns, PAGE_ROWS).shape, dtype="uint8"),
        "seq_lens": jnp.full(4, rows, jnp.int32),
        "block_table": draw.permutation(4 * columns).reshape(4, columns),
        "out": jnp.zeros((4, rows, HEAD_DIM), jnp.bfloat16),
    }
    moved = 4 * rows * FP8.row_bytes + _nbytes([arguments["out"], arguments["block_table"]])
    gather = dsv4_jax.dequantize_and_gather_k_cache
    return workload(case, gather, arguments, updates={"out": 0}, bytes=moved, page_rows=PAGE_ROWS)


@op()
def fused_indexer_q_rope_quant(case, draw):
    arguments = {
        "positions": jnp.arange(case.tokens, dtype=jnp.int32),
        "q": draw.normal(case.tokens, INDEX_HEADS, INDEX_HEAD_DIM, dtype="bfloat16"),
        "cos_sin": draw.normal(case.tokens, ROPE_DIM),
        "weights": draw.normal(case.tokens, INDEX_HEADS, dtype="bfloat16"),
    }
    scales = {"softmax_scale": INDEX_HEAD_DIM**-0.5, "head_scale": INDEX_HEADS**-0.5}
    return workload(case, dsv4_jax.fused_indexer_q_rope_quant, arguments, **scales)


@op()
def fused_inv_rope_fp8_quant(case, draw):
    arguments = {
        "o": draw.normal(case.tokens, HEADS, HEAD_DIM, dtype="bfloat16"),
        "positions": jnp.arange(case.tokens, dtype=jnp.int32),
        "cos_sin": draw.normal(case.tokens, ROPE_DIM),
    }
    groups = {"n_groups": OUTPUT_GROUPS, "heads_per_group": HEADS // OUTPUT_GROUPS}
    return workload(case, dsv4_jax.fused_inv_rope_fp8_quant, arguments, **groups)


@op()
def fused_q_kv_rmsnorm(case, draw):
    arguments = {
        "q": draw.normal(case.tokens, Q_LORA_RANK, dtype="bfloat16"),
        "kv": draw.normal(case.tokens, HEAD_DIM, dtype="bfloat16"),
        "q_weight": draw.normal(Q_LORA_RANK),
        "kv_weight": draw.normal(HEAD_DIM),
    }
    return workload(case, dsv4_jax.fused_q_kv_rmsnorm, arguments)


@op()
def fused_qnorm_rope_kv_rope_quant_insert(case, draw):
    """Keys of one request, into pages in any order."""
    arguments = {
        "q": draw.normal(case.tokens, HEADS, HEAD_DIM, dtype="bfloat16"),
        "kv": draw.normal(case.tokens, HEAD_DIM, dtype="bfloat16"),
        "positions": jnp.arange(case.tokens, dtype=jnp.int32),
        "cos_sin": draw.normal(case.tokens, ROPE_DIM),
        **_cache_and_slots(case, draw),
    }
    moved = _nbytes([arguments[name] for name in ("q", "q", "kv", "slots", "positions", "cos_sin")])
    return workload(
        case,
        dsv4_jax.fused_qnorm_rope_kv_rope_quant_insert,
        arguments,
        updates={"cache": 1},
        bytes=moved + case.tokens * FP8.row_bytes,
        page_rows=PAGE_ROWS,
    )


@op()
def prepare_megamoe_inputs(case, draw):
    arguments = {
        "hidden": draw.normal(case.tokens, HIDDEN, dtype="bfloat16"),
        "topk_weights": draw.normal(case.tokens, EXPERTS_PER_TOKEN),
        "topk_ids": draw.integers(EXPERTS, case.tokens, EXPERTS_PER_TOKEN),
        "is_padding": jnp.zeros(case.tokens, bool),
    }
    return workload(case, dsv4_jax.prepare_megamoe_inputs, arguments)


@op()
def quantize_and_insert_k_cache(case, draw):
    """Keys into pages in any order."""
    arguments = {
        "k": draw.normal(case.tokens, HEAD_DIM, dtype="bfloat16"),
        **_cache_and_slots(case, draw),
    }
    moved = _nbytes([arguments["k"], arguments["slots"]]) + case.tokens * FP8.row_bytes
    insert = dsv4_jax.quantize_and_insert_k_cache
    return workload(case, insert, arguments, updates={"cache": 0}, bytes=moved, page_rows=PAGE_ROWS)


def _cache_and_slots(case, draw):
    """A cache for one request, whose pages are in any order, and the slot of each token."""
    pages = -(-case.tokens // PAGE_ROWS)
    token = jnp.arange(case.tokens, dtype=jnp.int32)
    slots = draw.permutation(pages)[token // PAGE_ROWS] * PAGE_ROWS + token % PAGE_ROWS
    return {"cache": FP8.allocate(pages, PAGE_ROWS), "slots": slots}
