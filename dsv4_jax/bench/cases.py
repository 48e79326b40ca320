"""The workloads that are measured: a compressor, a batch, and the bytes that the op must move for it."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from dsv4_jax.config import CompressorConfig
from dsv4_jax.metadata import CompressorMetadata


@dataclasses.dataclass(frozen=True)
class Case:
    """One batch of one compressor.

    Attributes:
      config: the compressor.
      kind: "prefill" (one request), "decode" (a token a request, random positions) or "closing" (all close windows).
      tokens: T.
      dtype: of `kv_score`.
    """

    config: CompressorConfig
    kind: str
    tokens: int
    dtype: str = "float32"

    def batch(self, seed: int = 0):
        """Metadata, number of state pages and of cache pages."""
        rng = np.random.default_rng(seed)
        c, t = self.config, self.tokens
        n, m = c.window, c.compress_ratio
        if self.kind == "prefill":
            starts, lengths = np.array([0, t]), np.array([t])
        else:
            blocks = rng.integers(2, 9, t) if m > 4 else rng.integers(2, 257, t)
            phase = np.full(t, m) if self.kind == "closing" else rng.integers(1, m + 1, t)
            starts, lengths = np.arange(t + 1), blocks * m + phase
        columns = -(-int(lengths.max()) // c.page_rows)
        table = np.full((len(lengths), columns), -1, np.int32)
        pages = 0
        first = np.maximum(0, (lengths - 1) // m * m - (n - m)) // c.page_rows if self.kind != "prefill" else [0]
        for r, (low, length) in enumerate(zip(first, lengths, strict=True)):
            used = np.arange(low, -(-length // c.page_rows))
            table[r, used] = pages + np.arange(len(used))
            pages += len(used)
        table = np.where(table >= 0, rng.permutation(pages)[table], -1)
        keys = -(-lengths // m // c.kv_page_rows) + 1
        kv_table = rng.permutation(len(lengths) * keys.max()).reshape(len(lengths), -1)
        metadata = CompressorMetadata.build(
            c,
            jnp.asarray(starts, jnp.int32),
            jnp.asarray(lengths, jnp.int32),
            jnp.asarray(table, jnp.int32),
            jnp.asarray(kv_table, jnp.int32),
            num_tokens=t,
        )
        return metadata, pages, kv_table.size

    def arrays(self, metadata, pages, kv_pages, key):
        """Random kv_score, ape, norm_weight, cos_sin, states and cache."""
        return _arrays(self, int(metadata.positions.max()) + 1, pages, kv_pages, key)

    def compress_bytes(self, metadata, save: str) -> int:
        """Bytes that `compress` must move: its batch read once, history read, states and keys written."""
        c = self.config
        item = jnp.dtype(self.dtype).itemsize
        closing = int((metadata.closing[:, 0] >= 0).sum())
        saved = self.tokens if save == "all" else int((metadata.saving[:, 0] >= 0).sum())
        history = 0 if self.kind == "prefill" else closing * (c.window - 1) * 2 * c.head_dim * 4
        return self.tokens * 2 * c.width * item + history + saved * 2 * c.width * 4 + closing * c.format.row_bytes

    def store_bytes(self, metadata) -> int:
        """Bytes that `compress_norm_rope_store` must move."""
        c = self.config
        closing = int((metadata.closing[:, 0] >= 0).sum())
        return closing * (c.window * 2 * c.head_dim * 4 + c.format.row_bytes)

    def save_bytes(self) -> int:
        """Bytes that `save_partial_states` must move."""
        return self.tokens * 2 * self.config.width * (jnp.dtype(self.dtype).itemsize + 4)


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _arrays(case, positions, pages, kv_pages, key):
    c = case.config
    keys = jax.random.split(key, 4)
    angles = jnp.arange(positions)[:, None] * jnp.asarray(c.rope.inv_freq(c.rope_head_dim))[None, :]
    return {
        "kv_score": jax.random.normal(keys[0], (case.tokens, 2 * c.width), case.dtype),
        "ape": jax.random.normal(keys[1], (c.compress_ratio, c.width)),
        "norm_weight": 1 + 0.1 * jax.random.normal(keys[2], (c.head_dim,)),
        "cos_sin": jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], axis=1),
        "state_cache": jax.random.normal(keys[3], (pages, c.page_rows, 2 * c.width)),
        "kv_cache": c.format.allocate(kv_pages, c.kv_page_rows),
    }
