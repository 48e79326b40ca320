"""What the CuTeDSL kernels serve, and what they are compiled for; imports neither cutlass nor torch."""

import os

from dsv4_jax import platforms
from dsv4_jax.config import CompressorConfig

HEAD_DIM = 512
LONGEST_WINDOW = 256


def why_not(implementation: str, target: platforms.Target, *, config: CompressorConfig, **_) -> str | None:
    """None where the kernels are made for a compressor, else the reason why not and what serves it."""
    if implementation != "cutedsl":
        return None
    if config.head_dim != HEAD_DIM:
        return (
            f"its kernels are made for head_dim {HEAD_DIM} (CSA, HCA), this compressor has {config.head_dim}; "
            "implementation='triton' serves it, and so does None"
        )
    if config.state != "rows":
        return "its kernels have no online state; implementation='triton' serves it, and so does None"
    n = config.window
    if n > LONGEST_WINDOW:
        return f"its kernels hold windows of up to {LONGEST_WINDOW} rows, this one has {n}; use implementation='triton'"
    return None


def gpu_arch() -> str:
    """The target to compile for, as "sm_90a": `CUTE_DSL_ARCH`, or else that of JAX's first NVIDIA GPU."""
    if arch := os.environ.get("CUTE_DSL_ARCH"):
        return arch
    if arch := platforms.target("cuda").arch:
        return arch + "a"
    raise NotImplementedError("this machine has no NVIDIA GPU; set CUTE_DSL_ARCH, as to sm_90a, to compile for another")
