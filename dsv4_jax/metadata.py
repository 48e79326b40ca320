"""Where each token goes: one pytree per compressor and step, shared by all layers of that kind."""

import dataclasses
import functools
import json

import jax
import jax.export
import jax.numpy as jnp

from dsv4_jax import checks
from dsv4_jax.config import CompressorConfig
from dsv4_jax.promotion import own_rules

INT32_MAX = 2**31 - 1


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class CompressorMetadata:
    """The slots of one step's tokens, and the plan: which batch rows close windows, and which states to save.

    The batch has T tokens of R requests, one request after another. The tokens of a request are side by side and in
    position order; padding (a negative position) may come before and after them. All arrays are int32, and all are
    data: new values need no new compilation. -1 is the usual padding. A slot, row or request outside its array writes
    nothing and reads nothing.

    Attributes:
      positions: `[T]`, each token's position in its request.
      token_to_req: `[T]`, request of each token.
      query_start_loc: `[R + 1]`, first batch row of each request.
      slot_mapping: `[T]`, state slot of each token: `page * page_rows + row`.
      block_table: `[R, B]`, the state pages; column b holds positions `[b * page_rows, (b + 1) * page_rows)`. With the
        online state `[R, 1]`: the request's only page, whose row `p % page_rows` holds the state after position p.
      kv_slot_mapping: `[T]`, cache slot of the key whose window the token closes.
      closing: `[N, 4]`, the windows that close, compact, padded with -1. Columns: batch row of the closing token, its
        position, cache slot of the key, and how many of the window's last rows are in this batch. The last column
        counts the closing token and the batch rows just before it that hold the positions before it. It is 0 if the
        batch has other rows of the window elsewhere; `compress` then makes no key.
      window_slots: `[N, n]`, state slots of each window's rows, oldest first; -1 for a row that does not exist. With
        the online state `[N, 1]`: slot of the state before the window's first row in the batch; -1 if it starts there.
      saving: `[S, 3]`, the states that `save="tail"` writes, compact, padded with -1. Columns: batch row, position,
        state slot. The online state has a fourth: how many of the window's rows, up to this one, are in the batch.
      layout: `CompressorConfig.layout` of the compressor that this was built for; static.
      runs: with the online state `[R, 4]`, one row per request. Columns: its first batch row, its tokens, position of
        the first, slot of the state before it (-1 if there is none). None with the state in rows.
    """

    positions: jax.Array
    token_to_req: jax.Array
    query_start_loc: jax.Array
    slot_mapping: jax.Array
    block_table: jax.Array
    kv_slot_mapping: jax.Array
    closing: jax.Array
    window_slots: jax.Array
    saving: jax.Array
    layout: tuple[int, bool, int, int, str] = dataclasses.field(metadata={"static": True})
    runs: jax.Array | None = None

    @classmethod
    def build(
        cls,
        config: CompressorConfig,
        query_start_loc: jax.Array,
        seq_lens: jax.Array,
        block_table: jax.Array,
        kv_block_table: jax.Array,
        *,
        num_tokens: int,
        rollback: int = 0,
    ) -> "CompressorMetadata":
        """Builds one step's metadata from what a scheduler has. Works under `jax.jit`.

        Args:
          config: the compressor.
          query_start_loc: `[R + 1]` int32, first batch row of each request; rows past the last entry are padding.
          seq_lens: `[R]` int32, length of each request, this step's tokens included.
          block_table: `[R, B]` int32, state pages of each request, by `position // page_rows`. Negative: no page,
            because it was never allocated, or was given back after its windows closed. With the online state `[R, 1]`:
            one page per request.
          kv_block_table: `[R, K]` int32, cache pages of each request, by `position // compress_ratio // kv_page_rows`.
          num_tokens: T, the batch's length, padding included.
          rollback: how many of the last tokens may be taken back (speculative decoding); `save="tail"` then keeps the
            states for that. The online state always allows `page_rows - 1`, and `rollback` must not exceed it.
        """
        checks.instance("config", config, CompressorConfig)
        requests = checks.integers("seq_lens", seq_lens, ("R",)).shape[0]
        query_start_loc = checks.integers("query_start_loc", query_start_loc, (requests + 1,))
        seq_lens = checks.integers("seq_lens", seq_lens, (requests,))
        block_table = checks.integers("block_table", block_table, (requests, _columns(config)))
        kv_block_table = checks.integers("kv_block_table", kv_block_table, (requests, "K"))
        checks.at_least("num_tokens", num_tokens, 0)
        _check_rollback(config, rollback)
        return _build(config, query_start_loc, seq_lens, block_table, kv_block_table, num_tokens, rollback)

    @classmethod
    def from_slots(
        cls,
        config: CompressorConfig,
        positions: jax.Array,
        token_to_req: jax.Array,
        slot_mapping: jax.Array,
        kv_slot_mapping: jax.Array,
        block_table: jax.Array,
        query_start_loc: jax.Array,
        *,
        rollback: int = 0,
    ) -> "CompressorMetadata":
        """Builds metadata from slots that a scheduler already has, such as vLLM's. Works under `jax.jit`.

        The position and the request of a batch row say which window it belongs to, so padding before or after the
        tokens of a request changes nothing. If there is a gap between them (padding, or a missing position), `compress`
        stores no key for a window across the gap. With the online state, all tokens after the gap save nothing and
        close nothing, and a token saves nothing if its slot is not the one that the block table gives for its position.

        The arrays are the attributes of the same names, int32 (or int64, if JAX has x64 on). `config` and `rollback`
        are as in `build`.
        """
        checks.instance("config", config, CompressorConfig)
        (tokens,) = checks.integers("positions", positions, ("T",)).shape
        positions = checks.integers("positions", positions, (tokens,))
        token_to_req = checks.integers("token_to_req", token_to_req, (tokens,))
        slot_mapping = checks.integers("slot_mapping", slot_mapping, (tokens,))
        kv_slot_mapping = checks.integers("kv_slot_mapping", kv_slot_mapping, (tokens,))
        block_table = checks.integers("block_table", block_table, ("R", _columns(config)))
        requests = block_table.shape[0]
        query_start_loc = checks.integers("query_start_loc", query_start_loc, (requests + 1,))
        _check_rollback(config, rollback)
        return _from_slots(
            config, positions, token_to_req, slot_mapping, kv_slot_mapping, block_table, query_start_loc, rollback
        )

    @property
    def prefill(self) -> bool:
        """Whether the batch is a prefill: most of its windows lie in it whole.

        True if at most twice as many windows may close as the tokens fill, so about one request or fewer per
        `compress_ratio` tokens.
        """
        ratio = self.layout[0]
        return self.closing.shape[0] * ratio <= 2 * self.positions.shape[0]

    @own_rules()
    def at_layer(self, layer: jax.Array | int, state_pages: int, kv_pages: int) -> "CompressorMetadata":
        """The same step in caches that hold several layers, one after another along the page axis.

        What is outside a layer's own pages stays outside. Works under `jax.jit` and in `scan` over layers.

        Args:
          layer: `[]` int32, the layer's place in the caches, from 0.
          state_pages: pages per layer of the state cache; all layers together must have fewer than 2**31 rows.
          kv_pages: pages per layer of the cache; the same bound holds.
        """
        _, _, page_rows, kv_page_rows, _ = self.layout
        state_rows, kv_rows = state_pages * page_rows, kv_pages * kv_page_rows

        def move(values, size):
            return jnp.where((values >= 0) & (values < size), values + layer * size, -1).astype(jnp.int32)

        return dataclasses.replace(
            self,
            slot_mapping=move(self.slot_mapping, state_rows),
            block_table=move(self.block_table, state_pages),
            kv_slot_mapping=move(self.kv_slot_mapping, kv_rows),
            closing=self.closing.at[:, 2].set(move(self.closing[:, 2], kv_rows)),
            window_slots=move(self.window_slots, state_rows),
            saving=self.saving.at[:, 2].set(move(self.saving[:, 2], state_rows)),
            runs=None if self.runs is None else self.runs.at[:, 3].set(move(self.runs[:, 3], state_rows)),
        )


