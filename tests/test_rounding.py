"""Bytes written down by hand: rounding edges, saturation, and what a number that is not finite becomes."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from helpers import ops, oracle
from helpers.batches import random_batch
from helpers.sweep import sweep

GPU_TOO = True
INF, NAN = np.inf, np.nan


def key_bytes(kind, fmt, key, implementation, *, kv_scale=1.0):
    """The bytes (values, scales) that a finished key becomes.

    Every kv is 1 and every score equal, so c is 1; eps is too small to count, so RMSNorm gives exactly norm_weight;
    the angles are 0, so RoPE changes nothing.
    """
    config = ops.make_config(kind, fmt, 1, 1, eps=1e-30)
    length = config.window
    batch = random_batch(
        np.random.default_rng(0), config, sizes=[(0, length)], padding=0, padded_requests=0, spare_pages=0
    )
    cos_sin = np.concatenate([np.ones((length, 32)), np.zeros((length, 32))], axis=1).astype(np.float32)
    batch.kv_score[:] = 0
    batch.kv_score[:, : batch.width] = 1
    batch = dataclasses.replace(
        batch, ape=np.zeros_like(batch.ape), norm_weight=np.asarray(key, np.float32), cos_sin=cos_sin
    )
    if config.format.needs_scale:
        batch.kv_scale = np.float32(kv_scale)
    _, cache = ops.compress(batch, implementation=implementation)
    page, byte = oracle.row_index(fmt, [batch.kv_slot_mapping[-1]], 1)
    row = oracle.as_pages(cache)[page[0, 0], byte[0]]
    size = oracle.FORMATS[fmt].value_bytes
    return row[:size], row[size:]


def bf16(values):
    return oracle.bf16_code(np.asarray(values, np.float64)).view(np.uint8).tolist()


def test_fp8_ds_mla_edges(implementation):
    key = np.ones(512)
    key[:64] = 448  # amax / 448 is a power of two: that power is the scale
    key[64:128] = 2 * 448
    key[128:192] = 450  # the next bfloat16 above
    key[192:256] = 448 * (1 + 2.0**-10)  # is 448 in bfloat16
    key[256:320] = 1e-5  # 1e-4 bounds amax: ceil(log2(1e-4 / 448)) = -22
    key[320:384:2], key[321:384:2] = 0.0, -0.0
    key[384:448] = 448 * 2.0**-10
    key[448:] = np.arange(64) - 31.3
    values, scales = key_bytes("csa", "fp8_ds_mla", key, implementation)
    assert scales.tolist() == [127, 128, 128, 127, 105, 105, 117, 0]
    blocks = values[:448].reshape(7, 64)
    assert set(blocks[0]) == {0x7E} and set(blocks[1]) == {0x7E}  # 448
    assert set(blocks[2]) == {0x76}  # 450 / 2 = 225, rounded to 224
    assert set(blocks[3]) == {0x7E}
    assert set(blocks[4]) == {0x62}  # bf16(1e-5) * 2^22 = 42, half way between 40 and 44: the even code
    assert blocks[5].tolist() == [0x00, 0x80] * 32
    assert set(blocks[6]) == {0x7E}
    assert values[448:].tolist() == bf16(key[448:])


def test_indexer_fp8_edges(implementation):
    for top, scale, code in ((448.0, 1.0, 0x7E), (450.0, 2.0, 0x76), (448 * 2.0**-20, 2.0**-20, 0x7E)):
        key = np.full(128, -top)
        key[0] = top
        values, scales = key_bytes("indexer", "indexer_fp8", key, implementation)
        assert scales.view(np.float32)[0] == scale
        assert values.tolist() == [code] + [code | 0x80] * 127
    values, scales = key_bytes("indexer", "indexer_fp8", np.full(128, -0.0), implementation)
    assert scales.view(np.float32)[0] == 2.0**-22
    assert values[:64].tolist() == [0x80] * 64  # after it RoPE adds zeros of both signs


def test_indexer_mxfp4_edges(implementation):
    """6 and all midpoints with a scale of 1; amax just above 6; the least amax."""
    key = np.zeros(128)
    key[:16] = [6, 5.0, 5.03125, 3.5, 2.5, 1.75, 1.25, 0.75, 0.25, 0.251953125, 4.96875, 0.1, 0.0, 1.0, 3.0, 4.0]
    key[16:32] = -key[:16]
    key[32:64] = 6.03125  # the next bfloat16 above 6
    key[64:96] = -12
    key[96:] = 2.0**-126
    values, scales = key_bytes("indexer", "indexer_mxfp4", key, implementation)
    codes = np.stack([values & 15, values >> 4], axis=1).ravel()
    want = [7, 6, 7, 6, 4, 4, 2, 2, 0, 1, 6, 0, 0, 2, 5, 6]
    assert codes[:32].tolist() == want + [code | 8 for code in want]
    assert scales.tolist() == [127, 128, 128, 1]  # 2^0, 2^1, 2^1, 2^-126
    assert set(codes[32:64]) == {5}  # 3.015625 is 3
    assert set(codes[64:96]) == {15}
    assert set(codes[96:]) == {2}  # 1


def test_bf16_edges(implementation):
    key = np.ones(512)
    key[:6] = [1 + 2.0**-8, 1 + 3 * 2.0**-8, 1 + 2.0**-8 + 2.0**-20, -0.0, 3.3e38, 3.4e38]
    values, scales = key_bytes("csa", "bf16", key, implementation)
    codes = values.view(np.uint16)
    assert codes[:6].tolist() == [0x3F80, 0x3F82, 0x3F81, 0x8000, 0x7F78, 0x7F80]  # ties to even; past the largest: inf
    assert set(codes[6:]) == {0x3F80}
    assert scales.size == 0


def test_fp8_is_divided_in_float32_and_saturates(implementation):
    key = np.ones(512)
    # 464 is the midpoint above 448 and would be NaN without clipping. 17 / 3 rounds to 5.5; with a bfloat16 between
    # the two steps 17.0625 + 2^-10 would fall on the midpoint of 16 and 18.
    key[:8] = [448, 464, 1e30, -1e30, 17, 2.0**-9, 2.0**-10, 17 + 2.0**-10]
    values, _ = key_bytes("csa", "fp8", key, implementation, kv_scale=1.0)
    assert values[:8].tolist() == [0x7E, 0x7E, 0x7E, 0xFE, 0x58, 0x01, 0x00, 0x59]
    values, _ = key_bytes("csa", "fp8", key, implementation, kv_scale=3.0)
    assert values[4] == 0x4B and values[8] == 0x2B  # 5.5; 1 / 3 is 0.34375


def test_infinity_and_nan_in_a_finished_key(implementation):
    """c is finite, but norm_weight is not: only the channels it touches, and their blocks' scales."""
    key = np.ones(512)
    key[0], key[1], key[64], key[448:450] = INF, -INF, NAN, (NAN, 2.0)
    values, scales = key_bytes("csa", "fp8_ds_mla", key, implementation)
    # Infinity counts as the largest bfloat16: e = 120. It saturates; 1 * 2^-120 is 0. NaN counts as infinity.
    assert scales.tolist() == [247, 247, 127 - 8, 119, 119, 119, 119, 0]
    assert values[:3].tolist() == [0x7E, 0xFE, 0x00]
    assert values[64:66].tolist() == [0x7F, 0x00]
    assert set(values[128:448]) == {0x78}  # 1 / 2^-8 = 256
    # even' = even * cos - odd * sin: a NaN on either side of a pair makes both NaN.
    assert values[448:].view(np.uint16)[:3].tolist() == [0x7FC0, 0x7FC0, 0x3F80]
    values, _ = key_bytes("csa", "bf16", key, implementation)
    assert values.view(np.uint16)[[0, 1, 2, 64]].tolist() == [0x7F80, 0xFF80, 0x3F80, 0x7FC0]
    values, _ = key_bytes("csa", "fp8", key, implementation)
    assert values[[0, 1, 2, 64]].tolist() == [0x7E, 0xFE, 0x38, 0x7F]


