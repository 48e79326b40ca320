"""A server in miniature to test the layer with: requests fed in chunks, state pages given back once a window passed."""

import functools
from collections import deque

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dsv4_jax
from dsv4_jax import CompressorMetadata
from dsv4_jax.common.reference.helpers.window import normalized_keys

nnx = pytest.importorskip("flax.nnx")


def make_layer(config, hidden_size=32, seed=0, **options):
    """A layer with random weights that are multiples of 2**-5, so that integer hidden states project exactly."""
    layer = dsv4_jax.DeepseekCompressor(config, hidden_size, rngs=nnx.Rngs(seed), **options)
    rng = np.random.default_rng(seed)
    dtype = layer.wkv_gate.get_value().dtype
    layer.wkv_gate.set_value(jnp.asarray(rng.integers(-8, 9, layer.wkv_gate.shape) / 32, dtype))
    layer.ape.set_value(jnp.asarray(rng.standard_normal(layer.ape.shape), jnp.float32))
    layer.norm.set_value(jnp.asarray(1 + 0.2 * rng.standard_normal(layer.norm.shape), jnp.float32))
    return layer


def hidden_states(tokens, hidden_size=32, seed=0):
    """Random small integers `[tokens, hidden_size]`."""
    return np.random.default_rng([seed, 1]).integers(-2, 3, (tokens, hidden_size)).astype(np.float32)


@functools.partial(
    jax.jit,
    static_argnames=("graph", "rollback", "save", "keys", "implementation"),
    donate_argnames="caches",
)
def step(
    graph, params, caches, hidden, starts, lengths, table, kv_table, cos_sin, *, rollback, save, keys, implementation
):
    """A step; with `keys` also what `normalized_keys` gives, the keys before quantization."""
    layer = nnx.merge(graph, params)
    metadata = CompressorMetadata.build(
        layer.config, starts, lengths, table, kv_table, num_tokens=len(hidden), rollback=rollback
    )
    made = None
    if keys:
        kv_score = jnp.matmul(hidden, layer.wkv_gate.get_value(), precision=layer.precision)
        ape, norm = layer.ape.get_value(), layer.norm.get_value()
        made = normalized_keys(kv_score, ape, caches[0], metadata, norm, cos_sin, config=layer.config)
    return layer(hidden, caches, metadata, cos_sin, save=save, implementation=implementation), made


