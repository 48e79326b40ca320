"""`sparse_mla_decode`: attention over rows of one or two paged caches, read in place."""

import jax
import jax.numpy as jnp

from dsv4_jax import checks
from dsv4_jax.cache import CACHE_FORMATS, ROPE_DIM
from dsv4_jax.common.reference import sparse_mla_decode as reference
from dsv4_jax.op import Op
from dsv4_jax.platforms import Implementation

HEAD_DIM = 512
FORMATS = tuple(name for name, fmt in CACHE_FORMATS.items() if fmt.head_dim == HEAD_DIM)


def sparse_mla_decode(
    q: jax.Array,
    window_cache: jax.Array,
    window_indices: jax.Array,
    window_lens: jax.Array,
    sink: jax.Array,
    *,
    window_page_rows: int,
    cache: jax.Array | None = None,
    indices: jax.Array | None = None,
    lens: jax.Array | None = None,
    page_rows: int | None = None,
    cache_format: str = "fp8_ds_mla",
    kv_scale: jax.Array | float | None = None,
    softmax_scale: float = HEAD_DIM**-0.5,
    return_lse: bool = False,
    positions: jax.Array | None = None,
    cos_sin: jax.Array | None = None,
    quant_group_size: int | None = None,
    tma_aligned_scales: bool = False,
    implementation: Implementation | None = None,
) -> jax.Array | tuple[jax.Array, ...]:
    """Attends with each token's heads to rows of its sliding window and, optionally, of a compressed cache.

    A key is also its value. Over the keys k_j of token t, those of both caches together,

      l_j = q·k_j · softmax_scale,  o = Σ_j e^(l_j) k_j / (Σ_j e^(l_j) + e^sink),  lse = log Σ_j e^(l_j).

    A key counts where its column is below the row's length and its index names a row of the cache; any other index,
    as -1, is no key, and what lies there is not read. A token without a key has o = 0 and lse = +inf. A row that is
    named twice counts twice.

    Keys are dequantized to bfloat16. Scores, softmax and both sums are in float32; the weights e^(l_j - max) are
    rounded to bfloat16 for the sum over keys, and not for the denominator. How the keys are divided into partial sums
    is the implementation's choice, so results may differ in the last bits.

    With `positions` and `cos_sin` o is rotated back, and with `quant_group_size` also quantized, exactly as
    `fused_inv_rope_fp8_quant` does it to o in bfloat16. Heads of a group being consecutive, a reshape gives its layout.

    Args:
      q: `[T, H, 512]` bfloat16, after RoPE; any number of heads.
      window_cache: of `cache_format`, as `CacheFormat.allocate` makes it.
      window_indices: `[T, K]` int32, rows of `window_cache`: `page * window_page_rows + row`.
      window_lens: `[T]` int32, how many of a token's indices count; clipped to 0..K.
      sink: `[H]` float32, one logit per head.
      window_page_rows: rows of a page of `window_cache`.
      cache: a second cache of the same format, such as the compressed one; with `indices`, `lens` and `page_rows`, or
        None.
      indices: `[T, N]` int32.
      lens: `[T]` int32.
      page_rows: rows of a page of `cache`.
      cache_format: "fp8_ds_mla", "bf16" or "fp8".
      kv_scale: `[]` float32, what values of both caches are multiplied by; for the format `fp8` alone, needed there.
      softmax_scale: a static number.
      return_lse: whether to return lse, too.
      positions: `[T]` int32, of the tokens; a token outside the RoPE table gets zeros.
      cos_sin: `[P, 64]` float32, cos then sin, as `Yarn.table` makes it.
      quant_group_size: channels that share a scale: 32, 64 or 128; None: no quantization.
      tma_aligned_scales: scales as UE8M0 bytes, four to an int32, instead of float32.
      implementation: "xla", "triton" or None: the platform switch chooses.

    Returns:
      o `[T, H, 512]` bfloat16; quantized instead values `[T, H, 512]` float8_e4m3fn and scales `[T, H, B]` float32, B
      being `512 // quant_group_size`, or `[T, H, B // 4]` int32; then lse `[T, H]` float32 if it was asked for. A tuple
      if there is more than one.
    """
    checks.one_of("cache_format", cache_format, FORMATS)
    fmt = CACHE_FORMATS[cache_format]
    q, sink, options = check_queries(
        q, sink, softmax_scale, return_lse, positions, cos_sin, quant_group_size, tma_aligned_scales
    )
    tokens = q.shape[0]

    def check_rows(prefix, cache, indices, lens, page_rows):
        page_rows = checks.at_least(f"{prefix}page_rows", page_rows, 1)
        fmt.check_cache(f"{prefix}cache", cache, page_rows)
        return (
            checks.array(f"{prefix}cache", cache, cache.shape, (fmt.dtype,)),
            checks.integers(f"{prefix}indices", indices, (tokens, "K")),
            checks.integers(f"{prefix}lens", lens, (tokens,)),
            page_rows,
        )

    *window, window_page_rows = check_rows("window_", window_cache, window_indices, window_lens, window_page_rows)
    second = {"cache": cache, "indices": indices, "lens": lens, "page_rows": page_rows}
    given = [name for name, value in second.items() if value is not None]
    if given and len(given) < len(second):
        missing = ", ".join(name for name in second if name not in given)
        raise ValueError(f"{missing} is None; it must be given together with {', '.join(given)}")
    rows = (None, None, None)
    if given:
        *rows, page_rows = check_rows("", **second)
    kv_scale = fmt.check_scale("kv_scale", kv_scale)
    results = OP(
        q,
        *window,
        sink,
        *rows,
        kv_scale,
        *options.pop("rope"),
        implementation=implementation,
        cache_format=cache_format,
        window_page_rows=window_page_rows,
        page_rows=page_rows,
        **options,
    )
    return results if len(results) > 1 else results[0]


