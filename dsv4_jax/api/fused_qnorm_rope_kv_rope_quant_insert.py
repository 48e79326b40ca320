"""`fused_qnorm_rope_kv_rope_quant_insert`: prepares queries for attention, stores keys in the sliding-window cache."""

import jax
import jax.numpy as jnp

from dsv4_jax import checks
from dsv4_jax.cache import CACHE_FORMATS, ROPE_DIM
from dsv4_jax.common.reference import fused_qnorm_rope_kv_rope_quant_insert as reference
from dsv4_jax.op import Op
from dsv4_jax.platforms import Implementation

HEAD_DIM = 512
FORMATS = tuple(name for name, fmt in CACHE_FORMATS.items() if fmt.head_dim == HEAD_DIM)


def fused_qnorm_rope_kv_rope_quant_insert(
    q: jax.Array,
    kv: jax.Array,
    cache: jax.Array,
    slots: jax.Array,
    positions: jax.Array,
    cos_sin: jax.Array,
    eps: float = 1e-6,
    *,
    page_rows: int,
    padded_heads: int | None = None,
    cache_format: str = "fp8_ds_mla",
    kv_scale: jax.Array | float | None = None,
    implementation: Implementation | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Normalizes and rotates each head of q; rotates kv, quantizes it and stores it in the cache.

    Each head of q becomes `x · rsqrt(mean(x²) + eps)`, without a weight. Then the last 64 channels of q and of kv are
    rotated as interleaved pairs, at the token's own position. All of this is in float32; q is rounded once, to
    bfloat16, and kv as `CacheFormat.pack` says. kv must be normalized before, for example by `fused_q_kv_rmsnorm`.

    A token whose position is outside the RoPE table, such as padding's -1, gets zeros and stores nothing. If a channel
    of a head is not finite, the head becomes NaN (0x7FC0). If its sum of squares overflows float32, it becomes 0.

    Args:
      q: `[T, h, 512]` bfloat16.
      kv: `[T, 512]` bfloat16.
      cache: of `cache_format`, as `CacheFormat.allocate` makes it; updated in place when donated.
      slots: `[T]` int32, `page * page_rows + row`, distinct; a slot outside the cache stores nothing.
      positions: `[T]` int32.
      cos_sin: `[P, 64]` float32, cos then sin, as `Yarn.table` makes it.
      eps: above 0.
      page_rows: rows per cache page.
      padded_heads: heads of the output, at least h; those past h are zero. The default is 64 or 128, the head counts
        that sparse-attention kernels take.
      cache_format: "fp8_ds_mla", "bf16" or "fp8".
      kv_scale: `[]` float32, the divisor of values; needed for the format `fp8`, None for all others.
      implementation: "xla" or "triton"; None lets the platform switch choose.

    Returns:
      q `[T, padded_heads, 512]` bfloat16, and the cache.
    """
    q = checks.array("q", q, ("T", "h", HEAD_DIM), (jnp.bfloat16,))
    tokens, heads, _ = q.shape
    kv = checks.array("kv", kv, (tokens, HEAD_DIM), (jnp.bfloat16,))
    checks.one_of("cache_format", cache_format, FORMATS)
    fmt = CACHE_FORMATS[cache_format]
    page_rows = checks.at_least("page_rows", page_rows, 1)
    fmt.check_cache("cache", cache, page_rows)
    cache = checks.array("cache", cache, cache.shape, (fmt.dtype,))
    slots = checks.integers("slots", slots, (tokens,))
    positions = checks.integers("positions", positions, (tokens,))
    cos_sin = checks.array("cos_sin", cos_sin, ("P", ROPE_DIM))
    eps = checks.positive("eps", eps)
    if padded_heads is None:
        if heads > 128:
            raise ValueError(f"q has {heads} heads; above 128 padded_heads must be given")
        padded_heads = 64 if heads <= 64 else 128
    padded_heads = checks.at_least("padded_heads", padded_heads, heads)
    kv_scale = fmt.check_scale("kv_scale", kv_scale)
    options = {"eps": eps, "padded_heads": padded_heads, "cache_format": cache_format, "page_rows": page_rows}
    args = q, kv, cache, slots, positions, cos_sin, kv_scale
    cache, q = OP(*args, implementation=implementation, **options)
    return q, cache


def _outputs(q, *_, padded_heads, **__):
    return (jax.ShapeDtypeStruct((q.shape[0], padded_heads, HEAD_DIM), jnp.bfloat16),)


def _triton():
    from dsv4_jax.common.ops.fused_qnorm_rope_kv_rope_quant_insert import implement

    return implement


OP = Op(
    "fused_qnorm_rope_kv_rope_quant_insert",
    updates=(2,),
    outputs=_outputs,
    xla=reference.implement,
    triton=_triton,
    fp8=lambda *, cache_format, **_: CACHE_FORMATS[cache_format].fp8,
)
