"""`compress`, and its steps done apart: formats, pages and ragged batches, held to the oracle byte by byte."""

import dataclasses
import functools

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from helpers import ops, oracle
from helpers.batches import KINDS, random_batch
from helpers.sweep import sweep
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

# Every format, and pages that divide nothing.
PAGED = [
    ("csa", "fp8_ds_mla", 1, 1),
    ("csa", "bf16", 4, 64),
    ("csa", "fp8", 7, 3),
    ("hca", "fp8_ds_mla", 7, 3),
    ("indexer", "indexer_fp8", 4, 64),
    ("indexer", "indexer_mxfp4", 5, 1),
    *sweep(
        ("csa", "fp8_ds_mla", 4, 64),
        ("csa", "fp8", 4, 64),
        ("hca", "bf16", 7, 3),
        ("hca", "fp8", 7, 3),
        ("indexer", "indexer_mxfp4", 4, 64),
    ),
]
SIZES = {"csa": {"tokens": 27}, "indexer": {"tokens": 27}, "hca": {"tokens": 280, "requests": 2}}


@pytest.mark.parametrize(("kind", "fmt", "page_rows", "kv_page_rows"), PAGED)
def test_formats_and_pages(kind, fmt, page_rows, kv_page_rows, implementation):
    config = ops.make_config(kind, fmt, page_rows, kv_page_rows)
    batch = random_batch(np.random.default_rng([page_rows, kv_page_rows]), config, **SIZES[kind])
    ops.check_steps(batch, implementation)
    assert len(ops.check_compress(batch, implementation, "tail").slots)


@pytest.mark.parametrize(
    ("what", "kind", "fmt"),
    [
        *((what, "csa", "fp8_ds_mla") for what in (*KINDS, "holes", "magnitudes", "bf16 magnitudes", "wide pages")),
        *((what, "indexer", "indexer_mxfp4") for what in ("magnitudes", "wide pages")),
        *sweep(*((w, "indexer", "indexer_mxfp4") for w in (*KINDS, "holes", "bf16", "bf16 magnitudes"))),
        *sweep(("bf16", "csa", "fp8_ds_mla")),
    ],
)
def test_batches(what, kind, fmt, implementation):
    config = ops.make_config(kind, fmt, 3, 5)
    options = {
        "holes": "holes" in what,
        "magnitudes": "magnitudes" in what,
        "dtype": ml_dtypes.bfloat16 if "bf16" in what else np.float32,
        "page_bytes": 5 * config.format.row_bytes + 44 if "wide" in what else None,
    }
    rng = np.random.default_rng(len(what))
    batch = random_batch(rng, config, what if what in KINDS else "mixed", tokens=30, **options)
    ops.check_steps(batch, implementation)
    ops.check_compress(batch, implementation, "all")
    ops.check_compress(batch, implementation, "tail")


@pytest.mark.parametrize(("kind", "fmt"), [("csa", "fp8_ds_mla"), *sweep(("indexer", "indexer_mxfp4"))])
@pytest.mark.parametrize("size", [1e-30, 1e-12, 1e-4, 3e-3, 1e17, 1e30])
def test_whole_windows_of_one_size(kind, fmt, size, implementation):
    """RMSNorm's epsilon rules below 1e-3, its overflow above 1e18."""
    batch = random_batch(np.random.default_rng(2), ops.make_config(kind, fmt, 3, 5), "prefill", requests=1, tokens=16)
    batch.kv_score[:, : batch.width] *= np.float32(size)
    ops.check_compress(batch, implementation, "tail")


@pytest.mark.parametrize("options", [{"magnitudes": True, "holes": True}, {"dtype": ml_dtypes.bfloat16}], ids=str)
def test_long_windows(options, implementation):
    batch = random_batch(
        np.random.default_rng(5),
        ops.make_config("hca", "fp8_ds_mla", 16, 2),
        "chunked",
        requests=2,
        tokens=200,
        **options,
    )
    ops.check_steps(batch, implementation)
    ops.check_compress(batch, implementation, "tail")


