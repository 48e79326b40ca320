"""Every op, format and implementation on ragged batches, held to the oracle byte by byte."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from helpers import ops, oracle
from helpers.batches import KINDS, random_batch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import dsv4_jax

# Every format in the model's pages (HCA: in odd ones), and two more in pages that divide nothing.
PAGED = [
    *((kind, fmt, *{"csa": (4, 64), "hca": (7, 3), "indexer": (4, 64)}[kind]) for kind, fmt in ops.COMPRESSORS),
    ("csa", "fp8_ds_mla", 1, 1),
    ("indexer", "indexer_mxfp4", 5, 1),
]
SIZES = {"csa": {"tokens": 27}, "indexer": {"tokens": 27}, "hca": {"tokens": 280, "requests": 2}}


def check_steps(batch, implementation):
    """Steps 1 and 2-4 done apart."""
    want = ops.saved(batch)
    ops.same_bytes(ops.save_partial_states(batch, implementation=implementation), want)
    cache = ops.store(batch, want, implementation=implementation)
    oracle.assert_same_cache(
        cache, batch.cache, ops.rows(batch, want, from_batch=False), batch.config, scale=batch.kv_scale
    )


def check_compress(batch, implementation, save):
    state, cache = ops.compress(batch, implementation=implementation, save=save)
    ops.same_bytes(state, ops.saved(batch) if save == "all" else ops.tail(batch))
    exact = ops.rows(batch, batch.state, from_batch=True)
    oracle.assert_same_cache(cache, batch.cache, exact, batch.config, scale=batch.kv_scale)
    return exact


@pytest.mark.parametrize("width", [512, 24])
@pytest.mark.parametrize("page_rows", [1, 7])
def test_save_partial_states(width, page_rows, implementation):
    rng = np.random.default_rng(width + page_rows)
    for dtype in (np.float32, ml_dtypes.bfloat16):
        kv, score = rng.standard_normal((2, 9, width)).astype(np.float32).astype(dtype)
        kv[0, :3], score[1, :2] = (np.nan, np.inf, -0.0), (-np.inf, np.nan)
        ape = rng.standard_normal((4, width)).astype(np.float32)
        positions = np.array([0, 1, 2, 3, 1_048_575, 2**31 - 1, 6, 7, -1], np.int32)
        state = rng.standard_normal((4, page_rows, 2 * width)).astype(np.float32)
        free = rng.permutation(4 * page_rows)
        slots = np.array([*free[:4], 4 * page_rows, -1, 2**31 - 1, -(2**31), free[0]], np.int32)
        got = dsv4_jax.save_partial_states(
            *map(jnp.asarray, (kv, score, ape, positions, state, slots)),
            compress_ratio=4,
            implementation=implementation,
        )
        want = oracle.save_states(kv, score, ape, positions, state, slots, 4)
        assert (want != state).any(2).sum() == 4
        np.testing.assert_array_equal(np.asarray(got), want)  # a NaN is a NaN: x86 and GPUs differ in its payload


@pytest.mark.parametrize(("kind", "fmt", "page_rows", "kv_page_rows"), PAGED)
def test_formats_and_pages(kind, fmt, page_rows, kv_page_rows, implementation):
    config = ops.make_config(kind, fmt, page_rows, kv_page_rows)
    batch = random_batch(np.random.default_rng([page_rows, kv_page_rows]), config, **SIZES[kind])
    check_steps(batch, implementation)
    assert len(check_compress(batch, implementation, "tail").slots)


@pytest.mark.parametrize("fmt", ["fp8_ds_mla", "indexer_mxfp4"])
@pytest.mark.parametrize("what", [*KINDS, "holes", "magnitudes", "bf16", "bf16 magnitudes", "wide pages"])
def test_batches(what, fmt, implementation):
    kind = "csa" if fmt == "fp8_ds_mla" else "indexer"
    config = ops.make_config(kind, fmt, 3, 5)
    options = {
        "holes": "holes" in what,
        "magnitudes": "magnitudes" in what,
        "dtype": ml_dtypes.bfloat16 if "bf16" in what else np.float32,
        "page_bytes": 5 * config.format.row_bytes + 44 if "wide" in what else None,
    }
    rng = np.random.default_rng(len(what))
    batch = random_batch(rng, config, what if what in KINDS else "mixed", tokens=30, **options)
    check_steps(batch, implementation)
    check_compress(batch, implementation, "all")
    check_compress(batch, implementation, "tail")


@pytest.mark.parametrize("size", [1e-30, 1e-12, 1e-4, 3e-3, 1e17, 1e30])
@pytest.mark.parametrize(("kind", "fmt"), [("csa", "fp8_ds_mla"), ("indexer", "indexer_mxfp4")])
def test_whole_windows_of_one_size(kind, fmt, size, implementation):
    """RMSNorm's epsilon rules below 1e-3, its overflow above 1e18."""
    batch = random_batch(np.random.default_rng(2), ops.make_config(kind, fmt, 3, 5), "prefill", requests=1, tokens=16)
    batch.kv_score[:, : batch.width] *= np.float32(size)
    check_compress(batch, implementation, "tail")


