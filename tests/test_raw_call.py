"""raw_call: functions of addresses, read and written on the CPU."""

import ctypes
import functools
import gc
import itertools
import signal
import weakref
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.bridging import OwnError, Type, assert_same_bytes, copy_bytes, on_cpu_only, run_python

from bridge import _call, _run, raw_call


def add_one(stream, address):
    ctypes.c_int32.from_address(address).value += 1


@on_cpu_only
def test_raw_call_order_and_scratch():
    def fn(stream, a, b, c, first, scratch):
        assert len({a, b, c, first, scratch}) == 5
        ctypes.memmove(scratch, b, 8)
        ctypes.memmove(first, scratch, 8)
        ctypes.memmove(c, a, 4)

    one, two = Type((1,), np.int32), Type((2,), np.int32)
    inputs = np.int32([1]), np.int32([2, 3]), np.int32([4])
    out = raw_call(fn, *inputs, out_type={"x": two, "y": one}, input_output_aliases={2: 1}, scratch_type=two)
    np.testing.assert_array_equal(out["x"], [2, 3])
    np.testing.assert_array_equal(out["y"], [1])


@on_cpu_only
@pytest.mark.parametrize("loop", ["chain", "scan"])
def test_raw_call_updates_in_place(loop):
    def once(x):
        return raw_call(add_one, x, out_type=Type.like(x), input_output_aliases={0: 0})

    @functools.partial(jax.jit, donate_argnums=0)
    def run(x):
        if loop == "chain":
            return once(once(once(x)))
        return jax.lax.scan(lambda x, _: (once(x), None), x, length=3)[0]

    x = jnp.array(5, jnp.int32)
    kept = x + 0
    address = x.unsafe_buffer_pointer()
    y = run(x)
    assert y.unsafe_buffer_pointer() == address
    assert int(y) == 8
    assert int(once(kept)) == 6 and int(kept) == 5  # not donated, so copied first


@on_cpu_only
@pytest.mark.parametrize("shape", [(), (0,), (0, 3)])
def test_raw_call_of_scalars_and_empty_arrays(shape):
    x = np.ones(shape, np.float32)
    assert_same_bytes(jax.jit(lambda x: raw_call(copy_bytes(x.nbytes), x, out_type=Type.like(x)))(x), x)


def test_raw_call_may_return_nothing_only():
    with pytest.raises(jax.errors.JaxRuntimeError, match="raw_call: <lambda> returned a int, which would be lost"):
        raw_call(lambda *_: 3, jnp.ones(3), out_type=Type((3,), jnp.float32)).block_until_ready()


def test_raw_call_exceptions_reach_the_user():
    def fn(*_):
        raise OwnError("of fn's own")

    call = jax.jit(lambda x: raw_call(fn, x, out_type=Type.like(x), command_buffer_compatible=False))
    for _ in range(2):
        with pytest.raises(jax.errors.JaxRuntimeError, match=r"(?s)in fn.*OwnError: of fn's own"):
            call(jnp.ones(3)).block_until_ready()


@pytest.mark.parametrize(
    ("kwargs", "error", "match"),
    [
        ({"fn": 3}, TypeError, "raw_call: fn is a int; it must be callable"),
        ({"args": [3]}, TypeError, "raw_call: argument 0 of add_one is a int"),
        ({"out_type": 3}, TypeError, "raw_call: out_type is 3; it must be a jax.ShapeDtypeStruct"),
        ({"out_type": None}, ValueError, "raw_call: add_one has no outputs"),
        ({"out_type": Type((3,), jnp.int4)}, TypeError, "raw_call: out_type has dtype int4"),
        ({"scratch_type": 3}, TypeError, "raw_call: scratch_type is 3"),
        ({"input_output_aliases": {0: 2}}, ValueError, "raw_call: input_output_aliases names output 2"),
        ({"command_buffer_compatible": None}, TypeError, "raw_call: command_buffer_compatible is None"),
        ({"name": 3}, TypeError, "raw_call: name is a int"),
    ],
)
def test_raw_call_bad_arguments(kwargs, error, match):
    good = {"fn": add_one, "args": [jnp.ones(3)], "out_type": Type((3,), jnp.float32)} | kwargs
    with pytest.raises(error, match=match):
        raw_call(good.pop("fn"), *good.pop("args"), **good)


