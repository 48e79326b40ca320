"""Calls of every op, by cache format, dtype and shape of the batch: what the lowering tests lower."""

import functools
import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp

import dsv4_jax
from dsv4_jax import CACHE_FORMATS, CompressorConfig, CompressorMetadata

FP8_FORMATS = ("fp8_ds_mla", "fp8", "indexer_fp8")


class Case(NamedTuple):
    """One call of a public function.

    Attributes:
      op: its name.
      arrays: its arguments that are arrays, their types by name.
      params: the others.
      updated: names of `arrays` that it updates in place, in the order of its results.
      fp8: whether it converts to or from fp8.
    """

    op: str
    arrays: dict
    params: dict
    updated: tuple[str, ...] = ()
    fp8: bool = False

    def __str__(self):
        return f"{self.op}({', '.join(f'{k}={_short(v)}' for k, v in (self.arrays | self.params).items())})"

    def lower(self, platform: str, implementation: str | None = "triton"):
        """As users lower it: jitted, its caches donated."""
        function = functools.partial(getattr(dsv4_jax, self.op), **self.params, implementation=implementation)
        jitted = jax.jit(function, donate_argnames=self.updated)
        return jitted.trace(**self.arrays).lower(lowering_platforms=(platform,))


def cases() -> list[Case]:
    """All calls; between them they launch every kernel in every specialization that the ops choose themselves."""
    return [
        *_compressors(),
        *_online(),
        *_saves(),
        *_indices(),
        *_megamoe(),
        *_heads(),
        *_norms(),
        *_keys(),
        *_attention(),
    ]


def representatives() -> list[Case]:
    """The first call of each op with each compressor and cache format; of the online state two batches."""
    kinds = {}
    for case in cases():
        kind = case.params.get("cache_format")
        if config := case.params.get("config"):
            tokens = case.arrays["cos_sin"].shape if config.state == "online" else ()
            kind = config.cache_format, config.compress_ratio, config.state, *tokens
        kinds.setdefault((case.op, kind, case.fp8), case)
    return list(kinds.values())


def _short(value):
    if isinstance(value, CompressorConfig):
        return f"{value.compress_ratio}/{value.cache_format}/{value.state}"
    if isinstance(value, CompressorMetadata):
        return f"{value.block_table.shape[0]} requests"
    return jax.typeof(value).str_short(True) if isinstance(value, jax.ShapeDtypeStruct) else value


def _array(dtype, *shape):
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


_i32 = functools.partial(_array, jnp.int32)
_f32 = functools.partial(_array, jnp.float32)
_bf16 = functools.partial(_array, jnp.bfloat16)


def _cache(cache_format, pages, page_rows, **options):
    return jax.eval_shape(lambda: cache_format.allocate(pages, page_rows, **options))


def _metadata(config, tokens, requests):
    columns = 1 if config.state == "online" else tokens // config.page_rows
    build = functools.partial(CompressorMetadata.build, config, num_tokens=tokens)
    return jax.eval_shape(build, _i32(requests + 1), _i32(requests), _i32(requests, columns), _i32(requests, 8))


def _compress(config, dtype, tokens, requests, save="tail"):
    stored = {
        "state_cache": _f32(8, config.page_rows, config.state_width),
        "kv_cache": _cache(config.format, 8, config.kv_page_rows),
        "metadata": _metadata(config, tokens, requests),
        "norm_weight": _array(dtype, config.head_dim),
        "cos_sin": _f32(tokens, 64),
    }
    batch = {"kv_score": _array(dtype, tokens, 2 * config.width), "ape": _f32(config.compress_ratio, config.width)}
    params = {"config": config} | _scale(config.cache_format)
    fp8 = config.cache_format in FP8_FORMATS
    yield Case("compress", batch | stored, params | {"save": save}, ("state_cache", "kv_cache"), fp8)
    if config.state == "rows" and save == "tail" and requests == 1:
        yield Case("compress_norm_rope_store", stored, params, ("kv_cache",), fp8)


def _scale(cache_format):
    return {"kv_scale": 0.5} if CACHE_FORMATS[cache_format].needs_scale else {}


def _compressors():
    for make, formats in (
        (CompressorConfig.csa, ("fp8_ds_mla", "bf16", "fp8")),
        (CompressorConfig.hca, ("fp8_ds_mla", "bf16", "fp8")),
        (CompressorConfig.indexer, ("indexer_fp8", "indexer_mxfp4")),
    ):
        for name, dtype in itertools.product(formats, ("float32", "bfloat16")):
            yield from _compress(make(name), dtype, 256, 1)
            if name == formats[0]:
                yield from _compress(make(name), dtype, 256, 1, save="all")
                # Batches of a few tokens a request and decodes have kernels of their own.
                yield from _compress(make(name), dtype, 256, 128)
                yield from _compress(make(name), dtype, 256, 256)


def _online():
    """HCA with the online state: a short batch of a page's rows a request, and a long one."""
    for (name, page_rows), dtype in itertools.product((("fp8_ds_mla", 1), ("bf16", 4)), ("float32", "bfloat16")):
        config = CompressorConfig.hca(name, page_rows=page_rows, state="online")
        for tokens in (2 * page_rows, 256):
            yield from _compress(config, dtype, tokens, 2)


def _saves():
    for width, dtype in ((16, "float32"), (768, "float32"), (1000, "float32"), (1024, "float32"), (1024, "bfloat16")):
        arrays = {
            "kv": _array(dtype, 4, width),
            "score": _array(dtype, 4, width),
            "ape": _f32(4, width),
            "positions": _i32(4),
            "state_cache": _f32(2, 4, 2 * width),
            "slot_mapping": _i32(4),
        }
        yield Case("save_partial_states", arrays, {"compress_ratio": 4}, ("state_cache",))


