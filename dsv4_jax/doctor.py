"""`python -m dsv4_jax doctor`: what can run here, what is missing, and what is known to break."""

import os
import platform

from dsv4_jax import gpus, platforms
from dsv4_jax.op import OPS, Op

PACKAGES = (
    "jax", "jaxlib", "numpy", "ml_dtypes", "jax-triton", "triton", "torch", "nvidia-cutlass-dsl", "flax",
)  # fmt: skip
NEEDS = {
    "xla": "jax alone, any platform",
    "triton": "triton and jax-triton, a GPU; on the CPU triton, torch and TRITON_INTERPRET=1",
    "cutedsl": "nvidia-cutlass-dsl, an NVIDIA GPU",
}


def main() -> int:
    """Prints the report; returns 0 if it names no problem, else 1."""
    print(f"{'python':20}{platform.python_version()}  ({platform.system()} {platform.machine()})")
    for package in PACKAGES:
        print(f"{package:20}{platforms.installed(package) or '-'}")
    print()
    bad = [f"{pair} are installed: {what}" for pair, what in platforms.known_bad_pairs()]
    try:
        import jax

        target, devices = platforms.default_target(), jax.devices()
    except Exception as error:
        _print_problems([f"JAX does not start: {_one_line(error)}", *bad])
        return 1
    print(f"{'platform':20}{target.platform}  ({len(devices)} x {devices[0].device_kind}; jax.default_backend() is "
          f"{jax.default_backend()!r})")  # fmt: skip

    _print_ops(target)
    failures = {name: error for name in platforms.IMPLEMENTATIONS if (error := _failure(name, target))}
    problems = [f"{name} should run here but does not: {error}" for name, error in failures.items()]
    problems = bad + problems + _other_problems(target)
    _print_problems(problems)
    return 1 if problems else 0


def ops() -> list[Op]:
    """The ops between whose implementations the switch chooses."""
    return sorted((op for op in OPS if "xla" in op.implementations), key=lambda op: op.name)


def _print_ops(target):
    width = max(len(op.name) for op in ops()) + 2
    print("\n" + "op".ljust(width) + "".join(name.ljust(12) for name in platforms.IMPLEMENTATIONS) + "the switch takes")
    reasons, by_size = {}, False
    for op in ops():
        line = op.name.ljust(width)
        for implementation in platforms.IMPLEMENTATIONS:
            if implementation not in op.implementations:
                line += "-".ljust(12)  # not written
                continue
            why = op.why_not(implementation, target)
            line += ("no" if why else "yes").ljust(12)
            if why:
                reasons.setdefault((implementation, why), []).append(op.name)
        line += op.choose(target)
        if target.arch in op.measured_on and op.why_not("cutedsl", target) is None:
            line += ", cutedsl"
            by_size = True
        print(line)
    if by_size:
        print("Where it takes two, which one is by compressor and size: docs/performance.md.")
    if name := os.environ.get("DSV4_JAX_IMPLEMENTATION"):
        print(f"DSV4_JAX_IMPLEMENTATION={name} overrides the switch.")
    print()
    for implementation, needs in NEEDS.items():
        print(f"{implementation:9} needs {needs}")
    for (implementation, why), without in reasons.items():
        print(f"no {implementation} for {'any op' if len(without) == len(ops()) else ', '.join(without)}: {why}")
    if target.arch and (why := gpus.why_no_fp8(target.arch)):
        print(f"no triton where the format is fp8 for {', '.join(op.name for op in ops() if callable(op.fp8))}: {why}")
    if target.platform == "rocm":
        print("A program with Triton's kernels that was compiled for ROCm runs in the process that compiled it alone.")


def _failure(implementation, target):
    """Why an implementation that should run here does not, or None: the smallest op, once."""
    import dsv4_jax
    from dsv4_jax.api.save_partial_states import OP

    if OP.why_not(implementation, target):
        return None
    try:
        import jax.numpy as jnp

        row = jnp.ones((1, 128))
        slot = jnp.zeros(1, jnp.int32)
        cache = dsv4_jax.save_partial_states(
            row, row, row, slot, jnp.zeros((1, 1, 256)), slot, compress_ratio=1, implementation=implementation
        )
        if float(cache.sum()) != 128 + 2 * 128:
            return "a test call of save_partial_states gave a wrong result"
    except Exception as error:
        return _one_line(error)
    return None


def _other_problems(target):
    found = []
    try:
        name = platforms.default_implementation()
    except ValueError as error:
        found.append(str(error))
    else:
        if name and (why := platforms.why_not(name, target)):
            found.append(f"DSV4_JAX_IMPLEMENTATION is {name!r}, which cannot run on {target.platform}: {why}")
    # JAX on CUDA 13 cannot share a process with CuTeDSL's default libraries, which are those of CUDA 12.
    cuda13 = target.platform == "cuda" and any(
        platforms.installed(package) for package in ("jax-cuda13-plugin", "jax-cuda13-pjrt")
    )
    dsl, dsl13 = (platforms.installed(f"nvidia-cutlass-dsl{end}") for end in ("", "-libs-cu13"))
    if cuda13 and dsl and not dsl13:
        found.append("JAX is for CUDA 13, CuTeDSL is not: pip install nvidia-cutlass-dsl-libs-cu13")
    if target.platform in platforms.GPUS and platforms.installed("torch") and not _torch_has_gpu():
        found.append(
            "JAX has a GPU and torch has none: the bridge cannot run torch code on JAX's arrays; install the torch "
            f"build for {target.platform}" + (" (PyPI's is for CUDA)" if target.platform == "rocm" else "")
        )
    return found


def _torch_has_gpu():
    try:
        import torch

        return torch.cuda.is_available()  # ROCm's torch says so by the same name
    except Exception:
        return False


def _print_problems(problems):
    print()
    for problem in problems:
        print(f"PROBLEM  {problem}")
    if not problems:
        print("No problem found.")


def _one_line(error):
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"
