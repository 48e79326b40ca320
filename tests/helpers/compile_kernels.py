"""Compiles every Triton kernel, as the ops launch it, for one GPU target; needs no GPU.

`python tests/helpers/compile_kernels.py cuda 90 32` prints the name of each kernel and the bytes of its binary. Run it
without TRITON_INTERPRET.
"""

import itertools
import sys

import jax
import jax.numpy as jnp
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from dsv4_jax import CACHE_FORMATS, CompressorConfig, CompressorMetadata
from dsv4_jax.common.ops import (
    combine_topk_swa_indices,
    compress,
    compress_norm_rope_store,
    compute_global_topk_indices_and_lens,
    dequantize_and_gather_k_cache,
    fused_indexer_q_rope_quant,
    fused_inv_rope_fp8_quant,
    fused_q_kv_rmsnorm,
    fused_qnorm_rope_kv_rope_quant_insert,
    prepare_megamoe_inputs,
    quantize_and_insert_k_cache,
    save_partial_states,
    sparse_mla_decode,
    sparse_mla_prefill,
)
from dsv4_jax.common.ops.helpers import launch

TYPES = {"float32": "fp32", "bfloat16": "bf16", "int32": "i32", "uint8": "u8", "float8_e4m3fn": "fp8e4nv", "bool": "i1"}
BINARY = {"cuda": "cubin", "hip": "hsaco"}


def compile_launches(target: GPUTarget) -> dict:
    """Binary sizes by kernel name and specialization."""
    compiled = {}

    def record(kernel, grid, updates, outputs, num_warps, constants, args):
        arrays = {**args, **outputs}
        signature = {}
        attributes = {}
        for i, name in enumerate(kernel.arg_names):
            if name in constants:
                signature[name] = "constexpr"
            elif isinstance(arrays[name], int):
                signature[name] = "i32"
            else:
                signature[name] = "*" + TYPES[arrays[name].dtype.name]
                attributes[(i,)] = [["tt.divisibility", 16]]
        key = (kernel.__name__, tuple(signature.items()), tuple(constants.items()), num_warps)
        if key not in compiled:
            source = ASTSource(kernel, signature, constexprs=constants, attrs=attributes)
            binary = triton.compile(source, target=target, options={"num_warps": num_warps})
            compiled[key] = len(binary.asm[BINARY[target.backend]])
            print(kernel.__name__, constants.get("FORMAT", ""), constants.get("SAVE", ""), compiled[key], flush=True)
        return tuple(args[name] for name in updates) + tuple(jnp.zeros(s.shape, s.dtype) for s in outputs.values())

    launch._launch_gpu = record
    for config in (
        *map(CompressorConfig.csa, ("fp8_ds_mla", "bf16", "fp8")),
        *map(CompressorConfig.hca, ("fp8_ds_mla", "bf16", "fp8")),
        *map(CompressorConfig.indexer, ("indexer_fp8", "indexer_mxfp4")),
    ):
        first = config.cache_format in ("fp8_ds_mla", "indexer_fp8")
        for dtype, save in itertools.product((jnp.float32, jnp.bfloat16), ("tail", "all") if first else ("tail",)):
            jax.eval_shape(lambda c=config, d=dtype, s=save: _run(c, d, s))
        # A prefill, batches of a few tokens a request and decodes have kernels of their own.
        for dtype, requests in itertools.product((jnp.float32, jnp.bfloat16), (128, 256) if first else ()):
            jax.eval_shape(lambda c=config, d=dtype, r=requests: _run(c, d, "tail", r))
    jax.eval_shape(_save_other_widths)
    jax.eval_shape(_online)
    jax.eval_shape(_topk_indices)
    jax.eval_shape(_megamoe)
    jax.eval_shape(_rotated_heads)
    jax.eval_shape(_normalized_queries)
    jax.eval_shape(_keys_in_and_out)
    jax.eval_shape(_attention)
    return compiled


