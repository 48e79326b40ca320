"""Each argument of each op, wrong in dtype, rank, shape or value: the error says what it got and what it must be."""

import dataclasses
import re

import jax.numpy as jnp
import numpy as np
import pytest
from helpers import ops
from helpers.batches import random_batch

import dsv4_jax
from dsv4_jax import CompressorConfig, CompressorMetadata

T, R, W, M = 12, 2, 1024, 4


def zeros(*shape, dtype=jnp.float32):
    return jnp.zeros(shape, dtype)


def indices(*shape):
    return jnp.zeros(shape, jnp.int32)


def save_arguments():
    return {
        "kv": zeros(T, W),
        "score": zeros(T, W),
        "ape": zeros(M, W),
        "positions": indices(T),
        "state_cache": zeros(3, 4, 2 * W),
        "slot_mapping": indices(T) - 1,
        "compress_ratio": M,
    }


def store_arguments(fmt="fp8_ds_mla"):
    config = ops.make_config("csa", fmt)
    batch = random_batch(np.random.default_rng(0), config, sizes=[(0, T - 1), (0, 1)], padding=0, padded_requests=0)
    return {
        "state_cache": jnp.asarray(batch.state),
        "kv_cache": jnp.asarray(batch.cache),
        "metadata": ops.metadata(batch),
        "norm_weight": zeros(512),
        "cos_sin": zeros(20, 64),
        "config": config,
        "kv_scale": batch.kv_scale,
    }


def compress_arguments(fmt="fp8_ds_mla"):
    return {"kv_score": zeros(T, 2 * W), "ape": zeros(M, W), **store_arguments(fmt), "save": "tail"}


def plan_arguments():
    return {
        "config": CompressorConfig.csa(),
        "query_start_loc": jnp.array([0, 4, 12], jnp.int32),
        "seq_lens": jnp.array([4, 8], jnp.int32),
        "block_table": indices(R, 3),
        "kv_block_table": indices(R, 1),
        "num_tokens": T,
        "rollback": 0,
    }


def slots_arguments():
    return {
        "config": CompressorConfig.csa(),
        "positions": indices(T),
        "token_to_req": indices(T),
        "slot_mapping": indices(T),
        "kv_slot_mapping": indices(T),
        "block_table": indices(R, 3),
        "query_start_loc": indices(R + 1),
        "rollback": 0,
    }


OPS = {
    "save_partial_states": (dsv4_jax.save_partial_states, save_arguments),
    "compress_norm_rope_store": (dsv4_jax.compress_norm_rope_store, store_arguments),
    "compress": (dsv4_jax.compress, compress_arguments),
    "build": (CompressorMetadata.build, plan_arguments),
    "from_slots": (CompressorMetadata.from_slots, slots_arguments),
}
FLOATS = {"kv", "score", "ape", "state_cache", "norm_weight", "cos_sin", "kv_score"}
PACKED = {"kv_cache"}


def array_cases():
    """(op, argument, what is wrong, the wrong value, the error's type, what the text must say it got)."""
    for op, (_, arguments) in OPS.items():
        for name, value in arguments().items():
            if not hasattr(value, "shape") or name == "kv_scale":
                continue
            wrong_dtype = jnp.float16 if name in FLOATS else jnp.float32
            yield op, name, "dtype", value.astype(wrong_dtype), TypeError, np.dtype(wrong_dtype).name
            flat = value.reshape(-1) if value.ndim > 1 else value[None]
            yield op, name, "rank", flat, ValueError, str(flat.shape[0])
            yield op, name, "not an array", "text", TypeError, "str"
            if fixed_last(op, name):
                narrow = value[..., :-1]
                yield op, name, "last axis", narrow, ValueError, str(narrow.shape[-1])
            if fixed_first(op, name):
                short = value[:-1]
                yield op, name, "first axis", short, ValueError, str(short.shape[0])


def fixed_last(op, name):
    """Arguments whose last axis is given by others that come before them or by the config."""
    return name not in ("kv", "block_table", "kv_block_table", "seq_lens") and not (
        op == "from_slots" and name == "positions"
    )


