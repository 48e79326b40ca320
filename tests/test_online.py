"""HCA with the online state: however a sequence is fed, its keys are those of its whole history, by the oracle."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import ops
import oracle
import pytest
from batches import random_batch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import dsv4_jax
from dsv4_jax import CompressorConfig, CompressorMetadata

ON_CPU = jax.default_backend() == "cpu"
REQUESTS, LENGTH = 3, 24  # of nearly all tests, so that they share compilations
LONG = 50  # tokens of a batch that takes two launches; one takes up to REQUESTS * page_rows
OUTSIDE = (-1, -2, -(2**31), 2**31 - 1)


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
        """Feeds the next tokens of each request, by default in a long batch if they are more than a short one has."""
        short = len(counts) * self.config.page_rows
        total = total or (short if sum(counts) <= short else LONG)
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


# Whole sequences.


@pytest.mark.parametrize(
    ("m", "fmt", "kv_page_rows", "dtype"),
    [
        (8, "fp8_ds_mla", 1, ml_dtypes.bfloat16),
        (2, "fp8", 3, np.float32),
        (1, "bf16", 2, np.float32),
    ],
)
def test_prefill_then_decode(m, fmt, kv_page_rows, dtype, implementation):
    feed = Feed(online(m, fmt, kv_page_rows=kv_page_rows), implementation, dtype=dtype)
    feed.step([17, 2, 8])
    feed.check()
    feed.step([1, 14, 8])
    for _ in range(2 if implementation == "triton" and ON_CPU else 6):  # the interpreter is slow
        feed.step([1, 1, 1])
        feed.check()
    assert feed.check() >= 6 // m


@pytest.mark.parametrize("page_rows", [1, 3])
def test_every_cut(page_rows, implementation):
    """A prefill up to any position, a chunk, then tokens one by one, each request at another phase."""
    for cut in range(1, 17):
        if implementation == "triton" and cut not in (1, 6, 7, 8, 15) and ON_CPU:
            continue
        feed = Feed(online(8, page_rows=page_rows), implementation)
        feed.step([cut, max(cut - 5, 0), cut + 2], LONG)
        feed.step([3, 1, 5 if page_rows == 1 else 2])
        feed.step([1, 1, 0])
        feed.step([1, 1, 1] if page_rows == 1 else [2, 1, 2])
        feed.check()


def test_the_models_window(implementation):
    feed = Feed(online(128, "fp8_ds_mla"), implementation, lengths=[389])
    for count in (130, 125, 1, 1, 126, 1, 1):
        feed.step([count], total=130 if count > 1 else 1)
    assert feed.check() == 3
    feed.assert_states([[384]])


@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(
    seed=st.integers(0, 2**32 - 1),
    page_rows=st.sampled_from([1, 3]),
    magnitudes=st.booleans(),
    counts=st.lists(st.tuples(*[st.integers(0, 9)] * REQUESTS), max_size=9),
)
def test_ragged(seed, page_rows, magnitudes, counts):
    """Any split over steps, requests without a token in some of them."""
    feed = Feed(online(page_rows=page_rows), "xla", seed=seed, magnitudes=magnitudes)
    for count in counts:
        feed.step(np.minimum(count, LENGTH - feed.done))
    feed.check()


@pytest.mark.parametrize("rising", [True, False])
def test_scores_that_rise_or_fall(rising, implementation):
    """The running maximum moves with every token, or never again; by up to 600 a token."""
    feed = Feed(online(), implementation)
    order = np.arange(LENGTH * REQUESTS) if rising else -np.arange(LENGTH * REQUESTS)
    score = 0.3 * order[:, None] * 10.0 ** np.linspace(-3, 3.3, feed.config.width)
    feed.whole.kv_score[:, feed.config.width :] = score
    for _ in range(8):
        feed.step([1, 1, 1])
    assert feed.check() == 3


# Speculation.


@pytest.mark.parametrize("long", [False, True])
def test_rollback(long, implementation):
    """Each step brings a token and a draft, of which a prefix holds: keys and states as if the rest had never been."""
    rollback = 2
    feed = Feed(online(page_rows=1 + rollback), implementation)
    wrong = np.random.default_rng(9).standard_normal(feed.whole.kv_score.shape).astype(np.float32)
    rng = np.random.default_rng(1)
    length, taken_back = np.array([18, 16, 17]), set()
    while (feed.done < length).any():
        start, given_rows = feed.done.copy(), wrong.copy()
        counts = np.where(start < length, 1 + rollback, 0)
        kept = np.minimum(start + rng.integers(1, 2 + rollback, REQUESTS), length)
        for r, first in enumerate(feed.whole.query_start_loc[:-1]):
            given_rows[first : first + kept[r]] = feed.whole.kv_score[first : first + kept[r]]
            taken_back |= {p % 8 for p in range(kept[r], start[r] + counts[r])}
        feed.step(counts, LONG if long else None, kv_score=given_rows)
        feed.done = kept
    # Windows that only a draft closed are written again when they close.
    feed.step(np.array([23, 23, 23]) - feed.done, LONG)
    feed.step([1, 1, 1], LONG if long else None)
    assert feed.check() == 9 and taken_back >= {0, 1, 6, 7}


def test_a_rollback_leaves_the_states_before(implementation):
    """After a draft of 2, the page of 3 rows still holds the state that every shorter prefix needs."""
    feed = Feed(online(8, page_rows=3), implementation)
    feed.step([9, 4, 11], LONG)
    feed.step([3, 3, 3])
    feed.assert_states([[9, 10, 11], [4, 5, 6], [11, 12, 13]])


# What is saved, and the plan.


@pytest.mark.parametrize("total", [9, LONG])  # one launch, two
def test_saved_states(total, implementation):
    """The last `page_rows` tokens of each request, but those that close a window; other rows stay."""
    feed = Feed(online(8, page_rows=3), implementation)
    feed.step([3, 2, 1], total)
    feed.assert_states([[0, 1, 2], [0, 1], [0]])
    feed.step([3, 0, 6], total)
    feed.assert_states([[3, 4, 5], [0, 1], [4, 5, 6]])
    feed.step([1, 0, 2], total)
    feed.assert_states([[4, 5, 6], [0, 1], [4, 6, 8]])


def test_plan_by_hand():
    """m = 4, pages of 2 rows: request 0 brings positions 2-5 into page 3, request 1 nothing, request 2 position 7."""
    config = online(4, page_rows=2)
    meta = CompressorMetadata.build(
        config,
        np.array([0, 4, 4, 5]),
        np.array([6, 9, 8]),
        np.array([[3], [0], [1]]),
        np.array([[5], [6], [7]]),
        num_tokens=7,
    )
    assert meta.runs.tolist() == [[0, 4, 2, 3 * 2 + 1], [-1] * 4, [4, 1, 7, 1 * 2 + 0]]
    assert meta.slot_mapping.tolist() == [6, 7, 6, 7, 3, -1, -1]
    assert meta.closing.tolist() == [[1, 3, 10, 2], [4, 7, 15, 1], [-1] * 4, [-1] * 4]
    assert meta.window_slots.tolist() == [[7], [2], [-1], [-1]]
    assert meta.saving.tolist() == [[2, 4, 6, 1], [3, 5, 7, 2], *[[-1] * 4] * 4]
    assert all(array.dtype == jnp.int32 for array in jax.tree.leaves(meta))
    names = ("positions", "token_to_req", "slot_mapping", "kv_slot_mapping", "block_table", "query_start_loc")
    again = CompressorMetadata.from_slots(config, *(getattr(meta, name) for name in names))
    jax.tree.map(np.testing.assert_array_equal, meta, again)


def test_empty(implementation):
    """No token, no page of keys, no page of states."""
    feed = Feed(online(), implementation)
    for counts, total in (([0, 0, 0], 3), ([0, 0, 0], LONG)):
        feed.step(counts, total)
        assert feed.check() == 0
        feed.assert_states([[], [], []])
    state, cache = feed.compress(feed.batch([0, 0, 0], 0), feed.state, feed.cache, feed.metadata([0, 0, 0], 0))
    ops.same_bytes(state, feed.state)
    ops.same_bytes(cache, feed.cache)
    step = feed.batch([8, 0, 0], LONG), feed.metadata([8, 0, 0], LONG)
    _, cache = feed.compress(step[0], feed.state[:0], feed.cache, step[1])
    oracle.assert_same_cache(cache, feed.whole.cache, feed.alone(*range(8)), feed.config)
    step = feed.batch([3, 0, 0], 3), feed.metadata([3, 0, 0], 3)
    feed.state, cache = feed.compress(step[0], feed.state, feed.cache[:0], step[1])
    assert cache.shape[0] == 0
    feed.assert_states([[2], [], []])


# Data that is not as it should be.


@pytest.mark.parametrize("total", [REQUESTS, LONG])
def test_a_missing_page(total, implementation):
    """The history is absent, as rows would be: the batch's own rows are the window. Nothing is saved."""
    feed = Feed(online(), implementation)
    feed.step([7, 5, 6])
    for page in (*OUTSIDE, len(feed.state)):
        state, cache, done = feed.state, feed.cache, feed.done.copy()
        feed.step([1, 1, 1], total, table=np.full_like(feed.table, page))
        ops.same_bytes(feed.state, state)
        assert feed.check(feed.alone(7)) == 1
        feed.state, feed.cache, feed.done = state, cache, done


