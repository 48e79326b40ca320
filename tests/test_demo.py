"""The demo: it passes, it catches planted faults, and it says in one line what is wrong with its input."""

import dataclasses
import importlib.util
import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from dsv4_jax import CompressorConfig, platforms
from dsv4_jax.__main__ import main
from dsv4_jax.demo import engine, exact, run
from dsv4_jax.demo.checkpoint import checkpoint_weights

TOKENS = "560"  # requests of 265, 177 and 118: three HCA windows, one of them closed in decode
HIDDEN = 256  # as the demo's own weights have, so that one compilation serves all tests
DATA = Path(__file__).parent / "data"

# The names of a compressor's tensors: a CSA layer's or an HCA layer's, and the indexer's.
STYLES = {
    "deepseek": (
        "layers.{}.attn.compressor.",
        "layers.{}.attn.indexer.compressor.",
        {"kv": "wkv.weight", "gate": "wgate.weight", "ape": "ape", "norm": "norm.weight"},
    ),
    "hugging_face": (
        "model.layers.{}.self_attn.compressor.",
        "model.layers.{}.self_attn.compressor.indexer.",
        {"kv": "kv_proj.weight", "gate": "gate_proj.weight", "ape": "position_bias", "norm": "kv_norm.weight"},
    ),
    "vllm": (
        "model.layers.{}.attn.compressor.",
        "model.layers.{}.attn.indexer.compressor.",
        {"kv_gate": "fused_wkv_wgate.weight", "ape": "ape", "norm": "norm.weight"},
    ),
}
SHAPES = {"csa": (4, 1024, 512), "hca": (128, 512, 512), "indexer": (4, 256, 128)}


@pytest.fixture
def no_picture(monkeypatch):
    monkeypatch.setattr(run, "_plot", lambda *_: None)


def demo(*args):
    return main(["demo", *map(str, args)])


def tensors_of(kind, hidden=HIDDEN):
    m, w, d = SHAPES[kind]
    rng = np.random.default_rng(sum(kind.encode()))

    def draw(*shape):
        return rng.standard_normal(shape).astype(np.float32)

    kv, gate = draw(w, hidden) * hidden**-0.5, draw(w, hidden) * hidden**-0.5
    return {
        "kv": kv, "gate": gate, "kv_gate": np.concatenate([kv, gate]), "ape": draw(m, w), "norm": 1 + 0.1 * draw(d)
    }  # fmt: skip


def write_checkpoint(path, style, *, csa=2, hca=3, hidden=HIDDEN, dtype=np.float32, leave_out=()):
    """A checkpoint in two files with one CSA layer, one HCA layer and tensors that are none of the demo's business."""
    save_file = pytest.importorskip("safetensors.numpy").save_file
    main_prefix, indexer_prefix, names = STYLES[style]
    files = [{}, {}]
    for kind, layer in (("csa", csa), ("indexer", csa), ("hca", hca)):
        prefix = (indexer_prefix if kind == "indexer" else main_prefix).format(layer)
        for i, (role, tensor) in enumerate(tensors_of(kind, hidden).items()):
            if role in names and f"{kind}.{role}" not in leave_out:
                # A compressor's tensors may be spread over files.
                files[i % 2][prefix + names[role]] = tensor.astype(dtype if role != "ape" else np.float32)
    files[0]["model.embed_tokens.weight"] = np.zeros((4, 4), np.int8)
    files[1]["model.layers.2.self_attn.kv_norm.weight"] = np.zeros(3, np.float32)
    files[1]["mtp.0.attn.compressor.ape"] = np.zeros((4, 4), np.float32)
    path.mkdir(exist_ok=True)
    for i, tensors in enumerate(files):
        save_file(tensors, path / f"model-{i}.safetensors")
    return path


