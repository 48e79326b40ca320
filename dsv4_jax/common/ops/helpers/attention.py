"""Triton: attention over cached keys that are also the values, with a sink.

The keys of a token, those of both caches one after another, go by blocks; where few tokens would leave a GPU idle,
several programs share a token's blocks, and a second kernel joins their parts. How many is decided from shapes alone,
and each program then takes an equal share of the blocks that the token's lengths leave. So no pass over the lengths is
needed before the launch.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from dsv4_jax.cache import page_stride
from dsv4_jax.common.ops import fused_inv_rope_fp8_quant
from dsv4_jax.common.ops.helpers.launch import launch
from dsv4_jax.common.ops.helpers.quantize_store import bf16_bits

HEAD_DIM = 512
PROGRAMS = 132  # that fill a GPU: one for each multiprocessor of an H200, as a program takes most of one
LEAST_HEADS = 16  # rows of the least matrix product


class Rows(NamedTuple):
    """Rows of one cache: the cache, rows of its pages, and for each token the indices of its keys and their number."""

    cache: jax.Array
    page_rows: int
    indices: jax.Array
    lens: jax.Array


class Tiles(NamedTuple):
    """How a launch is divided.

    Heads of a program, keys of a block, programs that share a tile of heads, warps, and blocks in flight.
    """

    heads: int
    keys: int
    splits: int
    warps: int
    stages: int


def implement(
    q, sink, rows: list[Rows], kv_scale, positions, cos_sin,
    *, cache_format, softmax_scale, return_lse, quant_group_size, tma_aligned_scales, outputs,
):  # fmt: skip
    """The results of an attention op over rows of one or two caches."""
    types = outputs[:-1] if return_lse else outputs
    o, lse = attend(q, sink, rows, kv_scale, cache_format, softmax_scale)
    results = (o,)
    if positions is not None:
        options = {"quant_group_size": quant_group_size, "quantize": quant_group_size is not None}
        options |= {"tma_aligned_scales": tma_aligned_scales, "outputs": types}
        results = fused_inv_rope_fp8_quant.implement(o, positions, cos_sin, **options)
    return (*results, lse) if return_lse else results


def attend(q, sink, rows, kv_scale, cache_format, softmax_scale, tiles=None):
    """o `[T, H, 512]` bfloat16 and lse `[T, H]` float32."""
    rows = [r for r in rows if r.cache.size and r.indices.size]
    tokens, heads, _ = q.shape
    results = {
        "o": jax.ShapeDtypeStruct(q.shape, jnp.bfloat16),
        "lse": jax.ShapeDtypeStruct((tokens, heads), jnp.float32),
    }
    if not (rows and q.size):
        return jnp.zeros(q.shape, jnp.bfloat16), jnp.full((tokens, heads), jnp.inf)
    tiles = tiles or choose_tiles(tokens, heads, [r.indices.shape[1] for r in rows])
    first, second = rows[0], rows[-1]
    arguments = {
        "q": q,
        "cache": first.cache,
        "indices": first.indices,
        "lens": first.lens,
        "cache_2": second.cache,
        "indices_2": second.indices,
        "lens_2": second.lens,
        # Triton wants an array for every pointer; what is not read may be any.
        "kv_scale": sink if kv_scale is None else kv_scale,
        "pages": first.cache.shape[0],
        "columns": first.indices.shape[1],
        "pages_2": second.cache.shape[0],
        "columns_2": second.indices.shape[1],
        "num_warps": tiles.warps,
        "constants": {
            "FORMAT": cache_format,
            "HEADS": heads,
            "TILE": tiles.heads,
            "KEYS": tiles.keys,
            "STAGES": tiles.stages,
            "TWO": len(rows) == 2,
            "PAGE_ROWS": first.page_rows,
            "PAGE_BYTES": page_stride(first.cache),
            "PAGE_ROWS_2": second.page_rows,
            "PAGE_BYTES_2": page_stride(second.cache),
            "SCALE": softmax_scale * math.log2(math.e),
        },
    }
    programs = tokens * triton.cdiv(heads, tiles.heads)
    if tiles.splits == 1:
        return launch(_attend_kernel, programs, outputs=results, sink=sink, **arguments)
    shape = (tokens, heads, tiles.splits)
    types = {
        "part": jax.ShapeDtypeStruct((*shape, HEAD_DIM), jnp.float32),
        "largest": jax.ShapeDtypeStruct(shape, jnp.float32),
        "total": jax.ShapeDtypeStruct(shape, jnp.float32),
    }
    parts = launch(_attend_part_kernel, programs * tiles.splits, outputs=types, splits=tiles.splits, **arguments)
    return launch(
        _join_kernel,
        tokens * heads,
        outputs=results,
        num_warps=4,
        constants={"HEADS": heads, "HEAD_DIM": HEAD_DIM},
        **dict(zip(types, parts, strict=True)),
        sink=sink,
        splits=tiles.splits,
    )


def choose_tiles(tokens: int, heads: int, columns: list[int]) -> Tiles:
    """The division of a batch, from its shapes."""
    head_tile = min(64, max(LEAST_HEADS, triton.next_power_of_2(heads)))
    keys = 32
    programs = tokens * triton.cdiv(heads, head_tile)
    blocks = sum(triton.cdiv(n, keys) for n in columns)
    splits = max(1, min(PROGRAMS // programs, blocks))
    return Tiles(head_tile, keys, splits, 8 if head_tile == 64 else 4, 2)


@triton.jit
def _attend_kernel(
    q, cache, indices, lens, cache_2, indices_2, lens_2, kv_scale, sink, o, lse,
    pages, columns, pages_2, columns_2,
    FORMAT: tl.constexpr, HEADS: tl.constexpr, TILE: tl.constexpr, KEYS: tl.constexpr, STAGES: tl.constexpr,
    TWO: tl.constexpr, PAGE_ROWS: tl.constexpr, PAGE_BYTES: tl.constexpr, PAGE_ROWS_2: tl.constexpr,
    PAGE_BYTES_2: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
    """A program for a tile of a token's heads, over all of its keys."""
    TILES: tl.constexpr = (HEADS + TILE - 1) // TILE
    token = (tl.program_id(0) // TILES).to(tl.int64)
    head = tl.program_id(0) % TILES * TILE + tl.arange(0, TILE)
    present = head < HEADS
    row = token * HEADS + head
    a, b, c, d, largest, total = _sum_over_keys(
        q + row * 512, present, cache, indices, lens, cache_2, indices_2, lens_2, kv_scale,
        pages, columns, pages_2, columns_2, token, 0, 1,
        FORMAT, TILE, KEYS, STAGES, TWO, PAGE_ROWS, PAGE_BYTES, PAGE_ROWS_2, PAGE_BYTES_2, SCALE,
    )  # fmt: skip
    divisor = _divisor(largest, total, tl.load(sink + head, mask=present, other=0.0))[:, None]
    at = o.to(tl.pointer_type(tl.int16)) + row[:, None] * 512
    mask = present[:, None]
    tl.store(at + tl.arange(0, 256)[None, :], bf16_bits(a / divisor), mask=mask)
    tl.store(at + 256 + tl.arange(0, 128)[None, :], bf16_bits(b / divisor), mask=mask)
    tl.store(at + 384 + tl.arange(0, 64)[None, :], bf16_bits(c / divisor), mask=mask)
    tl.store(at + 448 + tl.arange(0, 64)[None, :], bf16_bits(d / divisor), mask=mask)
    tl.store(lse + row, _lse(largest, total), mask=present)


@triton.jit
def _attend_part_kernel(
    q, cache, indices, lens, cache_2, indices_2, lens_2, kv_scale, part, largest, total,
    pages, columns, pages_2, columns_2, splits,
    FORMAT: tl.constexpr, HEADS: tl.constexpr, TILE: tl.constexpr, KEYS: tl.constexpr, STAGES: tl.constexpr,
    TWO: tl.constexpr, PAGE_ROWS: tl.constexpr, PAGE_BYTES: tl.constexpr, PAGE_ROWS_2: tl.constexpr,
    PAGE_BYTES_2: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
    """A program for a tile of a token's heads, over a share of its keys; what it found without a key, is not stored."""
    TILES: tl.constexpr = (HEADS + TILE - 1) // TILE
    share = tl.program_id(0) % splits
    program = tl.program_id(0) // splits
    token = (program // TILES).to(tl.int64)
    head = program % TILES * TILE + tl.arange(0, TILE)
    present = head < HEADS
    row = token * HEADS + head
    a, b, c, d, m, n = _sum_over_keys(
        q + row * 512, present, cache, indices, lens, cache_2, indices_2, lens_2, kv_scale,
        pages, columns, pages_2, columns_2, token, share, splits,
        FORMAT, TILE, KEYS, STAGES, TWO, PAGE_ROWS, PAGE_BYTES, PAGE_ROWS_2, PAGE_BYTES_2, SCALE,
    )  # fmt: skip
    row = row * splits + share
    tl.store(largest + row, m, mask=present)
    tl.store(total + row, n, mask=present)
    at = part + row[:, None] * 512
    mask = (present & (n != 0))[:, None]
    tl.store(at + tl.arange(0, 256)[None, :], a, mask=mask)
    tl.store(at + 256 + tl.arange(0, 128)[None, :], b, mask=mask)
    tl.store(at + 384 + tl.arange(0, 64)[None, :], c, mask=mask)
    tl.store(at + 448 + tl.arange(0, 64)[None, :], d, mask=mask)


@triton.jit
def _join_kernel(
    part, largest, total, sink, o, lse, splits, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr
):  # fmt: skip
    """A program for a head of a token: the sum of its parts."""
    row = tl.program_id(0).to(tl.int64)
    channel = tl.arange(0, HEAD_DIM)
    first = row * splits
    m = tl.load(largest + first)
    n = tl.load(total + first)
    x = tl.load(part + first * HEAD_DIM + channel, mask=n != 0, other=0.0)
    for i in range(1, splits):
        m_i = tl.load(largest + first + i)
        n_i = tl.load(total + first + i)
        x_i = tl.load(part + (first + i) * HEAD_DIM + channel, mask=n_i != 0, other=0.0)
        m_new = tl.maximum(m, m_i)
        weight, weight_i = tl.exp2(m - _finite(m_new)), tl.exp2(m_i - _finite(m_new))
        m, n, x = m_new, n * weight + n_i * weight_i, x * weight + x_i * weight_i
    divisor = _divisor(m, n, tl.load(sink + tl.program_id(0) % HEADS))
    tl.store(o.to(tl.pointer_type(tl.int16)) + row * HEAD_DIM + channel, bf16_bits(x / divisor))
    tl.store(lse + row, _lse(m, n))


@triton.jit
def _finite(largest):
    """The largest score, 0 where there is none: -inf less -inf is NaN."""
    return tl.where(largest == float("-inf"), 0.0, largest)


@triton.jit
def _divisor(largest, total, sink):
    """The sum of the weights and the sink's; 1 without a key, whose sums are 0."""
    return tl.where(total == 0, 1.0, total + tl.exp2(sink * 1.4426950408889634 - _finite(largest)))


@triton.jit
def _lse(largest, total):
    found = tl.where(total == 0, 1.0, total)
    return tl.where(total == 0, float("inf"), (largest + tl.log2(found)) * 0.6931471805599453)


@triton.jit
def _sum_over_keys(
    q, present, cache, indices, lens, cache_2, indices_2, lens_2, kv_scale,
    pages, columns, pages_2, columns_2, token, share, shares,
    FORMAT: tl.constexpr, TILE: tl.constexpr, KEYS: tl.constexpr, STAGES: tl.constexpr,
    TWO: tl.constexpr, PAGE_ROWS: tl.constexpr, PAGE_BYTES: tl.constexpr, PAGE_ROWS_2: tl.constexpr,
    PAGE_BYTES_2: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
    """The weighted sum over a share of a token's keys, of heads q `[TILE]`: channels from 0, 256, 384 and 448 on, the
    largest score (in powers of 2) and the sum of weights relative to it.

    448 channels are no power of 2, and the others have another format: so a key has four pieces.
    """
    q_at, heads = q[:, None], present[:, None]
    q_a = tl.load(q_at + tl.arange(0, 256)[None, :], mask=heads, other=0.0)
    q_b = tl.load(q_at + 256 + tl.arange(0, 128)[None, :], mask=heads, other=0.0)
    q_c = tl.load(q_at + 384 + tl.arange(0, 64)[None, :], mask=heads, other=0.0)
    q_d = tl.load(q_at + 448 + tl.arange(0, 64)[None, :], mask=heads, other=0.0)
    a = tl.zeros((TILE, 256), tl.float32)
    b = tl.zeros((TILE, 128), tl.float32)
    c = tl.zeros((TILE, 64), tl.float32)
    d = tl.zeros((TILE, 64), tl.float32)
    largest = tl.full((TILE,), float("-inf"), tl.float32)
    total = tl.zeros((TILE,), tl.float32)

    factor = 1.0
    if FORMAT == "fp8":
        factor = tl.load(kv_scale)
    length = tl.minimum(tl.load(lens + token), columns)
    blocks = tl.cdiv(tl.maximum(length, 0), KEYS)
    all_blocks = blocks
    if TWO:
        length_2 = tl.minimum(tl.load(lens_2 + token), columns_2)
        all_blocks += tl.cdiv(tl.maximum(length_2, 0), KEYS)
    first, last = share * all_blocks // shares, (share + 1) * all_blocks // shares
    for block in tl.range(first, last, num_stages=STAGES):
        key = block * KEYS + tl.arange(0, KEYS)
        if TWO:
            of_2 = block >= blocks
            key -= tl.where(of_2, blocks * KEYS, 0)
            listed = tl.where(of_2, indices_2 + token * columns_2, indices + token * columns)
            index = tl.load(listed + key, mask=key < tl.where(of_2, length_2, length), other=-1)
            at, scales = _row(index, PAGE_ROWS, PAGE_BYTES, FORMAT)
            at_2, scales_2 = _row(index, PAGE_ROWS_2, PAGE_BYTES_2, FORMAT)
            counts = (index >= 0) & tl.where(of_2, index // PAGE_ROWS_2 < pages_2, index // PAGE_ROWS < pages)
            at, scales = tl.where(of_2, at_2, at), tl.where(of_2, scales_2, scales)
            base = tl.where(of_2, cache_2.to(tl.pointer_type(tl.uint8)), cache.to(tl.pointer_type(tl.uint8)))
        else:
            index = tl.load(indices + token * columns + key, mask=key < length, other=-1)
            at, scales = _row(index, PAGE_ROWS, PAGE_BYTES, FORMAT)
            counts = (index >= 0) & (index // PAGE_ROWS < pages)
            base = cache.to(tl.pointer_type(tl.uint8))
        at, scales = base + at, base + scales
        k_a = _piece(at, scales, counts, factor, 0, 256, FORMAT, KEYS)
        k_b = _piece(at, scales, counts, factor, 256, 128, FORMAT, KEYS)
        k_c = _piece(at, scales, counts, factor, 384, 64, FORMAT, KEYS)
        k_d = _piece(at, scales, counts, factor, 448, 64, FORMAT, KEYS)
        scores = tl.dot(q_a, tl.trans(k_a))
        scores = tl.dot(q_b, tl.trans(k_b), scores)
        scores = tl.dot(q_c, tl.trans(k_c), scores)
        scores = tl.dot(q_d, tl.trans(k_d), scores)
        scores = tl.where(counts[None, :], scores * SCALE, float("-inf"))
        largest_before = largest
        largest = tl.maximum(largest, tl.max(scores, axis=1))
        shift = _finite(largest)
        weights = tl.exp2(scores - shift[:, None])
        shrink = tl.exp2(largest_before - shift)
        total = total * shrink + tl.sum(weights, axis=1)
        weights = weights.to(tl.bfloat16)
        a = tl.dot(weights, k_a, a * shrink[:, None])
        b = tl.dot(weights, k_b, b * shrink[:, None])
        c = tl.dot(weights, k_c, c * shrink[:, None])
        d = tl.dot(weights, k_d, d * shrink[:, None])
    return a, b, c, d, largest, total


@triton.jit
def _row(index, PAGE_ROWS: tl.constexpr, PAGE_BYTES: tl.constexpr, FORMAT: tl.constexpr):
    """The first byte of a row's values and of its scales, from the cache's first."""
    page, row = (index // PAGE_ROWS).to(tl.int64) * PAGE_BYTES, index % PAGE_ROWS
    if FORMAT == "fp8_ds_mla":
        return page + row * 576, page + PAGE_ROWS * 576 + row * 8
    elif FORMAT == "bf16":
        return page + row * 1024, page
    else:
        return page + row * 512, page


@triton.jit
def _piece(
    at, scales, counts, factor, FIRST: tl.constexpr, COUNT: tl.constexpr, FORMAT: tl.constexpr, KEYS: tl.constexpr
):
    """Channels from FIRST on of the keys whose values begin at `at` `[KEYS]`, as bfloat16; zeros where none counts."""
    channel, wanted = tl.arange(0, COUNT)[None, :], counts[:, None]
    if FORMAT == "bf16":
        return tl.load((at + 2 * FIRST).to(tl.pointer_type(tl.bfloat16))[:, None] + channel, mask=wanted, other=0.0)
    elif FORMAT == "fp8":
        code = tl.load(at[:, None] + FIRST + channel, mask=wanted, other=0)
        return (code.to(tl.float8e4nv, bitcast=True).to(tl.float32) * factor).to(tl.bfloat16)
    elif FIRST == 448:
        return tl.load((at + 448).to(tl.pointer_type(tl.bfloat16))[:, None] + channel, mask=wanted, other=0.0)
    else:
        BLOCKS: tl.constexpr = COUNT // 64
        code = tl.load(at[:, None] + FIRST + channel, mask=wanted, other=0)
        exponent = tl.load(scales[:, None] + FIRST // 64 + tl.arange(0, BLOCKS)[None, :], mask=wanted, other=0)
        exponent = exponent.to(tl.int32)
        # float32 has 2**-127 as a subnormal, and infinity where UE8M0 has NaN.
        bits = tl.where(exponent == 0, 0x400000, tl.where(exponent == 255, 0x7FC00000, exponent << 23))
        x = tl.reshape(code.to(tl.float8e4nv, bitcast=True).to(tl.float32), (KEYS, BLOCKS, 64))
        return tl.reshape(x * bits.to(tl.float32, bitcast=True)[:, :, None], (KEYS, COUNT)).to(tl.bfloat16)
