"""Launches the kernels of one case on PyTorch's tensors, for profilers that fail on JAX programs.

ncu --set full -k regex:_compress python -m bench alone compress csa prefill:65536
ncu --set full -k regex:kernel_cutlass python -m bench alone compress hca prefill:65536 --implementation cutedsl
python -m bench alone fused_q_kv_rmsnorm - tokens:8192
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np

from bench import calls, run
from bench.cases import CONFIGS, OPS, Case


def main(argv: list[str]) -> int:
    """Runs the command line: one call of an op by Triton, or of `compress` by CuTeDSL."""
    parser = argparse.ArgumentParser(
        prog="python -m bench alone", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("op", choices=OPS)
    parser.add_argument("compressor", choices=("-", *CONFIGS), help="-: of an op around the compressor")
    parser.add_argument("batch", type=run.parse_batch, metavar="KIND:T")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"), help="of kv_score")
    parser.add_argument("--implementation", default="triton", choices=("triton", "cutedsl"))
    options = parser.parse_args(argv)
    jax.config.update("jax_platforms", "cpu")  # the GPU is torch's alone
    import torch

    kind, tokens = options.batch
    workload = Case(options.op, kind, tokens, options.compressor, options.dtype, options.implementation).workload()
    call = calls.find(workload)
    arguments = call.arguments(workload)
    if options.implementation == "cutedsl":
        launch_cutedsl(arguments, call.params)
    else:
        from dsv4_jax.common.ops.helpers.launch import launching_with

        outputs = {"outputs": call.op.outputs(*call.types, **call.params)} if call.op.outputs else {}
        with launching_with(launch_triton):
            call.op.implementations["triton"]()(*arguments, **call.params, **outputs)
    torch.cuda.synchronize()
    return 0


def launch_triton(kernel, grid, updates, outputs, num_warps, constants, args):
    """Launches a kernel as `dsv4_jax.common.ops.helpers.launch.launch` does, and returns tensors on the GPU."""
    import torch

    args = {name: arg if arg is None or isinstance(arg, int) else _on_gpu(arg) for name, arg in args.items()}
    new = {
        name: torch.empty(s.shape, dtype=getattr(torch, np.dtype(s.dtype).name), device="cuda")
        for name, s in outputs.items()
    }
    compiled = kernel[(grid,)](**args, **new, **constants, num_warps=num_warps)
    print(f"{kernel.__name__}: {grid} programs of {num_warps} warps, {compiled.n_regs} registers per thread")
    return tuple(args[name] for name in updates) + tuple(new.values())


def launch_cutedsl(arguments, params):
    """Launches the one kernel of `compress`."""
    import torch

    from dsv4_jax.nvidia.ops import compress
    from dsv4_jax.nvidia.ops.helpers import launch

    call = compress.plan(*arguments, **params)
    assert call is not None  # every batch of the bench has something to do
    tensors = {name: _on_gpu(array) for name, array in call.arrays.items()}
    values = call.numbers | {name: tensor.data_ptr() for name, tensor in tensors.items()}
    values = (kind(values.get(name, 0)) for name, kind in launch.Arguments.__annotations__.items())
    kernel = launch.load_kernel(call.kernel, call.shape, "sm_{}{}a".format(*torch.cuda.get_device_capability()))
    kernel(launch.Arguments(*values), launch.STREAM(torch.cuda.current_stream().cuda_stream))
    name = getattr(call.kernel, "__name__", "")
    print(f"{name}: {call.numbers['blocks']} CTAs, registers for {call.shape.resident} on a multiprocessor")
    torch.cuda.synchronize()  # before the tensors are gone


def _on_gpu(array):
    import torch

    from bridge import to_torch

    return array if isinstance(array, torch.Tensor) else to_torch(jnp.asarray(array)).cuda()
