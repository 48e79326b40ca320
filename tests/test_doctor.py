"""The doctor: its report with packages faked, and its exit code."""

import importlib
import inspect
import os
import subprocess
import sys
import types
from pathlib import Path

import jax
import pytest

import dsv4_jax
from dsv4_jax import doctor, platforms
from dsv4_jax.__main__ import main
from dsv4_jax.platforms import Target

GOOD = {
    "jax": "0.11.2",
    "jaxlib": "0.11.2",
    "numpy": "2.5.5",
    "ml_dtypes": "0.6.0",
    "jax-triton": "0.4.1",
    "triton": "3.8.0",
    "torch": "2.14.1",
    "nvidia-cutlass-dsl": "4.8.1",
    "flax": "0.12.12",
}
CORE = {name: GOOD[name] for name in ("jax", "jaxlib", "numpy", "ml_dtypes")}


@pytest.fixture
def report(monkeypatch, capsys):
    """Runs the doctor with these packages on this platform; returns its exit code and its words."""
    for name in ("DSV4_JAX_IMPLEMENTATION", "TRITON_INTERPRET"):
        monkeypatch.delenv(name, raising=False)

    def run(packages, platform="cpu", arch=None, torch_has_gpu=True):
        monkeypatch.setattr(platforms, "installed", packages.get)
        monkeypatch.setattr(platforms, "default_target", lambda: Target(platform, arch))
        monkeypatch.setattr(doctor, "_torch_has_gpu", lambda: torch_has_gpu)
        if platform != "cpu":  # there is none here to try the kernels on
            monkeypatch.setattr(doctor, "_failure", lambda *_: None)
        code = main(["doctor"])
        return code, capsys.readouterr().out

    return run


def rows(out):
    """Of each op: what the table says of xla, triton, cutedsl, and what the switch takes."""
    return {line.split()[0]: line.split()[1:] for line in out.splitlines() if line.split()[:1] and
            line.split()[0] in [op.name for op in doctor.ops()]}  # fmt: skip


def test_ops():
    public = (getattr(dsv4_jax, name) for name in dsv4_jax.__all__)
    choosing = [f.__name__ for f in public if callable(f) and "implementation" in inspect.signature(f).parameters]
    assert [op.name for op in doctor.ops()] == sorted(choosing) and len(choosing) == 14


def test_only_jax_and_numpy(report):
    code, out = report(CORE)
    assert code == 0 and "No problem found." in out
    assert all(row[:2] == ["yes", "no"] and row[3] == "xla" for row in rows(out).values())
    assert "triton is not installed; its interpreter needs triton and torch" in out
    versions = dict(line.split()[:2] for line in out.split("\n\n")[0].splitlines())
    assert versions["jax"] == "0.11.2" and versions["torch"] == versions["flax"] == "-"
    assert versions["python"] == ".".join(map(str, sys.version_info[:3]))


@pytest.mark.parametrize("platform", ["cuda", "rocm"])
def test_gpu(report, platform):
    code, out = report(GOOD, platform)
    assert code == 0 and "No problem found." in out
    table = rows(out)
    assert list(table) == [op.name for op in doctor.ops()]
    for row in table.values():
        assert row[:2] == ["yes", "yes"] and row[3] == "triton"
        assert row[2] == "-" or (row[2] == "yes") == (platform == "cuda")


def test_an_op_of_two_kernels(report):
    _, out = report(GOOD, "cuda", "sm_90")
    assert {op for op, row in rows(out).items() if row[3:] == ["triton,", "cutedsl"]} == {"compress"}
    assert "by compressor and size" in out
    _, out = report(GOOD, "cuda", "sm_100")
    assert all(len(row) == 4 for row in rows(out).values()) and "by compressor and size" not in out


def test_tpu(report):
    code, out = report(GOOD, "tpu")
    assert code == 0 and all(row[:2] == ["yes", "no"] for row in rows(out).values())


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"jax": "0.12.0.1", "jax-triton": "0.4.0"}, "jax 0.12.0.1 with jax-triton 0.4.0 are installed"),
        ({"triton": "3.6.0"}, "triton 3.6.0 with jax-triton 0.4.1 are installed"),
    ],
)
@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_bad_pairs(report, changed, said, platform):
    code, out = report(GOOD | changed, platform)
    assert code == 1 and f"PROBLEM  {said}" in out


