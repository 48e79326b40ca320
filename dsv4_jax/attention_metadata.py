"""Which rows each token of a step attends to: one pytree, shared by all attention layers."""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from dsv4_jax import checks
from dsv4_jax.metadata import _slots, _take

CSA_RATIO = 4
HCA_RATIO = 128


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AttentionMetadata:
    """The rows that one step's tokens attend to, and how much of each request is to be gathered for a prefill.

    T tokens of R requests lie one request after another, each request's tokens in position order. Everything is int32,
    and everything is data: new values need no new compilation. A token of padding has position and request -1, no row,
    and length 0.

    Attributes:
      positions: `[T]`, position p of each token in its request.
      token_to_req: `[T]`, request of each token.
      slot_mapping: `[T]`, row of the window cache that the token's own key goes to, -1 where there is none.
      window_indices: `[T, window]`, rows of the window cache of positions `max(p - window + 1, 0)` to p, ascending,
        then -1; -1 too where the block table has no page.
      window_lens: `[T]`, `min(p + 1, window)`.
      csa_lens: `[T]`, `(p + 1) // 4`: the compressed rows of a CSA layer that the indexer chooses from.
      hca_lens: `[T]`, `(p + 1) // 128`: the compressed rows of an HCA layer, all of which count.
      hca_indices: `[T, N]`, these rows in the HCA cache, then -1; None where no block table was given.
      gather_lens: `[R]`, how many of a request's last window keys its tokens of this step attend to:
        `query_len + min(prefix, window - 1)`, 0 without tokens; `dequantize_and_gather_k_cache` takes it.
      page_rows: rows of a page of the window cache and of the HCA cache; static.
    """

    positions: jax.Array
    token_to_req: jax.Array
    slot_mapping: jax.Array
    window_indices: jax.Array
    window_lens: jax.Array
    csa_lens: jax.Array
    hca_lens: jax.Array
    hca_indices: jax.Array | None
    gather_lens: jax.Array
    page_rows: tuple[int, int] = dataclasses.field(metadata={"static": True})

    @classmethod
    def build(
        cls,
        query_start_loc: jax.Array,
        seq_lens: jax.Array,
        block_table: jax.Array,
        hca_block_table: jax.Array | None = None,
        *,
        num_tokens: int,
        window: int = 128,
        page_rows: int = 64,
        hca_page_rows: int = 2,
    ) -> "AttentionMetadata":
        """Builds one step's metadata from what a scheduler has. Works under `jax.jit`.

        Args:
          query_start_loc: `[R + 1]` int32, first batch row of each request; rows past the last entry are padding. A
            request may have no token.
          seq_lens: `[R]` int32, tokens of each request so far, this step's included. Tokens of a request that has more
            in the batch than that are padding.
          block_table: `[R, B]` int32, pages of the window cache, by `position // page_rows`; negative where there is
            none, as once the window has passed.
          hca_block_table: `[R, C]` int32, pages of the HCA cache, by `position // 128 // hca_page_rows`; None leaves
            `hca_indices` out. Its columns give N: `C * hca_page_rows`.
          num_tokens: T, the batch's length, padding included.
          window: tokens of the sliding window, the query's own among them.
          page_rows: rows of a page of the window cache.
          hca_page_rows: rows of a page of the HCA cache.
        """
        seq_lens = checks.integers("seq_lens", seq_lens, ("R",))
        requests = seq_lens.shape[0]
        query_start_loc = checks.integers("query_start_loc", query_start_loc, (requests + 1,))
        block_table = checks.integers("block_table", block_table, (requests, "B"))
        if hca_block_table is not None:
            hca_block_table = checks.integers("hca_block_table", hca_block_table, (requests, "C"))
        return _build(
            query_start_loc,
            seq_lens,
            block_table,
            hca_block_table,
            num_tokens=checks.at_least("num_tokens", num_tokens, 0),
            window=checks.at_least("window", window, 1),
            page_rows=checks.at_least("page_rows", page_rows, 1),
            hca_page_rows=checks.at_least("hca_page_rows", hca_page_rows, 1),
        )

    def at_layer(
        self, layer: jax.Array | int, pages: int, hca_layer: jax.Array | int = 0, hca_pages: int | None = None
    ) -> "AttentionMetadata":
        """The same step in caches that hold several layers, one after another along the page axis.

        What lies outside a layer's own pages stays outside. Works under `jax.jit` and in `scan` over layers.

        Args:
          layer: `[]` int32, which of the window cache's layers, from 0.
          pages: pages of one layer of the window cache; all layers' rows together must be fewer than 2**31.
          hca_layer: `[]` int32, which of the HCA cache's layers.
          hca_pages: pages of one layer of the HCA cache; with None, `hca_indices` stay as they are.
        """
        rows, hca_rows = self.page_rows

        def move(indices, layer, size):
            return jnp.where((indices >= 0) & (indices < size), indices + layer * size, -1).astype(jnp.int32)

        hca_indices = self.hca_indices
        if hca_indices is not None and hca_pages is not None:
            hca_indices = move(hca_indices, hca_layer, hca_pages * hca_rows)
        return dataclasses.replace(
            self,
            slot_mapping=move(self.slot_mapping, layer, pages * rows),
            window_indices=move(self.window_indices, layer, pages * rows),
            hca_indices=hca_indices,
        )


# Jitted, so that eager calls cost one launch instead of dozens.
@functools.partial(jax.jit, static_argnames=("num_tokens", "window", "page_rows", "hca_page_rows"))
def _build(
    query_start_loc, seq_lens, block_table, hca_block_table, *, num_tokens, window, page_rows, hca_page_rows
):  # fmt: skip
    token = jnp.arange(num_tokens, dtype=jnp.int32)
    request = jnp.searchsorted(query_start_loc, token, side="right").astype(jnp.int32) - 1
    end = _take(query_start_loc[1:], request, -1)  # no request ends at -1
    position = _take(seq_lens, request, 0) - (end - token)
    real = (end >= 0) & (position >= 0)
    request, position = jnp.where(real, request, -1), jnp.where(real, position, -1)

    window_lens = jnp.minimum(position + 1, window)
    column = jnp.arange(window, dtype=jnp.int32)
    at = jnp.where(column < window_lens[:, None], (position - window_lens + 1)[:, None] + column, -1)
    hca_lens, hca_indices = (position + 1) // HCA_RATIO, None
    if hca_block_table is not None:
        row = jnp.arange(hca_block_table.shape[1] * hca_page_rows, dtype=jnp.int32)
        row = jnp.where(row < hca_lens[:, None], row, -1)
        hca_indices = _slots(hca_block_table, request[:, None], row, hca_page_rows)
    query_lens = jnp.clip(jnp.diff(query_start_loc), 0, jnp.maximum(seq_lens, 0))
    prefix = jnp.maximum(seq_lens, 0) - query_lens
    return AttentionMetadata(
        positions=position,
        token_to_req=request,
        slot_mapping=_slots(block_table, request, position, page_rows),
        window_indices=_slots(block_table, request[:, None], at, page_rows),
        window_lens=window_lens,
        csa_lens=(position + 1) // CSA_RATIO,
        hca_lens=hca_lens,
        hca_indices=hca_indices,
        gather_lens=jnp.where(query_lens > 0, query_lens + jnp.minimum(prefix, window - 1), 0),
        page_rows=(page_rows, hca_page_rows),
    )
