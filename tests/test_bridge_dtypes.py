"""Every dtype through torch_call, to_torch and to_jax, bit for bit, and the dtypes that are refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.bridging import Type, assert_same_bytes, double_into, torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bridge import to_jax, to_torch, torch_call

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


@pytest.fixture
def x64():
    with jax.enable_x64(True):
        yield


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
    with pytest.raises(TypeError, match=r"argument 0 of double_into has dtype float64.*jax_enable_x64.*float32"):
        torch_call(double_into, np.ones(3), out_type=Type((3,), np.float32))
    with jax.enable_x64(True):
        assert_same_bytes(torch_call(lambda x: x.argmax(), np.float32([1, 3, 2])), np.int64(1))
