"""Several prompts prefilled in chunks, then decoded together: one jitted step, its caches donated, pages by hand.

pip install -e '.[flax]'
python examples/decode_loop.py
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from dsv4_jax import CompressorConfig, CompressorMetadata, DeepseekCompressor

CHUNK, DECODE, HIDDEN, VOCABULARY = 48, 100, 64, 256
prompts = [np.random.default_rng(n).integers(0, VOCABULARY, n) for n in (37, 90, 14)]
requests, longest = len(prompts), max(map(len, prompts)) + DECODE
config = CompressorConfig.csa()
m, rows = config.compress_ratio, config.page_rows

layer = DeepseekCompressor(config, HIDDEN, rngs=nnx.Rngs(0))
graph, params = nnx.split(layer)
embedding = jax.random.normal(jax.random.key(1), (VOCABULARY, HIDDEN))
cos_sin = jnp.asarray(config.rope.table(longest))  # one for all layers of a model

# However long a request grows: 2 state pages before a step, 2 after it.
free = list(range(4 * requests))
table = np.full((requests, -(-longest // rows)), -1, np.int32)
kv_columns = -(-longest // m // config.kv_page_rows)
kv_table = np.arange(requests * kv_columns, dtype=np.int32).reshape(requests, -1)
caches = layer.init_caches(len(free), kv_table.size)


@functools.partial(jax.jit, donate_argnames="caches")
def step(params, caches, tokens, starts, lengths, table, kv_table, embedding, cos_sin):
    """A model that has nothing but a compressor."""
    metadata = CompressorMetadata.build(config, starts, lengths, table, kv_table, num_tokens=len(tokens))
    return nnx.merge(graph, params)(embedding[tokens], caches, metadata, cos_sin)


def first_column(length):
    """Of the states that are still needed: those of the open window, and with overlap of the one before."""
    return max(length // m * m - (m if config.overlap else 0), 0) // rows


def run(caches, lengths, texts, padded):
    """Feeds each request's next tokens. State pages are taken before the step and given back once a window passed."""
    starts = np.concatenate([[0], np.cumsum([len(text) for text in texts])]).astype(np.int32)
    tokens = np.zeros(padded, np.int32)
    tokens[: starts[-1]] = np.concatenate(texts)
    for row, length in zip(table, lengths, strict=True):
        for column in range(first_column(length), -(-length // rows)):
            if row[column] < 0:
                row[column] = free.pop()
    # A copy, since the step may still be running when the table changes.
    caches = step(params, caches, tokens, starts, lengths.copy(), table.copy(), kv_table, embedding, cos_sin)
    for row, length in zip(table, lengths, strict=True):
        passed = row[: first_column(length)]
        free.extend(passed[passed >= 0].tolist())
        passed[:] = -1
    return caches


done = np.zeros(requests, np.int32)
while any(left := [len(p) - n for p, n in zip(prompts, done, strict=True)]):
    counts = [min(n, max(CHUNK - sum(left[:i]), 0)) for i, n in enumerate(left)]  # first come, first served
    texts = [p[n : n + count] for p, n, count in zip(prompts, done, counts, strict=True)]
    done += np.array(counts, np.int32)
    caches = run(caches, done, texts, CHUNK)
for i in range(DECODE):
    done += 1
    caches = run(caches, done, [[(7 * i + r) % VOCABULARY] for r in range(requests)], requests)

print(f"{done.sum()} tokens of {requests} requests, {(done // m).sum()} keys in {caches[1].shape[0]} cache pages")
print(f"{4 * requests - len(free)} of {4 * requests} state pages in use, {step._cache_size()} compilations")
