"""The bridge, held to numpy. What is marked gpu also looks at addresses, streams and command buffers."""

import ctypes
import functools
import os
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental.layout import Format, Layout
from jax.sharding import Mesh, PartitionSpec

from bridge import raw_call, to_jax, to_torch, torch_call

torch = pytest.importorskip("torch")

Type = jax.ShapeDtypeStruct
DTYPES = [
    "bool",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "int8",
    "int16",
    "int32",
    "int64",
    "float16",
    "bfloat16",
    "float32",
    "float64",
    "complex64",
    "complex128",
    "float8_e4m3fn",
    "float8_e5m2",
    "float8_e4m3fnuz",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
]


def random_array(dtype, shape, seed=0):
    """A numpy array of random bytes: every bit pattern of the dtype may come up."""
    dtype = jnp.dtype(dtype)
    rng = np.random.default_rng(seed)
    if dtype.name == "bool":
        return rng.integers(0, 2, shape).astype(bool)
    return np.frombuffer(rng.bytes(int(np.prod(shape)) * dtype.itemsize), dtype).reshape(shape)


def assert_same_bytes(actual, expected):
    actual, expected = np.asarray(actual), np.asarray(expected)
    assert (actual.shape, actual.dtype) == (expected.shape, expected.dtype)
    assert actual.tobytes() == expected.tobytes()


def double_into(x, out):
    torch.mul(x, 2, out=out)


def add_in_place(x, cache):
    cache += x


def double(x):
    return torch_call(double_into, x, out_type=Type.like(x))


def accumulate(x, cache):
    return torch_call(add_in_place, x, cache, out_type=Type.like(cache), input_output_aliases={1: 0})


@pytest.fixture
def x64():
    with jax.enable_x64(True):
        yield


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


# Inferred results.


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


# Dtypes.


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_in_a_call(dtype, x64):
    x = random_array(dtype, (33, 7))
    seen = []

    def fn(x, out):
        seen.append((x.dtype, x.cpu().view(torch.uint8).numpy().tobytes()))
        out.copy_(x)

    out = torch_call(fn, x, out_type=Type(x.shape, x.dtype), command_buffer_compatible=False)
    assert_same_bytes(out, x)
    assert seen == [(getattr(torch, dtype), x.tobytes())]
    assert_same_bytes(torch_call(lambda x: x.clone(), x), x)
    assert_same_bytes(torch_call(lambda x: None, x, out_type=Type(x.shape, x.dtype), input_output_aliases={0: 0}), x)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_eagerly(dtype, x64):
    x = jnp.asarray(random_array(dtype, (33, 7)))
    tensor = to_torch(x)
    assert tensor.dtype == getattr(torch, dtype) and tensor.data_ptr() == x.unsafe_buffer_pointer()
    assert tensor.cpu().view(torch.uint8).numpy().tobytes() == np.asarray(x).tobytes()
    back = to_jax(tensor)
    assert back.unsafe_buffer_pointer() == x.unsafe_buffer_pointer()
    assert_same_bytes(back, x)


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(DTYPES), st.lists(st.integers(0, 5), max_size=4), st.integers(0, 99))
def test_any_shape_and_dtype(dtype, shape, seed):
    with jax.enable_x64(True):
        x = random_array(dtype, tuple(shape), seed)
        out = torch_call(lambda x, out: out.copy_(x), x, out_type=Type(x.shape, x.dtype))
        assert_same_bytes(out, x)
        assert_same_bytes(to_jax(to_torch(jnp.asarray(x)).clone()), x)


@pytest.mark.parametrize("dtype", ["int4", "uint4", "int2", "float4_e2m1fn", "float8_e4m3b11fnuz", "float8_e3m4"])
def test_dtypes_that_torch_lacks_are_refused_while_tracing(dtype):
    x = Type((4,), jnp.dtype(dtype))
    with pytest.raises(TypeError, match=rf"argument 1 of double_into has dtype {dtype},.*uint8"):
        jax.eval_shape(lambda x: torch_call(double_into, jnp.ones(3), x), x)
    with pytest.raises(TypeError, match=rf"out_type\[1\]\['a'\] has dtype {dtype},"):
        torch_call(double_into, jnp.ones(3), out_type=(Type((), jnp.float32), {"a": x}))
    with pytest.raises(TypeError, match=rf"scratch_type has dtype {dtype},"):
        torch_call(double_into, jnp.ones(3), out_type=Type((), jnp.float32), scratch_type=x)
    with pytest.raises(TypeError, match=rf"array has dtype {dtype},"):
        to_torch(jnp.zeros(4, dtype))


