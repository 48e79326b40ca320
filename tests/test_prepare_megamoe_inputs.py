"""`prepare_megamoe_inputs` against float64 and ml_dtypes, and by hand."""

import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from helpers import oracle
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import dsv4_jax

GPU_TOO = True
BF16 = ml_dtypes.bfloat16


def quantized(hidden):
    """The oracle's fp8 codes `[T, K]` and scale bytes `[T, K // 32]` of bfloat16 `[T, K]`."""
    with np.errstate(invalid="ignore"):
        blocks = np.asarray(hidden, np.float64).reshape(len(hidden), hidden.shape[1] // 32, 32)
        # Both propagate NaN.
        amax = np.maximum(np.abs(blocks).max(axis=2), 1e-4)
    exponents = np.array([[oracle.exponent(a, 448.0) for a in row] for row in amax], np.int64).reshape(amax.shape)
    codes = oracle.fp8_code(np.ldexp(blocks, -exponents[..., None])).reshape(hidden.shape)
    return codes, (exponents + 127).astype(np.uint8)


def routed(weights, ids, padding):
    """The oracle's ids and weights."""
    ids, weights = np.where(ids < 0, -1, ids), weights.copy()
    if padding is not None:
        ids[padding], weights[padding] = -1, 0.0
    return ids, weights


def check(got, hidden, weights, ids, padding):
    x, scales, got_ids, got_weights = map(np.asarray, got)
    assert [a.dtype for a in got] == [jnp.float8_e4m3fn, jnp.int32, jnp.int32, jnp.float32]
    codes, exponents = quantized(hidden)
    np.testing.assert_array_equal(x.view(np.uint8), codes)
    packed = (exponents.reshape(*scales.shape, 4).astype(np.int64) << np.array([0, 8, 16, 24])).sum(axis=2)
    np.testing.assert_array_equal(scales.astype(np.int64) % 2**32, packed)
    want_ids, want_weights = routed(weights, ids, padding)
    np.testing.assert_array_equal(got_ids, want_ids)
    np.testing.assert_array_equal(got_weights.view(np.int32), want_weights.view(np.int32))


def routing(rng, tokens, topk):
    return rng.random((tokens, topk), np.float32), rng.integers(-1, 256, (tokens, topk), np.int32)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(
    ("tokens", "width", "topk"),
    [(0, 128, 6), (1, 128, 1), (1, 4096, 8), (3, 7168, 6), (33, 128, 6), (33, 384, 0), (129, 256, 7), (2, 0, 3)],
)
def test_sizes(tokens, width, topk, padded, implementation):
    rng = np.random.default_rng(tokens + width)
    # Magnitudes from the least amax to far above fp8's.
    hidden = rng.normal(size=(tokens, width)) * np.exp2(rng.integers(-24, 24, (tokens, width // 32)).repeat(32, axis=1))
    arguments = hidden.astype(BF16), *routing(rng, tokens, topk)
    padding = rng.random(tokens) < 0.4 if padded else None
    got = dsv4_jax.prepare_megamoe_inputs(*arguments, padding, implementation=implementation)
    assert [a.shape for a in got] == [(tokens, width), (tokens, width // 128), (tokens, topk), (tokens, topk)]
    check(got, *arguments, padding)


@pytest.mark.parametrize("order", ["ascending", "shuffled"])
def test_every_bfloat16(order, implementation):
    """All 65 536 patterns: signed zeros, subnormals, infinities and NaN among them."""
    bits = np.arange(2**16, dtype=np.uint16)
    if order == "shuffled":
        # NaN and infinity rule their blocks: without most of them the others meet scales of their own.
        with np.errstate(invalid="ignore"):
            finite = np.isfinite(bits.view(BF16).astype(np.float32))
        usual = np.random.default_rng(0).permutation(bits[finite])
        bits = np.concatenate([usual, bits[~finite]])
    hidden = bits.view(BF16).reshape(16, 4096)
    arguments = hidden, *routing(np.random.default_rng(1), 16, 6)
    check(dsv4_jax.prepare_megamoe_inputs(*arguments, implementation=implementation), *arguments, None)


def test_by_hand(implementation):
    hidden = np.zeros((2, 256), np.float32)
    hidden[0, 0] = 448.0
    hidden[0, 32] = -450.0  # the next bfloat16 after 448 wants the next scale: -225 becomes -224
    hidden[0, 64:68] = 2.0**-20 * 448, -(2.0**-24) * 448, 0.0, -0.0
    hidden[0, 96] = 1e-5  # below the least amax: 1e-5 * 2**22 = 41.9
    hidden[0, 128 + 31] = np.inf
    hidden[0, 160] = np.nan
    hidden[0, 161] = 1e30
    hidden[0, 192:194] = 3e38, -np.inf
    hidden[1] = 1.0
    weights = np.array([[0.5, np.nan], [np.inf, 1.0]], np.float32)
    ids = np.array([[7, -1], [3, -9]], np.int32)
    got = dsv4_jax.prepare_megamoe_inputs(
        hidden.astype(BF16), weights, ids, np.array([False, True]), implementation=implementation
    )
    x, scales = np.asarray(got[0]).view(np.uint8), np.asarray(got[1])
    assert scales.dtype == np.int32
    assert scales.astype("<i4").view(np.uint8)[0].tolist() == [127, 128, 107, 105, 247, 247, 247, 105]
    assert (scales[1] == 0x77777777).all()  # 1 = 256 * 2**-8, byte 119 = 0x77
    assert x[0, 0] == 0x7E and x[0, 32] == 0xF6 and x[0, 64:68].tolist() == [0x7E, 0xDE, 0x00, 0x80]
    assert x[0, 96] == 0x62  # 40 or 44: 41.9 is nearer to 40, which is 1.25 * 2**5
    assert x[0, 128 + 31] == 0x7E and x[0, 160] == 0x7F and x[0, 161] == 0x00 and x[0, 193] == 0xFE
    assert (x[0, 224:] == 0).all() and (x[1] == 0x78).all()
    assert np.asarray(got[2]).tolist() == [[7, -1], [-1, -1]]
    assert np.asarray(got[3])[0, 0] == 0.5 and np.isnan(got[3][0, 1]) and (np.asarray(got[3])[1] == 0).all()


@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    st.lists(st.sampled_from([0.0, 1e-30, 1.0, 447.0, 448.0, 450.0, 896.0, 3e38]), min_size=8, max_size=8), st.data()
)
def test_scales_are_the_least_that_hold(implementation, peaks, data):
    """Blocks that peak at edges of the scale: nothing saturates, and half the scale would not do."""
    at = [data.draw(st.integers(0, 31)) for _ in peaks]
    hidden = np.zeros((2, 4, 32), np.float32)
    hidden.reshape(8, 32)[np.arange(8), at] = peaks
    hidden = hidden.reshape(2, 128).astype(BF16)
    arguments = hidden, *routing(np.random.default_rng(0), 2, 3)
    got = dsv4_jax.prepare_megamoe_inputs(*arguments, implementation=implementation)
    check(got, *arguments, None)
    amax = np.abs(hidden.astype(np.float64)).reshape(8, 32).max(axis=1)
    scale = np.exp2(np.asarray(got[1]).astype("<i4").view(np.uint8).astype(np.float64).reshape(8) - 127)
    assert (amax <= 448 * scale).all() and ((amax > 224 * scale) | (scale == 2.0**-22)).all()


def test_inside_jit(implementation):
    traces = []

    @jax.jit
    def prepare(*arguments):
        traces.append(1)
        return dsv4_jax.prepare_megamoe_inputs(*arguments, implementation=implementation)

    for seed in range(2):
        rng = np.random.default_rng(seed)
        arguments = rng.normal(size=(5, 256)).astype(BF16), *routing(rng, 5, 6), rng.random(5) < 0.5
        check(prepare(*arguments), *arguments)
    assert len(traces) == 1
    assert "prepare_megamoe_inputs" in str(jax.make_jaxpr(prepare)(*arguments))


def test_int64_ids(implementation):
    """Taken where JAX has x64 on, from NumPy always; beyond int32 they do not wrap round to another expert."""
    rng = np.random.default_rng(0)
    hidden, weights = rng.normal(size=(2, 128)).astype(BF16), rng.random((2, 2), np.float32)
    ids = np.array([[5, -(2**40)], [2**32 + 5, -1]])
    want = [[5, -1], [2**31 - 1, -1]]
    with jax.enable_x64(True):
        wide = jnp.asarray(ids)
        assert wide.dtype == jnp.int64
        got = dsv4_jax.prepare_megamoe_inputs(hidden, weights, wide, implementation=implementation)
        assert got[2].dtype == jnp.int32 and got[2].tolist() == want
    assert dsv4_jax.prepare_megamoe_inputs(hidden, weights, ids, implementation=implementation)[2].tolist() == want


RIGHT = {
    "hidden": jnp.zeros((6, 256), jnp.bfloat16),
    "topk_weights": jnp.zeros((6, 3)),
    "topk_ids": jnp.zeros((6, 3), jnp.int32),
    "is_padding": jnp.zeros(6, bool),
}
BAD = [
    ("hidden", jnp.zeros((6, 256)), TypeError, r"hidden has dtype float32; it must be bfloat16"),
    ("hidden", jnp.zeros(256, jnp.bfloat16), ValueError, r"hidden has shape \[256\]; it must be \[T, K\]"),
    (
        "hidden",
        jnp.zeros((6, 96), jnp.bfloat16),
        ValueError,
        r"hidden has shape \[6, 96\]; its last axis must be a mul",
    ),
    ("hidden", "text", TypeError, r"hidden is a str; it must be an array of bfloat16 \[T, K\]"),
    ("topk_weights", jnp.zeros((6, 3), jnp.bfloat16), TypeError, "topk_weights has dtype bfloat16; it must be float32"),
    ("topk_weights", jnp.zeros((5, 3)), ValueError, r"topk_weights has shape \[5, 3\]; it must be \[6, k\]"),
    ("topk_ids", jnp.zeros((6, 3)), TypeError, "topk_ids has dtype float32; it must be int32 or int64"),
    ("topk_ids", jnp.zeros((6, 4), jnp.int32), ValueError, r"topk_ids has shape \[6, 4\]; it must be \[6, 3\]"),
    ("is_padding", jnp.zeros(6), TypeError, "is_padding has dtype float32; it must be bool"),
    ("is_padding", jnp.zeros((6, 1), bool), ValueError, r"is_padding has shape \[6, 1\]; it must be \[6\]"),
    ("is_padding", True, TypeError, r"is_padding is a bool; it must be an array of bool \[6\]"),
    ("implementation", "cuda", ValueError, "implementation is 'cuda'; it must be one of 'xla'"),
]


@pytest.mark.parametrize(("name", "wrong", "error", "match"), BAD)
def test_bad_input(name, wrong, error, match):
    with pytest.raises(error) as caught:
        dsv4_jax.prepare_megamoe_inputs(**RIGHT | {name: wrong})
    assert re.search(match, str(caught.value)), caught.value


def test_what_bad_input_starts_from_is_right():
    assert jax.eval_shape(lambda: dsv4_jax.prepare_megamoe_inputs(**RIGHT))[0].shape == (6, 256)
