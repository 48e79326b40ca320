"""`prepare_megamoe_inputs` in Triton, one launch: programs that quantize a stretch of `hidden`, then those that route.

Blocks of 32 channels do not cross rows, so `hidden` is taken as one long row of them.
"""

import triton
import triton.language as tl

from dsv4_jax.common.ops.helpers.launch import launch
from dsv4_jax.common.ops.helpers.quantize_store import fp8_code, scale_blocks
from dsv4_jax.common.reference import prepare_megamoe_inputs as reference

BLOCKS = 128  # that a program quantizes: 8 KB of bfloat16
TOKENS = 128  # that a program routes


def implement(hidden, topk_weights, topk_ids, is_padding, *, outputs):
    """See `dsv4_jax.prepare_megamoe_inputs`."""
    tokens, topk = topk_weights.shape
    x, scales, ids, weights = outputs
    if hidden.size == 0 or topk == 0:
        return reference.implement(hidden, topk_weights, topk_ids, is_padding, outputs=outputs)
    blocks = hidden.size // reference.BLOCK
    quantizing = triton.cdiv(blocks, BLOCKS)
    return launch(
        _prepare_kernel,
        quantizing + triton.cdiv(tokens, TOKENS),
        outputs={"x": x, "scales": scales, "ids": ids, "weights": weights},
        num_warps=4,
        constants={
            "PADDING": is_padding is not None,
            "TOPK": topk,
            "TOPK_PAD": triton.next_power_of_2(topk),
            "BLOCK": reference.BLOCK,
            "BLOCKS": BLOCKS,
            "TOKENS": TOKENS,
        },
        hidden=hidden,
        topk_weights=topk_weights,
        topk_ids=topk_ids,
        is_padding=is_padding,
        quads=blocks // 4,
        quantizing=quantizing,
        tokens=tokens,
    )


@triton.jit
def _prepare_kernel(
    hidden, topk_weights, topk_ids, is_padding, x, scales, ids, weights, quads, quantizing, tokens,
    PADDING: tl.constexpr, TOPK: tl.constexpr, TOPK_PAD: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
    TOKENS: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0)
    if index < quantizing:
        CHANNELS: tl.constexpr = BLOCKS * BLOCK
        # A multiple of four blocks, which lets the compiler use vectors under the masks.
        blocks = tl.minimum(quads - index * (BLOCKS // 4), BLOCKS // 4) * 4
        first = index.to(tl.int64) * CHANNELS
        channel = tl.arange(0, CHANNELS)
        block = tl.arange(0, BLOCKS)
        values = tl.load(hidden + first + channel, mask=channel < blocks * BLOCK, other=0.0).to(tl.float32)
        scaled, exponents = scale_blocks(values, BLOCK, 448.0, 1e-4, CHANNELS)
        tl.store(x.to(tl.pointer_type(tl.uint8)) + first + channel, fp8_code(scaled), mask=channel < blocks * BLOCK)
        scale = scales.to(tl.pointer_type(tl.uint8)) + index.to(tl.int64) * BLOCKS + block
        tl.store(scale, (exponents + 127).to(tl.uint8), mask=block < blocks)
    else:
        token = (index - quantizing) * TOKENS + tl.arange(0, TOKENS)
        expert = tl.arange(0, TOPK_PAD)[None, :]
        real = (token < tokens)[:, None] & (expert < TOPK)
        at = token.to(tl.int64)[:, None] * TOPK + expert
        id = tl.maximum(tl.load(topk_ids + at, mask=real), -1)
        weight = tl.load(topk_weights + at, mask=real)
        if PADDING:
            padding = (tl.load(is_padding + token, mask=token < tokens, other=0) != 0)[:, None]
            id = tl.where(padding, -1, id)
            weight = tl.where(padding, 0.0, weight)
        tl.store(ids + at, id, mask=real)
        tl.store(weights + at, weight, mask=real)
