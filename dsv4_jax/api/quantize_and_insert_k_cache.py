"""`quantize_and_insert_k_cache`: quantizes finished keys and stores them in a cache."""

import operator

import jax

from dsv4_jax import checks
from dsv4_jax.cache import CACHE_FORMATS
from dsv4_jax.common.reference import quantize_and_insert_k_cache as reference
from dsv4_jax.op import Op
from dsv4_jax.platforms import Implementation


def quantize_and_insert_k_cache(
    k: jax.Array,
    cache: jax.Array,
    slots: jax.Array,
    *,
    page_rows: int,
    cache_format: str = "fp8_ds_mla",
    kv_scale: jax.Array | float | None = None,
    implementation: Implementation | None = None,
) -> jax.Array:
    """Quantizes keys that are finished (after RMSNorm and RoPE) and stores each at its slot.

    `CacheFormat.pack` defines the bytes of a row, also for values that are not finite. For `fp8_ds_mla`, the first 448
    channels are rounded to bfloat16 and then, in blocks of 64, to `fp8(x / 2**e)` with
    `e = ceil(log2(max(amax, 1e-4) / 448))` and the scale byte `e + 127`; the 64 RoPE channels stay bfloat16.

    Args:
      k: `[T, head_dim]` bfloat16 or float32.
      cache: of `cache_format`, as `CacheFormat.allocate` makes it; updated in place when donated.
      slots: `[T]` int32, `page * page_rows + row`, distinct; a slot outside the cache, such as padding's -1,
        stores nothing.
      page_rows: rows per page.
      cache_format: name of the `CacheFormat`.
      kv_scale: `[]` float32, the divisor of values; needed for the format `fp8`, None for all others.
      implementation: "xla" or "triton"; None lets the platform switch choose.

    Returns:
      The cache.
    """
    checks.one_of("cache_format", cache_format, tuple(CACHE_FORMATS))
    fmt = CACHE_FORMATS[cache_format]
    k = checks.array("k", k, ("T", fmt.head_dim), checks.FLOATS)
    checks.at_least("page_rows", page_rows, 1)
    fmt.check_cache("cache", cache, page_rows)
    cache = checks.array("cache", cache, cache.shape, (fmt.dtype,))
    slots = checks.integers("slots", slots, (k.shape[0],))
    kv_scale = fmt.check_scale("kv_scale", kv_scale)
    options = {"cache_format": cache_format, "page_rows": operator.index(page_rows)}
    (cache,) = OP(k, cache, slots, kv_scale, implementation=implementation, **options)
    return cache


def _triton():
    from dsv4_jax.common.ops.quantize_and_insert_k_cache import implement

    return implement


OP = Op(
    "quantize_and_insert_k_cache",
    updates=(1,),
    xla=reference.implement,
    triton=_triton,
    fp8=lambda *, cache_format, **_: CACHE_FORMATS[cache_format].fp8,
)
