"""`fused_indexer_q_rope_quant` in Triton: a program for every few heads of a token."""

import jax.numpy as jnp
import triton
import triton.language as tl

from dsv4_jax.common.ops.helpers.heads import load_heads, store_heads, store_zeros, tiles
from dsv4_jax.common.ops.helpers.launch import launch
from dsv4_jax.common.ops.helpers.quantize_store import quantize_mxfp4, round_bf16, scale_blocks, scaled_fp8_code
from dsv4_jax.common.ops.helpers.rope import rope_factors, rotate


def implement(positions, q, cos_sin, weights, *, softmax_scale, head_scale, use_fp4, outputs):
    """See `dsv4_jax.fused_indexer_q_rope_quant`."""
    if q.size == 0 or cos_sin.shape[0] == 0:
        return tuple(jnp.zeros(s.shape, s.dtype) for s in outputs)
    kernel = _indexer_q_fp4_kernel if use_fp4 else _indexer_q_fp8_kernel
    names = ("values", "scales", "weights_out") if use_fp4 else ("values", "weights_out")
    grid, options = tiles(q, cos_sin, positions)
    options["constants"] |= {"SOFTMAX_SCALE": softmax_scale, "HEAD_SCALE": head_scale}
    return launch(kernel, grid, outputs=dict(zip(names, outputs, strict=True)), q=q, weights=weights, **options)


@triton.jit
def _indexer_q_fp8_kernel(
    q, positions, cos_sin, weights, values, weights_out, table_rows,
    HEADS: tl.constexpr, TILE: tl.constexpr, HEAD_DIM: tl.constexpr, ROPE_DIM: tl.constexpr,
    SOFTMAX_SCALE: tl.constexpr, HEAD_SCALE: tl.constexpr,
):  # fmt: skip
    values = values.to(tl.pointer_type(tl.uint8))
    x, first, count, position = load_heads(q, positions, HEADS, TILE, HEAD_DIM)
    if (position >= 0) & (position < table_rows):
        cos, sin = rope_factors(cos_sin, position, HEAD_DIM, ROPE_DIM)
        x = round_bf16(rotate(x, cos, sin, HEAD_DIM, ROPE_DIM))
        scaled, exponents = scale_blocks(x, HEAD_DIM, 448.0, 1e-4, TILE * HEAD_DIM)
        store_heads(values, scaled_fp8_code(scaled, exponents), first, count, TILE, HEAD_DIM)
        scale = ((exponents + 127) << 23).to(tl.float32, bitcast=True)
        _store_weights(weights, weights_out, scale, first, count, TILE, SOFTMAX_SCALE, HEAD_SCALE)
    else:
        store_zeros(values, first, count, TILE, HEAD_DIM)
        store_zeros(weights_out, first, count, TILE, 1)


@triton.jit
def _indexer_q_fp4_kernel(
    q, positions, cos_sin, weights, values, scales, weights_out, table_rows,
    HEADS: tl.constexpr, TILE: tl.constexpr, HEAD_DIM: tl.constexpr, ROPE_DIM: tl.constexpr,
    SOFTMAX_SCALE: tl.constexpr, HEAD_SCALE: tl.constexpr,
):  # fmt: skip
    x, first, count, position = load_heads(q, positions, HEADS, TILE, HEAD_DIM)
    if (position >= 0) & (position < table_rows):
        cos, sin = rope_factors(cos_sin, position, HEAD_DIM, ROPE_DIM)
        codes, exponents = quantize_mxfp4(rotate(x, cos, sin, HEAD_DIM, ROPE_DIM), TILE * HEAD_DIM)
        store_heads(values, codes, first, count, TILE, HEAD_DIM // 2)
        biased = (exponents + 127).to(tl.uint8)  # a byte a block, little end first
        store_heads(scales.to(tl.pointer_type(tl.uint8)), biased, first, count, TILE, HEAD_DIM // 32)
        _store_weights(weights, weights_out, 1.0, first, count, TILE, SOFTMAX_SCALE, HEAD_SCALE)
    else:
        store_zeros(values, first, count, TILE, HEAD_DIM // 2)
        store_zeros(scales, first, count, TILE, 1)
        store_zeros(weights_out, first, count, TILE, 1)


@triton.jit
def _store_weights(
    weights, weights_out, scale, first, count,
    TILE: tl.constexpr, SOFTMAX_SCALE: tl.constexpr, HEAD_SCALE: tl.constexpr,
):  # fmt: skip
    head = tl.arange(0, TILE)
    weight = tl.load(weights + first + head, mask=head < count, other=0.0).to(tl.float32)
    weight = weight * scale * SOFTMAX_SCALE * HEAD_SCALE
    store_heads(weights_out, tl.where(weight != weight, float("nan"), weight), first, count, TILE, 1)
