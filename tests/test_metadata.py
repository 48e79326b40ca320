"""The plan: slots, closing tokens and the rows to save, against a plain loop over requests."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import ops, oracle
from helpers.batches import KINDS, random_batch
from helpers.online import Feed, online
from hypothesis import given, settings
from hypothesis import strategies as st

import dsv4_jax
from dsv4_jax import CompressorMetadata


def build(batch, **options):
    return CompressorMetadata.build(
        batch.config,
        *(jnp.asarray(getattr(batch, k)) for k in ("query_start_loc", "seq_lens", "block_table", "kv_block_table")),
        num_tokens=len(batch.positions),
        **options,
    )


def entries(plan):
    """A plan's rows, once it is seen that they are ascending, come first, and that the rest is -1."""
    plan = np.asarray(plan)
    found = plan[plan[:, 0] >= 0]
    np.testing.assert_array_equal(plan, np.concatenate([found, np.full_like(plan[len(found) :], -1)]))
    assert (np.diff(found[:, 0]) > 0).all()
    return found.tolist()


def saved_rows(meta):
    return [row for row, _, _ in entries(meta.saving)]


def window(batch, t):
    """How many of a window's last rows are in the batch, and the state slots of all of it, -1 where there is none."""
    config, r, p = batch.config, batch.token_to_req[t], int(batch.positions[t])
    slots = []
    for q in range(p - config.window + 1, p + 1):
        column = q // config.page_rows
        page = int(batch.block_table[r, column]) if q >= 0 and column < batch.block_table.shape[1] else -1
        slots.append(page * config.page_rows + q % config.page_rows if 0 <= page < 2**30 else -1)
    return min(t - int(batch.query_start_loc[r]) + 1, config.window), slots


def check(batch, meta, rollback=0):
    real = batch.token_to_req >= 0
    for name in ("positions", "token_to_req"):
        np.testing.assert_array_equal(np.asarray(getattr(meta, name))[real], getattr(batch, name)[real])
    np.testing.assert_array_equal(meta.slot_mapping, batch.slot_mapping)
    np.testing.assert_array_equal(meta.kv_slot_mapping, batch.kv_slot_mapping)
    np.testing.assert_array_equal(meta.block_table, batch.block_table)
    np.testing.assert_array_equal(meta.query_start_loc, batch.query_start_loc)
    for array in jax.tree.leaves(meta):
        assert array.dtype == jnp.int32
    tokens, requests = len(batch.positions), len(batch.block_table)
    bound = min(tokens, tokens // batch.config.compress_ratio + requests)
    assert meta.closing.shape == (bound, 4)
    closing = [t for t in batch.closing if batch.kv_slot_mapping[t] >= 0]
    windows = [window(batch, t) for t in closing]
    assert entries(meta.closing) == [
        [t, batch.positions[t], batch.kv_slot_mapping[t], count] for t, (count, _) in zip(closing, windows, strict=True)
    ]
    slots = np.full((bound, batch.config.window), -1)
    if closing:
        slots[: len(closing)] = [s for _, s in windows]
    np.testing.assert_array_equal(meta.window_slots, slots)
    keep = oracle.saving(batch.config, batch.query_start_loc, batch.seq_lens, rollback=rollback)
    assert entries(meta.saving) == [
        [t, batch.positions[t], batch.slot_mapping[t]] for t in keep if batch.slot_mapping[t] >= 0
    ]


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 2**32 - 1),
    kind=st.sampled_from(KINDS),
    compressor=st.sampled_from([("csa", 4, 64, 0), ("csa", 3, 1, 5), ("hca", 8, 2, 1), ("indexer", 1, 5, 0)]),
    holes=st.booleans(),
)
def test_build(seed, kind, compressor, holes):
    name, *pages, rollback = compressor  # together, so that there are few compilations
    config = ops.make_config(name, ops.FORMATS[name][0], *pages)
    batch = random_batch(
        np.random.default_rng(seed), config, kind, requests=3, tokens=36, padded_requests=2, holes=holes
    )
    check(batch, build(batch, rollback=rollback), rollback)


