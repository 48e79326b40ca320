"""raw_call: functions of addresses, read and written on the CPU."""

import ctypes
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bridging import OwnError, Type, assert_same_bytes, copy_bytes, on_cpu_only, run_python

from bridge import raw_call


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
