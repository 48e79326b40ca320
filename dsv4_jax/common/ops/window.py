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
def window_rows(
    element, row, in_batch, window_slots, state_pages,
    WINDOW: tl.constexpr, PAGE_ROWS: tl.constexpr, FROM_BATCH: tl.constexpr,
):  # fmt: skip
    """Which elements of a window are in the batch, and the state slots of the others, -1 where there is none."""
    back = WINDOW - 1 - element
    slots = tl.load(window_slots + element)
    slots = tl.where(slots // PAGE_ROWS < state_pages, slots, -1)
    if FROM_BATCH:
        from_batch = (back < in_batch) & (back <= row)
        slots = tl.where(from_batch, -1, slots)
    else:
        from_batch = back < 0
    return from_batch, slots


@triton.jit
def load_window(
    element, channels, kv_score, ape, state_cache, row, in_batch, window_slots, state_pages,
    RATIO: tl.constexpr, HEAD_DIM: tl.constexpr, OVERLAP: tl.constexpr, PAGE_ROWS: tl.constexpr,
    FROM_BATCH: tl.constexpr,
):  # fmt: skip
    """kv and biased score `[elements, channels]` of a window; absent rows have score -inf and kv 0."""
    WIDTH: tl.constexpr = HEAD_DIM * (2 if OVERLAP else 1)
    WINDOW: tl.constexpr = RATIO * (2 if OVERLAP else 1)
    # With overlap the older half of the window reads the first D columns, the newer half the last.
    half = tl.where(element >= RATIO, HEAD_DIM, 0) if OVERLAP else element * 0
    columns = half[:, None] + channels[None, :]
    batch = kv_score + (row - (WINDOW - 1)).to(tl.int64) * (2 * WIDTH) + (element * (2 * WIDTH))[:, None] + columns
    bias = ape + (element % RATIO * WIDTH)[:, None] + columns
    if FROM_BATCH and (in_batch >= WINDOW) & (row >= WINDOW - 1):
        # The common case of a prefill: nothing to look up, nothing to mask.
        kv = tl.load(batch).to(tl.float32)
        score = tl.load(batch + WIDTH).to(tl.float32) + tl.load(bias)
    else:
        from_batch, slots = window_rows(
            element, row, in_batch, window_slots, state_pages, WINDOW, PAGE_ROWS, FROM_BATCH
        )  # fmt: skip
        from_batch = from_batch[:, None]
        in_state = (slots >= 0)[:, None]
        state = state_cache + slots.to(tl.int64)[:, None] * (2 * WIDTH) + columns
        if FROM_BATCH and kv_score.dtype.element_ty == state_cache.dtype.element_ty:
            state = tl.where(from_batch, batch, state)
            in_state = in_state | from_batch
        kv = tl.load(state, mask=in_state, other=0.0)
        score = tl.load(state + WIDTH, mask=in_state, other=float("-inf"))
        if FROM_BATCH:
            if kv_score.dtype.element_ty != state_cache.dtype.element_ty:
                kv = tl.where(from_batch, tl.load(batch, mask=from_batch, other=0.0).to(tl.float32), kv)
                batch_score = tl.load(batch + WIDTH, mask=from_batch, other=0.0).to(tl.float32)
                score = tl.where(from_batch, batch_score, score)
            score += tl.load(bias, mask=from_batch, other=0.0)
    return kv, score


@triton.jit
def has_rows(window_slots, state_pages, WINDOW: tl.constexpr, PAGE_ROWS: tl.constexpr):
    """Whether any row of a window is in the state cache."""
    slots = tl.load(window_slots + tl.arange(0, WINDOW))
    return tl.max(((slots >= 0) & (slots // PAGE_ROWS < state_pages)).to(tl.int32), axis=0) > 0


@triton.jit
def softmax_sum(kv, score):
    """Softmax over the rows of `[rows, channels]` for each channel, times kv."""
    weight = tl.exp(score - tl.max(score, axis=0)[None, :])
    return tl.sum(weight * kv, axis=0) / tl.sum(weight, axis=0)
