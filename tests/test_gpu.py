"""On a GPU: the real kernels on large batches, and caches past 2**31 bytes and elements."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from helpers import ops, oracle
from helpers.batches import KINDS, random_batch

import dsv4_jax

pytestmark = pytest.mark.gpu

# Every format, and other pages for one of each compressor.
PAGED = [
    *((kind, fmt, *{"csa": (4, 64), "hca": (8, 2), "indexer": (4, 64)}[kind]) for kind, fmt in ops.COMPRESSORS),
    ("csa", "fp8_ds_mla", 7, 3),
    ("hca", "fp8_ds_mla", 5, 3),
    ("indexer", "indexer_mxfp4", 7, 1),
]


def check(batch, implementation):
    saved = ops.saved(batch)
    ops.same_bytes(ops.save_partial_states(batch, implementation=implementation), saved)
    apart = ops.rows(batch, saved, from_batch=False)
    cache = ops.store(batch, saved, implementation=implementation)
    oracle.assert_same_cache(cache, batch.cache, apart, batch.config, scale=batch.kv_scale)
    fused = ops.rows(batch, batch.state, from_batch=True)
    for save, state in (("all", saved), ("tail", ops.tail(batch))):
        got, cache = ops.compress(batch, implementation=implementation, save=save)
        ops.same_bytes(got, state)
        oracle.assert_same_cache(cache, batch.cache, fused, batch.config, scale=batch.kv_scale)
    return len(fused.slots)


@pytest.mark.parametrize(("kind", "fmt", "page_rows", "kv_page_rows"), PAGED)
def test_large_ragged_batches(kind, fmt, page_rows, kv_page_rows, implementation):
    config = ops.make_config(kind, fmt, page_rows, kv_page_rows)
    rng = np.random.default_rng([page_rows, len(fmt)])
    # Chunks long enough that most windows lie inside the batch, and decodes beside them.
    sizes = [(int(rng.integers(0, 300)), int(n)) for n in rng.integers(200, 500, 3)]
    sizes += [(int(rng.integers(0, 300)), 1) for _ in range(20)]
    sizes += [(config.compress_ratio - 1, 1), (2 * config.compress_ratio - 1, 1), (5, 1750)]
    order = rng.permutation(len(sizes))
    batch = random_batch(rng, config, sizes=[sizes[i] for i in order], padding=17, padded_requests=3)
    assert len(batch.positions) > 2048
    assert check(batch, implementation) > len(batch.positions) // config.compress_ratio // 2


@pytest.mark.parametrize(("kind", "fmt"), [("csa", "fp8_ds_mla"), ("hca", "bf16"), ("indexer", "indexer_mxfp4")])
@pytest.mark.parametrize("what", [*KINDS, "holes", "magnitudes", "bf16 magnitudes holes"])
def test_batches(kind, fmt, what, implementation):
    batch = random_batch(
        np.random.default_rng(len(what)),
        ops.make_config(kind, fmt, 3, 5),
        what if what in KINDS else "mixed",
        requests=5,
        tokens=8000 if kind == "hca" else 1000,  # few keys would have too few bytes for a share that may differ
        padding=9,
        holes="holes" in what,
        magnitudes="magnitudes" in what,
        dtype=ml_dtypes.bfloat16 if "bf16" in what else np.float32,
    )
    check(batch, implementation)


class Far:
    """A state cache too large to copy: the shape of all of it, the rows of the pages that are used."""

    def __init__(self, shape, near, pages):
        self.shape, self.near, self.where = shape, near, {page: i for i, page in enumerate(pages)}

    def __getitem__(self, index):
        page, row = index
        return self.near[self.where[page], row]


def free_bytes():
    stats = jax.devices()[0].memory_stats() or {}
    return stats.get("bytes_limit", 0) - stats.get("bytes_in_use", 0)


@functools.partial(jax.jit, static_argnames=("shape", "dtype"))
def filled(value, pages, near, *, shape, dtype):
    """A cache of one value, some pages of it given."""
    return jnp.full(shape, value, dtype).at[pages].set(near)


@jax.jit
def untouched(cache, value, pages):
    """How many elements outside `pages` are not `value`; a page at a time, so that no second cache is made."""
    known = jnp.zeros(cache.shape[0], bool).at[pages].set(True)

    def count(i, found):
        page = jax.lax.dynamic_index_in_dim(cache, i, keepdims=False)
        return found + jnp.where(known[i], 0, (page != value).sum())

    block = max(1, cache.shape[0] // 1024)
    # A sample of 1024 pages, the first and the last among them.
    return jax.lax.fori_loop(
        0, -(-cache.shape[0] // block), lambda i, f: count(i * block, f), count(cache.shape[0] - 1, 0)
    )


def far_batch(kind, fmt, state_pages, kv_pages, page_rows, kv_page_rows):
    """A batch whose pages lie at the far end of huge caches, around 2**31 and 2**32 bytes and elements among them."""
    config = ops.make_config(kind, fmt, page_rows, kv_page_rows)
    rng = np.random.default_rng(0)
    m = config.compress_ratio
    near = random_batch(
        rng, config, sizes=[(0, 3 * m + 1), (2 * m + 1, m + 2), (m - 1, 1)], padding=2, spare_pages=0, padded_requests=1
    )
    element = page_rows * 2 * config.width
    page_bytes = near.cache[0].nbytes
    marks = [state_pages - 1, 2**31 // element - 1, 2**31 // element, 2**30 // element, 0]
    state_at = spread(rng, len(near.state), state_pages, marks)
    marks = [kv_pages - 1, 2**31 // page_bytes - 1, 2**31 // page_bytes, 2**32 // page_bytes, 0]
    kv_at = spread(rng, len(near.cache), kv_pages, marks)

    def moved(table, at):
        return np.where(table >= 0, at[np.maximum(table, 0)], table).astype(np.int32)

    def slots(given, at, rows):
        return np.where(given >= 0, at[np.maximum(given, 0) // rows] * rows + given % rows, given).astype(np.int32)

    far = dataclasses.replace(
        near,
        block_table=moved(near.block_table, state_at),
        slot_mapping=slots(near.slot_mapping, state_at, page_rows),
        kv_slot_mapping=slots(near.kv_slot_mapping, kv_at, kv_page_rows),
    )
    return near, far, state_at, kv_at


def spread(rng, count, pages, marks):
    """`count` distinct pages, those of `marks` that exist among them."""
    chosen = dict.fromkeys(int(p) for p in marks if 0 <= p < pages)
    while len(chosen) < count:
        chosen[int(rng.integers(0, pages))] = None
    return rng.permutation(np.array(list(chosen)[:count], np.int64))


@pytest.mark.parametrize("loop", ["jit", "scan"])
@pytest.mark.parametrize(
    ("kind", "fmt", "page_rows", "kv_page_rows"),
    [("csa", "fp8_ds_mla", 4, 64), ("hca", "bf16", 8, 64), ("indexer", "indexer_mxfp4", 4, 64)],
)
def test_huge_caches(kind, fmt, page_rows, kv_page_rows, loop, implementation):
    """More than 2**31 state elements (over 8 GiB) and 2**32 cache bytes: right rows, same addresses, no copy."""
    config = ops.make_config(kind, fmt, page_rows, kv_page_rows)
    state_pages = 2**31 // (page_rows * 2 * config.width) + 1000
    sample = jax.eval_shape(lambda: config.format.allocate(1, kv_page_rows))
    kv_pages = 2**32 // (sample.size * sample.dtype.itemsize) + 1000
    if free_bytes() < 3 * (2**33 + 2**32):  # filling a cache may take it twice
        pytest.skip(f"needs 36 GiB of GPU memory, {free_bytes() / 2**30:.0f} are free")
    near, far, state_at, kv_at = far_batch(kind, fmt, state_pages, kv_pages, page_rows, kv_page_rows)

    state = filled(1.5, state_at, near.state, shape=(state_pages, *near.state.shape[1:]), dtype=jnp.float32)
    raw = np.uint16 if fmt == "bf16" else np.uint8
    # As raw bytes, then viewed as the format's dtype: a random NaN must keep its bits.
    cache = _viewed(
        filled(0x5A, kv_at, near.cache.view(raw), shape=(kv_pages, *near.cache.shape[1:]), dtype=raw), near.cache.dtype
    )
    assert state.size > 2**31 and cache.size * cache.dtype.itemsize > 2**32
    meta = ops.metadata(far)
    constant = tuple(map(jnp.asarray, (far.kv_score, far.ape, far.norm_weight, far.cos_sin)))

    def once(state, cache, meta, kv_score, ape, norm_weight, cos_sin):
        return dsv4_jax.compress(
            kv_score, ape, state, cache, meta, norm_weight, cos_sin, config=config, save="all",
            kv_scale=far.kv_scale, implementation=implementation,
        )  # fmt: skip

    def run(state, cache, *rest):
        if loop == "jit":
            return once(state, cache, *rest)
        return jax.lax.scan(lambda c, _: (once(*c, *rest), None), (state, cache), None, length=2)[0]

    compiled = jax.jit(run, donate_argnums=(0, 1)).lower(state, cache, meta, *constant).compile()
    assert not ops.copies(compiled, state, cache)
    addresses = [state.unsafe_buffer_pointer(), cache.unsafe_buffer_pointer()]
    state, cache = compiled(state, cache, meta, *constant)
    assert [state.unsafe_buffer_pointer(), cache.unsafe_buffer_pointer()] == addresses

    exact = ops.rows(far, Far(state.shape, near.state, state_at), from_batch=True, kv_pages=kv_pages)
    assert len(exact.slots) == len(ops.rows(near, near.state, from_batch=True).slots) > 3
    ops.same_bytes(state[state_at], ops.saved(near))
    # Back to the small cache's slots, to hold it as a whole.
    small = dataclasses.replace(exact, slots=near.kv_slot_mapping[exact.tokens])
    oracle.assert_same_cache(_viewed(cache, raw)[kv_at], near.cache, small, config, scale=far.kv_scale)
    assert int(untouched(state, 1.5, state_at)) == 0
    assert int(untouched(_viewed(cache, raw), 0x5A, kv_at)) == 0


def _viewed(array, dtype):
    """The same bits as another dtype of the same size."""
    if array.dtype == dtype:
        return array
    return jax.lax.bitcast_convert_type(array, dtype)
