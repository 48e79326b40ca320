"""`quantize_and_insert_k_cache` in plain JAX."""

from dsv4_jax.cache import CACHE_FORMATS


def implement(k, cache, slots, kv_scale, *, cache_format, page_rows):
    """See `dsv4_jax.quantize_and_insert_k_cache`."""
    if not (k.size and cache.size):
        return (cache,)
    fmt = CACHE_FORMATS[cache_format]
    return (fmt.store(cache, *fmt.pack(k, kv_scale), slots, page_rows),)
