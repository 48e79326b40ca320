"""JAX's own tools on the ops: strict promotion, export, the compilation cache, references, debugging."""

import dataclasses
import os
import subprocess
import sys

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import ops

import dsv4_jax
from dsv4_jax import CACHE_FORMATS, CompressorConfig, CompressorMetadata, Yarn

TOKENS = 8


def arange(count):
    return jnp.arange(count, dtype=jnp.int32)


def floats(*shape, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(0).standard_normal(shape), dtype)


def compressor(config):
    """Arguments of `compress` for one request of `TOKENS` tokens."""
    table = arange(1 if config.state == "online" else TOKENS)[None]
    starts, lengths = jnp.array([0, TOKENS], jnp.int32), jnp.array([TOKENS], jnp.int32)
    meta = CompressorMetadata.build(config, starts, lengths, table, arange(1)[None], num_tokens=TOKENS)
    return (
        floats(TOKENS, 2 * config.width),
        floats(config.compress_ratio, config.width),
        floats(TOKENS, config.page_rows, config.state_width),
        config.format.allocate(2, config.kv_page_rows),
        meta,
        floats(config.head_dim),
        floats(TOKENS, 64),
    )


def small(config):
    return dataclasses.replace(config, compress_ratio=4)


CONFIGS = {
    "csa": CompressorConfig.csa(),
    "csa_fp8": CompressorConfig.csa("fp8"),
    "online": small(CompressorConfig.hca("bf16", state="online")),
    "indexer": CompressorConfig.indexer("indexer_mxfp4"),
}


def calls():
    """Every public op, by name, with its arguments made."""
    x, rows, slots = floats(TOKENS, 512), floats(TOKENS, 64), arange(TOKENS)
    heads, weights = floats(TOKENS, 2, 128), floats(TOKENS, 2)
    found = {}
    for name, config in CONFIGS.items():
        args = compressor(config)
        scale = {"kv_scale": 0.5} if config.format.needs_scale else {}
        found[f"compress {name}"] = lambda a=args, c=config, s=scale: dsv4_jax.compress(*a, config=c, **s)
        if config.state == "rows":
            found[f"compress_norm_rope_store {name}"] = lambda a=args, c=config, s=scale: (
                dsv4_jax.compress_norm_rope_store(*a[2:], config=c, **s)
            )
    ape, state = floats(4, 64), floats(2, 4, 128)
    found["save_partial_states"] = lambda: dsv4_jax.save_partial_states(
        rows, rows, ape, slots, state, slots, compress_ratio=4
    )
    for name, fmt in CACHE_FORMATS.items():
        cache, keys = fmt.allocate(2, 4), floats(TOKENS, fmt.head_dim)
        options = {"page_rows": 4, "cache_format": name, "kv_scale": 0.5 if fmt.needs_scale else None}
        out = jnp.zeros((1, TOKENS, fmt.head_dim), jnp.bfloat16)
        found[f"quantize {name}"] = lambda k=keys, c=cache, o=options: dsv4_jax.quantize_and_insert_k_cache(
            k, c, slots, **o
        )
        found[f"gather {name}"] = lambda c=cache, o=options, out=out: dsv4_jax.dequantize_and_gather_k_cache(
            c, jnp.array([TOKENS], jnp.int32), arange(2)[None], out=out, **o
        )
        scale = jnp.float32(0.5) if fmt.needs_scale else None
        found[f"pack {name}"] = lambda f=fmt, k=keys, s=scale: f.pack(k, s)
        found[f"unpack {name}"] = lambda f=fmt, c=cache, s=scale: f.unpack(c, slots, 4, scale=s)
    q, kv, cache = (
        floats(TOKENS, 2, 512, dtype=jnp.bfloat16),
        floats(TOKENS, 512, dtype=jnp.bfloat16),
        CACHE_FORMATS["fp8_ds_mla"].allocate(2, 4),
    )
    found["fused_qnorm_rope_kv_rope_quant_insert"] = lambda: dsv4_jax.fused_qnorm_rope_kv_rope_quant_insert(
        q, kv, cache, slots, slots, rows, page_rows=4
    )
    found["fused_q_kv_rmsnorm"] = lambda: dsv4_jax.fused_q_kv_rmsnorm(x, x, x[0], x[0])
    found["fused_indexer_q_rope_quant"] = lambda: dsv4_jax.fused_indexer_q_rope_quant(
        slots, heads, rows, weights, 0.1, 0.1
    )
    found["fused_inv_rope_fp8_quant"] = lambda: dsv4_jax.fused_inv_rope_fp8_quant(
        q, slots, rows, n_groups=1, heads_per_group=2
    )
    ids = arange(TOKENS * 4).reshape(TOKENS, 4)
    found["prepare_megamoe_inputs"] = lambda: dsv4_jax.prepare_megamoe_inputs(kv, floats(TOKENS, 4), ids)
    found["compute_global_topk_indices_and_lens"] = lambda: dsv4_jax.compute_global_topk_indices_and_lens(
        ids, arange(TOKENS) * 0, arange(2)[None], 64, jnp.ones(TOKENS, bool)
    )
    starts, lens = jnp.array([0, TOKENS], jnp.int32), jnp.array([TOKENS], jnp.int32)
    found["combine_topk_swa_indices"] = lambda: dsv4_jax.combine_topk_swa_indices(
        ids, starts, lens, lens, 4, 4, 4, 16, 8
    )
    return found


def layer():
    nnx = pytest.importorskip("flax.nnx")
    config = CONFIGS["csa"]
    module = dsv4_jax.DeepseekCompressor(config, 32, rngs=nnx.Rngs(0))
    _, _, state, cache, meta, _, table = compressor(config)
    return module(floats(TOKENS, 32, dtype=jnp.bfloat16), (state, cache), meta, table)


