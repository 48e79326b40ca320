"""torch_call, held to numpy: where it can be called, what the function is given, and updates in place."""

import functools
import signal
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.bridging import OwnError, Type, accumulate, assert_same_bytes, double, double_into, run_python, torch
from jax.experimental.layout import Format, Layout
from jax.sharding import Mesh, PartitionSpec

from bridge import to_torch, torch_call

# Where it can be called.


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit])
def test_call_in_and_out_of_jit(wrap):
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    np.testing.assert_array_equal(wrap(double)(jnp.asarray(x)), x * 2)


def test_numpy_argument():
    np.testing.assert_array_equal(double(np.float32([1, 2])), [2, 4])


def test_chain_mixed_with_jax_ops():
    @jax.jit
    def f(x):
        for _ in range(5):
            x = double(x + 1)
        return x

    expected = np.arange(8, dtype=np.float32)
    for _ in range(5):
        expected = (expected + 1) * 2
    np.testing.assert_array_equal(f(jnp.arange(8, dtype=jnp.float32)), expected)


def test_jit_replays_with_changed_inputs():
    f = jax.jit(double)
    for i in range(5):
        np.testing.assert_array_equal(f(jnp.full(4, i, jnp.float32)), np.full(4, 2 * i))


def test_scan():
    def body(cache, x):
        cache = accumulate(x, cache)
        return cache, double(cache)

    xs = np.arange(12, dtype=np.float32).reshape(4, 3)
    cache, ys = jax.jit(lambda xs: jax.lax.scan(body, jnp.zeros(3), xs))(xs)
    np.testing.assert_array_equal(cache, xs.sum(0))
    np.testing.assert_array_equal(ys, 2 * xs.cumsum(0))


def test_cond_and_map():
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    f = jax.jit(lambda p, x: jax.lax.cond(p, double, lambda x: x, x))
    np.testing.assert_array_equal(f(True, x), x * 2)
    np.testing.assert_array_equal(f(False, x), x)
    np.testing.assert_array_equal(jax.lax.map(double, x), x * 2)


def test_shard_map_calls_each_shard():
    mesh = Mesh(np.array(jax.devices()), ("d",))
    spec = PartitionSpec("d")
    x = np.arange(4 * mesh.size, dtype=np.float32)
    f = jax.jit(jax.shard_map(double, mesh=mesh, in_specs=spec, out_specs=spec))
    np.testing.assert_array_equal(f(x), x * 2)


def test_custom_vjp_makes_it_differentiable():
    @jax.custom_vjp
    def sin(x):
        return torch_call(torch.sin, x)

    sin.defvjp(lambda x: (sin(x), x), lambda x, g: (torch_call(lambda x, g: g * torch.cos(x), x, g),))
    x = np.linspace(0, 1, 5, dtype=np.float32)
    np.testing.assert_allclose(jax.grad(lambda x: sin(x).sum())(x), np.cos(x), rtol=1e-6)


def test_threads_at_once():
    f = jax.jit(lambda x: double(double(x)))
    xs = [np.full(100, i, np.float32) for i in range(32)]
    with ThreadPoolExecutor(8) as pool:
        for x, y in zip(xs, pool.map(f, xs), strict=True):
            np.testing.assert_array_equal(y, x * 4)


@pytest.mark.parametrize("platform", ["cuda", "rocm"])
def test_lowers_for_gpus_without_one(platform):
    text = jax.jit(double).trace(jnp.ones(3)).lower(lowering_platforms=(platform,)).as_text()
    assert "xla_buffer_python_gpu_callback_cmd_buffer" in text
    f = jax.jit(lambda x: torch_call(lambda x: x + 1, x))
    text = f.trace(jnp.ones(3)).lower(lowering_platforms=(platform,)).as_text()
    assert "gpu_callback" in text and "cmd_buffer" not in text


# What the function is given.


