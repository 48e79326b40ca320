"""`compute_global_topk_indices_and_lens` against a loop over tokens, and what vLLM returned."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import golden
from helpers.indices import EXTREMES, MOST, same
from helpers.sweep import sweep

import dsv4_jax

GPU_TOO = True


def global_rows(topk, req, table, page_rows, valid):
    """The oracle of `compute_global_topk_indices_and_lens`, in Python's integers."""
    indices = np.full(topk.shape, -1, np.int64)
    for t, k in np.ndindex(topk.shape):
        r, i = int(req[t]), int(topk[t, k])
        if i < 0 or not 0 <= r < table.shape[0] or i // page_rows >= table.shape[1]:
            continue
        page = int(table[r, i // page_rows])
        if page >= 0 and (page + 1) * page_rows <= 2**31:
            indices[t, k] = page * page_rows + i % page_rows
    return indices, np.where(valid, (indices >= 0).sum(axis=1), 0)


def test_golden(implementation):
    g = golden.load("global_topk")
    arguments = g["topk"], g["req"], g["block_table"], int(g["meta"][0]), g["valid"]
    oracle = global_rows(*arguments)
    for returned, want in zip(oracle, (g["out"], g["lens"]), strict=True):
        np.testing.assert_array_equal(returned, want)
    same(dsv4_jax.compute_global_topk_indices_and_lens(*arguments, implementation=implementation), oracle)


BATCHES = [(1, 1, 1), (9, 4, 8), (33, 3, 40)]  # tokens, requests, columns of the block table
SIZES = [(*BATCHES[0], 1, 64), (*BATCHES[0], 1100, 7), (*BATCHES[1], 512, 64), (*BATCHES[1], 64, 7)]
SIZES += [(*BATCHES[2], 1100, 64)]
ALL = [(*batch, topk, page_rows) for batch in BATCHES for topk in (1, 64, 512, 1100) for page_rows in (7, 64)]


@pytest.mark.parametrize(
    ("tokens", "requests", "columns", "topk", "page_rows"), [*SIZES, *sweep(*(c for c in ALL if c not in SIZES))]
)
def test_sizes(tokens, requests, columns, topk, page_rows, implementation):
    rng = np.random.default_rng(tokens * 7 + topk)
    local = rng.integers(-2, columns * page_rows, (tokens, topk), np.int32)
    req = rng.integers(0, requests, tokens, np.int32)
    table = rng.permutation(requests * columns).reshape(requests, columns).astype(np.int32)
    arguments = local, req, table, page_rows, rng.random(tokens) < 0.8
    got = dsv4_jax.compute_global_topk_indices_and_lens(*arguments, implementation=implementation)
    same(got, global_rows(*arguments))


@pytest.mark.parametrize(("tokens", "topk", "table"), [(0, 4, (2, 3)), (3, 0, (1, 1)), (3, 5, (0, 4)), (3, 5, (2, 0))])
def test_of_nothing(tokens, topk, table, implementation):
    arrays = np.zeros((tokens, topk), np.int32), np.zeros(tokens, np.int32), np.zeros(table, np.int32)
    got = dsv4_jax.compute_global_topk_indices_and_lens(
        *arrays, 64, np.ones(tokens, bool), implementation=implementation
    )
    same(got, (np.full((tokens, topk), -1), np.zeros(tokens)))


@pytest.mark.parametrize("page_rows", [1, 64, 2**30, MOST])
def test_outside(page_rows, implementation):
    """Indices, requests and pages that no array holds: by hand, then every extreme with every other."""
    topk = np.array([[0, 127, 128, -1, MOST, -(2**31)]] * 6, np.int32)
    req = np.array([0, 1, 2, -1, MOST, -(2**31)], np.int32)
    table = np.array([[3, -1], [MOST, 2**25 - 1]], np.int32)
    valid = np.ones(6, bool)
    got = dsv4_jax.compute_global_topk_indices_and_lens(
        topk, req, table, page_rows, valid, implementation=implementation
    )
    if page_rows == 64:
        assert np.asarray(got[0][0]).tolist() == [192, -1, -1, -1, -1, -1]
        # The last page that fits int32 entirely ends with the largest row.
        assert np.asarray(got[0][1]).tolist() == [-1, MOST, -1, -1, -1, -1]
        assert np.asarray(got[1]).tolist() == [1, 1, 0, 0, 0, 0]
    same(got, global_rows(topk, req, table, page_rows, valid))
    values = np.array((*EXTREMES, 0, 1, 63, 64, 65), np.int32)
    topk, req = np.tile(values, (len(values), 1)), values
    table = np.array([[0, 2**25], [5, MOST], [2**25 - 1, -(2**31)]], np.int32)
    valid = np.arange(len(values)) % 3 > 0
    got = dsv4_jax.compute_global_topk_indices_and_lens(
        topk, req, table, page_rows, valid, implementation=implementation
    )
    same(got, global_rows(topk, req, table, page_rows, valid))


def test_inside_jit(implementation):
    """One trace serves new values; the op's name stands in the jaxpr."""
    rng, traces = np.random.default_rng(3), []

    @jax.jit
    def call(topk, req, table, valid):
        traces.append(1)
        return dsv4_jax.compute_global_topk_indices_and_lens(topk, req, table, 7, valid, implementation=implementation)

    for _ in range(2):
        req, table = rng.integers(0, 2, 6, np.int32), rng.permutation(20).astype(np.int32).reshape(2, 10)
        topk, valid = rng.integers(0, 64, (6, 8), np.int32), rng.random(6) < 0.5
        same(call(topk, req, table, valid), global_rows(topk, req, table, 7, valid))
    assert len(traces) == 1
    assert "compute_global_topk_indices_and_lens" in str(jax.make_jaxpr(call)(topk, req, table, valid))


def test_int64(implementation):
    """int64 beyond int32 does not wrap round to an index that is inside."""
    with jax.enable_x64(True):
        topk = jnp.asarray(np.array([[1, 2**32 + 1], [2, -(2**40)]]))
        req, table = jnp.array([0, 2**32]), jnp.array([[4, 2**32]])
        got = dsv4_jax.compute_global_topk_indices_and_lens(
            topk, req, table, 2, np.ones(2, bool), implementation=implementation
        )
        same(got, ([[9, -1], [-1, -1]], [1, 0]))


def ids(*shape):
    return jnp.zeros(shape, jnp.int32)


RIGHT = {
    "topk_indices": ids(6, 8),
    "token_to_req": ids(6),
    "block_table": ids(2, 3),
    "page_rows": 64,
    "is_valid_token": jnp.ones(6, bool),
}
INT = r"it must be int32 or int64"
WHOLE = r"it must be an integer of at least 1"
BAD = [
    *((n, RIGHT[n] + 0.0, TypeError, f"{n} has dtype float32; {INT}") for n in list(RIGHT)[:3]),
    ("topk_indices", 5, TypeError, "topk_indices is a int; it must be an array"),
    ("topk_indices", ids(6), ValueError, r"topk_indices has shape \[6\]; it must be \[T, K\]"),
    ("token_to_req", ids(5), ValueError, r"token_to_req has shape \[5\]; it must be \[6\]"),
    ("block_table", [[1], [2, 3]], ValueError, "block_table is a list that is no array: .*inhomogeneous"),
    ("block_table", np.ma.ones((2, 3), np.int32), TypeError, "block_table is a MaskedArray; it must be"),
    ("is_valid_token", jax.ShapeDtypeStruct((6,), bool), TypeError, "is_valid_token is a ShapeDtypeStruct; "),
    ("block_table", ids(6), ValueError, r"block_table has shape \[6\]; it must be \[R, B\]"),
    ("is_valid_token", ids(6), TypeError, "is_valid_token has dtype int32; it must be bool"),
    ("is_valid_token", jnp.ones((6, 1), bool), ValueError, r"is_valid_token has shape \[6, 1\]; .*\[6\]"),
    ("page_rows", 0, ValueError, f"page_rows is 0; {WHOLE}"),
    ("page_rows", 2**31, ValueError, r"page_rows is 2147483648; .*below 2\*\*31"),
    ("page_rows", 64.0, ValueError, rf"page_rows is 64\.0; {WHOLE}"),
    ("implementation", "cuda", ValueError, "implementation is 'cuda'; it must be one of 'xla'"),
]


@pytest.mark.parametrize(("name", "wrong", "error", "match"), BAD)
def test_bad_input(name, wrong, error, match):
    with pytest.raises(error) as caught:
        dsv4_jax.compute_global_topk_indices_and_lens(**RIGHT | {name: wrong})
    assert re.search(match, str(caught.value)), caught.value


def test_what_bad_input_starts_from_is_right():
    assert jax.eval_shape(lambda: dsv4_jax.compute_global_topk_indices_and_lens(**RIGHT))[1].shape == (6,)
