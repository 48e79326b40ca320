"""Requests fed bit by bit to HCA with the online state, and what the oracle says of their whole history."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

import dsv4_jax
from dsv4_jax import CompressorConfig, CompressorMetadata
from helpers import ops, oracle
from helpers.batches import random_batch

ON_CPU = jax.default_backend() == "cpu"
REQUESTS, LENGTH = 3, 24  # of nearly all tests, so that they share compilations
LONG = 50  # tokens of a batch that takes two launches; one takes up to REQUESTS * page_rows
OUTSIDE = (-1, -2, -(2**31), 2**31 - 1)


def few(values, implementation, every):
    """All values, or one in `every` in Triton's interpreter, which is slow."""
    return values[:: every if ON_CPU and implementation == "triton" else 1]


def online(m=8, fmt="bf16", page_rows=1, kv_page_rows=2):
    config = CompressorConfig.hca(fmt, page_rows=page_rows, kv_page_rows=kv_page_rows, state="online")
    return dataclasses.replace(config, compress_ratio=m)


class Feed:
    """Requests whose tokens are known from the start, how many were fed, and the caches after that.

    What no step has written is NaN in the states, so that a state read but never saved shows.
    """

    def __init__(self, config, implementation, *, lengths=(LENGTH,) * REQUESTS, seed=0, **options):
        self.config, self.implementation = config, implementation
        rng = np.random.default_rng(seed)
        rows = dataclasses.replace(config, state="rows", page_rows=4)
        sizes = [(0, n) for n in lengths]
        self.whole = random_batch(rng, rows, sizes=sizes, padding=0, padded_requests=0, **options)
        pages = len(lengths) + 2
        self.table = rng.permutation(pages)[: len(lengths)].astype(np.int32)[:, None]
        self.state = jnp.full((pages, config.page_rows, config.state_width), jnp.nan)
        self.cache = jnp.asarray(self.whole.cache)
        self.done = np.zeros(len(lengths), int)

    def batch(self, counts, total, kv_score=None):
        """The next tokens of each request, padded with NaN."""
        kv_score = self.whole.kv_score if kv_score is None else kv_score
        starts = self.whole.query_start_loc + np.append(self.done, 0)
        rows = [kv_score[s : s + n] for s, n in zip(starts, counts, strict=False)]
        return jnp.asarray(
            np.concatenate([*rows, np.full((total - sum(counts), kv_score.shape[1]), np.nan, rows[0].dtype)])
        )

    def metadata(self, counts, total, table=None):
        return CompressorMetadata.build(
            self.config,
            np.cumsum([0, *counts]),
            self.done + counts,
            self.table if table is None else table,
            self.whole.kv_block_table,
            num_tokens=total,
        )

    def compress(self, kv_score, state, cache, meta):
        whole = self.whole
        return dsv4_jax.compress(
            kv_score, jnp.asarray(whole.ape), state, cache, meta, jnp.asarray(whole.norm_weight),
            jnp.asarray(whole.cos_sin), config=self.config, kv_scale=whole.kv_scale,
            implementation=self.implementation,
        )  # fmt: skip

    def step(self, counts, total=None, *, kv_score=None, table=None, change=lambda meta: {}):
        """Feeds the next tokens of each request, by default in a short batch if they fit and it is another path."""
        short = len(counts) * self.config.page_rows
        total = total or (short if sum(counts) <= short and self.implementation == "triton" else LONG)
        meta = self.metadata(counts, total, table)
        meta = dataclasses.replace(meta, **change(meta))
        self.state, self.cache = self.compress(self.batch(counts, total, kv_score), self.state, self.cache, meta)
        self.done += counts

    def expected(self):
        """The oracle's keys of the windows that the fed tokens close."""
        whole = self.whole
        exact = ops.rows(whole, whole.state, from_batch=True)
        return ops.without(exact, *np.flatnonzero(whole.positions >= self.done[whole.token_to_req]))

    def check(self, exact=None):
        exact = self.expected() if exact is None else exact
        oracle.assert_same_cache(self.cache, self.whole.cache, exact, self.config, scale=self.whole.kv_scale)
        return len(exact.slots)

    def alone(self, *tokens):
        """The oracle's keys, where a window has no row before these tokens of request 0."""
        whole = self.whole
        starts = whole.query_start_loc.copy()
        starts[0] = tokens[0]
        cut = dataclasses.replace(whole, query_start_loc=starts, block_table=np.full_like(whole.block_table, -1))
        exact = ops.rows(cut, whole.state, from_batch=True)
        return ops.without(exact, *set(exact.tokens) - set(tokens))

    def assert_states(self, positions):
        """Holds rows of the state to float64: of each request those of these positions; every other is NaN still."""
        m, w, rest = self.config.compress_ratio, self.config.width, np.ones(self.state.shape[:2], bool)
        for r, last in ((r, p) for r, chosen in enumerate(positions) for p in chosen):
            p = np.arange(last // m * m, last + 1)
            rows = self.whole.kv_score[self.whole.query_start_loc[r] + p].astype(np.float64)
            score = rows[:, w:] + self.whole.ape[p % m].astype(np.float64)
            weight = np.exp(score - score.max(0))
            want = np.concatenate([score.max(0), weight.sum(0), (weight * rows[:, :w]).sum(0)])
            at = self.table[r, 0], last % self.config.page_rows
            np.testing.assert_allclose(np.asarray(self.state)[at], want, rtol=1e-5, atol=1e-5)
            rest[at] = False
        assert np.isnan(np.asarray(self.state)[rest]).all()
