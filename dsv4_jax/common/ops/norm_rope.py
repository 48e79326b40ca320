"""Triton: RMSNorm and RoPE of a compressed window."""

import triton
import triton.language as tl


@triton.jit
def norm_rope(
    c, position, norm_weight, cos_sin,
    EPS: tl.constexpr, HEAD_DIM: tl.constexpr, RATIO: tl.constexpr, ROPE_DIM: tl.constexpr,
):  # fmt: skip
    """The finished key `[HEAD_DIM]` float32. A channel of c that is not finite makes all of it NaN."""
    # All loads come before the sum, whose barrier they would wait behind.
    channels = tl.arange(0, HEAD_DIM)
    weight = tl.load(norm_weight + channels).to(tl.float32)
    # Interleaved pairs of the last ROPE_DIM channels, at the position of the window's first own token.
    angle = tl.arange(0, HEAD_DIM // 2) - (HEAD_DIM - ROPE_DIM) // 2
    rotates = angle >= 0
    at = cos_sin + (position // RATIO * RATIO).to(tl.int64) * ROPE_DIM + angle
    cos = tl.load(at, mask=rotates, other=1.0)
    sin = tl.load(at + ROPE_DIM // 2, mask=rotates, other=0.0)
    c = tl.where(tl.abs(c) < float("inf"), c, float("nan"))
    x = c * tl.rsqrt(tl.sum(c * c, axis=0) / HEAD_DIM + EPS) * weight
    even, odd = tl.split(tl.reshape(x, (HEAD_DIM // 2, 2)))
    rotated_even = tl.where(rotates, even * cos - odd * sin, even)
    rotated_odd = tl.where(rotates, odd * cos + even * sin, odd)
    return tl.reshape(tl.join(rotated_even, rotated_odd), (HEAD_DIM,))
