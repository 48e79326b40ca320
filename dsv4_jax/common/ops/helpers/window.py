"""Triton: which rows a window has, and the softmax-sum over them."""

import triton
import triton.language as tl

from dsv4_jax.common.ops.helpers.aggregates import Entry
from dsv4_jax.common.ops.helpers.softmax import fold, merge, softmax_sum

# Elements of a window that one program holds: 32 KB of kv and score.
TILE = 4096


@triton.jit
def closing_window(plan, index, shape):
    """Entry `index` of the plan's closing windows."""
    row = tl.load(plan.closing + index * 4)
    position = tl.load(plan.closing + index * 4 + 1)
    slot = tl.load(plan.closing + index * 4 + 2)
    in_batch = tl.load(plan.closing + index * 4 + 3)
    valid = (row >= 0) & (row < plan.tokens) & (slot >= 0) & (slot // shape.KV_PAGE_ROWS < plan.kv_pages)
    closes = (position >= 0) & ((position + 1) % shape.RATIO == 0)
    valid &= closes & (position // shape.RATIO * shape.RATIO < plan.table_rows)
    if shape.FROM_BATCH:
        valid &= in_batch >= 1  # the closing token itself
    return Entry(row, position, slot, in_batch, valid)


@triton.jit
def in_cache(slots, pages, PAGE_ROWS: tl.constexpr):
    """Which slots are those of rows in a cache."""
    return (slots >= 0) & (slots // PAGE_ROWS < pages)


@triton.jit
def has_rows(slots, pages, PAGE_ROWS: tl.constexpr):
    """Whether any of a window's slots is in the state cache."""
    return tl.max(in_cache(slots, pages, PAGE_ROWS).to(tl.int32), axis=0) > 0


@triton.jit
def window_sum(rows, entry, slots_at, slots, channels, shape, EXPECTED: tl.constexpr, LOADING: tl.constexpr):
    """The softmax-sum `[channels]` of a valid window; with `LOADING="ahead"` it need not be valid.

    `slots` are the state slots of its rows, oldest first, and `slots_at` is where they lie. The slots of rows in the
    batch are ignored. The sum is right for any window; two constants say what is fast (`how_to_load` chooses them):
      EXPECTED: the windows that most programs have: "whole" ones, with all rows in the batch; those with the "last" row
        alone in the batch; or "any". The first two need `FROM_BATCH`.
      LOADING: "pieces": expected windows at once, others some rows at a time, so that the kernel needs fewer registers;
        "ahead": whole windows before it is known that they are valid and whole; "branch": every window at once, after
        that is known.
    """
    element = tl.arange(0, shape.WINDOW)
    columns, bias = _columns(rows, element, channels, shape)
    is_whole = (entry.in_batch >= shape.WINDOW) & (entry.row >= shape.WINDOW - 1)
    first = entry.row - (shape.WINDOW - 1)
    if LOADING == "pieces":
        tl.static_assert(shape.FROM_BATCH)
        if (entry.in_batch == 1) if EXPECTED == "last" else is_whole:
            if EXPECTED == "last":
                kv, score = _load_decode(rows, entry, slots, element, columns, channels, shape)
            else:
                kv, score = _load_batch(rows, first + element, columns, bias, None, shape)
            c = softmax_sum(kv, score)
        else:
            c = _sum_by_pieces(rows, entry, slots_at, channels, shape)
    else:
        if LOADING == "ahead":
            is_whole &= entry.valid
            wanted = (element >= 0)[:, None] & is_whole
            index = tl.where(is_whole, first, 0) + element
            kv, score = _load_batch(rows, index, columns, bias, wanted, shape)
            if entry.valid & (is_whole == 0):
                kv, score = _load_mixed(rows, entry, slots, element, columns, bias, channels, shape)
        elif shape.FROM_BATCH and is_whole:
            kv, score = _load_batch(rows, first + element, columns, bias, None, shape)
        else:
            kv, score = _load_mixed(rows, entry, slots, element, columns, bias, channels, shape)
        c = softmax_sum(kv, score)
    return c


@triton.jit
def _sum_by_pieces(rows, entry, slots_at, channels, shape):
    """The softmax-sum of any window, some rows at a time."""
    PIECE: tl.constexpr = max(1, min(16, shape.WINDOW // 2))
    total = tl.zeros_like(channels).to(tl.float32)
    weighted = total
    maximum = total - float("inf")
    for begin in range(0, shape.WINDOW, PIECE):
        element = begin + tl.arange(0, PIECE)
        columns, bias = _columns(rows, element, channels, shape)
        slots = tl.load(slots_at + element)
        kv, score = _load_mixed(rows, entry, slots, element, columns, bias, channels, shape)
        piece_maximum, piece_total, piece_weighted = fold(kv, score)
        maximum, total, weighted = merge(maximum, total, weighted, piece_maximum, piece_total, piece_weighted)
    return weighted / total


@triton.jit
def _columns(rows, element, channels, shape):
    """Columns `[elements, channels]` of kv, and where the position bias of each lies."""
    # With overlap the older half of the window reads the first D columns, the newer half the last D. Arithmetic, not
    # tl.where: after tl.where Triton no longer sees that neighboring channels are neighbors, and loads them one by one.
    half = element // shape.RATIO * shape.HEAD_DIM if shape.WINDOW > shape.RATIO else element * 0
    columns = half[:, None] + channels[None, :]
    phase = (element % shape.RATIO * shape.WIDTH)[:, None]
    return columns, rows.ape + phase + columns


@triton.jit
def _load_batch(rows, index, columns, bias, wanted, shape):
    """kv and biased score of batch rows; where they are not wanted, 0 and the bias."""
    batch = by_fours(_row_starts(rows.kv_score, index, shape.WIDTH), columns)
    if wanted is None:
        kv = tl.load(batch).to(tl.float32)
        score = tl.load(batch + shape.WIDTH).to(tl.float32)
    else:
        kv = tl.load(batch, mask=wanted, other=0.0).to(tl.float32)
        score = tl.load(batch + shape.WIDTH, mask=wanted, other=0.0).to(tl.float32)
    return kv, score + tl.load(bias)


@triton.jit
def _load_decode(rows, entry, slots, element, columns, channels, shape):
    """The window's last row from the batch, the others from the state cache."""
    older = element < shape.WINDOW - 1
    present = in_cache(slots, rows.state_pages, shape.PAGE_ROWS) & older
    kv, score = _load_states(_row_starts(rows.state_cache, slots, shape.WIDTH), columns, present, shape.WIDTH)
    last = shape.WIDTH - shape.HEAD_DIM + channels
    last_row = _row_starts(rows.kv_score, entry.row, shape.WIDTH) + last
    last_kv = tl.load(last_row).to(tl.float32)
    last_score = tl.load(last_row + shape.WIDTH).to(tl.float32)
    last_score += tl.load(rows.ape + (shape.RATIO - 1) * shape.WIDTH + last)
    kv = tl.where(older[:, None], kv, last_kv[None, :])
    score = tl.where(older[:, None], score, last_score[None, :])
    return kv, score


@triton.jit
def _load_mixed(rows, entry, slots, element, columns, bias, channels, shape):
    """Rows from the batch, from the state cache, or from nowhere: absent rows have score -inf and kv 0."""
    present = in_cache(slots, rows.state_pages, shape.PAGE_ROWS)
    starts = _row_starts(rows.state_cache, slots, shape.WIDTH)
    if not shape.FROM_BATCH:
        kv, score = _load_states(starts, columns, present, shape.WIDTH)
    elif entry.in_batch == 1:
        kv, score = _load_decode(rows, entry, slots, element, columns, channels, shape)
    else:
        back = shape.WINDOW - 1 - element
        from_batch = (back < entry.in_batch) & (back <= entry.row)
        batch_starts = _row_starts(rows.kv_score, entry.row - back, shape.WIDTH)
        if rows.kv_score.dtype.element_ty == rows.state_cache.dtype.element_ty:
            # Where both have one dtype, one load serves both.
            starts = tl.where(from_batch, batch_starts, starts)
            kv, score = _load_states(starts, columns, present | from_batch, shape.WIDTH)
        else:
            kv, score = _load_states(starts, columns, present & (from_batch == 0), shape.WIDTH)
            batch = by_fours(batch_starts, columns)
            batch_kv = tl.load(batch, mask=from_batch[:, None], other=0.0).to(tl.float32)
            batch_score = tl.load(batch + shape.WIDTH, mask=from_batch[:, None], other=0.0).to(tl.float32)
            kv = tl.where(from_batch[:, None], batch_kv, kv)
            score = tl.where(from_batch[:, None], batch_score, score)
        score += tl.load(bias, mask=from_batch[:, None], other=0.0)
    return kv, score


@triton.jit
def _load_states(starts, columns, present, WIDTH: tl.constexpr):
    at = by_fours(starts, columns)
    kv = tl.load(at, mask=present[:, None], other=0.0)
    score = tl.load(at + WIDTH, mask=present[:, None], other=float("-inf"))
    return kv, score


@triton.jit
def _row_starts(array, index, WIDTH: tl.constexpr):
    """Where rows of kv and score begin."""
    return array + index.to(tl.int64) * (2 * WIDTH)


@triton.jit
def by_fours(starts, columns):
    """Where columns of rows lie, loaded four at a time: bfloat16 by eights would lie in other threads than float32."""
    return tl.multiple_of(starts[:, None] + columns, [1, 4 * (starts.dtype.element_ty.primitive_bitwidth // 8)])