def test_infinity_and_nan_in_a_finished_key_of_the_indexer(implementation):
    key = np.ones(128)
    key[0], key[1], key[33] = INF, -INF, NAN
    values, scales = key_bytes("indexer", "indexer_mxfp4", key, implementation)
    assert scales.tolist() == [253, 253, 125, 125]  # e = 126 for infinity, -2 for 1: 4
    codes = np.stack([values & 15, values >> 4], axis=1).ravel()
    assert codes[:3].tolist() == [7, 15, 0]
    assert codes[32:35].tolist() == [0, 7, 0]
    assert set(codes[64:]) == {6}
    values, scales = key_bytes("indexer", "indexer_fp8", key, implementation)
    assert scales.view(np.float32)[0] == 2.0**120
    assert values[[0, 1, 2, 33]].tolist() == [0x7E, 0xFE, 0x00, 0x7F]


NAN_ROWS = {
    "fp8_ds_mla": [0x7F] * 448 + [0xC0, 0x7F] * 64 + [247] * 7 + [0],
    "bf16": [0xC0, 0x7F] * 512,
    "fp8": [0x7F] * 512,
    "indexer_fp8": [0x7F] * 128 + [0, 0, 128, 123],  # 2^120, little end first
    "indexer_mxfp4": [0x77] * 64 + [253] * 4,
}
POISON = {
    "kv inf": (0, INF),
    "kv -inf": (0, -INF),
    "kv nan": (0, NAN),
    "score inf": (1, INF),
    "score nan": (1, NAN),
    "ape nan": (2, NAN),
    "ape inf": (2, INF),
}


