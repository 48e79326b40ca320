"""Keys into a cache and out of it: `quantize_and_insert_k_cache`, `dequantize_and_gather_k_cache`."""

import functools
import pathlib
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from helpers import ops, oracle
from helpers.batches import hard_keys, random_bytes
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4_jax import CACHE_FORMATS, dequantize_and_gather_k_cache, quantize_and_insert_k_cache

GPU_TOO = True
ON_GPU = jax.default_backend() != "cpu"
NAMES = list(oracle.FORMATS)
BF16 = ml_dtypes.bfloat16
INT32_MAX, INT32_MIN = 2**31 - 1, -(2**31)
SCALE = {"fp8": np.float32(0.37)}  # of the other formats None

with np.load(pathlib.Path(__file__).parent / "golden" / "vllm_0.33_h200_companions.npz") as archive:
    GOLDEN = {name: archive[name] for name in archive.files if name.startswith(("quantize_insert", "dequant_gather"))}


def random_cache(rng, name, pages, page_rows, padding=0):
    """A cache whose bytes are random, but that no scale is below 2**-126, where it may count as 0."""
    fmt, layout = CACHE_FORMATS[name], oracle.FORMATS[name]
    page_bytes = page_rows * layout.row_bytes + padding
    raw = random_bytes(rng, (pages, page_bytes), np.uint8)
    if name == "indexer_fp8":
        scales = np.ldexp(np.float32(1), rng.integers(-126, 128, (pages, page_rows))).astype(np.float32)
        scales[rng.random(scales.shape) < 0.2] = np.float32(0.3)
        scales[rng.random(scales.shape) < 0.1] = np.nan
        scales[rng.random(scales.shape) < 0.1] = np.inf
        first = page_rows * layout.value_bytes
        raw[:, first : first + 4 * page_rows] = scales.view(np.uint8).reshape(pages, 4 * page_rows)
    elif fmt.packed:
        scales = raw[:, page_rows * layout.value_bytes : page_rows * layout.row_bytes]
        scales[:] = np.maximum(scales, 1)
    if fmt.packed:
        return raw
    return raw.view({"bf16": BF16, "fp8": ml_dtypes.float8_e4m3fn}[name]).reshape(pages, page_rows, layout.head_dim)


def bits_of(name, rows):
    """What the bytes [N, row_bytes] of rows mean, as bits [N, D] of bfloat16."""
    layout = oracle.FORMATS[name]
    values, scales = (np.ascontiguousarray(a) for a in np.split(rows, [layout.value_bytes], axis=1))
    bits = oracle.bf16_code(oracle.decode(name, values, scales, SCALE.get(name)))
    if name == "bf16":
        bits = values.view(np.uint16)
    elif name == "fp8_ds_mla":
        bits[:, 448:] = np.ascontiguousarray(values[:, 448:]).view(np.uint16)
    return bits