def _run(config, dtype, save, requests=1):
    tokens = 256
    metadata = CompressorMetadata.build(
        config,
        jnp.arange(requests + 1),
        jnp.ones(requests, jnp.int32),
        jnp.zeros((requests, tokens // config.page_rows), jnp.int32),
        jnp.zeros((requests, 8), jnp.int32),
        num_tokens=tokens,
    )
    kv_score = jnp.zeros((tokens, 2 * config.width), dtype)
    kv, score = jnp.split(kv_score, 2, axis=1)
    ape = jnp.zeros((config.compress_ratio, config.width))
    states = jnp.zeros((8, config.page_rows, 2 * config.width))
    cache = config.format.allocate(8, config.kv_page_rows)
    norm, cos_sin = jnp.ones(config.head_dim, dtype), jnp.zeros((tokens, 64))
    scale = jnp.float32(1) if config.format.needs_scale else None
    rest = {"config": config}
    save_partial_states.implement(kv, score, ape, metadata.positions, states, metadata.slot_mapping)
    compress_norm_rope_store.implement(states, cache, metadata, norm, cos_sin, scale, **rest)
    return compress.implement(kv_score, ape, states, cache, metadata, norm, cos_sin, scale, save=save, **rest)


def _online():
    """HCA with the online state: a short batch of a page's rows a request, and a long one."""
    requests = 2
    for fmt, page_rows in (("fp8_ds_mla", 1), ("bf16", 4)):
        config = CompressorConfig.hca(fmt, page_rows=page_rows, state="online")
        for dtype, tokens in itertools.product((jnp.float32, jnp.bfloat16), (requests * page_rows, 256)):
            metadata = CompressorMetadata.build(
                config,
                jnp.arange(requests + 1),
                jnp.ones(requests, jnp.int32),
                jnp.zeros((requests, 1), jnp.int32),
                jnp.zeros((requests, 8), jnp.int32),
                num_tokens=tokens,
            )
            states, cache = jnp.zeros((8, page_rows, config.state_width)), config.format.allocate(8, 2)
            arrays = jnp.zeros((tokens, 2 * config.width), dtype), jnp.zeros((128, config.width)), states, cache
            weights = jnp.ones(512, dtype), jnp.zeros((tokens, 64)), None
            compress.implement(*arrays, metadata, *weights, config=config, save="tail")


def _save_other_widths():
    """`save_partial_states` takes any width."""
    for width in (16, 768, 1000):
        arrays = jnp.zeros((4, width)), jnp.zeros((4, width)), jnp.zeros((4, width)), jnp.zeros(4, jnp.int32)
        rest = jnp.zeros((2, 4, 2 * width)), jnp.zeros(4, jnp.int32)
        save_partial_states.implement(*arrays, *rest)


def _topk_indices():
    i32 = lambda *shape: jnp.zeros(shape, jnp.int32)
    for topk in (3, 512, 2048):
        arrays = i32(9, topk), i32(9), i32(2, 5), jnp.zeros(9, bool)
        compute_global_topk_indices_and_lens.implement(*arrays, page_rows=64)
        options = {"window_size": 128, "compress_ratio": 4, "M": 100, "N": 60}
        for used in (0, topk):
            combine_topk_swa_indices.implement(i32(9, topk), i32(3), i32(2), i32(2), topk=used, **options)


def _megamoe():
    for padding in (None, jnp.zeros(9, bool)):
        hidden, weights, ids = jnp.zeros((9, 4096), jnp.bfloat16), jnp.zeros((9, 6)), jnp.zeros((9, 6), jnp.int32)
        prepare_megamoe_inputs.implement(hidden, weights, ids, padding)


def _rotated_heads():
    """The ops that rotate and quantize the heads of queries and of attention's output."""
    positions, cos_sin = jnp.zeros(9, jnp.int32), jnp.zeros((20, 64))
    for heads, dtype, use_fp4 in ((64, jnp.bfloat16, False), (64, jnp.bfloat16, True), (3, jnp.float32, False)):
        q, weights = jnp.zeros((9, heads, 128), dtype), jnp.zeros((9, heads), dtype)
        options = {"softmax_scale": 128**-0.5, "head_scale": heads**-0.5, "use_fp4": use_fp4}
        fused_indexer_q_rope_quant.implement(positions, q, cos_sin, weights, **options)
    for heads, packed, size in ((64, False, 128), (64, True, 128), (6, True, 32)):
        o = jnp.zeros((9, heads, 512), jnp.bfloat16)
        options = {"n_groups": heads // 2, "quant_group_size": size, "tma_aligned_scales": packed}
        fused_inv_rope_fp8_quant.implement(o, positions, cos_sin, quantize=True, **options)
        fused_inv_rope_fp8_quant.implement(o, positions, cos_sin, quantize=False, **options)


def _normalized_queries():
    """The RMSNorms of q and kv; heads normalized and rotated, keys stored."""
    for dtype, tokens, widths in (
        (jnp.bfloat16, 9, (1024, 512)),
        (jnp.bfloat16, 9, (1536, 512)),
        (jnp.float32, 9, (1536, 512)),
        (jnp.bfloat16, 1, (1000, 5000)),
    ):
        arrays = *(jnp.zeros((tokens, w), dtype) for w in widths), *(jnp.ones(w) for w in widths)
        fused_q_kv_rmsnorm.implement(*arrays, eps=1e-6)
    for fmt, heads, padded_heads in (("fp8_ds_mla", 64, 64), ("bf16", 3, 11), ("fp8", 128, 128)):
        q, kv = jnp.zeros((9, heads, 512), jnp.bfloat16), jnp.zeros((9, 512), jnp.bfloat16)
        cache, indices = CACHE_FORMATS[fmt].allocate(8, 64), jnp.zeros(9, jnp.int32)
        scale = jnp.float32(1) if fmt == "fp8" else None
        options = {"padded_heads": padded_heads, "cache_format": fmt, "page_rows": 64, "eps": 1e-6}
        arrays = q, kv, cache, indices, indices, jnp.zeros((20, 64)), scale
        fused_qnorm_rope_kv_rope_quant_insert.implement(*arrays, **options)


def _keys_in_and_out():
    """Keys into a cache and out of it; one page of rows that 4-byte alignment alone allows, too."""
    i32 = lambda *shape: jnp.zeros(shape, jnp.int32)
    for name, fmt in CACHE_FORMATS.items():
        scale = jnp.float32(1) if fmt.needs_scale else None
        for page_rows, dtype in ((64, jnp.bfloat16), (3, jnp.float32)):
            options = {"cache_format": name, "page_rows": page_rows}
            k, out = jnp.zeros((9, fmt.head_dim), dtype), jnp.zeros((2, 300, fmt.head_dim), jnp.bfloat16)
            cache = fmt.allocate(8, page_rows, page_bytes=page_rows * fmt.row_bytes if fmt.packed else None)
            quantize_and_insert_k_cache.implement(k, cache, i32(9), scale, **options)
            arrays = cache, i32(2), i32(2, 5), i32(2), i32(), out
            dequantize_and_gather_k_cache.implement(*arrays, scale, **options)


def _attention():
    """Few tokens, whose keys are split, and many; one cache and two."""
    i32 = lambda *shape: jnp.zeros(shape, jnp.int32)
    for fmt, heads, tokens, second in (
        ("fp8_ds_mla", 64, 1, True),
        ("fp8_ds_mla", 16, 200, False),
        ("fp8", 16, 1, False),
    ):
        q = jnp.zeros((tokens, heads, 512), jnp.bfloat16)
        cache, scale = CACHE_FORMATS[fmt].allocate(8, 64), jnp.float32(1) if fmt == "fp8" else None
        window = cache, i32(tokens, 128), i32(tokens)
        rows = (CACHE_FORMATS[fmt].allocate(8, 2), i32(tokens, 512), i32(tokens)) if second else (None, None, None)
        options = {"softmax_scale": 1.0, "return_lse": False, "quant_group_size": None, "tma_aligned_scales": False}
        options |= {"outputs": (jax.ShapeDtypeStruct(q.shape, q.dtype),)}
        pages = {"window_page_rows": 64, "page_rows": 2 if second else None, "cache_format": fmt}
        arrays = q, *window, jnp.zeros(heads), *rows, scale, None, None
        sparse_mla_decode.implement(*arrays, **pages, **options)
    arrays = q, jnp.zeros((9, 512), jnp.bfloat16), i32(1, 128), i32(1), jnp.zeros(16), None, None
    sparse_mla_prefill.implement(*arrays, **options)


if __name__ == "__main__":
    backend, arch, warp_size = sys.argv[1:]
    total = compile_launches(GPUTarget(backend, int(arch) if arch.isdigit() else arch, int(warp_size)))
    assert total and all(total.values()), total
    print(f"{len(total)} kernels compiled")
