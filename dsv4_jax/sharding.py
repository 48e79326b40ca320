"""A check of arrays that must not be sharded, made when a program is compiled for several devices."""

import functools

import jax
from jax.experimental.custom_partitioning import custom_partitioning


def refuse_sharded(*arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Returns the arrays; compiling fails if one of them is sharded over an Auto axis of a mesh.

    An op cannot see how its arguments are sharded over Auto axes. XLA gathers a sharded cache in every step, and does
    not say so. Put this around the caches of a step that is jitted for several devices. On one device it does nothing,
    and no array is copied. `jax.export` cannot serialize it for several devices.

    Args:
      *arrays: any arrays, usually caches.

    Raises:
      jax.errors.JaxRuntimeError: when the program is compiled; it names the shape and the sharding.
    """
    return tuple(_refuse_sharded(array.ndim)(array) for array in arrays)


@functools.cache
def _refuse_sharded(ndim):
    @custom_partitioning
    def same(x):
        return x

    def partition(mesh, arguments, result):
        (array,) = arguments
        if not array.sharding.is_fully_replicated:
            raise NotImplementedError(
                f"an array of shape {list(array.shape)} is sharded as {array.sharding.spec}; call the ops inside "
                "jax.shard_map, each device with its own requests and caches"
            )
        return mesh, lambda x: x, result.sharding, (array.sharding,)

    axes = " ".join(f"i{axis}" for axis in range(ndim))
    same.def_partition(
        partition=partition,
        infer_sharding_from_operands=lambda mesh, arguments, result: arguments[0].sharding,
        sharding_rule=f"{axes} -> {axes}",
    )
    return same
