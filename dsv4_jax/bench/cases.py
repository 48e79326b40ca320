"""The compressor's workloads: a compressor, a batch, an op, and the bytes that the op must move for it."""

import dataclasses
import functools
import os
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dsv4_jax.bench.companions import WORKLOADS, Workload
from dsv4_jax.common.reference.compress import compress
from dsv4_jax.common.reference.compress_norm_rope_store import compress_norm_rope_store
from dsv4_jax.common.reference.save_partial_states import save_partial_states
from dsv4_jax.config import CompressorConfig
from dsv4_jax.metadata import CompressorMetadata

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
# The name here, to that of the op.
OPS = {
    "compress": "compress",
    "compress_all": "compress",
    "store": "compress_norm_rope_store",
    "save": "save_partial_states",
}
KINDS = ("prefill", "decode", "closing", "mixed")
MOST_DECODES = 64  # of a mixed batch
VARIABLE = "DSV4_JAX_IMPLEMENTATION"
KV_SCALE = 0.02  # for the format that needs one


class Batch(NamedTuple):
    """Metadata on the host and on the device, number of state pages and of cache pages."""

    host: CompressorMetadata
    device: CompressorMetadata
    pages: int
    kv_pages: int


@dataclasses.dataclass(frozen=True)
class Case:
    """One batch of one compressor.

    Attributes:
      config: the compressor.
      kind: "prefill" (one request), "decode" (a token a request, random positions), "closing" (the same, all close
        windows) or "mixed" (up to 64 decodes, and four chunks of unequal prefills, every second of which continues).
      tokens: T.
      dtype: of `kv_score`.
    """

    config: CompressorConfig
    kind: str
    tokens: int
    dtype: str = "float32"

    def batch(self) -> Batch:
        """Requests with pages at random for what they need."""
        return _batch(self.config.layout, self.kind, self.tokens)

    @property
    def prefill(self) -> bool:
        """As the batch's metadata, of which it needs the shapes alone: nothing is compiled."""
        return _prefill(self.config.layout, self.kind, self.tokens)

    def workload(self, op: str, seed: int = 0, implementation: str | None = None) -> Workload:
        """One of `OPS` on fresh data; calls with other seeds share metadata and RoPE table, as a model's layers do."""
        c, batch = self.config, self.batch()
        carry, inputs = _arrays(self, OPS[op], batch.pages, batch.kv_pages, _random(), seed)
        inputs["metadata"] = batch.device
        if op != "save":
            inputs["cos_sin"] = _table(c.rope, 1 << int(batch.host.positions.max()).bit_length())
        return Workload(_run(c, op, implementation), carry, inputs, self.bytes(op))

    def bytes(self, op: str) -> int:
        """Bytes that one of `OPS` must move: each input read once, each result written once."""
        c, plan = self.config, self.batch().host
        batch = self.tokens * 2 * c.width * jnp.dtype(self.dtype).itemsize
        row, state_row = 2 * c.head_dim * 4, c.state_width * 4
        keys = int((plan.closing[:, 0] >= 0).sum()) * c.format.row_bytes
        if op == "save":
            return batch + self.tokens * state_row
        if op == "store":
            return int((plan.window_slots >= 0).sum()) * row + keys
        if plan.runs is not None:
            history = int((plan.runs[:, 3] >= 0).sum()) * state_row
        else:
            old = np.arange(c.window) < c.window - plan.closing[:, 3:]
            history = int(((plan.window_slots >= 0) & old).sum()) * row
        saved = self.tokens if op == "compress_all" else int((plan.saving[:, 0] >= 0).sum())
        return batch + history + saved * state_row + keys


@dataclasses.dataclass(frozen=True)
class CompanionCase:
    """T tokens for an op around the compressor, one of `WORKLOADS`."""

    tokens: int
    kind = "tokens"
    dtype = "-"

    def workload(self, op: str, seed: int = 0, implementation: str | None = None) -> Workload:
        """The op on fresh random data."""
        workload = WORKLOADS[op](self.tokens, jax.random.key(seed))

        def run(carry, inputs):
            # The switch reads the variable when the op is traced, which is now.
            before = os.environ.get(VARIABLE)
            try:
                if implementation:
                    os.environ[VARIABLE] = implementation
                return workload.run(carry, inputs)
            finally:
                os.environ.pop(VARIABLE, None)
                if before is not None:
                    os.environ[VARIABLE] = before

        return workload._replace(run=run)


