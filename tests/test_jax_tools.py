"""JAX's own tools on the ops: strict promotion, export, the compilation cache, references, debugging."""

import dataclasses

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

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
