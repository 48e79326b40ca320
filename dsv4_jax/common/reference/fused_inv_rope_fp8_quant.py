"""`fused_inv_rope_fp8_quant` in plain JAX."""

import jax.numpy as jnp
from jax import lax

from dsv4_jax.cache import bf16, e8m0, pow2, quantize_fp8
from dsv4_jax.common.reference.helpers.rope import rope

AMAX_MIN = 1e-10


def implement(o, positions, cos_sin, *, quant_group_size, tma_aligned_scales, quantize, outputs, **_):
    """See `dsv4_jax.fused_inv_rope_fp8_quant`."""
    if o.size == 0 or cos_sin.shape[0] == 0:
        return tuple(jnp.zeros(s.shape, s.dtype) for s in outputs)
    x = rope(o.astype(jnp.float32), cos_sin, positions, inverse=True).reshape(outputs[0].shape)  # group after group
    inside = ((positions >= 0) & (positions < cos_sin.shape[0]))[:, None, None]
    if not quantize:
        return (jnp.where(inside, bf16(x), 0),)
    values, e = quantize_fp8(x, quant_group_size, AMAX_MIN)
    values = lax.bitcast_convert_type(jnp.where(inside, values, 0), jnp.float8_e4m3fn)
    if tma_aligned_scales:
        scales = lax.bitcast_convert_type(e8m0(e).reshape(*e.shape[:2], -1, 4), jnp.int32)
    else:
        scales = pow2(e)
    return values, jnp.where(inside, scales, 0)
