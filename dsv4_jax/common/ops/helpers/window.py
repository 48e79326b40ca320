"""Triton: which rows a window has, and the softmax-sum over them."""

import triton
import triton.language as tl

from dsv4_jax.common.ops.helpers.softmax import fold, merge, softmax_sum

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
def window_sum(
    slots_at, slots, channels, kv_score, ape, state_cache, row, in_batch, state_pages, valid,
    RATIO: tl.constexpr, HEAD_DIM: tl.constexpr, OVERLAP: tl.constexpr, PAGE_ROWS: tl.constexpr,
    FROM_BATCH: tl.constexpr, PATH: tl.constexpr,
):  # fmt: skip
    """The softmax-sum `[channels]` of a valid window; with `PATH="ahead"` it need not be valid.

    `slots` are the state slots of its rows, oldest first, and `slots_at` where they lie; of rows in the batch they do
    not count. `PATH` only says what is fast:
      "whole": windows all in the batch; "last": those with only their last row there. Others go by pieces, for which
        the kernel needs fewer registers. Both are for `FROM_BATCH`.
      "ahead": windows all in the batch, whose loads wait for no branch.
      "any": all of them.
    """
    WINDOW: tl.constexpr = RATIO * (2 if OVERLAP else 1)
    element = tl.arange(0, WINDOW)
    columns, bias = _columns(element, channels, ape, RATIO, HEAD_DIM, OVERLAP)
    whole = (in_batch >= WINDOW) & (row >= WINDOW - 1)
    first = row - (WINDOW - 1)
    if PATH == "last" or PATH == "whole":
        tl.static_assert(FROM_BATCH)
        if (in_batch == 1) if PATH == "last" else whole:
            if PATH == "last":
                kv, score = _load_decode(
                    slots, element, columns, channels, kv_score, ape, state_cache, row, state_pages,
                    RATIO, HEAD_DIM, OVERLAP, PAGE_ROWS,
                )  # fmt: skip
            else:
                kv, score = _load_batch(kv_score, first + element, columns, bias, None, RATIO, HEAD_DIM, OVERLAP)
            c = softmax_sum(kv, score)
        else:
            c = _sum_by_pieces(
                slots_at, channels, kv_score, ape, state_cache, row, in_batch, state_pages,
                RATIO, HEAD_DIM, OVERLAP, PAGE_ROWS,
            )  # fmt: skip
    else:
        if PATH == "ahead":
            whole &= valid
            wanted = (element >= 0)[:, None] & whole
            rows = tl.where(whole, first, 0) + element
            kv, score = _load_batch(kv_score, rows, columns, bias, wanted, RATIO, HEAD_DIM, OVERLAP)
            if valid & (whole == 0):
                kv, score = _load_mixed(
                    slots, element, columns, channels, kv_score, ape, bias, state_cache, row, in_batch, state_pages,
                    RATIO, HEAD_DIM, OVERLAP, PAGE_ROWS, FROM_BATCH,
                )  # fmt: skip
        elif FROM_BATCH and whole:
            kv, score = _load_batch(kv_score, first + element, columns, bias, None, RATIO, HEAD_DIM, OVERLAP)
        else:
            kv, score = _load_mixed(
                slots, element, columns, channels, kv_score, ape, bias, state_cache, row, in_batch, state_pages,
                RATIO, HEAD_DIM, OVERLAP, PAGE_ROWS, FROM_BATCH,
            )  # fmt: skip
        c = softmax_sum(kv, score)
    return c


