"""`quantize_and_insert_k_cache` in Triton: a program takes a few keys."""

import triton
import triton.language as tl

from dsv4_jax.cache import page_stride
from dsv4_jax.common.ops.helpers.aggregates import Cache
from dsv4_jax.common.ops.helpers.launch import launch
from dsv4_jax.common.ops.helpers.quantize_store import store_keys

TILE = 1024  # channels of all keys of a program, a warp: four loads of 16 bytes of bfloat16 in each thread


def implement(k, cache, slots, kv_scale, *, cache_format, page_rows):
    """See `dsv4_jax.quantize_and_insert_k_cache`."""
    tokens, head_dim = k.shape
    pages = cache.shape[0]
    if tokens == 0 or pages == 0:
        return (cache,)
    rows = TILE // head_dim
    return launch(
        _insert_kernel,
        triton.cdiv(tokens, rows),
        updates=("cache",),
        num_warps=1,
        constants={
            "FORMAT": cache_format,
            "HEAD_DIM": head_dim,
            "PAGE_ROWS": page_rows,
            "PAGE_BYTES": page_stride(cache),
            "ROWS": rows,
        },
        k=k,
        slots=slots,
        kv_scale=kv_scale,
        cache=cache,
        tokens=tokens,
        pages=pages,
    )


@triton.jit
def _insert_kernel(
    k, slots, kv_scale, cache, tokens, pages,
    FORMAT: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE_ROWS: tl.constexpr, PAGE_BYTES: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    start = tl.program_id(0).to(tl.int64) * ROWS
    # Do not wait for the slots: nearly all keys are stored.
    i = tl.arange(0, ROWS * HEAD_DIM)
    x = tl.load(k + start * HEAD_DIM + i, mask=start + i // HEAD_DIM < tokens, other=0.0)
    token = start + tl.arange(0, ROWS)
    slot = tl.load(slots + token, mask=token < tokens, other=-1)
    slot = tl.where(slot // PAGE_ROWS < pages, slot, -1)
    store_keys(x, slot, Cache(cache, kv_scale, FORMAT, HEAD_DIM, PAGE_ROWS, PAGE_BYTES), ROWS)
