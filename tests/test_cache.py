"""Cache formats: pack, store, load and unpack against the oracle; the layout's numbers by hand."""

import itertools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from helpers import oracle
from helpers.batches import hard_keys, random_bytes

from dsv4_jax import CACHE_FORMATS

NAMES = list(oracle.FORMATS)


@pytest.mark.parametrize("name", NAMES)
def test_pack(name):
    keys = hard_keys(name)
    scale = np.float32(0.37) if name == "fp8" else None
    for pack in (CACHE_FORMATS[name].pack, jax.jit(CACHE_FORMATS[name].pack)):
        values, scales = pack(jnp.asarray(keys), scale)
        want_values, want_scales = oracle.quantize(name, keys, scale=scale)
        np.testing.assert_array_equal(scales, want_scales)
        np.testing.assert_array_equal(values, want_values)


def test_oracle_rounds_to_the_nearest():
    """ml_dtypes' narrowing, which the oracle rests on, against a search for the nearest value."""
    rng = np.random.default_rng(0)
    for code, dtype, bits in (
        (oracle.fp8_code, ml_dtypes.float8_e4m3fn, 8),
        (oracle.fp4_code, ml_dtypes.float4_e2m1fn, 4),
    ):
        table = np.arange(1 << (bits - 1), dtype=np.uint8).view(dtype).astype(np.float64)
        table = table[np.isfinite(table)]
        x = np.concatenate([rng.uniform(0, table[-1], 2000), table, (table[1:] + table[:-1]) / 2])
        x = x.astype(np.float32).astype(np.float64)
        distance = np.abs(x[:, None] - table)
        near = distance == distance.min(axis=1, keepdims=True)
        even = near & (np.arange(len(table)) % 2 == 0)
        want = np.where(near.sum(axis=1) > 1, even.argmax(axis=1), near.argmax(axis=1))
        np.testing.assert_array_equal(code(x), want)
        np.testing.assert_array_equal(code(-x), want | 1 << (bits - 1))


@pytest.mark.parametrize("page_rows", [1, 3, 64])
@pytest.mark.parametrize("name", NAMES)
def test_store_load_unpack(name, page_rows):
    fmt, layout = CACHE_FORMATS[name], oracle.FORMATS[name]
    rng = np.random.default_rng(page_rows)
    pages = 5
    cache = np.asarray(fmt.allocate(pages, page_rows))
    before = random_bytes(rng, oracle.as_pages(cache).shape, np.uint8)
    cache = jnp.asarray(before.view(cache.dtype).reshape(cache.shape))
    count = min(6, pages * page_rows)
    inside = rng.permutation(pages * page_rows)[:count]
    slots = np.concatenate([inside, [-1, pages * page_rows, 2**31 - 1, -(2**31)]]).astype(np.int32)
    values = rng.integers(0, 256, (len(slots), layout.value_bytes), np.uint8)
    scales = rng.integers(1, 255, (len(slots), layout.scale_bytes), np.uint8)
    after = fmt.store(cache, jnp.asarray(values), jnp.asarray(scales), jnp.asarray(slots), page_rows)
    want = oracle.store(name, before, values[:count], scales[:count], inside, page_rows)
    np.testing.assert_array_equal(oracle.as_pages(after), want)

    got_values, got_scales = fmt.load(after, jnp.asarray(slots), page_rows)
    np.testing.assert_array_equal(got_values[:count], values[:count])
    np.testing.assert_array_equal(got_scales[:count], scales[:count])
    assert not np.asarray(got_values[count:]).any() and not np.asarray(got_scales[count:]).any()


