"""to_torch and to_jax: tensors and arrays that share memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.bridging import assert_same_bytes, run_python, torch
from jax.experimental.layout import Format, Layout

from bridge import to_jax, to_torch


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
    """
    run_python(script, XLA_FLAGS="--xla_force_host_platform_device_count=2")


@pytest.mark.parametrize(
    ("make", "error", "match"),
    [
        (lambda: np.ones(3), TypeError, "tensor is a ndarray; it must be a torch.Tensor"),
        (lambda: torch.ones(3, requires_grad=True), ValueError, r"requires grad.*detach\(\)"),
        (lambda: torch.ones(3, 3).to_sparse(), ValueError, r"layout torch.sparse_coo.*to_dense\(\)"),
        (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), ValueError, "nested"),
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


def test_fake_tensors_are_refused():
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode():
        fake = torch.empty(16)
    with pytest.raises(TypeError, match="FakeTensor"):
        to_jax(fake)