def test_order_is_inputs_outputs_scratch():
    def fn(a, b, first, second, scratch):
        assert [tuple(t.shape) for t in (a, b, first, second, scratch)] == [(1,), (2,), (3,), (4,), (5, 6)]
        assert scratch.dtype == torch.bfloat16 and second.dtype == torch.int32
        scratch.fill_(3)
        first.copy_(scratch[0, :3] + a)
        second.copy_(scratch[:4, 0])

    out = torch_call(
        fn,
        jnp.ones(1),
        jnp.ones(2),
        out_type={"a": Type((3,), jnp.float32), "b": [Type((4,), jnp.int32)]},
        scratch_type=Type((5, 6), jnp.bfloat16),
    )
    assert set(out) == {"a", "b"} and isinstance(out["b"], list)
    np.testing.assert_array_equal(out["a"], np.full(3, 4, np.float32))
    np.testing.assert_array_equal(out["b"][0], np.full(4, 3, np.int32))


def test_aliased_output_is_passed_as_the_input_only():
    def fn(x, cache, out, other):
        cache.add_(x)
        out.copy_(cache * 10)
        other.sub_(x)

    # Index 1 among the outputs is input 1, index 0 is fn's own to write.
    def call(x, cache, other):
        return torch_call(
            lambda x, cache, other, out: fn(x, cache, out, other),
            x,
            cache,
            other,
            out_type=(Type((3,), jnp.float32), Type((3,), jnp.float32), Type((3,), jnp.float32)),
            input_output_aliases={1: 1, 2: 2},
        )

    x, cache, other = jnp.ones(3), jnp.arange(3.0), jnp.arange(3.0) * 100
    for wrap in (lambda f: f, jax.jit):
        out, new, newer = wrap(call)(x, cache, other)
        np.testing.assert_array_equal(out, [10, 20, 30])
        np.testing.assert_array_equal(new, [1, 2, 3])
        np.testing.assert_array_equal(newer, [-1, 99, 199])
    np.testing.assert_array_equal(cache, [0, 1, 2])  # not donated, so untouched
    np.testing.assert_array_equal(other, [0, 100, 200])


def test_no_inputs():
    ones = torch_call(lambda out: out.fill_(1), out_type=Type((2, 2), jnp.int8))
    assert_same_bytes(ones, np.ones((2, 2), np.int8))


def test_partial_binds_static_values():
    def fn(x, *, power):
        return x**power

    x = np.arange(4, dtype=np.float32)
    np.testing.assert_array_equal(torch_call(functools.partial(fn, power=3), x), x**3)


def test_function_may_return_what_it_wrote():
    x = np.arange(4, dtype=np.float32)
    y = torch_call(lambda x, out: torch.exp(x, out=out), x, out_type=Type.like(jnp.asarray(x)))
    np.testing.assert_allclose(y, np.exp(x), rtol=1e-6)


def test_gradients_are_off_and_grad_mode_is_restored():
    weight = torch.nn.Parameter(torch.full((3,), 2.0, device=to_torch(jnp.zeros(1)).device))
    y = torch_call(lambda x, out: torch.mul(x, weight, out=out), jnp.ones(3), out_type=Type((3,), jnp.float32))
    np.testing.assert_array_equal(y, [2, 2, 2])
    np.testing.assert_array_equal(torch_call(lambda x: x * weight, jnp.ones(3)), [2, 2, 2])
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (3, 0, 2), (1, 1, 1)])
def test_scalars_and_empty_arrays(shape):
    x = np.ones(shape, np.float32)
    for f in (double, lambda x: torch_call(lambda x: x * 2, x), lambda x: accumulate(x, x)):
        assert_same_bytes(jax.jit(f)(x), x * 2)


def test_tensors_are_contiguous_whatever_the_layout():
    x = jnp.arange(12.0).reshape(3, 4)
    columns = jax.device_put(x, Format(Layout(major_to_minor=(1, 0)), x.sharding))

    def fn(x):
        assert x.is_contiguous()
        return x * 2

    np.testing.assert_array_equal(jax.jit(lambda x: torch_call(fn, x))(columns), np.arange(12.0).reshape(3, 4) * 2)
    np.testing.assert_array_equal(jax.jit(lambda x: torch_call(fn, x.T))(x), np.arange(12.0).reshape(3, 4).T * 2)


