"""RoPE tables against arithmetic in float64 and against Hugging Face's rotary embedding."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

from dsv4_jax import Yarn

FLASH = Path(__file__).parent / "data" / "config_flash.json"
EPS = 2.0**-24  # half an ulp of a float32, relative
MAX_POSITIONS = 1_048_576


def frequencies(yarn, dim):
    """What `Yarn.inv_freq` rounds: the formula in float64."""
    i = np.arange(dim // 2)
    kept = yarn.theta ** (-2.0 * i / dim)
    # A pair turns L * freq / 2 pi times within L positions; the ramp's ends are rounded outwards to whole pairs.
    turns = [yarn.beta_fast, yarn.beta_slow]
    pairs = [dim / 2 * math.log(yarn.original_max_position_embeddings / (2 * math.pi * t), yarn.theta) for t in turns]
    low, high = max(math.floor(pairs[0]), 0), min(math.ceil(pairs[1]), dim - 1)
    slow = np.clip((i - low) / (high - low), 0, 1)
    return kept * (1 - slow) + kept / yarn.factor * slow


@pytest.mark.parametrize(
    "yarn", [Yarn(), Yarn(factor=40.0), Yarn(10_000.0, 4.0, 4096), Yarn(beta_fast=8.0, beta_slow=2.0), Yarn(factor=1.0)]
)
@pytest.mark.parametrize("dim", [2, 32, 64, 128])
def test_inv_freq_is_the_formula(yarn, dim):
    got = yarn.inv_freq(dim)
    assert got.dtype == np.float32
    assert got.shape == (dim // 2,)
    # Roundings: the exponent (times log theta, at most 12), the power, its inverse, the ramp and the blend.
    np.testing.assert_allclose(got, frequencies(yarn, dim), rtol=(12 + 8) * EPS, atol=0)


def test_inv_freq_of_the_models_to_the_bit():
    bits = Yarn().inv_freq().view(np.uint32)
    want = {
        0: 0x3F800000,
        1: 0x3F300A3A,
        15: 0x3B6E4237,
        16: 0x3B147AE1,
        20: 0x399BB3AF,
        24: 0x37A3D70C,
        31: 0x35187C4D,
    }
    assert {i: int(bits[i]) for i in want} == want


def test_plain_rope_has_no_interpolation():
    plain = Yarn(10_000.0, factor=1.0).inv_freq()
    np.testing.assert_array_equal(plain, Yarn(10_000.0, factor=1.0, original_max_position_embeddings=512).inv_freq())
    np.testing.assert_allclose(plain, 10_000.0 ** (-np.arange(32) / 32), rtol=14 * EPS)


def test_table_is_cos_and_sin_of_position_times_frequency():
    yarn, positions = Yarn(), 9000
    table = yarn.table(positions)
    assert table.dtype == np.float32
    assert table.shape == (positions, 64)
    angles = np.arange(positions)[:, None] * frequencies(yarn, 64)
    # The angle's error: that of the frequency, and its own rounding.
    bound = np.concatenate([angles, angles], axis=1) * (20 + 1) * EPS + EPS
    assert (np.abs(table - np.concatenate([np.cos(angles), np.sin(angles)], axis=1)) <= bound).all()
    # No attention factor (0.1 log 16 + 1 = 1.28) multiplies them.
    np.testing.assert_allclose(table[:, :32] ** 2 + table[:, 32:] ** 2, 1, atol=4 * EPS)
    np.testing.assert_array_equal(table[0], [1] * 32 + [0] * 32)


def test_table_rounds_the_angle_to_float32():
    """At the last position a float64 angle would be another one, by up to 0.03 radians."""
    position, inv_freq = MAX_POSITIONS - 1, Yarn().inv_freq()
    angle = np.float32(position) * inv_freq
    exact = position * inv_freq.astype(np.float64)
    assert np.abs(np.cos(angle.astype(np.float64)) - np.cos(exact)).max() > 0.01
    table = Yarn().table(MAX_POSITIONS)
    np.testing.assert_array_equal(table[-1, :32], np.cos(angle.astype(np.float64)).astype(np.float32))
    np.testing.assert_array_equal(table[-1, 32:], np.sin(angle.astype(np.float64)).astype(np.float32))


def test_shorter_tables_are_prefixes():
    table = Yarn().table(20_000)
    for n in (0, 1, 8191, 8192, 8193):
        np.testing.assert_array_equal(Yarn().table(n), table[:n])
    assert Yarn().table(5, dim=32).shape == (5, 32)


def test_errors():
    for dim in (0, 63, -2):
        with pytest.raises(ValueError, match=f"dim is {dim}; it must be even and at least 2"):
            Yarn().inv_freq(dim)
    with pytest.raises(ValueError, match="num_positions is -1; it must be at least 0"):
        Yarn().table(-1)
    for name, value in [
        ("theta", 1.0),
        ("theta", math.nan),
        ("factor", 0.5),
        ("factor", math.inf),
        ("original_max_position_embeddings", 0),
        ("beta_slow", 0.0),
        ("beta_slow", 33.0),
    ]:
        with pytest.raises(ValueError, match=f"{name} is {value}"):
            Yarn(**{name: value})


@pytest.fixture
def hugging_face():
    """Hugging Face's rotary embedding of the Flash configuration."""
    pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    modeling = pytest.importorskip("transformers.models.deepseek_v4.modeling_deepseek_v4")
    published = json.loads(FLASH.read_text())
    published.pop("architectures")
    return modeling.DeepseekV4RotaryEmbedding(transformers.DeepseekV4Config(**published))


def test_inv_freq_equals_hugging_faces_to_the_bit(hugging_face):
    np.testing.assert_array_equal(Yarn().inv_freq(), hugging_face.compress_inv_freq.numpy())


def test_table_equals_hugging_faces(hugging_face):
    """All positions. Angles are the same to the bit; torch's cosine and sine are within one ulp, ours the nearest."""
    import torch

    table = Yarn().table(MAX_POSITIONS)
    like = torch.zeros(1, dtype=torch.float32)
    block = 1 << 16
    for start in range(0, MAX_POSITIONS, block):
        rows = table[start : start + block]
        position_ids = torch.arange(start, start + block)[None]
        for got, want in zip(
            (rows[:, :32], rows[:, 32:]), hugging_face(like, position_ids, layer_type="compress"), strict=True
        ):
            want = want[0].numpy()
            ulp = np.spacing(np.maximum(np.abs(got), np.abs(want)))
            assert (np.abs(got - want) <= ulp).all()