def test_raw_call_is_captured_unless_told():
    for options, captured in (({}, True), ({"command_buffer_compatible": False}, False)):
        f = jax.jit(functools.partial(raw_call, add_one, out_type=Type((3,), jnp.float32), **options))
        text = f.trace(jnp.ones(3)).lower(lowering_platforms=("cuda",)).as_text()
        assert ("gpu_callback_cmd_buffer" in text) == captured
    with pytest.raises(NotImplementedError, match=r"raw_call of add_one cannot be batched"):
        jax.vmap(lambda x: raw_call(add_one, x, out_type=Type.like(x)))(jnp.ones(3))


def test_raw_call_needs_no_torch():
    run_python("""
        import ctypes, sys
        sys.modules["torch"] = None
        import bridge, jax, jax.numpy as jnp
        for dtype in (jnp.float32, jnp.float8_e4m3fn):
            x = jnp.arange(8.0).astype(dtype)
            def copy(stream, source, target):
                ctypes.memmove(target, source, x.nbytes)
            assert (jax.jit(lambda x: bridge.raw_call(copy, x, out_type=x))(x) == x).all()
    """)


# How the addresses are found.


@on_cpu_only
def test_raw_call_asks_dlpack_at_the_first_run_only(monkeypatch):
    asked, ask = [], _run._dlpack_address
    monkeypatch.setattr(_run, "_dlpack_address", lambda buffer: asked.append(1) or ask(buffer))
    x = jnp.arange(6, dtype=jnp.int32)
    f = jax.jit(lambda x: raw_call(copy_bytes(24), x, out_type=Type.like(x)))
    for i in range(4):
        np.testing.assert_array_equal(f(x + i), np.arange(6) + i)
    assert len(asked) == 2


@on_cpu_only
def test_raw_call_of_a_jaxlib_whose_buffers_are_not_understood(monkeypatch):
    monkeypatch.setattr(_run, "_words_by_hash", lambda buffers: False)
    test_raw_call_order_and_scratch()
    test_raw_call_of_scalars_and_empty_arrays((0, 3))


@on_cpu_only
def test_raw_call_of_a_jax_without_a_list_of_callbacks(monkeypatch):
    hidden = lambda x, name, *default: default[0] if name == "host_callbacks" else getattr(x, name, *default)
    monkeypatch.setattr(_call, "getattr", hidden, raising=False)
    test_raw_call_order_and_scratch()
    test_raw_call_may_return_nothing_only()


class Buffer:
    """Has the address of what stands for its data, an object, in the field `data`."""

    __slots__ = ("data", "dtype", "shape")

    def __init__(self, data, dtype=None, shape=None):
        self.data, self.dtype, self.shape = data, dtype or object(), shape or object()

    def __dlpack__(self):
        return id(self.data)


class Hashed(Buffer):
    __slots__ = ()

    def __hash__(self):
        return 12345


def test_the_field_with_the_address_is_found_or_not_used(monkeypatch):
    monkeypatch.setattr(_run, "_dlpack_address", Buffer.__dlpack__)
    several = [Buffer(object()) for _ in range(5)]
    words = _run._words_by_hash(tuple(several[:3]))
    assert [words[hash(buffer)] for buffer in several] == [id(buffer.data) for buffer in several]
    first, second = object(), object()
    assert _run._words_by_hash((Buffer(first, dtype=first),)) is False  # it may be in either
    assert _run._words_by_hash((Buffer(first, dtype=first), Buffer(second, shape=second)))
    monkeypatch.setattr(_run, "_dlpack_address", lambda buffer: id(buffer.data) + 1)
    assert _run._words_by_hash(tuple(several)) is False
    monkeypatch.setattr(_run, "_dlpack_address", lambda buffer: 0)
    assert _run._words_by_hash(tuple(several)) is False  # of empty arrays, perhaps


def test_no_memory_is_read_where_a_hash_is_no_address(monkeypatch):
    monkeypatch.setattr(_run, "_dlpack_address", Buffer.__dlpack__)
    monkeypatch.setattr(_run, "_every_other_word", lambda start: pytest.fail("read"))
    assert _run._words_by_hash((Buffer(object()), Hashed(object()))) is False