def test_random_keys_are_refused():
    with pytest.raises(TypeError, match=r"argument 0 of sin has dtype key<.*key_data"):
        torch_call(torch.sin, jax.random.key(0))


def test_64_bits_need_x64():
    with pytest.raises(TypeError, match=r"out_type has dtype int64.*jax_enable_x64.*int32"):
        torch_call(double_into, jnp.ones(3), out_type=Type((3,), np.int64))
    with pytest.raises(TypeError, match=r"returned\['i'\] has dtype int64.*jax_enable_x64"):
        torch_call(lambda x: {"i": x.argmax()}, jnp.ones(3))
    with jax.enable_x64(True):
        assert_same_bytes(torch_call(lambda x: x.argmax(), np.float32([1, 3, 2])), np.int64(1))


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


# Errors while tracing.


@pytest.mark.parametrize(
    ("kwargs", "error", "match"),
    [
        ({"fn": 3}, TypeError, "fn is a int; it must be callable"),
        ({"fn": type("F", (), {"__call__": double_into, "__hash__": None})()}, TypeError, "fn, a F, is not hashable"),
        ({"args": [3]}, TypeError, r"argument 0 of double_into is a int.*functools\.partial"),
        ({"args": [None]}, TypeError, "argument 0 of double_into is a NoneType"),
        ({"args": [np.ones(3), (jnp.ones(3),)]}, TypeError, "argument 1 of double_into is a tuple.*pytrees"),
        ({"args": [torch.ones(3)]}, TypeError, "argument 0 of double_into is a Tensor.*to_jax"),
        ({"out_type": 3}, TypeError, "out_type is 3; it must be a jax.ShapeDtypeStruct"),
        ({"out_type": [Type((), int), "x"]}, TypeError, r"out_type\[1\] is 'x'"),
        ({"out_type": ()}, ValueError, "double_into has no outputs"),
        ({"scratch_type": [3]}, TypeError, r"scratch_type\[0\] is 3"),
        ({"input_output_aliases": [(0, 0)]}, TypeError, "input_output_aliases is .*it must be a dict"),
        ({"input_output_aliases": {0: "x"}}, TypeError, "input_output_aliases is .*it must be a dict"),
        ({"input_output_aliases": {1: 0}}, ValueError, "names input 1; there are 1 inputs"),
        ({"input_output_aliases": {-1: 0}}, ValueError, "names input -1"),
        ({"input_output_aliases": {0: 2}}, ValueError, "names output 2; there are 1 outputs"),
        ({"input_output_aliases": {0: 0}, "out_type": Type((4,), jnp.float32)}, ValueError, r"float32\[3\].*alike"),
        ({"input_output_aliases": {0: 0}, "out_type": Type((3,), jnp.int32)}, ValueError, r"int32\[3\].*alike"),
        ({"input_output_aliases": {0: 0}, "out_type": None}, ValueError, "needs out_type"),
        ({"args": [np.float32([1])] * 2, "input_output_aliases": {0: 0, 1: 0}, "out_type": Type((1,), jnp.float32)},
         ValueError, "only one input's"),
        ({"command_buffer_compatible": "yes"}, TypeError, "command_buffer_compatible is 'yes'"),
        ({"name": 3}, TypeError, "name is a int; it must be a str"),
    ],
)  # fmt: skip
def test_bad_arguments(kwargs, error, match):
    good = {"fn": double_into, "args": [jnp.ones(3)], "out_type": Type((3,), jnp.float32)}
    good.update(kwargs)
    with jax.enable_x64("int" in str(kwargs.get("out_type"))), pytest.raises(error, match=match):
        torch_call(good.pop("fn"), *good.pop("args"), **good)


@pytest.mark.parametrize(
    ("fn", "match"),
    [
        (lambda x: None, "returned None"),
        (lambda x: "text", "is a str; it must be a torch.Tensor"),
        (lambda x: (x, 1.0), r"returned\[1\] is a float; it must be a torch.Tensor"),
        (lambda x: x.to_sparse(), "could not be inferred|layout torch.sparse_coo"),
        (lambda x: x.nonzero(), "could not be inferred.*Pass out_type"),
        (lambda x: x[5], "could not be inferred.*IndexError"),
        (lambda x: (), None),
    ],
)
def test_results_that_cannot_be_inferred(fn, match):
    with pytest.raises(TypeError if match else ValueError, match=match or "no outputs"):
        torch_call(fn, jnp.ones(3))