@pytest.mark.parametrize("options", [{"magnitudes": True}, {"holes": True}, {"dtype": ml_dtypes.bfloat16}], ids=str)
def test_long_windows(options, implementation):
    batch = random_batch(
        np.random.default_rng(5),
        ops.make_config("hca", "fp8_ds_mla", 16, 2),
        "chunked",
        requests=2,
        tokens=200,
        **options,
    )
    check_steps(batch, implementation)
    check_compress(batch, implementation, "tail")


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        ("csa", [(2, 6), (7, 1), (3, 1), (0, 4), *[(0, 0)] * 8]),
        ("hca", [(126, 4), (127, 1), (254, 2), *[(0, 0)] * 4]),
        ("hca", [(100, 300)]),
    ],
    ids=["csa decode", "hca decode", "hca prefill"],
)
def test_windows_that_shapes_do_not_promise(kind, sizes, dtype, implementation):
    """A decode's windows with several rows in the batch, a prefill's that began before: kernels take these apart."""
    config = ops.make_config(kind, "fp8_ds_mla", 16, 3)
    batch = random_batch(np.random.default_rng(1), config, sizes=sizes, padding=0, padded_requests=0, dtype=dtype)
    meta = ops.metadata(batch)
    assert meta.prefill if len(sizes) == 1 else len(meta.closing) == len(batch.positions)
    assert len(check_compress(batch, implementation, "tail").slots) == {12: 5, 7: 3, 1: 3}[len(sizes)]


@pytest.mark.parametrize(("ratio", "overlap"), [(1, False), (1, True), (2, True), (16, True), (32, False)])
def test_other_ratios(ratio, overlap, implementation):
    config = ops.make_config("indexer", "indexer_fp8", compress_ratio=ratio, overlap=overlap)
    batch = random_batch(np.random.default_rng(ratio), config, "chunked", requests=2, tokens=2 * ratio + 6)
    check_steps(batch, implementation)
    check_compress(batch, implementation, "tail")


@functools.cache
def small(kind, fmt, page_rows, kv_page_rows):
    return ops.make_config(kind, fmt, page_rows, kv_page_rows)


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
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
    check_compress(batch, "xla", save)
    check_steps(batch, "xla")


@pytest.mark.parametrize(("kind", "fmt"), [c for c in ops.COMPRESSORS if c not in (("hca", "bf16"), ("hca", "fp8"))])
def test_compress_is_the_steps(kind, fmt, implementation):
    batch = random_batch(np.random.default_rng(11), ops.make_config(kind, fmt), "chunked", **SIZES[kind])
    state, cache = ops.compress(batch, implementation=implementation, save="all")
    apart = ops.save_partial_states(batch, implementation=implementation)
    ops.same_bytes(state, apart)
    ops.same_bytes(cache, ops.store(batch, apart, implementation=implementation))


def sequence(config, length, seed=0, requests=1):
    """A whole prefill as one batch, with room for nothing else."""
    batch = random_batch(
        np.random.default_rng(seed), config, sizes=[(0, length)] * requests, padding=0, padded_requests=0, spare_pages=1
    )
    return batch


def step(whole, state, cache, first, last, total, *, implementation, rollback=0, save="tail", kv_score=None):
    """Runs positions [first, last) of a one-request batch, padded to `total` tokens."""
    pad = total - (last - first)
    kv_score = whole.kv_score if kv_score is None else kv_score
    kv_score = np.pad(kv_score[first:last], [(0, pad), (0, 0)], constant_values=np.nan)
    return _step(
        jnp.asarray(kv_score), jnp.asarray(whole.ape), state, cache, jnp.array([0, last - first], jnp.int32),
        jnp.array([last], jnp.int32), jnp.asarray(whole.block_table), jnp.asarray(whole.kv_block_table),
        jnp.asarray(whole.norm_weight), jnp.asarray(whole.cos_sin), whole.kv_scale,
        config=whole.config, implementation=implementation, rollback=rollback, save=save,
    )  # fmt: skip


@functools.partial(jax.jit, static_argnames=("config", "implementation", "rollback", "save"), donate_argnums=(2, 3))
def _step(
    kv_score, ape, state, cache, starts, seq_lens, table, kv_table, norm_weight, cos_sin, kv_scale, *,
    config, implementation, rollback, save,
):  # fmt: skip
    meta = dsv4_jax.CompressorMetadata.build(
        config, starts, seq_lens, table, kv_table, num_tokens=kv_score.shape[0], rollback=rollback
    )
    return dsv4_jax.compress(
        kv_score, ape, state, cache, meta, norm_weight, cos_sin,
        config=config, save=save, kv_scale=kv_scale, implementation=implementation,
    )  # fmt: skip


