"""`fused_indexer_q_rope_quant` in Triton: a program for every few heads of a token."""

import jax.numpy as jnp
import triton
import triton.language as tl

from dsv4_jax.common.ops.heads import rotated_heads, store_heads, tiles
from dsv4_jax.common.ops.launch import launch
from dsv4_jax.common.ops.quantise_store import fp8_code, quantise_mxfp4, round_bf16, scale_blocks
from dsv4_jax.common.reference.fused_indexer_q_rope_quant import outputs


def implement(positions, q, cos_sin, weights, *, softmax_scale, head_scale, use_fp4, platform):
    """See `dsv4_jax.fused_indexer_q_rope_quant`."""
    results = outputs(positions, q, use_fp4=use_fp4)
    if q.size == 0 or cos_sin.shape[0] == 0:
        return tuple(jnp.zeros(s.shape, s.dtype) for s in results)
    kernel = _indexer_q_fp4_kernel if use_fp4 else _indexer_q_fp8_kernel
    names = ("values", "scales", "weights_out") if use_fp4 else ("values", "weights_out")
    grid, options = tiles(q, cos_sin, positions)
    options["constants"] |= {"SOFTMAX_SCALE": softmax_scale, "HEAD_SCALE": head_scale}
    return launch(kernel, grid, outputs=dict(zip(names, results, strict=True)), q=q, weights=weights, **options)


@triton.jit
def _indexer_q_fp8_kernel(
    q, positions, cos_sin, weights, values, weights_out, table_rows,
    HEADS: tl.constexpr, TILE: tl.constexpr, HEAD_DIM: tl.constexpr, ROPE_DIM: tl.constexpr,
    SOFTMAX_SCALE: tl.constexpr, HEAD_SCALE: tl.constexpr,
):  # fmt: skip
    x, first, count, inside = rotated_heads(q, positions, cos_sin, table_rows, HEADS, TILE, HEAD_DIM, ROPE_DIM)
    scaled, exponents = scale_blocks(round_bf16(x), HEAD_DIM, 448.0, 1e-4, TILE * HEAD_DIM)
    codes = tl.where(inside, fp8_code(scaled), 0)
    store_heads(values.to(tl.pointer_type(tl.uint8)), codes, first, count, TILE, HEAD_DIM)
    scale = ((exponents + 127) << 23).to(tl.float32, bitcast=True)
    _store_weights(weights, weights_out, scale, first, count, inside, TILE, SOFTMAX_SCALE, HEAD_SCALE)


@triton.jit
def _indexer_q_fp4_kernel(
    q, positions, cos_sin, weights, values, scales, weights_out, table_rows,
    HEADS: tl.constexpr, TILE: tl.constexpr, HEAD_DIM: tl.constexpr, ROPE_DIM: tl.constexpr,
    SOFTMAX_SCALE: tl.constexpr, HEAD_SCALE: tl.constexpr,
):  # fmt: skip
    x, first, count, inside = rotated_heads(q, positions, cos_sin, table_rows, HEADS, TILE, HEAD_DIM, ROPE_DIM)
    codes, exponents = quantise_mxfp4(x, TILE * HEAD_DIM)
    store_heads(values, tl.where(inside, codes, 0).to(tl.uint8), first, count, TILE, HEAD_DIM // 2)
    biased = tl.where(inside, exponents + 127, 0).to(tl.uint8)
    store_heads(scales.to(tl.pointer_type(tl.uint8)), biased, first, count, TILE, HEAD_DIM // 32)
    _store_weights(weights, weights_out, 1.0, first, count, inside, TILE, SOFTMAX_SCALE, HEAD_SCALE)


@triton.jit
def _store_weights(
    weights, weights_out, scale, first, count, inside,
    TILE: tl.constexpr, SOFTMAX_SCALE: tl.constexpr, HEAD_SCALE: tl.constexpr,
):  # fmt: skip
    head = tl.arange(0, TILE)
    weight = tl.load(weights + first + head, mask=inside & (head < count), other=0.0).to(tl.float32)
    weight = weight * scale * SOFTMAX_SCALE * HEAD_SCALE
    weight = tl.where(weight != weight, float("nan"), weight)
    store_heads(weights_out, tl.where(inside, weight, 0.0), first, count, TILE, 1)
