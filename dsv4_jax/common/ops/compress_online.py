"""`compress` with the online state, in Triton.

A page row that a call writes may be the history of the same call: nothing may be written before it was read. A short
batch takes one launch, a program a request, which walks its tokens. A long batch takes two: the first folds the rows of
each window, over blocks of channels, and only the second writes.
"""

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from dsv4_jax.common.ops.helpers.launch import launch
from dsv4_jax.common.ops.helpers.norm_rope import key_arguments, key_factors, norm_rope
from dsv4_jax.common.ops.helpers.quantize_store import store_key
from dsv4_jax.common.ops.helpers.rope import rope_factors
from dsv4_jax.common.ops.helpers.softmax import fold, merge
from dsv4_jax.common.ops.helpers.window import TILE, by_fours, closing_window

MOST_LOADED = 8  # tokens that a walking program loads at once


def implement(kv_score, ape, state_cache, kv_cache, metadata, norm_weight, cos_sin, kv_scale, *, config):
    """See `dsv4_jax.compress`."""
    tokens = metadata.positions.shape[0]
    windows = metadata.closing.shape[0] if kv_cache.shape[0] and cos_sin.shape[0] else 0
    saved = metadata.saving.shape[0] if state_cache.shape[0] else 0
    if windows + saved == 0:
        return state_cache, kv_cache
    sizes = {
        "tokens": tokens,
        "state_pages": state_cache.shape[0],
        "kv_pages": kv_cache.shape[0],
        "table_rows": cos_sin.shape[0],
    }
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
    if windows and saved and tokens <= requests * config.page_rows:
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
        # Triton wants an array for every pointer; where there are no pages another stands in, and is not read.
        **rows | ({} if state_cache.shape[0] else {"state_cache": ape}),
        **plan,
        **sizes,
    )
    caches = {"state_cache": state_cache} if saved else {}
    caches |= {"kv_cache": kv_cache} if windows else {}
    written = launch(
        _online_write_kernel,
        windows + saved,
        updates=tuple(caches),
        num_warps=config.head_dim // 128,
        constants={**shape, **store},
        compressed=compressed,
        states=states,
        **{"state_cache": states, **keys, "kv_cache": compressed, **caches},
        **plan,
        **sizes,
    )
    caches = dict(zip(caches, written, strict=True))
    return caches.get("state_cache", state_cache), caches.get("kv_cache", kv_cache)


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
        # Loads that wait for nothing but the run come first, and overlap.
        maximum, total, weighted = load_state(state_cache, before, channels, state_pages, HEAD_DIM, PAGE_ROWS)
        weight = tl.load(norm_weight + channels).to(tl.float32)
        for begin in range(0, count, LOADED):
            index = tl.arange(0, LOADED)
            kvs, scores = load_rows(
                kv_score, ape, first + begin, (position + begin + index) % RATIO, index, begin + index < count,
                channels, HEAD_DIM,
            )  # fmt: skip
            for i in range(tl.minimum(LOADED, count - begin)):
                row = first + begin + i
                here = position + begin + i
                slot = tl.load(slot_mapping + row)
                key_slot = tl.load(kv_slot_mapping + row)
                anchor = here // RATIO * RATIO
                in_table = anchor < table_rows
                cos, sin = rope_factors(cos_sin, tl.where(in_table, anchor, 0), HEAD_DIM, ROPE_DIM)
                if begin + i == 0:
                    # No warp writes a state before all have read the one that came before.
                    tl.debug_barrier()
                opens = here == anchor
                maximum, total, weighted = merge(
                    tl.where(opens, float("-inf"), maximum), tl.where(opens, 0.0, total),
                    tl.where(opens, 0.0, weighted), take_row(scores, index, i), 1.0, take_row(kvs, index, i),
                )  # fmt: skip
                if here - anchor == RATIO - 1:
                    if (key_slot >= 0) & (key_slot // KV_PAGE_ROWS < kv_pages) & in_table:
                        key = norm_rope(weighted / total, weight, cos, sin, EPS, HEAD_DIM, ROPE_DIM)
                        store_key(key, key_slot, kv_cache, kv_scale, FORMAT, HEAD_DIM, KV_PAGE_ROWS, PAGE_BYTES)
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
    closes = index < windows
    if closes:
        row, position, slot, in_batch, valid = closing_window(
            index, closing, tokens, kv_pages, table_rows, RATIO, KV_PAGE_ROWS, True
        )  # fmt: skip
        before = tl.load(window_slots + index)
    else:
        index -= windows
        row, position, slot, in_batch, valid = saved_token(index, saving, tokens, state_pages, PAGE_ROWS)
        # The state before lies in the same page.
        before = slot // PAGE_ROWS * PAGE_ROWS + (position - in_batch) % PAGE_ROWS
    if valid:
        before = tl.where(in_batch <= position % RATIO, before, -1)
        maximum, total, weighted = fold_window(
            kv_score, ape, state_cache, row, position, in_batch, before, channels, state_pages,
            RATIO, HEAD_DIM, PAGE_ROWS,
        )  # fmt: skip
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
        _, position, slot, _, valid = closing_window(
            index, closing, tokens, kv_pages, table_rows, RATIO, KV_PAGE_ROWS, True
        )  # fmt: skip
        if valid:
            c = tl.load(compressed + index * HEAD_DIM + channels)
            weight, cos, sin = key_factors(position, norm_weight, cos_sin, HEAD_DIM, RATIO, ROPE_DIM)
            key = norm_rope(c, weight, cos, sin, EPS, HEAD_DIM, ROPE_DIM)
            store_key(key, slot, kv_cache, kv_scale, FORMAT, HEAD_DIM, KV_PAGE_ROWS, PAGE_BYTES)
    else:
        index -= windows
        _, _, slot, _, valid = saved_token(index, saving, tokens, state_pages, PAGE_ROWS)
        if valid:
            maximum, total, weighted = load_state(states, index, channels, index + 1, HEAD_DIM, 1)
            store_state(state_cache, slot, channels, maximum, total, weighted, HEAD_DIM)


@triton.jit
def saved_token(index, saving, tokens, state_pages, PAGE_ROWS: tl.constexpr):
    """An entry of the plan: batch row, position, state slot, rows in the batch, and whether it may write."""
    row = tl.load(saving + index * 4)
    position = tl.load(saving + index * 4 + 1)
    slot = tl.load(saving + index * 4 + 2)
    in_batch = tl.load(saving + index * 4 + 3)
    valid = (row >= 0) & (row < tokens) & (slot >= 0) & (slot // PAGE_ROWS < state_pages)
    return row, position, slot, in_batch, valid & (position >= 0) & (in_batch >= 1)


@triton.jit
def fold_window(
    kv_score, ape, state_cache, row, position, in_batch, before, channels, state_pages,
    RATIO: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE_ROWS: tl.constexpr,
):  # fmt: skip
    """The state `[channels]` after a batch row: the rows of its window in the batch, and the state before those."""
    element = tl.arange(0, RATIO)
    back = position % RATIO - element
    if (in_batch >= RATIO) & (row >= RATIO - 1) & (position % RATIO == RATIO - 1):
        # The common case of a prefill: nothing to mask.
        kv, score = load_rows(kv_score, ape, row - (RATIO - 1), element, element, None, channels, HEAD_DIM)
    else:
        present = (back >= 0) & (back < in_batch) & (back <= row)
        kv, score = load_rows(kv_score, ape, row - position % RATIO, element, element, present, channels, HEAD_DIM)
    maximum, total, weighted = fold(kv, score)
    old_maximum, old_total, old_weighted = load_state(state_cache, before, channels, state_pages, HEAD_DIM, PAGE_ROWS)
    return merge(old_maximum, old_total, old_weighted, maximum, total, weighted)


@triton.jit
def load_rows(kv_score, ape, first, phase, index, present, channels, HEAD_DIM: tl.constexpr):
    """kv and biased score `[rows, channels]` of batch rows `first + index`; of those not present 0 and -inf."""
    rows = kv_score + first.to(tl.int64) * (2 * HEAD_DIM) + index * (2 * HEAD_DIM)
    at = by_fours(rows, channels[None, :])
    bias = ape + (phase * HEAD_DIM)[:, None] + channels[None, :]
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
