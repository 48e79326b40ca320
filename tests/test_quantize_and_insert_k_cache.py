"""`quantize_and_insert_k_cache` against the oracle, vLLM's bytes, and back through the gather."""

import jax.numpy as jnp
import numpy as np
import pytest
from helpers import golden, ops, oracle
from helpers.batches import hard_keys
from helpers.k_cache import BF16, CACHE_ERRORS, INT32_MAX, INT32_MIN, NAMES, SCALE, random_cache

from dsv4_jax import CACHE_FORMATS, dequantize_and_gather_k_cache, quantize_and_insert_k_cache

GPU_TOO = True


def test_golden(implementation):
    case = golden.load("quantize_insert")
    page_rows, page_bytes, pages = map(int, case["meta"])
    cache = np.full((pages, page_bytes), 0xA5, np.uint8)
    got = quantize_and_insert_k_cache(
        case["k"], cache, case["slots"], page_rows=page_rows, implementation=implementation
    )
    np.testing.assert_array_equal(got, case["cache"])


@pytest.mark.parametrize(("page_rows", "padding", "dtype"), [(1, 0, np.float32), (7, 44, BF16)])
@pytest.mark.parametrize("name", NAMES)
def test_every_rounding_edge(name, page_rows, padding, dtype, implementation):
    """Every rounding edge, padding in any place, pages longer than their rows; no other byte changes."""
    fmt = CACHE_FORMATS[name]
    rng = np.random.default_rng(page_rows)
    k = hard_keys(name)
    if page_rows > 1:
        k = k[: rng.integers(30, len(k))]
    with np.errstate(over="ignore"):
        k = k.astype(dtype)
    tokens = len(k)
    pages = tokens // page_rows + 2
    cache = random_cache(rng, name, pages, page_rows, padding if fmt.packed else 0)
    slots = rng.permutation(pages * page_rows)[:tokens].astype(np.int32)
    slots[rng.permutation(tokens)[:5]] = [-1, pages * page_rows, INT32_MAX, INT32_MIN, -page_rows]
    got = quantize_and_insert_k_cache(
        k,
        cache,
        slots,
        page_rows=page_rows,
        cache_format=name,
        kv_scale=SCALE.get(name),
        implementation=implementation,
    )
    inside = (slots >= 0) & (slots < pages * page_rows)
    written = oracle.quantize(name, k[inside], scale=SCALE.get(name))
    ops.same_bytes(got, oracle.store(name, oracle.as_pages(cache), *written, slots[inside], page_rows))


@pytest.mark.parametrize(("tokens", "pages"), [(0, 2), (3, 0), (1, 1), (17, 9)])
@pytest.mark.parametrize("name", ["fp8_ds_mla", "indexer_mxfp4", "bf16"])
def test_sizes(name, tokens, pages, implementation):
    rng = np.random.default_rng(tokens)
    page_rows = 2
    k = rng.standard_normal((tokens, oracle.FORMATS[name].head_dim)).astype(BF16)
    cache = random_cache(rng, name, pages, page_rows)
    slots = np.resize(rng.permutation(pages * page_rows), tokens) if pages else np.arange(tokens)
    slots[pages * page_rows :] = -1
    got = quantize_and_insert_k_cache(
        jnp.asarray(k),
        jnp.asarray(cache),
        jnp.asarray(slots),
        page_rows=page_rows,
        cache_format=name,
        kv_scale=SCALE.get(name),
        implementation=implementation,
    )
    assert got.shape == cache.shape and got.dtype == cache.dtype
    if not (tokens and pages):
        return
    written = oracle.quantize(name, k[slots >= 0], scale=SCALE.get(name))
    ops.same_bytes(got, oracle.store(name, oracle.as_pages(cache), *written, slots[slots >= 0], page_rows))