@pytest.mark.parametrize("name", NAMES)
def test_unpack(name):
    fmt, page_rows = CACHE_FORMATS[name], 7
    keys = hard_keys(name)
    scale = np.float32(0.37) if name == "fp8" else None
    values, scales = oracle.quantize(name, keys, scale=scale)
    pages = -(-len(keys) // page_rows)
    slots = np.random.default_rng(0).permutation(pages * page_rows)[: len(keys)].astype(np.int32)
    empty = np.asarray(fmt.allocate(pages, page_rows))
    packed = oracle.store(name, oracle.as_pages(empty), values, scales, slots, page_rows)
    cache = jnp.asarray(packed.view(empty.dtype).reshape(empty.shape))
    got = fmt.unpack(cache, jnp.asarray(slots), page_rows, scale=scale)
    want = oracle.decode(name, values, scales, scale)
    with np.errstate(over="ignore"):
        want = want.astype(np.float32)
    # Subnormal float32 values may be flushed to zero; everything else is exact.
    normal = ~(np.abs(want) < 2.0**-126)
    np.testing.assert_array_equal(np.asarray(got)[normal], want[normal])
    assert (np.abs(np.asarray(got)[~normal]) <= np.abs(want[~normal])).all()
    assert not np.asarray(fmt.unpack(cache, jnp.array([-1, 2**31 - 1], jnp.int32), page_rows, scale=scale)).any()


def test_layout_by_hand():
    assert [CACHE_FORMATS[n].row_bytes for n in NAMES] == [584, 132, 68, 1024, 512]
    assert [CACHE_FORMATS[n].page_bytes(64) for n in NAMES[:3]] == [37440, 8448, 4352]
    assert CACHE_FORMATS["fp8_ds_mla"].page_bytes(2) == 1728
    assert CACHE_FORMATS["fp8_ds_mla"].allocate(3, 2).shape == (3, 1728)
    assert CACHE_FORMATS["indexer_fp8"].allocate(3, 64, page_bytes=8640).shape == (3, 8640)
    assert CACHE_FORMATS["bf16"].allocate(3, 2).shape == (3, 2, 512)
    assert CACHE_FORMATS["bf16"].allocate(0, 2).dtype == jnp.bfloat16
    assert CACHE_FORMATS["fp8"].allocate(3, 2).dtype == jnp.float8_e4m3fn
    page, byte = oracle.row_index("fp8_ds_mla", [65], 64)  # page 1, row 1: values at 576, scales behind 64 * 576
    assert page.tolist() == [[1]]
    assert byte[0, [0, 575, 576, 583]].tolist() == [576, 1151, 36872, 36879]


@pytest.mark.parametrize("name", ["fp8_ds_mla", "indexer_fp8", "indexer_mxfp4"])
def test_no_scale_byte_is_255(name):
    """Readers take 255 for NaN."""
    extremes = [0.0, 1e-45, 2.0**-126, 1.0, 3.4e38, np.inf, -np.inf, np.nan]
    for a, b in itertools.product(extremes, repeat=2):
        key = np.full((1, oracle.FORMATS[name].head_dim), a, np.float32)
        key[0, ::7] = b
        _, scales = CACHE_FORMATS[name].pack(jnp.asarray(key))
        scales = np.asarray(scales)
        exponents = (scales.view(np.uint32) >> 23) if name == "indexer_fp8" else scales
        assert exponents.max() <= 254, (a, b)


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda f: f["bf16"].allocate(-1, 4), ValueError, r"pages is -1.*at least 0"),
        (lambda f: f["bf16"].allocate(1, 0), ValueError, r"page_rows 0.*1"),
        (lambda f: f["bf16"].allocate(1, 1, page_bytes=4096), ValueError, r"page_bytes is 4096.*leave it out"),
        (lambda f: f["fp8_ds_mla"].allocate(1, 2, page_bytes=1000), ValueError, r"page_bytes.*1000.*at least 1168"),
        (lambda f: f["indexer_fp8"].allocate(1, 1, page_bytes=133), ValueError, r"page_bytes.*133.*multiple of 4"),
        (lambda f: f["bf16"].pack(jnp.zeros((2, 128))), ValueError, r"keys has shape \(2, 128\).*512"),
        (lambda f: f["fp8"].pack(jnp.zeros((2, 512))), ValueError, r"scale is None.*must"),
        (
            lambda f: f["bf16"].unpack(jnp.zeros((1, 2, 512)), jnp.zeros(1, jnp.int32), 2),
            TypeError,
            r"cache has dtype float32.*bfloat16",
        ),
        (
            lambda f: f["bf16"].unpack(jnp.zeros((1, 3, 512), jnp.bfloat16), jnp.zeros(1, jnp.int32), 2),
            ValueError,
            r"cache has shape \(1, 3, 512\).*\[pages, 2, 512\]",
        ),
        (
            lambda f: f["indexer_fp8"].unpack(jnp.zeros((1, 131), jnp.uint8), jnp.zeros(1, jnp.int32), 1),
            ValueError,
            r"cache has shape \(1, 131\).*at least 132",
        ),
    ],
)
def test_errors(call, error, match):
    with pytest.raises(error, match=match):
        call(CACHE_FORMATS)


@pytest.mark.parametrize("name", CACHE_FORMATS)
def test_no_rows(name):
    fmt = CACHE_FORMATS[name]
    scale = 1.0 if fmt.needs_scale else None
    values, scales = fmt.pack(jnp.zeros((0, fmt.head_dim)), scale)
    assert values.shape == (0, fmt.value_bytes) and scales.shape == (0, fmt.scale_bytes)
    cache = fmt.allocate(1, 2)
    none = jnp.zeros(0, jnp.int32)
    np.testing.assert_array_equal(fmt.store(cache, values, scales, none, 2), cache)
    assert fmt.unpack(cache, none, 2, scale=scale).shape == (0, fmt.head_dim)


@pytest.mark.parametrize("traced", [False, True])
def test_fp8_is_divided(traced):
    """Midpoints of neighboring codes times a scale: times its inverse, many would fall on the wrong side."""
    scale = np.float32(0.7)
    codes = np.arange(0x7F, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    keys = np.resize((codes[:-1] + codes[1:]) / 2, (5, 512)) * scale
    pack = CACHE_FORMATS["fp8"].pack
    values, _ = jax.jit(pack)(keys, scale) if traced else jax.jit(lambda keys: pack(keys, scale))(keys)
    np.testing.assert_array_equal(values, (keys / scale).astype(ml_dtypes.float8_e4m3fn).view(np.uint8))


ZERO = [0, 0.0, -1.0, float("nan"), float("inf"), np.float32(0), np.float32("nan"), np.zeros((), np.float32)]


@pytest.mark.parametrize("scale", ZERO, ids=repr)
def test_a_scale_that_is_known_must_be_positive(scale):
    fmt = CACHE_FORMATS["fp8"]
    with pytest.raises(ValueError, match=r"^kv_scale is .*; it must be above 0, finite"):
        fmt.check_scale("kv_scale", scale)
    with pytest.raises(ValueError, match=r"^scale is .*; it must be above 0, finite"):
        fmt.pack(jnp.ones((1, 512)), scale)
