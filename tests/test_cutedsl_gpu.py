"""The CuTeDSL kernels on a GPU, held to the oracle."""

import dataclasses
import functools
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from helpers import ops, oracle
from helpers.batches import random_batch

import bridge
import dsv4_jax
from dsv4_jax import CompressorMetadata

pytestmark = pytest.mark.gpu

FORMATS = [
    ("csa", "fp8_ds_mla", 4, 64, {}),
    ("hca", "fp8_ds_mla", 8, 2, {}),
    ("csa", "bf16", 3, 5, {"dtype": ml_dtypes.bfloat16}),
    ("hca", "bf16", 3, 5, {"dtype": ml_dtypes.bfloat16, "holes": True}),
    ("csa", "fp8", 7, 1, {"holes": True}),
    ("hca", "fp8", 5, 3, {"magnitudes": True}),
    ("csa", "fp8_ds_mla", 1, 5, {"magnitudes": True, "holes": True, "page_bytes": 5 * 584 + 4}),
    ("hca", "fp8_ds_mla", 1, 1, {"magnitudes": True, "holes": True, "dtype": ml_dtypes.bfloat16}),
]


@pytest.fixture(params=["any batch", "long prefill"])
def kernel(request, monkeypatch):
    """Which kernel takes the prefills: for long ones, three of its CTAs take all windows by turns."""
    if request.param == "any batch":
        yield
        return
    from dsv4_jax.nvidia.ops import compress_prefill

    taken = []

    def few(windows):
        taken.append(windows)
        return min(windows, 3)

    monkeypatch.setattr(CompressorMetadata, "prefill", True)
    monkeypatch.setattr(compress_prefill, "pays", lambda shape, tokens: True)
    monkeypatch.setattr(compress_prefill, "blocks", few)
    # What was compiled before has another kernel.
    jax.clear_caches()
    yield
    jax.clear_caches()
    assert taken


def gpu_batch(kind, fmt, page_rows, kv_page_rows, options, seed=7, **changes):
    config = ops.make_config(kind, fmt, page_rows, kv_page_rows, **changes)
    tokens = 2500 if config.compress_ratio > 64 else 420  # enough for several windows to close
    return random_batch(np.random.default_rng(seed), config, requests=5, tokens=tokens, padding=9, **options)


def check(batch):
    """All three ways from scores to keys, held to the oracle."""
    saved = ops.saved(batch)
    held = functools.partial(oracle.assert_same_cache, before=batch.cache, config=batch.config, scale=batch.kv_scale)
    held(ops.store(batch, saved, implementation="cutedsl"), rows=ops.rows(batch, saved, from_batch=False))
    fused = ops.rows(batch, batch.state, from_batch=True)
    assert len(fused.slots) > 2
    for save, state in (("all", saved), ("tail", ops.tail(batch))):
        got, cache = ops.compress(batch, implementation="cutedsl", save=save)
        ops.same_bytes(got, state)
        held(cache, rows=fused)


@pytest.mark.parametrize(("kind", "fmt", "page_rows", "kv_page_rows", "options"), FORMATS)
def test_batches(kind, fmt, page_rows, kv_page_rows, options, kernel):
    check(gpu_batch(kind, fmt, page_rows, kv_page_rows, options))


@pytest.mark.parametrize("kind", ["csa", "hca"])
def test_bfloat16_norm_weight(kind, kernel):
    batch = gpu_batch(kind, "fp8_ds_mla", 4, 4, {})
    check(dataclasses.replace(batch, norm_weight=batch.norm_weight.astype(ml_dtypes.bfloat16)))


@pytest.mark.parametrize(
    ("ratio", "overlap"), [(1, False), (2, True), (16, False), (16, True), (64, True), (256, False)]
)
def test_other_ratios(ratio, overlap):
    check(gpu_batch("csa", "fp8_ds_mla", 4, 4, {}, compress_ratio=ratio, overlap=overlap))


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("kernel", ["long prefill"], indirect=True)
@pytest.mark.parametrize(
    ("ratio", "overlap"), [(8, False), (8, True), (16, False), (16, True), (64, True), (256, False)]
)
def test_long_prefills_of_other_ratios(ratio, overlap, kernel, dtype):
    check(gpu_batch("csa", "fp8_ds_mla", 4, 4, {"dtype": dtype}, compress_ratio=ratio, overlap=overlap))


