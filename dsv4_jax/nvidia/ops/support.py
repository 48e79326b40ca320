"""What the CuTeDSL kernels can serve, in words; imports neither cutlass nor torch."""

import importlib.metadata
import importlib.util
import os

import jax

HEAD_DIM = 512
LONGEST_WINDOW = 256
LEAST_CAPABILITY = (9, 0)


def why_not(config) -> str | None:
    """None where the kernels are made for a compressor, else the reason why not and what serves it."""
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
    return arch_of(jax.local_devices(backend="cuda")[0].compute_capability)


def arch_of(compute_capability: str) -> str:
    """The target of a compute capability: "9.0" gives "sm_90a"."""
    major, minor = (int(part) for part in compute_capability.split("."))
    if (major, minor) < LEAST_CAPABILITY:
        raise NotImplementedError(
            f"CuTeDSL kernels need a GPU of compute capability {'.'.join(map(str, LEAST_CAPABILITY))} or newer (they "
            f"use thread block clusters), this one has {compute_capability}; implementation='triton' runs on it, and "
            "is what the switch takes there"
        )
    return f"sm_{major}{minor}a"


def require_libraries() -> None:
    """Imports cutlass, or raises NotImplementedError that says what is missing."""
    what = "implementation='triton' does without, and is what the switch takes where it is not installed"
    if importlib.util.find_spec("cutlass") is None:
        raise NotImplementedError(f"nvidia-cutlass-dsl is not installed; install dsv4-jax[cuda13]. {what}")
    try:
        import cutlass.cute  # noqa: F401
    except Exception as error:
        raise NotImplementedError(
            f"nvidia-cutlass-dsl cannot be imported: {type(error).__name__}: {error}. Installed: {installed()}; the "
            f"cu13 libraries are for CUDA 13, the cu12 ones for CUDA 12. {what}"
        ) from error


def kernels(config):
    """The kernels' module; raises NotImplementedError that says why it cannot serve a compressor here and what can."""
    if why := why_not(config):
        raise NotImplementedError(f"implementation='cutedsl': {why}")
    require_libraries()
    from dsv4_jax.nvidia.ops import compress

    return compress


def installed() -> str:
    """The installed packages of cutlass-dsl and their versions."""
    found = []
    for name in ("", "-libs-base", "-libs-core", "-libs-cu12", "-libs-cu13"):
        try:
            found.append(f"nvidia-cutlass-dsl{name} {importlib.metadata.version('nvidia-cutlass-dsl' + name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return ", ".join(found) or "no nvidia-cutlass-dsl"
