"""`python -m dsv4_jax bench bridge` on the CPU, where it has nothing to launch."""

import json

import jax
import pytest

from dsv4_jax import platforms
from dsv4_jax.__main__ import main
from dsv4_jax.bench import bridge as bench

pytest.importorskip("torch")


@pytest.fixture(autouse=True)
def few(monkeypatch):
    for name, value in {"CHAIN": 2, "CALLS": 1, "ROUNDS": 2, "FRESH": 2}.items():
        monkeypatch.setattr(bench, name, value)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="prints more on a GPU")
def test_steps_of_a_call(tmp_path, capsys):
    path = tmp_path / "calls.json"
    assert main(["bench", "bridge", "--json", str(path)]) == 0
    printed = capsys.readouterr().out
    assert "only the ratios between two rows mean something" in printed
    assert "left out: bridge: needs a GPU" in printed and "left out: triton: needs a GPU" in printed
    content = json.loads(path.read_text())
    assert content["device"] == "cpu" and content["versions"]["jax"] == jax.__version__
    rows = {row["variant"]: row for row in content["rows"]}
    assert list(rows) == ["empty callback", "addresses", "tensors", "torch_call"]
    for name, row in rows.items():
        columns = {"lone", "chain", "scan", "fresh"} if name == "empty callback" else {"lone", "chain"}
        assert row.keys() - {"variant"} == columns
    assert list(content["ratios"]) == ["addresses / empty callback", "torch_call / empty callback"]
    for label, ratios in content["ratios"].items():
        over, under = label.split(" / ")
        assert ratios == {column: rows[over][column] / rows[under][column] for column in ("lone", "chain")}


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="prints more on a GPU")
def test_loops_need_a_gpu(capsys):
    assert main(["bench", "bridge", "--loops"]) == 0
    assert "There is nothing to capture." in capsys.readouterr().out


def test_without_torch_tensors_are_left_out(monkeypatch):
    monkeypatch.setattr(platforms, "installed", lambda package: None if package == "torch" else "1.0")
    monkeypatch.setattr(bench, "installed", platforms.installed)
    missing = {name: bench._why_not(name, False) for name in bench.STEPS | bench.NATIVE | bench.KERNELS}
    assert {name for name, why in missing.items() if why} == {"tensors", "torch_call"}
    assert missing["tensors"] == "torch is not installed"


def test_xla_knows_the_settings():
    for options, unroll in bench.SETTINGS.values():
        assert jax.jit(lambda x: x + 1, compiler_options=options)(1.0) == 2 and unroll >= 1
