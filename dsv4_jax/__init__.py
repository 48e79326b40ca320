"""DeepSeek-V4's KV compressor for JAX: gated softmax over windows, RMSNorm, RoPE, fp8 or fp4, paged caches."""

from dsv4_jax.cache import CACHE_FORMATS, CacheFormat
from dsv4_jax.common.reference.compress import compress
from dsv4_jax.common.reference.compress_norm_rope_store import (
    compress_norm_rope_store,
    compress_norm_rope_store_triton,
)
from dsv4_jax.common.reference.save_partial_states import save_partial_states
from dsv4_jax.config import CompressorConfig
from dsv4_jax.metadata import CompressorMetadata
from dsv4_jax.rope import Yarn

__version__ = "0.1.0"

__all__ = [
    "CACHE_FORMATS",
    "CacheFormat",
    "CompressorConfig",
    "CompressorMetadata",
    "Yarn",
    "compress",
    "compress_norm_rope_store",
    "compress_norm_rope_store_triton",
    "save_partial_states",
]
