"""`fused_q_kv_rmsnorm`: normalizes the low-rank query and the key-value vector in one launch."""

import jax

from dsv4_jax import checks
from dsv4_jax.common.reference import fused_q_kv_rmsnorm as reference
from dsv4_jax.op import Op
from dsv4_jax.platforms import Implementation


def fused_q_kv_rmsnorm(
    q: jax.Array,
    kv: jax.Array,
    q_weight: jax.Array,
    kv_weight: jax.Array,
    eps: float = 1e-6,
    *,
    implementation: Implementation | None = None,
) -> tuple[jax.Array, jax.Array]:
    """RMSNorm of each token's q and kv: `x · rsqrt(mean(x²) + eps) · weight`, as in DeepSeek-V4's attention.

    Computes in float32 and rounds once, to the input's dtype. If a channel is not finite, its row becomes NaN (in
    bfloat16 0x7FC0). If the sum of squares overflows float32, the row becomes 0.

    Args:
      q: `[T, Dq]` float32 or bfloat16; in DeepSeek-V4, Dq = q_lora_rank = 1024 (Flash) or 1536 (Pro).
      kv: `[T, Dkv]` float32 or bfloat16; in DeepSeek-V4, Dkv = 512.
      q_weight: `[Dq]` float32 or bfloat16.
      kv_weight: `[Dkv]` float32 or bfloat16.
      eps: above 0.
      implementation: "xla" or "triton"; None lets the platform switch choose.

    Returns:
      q and kv, normalized, with unchanged shapes and dtypes.
    """
    q = checks.array("q", q, ("T", "Dq"), checks.FLOATS)
    kv = checks.array("kv", kv, (q.shape[0], "Dkv"), checks.FLOATS)
    for name, array in (("q", q), ("kv", kv)):
        if array.shape[1] == 0:
            raise ValueError(f"{name} has shape {list(array.shape)}; it must have at least 1 channel")
    q_weight = checks.array("q_weight", q_weight, (q.shape[1],), checks.FLOATS)
    kv_weight = checks.array("kv_weight", kv_weight, (kv.shape[1],), checks.FLOATS)
    eps = checks.positive("eps", eps)
    q, kv = OP(q, kv, q_weight, kv_weight, implementation=implementation, eps=eps)
    return q, kv


def _outputs(q, kv, *_, **__):
    return jax.ShapeDtypeStruct(q.shape, q.dtype), jax.ShapeDtypeStruct(kv.shape, kv.dtype)


def _triton():
    from dsv4_jax.common.ops.fused_q_kv_rmsnorm import implement

    return implement


OP = Op("fused_q_kv_rmsnorm", outputs=_outputs, xla=reference.implement, triton=_triton)
