"""`fused_inv_rope_fp8_quant` against its rules in NumPy, and vLLM's bytes."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from helpers import golden, heads, oracle

from dsv4_jax import fused_inv_rope_fp8_quant

GPU_TOO = True


def run(o, positions, cos_sin, groups, count, size, packed, implementation):
    """Values `[T, G, count * 512]` uint8 and scales."""
    values, scales = fused_inv_rope_fp8_quant(
        o, positions, cos_sin, groups, count, size, packed, implementation=implementation
    )
    assert values.dtype == jnp.float8_e4m3fn and scales.dtype == (jnp.int32 if packed else jnp.float32)
    return np.asarray(values).view(np.uint8), np.asarray(scales)


def expected(o, positions, cos_sin, groups, count, size, packed):
    """What `run` gives, by the rules."""
    inside = ((positions >= 0) & (positions < len(cos_sin)))[:, None, None]
    x = heads.rotated(o, cos_sin, positions, inverse=True).astype(np.float64).reshape(len(o), groups, -1, size)
    with np.errstate(invalid="ignore"):
        amax = np.maximum(np.abs(x).max(axis=-1), np.float64(np.float32(1e-10)))
    e = np.array([oracle.exponent(a, 448.0) for a in amax.ravel()], np.int64).reshape(amax.shape)
    values = oracle.fp8_code(np.ldexp(x, -e[..., None])).reshape(len(o), groups, -1)
    scales = np.ldexp(np.float32(1), e)
    if packed:
        scales = (e + 127).astype(np.uint8).view("<i4")
    return np.where(inside, values, 0), np.where(inside, scales, 0)


def check(*arguments, implementation):
    """Holds an implementation to the rules, to the bit."""
    got, want = run(*arguments, implementation), expected(*arguments)
    for g, w in zip(got, want, strict=True):
        assert g.shape == w.shape
        np.testing.assert_array_equal(g, w)


def check_bf16(o, positions, cos_sin, groups, count, implementation):
    """The same without `quantize`."""
    got = fused_inv_rope_fp8_quant(o, positions, cos_sin, groups, count, quantize=False, implementation=implementation)
    assert got.dtype == jnp.bfloat16
    want = oracle.bf16_code(heads.rotated(o, cos_sin, positions, inverse=True)).reshape(len(o), groups, count * 512)
    assert got.shape == want.shape
    np.testing.assert_array_equal(np.asarray(got).view(np.uint16), want)


@pytest.mark.parametrize(
    ("tokens", "groups", "count", "size", "packed"),
    [
        (1, 1, 1, 128, False),
        (3, 2, 8, 128, True),
        (2, 1, 9, 128, False),
        (5, 3, 1, 64, True),
        (2, 1, 3, 64, False),
        (3, 5, 2, 32, True),
        (2, 4, 1, 32, False),
    ],
)
def test_sizes_and_magnitudes(tokens, groups, count, size, packed, implementation):
    rng = np.random.default_rng(tokens + groups)
    o, table = heads.random_heads(rng, tokens, groups * count, 512), heads.random_table(rng, 40)
    # Blocks of one head have different magnitudes too.
    o[..., ::2] *= np.repeat(np.exp2(rng.integers(-6, 1, (*o.shape[:2], 8))), 32, axis=-1).astype(o.dtype)
    o[..., -64:] = heads.random_heads(rng, tokens, groups * count, 64)
    check(o, rng.integers(0, 40, tokens), table, groups, count, size, packed, implementation=implementation)
    check_bf16(o, rng.integers(0, 40, tokens), table, groups, count, implementation)


def test_no_rounding_before_fp8(implementation):
    """Rotated channels go to fp8 from float32: 17.0 + 2**-7 is above a tie that bfloat16 would round it to."""
    o = np.zeros((1, 1, 512), np.float32)
    o[0, 0, 384], o[0, 0, 448:450] = 448, (17, 1)  # the scale is 1
    table = np.zeros((1, 64), np.float32)
    table[0, 0], table[0, 32] = 1, 2.0**-7  # even' = 17 + 2**-7, odd' = 1 - 17 * 2**-7
    o = o.astype(ml_dtypes.bfloat16)
    values, scales = run(o, np.array([0]), table, 1, 1, 128, False, implementation)
    # 17 lies between 16 (0x58) and 18 (0x59), so the even 16 would win.
    assert values[0, 0, [384, 448]].tolist() == [0x7E, 0x59] and scales[0, 0, 3] == 1
    assert scales[0, 0, 0] == 2.0**-42  # of zeros: ceil(log2(1e-10 / 448))


def test_rotation_turns_odd_to_even(implementation):
    """By hand: a quarter turn back takes (even, odd) to (odd, -even); scale bytes lie head after head, little end."""
    o = np.zeros((1, 2, 512), np.float32)
    o[0, 0, 448:450], o[0, 1, 0], o[0, 1, 511] = (448, 224), 896, 224
    table = np.repeat(np.array([[1.0, 0.0], [0.0, 1.0]]), 32, axis=1).astype(np.float32)
    o = o.astype(ml_dtypes.bfloat16)
    values, scales = run(o, np.array([1]), table, 1, 2, 128, True, implementation)
    assert values[0, 0, [448, 449, 512, 1022]].tolist() == [0x76, 0xFE, 0x7E, 0x7E]
    assert scales[0, 0].tobytes() == bytes([85, 85, 85, 127, 128, 85, 85, 126])


def test_positions_outside_the_table(implementation):
    rng = np.random.default_rng(3)
    positions = np.array([-1, 5, 6, 2**40, -(2**31), 0, 2**31 - 1])
    o, table = heads.random_heads(rng, 7, 2, 512), heads.random_table(rng, 6)
    o[:, 1] = np.nan
    table[0] = -1.0  # a rotated zero has either sign
    for packed in (False, True):
        check(o, positions, table, 2, 1, 128, packed, implementation=implementation)
        values, scales = run(o, positions, table, 2, 1, 128, packed, implementation)
        outside = [0, 2, 3, 4, 6]
        assert not values[outside].any() and not scales[outside].any() and values[[1, 5]].any()
    check_bf16(o, positions, table, 2, 1, implementation)
    none = np.zeros((0, 64), np.float32)
    check(o, positions, none, 2, 1, 128, False, implementation=implementation)
    check_bf16(o, positions, none, 2, 1, implementation)


def test_no_tokens(implementation):
    o, positions, table = np.zeros((0, 4, 512), ml_dtypes.bfloat16), np.zeros(0, np.int32), np.ones((2, 64), np.float32)
    for packed in (False, True):
        values, scales = run(o, positions, table, 2, 2, 128, packed, implementation)
        assert values.shape == (0, 2, 1024) and scales.shape == (0, 2, 2 if packed else 8)
    check_bf16(o, positions, table, 2, 2, implementation)


def test_every_bfloat16(implementation):
    """Each of the 65536 in a channel that does not rotate: among others of any size, and among smaller ones."""
    rng = np.random.default_rng(2)
    bits = np.arange(65536, dtype=np.uint16)
    magnitude = (bits & 0x7FFF).argsort(kind="stable")
    bits = np.where((bits & 0x7F80) == 0, bits & 0x8000, bits)  # a platform may take subnormal numbers for 0
    o = np.zeros((44, 8, 512), np.uint16)
    o[:22, :, :384].reshape(-1)[:65536] = rng.permutation(bits)
    rows = np.zeros((22, 8, 384), np.uint16)
    rows.reshape(-1)[:65536] = bits[magnitude]
    o[22:, :, :384] = rows
    o = o.view(ml_dtypes.bfloat16)
    table = heads.random_table(rng, 4)
    check(o, rng.integers(0, 4, 44), table, 2, 4, 128, True, implementation=implementation)
    check_bf16(o, rng.integers(0, 4, 44), table, 2, 4, implementation)


def test_not_finite(implementation):
    rng = np.random.default_rng(4)
    o, table = heads.random_heads(rng, 8, 5, 512, powers=(0, 100)), heads.random_table(rng, 9)
    for t, bad in enumerate((np.nan, -np.nan, np.inf, -np.inf)):
        o[2 * t, 0, 3] = o[2 * t, 1, 450] = o[2 * t + 1, 2, 511] = o[2 * t + 1, 3, :] = bad
    positions = rng.integers(0, 9, 8)
    check(o, positions, table, 1, 5, 128, False, implementation=implementation)
    check_bf16(o, positions, table, 1, 5, implementation)


@pytest.mark.parametrize("packed", [False, True])
def test_golden(packed, implementation):
    case = golden.load(f"inv_rope/tma{int(packed)}")
    groups, count = map(int, case["meta"])
    values, scales = run(case["o"], case["positions"], case["cos_sin"], groups, count, 128, packed, implementation)
    assert scales.dtype == case["scales"].dtype
    np.testing.assert_array_equal(scales, case["scales"])
    off = np.abs(values.astype(int) - case["out"].view(np.uint8).astype(int))
    assert off.max() <= 1 and (off > 0).sum() <= values.size // 2000


def test_in_jit(implementation):
    """All traced, with other positions at the second call."""
    rng = np.random.default_rng(6)
    o, table = heads.random_heads(rng, 2, 4, 512), heads.random_table(rng, 9)
    op = jax.jit(lambda *a: fused_inv_rope_fp8_quant(*a, 2, 2, tma_aligned_scales=True, implementation=implementation))
    for positions in (np.array([3, 1], np.int32), np.array([0, 12], np.int32)):
        values, scales = op(jnp.asarray(o), positions, table)
        want = expected(o, positions, table, 2, 2, 128, True)
        np.testing.assert_array_equal(np.asarray(values).view(np.uint8), want[0])
        np.testing.assert_array_equal(np.asarray(scales), want[1])


@pytest.mark.gpu
def test_more_than_2_31_elements():
    """The last tokens of a batch whose offsets do not fit int32 are as in a batch of their own."""
    tokens, count = 66_000, 64
    table = jnp.asarray(heads.random_table(np.random.default_rng(0), 8))
    op = jax.jit(lambda *a: fused_inv_rope_fp8_quant(*a, 8, 8, implementation="triton"))
    o = jax.random.normal(jax.random.key(0), (tokens, count, 512), jnp.bfloat16)
    positions = jnp.arange(tokens) % 8
    assert o.size > 2**31
    values, scales = op(o, positions, table)
    last = run(o[-3:], positions[-3:], table, 8, 8, 128, False, "xla")
    np.testing.assert_array_equal(np.asarray(values[-3:]).view(np.uint8), last[0])
    np.testing.assert_array_equal(np.asarray(scales[-3:]), last[1])


@pytest.mark.parametrize(
    ("name", "wrong", "error", "match"),
    [
        ("o", jnp.zeros((4, 6, 512)), TypeError, r"o has dtype float32; it must be bfloat16"),
        ("o", jnp.zeros((4, 5, 512), jnp.bfloat16), ValueError, r"o has shape \[4, 5, 512\]; it must be \[T, 6, 512\]"),
        ("o", jnp.zeros((4, 6, 128), jnp.bfloat16), ValueError, r"o has shape \[4, 6, 128\]; it must be \[T, 6, 512\]"),
        ("o", jnp.zeros((4, 3072), jnp.bfloat16), ValueError, r"o has shape \[4, 3072\]; it must be \[T, 6, 512\]"),
        ("o", [1], TypeError, r"o is a list; it must be an array"),
        ("positions", jnp.zeros(4), TypeError, r"positions has dtype float32; it must be int32 or int64"),
        ("positions", jnp.zeros(5, jnp.int32), ValueError, r"positions has shape \[5\]; it must be \[4\]"),
        ("cos_sin", jnp.zeros((9, 128)), ValueError, r"cos_sin has shape \[9, 128\]; it must be \[P, 64\]"),
        ("cos_sin", jnp.zeros((9, 64), jnp.float16), TypeError, r"cos_sin has dtype float16; it must be float32"),
        ("n_groups", 0, ValueError, r"n_groups is 0; it must be an integer of at least 1"),
        ("n_groups", 3, ValueError, r"o has shape \[4, 6, 512\]; it must be \[T, 9, 512\]"),
        ("heads_per_group", -1, ValueError, r"heads_per_group is -1; it must be an integer of at least 1"),
        ("heads_per_group", 2.0, ValueError, r"heads_per_group is 2\.0; it must be an integer of at least 1"),
        ("quant_group_size", 256, ValueError, r"quant_group_size is 256; it must be one of 32, 64, 128"),
        ("quant_group_size", "128", ValueError, r"quant_group_size is '128'; it must be one of 32, 64, 128"),
        ("tma_aligned_scales", 1, TypeError, r"tma_aligned_scales is a int; it must be a bool"),
        ("quantize", None, TypeError, r"quantize is a NoneType; it must be a bool"),
        ("implementation", "", ValueError, r"implementation is ''; it must be one of 'xla'"),
    ],
)
def test_bad_input(name, wrong, error, match):
    arguments = {
        "o": jnp.zeros((4, 6, 512), jnp.bfloat16),
        "positions": jnp.zeros(4, jnp.int32),
        "cos_sin": jnp.zeros((9, 64)),
        "n_groups": 2,
        "heads_per_group": 3,
    }
    with pytest.raises(error, match=match):
        fused_inv_rope_fp8_quant(**arguments | {name: wrong})
