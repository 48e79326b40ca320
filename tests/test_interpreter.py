"""In Triton's interpreter, as the ops run it, narrowing rounds to nearest even as hardware does; widening is exact."""

import contextlib

import ml_dtypes
import numpy as np
import pytest
from conftest import HAS_GPU
from helpers import ops, oracle
from helpers.batches import random_batch

pytest.importorskip("torch", reason="Triton's interpreter needs torch, which is not installed")
pytestmark = pytest.mark.skipif(HAS_GPU, reason="with a GPU kernels run on it, not in the interpreter")


def narrow(values, to):
    """float32 to "bf16" or "fp8e4nv" by a kernel in the interpreter; returns the bits."""
    import torch
    import triton
    import triton.language as tl

    from dsv4_jax.common.ops.helpers import interpreter

    @triton.jit
    def kernel(x, out, N: tl.constexpr, TO: tl.constexpr):
        i = tl.arange(0, N)
        if TO == "bf16":
            tl.store(out + i, tl.load(x + i).to(tl.bfloat16).to(tl.int16, bitcast=True))
        else:
            tl.store(out + i, tl.load(x + i).to(tl.float8e4nv).to(tl.uint8, bitcast=True))

    kernel.fn.__globals__["tl"] = tl
    size = 1 << (len(values) - 1).bit_length()
    x = torch.from_numpy(np.resize(values, size).astype(np.float32))
    out = torch.zeros(size, dtype=torch.int16 if to == "bf16" else torch.uint8)
    with interpreter.correct_rounding():
        kernel[(1,)](x, out, N=size, TO=to)
    return out.numpy()[: len(values)].view(np.uint16 if to == "bf16" else np.uint8)


def neighborhoods(dtype, patterns):
    """Every finite value, the midpoints between neighbors, and the float32 on each side of those."""
    values = np.unique(patterns.view(dtype).astype(np.float32))
    values = values[np.isfinite(values)]
    middle = (values[1:].astype(np.float64) + values[:-1]) / 2
    middle = middle.astype(np.float32)
    points = np.concatenate([values, middle, np.nextafter(middle, np.inf), np.nextafter(middle, -np.inf)])
    return points.astype(np.float32)


def test_every_bf16_and_its_midpoints():
    points = neighborhoods(ml_dtypes.bfloat16, np.arange(1 << 16, dtype=np.uint16))
    np.testing.assert_array_equal(narrow(points, "bf16"), points.astype(ml_dtypes.bfloat16).view(np.uint16))


def test_every_fp8_and_its_midpoints():
    points = neighborhoods(ml_dtypes.float8_e4m3fn, np.arange(1 << 8, dtype=np.uint8))
    np.testing.assert_array_equal(narrow(points, "fp8e4nv"), points.astype(ml_dtypes.float8_e4m3fn).view(np.uint8))


@pytest.mark.parametrize("name", ["bfloat16", "float8_e4m3fn"])
def test_every_code_widens_exactly(name):
    import torch
    import triton
    import triton.language as tl

    from dsv4_jax.common.ops.helpers import interpreter

    @triton.jit
    def kernel(x, out, N: tl.constexpr):
        i = tl.arange(0, N)
        tl.store(out + i, tl.load(x + i).to(tl.float32))

    kernel.fn.__globals__["tl"] = tl
    dtype = getattr(ml_dtypes, name)
    codes = np.arange(2 ** (8 * np.dtype(dtype).itemsize)).astype(np.uint16 if name == "bfloat16" else np.uint8)
    x = torch.from_numpy(codes).view(getattr(torch, name))
    out = torch.zeros(len(codes), dtype=torch.float32)
    with interpreter.correct_rounding():
        kernel[(1,)](x, out, N=len(codes))
    np.testing.assert_array_equal(out.numpy(), codes.view(dtype).astype(np.float32))


