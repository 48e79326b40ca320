"""Random ragged batches, in NumPy: what a paged scheduler could hand to a compressor, and some things it should not."""

import dataclasses

import ml_dtypes
import numpy as np

from helpers import oracle

KINDS = ("decode", "prefill", "chunked", "mixed")
# Squares of these stay far from float32's largest value, below which RMSNorm's mean is finite and above infinite.
KV_MAGNITUDES = (1e-30, 1e-12, 1e-4, 1.0, 300.0, 1e12, 1e25, 1e30)
SCORE_MAGNITUDES = (1e-30, 1e-3, 1.0, 6.0, 1e4, 1e30)


@dataclasses.dataclass
class Batch:
    """One step of one compressor: the arguments of the ops, all NumPy."""

    config: object
    kv_score: np.ndarray
    ape: np.ndarray
    positions: np.ndarray
    token_to_req: np.ndarray
    query_start_loc: np.ndarray
    seq_lens: np.ndarray
    slot_mapping: np.ndarray
    kv_slot_mapping: np.ndarray
    block_table: np.ndarray
    kv_block_table: np.ndarray
    closing: np.ndarray
    state: np.ndarray
    cache: np.ndarray
    norm_weight: np.ndarray
    cos_sin: np.ndarray
    kv_scale: np.float32 | None

    @property
    def width(self):
        return self.ape.shape[1]


def angles(count):
    """A rotation table [count, 64] with angles of every size; rotations stay rotations."""
    angle = np.arange(count)[:, None] * 10.0 ** -np.linspace(0, 4, 32)
    return np.concatenate([np.cos(angle), np.sin(angle)], axis=1).astype(np.float32)


