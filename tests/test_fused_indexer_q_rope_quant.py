"""`fused_indexer_q_rope_quant` against the formats' rules in NumPy, and vLLM's bytes."""

import types

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from helpers import golden, heads, oracle

from dsv4_jax import Yarn, fused_indexer_q_rope_quant

GPU_TOO = True
FORMATS = {False: "indexer_fp8", True: "indexer_mxfp4"}
SCALES = 0.1, 0.3  # their products round differently in another order
NAN = 0x7FC00000


def run(positions, q, cos_sin, weights, use_fp4, implementation, scales=SCALES):
    """Values `[T, H, bytes]` uint8, scales `[T, H]` int32 or None, weights `[T, H]` float32."""
    q, weights = fused_indexer_q_rope_quant(
        positions, q, cos_sin, weights, *scales, use_fp4, implementation=implementation
    )
    values, scales = q if use_fp4 else (q, None)
    assert values.dtype == (jnp.uint8 if use_fp4 else jnp.float8_e4m3fn) and weights.dtype == jnp.float32
    return np.asarray(values).view(np.uint8), None if scales is None else np.asarray(scales), np.asarray(weights)


def expected(positions, q, cos_sin, weights, use_fp4):
    """What `run` gives, by the rules of the format."""
    tokens, count, _ = q.shape
    values, scales = oracle.quantize(FORMATS[use_fp4], heads.rotated(q, cos_sin, positions).reshape(-1, 128))
    inside = ((positions >= 0) & (positions < len(cos_sin)))[:, None]
    values = np.where(inside[:, :, None], values.reshape(tokens, count, -1), 0)
    scales = scales.reshape(tokens, count, 4).view("<i4" if use_fp4 else "<f4")[..., 0]
    with np.errstate(all="ignore"):
        weights = weights.astype(np.float32)
        for factor in (*(() if use_fp4 else (scales,)), *map(np.float32, SCALES)):
            weights = weights * factor
    weights = np.where(np.isnan(weights), np.uint32(NAN).view(np.float32), weights)
    return values, np.where(inside, scales, 0) if use_fp4 else None, np.where(inside, weights, np.float32(0))


def check(positions, q, cos_sin, weights, use_fp4, implementation):
    """Holds an implementation to the rules, to the bit."""
    got = run(positions, q, cos_sin, weights, use_fp4, implementation)
    want = expected(positions, q, cos_sin, weights, use_fp4)
    np.testing.assert_array_equal(got[0], want[0])
    if use_fp4:
        assert got[1].dtype == np.int32
        np.testing.assert_array_equal(got[1], want[1])
    np.testing.assert_array_equal(got[2].view(np.uint32), want[2].view(np.uint32))


@pytest.mark.parametrize("use_fp4", FORMATS)
@pytest.mark.parametrize(("tokens", "count"), [(1, 1), (5, 3), (3, 64), (2, 33)])
def test_sizes_and_magnitudes(tokens, count, use_fp4, implementation):
    rng = np.random.default_rng(tokens + count)
    q, table = heads.random_heads(rng, tokens, count, 128), heads.random_table(rng, 40)
    positions = rng.integers(0, 40, tokens).astype(np.int32)
    check(positions, q, table, rng.standard_normal((tokens, count)).astype(np.float32), use_fp4, implementation)


@pytest.mark.parametrize("use_fp4", FORMATS)
@pytest.mark.parametrize(("tokens", "count"), [(0, 64), (3, 0)])
def test_nothing(tokens, count, use_fp4, implementation):
    q = np.zeros((tokens, count, 128), ml_dtypes.bfloat16)
    values, scales, weights = run(
        np.zeros(tokens, np.int32), q, np.ones((2, 64), np.float32), q[..., 0], use_fp4, implementation
    )
    assert values.shape == (tokens, count, 64 if use_fp4 else 128) and weights.shape == (tokens, count)
    assert not use_fp4 or (scales.shape == (tokens, count) and scales.dtype == np.int32)


@pytest.mark.parametrize("use_fp4", FORMATS)
def test_dtypes(use_fp4, implementation):
    """float32 queries are rounded to bfloat16 after the rotation; weights may be bfloat16."""
    rng = np.random.default_rng(1)
    q = (rng.integers(-4095, 4096, (3, 5, 128)) / 512).astype(np.float32)  # 12 bits and 7 more: exact still
    weights = rng.standard_normal((3, 5)).astype(ml_dtypes.bfloat16)
    check(np.array([3, 0, 7]), q, heads.random_table(rng, 8), weights, use_fp4, implementation)


@pytest.mark.parametrize("use_fp4", FORMATS)
def test_every_bfloat16(use_fp4, implementation):
    """Each of the 65536 in a channel that does not rotate: among others of any size, and among smaller ones."""
    rng = np.random.default_rng(2)
    bits = np.arange(65536, dtype=np.uint16)
    magnitude = (bits & 0x7FFF).argsort(kind="stable")
    subnormal = (bits & 0x7F80) == 0
    bits = np.where(subnormal, bits & 0x8000, bits)  # a platform may take subnormal numbers for 0
    q = np.zeros((32, 64, 128), np.uint16)
    q[:16, :, :64] = rng.permutation(bits).reshape(16, 64, 64)
    q[16:, :, :64] = bits[magnitude].reshape(16, 64, 64)
    weights = rng.standard_normal((32, 64)).astype(np.float32)
    table = heads.random_table(rng, 4)
    check(rng.integers(0, 4, 32), q.view(ml_dtypes.bfloat16), table, weights, use_fp4, implementation)


