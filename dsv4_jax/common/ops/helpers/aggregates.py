"""Triton: what kernels hand to their helpers, in named aggregates.

A launch passes loose arguments. A kernel bundles them in its first lines, and its helpers take the bundles.
"""

import triton
import triton.language as tl

# jax-triton turns an integer argument that is 1 into a constant.
MaybeConstant = tl.tensor | tl.constexpr


@triton.aggregate
class Shape:
    """What is static about a compressor, as in `CompressorConfig`, and whether windows may have rows in the batch."""

    RATIO: tl.constexpr
    WINDOW: tl.constexpr
    HEAD_DIM: tl.constexpr
    WIDTH: tl.constexpr
    PAGE_ROWS: tl.constexpr
    KV_PAGE_ROWS: tl.constexpr
    FROM_BATCH: tl.constexpr


@triton.aggregate
class Plan:
    """The windows that may close, `[windows, 4]` int32, and the lengths that bound their entries."""

    closing: tl.tensor
    tokens: MaybeConstant
    kv_pages: MaybeConstant
    table_rows: MaybeConstant


@triton.aggregate
class Entry:
    """An entry of the plan, and whether it may write: the plan is data and can be wrong.

    `row` is the last batch row of the window, or of what a state holds; `in_batch` counts its rows in the batch.
    """

    row: tl.tensor
    position: tl.tensor
    slot: tl.tensor
    in_batch: tl.tensor
    valid: tl.tensor


@triton.aggregate
class Rows:
    """Where rows of kv and score come from: the batch with its position bias, and the state cache.

    Without `FROM_BATCH` in the shape, `kv_score` and `ape` must not be read.
    """

    kv_score: tl.tensor
    ape: tl.tensor
    state_cache: tl.tensor
    state_pages: MaybeConstant


@triton.aggregate
class States:
    """A state cache of rows, and the position bias that its scores have."""

    ape: tl.tensor
    cache: tl.tensor
    pages: MaybeConstant
    RATIO: tl.constexpr
    WIDTH: tl.constexpr
    PAGE_ROWS: tl.constexpr


@triton.aggregate
class Saving:
    """The states to save: those that the plan names (`SAVE="tail"`), or all; a program saves `ROWS` of them."""

    saving: tl.tensor
    positions: tl.tensor
    slot_mapping: tl.tensor
    saved: MaybeConstant
    tokens: MaybeConstant
    SAVE: tl.constexpr
    ROWS: tl.constexpr


@triton.aggregate
class Cache:
    """A cache of keys and its format; `scale` is read for the format `fp8` alone."""

    pages: tl.tensor
    scale: tl.tensor
    FORMAT: tl.constexpr
    HEAD_DIM: tl.constexpr
    PAGE_ROWS: tl.constexpr
    PAGE_BYTES: tl.constexpr


@triton.aggregate
class Rope:
    """The RoPE table, and the position of each token."""

    positions: tl.tensor
    cos_sin: tl.tensor
    table_rows: MaybeConstant
    ROPE_DIM: tl.constexpr


@triton.aggregate
class Factors:
    """What a key's channels are multiplied by: the norm weight, and cos and sin of each pair."""

    weight: tl.tensor
    cos: tl.tensor
    sin: tl.tensor