def random_bytes(rng, shape, dtype):
    """An array whose every byte is random, so that a write that should not be, shows; many floats are NaN."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return rng.integers(0, 256, size, np.uint8).view(dtype).reshape(shape)


def hard_keys(name):
    """Keys [N, D] float32 around every rounding edge, of all magnitudes, and not finite."""
    fmt = oracle.FORMATS[name]
    rng = np.random.default_rng(0)
    keys = rng.standard_normal((64, fmt.head_dim)) * 10.0 ** rng.integers(-30, 30, (64, 1))
    mixed = rng.standard_normal((16, fmt.head_dim)) * 10.0 ** rng.integers(-6, 6, (16, fmt.head_dim))
    # Halves of everything that a code can be, with a block's largest value at 448 or 6 so that the scale is a power.
    grid = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    grid = np.sort(grid[np.isfinite(grid)])
    halves = np.concatenate([grid, (grid[1:] + grid[:-1]) / 2])
    edges = np.resize(halves, (8, fmt.head_dim))
    largest = fmt.largest or 448.0
    edges *= largest / 448
    edges[:, :: fmt.block or 64] = largest
    powers = np.array([largest * 2.0**e * f for e in (-20, -1, 0, 1, 30) for f in (1, 1 + 2.0**-7, 1 - 2.0**-7)])
    tops = np.zeros((len(powers), fmt.head_dim))
    tops[:, :: fmt.block or 64] = powers[:, None]
    odd = rng.standard_normal((8, fmt.head_dim))
    odd[0, 3], odd[1, 3], odd[2, 3] = np.inf, -np.inf, np.nan
    odd[3], odd[4], odd[5], odd[6] = np.nan, 0.0, -0.0, np.finfo(np.float32).max
    return np.concatenate([keys, mixed, edges, tops, odd]).astype(np.float32)


def empty_cache(rng, config, pages, page_bytes=None):
    """A compressed cache of random bytes."""
    fmt = config.format
    if fmt.packed:
        return random_bytes(rng, (pages, page_bytes or fmt.page_bytes(config.kv_page_rows)), np.uint8)
    raw = random_bytes(rng, (pages, config.kv_page_rows, fmt.head_dim), f"u{np.dtype(fmt.dtype).itemsize}")
    return raw.view(ml_dtypes.bfloat16 if fmt.name == "bf16" else ml_dtypes.float8_e4m3fn)


def rows(rng, count, width, magnitudes, dtype=np.float32, *, alike=1):
    """[count, 2 * width] of kv and score; `magnitudes`: over the range of float32, in runs of `alike` rows."""
    kv, score = rng.standard_normal((2, count, width))
    if magnitudes:
        kv *= rng.choice(KV_MAGNITUDES, (count // alike + 1, 1)).repeat(alike, axis=0)[:count]
        score *= rng.choice(SCORE_MAGNITUDES, (count, 1))
    return np.concatenate([kv, score], axis=1).astype(np.float32).astype(dtype)


def lengths(rng, kind, requests, config, most):
    """(tokens before this step, tokens of this step, at most `most`) of each request."""
    m, found = config.compress_ratio, []
    for _ in range(requests):
        what = rng.choice(KINDS[:3]) if kind == "mixed" else kind
        before = 0 if what == "prefill" else int(rng.integers(0, 2 * m + 3))
        new = 1 if what == "decode" else int(rng.integers(1, most + 1))
        if rng.random() < 0.5:  # half of them end on a window
            if what != "prefill":
                before += -(before + new) % m
            elif new > m:
                new -= new % m
        found.append((before, new))
    return found


def random_batch(
    rng,
    config,
    kind="mixed",
    *,
    requests=3,
    tokens=40,
    padding=3,
    padded_requests=1,
    holes=False,
    magnitudes=False,
    dtype=np.float32,
    spare_pages=2,
    sizes=None,
    page_bytes=None,
):
    """Draws a batch. Without `sizes`, shapes depend on the arguments alone, so that draws share one compilation.

    Args:
      rng: numpy.random.Generator.
      config: CompressorConfig.
      kind: one of KINDS.
      requests: how many have tokens.
      tokens: at most so many, shared out between the requests.
      padding: tokens after the last request's.
      padded_requests: requests without a token after the others.
      holes: some block-table entries are negative or past the caches, some slots too.
      magnitudes: rows from 1e-30 to 1e30 in one batch.
      dtype: of kv_score.
      spare_pages: pages of either cache that nobody owns.
      sizes: (tokens before, tokens of this step) of each request, instead of random ones.
      page_bytes: of a packed cache page.
    """
    m = config.compress_ratio
    fixed = sizes is None
    if fixed:
        most = max(tokens // requests, 1)
        longest, total = 3 * m + 2 + most, requests * most + padding
        sizes = lengths(rng, kind, requests, config, most)
    else:
        longest, total = max(a + b for a, b in sizes), sum(b for _, b in sizes) + padding
    sizes = [*sizes, *[(0, 0)] * padded_requests]
    seq_lens = np.array([a + b for a, b in sizes], np.int32)
    query_start_loc = np.concatenate([[0], np.cumsum([b for _, b in sizes])]).astype(np.int32)
    token_to_req = np.full(total, -1, np.int32)
    positions = np.full(total, -1, np.int32)
    for r, (before, new) in enumerate(sizes):
        token_to_req[query_start_loc[r] : query_start_loc[r + 1]] = r
        positions[query_start_loc[r] : query_start_loc[r + 1]] = before + np.arange(new)

    block_table, pages = _table(rng, seq_lens, longest, config.page_rows, spare_pages, holes, fixed)
    kv_block_table, kv_pages = _table(rng, seq_lens // m, longest // m, config.kv_page_rows, spare_pages, holes, fixed)
    slots = _slots(block_table, token_to_req, positions, config.page_rows, positions >= 0)
    closes = (positions >= 0) & ((positions + 1) % m == 0)
    kv_slots = _slots(kv_block_table, token_to_req, positions // m, config.kv_page_rows, closes)

    width = config.width
    # In half of the batches every row has its own magnitude: then the largest of a window rules. In the others whole
    # windows are small, so that RMSNorm's epsilon and the least amax rule.
    alike = 1 if rng.random() < 0.5 else 2 * config.window
    state = random_bytes(rng, (pages, config.page_rows, 2 * width), np.float32)
    for r, (before, _) in enumerate(sizes):
        history = rows(rng, before, width, magnitudes, alike=alike)
        for p in range(max(0, before - config.window), before):
            page = block_table[r, p // config.page_rows]
            if 0 <= page < pages:
                state[page, p % config.page_rows] = history[p]
    fmt = config.format
    return Batch(
        config=config,
        kv_score=rows(rng, total, width, magnitudes, dtype, alike=alike),
        ape=rng.standard_normal((m, width)).astype(np.float32),
        positions=positions,
        token_to_req=token_to_req,
        query_start_loc=query_start_loc,
        seq_lens=seq_lens,
        slot_mapping=slots,
        kv_slot_mapping=kv_slots,
        block_table=block_table,
        kv_block_table=kv_block_table,
        closing=np.flatnonzero(closes).astype(np.int32),
        state=state,
        cache=empty_cache(rng, config, kv_pages, page_bytes),
        norm_weight=(1 + 0.3 * rng.standard_normal(config.head_dim)).astype(np.float32),
        cos_sin=angles(longest),
        kv_scale=np.float32(0.013) if fmt.needs_scale else None,
    )


def _table(rng, lengths, longest, page_rows, spare_pages, holes, fixed):
    """A block table [R, B] of distinct shuffled pages, and how many pages there are; past a request's pages -1."""
    columns = -(-longest // page_rows)
    used = len(lengths) * columns if fixed else int((-(-lengths // page_rows)).sum())
    pages = used + spare_pages
    shuffled = iter(rng.permutation(pages))
    table = np.full((len(lengths), columns + 1), -1, np.int32)
    for r, length in enumerate(lengths):
        count = -(-length // page_rows)
        table[r, :count] = [next(shuffled) for _ in range(count)]
    if holes:
        outside = rng.choice([-1, -2, -(2**31), pages, pages + 7, 2**31 - 1], table.shape)
        table = np.where(rng.random(table.shape) < 0.3, outside, table)
    return table.astype(np.int32), pages


def _slots(table, requests, index, page_rows, wanted):
    slots = np.full(len(index), -1, np.int32)
    for t in np.flatnonzero(wanted):
        page = int(table[requests[t], index[t] // page_rows])
        slot = page * page_rows + int(index[t]) % page_rows
        if 0 <= page < 2**30:  # what is further out must not wrap round
            slots[t] = slot
    return slots
