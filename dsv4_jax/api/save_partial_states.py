"""`save_partial_states`: writes each token's kv and biased score to its row of the state cache."""

import jax
import jax.numpy as jnp

from dsv4_jax import checks
from dsv4_jax.common.reference import save_partial_states as reference
from dsv4_jax.op import Op
from dsv4_jax.platforms import Implementation


def save_partial_states(
    kv: jax.Array,
    score: jax.Array,
    ape: jax.Array,
    positions: jax.Array,
    state_cache: jax.Array,
    slot_mapping: jax.Array,
    *,
    compress_ratio: int,
    implementation: Implementation | None = None,
) -> jax.Array:
    """Writes `kv[t]` and `score[t] + ape[positions[t] % compress_ratio]` at each token's slot.

    Args:
      kv: `[T, W]` float32 or bfloat16.
      score: `[T, W]`, of the same dtype as kv.
      ape: `[compress_ratio, W]` float32, the position bias.
      positions: `[T]` int32; a token with a negative position writes nothing.
      state_cache: `[pages, page_rows, 2W]` float32, kv in the first half of a row; updated in place when donated.
      slot_mapping: `[T]` int32, `page * page_rows + row`, distinct; a slot outside the cache writes nothing.
      compress_ratio: m, tokens per key.
      implementation: "xla" or "triton"; None lets the platform switch choose.

    Returns:
      The state cache.
    """
    checks.at_least("compress_ratio", compress_ratio, 1)
    tokens, width = checks.array("kv", kv, ("T", "W"), checks.FLOATS).shape
    kv = jnp.asarray(kv)
    score = checks.array("score", score, (tokens, width), (kv.dtype,))
    ape = checks.array("ape", ape, (compress_ratio, width))
    positions = checks.integers("positions", positions, (tokens,))
    state_cache = checks.array("state_cache", state_cache, ("pages", "page_rows", 2 * width))
    slot_mapping = checks.integers("slot_mapping", slot_mapping, (tokens,))
    (state_cache,) = OP(kv, score, ape, positions, state_cache, slot_mapping, implementation=implementation)
    return state_cache


def _triton():
    from dsv4_jax.common.ops.save_partial_states import implement

    return implement


OP = Op("save_partial_states", updates=(4,), xla=reference.implement, triton=_triton)
