"""The CuTeDSL kernels: compiled for every target, their key, their errors; on a GPU, held to the oracle."""

import dataclasses
import functools
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import ops
import oracle
import pytest
from batches import random_batch

import dsv4_jax
from dsv4_jax import CompressorConfig, CompressorMetadata, platforms
from dsv4_jax.nvidia.ops import compress, support

ROOT = Path(__file__).parent.parent
HAS_CUDA = jax.default_backend() in ("gpu", "cuda")


@pytest.fixture
def fresh(monkeypatch):
    """The launcher with nothing compiled yet, for a GPU that is not there; returns (module, keys compiled)."""
    pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
    pytest.importorskip("torch", reason="the bridge needs torch")
    from dsv4_jax.nvidia.ops import launch

    keys = []

    @functools.cache
    def compiled(kernel, shape, arch):
        keys.append((kernel.__name__, shape, arch))

    monkeypatch.setattr(launch, "loaded", compiled)
    monkeypatch.setenv("CUTE_DSL_ARCH", "sm_90a")
    return keys


def traced(kind="csa", fmt="fp8_ds_mla", *, dtype="float32", norm="float32", save="tail", page_rows=None, tokens=256):
    """Traces `compress` as it is lowered for CUDA."""
    config = ops.make_config(kind, fmt, page_rows)
    metadata = CompressorMetadata.build(
        config, jnp.array([0, tokens]), jnp.array([tokens]),
        jnp.zeros((1, 64), jnp.int32), jnp.zeros((1, 8), jnp.int32),
        num_tokens=tokens,
    )  # fmt: skip
    arguments = (
        jnp.zeros((tokens, 2 * config.width), dtype),
        jnp.zeros((config.compress_ratio, config.width)),
        jnp.zeros((tokens // 64, config.page_rows, 2 * config.width)),
        config.format.allocate(tokens // 16, config.kv_page_rows),
        metadata,
        jnp.ones(config.head_dim, norm),
        jnp.zeros((tokens, 64)),
        jnp.float32(1) if config.format.needs_scale else None,
    )
    return jax.make_jaxpr(functools.partial(compress.implement, config=config, save=save, platform="cuda"))(*arguments)


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_every_kernel_compiles(arch):
    pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "tests/compile_cutedsl.py", arch], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.endswith("18 kernels compiled\n"), done.stdout


def test_numbers_of_tokens_and_pages_are_not_in_the_key(fresh):
    for tokens in (256, 512, 1024):
        traced(tokens=tokens)
    assert len(fresh) == 1


def test_few_and_many_long_windows_have_a_kernel_each(fresh):
    for tokens in (256, 8192, 17408, 25600):
        traced("hca", tokens=tokens, dtype="bfloat16")
    assert [shape.resident for _, shape, _ in fresh] == [2, 3]


@pytest.mark.parametrize(
    "change",
    [
        {"kind": "hca"}, {"fmt": "bf16"}, {"fmt": "fp8"}, {"dtype": "bfloat16"}, {"norm": "bfloat16"}, {"save": "all"},
        {"page_rows": 3},
    ],
    ids=str,
)  # fmt: skip
def test_what_is_in_the_key(change, fresh):
    traced()
    traced(**change)
    traced()
    assert len(fresh) == 2


def test_the_target_is_in_the_key(fresh, monkeypatch):
    traced()
    monkeypatch.setenv("CUTE_DSL_ARCH", "sm_100a")
    traced()
    assert [arch for *_, arch in fresh] == ["sm_90a", "sm_100a"]


def test_one_launch(fresh):
    for kind in ("csa", "hca"):
        assert str(traced(kind)).count("= bridge_call[") == 1


@pytest.mark.parametrize(
    ("capability", "arch"), [("9.0", "sm_90a"), ("10.0", "sm_100a"), ("10.3", "sm_103a"), ("12.0", "sm_120a")]
)
def test_target_of_a_gpu(capability, arch):
    assert support.arch_of(capability) == arch


def test_an_old_gpu_is_refused():
    with pytest.raises(NotImplementedError, match=r"9\.0 or newer.*this one has 8\.9.*'triton'"):
        support.arch_of("8.9")


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (CompressorConfig.indexer(), r"head_dim 512.*this compressor has 128.*'triton'"),
        (dataclasses.replace(CompressorConfig.hca(), compress_ratio=512), r"up to 256 rows.*has 512.*'triton'"),
    ],
    ids=["indexer", "long window"],
)
def test_other_compressors_are_refused(config, why):
    with pytest.raises(NotImplementedError, match=why):
        compress.implement(config=config, save="tail", platform="cuda")
    for served in (CompressorConfig.csa(), CompressorConfig.hca("bf16")):
        assert support.why_not(served) is None