def test_mxfp4_ties_and_layout(implementation):
    """By hand: 6 makes the scale 1; ties go to the even code; even channels low; the first block's byte lowest."""
    q = np.zeros((1, 1, 128), np.float32)
    q[0, 0, :16] = [6, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, -6, -0.25, -0.75, -1.25, -1.75, -2.5, -3.5, -5]
    q[0, 0, 32:34] = 12, -0.5  # scale 2: 6 and -0.25
    q[0, 0, 64:66] = 6.03125, 1  # above 6 by a bfloat16 ulp: scale 2
    table = np.concatenate([np.ones((1, 32)), np.zeros((1, 32))], axis=1).astype(np.float32)
    values, scales, weights = run(
        np.array([0]), q, table, np.ones((1, 1), np.float32), True, implementation, (0.5, 0.25)
    )
    want = [0x07, 0x22, 0x44, 0x66, 0x8F, 0xAA, 0xCC, 0xEE]
    assert values[0, 0, :8].tolist() == want and not values[0, 0, 8:16].any()
    assert values[0, 0, 16:18].tolist() == [0x87, 0] and values[0, 0, 32:34].tolist() == [0x15, 0]
    # The last block is all zero: its amax is 6 * 2**-126, so its exponent -126.
    assert scales[0, 0].tobytes() == bytes([127, 128, 128, 1]) and weights[0, 0] == 0.125


def test_rotation_turns_even_to_odd(implementation):
    """By hand: a quarter turn takes (even, odd) to (-odd, even), at the token's own position."""
    q = np.zeros((2, 1, 128), np.float32)
    q[:, 0, 64], q[:, 0, 127] = 448, 224
    table = np.repeat(np.array([[1.0, 0.0], [0.0, 1.0]]), 32, axis=1).astype(np.float32)
    values, _, weights = run(np.array([1, 0]), q, table, np.ones((2, 1), np.float32), False, implementation, (1.0, 1.0))
    codes = {448: 0x7E, 224: 0x76}
    turned, kept = np.zeros(128, np.uint8), np.zeros(128, np.uint8)
    turned[65], turned[126] = codes[448], codes[224] | 0x80
    kept[64], kept[127] = codes[448], codes[224]
    assert (values[0, 0] & 0x7F).tolist() == (turned & 0x7F).tolist() and values[0, 0, 126] == turned[126]
    assert values[1, 0].tolist() == kept.tolist() and weights.tolist() == [[1], [1]]


@pytest.mark.parametrize("use_fp4", FORMATS)
def test_positions_outside_the_table(use_fp4, implementation):
    rng = np.random.default_rng(3)
    positions = np.array([-1, 5, 6, 2**40, -(2**31), 0, 2**31 - 1])
    q = heads.random_heads(rng, 7, 3, 128)
    q[:, 1] = np.nan
    weights, table = np.full((7, 3), np.nan, np.float32), heads.random_table(rng, 6)
    weights[:, 0] = 1
    table[0] = -1.0  # a rotated zero has either sign
    check(positions, q, table, weights, use_fp4, implementation)
    values, scales, weights = run(positions, q, table, weights, use_fp4, implementation)
    outside = [0, 2, 3, 4, 6]
    assert not values[outside].any() and not weights[outside].view(np.uint32).any() and values[[1, 5]].any()
    assert scales is None or not scales[outside].any()
    check(positions, q, np.zeros((0, 64), np.float32), np.ones((7, 3), np.float32), use_fp4, implementation)


@pytest.mark.parametrize("use_fp4", FORMATS)
def test_not_finite(use_fp4, implementation):
    rng = np.random.default_rng(4)
    q, table = heads.random_heads(rng, 12, 5, 128, powers=(0, 100)), heads.random_table(rng, 9)
    weights = rng.standard_normal((12, 5)).astype(np.float32)
    for t, bad in enumerate((np.nan, -np.nan, np.inf, -np.inf)):
        q[3 * t, 0, 3] = q[3 * t, 1, 70] = q[3 * t + 1, 2, 127] = q[3 * t + 1, 3, :] = bad
        weights[3 * t, 0], weights[3 * t + 1, 3], weights[3 * t + 2, 3] = 0, -np.inf, bad
    check(rng.integers(0, 9, 12), q, table, weights, use_fp4, implementation)


