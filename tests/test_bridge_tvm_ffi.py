"""Kernels that are launched through TVM-FFI inside torch_call run on XLA's stream (`pip install apache-tvm-ffi`)."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.bridging import Type, torch

from bridge import torch_call

tvm_ffi = pytest.importorskip("tvm_ffi", reason="apache-tvm-ffi is not installed")


@functools.cache
def compiled_add():
    """`(x, y)`: y = x + 1 for 4096 float32, a CuTeDSL kernel behind TVM-FFI, which chooses the stream itself."""
    cutlass = pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
    import cutlass.cute as cute
    from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream

    @cute.kernel
    def add_kernel(x: cute.Tensor, y: cute.Tensor):
        i = cute.arch.block_idx()[0] * 256 + cute.arch.thread_idx()[0]
        y[i] = x[i] + 1.0

    @cute.jit
    def add(x: cute.Tensor, y: cute.Tensor, stream):
        add_kernel(x, y).launch(grid=[16, 1, 1], block=[256, 1, 1], stream=stream)

    fake = make_fake_compact_tensor(cutlass.Float32, (4096,))
    return cute.compile(add, fake, fake, make_fake_stream(use_tvm_ffi_env_stream=True), options="--enable-tvm-ffi")


@pytest.mark.gpu
def test_gpu_tvm_ffi_sees_xlas_stream():
    seen = []

    def note(tensor):
        seen.append((tvm_ffi.get_raw_stream(tensor.device), torch.cuda.current_stream().cuda_stream))

    noted = tvm_ffi.convert(note)

    def fn(x, out):
        noted(out)
        torch.add(x, 1, out=out)

    f = functools.partial(torch_call, fn, out_type=Type((4,), jnp.float32), command_buffer_compatible=False)
    np.testing.assert_array_equal(jax.jit(f)(jnp.zeros(4)), np.ones(4))
    default = torch.cuda.default_stream().cuda_stream
    assert seen and all(theirs == ours != default for theirs, ours in seen)


@pytest.mark.gpu
@pytest.mark.parametrize("captured", [False, True])
def test_gpu_tvm_ffi_kernels_are_ordered_with_xlas_work(captured):
    add = compiled_add()

    def fn(x, out):
        add(x, out)

    @jax.jit
    def f(x, square):
        for _ in range(8):
            square = jax.lax.fori_loop(0, 20, lambda _, s: s @ s / s.shape[0], square)  # the kernel must wait for it
            x = torch_call(fn, x * square[0, 0], out_type=Type.like(x), command_buffer_compatible=captured)
        return x

    x = np.arange(4096, dtype=np.float32)
    for _ in range(5):
        np.testing.assert_array_equal(f(x, jnp.ones((1024, 1024))), x + 8)