UNPROMISED = {
    "csa decode": ("csa", [(2, 6), (7, 1), (3, 1), (0, 4), *[(0, 0)] * 8]),
    "hca decode": ("hca", [(126, 4), (127, 1), (254, 2), *[(0, 0)] * 4]),
    "hca prefill": ("hca", [(100, 300)]),
}


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("csa decode", "float32"), ("hca decode", "bfloat16"), ("hca prefill", "float32"),
        *sweep(("csa decode", "bfloat16"), ("hca decode", "float32"), ("hca prefill", "bfloat16")),
    ],
)  # fmt: skip
def test_windows_that_shapes_do_not_promise(name, dtype, implementation):
    """A decode's windows with several rows in the batch, a prefill's that began before: kernels take these apart."""
    kind, sizes = UNPROMISED[name]
    config = ops.make_config(kind, "fp8_ds_mla", 16, 3)
    options = {"sizes": sizes, "padding": 0, "padded_requests": 0, "dtype": jnp.dtype(dtype)}
    batch = random_batch(np.random.default_rng(1), config, **options)
    meta = ops.metadata(batch)
    assert meta.prefill if len(sizes) == 1 else len(meta.closing) == len(batch.positions)
    assert len(ops.check_compress(batch, implementation, "tail").slots) == {12: 5, 7: 3, 1: 3}[len(sizes)]


@pytest.mark.parametrize(("ratio", "overlap"), [(1, False), (2, True), (32, False), *sweep((1, True), (16, True))])
def test_other_ratios(ratio, overlap, implementation):
    config = ops.make_config("indexer", "indexer_fp8", compress_ratio=ratio, overlap=overlap)
    batch = random_batch(np.random.default_rng(ratio), config, "chunked", requests=2, tokens=2 * ratio + 6)
    ops.check_steps(batch, implementation)
    ops.check_compress(batch, implementation, "tail")


@functools.cache
def small(kind, fmt, page_rows, kv_page_rows):
    return ops.make_config(kind, fmt, page_rows, kv_page_rows)


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(
    seed=st.integers(0, 2**32 - 1),
    kind=st.sampled_from(KINDS),
    compressor=st.sampled_from([("csa", "fp8_ds_mla"), ("csa", "bf16"), ("indexer", "indexer_mxfp4")]),
    pages=st.just((2, 3)),
    holes=st.booleans(),
    magnitudes=st.booleans(),
    save=st.sampled_from(["tail", "all"]),
)
def test_ragged(seed, kind, compressor, pages, holes, magnitudes, save):
    batch = random_batch(
        np.random.default_rng(seed), small(*compressor, *pages), kind, tokens=24, holes=holes, magnitudes=magnitudes
    )
    ops.check_compress(batch, "xla", save)
    ops.check_steps(batch, "xla")


@pytest.mark.parametrize(
    ("kind", "fmt"),
    [
        ("csa", "fp8_ds_mla"), ("hca", "fp8_ds_mla"), ("indexer", "indexer_mxfp4"),
        *sweep(("csa", "bf16"), ("csa", "fp8"), ("indexer", "indexer_fp8")),
    ],
)  # fmt: skip
def test_compress_is_the_steps(kind, fmt, implementation):
    batch = random_batch(np.random.default_rng(11), ops.make_config(kind, fmt), "chunked", **SIZES[kind])
    state, cache = ops.compress(batch, implementation=implementation, save="all")
    apart = ops.save_partial_states(batch, implementation=implementation)
    ops.same_bytes(state, apart)
    ops.same_bytes(cache, ops.store(batch, apart, implementation=implementation))


def test_empty_calls(implementation):
    """No token, no request, no page: nothing happens."""
    config = ops.make_config("csa", "fp8_ds_mla")
    batch = random_batch(np.random.default_rng(0), config, tokens=9)
    none = dataclasses.replace(
        batch,
        **{
            k: getattr(batch, k)[:0]
            for k in ("kv_score", "positions", "token_to_req", "slot_mapping", "kv_slot_mapping")
        },
        query_start_loc=np.zeros_like(batch.query_start_loc),
    )
    for save in ("tail", "all"):
        state, cache = ops.compress(none, implementation=implementation, save=save)
        ops.same_bytes(state, batch.state)
        ops.same_bytes(cache, batch.cache)
    pageless = dataclasses.replace(batch, cache=batch.cache[:0])
    state, cache = ops.compress(pageless, implementation=implementation)
    ops.same_bytes(state, ops.tail(batch))
    assert cache.shape == pageless.cache.shape
    stateless = dataclasses.replace(batch, state=batch.state[:0])
    state, cache = ops.compress(stateless, implementation=implementation)
    exact = ops.rows(batch, batch.state[:0], from_batch=True)
    oracle.assert_same_cache(cache, batch.cache, exact, config)
    ops.same_bytes(ops.store(batch, batch.state[:0], implementation=implementation), batch.cache)


