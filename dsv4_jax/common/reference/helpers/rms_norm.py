"""RMSNorm in plain JAX."""

import jax
import jax.numpy as jnp


def rms_norm(x: jax.Array, weight: jax.Array | None, eps: float) -> jax.Array:
    """`x · rsqrt(mean(x²) + eps) · weight` over the last axis, float32; a channel that is not finite makes its row NaN.

    Args:
      x: `[..., D]`, any float; D at least 1.
      weight: `[D]`, any float, or None: all ones.
      eps: above 0.
    """
    x = x.astype(jnp.float32)
    x = jnp.where(jnp.isfinite(x).all(axis=-1, keepdims=True), x, jnp.nan)
    x = x * jax.lax.rsqrt((x * x).mean(axis=-1, keepdims=True) + eps)
    return x if weight is None else x * weight.astype(jnp.float32)
