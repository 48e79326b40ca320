"""`combine_topk_swa_indices` in Triton: a program writes some tokens' rows, 128 columns at a time."""

import jax.numpy as jnp
import triton
import triton.language as tl

from dsv4_jax.common.ops.helpers.launch import launch

TOKENS = 8  # of a program
BLOCK = 128  # columns that it writes at once; a row of indices has a multiple of them
REQUESTS = 256  # whose ends a program compares with its tokens at once


def implement(
    topk_indices, query_start_loc, seq_lens, gather_lens, *, window_size, compress_ratio, topk, M, N, outputs
):
    """See `dsv4_jax.combine_topk_swa_indices`."""
    tokens, columns = topk_indices.shape
    requests = seq_lens.shape[0]
    indices, lens = outputs
    if tokens == 0 or requests == 0:
        return jnp.full(indices.shape, -1, jnp.int32), jnp.zeros(lens.shape, jnp.int32)
    return launch(
        _combine_kernel,
        triton.cdiv(tokens, TOKENS),
        outputs={"indices": indices, "lens": lens},
        num_warps=4,
        constants={
            "COLUMNS": columns,
            "TOPK": topk,
            "WINDOW": window_size,
            "RATIO": compress_ratio,
            "WIDTH": indices.shape[1],
            "BLOCK": BLOCK,
            "TOKENS": TOKENS,
            "REQUESTS": REQUESTS,
        },
        topk_indices=topk_indices,
        query_start_loc=query_start_loc,
        seq_lens=seq_lens,
        gather_lens=gather_lens,
        tokens=tokens,
        requests=requests,
        M=M,
        N=N,
    )


@triton.jit
def _combine_kernel(
    topk_indices, query_start_loc, seq_lens, gather_lens, indices, lens, tokens, requests, M, N,
    COLUMNS: tl.constexpr, TOPK: tl.constexpr, WINDOW: tl.constexpr, RATIO: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK: tl.constexpr, TOKENS: tl.constexpr, REQUESTS: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    real = t < tokens
    token = tl.load(query_start_loc) + t
    b = tl.zeros((TOKENS,), tl.int32)
    for first in range(0, requests, REQUESTS):
        request = first + tl.arange(0, REQUESTS)
        known = request < requests
        end = tl.load(query_start_loc + 1 + request, mask=known)
        b += tl.sum((known[None, :] & (end[None, :] <= token[:, None])).to(tl.int32), axis=1)
    b = tl.minimum(b, requests - 1)
    start = tl.load(query_start_loc + b)
    end = tl.load(query_start_loc + b + 1)
    seq_len = tl.load(seq_lens + b)
    gather_len = tl.load(gather_lens + b)
    after = end - token
    valid = (start <= token) & (token < end) & (after >= 1) & (after <= seq_len)
    valid &= (gather_len >= 0) & (gather_len <= seq_len)
    position = tl.where(valid, seq_len - after, -1)
    closed = (position + 1) // RATIO  # keys whose tokens are all known to the query
    compressed = tl.minimum(closed, TOPK)
    window = tl.minimum(position + 1, WINDOW)
    tl.store(lens + t, compressed + window, mask=real)

    first_gathered = position - window + 1 - (seq_len - gather_len) - compressed
    for start_column in tl.static_range(0, WIDTH, BLOCK):
        column = (start_column + tl.arange(0, BLOCK))[None, :]
        row = tl.full((TOKENS, BLOCK), -1, tl.int32)
        if start_column < TOPK:
            at = t.to(tl.int64)[:, None] * COLUMNS + column
            # All of them, since a mask of the data would keep loads from being vectors.
            local = tl.load(topk_indices + at, mask=real[:, None] & (column < TOPK), other=-1)
            row = tl.where((column < compressed[:, None]) & (local < tl.minimum(closed, N)[:, None]), local, -1)
        gathered = first_gathered[:, None] + column
        is_window = (column >= compressed[:, None]) & (column < (compressed + window)[:, None])
        is_window &= (gathered >= 0) & (gathered < M - N)
        row = tl.where(is_window, N + gathered, row)
        row = tl.where(row >= 0, row + (M * b)[:, None], -1)
        tl.store(indices + t.to(tl.int64)[:, None] * WIDTH + column, row, mask=real[:, None])
