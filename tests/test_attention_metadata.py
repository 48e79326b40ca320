"""`AttentionMetadata` against a plain loop over requests."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4_jax import AttentionMetadata

ROWS, HCA_ROWS, WINDOW = 4, 2, 6


def expected(starts, seq_lens, table, hca_table, tokens):
    """Every attribute by name, from a loop."""
    width = hca_table.shape[1] * HCA_ROWS
    want = {name: np.full(tokens, -1) for name in ("positions", "token_to_req", "slot_mapping")}
    want |= {name: np.zeros(tokens, int) for name in ("window_lens", "csa_lens", "hca_lens")}
    want["window_indices"], want["hca_indices"] = np.full((tokens, WINDOW), -1), np.full((tokens, width), -1)
    want["gather_lens"] = np.zeros(len(seq_lens), int)

    def slot(row, index, rows):
        page = row[index // rows] if index // rows < len(row) else -1
        return page * rows + index % rows if page >= 0 and (page + 1) * rows < 2**31 else -1

    for r, length in enumerate(seq_lens):
        begin, end = starts[r], starts[r + 1]
        count = max(min(end - begin, max(length, 0)), 0)
        if count:
            want["gather_lens"][r] = count + min(length - count, WINDOW - 1)
        for t in range(max(begin, 0), min(end, tokens)):
            p = length - (end - t)
            if p < 0:
                continue
            want["positions"][t], want["token_to_req"][t] = p, r
            want["slot_mapping"][t] = slot(table[r], p, ROWS)
            keys = range(max(p - WINDOW + 1, 0), p + 1)
            want["window_indices"][t, : len(keys)] = [slot(table[r], key, ROWS) for key in keys]
            want["window_lens"][t] = len(keys)
            want["csa_lens"][t], want["hca_lens"][t] = (p + 1) // 4, (p + 1) // 128
            for i in range(min((p + 1) // 128, width)):
                want["hca_indices"][t, i] = slot(hca_table[r], i, HCA_ROWS)
    return want


def check(starts, seq_lens, table, hca_table, tokens):
    arrays = [jnp.asarray(a, jnp.int32) for a in (starts, seq_lens, table, hca_table)]
    options = {"num_tokens": tokens, "window": WINDOW, "page_rows": ROWS, "hca_page_rows": HCA_ROWS}
    got = AttentionMetadata.build(*arrays, **options)
    for name, value in expected(starts, seq_lens, table, hca_table, tokens).items():
        found = getattr(got, name)
        assert found.dtype == jnp.int32
        np.testing.assert_array_equal(found, value, err_msg=name)
    return got


def test_decode_and_drafts():
    """One token a request, and three: each token of a draft sees those before it."""
    table = np.arange(300).reshape(3, 100)[:, ::-1]
    meta = check([0, 1, 4, 5], [1, 300, 7], table, np.arange(6).reshape(3, 2) + 9, 5)
    assert meta.positions.tolist() == [0, 297, 298, 299, 6]
    assert meta.window_lens.tolist() == [1, 6, 6, 6, 6] and meta.hca_lens.tolist() == [0, 2, 2, 2, 0]
    assert meta.hca_indices[3].tolist() == [22, 23, -1, -1]


def test_chunked_prefill_padding_and_empty_requests():
    table = np.arange(60).reshape(4, 15)
    meta = check([0, 5, 5, 8, 9], [5, 11, 40, 1], table, np.full((4, 1), -1), 12)
    assert meta.gather_lens.tolist() == [5, 0, 8, 1]
    assert meta.positions[8:].tolist() == [0, -1, -1, -1]


def test_dummy_batches():
    """Of no request, no token, or padding alone."""
    none = np.zeros((0, 3), int)
    for tokens in (0, 4):
        meta = check([0], [], none, none, tokens)
        assert not (meta.window_lens.any() or meta.gather_lens.any())
        check([0, 0], [0], np.zeros((1, 0), int), np.zeros((1, 0), int), tokens)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_batch(data):
    """Lengths that a scheduler would not give, and tables with holes and pages far out, too."""
    draw = data.draw
    requests = 3
    counts = draw(st.lists(st.integers(0, 4), min_size=requests, max_size=requests))
    starts = np.concatenate([[0], np.cumsum(counts)]) + draw(st.sampled_from([0, 0, 1]))
    seq_lens = draw(st.lists(st.sampled_from([-1, 0, 1, 3, 4, 7, 130, 300]), min_size=requests, max_size=requests))
    pages = st.sampled_from([-1, 0, 5, 9, 2**29, 2**31 - 1])
    table = np.array(draw(st.lists(st.lists(pages, min_size=20, max_size=20), min_size=requests, max_size=requests)))
    hca = np.array(draw(st.lists(st.lists(pages, min_size=2, max_size=2), min_size=requests, max_size=requests)))
    check(starts.tolist(), seq_lens, table, hca, 10)


def test_at_layer():
    table = jnp.array([[1, 0, 7]])  # page 7 is past the layer's pages
    meta = AttentionMetadata.build(
        jnp.array([0, 2]), jnp.array([10]), table, jnp.array([[3]]), num_tokens=2, window=6, page_rows=4
    )

    @jax.jit
    def moved(layer):
        return meta.at_layer(layer, 2, hca_layer=layer, hca_pages=4)

    assert meta.window_indices[1].tolist() == [0, 1, 2, 3, 28, 29] and meta.slot_mapping.tolist() == [28, 29]
    at = moved(3)
    assert at.window_indices[1].tolist() == [24, 25, 26, 27, -1, -1] and at.slot_mapping.tolist() == [-1, -1]
    assert at.window_lens.tolist() == meta.window_lens.tolist() and at.hca_indices.shape == (2, 2)
    long = AttentionMetadata.build(jnp.array([0, 1]), jnp.array([256]), table, jnp.array([[3]]), num_tokens=1)
    assert long.at_layer(0, 2, 2, 4).hca_indices.tolist() == [[22, 23]]
    assert long.at_layer(1, 2).hca_indices.tolist() == long.hca_indices.tolist() == [[6, 7]]


def test_without_hca():
    meta = AttentionMetadata.build(jnp.array([0, 1]), jnp.array([300]), jnp.zeros((1, 5), jnp.int32), num_tokens=1)
    assert meta.hca_indices is None and meta.hca_lens.tolist() == [2] and meta.window_indices.shape == (1, 128)
    assert meta.at_layer(2, 9).hca_indices is None


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"query_start_loc": np.zeros(2, np.int32)}, r"query_start_loc has shape \[2\]; it must be \[3\]"),
        ({"block_table": np.zeros((1, 5), np.int32)}, r"block_table has shape \[1, 5\]; it must be \[2, B\]"),
        ({"hca_block_table": np.zeros(2, np.int32)}, r"hca_block_table has shape \[2\]; it must be \[2, C\]"),
        ({"num_tokens": -1}, "num_tokens is -1; it must be an integer of at least 0"),
        ({"window": 0}, "window is 0; it must be an integer of at least 1"),
    ],
)
def test_bad_input(changes, says):
    arguments = {
        "query_start_loc": np.array([0, 1, 2], np.int32),
        "seq_lens": np.array([3, 4], np.int32),
        "block_table": np.zeros((2, 5), np.int32),
        "num_tokens": 2,
    }
    with pytest.raises(ValueError, match=says):
        AttentionMetadata.build(**(arguments | changes))
