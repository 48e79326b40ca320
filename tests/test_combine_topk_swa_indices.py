"""`combine_topk_swa_indices` against loops over requests and tokens, and what vLLM returned."""

import functools
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import golden
from helpers.indices import EXTREMES, MOST, same
from helpers.sweep import sweep
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import dsv4_jax

GPU_TOO = True


def combined(topk_indices, starts, seq_lens, gather_lens, window, ratio, topk, m, n):
    """The oracle of `combine_topk_swa_indices` for ascending starts, request by request, in Python's integers."""
    tokens = len(topk_indices)
    indices = np.full((tokens, (topk + window + 127) // 128 * 128), -1, np.int64)
    lens = np.zeros(tokens, np.int64)
    starts = [int(s) for s in starts]
    for b, (seq_len, gather_len) in enumerate(zip(map(int, seq_lens), map(int, gather_lens), strict=True)):
        for t in range(tokens):
            token = starts[0] + t
            position = seq_len - (starts[b + 1] - token)
            if not starts[b] <= token < starts[b + 1] or position < 0 or not 0 <= gather_len <= seq_len:
                continue
            closed = (position + 1) // ratio
            row = [m * b + int(i) if 0 <= i < min(n, closed) else -1 for i in topk_indices[t, : min(closed, topk)]]
            for q in range(max(position - window + 1, 0), position + 1):
                gathered = q - (seq_len - gather_len)
                row.append(m * b + n + gathered if 0 <= gathered < m - n else -1)
            indices[t, : len(row)] = row
            lens[t] = len(row)
    return indices, lens


@pytest.mark.parametrize(("case", "later"), [("r4", 6), ("r128", 7), ("r1", 0)])
def test_golden(case, later, implementation):
    """The recorded indices are random. Some name keys of later tokens; vLLM attends to these, this op does not."""
    g = golden.load(f"combine_topk_swa/{case}")
    arguments = g["topk"], g["query_start_loc"], g["seq_lens"], g["gather_lens"], *map(int, g["meta"])
    oracle = combined(*arguments)
    differ = oracle[0] != g["out"]
    assert differ.sum() == later and (oracle[0][differ] == -1).all()
    np.testing.assert_array_equal(oracle[1], g["lens"])
    same(dsv4_jax.combine_topk_swa_indices(*arguments, implementation=implementation), oracle)


def batch(rng, lengths, *, padding=0, first=0, topk=8, n=64, window=9, ratio=4, spare=5):
    """Ragged requests of (tokens before, tokens now): arguments up to gather_lens, and M."""
    before, now = np.array(lengths, np.int64).reshape(-1, 2).T
    starts = first + np.concatenate([[0], np.cumsum(now)])
    seq_lens = before + now
    gather_lens = np.minimum(seq_lens, now + window - 1)
    positions = [*(p for a, b in zip(before, now, strict=True) for p in range(a, a + b)), *[0] * padding]
    closed = np.clip((np.array(positions, np.int64) + 1) // ratio, 1, n)
    topk_indices = rng.integers(0, 2**20, (len(positions), topk)) % closed[:, None]
    arguments = (a.astype(np.int32) for a in (topk_indices, starts, seq_lens, gather_lens))
    return *arguments, n + int(gather_lens.max(initial=0)) + spare


RAGGED = {
    "one token": [(0, 1)],
    "prefill": [(0, 21)],
    "decode": [(t, 1) for t in (0, 2, 3, 40, 511, 512, 700)],
    "chunked": [(0, 5), (13, 4), (7, 0), (500, 3), (0, 0)],
    "nothing": [(0, 0), (9, 0)],
    "no requests": [],
}


@pytest.mark.parametrize("name", ["decode", "chunked", "nothing", *sweep("one token", "prefill", "no requests")])
@pytest.mark.parametrize(("window", "ratio", "topk", "columns"), [(128, 4, 8, 8), (1, 1, 200, 203), (9, 128, 0, 0)])
def test_sizes(name, window, ratio, topk, columns, implementation):
    rng = np.random.default_rng(len(name))
    *arrays, m = batch(rng, RAGGED[name], padding=3, topk=columns, window=window, ratio=ratio)
    arguments = *arrays, window, ratio, topk, m, 64
    oracle = combined(*arguments)
    # Every index is in the buffer, and but for padding nothing that should be there is -1.
    assert (oracle[0] < m * max(len(arrays[2]), 1)).all() and ((oracle[0] >= 0).sum(axis=1) == oracle[1]).all()
    assert (oracle[1][len(oracle[1]) - 3 :] == 0).all()
    same(dsv4_jax.combine_topk_swa_indices(*arguments, implementation=implementation), oracle)


def test_without_tokens(implementation):
    empty = np.zeros((0, 8), np.int32)
    loc, lens = np.zeros(3, np.int32), np.array([3, 0], np.int32)
    got = dsv4_jax.combine_topk_swa_indices(empty, loc, lens, lens, 128, 4, 8, 70, 64, implementation=implementation)
    assert got[0].shape == (0, 256) and got[1].shape == (0,)


def test_many_requests(implementation):
    """More requests than the kernel compares at once."""
    rng = np.random.default_rng(0)
    *arrays, m = batch(rng, rng.integers(0, (9, 2), (300, 2)))
    arguments = *arrays, 9, 4, 8, m, 64
    same(dsv4_jax.combine_topk_swa_indices(*arguments, implementation=implementation), combined(*arguments))


@pytest.mark.parametrize("first", [5, 2**31 - 100])
def test_slice_of_a_batch(first, implementation):
    """query_start_loc need not begin at 0: the rows given are those from its first entry."""
    *arrays, m = batch(np.random.default_rng(1), RAGGED["chunked"], first=first)
    arguments = *arrays, 9, 4, 8, m, 64
    got = dsv4_jax.combine_topk_swa_indices(*arguments, implementation=implementation)
    arrays[1] -= first
    same(got, combined(*arrays, *arguments[4:]))


def test_outside(implementation):
    """Top-k indices outside the compressed rows, tokens that were not gathered, a buffer too short: -1 in place."""
    topk = np.array([[0, 3, 4, -1], [MOST, 2, -(2**31), 1]], np.int32)
    loc, seq_lens = np.array([0, 1, 2], np.int32), np.array([20, 20], np.int32)
    gather_lens = np.array([2, 6], np.int32)
    call = functools.partial(dsv4_jax.combine_topk_swa_indices, topk, loc, seq_lens, implementation=implementation)
    indices, lens = call(gather_lens, 3, 4, 4, 8, 4)
    assert np.asarray(lens).tolist() == [7, 7]
    assert np.asarray(indices)[:, :8].tolist() == [[0, 3, -1, -1, -1, 4, 5, -1], [-1, 10, -1, 9, 15, -1, -1, -1]]
    assert (np.asarray(indices)[:, 8:] == -1).all()
    # M = N: no room for the window; M = N = 0: none for anything.
    indices, lens = call(gather_lens, 3, 4, 4, 4, 4)
    assert np.asarray(indices)[:, :8].tolist() == [[0, 3, -1, -1, -1, -1, -1, -1], [-1, 6, -1, 5, -1, -1, -1, -1]]
    indices, lens = call(gather_lens, 3, 4, 4, 0, 0)
    assert (np.asarray(indices) == -1).all() and np.asarray(lens).tolist() == [7, 7]
    # The largest buffer whose rows fit int32.
    m = 2**30 - 1
    indices, _ = call(np.array([20, 20], np.int32), 1, 4, 1, m, m - 20)
    assert np.asarray(indices)[:, :2].tolist() == [[0, m - 1], [-1, 2 * m - 1]]


def test_keys_of_later_tokens(implementation):
    """At position 4 key 0 is of the past; key 1 is made of tokens up to 7. At 8 key 1 is known, and key 2 is not."""
    topk, loc = np.array([[1, 0], [1, 2]], np.int32), np.array([0, 1, 2], np.int32)
    lens = np.array([5, 9], np.int32)
    indices, lens = dsv4_jax.combine_topk_swa_indices(
        topk, loc, lens, lens, 1, 4, 2, 20, 8, implementation=implementation
    )
    assert np.asarray(indices)[:, :4].tolist() == [[-1, 8 + 4, -1, -1], [20 + 1, -1, 20 + 8 + 8, -1]]
    assert np.asarray(lens).tolist() == [2, 3]


@pytest.mark.parametrize("name", ["seq_lens", "gather_lens"])
@pytest.mark.parametrize("wrong", EXTREMES)
def test_impossible_lengths(name, wrong, implementation):
    """A request with such lengths has empty rows; the others keep theirs."""
    *arrays, m = batch(np.random.default_rng(2), [(3, 2), (4, 3), (30, 2)])
    arrays[{"seq_lens": 2, "gather_lens": 3}[name]][1] = wrong
    arguments = *arrays, 9, 4, 8, m, 64
    indices, lens = dsv4_jax.combine_topk_swa_indices(*arguments, implementation=implementation)
    if name == "seq_lens" and wrong > 0:  # long indeed, and gathered from its end: every row is in the buffer
        assert np.asarray(lens)[2:5].tolist() == [17, 17, 17]
    else:
        assert np.asarray(lens)[2:5].tolist() == [0, 0, 0] and (np.asarray(indices)[2:5] == -1).all()
    same((indices, lens), combined(*arguments))


numbers = st.one_of(st.sampled_from(EXTREMES), st.integers(-3, 30))


@settings(max_examples=30, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    st.lists(numbers, min_size=4, max_size=4),
    st.lists(numbers, min_size=3, max_size=3),
    st.lists(numbers, min_size=3, max_size=3),
    st.integers(0, 99),
)
def test_stays_in_the_buffer(implementation, starts, seq_lens, gather_lens, seed):
    """Whatever the arrays hold, an index is -1 or one of its request's rows, and as many stand there as lens says."""
    rng = np.random.default_rng(seed)
    topk_indices = rng.choice(np.array((*EXTREMES, *range(12)), np.int32), (12, 8))
    arrays = [np.array(a, np.int32) for a in (starts, seq_lens, gather_lens)]
    arguments = topk_indices, *arrays, 9, 4, 8, 30, 10
    indices, lens = map(np.asarray, dsv4_jax.combine_topk_swa_indices(*arguments, implementation=implementation))
    assert ((indices >= -1) & (indices < 90)).all()
    assert ((lens >= 0) & (lens <= 17)).all()
    assert (np.where(np.arange(128) < lens[:, None], -1, indices) == -1).all()
    assert all(len({i // 30 for i in row if i >= 0}) <= 1 for row in indices.tolist())
    if (np.diff(arrays[0].astype(np.int64)) >= 0).all() and starts[0] + 12 <= MOST:
        same((indices, lens), combined(*arguments))


def test_inside_jit(implementation):
    """One trace serves new values; the op's name stands in the jaxpr."""
    rng, traces = np.random.default_rng(3), []

    @jax.jit
    def call(topk, loc, seq_lens, gather_lens):
        traces.append(1)
        return dsv4_jax.combine_topk_swa_indices(
            topk, loc, seq_lens, gather_lens, 9, 4, 8, 90, 64, implementation=implementation
        )

    for lengths in ([(3, 2), (9, 4)], [(0, 5), (20, 1)]):
        *arrays, _ = batch(rng, lengths, padding=6 - sum(now for _, now in lengths))
        same(call(*arrays), combined(*arrays, 9, 4, 8, 90, 64))
    assert len(traces) == 1
    assert "combine_topk_swa_indices" in str(jax.make_jaxpr(call)(*arrays))


def test_int64(implementation):
    """int64 beyond int32 does not wrap round to an index that is inside."""
    with jax.enable_x64(True):
        topk = jnp.asarray(np.array([[0, 2**32], [2**32 + 1, -(2**40)]]))
        got = dsv4_jax.combine_topk_swa_indices(
            topk, jnp.array([0, 2]), jnp.array([2]), jnp.array([2]), 2, 1, 2, 12, 8, implementation=implementation
        )
        same((got[0][:, :4], got[1]), ([[0, 8, -1, -1], [-1, -1, 8, 9]], [2, 4]))


def test_programs_in_the_docs(capsys):
    """They print what their comments say."""
    text = (pathlib.Path(__file__).parents[1] / "docs" / "ops.md").read_text()
    programs = [p for p in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if re.search("topk_indices_|swa_", p)]
    assert len(programs) == 2
    for program in programs:
        said = re.findall(r"^print\(.*\)  # (.*)$", program, re.MULTILINE)
        exec(program, {})
        assert said and capsys.readouterr().out.splitlines() == said


def ids(*shape):
    return jnp.zeros(shape, jnp.int32)


RIGHT = {
    "topk_indices": ids(6, 8),
    "query_start_loc": ids(3),
    "seq_lens": ids(2),
    "gather_lens": ids(2),
    "window_size": 128,
    "compress_ratio": 4,
    "topk": 8,
    "M": 100,
    "N": 60,
}
WHOLE = r"it must be an integer of at least {}"
BAD = [
    *((n, RIGHT[n] > 0, TypeError, f"{n} has dtype bool; it must be int32 or int64") for n in list(RIGHT)[:4]),
    ("topk_indices", 5, TypeError, "topk_indices is a int; it must be an array"),
    ("topk_indices", ids(6), ValueError, r"topk_indices has shape \[6\]; it must be \[T, K\]"),
    ("query_start_loc", ids(2), ValueError, r"query_start_loc has shape \[2\]; it must be \[3\]"),
    ("seq_lens", ids(2, 1), ValueError, r"seq_lens has shape \[2, 1\]; it must be \[R\]"),
    ("seq_lens", [], ValueError, r"query_start_loc has shape \[3\]; it must be \[1\]"),
    ("gather_lens", ids(3), ValueError, r"gather_lens has shape \[3\]; it must be \[2\]"),
    ("window_size", 0, ValueError, "window_size is 0; " + WHOLE.format(1)),
    ("compress_ratio", 0, ValueError, "compress_ratio is 0; " + WHOLE.format(1)),
    ("topk", -1, ValueError, "topk is -1; " + WHOLE.format(0)),
    ("topk", 9, ValueError, "topk is 9; it must be at most 8, the columns of topk_indices"),
    ("M", 59, ValueError, "N is 60; it must be at most M, 59"),
    ("M", 2**30, ValueError, r"M is 1073741824; M times 2 requests must be below 2\*\*31"),
    ("N", -1, ValueError, "N is -1; " + WHOLE.format(0)),
    ("N", True, ValueError, "N is True; " + WHOLE.format(0)),
    ("implementation", "cuda", ValueError, "implementation is 'cuda'; it must be one of 'xla'"),
]


@pytest.mark.parametrize(("name", "wrong", "error", "match"), BAD)
def test_bad_input(name, wrong, error, match):
    with pytest.raises(error) as caught:
        dsv4_jax.combine_topk_swa_indices(**RIGHT | {name: wrong})
    assert re.search(match, str(caught.value)), caught.value


def test_what_bad_input_starts_from_is_right():
    assert jax.eval_shape(lambda: dsv4_jax.combine_topk_swa_indices(**RIGHT))[1].shape == (6,)
