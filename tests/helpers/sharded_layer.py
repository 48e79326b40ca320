"""The layer over two devices; `test_compressor.py` runs this where the CPU counts as two."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.core import spmd
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from dsv4_jax import CompressorConfig, CompressorMetadata, DeepseekCompressor

config = CompressorConfig.csa()
layer = DeepseekCompressor(config, 32, rngs=nnx.Rngs(0))
cos_sin = jnp.asarray(config.rope.table(16))
hidden = jax.random.normal(jax.random.key(1), (2, 10, 32))
steps = [
    CompressorMetadata.build(
        config, jnp.array([0, n]), jnp.array([n]), jnp.array([[0, 1, 2]]), jnp.array([[0]]), num_tokens=10
    )
    for n in (10, 7)
]
step = jax.jit(lambda params, *args: nnx.merge(graph, params)(*args))
graph, params = nnx.split(layer)
want = [step(params, hidden[i], layer.init_caches(3, 1), steps[i], cos_sin) for i in range(2)]

# The batch over two devices, each with caches of its own.
mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
batch = jax.tree.map(lambda *x: jnp.concatenate(x), *[(hidden[i], layer.init_caches(3, 1), steps[i]) for i in range(2)])
batch = jax.device_put(batch, NamedSharding(mesh, P("data")))


@jax.jit
@functools.partial(jax.shard_map, mesh=mesh, in_specs=(P(), P("data"), P()), out_specs=P("data"))
def sharded(params, batch, cos_sin):
    return nnx.merge(graph, params)(*batch, cos_sin)


for got, *wanted in zip(sharded(params, batch, cos_sin), *want, strict=True):
    assert len(got.sharding.device_set) == 2
    np.testing.assert_array_equal(got, np.concatenate(wanted))

# Parameters over two devices by their logical axes.
with spmd.logical_axis_rules((("embed", "data"), ("state", None))):
    params = jax.device_put(params, nnx.get_named_sharding(params, mesh))
assert params["wkv_gate"].get_value().sharding.spec == P("data", None)
got = step(params, hidden[0], layer.init_caches(3, 1), steps[0], cos_sin)
np.testing.assert_allclose(got[0], want[0][0], atol=1e-5)
print("ok")
