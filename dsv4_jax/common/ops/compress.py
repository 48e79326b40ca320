"""`compress` in Triton.

A program holds all rows of a window: for all channels of a short window (CSA, the indexer), for a block of them of a
long one (HCA), where few windows close and each is large. Short windows are finished in the same program. Long ones
need a second kernel, since RMSNorm reads all channels. Other programs of the same launch save states.
"""

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from dsv4_jax.common.ops import compress_online
from dsv4_jax.common.ops.helpers.aggregates import Cache, Plan, Rows, Saving, Shape, States
from dsv4_jax.common.ops.helpers.launch import launch
from dsv4_jax.common.ops.helpers.norm_rope import key_arguments, load_factors, norm_rope
from dsv4_jax.common.ops.helpers.quantize_store import store_key
from dsv4_jax.common.ops.helpers.window import TILE, closing_window, has_rows, window_sum
from dsv4_jax.common.ops.save_partial_states import save_rows
from dsv4_jax.common.sizes import count_work, measure_arrays


def implement(kv_score, ape, state_cache, kv_cache, metadata, norm_weight, cos_sin, kv_scale, *, config, save):
    """See `dsv4_jax.compress`; without `kv_score`, and save="none", every row comes from the state cache."""
    if config.state == "online":
        arrays = kv_score, ape, state_cache, kv_cache, metadata, norm_weight, cos_sin, kv_scale
        return compress_online.implement(*arrays, config=config)
    windows, saved = count_work(metadata, state_cache, kv_cache, cos_sin, save)
    if windows + saved == 0:
        return state_cache, kv_cache
    plan = {
        "closing": metadata.closing,
        "window_slots": metadata.window_slots,
        **measure_arrays(metadata, state_cache, kv_cache, cos_sin),
    }
    states = {
        "kv_score": kv_score,
        "ape": ape,
        "state_cache": state_cache,
        "saving": metadata.saving,
        "positions": metadata.positions,
        "slot_mapping": metadata.slot_mapping,
        "windows": windows,
        "saved": saved,
    }
    keys, store = key_arguments(kv_cache, norm_weight, cos_sin, kv_scale, config)
    shape = {
        "RATIO": config.compress_ratio,
        "WINDOW": config.window,
        "HEAD_DIM": config.head_dim,
        "WIDTH": config.width,
        "PAGE_ROWS": config.page_rows,
        "KV_PAGE_ROWS": config.kv_page_rows,
        "FROM_BATCH": kv_score is not None,
    }
    block = min(config.head_dim, max(16, TILE // config.window))
    is_short = block == config.head_dim
    expected = expected_windows(kv_score, metadata)
    load = {"EXPECTED": expected, "LOADING": how_to_load(expected, kv_score, is_short)}
    task = {"SAVE": save, "ROWS": min(4, config.compress_ratio) if save == "all" else 1}
    if is_short:
        updates = ("kv_cache",) if save == "none" else ("state_cache", "kv_cache")
        results = launch(
            _compress_store_kernel,
            _count_programs(windows, saved, 1, config.compress_ratio, **task),
            updates=updates,
            num_warps=max(1, config.head_dim // 128),
            constants={**shape, **store, **task, **load},
            **plan,
            **states,
            **keys,
        )
        return results if save != "none" else (state_cache, results[0])

    compressed = jax.ShapeDtypeStruct((max(1, windows), config.head_dim), jnp.float32)
    results = launch(
        _compress_kernel,
        _count_programs(windows, saved, config.head_dim // block, config.compress_ratio, **task),
        updates=() if save == "none" else ("state_cache",),
        outputs={"compressed": compressed},
        num_warps=4,
        constants={**shape, **task, **load, "BLOCK": block},
        **plan,
        **states,
    )
    *updated, compressed = results
    state_cache = updated[0] if updated else state_cache
    if windows == 0:
        return state_cache, kv_cache
    (kv_cache,) = launch(
        _store_kernel,
        windows,
        updates=("kv_cache",),
        num_warps=4,
        constants={**shape, **store},
        **plan,
        **keys,
        compressed=compressed,
    )
    return state_cache, kv_cache


def implement_store(*args, config):
    """See `dsv4_jax.compress_norm_rope_store`: the same kernels, with every row taken from the state cache."""
    _, kv_cache = implement(None, None, *args, config=config, save="none")
    return (kv_cache,)


def expected_windows(kv_score, metadata) -> str:
    """Which windows most of a batch are, by its shapes alone, as `window_sum` names them."""
    if kv_score is None:
        return "any"
    if metadata.closing.shape[0] >= kv_score.shape[0]:
        return "last"  # usually a decode of one token per request; empty requests count too
    return "whole" if metadata.prefill else "any"


def how_to_load(expected: str, kv_score, is_short: bool) -> str:
    """The fastest `LOADING` of `window_sum`, measured on an H200."""
    if expected == "last":
        return "pieces"
    if expected == "whole":
        if kv_score.dtype.itemsize == 2:
            return "pieces"
        # Loads of float32 need the registers that pieces would save.
        return "ahead" if is_short else "branch"
    return "branch"


@triton.jit
def _compress_store_kernel(
    closing, window_slots, kv_score, ape, state_cache, saving, positions, slot_mapping,
    kv_cache, norm_weight, cos_sin, kv_scale,
    tokens, state_pages, kv_pages, table_rows, windows, saved,
    RATIO: tl.constexpr, WINDOW: tl.constexpr, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr,
    PAGE_ROWS: tl.constexpr, KV_PAGE_ROWS: tl.constexpr, FROM_BATCH: tl.constexpr,
    FORMAT: tl.constexpr, PAGE_BYTES: tl.constexpr, EPS: tl.constexpr, ROPE_DIM: tl.constexpr,
    SAVE: tl.constexpr, ROWS: tl.constexpr, EXPECTED: tl.constexpr, LOADING: tl.constexpr,
):  # fmt: skip
    """Short windows, from rows to stored keys; then states."""
    shape = Shape(RATIO, WINDOW, HEAD_DIM, WIDTH, PAGE_ROWS, KV_PAGE_ROWS, FROM_BATCH)
    plan = Plan(closing, tokens, kv_pages, table_rows)
    rows = Rows(kv_score, ape, state_cache, state_pages)
    cache = Cache(kv_cache, kv_scale, FORMAT, HEAD_DIM, KV_PAGE_ROWS, PAGE_BYTES)
    is_window, index, _, first = _task(windows, saved, 1, RATIO, SAVE, ROWS)
    if is_window:
        # Issue this load together with the plan's, before knowing whether it is needed.
        slots_at = window_slots + index * WINDOW
        slots = tl.load(slots_at + tl.arange(0, WINDOW))
        entry = closing_window(plan, index, shape)
        valid = entry.valid
        if not FROM_BATCH:
            valid &= has_rows(slots, state_pages, PAGE_ROWS)
        if valid | (LOADING == "ahead"):
            factors = load_factors(norm_weight, cos_sin, tl.where(valid, entry.position, 0), shape, ROPE_DIM)
            c = window_sum(rows, entry, slots_at, slots, tl.arange(0, HEAD_DIM), shape, EXPECTED, LOADING)
            if valid:
                store_key(norm_rope(c, factors, EPS, HEAD_DIM, ROPE_DIM), entry.slot, cache)
    elif SAVE != "none":
        _save(first, rows, Saving(saving, positions, slot_mapping, saved, tokens, SAVE, ROWS), shape)


@triton.jit
def _compress_kernel(
    closing, window_slots, kv_score, ape, state_cache, saving, positions, slot_mapping, compressed,
    tokens, state_pages, kv_pages, table_rows, windows, saved,
    RATIO: tl.constexpr, WINDOW: tl.constexpr, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr,
    PAGE_ROWS: tl.constexpr, KV_PAGE_ROWS: tl.constexpr, FROM_BATCH: tl.constexpr,
    SAVE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, EXPECTED: tl.constexpr, LOADING: tl.constexpr,
):  # fmt: skip
    """The softmax-sum of one block of a long window's channels, into `compressed[window, HEAD_DIM]`; then states."""
    shape = Shape(RATIO, WINDOW, HEAD_DIM, WIDTH, PAGE_ROWS, KV_PAGE_ROWS, FROM_BATCH)
    plan = Plan(closing, tokens, kv_pages, table_rows)
    rows = Rows(kv_score, ape, state_cache, state_pages)
    is_window, index, block, first = _task(windows, saved, HEAD_DIM // BLOCK, RATIO, SAVE, ROWS)
    if is_window:
        # Issue this load together with the plan's, before knowing whether it is needed.
        slots_at = window_slots + index * WINDOW
        slots = tl.load(slots_at + tl.arange(0, WINDOW))
        channels = block * BLOCK + tl.arange(0, BLOCK)
        entry = closing_window(plan, index, shape)
        if entry.valid:
            c = window_sum(rows, entry, slots_at, slots, channels, shape, EXPECTED, LOADING)
            tl.store(compressed + index * HEAD_DIM + channels, c)
    elif SAVE != "none":
        _save(first, rows, Saving(saving, positions, slot_mapping, saved, tokens, SAVE, ROWS), shape)


@triton.jit
def _store_kernel(
    closing, window_slots, kv_cache, norm_weight, cos_sin, kv_scale, compressed,
    tokens, state_pages, kv_pages, table_rows,
    RATIO: tl.constexpr, WINDOW: tl.constexpr, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr,
    PAGE_ROWS: tl.constexpr, KV_PAGE_ROWS: tl.constexpr, FROM_BATCH: tl.constexpr,
    FORMAT: tl.constexpr, PAGE_BYTES: tl.constexpr, EPS: tl.constexpr, ROPE_DIM: tl.constexpr,
):  # fmt: skip
    """Finishes a compressed window and stores its key."""
    shape = Shape(RATIO, WINDOW, HEAD_DIM, WIDTH, PAGE_ROWS, KV_PAGE_ROWS, FROM_BATCH)
    index = tl.program_id(0)
    # Issue this load before the plan's, which says whether it is needed.
    c = tl.load(compressed + index * HEAD_DIM + tl.arange(0, HEAD_DIM))
    entry = closing_window(Plan(closing, tokens, kv_pages, table_rows), index, shape)
    valid = entry.valid
    if not FROM_BATCH:
        slots = tl.load(window_slots + index * WINDOW + tl.arange(0, WINDOW))
        valid &= has_rows(slots, state_pages, PAGE_ROWS)
    if valid:
        factors = load_factors(norm_weight, cos_sin, entry.position, shape, ROPE_DIM)
        cache = Cache(kv_cache, kv_scale, FORMAT, HEAD_DIM, KV_PAGE_ROWS, PAGE_BYTES)
        store_key(norm_rope(c, factors, EPS, HEAD_DIM, ROPE_DIM), entry.slot, cache)


def _count_programs(windows, saved, blocks, ratio, SAVE, ROWS):
    """How many programs `_task` gives work to."""
    if SAVE == "all":
        return max(windows, -(-saved // ratio)) * (blocks + ratio // ROWS)
    return windows * blocks + saved


@triton.jit
def _task(windows, saved, BLOCKS: tl.constexpr, RATIO: tl.constexpr, SAVE: tl.constexpr, ROWS: tl.constexpr):
    """What this program does: whether it takes a block of a window, which window, which block; else the first row that
    it saves."""
    pid = tl.program_id(0)
    if SAVE == "all":
        # The programs of each window are followed by those that save the rows of one more: the L2 cache still has them.
        UNIT: tl.constexpr = BLOCKS + RATIO // ROWS
        index = pid // UNIT
        block = pid % UNIT
        is_window = (block < BLOCKS) & (index < windows)
        first = tl.where(block < BLOCKS, saved, index * RATIO + (block - BLOCKS) * ROWS)
    else:
        index = pid // BLOCKS
        block = pid % BLOCKS
        is_window = index < windows
        first = pid - windows * BLOCKS
    return is_window, index, block, first


@triton.jit
def _save(first, rows, plan, shape):
    """Saves the states from entry `first` on."""
    entry = first + tl.arange(0, plan.ROWS)
    there = entry < plan.saved
    if plan.SAVE == "tail":
        row = tl.load(plan.saving + entry * 3, mask=there, other=-1)
        position = tl.load(plan.saving + entry * 3 + 1, mask=there, other=-1)
        slot = tl.load(plan.saving + entry * 3 + 2, mask=there, other=-1)
    else:
        row = entry
        position = tl.load(plan.positions + entry, mask=there, other=-1)
        slot = tl.load(plan.slot_mapping + entry, mask=there, other=-1)
    present = there & (row >= 0) & (row < plan.tokens)
    kv, score = rows.kv_score, rows.kv_score + shape.WIDTH
    states = States(rows.ape, rows.state_cache, rows.state_pages, shape.RATIO, shape.WIDTH, shape.PAGE_ROWS)
    save_rows(row, present, position, slot, kv, score, 2 * shape.WIDTH, states)