def test_a_program_may_forbid_implicit_promotion():
    """Implementations are traced when they are lowered."""
    failed = []
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        for name, call in {**calls(), "layer": layer}.items():
            try:
                text = jax.jit(call).lower().as_text(debug_info=True)
            except (TypeError, ValueError) as error:
                failed.append(f"{name}: {error}")
                continue
            if hasattr(dsv4_jax, op := name.split()[0]):
                assert f"{op}/" in text, f"no operation of {name} is in the scope of its name"
        compressor(CONFIGS["csa"])[4].at_layer(0, TOKENS, 2)
    assert not failed, "\n".join(failed)


def test_export():
    pytest.importorskip("flatbuffers")
    """A function of metadata, a config and caches comes back from bytes and runs."""
    config = CONFIGS["csa"]
    *before, state, cache, meta, norm, table = compressor(config)
    meta_of_online = compressor(CONFIGS["online"])[4]

    @jax.jit
    def f(state, cache, meta, config, other):
        return *dsv4_jax.compress(*before, state, cache, meta, norm, table, config=config), meta, config, other

    args = state, cache, meta, config, meta_of_online
    exported = jax.export.deserialize(jax.export.export(f)(*args).serialize())
    got = exported.call(*args)
    assert isinstance(got[2], CompressorMetadata) and got[2].layout == meta.layout and got[3] == config
    jax.tree.map(np.testing.assert_array_equal, got, f(*args))


def test_serializable_configs():
    pytest.importorskip("flatbuffers")
    for config in (*CONFIGS.values(), dataclasses.replace(CONFIGS["csa"], eps=1e-5, rope=Yarn(50000.0, factor=4.0))):
        exported = jax.export.export(jax.jit(lambda c: c))(config)
        assert jax.export.deserialize(exported.serialize()).call(config) == config


@pytest.mark.parametrize("context", [jax.disable_jit, lambda: jax.debug_nans(True), lambda: jax.enable_x64(True)])
def test_debugging(context):
    config = CONFIGS["csa"]
    *args, norm, table = compressor(config)
    want = dsv4_jax.compress(*args, norm, table, config=config)
    with context():
        *args, norm, table = compressor(config)
        got = dsv4_jax.compress(*args, norm, table, config=config)
    jax.tree.map(np.testing.assert_array_equal, got, want)


def test_a_ref_is_refused_in_words():
    state = compressor(CONFIGS["csa"])[2]
    x, ape, slots = floats(TOKENS, 1024), floats(4, 1024), arange(TOKENS)

    def save(state):
        return dsv4_jax.save_partial_states(x, x, ape, slots, state, slots, compress_ratio=4)

    for call in (save, jax.jit(save)):
        with pytest.raises(TypeError, match=r"^state_cache is a jax.Ref; .* state_cache\[\.\.\.\] = result"):
            call(jax.new_ref(state))
    *before, state, cache, meta, norm, table = compressor(CONFIGS["csa"])
    with pytest.raises(TypeError, match=r"^kv_cache is a jax.Ref"):
        dsv4_jax.compress(*before, state, jax.new_ref(cache), meta, norm, table, config=CONFIGS["csa"])

    ref = jax.new_ref(state)

    @jax.jit
    def update(ref):
        ref[...] = save(ref[...])

    assert not ops.copies(update.lower(ref).compile(), state)
    update(ref)
    np.testing.assert_array_equal(ref[...], save(state))


CACHED = """
import jax, test_jax_tools as t, dsv4_jax
hits = []
jax.monitoring.register_event_listener(lambda event, **_: hits.append(event))
args = t.compressor(t.CONFIGS["csa"])
hits.clear()
jax.block_until_ready(jax.jit(lambda args, c: dsv4_jax.compress(*args, config=c))(args, t.CONFIGS["csa"]))
print(hits.count("/jax/compilation_cache/cache_hits"), hits.count("/jax/compilation_cache/cache_misses"))
"""

SHARDED = """
import jax, re, test_jax_tools as t, dsv4_jax
from helpers import ops
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,))
config = t.CONFIGS["csa"]
*before, state, cache, meta, norm, table = t.compressor(config)
f = jax.jit(
    lambda *caches: dsv4_jax.compress(*before, *dsv4_jax.refuse_sharded(*caches), meta, norm, table, config=config),
    donate_argnums=(0, 1),
)
replicated, split = NamedSharding(mesh, P()), NamedSharding(mesh, P("x"))
for shardings in ((split, replicated), (replicated, split), (replicated, NamedSharding(mesh, P(None, "x")))):
    try:
        f.lower(*jax.device_put((state, cache), shardings)).compile()
        print("compiled", shardings)
    except jax.errors.JaxRuntimeError as error:
        assert "an array of shape" in str(error) and "jax.shard_map" in str(error), error
compiled = f.lower(*jax.device_put((state, cache), replicated)).compile()
assert not ops.copies(compiled, state, cache)
assert not re.search("all-reduce|all-gather", compiled.as_text())
assert not ops.copies(f.lower(state, cache).compile(), state, cache)
print("ok")
"""


def in_a_process(program, **variables):
    tests = os.path.dirname(__file__)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([os.path.dirname(tests), tests]), **variables}
    environment |= {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_compiled_function_comes_back_from_the_persistent_cache(tmp_path):
    variables = {
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    assert in_a_process(CACHED, **variables) == "0 1"
    assert in_a_process(CACHED, **variables) == "1 0"


def test_a_sharded_cache_under_plain_jit():
    assert in_a_process(SHARDED, XLA_FLAGS="--xla_force_host_platform_device_count=2") == "ok"