@pytest.mark.parametrize(("kind", "tokens"), [("csa", 9000), ("hca", 17000), ("hca", 53000)])
def test_long_prefills(kind, tokens):
    """As many windows as the kernel for long prefills is taken for: with three CTAs a multiprocessor, and with four."""
    from dsv4_jax.nvidia.ops import compress_prefill

    config = ops.make_config(kind, "fp8_ds_mla")
    sizes = [(3, tokens // 2), (0, tokens // 2 - 700), (130, 690)]
    batch = random_batch(np.random.default_rng(5), config, sizes=sizes, padding=10, dtype=ml_dtypes.bfloat16)
    assert tokens // config.compress_ratio * config.window >= compress_prefill.LEAST_ROWS
    assert compress_prefill.resident(ops.metadata(batch).closing.shape[0]) == (3 if tokens == 17000 else 4)
    state, cache = ops.compress(batch, implementation="cutedsl")
    ops.same_bytes(state, ops.tail(batch))
    oracle.assert_same_cache(cache, batch.cache, ops.rows(batch, batch.state, from_batch=True), config)


@pytest.mark.parametrize("kind", ["csa", "hca"])
def test_wrong_plan_entries_write_nothing(kind, kernel):
    batch = gpu_batch(kind, "fp8_ds_mla", 4, 3, {})
    meta = ops.metadata(batch)
    tokens, m, n, largest = len(batch.positions), batch.config.compress_ratio, batch.config.window, 2**31 - 1
    wrong = [
        [largest, m - 1, 0, n], [tokens, m - 1, 0, n], [-5, m - 1, 0, n],  # batch row of a window in the batch
        [tokens, m - 1, 0, 1], [largest, m - 1, 0, 1], [-5, m - 1, 0, 1],  # batch row
        [0, m, 0, 1], [0, largest, 0, 1], [0, -1, 0, 1],  # position
        [0, m - 1, largest, 1], [0, m - 1, len(batch.cache) * 3, 1], [0, m - 1, -7, 1],  # cache slot
        [0, m - 1, 0, 0],  # rows in the batch
    ]  # fmt: skip
    right = np.array(meta.closing)
    right = right[right[:, 0] >= 0]
    closing = np.array([entry for i, r in enumerate(right) for entry in (wrong[i % len(wrong)], r)], np.int32)
    slots = np.repeat(np.asarray(meta.window_slots)[: len(right)], 2, axis=0)
    wrong = [[tokens, 0, 0], [-1, 0, 0], [largest, 5, 0], [0, -1, 0], [0, 0, largest]]
    saving = np.concatenate([np.asarray(meta.saving), wrong]).astype(np.int32)
    meta = ops.metadata(batch, closing=closing, window_slots=slots, saving=saving)
    state, cache = ops.compress(batch, meta, implementation="cutedsl")
    ops.same_bytes(state, ops.tail(batch))
    oracle.assert_same_cache(cache, batch.cache, ops.rows(batch, batch.state, from_batch=True), batch.config)


@pytest.mark.parametrize("fmt", ["fp8_ds_mla", "bf16", "fp8"])
@pytest.mark.parametrize("kind", ["csa", "hca"])
def test_a_channel_that_is_not_finite(kind, fmt, kernel):
    batch = gpu_batch(kind, fmt, 4, 3, {})
    rng = np.random.default_rng(0)
    for value in (np.nan, np.inf, -np.inf):
        batch.kv_score[rng.integers(0, 420, 3), rng.integers(0, batch.kv_score.shape[1], 3)] = value
    _, cache = ops.compress(batch, implementation="cutedsl")
    rows = ops.rows(batch, batch.state, from_batch=True)
    assert np.isnan(rows.exact).any()
    oracle.assert_same_cache(cache, batch.cache, rows, batch.config, scale=batch.kv_scale)


@pytest.mark.parametrize("loop", ["jit", "scan"])
@pytest.mark.parametrize("fmt", ["fp8_ds_mla", "bf16", "fp8"])
@pytest.mark.parametrize("kind", ["csa", "hca"])
def test_in_place(kind, fmt, loop):
    batch = gpu_batch(kind, fmt, 4, 3, {})
    meta, rest = ops.metadata(batch), tuple(map(jnp.asarray, (batch.norm_weight, batch.cos_sin)))
    inputs = jnp.asarray(batch.kv_score), jnp.asarray(batch.ape)

    def once(caches):
        return dsv4_jax.compress(
            *inputs, *caches, meta, *rest, config=batch.config, kv_scale=batch.kv_scale, implementation="cutedsl"
        )

    def run(caches):
        if loop == "jit":
            return once(once(caches))
        return jax.lax.scan(lambda c, _: (once(c), None), caches, length=2)[0]

    caches = jnp.asarray(batch.state), jnp.asarray(batch.cache)
    compiled = jax.jit(run, donate_argnums=0).lower(caches).compile()
    assert not ops.copies(compiled, *caches)
    addresses = [cache.unsafe_buffer_pointer() for cache in caches]
    assert [cache.unsafe_buffer_pointer() for cache in compiled(caches)] == addresses


@pytest.mark.parametrize(("kind", "fmt", "page_rows", "kv_page_rows", "options"), FORMATS)
def test_named_kernels(kind, fmt, page_rows, kv_page_rows, options):
    """One launch and two, on several batches of one shape."""

    @functools.partial(jax.jit, static_argnums=0)
    def both(config, state, cache, meta, norm_weight, cos_sin, kv_scale):
        options = {"config": config, "kv_scale": kv_scale}
        rows = dsv4_jax.compress_kv_sparse_attn_cutedsl(state, meta, config=config)
        rest = cache, meta, norm_weight, cos_sin
        return (
            dsv4_jax.fused_kv_compress_norm_rope_insert_sparse_attn_cutedsl(state, *rest, **options),
            dsv4_jax.compress_norm_rope_store_cutedsl(state, *rest, **options),
            dsv4_jax.norm_rope_insert_sparse_attn_cutedsl(rows, state, *rest, **options),
        )

    for seed in (7, 8, 9):
        batch = gpu_batch(kind, fmt, page_rows, kv_page_rows, options, seed)
        state = ops.saved(batch)
        rest = batch.cache, ops.metadata(batch), batch.norm_weight, batch.cos_sin, batch.kv_scale
        rows = ops.rows(batch, state, from_batch=False)
        for cache in both(batch.config, *jax.tree.map(jnp.asarray, (state, *rest))):
            oracle.assert_same_cache(cache, batch.cache, rows, batch.config, scale=batch.kv_scale)


@pytest.mark.parametrize("kind", ["csa", "hca"])
def test_ten_thousand_decode_steps(kind, monkeypatch, total=10_000):
    """Three requests at other phases, in a scan, in jits of eight steps that XLA replays as a graph, and one by one."""
    from dsv4_jax.nvidia.ops.helpers import launch

    launches, call = [], launch.Launch.__call__
    monkeypatch.setattr(launch.Launch, "__call__", lambda self, *args: launches.append(self) or call(self, *args))
    config = ops.make_config(kind, "fp8_ds_mla", 4, 4)
    before = np.array([0, 5, 130])
    sizes = [(int(b), total) for b in before]
    batch = random_batch(np.random.default_rng(1), config, sizes=sizes, padding=0, padded_requests=0)
    arrays = batch.kv_score.reshape(3, total, -1), batch.ape, batch.norm_weight, batch.cos_sin
    arrays += batch.block_table, batch.kv_block_table
    arrays = jax.tree.map(jnp.asarray, arrays)

    def inputs(t, kv_score, ape, norm_weight, cos_sin, *tables):
        starts, lengths = jnp.arange(4, dtype=jnp.int32), jnp.asarray(before + 1, jnp.int32) + t
        meta = CompressorMetadata.build(config, starts, lengths, *tables, num_tokens=3)
        return kv_score[:, t], ape, meta, norm_weight, cos_sin

    @functools.partial(jax.jit, donate_argnums=0)
    def step(caches, kv_score, ape, meta, norm_weight, cos_sin):
        args = kv_score, ape, *caches, meta, norm_weight, cos_sin
        return dsv4_jax.compress(*args, config=config, implementation="cutedsl")

    @functools.partial(jax.jit, donate_argnums=0)
    def scan(caches, arrays):
        return jax.lax.scan(lambda c, t: (step(c, *inputs(t, *arrays)), None), caches, jnp.arange(total))[0]

    @functools.partial(jax.jit, donate_argnums=0)
    def eight(caches, t, arrays):
        for i in range(8):
            caches = step(caches, *inputs(t + i, *arrays))
        return caches

    def start():
        return jnp.asarray(batch.state), jnp.asarray(batch.cache)

    found = {"scan": scan(start(), arrays)}
    caches = start()
    launches.clear()
    for t in range(0, total, 8):
        caches = eight(caches, t, arrays)
    found["eight"] = jax.block_until_ready(caches)
    assert 8 <= len(launches) < total / 2, "Python ran at most calls, so no graph was replayed"
    caches, prepared = start(), jax.jit(inputs)
    for t in range(total):
        caches = step(caches, *prepared(t, *arrays))
    found["one"] = caches

    saved = [
        int(batch.query_start_loc[row]) + t
        for t in range(total)
        for row in oracle.saving(config, np.arange(4), before + t + 1)
    ]
    state = ops.saved(batch, tokens=np.array(saved))
    rows = ops.rows(batch, batch.state, from_batch=True)
    assert len(rows.slots) == sum((b + total) // config.compress_ratio - b // config.compress_ratio for b in before)
    for got, cache in found.values():
        ops.same_bytes(got, state)
        oracle.assert_same_cache(cache, batch.cache, rows, config)


def test_threads_with_programs_of_their_own():
    """Each thread compiles its own program and runs it again and again, on data that changes."""
    batches = [gpu_batch(kind, "fp8_ds_mla", 4, 3, {}, seed) for kind in ("csa", "hca") for seed in (7, 8)]

    def work(batch):
        meta, rest = ops.metadata(batch), tuple(map(jnp.asarray, (batch.norm_weight, batch.cos_sin)))
        caches = jnp.asarray(batch.state), jnp.asarray(batch.cache)
        inputs = jnp.asarray(batch.kv_score), jnp.asarray(batch.ape)

        @jax.jit
        def several(kv_score, ape):
            found = []
            for _ in range(6):  # each from the caches as they were
                kv_score, *before = jax.lax.optimization_barrier((kv_score, *caches))
                args = kv_score, ape, *before, meta, *rest
                found.append(dsv4_jax.compress(*args, config=batch.config, implementation="cutedsl"))
            return found

        return [several(*inputs) for _ in range(20)][-1]

    with ThreadPoolExecutor(len(batches)) as pool:
        for batch, found in zip(batches, pool.map(work, batches), strict=True):
            rows = ops.rows(batch, batch.state, from_batch=True)
            for state, cache in found:
                ops.same_bytes(state, ops.tail(batch))
                oracle.assert_same_cache(cache, batch.cache, rows, batch.config)


@pytest.mark.parametrize("captured", [False, True])
def test_an_exception_beside_a_launch_does_no_harm(captured):
    batch = gpu_batch("csa", "fp8_ds_mla", 4, 3, {})
    meta, rest = ops.metadata(batch), tuple(map(jnp.asarray, (batch.norm_weight, batch.cos_sin)))
    inputs = tuple(map(jnp.asarray, (batch.kv_score, batch.ape)))
    caches = jnp.asarray(batch.state), jnp.asarray(batch.cache)
    fails = True

    def fail(*_):
        if fails:
            raise ValueError("of the other call")

    @jax.jit
    def both(kv_score, ape, state, cache):
        for _ in range(6):
            state, cache = dsv4_jax.compress(
                kv_score, ape, state, cache, meta, *rest, config=batch.config, implementation="cutedsl"
            )
            (state,) = bridge.torch_call(
                fail, state, out_type=(state,), input_output_aliases={0: 0}, command_buffer_compatible=captured
            )
        return state, cache

    for _ in range(2):
        with pytest.raises(jax.errors.JaxRuntimeError, match="ValueError: of the other call"):
            jax.block_until_ready(both(*inputs, *caches))
    fails = False
    state, cache = both(*inputs, *caches)
    ops.same_bytes(state, ops.tail(batch))
    oracle.assert_same_cache(cache, batch.cache, ops.rows(batch, batch.state, from_batch=True), batch.config)