def test_transformations_say_what_to_use():
    x = jnp.ones(3)
    with pytest.raises(NotImplementedError, match=r"double_into cannot be differentiated.*jax\.custom_vjp"):
        jax.grad(lambda x: double(x).sum())(x)
    with pytest.raises(NotImplementedError, match=r"double_into cannot be differentiated"):
        jax.linear_transpose(double, x)(x)
    with pytest.raises(NotImplementedError, match=r"double_into cannot be batched.*jax\.lax\.map"):
        jax.vmap(double)(x)
    for platforms in (None, ["cpu", "cuda"]):
        with pytest.raises(NotImplementedError, match=r"double_into cannot be exported"):
            jax.export.export(jax.jit(double), platforms=platforms)(x)
    with pytest.raises(NotImplementedError, match=r"double_into cannot run on tpu; it can on cpu, cuda and rocm"):
        jax.jit(double).trace(x).lower(lowering_platforms=("tpu",))


@pytest.mark.parametrize("platform", ["cuda", "rocm"])
def test_lowers_for_gpus_without_one(platform):
    text = jax.jit(double).trace(jnp.ones(3)).lower(lowering_platforms=(platform,)).as_text()
    assert "xla_buffer_python_gpu_callback_cmd_buffer" in text
    f = jax.jit(lambda x: torch_call(lambda x: x + 1, x))
    text = f.trace(jnp.ones(3)).lower(lowering_platforms=(platform,)).as_text()
    assert "gpu_callback" in text and "cmd_buffer" not in text


# Functions of addresses. On the CPU an address can be read and written; on a GPU kernels do that.

on_cpu_only = pytest.mark.skipif(jax.default_backend() != "cpu", reason="reads memory by its address")


def copy_bytes(size):
    def copy(stream, source, target):
        assert stream == 0
        ctypes.memmove(target, source, size)

    return copy


def add_one(stream, address):
    ctypes.c_int32.from_address(address).value += 1


@on_cpu_only
@pytest.mark.parametrize("dtype", DTYPES)
def test_raw_call_of_every_dtype(dtype, x64):
    x = random_array(dtype, (33, 7))
    copy = functools.partial(raw_call, copy_bytes(x.nbytes), out_type=Type(x.shape, x.dtype))
    assert_same_bytes(copy(x), x)
    assert_same_bytes(jax.jit(copy)(x), x)


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


# Errors while running.


class OwnError(Exception):
    pass


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit])
def test_exceptions_reach_the_user_and_do_no_harm(wrap):
    def fn(x, out):
        raise OwnError("something of fn's own")

    f = wrap(lambda x: torch_call(fn, x, out_type=Type.like(x)))
    for _ in range(3):
        with pytest.raises(jax.errors.JaxRuntimeError, match=r"(?s)in fn.*OwnError: something of fn's own"):
            f(jnp.ones(3)).block_until_ready()
        assert torch.is_grad_enabled()
        np.testing.assert_array_equal(wrap(double)(jnp.ones(3)), [2, 2, 2])


@pytest.mark.parametrize(
    ("fn", "returned"),
    [
        (lambda x, out: x, r"float32\[3\]"),
        (lambda x, out: (out, 3), r"\(float32\[3\], int\)"),
        (lambda x, out: out + x, r"float32\[3\]"),
    ],
)
def test_returning_instead_of_writing(fn, returned):
    with pytest.raises(jax.errors.JaxRuntimeError, match=rf"TypeError: .*returned {returned}, which would be lost"):
        torch_call(fn, jnp.ones(3), out_type=Type((3,), jnp.float32)).block_until_ready()


@pytest.mark.parametrize(
    ("later", "described"),
    [
        (lambda x: x.to(torch.int8), r"int8\[3\]"),
        (lambda x: x[:2], r"float32\[2\]"),
        (lambda x: (x, x), r"\(float32\[3\], float32\[3\]\)"),
        (lambda x: 3, "int"),
        (lambda x: None, "None"),
    ],
)
def test_returning_something_else_than_when_traced(later, described):
    def fn(x):
        return x if type(x).__name__ == "FakeTensor" else later(x)

    match = rf"fn returned {described}, but returned float32\[3\] when it was traced"
    with pytest.raises(jax.errors.JaxRuntimeError, match=match):
        torch_call(fn, jnp.ones(3)).block_until_ready()


