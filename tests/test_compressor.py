"""`DeepseekCompressor`: the layer itself, what a serving loop needs of it, and Flax's and JAX's transformations."""

import dataclasses
import functools
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import ops, serving
from helpers.serving import DecodeLoop, Server, hidden_states, make_layer, nnx

import dsv4_jax
from dsv4_jax import CompressorConfig, CompressorMetadata, compress

HIDDEN = 32
CONFIGS = {"csa": CompressorConfig.csa(), "hca": CompressorConfig.hca(), "indexer": CompressorConfig.indexer()}


def one_step(config, tokens=10):
    """Metadata of one request's prefill, caches' pages `(state, kv)`, and the RoPE table."""
    pages = -(-tokens // config.page_rows)
    metadata = CompressorMetadata.build(
        config,
        jnp.array([0, tokens]),
        jnp.array([tokens]),
        jnp.arange(pages)[None],
        jnp.array([[0]]),
        num_tokens=tokens,
    )
    return metadata, (pages, 1), jnp.asarray(config.rope.table(tokens))


def same(got, want):
    for a, b in zip(got, want, strict=True):
        ops.same_bytes(a, b)


@pytest.mark.parametrize("kind", CONFIGS)
def test_parameters(kind):
    config = CONFIGS[kind]
    layer = dsv4_jax.DeepseekCompressor(config, HIDDEN, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    m, d, w = config.compress_ratio, config.head_dim, config.width
    state = nnx.state(layer, nnx.Param)
    assert {name: (p.shape, p.get_value().dtype) for name, p in state.items()} == {
        "wkv_gate": ((HIDDEN, 2 * w), jnp.bfloat16),
        "ape": ((m, w), jnp.float32),
        "norm": ((d,), jnp.float32),
    }
    assert len(jax.tree.leaves(nnx.state(layer))) == 3, "nothing but parameters"
    assert 0.5 < float(layer.wkv_gate.get_value().astype(jnp.float32).std()) * HIDDEN**0.5 < 1.5
    assert (layer.norm.get_value() == 1).all() and not layer.ape.get_value().any()
    states, cache = layer.init_caches(3, 5)
    assert states.shape == (3, config.page_rows, 2 * w) and states.dtype == jnp.float32
    assert cache.shape == (5, config.format.page_bytes(config.kv_page_rows))


@pytest.mark.parametrize(
    ("config", "dtype", "param_dtype", "kv_scale"),
    [
        (CONFIGS["csa"], jnp.float32, jnp.float32, None),
        (CONFIGS["hca"], jnp.bfloat16, jnp.bfloat16, None),
        (CONFIGS["indexer"], jnp.bfloat16, jnp.float32, None),
        (CompressorConfig.csa("fp8"), jnp.float32, jnp.bfloat16, 0.02),
    ],
    ids=["csa", "hca", "indexer", "csa-fp8"],
)
def test_is_the_projection_and_compress(config, dtype, param_dtype, kv_scale):
    """Also that bfloat16 operands are summed in float32: the integers here need more bits than bfloat16 has."""
    layer = make_layer(config, HIDDEN, param_dtype=param_dtype)
    tokens = config.compress_ratio + 6
    metadata, pages, cos_sin = one_step(config, tokens)
    hidden = 37 * hidden_states(tokens)
    options = {"save": "all", "kv_scale": kv_scale}
    got = layer(jnp.asarray(hidden, dtype), layer.init_caches(*pages), metadata, cos_sin, **options)
    exact = hidden.astype(np.float64) @ np.asarray(layer.wkv_gate.get_value(), np.float64)
    assert (exact.astype(jnp.bfloat16) != exact).any()
    ape, norm = layer.ape.get_value(), layer.norm.get_value()
    want = compress(
        jnp.asarray(exact, jnp.float32),
        ape,
        *layer.init_caches(*pages),
        metadata,
        norm,
        cos_sin,
        config=config,
        **options,
    )
    same(got, want)
    assert got[1].astype(jnp.float32).any()


def test_precision_reaches_the_matmul():
    layer = dsv4_jax.DeepseekCompressor(CONFIGS["csa"], HIDDEN, precision="highest", rngs=nnx.Rngs(0))
    metadata, pages, cos_sin = one_step(layer.config)
    jaxpr = str(jax.make_jaxpr(lambda h: layer(h, layer.init_caches(*pages), metadata, cos_sin))(hidden_states(10)))
    assert "Precision.HIGHEST" in jaxpr and "preferred_element_type=float32" in jaxpr


def test_bad_arguments():
    config = CONFIGS["csa"]
    make = functools.partial(dsv4_jax.DeepseekCompressor, rngs=nnx.Rngs(0))
    with pytest.raises(TypeError, match="config is a str"):
        make("csa", HIDDEN)
    with pytest.raises(ValueError, match="hidden_size is 0"):
        make(config, 0)
    with pytest.raises(TypeError, match="param_dtype is float16; it must be float32 or bfloat16"):
        make(config, HIDDEN, param_dtype=jnp.float16)
    layer = make(config, HIDDEN)
    metadata, pages, cos_sin = one_step(config)
    caches, hidden = layer.init_caches(*pages), jnp.zeros((10, HIDDEN))
    with pytest.raises(ValueError, match=rf"hidden has shape \[10, 7\]; it must be \[T, {HIDDEN}\]"):
        layer(hidden[:, :7], caches, metadata, cos_sin)
    with pytest.raises(TypeError, match="hidden has dtype float16"):
        layer(hidden.astype(jnp.float16), caches, metadata, cos_sin)
    with pytest.raises(TypeError, match="caches must be the pair"):
        layer(hidden, caches[0], metadata, cos_sin)
    with pytest.raises(ValueError, match=r"kv_score has shape \[9, 2048\]; it must be \[10, 2048\]"):
        layer(hidden[:9], caches, metadata, cos_sin)
    with pytest.raises(ValueError, match="save is 'none'"):
        layer(hidden, caches, metadata, cos_sin, save="none")
    with pytest.raises(ValueError, match=r"kv_scale is 2\.0"):
        layer(hidden, caches, metadata, cos_sin, kv_scale=2.0)
    with pytest.raises(ValueError, match="state_pages is -1"):
        layer.init_caches(-1, 2)


def test_package_without_flax():
    program = (
        "import sys; sys.modules['flax'] = None\n"
        "import dsv4_jax\n"
        "for use in (lambda: dsv4_jax.DeepseekCompressor, lambda: dsv4_jax.load_compressors('.')):\n"
        "    try: use()\n"
        "    except ImportError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.splitlines() == ["DeepseekCompressor needs flax: pip install 'dsv4-jax[flax]'"] * 2, done.stderr
    program = "import sys, dsv4_jax; assert 'flax' not in sys.modules; dsv4_jax.DeepseekCompressor; dsv4_jax.nothing"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "module 'dsv4_jax' has no attribute 'nothing'" in done.stderr


# Serving: in all tests the same shapes and options, so that each compressor is compiled three times for all of them.

ROLLBACK = 4


def paged(kind):
    """Cache pages so small that several are in play."""
    return dataclasses.replace(CONFIGS[kind], kv_page_rows=1 if kind == "hca" else 2)


def server(layer, **options):
    m = layer.config.compress_ratio
    return Server(layer, 2, 6 * m + 64, chunk=2 * m + 16, rollback=ROLLBACK, **options)


def pool(config):
    """State pages just enough for what two requests need before a step and after it."""
    return 2 * (-(-(2 * (config.window + ROLLBACK) + 1) // config.page_rows) + 1)


def expected(layer, *hidden):
    """What a server has that was fed in large pieces and keeps every page."""
    wanted = server(layer)
    while any(done < len(h) for h, done in zip(hidden, wanted.done, strict=True)):
        ends = wanted.done + wanted.chunk // 2
        wanted.feed(*(h[a:b] for h, a, b in zip(hidden, wanted.done, ends, strict=True)))
    return wanted


def assert_same(got, want):
    for r in range(2):
        assert len(want.stored(r)) > 0 and got.done[r] == want.done[r]
        ops.same_bytes(got.stored(r), want.stored(r))
        ops.same_bytes(got.states(r), want.states(r))


@pytest.mark.parametrize("kind", CONFIGS)
def test_state_pages_are_reused(kind):
    """A pool just large enough for the windows that are open; and no compilation once both steps were seen."""
    layer = make_layer(paged(kind))
    config, m = layer.config, layer.config.compress_ratio
    hidden = [hidden_states(5 * m + 33), hidden_states(4 * m + 31, seed=1)]
    assert pool(config) * config.page_rows < sum(map(len, hidden)) - 2 * m
    pooled = server(layer, pool=pool(config))
    pooled.feed(hidden[0][: m + 9], hidden[1][: m - 1])
    compiled = None
    while any(done < len(h) for h, done in zip(hidden, pooled.done, strict=True)):
        pooled.feed(*(h[done : done + 1] for h, done in zip(hidden, pooled.done, strict=True)))
        compiled = compiled or serving.step._cache_size()
    assert serving.step._cache_size() == compiled
    assert_same(pooled, expected(layer, *hidden))


@pytest.mark.parametrize("kind", CONFIGS)
def test_shared_prefix(kind):
    """A second request starts from the first one's pages, which were saved whole."""
    layer = make_layer(paged(kind))
    config, m = layer.config, layer.config.compress_ratio
    shared = 2 * m  # whole pages of both caches
    assert shared % config.page_rows == shared // m % config.kv_page_rows == 0
    first = hidden_states(shared + m + 3)
    second = np.concatenate([first[:shared], hidden_states(m + 5, seed=1)])
    sharing = server(layer, save="all")
    sharing.feed(first[:shared], first[:0])
    sharing.table[1, : shared // config.page_rows] = sharing.table[0, : shared // config.page_rows]
    pages = shared // m // config.kv_page_rows
    sharing.kv_table[1, :pages] = sharing.kv_table[0, :pages]
    sharing.done[1] = shared
    sharing.feed(first[shared:], second[shared:])
    assert_same(sharing, expected(layer, first, second))


@pytest.mark.parametrize("share", ["nothing", "states", "no slots"])
def test_a_shared_window_fed_again(share):
    """The second request shares cache pages and feeds their last window again: alone it makes another key."""
    layer = make_layer(paged("csa"))
    config, m = layer.config, layer.config.compress_ratio
    shared = 2 * m
    first = hidden_states(shared + m + 3)
    second = np.concatenate([first[:shared], hidden_states(m + 5, seed=1)])
    sharing = server(layer, save="all")
    sharing.feed(first[:shared], first[:0])
    before = sharing.stored(0)
    if share == "states":
        columns = shared // config.page_rows
        sharing.table[1, :columns] = sharing.table[0, :columns]
    pages = shared // m // config.kv_page_rows
    sharing.kv_table[1, :pages] = -1 if share == "no slots" else sharing.kv_table[0, :pages]
    sharing.done[1] = shared - m
    sharing.feed(first[:0], second[shared - m :])
    sharing.kv_table[1, :pages] = sharing.kv_table[0, :pages]
    if share == "nothing":
        assert (sharing.stored(0)[0] == before[0]).all() and (sharing.stored(0)[1] != before[1]).any()
        return
    sharing.feed(first[shared:], second[:0])
    assert_same(sharing, expected(layer, first, second))


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("pooled", [False, True])
def test_tokens_taken_back(kind, pooled):
    """Speculative decoding: wrong drafts leave no trace, whatever windows they closed."""
    layer = make_layer(paged(kind))
    m = layer.config.compress_ratio
    start, rounds = (2 * m - 6, 9) if kind == "hca" else (m + 1, 16)
    right = [hidden_states(start + rounds * (ROLLBACK + 1), seed=r) for r in range(2)]
    wrong, rng = hidden_states(ROLLBACK, seed=9), np.random.default_rng(0)
    speculating = server(layer, pool=pool(layer.config) if pooled else None)
    for part in (slice(start // 2), slice(start // 2, start)):
        speculating.feed(*(h[part] for h in right))
    for _ in range(rounds):
        counts = rng.integers(0, ROLLBACK + 1, 2)  # of wrong drafts, after right ones
        batch = [
            np.concatenate([h[done : done + ROLLBACK + 1 - bad], wrong[:bad]])
            for h, done, bad in zip(right, speculating.done, counts, strict=True)
        ]
        speculating.feed(*batch)
        for r, bad in enumerate(counts):
            speculating.take_back(r, bad)
    assert_same(speculating, expected(layer, *(h[:n] for h, n in zip(right, speculating.done, strict=True))))


# Flax's and JAX's transformations.


@pytest.fixture(scope="module")
def csa():
    """A layer, a step of it, and what it gives eagerly."""
    layer = make_layer(CONFIGS["csa"])
    metadata, pages, cos_sin = one_step(layer.config)
    hidden = jnp.asarray(hidden_states(10))
    return layer, hidden, metadata, pages, cos_sin, layer(hidden, layer.init_caches(*pages), metadata, cos_sin)


def test_jit(csa):
    layer, hidden, metadata, pages, cos_sin, want = csa
    by_flax = nnx.jit(lambda layer, caches, *args: layer(*args[:1], caches, *args[1:]), donate_argnums=1)
    same(by_flax(layer, layer.init_caches(*pages), hidden, metadata, cos_sin), want)

    graph, params = nnx.split(layer)

    @functools.partial(jax.jit, donate_argnums=1)
    def by_jax(params, caches, hidden, metadata, cos_sin):
        return nnx.merge(graph, params)(hidden, caches, metadata, cos_sin)

    caches = layer.init_caches(*pages)
    compiled = by_jax.lower(params, caches, hidden, metadata, cos_sin).compile()
    assert not ops.copies(compiled, *caches)
    same(compiled(params, caches, hidden, metadata, cos_sin), want)
    assert all(cache.is_deleted() for cache in caches), "donated"


def test_scan_over_layers():
    """Layers' parameters stacked, their caches one after another along the page axis and carried: never copied."""
    config, layers = CONFIGS["csa"], 3
    metadata, (state_pages, kv_pages), cos_sin = one_step(config)
    kv_pages += 1
    hidden = jnp.asarray(hidden_states(10))
    name = {nnx.PARTITION_NAME: "layers"}

    @nnx.vmap(transform_metadata=name)
    def make(rngs):
        return dsv4_jax.DeepseekCompressor(config, HIDDEN, rngs=rngs)

    stack = make(nnx.Rngs(0).split(layers))
    assert stack.wkv_gate.out_sharding == ("layers", "embed", "state")

    @nnx.scan(in_axes=(nnx.Carry, 0, 0, None, None, None), out_axes=nnx.Carry, transform_metadata=name)
    def through(caches, layer, i, hidden, metadata, cos_sin):
        return layer(hidden, caches, metadata.at_layer(i, state_pages, kv_pages), cos_sin)

    graph, params = nnx.split(stack)

    @functools.partial(jax.jit, donate_argnums=1)
    def run(params, caches, hidden, metadata, cos_sin):
        return through(caches, nnx.merge(graph, params), jnp.arange(layers), hidden, metadata, cos_sin)

    caches = stack.init_caches(layers * state_pages, layers * kv_pages)
    compiled = run.lower(params, caches, hidden, metadata, cos_sin).compile()
    assert not ops.copies(compiled, *caches)
    states, cache = compiled(params, caches, hidden, metadata, cos_sin)
    for i in range(layers):
        layer = nnx.merge(graph, jax.tree.map(lambda p, i=i: p[i], params))
        want = layer(hidden, layer.init_caches(state_pages, kv_pages), metadata, cos_sin)
        same((states[i * state_pages :][:state_pages], cache[i * kv_pages :][:kv_pages]), want)


def test_at_layer():
    """What lies outside a layer's pages must not come to lie in the next layer's."""
    config = CompressorConfig.csa(page_rows=4, kv_page_rows=2)
    columns = jnp.array([[0, 2, 1]]), jnp.array([[1, 0]])  # of 3 state pages and 2 cache pages
    plain = CompressorMetadata.build(config, jnp.array([0, 12]), jnp.array([12]), *columns, num_tokens=13)
    moved = plain.at_layer(jnp.int32(2), 3, 2)
    built = [c + 2 * pages for c, pages in zip(columns, (3, 2), strict=True)]
    want = CompressorMetadata.build(config, jnp.array([0, 12]), jnp.array([12]), *built, num_tokens=13)
    jax.tree.map(np.testing.assert_array_equal, moved, want)
    assert all(a.dtype == jnp.int32 for a in jax.tree.leaves(moved))
    less = plain.at_layer(1, 2, 1)  # page 2 and cache page 1 are past these
    table = jnp.array([[2, -1, 3]]), jnp.array([[-1, 1]])
    want = CompressorMetadata.build(config, jnp.array([0, 12]), jnp.array([12]), *table, num_tokens=13)
    for name in ("slot_mapping", "block_table", "kv_slot_mapping"):
        np.testing.assert_array_equal(getattr(less, name), getattr(want, name))
    for a, b in ((less.closing[:, 2], plain.closing[:, 2]), (less.saving[:, 2], plain.saving[:, 2])):
        assert ((a >= 0) <= (b >= 0)).all() and (a < 16).all()
    assert less.window_slots.max() < 16 and set(np.asarray(less.closing[:, 2])) <= {-1, 2, 3}


def test_sharded():
    env = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
    program = os.path.join(os.path.dirname(__file__), "helpers", "sharded_layer.py")
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, env=env)
    assert done.stdout == "ok\n", done.stderr


@pytest.mark.gpu
@pytest.mark.skipif(jax.local_device_count() < 2, reason="needs two GPUs")
def test_sharded_over_gpus():
    # A process of its own, beside this one's memory.
    env = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    program = os.path.join(os.path.dirname(__file__), "helpers", "sharded_layer.py")
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, env=env)
    assert done.stdout == "ok\n", done.stderr


# A decode loop with everything in one step.


def decode_loop(implementation, requests, steps, hidden_size=HIDDEN, kinds=tuple(CONFIGS)):
    layers = {kind: make_layer(CONFIGS[kind], hidden_size) for kind in kinds}
    loop = DecodeLoop(layers, requests, steps, implementation)
    caches = [cache for pair in loop.state[1].values() for cache in pair]
    assert not ops.copies(loop.compile(), *caches)
    loop.run(3)
    addresses = [cache.unsafe_buffer_pointer() for pair in loop.state[1].values() for cache in pair]
    after = loop.run(steps - 3)
    assert [cache.unsafe_buffer_pointer() for pair in after.values() for cache in pair] == addresses
    assert loop.step._cache_size() == 1
    return after


def test_decode_loop():
    """Positions, slots and closing windows change; the compilation, the buffers and their addresses do not."""
    decode_loop("xla", requests=3, steps=140)


@pytest.mark.gpu
@pytest.mark.parametrize(("implementation", "kinds"), [("triton", tuple(CONFIGS)), ("cutedsl", ("csa", "hca"))])
def test_decode_loop_on_a_gpu(implementation, kinds):
    loops = (decode_loop(i, requests=64, steps=200, hidden_size=1024, kinds=kinds) for i in (implementation, "xla"))
    serving.assert_alike(*loops)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("kind", "fast"), [*((kind, "triton") for kind in CONFIGS), ("csa", "cutedsl"), ("hca", "cutedsl")]
)
@pytest.mark.parametrize("save", ["tail", "all"])
def test_prefill_on_a_gpu(kind, fast, save):
    layer = make_layer(CONFIGS[kind], 1024, param_dtype=jnp.bfloat16)
    hidden = [hidden_states(n, 1024, seed=n).astype(jnp.bfloat16) for n in (700, 33)]
    caches = {}
    for implementation in (fast, "xla"):
        prefilled = Server(layer, 2, 700, chunk=400, save=save, implementation=implementation)
        for a in (0, 350):
            prefilled.feed(*(h[a : a + 350] for h in hidden))
        states, cache = prefilled.caches
        caches[implementation] = {kind: (jnp.nan_to_num(states, nan=7.0), cache)}
    serving.assert_alike(caches[fast], caches["xla"])