def fixed_first(op, name):
    firsts = {"score", "ape", "slot_mapping", "kv_score", "token_to_req", "kv_slot_mapping", "kv_block_table"}
    return name in firsts or (op, name) in (("save_partial_states", "positions"), ("build", "block_table"))


CASES = list(array_cases())


@pytest.mark.parametrize(
    ("op", "name", "wrong", "error", "got"),
    [pytest.param(op, n, v, e, g, id=f"{op}-{n}-{what}") for op, n, what, v, e, g in CASES],
)
def test_arrays(op, name, wrong, error, got):
    function, arguments = OPS[op]
    with pytest.raises(error) as caught:
        function(**arguments() | {name: wrong})
    text = str(caught.value)
    assert re.search(rf"\b{name}\b", text), text
    assert got in text, text
    assert "must" in text, text


@pytest.mark.parametrize("op", OPS)
def test_the_arguments_are_right(op):
    """What the cases start from raises nothing."""
    function, arguments = OPS[op]
    function(**arguments())


@pytest.mark.parametrize("op", ["compress_norm_rope_store", "compress"])
@pytest.mark.parametrize(
    "field", [f.name for f in dataclasses.fields(CompressorMetadata) if f.name not in ("layout", "runs")]
)
def test_metadata_fields(op, field):
    function, arguments = OPS[op]
    given = arguments()
    value = getattr(given["metadata"], field)
    wrong = {"dtype": (value.astype(jnp.float32), TypeError, "float32"), "rank": (value[None], ValueError, "1")}
    if value.ndim == 2:
        if field != "block_table":
            wrong["columns"] = (value[:, :-1], ValueError, str(value.shape[1] - 1))
    else:
        wrong["length"] = (jnp.concatenate([value, value]), ValueError, str(2 * len(value)))
    for wrong_value, error, got in wrong.values():
        if field == "positions" and error is ValueError and wrong_value.ndim == 1:
            continue  # the length of positions is T: the others are then wrong
        metadata = dataclasses.replace(given["metadata"], **{field: wrong_value})
        with pytest.raises(error) as caught:
            function(**given | {"metadata": metadata})
        text = str(caught.value)
        assert re.search(rf"metadata\.{field}\b", text) and got in text and "must" in text, text


VALUES = [
    ("save_partial_states", "compress_ratio", 0, ValueError, r"compress_ratio is 0; it must be .*1"),
    ("save_partial_states", "compress_ratio", 4.0, ValueError, r"compress_ratio is 4\.0; it must be an integer"),
    ("save_partial_states", "compress_ratio", 8, ValueError, r"ape has shape \[4, 1024\]; it must be \[8, 1024\]"),
    ("save_partial_states", "implementation", "cuda", ValueError, r"implementation is 'cuda'; it must be one of 'xla'"),
    ("save_partial_states", "implementation", 3, ValueError, r"implementation is 3; it must be one of 'xla'"),
    ("compress", "save", "some", ValueError, r"save is 'some'; it must be one of 'tail', 'all'"),
    ("compress", "save", None, ValueError, r"save is None; it must be one of 'tail', 'all'"),
    ("compress", "implementation", "cuda", ValueError, r"implementation is 'cuda'; it must be one of 'xla'"),
    ("compress", "config", "csa", TypeError, r"config is a str; it must be a CompressorConfig"),
    ("compress", "metadata", {}, TypeError, r"metadata is a dict; it must be a CompressorMetadata"),
    ("compress", "kv_scale", 1.0, ValueError, r"kv_scale is 1\.0; .*must be None"),
    ("compress_norm_rope_store", "config", None, TypeError, r"config is a NoneType; it must be a CompressorConfig"),
    ("compress_norm_rope_store", "metadata", None, TypeError, r"metadata is a NoneType; it must be a CompressorMeta"),
    ("compress_norm_rope_store", "kv_scale", 1.0, ValueError, r"kv_scale is 1\.0; .*must be None"),
    ("compress_norm_rope_store", "implementation", "", ValueError, r"implementation is ''; it must be one of 'xla'"),
    ("build", "config", "csa", TypeError, r"config is a str; it must be a CompressorConfig"),
    ("build", "num_tokens", -1, ValueError, r"num_tokens is -1; it must be .*0"),
    ("build", "num_tokens", 2.0, ValueError, r"num_tokens is 2\.0; it must be an integer"),
    ("build", "rollback", -1, ValueError, r"rollback is -1; it must be .*0"),
    ("build", "rollback", True, ValueError, r"rollback is True; it must be an integer"),
    ("from_slots", "config", None, TypeError, r"config is a NoneType; it must be a CompressorConfig"),
    ("from_slots", "rollback", 0.5, ValueError, r"rollback is 0\.5; it must be an integer"),
]