@pytest.mark.parametrize("platform", ["cuda", "rocm"])
def test_torch_without_gpu(report, platform):
    code, out = report(GOOD, platform, torch_has_gpu=False)
    assert code == 1 and "PROBLEM  JAX has a GPU and torch has none" in out
    assert "torch has none" not in report(CORE, platform, torch_has_gpu=False)[1]
    assert "torch has none" not in report(GOOD, "cpu", torch_has_gpu=False)[1]


def test_cutlass_dsl_for_cuda_13(report):
    cuda13 = GOOD | {"jax-cuda13-plugin": "0.11.2"}
    code, out = report(cuda13, "cuda")
    assert code == 1 and "PROBLEM  JAX is for CUDA 13, CuTeDSL is not: pip install nvidia-cutlass-dsl-libs-cu13" in out
    assert "No problem found." in report(cuda13 | {"nvidia-cutlass-dsl-libs-cu13": "4.8.1"}, "cuda")[1]
    assert "No problem found." in report(GOOD | {"jax-cuda12-plugin": "0.11.2"}, "cuda")[1]


def test_without_jax(monkeypatch, capsys):
    monkeypatch.setattr(platforms, "installed", {"numpy": "2.5.5"}.get)
    monkeypatch.setitem(sys.modules, "jax", None)
    assert doctor.main() == 1
    out = capsys.readouterr().out
    assert "PROBLEM  JAX does not start: ModuleNotFoundError: import of jax halted" in out


def test_backend_that_does_not_start(monkeypatch, capsys):
    def fail():
        raise RuntimeError("Unable to initialize backend 'cuda': no driver\nand more")

    monkeypatch.setattr(jax, "default_backend", fail)
    assert main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "PROBLEM  JAX does not start: RuntimeError: Unable to initialize backend 'cuda': no driver" in out
    assert "and more" not in out


def test_xla_that_fails(report, monkeypatch):
    reference = importlib.import_module("dsv4_jax.common.reference.save_partial_states")

    def fail(*_, **__):
        raise RuntimeError("no compiler")

    jax.clear_caches()
    monkeypatch.setattr(reference, "store_states", fail)
    code, out = report(CORE)
    assert code == 1 and "PROBLEM  xla should run here but does not: RuntimeError: no compiler" in out


def test_default_implementation(report, monkeypatch):
    monkeypatch.setenv("DSV4_JAX_IMPLEMENTATION", "xla")
    code, out = report(CORE)
    assert code == 0 and "DSV4_JAX_IMPLEMENTATION=xla overrides the switch." in out


def test_bad_default_implementation(report, monkeypatch):
    monkeypatch.setenv("DSV4_JAX_IMPLEMENTATION", "cuda")
    assert "PROBLEM  DSV4_JAX_IMPLEMENTATION is 'cuda'" in report(CORE)[1]


@pytest.mark.parametrize(
    ("backend", "version", "want"),
    [("cpu", "", "cpu"), ("gpu", "cuda 13000", "cuda"), ("gpu", "rocm 70100", "rocm"), ("tpu", "", "tpu")],
)
def test_default_target(monkeypatch, backend, version, want):
    client = types.SimpleNamespace(platform_version=f"PJRT C API\n{version}")
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    monkeypatch.setattr(jax, "devices", lambda: [types.SimpleNamespace(client=client)])
    assert platforms.default_target().platform == want


def test_imports_nothing_optional(tmp_path):
    """With every optional package hidden, in a process of its own."""
    (tmp_path / "hide.py").write_text(
        "import runpy, sys\n"
        "for name in ('torch', 'triton', 'jax_triton', 'cutlass', 'flax', 'matplotlib', 'safetensors'):\n"
        "    sys.modules[name] = None\n"
        "sys.argv = ['dsv4_jax', 'doctor']\n"
        "runpy.run_module('dsv4_jax', run_name='__main__')\n"
    )
    root = Path(__file__).parent.parent
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"PYTHONPATH": str(root)}
    command = [sys.executable, tmp_path / "hide.py"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "No problem found." in done.stdout and not done.stderr


def test_bench_says_where_it_went(capsys):
    assert main(["bench", "--quick"]) == 2
    assert "python -m bench" in capsys.readouterr().err


def test_an_implementation_in_the_environment_that_cannot_run(report, monkeypatch):
    monkeypatch.setenv("DSV4_JAX_IMPLEMENTATION", "cutedsl")
    code, out = report(GOOD, "cpu")
    assert code == 1 and "PROBLEM  DSV4_JAX_IMPLEMENTATION is 'cutedsl', which cannot run on cpu" in out