def run_with_cuts(whole, cuts, total, implementation, **options):
    """Runs a sequence cut at `cuts`; what no step saved is NaN, so what is missing shows."""
    state = jnp.full(whole.state.shape, jnp.nan)
    cache = jnp.asarray(whole.cache)
    for first, last in itertools.pairwise([0, *cuts, len(whole.kv_score)]):
        state, cache = step(
            whole, state, cache, first, last, total if last - first > 1 else 1, implementation=implementation, **options
        )
    return state, cache


@pytest.mark.parametrize(("kind", "fmt", "length"), [("csa", "fp8_ds_mla", 22), ("indexer", "indexer_fp8", 22)])
def test_every_cut(kind, fmt, length, implementation):
    whole = sequence(ops.make_config(kind, fmt, 3, 2), length)
    exact = ops.rows(whole, whole.state, from_batch=True)
    assert len(exact.slots) == length // 4
    for cut in range(1, length):
        if implementation == "triton" and cut % 3 and jax.default_backend() == "cpu":
            continue  # the interpreter is slow; every residue of 4 is met
        chunk = min(cut + 5, length)  # prefill, chunk, then decode
        _, cache = run_with_cuts(whole, [cut, *range(chunk, length)], length, implementation)
        oracle.assert_same_cache(cache, whole.cache, exact, whole.config)


@pytest.mark.parametrize("cut", [1, 127, 128, 256])
def test_every_cut_of_long_windows(cut, implementation):
    length = 260
    whole = sequence(ops.make_config("hca", "fp8_ds_mla", 8, 2), length)
    exact = ops.rows(whole, whole.state, from_batch=True)
    cuts = sorted({cut, min(cut + 130, length - 3), length - 2, length - 1})
    _, cache = run_with_cuts(whole, cuts, length, implementation)
    oracle.assert_same_cache(cache, whole.cache, exact, whole.config)


@pytest.mark.parametrize(("kind", "rollback"), [("csa", 3), ("indexer", 1), ("indexer", 6)])
def test_rollback(kind, rollback, implementation):
    """A draft of `rollback` tokens is taken back, and other tokens come: the keys are as if it had never been."""
    whole = sequence(ops.make_config(kind, ops.FORMATS[kind][0], 3, 2), 24)
    exact = ops.rows(whole, whole.state, from_batch=True)
    draft = whole.kv_score[::-1].copy()
    for cut in (9, 12, 14):
        state, cache = jnp.full(whole.state.shape, jnp.nan), jnp.asarray(whole.cache)
        run = functools.partial(step, whole, total=24, implementation=implementation, rollback=rollback)
        mixed = np.concatenate([whole.kv_score[: cut - rollback], draft[cut - rollback :]])
        state, cache = run(state, cache, 0, cut, kv_score=mixed)
        state, cache = run(state, cache, cut - rollback, 24)
        oracle.assert_same_cache(cache, whole.cache, exact, whole.config)


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


def test_window_slots_outside_the_state_are_absent(implementation):
    """As if the block table had no such page."""
    config = ops.make_config("csa", "bf16", 1, 4)
    batch = random_batch(np.random.default_rng(1), config, sizes=[(0, 8)], padding=0, padded_requests=0)
    state = ops.saved(batch)
    table = batch.block_table.copy()
    table[0, [1, 2, 5]] = -1
    exact = ops.rows(dataclasses.replace(batch, block_table=table), state, from_batch=False)
    slots = np.array(ops.metadata(batch).window_slots)
    for outside in ([len(state), -2, 2**31 - 1], [-(2**31), len(state) + 5, -1]):
        changed = slots.copy()
        changed[1, [1, 2, 5]] = outside  # the window of positions 0-7
        changed[0, [4 + 1, 4 + 2]] = outside[:2]  # that of positions 0-3
        cache = ops.store(batch, state, ops.metadata(batch, window_slots=changed), implementation=implementation)
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


def test_absent_rows(implementation):
    """A window without a state row writes nothing; one row is enough, and is then the whole window."""
    config = ops.make_config("csa", "bf16", 1, 4)
    batch = random_batch(np.random.default_rng(1), config, sizes=[(0, 8)], padding=0)
    state = ops.saved(batch)
    table = np.full_like(batch.block_table, -1)
    empty = dataclasses.replace(batch, block_table=table)
    ops.same_bytes(ops.store(empty, state, implementation=implementation), batch.cache)
    table[0, 6] = batch.block_table[0, 6]
    one = dataclasses.replace(batch, block_table=table)
    exact = ops.rows(one, state, from_batch=False)
    assert exact.tokens.tolist() == [7]
    oracle.assert_same_cache(ops.store(one, state, implementation=implementation), batch.cache, exact, config)
