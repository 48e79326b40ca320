"""`compress_kv_sparse_attn_cutedsl`: its launch and its errors; test_cutedsl_gpu.py has what it gives."""

import functools

import jax
import jax.numpy as jnp
import pytest
from helpers import named, ops

import dsv4_jax

NAME = "compress_kv_sparse_attn_cutedsl"


@pytest.mark.parametrize(("kind", "kernel"), [("csa", "_short_windows"), ("hca", "_long_windows")])
def test_one_launch(kind, kernel, compiled_kernels):
    named.check_one_launch(NAME, kind, kernel, "compressed", compiled_kernels)


def test_says_what_is_missing(monkeypatch):
    named.check_says_what_is_missing(NAME, monkeypatch)


def test_arguments():
    config = ops.make_config("csa", "fp8_ds_mla")
    state, metadata = named.named_arguments(NAME, config)

    def call(*args, config=config):
        return jax.eval_shape(functools.partial(dsv4_jax.compress_kv_sparse_attn_cutedsl, config=config), *args)

    assert call(state, metadata) == jax.ShapeDtypeStruct((len(metadata.closing), 512), jnp.float32)
    with pytest.raises(ValueError, match="state_cache has shape"):
        call(jax.ShapeDtypeStruct((64, 4, 512), jnp.float32), metadata)
    with pytest.raises(TypeError, match="config is a str"):
        call(state, metadata, config="csa")
    with pytest.raises(ValueError, match=r"metadata was built for .*config has"):
        call(state, metadata, config=ops.make_config("hca", "fp8_ds_mla"))
