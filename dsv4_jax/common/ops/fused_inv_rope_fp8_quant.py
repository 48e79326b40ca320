"""`fused_inv_rope_fp8_quant` in Triton: a program for every few heads of a token."""

import jax.numpy as jnp
import triton
import triton.language as tl

from dsv4_jax.common.ops.heads import rotated_heads, store_heads, tiles
from dsv4_jax.common.ops.launch import launch
from dsv4_jax.common.ops.quantise_store import bf16_bits, fp8_code, scale_blocks
from dsv4_jax.common.reference.fused_inv_rope_fp8_quant import AMAX_MIN, outputs


def implement(o, positions, cos_sin, *, quant_group_size, quantize, platform, **params):
    """See `dsv4_jax.fused_inv_rope_fp8_quant`."""
    results = outputs(o, quant_group_size=quant_group_size, quantize=quantize, **params)
    if o.size == 0 or cos_sin.shape[0] == 0:
        return tuple(jnp.zeros(s.shape, s.dtype) for s in results)
    grid, options = tiles(o, cos_sin, positions)
    if not quantize:
        return launch(_inv_rope_kernel, grid, outputs={"values": results[0]}, o=o, **options)
    options["constants"] |= {"BLOCK": quant_group_size, "AMAX_MIN": AMAX_MIN}
    named = dict(zip(("values", "scales"), results, strict=True))
    return launch(_inv_rope_quant_kernel, grid, outputs=named, o=o, **options)


@triton.jit
def _inv_rope_quant_kernel(
    o, positions, cos_sin, values, scales, table_rows,
    HEADS: tl.constexpr, TILE: tl.constexpr, HEAD_DIM: tl.constexpr, ROPE_DIM: tl.constexpr, BLOCK: tl.constexpr,
    AMAX_MIN: tl.constexpr,
):  # fmt: skip
    x, first, count, inside = rotated_heads(
        o, positions, cos_sin, table_rows, HEADS, TILE, HEAD_DIM, ROPE_DIM, INVERSE=True
    )  # fmt: skip
    scaled, exponents = scale_blocks(x, BLOCK, 448.0, AMAX_MIN, TILE * HEAD_DIM)
    codes = tl.where(inside, fp8_code(scaled), 0)
    store_heads(values.to(tl.pointer_type(tl.uint8)), codes, first, count, TILE, HEAD_DIM)
    biased = tl.where(inside, exponents + 127, 0)
    if scales.dtype.element_ty == tl.float32:
        scale = (biased << 23).to(tl.float32, bitcast=True)
        store_heads(scales, scale, first, count, TILE, HEAD_DIM // BLOCK)
    else:  # four bytes, little end first
        at = scales.to(tl.pointer_type(tl.uint8))
        store_heads(at, biased.to(tl.uint8), first, count, TILE, HEAD_DIM // BLOCK)


@triton.jit
def _inv_rope_kernel(
    o, positions, cos_sin, values, table_rows,
    HEADS: tl.constexpr, TILE: tl.constexpr, HEAD_DIM: tl.constexpr, ROPE_DIM: tl.constexpr,
):  # fmt: skip
    x, first, count, inside = rotated_heads(
        o, positions, cos_sin, table_rows, HEADS, TILE, HEAD_DIM, ROPE_DIM, INVERSE=True
    )  # fmt: skip
    bits = tl.where(inside, bf16_bits(x), 0)
    store_heads(values.to(tl.pointer_type(tl.int16)), bits, first, count, TILE, HEAD_DIM)