def test_a_launch_leaves_triton_as_it_was():
    """The interpreter's own functions, and those of triton.language that it patches, also for a helper's helper."""
    import torch
    import triton
    import triton.language as tl
    from triton.runtime import interpreter as triton_interpreter

    from dsv4_jax.common.ops.helpers import interpreter

    @triton.jit
    def helper(x):
        return tl.sum(x, axis=0)  # written with triton.language.core, which the kernel's module does not name

    @triton.jit
    def kernel(x, out, N: tl.constexpr):
        tl.store(out, helper(tl.load(x + tl.arange(0, N))))

    kernel.fn.__globals__.update(tl=tl, helper=helper)
    owners = triton_interpreter, triton_interpreter.ReduceOps, tl, tl.core, tl.math, tl.tensor, tl.dtype
    before = [dict(vars(owner)) for owner in owners]
    for _ in range(2):
        out = torch.zeros(1)
        with interpreter.correct_rounding():
            assert triton_interpreter._convert_float is not before[0]["_convert_float"]
            kernel[(1,)](torch.arange(8.0), out, N=8)
        assert out.item() == 28
        assert [dict(vars(owner)) for owner in owners] == before


@pytest.mark.parametrize("axis", [0, 1])
def test_reductions_by_slices_give_what_the_interpreters_own_do(axis):
    import torch
    import triton
    import triton.language as tl

    from dsv4_jax.common.ops.helpers import interpreter

    @triton.jit
    def combine(a, b, c, d):
        return a * 0.5 + c, b - a * d  # neither commutes nor associates

    @triton.jit
    def kernel(x, y, out, ROWS: tl.constexpr, COLUMNS: tl.constexpr, AXIS: tl.constexpr):
        at = tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
        first, second = tl.reduce((tl.load(x + at), tl.load(y + at)), AXIS, combine)
        size: tl.constexpr = first.shape[0]
        tl.store(out + tl.arange(0, size), first)
        tl.store(out + size + tl.arange(0, size), second)

    kernel.fn.__globals__.update(tl=tl, combine=combine)
    x, y = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(0))
    found = []
    for context in (contextlib.nullcontext, interpreter.correct_rounding):
        out = torch.zeros(2 * (8, 4)[axis])
        with context():
            kernel[(1,)](x, y, out, ROWS=4, COLUMNS=8, AXIS=axis)
        found.append(out.numpy())
    np.testing.assert_array_equal(*found)
    assert np.count_nonzero(found[0]) == found[0].size


@pytest.mark.parametrize(
    ("kind", "ratio", "sizes"), [("csa", 4, [(3, 9), (6, 1), (0, 14)]), ("hca", 32, [(24, 8), (0, 33)])]
)
def test_weights_that_gpus_take_for_zero(kind, ratio, sizes, monkeypatch):
    """tl.exp2 has no subnormal results on GPUs. In the interpreter it has them or not, as the thread is set."""
    from triton.runtime.interpreter import InterpreterBuilder

    flushed = 0

    def exp2(x):
        nonlocal flushed
        flushed += np.count_nonzero((x < -126) & (x > -149))
        return np.where(x < -126, np.float32(0), np.exp2(x))

    monkeypatch.setattr(InterpreterBuilder, "create_exp2", lambda self, x: self.unary_op(x, exp2))
    config = ops.make_config(kind, "fp8_ds_mla", compress_ratio=ratio)  # HCA's windows shortened, to take seconds
    for seed in range(2):
        rng = np.random.default_rng(seed)
        batch = random_batch(rng, config, sizes=sizes, magnitudes=True)
        score = batch.kv_score[:, batch.width :]
        score[:] = 40 * rng.standard_normal(score.shape)  # weights of every size, and about the least float32
        _, cache = ops.compress(batch, implementation="triton")
        exact = ops.rows(batch, batch.state, from_batch=True)
        assert len(exact.slots)
        oracle.assert_same_cache(cache, batch.cache, exact, config)
    assert flushed > 100


def test_a_state_cache_without_pages():
    """Nothing is saved; a window that lies whole in the batch gets its key."""
    config = ops.make_config("hca", "bf16", compress_ratio=32)
    batch = random_batch(np.random.default_rng(0), config, sizes=[(0, 33)], padding=0, padded_requests=0)
    batch.state = batch.state[:0]
    state, cache = ops.compress(batch, implementation="triton")
    assert state.shape == batch.state.shape
    exact = ops.rows(batch, batch.state, from_batch=True)
    assert len(exact.slots) == 1
    oracle.assert_same_cache(cache, batch.cache, exact, config)
