"""`dequantize_and_gather_k_cache`: copies the last keys of each request from its pages into one bfloat16 array."""

import operator

import jax
import jax.numpy as jnp
import numpy as np

from dsv4_jax import checks
from dsv4_jax.cache import CACHE_FORMATS
from dsv4_jax.common.reference import dequantize_and_gather_k_cache as reference
from dsv4_jax.op import Op
from dsv4_jax.platforms import Implementation


def dequantize_and_gather_k_cache(
    cache: jax.Array,
    seq_lens: jax.Array,
    block_table: jax.Array,
    gather_lens: jax.Array | None = None,
    offset: jax.Array | int = 0,
    *,
    out: jax.Array,
    page_rows: int,
    cache_format: str = "fp8_ds_mla",
    kv_scale: jax.Array | float | None = None,
    implementation: Implementation | None = None,
) -> jax.Array:
    """Copies the last keys of each request into `out`, dequantized.

    Row `seq_lens[r] - gather_lens[r] + i` of request r goes to `out[r, offset + i]`, for `0 <= i < gather_lens[r]`. Row
    p of request r is row `p % page_rows` of page `block_table[r, p // page_rows]`. A value is multiplied by its scale
    in float32 and rounded to bfloat16. Every NaN becomes 0x7FC0; the scale byte 255 means NaN; a scale or product below
    2**-126 may count as 0. What is stored as bfloat16 (the RoPE part of `fp8_ds_mla`, all of `bf16`) keeps its bits.

    A row is skipped if it is below 0, past the block table or in a page outside the cache, or if its place is outside
    `out`. Whatever is not written in `out` keeps its value. A negative length counts as 0. A negative offset writes
    nothing.

    Args:
      cache: of `cache_format`, as `CacheFormat.allocate` makes it.
      seq_lens: `[R]` int32, rows that each request has in the cache: its tokens divided by the compress ratio, rounded
        down.
      block_table: `[R, B]` int32, cache pages of each request.
      gather_lens: `[R]` int32, how many of its last rows to copy; None copies all.
      offset: int or `[]` int32, at least 0.
      out: `[R, L, head_dim]` bfloat16; updated in place when donated.
      page_rows: rows per page.
      cache_format: name of the `CacheFormat`.
      kv_scale: `[]` float32, the factor of values; needed for the format `fp8`, None for all others.
      implementation: "xla" or "triton"; None lets the platform switch choose.

    Returns:
      `out`.
    """
    checks.one_of("cache_format", cache_format, tuple(CACHE_FORMATS))
    fmt = CACHE_FORMATS[cache_format]
    checks.at_least("page_rows", page_rows, 1)
    fmt.check_cache("cache", cache, page_rows)
    cache = checks.array("cache", cache, cache.shape, (fmt.dtype,))
    seq_lens = checks.integers("seq_lens", seq_lens, ("R",))
    (requests,) = seq_lens.shape
    block_table = checks.integers("block_table", block_table, (requests, "B"))
    gather_lens = seq_lens if gather_lens is None else checks.integers("gather_lens", gather_lens, (requests,))
    if isinstance(offset, int | np.integer):
        checks.at_least("offset", offset, 0)
        offset = jnp.int32(offset)
    offset = checks.integers("offset", offset, ())
    out = checks.array("out", out, (requests, "L", fmt.head_dim), (jnp.bfloat16,))
    kv_scale = fmt.check_scale("kv_scale", kv_scale)
    (out,) = OP(
        cache,
        seq_lens,
        block_table,
        gather_lens,
        offset,
        out,
        kv_scale,
        implementation=implementation,
        cache_format=cache_format,
        page_rows=operator.index(page_rows),
    )
    return out


def _triton():
    from dsv4_jax.common.ops.dequantize_and_gather_k_cache import implement

    return implement


OP = Op(
    "dequantize_and_gather_k_cache",
    updates=(5,),
    xla=reference.implement,
    triton=_triton,
    fp8=lambda *, cache_format, **_: cache_format != "bf16",  # MXFP4's values are read as fp8's
)
