"""Launches the kernels of one call on PyTorch's tensors: for profilers that fail on JAX programs.

ncu --set full -k regex:_compress python -m dsv4_jax.bench.alone csa prefill:65536
ncu --set full -k regex:kernel_cutlass python -m dsv4_jax.bench.alone hca prefill:65536 --implementation cutedsl
"""

import argparse

import jax
import numpy as np
import torch

from bridge import to_torch
from dsv4_jax.bench import run
from dsv4_jax.bench.cases import CONFIGS, KV_SCALE, Case
from dsv4_jax.common.ops import compress, launch, save_partial_states


def main(argv=None):
    """Runs one of the bench's cases once: `compress` by Triton or CuTeDSL, or `save_partial_states`."""
    parser = argparse.ArgumentParser(
        prog="python -m dsv4_jax.bench.alone",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("compressor", choices=CONFIGS)
    parser.add_argument("batch", type=run.parsed_batch, help="as prefill:65536; or decode, closing, mixed")
    parser.add_argument("dtype", nargs="?", default="float32", choices=("float32", "bfloat16"), help="of kv_score")
    parser.add_argument("--op", default="compress", choices=("compress", "save"))
    parser.add_argument("--implementation", default="triton", choices=("triton", "cutedsl"), help="of compress")
    options = parser.parse_args(argv)
    jax.config.update("jax_platforms", "cpu")  # the GPU is torch's alone
    kind, tokens = options.batch
    case = Case(CONFIGS[options.compressor], kind, tokens, options.dtype)
    workload = case.workload(options.op)
    if options.op == "save":
        _save(workload)
    elif options.implementation == "cutedsl":
        _compress_cutedsl(case.config, workload)
    else:
        _compress(case.config, workload)
    torch.cuda.synchronize()


def _save(workload):
    a, states = _on_gpu(workload.inputs), _on_gpu(workload.carry[0])
    launch._launch_gpu = _launch
    where = a["metadata"].positions, states, a["metadata"].slot_mapping
    save_partial_states.implement(a["kv"], a["score"], a["ape"], *where)


def _compress(config, workload):
    args = _on_gpu(_arguments(config, workload))
    launch._launch_gpu = _launch
    compress.implement(*args, config=config, save="tail")


def _compress_cutedsl(config, workload):
    from dsv4_jax.nvidia.ops import support
    from dsv4_jax.nvidia.ops.helpers.launch import Launch

    call = support.kernels(config).plan(*_arguments(config, workload), config=config, save="tail")
    assert call is not None  # every batch of the bench has something to do
    tensors = _on_gpu(list(call.arrays.values()))
    arch = support.arch_of("{}.{}".format(*torch.cuda.get_device_capability()))
    kernel = Launch(call.kernel, call.shape, arch, tuple(call.arrays), tuple(call.numbers.items()))
    kernel(torch.cuda.current_stream().cuda_stream, *(tensor.data_ptr() for tensor in tensors))
    print(f"{kernel.__name__}: {call.numbers['blocks']} CTAs, registers for {call.shape.resident} on a multiprocessor")
    torch.cuda.synchronize()  # before the tensors are gone


def _arguments(config, workload):
    """Those of `compress` that are arrays, in its order."""
    a, (states, cache) = workload.inputs, workload.carry
    scale = jax.numpy.float32(KV_SCALE) if config.format.needs_scale else None
    return a["kv_score"], a["ape"], states, cache, a["metadata"], a["norm_weight"], a["cos_sin"], scale


def _on_gpu(arrays):
    return jax.tree.map(lambda array: to_torch(array).cuda(), arrays)


def _launch(kernel, grid, updates, outputs, num_warps, constants, args):
    new = {
        name: torch.empty(s.shape, dtype=getattr(torch, np.dtype(s.dtype).name), device="cuda")
        for name, s in outputs.items()
    }
    compiled = kernel[(grid,)](**args, **new, **constants, num_warps=num_warps)
    print(f"{kernel.__name__}: {grid} programs of {num_warps} warps, {compiled.n_regs} registers a thread")
    return tuple(args[name] for name in updates) + tuple(new.values())


if __name__ == "__main__":
    main()
