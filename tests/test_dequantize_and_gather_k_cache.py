"""`dequantize_and_gather_k_cache` against the oracle and vLLM's result."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import golden, ops, oracle
from helpers.batches import random_bytes
from helpers.k_cache import (
    BF16,
    CACHE_ERRORS,
    INT32_MAX,
    INT32_MIN,
    NAMES,
    SCALE,
    assert_gathered,
    gathered,
    random_cache,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4_jax import CACHE_FORMATS, dequantize_and_gather_k_cache, quantize_and_insert_k_cache

GPU_TOO = True
ON_GPU = jax.default_backend() != "cpu"


def call_gather(name, cache, page_rows, seq_lens, block_table, gather_lens, offset, out, implementation):
    return dequantize_and_gather_k_cache(
        cache,
        seq_lens,
        block_table,
        gather_lens,
        offset,
        out=out,
        page_rows=page_rows,
        cache_format=name,
        kv_scale=SCALE.get(name),
        implementation=implementation,
    )


@pytest.mark.parametrize("case", ["all", "tail"])
def test_golden(case, implementation):
    arrays = golden.load(f"dequant_gather/{case}")
    page_rows, offset = map(int, arrays["meta"])
    gather_lens = arrays["gather_lens"] if arrays["gather_lens"].size else None
    want = arrays["out"]
    got = call_gather(
        "fp8_ds_mla", arrays["cache"], page_rows, arrays["seq_lens"], arrays["block_table"], gather_lens, offset,
        np.zeros(want.shape, BF16), implementation,
    )  # fmt: skip
    assert want.any()
    ops.same_bytes(got, want)


# (rows in the cache, rows wanted): all, none, a part, more than there are, past the block table, negative, enormous.
LENGTHS = [
    (13, 13), (0, 0), (9, 0), (11, 4), (5, 9), (40, 12), (-3, 5), (7, -1), (INT32_MAX, INT32_MAX), (INT32_MAX, 3),
    (12, INT32_MAX), (INT32_MIN, INT32_MIN), (3, 1), (16, 16), (INT32_MAX, INT32_MAX - 6),
]  # fmt: skip


@pytest.mark.parametrize(("page_rows", "padding", "offset"), [(1, 0, 15), (4, 12, 3)])
@pytest.mark.parametrize("name", NAMES)
def test_ragged_lengths(name, page_rows, padding, offset, implementation):
    """Ragged lengths, a block table with holes and pages that are not there; all of `out` else stays."""
    rng = np.random.default_rng(page_rows)
    requests, columns, pages, length = len(LENGTHS), 18 // page_rows, 23, 17
    cache = random_cache(rng, name, pages, page_rows, padding if CACHE_FORMATS[name].packed else 0)
    seq_lens, gather_lens = np.array(LENGTHS, np.int32).T
    block_table = rng.integers(0, pages, (requests, columns)).astype(np.int32)
    holes = rng.random(block_table.shape) < 0.2
    block_table[holes] = rng.choice([-1, pages, INT32_MAX, INT32_MIN], holes.sum())
    out = random_bytes(rng, (requests, length, oracle.FORMATS[name].head_dim), BF16)
    for lens in (gather_lens, None):
        args = seq_lens, block_table, lens, offset, out
        got = call_gather(name, cache, page_rows, *args, implementation)
        want = gathered(name, cache, page_rows, seq_lens, block_table, seq_lens if lens is None else lens, offset, out)
        assert want[1].any() and not want[1].all()
        assert_gathered(got, want)
    # A negative offset, which only data can be.
    nowhere = call_gather(name, cache, page_rows, seq_lens, block_table, None, jnp.int32(-2), out, implementation)
    np.testing.assert_array_equal(np.asarray(nowhere).view(np.uint16), out.view(np.uint16))


@pytest.mark.parametrize("name", NAMES)
def test_every_code(name, implementation):
    """Each value byte under scales of all kinds; each bfloat16 where one is kept, each fourth in `fp8_ds_mla`."""
    rng = np.random.default_rng(0)
    layout = oracle.FORMATS[name]
    rows = 128 if name == "bf16" else 256
    cache = random_cache(rng, name, 1, rows)
    pages = oracle.as_pages(cache)  # a view
    values = pages[0, : rows * layout.value_bytes].reshape(rows, -1)
    scales = pages[0, rows * layout.value_bytes : rows * layout.row_bytes].reshape(rows, -1)
    values[:] = np.sort(np.resize(np.arange(256, dtype=np.uint8), values.size)).reshape(values.shape)
    if name == "bf16":
        values[:] = np.arange(2**16, dtype=np.uint16).view(np.uint8).reshape(rows, -1)
    if name == "fp8_ds_mla":
        values[:, 448:] = np.arange(0, 2**16, 4, dtype=np.uint16).view(np.uint8).reshape(rows, -1)
    if name in ("fp8_ds_mla", "indexer_mxfp4"):
        scales[:] = np.arange(scales.size).reshape(scales.shape) * 37 % 255 + 1
    lens, table = np.array([rows], np.int32), np.zeros((1, 1), np.int32)
    out = random_bytes(rng, (1, rows, layout.head_dim), BF16)
    want = gathered(name, cache, rows, lens, table, lens, 0, out)
    assert_gathered(call_gather(name, cache, rows, lens, table, None, 0, out, implementation), want)


SPAN = st.one_of(st.integers(-2, 9), st.sampled_from([INT32_MAX, INT32_MAX - 1, INT32_MIN]))


@settings(max_examples=60, deadline=None)
@given(
    lens=st.lists(st.tuples(SPAN, SPAN), min_size=3, max_size=3),
    table=st.lists(st.sampled_from([-1, 0, 1, 2, 3, 4, INT32_MAX]), min_size=6, max_size=6),
    offset=SPAN,
)
def check_any_lengths(implementation, lens, table, offset):
    rng = np.random.default_rng(0)
    cache = random_cache(rng, "indexer_mxfp4", 4, 3)
    out = random_bytes(rng, (3, 7, 128), BF16)
    seq_lens, gather_lens = np.array(lens, np.int32).T
    block_table = np.array(table, np.int32).reshape(3, 2)
    args = "indexer_mxfp4", cache, 3, seq_lens, block_table, gather_lens
    want = gathered(*args, offset, out)
    assert_gathered(call_gather(*args, jnp.int32(offset), out, implementation), want)


def test_any_lengths(implementation):
    check_any_lengths(implementation)


@pytest.mark.parametrize("tile", [512, 2048])
def test_programs_take_several_turns(tile, monkeypatch):
    """More rows than the programs of a request hold at once."""
    pytest.importorskip("triton", reason="triton is not installed")
    kernel = pytest.importorskip("dsv4_jax.common.ops.dequantize_and_gather_k_cache")
    monkeypatch.setattr(kernel, "TILE", tile)
    monkeypatch.setattr(kernel, "PROGRAMS", 5)
    monkeypatch.setattr(kernel, "PROGRAMS_OF_REQUEST", 2)
    rng = np.random.default_rng(tile)
    length = 20 * tile // 512 + 3  # a shape of this test alone: what it compiles is not used again
    cache = random_cache(rng, "fp8_ds_mla", 9, 16)
    seq_lens, gather_lens = np.array([[length, length], [length - 2, 5]], np.int32)
    seq_lens[1] += 3  # its rows begin past the table
    block_table = rng.integers(0, 9, (2, length // 16 + 2)).astype(np.int32)
    args = "fp8_ds_mla", cache, 16, seq_lens, block_table, gather_lens, 1
    out = random_bytes(rng, (2, length, 512), BF16)
    assert_gathered(call_gather(*args, out, "triton"), gathered(*args, out))


@pytest.mark.parametrize(
    ("requests", "columns", "pages", "length"), [(0, 2, 3, 4), (2, 0, 3, 4), (2, 2, 0, 4), (2, 2, 3, 0), (1, 1, 1, 1)]
)
@pytest.mark.parametrize("name", ["fp8_ds_mla", "bf16"])
def test_sizes(name, requests, columns, pages, length, implementation):
    rng = np.random.default_rng(0)
    cache = random_cache(rng, name, pages, 2)
    lens = np.full(requests, 1, np.int32)
    table = np.zeros((requests, columns), np.int32)
    out = random_bytes(rng, (requests, length, 512), BF16)
    got = call_gather(name, cache, 2, lens, table, None, 0, out, implementation)
    assert got.shape == out.shape
    assert_gathered(got, gathered(name, cache, 2, lens, table, lens, 0, out))


@pytest.mark.parametrize("name", NAMES)
def test_in_place(name, implementation):
    """Donated, the cache and `out` are updated where they are, also as a loop's carry.

    On the CPU the Triton interpreter is a callback, whose results are new buffers, and XLA copies an fp8 array to see
    it as bytes; there only the bytes are held.
    """
    rng = np.random.default_rng(0)
    cache, dim = random_cache(rng, name, 3, 2), oracle.FORMATS[name].head_dim
    k = rng.standard_normal((3, dim)).astype(BF16)
    slots, table = np.array([5, 0, 3]), np.array([[2, 0], [1, 1]], np.int32)
    lens = np.array([3, 2], np.int32)
    out = random_bytes(rng, (2, 5, dim), BF16)
    options = {"page_rows": 2, "cache_format": name, "kv_scale": SCALE.get(name), "implementation": implementation}

    def step(i, carry):
        cache, out = carry
        cache = quantize_and_insert_k_cache(k, cache, slots, **options)
        return cache, dequantize_and_gather_k_cache(cache, lens, table, offset=i, out=out, **options)

    loop = functools.partial(jax.lax.fori_loop, 0, 3, step)
    compiled = jax.jit(lambda *carry: loop(carry), donate_argnums=(0, 1)).lower(cache, out).compile()
    on_device = [jnp.array(a, copy=True) for a in (cache, out)]
    addresses = [a.unsafe_buffer_pointer() for a in on_device]
    got_cache, got = compiled(*on_device)
    if ON_GPU or (implementation == "xla" and name != "fp8"):
        assert not ops.copies(compiled, cache, out)
        assert [a.unsafe_buffer_pointer() for a in (got_cache, got)] == addresses
    written = oracle.quantize(name, k, scale=SCALE.get(name))
    after = oracle.store(name, oracle.as_pages(cache), *written, slots, 2)
    ops.same_bytes(got_cache, after)
    for i in range(3):
        bits, rows = gathered(name, after, 2, lens, table, lens, i, out)
        out = bits.view(BF16)
    assert_gathered(got, (bits, np.ones_like(rows)))


def arguments():
    return {
        "cache": jnp.zeros((2, 1168), jnp.uint8),
        "seq_lens": jnp.ones(3, jnp.int32),
        "block_table": jnp.zeros((3, 1), jnp.int32),
        "gather_lens": jnp.ones(3, jnp.int32),
        "offset": 0,
        "out": jnp.zeros((3, 4, 512), jnp.bfloat16),
        "page_rows": 2,
        "cache_format": "fp8_ds_mla",
    }


ERRORS = [
    ({"seq_lens": jnp.ones(3)}, TypeError, r"seq_lens has dtype float32; it must be int32"),
    ({"seq_lens": 3}, TypeError, r"seq_lens is a int; it must be an array"),
    ({"block_table": jnp.zeros((2, 1), jnp.int32)}, ValueError, r"block_table has shape \[2, 1\]; it must be \[3, B\]"),
    ({"gather_lens": jnp.ones(2, jnp.int32)}, ValueError, r"gather_lens has shape \[2\]; it must be \[3\]"),
    ({"gather_lens": jnp.ones(3)}, TypeError, r"gather_lens has dtype float32; it must be int32"),
    ({"offset": -1}, ValueError, r"offset is -1; it must be an integer of at least 0"),
    ({"offset": 2**31}, ValueError, r"offset is 2147483648; .*below 2\*\*31"),
    ({"offset": 1.0}, TypeError, r"offset is a float; it must be an array of int32"),
    ({"offset": jnp.zeros(3, jnp.int32)}, ValueError, r"offset has shape \[3\]; it must be \[\]"),
    ({"out": jnp.zeros((3, 4, 512))}, TypeError, r"out has dtype float32; it must be bfloat16"),
    (
        {"out": jnp.zeros((3, 4, 128), jnp.bfloat16)},
        ValueError,
        r"out has shape \[3, 4, 128\]; .*\[3, L, 512\]",
    ),
    (
        {"out": jnp.zeros((2, 4, 512), jnp.bfloat16)},
        ValueError,
        r"out has shape \[2, 4, 512\]; .*\[3, L, 512\]",
    ),
    ({"out": None}, TypeError, r"out is a NoneType; it must be an array"),
]


@pytest.mark.parametrize(("wrong", "error", "match"), CACHE_ERRORS + ERRORS)
def test_bad_input(wrong, error, match):
    with pytest.raises(error, match=match):
        dequantize_and_gather_k_cache(**arguments() | wrong)


def test_the_arguments_are_right(implementation):
    """What the cases start from raises nothing; nor do indices of int64, whatever they hold."""
    given = arguments()
    want = dequantize_and_gather_k_cache(**given, implementation=implementation)
    assert want.dtype == jnp.bfloat16
    for name in ("seq_lens", "block_table"):
        wide = np.asarray(given[name], np.int64)
        same = dequantize_and_gather_k_cache(**given | {name: wide}, implementation=implementation)
        np.testing.assert_array_equal(same, want)
        beyond = dequantize_and_gather_k_cache(**given | {name: wide * 0 + 2**40}, implementation=implementation)
        assert not np.asarray(beyond, np.float32).any()


def test_the_scale_of_fp8_must_be_given():
    given = arguments() | {"cache": CACHE_FORMATS["fp8"].allocate(2, 2), "cache_format": "fp8"}
    with pytest.raises(ValueError, match=r"kv_scale is None; for the cache format fp8 it must be a float32 scalar"):
        dequantize_and_gather_k_cache(**given)
    with pytest.raises(ValueError, match=r"kv_scale has shape \[1\]; it must be \[\]"):
        dequantize_and_gather_k_cache(**given, kv_scale=jnp.ones(1))
    assert dequantize_and_gather_k_cache(**given, kv_scale=1.0).dtype == jnp.bfloat16