@pytest.mark.parametrize("kind", KINDS)
def test_from_slots(kind):
    batch = random_batch(np.random.default_rng(4), ops.make_config("csa", "fp8_ds_mla", 3, 5), kind)
    check(batch, ops.metadata(batch))


def test_from_slots_agrees_with_build():
    batch = random_batch(np.random.default_rng(4), ops.make_config("csa", "fp8_ds_mla", 3, 5), holes=True)
    built, given_slots = build(batch, rollback=2), None
    names = ("positions", "token_to_req", "slot_mapping", "kv_slot_mapping", "block_table", "query_start_loc")
    given_slots = CompressorMetadata.from_slots(batch.config, *(getattr(built, name) for name in names), rollback=2)
    jax.tree.map(np.testing.assert_array_equal, built, given_slots)


def test_under_jit_new_values_do_not_compile_again():
    config = ops.make_config("csa", "fp8_ds_mla")
    traces = []

    @jax.jit
    def plan(starts, seq_lens, table, kv_table):
        traces.append(1)
        return CompressorMetadata.build(config, starts, seq_lens, table, kv_table, num_tokens=30)

    for seed in range(4):
        batch = random_batch(np.random.default_rng(seed), config, KINDS[seed], tokens=27)
        assert len(batch.positions) == 30
        check(batch, plan(batch.query_start_loc, batch.seq_lens, batch.block_table, batch.kv_block_table))
    assert len(traces) == 1


def test_what_is_saved_by_hand():
    """CSA, m = 4, one request of 10 tokens: the open window is 8-9, before it 4-7."""
    batch = random_batch(np.random.default_rng(0), ops.make_config("csa", "bf16"), sizes=[(0, 10)], padding=0)
    assert saved_rows(build(batch)) == [4, 5, 6, 7, 8, 9]
    assert saved_rows(build(batch, rollback=2)) == [4, 5, 6, 7, 8, 9]
    assert saved_rows(build(batch, rollback=3)) == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
    whole = random_batch(np.random.default_rng(0), ops.make_config("csa", "bf16"), sizes=[(4, 8)], padding=0)
    assert saved_rows(build(whole)) == [4, 5, 6, 7]  # positions 8-11
    assert saved_rows(build(whole, rollback=1)) == [0, 1, 2, 3, 4, 5, 6, 7]
    long = random_batch(np.random.default_rng(0), ops.make_config("hca", "bf16"), sizes=[(0, 130), (0, 128)], padding=0)
    assert saved_rows(build(long)) == [128, 129]  # without overlap nothing before the open window is needed


def test_empty():
    config = ops.make_config("csa", "bf16")
    none = np.zeros((0, 3), np.int32)
    meta = CompressorMetadata.build(config, np.zeros(1, np.int32), np.zeros(0, np.int32), none, none, num_tokens=0)
    assert all(len(getattr(meta, k)) == 0 for k in ("positions", "closing", "window_slots", "saving"))
    meta = CompressorMetadata.build(config, np.zeros(1, np.int32), np.zeros(0, np.int32), none, none, num_tokens=5)
    for name in ("slot_mapping", "kv_slot_mapping", "closing", "saving"):
        assert (np.asarray(getattr(meta, name)) == -1).all(), name


def test_int64_indices_beyond_int32_stay_outside():
    batch = random_batch(np.random.default_rng(0), ops.make_config("csa", "bf16"), sizes=[(0, 12)], padding=0)
    names = ("positions", "token_to_req", "slot_mapping", "kv_slot_mapping", "block_table", "query_start_loc")
    with jax.enable_x64(True):
        wide = {name: getattr(batch, name).astype(np.int64) for name in names}
        wide["slot_mapping"][[8, 9]] = [2**32 + 1, -(2**33) + 2]  # wrapped they would be slots 1 and 2
        wide["kv_slot_mapping"][3] = 2**32
        wide["block_table"][0, 0] = 2**32
        meta = CompressorMetadata.from_slots(batch.config, *(jnp.asarray(wide[name]) for name in names))
        assert all(array.dtype == jnp.int32 for array in jax.tree.leaves(meta))
        outside = len(batch.state) * batch.config.page_rows
        slots = np.asarray(meta.slot_mapping)
        assert all(s < 0 or s >= outside for s in slots[[8, 9]])
        k = int(meta.kv_slot_mapping[3])
        assert k < 0 or k >= len(batch.cache) * batch.config.kv_page_rows
        page = int(meta.block_table[0, 0])
        assert page < 0 or page >= len(batch.state)
        _, cache = ops.compress(batch, meta, implementation="xla")
        exact = ops.rows(batch, batch.state, from_batch=True)
        exact = ops.without(exact, 3)
        assert exact.tokens.tolist() == [7, 11]
        oracle.assert_same_cache(cache, batch.cache, exact, batch.config)


