"""What the tests of `quantize_and_insert_k_cache` and `dequantize_and_gather_k_cache` share."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from dsv4_jax import CACHE_FORMATS
from helpers import oracle
from helpers.batches import random_bytes

NAMES = list(oracle.FORMATS)
BF16 = ml_dtypes.bfloat16
INT32_MAX, INT32_MIN = 2**31 - 1, -(2**31)
SCALE = {"fp8": np.float32(0.37)}  # of the other formats None


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


# Changes to an op's arguments that concern the cache: what is wrong, the error, its text.
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
