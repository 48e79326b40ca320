"""The online state and data that is not as it should be: missing pages, wrong plans, values that are not finite."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from helpers import ops
from helpers.online import LENGTH, LONG, OUTSIDE, REQUESTS, Feed, few, online

import dsv4_jax
from dsv4_jax import CompressorConfig, CompressorMetadata


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
        if counts[0] == 1 and what not in few(list(VALUES), implementation, 2):
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
    for column, value in few(WRONG_CLOSING, implementation, 2):
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
    """`from_slots` with slots, positions and requests outside: what follows the first wrong token is left out."""
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
    for outside, kept in ((page, [14]), (len(feed.state), []), (-1, []), (2**31 - 1, [])):
        slots = np.full(tokens, outside, np.int32)
        meta = CompressorMetadata.from_slots(feed.config, positions, of, slots, keys, table, starts)
        state, cache = feed.compress(jnp.asarray(whole.kv_score[:tokens]), feed.state, feed.cache, meta)
        ops.same_bytes(cache, whole.cache)
        after = Feed(online(), implementation)
        after.state = state
        after.assert_states([kept, [], []])


@pytest.mark.parametrize("requests", [12, 1])  # one launch, two
def test_negative_positions_are_passed_over(requests, implementation):
    """A request whose first rows are no tokens begins at position 0."""
    feed = Feed(online(), implementation)
    before, tokens = 2, 10
    positions = np.arange(-before, tokens, dtype=np.int32)
    page = np.concatenate([feed.table[:1], np.full((requests - 1, 1), -1, np.int32)])
    slots = np.full(len(positions), page[0, 0], np.int32)
    keys = np.concatenate([np.full(before, -1, np.int32), feed.whole.kv_slot_mapping[:tokens]])
    starts = np.array([0, *[len(positions)] * requests], np.int32)
    meta = CompressorMetadata.from_slots(feed.config, positions, 0 * positions, slots, keys, page, starts)
    rows = feed.whole.kv_score[:tokens]
    kv_score = jnp.asarray(np.concatenate([np.full((before, rows.shape[1]), np.nan, rows.dtype), rows]))
    feed.state, feed.cache = feed.compress(kv_score, feed.state, feed.cache, meta)
    feed.done[0] = tokens
    assert feed.check() == 1
    feed.assert_states([[9], [], []])


def test_slots_that_contradict_the_block_table_save_nothing():
    config, zeros = online(page_rows=4), np.zeros(2, np.int32)
    for slots, saved in (([9, 10], []), ([5, 6], [5, 6]), ([6, 6], [6])):  # page 1 holds slots 4 to 7
        meta = CompressorMetadata.from_slots(
            config, np.array([1, 2]), zeros, np.array(slots), zeros - 1, np.array([[1]]), np.array([0, 2])
        )
        assert [slot for slot in meta.saving[:, 2].tolist() if slot >= 0] == saved


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
