"""Calls over several devices: where the arguments' types say how they are sharded, on each shard.

XLA's own partitioner, through `jax.experimental.custom_partitioning`, cannot be told: JAX lowers what is called on a
shard as a program of its own and drops the Python functions that it calls.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AxisType

from bridge._primitive import varying


def call_on_shards(bind: Callable, rule: Any, name: str, args: tuple, in_avals: tuple, out_avals: tuple) -> list:
    """`bind(args, out_avals, one_device)`, on whole arrays or inside `jax.shard_map` on shards."""
    names = None if rule is None else _parsed(rule, in_avals, out_avals)
    shardings = [jax.typeof(arg).sharding for arg in args]
    meshes = [*(s.mesh for s in shardings), jax.sharding.get_abstract_mesh()]
    meshes = [mesh for mesh in meshes if AxisType.Explicit in mesh.axis_types]
    if not meshes:
        return bind(_varying_alike(args), out_avals, rule is not None)
    if names is None:
        for i, s in enumerate(shardings):
            if any(axes is not None for axes in s.spec):
                raise NotImplementedError(
                    f"torch_call: argument {i} of {name} is sharded, {jax.typeof(args[i])}, and nothing says how the "
                    "function can be split. Pass sharding_rule, use jax.shard_map, or gather the argument with "
                    "jax.sharding.reshard"
                )
        return bind(args, out_avals, False)

    operands, results = names
    split = _split_axes(operands, results, [s.spec for s in shardings])
    specs = [[jax.P(*(split.get(axis) for axis in axes)) for axes in side] for side in (operands, results)]
    sizes = [
        jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=jax.NamedSharding(meshes[0], spec))
        for aval, spec in zip(out_avals, specs[1], strict=True)
    ]
    shards = tuple(jax.core.ShapedArray(x.sharding.shard_shape(x.shape), x.dtype) for x in sizes)
    args = tuple(
        arg if s.spec == spec else jax.sharding.reshard(arg, jax.NamedSharding(meshes[0], spec))
        for arg, s, spec in zip(args, shardings, specs[0], strict=True)
    )
    on_shard = lambda *args: bind(_varying_alike(args), shards, False)[: len(shards)]
    return jax.shard_map(on_shard, mesh=meshes[0], in_specs=tuple(specs[0]), out_specs=specs[1])(*args)


def _varying_alike(args: tuple) -> tuple:
    """The arguments, all varying over the same mesh axes of `jax.shard_map`: gradients of others are to be summed."""
    union = frozenset().union(*(varying(jax.typeof(arg)) for arg in args))

    def varied(arg: Any) -> Any:
        missing = tuple(union - varying(jax.typeof(arg)))
        return jax.lax.pcast(arg, missing, to="varying") if missing else arg

    return tuple(map(varied, args))


Names = list[list[str]]  # of the axes of each array


def _parsed(rule: Any, in_avals: tuple, out_avals: tuple) -> tuple[Names, Names]:
    what = f"torch_call: sharding_rule is {rule!r}"
    if not isinstance(rule, str) or rule.count("->") != 1:
        raise ValueError(f"{what}; it must be a text such as 'b i, i j -> b j'")
    sides = []
    sizes: dict[str, int] = {}
    for kind, text, avals in zip(("argument", "result"), rule.split("->"), (in_avals, out_avals), strict=True):
        arrays = [axes.split() for axes in text.split(",")] if avals or text.strip() else []
        if len(arrays) != len(avals):
            raise ValueError(f"{what}, with {len(arrays)} {kind}s; there are {len(avals)}")
        for i, (axes, aval) in enumerate(zip(arrays, avals, strict=True)):
            if len(axes) != aval.ndim or len(set(axes)) != len(axes):
                raise ValueError(f"{what}, and {kind} {i} is {aval}: it must have a name of its own for each axis")
            for axis, size in zip(axes, aval.shape, strict=True):
                if sizes.setdefault(axis, size) != size:
                    raise ValueError(f"{what}, where {axis} has size {sizes[axis]}, and in {kind} {i}, {aval}, {size}")
        sides.append(arrays)
    return sides[0], sides[1]


def _split_axes(operands: Names, results: Names, specs: list) -> dict[str, Any]:
    """The mesh axes of the axes that may be split; if two arguments ask for different ones, the first one's."""
    split: dict[str, Any] = {}
    used: set = set()
    independent = set.intersection(*map(set, results))
    for axes, spec in zip(operands, specs, strict=True):
        for axis, mesh_axes in zip(axes, spec, strict=False):
            asked = set(mesh_axes if isinstance(mesh_axes, tuple) else () if mesh_axes is None else (mesh_axes,))
            if axis in independent and axis not in split and asked and not asked & used:
                split[axis] = mesh_axes
                used |= asked
    return split
