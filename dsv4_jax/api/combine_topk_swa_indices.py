"""`combine_topk_swa_indices`: lists the gathered rows that each query attends to, top-k keys before the window."""

import jax
import jax.numpy as jnp

from dsv4_jax import checks
from dsv4_jax.common.reference import combine_topk_swa_indices as reference
from dsv4_jax.op import Op
from dsv4_jax.platforms import Implementation

ALIGN = 128  # the width of a row of indices is a multiple of this


def combine_topk_swa_indices(
    topk_indices: jax.Array,
    query_start_loc: jax.Array,
    seq_lens: jax.Array,
    gather_lens: jax.Array,
    window_size: int,
    compress_ratio: int,
    topk: int,
    M: int,
    N: int,
    *,
    implementation: Implementation | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Lists, for each query token, the rows of a gathered buffer that it attends to.

    The buffer has M rows per request: the compressed keys from row 0, the keys of the last `gather_lens[b]` tokens from
    row N. `dequantize_and_gather_k_cache` fills it. A token at position p of request b gets these indices, in this
    order:

      1. the first `min((p + 1) // compress_ratio, topk)` of the token's `topk_indices`, each plus `M * b`;
      2. `M * b + N + q - (seq_lens[b] - gather_lens[b])` for q from `max(p - window_size + 1, 0)` to p;
      3. -1 to the end.

    Args:
      topk_indices: `[T, K]` int32, the compressed rows that each query token selected, counted within its request.
      query_start_loc: `[R + 1]` int32, the first token of each request, then the end. Tokens count from
        `query_start_loc[0]`, so this may be a slice of a longer array.
      seq_lens: `[R]` int32, the length of each request. Its last tokens are those of this batch.
      gather_lens: `[R]` int32, how many of its last tokens were gathered, from 0 to `seq_lens`.
      window_size: tokens of the sliding window, including the query's own.
      compress_ratio: m, tokens per compressed row.
      topk: how many of `topk_indices` are used, from 0 to K.
      M: rows of the buffer per request; `M * R` must be below 2**31.
      N: rows before the gathered tokens, from 0 to M.
      implementation: "xla" or "triton"; None lets the platform switch choose.

    Returns:
      indices: `[T, W]` int32, W being `topk + window_size` rounded up to a multiple of 128. An entry is -1 if
        its row is not in the buffer: a top-k index outside `[0, N)`, a token before the gathered ones, a row of M or
        more. So is a top-k index of `(p + 1) // compress_ratio` or more, whose key holds tokens after p.
      lens: `[T]` int32, how many entries 1. and 2. have together. A token that is in no request, or whose request has
        lengths outside the ranges above, gets a row of -1 and length 0.
    """
    topk_indices = checks.integers("topk_indices", topk_indices, ("T", "K"))
    seq_lens = checks.integers("seq_lens", seq_lens, ("R",))
    requests = seq_lens.shape[0]
    query_start_loc = checks.integers("query_start_loc", query_start_loc, (requests + 1,))
    gather_lens = checks.integers("gather_lens", gather_lens, (requests,))
    window_size = checks.at_least("window_size", window_size, 1)
    compress_ratio = checks.at_least("compress_ratio", compress_ratio, 1)
    topk = checks.at_least("topk", topk, 0)
    M = checks.at_least("M", M, 0)
    N = checks.at_least("N", N, 0)
    if topk > topk_indices.shape[1]:
        raise ValueError(f"topk is {topk}; it must be at most {topk_indices.shape[1]}, the columns of topk_indices")
    if N > M:
        raise ValueError(f"N is {N}; it must be at most M, {M}")
    if M * requests >= 2**31:
        raise ValueError(f"M is {M}; M times {requests} requests must be below 2**31")
    indices, lens = OP(
        topk_indices,
        query_start_loc,
        seq_lens,
        gather_lens,
        window_size=window_size,
        compress_ratio=compress_ratio,
        topk=topk,
        M=M,
        N=N,
        implementation=implementation,
    )
    return indices, lens


def _outputs(topk_indices, *_, window_size, topk, **__):
    """The types of `indices` and `lens`."""
    tokens, width = topk_indices.shape[0], -(-(topk + window_size) // ALIGN) * ALIGN
    return jax.ShapeDtypeStruct((tokens, width), jnp.int32), jax.ShapeDtypeStruct((tokens,), jnp.int32)


def _triton():
    from dsv4_jax.common.ops.combine_topk_swa_indices import implement

    return implement


OP = Op("combine_topk_swa_indices", outputs=_outputs, xla=reference.implement, triton=_triton)