def requests(kind: str, tokens: int, ratio: int, rng) -> tuple[np.ndarray, np.ndarray]:
    """Tokens in the batch and in all, of each request."""
    if kind == "prefill":
        return np.array([tokens]), np.array([tokens])
    decodes = min(tokens // 2, MOST_DECODES) if kind == "mixed" else tokens
    blocks = rng.integers(2, 9 if ratio > 4 else 257, decodes)
    lengths = blocks * ratio + (ratio if kind == "closing" else rng.integers(1, ratio + 1, decodes))
    if kind != "mixed":
        return np.ones(tokens, int), lengths
    chunks = np.diff(np.array([0, 1, 3, 6, 10]) * (tokens - decodes) // 10)
    before = np.array([0, 1, 0, 1]) * (3 * ratio + ratio // 2 + 1)
    chunks, before = chunks[chunks > 0], before[chunks > 0]
    return np.concatenate([np.ones(decodes, int), chunks]), np.concatenate([lengths, before + chunks])


def tables(config: CompressorConfig, kind: str, tokens: int) -> tuple[list[np.ndarray], int, int]:
    """The arrays that `CompressorMetadata.build` takes, number of state pages and of cache pages, all at random."""
    rng = np.random.default_rng(0)
    ratio = config.compress_ratio
    queries, lengths = requests(kind, tokens, ratio, rng)
    if config.state == "online":
        pages = len(lengths)
        table = rng.permutation(pages)[:, None]
    else:
        first = np.maximum(0, (lengths - queries) // ratio * ratio - (config.window - ratio)) // config.page_rows
        end = -(-lengths // config.page_rows)
        ends = np.cumsum(end - first)
        pages = int(ends[-1])
        column = np.arange(_columns(end))
        table = (ends - end)[:, None] + column  # a request's pages end where the next one's begin
        used = (column >= first[:, None]) & (column < end[:, None])
        table = np.where(used, rng.permutation(pages)[np.where(used, table, 0)], -1)
    keys = _columns(-(-lengths // ratio // config.kv_page_rows) + 1)
    kv_table = rng.permutation(len(lengths) * keys).reshape(-1, keys)
    starts = np.concatenate([[0], np.cumsum(queries)])
    return [np.asarray(x, np.int32) for x in (starts, lengths, table, kv_table)], pages, kv_table.size


@functools.lru_cache(maxsize=64)  # ops, formats and dtypes share it: building it takes compilation
def _batch(layout, kind, tokens):
    config = _any_of(layout)
    arrays, pages, kv_pages = tables(config, kind, tokens)
    # Compiled for the host, and lightly: for a GPU it takes longer than all the rest of a measurement.
    light = {"xla_backend_optimization_level": 0}
    build = jax.jit(functools.partial(_build, config, tokens), compiler_options=light)
    with jax.default_device(_host()):
        built = build(*arrays)
    return Batch(jax.tree.map(np.asarray, built), jax.device_put(built, jax.devices()[0]), pages, kv_pages)


@functools.lru_cache(maxsize=64)
def _prefill(layout, kind, tokens):
    config = _any_of(layout)
    arrays, _, _ = tables(config, kind, tokens)
    return jax.eval_shape(functools.partial(_build, config, tokens), *arrays).prefill


def _any_of(layout):
    ratio, overlap, page_rows, kv_page_rows, state = layout
    return CompressorConfig(ratio, 512, overlap, "bf16", page_rows, kv_page_rows, state=state)


def _build(config, tokens, *arrays):
    return CompressorMetadata.build(config, *arrays, num_tokens=tokens)


def _columns(needed):
    """Columns of a table: a power of two."""
    return 1 << int(needed.max() - 1).bit_length()


def _host():
    try:
        return jax.devices("cpu")[0]
    except RuntimeError:  # JAX_PLATFORMS names the GPU alone
        return None


@functools.cache
def _random():
    return jnp.asarray(np.random.default_rng(0).standard_normal(1 << 20, np.float32))


@functools.lru_cache(maxsize=32)
def _table(rope, positions):
    return jnp.asarray(rope.table(positions))


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _arrays(case, op, pages, kv_pages, random, seed):
    """Carry and inputs, made of `random` over and over: a generator of random numbers takes seconds to compile."""
    c = case.config

    def fill(i, *shape):
        return jnp.resize(jnp.roll(random, 7919 * (5 * seed + i)), shape)

    carry = fill(0, pages, c.page_rows, c.state_width), c.format.allocate(kv_pages, c.kv_page_rows)
    inputs = {"ape": fill(1, c.compress_ratio, c.width), "norm_weight": 1 + 0.1 * fill(2, c.head_dim)}
    if op == "save_partial_states":
        inputs |= {name: fill(i, case.tokens, c.width).astype(case.dtype) for i, name in ((3, "kv"), (4, "score"))}
    elif op == "compress":
        inputs["kv_score"] = fill(3, case.tokens, 2 * c.width).astype(case.dtype)
    return carry, inputs


def _run(config, op, implementation):
    """One of `OPS` as `carry, inputs -> carry`."""
    options = {"config": config, "implementation": implementation}
    if config.format.needs_scale:
        options["kv_scale"] = KV_SCALE

    def run_compress(carry, a):
        save = "all" if op == "compress_all" else "tail"
        states, cache = carry
        inputs = {**a, "state_cache": states, "kv_cache": cache}
        return compress(**inputs, save=save, **options)

    def run_store(carry, a):
        # The barrier ties the states to the cache: without, XLA would do equal calls' first halves once.
        states, cache = jax.lax.optimization_barrier(carry)
        return states, compress_norm_rope_store(states, cache, a["metadata"], a["norm_weight"], a["cos_sin"], **options)

    def run_save(carry, a):
        states, cache = carry
        where = a["metadata"].positions, states, a["metadata"].slot_mapping
        ratio = {"compress_ratio": config.compress_ratio, "implementation": implementation}
        return save_partial_states(a["kv"], a["score"], a["ape"], *where, **ratio), cache

    return {"compress": run_compress, "compress_all": run_compress, "store": run_store, "save": run_save}[op]
