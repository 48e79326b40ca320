"""Triton: which rows a window has, and the softmax-sum over them."""

import triton
import triton.language as tl

# Elements of a window that one program holds: 32 KB of kv and score.
TILE = 4096


@triton.jit
def closing_window(
    index, closing, tokens, kv_pages, table_rows,
    RATIO: tl.constexpr, KV_PAGE_ROWS: tl.constexpr, FROM_BATCH: tl.constexpr,
):  # fmt: skip
    """An entry of the plan: batch row, position, cache slot, rows in the batch, and whether it may write.

    The plan is data and can be wrong.
    """
    row = tl.load(closing + index * 4)
    position = tl.load(closing + index * 4 + 1)
    slot = tl.load(closing + index * 4 + 2)
    in_batch = tl.load(closing + index * 4 + 3)
    valid = (row >= 0) & (row < tokens) & (slot >= 0) & (slot // KV_PAGE_ROWS < kv_pages)
    valid &= (position >= 0) & ((position + 1) % RATIO == 0) & (position // RATIO * RATIO < table_rows)
    if FROM_BATCH:
        valid &= in_batch >= 1  # the closing token itself
    return row, position, slot, in_batch, valid


@triton.jit
def in_cache(slots, pages, PAGE_ROWS: tl.constexpr):
    """Which slots are those of rows in a cache."""
    return (slots >= 0) & (slots // PAGE_ROWS < pages)


@triton.jit
def has_rows(slots, pages, PAGE_ROWS: tl.constexpr):
    """Whether any of a window's slots is in the state cache."""
    return tl.max(in_cache(slots, pages, PAGE_ROWS).to(tl.int32), axis=0) > 0


@triton.jit
def load_window(
    slots, channels, kv_score, ape, state_cache, row, in_batch, state_pages,
    RATIO: tl.constexpr, HEAD_DIM: tl.constexpr, OVERLAP: tl.constexpr, PAGE_ROWS: tl.constexpr,
    FROM_BATCH: tl.constexpr,
):  # fmt: skip
    """kv and biased score `[elements, channels]` of a window; absent rows have score -inf and kv 0.

    `slots` are the state slots of its rows, oldest first; of those in the batch they do not count.
    """
    WIDTH: tl.constexpr = HEAD_DIM * (2 if OVERLAP else 1)
    WINDOW: tl.constexpr = RATIO * (2 if OVERLAP else 1)
    element = tl.arange(0, WINDOW)
    # With overlap the older half of the window reads the first D columns, the newer half the last. By arithmetic: after
    # a tl.where Triton no longer sees that neighbouring channels are neighbours, and loads them one by one.
    half = element // RATIO * HEAD_DIM if OVERLAP else element * 0
    columns = half[:, None] + channels[None, :]
    batch_row = kv_score + (row - (WINDOW - 1) + element).to(tl.int64) * (2 * WIDTH)
    # Four channels a load, of either dtype: bfloat16 by eights would lie in other registers than the states' float32.
    batch = tl.multiple_of(batch_row[:, None] + columns, [1, 4 * (kv_score.dtype.element_ty.primitive_bitwidth // 8)])
    bias = ape + (element % RATIO * WIDTH)[:, None] + columns
    if FROM_BATCH and (in_batch >= WINDOW) & (row >= WINDOW - 1):
        # The common case of a prefill: nothing to look up, nothing to mask.
        kv = tl.load(batch).to(tl.float32)
        score = tl.load(batch + WIDTH).to(tl.float32) + tl.load(bias)
    else:
        back = WINDOW - 1 - element
        from_batch = (back < in_batch) & (back <= row)
        present = in_cache(slots, state_pages, PAGE_ROWS)
        state_row = state_cache + slots.to(tl.int64) * (2 * WIDTH)
        SAME: tl.constexpr = kv_score.dtype.element_ty == state_cache.dtype.element_ty
        if FROM_BATCH and SAME:
            state_row = tl.where(from_batch, batch_row, state_row)
            present = present | from_batch
        elif FROM_BATCH:
            present = present & ~from_batch
        state = tl.multiple_of(state_row[:, None] + columns, [1, 16])
        kv = tl.load(state, mask=present[:, None], other=0.0)
        score = tl.load(state + WIDTH, mask=present[:, None], other=float("-inf"))
        if FROM_BATCH:
            from_batch = from_batch[:, None]
            if not SAME:
                kv = tl.where(from_batch, tl.load(batch, mask=from_batch, other=0.0).to(tl.float32), kv)
                batch_score = tl.load(batch + WIDTH, mask=from_batch, other=0.0).to(tl.float32)
                score = tl.where(from_batch, batch_score, score)
            score += tl.load(bias, mask=from_batch, other=0.0)
    return kv, score


@triton.jit
def softmax_sum(kv, score):
    """Softmax over the rows of `[rows, channels]` for each channel, times kv."""
    weight = tl.exp(score - tl.max(score, axis=0)[None, :])
    return tl.sum(weight * kv, axis=0) / tl.sum(weight, axis=0)
