"""DeepSeek-V4's KV compressor for JAX: gated softmax over windows, RMSNorm, RoPE, fp8 or fp4, paged caches."""

from typing import TYPE_CHECKING

from dsv4_jax.api.combine_topk_swa_indices import combine_topk_swa_indices
from dsv4_jax.api.compress import compress
from dsv4_jax.api.compress_kv_sparse_attn_cutedsl import compress_kv_sparse_attn_cutedsl
from dsv4_jax.api.compress_norm_rope_store import (
    compress_norm_rope_store,
    compress_norm_rope_store_cutedsl,
    compress_norm_rope_store_triton,
    fused_kv_compress_norm_rope_insert_sparse_attn_cutedsl,
)
from dsv4_jax.api.compute_global_topk_indices_and_lens import compute_global_topk_indices_and_lens
from dsv4_jax.api.dequantize_and_gather_k_cache import dequantize_and_gather_k_cache
from dsv4_jax.api.fused_indexer_q_rope_quant import fused_indexer_q_rope_quant
from dsv4_jax.api.fused_inv_rope_fp8_quant import fused_inv_rope_fp8_quant
from dsv4_jax.api.fused_q_kv_rmsnorm import fused_q_kv_rmsnorm
from dsv4_jax.api.fused_qnorm_rope_kv_rope_quant_insert import fused_qnorm_rope_kv_rope_quant_insert
from dsv4_jax.api.norm_rope_insert_sparse_attn_cutedsl import norm_rope_insert_sparse_attn_cutedsl
from dsv4_jax.api.prepare_megamoe_inputs import prepare_megamoe_inputs
from dsv4_jax.api.quantize_and_insert_k_cache import quantize_and_insert_k_cache
from dsv4_jax.api.save_partial_states import save_partial_states
from dsv4_jax.api.sparse_mla_decode import sparse_mla_decode
from dsv4_jax.api.sparse_mla_prefill import sparse_mla_prefill
from dsv4_jax.attention_metadata import AttentionMetadata
from dsv4_jax.cache import CACHE_FORMATS, CacheFormat
from dsv4_jax.checkpoint import load_compressors
from dsv4_jax.config import CompressorConfig
from dsv4_jax.export import EXPORT_DISABLED_CHECKS
from dsv4_jax.metadata import CompressorMetadata
from dsv4_jax.rope import Yarn
from dsv4_jax.sharding import refuse_sharded

if TYPE_CHECKING:
    from dsv4_jax.compressor import DeepseekCompressor

__version__ = "0.1.0"

__all__ = [
    "CACHE_FORMATS",
    "EXPORT_DISABLED_CHECKS",
    "AttentionMetadata",
    "CacheFormat",
    "CompressorConfig",
    "CompressorMetadata",
    "DeepseekCompressor",
    "Yarn",
    "combine_topk_swa_indices",
    "compress",
    "compress_kv_sparse_attn_cutedsl",
    "compress_norm_rope_store",
    "compress_norm_rope_store_cutedsl",
    "compress_norm_rope_store_triton",
    "compute_global_topk_indices_and_lens",
    "dequantize_and_gather_k_cache",
    "fused_indexer_q_rope_quant",
    "fused_inv_rope_fp8_quant",
    "fused_kv_compress_norm_rope_insert_sparse_attn_cutedsl",
    "fused_q_kv_rmsnorm",
    "fused_qnorm_rope_kv_rope_quant_insert",
    "load_compressors",
    "norm_rope_insert_sparse_attn_cutedsl",
    "prepare_megamoe_inputs",
    "quantize_and_insert_k_cache",
    "refuse_sharded",
    "save_partial_states",
    "sparse_mla_decode",
    "sparse_mla_prefill",
]


def __getattr__(name: str):
    if name == "DeepseekCompressor":  # on first use, as it needs flax
        from dsv4_jax.compressor import DeepseekCompressor

        return DeepseekCompressor
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