def test_is_one_pytree():
    batch = random_batch(np.random.default_rng(0), ops.make_config("csa", "bf16"))
    meta = build(batch)
    leaves, tree = jax.tree.flatten(meta)
    assert len(leaves) == 9
    assert isinstance(jax.tree.unflatten(tree, leaves), CompressorMetadata)


def test_the_saved_tail_is_that_of_the_tokens_in_the_batch():
    """A batch cut short, or padded inside a request, keeps the rows after the last window that it closes."""
    config = ops.make_config("hca", "bf16")
    table, kv_table = jnp.arange(50, dtype=jnp.int32)[None], jnp.arange(3, dtype=jnp.int32)[None]
    cut = CompressorMetadata.build(config, jnp.array([0, 300]), jnp.array([300]), table, kv_table, num_tokens=200)
    assert np.asarray(cut.saving[:73, 0]).tolist() == [*range(128, 200), -1]
    padded = {"positions": np.r_[0:200, np.zeros(56)], "slot_mapping": np.r_[0:200, np.full(56, -1)]}
    padded = {k: jnp.asarray(v, jnp.int32) for k, v in padded.items()}
    nothing = jnp.full(256, -1, jnp.int32)
    meta = CompressorMetadata.from_slots(
        config,
        token_to_req=jnp.zeros(256, jnp.int32),
        kv_slot_mapping=nothing,
        block_table=table,
        query_start_loc=jnp.array([0, 256]),
        **padded,
    )
    assert np.asarray(meta.saving[:73, 0]).tolist() == [*range(128, 200), -1]


def test_int64_pages_of_numpy_do_not_wrap():
    """2**32 is no page of any cache; as int32 it would be page 0."""
    config = ops.make_config("csa", "bf16")
    far = np.array([[2**32]])
    meta = CompressorMetadata.build(config, np.array([0, 4]), np.array([4]), far, far, num_tokens=4)
    assert (np.asarray(meta.slot_mapping) == -1).all() and (np.asarray(meta.closing) == -1).all()
    rows = jnp.ones((1, 8))
    state = dsv4_jax.save_partial_states(
        rows, rows, jnp.zeros((4, 8)), np.array([0]), jnp.zeros((2, 4, 16)), np.array([2**32]), compress_ratio=4
    )
    assert not state.any()


@pytest.mark.parametrize(
    ("kind", "tokens", "requests", "prefill"),
    [
        ("csa", 14, 4, True), ("csa", 13, 4, False), ("csa", 8, 8, False),
        ("hca", 64, 1, True), ("hca", 63, 1, False), ("hca", 1, 1, False),
        ("hca", 640, 5, True), ("hca", 639, 6, False),
    ],
)  # fmt: skip
def test_a_prefill_fills_half_the_windows_that_may_close(kind, tokens, requests, prefill):
    # At most tokens // ratio + requests windows close, and one a token.
    config = ops.make_config(kind, "bf16")
    arrays = jnp.arange(requests + 1), jnp.ones(requests, jnp.int32), *[jnp.zeros((requests, 4), jnp.int32)] * 2
    built = jax.eval_shape(lambda: CompressorMetadata.build(config, *arrays, num_tokens=tokens))
    assert built.prefill is prefill


NAMES = ("positions", "token_to_req", "slot_mapping", "kv_slot_mapping", "block_table", "query_start_loc")


