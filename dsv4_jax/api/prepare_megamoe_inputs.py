"""`prepare_megamoe_inputs`: prepares hidden states and routing for a fused mixture-of-experts kernel."""

import jax
import jax.numpy as jnp

from dsv4_jax import checks
from dsv4_jax.common.reference import prepare_megamoe_inputs as reference
from dsv4_jax.op import Op
from dsv4_jax.platforms import Implementation

BLOCK = 32  # channels under one scale


def prepare_megamoe_inputs(
    hidden: jax.Array,
    topk_weights: jax.Array,
    topk_ids: jax.Array,
    is_padding: jax.Array | None = None,
    *,
    implementation: Implementation | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Quantizes `hidden` to fp8 with one power-of-two scale per 32 channels, and routes padding to no expert.

    A block's scale is exactly `2 ** ceil(log2(max(amax, 1e-4) / 448))`. 1e-4 is vLLM's bound: it gives a block of zeros
    the scale 2**-22, byte 105. In amax, NaN counts as infinity, and infinity as the largest finite bfloat16. Values are
    divided by the scale and rounded to nearest, ties to even. NaN becomes 0x7F, infinity 448.

    Args:
      hidden: `[T, K]` bfloat16, K a multiple of 128.
      topk_weights: `[T, k]` float32, the weight of each of a token's experts.
      topk_ids: `[T, k]` int32, each token's experts; negative: none.
      is_padding: `[T]` bool, the rows without a token; by default there are none. Their hidden states are quantized
        too.
      implementation: "xla" or "triton"; None lets the platform switch choose.

    Returns:
      x: `[T, K]` float8_e4m3fn.
      scales: `[T, K // 128]` int32, the UE8M0 bytes (exponent plus 127) of four blocks, the first block's lowest.
      ids: `[T, k]` int32, `topk_ids`, but -1 where negative and in rows of padding.
      weights: `[T, k]` float32, `topk_weights`, but 0 in rows of padding.
    """
    hidden = checks.array("hidden", hidden, ("T", "K"), (jnp.bfloat16,))
    tokens, width = hidden.shape
    if width % (4 * BLOCK):
        raise ValueError(f"hidden has shape {list(hidden.shape)}; its last axis must be a multiple of {4 * BLOCK}")
    topk_weights = checks.array("topk_weights", topk_weights, (tokens, "k"))
    topk_ids = checks.integers("topk_ids", topk_ids, topk_weights.shape)
    if is_padding is not None:
        is_padding = checks.array("is_padding", is_padding, (tokens,), (jnp.bool_,))
    x, scales, ids, weights = OP(hidden, topk_weights, topk_ids, is_padding, implementation=implementation)
    return x, scales, ids, weights


def _outputs(hidden, topk_weights, *_, **__):
    """The types of what is returned."""
    tokens, width = hidden.shape
    return (
        jax.ShapeDtypeStruct((tokens, width), jnp.float8_e4m3fn),
        jax.ShapeDtypeStruct((tokens, width // (4 * BLOCK)), jnp.int32),
        jax.ShapeDtypeStruct(topk_weights.shape, jnp.int32),
        jax.ShapeDtypeStruct(topk_weights.shape, jnp.float32),
    )


def _triton():
    from dsv4_jax.common.ops.prepare_megamoe_inputs import implement

    return implement


OP = Op(
    "prepare_megamoe_inputs",
    outputs=_outputs,
    xla=reference.implement,
    triton=_triton,
    fp8=True,
)
