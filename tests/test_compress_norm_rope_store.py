"""`compress_norm_rope_store` where the state cache lacks rows, and by its names; test_compress.py has the formats."""

import dataclasses

import numpy as np
import pytest
from helpers import named, ops, oracle
from helpers.batches import random_batch


def test_window_slots_outside_the_state_are_absent(implementation):
    """As if the block table had no such page."""
    config = ops.make_config("csa", "bf16", 1, 4)
    batch = random_batch(np.random.default_rng(1), config, sizes=[(0, 8)], padding=0, padded_requests=0)
    state = ops.saved(batch)
    table = batch.block_table.copy()
    table[0, [1, 2, 5]] = -1
    exact = ops.rows(dataclasses.replace(batch, block_table=table), state, from_batch=False)
    slots = np.array(ops.metadata(batch).window_slots)
    for outside in ([len(state), -2, 2**31 - 1], [-(2**31), len(state) + 5, -1]):
        changed = slots.copy()
        changed[1, [1, 2, 5]] = outside  # the window of positions 0-7
        changed[0, [4 + 1, 4 + 2]] = outside[:2]  # that of positions 0-3
        cache = ops.store(batch, state, ops.metadata(batch, window_slots=changed), implementation=implementation)
        oracle.assert_same_cache(cache, batch.cache, exact, config)


def test_absent_rows(implementation):
    """A window without a state row writes nothing; one row is enough, and is then the whole window."""
    config = ops.make_config("csa", "bf16", 1, 4)
    batch = random_batch(np.random.default_rng(1), config, sizes=[(0, 8)], padding=0)
    state = ops.saved(batch)
    table = np.full_like(batch.block_table, -1)
    empty = dataclasses.replace(batch, block_table=table)
    ops.same_bytes(ops.store(empty, state, implementation=implementation), batch.cache)
    table[0, 6] = batch.block_table[0, 6]
    one = dataclasses.replace(batch, block_table=table)
    exact = ops.rows(one, state, from_batch=False)
    assert exact.tokens.tolist() == [7]
    oracle.assert_same_cache(ops.store(one, state, implementation=implementation), batch.cache, exact, config)


CUTEDSL = ["compress_norm_rope_store_cutedsl", "fused_kv_compress_norm_rope_insert_sparse_attn_cutedsl"]


@pytest.mark.parametrize("name", CUTEDSL)
@pytest.mark.parametrize(("kind", "kernel"), [("csa", "_short_windows"), ("hca", "_long_windows")])
def test_named_kernels_are_one_launch(name, kind, kernel, compiled_kernels):
    named.check_one_launch(name, kind, kernel, "fp8_ds_mla", compiled_kernels)


@pytest.mark.parametrize("name", CUTEDSL)
def test_named_kernels_say_what_is_missing(name, monkeypatch):
    named.check_says_what_is_missing(name, monkeypatch)