def padded(arrays, before, request=-1):
    """The same batch with a row of padding before some of its rows, each in the range of the request that it is in."""
    filled = {"positions": -1, "token_to_req": request, "slot_mapping": -1, "kv_slot_mapping": -1, "kv_score": np.nan}
    found = {k: np.insert(np.asarray(v), before, filled[k], axis=0) for k, v in arrays.items() if k in filled}
    starts = np.asarray(arrays["query_start_loc"])
    found["query_start_loc"] = starts + (np.asarray(before) < starts[:, None]).sum(axis=1, dtype=np.int32)
    return arrays | found


def same_but_for_padding(config, arrays, compress):
    """Asserts that padding before, between and after the tokens of requests changes neither cache nor state."""
    want = compress(arrays)
    starts = np.asarray(arrays["query_start_loc"])
    for request in (-1, 0, 1):
        got = compress(padded(arrays, [starts[0], starts[1], starts[1], starts[-1]], request))
        for one, other in zip(got, want, strict=True):
            ops.same_bytes(one, other)


def compress_rows(batch):
    def compress(arrays):
        meta = CompressorMetadata.from_slots(batch.config, *(jnp.asarray(arrays[name]) for name in NAMES))
        changed = dataclasses.replace(batch, kv_score=arrays["kv_score"])
        return ops.compress(changed, meta, "xla")

    return compress


def test_padding_around_requests_changes_nothing():
    """The first goes on at positions 4 to 7: a row of padding before them is no row of the window."""
    config = ops.make_config("csa", "bf16", 3, 5)
    batch = random_batch(np.random.default_rng(0), config, sizes=[(4, 4), (0, 13), (3, 6)], padding=0)
    same_but_for_padding(config, vars(batch), compress_rows(batch))


def test_padding_around_requests_changes_nothing_online():
    feed = Feed(online(page_rows=3), "xla")
    feed.step([4, 0, 11])
    counts = [4, 13, 7]
    meta = feed.metadata(counts, sum(counts))
    arrays = {name: getattr(meta, name) for name in NAMES} | {"kv_score": feed.batch(counts, sum(counts))}

    def compress(arrays):
        meta = CompressorMetadata.from_slots(feed.config, *(jnp.asarray(arrays[name]) for name in NAMES))
        return feed.compress(jnp.asarray(arrays["kv_score"]), feed.state, feed.cache, meta)

    jax.tree.map(
        np.testing.assert_array_equal, CompressorMetadata.from_slots(feed.config, *map(arrays.get, NAMES)), meta
    )
    same_but_for_padding(feed.config, arrays, compress)


def test_padding_between_the_tokens_of_a_request():
    """A gap between 5 and 6: the windows of 7 and 11 reach across it and get no key, those after it do."""
    config = ops.make_config("csa", "bf16")
    batch = random_batch(np.random.default_rng(0), config, sizes=[(4, 16)], padding=0, padded_requests=0)
    assert batch.positions[batch.closing].tolist() == [7, 11, 15, 19]
    exact = ops.rows(batch, batch.state, from_batch=True)
    gap = padded(vars(batch), [2], 0)
    state, cache = compress_rows(batch)(gap)
    ops.same_bytes(state, compress_rows(batch)(vars(batch))[0])
    oracle.assert_same_cache(cache, batch.cache, ops.without(exact, 3, 7), config)

    # The two steps read everything from the state cache, and need no neighbors.
    moved = dataclasses.replace(batch, **{k: gap[k] for k in (*NAMES, "kv_score")})
    cache = ops.store(moved, ops.save_partial_states(moved, implementation="xla"), implementation="xla")
    oracle.assert_same_cache(cache, batch.cache, exact, config)


def test_padding_between_the_tokens_of_a_request_online():
    """What comes after the gap is as if it had not been given."""
    want, feed = Feed(online(), "xla"), Feed(online(), "xla")
    want.step([11, 0, 2])
    meta = feed.metadata([24, 0, 2], 26)
    arrays = {name: getattr(meta, name) for name in NAMES} | {"kv_score": feed.batch([24, 0, 2], 26)}
    arrays = padded(arrays, [11], 0)
    meta = CompressorMetadata.from_slots(feed.config, *(jnp.asarray(arrays[name]) for name in NAMES))
    state, cache = feed.compress(jnp.asarray(arrays["kv_score"]), feed.state, feed.cache, meta)
    ops.same_bytes(state, want.state)
    ops.same_bytes(cache, want.cache)