def _indices():
    for topk in (3, 512, 2048):
        indices = {"topk_indices": _i32(9, topk)}
        rest = {"token_to_req": _i32(9), "block_table": _i32(2, 5), "is_valid_token": _array(bool, 9)}
        yield Case("compute_global_topk_indices_and_lens", indices | rest, {"page_rows": 64})
        rest = {"query_start_loc": _i32(3), "seq_lens": _i32(2), "gather_lens": _i32(2)}
        params = {"window_size": 128, "compress_ratio": 4, "M": 100, "N": 60}
        for used in (0, topk):
            yield Case("combine_topk_swa_indices", indices | rest, params | {"topk": used})


def _megamoe():
    arrays = {"hidden": _bf16(9, 4096), "topk_weights": _f32(9, 6), "topk_ids": _i32(9, 6)}
    for padding in ({}, {"is_padding": _array(bool, 9)}):
        yield Case("prepare_megamoe_inputs", arrays | padding, {}, fp8=True)


def _heads():
    """The ops that rotate and quantize the heads of queries and of attention's output."""
    place = {"positions": _i32(9), "cos_sin": _f32(20, 64)}
    for heads, dtype, use_fp4 in ((64, "bfloat16", False), (64, "bfloat16", True), (3, "float32", False)):
        arrays = place | {"q": _array(dtype, 9, heads, 128), "weights": _array(dtype, 9, heads)}
        params = {"softmax_scale": 128**-0.5, "head_scale": heads**-0.5, "use_fp4": use_fp4}
        yield Case("fused_indexer_q_rope_quant", arrays, params, fp8=not use_fp4)
    for heads, packed, size in ((64, False, 128), (64, True, 128), (6, True, 32)):
        arrays = place | {"o": _bf16(9, heads, 512)}
        params = {"n_groups": heads // 2, "heads_per_group": 2, "quant_group_size": size, "tma_aligned_scales": packed}
        for quantize in (True, False):
            yield Case("fused_inv_rope_fp8_quant", arrays, params | {"quantize": quantize}, fp8=quantize)


def _norms():
    """The RMSNorms of q and kv; heads normalized and rotated, keys stored."""
    for dtype, tokens, q_width, kv_width in (
        ("bfloat16", 9, 1024, 512),
        ("bfloat16", 9, 1536, 512),
        ("float32", 9, 1536, 512),
        ("bfloat16", 1, 1000, 5000),
    ):
        arrays = {
            "q": _array(dtype, tokens, q_width),
            "kv": _array(dtype, tokens, kv_width),
            "q_weight": _f32(q_width),
            "kv_weight": _f32(kv_width),
        }
        yield Case("fused_q_kv_rmsnorm", arrays, {})
    for name, heads, padded_heads in (("fp8_ds_mla", 64, 64), ("bf16", 3, 11), ("fp8", 128, 128)):
        arrays = {
            "q": _bf16(9, heads, 512),
            "kv": _bf16(9, 512),
            "cache": _cache(CACHE_FORMATS[name], 8, 64),
            "slots": _i32(9),
            "positions": _i32(9),
            "cos_sin": _f32(20, 64),
        }
        params = {"padded_heads": padded_heads, "cache_format": name, "page_rows": 64} | _scale(name)
        yield Case("fused_qnorm_rope_kv_rope_quant_insert", arrays, params, ("cache",), name in FP8_FORMATS)


def _keys():
    """Keys into a cache and out of it; one page of rows that 4-byte alignment alone allows, too."""
    for (name, fmt), (page_rows, dtype) in itertools.product(CACHE_FORMATS.items(), ((64, "bfloat16"), (3, "float32"))):
        padding = {"page_bytes": page_rows * fmt.row_bytes} if fmt.packed else {}
        cache = {"cache": _cache(fmt, 8, page_rows, **padding)}
        params = {"cache_format": name, "page_rows": page_rows} | _scale(name)
        fp8 = name in FP8_FORMATS
        arrays = {"k": _array(dtype, 9, fmt.head_dim), "slots": _i32(9)}
        yield Case("quantize_and_insert_k_cache", cache | arrays, params, ("cache",), fp8)
        arrays = {"seq_lens": _i32(2), "block_table": _i32(2, 5), "gather_lens": _i32(2), "offset": _i32()}
        out = {"out": _bf16(2, 300, fmt.head_dim)}
        # MXFP4 is read through fp8, of which its values are a part.
        yield Case("dequantize_and_gather_k_cache", cache | arrays | out, params, ("out",), name != "bf16")


def _attention():
    """Few tokens, whose keys are split, and many; one cache and two."""

    def queries(tokens, heads):
        return {"q": _bf16(tokens, heads, 512), "sink": _f32(heads)}

    for name, tokens, heads in (("fp8_ds_mla", 1, 64), ("bf16", 1, 16), ("fp8", 1, 16), ("fp8_ds_mla", 200, 16)):
        cache, params = CACHE_FORMATS[name], {"cache_format": name, "window_page_rows": 64} | _scale(name)
        arrays = {
            "window_cache": _cache(cache, 8, 64),
            "window_indices": _i32(tokens, 128),
            "window_lens": _i32(tokens),
        }
        if heads == 64:
            arrays |= {"cache": _cache(cache, 8, 2), "indices": _i32(tokens, 512), "lens": _i32(tokens)}
            params |= {"page_rows": 2, "return_lse": True}
        yield Case("sparse_mla_decode", queries(tokens, heads) | arrays, params, fp8=name in FP8_FORMATS)
    arrays = {"kv": _bf16(300, 512), "indices": _i32(200, 128), "lens": _i32(200)}
    yield Case("sparse_mla_prefill", queries(200, 16) | arrays, {})
