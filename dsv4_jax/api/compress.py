"""`compress`: from the projection's output to saved states and stored keys, in one pass."""

from typing import Literal, NamedTuple

import jax

from dsv4_jax import checks
from dsv4_jax.api.compress_norm_rope_store import check_store
from dsv4_jax.common.reference import compress as reference
from dsv4_jax.config import CompressorConfig
from dsv4_jax.metadata import CompressorMetadata
from dsv4_jax.nvidia import support
from dsv4_jax.op import Op
from dsv4_jax.platforms import Implementation

Save = Literal["tail", "all"]


def compress(
    kv_score: jax.Array,
    ape: jax.Array,
    state_cache: jax.Array,
    kv_cache: jax.Array,
    metadata: CompressorMetadata,
    norm_weight: jax.Array,
    cos_sin: jax.Array,
    *,
    config: CompressorConfig,
    save: Save = "tail",
    kv_scale: jax.Array | float | None = None,
    implementation: Implementation | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Saves states and stores the keys of windows that close, reading each input once.

    Rows of this batch come from `kv_score`, older rows of a window from the state cache. The keys are those of
    `save_partial_states` followed by `compress_norm_rope_store`, except that float32 sums may be made in another order
    (docs/compressor.md says how far this can go). No slot that this call writes may hold a row that one of its windows
    still needs.

    Args:
      kv_score: `[T, 2W]` float32 or bfloat16, the projection's output: kv in the first half, score in the second.
      ape: `[m, W]` float32, the position bias.
      state_cache: `[pages, page_rows, config.state_width]` float32; updated in place when donated.
      kv_cache: the cache of `config.format`; updated in place when donated.
      metadata: this step's `CompressorMetadata`.
      norm_weight: `[D]` float32 or bfloat16.
      cos_sin: `[P, 64]` float32, cos then sin, as `Yarn.table` makes it.
      config: the compressor.
      save: "tail" saves the states that a later step can need. "all" saves every token's state, for requests that share
        a prefix; the online state has no rows to share, and refuses it.
      kv_scale: `[]` float32, the divisor of values; needed for the format `fp8`, None for all others.
      implementation: "xla", "triton" or "cutedsl"; None lets the platform switch choose.

    Returns:
      The state cache and the cache.
    """
    checks.one_of("save", save, ("tail", "all"))
    checks.instance("config", config, CompressorConfig)
    if config.state == "online" and save == "all":
        raise ValueError(
            "save is 'all'; with the online state it must be 'tail': there are no rows to share, and a prefix that is "
            "shared up to a multiple of the compress ratio needs no state"
        )
    state_cache, kv_cache, metadata, norm_weight, cos_sin, kv_scale = check_store(
        state_cache, kv_cache, metadata, norm_weight, cos_sin, config, kv_scale
    )
    tokens = metadata.positions.shape[0]
    kv_score = checks.array("kv_score", kv_score, (tokens, 2 * config.width), checks.FLOATS)
    ape = checks.array("ape", ape, (config.compress_ratio, config.width))
    state_cache, kv_cache = OP(
        kv_score,
        ape,
        state_cache,
        kv_cache,
        metadata,
        norm_weight,
        cos_sin,
        kv_scale,
        implementation=implementation,
        config=config,
        save=save,
    )
    return state_cache, kv_cache


def _triton():
    from dsv4_jax.common.ops.compress import implement

    return implement


def _cutedsl():
    from dsv4_jax.nvidia.ops.compress import implement

    return implement


class Faster(NamedTuple):
    """Prefills that go to CuTeDSL: one compressor, a range of token counts."""

    layout: tuple[int, bool]  # compress_ratio, overlap
    tokens: range


# Where CuTeDSL was clearly faster on an H200, for save="tail" and kv_score in float32 and bfloat16: by 1 us (HCA, 512
# tokens) to 46 us (CSA in bfloat16, 131072 tokens). docs/performance.md has the times. All other batches go to Triton,
# decodes too: a model's step is captured in a command buffer, where both launches cost the same, but outside of one
# Python launches the CuTeDSL kernel, which takes about 80 us more than a Triton launch.
CUTEDSL_FASTER = (
    Faster((4, True), range(8192, 2**31)),
    Faster((128, False), range(512, 2049)),
    Faster((128, False), range(32768, 2**31)),
)


def _preference(kv_score, ape, state_cache, kv_cache, metadata, *_, config, save):
    layout = config.compress_ratio, config.overlap
    measured = any(faster.layout == layout and kv_score.shape[0] in faster.tokens for faster in CUTEDSL_FASTER)
    return ("cutedsl", "triton") if measured and save == "tail" and metadata.prefill else ("triton",)


OP = Op(
    "compress",
    updates=(2, 3),
    xla=reference.implement,
    triton=_triton,
    cutedsl=_cutedsl,
    why_not=support.why_not,
    preference=_preference,
    measured_on=("sm_90",),
    fp8=lambda *, config, **_: config.format.fp8,
)