def test_missing_cutlass_is_named(monkeypatch):
    monkeypatch.setattr(support.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(NotImplementedError, match=r"nvidia-cutlass-dsl is not installed.*'triton'"):
        support.require_libraries()


def test_broken_cutlass_is_named(monkeypatch, tmp_path):
    package = tmp_path / "cutlass"
    package.mkdir()
    (package / "__init__.py").write_text("raise OSError('libcudart.so.13: cannot open')")
    for name in [name for name in sys.modules if name.partition(".")[0] == "cutlass"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(NotImplementedError, match=r"OSError: libcudart\.so\.13.*cu13.*CUDA 13.*'triton'"):
        support.require_libraries()


@pytest.mark.skipif(HAS_CUDA, reason="runs there")
@pytest.mark.parametrize("call", [ops.compress, ops.store], ids=["compress", "compress_norm_rope_store"])
def test_not_on_the_cpu(call):
    batch = random_batch(np.random.default_rng(0), CompressorConfig.csa(), requests=1, tokens=8)
    arguments = (batch,) if call is ops.compress else (batch, batch.state)
    with pytest.raises(NotImplementedError, match=r"NVIDIA GPUs only, not on cpu"):
        call(*arguments, implementation="cutedsl")


NAMED = [
    "compress_kv_sparse_attn_cutedsl",
    "compress_norm_rope_store_cutedsl",
    "fused_kv_compress_norm_rope_insert_sparse_attn_cutedsl",
    "norm_rope_insert_sparse_attn_cutedsl",
]


def named_arguments(name, config):
    """Arguments of a named kernel, shapes alone."""

    def make():
        metadata = CompressorMetadata.build(
            config, jnp.array([0, 256]), jnp.array([256]), jnp.zeros((1, 64), jnp.int32), jnp.zeros((1, 8), jnp.int32),
            num_tokens=256,
        )  # fmt: skip
        state = jnp.zeros((64, config.page_rows, 2 * config.width))
        if name == "compress_kv_sparse_attn_cutedsl":
            return state, metadata
        cache = config.format.allocate(8, config.kv_page_rows)
        rest = state, cache, metadata, jnp.ones(config.head_dim), jnp.zeros((256, 64))
        rows = jnp.zeros((metadata.closing.shape[0], config.head_dim))
        return (rows, *rest) if name == "norm_rope_insert_sparse_attn_cutedsl" else rest

    return jax.eval_shape(make)


def lower_named(name, config, platform):
    function = functools.partial(getattr(dsv4_jax, name), config=config)
    return jax.jit(function).trace(*named_arguments(name, config)).lower(lowering_platforms=(platform,)).as_text()


@pytest.mark.parametrize("name", NAMED)
@pytest.mark.parametrize("kind", ["csa", "hca"])
def test_named_kernels_are_one_launch(name, kind, fresh):
    text = lower_named(name, ops.make_config(kind, "fp8_ds_mla"), "cuda")
    assert text.count("gpu_callback_cmd_buffer") == 1
    kernel = {"csa": "_short_windows", "hca": "_long_windows"}[kind]
    if name == "norm_rope_insert_sparse_attn_cutedsl":
        kernel = "_norm_rope_insert"
    assert [key[0] for key in fresh] == [kernel]
    assert fresh[0][1].format == ("compressed" if name == "compress_kv_sparse_attn_cutedsl" else "fp8_ds_mla")


@pytest.mark.parametrize("name", NAMED)
def test_named_kernels_say_what_is_missing(name, monkeypatch):
    csa = CompressorConfig.csa()
    for platform in ("cpu", "rocm", "tpu"):
        with pytest.raises(NotImplementedError, match=f"NVIDIA GPUs only, not on {platform}; .*implementation=None"):
            lower_named(name, csa, platform)
    with pytest.raises(NotImplementedError, match=r"made for head_dim 512.*has 128.*'triton'"):
        lower_named(name, CompressorConfig.indexer(), "cuda")
    monkeypatch.setattr(platforms, "installed", lambda package: None)
    with pytest.raises(NotImplementedError, match=r"nvidia-cutlass-dsl is not installed; install .*'triton'"):
        lower_named(name, csa, "cuda")


def test_named_kernels_check_their_arguments():
    config = ops.make_config("csa", "fp8_ds_mla")
    rows, state, cache, metadata, *rest = named_arguments("norm_rope_insert_sparse_attn_cutedsl", config)

    def compress_kv(*args, config=config):
        return jax.eval_shape(functools.partial(dsv4_jax.compress_kv_sparse_attn_cutedsl, config=config), *args)

    def insert(rows, **options):
        call = functools.partial(dsv4_jax.norm_rope_insert_sparse_attn_cutedsl, config=config, **options)
        return jax.eval_shape(call, rows, state, cache, metadata, *rest)

    assert compress_kv(state, metadata) == rows and insert(rows) == cache
    wrong = jax.ShapeDtypeStruct((len(rows) + 1, 512), jnp.float32)
    with pytest.raises(ValueError, match=rf"compressed has shape \[{len(rows) + 1}, 512\]; it must be"):
        insert(wrong)
    with pytest.raises(TypeError, match="compressed has dtype bfloat16; it must be float32"):
        insert(jax.ShapeDtypeStruct(rows.shape, jnp.bfloat16))
    with pytest.raises(ValueError, match=r"kv_scale is 2\.0; for the cache format fp8_ds_mla it must be None"):
        insert(rows, kv_scale=2.0)
    with pytest.raises(ValueError, match="state_cache has shape"):
        compress_kv(jax.ShapeDtypeStruct((64, 4, 512), jnp.float32), metadata)
    with pytest.raises(TypeError, match="config is a str"):
        compress_kv(state, metadata, config="csa")
    with pytest.raises(ValueError, match="metadata was built for the layout"):
        compress_kv(state, metadata, config=ops.make_config("hca", "fp8_ds_mla"))


def test_public_names_import_neither_cutlass_nor_torch():
    script = (
        "import sys, dsv4_jax\n"
        f"for name in {NAMED}: assert getattr(dsv4_jax, name).__doc__ and name in dsv4_jax.__all__\n"
        "assert not {'torch', 'cutlass', 'triton', 'flax'} & set(sys.modules)"
    )
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", script], env=environment, check=True)


# On a GPU.

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


@pytest.mark.gpu
@pytest.mark.parametrize(("kind", "fmt", "page_rows", "kv_page_rows", "options"), FORMATS)
def test_batches(kind, fmt, page_rows, kv_page_rows, options):
    check(gpu_batch(kind, fmt, page_rows, kv_page_rows, options))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["csa", "hca"])
def test_bfloat16_norm_weight(kind):
    batch = gpu_batch(kind, "fp8_ds_mla", 4, 4, {})
    check(dataclasses.replace(batch, norm_weight=batch.norm_weight.astype(ml_dtypes.bfloat16)))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("ratio", "overlap"), [(1, False), (2, True), (16, False), (16, True), (64, True), (256, False)]
)
def test_other_ratios(ratio, overlap):
    check(gpu_batch("csa", "fp8_ds_mla", 4, 4, {}, compress_ratio=ratio, overlap=overlap))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["csa", "hca"])