VALUES = {
    "NaN score": (np.nan, None),
    "inf score": (np.inf, None),
    "-inf score": (-np.inf, None),
    "NaN kv": (None, np.nan),
    "inf kv": (None, np.inf),
    "inf kv of no weight": (-np.inf, np.inf),
}


@pytest.mark.parametrize("what", VALUES)
def test_not_finite(what, implementation):
    """In one channel: first in a window, within it, last, and in all its rows; as the oracle says of rows."""
    score, kv = VALUES[what]
    for counts in ([24, 24, 0], [5, 5, 0], [1, 1, 0]):
        if counts[0] == 1 and implementation == "triton" and ON_CPU and what not in ("NaN score", "-inf score"):
            continue
        feed = Feed(online(), implementation)
        for rows, channel in (([0], 3), ([13], 70), ([23], 450), (range(LENGTH, LENGTH + 8), 9)):
            if score is not None:
                feed.whole.kv_score[rows, feed.config.width + channel] = score
            if kv is not None:
                feed.whole.kv_score[rows, channel] = kv
        nan = np.isnan(ops.rows(feed.whole, feed.whole.state, from_batch=True).exact).all(axis=1)[:6]
        assert nan.tolist() == ([False] * 3 if what == "-inf score" else [True] * 3) + [True, False, False]
        while feed.done[0] < LENGTH:
            feed.step(np.minimum(counts, LENGTH - feed.done))
        assert feed.check() == 6