# The eager pair.


def test_to_torch_and_back_share_memory():
    x = jnp.arange(6.0).reshape(2, 3) + 1
    tensor = to_torch(x)
    assert tuple(tensor.shape) == (2, 3)
    np.testing.assert_array_equal(tensor.cpu().numpy(), np.arange(1, 7).reshape(2, 3))
    assert to_jax(tensor).unsafe_buffer_pointer() == x.unsafe_buffer_pointer() == tensor.data_ptr()


@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (1, 2, 3)])
def test_eager_shapes(shape):
    x = np.ones(shape, np.float32)
    assert tuple(to_torch(jnp.asarray(x)).shape) == shape
    assert_same_bytes(to_jax(torch.ones(shape)), x)


def test_to_torch_waits_for_the_array():
    f = jax.jit(lambda x: jax.lax.fori_loop(0, 50, lambda _, x: x @ x / 256, x))
    tensor = to_torch(f(jnp.ones((256, 256))))
    np.testing.assert_array_equal(tensor.cpu().numpy(), np.ones((256, 256)))


def test_memory_outlives_its_first_owner():
    tensor = to_torch(jnp.arange(1000.0) + 1)
    array = to_jax(torch.arange(1000.0) + 1)
    junk = [jnp.zeros(1000) + i for i in range(20)] + [torch.zeros(1000) for _ in range(20)]
    np.testing.assert_array_equal(tensor.cpu().numpy(), np.arange(1, 1001))
    np.testing.assert_array_equal(array, np.arange(1, 1001))
    del junk


def test_donating_a_lent_array_leaves_the_tensor_alone():
    if jax.default_backend() != "cpu":
        pytest.skip("whether such a donation copies or fails is the backend's choice")
    x = jnp.arange(4.0)
    tensor = to_torch(x)
    y = jax.jit(lambda x: x + 1, donate_argnums=0)(x)
    np.testing.assert_array_equal(y, [1, 2, 3, 4])
    np.testing.assert_array_equal(tensor.cpu().numpy(), [0, 1, 2, 3])


def test_to_torch_keeps_a_transposed_layout():
    x = jnp.arange(12.0).reshape(3, 4)
    columns = jax.device_put(x, Format(Layout(major_to_minor=(1, 0)), x.sharding))
    tensor = to_torch(columns)
    assert tensor.stride() == (1, 3)
    np.testing.assert_array_equal(tensor.cpu().numpy(), np.arange(12.0).reshape(3, 4))


def test_to_torch_refuses():
    with pytest.raises(TypeError, match=r"array is traced.*torch_call"):
        jax.jit(to_torch)(jnp.ones(3))
    with pytest.raises(TypeError, match=r"array is a ndarray; it must be a jax\.Array"):
        to_torch(np.ones(3))
    deleted = jnp.ones(3)
    deleted.delete()
    with pytest.raises(ValueError, match=r"float32\[3\], was deleted or donated"):
        to_torch(deleted)


def test_to_torch_refuses_a_sharded_array():
    script = """
        import jax, jax.numpy as jnp, numpy as np, bridge
        mesh = jax.sharding.Mesh(np.array(jax.devices()), ("d",))
        x = jnp.arange(4.0)
        x = jax.device_put(x, jax.NamedSharding(mesh, jax.P("d")))
        try:
            bridge.to_torch(x)
        except ValueError as error:
            assert "array lies on 2 devices" in str(error), error
        else:
            raise AssertionError("no error")
        assert bridge.to_torch(x.addressable_shards[1].data).tolist() == [2, 3]
        double = lambda x: bridge.torch_call(lambda x: x * 2, x)
        f = jax.jit(jax.shard_map(double, mesh=mesh, in_specs=jax.P("d"), out_specs=jax.P("d")))
        np.testing.assert_array_equal(f(x), [0, 2, 4, 6])
        np.testing.assert_array_equal(jax.jit(double)(x), [0, 2, 4, 6])
    """
    run_python(script, XLA_FLAGS="--xla_force_host_platform_device_count=2")


