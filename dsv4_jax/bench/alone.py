"""Launches the Triton kernels of one `compress` on PyTorch's tensors: for profilers that fail on JAX programs.

ncu --set full -k regex:_compress python -m dsv4_jax.bench.alone csa prefill:65536 float32
"""

import sys

import jax
import numpy as np
import torch

from bridge import to_torch
from dsv4_jax.bench import run
from dsv4_jax.bench.cases import CONFIGS, KV_SCALE, Case
from dsv4_jax.common.ops import compress, launch


def main(compressor, batch, dtype="float32"):
    """Runs one of the bench's cases once.

    Args:
      compressor: one of `CONFIGS`.
      batch: kind and tokens, as `bench --batch` takes them.
      dtype: of `kv_score`.
    """
    jax.config.update("jax_platforms", "cpu")  # the GPU is torch's alone
    case = Case(CONFIGS[compressor], *run.parsed_batch(batch), dtype)
    workload = case.workload("compress")
    states, cache = jax.tree.map(_on_gpu, workload.carry)
    inputs = jax.tree.map(_on_gpu, workload.inputs)
    launch._launch_gpu = _launch
    compress.implement(
        inputs["kv_score"], inputs["ape"], states, cache, inputs["metadata"], inputs["norm_weight"], inputs["cos_sin"],
        kv_scale=torch.full((1,), KV_SCALE, device="cuda") if case.config.format.needs_scale else None,
        config=case.config, save="tail", platform="cuda",
    )  # fmt: skip
    torch.cuda.synchronize()


def _on_gpu(array):
    return to_torch(array).cuda()


def _launch(kernel, grid, updates, outputs, num_warps, constants, args):
    new = {
        name: torch.empty(s.shape, dtype=getattr(torch, np.dtype(s.dtype).name), device="cuda")
        for name, s in outputs.items()
    }
    compiled = kernel[(grid,)](**args, **new, **constants, num_warps=num_warps)
    print(f"{kernel.__name__}: {grid} programs of {num_warps} warps, {compiled.n_regs} registers a thread")
    return tuple(args[name] for name in updates) + tuple(new.values())


if __name__ == "__main__":
    main(*sys.argv[1:])
