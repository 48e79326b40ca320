"""`fused_inv_rope_fp8_quant` in Triton: a program for every few heads of a token."""

import jax.numpy as jnp
import triton
import triton.language as tl

from dsv4_jax.common.ops.helpers.heads import load_heads, store_heads, store_zeros, tiles
from dsv4_jax.common.ops.helpers.launch import launch
from dsv4_jax.common.ops.helpers.quantize_store import bf16_bits, scale_blocks, scaled_fp8_code
from dsv4_jax.common.ops.helpers.rope import rope_factors, rotate
from dsv4_jax.common.reference.fused_inv_rope_fp8_quant import AMAX_MIN


def implement(o, positions, cos_sin, *, quant_group_size, quantize, outputs, **_):
    """See `dsv4_jax.fused_inv_rope_fp8_quant`."""
    if o.size == 0 or cos_sin.shape[0] == 0:
        return tuple(jnp.zeros(s.shape, s.dtype) for s in outputs)
    grid, options = tiles(o, cos_sin, positions)
    if not quantize:
        return launch(_inv_rope_kernel, grid, outputs={"values": outputs[0]}, o=o, **options)
    options["constants"] |= {"BLOCK": quant_group_size, "AMAX_MIN": AMAX_MIN}
    named = dict(zip(("values", "scales"), outputs, strict=True))
    return launch(_inv_rope_quant_kernel, grid, outputs=named, o=o, **options)


@triton.jit
def _inv_rope_quant_kernel(
    o, positions, cos_sin, values, scales, table_rows,
    HEADS: tl.constexpr, TILE: tl.constexpr, HEAD_DIM: tl.constexpr, ROPE_DIM: tl.constexpr, BLOCK: tl.constexpr,
    AMAX_MIN: tl.constexpr,
):  # fmt: skip
    BLOCKS: tl.constexpr = HEAD_DIM // BLOCK
    values = values.to(tl.pointer_type(tl.uint8))
    if scales.dtype.element_ty == tl.int32:
        scales = scales.to(tl.pointer_type(tl.uint8))  # a byte a block, little end first
    x, first, count, position = load_heads(o, positions, HEADS, TILE, HEAD_DIM)
    if (position >= 0) & (position < table_rows):
        x = _rotate_back(x, cos_sin, position, HEAD_DIM, ROPE_DIM)
        scaled, exponents = scale_blocks(x, BLOCK, 448.0, AMAX_MIN, TILE * HEAD_DIM)
        store_heads(values, scaled_fp8_code(scaled, exponents), first, count, TILE, HEAD_DIM)
        if scales.dtype.element_ty == tl.uint8:
            scale = (exponents + 127).to(tl.uint8)
        else:
            scale = ((exponents + 127) << 23).to(tl.float32, bitcast=True)
        store_heads(scales, scale, first, count, TILE, BLOCKS)
    else:
        store_zeros(values, first, count, TILE, HEAD_DIM)
        store_zeros(scales, first, count, TILE, BLOCKS)


@triton.jit
def _inv_rope_kernel(
    o, positions, cos_sin, values, table_rows,
    HEADS: tl.constexpr, TILE: tl.constexpr, HEAD_DIM: tl.constexpr, ROPE_DIM: tl.constexpr,
):  # fmt: skip
    values = values.to(tl.pointer_type(tl.int16))
    x, first, count, position = load_heads(o, positions, HEADS, TILE, HEAD_DIM)
    if (position >= 0) & (position < table_rows):
        x = _rotate_back(x, cos_sin, position, HEAD_DIM, ROPE_DIM)
        store_heads(values, bf16_bits(x), first, count, TILE, HEAD_DIM)
    else:
        store_zeros(values, first, count, TILE, HEAD_DIM)


@triton.jit
def _rotate_back(x, cos_sin, position, HEAD_DIM: tl.constexpr, ROPE_DIM: tl.constexpr):
    cos, sin = rope_factors(cos_sin, position, HEAD_DIM, ROPE_DIM)
    # -sin is 0 - sin to Triton, which loses the sign of zero.
    return rotate(x, cos, -1.0 * sin, HEAD_DIM, ROPE_DIM)