def check_queries(q, sink, softmax_scale, return_lse, positions, cos_sin, quant_group_size, tma_aligned_scales):
    """Checks what both attention ops take; returns q, sink, and the parameters with `rope`: positions and cos_sin."""
    q = checks.array("q", q, ("T", "H", HEAD_DIM), (jnp.bfloat16,))
    sink = checks.array("sink", sink, (q.shape[1],))
    softmax_scale = checks.positive("softmax_scale", softmax_scale)
    checks.instance("return_lse", return_lse, bool)
    checks.instance("tma_aligned_scales", tma_aligned_scales, bool)
    if (positions is None) != (cos_sin is None):
        name = "positions" if positions is None else "cos_sin"
        raise ValueError(f"{name} is None; positions and cos_sin must be given together, or neither")
    if positions is not None:
        positions = checks.integers("positions", positions, (q.shape[0],))
        cos_sin = checks.array("cos_sin", cos_sin, ("P", ROPE_DIM))
    if quant_group_size is not None:
        checks.one_of("quant_group_size", quant_group_size, (32, 64, 128))
        quant_group_size = checks.at_least("quant_group_size", quant_group_size, 32)
        if positions is None:
            raise ValueError("positions is None; with quant_group_size, positions and cos_sin must be given")
    options = {
        "rope": (positions, cos_sin),
        "softmax_scale": softmax_scale,
        "return_lse": return_lse,
        "quant_group_size": quant_group_size,
        "tma_aligned_scales": tma_aligned_scales,
    }
    return q, sink, options


def outputs(q, *_, return_lse, quant_group_size, tma_aligned_scales, **__):
    """The types of both attention ops' results."""
    tokens, heads, _ = q.shape
    if quant_group_size is None:
        types = (jax.ShapeDtypeStruct(q.shape, jnp.bfloat16),)
    else:
        blocks = HEAD_DIM // quant_group_size
        scales = (blocks // 4, jnp.int32) if tma_aligned_scales else (blocks, jnp.float32)
        types = (
            jax.ShapeDtypeStruct(q.shape, jnp.float8_e4m3fn),
            jax.ShapeDtypeStruct((tokens, heads, scales[0]), scales[1]),
        )
    return (*types, jax.ShapeDtypeStruct((tokens, heads), jnp.float32)) if return_lse else types


def _triton():
    from dsv4_jax.common.ops.sparse_mla_decode import implement

    return implement


OP = Op(
    "sparse_mla_decode",
    outputs=outputs,
    xla=reference.implement,
    triton=_triton,
    fp8=lambda *, cache_format, quant_group_size, **_: cache_format != "bf16" or quant_group_size is not None,
)