@pytest.mark.parametrize("name", ["fp8_ds_mla", "indexer_mxfp4", "fp8"])
def test_there_and_back(name, implementation):
    """Keys that a format holds exactly come back as they were."""
    rng = np.random.default_rng(0)
    dim = oracle.FORMATS[name].head_dim
    k = rng.choice([-4.0, -1.5, -0.5, 0.0, 1.0, 2.0, 3.0], (6, dim))
    k[:, ::32] = 6.0  # each block's largest, so that its scale is 1 in E2M1
    k = jnp.asarray(k, jnp.bfloat16)
    cache = CACHE_FORMATS[name].allocate(4, 2)
    block_table = np.array([[3, 1], [0, 2]])
    slots = np.array([6, 7, 2, 0, 1, 4])
    options = {"page_rows": 2, "cache_format": name, "implementation": implementation}
    options["kv_scale"] = 0.5 if name == "fp8" else None
    cache = quantize_and_insert_k_cache(k, cache, slots, **options)
    out = jnp.full((2, 4, dim), 9, jnp.bfloat16)
    got = dequantize_and_gather_k_cache(cache, np.array([3, 3]), block_table, np.array([3, 2]), 1, out=out, **options)
    want = np.full((2, 4, dim), 9.0)
    want[0, 1:], want[1, 1:3] = k[:3], k[4:]
    np.testing.assert_array_equal(np.asarray(got, np.float64), want)


def arguments():
    return {
        "k": jnp.zeros((3, 512), jnp.bfloat16),
        "cache": jnp.zeros((2, 1168), jnp.uint8),
        "slots": jnp.arange(3),
        "page_rows": 2,
        "cache_format": "fp8_ds_mla",
    }


ERRORS = [
    ({"k": jnp.zeros((3, 512), jnp.float16)}, TypeError, r"k has dtype float16; it must be float32 or bfloat16"),
    ({"k": jnp.zeros((3, 128), jnp.bfloat16)}, ValueError, r"k has shape \[3, 128\]; it must be \[T, 512\]"),
    ({"k": jnp.zeros(512)}, ValueError, r"k has shape \[512\]; it must be \[T, 512\]"),
    ({"k": None}, TypeError, r"k is a NoneType; it must be an array"),
    ({"slots": jnp.zeros(3)}, TypeError, r"slots has dtype float32; it must be int32 or int64"),
    ({"slots": jnp.arange(4)}, ValueError, r"slots has shape \[4\]; it must be \[3\]"),
]


@pytest.mark.parametrize(("wrong", "error", "match"), CACHE_ERRORS + ERRORS)
def test_bad_input(wrong, error, match):
    with pytest.raises(error, match=match):
        quantize_and_insert_k_cache(**arguments() | wrong)


def test_the_arguments_are_right(implementation):
    """What the cases start from raises nothing; nor do slots of int64, whatever they hold."""
    given = arguments()
    want = quantize_and_insert_k_cache(**given, implementation=implementation)
    assert want.dtype == jnp.uint8
    slots = np.asarray(given["slots"], np.int64)
    same = quantize_and_insert_k_cache(**given | {"slots": slots}, implementation=implementation)
    np.testing.assert_array_equal(same, want)
    beyond = quantize_and_insert_k_cache(**given | {"slots": slots * 0 + 2**40}, implementation=implementation)
    assert not beyond.any()


def test_the_scale_of_fp8_must_be_given():
    given = arguments() | {"cache": CACHE_FORMATS["fp8"].allocate(2, 2), "cache_format": "fp8"}
    with pytest.raises(ValueError, match=r"kv_scale is None; for the cache format fp8 it must be a float32 scalar"):
        quantize_and_insert_k_cache(**given)
    with pytest.raises(ValueError, match=r"kv_scale has shape \[1\]; it must be \[\]"):
        quantize_and_insert_k_cache(**given, kv_scale=jnp.ones(1))
    assert quantize_and_insert_k_cache(**given, kv_scale=1.0).dtype == jnp.float8_e4m3fn
