"""Triton: finished keys become bytes in their pages; one helper per cache format.

The rounding rules are those of `dsv4_jax.cache.CacheFormat.pack`.
"""

import triton
import triton.language as tl


@triton.jit
def store_key(x, slot, cache):
    """Quantizes a key `[HEAD_DIM]` float32 and stores it at its slot of a cache."""
    store_keys(x, slot + tl.zeros((1,), tl.int32), cache, 1)


@triton.jit
def store_keys(x, slots, cache, ROWS: tl.constexpr):
    """Quantizes keys `[ROWS * HEAD_DIM]`, float32 or bfloat16, and stores those whose slot `[ROWS]` is not negative."""
    page = cache.pages.to(tl.pointer_type(tl.uint8)) + (slots // cache.PAGE_ROWS).to(tl.int64) * cache.PAGE_BYTES
    page = page[:, None]
    row = (slots % cache.PAGE_ROWS).to(tl.int64)[:, None]
    wanted = (slots >= 0)[:, None]
    channels = tl.arange(0, cache.HEAD_DIM)[None, :]
    if cache.FORMAT == "fp8_ds_mla":
        _store_fp8_ds_mla(x, page, row, wanted, cache, ROWS)
    elif cache.FORMAT == "indexer_fp8":
        _store_indexer_fp8(x, page, row, wanted, cache, ROWS)
    elif cache.FORMAT == "indexer_mxfp4":
        _store_indexer_mxfp4(x, page, row, wanted, cache, ROWS)
    elif cache.FORMAT == "bf16":
        values = page.to(tl.pointer_type(tl.int16)) + row * cache.HEAD_DIM
        tl.store(values + channels, tl.reshape(bf16_bits(x), (ROWS, cache.HEAD_DIM)), mask=wanted)
    else:
        tl.static_assert(cache.FORMAT == "fp8")
        code = fp8_code(tl.div_rn(x.to(tl.float32), tl.load(cache.scale)))
        tl.store(page + row * cache.HEAD_DIM + channels, tl.reshape(code, (ROWS, cache.HEAD_DIM)), mask=wanted)


@triton.jit
def _store_fp8_ds_mla(x, page, row, wanted, cache, ROWS: tl.constexpr):
    HEAD_DIM: tl.constexpr = cache.HEAD_DIM
    ROPE_DIM: tl.constexpr = 64
    NOPE_DIM: tl.constexpr = HEAD_DIM - ROPE_DIM
    VALUE_BYTES: tl.constexpr = NOPE_DIM + 2 * ROPE_DIM
    BLOCKS: tl.constexpr = HEAD_DIM // 64
    channels = tl.arange(0, HEAD_DIM)[None, :]
    values = page + row * VALUE_BYTES
    # The RoPE part is an eighth block of 64 channels: it is scaled with the others, but its codes are not stored.
    scaled, exponents = scale_blocks(round_bf16(x), 64, 448.0, 1e-4, ROWS * HEAD_DIM)
    tl.store(
        values + channels,
        tl.reshape(_block_codes(scaled, exponents, ROWS), (ROWS, HEAD_DIM)),
        mask=wanted & (channels < NOPE_DIM),
    )
    rope = (values + NOPE_DIM).to(tl.pointer_type(tl.int16)) + (channels - NOPE_DIM)
    tl.store(rope, tl.reshape(bf16_bits(x), (ROWS, HEAD_DIM)), mask=wanted & (channels >= NOPE_DIM))
    block = tl.arange(0, BLOCKS)[None, :]
    scale = tl.where(block < NOPE_DIM // 64, tl.reshape(exponents, (ROWS, BLOCKS)) + 127, 0)
    tl.store(page + cache.PAGE_ROWS * VALUE_BYTES + row * BLOCKS + block, scale.to(tl.uint8), mask=wanted)


@triton.jit
def _store_indexer_fp8(x, page, row, wanted, cache, ROWS: tl.constexpr):
    HEAD_DIM: tl.constexpr = cache.HEAD_DIM
    scaled, exponents = scale_blocks(round_bf16(x), HEAD_DIM, 448.0, 1e-4, ROWS * HEAD_DIM)
    code = tl.reshape(_block_codes(scaled, exponents, ROWS), (ROWS, HEAD_DIM))
    tl.store(page + row * HEAD_DIM + tl.arange(0, HEAD_DIM)[None, :], code, mask=wanted)
    scales = (page + cache.PAGE_ROWS * HEAD_DIM).to(tl.pointer_type(tl.int32))
    tl.store(scales + row, (exponents[:, None] + 127) << 23, mask=wanted)


@triton.jit
def _store_indexer_mxfp4(x, page, row, wanted, cache, ROWS: tl.constexpr):
    HALF: tl.constexpr = cache.HEAD_DIM // 2
    BLOCKS: tl.constexpr = cache.HEAD_DIM // 32
    values, exponents = quantize_mxfp4(x, ROWS * cache.HEAD_DIM)
    tl.store(page + row * HALF + tl.arange(0, HALF)[None, :], tl.reshape(values, (ROWS, HALF)), mask=wanted)
    scales = page + cache.PAGE_ROWS * HALF + row * BLOCKS + tl.arange(0, BLOCKS)[None, :]
    tl.store(scales, (tl.reshape(exponents, (ROWS, BLOCKS)) + 127).to(tl.uint8), mask=wanted)


@triton.jit
def quantize_mxfp4(x, DIM: tl.constexpr):
    """x `[DIM]` as bytes of two E2M1, the even channel in the low nibble, and each 32 channels' scale exponent."""
    x, exponents = scale_blocks(round_bf16(x), 32, 6.0, 7.052966104933725e-38, DIM)  # 6 * 2**-126
    if tl.max(exponents, axis=0) >= 126:  # where an infinity or a NaN may be
        x = tl.where(x != x, 6.0, tl.clamp(x, -6.0, 6.0))
    # The codes 0 to 7 as a function of their values are concave: of slope 2 up to 2, 1 up to 4, then 1/2. A sum with
    # 2**23 rounds to an integer, nearest, ties to even, in its low bits.
    a = tl.abs(x)
    rounded = tl.minimum(_bits(a * 2.0 + 8388608.0), tl.minimum(_bits(a + 8388610.0), _bits(a * 0.5 + 8388612.0)))
    code = rounded | ((_bits(x) >> 28) & 8)
    low, high = tl.split(tl.reshape(code, (DIM // 2, 2)))
    return (low | (high << 4)).to(tl.uint8), exponents


@triton.jit
def _bits(x):
    return x.to(tl.int32, bitcast=True)


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
    """The e4m3fn byte of x: nearest, ties to even, saturating; NaN is 0x7F, whatever its sign."""
    x = tl.where(x != x, float("nan"), tl.clamp(x, -448.0, 448.0))
    return x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)


@triton.jit
def scaled_fp8_code(scaled, exponents):
    """`fp8_code` of what `scale_blocks` gives: finite values are at most 448 then."""
    if tl.max(exponents, axis=0) >= 120:  # where an infinity or a NaN may be
        scaled = tl.where(scaled != scaled, float("nan"), tl.clamp(scaled, -448.0, 448.0))
    return scaled.to(tl.float8e4nv).to(tl.uint8, bitcast=True)


@triton.jit
def _block_codes(scaled, exponents, ROWS: tl.constexpr):
    # Several rows are bound by instructions, which the branch saves; a single one by the wait that it costs.
    return scaled_fp8_code(scaled, exponents) if ROWS > 1 else fp8_code(scaled)


@triton.jit
def bf16_bits(x):
    """The bits of x as bfloat16, int16; NaN is 0x7FC0."""
    return tl.where(x != x, 0x7FC0, x.to(tl.bfloat16).to(tl.int16, bitcast=True)).to(tl.int16)
