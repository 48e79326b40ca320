"""`dequantize_and_gather_k_cache` in Triton.

Each request has a fixed number of programs, which loop over its rows with a grid stride. With one program per block of
`out`, most would exit at once where `out` is long and few of its rows are wanted.
"""

import triton
import triton.language as tl

from dsv4_jax.cache import page_stride
from dsv4_jax.common.ops.helpers.aggregates import Cache
from dsv4_jax.common.ops.helpers.launch import launch
from dsv4_jax.common.ops.helpers.quantize_store import bf16_bits

# Channels of all rows that a program holds at a time.
TILE = 4096
# Programs of all requests together, and at least of one: enough to fill a GPU.
PROGRAMS = 4096
PROGRAMS_OF_REQUEST = 64


def implement(
    cache, seq_lens, block_table, gather_lens, offset, out, kv_scale, *, cache_format, page_rows
):  # fmt: skip
    """See `dsv4_jax.dequantize_and_gather_k_cache`."""
    requests, length, head_dim = out.shape
    pages, columns = cache.shape[0], block_table.shape[1]
    if not (out.size and pages and columns):
        return (out,)
    rows = TILE // head_dim
    programs = min(triton.cdiv(length, rows), max(PROGRAMS_OF_REQUEST, triton.cdiv(PROGRAMS, requests)))
    return launch(
        _gather_kernel,
        requests * programs,
        updates=("out",),
        num_warps=4,
        constants={
            "FORMAT": cache_format,
            "HEAD_DIM": head_dim,
            "PAGE_ROWS": page_rows,
            "PAGE_BYTES": page_stride(cache),
            "ROWS": rows,
        },
        cache=cache,
        seq_lens=seq_lens,
        block_table=block_table,
        gather_lens=gather_lens,
        offset=offset,
        kv_scale=kv_scale,
        out=out,
        pages=pages,
        columns=columns,
        length=length,
        programs=programs,
    )


