"""CuTeDSL: RMSNorm and RoPE of four neighboring channels of a compressed window."""

from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64

from dsv4_jax.nvidia.ops.helpers.memory import BYTES, load, load4, select

HALF_WARPS = 8  # of a CTA that holds a whole key: 64 channels each


class Factors(NamedTuple):
    """What a thread's channels are multiplied by; loaded ahead of the window, so that they are there when it is."""

    weight: tuple
    cos: tuple
    sin: tuple
    rotates: Boolean


def load_factors(a, position: Int32, channel: Int32, shape) -> Factors:
    """The factors of channels `channel` to `channel + 3` for the window that the token at `position` closes."""
    rotates = channel >= shape.head_dim - shape.rope_dim
    anchor = Int64(position // shape.ratio * shape.ratio)
    pair = Int64((channel - (shape.head_dim - shape.rope_dim)) // 2)
    at = a.cos_sin + (anchor * shape.rope_dim + pair) * 4
    half = shape.rope_dim // 2 * 4
    return Factors(
        load4(a.norm_weight + Int64(channel) * BYTES[shape.norm_dtype], True, shape.norm_dtype),
        tuple(load(at + 4 * i, Float32, rotates) for i in range(2)),
        tuple(load(at + half + 4 * i, Float32, rotates) for i in range(2)),
        rotates,
    )


def sum_of_squares(c) -> Float32:
    """Over the 64 channels of the sixteen threads that this one is among."""
    squares = c[0] * c[0] + c[1] * c[1] + c[2] * c[2] + c[3] * c[3]
    for lanes in (8, 4, 2, 1):
        squares = squares + cute.arch.shuffle_sync_bfly(squares, lanes)
    return squares


def squares_of_cta(shared: cute.Pointer, c) -> Float32:
    """As `sum_of_squares`, over a whole key that a CTA holds; by `HALF_WARPS` float32 of shared memory."""
    squares = sum_of_squares(c)
    # All sixteen threads of a half-warp write the same value.
    (shared + cute.arch.thread_idx()[0] // 16).store(squares)
    cute.arch.sync_threads()
    total = shared.load()
    for i in range(1, HALF_WARPS):
        total = total + (shared + i).load()
    return total


def norm_rope(c, squares: Float32, factors: Factors, shape) -> list:
    """The finished channels; `squares` is the sum over the whole key."""
    inverse = cute.math.rsqrt(squares * Float32(1 / shape.head_dim) + Float32(shape.eps), fastmath=True)
    x = [value * inverse * weight for value, weight in zip(c, factors.weight, strict=True)]
    rotated = []
    for i in range(2):
        even, odd, cos, sin = x[2 * i], x[2 * i + 1], factors.cos[i], factors.sin[i]
        rotated += [even * cos - odd * sin, odd * cos + even * sin]
    return [select(factors.rotates, r, v) for r, v in zip(rotated, x, strict=True)]
