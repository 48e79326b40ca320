"""`fused_qnorm_rope_kv_rope_quant_insert` in Triton.

Each token has a program for every few heads, and one for its key.
"""

import jax.numpy as jnp
import triton
import triton.language as tl

from dsv4_jax.cache import page_stride
from dsv4_jax.common.ops.helpers.aggregates import Cache, Rope
from dsv4_jax.common.ops.helpers.launch import launch
from dsv4_jax.common.ops.helpers.quantize_store import bf16_bits, store_key
from dsv4_jax.common.ops.helpers.rms_norm import rms_norm
from dsv4_jax.common.ops.helpers.rope import rope_factors, rotate

TILE = 8  # heads of a program, of 4 warps: 4 loads of 16 bytes in flight in each thread


def implement(
    q, kv, cache, slots, positions, cos_sin, kv_scale, *, eps, padded_heads, cache_format, page_rows, outputs
):
    """See `dsv4_jax.fused_qnorm_rope_kv_rope_quant_insert`."""
    tokens, heads, head_dim = q.shape
    (out,) = outputs
    if tokens == 0 or cos_sin.shape[0] == 0:
        return cache, jnp.zeros(out.shape, out.dtype)
    programs = triton.cdiv(padded_heads, TILE) + 1
    return launch(
        _qnorm_insert_kernel,
        tokens * programs,
        updates=("cache",),
        outputs={"out": out},
        num_warps=4,
        constants={
            "PROGRAMS": programs,
            "HEADS": heads,
            "PADDED_HEADS": padded_heads,
            "TILE": TILE,
            "HEAD_DIM": head_dim,
            "ROPE_DIM": cos_sin.shape[1],
            "EPS": eps,
            "FORMAT": cache_format,
            "PAGE_ROWS": page_rows,
            "PAGE_BYTES": page_stride(cache),
        },
        q=q,
        kv=kv,
        slots=slots,
        positions=positions,
        cos_sin=cos_sin,
        kv_scale=kv_scale,
        cache=cache,
        pages=cache.shape[0],
        table_rows=cos_sin.shape[0],
    )


@triton.jit
def _qnorm_insert_kernel(
    q, kv, slots, positions, cos_sin, kv_scale, cache, out, pages, table_rows,
    PROGRAMS: tl.constexpr, HEADS: tl.constexpr, PADDED_HEADS: tl.constexpr, TILE: tl.constexpr,
    HEAD_DIM: tl.constexpr, ROPE_DIM: tl.constexpr, EPS: tl.constexpr, FORMAT: tl.constexpr, PAGE_ROWS: tl.constexpr,
    PAGE_BYTES: tl.constexpr,
):  # fmt: skip
    token = (tl.program_id(0) // PROGRAMS).to(tl.int64)
    part = tl.program_id(0) % PROGRAMS
    rope = Rope(positions, cos_sin, table_rows, ROPE_DIM)
    if part < PROGRAMS - 1:
        head = part * TILE + tl.arange(0, TILE)
        _write_heads(token, head, q, out, rope, HEADS, PADDED_HEADS, HEAD_DIM, EPS)
    else:
        _insert_key(token, kv, slots, rope, Cache(cache, kv_scale, FORMAT, HEAD_DIM, PAGE_ROWS, PAGE_BYTES), pages)


@triton.jit
def _write_heads(
    token, head, q, out, rope,
    HEADS: tl.constexpr, PADDED_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    """Some of a token's heads, normalized and rotated; zeros for those past HEADS."""
    channel = tl.arange(0, HEAD_DIM)
    real = (head < HEADS)[:, None]
    # Do not wait for the position: nearly all tokens have one.
    x = tl.load(q + (token * HEADS + head)[:, None] * HEAD_DIM + channel, mask=real, other=0.0).to(tl.float32)
    inside, cos, sin = _load_angles(token, rope, HEAD_DIM)
    x = rotate(rms_norm(x, 1.0, EPS, HEAD_DIM), cos, sin, HEAD_DIM, rope.ROPE_DIM)
    at = out.to(tl.pointer_type(tl.int16)) + (token * PADDED_HEADS + head)[:, None] * HEAD_DIM + channel
    # Rotated zeros may be -0.
    tl.store(at, tl.where(real & inside, bf16_bits(x), 0), mask=(head < PADDED_HEADS)[:, None])


@triton.jit
def _insert_key(token, kv, slots, rope, cache, pages):
    """A token's key, rotated, at its slot."""
    slot = tl.load(slots + token)
    x = tl.load(kv + token * cache.HEAD_DIM + tl.arange(0, cache.HEAD_DIM)).to(tl.float32)
    inside, cos, sin = _load_angles(token, rope, cache.HEAD_DIM)
    if inside & (slot >= 0) & (slot // cache.PAGE_ROWS < pages):
        store_key(rotate(x, cos, sin, cache.HEAD_DIM, rope.ROPE_DIM), slot, cache)


@triton.jit
def _load_angles(token, rope, HEAD_DIM: tl.constexpr):
    """Whether a token's position is in the table, and cos and sin there."""
    position = tl.load(rope.positions + token)
    inside = (position >= 0) & (position < rope.table_rows)
    cos, sin = rope_factors(rope.cos_sin, tl.where(inside, position, 0), HEAD_DIM, rope.ROPE_DIM)
    return inside, cos, sin
