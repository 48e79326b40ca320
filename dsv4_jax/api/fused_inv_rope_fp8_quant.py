"""`fused_inv_rope_fp8_quant`: rotates attention's output back and quantizes it for the grouped output projection."""

import jax
import jax.numpy as jnp

from dsv4_jax import checks
from dsv4_jax.cache import ROPE_DIM
from dsv4_jax.common.reference import fused_inv_rope_fp8_quant as reference
from dsv4_jax.op import Op
from dsv4_jax.platforms import Implementation

HEAD_DIM = 512
AMAX_MIN = 1e-10


def fused_inv_rope_fp8_quant(
    o: jax.Array,
    positions: jax.Array,
    cos_sin: jax.Array,
    n_groups: int,
    heads_per_group: int,
    quant_group_size: int = 128,
    tma_aligned_scales: bool = False,
    quantize: bool = True,
    *,
    implementation: Implementation | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Rotates the last 64 channels of each head back, then quantizes to fp8 with one scale per block.

    The inverse RoPE is in float32, at the token's own position, over interleaved pairs: `even' = even·cos + odd·sin`,
    `odd' = odd·cos - even·sin`. Each block of `quant_group_size` channels has `amax = max(|x|, 1e-10)`,
    `e = ceil(log2(amax / 448))` and the values `fp8(clip(x · 2^-e, ±448))`, straight from float32. Without `quantize`,
    channels are rounded once, to bfloat16.

    A token whose position is outside the RoPE table, such as padding's -1, gets zeros in all results. In a block's
    amax, NaN counts as infinity, and infinity gives e = 120. NaN is stored as 0x7F (fp8) or 0x7FC0 (bfloat16). Infinity
    saturates in fp8.

    Args:
      o: `[T, n_groups * heads_per_group, 512]` bfloat16, group after group.
      positions: `[T]` int32.
      cos_sin: `[P, 64]` float32, cos then sin, as `Yarn.table` makes it; magnitudes at most 1.
      n_groups: G, groups of the output projection.
      heads_per_group: heads per group.
      quant_group_size: channels that share a scale: 32, 64 or 128.
      tma_aligned_scales: scales as UE8M0 bytes, four to an int32, instead of float32.
      quantize: False leaves bfloat16.
      implementation: "xla" or "triton"; None lets the platform switch choose.

    Returns:
      Values `[T, G, heads_per_group * 512]` float8_e4m3fn and scales `[T, G, B]` float32, where B is
      `heads_per_group * 512 // quant_group_size`. With `tma_aligned_scales`, the scales are `[T, G, B // 4]` int32, the
      first block's byte lowest. Without `quantize`, one array: `[T, G, heads_per_group * 512]` bfloat16.
    """
    n_groups = checks.at_least("n_groups", n_groups, 1)
    heads_per_group = checks.at_least("heads_per_group", heads_per_group, 1)
    o = checks.array("o", o, ("T", n_groups * heads_per_group, HEAD_DIM), (jnp.bfloat16,))
    positions = checks.integers("positions", positions, (o.shape[0],))
    cos_sin = checks.array("cos_sin", cos_sin, ("P", ROPE_DIM))
    checks.one_of("quant_group_size", quant_group_size, (32, 64, 128))
    quant_group_size = checks.at_least("quant_group_size", quant_group_size, 32)
    checks.instance("tma_aligned_scales", tma_aligned_scales, bool)
    checks.instance("quantize", quantize, bool)
    results = OP(
        o,
        positions,
        cos_sin,
        implementation=implementation,
        n_groups=n_groups,
        quant_group_size=quant_group_size,
        tma_aligned_scales=tma_aligned_scales,
        quantize=quantize,
    )
    return (results[0], results[1]) if quantize else results[0]


def _outputs(o, *_, n_groups, quant_group_size, tma_aligned_scales, quantize):
    tokens, heads, _ = o.shape
    width = heads * HEAD_DIM // n_groups
    shape = tokens, n_groups, width
    if not quantize:
        return (jax.ShapeDtypeStruct(shape, jnp.bfloat16),)
    blocks = width // quant_group_size
    scales = (blocks // 4, jnp.int32) if tma_aligned_scales else (blocks, jnp.float32)
    return (
        jax.ShapeDtypeStruct(shape, jnp.float8_e4m3fn),
        jax.ShapeDtypeStruct((tokens, n_groups, scales[0]), scales[1]),
    )


def _triton():
    from dsv4_jax.common.ops.fused_inv_rope_fp8_quant import implement

    return implement


OP = Op(
    "fused_inv_rope_fp8_quant",
    outputs=_outputs,
    xla=reference.implement,
    triton=_triton,
    fp8=lambda *, quantize, **_: quantize,
)