@triton.jit
def _sum_by_pieces(
    slots_at, channels, kv_score, ape, state_cache, row, in_batch, state_pages,
    RATIO: tl.constexpr, HEAD_DIM: tl.constexpr, OVERLAP: tl.constexpr, PAGE_ROWS: tl.constexpr,
):  # fmt: skip
    """The softmax-sum of any window, some rows at a time."""
    WINDOW: tl.constexpr = RATIO * (2 if OVERLAP else 1)
    PIECE: tl.constexpr = max(1, min(16, WINDOW // 2))
    total = tl.zeros_like(channels).to(tl.float32)
    weighted = total
    maximum = total - float("inf")
    for begin in range(0, WINDOW, PIECE):
        element = begin + tl.arange(0, PIECE)
        columns, bias = _columns(element, channels, ape, RATIO, HEAD_DIM, OVERLAP)
        kv, score = _load_mixed(
            tl.load(slots_at + element), element, columns, channels, kv_score, ape, bias, state_cache, row, in_batch,
            state_pages, RATIO, HEAD_DIM, OVERLAP, PAGE_ROWS, True,
        )  # fmt: skip
        piece_maximum, piece_total, piece_weighted = fold(kv, score)
        maximum, total, weighted = merge(maximum, total, weighted, piece_maximum, piece_total, piece_weighted)
    return weighted / total


@triton.jit
def _columns(element, channels, ape, RATIO: tl.constexpr, HEAD_DIM: tl.constexpr, OVERLAP: tl.constexpr):
    """Columns `[elements, channels]` of kv, and where the position bias of each lies."""
    WIDTH: tl.constexpr = HEAD_DIM * (2 if OVERLAP else 1)
    # With overlap the older half of the window reads the first D columns, the newer half the last. By arithmetic: after
    # a tl.where Triton no longer sees that neighboring channels are neighbors, and loads them one by one.
    half = element // RATIO * HEAD_DIM if OVERLAP else element * 0
    columns = half[:, None] + channels[None, :]
    return columns, ape + (element % RATIO * WIDTH)[:, None] + columns


@triton.jit
def _load_batch(
    kv_score, rows, columns, bias, wanted,
    RATIO: tl.constexpr, HEAD_DIM: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """kv and biased score of batch rows; where they are not wanted, 0 and the bias."""
    WIDTH: tl.constexpr = HEAD_DIM * (2 if OVERLAP else 1)
    batch = by_fours(_rows(kv_score, rows, WIDTH), columns)
    if wanted is None:
        kv = tl.load(batch).to(tl.float32)
        score = tl.load(batch + WIDTH).to(tl.float32)
    else:
        kv = tl.load(batch, mask=wanted, other=0.0).to(tl.float32)
        score = tl.load(batch + WIDTH, mask=wanted, other=0.0).to(tl.float32)
    return kv, score + tl.load(bias)


@triton.jit
def _load_decode(
    slots, element, columns, channels, kv_score, ape, state_cache, row, state_pages,
    RATIO: tl.constexpr, HEAD_DIM: tl.constexpr, OVERLAP: tl.constexpr, PAGE_ROWS: tl.constexpr,
):  # fmt: skip
    """Rows from the state cache, but for the window's last one, which is the batch's `row`."""
    WIDTH: tl.constexpr = HEAD_DIM * (2 if OVERLAP else 1)
    older = element < RATIO * (2 if OVERLAP else 1) - 1
    present = in_cache(slots, state_pages, PAGE_ROWS) & older
    kv, score = _load_states(_rows(state_cache, slots, WIDTH), columns, present, WIDTH)
    last = WIDTH - HEAD_DIM + channels
    last_row = _rows(kv_score, row, WIDTH) + last
    last_kv = tl.load(last_row).to(tl.float32)
    last_score = tl.load(last_row + WIDTH).to(tl.float32) + tl.load(ape + (RATIO - 1) * WIDTH + last)
    kv = tl.where(older[:, None], kv, last_kv[None, :])
    score = tl.where(older[:, None], score, last_score[None, :])
    return kv, score


@triton.jit
def _load_mixed(
    slots, element, columns, channels, kv_score, ape, bias, state_cache, row, in_batch, state_pages,
    RATIO: tl.constexpr, HEAD_DIM: tl.constexpr, OVERLAP: tl.constexpr, PAGE_ROWS: tl.constexpr,
    FROM_BATCH: tl.constexpr,
):  # fmt: skip
    """Rows from the batch, from the state cache, or from nowhere: absent rows have score -inf and kv 0."""
    WIDTH: tl.constexpr = HEAD_DIM * (2 if OVERLAP else 1)
    SAME: tl.constexpr = kv_score.dtype.element_ty == state_cache.dtype.element_ty
    present = in_cache(slots, state_pages, PAGE_ROWS)
    rows = _rows(state_cache, slots, WIDTH)
    if not FROM_BATCH:
        kv, score = _load_states(rows, columns, present, WIDTH)
    elif in_batch == 1:
        kv, score = _load_decode(
            slots, element, columns, channels, kv_score, ape, state_cache, row, state_pages,
            RATIO, HEAD_DIM, OVERLAP, PAGE_ROWS,
        )  # fmt: skip
    else:
        back = RATIO * (2 if OVERLAP else 1) - 1 - element
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
