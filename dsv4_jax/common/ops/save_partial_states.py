"""`save_partial_states` in Triton: one program a token."""

import triton
import triton.language as tl

from dsv4_jax.common.ops.helpers.launch import launch


def implement(kv, score, ape, positions, state_cache, slot_mapping):
    """See `dsv4_jax.save_partial_states`."""
    tokens, width = kv.shape
    pages, page_rows, _ = state_cache.shape
    if tokens == 0 or pages == 0:
        return (state_cache,)
    return launch(
        _save_kernel,
        tokens,
        updates=("state_cache",),
        num_warps=max(1, min(4, triton.next_power_of_2(width) // 256)),
        constants={"RATIO": ape.shape[0], "WIDTH": width, "PAGE_ROWS": page_rows},
        kv=kv,
        score=score,
        ape=ape,
        positions=positions,
        slot_mapping=slot_mapping,
        state_cache=state_cache,
        pages=pages,
    )


@triton.jit
def _save_kernel(
    kv, score, ape, positions, slot_mapping, state_cache, pages,
    RATIO: tl.constexpr, WIDTH: tl.constexpr, PAGE_ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) + tl.arange(0, 1)
    position = tl.load(positions + row)
    slot = tl.load(slot_mapping + row)
    save_rows(row, row >= 0, position, slot, kv, score, WIDTH, ape, state_cache, pages, RATIO, WIDTH, PAGE_ROWS)


@triton.jit
def save_rows(
    row, present, position, slot, kv, score, stride, ape, state_cache, pages,
    RATIO: tl.constexpr, WIDTH: tl.constexpr, PAGE_ROWS: tl.constexpr,
):  # fmt: skip
    """Writes kv and biased score of batch rows at their state slots; rows of kv and score are `stride` apart.

    Rows are loaded where they are `present` in the batch, which is known before their slots are.
    """
    valid = present & (position >= 0) & (slot >= 0) & (slot // PAGE_ROWS < pages)
    # The width need not be a power of two.
    channels = tl.arange(0, triton.next_power_of_2(WIDTH))[None, :]
    inside = channels < WIDTH
    source = (row.to(tl.int64) * stride)[:, None] + channels
    values = tl.load(kv + source, mask=present[:, None] & inside).to(tl.float32)
    scores = tl.load(score + source, mask=present[:, None] & inside).to(tl.float32)
    mask = valid[:, None] & inside
    scores += tl.load(ape + (position % RATIO * WIDTH)[:, None] + channels, mask=mask)
    at = state_cache + (slot.to(tl.int64) * (2 * WIDTH))[:, None] + channels
    tl.store(at, values, mask=mask)
    tl.store(at + WIDTH, scores, mask=mask)
