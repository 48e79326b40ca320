"""Attention with a sink, over keys that are also the values, in plain JAX."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from dsv4_jax.cache import bf16
from dsv4_jax.common.reference.fused_inv_rope_fp8_quant import implement as inv_rope_quant

TOKENS = 32  # whose keys are held at a time


def attend(q, sink, rows, load: Callable, *, softmax_scale: float) -> tuple[jax.Array, jax.Array]:
    """Attends with each token's heads to the token's own keys.

    Args:
      q: `[T, H, D]` bfloat16.
      sink: `[H]` float32.
      rows: pytree of arrays `[T, ...]`, what `load` needs.
      load: `load(rows)` of one token gives its keys `[K, D]` bfloat16 and which of them count `[K]`; the others are
        zeros.
      softmax_scale: multiplies the scores.

    Returns:
      o `[T, H, D]` and lse `[T, H]`, float32.
    """
    tokens, heads, dim = q.shape
    if q.size == 0:
        return jnp.zeros((tokens, heads, dim), jnp.float32), jnp.zeros((tokens, heads), jnp.float32)

    def of_token(token):
        q, rows = token
        keys, counts = load(rows)
        scores = jnp.einsum("hd,kd->hk", q, keys, preferred_element_type=jnp.float32)
        scores = jnp.where(counts, scores * jnp.float32(softmax_scale * math.log2(math.e)), -jnp.inf)
        largest = jnp.max(scores, axis=1, initial=-jnp.inf)
        largest = jnp.where(counts.any(), largest, 0)
        weights = jnp.exp2(scores - largest[:, None])
        total = weights.sum(axis=1)
        # reduce_precision, since XLA may drop a pair of converts.
        rounded = lax.reduce_precision(weights, exponent_bits=8, mantissa_bits=7).astype(jnp.bfloat16)
        o = jnp.einsum("hk,kd->hd", rounded, keys, preferred_element_type=jnp.float32)
        o /= (total + jnp.exp2(sink * jnp.float32(math.log2(math.e)) - largest))[:, None]
        lse = (largest + jnp.log2(total)) * jnp.float32(math.log(2))
        return jnp.where(counts.any(), o, 0), jnp.where(counts.any(), lse, jnp.inf)

    return lax.map(of_token, (q, rows), batch_size=TOKENS)


def finish(o, lse, positions, cos_sin, *, return_lse, quant_group_size, tma_aligned_scales, outputs):
    """The results of an attention op, from o and lse in float32."""
    o, types = bf16(o), outputs[:-1] if return_lse else outputs
    results = (o,)
    if positions is not None:
        quantize = {"quant_group_size": quant_group_size, "quantize": quant_group_size is not None}
        results = inv_rope_quant(
            o, positions, cos_sin, tma_aligned_scales=tma_aligned_scales, outputs=types, **quantize
        )  # fmt: skip
    return (*results, lse) if return_lse else results
