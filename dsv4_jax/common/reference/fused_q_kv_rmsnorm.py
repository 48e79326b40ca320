"""`fused_q_kv_rmsnorm` in plain JAX."""

import jax.numpy as jnp

from dsv4_jax.cache import bf16
from dsv4_jax.common.reference.helpers.rms_norm import rms_norm


def implement(q, kv, q_weight, kv_weight, *, eps, outputs):
    """See `dsv4_jax.fused_q_kv_rmsnorm`."""
    return _normalized(q, q_weight, eps), _normalized(kv, kv_weight, eps)


def _normalized(x, weight, eps):
    y = rms_norm(x, weight, eps)
    return bf16(y) if x.dtype == jnp.bfloat16 else y
