"""Triton: RoPE of the last channels, interleaved pairs."""

import triton
import triton.language as tl


@triton.jit
def rope_factors(cos_sin, position, DIM: tl.constexpr, ROPE_DIM: tl.constexpr):
    """cos and sin `[DIM // 2]` of each pair of channels at a position of the table; 1 and 0 where nothing rotates."""
    angle = tl.arange(0, DIM // 2) - (DIM - ROPE_DIM) // 2
    rotates = angle >= 0
    at = cos_sin + position.to(tl.int64) * ROPE_DIM + angle
    cos = tl.load(at, mask=rotates, other=1.0)
    sin = tl.load(at + ROPE_DIM // 2, mask=rotates, other=0.0)
    return cos, sin


@triton.jit
def rotate(x, cos, sin, DIM: tl.constexpr, ROPE_DIM: tl.constexpr):
    """x float32, one row of DIM channels or several of one position, with its pairs rotated; by -sin, the inverse.

    Channels that do not rotate stay as they are.
    """
    rotates = (tl.arange(0, DIM // 2) >= (DIM - ROPE_DIM) // 2)[None, :]
    even, odd = tl.split(tl.reshape(x, (x.numel // DIM, DIM // 2, 2)))
    rotated_even = tl.where(rotates, even * cos[None, :] - odd * sin[None, :], even)
    rotated_odd = tl.where(rotates, odd * cos[None, :] + even * sin[None, :], odd)
    return tl.reshape(tl.join(rotated_even, rotated_odd), x.shape)