def test_inputs_are_not_modified():
    x = jnp.arange(5.0)
    accumulate(x, x), double(x), jax.jit(accumulate)(x, x)
    np.testing.assert_array_equal(x, np.arange(5.0))


def test_functions_are_not_kept_alive():
    import gc
    import weakref

    weights = torch.ones(3)
    alive = weakref.ref(weights)
    call = functools.partial(torch.mul, weights)
    torch_call(call, jnp.ones(3))
    del call, weights
    jax.clear_caches()
    gc.collect()
    assert alive() is None


# Inferred results.


def test_inferred_from_what_torch_compile_was_given():
    """Its compiled code reads memory, which fake tensors lack. In a process of its own, as this was a crash."""
    run_python("""
        import jax.numpy as jnp, torch, bridge
        compiled = torch.compile(torch.sin, backend="eager")
        compiled(torch.ones(3))
        assert jnp.allclose(bridge.torch_call(compiled, jnp.ones(3)), jnp.sin(1.0))
    """)


def test_inferred_structure():
    out = torch_call(lambda x: {"b": (x.sum(), x > 1), "a": [x.to(torch.bfloat16)]}, np.float32([1, 2]))
    assert_same_bytes(out["b"][0], np.float32(3))
    assert_same_bytes(out["b"][1], np.array([False, True]))
    assert_same_bytes(out["a"][0], np.array([1, 2], jnp.bfloat16))


def test_inferred_view_is_copied_out_as_shaped():
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    np.testing.assert_array_equal(torch_call(lambda x: x.T, x), x.T)
    np.testing.assert_array_equal(torch_call(lambda x: x[:, ::2].expand(4, 2, 2), x), np.stack([x[:, ::2]] * 4))


def test_inferred_with_scratch():
    def fn(x, scratch):
        torch.add(x, 1, out=scratch)
        return scratch * 2

    np.testing.assert_array_equal(torch_call(fn, jnp.ones(3), scratch_type=[Type((3,), jnp.float32)]), [4, 4, 4])


def test_inference_runs_once_for_each_type():
    calls = []

    def fn(x):
        calls.append(type(x).__name__)
        return x + 1

    for _ in range(3):
        torch_call(fn, jnp.ones(3))
    assert calls.count("FakeTensor") == 1
    torch_call(fn, jnp.ones(4))
    assert calls.count("FakeTensor") == 2


def test_only_functions_that_write_are_captured_unless_told():
    def captured(**kwargs):
        (eqn,) = jax.make_jaxpr(lambda x: torch_call(lambda x, *out: None if out else x, x, **kwargs))(1.0).eqns
        return eqn.params["capture"]

    out_type = Type((), jnp.float32)
    assert captured(out_type=out_type) and not captured()
    assert not captured(out_type=out_type, command_buffer_compatible=False) and captured(command_buffer_compatible=True)


def test_name_stands_in_the_jaxpr_and_the_hlo():
    f = functools.partial(torch_call, double_into, out_type=Type((3,), jnp.float32), name="my_kernel")
    assert "name=my_kernel" in str(jax.make_jaxpr(f)(jnp.ones(3)))
    assert "my_kernel" in jax.jit(f).lower(jnp.ones(3)).compile().as_text()


# Updates in place.


def step_chain(x, cache):
    for _ in range(3):
        cache = accumulate(x, cache)
    return cache


def step_fori(x, cache):
    return jax.lax.fori_loop(0, 3, lambda _, cache: accumulate(x, cache), cache)


def step_scan(x, cache):
    return jax.lax.scan(lambda cache, _: (accumulate(x, cache), None), cache, length=3)[0]


@pytest.mark.parametrize("step", [step_chain, step_fori, step_scan])
def test_donated_cache_is_updated_where_it_is(step):
    f = jax.jit(step, donate_argnums=1)
    x, cache = jnp.float32(2), jnp.ones((333, 77))
    compiled = f.lower(x, cache).compile()
    copies = [line for line in compiled.as_text().splitlines() if " copy" in line and "333,77" in line]
    assert not copies
    assert compiled.memory_analysis().temp_size_in_bytes < cache.nbytes
    address = cache.unsafe_buffer_pointer()
    for i in range(1, 4):
        cache = f(x, cache)
        assert cache.unsafe_buffer_pointer() == address
        np.testing.assert_array_equal(cache, np.full((333, 77), 1 + 6 * i, np.float32))


