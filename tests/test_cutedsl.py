"""The CuTeDSL kernels without a GPU: compiled for every target, their key, their names, their errors."""

import ctypes
import dataclasses
import functools
import os
import re
import subprocess
import sys
import threading
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import ops
from helpers.batches import random_batch

from dsv4_jax import CompressorConfig, CompressorMetadata, platforms
from dsv4_jax.api import compress as compress_api
from dsv4_jax.nvidia.ops import compress
from dsv4_jax.platforms import Target

ROOT = Path(__file__).parent.parent
HAS_CUDA = jax.default_backend() in ("gpu", "cuda")


def traced(
    kind="csa", fmt="fp8_ds_mla", *,
    dtype="float32", norm="float32", save="tail", page_rows=None, tokens=256, requests=1,
):  # fmt: skip
    """Traces `compress` as it is lowered for CUDA; all requests but the first have one token."""
    config = ops.make_config(kind, fmt, page_rows)

    def make():
        lengths = jnp.ones(requests, jnp.int32).at[0].set(tokens - requests + 1)
        metadata = CompressorMetadata.build(
            config, jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(lengths)]), lengths,
            jnp.zeros((requests, 64), jnp.int32), jnp.zeros((requests, 8), jnp.int32),
            num_tokens=tokens,
        )  # fmt: skip
        return (
            jnp.zeros((tokens, 2 * config.width), dtype),
            jnp.zeros((config.compress_ratio, config.width)),
            jnp.zeros((tokens // 64, config.page_rows, 2 * config.width)),
            config.format.allocate(tokens // 16, config.kv_page_rows),
            metadata,
            jnp.ones(config.head_dim, norm),
            jnp.zeros((tokens, 64)),
            jnp.float32(1) if config.format.needs_scale else None,
        )

    call = functools.partial(compress.implement, config=config, save=save)
    return jax.make_jaxpr(call)(*jax.eval_shape(make))


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_every_kernel_compiles(arch):
    """And takes packed arguments."""
    pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT), "CUTE_DSL_ARCH": arch}
    done = subprocess.run(
        [sys.executable, "tests/helpers/compile_cutedsl.py"], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.endswith("23 kernels compiled\n"), done.stdout


def test_numbers_of_tokens_and_pages_are_not_in_the_key(compiled_kernels):
    for tokens in (256, 512, 1024):
        traced(tokens=tokens)
    assert len(compiled_kernels) == 1


@pytest.mark.parametrize(
    ("kind", "dtype", "save", "tokens", "kernel", "resident"),
    [
        ("hca", "bfloat16", "tail", 8192, "_long_windows", 2),
        ("hca", "bfloat16", "tail", 16384, "prefill_windows", 3),
        ("hca", "float32", "tail", 49152, "prefill_windows", 3),
        ("hca", "float32", "tail", 65536, "prefill_windows", 4),
        ("hca", "float32", "all", 65536, "_long_windows", 3),
        ("csa", "bfloat16", "tail", 4096, "_short_windows", 4),
        ("csa", "bfloat16", "tail", 8192, "prefill_windows", 4),
        ("csa", "bfloat16", "all", 8192, "_short_windows", 4),
        ("csa", "float32", "tail", 65536, "_short_windows", 4),
    ],
)
def test_the_kernel_of_so_many_windows(kind, dtype, save, tokens, kernel, resident, compiled_kernels):
    traced(kind, dtype=dtype, save=save, tokens=tokens)
    assert [(name, shape.resident) for name, shape, _ in compiled_kernels] == [(kernel, resident)]


@pytest.mark.parametrize(("tokens", "requests"), [(32768, 32768), (32768, 300), (2048, 500), (16384 - 128, 50)])
def test_entries_that_may_close_no_window_do_not_make_a_long_prefill(tokens, requests, compiled_kernels):
    traced("hca", tokens=tokens, requests=requests)
    assert [name for name, *_ in compiled_kernels] == ["_long_windows"]


@pytest.mark.parametrize(
    "change",
    [
        {"kind": "hca"}, {"fmt": "bf16"}, {"fmt": "fp8"}, {"dtype": "bfloat16"}, {"norm": "bfloat16"}, {"save": "all"},
        {"page_rows": 3},
    ],
    ids=str,
)  # fmt: skip
def test_what_is_in_the_key(change, compiled_kernels):
    traced()
    traced(**change)
    traced()
    assert len(compiled_kernels) == 2


def test_the_target_is_in_the_key(compiled_kernels, monkeypatch):
    traced()
    monkeypatch.setenv("CUTE_DSL_ARCH", "sm_100a")
    traced()
    assert [arch for *_, arch in compiled_kernels] == ["sm_90a", "sm_100a"]


def test_one_launch(compiled_kernels):
    for kind in ("csa", "hca"):
        assert str(traced(kind)).count("= torch_call[") == 1


@pytest.fixture(scope="module")
def shape():
    """The key of a CSA kernel."""
    pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
    from dsv4_jax.nvidia.ops.helpers import launch

    return launch.Shape(
        ratio=4, window=8, head_dim=512, width=1024, rope_dim=64, eps=1e-6, page_rows=4, kv_page_rows=64, format="bf16",
        page_bytes=64 * 1024, dtype="float32", norm_dtype="float32", save="tail", resident=4,
    )  # fmt: skip


def test_threads_that_compile_at_once(shape):
    from dsv4_jax.nvidia.ops import compress
    from dsv4_jax.nvidia.ops.helpers import launch

    kernel = compress._short_windows
    shapes = [shape, dataclasses.replace(shape, dtype="bfloat16")] * 2
    together = threading.Barrier(len(shapes))

    def compiled(shape):
        together.wait()
        return launch.compile_kernel(kernel, shape, "sm_90a")

    with ThreadPoolExecutor(len(shapes)) as pool:
        found = list(pool.map(compiled, shapes))
    assert found[0] is found[2] and found[1] is found[3], "compiled twice"
    assert found[0] is not found[1]


# Arguments in the kernel's order: 13 addresses, 7 numbers.
NAMES, NUMBERS = ("kv_cache", "closing", "kv_scale"), (("blocks", 5), ("tokens", 9))


def passed(kv_cache, closing, kv_scale, stream):
    return [[closing, 0, 0, 0, 0, 0, 0, 0, kv_cache, 0, 0, kv_scale, 0, 9, 0, 0, 0, 0, 0, 5], [stream]]


def launched_on_threads(shape, monkeypatch, call):
    """What a launch hands its compiled function in each of four threads that `call` it at once, on streams 0 to 3."""
    torch = pytest.importorskip("torch")
    from dsv4_jax.nvidia.ops.helpers import launch

    calls, of_thread, together = [], threading.local(), threading.Barrier(4)

    def function(*arguments):
        pointers = [argument.__c_pointers__() for argument in arguments]
        calls.append([[ctypes.c_int64.from_address(p.value).value for p in values] for values in pointers])

    monkeypatch.setattr(launch, "load_kernel", lambda *key: function)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: types.SimpleNamespace(cuda_stream=of_thread.stream))
    one = launch.Launch(launch.compile_kernel, shape, "sm_90a", NAMES, NUMBERS)

    def work(stream):
        of_thread.stream = stream
        together.wait()
        call(one, stream)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    return calls


class Tensor:
    def __init__(self, address):
        self.data_ptr = lambda: address


def test_what_a_launch_passes(shape, monkeypatch):
    def call(launch, stream):
        for address in (2**47 + 16, 7):
            launch(Tensor(address), Tensor(stream), Tensor(2**63 - 1))
        for few_or_many in ((Tensor(1),) * 2, (Tensor(1),) * 4):
            with pytest.raises(ValueError, match="zip"):
                launch(*few_or_many)

    calls = launched_on_threads(shape, monkeypatch, call)
    expected = [passed(address, stream, 2**63 - 1, stream) for stream in range(4) for address in (7, 2**47 + 16)]
    assert sorted(calls) == sorted(expected)


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (CompressorConfig.indexer(), r"head_dim 512.*this compressor has 128.*'triton'"),
        (dataclasses.replace(CompressorConfig.hca(), compress_ratio=512), r"up to 256 rows.*has 512.*'triton'"),
        (CompressorConfig.hca(state="online"), r"no online state.*'triton'"),
        (CompressorConfig.csa(), None),
        (CompressorConfig.hca("bf16"), None),
    ],
    ids=["indexer", "long window", "online", "csa", "hca"],
)
def test_which_compressors_are_served(config, why):
    said = compress_api.OP.why_not("cutedsl", Target("cuda", "sm_90"), config=config, save="tail")
    assert said is None if why is None else re.search(why, said)


