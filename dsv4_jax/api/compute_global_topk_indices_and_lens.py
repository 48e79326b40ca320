"""`compute_global_topk_indices_and_lens`: turns rows of a request into rows of the paged cache."""

import jax
import jax.numpy as jnp

from dsv4_jax import checks
from dsv4_jax.common.reference import compute_global_topk_indices_and_lens as reference
from dsv4_jax.op import Op
from dsv4_jax.platforms import Implementation


def compute_global_topk_indices_and_lens(
    topk_indices: jax.Array,
    token_to_req: jax.Array,
    block_table: jax.Array,
    page_rows: int,
    is_valid_token: jax.Array,
    *,
    implementation: Implementation | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Gives `block_table[r, i // page_rows] * page_rows + i % page_rows` for each index i of a token of request r.

    Args:
      topk_indices: `[T, K]` int32, rows of the compressed cache, counted within the token's request; negative: none.
      token_to_req: `[T]` int32, each token's row of `block_table`.
      block_table: `[R, B]` int32, the pages of each request; negative: none.
      page_rows: rows per page.
      is_valid_token: `[T]` bool; False for padding. It changes only `lens`.
      implementation: "xla" or "triton"; None lets the platform switch choose.

    Returns:
      indices: `[T, K]` int32, rows of the whole cache, each in the place of its local index. An entry is -1 if its
        index is negative, its request or column is outside the table, its page is negative, or its page's last row does
        not fit int32.
      lens: `[T]` int32, how many of a token's indices are not -1; 0 where the token is not valid.
    """
    topk_indices = checks.integers("topk_indices", topk_indices, ("T", "K"))
    tokens = topk_indices.shape[0]
    token_to_req = checks.integers("token_to_req", token_to_req, (tokens,))
    block_table = checks.integers("block_table", block_table, ("R", "B"))
    page_rows = checks.at_least("page_rows", page_rows, 1)
    is_valid_token = checks.array("is_valid_token", is_valid_token, (tokens,), (jnp.bool_,))
    indices, lens = OP(
        topk_indices, token_to_req, block_table, is_valid_token, page_rows=page_rows, implementation=implementation
    )
    return indices, lens


def _outputs(topk_indices, *_, **__):
    """The types of `indices` and `lens`."""
    return jax.ShapeDtypeStruct(topk_indices.shape, jnp.int32), jax.ShapeDtypeStruct(topk_indices.shape[:1], jnp.int32)


def _triton():
    from dsv4_jax.common.ops.compute_global_topk_indices_and_lens import implement

    return implement


OP = Op("compute_global_topk_indices_and_lens", outputs=_outputs, xla=reference.implement, triton=_triton)