@pytest.mark.parametrize("use_fp4", FORMATS)
def test_table_of_the_model(use_fp4, implementation):
    """Where float32 rounds, a code may be the neighboring one, and only inside the rounding's bounds."""
    rng = np.random.default_rng(5)
    table, positions = Yarn().table(300), rng.integers(0, 300, 6)
    q = rng.standard_normal((6, 9, 128)).astype(ml_dtypes.bfloat16)
    values, scales, weights = run(positions, q, table, np.ones((6, 9), np.float32), use_fp4, implementation, (1.0, 1.0))
    scales = scales if use_fp4 else weights
    got = np.concatenate([values, np.ascontiguousarray(scales[..., None]).view(np.uint8)], axis=-1).reshape(54, -1)
    exact = heads.rotated(q, table, positions).astype(np.float64)
    pairs = np.abs(q.astype(np.float64)[..., 64:]).reshape(6, 9, 32, 2).sum(-1).repeat(2, axis=-1)
    error = np.zeros_like(exact)
    error[..., 64:] = 3 * oracle.U * pairs  # two products and a sum
    low, high, exact = (a.reshape(54, 128) for a in (exact - error, exact + error, exact))
    rows = oracle.Rows(np.arange(54), np.arange(54), exact, low, high)
    oracle.assert_same_rows(got, rows, types.SimpleNamespace(cache_format=FORMATS[use_fp4]))


def test_golden(implementation):
    case, scales = golden.load("indexer_q_fp8"), (128**-0.5, 64**-0.5)
    arrays = (case[name] for name in ("positions", "q", "cos_sin", "weights"))
    values, _, weights = run(*arrays, False, implementation, scales)
    np.testing.assert_array_equal(weights, case["weights_out"])
    off = np.abs(values.astype(int) - case["out"].view(np.uint8).astype(int))
    assert off.max() <= 1 and (off > 0).sum() <= values.size // 2000


def test_in_jit(implementation):
    """All traced, with other positions at the second call."""
    rng = np.random.default_rng(6)
    q, table = heads.random_heads(rng, 2, 3, 128), heads.random_table(rng, 9)
    weights = np.ones((2, 3), np.float32)
    op = jax.jit(lambda *a: fused_indexer_q_rope_quant(*a, *SCALES, use_fp4=True, implementation=implementation))
    for positions in (np.array([3, 1], np.int32), np.array([0, 12], np.int32)):
        (values, scales), out = op(positions, jnp.asarray(q), table, weights)
        want = expected(positions, q, table, weights, True)
        for got, exact in zip((values, scales, out), want, strict=True):
            np.testing.assert_array_equal(np.asarray(got), exact)


def arguments(**changes):
    return {
        "positions": jnp.zeros(4, jnp.int32),
        "q": jnp.zeros((4, 3, 128), jnp.bfloat16),
        "cos_sin": jnp.zeros((9, 64)),
        "weights": jnp.zeros((4, 3)),
        "softmax_scale": 1.0,
        "head_scale": 1.0,
    } | changes


@pytest.mark.parametrize(
    ("name", "wrong", "error", "match"),
    [
        ("positions", jnp.zeros(4), TypeError, r"positions has dtype float32; it must be int32 or int64"),
        ("positions", jnp.zeros(3, jnp.int32), ValueError, r"positions has shape \[3\]; it must be \[4\]"),
        ("positions", "x", TypeError, r"positions is a str; it must be an array"),
        ("q", jnp.zeros((4, 3, 128), jnp.float16), TypeError, r"q has dtype float16; it must be float32 or bfloat16"),
        ("q", jnp.zeros((4, 3, 64)), ValueError, r"q has shape \[4, 3, 64\]; it must be \[T, H, 128\]"),
        ("q", jnp.zeros((4, 128)), ValueError, r"q has shape \[4, 128\]; it must be \[T, H, 128\]"),
        ("q", None, TypeError, r"q is a NoneType; it must be an array"),
        ("cos_sin", jnp.zeros((9, 32)), ValueError, r"cos_sin has shape \[9, 32\]; it must be \[P, 64\]"),
        ("cos_sin", jnp.zeros((9, 64), jnp.bfloat16), TypeError, r"cos_sin has dtype bfloat16; it must be float32"),
        ("weights", jnp.zeros((3, 4)), ValueError, r"weights has shape \[3, 4\]; it must be \[4, 3\]"),
        ("weights", jnp.zeros((4, 3), jnp.int32), TypeError, r"weights has dtype int32; it must be float32 or bf"),
        ("softmax_scale", 0.0, ValueError, r"softmax_scale is 0\.0; it must be above 0"),
        ("softmax_scale", jnp.float32(1), TypeError, r"softmax_scale is a .*; it must be a number"),
        ("head_scale", float("nan"), ValueError, r"head_scale is nan; it must be above 0"),
        ("head_scale", True, TypeError, r"head_scale is a bool; it must be a number"),
        ("use_fp4", 1, TypeError, r"use_fp4 is a int; it must be a bool"),
        ("implementation", "cuda", ValueError, r"implementation is 'cuda'; it must be one of 'xla'"),
        ("implementation", "cutedsl", NotImplementedError, r"has no cutedsl implementation; use one of xla, triton"),
    ],
)
def test_bad_input(name, wrong, error, match):
    with pytest.raises(error, match=match):
        fused_indexer_q_rope_quant(**arguments(**{name: wrong}))
