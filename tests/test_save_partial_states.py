"""`save_partial_states` against the formula, to the byte; test_compress.py saves whole batches with it."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from helpers import oracle

import dsv4_jax


@pytest.mark.parametrize("width", [512, 24])
@pytest.mark.parametrize("page_rows", [1, 7])
def test_rows_slots_and_values(width, page_rows, implementation):
    rng = np.random.default_rng(width + page_rows)
    for dtype in (np.float32, ml_dtypes.bfloat16):
        kv, score = rng.standard_normal((2, 9, width)).astype(np.float32).astype(dtype)
        kv[0, :3], score[1, :2] = (np.nan, np.inf, -0.0), (-np.inf, np.nan)
        ape = rng.standard_normal((4, width)).astype(np.float32)
        positions = np.array([0, 1, 2, 3, 1_048_575, 2**31 - 1, 6, 7, -1], np.int32)
        state = rng.standard_normal((4, page_rows, 2 * width)).astype(np.float32)
        free = rng.permutation(4 * page_rows)
        slots = np.array([*free[:4], 4 * page_rows, -1, 2**31 - 1, -(2**31), free[0]], np.int32)
        got = dsv4_jax.save_partial_states(
            *map(jnp.asarray, (kv, score, ape, positions, state, slots)),
            compress_ratio=4,
            implementation=implementation,
        )
        want = oracle.save_states(kv, score, ape, positions, state, slots, 4)
        assert (want != state).any(2).sum() == 4
        np.testing.assert_array_equal(np.asarray(got), want)  # a NaN is a NaN: x86 and GPUs differ in its payload