def test_wrong_plan_entries_write_nothing(kind):
    batch = gpu_batch(kind, "fp8_ds_mla", 4, 3, {})
    meta = ops.metadata(batch)
    tokens, m, largest = len(batch.positions), batch.config.compress_ratio, 2**31 - 1
    wrong = [
        [tokens, m - 1, 0, 1], [largest, m - 1, 0, 1], [-5, m - 1, 0, 1],  # batch row
        [0, m, 0, 1], [0, largest, 0, 1], [0, -1, 0, 1],  # position
        [0, m - 1, largest, 1], [0, m - 1, len(batch.cache) * 3, 1], [0, m - 1, -7, 1],  # cache slot
        [0, m - 1, 0, 0],  # rows in the batch
    ]  # fmt: skip
    right = np.array(meta.closing)
    right = right[right[:, 0] >= 0]
    closing = np.array([entry for i, r in enumerate(right) for entry in (r, wrong[i % len(wrong)])], np.int32)
    slots = np.repeat(np.asarray(meta.window_slots)[: len(right)], 2, axis=0)
    wrong = [[tokens, 0, 0], [-1, 0, 0], [largest, 5, 0], [0, -1, 0], [0, 0, largest]]
    saving = np.concatenate([np.asarray(meta.saving), wrong]).astype(np.int32)
    meta = ops.metadata(batch, closing=closing, window_slots=slots, saving=saving)
    state, cache = ops.compress(batch, meta, implementation="cutedsl")
    ops.same_bytes(state, ops.tail(batch))
    oracle.assert_same_cache(cache, batch.cache, ops.rows(batch, batch.state, from_batch=True), batch.config)