def test_passes_and_draws(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "demo.png"
    assert demo("--tokens", TOKENS, "--output", picture) == 0
    out = capsys.readouterr().out
    assert picture.read_bytes().startswith(b"\x89PNG") and picture.stat().st_size > 50_000
    assert "\x1b" not in out and "\r" not in out
    rows = {line.split("  ")[0]: line.split() for line in out.splitlines() if line.endswith("  ok")}
    assert set(rows) == {"CSA", "HCA", "indexer", "indexer fp4"}
    assert rows["HCA"][2:7] == ["560", "3", "4.6", "1024", "224x"]
    assert rows["CSA"][3] == rows["indexer"][3] == str(265 // 4 + 177 // 4 + 118 // 4)
    for row in rows.values():
        assert 0.9 < float(row[-2]) <= 1  # the bound is as tight as it can be
    assert "100 %" in out


def test_a_window_of_each_kind_closes_in_decode():
    lengths = [len(r) for r in engine.split(np.zeros(int(TOKENS), np.uint8))]
    assert lengths[0] // 128 > (lengths[0] - engine.DECODE) // 128
    steps = engine.schedule(lengths)
    assert np.sum([counts for counts, _ in steps], axis=0).tolist() == lengths
    assert all(counts.sum() <= padded for counts, padded in steps) and len({padded for _, padded in steps}) == 2


def test_as_a_command(tmp_path):
    text = tmp_path / "short.txt"
    text.write_text("Grüße an alle.", encoding="utf-8")
    command = [sys.executable, "-m", "dsv4_jax", "demo", text, "--output", tmp_path / "x.png"]
    root = Path(__file__).parent.parent
    env = dict(os.environ, PYTHONPATH=str(root))
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "no key yet" in done.stdout and not done.stderr


@pytest.mark.parametrize("style", STYLES)
def test_checkpoint(style, tmp_path, capsys, no_picture):
    path = write_checkpoint(tmp_path / "model", style)
    assert demo("--checkpoint", path, "--tokens", TOKENS) == 0
    assert capsys.readouterr().out.count("  ok\n") == 4


@pytest.mark.parametrize("style", STYLES)
def test_checkpoint_is_read_right(style, tmp_path):
    """Values, a hidden size of its own, bfloat16, and the config beside the weights."""
    bfloat16 = jnp.dtype("bfloat16")
    path = write_checkpoint(tmp_path / "model", style, hidden=24, dtype=bfloat16)
    shutil.copy(DATA / "config_flash.json", path / "config.json")
    read = checkpoint_weights(path, 1)
    layers = CompressorConfig.from_pretrained_config(DATA / "config_flash.json")
    assert [read["CSA"][0], read["indexer"][0]] == list(layers[2])
    assert read["indexer fp4"][0] == dataclasses.replace(layers[2][1], cache_format="indexer_mxfp4")
    for name, kind in {"CSA": "csa", "HCA": "hca", "indexer": "indexer", "indexer fp4": "indexer"}.items():
        want, weights = tensors_of(kind, 24), read[name][1]
        assert weights.embedding.shape == (256, 24)
        np.testing.assert_array_equal(weights.wkv_gate, want["kv_gate"].astype(bfloat16).astype(np.float32).T)
        np.testing.assert_array_equal(weights.ape, want["ape"])
        np.testing.assert_array_equal(weights.norm, want["norm"].astype(bfloat16).astype(np.float32))


def _bad(path):
    """What to run, and what the error must say, by name."""
    (path / "empty.txt").write_bytes(b"")
    (path / "binary").write_bytes(bytes(range(256)))
    (path / "nul").write_bytes(b"text\0text")
    (path / "broken").mkdir()
    (path / "broken" / "model.safetensors").write_bytes(b"not one")
    (path / "bare").mkdir()
    other = write_checkpoint(path / "other", "deepseek", leave_out=[f"{k}.{r}" for k in SHAPES for r in ("ape",)])
    partial = write_checkpoint(path / "partial", "hugging_face", leave_out=["indexer.gate"])
    shape = write_checkpoint(path / "shape", "vllm")
    (shape / "config.json").write_text(json.dumps({"model_type": "llama"}))
    swapped = write_checkpoint(path / "swapped", "deepseek", csa=3, hca=4)
    shutil.copy(DATA / "config_flash.json", swapped / "config.json")
    fp8 = write_checkpoint(path / "fp8", "deepseek", dtype=jnp.dtype("float8_e4m3fn"))
    return {
        "missing": ([path / "none.txt"], "No such file"),
        "directory": ([path], "directory"),
        "empty": ([path / "empty.txt"], "is empty"),
        "binary": ([path / "binary"], "not a text"),
        "nul": ([path / "nul"], "not a text"),
        "no directory": (["--checkpoint", path / "none"], "does not exist"),
        "no file": (["--checkpoint", path / "bare"], "no .safetensors file"),
        "broken file": (["--checkpoint", path / "broken"], "cannot be read"),
        "no compressor": (["--checkpoint", other], "no CSA compressor"),
        "layer too late": (["--checkpoint", partial, "--layer", 3], "no CSA compressor"),
        "missing tensor": (["--checkpoint", partial], "no tensor wgate.weight or gate_proj.weight"),
        "other model": (["--checkpoint", shape], "model_type"),
        "layers swapped": (["--checkpoint", swapped], "config.json says otherwise"),
        "fp8": (["--checkpoint", fp8], "has dtype F8_E4M3"),
        "output": (["--output", path / "demo.pdf"], "must end in .png"),
        "output nowhere": (["--output", path / "none" / "demo.png"], "cannot be written"),
        "implementation": (["--implementation", "cutedsl"], "cannot run here"),
    }


def test_bad_input(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(platforms, "default_target", lambda: platforms.Target("cpu"))
    for name, (args, want) in _bad(tmp_path).items():
        assert demo(*args) == 2, name
        captured = capsys.readouterr()
        assert want in captured.err and captured.err.count("\n") == 1, (name, captured.err)
        assert captured.out == "", name


@pytest.mark.parametrize("args", [["--tokens", "0"], ["--tokens", "x"], ["--layer", "-1"], ["--implementation", "c"]])
def test_bad_options(args, capsys):
    with pytest.raises(SystemExit) as stopped:
        demo(*args)
    assert stopped.value.code == 2
    assert "error: argument " + args[0] in capsys.readouterr().err


def corrupt(after, slots, config, what):
    """One small fault in a cache."""
    page, row = divmod(int(slots[0][-1]), config.kv_page_rows)  # the first request's last key
    values, scales = exact.VALUE_SCALE_BYTES[config.cache_format]
    first_scale = config.kv_page_rows * values + row * scales
    if what == "value":
        # The neighboring code: a fault of one step.
        after[page, row * values] ^= 1
    elif what == "last value":
        after[page, row * values + values - 1] ^= 0x80
    elif what == "scale":
        after[page, first_scale + (3 if config.cache_format == "indexer_fp8" else 0)] ^= 1
    elif what == "padding":
        after[0, -1] ^= 1
    elif what == "other page":
        used = {int(slot) // config.kv_page_rows for of_request in slots for slot in of_request}
        after[min(set(range(len(after))) - used), 0] ^= 1


@pytest.mark.parametrize("what", ["value", "last value", "scale", "padding", "other page"])
def test_planted_byte_is_found(what, monkeypatch, capsys, no_picture):
    run_compressor = engine.run

    def faulty(config, *args):
        result = run_compressor(config, *args)
        after = result.after.copy()
        if what != "padding" or config.cache_format == "fp8_ds_mla":  # the format whose pages are padded
            corrupt(after, result.slots, config, what)
        return dataclasses.replace(result, after=after)

    monkeypatch.setattr(engine, "run", faulty)
    assert demo("--tokens", TOKENS) == 1
    out = capsys.readouterr().out
    assert out.count("WRONG") == (2 if what == "padding" else 4)
    assert out.count("FAULT") >= out.count("WRONG")
    assert ("belong to no key" in out) == (what in ("padding", "other page"))


def test_lost_states_are_found(monkeypatch, capsys, no_picture):
    """States that a step fails to keep show in the keys that need them."""
    step = engine.step

    def forgetful(state_cache, *args, **options):
        state_cache, *rest = step(state_cache, *args, **options)
        return (jnp.full_like(state_cache, jnp.nan), *rest)

    monkeypatch.setattr(engine, "step", forgetful)
    assert demo("--tokens", TOKENS) == 1
    assert capsys.readouterr().out.count("WRONG") == 4


def test_without_matplotlib(monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(sys.modules, "dsv4_jax.demo.plot", None)
    assert demo("--tokens", TOKENS, "--output", tmp_path / "x.png") == 0
    assert "matplotlib is not installed" in capsys.readouterr().out
    assert not (tmp_path / "x.png").exists()


def test_exact_decodes_every_code():
    """The demo's own tables against ml_dtypes."""
    ml_dtypes = pytest.importorskip("ml_dtypes")
    codes = np.arange(256, dtype=np.uint8)
    np.testing.assert_array_equal(exact._E4M3, codes.view(ml_dtypes.float8_e4m3fn).astype(np.float64))
    np.testing.assert_array_equal(exact._E2M1, codes[:16].view(ml_dtypes.float4_e2m1fn).astype(np.float64))


@pytest.mark.parametrize("terminal", [True, False])
def test_progress(terminal):
    stream = io.StringIO()
    stream.isatty = lambda: terminal
    progress = run.Progress(10, stream)
    for _ in range(10):
        progress.step("x")
    progress.finish()
    written = stream.getvalue()
    assert "100 %" in written and written.endswith("\n")
    assert ("\r" in written) == terminal and written.count("\n") == (1 if terminal else 4)


def test_the_text_is_package_data():
    assert importlib.util.find_spec("dsv4_jax.demo").submodule_search_locations
    _, content = run._read_text(None)
    assert 3000 < len(content) < 6000 and content.decode().isascii()