WRONG_CLOSING = [
    *((0, row) for row in (LONG, *OUTSIDE)),
    *((1, position) for position in (14, -1, LENGTH + 7, 2**31 - 1)),
    *((2, slot) for slot in ("past", *OUTSIDE)),
    *((3, count) for count in (0, -1, -(2**31))),
]


def test_a_wrong_entry_of_the_plan_writes_nothing(implementation):
    for column, value in WRONG_CLOSING:
        feed = Feed(online(), implementation)

        def change(meta, feed=feed, column=column, value=value):
            assert meta.closing[1, :2].tolist() == [15, 15]
            return {"closing": meta.closing.at[1, column].set(len(feed.cache) * 2 if value == "past" else value)}

        feed.step([24, 0, 9], change=change)
        assert feed.check(ops.without(feed.expected(), 15)) == 3, (column, value)


@pytest.mark.parametrize("slot", ["past", *OUTSIDE])
def test_a_wrong_slot_of_what_came_before_is_absent(slot, implementation):
    feed = Feed(online(), implementation)
    feed.step([5, 5, 5])
    slot = len(feed.state) if slot == "past" else slot
    feed.step([9, 0, 0], LONG, change=lambda meta: {"window_slots": meta.window_slots.at[0, 0].set(slot)})
    assert feed.check(feed.alone(5, 6, 7)) == 1


def test_wrong_entries_of_what_is_saved(implementation):
    feed = Feed(online(page_rows=3), implementation)
    slot = int(feed.table[0, 0]) * 3
    outside = len(feed.state) * 3
    wrong = [[row, 18, slot, 3] for row in (LONG, *OUTSIDE)] + [[18, 18, s, 3] for s in (outside, *OUTSIDE)]
    wrong += [[18, -1, slot, 3], [18, 18, slot, 0], [18, 18, slot, -5], [20, 20, slot + 2, 5]]
    feed.step([22, 0, 0], change=lambda _: {"saving": jnp.array(wrong, jnp.int32)})
    feed.check()
    feed.assert_states([[20], [], []])