def test_wrong_data_writes_nothing(implementation):
    """Requests, slots and positions outside their arrays."""
    config = ops.make_config("csa", "fp8_ds_mla", 3, 5)
    batch = random_batch(np.random.default_rng(3), config, sizes=[(0, 40)], padding=0, padded_requests=0)
    batch.kv_slot_mapping[[3, 7, 11]] = [len(batch.cache) * 5, -7, 2**31 - 1]
    batch.token_to_req[[15, 19]] = [1, -1]
    batch.positions[[23, 27]] = [39 + 4, 2**31 - 1]  # past the table of cos and sin, which has 40 rows
    for cache, state, from_batch in (
        (ops.compress(batch, implementation=implementation)[1], batch.state, True),
        (ops.store(batch, ops.saved(batch), implementation=implementation), ops.saved(batch), False),
    ):
        exact = ops.rows(batch, state, from_batch=from_batch)
        assert exact.tokens.tolist() == [31, 35, 39]
        if from_batch:  # row 27 does not say that it is position 27: the window of 31 has a gap
            exact = ops.without(exact, 31)
        oracle.assert_same_cache(cache, batch.cache, exact, config)


# Changes to the plan's entry of batch row 11, position 11: (column, value).
WRONG_ENTRIES = {
    "row past the batch": (0, 40),
    "row far past the batch": (0, 2**31 - 1),
    "row before the batch": (0, -(2**31)),
    "position closes nothing": (1, 10),
    "position before 0": (1, -1),
    "position past the table": (1, 43),
    "position far past the table": (1, 2**31 - 1),
    "slot past the cache": (2, None),
    "slot far past the cache": (2, 2**31 - 1),
    "slot before the cache": (2, -(2**31)),
}


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("wrong", WRONG_ENTRIES)
def test_a_wrong_entry_of_the_plan_writes_nothing(wrong, dtype, implementation):
    config = ops.make_config("csa", "fp8_ds_mla", 3, 5)
    batch = random_batch(np.random.default_rng(3), config, sizes=[(0, 40)], padding=0, padded_requests=0, dtype=dtype)
    column, value = WRONG_ENTRIES[wrong]
    closing = np.array(ops.metadata(batch).closing)
    assert closing[2, :2].tolist() == [11, 11]
    closing[2, column] = len(batch.cache) * 5 if value is None else value
    meta = ops.metadata(batch, closing=closing)
    for cache, state, from_batch in (
        (ops.compress(batch, meta, implementation=implementation)[1], batch.state, True),
        (ops.store(batch, ops.saved(batch), meta, implementation=implementation), ops.saved(batch), False),
    ):
        exact = ops.without(ops.rows(batch, state, from_batch=from_batch), 11)
        assert len(exact.slots) == 9
        oracle.assert_same_cache(cache, batch.cache, exact, config)


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16], ids=["float32", "bfloat16"])
def test_rows_before_the_batch_are_absent(dtype, implementation):
    """Whatever the plan says of how many rows the batch has."""
    config = ops.make_config("csa", "bf16", 3, 5)
    batch = random_batch(np.random.default_rng(4), config, sizes=[(0, 24)], padding=0, padded_requests=0, dtype=dtype)
    closing = np.array(ops.metadata(batch).closing)
    assert closing[0].tolist()[:2] == [3, 3]
    exact = ops.rows(batch, batch.state, from_batch=True)
    for in_batch in (8, 9, 2**31 - 1):
        closing[0, 3] = in_batch
        _, cache = ops.compress(batch, ops.metadata(batch, closing=closing), implementation=implementation)
        oracle.assert_same_cache(cache, batch.cache, exact, config)


def test_a_plan_with_wrong_rows_saves_only_real_ones(implementation):
    batch = random_batch(np.random.default_rng(3), ops.make_config("csa", "fp8_ds_mla"), sizes=[(0, 11)], padding=2)
    outside = batch.state.shape[0] * batch.state.shape[1]
    slot = batch.slot_mapping
    saving = [[9, 9, slot[9]], [13, 3, slot[3]], [-1, 3, slot[3]], [2**31 - 1, 3, slot[3]], [-(2**31), 3, slot[3]]]
    saving += [[2, 2, slot[2]], [4, 4, outside], [5, 5, -3], [6, 6, 2**31 - 1], [7, -1, slot[7]]]
    meta = ops.metadata(batch, saving=np.array(saving, np.int32))
    state, _ = ops.compress(batch, meta, implementation=implementation)
    ops.same_bytes(state, ops.saved(batch, tokens=[9, 2]))
