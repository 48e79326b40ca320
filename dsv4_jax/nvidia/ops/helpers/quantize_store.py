"""CuTeDSL: four neighboring channels of a finished key become bytes in its page; one helper a cache format.

The rounding rules are those of `dsv4_jax.cache.CacheFormat.pack`. The sixteen threads of a block of 64 channels call
these together.
"""

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from dsv4_jax.nvidia.ops.helpers.memory import load, select, store_byte, store_words

BLOCK = 64
FP8_AMAX_MIN_BITS = 0x38D1B717  # 1e-4
INFINITY_BITS = 0x7F800000


def store_key(a, key, channel: Int32, slot: Int32, present, shape) -> None:
    """Quantizes channels `channel` to `channel + 3` and stores them where `present` holds."""
    page = a.kv_cache + Int64(slot // shape.kv_page_rows) * shape.page_bytes
    row = Int64(slot % shape.kv_page_rows)
    if shape.format == "fp8_ds_mla":
        _store_fp8_ds_mla(key, channel, page, row, present, shape)
    elif shape.format == "bf16":
        store_words(page + (row * shape.head_dim + channel) * 2, bf16_words(key), present)
    else:
        assert shape.format == "fp8", shape.format
        scale = load(a.kv_scale, Float32)
        store_words(page + row * shape.head_dim + channel, [fp8_word([x / scale for x in key])], present)


def _store_fp8_ds_mla(key, channel, page, row, present, shape):
    nope_dim = shape.head_dim - shape.rope_dim
    value_bytes = nope_dim + 2 * shape.rope_dim
    values = page + row * value_bytes
    is_rope = channel >= nope_dim
    scaled, exponent = scale_block(key)
    store_words(values + channel, [fp8_word(scaled)], present & ~is_rope)
    store_words(values + nope_dim + (channel - nope_dim) * 2, bf16_words(key), present & is_rope)
    # The RoPE part is an eighth block: its scale byte is always 0.
    at = page + shape.kv_page_rows * value_bytes + row * 8 + channel // BLOCK
    store_byte(at, select(is_rope, Int32(0), exponent + 127), present & (channel % BLOCK == 0))


def scale_block(key) -> tuple:
    """The channels rounded to bfloat16 and divided by their block's power-of-two scale, and the scale's exponent."""
    rounded = [(word << shift) & mask for word in bf16_words(key) for shift, mask in ((16, -1), (0, -0x10000))]
    # On the bits, so that NaN counts as infinity whatever the hardware's maximum does with it.
    largest = Int32(FP8_AMAX_MIN_BITS)
    for bits in rounded:
        largest = _max(largest, bits & 0x7FFFFFFF)
    for lanes in (8, 4, 2, 1):
        largest = _max(largest, cute.arch.shuffle_sync_bfly(largest, lanes))
    largest = select(largest > INFINITY_BITS, Int32(INFINITY_BITS), largest)
    # ceil(log2(amax / 448)) exactly: 448 is 1.75 * 2**8.
    exponent = (largest >> 23) - 135 + Int32((largest & 0x7FFFFF) > 0x600000)
    inverse = ((127 - exponent) << 23).bitcast(Float32)
    return [bits.bitcast(Float32) * inverse for bits in rounded], exponent


def fp8_word(values) -> Int32:
    """Four e4m3fn bytes: nearest, ties to even, saturating; NaN is 0x7F, which is what the instruction gives."""
    return cute.arch.inline_ptx(
        "{ .reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f32 low, {$r1}, {$r0};"
        " cvt.rn.satfinite.e4m3x2.f32 high, {$r3}, {$r2}; mov.b32 {$w0}, {low, high}; }",
        write_only_types=[Int32],
        read_only_args=list(values),
    )


def bf16_words(values) -> list:
    """Pairs of bfloat16, the first in the low half; NaN is 0x7FC0, where the instruction gives 0x7FFF."""
    return [
        cute.arch.inline_ptx(
            "{ .reg .pred p, q; .reg .b16 low, high, nan; mov.b16 nan, 0x7FC0;"
            " cvt.rn.bf16.f32 low, {$r0}; cvt.rn.bf16.f32 high, {$r1};"
            " setp.nan.f32 p, {$r0}, {$r0}; setp.nan.f32 q, {$r1}, {$r1};"
            " selp.b16 low, nan, low, p; selp.b16 high, nan, high, q; mov.b32 {$w0}, {low, high}; }",
            write_only_types=[Int32],
            read_only_args=[values[i], values[i + 1]],
        )
        for i in (0, 2)
    ]


def _max(x, y):
    return select(x > y, x, y)
