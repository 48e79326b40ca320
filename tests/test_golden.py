"""The bytes of vLLM's kernels: the oracle reproduces them, and so does every implementation."""

import dataclasses

import numpy as np
import pytest
from helpers import golden, ops, oracle
from helpers.batches import Batch
from helpers.sweep import sweep

GPU_TOO = True
KINDS = {"csa": "fp8_ds_mla", "hca": "fp8_ds_mla", "indexer_fp8": "indexer_fp8"}
CASES = golden.cases()
# One case per compressor and of extreme magnitudes; the others have other shapes and so are other compilations.
RUN = ["csa/magnitudes", "csa/ragged", "hca/ragged", "indexer_fp8/magnitudes", "indexer_fp8/small_pages"]
RUN += sweep(*(case for case in CASES if case not in RUN))


def load(case):
    """A case's inputs as a Batch, the cache it became, and its arrays by name."""
    arrays = golden.load(case, golden.COMPRESSOR)
    kind = case.split("/")[0]
    dim, m, page_rows, kv_page_rows, page_bytes, pages = map(int, arrays["meta"])
    config = ops.make_config(kind.split("_")[0], KINDS[kind], page_rows, kv_page_rows)
    assert (config.head_dim, config.compress_ratio) == (dim, m)
    # Padding tokens, those past the last request's, are given to request 0 at position 0.
    positions, requests = arrays["positions"], arrays["token_to_req"]
    real = np.arange(len(positions)) < len(positions) - _padding(requests)
    counts = np.bincount(requests[real], minlength=len(arrays["block_table"]))
    starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    seq_lens = np.array([positions[end - 1] + 1 if n else 0 for end, n in zip(starts[1:], counts, strict=True)])
    batch = Batch(
        config=config,
        kv_score=arrays["kv_score"],
        ape=arrays["ape"].astype(np.float32),
        positions=positions,
        token_to_req=requests,
        query_start_loc=starts,
        seq_lens=seq_lens.astype(np.int32),
        slot_mapping=arrays["slot_mapping"],
        kv_slot_mapping=arrays["kv_slot_mapping"],
        block_table=arrays["block_table"],
        kv_block_table=None,
        closing=np.flatnonzero((positions + 1) % m == 0),
        state=arrays["state_before"].astype(np.float32),
        cache=np.full((pages, page_bytes), 0xA5, np.uint8),
        norm_weight=arrays["norm_weight"],
        cos_sin=arrays["cos_sin"],
        kv_scale=None,
    )
    return batch, arrays["kv_after_triton"], arrays


def _padding(requests):
    """Tokens after the last request's: where the request index falls back."""
    falls = np.flatnonzero(np.diff(requests) < 0)
    return len(requests) - 1 - falls[0] if len(falls) else 0


@pytest.mark.parametrize("case", CASES)
def test_oracle(case):
    batch, after, arrays = load(case)
    state = ops.saved(batch)
    if "state_rows_after" in arrays:
        slots = batch.slot_mapping[batch.slot_mapping >= 0]
        ops.same_bytes(state.reshape(-1, state.shape[-1])[slots], arrays["state_rows_after"])
    rows = ops.rows(batch, state, from_batch=False)
    assert len(rows.slots)
    oracle.assert_same_cache(after, batch.cache, rows, batch.config)
    # Not one byte differs: the allowance is not needed.
    written = oracle.quantize(batch.config.cache_format, rows.exact)
    ops.same_bytes(
        after, oracle.store(batch.config.cache_format, batch.cache, *written, rows.slots, batch.config.kv_page_rows)
    )


@pytest.mark.parametrize("case", RUN)
def test_steps(case, implementation):
    batch, after, _ = load(case)
    state = ops.save_partial_states(batch, implementation=implementation)
    ops.same_bytes(state, ops.saved(batch))
    cache = np.asarray(ops.store(batch, state, implementation=implementation))
    exact = ops.rows(batch, ops.saved(batch), from_batch=False)
    oracle.assert_same_cache(cache, batch.cache, exact, batch.config)
    assert (cache != after).sum() <= max(
        1, len(exact.slots) * oracle.FORMATS[batch.config.cache_format].row_bytes // 2000
    )


@pytest.mark.parametrize("save", ["tail", *sweep("all")])
@pytest.mark.parametrize("case", RUN)
def test_compress(case, save, implementation):
    batch, after, _ = load(case)
    state, cache = ops.compress(batch, implementation=implementation, save=save)
    ops.same_bytes(state, ops.saved(batch) if save == "all" else ops.tail(batch))
    exact = ops.rows(batch, batch.state, from_batch=True)
    oracle.assert_same_cache(cache, batch.cache, exact, batch.config)
    differing = (np.asarray(cache) != after).sum()
    assert differing <= max(1, len(exact.slots) * oracle.FORMATS[batch.config.cache_format].row_bytes // 2000)


def test_a_wrong_byte_is_found():
    batch, after, _ = load("csa/ragged")
    rows = ops.rows(batch, ops.saved(batch), from_batch=False)
    page, byte = (i[0] for i in oracle.row_index("fp8_ds_mla", rows.slots, batch.config.kv_page_rows))
    for column in (0, 447, 448, 575, 576, 583):
        wrong = after.copy()
        wrong[page, byte[column]] ^= 0x04
        with pytest.raises(AssertionError, match=r"wrong|differ"):
            oracle.assert_same_cache(wrong, batch.cache, rows, batch.config)
    wrong = after.copy()
    wrong[-1, -1] ^= 1
    with pytest.raises(AssertionError, match="stray"):
        oracle.assert_same_cache(wrong, batch.cache, rows, batch.config)
    missing = dataclasses.replace(rows, **{f.name: getattr(rows, f.name)[1:] for f in dataclasses.fields(rows)})
    with pytest.raises(AssertionError, match="stray"):
        oracle.assert_same_cache(after, batch.cache, missing, batch.config)