def gathered(name, cache, page_rows, seq_lens, block_table, gather_lens, offset, out):
    """The bits [R, L, D] of `out` afterwards, and which rows [R, L] were written."""
    pages = oracle.as_pages(cache) if len(cache) else ()
    bits, written = out.view(np.uint16).copy(), np.zeros(out.shape[:2], bool)
    for r, (seq_len, gather_len) in enumerate(zip(seq_lens.tolist(), gather_lens.tolist(), strict=True)):
        if seq_len < 0 or offset < 0:
            continue
        for place in range(offset, min(offset + gather_len, out.shape[1])):
            row = seq_len - gather_len + place - offset
            if row < 0 or row // page_rows >= block_table.shape[1]:
                continue
            page = int(block_table[r, row // page_rows])
            if 0 <= page < len(pages):
                where = oracle.row_index(name, [page * page_rows + row % page_rows], page_rows)
                bits[r, place], written[r, place] = bits_of(name, pages[where])[0], True
    return bits, written


def assert_gathered(got, want):
    """Equal bits, but that a number below bfloat16's normal range may be 0 where it was computed."""
    bits, written = want
    got = np.asarray(got).view(np.uint16)
    magnitude = bits & 0x7FFF
    may_flush = written[..., None] & (magnitude < 0x80)
    wrong = (got != bits) & ~(may_flush & (got == (bits & 0x8000)))
    assert not wrong.any(), f"{wrong.sum()} are wrong, the first at {np.argwhere(wrong)[0]}: {got[wrong][0]:#x}"


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


# Insert.


def test_insert_golden(implementation):
    page_rows, page_bytes, pages = map(int, GOLDEN["quantize_insert/meta"])
    k = GOLDEN["quantize_insert/k__bf16"].view(BF16)
    cache = np.full((pages, page_bytes), 0xA5, np.uint8)
    slots = GOLDEN["quantize_insert/slots"]
    got = quantize_and_insert_k_cache(k, cache, slots, page_rows=page_rows, implementation=implementation)
    np.testing.assert_array_equal(got, GOLDEN["quantize_insert/cache"])


@pytest.mark.parametrize(("page_rows", "padding", "dtype"), [(1, 0, np.float32), (7, 44, BF16)])
@pytest.mark.parametrize("name", NAMES)
def test_insert(name, page_rows, padding, dtype, implementation):
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
def test_insert_sizes(name, tokens, pages, implementation):
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


# Gather.


@pytest.mark.parametrize("case", ["all", "tail"])
def test_gather_golden(case, implementation):
    prefix = f"dequant_gather/{case}/"
    arrays = {name.removeprefix(prefix): a for name, a in GOLDEN.items() if name.startswith(prefix)}
    page_rows, offset = map(int, arrays["meta"])
    gather_lens = arrays["gather_lens"] if arrays["gather_lens"].size else None
    want = arrays["out__bf16"]
    got = call_gather(
        "fp8_ds_mla", arrays["cache"], page_rows, arrays["seq_lens"], arrays["block_table"], gather_lens, offset,
        np.zeros(want.shape, BF16), implementation,
    )  # fmt: skip
    assert want.any()
    np.testing.assert_array_equal(np.asarray(got).view(np.int16), want)


# (rows in the cache, rows wanted): all, none, a part, more than there are, past the block table, negative, enormous.
LENGTHS = [
    (13, 13), (0, 0), (9, 0), (11, 4), (5, 9), (40, 12), (-3, 5), (7, -1), (INT32_MAX, INT32_MAX), (INT32_MAX, 3),
    (12, INT32_MAX), (INT32_MIN, INT32_MIN), (3, 1), (16, 16), (INT32_MAX, INT32_MAX - 6),
]  # fmt: skip


@pytest.mark.parametrize(("page_rows", "padding", "offset"), [(1, 0, 15), (4, 12, 3)])
@pytest.mark.parametrize("name", NAMES)
def test_gather(name, page_rows, padding, offset, implementation):
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
def test_gather_sizes(name, requests, columns, pages, length, implementation):
    rng = np.random.default_rng(0)
    cache = random_cache(rng, name, pages, 2)
    lens = np.full(requests, 1, np.int32)
    table = np.zeros((requests, columns), np.int32)
    out = random_bytes(rng, (requests, length, 512), BF16)
    got = call_gather(name, cache, 2, lens, table, None, 0, out, implementation)
    assert got.shape == out.shape
    assert_gathered(got, gathered(name, cache, 2, lens, table, lens, 0, out))


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


# Inside JAX.


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


# Bad input.


def insert_arguments():
    return {
        "k": jnp.zeros((3, 512), jnp.bfloat16),
        "cache": jnp.zeros((2, 1168), jnp.uint8),
        "slots": jnp.arange(3),
        "page_rows": 2,
        "cache_format": "fp8_ds_mla",
    }


def gather_arguments():
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


INSERT, GATHER = (quantize_and_insert_k_cache, insert_arguments), (dequantize_and_gather_k_cache, gather_arguments)
CACHE_ERRORS = [
    ({"cache": [1]}, TypeError, r"cache is a list; it must be an array"),
    ({"cache": jnp.zeros((2, 1168), jnp.int8)}, TypeError, r"cache has dtype int8; .*must have uint8"),
    ({"cache": jnp.zeros((2, 1164), jnp.uint8)}, ValueError, r"cache has shape \(2, 1164\); .* at least 1168"),
    ({"cache": jnp.zeros((2, 1170), jnp.uint8)}, ValueError, r"cache has shape \(2, 1170\); .*multiple of 4"),
    ({"cache": jnp.zeros(1168, jnp.uint8)}, ValueError, r"cache has shape \(1168,\); .*must be \[pages, page_bytes\]"),
    ({"page_rows": 0}, ValueError, r"page_rows is 0; it must be an integer of at least 1"),
    ({"page_rows": 2.0}, ValueError, r"page_rows is 2\.0; it must be an integer"),
    ({"page_rows": 3}, ValueError, r"cache of 3 rows a page must be .* at least 1752"),
    ({"cache_format": "fp4"}, ValueError, r"cache_format is 'fp4'; it must be one of 'fp8_ds_mla'"),
    ({"cache_format": "bf16"}, TypeError, r"cache has dtype uint8; a bf16 cache must have bfloat16"),
    ({"kv_scale": 1.0}, ValueError, r"kv_scale is 1\.0; for the cache format fp8_ds_mla it must be None"),
    ({"implementation": "cuda"}, ValueError, r"implementation is 'cuda'; it must be one of 'xla'"),
    ({"implementation": "cutedsl"}, NotImplementedError, r"has no cutedsl implementation; use one of xla, triton"),
]
INSERT_ERRORS = [
    ({"k": jnp.zeros((3, 512), jnp.float16)}, TypeError, r"k has dtype float16; it must be float32 or bfloat16"),
    ({"k": jnp.zeros((3, 128), jnp.bfloat16)}, ValueError, r"k has shape \[3, 128\]; it must be \[T, 512\]"),
    ({"k": jnp.zeros(512)}, ValueError, r"k has shape \[512\]; it must be \[T, 512\]"),
    ({"k": None}, TypeError, r"k is a NoneType; it must be an array"),
    ({"slots": jnp.zeros(3)}, TypeError, r"slots has dtype float32; it must be int32 or int64"),
    ({"slots": jnp.arange(4)}, ValueError, r"slots has shape \[4\]; it must be \[3\]"),
]
GATHER_ERRORS = [
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


@pytest.mark.parametrize(
    ("op", "wrong", "error", "match"),
    [
        *((INSERT, *case) for case in CACHE_ERRORS + INSERT_ERRORS),
        *((GATHER, *case) for case in CACHE_ERRORS + GATHER_ERRORS),
    ],
)
def test_bad_input(op, wrong, error, match):
    function, arguments = op
    with pytest.raises(error, match=match):
        function(**arguments() | wrong)


@pytest.mark.parametrize("op", [INSERT, GATHER], ids=["insert", "gather"])
def test_the_arguments_are_right(op, implementation):
    """What the cases start from raises nothing; nor do indices as lists or int64, whatever they hold."""
    function, arguments = op
    given = arguments()
    want = function(**given, implementation=implementation)
    assert want.dtype == (jnp.uint8 if op is INSERT else jnp.bfloat16)
    for name in ("slots", "seq_lens", "block_table", "gather_lens"):
        if name in given:
            same = function(**given | {name: np.asarray(given[name], np.int64)}, implementation=implementation)
            np.testing.assert_array_equal(same, want)
            beyond = function(**given | {name: np.full(given[name].shape, 2**40)}, implementation=implementation)
            assert not np.asarray(beyond, np.float32).any()


@pytest.mark.parametrize("op", [INSERT, GATHER], ids=["insert", "gather"])
def test_the_scale_of_fp8_must_be_given(op):
    function, arguments = op
    given = arguments() | {"cache": CACHE_FORMATS["fp8"].allocate(2, 2), "cache_format": "fp8"}
    with pytest.raises(ValueError, match=r"kv_scale is None; for the cache format fp8 it must be a float32 scalar"):
        function(**given)
    with pytest.raises(ValueError, match=r"kv_scale has shape \[1\]; it must be \[\]"):
        function(**given, kv_scale=jnp.ones(1))
    assert re.search("float", str(function(**given, kv_scale=1.0).dtype))
