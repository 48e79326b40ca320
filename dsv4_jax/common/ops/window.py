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
    slots, channels, kv_score, ape, state_cache, row, in_batch, state_pages, valid,
    RATIO: tl.constexpr, HEAD_DIM: tl.constexpr, OVERLAP: tl.constexpr, PAGE_ROWS: tl.constexpr,
    FROM_BATCH: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """kv and biased score `[elements, channels]` of a window; absent rows have score -inf and kv 0.

    `slots` are the state slots of its rows, oldest first; of those in the batch they do not count. With `AHEAD` the
    loads from the batch wait for no branch, and the window need not be valid.
    """
    WIDTH: tl.constexpr = HEAD_DIM * (2 if OVERLAP else 1)
    WINDOW: tl.constexpr = RATIO * (2 if OVERLAP else 1)
    element = tl.arange(0, WINDOW)
    # With overlap the older half of the window reads the first D columns, the newer half the last. By arithmetic: after
    # a tl.where Triton no longer sees that neighbouring channels are neighbours, and loads them one by one.
    half = element // RATIO * HEAD_DIM if OVERLAP else element * 0
    columns = half[:, None] + channels[None, :]
    bias = ape + (element % RATIO * WIDTH)[:, None] + columns
    # The common case of a prefill: nothing to look up.
    whole = valid & (in_batch >= WINDOW) & (row >= WINDOW - 1)
    if AHEAD:
        batch = by_fours(_rows(kv_score, tl.where(whole, row - (WINDOW - 1), 0) + element, WIDTH), columns)
        wanted = (element >= 0)[:, None] & whole
        kv = tl.load(batch, mask=wanted, other=0.0).to(tl.float32)
        score = tl.load(batch + WIDTH, mask=wanted, other=0.0).to(tl.float32) + tl.load(bias)
        if valid & (whole == 0):
            kv, score = _load_mixed(
                slots, element, columns, channels, kv_score, ape, bias, state_cache, row, in_batch, state_pages,
                RATIO, HEAD_DIM, OVERLAP, PAGE_ROWS, FROM_BATCH,
            )  # fmt: skip
    elif FROM_BATCH and whole:
        batch = by_fours(_rows(kv_score, row - (WINDOW - 1) + element, WIDTH), columns)
        kv = tl.load(batch).to(tl.float32)
        score = tl.load(batch + WIDTH).to(tl.float32) + tl.load(bias)
    else:
        kv, score = _load_mixed(
            slots, element, columns, channels, kv_score, ape, bias, state_cache, row, in_batch, state_pages,
            RATIO, HEAD_DIM, OVERLAP, PAGE_ROWS, FROM_BATCH,
        )  # fmt: skip
    return kv, score


@triton.jit
def _load_mixed(
    slots, element, columns, channels, kv_score, ape, bias, state_cache, row, in_batch, state_pages,
    RATIO: tl.constexpr, HEAD_DIM: tl.constexpr, OVERLAP: tl.constexpr, PAGE_ROWS: tl.constexpr,
    FROM_BATCH: tl.constexpr,
):  # fmt: skip
    """Rows from the batch, from the state cache, or from nowhere."""
    WIDTH: tl.constexpr = HEAD_DIM * (2 if OVERLAP else 1)
    WINDOW: tl.constexpr = RATIO * (2 if OVERLAP else 1)
    SAME: tl.constexpr = kv_score.dtype.element_ty == state_cache.dtype.element_ty
    present = in_cache(slots, state_pages, PAGE_ROWS)
    rows = _rows(state_cache, slots, WIDTH)
    back = WINDOW - 1 - element
    if not FROM_BATCH:
        kv, score = _load_states(rows, columns, present, WIDTH)
    elif in_batch == 1:
        # A decode: the last row alone is in the batch.
        kv, score = _load_states(rows, columns, present & (back > 0), WIDTH)
        last = WIDTH - HEAD_DIM + channels
        last_row = _rows(kv_score, row, WIDTH) + last
        last_kv = tl.load(last_row).to(tl.float32)
        last_score = tl.load(last_row + WIDTH).to(tl.float32) + tl.load(ape + (RATIO - 1) * WIDTH + last)
        kv = tl.where((back > 0)[:, None], kv, last_kv[None, :])
        score = tl.where((back > 0)[:, None], score, last_score[None, :])
    else:
        from_batch = (back < in_batch) & (back <= row)
        batch_rows = _rows(kv_score, row - back, WIDTH)
        if SAME:
            # One load serves both.
            rows = tl.where(from_batch, batch_rows, rows)
            kv, score = _load_states(rows, columns, present | from_batch, WIDTH)
        else:
            kv, score = _load_states(rows, columns, present & (from_batch == 0), WIDTH)
            batch = by_fours(batch_rows, columns)
            batch_kv = tl.load(batch, mask=from_batch[:, None], other=0.0).to(tl.float32)
            batch_score = tl.load(batch + WIDTH, mask=from_batch[:, None], other=0.0).to(tl.float32)
            kv = tl.where(from_batch[:, None], batch_kv, kv)
            score = tl.where(from_batch[:, None], batch_score, score)
        score += tl.load(bias, mask=from_batch[:, None], other=0.0)
    return kv, score


@triton.jit
def _load_states(rows, columns, present, WIDTH: tl.constexpr):
    at = by_fours(rows, columns)
    kv = tl.load(at, mask=present[:, None], other=0.0)
    score = tl.load(at + WIDTH, mask=present[:, None], other=float("-inf"))
    return kv, score


@triton.jit
def _rows(array, index, WIDTH: tl.constexpr):
    """Where rows of kv and score begin."""
    return array + index.to(tl.int64) * (2 * WIDTH)


@triton.jit
def by_fours(rows, columns):
    """Where columns of rows lie, loaded four at a time: bfloat16 by eights would lie in other threads than float32."""
    return tl.multiple_of(rows[:, None] + columns, [1, 4 * (rows.dtype.element_ty.primitive_bitwidth // 8)])
