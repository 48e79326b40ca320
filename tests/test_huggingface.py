"""Hugging Face's DeepSeek-V4 compressors as a second oracle: prefill, then decode token by token.

Both sides get the same float32 projection, so what is compared is state keeping, pooling, RMSNorm and RoPE.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.sweep import sweep

import dsv4_jax
from dsv4_jax import CompressorConfig, CompressorMetadata
from dsv4_jax.common.reference.helpers.window import normalized_keys

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
modeling = pytest.importorskip("transformers.models.deepseek_v4.modeling_deepseek_v4")

TOKENS, HIDDEN, RANK = 300, 32, 16
EPS = 2.0**-24  # half an ulp of a float32, relative
CSA_LAYER, HCA_LAYER = 1, 2


@functools.cache
def hugging_face_config():
    return transformers.DeepseekV4Config(
        hidden_size=HIDDEN,
        num_hidden_layers=3,
        layer_types=["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"],
        head_dim=512,
        qk_rope_head_dim=64,
        index_head_dim=128,
        num_attention_heads=2,
        index_n_heads=2,
        index_topk=4,
        q_lora_rank=RANK,
        o_groups=1,
        o_lora_rank=8,
        vocab_size=16,
        moe_intermediate_size=8,
        n_routed_experts=2,
        num_experts_per_tok=1,
        rope_scaling={
            "type": "yarn",
            "factor": 16,
            "original_max_position_embeddings": 65536,
            "beta_fast": 32,
            "beta_slow": 1,
        },
    )


@functools.cache
def our_configs():
    """The configs that we read from Hugging Face's, by name; in the bf16 format where there is one."""
    layers = CompressorConfig.from_pretrained_config(
        hugging_face_config().to_dict(), csa_format="bf16", hca_format="bf16"
    )
    assert layers[0] == ()
    return {"csa": layers[CSA_LAYER][0], "indexer": layers[CSA_LAYER][1], "hca": layers[HCA_LAYER][0]}


@functools.cache
def layer(name):
    """Hugging Face's layer with random weights, and its part that holds the compressor's weights."""
    kinds = {"csa": modeling.DeepseekV4CSACompressor, "hca": modeling.DeepseekV4HCACompressor}
    module = kinds["csa" if name == "indexer" else name](hugging_face_config()).float().eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for key, weight in module.named_parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator))
            if key.endswith("kv_norm.weight"):
                weight.mul_(0.2).add_(1)
            elif key.endswith("proj.weight"):
                weight.mul_(2 * HIDDEN**-0.5)  # scores far enough apart that the softmax chooses
    return module, module.indexer if name == "indexer" else module


@functools.cache
def inputs():
    generator = torch.Generator().manual_seed(1)
    return [torch.randn((1, TOKENS, size), generator=generator) for size in (HIDDEN, RANK)]


def chunks(prefill, step=1):
    """First and last row of a prefill and of the decode steps after it."""
    edges = [0, *range(prefill, TOKENS, step), TOKENS]
    return [(a, b) for a, b in itertools.pairwise(edges) if a < b]


@torch.no_grad()
def hugging_face_keys(name, steps):
    """The keys `[windows, D]`, and what the projection gave `[T, 2W]`."""
    module, compressor = layer(name)
    index = HCA_LAYER if name == "hca" else CSA_LAYER
    cache = transformers.DynamicCache(config=hugging_face_config())
    hidden, residual = inputs()
    projected = []
    # The two projections' outputs, as the compressor itself got them.
    hooks = [
        linear.register_forward_hook(lambda _module, _args, output: projected.append(output[0]))
        for linear in (compressor.kv_proj, compressor.gate_proj)
    ]
    try:
        for a, b in steps:
            keys, _ = module(hidden[:, a:b], residual[:, a:b], torch.arange(a, b)[None], cache, index)
    finally:
        for hook in hooks:
            hook.remove()
    kv, score = torch.cat(projected[0::2]), torch.cat(projected[1::2])
    if name == "indexer":
        keys = cache.layers[index].compressed_kv["indexer"][:, None]
    # Copies, so that JAX, which runs on while Python goes on, shares no memory with torch.
    return keys[0, 0].numpy().copy(), torch.cat([kv, score], dim=1).numpy().copy()


