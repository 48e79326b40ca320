"""`norm_rope_insert_sparse_attn_cutedsl`: its launch and its errors; test_cutedsl_gpu.py has what it gives."""

import functools

import jax
import jax.numpy as jnp
import pytest
from helpers import named, ops

import dsv4_jax

NAME = "norm_rope_insert_sparse_attn_cutedsl"


@pytest.mark.parametrize("kind", ["csa", "hca"])
def test_one_launch(kind, compiled_kernels):
    named.check_one_launch(NAME, kind, "_norm_rope_insert", "fp8_ds_mla", compiled_kernels)


def test_says_what_is_missing(monkeypatch):
    named.check_says_what_is_missing(NAME, monkeypatch)


def test_arguments():
    config = ops.make_config("csa", "fp8_ds_mla")
    rows, state, cache, metadata, *rest = named.named_arguments(NAME, config)

    def call(rows, **options):
        function = functools.partial(dsv4_jax.norm_rope_insert_sparse_attn_cutedsl, config=config, **options)
        return jax.eval_shape(function, rows, state, cache, metadata, *rest)

    assert call(rows) == cache
    wrong = jax.ShapeDtypeStruct((len(rows) + 1, 512), jnp.float32)
    with pytest.raises(ValueError, match=rf"compressed has shape \[{len(rows) + 1}, 512\]; it must be"):
        call(wrong)
    with pytest.raises(TypeError, match="compressed has dtype bfloat16; it must be float32"):
        call(jax.ShapeDtypeStruct(rows.shape, jnp.bfloat16))
    with pytest.raises(ValueError, match=r"kv_scale is 2\.0; for the cache format fp8_ds_mla it must be None"):
        call(rows, kv_scale=2.0)