def test_live_cache_is_copied_first():
    x, cache = jnp.float32(2), jnp.ones(4)
    new, old = jax.jit(lambda x, cache: (accumulate(x, cache), cache * 1))(x, cache)
    np.testing.assert_array_equal(new, [3, 3, 3, 3])
    np.testing.assert_array_equal(old, [1, 1, 1, 1])


# Configurations of JAX, and other programs.


@pytest.mark.parametrize("option", ["jax_disable_jit", "jax_debug_nans", "jax_enable_x64"])
def test_configurations(option):
    before = getattr(jax.config, option)
    jax.config.update(option, True)
    try:
        f = jax.jit(jax.grad(lambda x: torch_call(torch.log, x, differentiable=True).sum()))
        np.testing.assert_array_equal(f(np.float32([1, 2])), [1, 0.5])
        if option == "jax_debug_nans":
            with pytest.raises(FloatingPointError, match="nan"):
                jax.jit(lambda x: torch_call(torch.log, x))(-jnp.ones(2)).block_until_ready()
        if option == "jax_enable_x64":
            assert_same_bytes(f(np.float64([4])), np.float64([0.25]))
    finally:
        jax.config.update(option, before)


def test_what_a_signal_raises_reaches_the_user():
    """Within a call, on the main thread, where Python runs its handlers; the program after it is well."""

    def handler(*_):
        raise OwnError("by a signal")

    def fn(x, out):
        signal.raise_signal(signal.SIGUSR1)
        out.copy_(x)

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        f = jax.jit(lambda x: torch_call(fn, x, out_type=Type.like(x), command_buffer_compatible=False))
        with pytest.raises(jax.errors.JaxRuntimeError, match="OwnError: by a signal"):
            f(jnp.ones(3)).block_until_ready()
        signal.signal(signal.SIGUSR1, lambda *_: None)
        np.testing.assert_array_equal(f(jnp.ones(3)), [1, 1, 1])
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_program_from_the_persistent_cache_calls_its_own_function(tmp_path):
    """Two programs that differ in nothing but the function: the second is read from the cache."""
    run_python(
        """
        import jax, jax.numpy as jnp
        from bridge import torch_call
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
        events = []
        jax.monitoring.register_event_listener(lambda event, **_: events.append(event.rpartition("/")[2]))
        def writes(value):
            return lambda out: out.fill_(value)
        for value in (1.0, 2.0):
            program = jax.jit(lambda: torch_call(writes(value), out_type=jax.ShapeDtypeStruct((), jnp.float32)))
            assert float(program()) == value
        assert events.count("cache_hits") == events.count("cache_misses") == 1, events
        """,
        JAX_COMPILATION_CACHE_DIR=str(tmp_path),
    )


# Imports.


def test_the_name_that_no_other_project_has():
    import bridge
    import dsv4_jax.bridge

    assert all(getattr(dsv4_jax.bridge, name) is getattr(bridge, name) for name in bridge.__all__)


def test_import_needs_no_torch():
    run_python("""
        import sys
        sys.modules["torch"] = None  # any import of it fails
        import bridge, jax.numpy as jnp
        for call in (lambda x: bridge.to_torch(x), lambda x: bridge.to_jax(x), lambda x: bridge.torch_call(abs, x)):
            try:
                call(jnp.ones(3))
            except ImportError as error:
                assert "bridge needs PyTorch" in str(error) and "pip install torch" in str(error), error
            else:
                raise AssertionError("no error")
    """)


def test_import_alone_loads_no_torch_and_starts_no_backend():
    run_python("""
        import sys, bridge
        assert "torch" not in sys.modules
        from jax._src import xla_bridge
        assert not xla_bridge.backends_are_initialized()
    """)