def checked_metadata(metadata: CompressorMetadata, config: CompressorConfig) -> CompressorMetadata:
    """The metadata as int32, after checking that its shapes agree with each other and with the compressor.

    Raises:
      TypeError, ValueError: an array does not fit; names it, what it is and what it must be.
    """
    checks.instance("config", config, CompressorConfig)
    checks.instance("metadata", metadata, CompressorMetadata)
    if metadata.layout != config.layout:
        names = "(compress_ratio, overlap, page_rows, kv_page_rows, state)"
        raise ValueError(f"metadata was built for {names} = {metadata.layout}; config has {config.layout}")
    online = config.state == "online"
    (tokens,) = checks.integers("metadata.positions", metadata.positions, ("T",)).shape
    requests, _ = checks.integers("metadata.block_table", metadata.block_table, ("R", "B")).shape
    windows, _ = checks.integers("metadata.closing", metadata.closing, ("N", 4)).shape
    shapes = {
        "positions": (tokens,),
        "token_to_req": (tokens,),
        "query_start_loc": (requests + 1,),
        "slot_mapping": (tokens,),
        "block_table": (requests, 1 if online else "B"),
        "kv_slot_mapping": (tokens,),
        "closing": (windows, 4),
        "window_slots": (windows, 1 if online else config.window),
        "saving": ("S", 4 if online else 3),
    }
    if online:
        shapes["runs"] = (requests, 4)
    arrays = {
        name: checks.integers(f"metadata.{name}", getattr(metadata, name), shape) for name, shape in shapes.items()
    }
    return CompressorMetadata(**arrays, layout=metadata.layout)