@triton.jit
def _gather_kernel(
    cache, seq_lens, block_table, gather_lens, offset, kv_scale, out, pages, columns, length, programs,
    FORMAT: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE_ROWS: tl.constexpr, PAGE_BYTES: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    request = (tl.program_id(0) // programs).to(tl.int64)
    program = tl.program_id(0) % programs
    seq_len = tl.load(seq_lens + request)
    gather_len = tl.load(gather_lens + request)
    first = tl.load(offset)
    # length - first cannot overflow where first is not negative.
    count = tl.minimum(gather_len, length - tl.maximum(first, 0))
    count = tl.where((first >= 0) & (seq_len >= 0), count, 0)
    block_table += request * columns
    out = out.to(tl.pointer_type(tl.int16)) + (request * length + first) * HEAD_DIM
    channels = tl.arange(0, HEAD_DIM)[None, :]
    source = Cache(cache, kv_scale, FORMAT, HEAD_DIM, PAGE_ROWS, PAGE_BYTES)
    for start in range(program * ROWS, count, programs * ROWS):
        i = start + tl.arange(0, ROWS)
        position = seq_len - gather_len + i
        column = position // PAGE_ROWS
        wanted = (i < count) & (position >= 0) & (column < columns)
        page = tl.load(block_table + column, mask=wanted, other=-1)
        wanted = (page >= 0) & (page < pages)
        at = cache.to(tl.pointer_type(tl.uint8)) + page.to(tl.int64) * PAGE_BYTES
        key = _load_keys(at, (position % PAGE_ROWS).to(tl.int64), wanted, source, ROWS)
        tl.store(out + i.to(tl.int64)[:, None] * HEAD_DIM + channels, key, mask=wanted[:, None])


@triton.jit
def _load_keys(page, row, wanted, cache, ROWS: tl.constexpr):
    """Keys `[ROWS, HEAD_DIM]` as the bits of bfloat16, from row `row[i]` of the page at `page[i]`."""
    HEAD_DIM: tl.constexpr = cache.HEAD_DIM
    PAGE_ROWS: tl.constexpr = cache.PAGE_ROWS
    pages, rows, mask = page[:, None], row[:, None], wanted[:, None]
    channels = tl.arange(0, HEAD_DIM)[None, :]
    if cache.FORMAT == "fp8_ds_mla":
        ROPE_DIM: tl.constexpr = 64
        NOPE_DIM: tl.constexpr = HEAD_DIM - ROPE_DIM
        VALUE_BYTES: tl.constexpr = NOPE_DIM + 2 * ROPE_DIM
        BLOCKS: tl.constexpr = HEAD_DIM // 64
        values = pages + rows * VALUE_BYTES
        code = tl.load(values + channels, mask=mask & (channels < NOPE_DIM), other=0)
        rope = (values + NOPE_DIM).to(tl.pointer_type(tl.int16)) + (channels - NOPE_DIM)
        rope = tl.load(rope, mask=mask & (channels >= NOPE_DIM), other=0)
        scales = pages + PAGE_ROWS * VALUE_BYTES + rows * BLOCKS + tl.arange(0, BLOCKS)[None, :]
        scales = tl.load(scales, mask=mask, other=0)
        key = tl.where(channels < NOPE_DIM, bf16_bits(_scaled(_from_fp8(code), scales, ROWS, HEAD_DIM, BLOCKS)), rope)
    elif cache.FORMAT == "indexer_fp8":
        code = tl.load(pages + rows * HEAD_DIM + channels, mask=mask, other=0)
        # As a column of one it would be loaded again for every channel that a thread holds.
        scale = tl.load((page + PAGE_ROWS * HEAD_DIM).to(tl.pointer_type(tl.float32)) + row, mask=wanted, other=0.0)
        key = bf16_bits(_from_fp8(code) * scale[:, None])
    elif cache.FORMAT == "indexer_mxfp4":
        HALF: tl.constexpr = HEAD_DIM // 2
        BLOCKS: tl.constexpr = HEAD_DIM // 32
        two = tl.load(pages + rows * HALF + tl.arange(0, HALF)[None, :], mask=mask, other=0)
        # E2M1's exponent and mantissa at e4m3's place are its value divided by 64.
        low, high = ((two & 7) << 2) | ((two & 8) << 4), ((two & 0x70) >> 2) | (two & 0x80)
        code = tl.reshape(tl.join(low, high), (ROWS, HEAD_DIM))
        scales = pages + PAGE_ROWS * HALF + rows * BLOCKS + tl.arange(0, BLOCKS)[None, :]
        scales = tl.load(scales, mask=mask, other=0)
        key = bf16_bits(_scaled(_from_fp8(code) * 64, scales, ROWS, HEAD_DIM, BLOCKS))
    elif cache.FORMAT == "bf16":
        key = tl.load(pages.to(tl.pointer_type(tl.int16)) + rows * HEAD_DIM + channels, mask=mask, other=0)
    else:
        tl.static_assert(cache.FORMAT == "fp8")
        code = tl.load(pages + rows * HEAD_DIM + channels, mask=mask, other=0)
        key = bf16_bits(_from_fp8(code) * tl.load(cache.scale))
    return key


@triton.jit
def _scaled(x, scales, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCKS: tl.constexpr):
    """x `[ROWS, HEAD_DIM]` times the power of two of its block, from UE8M0 bytes `[ROWS, BLOCKS]`; 255 is NaN."""
    scales = scales.to(tl.int32)
    # float32 has 2**-127 as a subnormal, and infinity where UE8M0 has NaN.
    bits = tl.where(scales == 0, 0x400000, tl.where(scales == 255, 0x7FC00000, scales << 23))
    blocks = tl.reshape(x, (ROWS, BLOCKS, HEAD_DIM // BLOCKS)) * bits.to(tl.float32, bitcast=True)[:, :, None]
    return tl.reshape(blocks, (ROWS, HEAD_DIM))


@triton.jit
def _from_fp8(code):
    return code.to(tl.float8e4nv, bitcast=True).to(tl.float32)