def test_missing_cutlass_is_named(monkeypatch):
    monkeypatch.setattr(platforms, "installed", lambda package: None)
    assert re.search(r"nvidia-cutlass-dsl is not installed.*'triton'", platforms.why_not("cutedsl", Target("cuda")))


def test_broken_cutlass_is_named(monkeypatch, tmp_path):
    package = tmp_path / "cutlass"
    package.mkdir()
    (package / "__init__.py").write_text("raise OSError('libcudart.so.13: cannot open')")
    for name in [name for name in sys.modules if name.partition(".")[0] == "cutlass"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(platforms, "_cutlass_import_error", platforms._cutlass_import_error.__wrapped__)
    why = platforms.why_not("cutedsl", Target("cuda"))
    assert re.search(r"OSError: libcudart\.so\.13.*cu13.*CUDA 13.*'triton'", why)


@pytest.mark.skipif(HAS_CUDA, reason="runs there")
@pytest.mark.parametrize("call", [ops.compress, ops.store], ids=["compress", "compress_norm_rope_store"])
def test_not_on_the_cpu(call):
    batch = random_batch(np.random.default_rng(0), CompressorConfig.csa(), requests=1, tokens=8)
    arguments = (batch,) if call is ops.compress else (batch, batch.state)
    with pytest.raises(NotImplementedError, match=r"NVIDIA GPUs only, not on cpu"):
        call(*arguments, implementation="cutedsl")
