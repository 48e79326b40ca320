"""RoPE of the last channels, interleaved pairs, in plain JAX."""

import jax
import jax.numpy as jnp


def rope(x: jax.Array, cos_sin: jax.Array, positions: jax.Array, *, inverse: bool = False) -> jax.Array:
    """Rotates the last channels of each token at its position.

    Args:
      x: `[T, ..., D]` float32.
      cos_sin: `[P, r]` float32, cos then sin, P at least 1; the last r channels rotate.
      positions: `[T]` int32; those outside the table count as its nearest row.
      inverse: rotate back.
    """
    half = cos_sin.shape[1] // 2
    angles = jnp.take(cos_sin, positions, axis=0, mode="clip")
    angles = angles.reshape(angles.shape[0], *(1,) * (x.ndim - 2), 2 * half)
    cos, sin = angles[..., :half], angles[..., half:]
    sin = -sin if inverse else sin
    even, odd = x[..., -2 * half :: 2], x[..., -2 * half + 1 :: 2]
    rotated = jnp.stack([even * cos - odd * sin, odd * cos + even * sin], axis=-1)
    return jnp.concatenate([x[..., : -2 * half], rotated.reshape(*x.shape[:-1], 2 * half)], axis=-1)
