"""`compress` with the online state, in Triton.

A call may write a page row that holds the history of the same call, so every row must be read before it is written. A
short batch takes one launch, in which each program walks the tokens of one request. A long batch takes two: the first
folds the rows of each window, a block of channels per program, and only the second writes.
"""

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from dsv4_jax.common.ops.helpers.aggregates import Cache, Entry, Factors, Plan, Rows, Shape
from dsv4_jax.common.ops.helpers.launch import launch
from dsv4_jax.common.ops.helpers.norm_rope import key_arguments, load_factors, norm_rope
from dsv4_jax.common.ops.helpers.quantize_store import store_key
from dsv4_jax.common.ops.helpers.rope import rope_factors
from dsv4_jax.common.ops.helpers.softmax import fold, merge
from dsv4_jax.common.ops.helpers.window import TILE, by_fours, closing_window
from dsv4_jax.common.sizes import count_work, measure_arrays

MOST_LOADED = 8  # tokens that a program loads at once as it walks


def implement(kv_score, ape, state_cache, kv_cache, metadata, norm_weight, cos_sin, kv_scale, *, config):
    """See `dsv4_jax.compress`."""
    windows, saved = count_work(metadata, state_cache, kv_cache, cos_sin, "tail")
    if windows + saved == 0:
        return state_cache, kv_cache
    sizes = measure_arrays(metadata, state_cache, kv_cache, cos_sin)
    rows = {"kv_score": kv_score, "ape": ape, "state_cache": state_cache}
    plan = {"closing": metadata.closing, "saving": metadata.saving, "windows": windows}
    keys, store = key_arguments(kv_cache, norm_weight, cos_sin, kv_scale, config)
    shape = {
        "RATIO": config.compress_ratio,
        "HEAD_DIM": config.head_dim,
        "PAGE_ROWS": config.page_rows,
        "KV_PAGE_ROWS": config.kv_page_rows,
    }
    requests = metadata.runs.shape[0]
    if windows and saved and sizes["tokens"] <= requests * config.page_rows:
        return launch(
            _online_walk_kernel,
            requests,
            updates=("state_cache", "kv_cache"),
            num_warps=config.head_dim // 128,
            constants={**shape, **store, "LOADED": min(triton.next_power_of_2(config.page_rows), MOST_LOADED)},
            runs=metadata.runs,
            slot_mapping=metadata.slot_mapping,
            kv_slot_mapping=metadata.kv_slot_mapping,
            **rows,
            **sizes,
            **keys,
        )

    block = min(config.head_dim, max(16, TILE // config.window))
    compressed, states = launch(
        _online_fold_kernel,
        (windows + saved) * (config.head_dim // block),
        outputs={
            "compressed": jax.ShapeDtypeStruct((max(1, windows), config.head_dim), jnp.float32),
            "states": jax.ShapeDtypeStruct((max(1, saved), 3 * config.head_dim), jnp.float32),
        },
        num_warps=4,
        constants={**shape, "BLOCK": block},
        window_slots=metadata.window_slots,
        **rows,
        **plan,
        **sizes,
    )
    updates = [name for name, count in (("state_cache", saved), ("kv_cache", windows)) if count]
    written = launch(
        _online_write_kernel,
        windows + saved,
        updates=updates,
        num_warps=config.head_dim // 128,
        constants={**shape, **store},
        compressed=compressed,
        states=states,
        state_cache=state_cache,
        **keys,
        **plan,
        **sizes,
    )
    caches = {"state_cache": state_cache, "kv_cache": kv_cache} | dict(zip(updates, written, strict=True))
    return caches["state_cache"], caches["kv_cache"]


@triton.jit
def _online_walk_kernel(
    runs, kv_score, ape, slot_mapping, kv_slot_mapping, state_cache, kv_cache, norm_weight, cos_sin, kv_scale,
    tokens, state_pages, kv_pages, table_rows,
    RATIO: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE_ROWS: tl.constexpr, KV_PAGE_ROWS: tl.constexpr,
    FORMAT: tl.constexpr, PAGE_BYTES: tl.constexpr, EPS: tl.constexpr, ROPE_DIM: tl.constexpr, LOADED: tl.constexpr,
):  # fmt: skip
    """All of one request: its tokens in order, from the state before them."""
    run = runs + tl.program_id(0) * 4
    first = tl.load(run)
    count = tl.load(run + 1)
    position = tl.load(run + 2)
    before = tl.load(run + 3)
    if (first >= 0) & (first < tokens) & (position >= 0):
        count = tl.minimum(count, tl.minimum(tokens - first, 0x7FFFFFFF - position))
        channels = tl.arange(0, HEAD_DIM)
        # Issue first the loads that need the run alone, so that they overlap.
        maximum, total, weighted = load_state(state_cache, before, channels, state_pages, HEAD_DIM, PAGE_ROWS)
        weight = tl.load(norm_weight + channels).to(tl.float32)
        cache = Cache(kv_cache, kv_scale, FORMAT, HEAD_DIM, KV_PAGE_ROWS, PAGE_BYTES)
        rows = Rows(kv_score, ape, state_cache, state_pages)
        for begin in range(0, count, LOADED):
            index = tl.arange(0, LOADED)
            start = first + begin
            phase = (position + begin + index) % RATIO
            kvs, scores = load_rows(rows, start, phase, index, begin + index < count, channels, HEAD_DIM)
            for i in range(tl.minimum(LOADED, count - begin)):
                row = first + begin + i
                here = position + begin + i
                slot = tl.load(slot_mapping + row)
                key_slot = tl.load(kv_slot_mapping + row)
                anchor = here // RATIO * RATIO
                in_table = anchor < table_rows
                cos, sin = rope_factors(cos_sin, tl.where(in_table, anchor, 0), HEAD_DIM, ROPE_DIM)
                if begin + i == 0:
                    # Every warp must have read the state before this request's tokens before any warp writes one.
                    tl.debug_barrier()
                opens = here == anchor
                maximum, total, weighted = merge(
                    tl.where(opens, float("-inf"), maximum), tl.where(opens, 0.0, total),
                    tl.where(opens, 0.0, weighted), take_row(scores, index, i), 1.0, take_row(kvs, index, i),
                )  # fmt: skip
                if here - anchor == RATIO - 1:
                    if (key_slot >= 0) & (key_slot // KV_PAGE_ROWS < kv_pages) & in_table:
                        key = norm_rope(weighted / total, Factors(weight, cos, sin), EPS, HEAD_DIM, ROPE_DIM)
                        store_key(key, key_slot, cache)
                elif (begin + i >= count - PAGE_ROWS) & (slot >= 0) & (slot // PAGE_ROWS < state_pages):
                    store_state(state_cache, slot, channels, maximum, total, weighted, HEAD_DIM)


@triton.jit
def _online_fold_kernel(
    closing, window_slots, saving, kv_score, ape, state_cache, compressed, states,
    tokens, state_pages, kv_pages, table_rows, windows,
    RATIO: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE_ROWS: tl.constexpr, KV_PAGE_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One block of channels: a closing window's softmax-sum into `compressed`, or a state to save into `states`."""
    BLOCKS: tl.constexpr = HEAD_DIM // BLOCK
    pid = tl.program_id(0)
    index = pid // BLOCKS
    channels = pid % BLOCKS * BLOCK + tl.arange(0, BLOCK)
    shape = Shape(RATIO, RATIO, HEAD_DIM, HEAD_DIM, PAGE_ROWS, KV_PAGE_ROWS, True)
    closes = index < windows
    if closes:
        entry = closing_window(Plan(closing, tokens, kv_pages, table_rows), index, shape)
        before = tl.load(window_slots + index)
    else:
        index -= windows
        entry = saved_token(index, saving, tokens, state_pages, PAGE_ROWS)
        # The state before lies in the same page.
        before = entry.slot // PAGE_ROWS * PAGE_ROWS + (entry.position - entry.in_batch) % PAGE_ROWS
    if entry.valid:
        before = tl.where(entry.in_batch <= entry.position % RATIO, before, -1)
        rows = Rows(kv_score, ape, state_cache, state_pages)
        maximum, total, weighted = fold_window(rows, entry, before, channels, shape)
        if closes:
            tl.store(compressed + index * HEAD_DIM + channels, weighted / total)
        else:
            store_state(states, index, channels, maximum, total, weighted, HEAD_DIM)


@triton.jit
def _online_write_kernel(
    closing, saving, compressed, states, state_cache, kv_cache, norm_weight, cos_sin, kv_scale,
    tokens, state_pages, kv_pages, table_rows, windows,
    RATIO: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE_ROWS: tl.constexpr, KV_PAGE_ROWS: tl.constexpr,
    FORMAT: tl.constexpr, PAGE_BYTES: tl.constexpr, EPS: tl.constexpr, ROPE_DIM: tl.constexpr,
):  # fmt: skip
    """Finishes a window and stores its key, or stores a state."""
    index = tl.program_id(0)
    channels = tl.arange(0, HEAD_DIM)
    if index < windows:
        shape = Shape(RATIO, RATIO, HEAD_DIM, HEAD_DIM, PAGE_ROWS, KV_PAGE_ROWS, True)
        entry = closing_window(Plan(closing, tokens, kv_pages, table_rows), index, shape)
        if entry.valid:
            c = tl.load(compressed + index * HEAD_DIM + channels)
            factors = load_factors(norm_weight, cos_sin, entry.position, shape, ROPE_DIM)
            cache = Cache(kv_cache, kv_scale, FORMAT, HEAD_DIM, KV_PAGE_ROWS, PAGE_BYTES)
            store_key(norm_rope(c, factors, EPS, HEAD_DIM, ROPE_DIM), entry.slot, cache)
    else:
        index -= windows
        entry = saved_token(index, saving, tokens, state_pages, PAGE_ROWS)
        if entry.valid:
            maximum, total, weighted = load_state(states, index, channels, index + 1, HEAD_DIM, 1)
            store_state(state_cache, entry.slot, channels, maximum, total, weighted, HEAD_DIM)


@triton.jit
def saved_token(index, saving, tokens, state_pages, PAGE_ROWS: tl.constexpr):
    """Entry `index` of the plan's states to save."""
    row = tl.load(saving + index * 4)
    position = tl.load(saving + index * 4 + 1)
    slot = tl.load(saving + index * 4 + 2)
    in_batch = tl.load(saving + index * 4 + 3)
    valid = (row >= 0) & (row < tokens) & (slot >= 0) & (slot // PAGE_ROWS < state_pages)
    return Entry(row, position, slot, in_batch, valid & (position >= 0) & (in_batch >= 1))


@triton.jit
def fold_window(rows, entry, before, channels, shape):
    """The state `[channels]` after a batch row: the rows of its window in the batch, and the state before those."""
    RATIO: tl.constexpr = shape.RATIO
    element = tl.arange(0, RATIO)
    back = entry.position % RATIO - element
    if (entry.in_batch >= RATIO) & (entry.row >= RATIO - 1) & (entry.position % RATIO == RATIO - 1):
        # The common case of a prefill: nothing to mask.
        kv, score = load_rows(rows, entry.row - (RATIO - 1), element, element, None, channels, shape.HEAD_DIM)
    else:
        present = (back >= 0) & (back < entry.in_batch) & (back <= entry.row)
        start = entry.row - entry.position % RATIO
        kv, score = load_rows(rows, start, element, element, present, channels, shape.HEAD_DIM)
    maximum, total, weighted = fold(kv, score)
    old_maximum, old_total, old_weighted = load_state(
        rows.state_cache, before, channels, rows.state_pages, shape.HEAD_DIM, shape.PAGE_ROWS
    )
    return merge(old_maximum, old_total, old_weighted, maximum, total, weighted)


@triton.jit
def load_rows(rows, first, phase, index, present, channels, HEAD_DIM: tl.constexpr):
    """kv and biased score `[rows, channels]` of batch rows `first + index`; of those not present 0 and -inf."""
    starts = rows.kv_score + first.to(tl.int64) * (2 * HEAD_DIM) + index * (2 * HEAD_DIM)
    at = by_fours(starts, channels[None, :])
    bias = rows.ape + (phase * HEAD_DIM)[:, None] + channels[None, :]
    if present is None:
        kv = tl.load(at).to(tl.float32)
        score = tl.load(at + HEAD_DIM).to(tl.float32) + tl.load(bias)
    else:
        mask = present[:, None]
        kv = tl.load(at, mask=mask, other=0.0).to(tl.float32)
        score = tl.load(at + HEAD_DIM, mask=mask, other=float("-inf")).to(tl.float32)
        score += tl.load(bias, mask=mask, other=0.0)
    return kv, score


@triton.jit
def take_row(tile, index, i):
    """Row i of `[rows, channels]`, whose rows are numbered by `index`."""
    return tl.sum(tl.where((index == i)[:, None], tile, 0.0), axis=0)


@triton.jit
def load_state(states, slot, channels, pages, HEAD_DIM: tl.constexpr, PAGE_ROWS: tl.constexpr):
    """Maximum, sum and weighted sum `[channels]` at a slot; those of no row at all where it is outside."""
    inside = (slot >= 0) & (slot // PAGE_ROWS < pages)
    at = states + slot.to(tl.int64) * (3 * HEAD_DIM) + channels
    maximum = tl.load(at, mask=inside, other=float("-inf"))
    total = tl.load(at + HEAD_DIM, mask=inside, other=0.0)
    return maximum, total, tl.load(at + 2 * HEAD_DIM, mask=inside, other=0.0)


@triton.jit
def store_state(states, slot, channels, maximum, total, weighted, HEAD_DIM: tl.constexpr):
    at = states + slot.to(tl.int64) * (3 * HEAD_DIM) + channels
    tl.store(at, maximum)
    tl.store(at + HEAD_DIM, total)
    tl.store(at + 2 * HEAD_DIM, weighted)
