"""Cache formats: pack, store, load and unpack against the oracle; the layout's numbers by hand."""

import itertools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import oracle
import pytest
from batches import random_bytes

from dsv4_jax import CACHE_FORMATS

NAMES = list(oracle.FORMATS)


def decoded(name, values, scales, scale=None):
    """[N, D] float64 values of rows of bytes: the meaning of a format, said once more."""
    with np.errstate(invalid="ignore"):
        if name == "bf16":
            return values.view(ml_dtypes.bfloat16).astype(np.float64)
        if name == "fp8":
            return values.view(ml_dtypes.float8_e4m3fn).astype(np.float64) * float(np.float32(scale))
        if name == "indexer_fp8":
            return values.view(ml_dtypes.float8_e4m3fn).astype(np.float64) * scales.view(np.float32)
        if name == "indexer_mxfp4":
            codes = np.stack([values & 15, values >> 4], axis=-1).reshape(len(values), 128)
            numbers = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])[codes & 7] * np.where(codes > 7, -1.0, 1.0)
            return np.ldexp(numbers, np.repeat(scales.astype(int) - 127, 32, axis=1))
        nope = values[:, :448].view(ml_dtypes.float8_e4m3fn).astype(np.float64)
        nope = np.ldexp(nope, np.repeat(scales[:, :7].astype(int) - 127, 64, axis=1))
        rope = np.ascontiguousarray(values[:, 448:]).view(ml_dtypes.bfloat16).astype(np.float64)
        return np.concatenate([nope, rope], axis=1)


def hard_keys(name):
    """Keys [N, D] float32 around every rounding edge, of all magnitudes, and not finite."""
    fmt = oracle.FORMATS[name]
    rng = np.random.default_rng(0)
    keys = rng.standard_normal((64, fmt.head_dim)) * 10.0 ** rng.integers(-30, 30, (64, 1))
    mixed = rng.standard_normal((16, fmt.head_dim)) * 10.0 ** rng.integers(-6, 6, (16, fmt.head_dim))
    # Halves of everything that a code can be, with a block's largest value at 448 or 6 so that the scale is a power.
    grid = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    grid = np.sort(grid[np.isfinite(grid)])
    halves = np.concatenate([grid, (grid[1:] + grid[:-1]) / 2])
    edges = np.resize(halves, (8, fmt.head_dim))
    largest = fmt.largest or 448.0
    edges *= largest / 448
    edges[:, :: fmt.block or 64] = largest
    powers = np.array([largest * 2.0**e * f for e in (-20, -1, 0, 1, 30) for f in (1, 1 + 2.0**-7, 1 - 2.0**-7)])
    tops = np.zeros((len(powers), fmt.head_dim))
    tops[:, :: fmt.block or 64] = powers[:, None]
    odd = rng.standard_normal((8, fmt.head_dim))
    odd[0, 3], odd[1, 3], odd[2, 3] = np.inf, -np.inf, np.nan
    odd[3], odd[4], odd[5], odd[6] = np.nan, 0.0, -0.0, np.finfo(np.float32).max
    return np.concatenate([keys, mixed, edges, tops, odd]).astype(np.float32)


@pytest.mark.parametrize("name", NAMES)
def test_pack(name):
    keys = hard_keys(name)
    scale = np.float32(0.37) if name == "fp8" else None
    for pack in (CACHE_FORMATS[name].pack, jax.jit(CACHE_FORMATS[name].pack)):
        values, scales = pack(jnp.asarray(keys), scale)
        want_values, want_scales = oracle.quantise(name, keys, scale=scale)
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
    values, scales = oracle.quantise(name, keys, scale=scale)
    pages = -(-len(keys) // page_rows)
    slots = np.random.default_rng(0).permutation(pages * page_rows)[: len(keys)].astype(np.int32)
    empty = np.asarray(fmt.allocate(pages, page_rows))
    packed = oracle.store(name, oracle.as_pages(empty), values, scales, slots, page_rows)
    cache = jnp.asarray(packed.view(empty.dtype).reshape(empty.shape))
    got = fmt.unpack(cache, jnp.asarray(slots), page_rows, scale=scale)
    want = decoded(name, values, scales, scale)
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
