"""Without a GPU Triton's kernels run in its interpreter, and tests marked `gpu` are skipped."""

import functools
import os
import sys

import jax
import pytest

sys.path.insert(0, os.path.dirname(__file__))

HAS_GPU = jax.default_backend() in ("gpu", "cuda", "rocm")
if not HAS_GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined, so before anything imports triton


def pytest_configure(config):
    config.addinivalue_line("markers", "gpu: needs a GPU that JAX can use")


@pytest.hookimpl(tryfirst=True)  # before -m is applied
def pytest_collection_modifyitems(items):
    if HAS_GPU:
        # Modules that say so hold the kernels to the same bytes on the GPU, so `-m gpu` takes them too.
        for item in items:
            if getattr(item.module, "GPU_TOO", False) and "implementation" in item.fixturenames:
                item.add_marker("gpu")
        return
    skip = pytest.mark.skip(reason=f"needs a GPU; JAX's default backend is {jax.default_backend()!r}")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


@pytest.fixture(params=["xla", "triton"])
def implementation(request):
    """Each implementation that runs on every platform; Triton's on the CPU through its interpreter."""
    if request.param == "triton":
        pytest.importorskip("triton", reason="triton is not installed")
        if not HAS_GPU:
            pytest.importorskip("torch", reason="Triton's interpreter needs torch, which is not installed")
    return request.param


@pytest.fixture
def compiled_kernels(monkeypatch):
    """The keys of the CuTeDSL kernels that are compiled from here on, for a GPU that is not there; none really is."""
    pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
    pytest.importorskip("torch", reason="the bridge needs torch")
    from dsv4_jax.nvidia.ops.helpers import launch

    keys = []

    @functools.cache
    def compiled(kernel, shape, arch):
        keys.append((kernel.__name__, shape, arch))

    monkeypatch.setattr(launch, "load_kernel", compiled)
    monkeypatch.setenv("CUTE_DSL_ARCH", "sm_90a")
    return keys