@on_cpu_only
@pytest.mark.parametrize("empty", range(3))
def test_raw_call_order_with_aliases_and_empty_arrays(empty):
    """Two inputs are updated in place, in the other order; one of the three arrays has no elements."""
    sizes = [0 if i == empty else 8 + i for i in range(3)]
    inputs = [np.arange(size, dtype=np.uint8) + 10 * i for i, size in enumerate(sizes)]

    def fn(stream, first, second, third, out, scratch):
        for address, size in zip((first, third), (sizes[0], sizes[2]), strict=True):
            for i in range(size):
                ctypes.c_uint8.from_address(address + i).value += 100
        ctypes.memmove(scratch, second, sizes[1])
        ctypes.memmove(out, scratch, sizes[1])

    types = [Type(x.shape, x.dtype) for x in inputs]
    third, second, first = jax.jit(
        lambda *xs: raw_call(
            fn, *xs, out_type=types[::-1], input_output_aliases={0: 2, 2: 0}, scratch_type=Type((16,), np.uint8)
        )
    )(*inputs)
    for actual, expected in ((first, inputs[0] + 100), (second, inputs[1]), (third, inputs[2] + 100)):
        assert_same_bytes(actual, expected)


# Programs and threads.


@on_cpu_only
def test_raw_call_on_threads_at_once():
    """Each thread has programs of its own, and one that all share."""
    shared = jax.jit(lambda x: raw_call(copy_bytes(800), x, out_type=Type.like(x)))

    def work(i):
        own = jax.jit(lambda x: raw_call(copy_bytes(800), x, out_type=Type.like(x)) + i)
        xs = [np.full(200, 100 * i + j, np.float32) for j in range(30)]
        return [(x + i, np.asarray(own(shared(x)))) for x in xs]

    with ThreadPoolExecutor(8) as pool:
        for expected, actual in itertools.chain.from_iterable(pool.map(work, range(8))):
            np.testing.assert_array_equal(actual, expected)


@on_cpu_only
def test_raw_call_function_lives_as_long_as_its_programs():
    def make():
        copy = copy_bytes(12)
        return jax.jit(lambda x: raw_call(copy, x, out_type=Type.like(x))).lower(jnp.ones(3)).compile(), copy

    compiled, copy = make()
    alive = weakref.ref(copy)
    del copy
    jax.clear_caches()
    gc.collect()
    np.testing.assert_array_equal(compiled(jnp.arange(3.0)), [0, 1, 2])
    del compiled
    jax.clear_caches()
    gc.collect()
    assert alive() is None


def test_xla_calls_the_bridge_and_not_through_jax():
    def fn(*_):
        raise OwnError

    with pytest.raises(jax.errors.JaxRuntimeError, match="OwnError") as caught:
        raw_call(fn, jnp.ones(3), out_type=Type((3,), jnp.float32)).block_until_ready()
    assert "_run.py" in str(caught.value) and "buffer_callback.py" not in str(caught.value)


@on_cpu_only
def test_what_a_signal_raises_reaches_the_user():
    """Within a call, on the main thread, where Python runs its handlers; the program after it is well."""

    def handler(*_):
        raise OwnError("by a signal")

    def fn(stream, source, target):
        signal.raise_signal(signal.SIGUSR1)
        ctypes.memmove(target, source, 12)

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        f = jax.jit(lambda x: raw_call(fn, x, out_type=Type.like(x)))
        with pytest.raises(jax.errors.JaxRuntimeError, match="OwnError: by a signal"):
            f(jnp.ones(3)).block_until_ready()
        signal.signal(signal.SIGUSR1, lambda *_: None)
        np.testing.assert_array_equal(f(jnp.ones(3)), [1, 1, 1])
    finally:
        signal.signal(signal.SIGUSR1, before)


@on_cpu_only
def test_a_program_from_the_persistent_cache_calls_its_own_function(tmp_path):
    """Two programs that differ in nothing but the function: the second is read from the cache."""
    run_python(
        """
        import ctypes, jax, jax.numpy as jnp
        from bridge import raw_call
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
        events = []
        jax.monitoring.register_event_listener(lambda event, **_: events.append(event.rpartition("/")[2]))
        def writes(value):
            def fn(stream, target):
                ctypes.c_float.from_address(target).value = value
            return fn
        for value in (1.0, 2.0):
            program = jax.jit(lambda: raw_call(writes(value), out_type=jax.ShapeDtypeStruct((), jnp.float32)))
            assert float(program()) == value
        assert events.count("cache_hits") == events.count("cache_misses") == 1, events
        """,
        JAX_COMPILATION_CACHE_DIR=str(tmp_path),
    )
