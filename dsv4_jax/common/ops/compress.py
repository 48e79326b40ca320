"""`compress` in Triton.

A program holds all rows of a window, for all channels of a short window (CSA, the indexer), for a block of them of a
long one (HCA), where few windows close and each is large. Short windows are finished in the same program; long ones by
a second kernel, since RMSNorm wants all channels. Other programs of the same launch save states.
"""

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from dsv4_jax.common.ops import compress_online
from dsv4_jax.common.ops.helpers.launch import launch
from dsv4_jax.common.ops.helpers.norm_rope import key_arguments, key_factors, norm_rope
from dsv4_jax.common.ops.helpers.quantize_store import store_key
from dsv4_jax.common.ops.helpers.window import TILE, closing_window, has_rows, window_sum
from dsv4_jax.common.ops.save_partial_states import save_rows


def implement(kv_score, ape, state_cache, kv_cache, metadata, norm_weight, cos_sin, kv_scale, *, config, save):
    """See `dsv4_jax.compress`; without `kv_score`, and save="none", every row comes from the state cache."""
    if config.state == "online":
        arrays = kv_score, ape, state_cache, kv_cache, metadata, norm_weight, cos_sin, kv_scale
        return compress_online.implement(*arrays, config=config)
    tokens = metadata.positions.shape[0]
    windows = metadata.closing.shape[0] if kv_cache.shape[0] and cos_sin.shape[0] else 0
    saved = {"all": tokens, "tail": metadata.saving.shape[0], "none": 0}[save] if state_cache.shape[0] else 0
    if windows + saved == 0:
        return state_cache, kv_cache
    from_batch = kv_score is not None
    window = {
        "closing": metadata.closing,
        "window_slots": metadata.window_slots,
        "tokens": tokens,
        "state_pages": state_cache.shape[0],
        "kv_pages": kv_cache.shape[0],
        "table_rows": cos_sin.shape[0],
    }
    states = {
        # Triton wants an array for every pointer; state_cache stands in for what is not read.
        "kv_score": kv_score if from_batch else state_cache,
        "ape": ape if from_batch else state_cache,
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
        "HEAD_DIM": config.head_dim,
        "OVERLAP": config.overlap,
        "PAGE_ROWS": config.page_rows,
        "KV_PAGE_ROWS": config.kv_page_rows,
        "FROM_BATCH": from_batch,
    }
    block = min(config.head_dim, max(16, TILE // config.window))
    task = {"SAVE": save, "ROWS": min(4, config.compress_ratio) if save == "all" else 1}
    path = _path(kv_score, metadata, block == config.head_dim)
    if block == config.head_dim:
        updates = ("kv_cache",) if save == "none" else ("state_cache", "kv_cache")
        results = launch(
            _compress_store_kernel,
            _programs(windows, saved, 1, config.compress_ratio, **task),
            updates=updates,
            num_warps=max(1, config.head_dim // 128),
            constants={**shape, **store, **task, "PATH": path},
            **window,
            **states,
            **keys,
        )
        return results if save != "none" else (state_cache, results[0])

    compressed = jax.ShapeDtypeStruct((max(1, windows), config.head_dim), jnp.float32)
    results = launch(
        _compress_kernel,
        _programs(windows, saved, config.head_dim // block, config.compress_ratio, **task),
        updates=() if save == "none" else ("state_cache",),
        outputs={"compressed": compressed},
        num_warps=4,
        constants={**shape, **task, "BLOCK": block, "PATH": path},
        **window,
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
        **window,
        **keys,
        compressed=compressed,
    )
    return state_cache, kv_cache


def implement_store(*args, config):
    """See `dsv4_jax.compress_norm_rope_store`: the same kernels, with every row taken from the state cache."""
    _, kv_cache = implement(None, None, *args, config=config, save="none")
    return (kv_cache,)


@triton.jit
def _compress_store_kernel(
    closing, window_slots, kv_score, ape, state_cache, saving, positions, slot_mapping,
    kv_cache, norm_weight, cos_sin, kv_scale,
    tokens, state_pages, kv_pages, table_rows, windows, saved,
    RATIO: tl.constexpr, HEAD_DIM: tl.constexpr, OVERLAP: tl.constexpr, PAGE_ROWS: tl.constexpr,
    KV_PAGE_ROWS: tl.constexpr, FROM_BATCH: tl.constexpr, FORMAT: tl.constexpr, PAGE_BYTES: tl.constexpr,
    EPS: tl.constexpr, ROPE_DIM: tl.constexpr, SAVE: tl.constexpr, ROWS: tl.constexpr, PATH: tl.constexpr,
):  # fmt: skip
    WIDTH: tl.constexpr = HEAD_DIM * (2 if OVERLAP else 1)
    WINDOW: tl.constexpr = RATIO * (2 if OVERLAP else 1)
    is_window, index, _, first = _task(windows, saved, 1, RATIO, SAVE, ROWS)
    if is_window:
        # At once with the plan, whether needed or not.
        slots_at = window_slots + index * WINDOW
        slots = tl.load(slots_at + tl.arange(0, WINDOW))
        row, position, slot, in_batch, valid = closing_window(
            index, closing, tokens, kv_pages, table_rows, RATIO, KV_PAGE_ROWS, FROM_BATCH
        )  # fmt: skip
        if not FROM_BATCH:
            valid &= has_rows(slots, state_pages, PAGE_ROWS)
        if valid | (PATH == "ahead"):
            weight, cos, sin = key_factors(
                tl.where(valid, position, 0), norm_weight, cos_sin, HEAD_DIM, RATIO, ROPE_DIM
            )  # fmt: skip
            c = window_sum(
                slots_at, slots, tl.arange(0, HEAD_DIM), kv_score, ape, state_cache, row, in_batch, state_pages, valid,
                RATIO, HEAD_DIM, OVERLAP, PAGE_ROWS, FROM_BATCH, PATH,
            )  # fmt: skip
            if valid:
                key = norm_rope(c, weight, cos, sin, EPS, HEAD_DIM, ROPE_DIM)
                store_key(key, slot, kv_cache, kv_scale, FORMAT, HEAD_DIM, KV_PAGE_ROWS, PAGE_BYTES)
    else:
        _save(
            first, kv_score, ape, positions, slot_mapping, saving, state_cache, tokens, saved, state_pages,
            RATIO, WIDTH, PAGE_ROWS, SAVE, ROWS,
        )  # fmt: skip


@triton.jit
def _compress_kernel(
    closing, window_slots, kv_score, ape, state_cache, saving, positions, slot_mapping, compressed,
    tokens, state_pages, kv_pages, table_rows, windows, saved,
    RATIO: tl.constexpr, HEAD_DIM: tl.constexpr, OVERLAP: tl.constexpr, PAGE_ROWS: tl.constexpr,
    KV_PAGE_ROWS: tl.constexpr, FROM_BATCH: tl.constexpr, SAVE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    PATH: tl.constexpr,
):  # fmt: skip
    """Softmax-sum of one block of a window's channels, into `compressed[window, HEAD_DIM]`."""
    WIDTH: tl.constexpr = HEAD_DIM * (2 if OVERLAP else 1)
    WINDOW: tl.constexpr = RATIO * (2 if OVERLAP else 1)
    BLOCKS: tl.constexpr = HEAD_DIM // BLOCK
    is_window, index, block, first = _task(windows, saved, BLOCKS, RATIO, SAVE, ROWS)
    if is_window:
        # At once with the plan, whether needed or not.
        slots_at = window_slots + index * WINDOW
        slots = tl.load(slots_at + tl.arange(0, WINDOW))
        channels = block * BLOCK + tl.arange(0, BLOCK)
        row, _, _, in_batch, valid = closing_window(
            index, closing, tokens, kv_pages, table_rows, RATIO, KV_PAGE_ROWS, FROM_BATCH
        )  # fmt: skip
        if valid:
            c = window_sum(
                slots_at, slots, channels, kv_score, ape, state_cache, row, in_batch, state_pages, valid,
                RATIO, HEAD_DIM, OVERLAP, PAGE_ROWS, FROM_BATCH, PATH,
            )  # fmt: skip
            tl.store(compressed + index * HEAD_DIM + channels, c)
    else:
        _save(
            first, kv_score, ape, positions, slot_mapping, saving, state_cache, tokens, saved, state_pages,
            RATIO, WIDTH, PAGE_ROWS, SAVE, ROWS,
        )  # fmt: skip


@triton.jit
def _store_kernel(
    closing, window_slots, kv_cache, norm_weight, cos_sin, kv_scale, compressed,
    tokens, state_pages, kv_pages, table_rows,
    RATIO: tl.constexpr, HEAD_DIM: tl.constexpr, OVERLAP: tl.constexpr, PAGE_ROWS: tl.constexpr,
    KV_PAGE_ROWS: tl.constexpr, FROM_BATCH: tl.constexpr, FORMAT: tl.constexpr, PAGE_BYTES: tl.constexpr,
    EPS: tl.constexpr, ROPE_DIM: tl.constexpr,
):  # fmt: skip
    """Finishes a compressed window and stores its key."""
    WINDOW: tl.constexpr = RATIO * (2 if OVERLAP else 1)
    index = tl.program_id(0)
    # Ahead of the plan, which says whether it counts.
    c = tl.load(compressed + index * HEAD_DIM + tl.arange(0, HEAD_DIM))
    _, position, slot, _, valid = closing_window(
        index, closing, tokens, kv_pages, table_rows, RATIO, KV_PAGE_ROWS, FROM_BATCH
    )  # fmt: skip
    if not FROM_BATCH:
        slots = tl.load(window_slots + index * WINDOW + tl.arange(0, WINDOW))
        valid &= has_rows(slots, state_pages, PAGE_ROWS)
    if valid:
        weight, cos, sin = key_factors(position, norm_weight, cos_sin, HEAD_DIM, RATIO, ROPE_DIM)
        key = norm_rope(c, weight, cos, sin, EPS, HEAD_DIM, ROPE_DIM)
        store_key(key, slot, kv_cache, kv_scale, FORMAT, HEAD_DIM, KV_PAGE_ROWS, PAGE_BYTES)


def _path(kv_score, metadata, is_short):
    """What `window_sum` is to be fast for. Measured on an H200."""
    if kv_score is None:
        return "any"
    if metadata.closing.shape[0] >= kv_score.shape[0]:
        return "last"  # as a rule, a decode of one token a request; empty requests count too
    if not metadata.prefill:
        return "any"
    if kv_score.dtype.itemsize == 2:
        return "whole"
    # float32 needs its registers for loads.
    return "ahead" if is_short else "any"


def _programs(windows, saved, blocks, ratio, SAVE, ROWS):
    """How many programs `_task` gives work to."""
    if SAVE == "all":
        return max(windows, -(-saved // ratio)) * (blocks + ratio // ROWS)
    return windows * blocks + saved


@triton.jit
def _task(windows, saved, BLOCKS: tl.constexpr, RATIO: tl.constexpr, SAVE: tl.constexpr, ROWS: tl.constexpr):
    """What this program does: whether a block of a window, which window, which block; else, the first row it saves."""
    pid = tl.program_id(0)
    if SAVE == "all":
        # After each window's programs those that save the rows of one more: the L2 cache still has them.
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
def _save(
    first, kv_score, ape, positions, slot_mapping, saving, state_cache, tokens, saved, state_pages,
    RATIO: tl.constexpr, WIDTH: tl.constexpr, PAGE_ROWS: tl.constexpr, SAVE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Saves the states of the batch rows that the plan names (`SAVE="tail"`), or of every one (`"all"`)."""
    entry = first + tl.arange(0, ROWS)
    there = entry < saved
    if SAVE == "tail":
        row = tl.load(saving + entry * 3, mask=there, other=-1)
        position = tl.load(saving + entry * 3 + 1, mask=there, other=-1)
        slot = tl.load(saving + entry * 3 + 2, mask=there, other=-1)
    else:
        row = entry
        position = tl.load(positions + entry, mask=there, other=-1)
        slot = tl.load(slot_mapping + entry, mask=there, other=-1)
    present = there & (row >= 0) & (row < tokens)
    save_rows(
        row, present, position, slot, kv_score, kv_score + WIDTH, 2 * WIDTH, ape, state_cache, state_pages,
        RATIO, WIDTH, PAGE_ROWS,
    )  # fmt: skip
