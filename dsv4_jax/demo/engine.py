"""A serving engine in miniature: a few requests, chunked prefill, decode, paged caches."""

import dataclasses
import functools
import itertools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from dsv4_jax import CompressorConfig, CompressorMetadata, compress
from dsv4_jax.demo.weights import Weights

CHUNKS = (150, 47, 256, 90, 13)  # prefill, taken in turn
DECODE = 32  # each request's last tokens, which come one by one
SPARE_PAGES = 3  # pages that belong to no request


@dataclasses.dataclass(frozen=True)
class Result:
    """What one compressor read and what it wrote.

    Attributes:
      kv_score: per request `[tokens, 2W]`, the projection's output.
      slots: per request `[windows]`, the cache slots of its keys.
      before: the cache before the run, `[pages, page_bytes]`.
      after: the cache after it.
    """

    kv_score: list[np.ndarray]
    slots: list[np.ndarray]
    before: np.ndarray
    after: np.ndarray


def split(tokens: np.ndarray) -> list[np.ndarray]:
    """Cuts a text into up to three requests. The first request's last HCA window closes while it decodes."""
    first = len(tokens) // 2
    if first >= 128:
        first = first // 128 * 128 + 9
    second = first + (len(tokens) - first) * 3 // 5
    return [part for part in np.split(tokens, [first, second]) if len(part)]


def schedule(lengths: list[int]) -> list[tuple[np.ndarray, int]]:
    """For each step: how many tokens each request has, and the length to which the batch is padded."""
    totals = np.array(lengths)
    left = np.maximum(totals - DECODE, 0)
    prefill = []
    for i in itertools.count():
        counts = np.minimum(left, [CHUNKS[(i + r) % len(CHUNKS)] for r in range(len(left))])
        if not counts.any():
            break
        prefill.append(counts)
        left = left - counts
    # Prefill steps share one padded length and decode steps another, so each kind is compiled once.
    most = max((int(counts.sum()) for counts in prefill), default=0)
    decode = [(np.minimum(totals, DECODE) > i).astype(np.int64) for i in range(min(DECODE, max(lengths)))]
    return [(counts, most) for counts in prefill] + [(counts, len(lengths)) for counts in decode]


def run(
    config: CompressorConfig,
    weights: Weights,
    requests: list[np.ndarray],
    implementation: str | None,
    progress: Callable[[], None],
) -> Result:
    """Runs the requests' tokens through one compressor; calls `progress` after each step."""
    rng = np.random.default_rng(1)
    lengths = [len(tokens) for tokens in requests]
    windows = [n // config.compress_ratio for n in lengths]
    block_table, pages = _shuffled_pages(lengths, config.page_rows, rng)
    kv_block_table, kv_pages = _shuffled_pages(windows, config.kv_page_rows, rng)
    # NaN reveals a state that was never saved; random bytes reveal a stray write.
    state_cache = jnp.full((pages, config.page_rows, 2 * config.width), jnp.nan, jnp.float32)
    before = rng.integers(0, 256, config.format.allocate(kv_pages, config.kv_page_rows).shape, np.uint8)
    kv_cache = jnp.array(before)
    cos_sin = jnp.asarray(config.rope.table(max(lengths)))

    done = np.zeros(len(requests), np.int64)
    kv_score = [[] for _ in requests]
    for counts, padded in schedule(lengths):
        start = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        batch = np.zeros(padded, np.int32)
        batch[: start[-1]] = np.concatenate(
            [tokens[i : i + n] for tokens, i, n in zip(requests, done, counts, strict=True)]
        )
        done += counts
        state_cache, kv_cache, projected = step(
            state_cache, kv_cache, batch, weights, cos_sin, start, done.astype(np.int32), block_table, kv_block_table,
            config=config, implementation=implementation,
        )  # fmt: skip
        projected = np.asarray(projected)
        for rows, (a, b) in zip(kv_score, itertools.pairwise(start), strict=True):
            rows.append(projected[a:b])
        progress()

    slots = [
        pages[np.arange(n) // config.kv_page_rows] * config.kv_page_rows + np.arange(n) % config.kv_page_rows
        for pages, n in zip(kv_block_table, windows, strict=True)
    ]
    return Result([np.concatenate(rows) for rows in kv_score], slots, before, np.asarray(kv_cache))


@functools.partial(jax.jit, static_argnames=("config", "implementation"), donate_argnames=("state_cache", "kv_cache"))
def step(
    state_cache, kv_cache, tokens, weights, cos_sin, query_start_loc, seq_lens, block_table, kv_block_table,
    *, config, implementation,
):  # fmt: skip
    """One step of a model that is only a compressor; also returns the projection's output."""
    metadata = CompressorMetadata.build(
        config, query_start_loc, seq_lens, block_table, kv_block_table, num_tokens=len(tokens)
    )
    kv_score = weights.embedding[tokens] @ weights.wkv_gate
    caches = compress(
        kv_score, weights.ape, state_cache, kv_cache, metadata, weights.norm, cos_sin,
        config=config, save="tail", implementation=implementation,
    )  # fmt: skip
    return *caches, kv_score


def _shuffled_pages(rows, page_rows, rng):
    """A block table `[R, B]` with pages in random order, padded with -1, and the number of pages."""
    counts = [-(-n // page_rows) for n in rows]
    pages = rng.permutation(sum(counts) + SPARE_PAGES).astype(np.int32)
    table = np.full((len(rows), max(*counts, 1)), -1, np.int32)
    for request, own in enumerate(np.split(pages, np.cumsum(counts))[:-1]):
        table[request, : len(own)] = own
    return table, len(pages)
