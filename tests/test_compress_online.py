"""HCA with the online state: however a sequence is fed, its keys are those of its whole history, by the oracle."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from helpers import ops, oracle
from helpers.online import LENGTH, LONG, ON_CPU, REQUESTS, Feed, few, online
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import dsv4_jax
from dsv4_jax import CompressorMetadata

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
    for _ in few(range(6), implementation, 3):
        feed.step([1, 1, 1])
        feed.check()
    assert feed.check() >= 6 // m


@pytest.mark.parametrize("page_rows", [1, 3])
def test_every_cut(page_rows, implementation):
    """A prefill up to any position, a chunk, then tokens one by one, each request at another phase."""
    for cut in few([7, 1, 2, 15, 3, 4, 8, 5, 6, *range(9, 15), 16], implementation, 3):
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
        feed.step(counts, change=change)
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
