"""Triton: where the rows of a window lie, and the softmax-sum over them."""

import triton
import triton.language as tl


@triton.jit
def closing_token(
    index, closing, positions, token_to_req, kv_slot_mapping, tokens, requests, kv_pages, table_rows,
    RATIO: tl.constexpr, KV_PAGE_ROWS: tl.constexpr,
):  # fmt: skip
    """Token, position, request and cache slot of the plan's entry, and whether it closes a window (data can be wrong)."""
    token = tl.load(closing + index)
    valid = (token >= 0) & (token < tokens)
    position = tl.load(positions + token, mask=valid, other=-1)
    request = tl.load(token_to_req + token, mask=valid, other=-1)
    slot = tl.load(kv_slot_mapping + token, mask=valid, other=-1)
    valid &= (position >= 0) & ((position + 1) % RATIO == 0) & (position // RATIO * RATIO < table_rows)
    valid &= (request >= 0) & (request < requests)
    valid &= (slot >= 0) & (slot // KV_PAGE_ROWS < kv_pages)
    return token, position, request, slot, valid


@triton.jit
def window_rows(
    back, token, position, request, query_start_loc, block_table, table_width, state_pages,
    PAGE_ROWS: tl.constexpr, FROM_BATCH: tl.constexpr,
):  # fmt: skip
    """Where the rows lie that are `back` positions before a token: its batch rows, state rows, and which of both exist.

    A row that is in neither counts as absent.
    """
    p = position - back
    row = token - back
    if FROM_BATCH:
        start = tl.maximum(tl.load(query_start_loc + request), 0)
        in_batch = (p >= 0) & (row >= start)
    else:
        in_batch = p < p
    column = tl.maximum(p, 0) // PAGE_ROWS
    wanted = (p >= 0) & ~in_batch & (column < table_width)
    page = tl.load(block_table + request.to(tl.int64) * table_width + column, mask=wanted, other=-1)
    in_state = wanted & (page >= 0) & (page < state_pages)
    state_row = page.to(tl.int64) * PAGE_ROWS + tl.maximum(p, 0) % PAGE_ROWS
    return row.to(tl.int64), in_batch, state_row, in_state


@triton.jit
def load_rows(
    element, channels, kv_score, ape, state_cache, row, in_batch, state_row, in_state,
    RATIO: tl.constexpr, HEAD_DIM: tl.constexpr, OVERLAP: tl.constexpr, FROM_BATCH: tl.constexpr,
):  # fmt: skip
    """kv and biased score `[rows, channels]` of window elements; absent rows have score -inf and kv 0."""
    WIDTH: tl.constexpr = HEAD_DIM * (2 if OVERLAP else 1)
    columns = tl.broadcast_to(channels[None, :], (element.shape[0], channels.shape[0]))
    if OVERLAP:
        # The older half of the window reads the first D columns, the newer half the last.
        columns += tl.where(element >= RATIO, HEAD_DIM, 0)[:, None]
    at = state_cache + state_row[:, None] * (2 * WIDTH) + columns
    kv = tl.load(at, mask=in_state[:, None], other=0.0)
    score = tl.load(at + WIDTH, mask=in_state[:, None], other=float("-inf"))
    if FROM_BATCH:
        at = kv_score + row[:, None] * (2 * WIDTH) + columns
        batch_kv = tl.load(at, mask=in_batch[:, None], other=0.0).to(tl.float32)
        batch_score = tl.load(at + WIDTH, mask=in_batch[:, None], other=0.0).to(tl.float32)
        bias = tl.load(ape + (element % RATIO)[:, None] * WIDTH + columns, mask=in_batch[:, None], other=0.0)
        kv = tl.where(in_batch[:, None], batch_kv, kv)
        score = tl.where(in_batch[:, None], batch_score + bias, score)
    return kv, score


@triton.jit
def softmax_fold(kv, score, largest, total, weighted):
    """Folds rows `[rows, channels]` into the running maximum, sum of exponentials and weighted sum of each channel."""
    new_largest = tl.maximum(largest, tl.max(score, axis=0))
    # While all scores are -inf the differences below must not become inf - inf.
    reference = tl.where(new_largest == float("-inf"), 0.0, new_largest)
    scale = tl.exp(largest - reference)
    weight = tl.exp(score - reference[None, :])
    total = total * scale + tl.sum(weight, axis=0)
    weighted = weighted * scale + tl.sum(weight * kv, axis=0)
    return new_largest, total, weighted
