"""`fused_indexer_q_rope_quant`: rotates and quantizes the indexer's queries, and scales the weights of their scores."""

import jax
import jax.numpy as jnp

from dsv4_jax import checks
from dsv4_jax.cache import ROPE_DIM
from dsv4_jax.common.reference import fused_indexer_q_rope_quant as reference
from dsv4_jax.op import Op
from dsv4_jax.platforms import Implementation

HEAD_DIM = 128


def fused_indexer_q_rope_quant(
    positions: jax.Array,
    q: jax.Array,
    cos_sin: jax.Array,
    weights: jax.Array,
    softmax_scale: float,
    head_scale: float,
    use_fp4: bool = False,
    *,
    implementation: Implementation | None = None,
) -> tuple[jax.Array | tuple[jax.Array, jax.Array], jax.Array]:
    """Rotates the last 64 channels of each head and quantizes the head like an indexer key.

    RoPE is in float32, at the token's own position, over interleaved pairs: `even' = even·cos - odd·sin`,
    `odd' = odd·cos + even·sin`. All channels are then rounded to bfloat16 and quantized by the rules of the cache
    formats `indexer_fp8` and `indexer_mxfp4`. In fp8, a head has one scale, a power of two. It is not returned; the
    head's weight carries it: `weights · scale · softmax_scale · head_scale`, multiplied in this order in float32. In
    MXFP4, the scales are an array of their own, and weights become `weights · softmax_scale · head_scale`.

    A token whose position is outside the RoPE table, such as padding's -1, gets zeros in all results. Channels that are
    not finite become what `CacheFormat.pack` says. In fp8 they make the head's scale 2^120, so its weight is large,
    infinite or, if `weights` is 0, still 0. A NaN weight stays NaN (0x7FC00000).

    Args:
      positions: `[T]` int32.
      q: `[T, H, 128]` bfloat16 or float32.
      cos_sin: `[P, 64]` float32, cos then sin, as `Yarn.table` makes it; magnitudes at most 1.
      weights: `[T, H]` bfloat16 or float32, the weight of each head's score.
      softmax_scale: a number above 0, `128 ** -0.5` in the models.
      head_scale: a number above 0, `H ** -0.5` in the models.
      use_fp4: MXFP4 instead of fp8.
      implementation: "xla" or "triton"; None lets the platform switch choose.

    Returns:
      q and weights `[T, H]` float32. q is `[T, H, 128]` float8_e4m3fn; with `use_fp4` it is a pair: values `[T, H, 64]`
      uint8, two E2M1 a byte, the even channel in the low nibble, and scales `[T, H]` int32, four UE8M0 bytes, that of
      the first 32 channels lowest.
    """
    q = checks.array("q", q, ("T", "H", HEAD_DIM), checks.FLOATS)
    tokens, heads, _ = q.shape
    positions = checks.integers("positions", positions, (tokens,))
    cos_sin = checks.array("cos_sin", cos_sin, ("P", ROPE_DIM))
    weights = checks.array("weights", weights, (tokens, heads), checks.FLOATS)
    options = {
        "softmax_scale": checks.positive("softmax_scale", softmax_scale),
        "head_scale": checks.positive("head_scale", head_scale),
        "use_fp4": use_fp4,
    }
    checks.instance("use_fp4", use_fp4, bool)
    values, *scales, weights = OP(positions, q, cos_sin, weights, implementation=implementation, **options)
    return (values, scales[0]) if use_fp4 else values, weights


def _outputs(positions, q, *_, use_fp4, **__):
    rows = q.shape[:2]
    weights = jax.ShapeDtypeStruct(rows, jnp.float32)
    if use_fp4:
        values = jax.ShapeDtypeStruct((*rows, HEAD_DIM // 2), jnp.uint8)
        return values, jax.ShapeDtypeStruct(rows, jnp.int32), weights
    return jax.ShapeDtypeStruct((*rows, HEAD_DIM), jnp.float8_e4m3fn), weights


def _triton():
    from dsv4_jax.common.ops.fused_indexer_q_rope_quant import implement

    return implement


OP = Op(
    "fused_indexer_q_rope_quant",
    outputs=_outputs,
    xla=reference.implement,
    triton=_triton,
    fp8=lambda *, use_fp4, **_: not use_fp4,
)