@functools.cache
def step_functions(config):
    """One step before quantization, and as users call it; and the caches and slots that it starts from."""
    pages = -(-TOKENS // config.page_rows)
    # Pages in an order of no meaning, as an allocator hands them out.
    block_table = jnp.asarray(np.random.default_rng(2).permutation(pages)[None], jnp.int32)
    kv_pages = -(-TOKENS // config.compress_ratio // config.kv_page_rows)
    kv_block_table = jnp.arange(kv_pages, dtype=jnp.int32)[None, ::-1]

    @jax.jit
    def step(kv_score, ape, state_cache, kv_cache, norm_weight, cos_sin, length, end):
        metadata = CompressorMetadata.build(
            config,
            jnp.stack([0, length]),
            end[None],
            block_table,
            kv_block_table,
            num_tokens=kv_score.shape[0],
        )
        keys, slots = normalized_keys(kv_score, ape, state_cache, metadata, norm_weight, cos_sin, config=config)
        state_cache, kv_cache = dsv4_jax.compress(
            kv_score, ape, state_cache, kv_cache, metadata, norm_weight, cos_sin, config=config, save="tail"
        )
        return keys, slots, state_cache, kv_cache

    # NaN in every row that is not written: read by mistake it would show.
    state_cache = jnp.full((pages, config.page_rows, 2 * config.width), jnp.nan, jnp.float32)
    kv_cache = config.format.allocate(kv_pages, config.kv_page_rows)
    windows = jnp.arange(TOKENS // config.compress_ratio, dtype=jnp.int32)
    slots = kv_block_table[0, windows // config.kv_page_rows] * config.kv_page_rows + windows % config.kv_page_rows
    return step, state_cache, kv_cache, slots


def our_keys(name, steps, kv_score):
    """The keys before quantization `[windows, D]`, and those read back from the cache."""
    config = our_configs()[name]
    _, compressor = layer(name)
    ape, norm_weight = (
        jnp.array(p.detach().numpy().copy()) for p in (compressor.position_bias, compressor.kv_norm.weight)
    )
    cos_sin = jnp.array(config.rope.table(TOKENS, config.rope_head_dim))
    jax.block_until_ready((ape, norm_weight, cos_sin))
    step, state_cache, kv_cache, slots = step_functions(config)
    keys = np.full((len(slots), config.head_dim), np.nan, np.float32)
    row_of_slot = {slot: row for row, slot in enumerate(slots.tolist())}
    for a, b in steps:
        batch = kv_score[a:b]
        if b - a > 1:  # padded, so that there are two lengths to compile for: this one and one token
            batch = np.pad(batch, [(0, TOKENS - (b - a)), (0, 0)], constant_values=np.nan)
        got, at, state_cache, kv_cache = step(
            batch, ape, state_cache, kv_cache, norm_weight, cos_sin, jnp.int32(b - a), jnp.int32(b)
        )
        for key, slot in zip(np.asarray(got), at.tolist(), strict=True):
            if slot >= 0:
                keys[row_of_slot.pop(slot)] = key
    assert not row_of_slot, "every window is closed, and closed once"
    return keys, np.asarray(config.format.unpack(kv_cache, slots, config.kv_page_rows))


def tolerance(config, keys):
    """How far two float32 evaluations may lie apart, by row: `[windows, 1]`.

    Both sum n terms and n weights in an order of their own; the exponentials, RMSNorm and RoPE add a few roundings
    more. Terms may cancel, so errors are relative to the row's largest value. They add up as a random walk does, to
    about sqrt(n) / 2 half ulps; this is six times that. The largest seen is 4.2e-7 of the row's largest.
    """
    return 3 * (config.window**0.5 + 8) * EPS * np.abs(keys).max(axis=1, keepdims=True)


@pytest.mark.parametrize(
    ("name", "steps"),
    [
        # Prefill up to: all, one token, beside a window's end and on it; then steps of one token, or of several.
        *((name, chunks(*cut)) for name in ("csa", "indexer") for cut in [(TOKENS,), (127,), (10, 7)]),
        *(("hca", chunks(*cut)) for cut in [(TOKENS,), (127,), (128,), (130, 130)]),
        *sweep(
            *((name, chunks(*cut)) for name in ("csa", "indexer") for cut in [(1,), (128,), (129,), (254,), (130, 130)])
        ),
        *sweep(*(("hca", chunks(*cut)) for cut in [(1,), (129,), (254,), (10, 7)])),
    ],
    ids=lambda value: value if isinstance(value, str) else f"{value[0][1]}then{len(value) - 1}",
)
def test_keys(name, steps):
    config = our_configs()[name]
    want, kv_score = hugging_face_keys(name, steps)
    assert want.shape == (TOKENS // config.compress_ratio, config.head_dim)
    keys, stored = our_keys(name, steps, kv_score)
    far = ~(np.abs(keys - want) <= tolerance(config, want))
    assert not far.any(), (
        f"rows {np.flatnonzero(far.any(axis=1)).tolist()}, {far.sum()} values, NaN {np.isnan(keys[far]).sum()}, "
        f"largest {np.abs(keys - want)[far].max()}: {keys[far][:4]} for {want[far][:4]}"
    )
    # Storing loses what the format's rounding loses, of the key before quantization.
    if config.cache_format == "bf16":
        np.testing.assert_array_equal(stored, np.asarray(jnp.asarray(keys, jnp.bfloat16).astype(jnp.float32)))
        assert (np.abs(stored - want) <= tolerance(config, want) + np.abs(want) * 2.0**-8).all()
    else:
        scale = 2.0 ** np.ceil(np.log2(np.abs(want).max(axis=1, keepdims=True) / 448))
        # bf16 first (2**-9 of it), then e4m3 (2**-4 of it, or half of its least step, 2**-10).
        assert (np.abs(stored - want) <= np.maximum(np.abs(want) * (2.0**-4 + 2.0**-8), scale * 2.0**-9)).all()