@pytest.mark.parametrize(
    ("make", "error", "match"),
    [
        (lambda: np.ones(3), TypeError, "tensor is a ndarray; it must be a torch.Tensor"),
        (lambda: torch.ones(3, requires_grad=True), ValueError, r"requires grad.*detach\(\)"),
        (lambda: torch.ones(3, 3).to_sparse(), ValueError, r"layout torch.sparse_coo.*to_dense\(\)"),
        (lambda: torch.ones(3, 4).T, ValueError, r"shape \(4, 3\) has strides \(1, 4\).*contiguous\(\)"),
        (lambda: torch.ones(8)[::2], ValueError, r"strides \(2,\)"),
        (lambda: torch.ones(1).expand(3), ValueError, r"strides \(0,\)"),
        (lambda: torch.ones(3, dtype=torch.complex64).conj(), ValueError, r"resolve_conj\(\)"),
        (lambda: torch.ones(8)[1:], ValueError, r"address.*64 bytes.*clone\(\)"),
        (lambda: torch.ones(3, device="meta"), ValueError, "device meta; it must be on cpu or cuda"),
        (lambda: torch.ones(3, dtype=torch.int64), TypeError, "dtype int64.*jax_enable_x64"),
        (lambda: torch.ones(3, dtype=torch.float64), TypeError, "dtype float64.*jax_enable_x64"),
        (lambda: torch.zeros(4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2), TypeError, r"float4_e2m1fn_x2"),
    ],
)
def test_to_jax_refuses(make, error, match):
    with pytest.raises(error, match=match):
        to_jax(make())


# Imports.


def run_python(script, **env):
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": root, **env}
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], env=env, check=True, timeout=120)


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


def test_import_alone_loads_no_torch_and_starts_no_backend():
    run_python("""
        import sys, bridge
        assert "torch" not in sys.modules
        from jax._src import xla_bridge
        assert not xla_bridge.backends_are_initialized()
    """)


# On a GPU.


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
@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_gpu_fp8_both_ways(dtype):
    x = np.linspace(-20, 20, 4096, dtype=np.float32)
    expected = x.astype(jnp.dtype(dtype))  # ml_dtypes rounds to nearest even, as the hardware does
    narrow = jax.jit(lambda x: torch_call(lambda x, out: out.copy_(x), x, out_type=Type(x.shape, jnp.dtype(dtype))))
    assert_same_bytes(narrow(x), expected)
    wide = jax.jit(lambda x: torch_call(lambda x, out: out.copy_(x), x, out_type=Type(x.shape, jnp.float32)))
    assert_same_bytes(wide(expected), expected.astype(np.float32))
    assert to_torch(jnp.asarray(expected)).dtype == getattr(torch, dtype)


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


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_gpu_raw_call_gets_the_buffers_addresses_and_xlas_stream(dtype, x64):
    seen = []

    def note(stream, *addresses):
        seen.append((stream, addresses))

    def torch_stream(x):
        seen.append(torch.cuda.current_stream().cuda_stream)

    @functools.partial(jax.jit, donate_argnums=1)
    def f(x, cache):
        cache = raw_call(
            note, x, cache, out_type=Type.like(cache), input_output_aliases={1: 0}, command_buffer_compatible=False
        )
        return torch_call(
            torch_stream, cache, out_type=Type.like(cache), input_output_aliases={0: 0}, command_buffer_compatible=False
        )

    x, cache = (jnp.asarray(random_array(dtype, (33, 7), seed)) for seed in (0, 1))
    kept = np.asarray(cache)
    addresses = x.unsafe_buffer_pointer(), cache.unsafe_buffer_pointer()
    assert_same_bytes(f(x, cache), kept)
    assert seen == [(seen[1], addresses), seen[1]] and seen[1] != 0


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


def test_an_output_of_another_shape_than_declared():
    """torch resizes an out= tensor, with a warning only, and would write where XLA does not look."""

    def fn(x, out):
        torch.add(x, 1, out=out)

    with pytest.raises(jax.errors.JaxRuntimeError, match=r"changed the shape of an output from \(4,\) to \(3,\)"):
        jax.block_until_ready(torch_call(fn, jnp.ones(3), out_type=Type((4,), jnp.float32)))


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


def test_fake_tensors_are_refused():
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode():
        fake = torch.empty(16)
    with pytest.raises(TypeError, match="FakeTensor"):
        to_jax(fake)
