"""Runs a Triton kernel on JAX arrays: by jax-triton on a GPU, in Triton's interpreter on the CPU."""

import contextlib
import contextvars
import warnings
from collections.abc import Callable

import jax
import triton

from dsv4_jax import gpus, platforms
from dsv4_jax.common.ops.helpers import interpreter

_launcher: contextvars.ContextVar[Callable | None] = contextvars.ContextVar("launcher", default=None)


@contextlib.contextmanager
def launching_with(launcher: Callable):
    """Until it is left, every launch is `launcher(kernel, grid, updates, outputs, num_warps, constants, args)`.

    It gets what `launch` gets and returns what `launch` returns. So kernels can be run on other arrays than JAX's, or
    compiled for a target that is not here.
    """
    token = _launcher.set(launcher)
    try:
        yield
    finally:
        _launcher.reset(token)


def launch(kernel, grid: int, *, updates=(), outputs=None, num_warps: int, constants: dict, **args) -> tuple:
    """Launches `kernel` on `grid` programs; arguments go by the kernel's parameter names.

    Args:
      kernel: a `triton.jit` function; its array parameters come first, results among them last.
      grid: number of programs.
      updates: names of the arrays that the kernel updates in place.
      outputs: name to `jax.ShapeDtypeStruct` of new arrays, results or outputs; the last array parameters.
      num_warps: warps of a program, of 32 threads each; where a warp has more, fewer are started.
      constants: `constexpr` parameters.
      **args: arrays and integers; None for an array that is absent, which the kernel then must not read.

    Returns:
      The updated arrays, then the outputs.
    """
    # A kernel has a pointer for every array. Where an array is absent, another stands in.
    stand_in = next(value for value in args.values() if not (value is None or isinstance(value, int)))
    args = {name: stand_in if value is None else value for name, value in args.items()}
    compiled = isinstance(kernel, triton.runtime.JITFunction)
    launcher = _launcher.get() or (_launch_gpu if compiled else _launch_interpreted)
    return launcher(kernel, grid, updates, outputs or {}, num_warps, constants, args)


def _launch_gpu(kernel, grid, updates, outputs, num_warps, constants, args):
    from dsv4_jax.common.ops.helpers.jax_triton_compat import triton_call

    platform, arch = platforms.lowered_for()
    if arch is None:
        raise RuntimeError(
            f"Triton must know the GPU that it compiles for, and this machine has none of {platform}; "
            f"{gpus.how_to_name(platform)}, or use implementation='xla'"
        )
    operands = [name for name in kernel.arg_names if name in args]
    with warnings.catch_warnings():
        # jax-triton asks for Refs instead; an alias says the same and works inside a primitive's lowering.
        warnings.filterwarnings("ignore", "input_output_aliases is deprecated", DeprecationWarning)
        # The buffers that are not aliased come first: the launcher gives results to the kernel's parameters in order.
        results = triton_call(
            kernel=kernel,
            grid=(grid,),
            out_type=[*outputs.values(), *(jax.typeof(args[name]) for name in updates)],
            input_output_aliases={operands.index(name): len(outputs) + i for i, name in enumerate(updates)},
            num_warps=max(1, num_warps * 32 // gpus.wave_size(arch)),
            compute_capability=gpus.compute_capability(arch),
            backend_options={"enable_fp_fusion": True},  # Triton 3.10 means to turn it off by default
            **args,
            **constants,
        )
    return (*results[len(outputs) :], *results[: len(outputs)])


def _launch_interpreted(kernel, grid, updates, outputs, _, constants, args):
    import bridge

    names = [name for name, value in args.items() if not isinstance(value, int)]
    numbers = {name: value for name, value in args.items() if isinstance(value, int)}

    def run(*tensors):
        # The interpreter cannot copy a tensor without elements; one that has some stands in, and is not read.
        filled = [tensor if tensor.numel() else tensor.new_zeros(1) for tensor in tensors]
        arrays = dict(zip([*names, *outputs], filled, strict=True))
        with interpreter.correct_rounding():
            kernel[(grid,)](**arrays, **numbers, **constants)

    results = bridge.torch_call(
        run,
        *(args[name] for name in names),
        out_type=tuple(jax.ShapeDtypeStruct(args[name].shape, args[name].dtype) for name in updates)
        + tuple(outputs.values()),
        input_output_aliases={names.index(name): i for i, name in enumerate(updates)},
    )
    return tuple(results)