@pytest.mark.parametrize("implementation", ["triton"], indirect=True)
def test_a_wrong_run_does_nothing(implementation):
    """What a short batch goes by; the plan of a long one is tested above."""
    for column, value in (*((0, row) for row in (REQUESTS, *OUTSIDE)), (1, 0), (1, -(2**31)), (2, -1), (2, -(2**31))):
        feed = Feed(online(), implementation)
        feed.step([7, 0, 3])
        state = feed.state
        feed.step([1, 0, 0], change=lambda meta: {"runs": meta.runs.at[0, column].set(value)})  # noqa: B023
        ops.same_bytes(feed.state, state)
        assert feed.check(ops.without(feed.expected(), 7)) == 0


@pytest.mark.parametrize("implementation", ["triton"], indirect=True)
def test_a_wrong_run_stays_inside(implementation):
    """Too many tokens: those of the batch. No such state: none."""
    for column, value in ((1, 2), (1, 2**31 - 1), (3, "past"), (3, 2**31 - 1), (3, -5)):
        feed = Feed(online(), implementation)
        feed.step([7, 0, 0])
        state = feed.state
        value = len(state) if value == "past" else value
        feed.step([1, 0, 0], 1, change=lambda meta: {"runs": meta.runs.at[0, column].set(value)})  # noqa: B023
        ops.same_bytes(feed.state, state)
        assert feed.check(feed.alone(7) if column == 3 else None) == 1


@pytest.mark.parametrize("requests", [24, 2])  # one launch, two
def test_wrong_slots(requests, implementation):
    """`from_slots` with slots, positions and requests outside, in mid-request."""
    feed = Feed(online(), implementation)
    whole, page = feed.whole, int(feed.table[0, 0])
    tokens = 23
    positions, of = np.arange(tokens, dtype=np.int32), np.zeros(tokens, np.int32)
    keys = whole.kv_slot_mapping[:tokens].copy()
    keys[7] = len(feed.cache) * 2
    of[15] = 77
    positions[[19, 20]] = 31, 2**31 - 1
    table = np.concatenate([feed.table[:1], np.full((requests - 1, 1), -1, np.int32)])
    starts = np.array([0, *[tokens] * requests], np.int32)
    for outside, kept in ((page, [22]), (len(feed.state), []), (-1, []), (2**31 - 1, [])):
        slots = np.full(tokens, outside, np.int32)
        meta = CompressorMetadata.from_slots(feed.config, positions, of, slots, keys, table, starts)
        state, cache = feed.compress(jnp.asarray(whole.kv_score[:tokens]), feed.state, feed.cache, meta)
        ops.same_bytes(cache, whole.cache)
        after = Feed(online(), implementation)
        after.state = state
        after.assert_states([kept, [], []])


# In JAX.


def test_layers_in_one_cache(implementation):
    """Each layer's pages after another's; what lies outside a layer stays outside."""
    feed = Feed(online(page_rows=3), implementation)
    own_state, own_cache = feed.state, feed.cache
    pages, kv_pages = len(own_state), len(own_cache)
    feed.state, feed.cache = jnp.concatenate([own_state] * 3), jnp.concatenate([own_cache] * 3)

    def change(meta):
        moved = meta.at_layer(jnp.int32(1), pages, kv_pages)
        return {f.name: getattr(moved, f.name) for f in dataclasses.fields(moved)}

    for counts in ([6, 5, 0], [9, 1, 2], [1, 1, 1], [1, 1, 3]):
        feed.step(counts, LONG if implementation == "xla" else None, change=change)
    state, cache = feed.state, feed.cache
    feed.state, feed.cache = state[pages : 2 * pages], cache[kv_pages : 2 * kv_pages]
    assert feed.check() == 3
    feed.assert_states([[12, 14, 16], [4, 5, 6], [3, 4, 5]])
    for part, own in ((state, own_state), (cache, own_cache)):
        for layer in (0, 2):
            ops.same_bytes(part[layer * len(own) :][: len(own)], own)


@pytest.mark.parametrize("counts", [[1, 1, 1], [9, 1, 1]])
def test_in_place(counts, implementation):
    """Donated caches are updated where they are, and no instruction copies one."""
    feed = Feed(online(), implementation)
    feed.step([7, 10, 0], LONG)
    kv_score, meta = feed.batch(counts, sum(counts)), feed.metadata(counts, sum(counts))
    run = jax.jit(lambda state, cache, meta: feed.compress(kv_score, state, cache, meta), donate_argnums=(0, 1))
    compiled = run.lower(feed.state, feed.cache, meta).compile()
    addresses = [feed.state.unsafe_buffer_pointer(), feed.cache.unsafe_buffer_pointer()]
    if implementation == "xla" or not ON_CPU:
        assert not ops.copies(compiled, feed.state, feed.cache)
    feed.state, feed.cache = compiled(feed.state, feed.cache, meta)
    if implementation == "xla" or not ON_CPU:
        assert [feed.state.unsafe_buffer_pointer(), feed.cache.unsafe_buffer_pointer()] == addresses
    feed.done += counts
    feed.check()


