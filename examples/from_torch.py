"""A PyTorch function inside `jax.jit`: its tensors are XLA's own buffers, on the CPU and on a GPU.

pip install -e '.[flax]' torch
python examples/from_torch.py
"""

import jax
import jax.numpy as jnp
import numpy as np
import torch
from flax import nnx

from bridge import torch_call
from dsv4_jax import CompressorConfig, CompressorMetadata, DeepseekCompressor

HIDDEN, TOKENS = 64, 40
config = CompressorConfig.csa()
layer = DeepseekCompressor(config, HIDDEN, rngs=nnx.Rngs(0))
graph, params = nnx.split(layer)
metadata = CompressorMetadata.build(
    config,
    query_start_loc=jnp.array([0, TOKENS]),
    seq_lens=jnp.array([TOKENS]),
    block_table=jnp.arange(TOKENS // config.page_rows)[None],
    kv_block_table=jnp.array([[0]]),
    num_tokens=TOKENS,
)


def rms_norm(x, weight, out):
    """In PyTorch: what a layer does to hidden states before the compressor. Writes its result where XLA wants it."""
    torch.mul(x, torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6), out=out)
    out.mul_(weight)


@jax.jit
def with_torch(params, caches, x, weight, cos_sin):
    hidden = torch_call(rms_norm, x, weight, out_type=jax.ShapeDtypeStruct(x.shape, x.dtype))
    return nnx.merge(graph, params)(hidden, caches, metadata, cos_sin)


@jax.jit
def in_jax(params, caches, x, weight, cos_sin):
    hidden = x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-6) * weight
    return nnx.merge(graph, params)(hidden, caches, metadata, cos_sin)


x = 3 * jax.random.normal(jax.random.key(1), (TOKENS, HIDDEN))
args = params, layer.init_caches(TOKENS, 1), x, jnp.linspace(0.5, 1.5, HIDDEN), jnp.asarray(config.rope.table(TOKENS))
slots = jnp.arange(TOKENS // config.compress_ratio)
keys, same = (config.format.unpack(f(*args)[1], slots, config.kv_page_rows) for f in (with_torch, in_jax))
error = float(jnp.abs(keys - same).max() / jnp.abs(same).max())
print(f"{len(keys)} keys from torch's hidden states; JAX's own differ by {error:.1e} of the largest")
assert np.isfinite(keys).all() and error < 0.15, "one step of fp8 at most"
