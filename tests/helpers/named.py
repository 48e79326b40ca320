"""What the tests of the ops that name one CuTeDSL kernel share: their arguments, and what must hold of each of them."""

import functools

import jax
import jax.numpy as jnp
import pytest

import dsv4_jax
from dsv4_jax import CompressorConfig, CompressorMetadata, platforms
from helpers import ops


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


def check_one_launch(name, kind, kernel, fmt, compiled_kernels):
    """Lowered for CUDA, the op of a "csa" or "hca" compressor is one launch of this kernel, for this format."""
    text = lower_named(name, ops.make_config(kind, "fp8_ds_mla"), "cuda")
    assert text.count("gpu_callback_cmd_buffer") == 1
    assert [(key[0], key[1].format) for key in compiled_kernels] == [(kernel, fmt)]


def check_says_what_is_missing(name, monkeypatch):
    """An error on other platforms, for other compressors and without the package; documented and public."""
    assert getattr(dsv4_jax, name).__doc__ and name in dsv4_jax.__all__
    csa = CompressorConfig.csa()
    for platform in ("cpu", "rocm", "tpu"):
        with pytest.raises(NotImplementedError, match=f"NVIDIA GPUs only, not on {platform}; .*implementation=None"):
            lower_named(name, csa, platform)
    with pytest.raises(NotImplementedError, match=r"made for head_dim 512.*has 128.*'triton'"):
        lower_named(name, CompressorConfig.indexer(), "cuda")
    monkeypatch.setattr(platforms, "installed", lambda package: None)
    with pytest.raises(NotImplementedError, match=r"nvidia-cutlass-dsl is not installed; install .*'triton'"):
        lower_named(name, csa, "cuda")
