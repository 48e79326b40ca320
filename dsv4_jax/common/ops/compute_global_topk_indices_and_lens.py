"""`compute_global_topk_indices_and_lens` in Triton: a program takes some tokens' indices, a block at a time."""

import jax.numpy as jnp
import triton
import triton.language as tl

from dsv4_jax.common.ops.helpers.launch import launch

# Indices that a program holds at once: four loads of 16 bytes a thread.
TILE = 2048


def implement(topk_indices, token_to_req, block_table, is_valid_token, *, page_rows, outputs):
    """See `dsv4_jax.compute_global_topk_indices_and_lens`."""
    tokens, topk = topk_indices.shape
    requests, columns = block_table.shape
    if topk_indices.size == 0 or block_table.size == 0:
        return jnp.full(topk_indices.shape, -1, jnp.int32), jnp.zeros(tokens, jnp.int32)
    block = min(triton.next_power_of_2(topk), TILE // 2)
    token_block = TILE // block
    indices, lens = outputs
    return launch(
        _global_topk_kernel,
        triton.cdiv(tokens, token_block),
        outputs={"indices": indices, "lens": lens},
        num_warps=4,
        constants={
            "TOPK": topk,
            "PAGE_ROWS": page_rows,
            "LAST_PAGE": 2**31 // page_rows - 1,  # all of whose rows have an int32 number
            "TOKENS": token_block,
            "BLOCK": block,
        },
        topk_indices=topk_indices,
        token_to_req=token_to_req,
        block_table=block_table,
        is_valid_token=is_valid_token,
        tokens=tokens,
        requests=requests,
        columns=columns,
    )


@triton.jit
def _global_topk_kernel(
    topk_indices, token_to_req, block_table, is_valid_token, indices, lens, tokens, requests, columns,
    TOPK: tl.constexpr, PAGE_ROWS: tl.constexpr, LAST_PAGE: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    real = token < tokens
    req = tl.load(token_to_req + token, mask=real, other=-1)
    in_table = (req >= 0) & (req < requests)
    pages = block_table + req.to(tl.int64) * columns
    row = token.to(tl.int64) * TOPK
    count = tl.zeros((TOKENS,), tl.int32)
    for start in range(0, TOPK, BLOCK):
        column = start + tl.arange(0, BLOCK)
        mask = real[:, None] & (column < TOPK)[None, :]
        at = row[:, None] + column[None, :]
        local = tl.load(topk_indices + at, mask=mask, other=-1)
        inside = in_table[:, None] & (local >= 0) & (local // PAGE_ROWS < columns)
        page = tl.load(pages[:, None] + local // PAGE_ROWS, mask=inside, other=-1)
        inside &= (page >= 0) & (page <= LAST_PAGE)
        tl.store(indices + at, tl.where(inside, page * PAGE_ROWS + local % PAGE_ROWS, -1), mask=mask)
        count += tl.sum(inside.to(tl.int32), axis=1)
    valid = tl.load(is_valid_token + token, mask=real, other=0)
    tl.store(lens + token, tl.where(valid != 0, count, 0), mask=real)
