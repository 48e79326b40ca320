"""`python -m dsv4_jax doctor`: what can run here, what is missing, and what is known to break."""

import os
import pkgutil
import platform

from dsv4_jax import platforms

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

        where, devices = jax_platform(), jax.devices()
    except Exception as error:
        _print_problems([f"JAX does not start: {_one_line(error)}", *bad])
        return 1
    print(f"{'platform':20}{where}  ({len(devices)} x {devices[0].device_kind}; jax.default_backend() is "
          f"{jax.default_backend()!r})")  # fmt: skip

    _print_ops(where)
    failures = {name: error for name in platforms.IMPLEMENTATIONS if (error := _failure(name, where))}
    problems = [f"{name} should run here but does not: {error}" for name, error in failures.items()]
    problems = bad + problems + _other_problems(where)
    _print_problems(problems)
    return 1 if problems else 0


def jax_platform() -> str:
    """The platform that JAX compiles for by default: "cpu", "cuda", "rocm" or "tpu"."""
    import jax

    backend = jax.default_backend()
    if backend != "gpu":
        return backend
    return "rocm" if "rocm" in jax.devices()[0].client.platform_version.lower() else "cuda"


def ops() -> list[str]:
    """Names of the ops: the public names that are modules of `common/reference`."""
    import dsv4_jax
    import dsv4_jax.common.reference

    folder = dsv4_jax.common.reference.__path__
    return [module.name for module in pkgutil.iter_modules(folder) if module.name in dsv4_jax.__all__]


def _print_ops(where):
    names = ops()
    width = max(map(len, names)) + 2
    print("\n" + "op".ljust(width) + "".join(name.ljust(12) for name in platforms.IMPLEMENTATIONS) + "the switch takes")
    reasons, by_size = {}, False
    for op in names:
        line = op.ljust(width)
        for implementation in platforms.IMPLEMENTATIONS:
            if implementation not in platforms.implementations(op):
                line += "-".ljust(12)  # not written
                continue
            why = platforms.why_not(implementation, op, where)
            line += ("no" if why else "yes").ljust(12)
            if why:
                reasons.setdefault((implementation, why), []).append(op)
        taken = platforms.choices(op, where)
        by_size |= len(taken) > 1
        print(line + ", ".join(taken))
    if by_size:
        print("Where it takes two, which one is by compressor and size: docs/platforms.md.")
    if name := os.environ.get("DSV4_JAX_IMPLEMENTATION"):
        print(f"DSV4_JAX_IMPLEMENTATION={name} overrides the switch.")
    print()
    for implementation, needs in NEEDS.items():
        print(f"{implementation:9} needs {needs}")
    for (implementation, why), without in reasons.items():
        print(f"no {implementation} for {'any op' if without == names else ', '.join(without)}: {why}")


def _failure(implementation, where):
    """Why an implementation that should run here does not, or None: the smallest op, once."""
    if platforms.why_not(implementation, "save_partial_states", where):
        return None
    try:
        import jax.numpy as jnp

        import dsv4_jax

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


def _other_problems(where):
    found = []
    try:
        name = platforms.default_implementation()
    except ValueError as error:
        found.append(str(error))
    else:
        if name and (why := platforms.why_not(name, "compress", where)):
            found.append(f"DSV4_JAX_IMPLEMENTATION is {name!r}, which cannot run on {where}: {why}")
    # JAX on CUDA 13 cannot share a process with CuTeDSL's default libraries, which are those of CUDA 12.
    cuda13 = any(platforms.installed(package) for package in ("jax-cuda13-plugin", "jax-cuda13-pjrt"))
    dsl, dsl13 = (platforms.installed(f"nvidia-cutlass-dsl{end}") for end in ("", "-libs-cu13"))
    if cuda13 and dsl and not dsl13:
        found.append("JAX is for CUDA 13, CuTeDSL is not: pip install nvidia-cutlass-dsl-libs-cu13")
    if where in ("cuda", "rocm") and platforms.installed("torch") and not _torch_has_gpu():
        found.append(
            "JAX has a GPU and torch has none: the bridge cannot run torch code on JAX's arrays; install the torch "
            f"build for {where}"
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
