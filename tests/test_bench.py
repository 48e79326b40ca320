"""The bench: its batches, the bytes it counts, and its command line."""

import json

import numpy as np
import pytest

from dsv4_jax import CompressorConfig
from dsv4_jax.bench import run
from dsv4_jax.bench.cases import Case


def test_a_prefill_closes_every_window_inside_the_batch():
    case = Case(CompressorConfig.csa(), "prefill", 64)
    metadata, pages, kv_pages = case.batch()
    assert metadata.closing[:16, 0].tolist() == list(range(3, 64, 4)) and metadata.closing[:, 3].max() == 8
    assert pages == 16 and kv_pages >= 1
    # 64 tokens of 2 * 1024 float32; the last window's 4 rows are still needed; 16 keys of 584 bytes.
    assert case.compress_bytes(metadata, "tail") == 64 * 8192 + 4 * 8192 + 16 * 584
    assert case.compress_bytes(metadata, "all") == 64 * 8192 * 2 + 16 * 584
    assert case.store_bytes(metadata) == 16 * (8 * 2 * 512 * 4 + 584)
    assert case.save_bytes() == 64 * 8192 * 2
    assert Case(case.config, "prefill", 64, "bfloat16").compress_bytes(metadata, "all") == 64 * (4096 + 8192) + 16 * 584


@pytest.mark.parametrize("name", run.CONFIGS)
def test_closing_requests_have_all_their_rows(name):
    case = Case(run.CONFIGS[name], "closing", 8)
    metadata, pages, _ = case.batch()
    slots = np.asarray(metadata.window_slots)[:8]
    assert metadata.closing[:8, 0].tolist() == list(range(8)) and (metadata.closing[:8, 3] == 1).all()
    assert (slots >= 0).all() and len(np.unique(slots)) == slots.size and slots.max() < pages * case.config.page_rows


def test_random_phases_close_some_windows():
    metadata, _, _ = Case(CompressorConfig.csa(), "decode", 256).batch()
    assert 32 < int((metadata.closing[:, 0] >= 0).sum()) < 96  # a quarter of them: 64, give or take 7 (sigma)


def test_what_got_slower_is_named():
    row = {"compressor": "csa", "op": "save", "kind": "prefill", "tokens": 64, "warm": 2.0}
    assert run.slower([row | {"warm": 2.09}], [row]) == []
    assert run.slower([row | {"warm": 2.2}], [row]) == ["slower: csa save prefill 64 warm: 2.00 -> 2.20 us"]
    assert run.slower([row | {"warm": 9.0, "tokens": 65}], [row]) == []


def test_command_line(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(run, "CPU_BATCHES", (("prefill", 16),))
    monkeypatch.setattr(run, "QUICK", (("prefill", 16),))
    file = tmp_path / "bench.json"
    arguments = ["--compressor", "indexer_mxfp4", "--op", "save", "--quick", "--json", str(file)]
    assert run.main(arguments) == 0
    written = json.loads(file.read_text())
    assert [(r["compressor"], r["op"], r["tokens"]) for r in written["rows"]] == [("indexer_mxfp4", "save", 16)]
    assert written["rows"][0]["warm"] > 0 and written["bandwidth"] > 0
    assert "indexer_mxfp4 save" in capsys.readouterr().out
    with pytest.raises(FileNotFoundError):
        run.main([*arguments[:-1], str(tmp_path / "missing" / "bench.json")])
