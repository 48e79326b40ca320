"""How the tests call the ops: from a NumPy batch, and with what the oracle says of it."""

import dataclasses
import re

import jax.numpy as jnp
import numpy as np

import dsv4_jax
from dsv4_jax import CompressorConfig, CompressorMetadata
from helpers import oracle

FORMATS = {
    "csa": ("fp8_ds_mla", "bf16", "fp8"),
    "hca": ("fp8_ds_mla", "bf16", "fp8"),
    "indexer": ("indexer_fp8", "indexer_mxfp4"),
}
COMPRESSORS = [(kind, fmt) for kind, formats in FORMATS.items() for fmt in formats]


def make_config(kind, cache_format, page_rows=None, kv_page_rows=None, **changes):
    """The config of "csa", "hca" or "indexer", with other pages than the model's where given."""
    config = getattr(CompressorConfig, kind)(cache_format)
    pages = {"page_rows": page_rows, "kv_page_rows": kv_page_rows}
    return dataclasses.replace(config, **{k: v for k, v in pages.items() if v}, **changes)


def metadata(batch, **changes):
    """The op's metadata of a batch, from its slots; `changes` to the plan afterwards."""
    names = ("positions", "token_to_req", "slot_mapping", "kv_slot_mapping", "block_table", "query_start_loc")
    built = CompressorMetadata.from_slots(batch.config, *(jnp.asarray(getattr(batch, name)) for name in names))
    return dataclasses.replace(built, **{k: jnp.asarray(v) for k, v in changes.items()})


def save_partial_states(batch, state=None, implementation=None):
    kv_score = jnp.asarray(batch.kv_score)
    w = batch.width
    return dsv4_jax.save_partial_states(
        kv_score[:, :w],
        kv_score[:, w:],
        jnp.asarray(batch.ape),
        jnp.asarray(batch.positions),
        jnp.asarray(batch.state if state is None else state),
        jnp.asarray(batch.slot_mapping),
        compress_ratio=batch.config.compress_ratio,
        implementation=implementation,
    )


def store(batch, state, meta=None, implementation=None):
    return dsv4_jax.compress_norm_rope_store(
        jnp.asarray(state),
        jnp.asarray(batch.cache),
        metadata(batch) if meta is None else meta,
        jnp.asarray(batch.norm_weight),
        jnp.asarray(batch.cos_sin),
        config=batch.config,
        kv_scale=batch.kv_scale,
        implementation=implementation,
    )


def compress(batch, meta=None, implementation=None, save="tail"):
    return dsv4_jax.compress(
        jnp.asarray(batch.kv_score),
        jnp.asarray(batch.ape),
        jnp.asarray(batch.state),
        jnp.asarray(batch.cache),
        metadata(batch) if meta is None else meta,
        jnp.asarray(batch.norm_weight),
        jnp.asarray(batch.cos_sin),
        config=batch.config,
        save=save,
        kv_scale=batch.kv_scale,
        implementation=implementation,
    )


def saved(batch, state=None, tokens=None):
    """The oracle's state after a batch is saved."""
    w = batch.width
    return oracle.save_states(
        batch.kv_score[:, :w],
        batch.kv_score[:, w:],
        batch.ape,
        batch.positions,
        batch.state if state is None else state,
        batch.slot_mapping,
        batch.config.compress_ratio,
        tokens=tokens,
    )


def tail(batch, rollback=0):
    """The oracle's state after `save="tail"`."""
    tokens = oracle.saving(batch.config, batch.query_start_loc, batch.seq_lens, rollback=rollback)
    return saved(batch, tokens=tokens)


def rows(batch, state, *, from_batch, meta=None, kv_pages=None):
    """The oracle's keys: every row of a window from `state`, or this batch's from `kv_score`."""
    given = {"kv_score": batch.kv_score, "ape": batch.ape} if from_batch else {}
    kv_pages = len(batch.cache) if kv_pages is None else kv_pages
    return oracle.compressed_rows(
        batch.config, state, meta or batch, batch.norm_weight, batch.cos_sin, kv_pages, **given
    )


def without(exact, *tokens):
    """The oracle's keys but for those of some tokens."""
    keep = ~np.isin(exact.tokens, tokens)
    return oracle.Rows(*(getattr(exact, f.name)[keep] for f in dataclasses.fields(exact)))


def same_bytes(got, want):
    """Asserts equal bytes, NaN's payload included."""
    got, want = (oracle.as_pages(a) for a in (got, want))
    assert got.shape == want.shape
    where = np.argwhere(got != want)
    assert not len(where), f"{len(where)} bytes differ, the first at (page, byte) {where[:4].tolist()}"


def copies(compiled, *caches):
    """The instructions of compiled HLO that copy an array of a cache's shape."""
    found = []
    for cache in caches:
        short = {"uint8": "u8", "float32": "f32", "bfloat16": "bf16", "float8_e4m3fn": "f8e4m3fn"}[cache.dtype.name]
        shape = re.escape(f"{short}[{','.join(map(str, cache.shape))}]")
        found += re.findall(rf"^.*= \(?{shape}\S* .*?copy(?:-start)?\(.*$", compiled.as_text(), re.MULTILINE)
    return found


def check_steps(batch, implementation):
    """Steps 1 and 2-4 done apart."""
    want = saved(batch)
    same_bytes(save_partial_states(batch, implementation=implementation), want)
    cache = store(batch, want, implementation=implementation)
    oracle.assert_same_cache(
        cache, batch.cache, rows(batch, want, from_batch=False), batch.config, scale=batch.kv_scale
    )


def check_compress(batch, implementation, save):
    """All steps in one; returns the oracle's keys."""
    state, cache = compress(batch, implementation=implementation, save=save)
    same_bytes(state, saved(batch) if save == "all" else tail(batch))
    exact = rows(batch, batch.state, from_batch=True)
    oracle.assert_same_cache(cache, batch.cache, exact, batch.config, scale=batch.kv_scale)
    return exact
