"""`sparse_mla_prefill`: attention over rows of one gathered buffer."""

import jax
import jax.numpy as jnp

from dsv4_jax import checks
from dsv4_jax.api.sparse_mla_decode import HEAD_DIM, check_queries, outputs
from dsv4_jax.common.reference import sparse_mla_prefill as reference
from dsv4_jax.op import Op
from dsv4_jax.platforms import Implementation


def sparse_mla_prefill(
    q: jax.Array,
    kv: jax.Array,
    indices: jax.Array,
    lens: jax.Array,
    sink: jax.Array,
    *,
    softmax_scale: float = HEAD_DIM**-0.5,
    return_lse: bool = False,
    positions: jax.Array | None = None,
    cos_sin: jax.Array | None = None,
    quant_group_size: int | None = None,
    tma_aligned_scales: bool = False,
    implementation: Implementation | None = None,
) -> jax.Array | tuple[jax.Array, ...]:
    """Attends with each token's heads to rows of a gathered bfloat16 buffer; the formula is `sparse_mla_decode`'s.

    `dequantize_and_gather_k_cache` fills the buffer and `combine_topk_swa_indices` lists the rows. A row counts where
    its column is below the token's length and its index is in the buffer; any other index, as -1, is no key.

    Args:
      q: `[T, H, 512]` bfloat16, after RoPE; any number of heads.
      kv: `[rows, 512]` bfloat16.
      indices: `[T, K]` int32, rows of `kv`.
      lens: `[T]` int32, how many of a token's indices count; clipped to 0..K.
      sink: `[H]` float32, one logit per head.
      softmax_scale: a static number.
      return_lse: whether to return lse, too.
      positions: `[T]` int32, of the tokens; a token outside the RoPE table gets zeros.
      cos_sin: `[P, 64]` float32, cos then sin, as `Yarn.table` makes it.
      quant_group_size: channels that share a scale: 32, 64 or 128; None: no quantization.
      tma_aligned_scales: scales as UE8M0 bytes, four to an int32, instead of float32.
      implementation: "xla", "triton" or None: the platform switch chooses.

    Returns:
      As `sparse_mla_decode`.
    """
    q, sink, options = check_queries(
        q, sink, softmax_scale, return_lse, positions, cos_sin, quant_group_size, tma_aligned_scales
    )
    tokens = q.shape[0]
    kv = checks.array("kv", kv, ("rows", HEAD_DIM), (jnp.bfloat16,))
    indices = checks.integers("indices", indices, (tokens, "K"))
    lens = checks.integers("lens", lens, (tokens,))
    results = OP(q, kv, indices, lens, sink, *options.pop("rope"), implementation=implementation, **options)
    return results if len(results) > 1 else results[0]


def _triton():
    from dsv4_jax.common.ops.sparse_mla_prefill import implement

    return implement


OP = Op(
    "sparse_mla_prefill",
    outputs=outputs,
    xla=reference.implement,
    triton=_triton,
    fp8=lambda *, quant_group_size, **_: quant_group_size is not None,
)
