"""However a sequence is cut into steps, and drafts taken back, its keys are those of its whole history."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import ops, oracle
from helpers.batches import random_batch
from helpers.sweep import sweep

import dsv4_jax


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


@pytest.mark.parametrize(("kind", "fmt", "length"), [("csa", "fp8_ds_mla", 22), *sweep(("indexer", "indexer_fp8", 22))])
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


@pytest.mark.parametrize("cut", [127, 128, *sweep(1, 256)])
def test_every_cut_of_long_windows(cut, implementation):
    length = 260
    whole = sequence(ops.make_config("hca", "fp8_ds_mla", 8, 2), length)
    exact = ops.rows(whole, whole.state, from_batch=True)
    cuts = sorted({cut, min(cut + 130, length - 3), length - 2, length - 1})
    _, cache = run_with_cuts(whole, cuts, length, implementation)
    oracle.assert_same_cache(cache, whole.cache, exact, whole.config)


@pytest.mark.parametrize(("kind", "rollback"), [("csa", 3), ("indexer", 6), *sweep(("indexer", 1))])
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