def test_in_a_loop(implementation):
    """Decode inside `fori_loop`, the caches carried."""
    feed = Feed(online(), implementation)
    kv_score = jnp.asarray(feed.whole.kv_score.reshape(REQUESTS, LENGTH, -1))
    starts = jnp.arange(REQUESTS + 1, dtype=jnp.int32)

    def body(i, caches):
        meta = CompressorMetadata.build(
            feed.config, starts, jnp.full(REQUESTS, i + 1), feed.table, feed.whole.kv_block_table, num_tokens=REQUESTS
        )
        return feed.compress(kv_score[:, i], *caches, meta)

    run = jax.jit(lambda caches: jax.lax.fori_loop(0, 10, body, caches), donate_argnums=0)
    feed.state, feed.cache = run((feed.state, feed.cache))
    feed.done += 10
    assert feed.check() == 3
    feed.assert_states([[9]] * 3)


def test_layer(implementation):
    nnx = pytest.importorskip("flax.nnx")
    feed = Feed(online(), implementation)
    layer = dsv4_jax.DeepseekCompressor(feed.config, 16, rngs=nnx.Rngs(0))
    # Small integers and multiples of a power of two, so that the projection is exact.
    hidden = np.random.default_rng(0).integers(-3, 4, (LENGTH, 16)).astype(np.float32)
    weight = np.random.default_rng(1).integers(-8, 9, layer.wkv_gate.shape) / 32
    layer.wkv_gate.set_value(jnp.asarray(weight, jnp.float32))
    layer.ape.set_value(jnp.asarray(feed.whole.ape))
    layer.norm.set_value(jnp.asarray(feed.whole.norm_weight))
    feed.whole.kv_score[:LENGTH] = hidden.astype(np.float64) @ weight
    state, cache = layer.init_caches(len(feed.state), len(feed.cache))
    assert state.shape == feed.state.shape and state.dtype == jnp.float32 and cache.shape == feed.cache.shape
    for first, last in itertools.pairwise([0, 10, 16, 17, 18, 19]):
        total = LONG if last - first > 1 else REQUESTS
        meta = feed.metadata([last - first, 0, 0], total)
        feed.state, feed.cache = layer(
            jnp.asarray(np.pad(hidden[first:last], [(0, total - last + first), (0, 0)])),
            (feed.state, feed.cache),
            meta,
            jnp.asarray(feed.whole.cos_sin),
            implementation=implementation,
        )
        feed.done[0] = last
    assert feed.check() == 2
    feed.assert_states([[18], [], []])


# Errors.


def test_config():
    assert CompressorConfig.hca(state="online").page_rows == 1 and CompressorConfig.hca().page_rows == 8
    assert CompressorConfig.hca(state="online").state_width == 1536 and CompressorConfig.hca().state_width == 1024
    assert CompressorConfig.csa().state_width == 2048
    with pytest.raises(ValueError, match="state is 'ring'; it must be 'rows' or 'online'"):
        CompressorConfig.hca(state="ring")
    with pytest.raises(ValueError, match="state is 'online'; with overlap it must be 'rows'"):
        dataclasses.replace(CompressorConfig.csa(), state="online")


