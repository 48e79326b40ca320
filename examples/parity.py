"""Hugging Face's DeepSeek-V4 compressors against ours, on one random checkpoint that transformers wrote.

pip install -e '.[flax]' torch 'transformers>=5.17'
python examples/parity.py
"""

import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import torch
from transformers import AutoModelForCausalLM, DeepseekV4Config, DynamicCache

from dsv4_jax import CompressorConfig, CompressorMetadata, load_compressors

TOKENS, HIDDEN, RANK = 300, 32, 16
torch.manual_seed(0)
hf_config = DeepseekV4Config(
    hidden_size=HIDDEN, num_hidden_layers=2,
    layer_types=["compressed_sparse_attention", "heavily_compressed_attention"],
    num_attention_heads=2, index_n_heads=2, q_lora_rank=RANK, o_groups=1, o_lora_rank=8, vocab_size=16,
    moe_intermediate_size=8, n_routed_experts=2, num_experts_per_tok=1,
    rope_scaling={"type": "yarn", "factor": 16, "original_max_position_embeddings": 65536, "beta_fast": 32,
                  "beta_slow": 1},
)  # fmt: skip
model = AutoModelForCausalLM.from_config(hf_config).float().eval()
with torch.no_grad():
    for name, weight in model.named_parameters():
        if "compressor" in name and "norm" not in name:
            weight.normal_(std=HIDDEN**-0.5 if name.endswith("weight") else 1)  # scores that choose
hidden = torch.randn(1, TOKENS, HIDDEN)


@torch.no_grad()
def theirs():
    """Keys by layer: the compressor's and, where there is one, the indexer's."""
    cache, positions = DynamicCache(config=hf_config), torch.arange(TOKENS)[None]
    for i, block in enumerate(model.model.layers):
        block.self_attn.compressor(hidden, torch.zeros(1, TOKENS, RANK), positions, cache, i)
    return [[layer.compressed_kv[k][0].numpy() for k in layer.compressed_kv] for layer in cache.layers]


def ours(compressor):
    """Keys read back from the cache after one prefill."""
    c = compressor.config
    pages, windows = -(-TOKENS // c.page_rows), TOKENS // c.compress_ratio
    kv_pages = -(-windows // c.kv_page_rows)
    tables = jnp.arange(pages)[None], jnp.arange(kv_pages)[None]
    step = CompressorMetadata.build(c, jnp.array([0, TOKENS]), jnp.array([TOKENS]), *tables, num_tokens=TOKENS)

    @jax.jit
    def run(hidden, cos_sin):
        _, cache = compressor(hidden, compressor.init_caches(pages, kv_pages), step, cos_sin)
        return c.format.unpack(cache, jnp.arange(windows), c.kv_page_rows)

    return np.asarray(run(jnp.asarray(hidden[0].numpy()), jnp.asarray(c.rope.table(TOKENS))))


with tempfile.TemporaryDirectory() as path:
    model.save_pretrained(path)
    formats = {"csa_format": "bf16", "hca_format": "bf16", "indexer_format": "indexer_mxfp4"}
    other = CompressorConfig.from_pretrained_config(path, **formats)
    loaded = [load_compressors(path), load_compressors(path, configs=other)]

ALLOWED = {"fp8_ds_mla": 0.075, "bf16": 0.004, "indexer_fp8": 0.075, "indexer_mxfp4": 0.34}  # half a step and a little
print(f"{'compressor':12}{'format':15}{'keys':>5}{'worst error*':>14}{'mean error*':>13}")
for i, keys in enumerate(theirs()):
    for part, want in enumerate(keys):
        for compressors in loaded:
            compressor = compressors[i][part]
            name, fmt = ("indexer" if part else ["CSA", "HCA"][i]), compressor.config.cache_format
            error = np.abs(ours(compressor) - want) / np.abs(want).max(axis=1, keepdims=True)
            print(f"{name:12}{fmt:15}{len(want):5}{error.max():14.2e}{error.mean():13.2e}")
            assert error.max() < ALLOWED[fmt], "more than the format's rounding"
print("* of a value, relative to its key's largest; Hugging Face keeps its keys in float32")