jax.export.register_pytree_node_serialization(
    CompressorMetadata,
    serialized_name="dsv4_jax.CompressorMetadata",
    serialize_auxdata=lambda layout: json.dumps(layout).encode(),
    deserialize_auxdata=lambda data: (tuple(json.loads(data)[0]),),
)


def _columns(config):
    """How many columns a block table must have."""
    return 1 if config.state == "online" else "B"


def _check_rollback(config, rollback):
    checks.at_least("rollback", rollback, 0)
    if config.state == "online" and rollback >= config.page_rows:
        raise ValueError(
            f"rollback is {rollback}; with the online state it must be below config.page_rows, {config.page_rows}: a "
            "page holds the states after the last page_rows tokens"
        )


# Jitted, so that eager calls cost one launch instead of dozens.
@own_rules()
@functools.partial(jax.jit, static_argnames=("config", "num_tokens", "rollback"))
def _build(config, query_start_loc, seq_lens, block_table, kv_block_table, num_tokens, rollback):
    requests = seq_lens.shape[0]
    token = jnp.arange(num_tokens, dtype=jnp.int32)
    request = jnp.searchsorted(query_start_loc, token, side="right").astype(jnp.int32) - 1
    real = (request >= 0) & (request < requests)
    request = jnp.where(real, request, -1)
    position = _take(seq_lens, request, 0) - (_take(query_start_loc[1:], request, 0) - token)
    position = jnp.where(real, position, -1)
    m = config.compress_ratio
    closes = (position >= 0) & ((position + 1) % m == 0)
    slots = _state_slots(config, block_table, request, position)
    kv_slots = _slots(kv_block_table, request, position // m, config.kv_page_rows)
    kv_slots = jnp.where(closes, kv_slots, -1)
    return _from_slots(config, position, request, slots, kv_slots, block_table, query_start_loc, rollback)


@own_rules()
@functools.partial(jax.jit, static_argnames=("config", "rollback"))
def _from_slots(config, positions, token_to_req, slot_mapping, kv_slot_mapping, block_table, query_start_loc, rollback):
    tokens, requests = positions.shape[0], block_table.shape[0]
    m, n, online = config.compress_ratio, config.window, config.state == "online"
    token = jnp.arange(tokens, dtype=jnp.int32)
    real = (positions >= 0) & (token_to_req >= 0) & (token_to_req < requests)
    own = real & (token >= _take(query_start_loc, token_to_req, INT32_MAX))
    own &= token < _take(query_start_loc[1:], token_to_req, 0)
    begin = runs = None
    if online:
        # A state is folded from token to token, so only tokens that follow the request's first one count.
        begin = _least(token, own, token_to_req, requests)
        first = _take(begin, token_to_req, INT32_MAX)
        follows = own & (positions - _take(positions, first, 0) == token - first)
        last = follows & ~jnp.append(follows[1:] & (token_to_req[1:] == token_to_req[:-1]), False)[:tokens]
        real = follows & (token <= _take(_least(token, last, token_to_req, requests), token_to_req, -1))
        # The state before a token is looked up by the block table: it must be where that token's was saved.
        held = _state_slots(config, block_table, token_to_req, positions)
        slot_mapping = jnp.where(real & (slot_mapping == held), slot_mapping, -1)
        kv_slot_mapping = jnp.where(real, kv_slot_mapping, -1)
    request = jnp.where(real, token_to_req, -1)
    at = jnp.where(real, token_to_req, requests)
    seq_lens = jnp.zeros(requests, jnp.int32).at[at].max(positions + 1, mode="drop")

    closes = real & ((positions + 1) % m == 0) & (kv_slot_mapping >= 0)
    # A request closes at most one window more than its tokens fill.
    row, rows = _compact(closes, min(tokens, tokens // m + requests))
    position = rows(positions)
    if online:
        in_batch = jnp.clip(row - _take(begin, rows(request), INT32_MAX) + 1, 0, jnp.minimum(n, position + 1))
        before = jnp.where(in_batch < n, position - in_batch, -1)[:, None]
    else:
        back = jnp.arange(n, dtype=jnp.int32)
        before = position[:, None] - back[::-1]
        in_batch = _count_in_batch(row, position, rows(request), back, positions, token_to_req)
        # If the batch has earlier tokens of the request, these are not in the state cache either.
        first = _take(_least(positions, own, token_to_req, requests), rows(request), INT32_MAX)
        in_batch = jnp.where((in_batch < n) & (first <= position - in_batch), 0, in_batch)
    closing = [row, position, rows(kv_slot_mapping), in_batch]
    window_slots = _state_slots(config, block_table, rows(request)[:, None], before)

    if online:
        # A closing token leaves no state: the next token starts a new window.
        saves = real & (positions >= _take(seq_lens - config.page_rows, request, INT32_MAX)) & ((positions + 1) % m > 0)
        most = requests * config.page_rows
    else:
        needed = jnp.maximum(seq_lens - rollback, 0) // m * m - (m if config.overlap else 0)
        saves = real & (positions >= _take(needed, request, INT32_MAX))
        most = requests * (m - 1 + (m if config.overlap else 0) + rollback)
    row, rows = _compact(saves & (slot_mapping >= 0), min(tokens, most))
    saving = [row, rows(positions), rows(slot_mapping)]
    if online:
        saving.append(jnp.minimum(row - _take(begin, rows(request), INT32_MAX), rows(positions) % m) + 1)
        runs = _runs(config, seq_lens, positions, block_table, begin)
    return CompressorMetadata(
        positions,
        token_to_req,
        query_start_loc,
        slot_mapping,
        block_table,
        kv_slot_mapping,
        jnp.where(closing[0] >= 0, jnp.stack(closing), -1).T,
        jnp.where(closing[0][:, None] >= 0, window_slots, -1),
        jnp.where(row >= 0, jnp.stack(saving), -1).T,
        config.layout,
        runs,
    )


def _count_in_batch(row, position, request, back, positions, token_to_req):
    """How many batch rows, ending with a closing one, hold the last positions of its window in order."""
    at = row[:, None] - back
    wanted = position[:, None] - back
    there = (wanted >= 0) & (_take(positions, at, -1) == wanted) & (_take(token_to_req, at, -1) == request[:, None])
    return jnp.where(there, back.shape[0], back).min(axis=1)


def _runs(config, seq_lens, positions, block_table, begin):
    """`CompressorMetadata.runs`; `seq_lens` counts the tokens that the batch has, 0 where it has none."""
    requests = jnp.arange(block_table.shape[0], dtype=jnp.int32)
    first = _take(positions, begin, 0)
    before = jnp.where(first % config.compress_ratio > 0, first - 1, -1)
    runs = [begin, seq_lens - first, first, _state_slots(config, block_table, requests, before)]
    return jnp.where(seq_lens > 0, jnp.stack(runs), -1).T


def _least(values, where, token_to_req, requests):
    """Per request, the least value of its tokens that count; INT32_MAX if none does."""
    least = jnp.full(requests, INT32_MAX, jnp.int32)
    return least.at[jnp.where(where, token_to_req, requests)].min(values, mode="drop")


def _compact(mask, size):
    """The rows where the mask holds, padded with -1 to `size`, and a function that takes values at these rows."""
    (row,) = jnp.nonzero(mask, size=size, fill_value=-1)
    row = row.astype(jnp.int32)
    return row, lambda values: _take(values, row, -1)


def _take(values, index, missing):
    """`values[index]`; `missing` if the index is outside, which a negative one is."""
    if values.shape[0] == 0:
        return jnp.full(index.shape, missing, values.dtype)
    index = jnp.where(index >= 0, index, values.shape[0])
    return values.at[index].get(mode="fill", fill_value=missing)


def _state_slots(config, block_table, request, position):
    """The state slot of each position; -1 if it has no page."""
    if config.state == "online":
        position = jnp.where(position >= 0, position % config.page_rows, -1)
    return _slots(block_table, request, position, config.page_rows)


def _slots(block_table, request, index, page_rows):
    """`page * page_rows + row` of each index in its request; -1 if it has no page."""
    if block_table.size == 0:
        return jnp.full(jnp.broadcast_shapes(request.shape, index.shape), -1, jnp.int32)
    page = block_table.at[
        jnp.where(request >= 0, request, block_table.shape[0]),
        jnp.where(index >= 0, index // page_rows, block_table.shape[1]),
    ].get(mode="fill", fill_value=-1)
    # If a page's slots overflow int32, they must not wrap around into the cache.
    page = jnp.where(page <= INT32_MAX // page_rows - 1, page, -1)
    return jnp.where(page >= 0, page * page_rows + index % page_rows, -1)
