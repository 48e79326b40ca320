"""CuTeDSL kernels through `cutlass.jax.cutlass_call`, which calls no Python: what the bridge is measured against."""

import cutlass
import cutlass.cute as cute
import jax
from cutlass.jax import cutlass_call

from dsv4_jax.nvidia.ops.helpers.launch import STREAM, Arguments


def run(call):
    """Launches a `compress.Call`; returns the updated arrays."""
    names = tuple(call.arrays)
    launch = cutlass_call(
        _launch,
        output_shape_dtype=tuple(
            jax.ShapeDtypeStruct(call.arrays[name].shape, call.arrays[name].dtype) for name in call.updates
        ),
        input_output_aliases={names.index(name): i for i, name in enumerate(call.updates)},
        kernel=call.kernel,
        shape=call.shape,
        names=names,
        numbers=tuple(call.numbers.items()),
    )
    return launch(*call.arrays.values())


@cute.jit
def _launch(
    stream: STREAM,
    *tensors,
    kernel: cutlass.Constexpr,
    shape: cutlass.Constexpr,
    names: cutlass.Constexpr,
    numbers: cutlass.Constexpr,
):
    values = dict(numbers)
    for name, tensor in zip(names, tensors):  # noqa: B905
        values[name] = tensor.iterator.toint()
    kernel(Arguments(*(kind(values.get(name, 0)) for name, kind in Arguments.__annotations__.items())), stream, shape)
