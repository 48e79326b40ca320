"""`save_partial_states` in Triton: one program per token."""

import triton
import triton.language as tl

from dsv4_jax.common.ops.helpers.aggregates import States
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
    states = States(ape, state_cache, pages, RATIO, WIDTH, PAGE_ROWS)
    save_rows(row, row >= 0, position, slot, kv, score, WIDTH, states)


@triton.jit
def save_rows(row, present, position, slot, kv, score, stride, states):
    """Writes kv and biased score of batch rows at their state slots; rows of kv and score are `stride` apart.

    A row that is `present` in the batch is loaded before its slot is known.
    """
    valid = present & (position >= 0) & (slot >= 0) & (slot // states.PAGE_ROWS < states.pages)
    # The width need not be a power of two.
    channels = tl.arange(0, triton.next_power_of_2(states.WIDTH))[None, :]
    inside = channels < states.WIDTH
    source = (row.to(tl.int64) * stride)[:, None] + channels
    values = tl.load(kv + source, mask=present[:, None] & inside).to(tl.float32)
    scores = tl.load(score + source, mask=present[:, None] & inside).to(tl.float32)
    mask = valid[:, None] & inside
    scores += tl.load(states.ape + (position % states.RATIO * states.WIDTH)[:, None] + channels, mask=mask)
    at = states.cache + (slot.to(tl.int64) * (2 * states.WIDTH))[:, None] + channels
    tl.store(at, values, mask=mask)
    tl.store(at + states.WIDTH, scores, mask=mask)