def poisoned(kind, fmt, place, value, *, rows=slice(1, 2)):
    """One window; in one channel, `value` in some of its rows' kv (0) or score (1), or in ape (2)."""
    config = ops.make_config(kind, fmt, 3, 2)
    batch = random_batch(np.random.default_rng(2), config, sizes=[(0, config.window)], padding=0, padded_requests=0)
    channel = 5
    if place == 2:
        batch.ape[rows, channel] = value
    else:
        batch.kv_score[rows, place * batch.width + channel] = value
    return batch


# Two poisons in every format, all of them in two.
POISONED = [
    (kind, fmt, poison)
    for kind, fmt in [c for c in ops.COMPRESSORS if c not in (("hca", "bf16"), ("hca", "fp8"))]
    for poison in ("kv inf", "score inf")
]
POISONED += [("csa", "fp8_ds_mla", poison) for poison in POISON if ("csa", "fp8_ds_mla", poison) not in POISONED]
POISONED += sweep(
    *(c for c in (("indexer", "indexer_mxfp4", poison) for poison in POISON) if c not in POISONED),
)


@pytest.mark.parametrize(("kind", "fmt", "poison"), POISONED)
def test_one_bad_channel_makes_the_row_nan(kind, fmt, poison, implementation):
    batch = poisoned(kind, fmt, *POISON[poison])
    page, byte = oracle.row_index(fmt, [batch.kv_slot_mapping[-1]], 2)
    _, fused = ops.compress(batch, implementation=implementation)
    apart = ops.store(batch, ops.saved(batch), implementation=implementation)
    for cache in (fused, apart):
        got = oracle.as_pages(cache)[page[0, 0], byte[0]]
        assert got.tolist() == NAN_ROWS[fmt]
        exact = ops.rows(batch, batch.state, from_batch=True)
        oracle.assert_same_cache(cache, batch.cache, exact, batch.config, scale=batch.kv_scale)


@pytest.mark.parametrize("kind", ["csa", "hca"])
def test_a_score_of_minus_infinity_is_a_weight_of_zero(kind, implementation):
    """Of some rows it takes them out of the channel's sum; of all it leaves no sum: NaN."""
    n = ops.make_config(kind, "bf16").window
    for rows, finite in ((slice(1, 3), True), (slice(0, n - 1), True), (slice(0, n), False)):
        batch = poisoned(kind, "bf16", 1, -INF, rows=rows)
        if kind == "csa":  # the newer half of the window reads the other columns
            batch.kv_score[rows, batch.width + 512 + 5] = -INF
        exact = ops.rows(batch, batch.state, from_batch=True)
        assert np.isfinite(exact.exact[-1]).all() == finite
        _, cache = ops.compress(batch, implementation=implementation)
        oracle.assert_same_cache(cache, batch.cache, exact, batch.config)


def test_scores_that_overflow(implementation):
    """score + ape past float32's largest is infinite, as in the state cache; a difference of scores may overflow."""
    batch = poisoned("csa", "bf16", 1, 3e38)
    batch.ape[1, 5] = 3e38
    _, cache = ops.compress(batch, implementation=implementation)
    page, byte = oracle.row_index("bf16", [batch.kv_slot_mapping[-1]], 2)
    assert oracle.as_pages(cache)[page[0, 0], byte[0]].tolist() == NAN_ROWS["bf16"]
    batch = poisoned("csa", "bf16", 1, 3e38)
    batch.kv_score[2, batch.width + 5] = -3e38
    exact = ops.rows(batch, batch.state, from_batch=True)
    assert np.isfinite(exact.exact).all()
    _, cache = ops.compress(batch, implementation=implementation)
    oracle.assert_same_cache(cache, batch.cache, exact, batch.config)


def test_bf16_norm_weight(implementation):
    batch = poisoned("csa", "fp8_ds_mla", 0, 1.0)
    weight = jnp.asarray(batch.norm_weight).astype(jnp.bfloat16)
    batch = dataclasses.replace(batch, norm_weight=np.asarray(weight))
    exact = ops.rows(batch, batch.state, from_batch=True)
    _, cache = ops.compress(batch, implementation=implementation)
    oracle.assert_same_cache(cache, batch.cache, exact, batch.config)