def test_errors():
    feed = Feed(online(page_rows=3), "xla")
    kv_score, meta = feed.batch([9, 0, 0], LONG), feed.metadata([9, 0, 0], LONG)
    whole = feed.whole
    ape, norm, cos_sin = (jnp.asarray(a) for a in (whole.ape, whole.norm_weight, whole.cos_sin))
    config = {"config": feed.config}
    with pytest.raises(ValueError, match=r"save is 'all'; with the online state it must be 'tail'.*no rows to share"):
        dsv4_jax.compress(kv_score, ape, feed.state, feed.cache, meta, norm, cos_sin, save="all", **config)
    with pytest.raises(ValueError, match=r"config\.state is 'online'; it must be 'rows'"):
        dsv4_jax.compress_norm_rope_store(feed.state, feed.cache, meta, norm, cos_sin, **config)
    with pytest.raises(ValueError, match=r"state_cache has shape \[5, 3, 1024\]; it must be \[pages, 3, 1536\]"):
        feed.compress(kv_score, feed.state[..., :1024], feed.cache, meta)
    rows = dataclasses.replace(feed.config, state="rows")
    with pytest.raises(ValueError, match=r"metadata was built for .*'online'\); config has .*'rows'\)"):
        dsv4_jax.compress(kv_score, ape, feed.state, feed.cache, meta, norm, cos_sin, config=rows)
    tables = feed.table, whole.kv_block_table
    with pytest.raises(ValueError, match=r"rollback is 3; with the online state it must be below .*page_rows, 3"):
        CompressorMetadata.build(feed.config, np.arange(4), np.ones(3, int), *tables, num_tokens=3, rollback=3)
    wide = np.zeros((3, 2), np.int32)
    with pytest.raises(ValueError, match=r"block_table has shape \[3, 2\]; it must be \[3, 1\]"):
        CompressorMetadata.build(feed.config, np.arange(4), np.ones(3, int), wide, tables[1], num_tokens=3)
    for name, must in {"runs": r"\[3, 4\]", "saving": r"\[S, 4\]", "window_slots": r"\[9, 1\]"}.items():
        wrong = dataclasses.replace(meta, **{name: getattr(meta, name)[:, :0]})
        with pytest.raises(ValueError, match=rf"metadata\.{name} has shape .*, 0\]; it must be {must}"):
            feed.compress(kv_score, feed.state, feed.cache, wrong)


def test_cutedsl_has_none():
    from dsv4_jax.nvidia.ops import support

    assert "no online state; implementation='triton'" in support.why_not(CompressorConfig.hca(state="online"))


# On a GPU.


@pytest.mark.gpu
@pytest.mark.parametrize("page_rows", [1, 4])
def test_decode_loop_on_a_gpu(page_rows):
    """64 requests, each at its own phase, 300 steps of a token each, by Triton and by XLA."""
    requests, steps = 64, 300
    config = online(128, "fp8_ds_mla", page_rows=page_rows)
    first = jnp.arange(requests, dtype=jnp.int32) * 5
    kv_table = np.random.default_rng(1).permutation(requests * 4).astype(np.int32).reshape(requests, -1)
    cos_sin, ape = jnp.asarray(config.rope.table(1024)), jax.random.normal(jax.random.key(1), (128, config.width))

    @functools.partial(jax.jit, static_argnames="implementation")
    def run(implementation):
        def body(i, caches):
            kv_score = jax.random.normal(jax.random.key(i), (requests, 2 * config.width))
            meta = CompressorMetadata.build(
                config, jnp.arange(requests + 1), first + i + 1, jnp.arange(requests)[:, None], kv_table,
                num_tokens=requests,
            )  # fmt: skip
            return dsv4_jax.compress(
                kv_score, ape, *caches, meta, jnp.ones(512), cos_sin, config=config, implementation=implementation
            )

        # All zeros is a state too: what a request that is taken up in mid-window begins with.
        caches = jnp.zeros((requests, page_rows, config.state_width)), config.format.allocate(requests * 2, 2)
        return jax.lax.fori_loop(0, steps, body, caches)

    (states, cache), (want_states, want_cache) = (jax.tree.map(np.asarray, run(i)) for i in ("triton", "xla"))
    np.testing.assert_allclose(states, want_states, rtol=1e-4, atol=1e-4)
    assert np.count_nonzero(want_cache) > requests * 400
    assert (cache != want_cache).sum() <= np.count_nonzero(want_cache) // 2000


@pytest.mark.gpu
@pytest.mark.parametrize("page_rows", [1, 4])
def test_large_batches_on_a_gpu(page_rows, implementation):
    """A prefill of thousands of tokens beside chunks and decodes, then 4 tokens each."""
    lengths = [5000, 700, 129, 257, *range(100, 400, 13)]
    feed = Feed(online(128, "fp8_ds_mla", page_rows=page_rows), implementation, lengths=lengths)
    half = np.array([n - 4 if i % 3 else max(n - 400, 0) for i, n in enumerate(lengths)])
    feed.step(half, total=sum(half) + 5)
    more = np.array(lengths) - 4 - half
    feed.step(more, total=sum(more))
    feed.step([4] * len(lengths), total=4 * len(lengths))
    assert feed.check() > 60
