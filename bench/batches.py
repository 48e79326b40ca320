"""Batches for a compressor: requests of several kinds, their pages at random, and the step's metadata."""

import functools
from typing import NamedTuple

import jax
import numpy as np

from dsv4_jax import CompressorConfig, CompressorMetadata

KINDS = ("prefill", "decode", "closing", "mixed")
MOST_DECODES = 64  # of a mixed batch


class Batch(NamedTuple):
    """Metadata on the host and on the device, number of state pages and of cache pages."""

    host: CompressorMetadata
    device: CompressorMetadata
    pages: int
    kv_pages: int


def build(config: CompressorConfig, kind: str, tokens: int) -> Batch:
    """A batch of T tokens.

    Args:
      config: the compressor; compressors of one layout share the batch.
      kind: "prefill" (one request), "decode" (one token per request, random positions), "closing" (the same, and every
        token closes a window) or "mixed" (up to 64 decodes and four chunks of unequal prefills, every second of which
        continues an earlier one).
      tokens: T.
    """
    return _build(config.layout, kind, tokens)


def requests(kind: str, tokens: int, ratio: int, rng) -> tuple[np.ndarray, np.ndarray]:
    """The tokens in the batch and in all, of each request."""
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


def _columns(needed):
    """Columns of a table: a power of two."""
    return 1 << int(needed.max() - 1).bit_length()


@functools.lru_cache(maxsize=64)  # ops, formats and dtypes share it: to build one takes compilation
def _build(layout, kind, tokens):
    ratio, overlap, page_rows, kv_page_rows, state = layout
    config = CompressorConfig(ratio, 512, overlap, "bf16", page_rows, kv_page_rows, state=state)
    arrays, pages, kv_pages = tables(config, kind, tokens)
    build = functools.partial(CompressorMetadata.build, config, num_tokens=tokens)
    # Compiled for the host, and lightly: compiling for a GPU takes longer than all the rest of a measurement.
    with jax.default_device(_host()):
        built = jax.jit(build, compiler_options={"xla_backend_optimization_level": 0})(*arrays)
    return Batch(jax.tree.map(np.asarray, built), jax.device_put(built, jax.devices()[0]), pages, kv_pages)


def _host():
    try:
        return jax.devices("cpu")[0]
    except RuntimeError:  # JAX_PLATFORMS names the GPU alone
        return None
