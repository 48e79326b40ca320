"""Decodes over a paged fp8 cache in place, and compares each token with dense attention in plain JAX.

python examples/sparse_decode.py
"""

import functools

import jax
import jax.numpy as jnp

from dsv4_jax import CACHE_FORMATS, AttentionMetadata, quantize_and_insert_k_cache, sparse_mla_decode

HEADS, ROWS, WINDOW, STEPS = 3, 64, 128, 4
lengths = jnp.array([5, 200, 131])  # tokens of each request before the first step
requests, columns = len(lengths), 4
fmt = CACHE_FORMATS["fp8_ds_mla"]
table = jax.random.permutation(jax.random.key(0), requests * columns).reshape(requests, columns)
starts, sink = jnp.arange(requests + 1), jnp.zeros(HEADS)


def key_of(request, position):
    """A model would project hidden states to this; `[512]` bfloat16, after RMSNorm and RoPE."""
    seed = jax.random.fold_in(jax.random.fold_in(jax.random.key(1), request), position)
    return jax.random.normal(seed, (512,), jnp.bfloat16)


keys = jax.vmap(jax.vmap(key_of, (None, 0)), (0, None))(jnp.arange(requests), jnp.arange(columns * ROWS))


@functools.partial(jax.jit, donate_argnames="cache")
def step(cache, lengths, q):
    """Stores each request's newest key and attends to its window."""
    metadata = AttentionMetadata.build(starts, lengths, table, num_tokens=requests, window=WINDOW, page_rows=ROWS)
    newest = keys[metadata.token_to_req, metadata.positions]
    cache = quantize_and_insert_k_cache(newest, cache, metadata.slot_mapping, page_rows=ROWS)
    o = sparse_mla_decode(q, cache, metadata.window_indices, metadata.window_lens, sink, window_page_rows=ROWS)
    return cache, o


def dense(q, keys, length):
    """The same for one request, from all of its keys: softmax over the window and the sink."""
    position = jnp.arange(len(keys))
    scores = jnp.where((position < length) & (position >= length - WINDOW), q @ keys.T * 512**-0.5, -jnp.inf)
    weights = jax.nn.softmax(jnp.concatenate([scores, sink[:, None]], axis=1))[:, :-1]
    return weights @ keys


# The prompts' keys, then a token a step.
cache = fmt.allocate(requests * columns, ROWS)
position = jnp.arange(columns * ROWS)
slots = table[:, position // ROWS] * ROWS + position % ROWS
slots = jnp.where(position < lengths[:, None], slots, -1)
cache = quantize_and_insert_k_cache(keys.reshape(-1, 512), cache, slots.reshape(-1), page_rows=ROWS)
every_row = jnp.arange(requests * columns * ROWS)
worst = 0.0
for i in range(STEPS):
    lengths += 1
    q = jax.random.normal(jax.random.key(2 + i), (requests, HEADS, 512), jnp.bfloat16)
    cache, o = step(cache, lengths, q)
    stored = fmt.unpack(cache, every_row, ROWS)[table[:, position // ROWS] * ROWS + position % ROWS]
    want = jax.vmap(dense)(q.astype(jnp.float32), stored, lengths)
    worst = max(worst, float(jnp.abs(o - want).max()))
print(
    f"{STEPS} steps of {requests} requests, {step._cache_size()} compilation, at most {worst:.3f} from dense attention"
)