class Server:
    """Feeds the requests of one layer.

    Args:
      layer: `DeepseekCompressor`.
      requests: how many.
      most: tokens of a request, at most.
      chunk: what a step of more tokens than requests is padded to.
      pool: state pages that the requests share; where None every position has its own page and keeps it.
      keys: also keep the keys before quantization, in `made`, by cache slot.
      save, rollback, implementation: of the steps.
    """

    def __init__(
        self, layer, requests, most, chunk, *, pool=None, keys=False, save="tail", rollback=0,
        implementation=None,
    ):  # fmt: skip
        c = self.config = layer.config
        self.graph, self.params = nnx.split(layer)
        self.options = {"save": save, "rollback": rollback, "keys": keys, "implementation": implementation}
        self.chunk, self.rollback, self.recycles = chunk, rollback, pool is not None
        rng = np.random.default_rng(7)
        columns, kv_columns = -(-most // c.page_rows), -(-most // c.compress_ratio // c.kv_page_rows)
        # The cache has as many pages with a pool as without, so that both take the same compilation.
        pages = requests * columns
        order = rng.permutation(pages).astype(np.int32)
        self.table = np.full((requests, columns), -1, np.int32) if self.recycles else order.reshape(requests, -1)
        self.free = deque(order[:pool].tolist() if self.recycles else [])
        self.kv_table = rng.permutation(requests * kv_columns).astype(np.int32).reshape(requests, -1)
        # NaN in every row that is not written: read by mistake it would show.
        states = jnp.full((pages, c.page_rows, 2 * c.width), jnp.nan, jnp.float32)
        self.caches = states, layer.init_caches(0, requests * kv_columns)[1]
        self.cos_sin = jnp.asarray(c.rope.table(most))
        self.done = np.zeros(requests, np.int32)
        self.made = {}

    def feed(self, *chunks):
        """The next tokens `[n, hidden]` of each request, n = 0 for none."""
        counts = [len(chunk) for chunk in chunks]
        starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        self.done += np.array(counts, np.int32)
        if self.recycles:
            self._take_pages()
        total = self.chunk if starts[-1] > len(chunks) else len(chunks)
        hidden = np.full((total, chunks[0].shape[1]), np.nan, chunks[0].dtype)
        hidden[: starts[-1]] = np.concatenate(chunks)
        # Copies, as a CPU array may share NumPy's memory and the tables are changed while a step still runs.
        args = [np.array(a) for a in (hidden, starts, self.done, self.table, self.kv_table)]
        self.caches, made = step(self.graph, self.params, self.caches, *args, self.cos_sin, **self.options)
        if made:
            self.made.update((s, k) for k, s in zip(*map(np.asarray, made), strict=True) if s >= 0)
        if self.recycles:
            self._give_pages_back()

    def take_back(self, request, count):
        """The last tokens of a request were wrong."""
        self.done[request] -= count

    def slots(self, request):
        """The cache slots of a request's keys."""
        window = np.arange(self.done[request] // self.config.compress_ratio)
        rows = self.config.kv_page_rows
        return self.kv_table[request, window // rows] * rows + window % rows

    def stored(self, request):
        """The bytes of a request's keys."""
        loaded = self.config.format.load(self.caches[1], jnp.asarray(self.slots(request)), self.config.kv_page_rows)
        return np.concatenate([np.asarray(part) for part in loaded], axis=1)

    def keys(self, request):
        """A request's keys, read back."""
        slots = jnp.asarray(self.slots(request))
        if not slots.size:
            return np.zeros((0, self.config.head_dim), np.float32)
        return np.asarray(self.config.format.unpack(self.caches[1], slots, self.config.kv_page_rows))

    def first_needed(self, request, rollback):
        """The first position whose state a later step may still read, if it takes back up to `rollback` tokens."""
        m = self.config.compress_ratio
        kept = max(int(self.done[request]) - rollback, 0)
        return max(kept // m * m - (m if self.config.overlap else 0), 0)

    def states(self, request):
        """The states that the next step may still read."""
        p = np.arange(self.first_needed(request, 0), self.done[request])
        pages = self.table[request, p // self.config.page_rows]
        assert (pages >= 0).all()
        return np.asarray(self.caches[0])[pages, p % self.config.page_rows]

    def _take_pages(self):
        rows = self.config.page_rows
        for r, row in enumerate(self.table):
            for column in range(self.first_needed(r, self.rollback) // rows, -(-self.done[r] // rows)):
                if row[column] < 0:
                    row[column] = self.free.popleft()

    def _give_pages_back(self):
        for r, row in enumerate(self.table):
            passed = row[: self.first_needed(r, self.rollback) // self.config.page_rows]
            self.free.extend(passed[passed >= 0].tolist())
            passed[:] = -1


def ring_table(requests, positions, window, page_rows):
    """A block table in which every request goes round its few pages for ever: `[R, B]`, and the number of pages."""
    ring = -(-(window + page_rows) // page_rows)
    column = np.arange(-(-positions // page_rows)) % ring
    return (np.arange(requests)[:, None] * ring + column).astype(np.int32), requests * ring


class DecodeLoop:
    """All layers' compressors in one jitted step, each request one token a step; everything stays on the device.

    Args:
      layers: by name.
      requests: R; each starts at a position of its own, below 300.
      steps: the most that will be run.
      implementation: of the ops.
    """

    def __init__(self, layers, requests, steps, implementation=None):
        most = 300 + steps
        first = jnp.asarray(np.random.default_rng(0).integers(0, 300, requests), jnp.int32)
        starts = jnp.arange(requests + 1, dtype=jnp.int32)
        graphs, tables, caches = {}, {}, {}
        for name, layer in layers.items():
            c = layer.config
            keys = -(-most // c.compress_ratio // c.kv_page_rows) + 1
            table, pages = ring_table(requests, most, c.window, c.page_rows)
            kv_table = np.arange(requests * keys, dtype=np.int32).reshape(requests, -1)
            tables[name] = jnp.asarray(table), jnp.asarray(kv_table)
            caches[name] = layer.init_caches(pages, kv_table.size)
            graphs[name] = nnx.split(layer)
        params = {name: params for name, (_, params) in graphs.items()}
        hidden_size = next(iter(layers.values())).wkv_gate.shape[0]
        cos_sin = jnp.asarray(next(iter(layers.values())).config.rope.table(most))

        @functools.partial(jax.jit, donate_argnums=(0, 1))
        def step(i, caches, params, tables, cos_sin):
            hidden = jax.random.randint(jax.random.key(i), (requests, hidden_size), -2, 3).astype(jnp.bfloat16)
            after = {}
            for name, (graph, _) in graphs.items():
                layer = nnx.merge(graph, params[name])
                metadata = CompressorMetadata.build(
                    layer.config, starts, first + i + 1, *tables[name], num_tokens=requests
                )
                after[name] = layer(hidden, caches[name], metadata, cos_sin, implementation=implementation)
            return i + 1, after

        self.step, self.args = step, (params, tables, cos_sin)
        self.state = jnp.int32(0), caches

    def compile(self):
        """The compiled step, to read its HLO."""
        return self.step.lower(*self.state, *self.args).compile()

    def run(self, steps):
        for _ in range(steps):
            self.state = self.step(*self.state, *self.args)
        return jax.block_until_ready(self.state[1])


def assert_alike(got, want):
    """Two implementations' caches: the same states, and at most 1 byte of keys in 2000 another, from rounding edges."""
    for name, (states, cache) in got.items():
        np.testing.assert_array_equal(states, want[name][0])
        a, b = (np.asarray(c) for c in (cache, want[name][1]))
        assert b.any() and (a != b).sum() <= max(2, np.count_nonzero(b) // 2000), name
