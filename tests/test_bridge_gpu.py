"""The bridge on a GPU: addresses, streams and command buffers. test_bridge_dtypes.py has its dtypes."""

import functools
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.bridging import OwnError, Type, double, torch

from bridge import to_jax, to_torch, torch_call


@pytest.mark.gpu
def test_gpu_tensors_are_xla_buffers_on_xla_stream():
    seen = {}

    def fn(x, cache, out):
        seen.update(x=x.data_ptr(), cache=cache.data_ptr(), out=out.data_ptr(), device=x.device)
        seen.update(stream=torch.cuda.current_stream(), current=torch.cuda.current_device())
        cache.add_(x)
        torch.mul(cache, 2, out=out)

    @functools.partial(jax.jit, donate_argnums=1)
    def f(x, cache):
        like = Type.like(x)
        return torch_call(
            fn, x, cache, out_type=(like, like), input_output_aliases={1: 0}, command_buffer_compatible=False
        )

    x, cache = jnp.arange(4096.0), jnp.ones(4096)
    addresses = x.unsafe_buffer_pointer(), cache.unsafe_buffer_pointer()
    new, out = f(x, cache)  # jit gives a donated buffer to the first result of its type
    assert (seen["x"], seen["cache"]) == addresses
    assert new.unsafe_buffer_pointer() == addresses[1] and out.unsafe_buffer_pointer() == seen["out"]
    assert seen["device"].type == "cuda" and seen["device"].index == seen["current"]
    assert seen["stream"] != torch.cuda.default_stream()
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    np.testing.assert_array_equal(new, np.arange(4096.0) + 1)
    np.testing.assert_array_equal(out, (np.arange(4096.0) + 1) * 2)


@pytest.mark.gpu
def test_gpu_command_buffer_replays_without_python():
    calls = []

    def fn(x, state):
        calls.append(torch.cuda.is_current_stream_capturing())
        state.mul_(3).add_(x)

    @functools.partial(jax.jit, donate_argnums=1)
    def f(x, state):
        for _ in range(20):
            state = torch_call(fn, x, state, out_type=Type.like(state), input_output_aliases={1: 0})
        return state

    x = np.arange(4096, dtype=np.int32)
    expected = np.ones(4096, np.int32)
    state, x_device = jnp.asarray(expected), jnp.asarray(x)
    counts = []
    for _ in range(10):  # the state stays where it is and changes each time
        state = f(x_device, state)
        for _ in range(20):
            expected = expected * 3 + x
        np.testing.assert_array_equal(state, expected)
        counts.append(len(calls))
    assert any(calls), "never recorded"
    assert all(count % 20 == 0 for count in counts)
    assert counts[-1] == counts[4], f"Python ran in replays: {counts}"


@pytest.mark.gpu
def test_gpu_order_with_work_before_and_after():
    @jax.jit
    def f(x):
        for _ in range(8):
            x = jax.lax.fori_loop(0, 20, lambda _, x: x @ x / x.shape[0], x)
            x = double(x) / 2 + 0
        return x

    x = jnp.ones((1024, 1024))
    np.testing.assert_array_equal(f(x), np.ones((1024, 1024)))


@pytest.mark.gpu
def test_gpu_scratch():
    def fn(x, out, scratch):
        torch.cumsum(x, 0, out=scratch)
        torch.mul(scratch, 2, out=out)

    f = jax.jit(lambda x: torch_call(fn, x, out_type=Type.like(x), scratch_type=Type.like(x)))
    for i in range(3):
        x = np.arange(1000, dtype=np.float32) % (7 + i)
        np.testing.assert_array_equal(f(x), x.cumsum() * 2)


@pytest.mark.gpu
def test_gpu_eager_pair_is_zero_copy_and_ordered():
    slow = jax.jit(lambda x: jax.lax.fori_loop(0, 200, lambda _, x: x @ x / x.shape[0], x))
    x = slow(jnp.ones((2048, 2048)))
    tensor = to_torch(x)  # must not see x before it is computed
    y = tensor + 1
    assert tensor.data_ptr() == x.unsafe_buffer_pointer()
    assert bool((y == 2).all())
    with torch.cuda.stream(torch.cuda.Stream()):
        z = torch.ones(2048, 2048, device="cuda")
        for _ in range(200):
            z = z @ z / 2048
        array = to_jax(z)  # must not see z before it is computed
        assert array.unsafe_buffer_pointer() == z.data_ptr()
        np.testing.assert_array_equal(array * 3, np.full((2048, 2048), 3, np.float32))


@pytest.mark.gpu
def test_gpu_exception_does_no_harm():
    def fn(x, out):
        raise OwnError("raised on the GPU")

    bad = jax.jit(lambda x: torch_call(fn, x, out_type=Type.like(x)))
    for _ in range(2):
        with pytest.raises(jax.errors.JaxRuntimeError, match="OwnError: raised on the GPU"):
            bad(jnp.ones(3)).block_until_ready()
        assert torch.cuda.current_stream() == torch.cuda.default_stream()
        np.testing.assert_array_equal(jax.jit(double)(jnp.ones(3)), [2, 2, 2])


@pytest.mark.gpu
def test_gpu_exception_in_a_command_buffer_does_no_harm():
    fails = True

    def fn(x, out):
        if fails:
            raise OwnError("while the graph was recorded")
        torch.add(x, 1, out=out)

    @jax.jit
    def f(x):
        for _ in range(8):
            x = torch_call(fn, x, out_type=Type.like(x))
        return x

    for _ in range(3):
        with pytest.raises(jax.errors.JaxRuntimeError, match="OwnError: while the graph was recorded"):
            f(jnp.ones(3)).block_until_ready()
        np.testing.assert_array_equal(jax.jit(double)(jnp.ones(3)), [2, 2, 2])
    fails = False
    for _ in range(3):
        np.testing.assert_array_equal(f(jnp.ones(3)), [9, 9, 9])


@pytest.mark.gpu
def test_gpu_threads_keep_their_own_streams():
    x = np.arange(4096, dtype=np.float32)

    def work(i):
        mine = torch.cuda.Stream()
        with torch.cuda.stream(mine):
            f = jax.jit(lambda x: double(double(x + i)))
            found = [np.asarray(f(x)) for _ in range(20)]
            assert torch.cuda.current_stream() == mine and torch.is_grad_enabled()
        return found

    with ThreadPoolExecutor(6) as pool:
        for i, found in enumerate(pool.map(work, range(6))):
            for y in found:
                np.testing.assert_array_equal(y, (x + i) * 4)
