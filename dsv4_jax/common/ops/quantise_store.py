"""Triton: a finished key becomes bytes in its page; one helper a cache format.

The rounding rules are those of `dsv4_jax.cache.CacheFormat.pack`.
"""

import triton
import triton.language as tl


@triton.jit
def store_key(
    x, slot, kv_cache, kv_scale,
    FORMAT: tl.constexpr, HEAD_DIM: tl.constexpr, KV_PAGE_ROWS: tl.constexpr, PAGE_BYTES: tl.constexpr,
):  # fmt: skip
    """Quantises a key `[HEAD_DIM]` float32 and stores it at its slot of a cache of `FORMAT`."""
    page = kv_cache.to(tl.pointer_type(tl.uint8)) + (slot // KV_PAGE_ROWS).to(tl.int64) * PAGE_BYTES
    row = slot % KV_PAGE_ROWS
    if FORMAT == "fp8_ds_mla":
        _store_fp8_ds_mla(x, page, row, HEAD_DIM, KV_PAGE_ROWS)
    elif FORMAT == "indexer_fp8":
        _store_indexer_fp8(x, page, row, HEAD_DIM, KV_PAGE_ROWS)
    elif FORMAT == "indexer_mxfp4":
        _store_indexer_mxfp4(x, page, row, HEAD_DIM, KV_PAGE_ROWS)
    elif FORMAT == "bf16":
        channels = tl.arange(0, HEAD_DIM)
        tl.store(page.to(tl.pointer_type(tl.int16)) + row * HEAD_DIM + channels, bf16_bits(x))
    else:
        tl.static_assert(FORMAT == "fp8")
        channels = tl.arange(0, HEAD_DIM)
        tl.store(page + row * HEAD_DIM + channels, fp8_code(tl.div_rn(x, tl.load(kv_scale))))


@triton.jit
def _store_fp8_ds_mla(x, page, row, HEAD_DIM: tl.constexpr, KV_PAGE_ROWS: tl.constexpr):
    ROPE_DIM: tl.constexpr = 64
    NOPE_DIM: tl.constexpr = HEAD_DIM - ROPE_DIM
    VALUE_BYTES: tl.constexpr = NOPE_DIM + 2 * ROPE_DIM
    channels = tl.arange(0, HEAD_DIM)
    values = page + row * VALUE_BYTES
    # The RoPE part is its own eighth block of 64: computed with the others, not stored.
    scaled, exponents = scale_blocks(round_bf16(x), 64, 448.0, 1e-4, HEAD_DIM)
    tl.store(values + channels, fp8_code(scaled), mask=channels < NOPE_DIM)
    rope = (values + NOPE_DIM).to(tl.pointer_type(tl.int16)) + (channels - NOPE_DIM)
    tl.store(rope, bf16_bits(x), mask=channels >= NOPE_DIM)
    block = tl.arange(0, HEAD_DIM // 64)
    scale = tl.where(block < NOPE_DIM // 64, exponents + 127, 0)
    tl.store(page + KV_PAGE_ROWS * VALUE_BYTES + row * 8 + block, scale.to(tl.uint8))


@triton.jit
def _store_indexer_fp8(x, page, row, HEAD_DIM: tl.constexpr, KV_PAGE_ROWS: tl.constexpr):
    scaled, exponents = scale_blocks(round_bf16(x), HEAD_DIM, 448.0, 1e-4, HEAD_DIM)
    tl.store(page + row * HEAD_DIM + tl.arange(0, HEAD_DIM), fp8_code(scaled))
    scales = (page + KV_PAGE_ROWS * HEAD_DIM).to(tl.pointer_type(tl.int32))
    tl.store(scales + row + tl.arange(0, 1), (exponents + 127) << 23)


@triton.jit
def _store_indexer_mxfp4(x, page, row, HEAD_DIM: tl.constexpr, KV_PAGE_ROWS: tl.constexpr):
    scaled, exponents = scale_blocks(round_bf16(x), 32, 6.0, 7.052966104933725e-38, HEAD_DIM)  # 6 * 2**-126
    low, high = tl.split(tl.reshape(e2m1_code(scaled), (HEAD_DIM // 2, 2)))
    tl.store(page + row * (HEAD_DIM // 2) + tl.arange(0, HEAD_DIM // 2), (low | (high << 4)).to(tl.uint8))
    scales = page + KV_PAGE_ROWS * (HEAD_DIM // 2) + row * (HEAD_DIM // 32)
    tl.store(scales + tl.arange(0, HEAD_DIM // 32), (exponents + 127).to(tl.uint8))


@triton.jit
def scale_blocks(
    x, BLOCK: tl.constexpr, LARGEST: tl.constexpr, AMAX_MIN: tl.constexpr, HEAD_DIM: tl.constexpr
):  # fmt: skip
    """x `[HEAD_DIM]` divided by its block's power-of-two scale, and the scales' exponents `[HEAD_DIM // BLOCK]`."""
    blocks = tl.reshape(x, (HEAD_DIM // BLOCK, BLOCK))
    # On the bits, so that NaN counts as infinity whatever the hardware's maximum does with it.
    bits = tl.max(blocks.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)
    amax = tl.maximum(tl.minimum(bits, 0x7F800000).to(tl.float32, bitcast=True), AMAX_MIN)
    # ceil(log2(amax / LARGEST)) exactly: 448 is 1.75 * 2**8, 6 is 1.5 * 2**2.
    LARGEST_MANTISSA: tl.constexpr = 0x600000 if LARGEST == 448.0 else 0x400000
    LARGEST_EXPONENT: tl.constexpr = 135 if LARGEST == 448.0 else 129
    bits = amax.to(tl.int32, bitcast=True)
    exponents = (bits >> 23) - LARGEST_EXPONENT + ((bits & 0x7FFFFF) > LARGEST_MANTISSA).to(tl.int32)
    inverse = ((127 - exponents) << 23).to(tl.float32, bitcast=True)
    return tl.reshape(blocks * inverse[:, None], (HEAD_DIM,)), exponents


@triton.jit
def round_bf16(x):
    """x rounded to bfloat16, as float32."""
    return x.to(tl.bfloat16).to(tl.float32)


@triton.jit
def fp8_code(x):
    """The e4m3fn byte of x: nearest, ties to even, saturating; NaN is 0x7F."""
    code = tl.clamp(x, -448.0, 448.0).to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    return tl.where(x != x, 0x7F, code).to(tl.uint8)


@triton.jit
def bf16_bits(x):
    """The bits of x as bfloat16, int16; NaN is 0x7FC0."""
    return tl.where(x != x, 0x7FC0, x.to(tl.bfloat16).to(tl.int16, bitcast=True)).to(tl.int16)


@triton.jit
def e2m1_code(x):
    """The E2M1 code of x: nearest, ties to even, saturating at 6; NaN is 7. By comparison with the midpoints."""
    a = tl.abs(x)
    code = (a > 0.25).to(tl.int32) + (a >= 0.75).to(tl.int32) + (a > 1.25).to(tl.int32) + (a >= 1.75).to(tl.int32)
    code += (a > 2.5).to(tl.int32) + (a >= 3.5).to(tl.int32) + (a > 5.0).to(tl.int32)
    code |= (x.to(tl.int32, bitcast=True) >> 28) & 8
    return tl.where(x != x, 7, code)
