"""Triton: a program for a few heads of one token."""

import triton
import triton.language as tl

CHANNELS = 4096  # of a program, 32 a thread: four loads of 16 bytes of bfloat16 in flight


def tiles(x, cos_sin, positions) -> tuple[int, dict]:
    """For x `[T, heads, dim]` the grid, and `num_warps`, `constants` and arguments of `load_heads`, for `launch`."""
    tokens, heads, head_dim = x.shape
    tile = min(CHANNELS // head_dim, triton.next_power_of_2(heads))
    return tokens * triton.cdiv(heads, tile), {
        "num_warps": max(1, tile * head_dim // 1024),
        "constants": {"HEADS": heads, "TILE": tile, "HEAD_DIM": head_dim, "ROPE_DIM": cos_sin.shape[1]},
        "positions": positions,
        "cos_sin": cos_sin,
        "table_rows": cos_sin.shape[0],
    }


@triton.jit
def load_heads(x, positions, HEADS: tl.constexpr, TILE: tl.constexpr, HEAD_DIM: tl.constexpr):
    """This program's heads, `[TILE * HEAD_DIM]` float32, the first one's index over all tokens, their number, and the
    token's position."""
    PARTS: tl.constexpr = (HEADS + TILE - 1) // TILE
    token = (tl.program_id(0) // PARTS).to(tl.int64)
    head = tl.program_id(0) % PARTS * TILE
    first = token * HEADS + head
    count = tl.minimum(HEADS - head, TILE)
    channel = tl.arange(0, TILE * HEAD_DIM)
    rows = tl.load(x + first * HEAD_DIM + channel, mask=channel < count * HEAD_DIM, other=0.0)
    return rows.to(tl.float32), first, count, tl.load(positions + token)


@triton.jit
def store_heads(at, values, first, count, TILE: tl.constexpr, WIDTH: tl.constexpr):
    """Stores WIDTH values for each of this program's heads, `[TILE * WIDTH]`, in an array of WIDTH for each head."""
    index = tl.arange(0, TILE * WIDTH)
    tl.store(at + first * WIDTH + index, values, mask=index < count * WIDTH)


@triton.jit
def store_zeros(at, first, count, TILE: tl.constexpr, WIDTH: tl.constexpr):
    """As `store_heads`."""
    store_heads(at, tl.zeros((TILE * WIDTH,), tl.int8).to(at.dtype.element_ty), first, count, TILE, WIDTH)