@pytest.mark.parametrize(
    ("op", "name", "wrong", "error", "match"), VALUES, ids=[f"{v[0]}-{v[1]}-{v[2]}" for v in VALUES]
)
def test_values(op, name, wrong, error, match):
    function, arguments = OPS[op]
    with pytest.raises(error, match=match):
        function(**arguments() | {name: wrong})


@pytest.mark.parametrize("op", ["compress_norm_rope_store", "compress"])
def test_kv_scale(op):
    function = OPS[op][0]
    arguments = {"compress_norm_rope_store": store_arguments, "compress": compress_arguments}[op]("fp8")
    function(**arguments)
    function(**arguments | {"kv_scale": 0.5})
    for wrong, error, got in ((None, ValueError, "None"), (zeros(1), ValueError, "[1]"), ("x", TypeError, "str")):
        with pytest.raises(error) as caught:
            function(**arguments | {"kv_scale": wrong})
        text = str(caught.value)
        assert "kv_scale" in text and got in text and "must" in text, text


def test_kv_and_score_of_different_dtypes():
    arguments = save_arguments() | {"score": zeros(T, W, dtype=jnp.bfloat16)}
    with pytest.raises(TypeError, match=r"score has dtype bfloat16; it must be float32"):
        dsv4_jax.save_partial_states(**arguments)


def test_a_cache_of_another_format():
    arguments = compress_arguments("bf16")
    arguments["config"] = CompressorConfig.csa("fp8_ds_mla")
    with pytest.raises(TypeError, match=r"kv_cache has dtype bfloat16; a fp8_ds_mla cache must have uint8"):
        dsv4_jax.compress(**arguments)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"compress_ratio": 3}, r"compress_ratio is 3; it must be a power of two"),
        ({"compress_ratio": 0}, r"compress_ratio is 0; it must be a power of two"),
        ({"compress_ratio": 4.0}, r"compress_ratio is 4\.0; it must be a power of two"),
        ({"head_dim": 128}, r"head_dim is 128; .*512"),
        ({"cache_format": "int8"}, r"cache_format is 'int8'; it must be one of fp8_ds_mla"),
        ({"page_rows": 0}, r"page_rows is 0; it must be an integer of at least 1"),
        ({"page_rows": 1.5}, r"page_rows is 1\.5; it must be an integer of at least 1"),
        ({"kv_page_rows": -1}, r"kv_page_rows is -1; it must be an integer of at least 1"),
        ({"rope_head_dim": 32}, r"rope_head_dim is 32; .*64"),
        ({"eps": 0.0}, r"eps is 0\.0; it must be positive"),
        ({"eps": float("nan")}, r"eps is nan; it must be positive"),
    ],
    ids=str,
)
def test_config(changes, match):
    with pytest.raises(ValueError, match=match):
        dataclasses.replace(CompressorConfig.csa(), **changes)


@pytest.mark.parametrize("changes", [{"page_rows": 8}, {"kv_page_rows": 2}, {"compress_ratio": 8, "overlap": False}])
def test_metadata_of_another_layout(changes):
    """A plan made for other pages or windows would write other requests' rows."""
    batch = random_batch(np.random.default_rng(0), ops.make_config("csa", "bf16"), sizes=[(0, 8)])
    other = dataclasses.replace(batch.config, **changes)
    built = CompressorMetadata.build(
        other, batch.query_start_loc, batch.seq_lens, batch.block_table, batch.kv_block_table, num_tokens=8
    )
    with pytest.raises(ValueError, match=r"metadata was built for .*config has \(4, True, 4, 64, 'rows'\)"):
        ops.compress(batch, built)