@pytest.mark.gpu
@pytest.mark.parametrize("fmt", ["fp8_ds_mla", "bf16", "fp8"])
@pytest.mark.parametrize("kind", ["csa", "hca"])
def test_a_channel_that_is_not_finite(kind, fmt):
    batch = gpu_batch(kind, fmt, 4, 3, {})
    rng = np.random.default_rng(0)
    for value in (np.nan, np.inf, -np.inf):
        batch.kv_score[rng.integers(0, 420, 3), rng.integers(0, batch.kv_score.shape[1], 3)] = value
    _, cache = ops.compress(batch, implementation="cutedsl")
    rows = ops.rows(batch, batch.state, from_batch=True)
    assert np.isnan(rows.exact).any()
    oracle.assert_same_cache(cache, batch.cache, rows, batch.config, scale=batch.kv_scale)


@pytest.mark.gpu
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


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["csa", "hca"])
def test_two_launches_are_one(kind):
    batch = gpu_batch(kind, "fp8_ds_mla", 4, 3, {"holes": True})
    config = batch.config

    @jax.jit
    def both(state, cache, meta, norm_weight, cos_sin):
        rows = dsv4_jax.compress_kv_sparse_attn_cutedsl(state, meta, config=config)
        rest = cache, meta, norm_weight, cos_sin
        one = dsv4_jax.fused_kv_compress_norm_rope_insert_sparse_attn_cutedsl(state, *rest, config=config)
        return one, dsv4_jax.norm_rope_insert_sparse_attn_cutedsl(rows, state, *rest, config=config)

    state = ops.saved(batch)
    rest = batch.cache, ops.metadata(batch), batch.norm_weight, batch.cos_sin
    for cache in both(jnp.asarray(state), *jax.tree.map(jnp.asarray, rest)):
        oracle.assert_same_cache(cache, batch.cache, ops.rows(batch, state, from_batch=False), config)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["csa", "hca"])
def test_a_captured_launch_follows_its_data(kind, total=300):
    """Two requests, token by token: in a scan, across calls of one op and of six, which XLA replays as a graph."""
    config = ops.make_config(kind, "fp8_ds_mla", 4, 4)
    sizes = [(0, total), (0, total)]
    batch = random_batch(np.random.default_rng(1), config, sizes=sizes, padding=0, padded_requests=0)
    kv_score = jnp.asarray(batch.kv_score).reshape(2, total, -1)
    tables = jnp.asarray(batch.block_table), jnp.asarray(batch.kv_block_table)
    constant = tuple(map(jnp.asarray, (batch.norm_weight, batch.cos_sin)))
    ape = jnp.asarray(batch.ape)

    def step(caches, t):
        starts, lengths = jnp.arange(3, dtype=jnp.int32), jnp.full(2, t + 1, jnp.int32)
        meta = CompressorMetadata.build(config, starts, lengths, *tables, num_tokens=2)
        return dsv4_jax.compress(kv_score[:, t], ape, *caches, meta, *constant, config=config, implementation="cutedsl")

    @functools.partial(jax.jit, donate_argnums=0, static_argnums=2)
    def steps(caches, first, count):
        for i in range(count):
            caches = step(caches, first + i)
        return caches

    start = jnp.asarray(batch.state), jnp.asarray(batch.cache)
    found = [jax.jit(lambda c: jax.lax.scan(lambda c, t: (step(c, t), None), c, jnp.arange(total))[0])(start)[1]]
    for count in (1, 6):
        caches = jax.tree.map(jnp.copy, start)
        for t in range(0, total, count):
            caches = steps(caches, t, count)
        found.append(caches[1])
    rows = ops.rows(batch, batch.state, from_batch=True)
    for cache in found:
        oracle.assert_same_cache(cache, batch.cache, rows, config)
