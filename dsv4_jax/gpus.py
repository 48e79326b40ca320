"""Facts about GPU architectures, and which one a program is lowered for.

An architecture is named "sm_90" on NVIDIA's platform and "gfx942" on AMD's, where "gfx" is followed by the generation
and two more digits.
"""

import jax


def arch(platform: str) -> str | None:
    """The architecture that a program is lowered for on "cuda" or "rocm", None if nothing says which.

    That of the abstract device of `jax.sharding.use_abstract_mesh`, so that a program can be lowered for another
    machine's GPU, else that of the first local one. Raises ValueError for an abstract device that JAX does not know.
    """
    local = _local_device(platform)
    abstract = jax.sharding.get_abstract_mesh().abstract_device
    # A mesh of local devices has an abstract device, too, of the same kind.
    if (
        abstract
        and abstract.platform in ("gpu", platform)
        and not (local and local.device_kind == abstract.device_kind)
    ):
        from jax.experimental.pallas import triton

        name = triton.get_gpu_info().arch_name
    elif local:
        name = local.compute_capability
    else:
        return None
    # JAX calls them "9.0" and "gfx942:sramecc+:xnack-".
    return "sm_" + name.replace(".", "") if platform == "cuda" else name.split(":")[0]


def _local_device(platform):
    try:
        return jax.local_devices(backend=platform)[0]
    except RuntimeError:  # no such backend
        return None


def how_to_name(platform: str) -> str:
    """How to lower for a GPU that this machine does not have."""
    kind = {"cuda": "NVIDIA H200", "rocm": "gfx942"}[platform]
    return (
        "lower inside jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), axis_types=(), abstract_device="
        f"jax.sharding.AbstractDevice({kind!r}, None, 'gpu')))"
    )


def compute_capability(arch: str) -> int | None:
    """90 for "sm_90"; None on AMD."""
    return int(arch.removeprefix("sm_")) if arch.startswith("sm_") else None


def wave_size(arch: str) -> int:
    """Threads of a warp: 64 on AMD's GCN and CDNA (gfx9), 32 on RDNA and on NVIDIA's GPUs."""
    return 64 if arch.startswith("gfx") and int(arch.removeprefix("gfx")[:-2]) < 10 else 32


def why_no_triton(arch: str) -> str | None:
    """Why Triton's kernels cannot run, or None."""
    if arch.startswith("gfx") and wave_size(arch) != 64:
        return (
            f"{arch} has waves of {wave_size(arch)} threads, and on ROCm jaxlib starts Triton's kernels in waves of "
            "64; use implementation='xla'"
        )
    return None


def why_no_fp8(arch: str) -> str | None:
    """Why Triton's kernels cannot convert to and from float8_e4m3fn, or None."""
    capability = compute_capability(arch)
    if capability is not None and capability < 89:
        return (
            f"Triton converts float8_e4m3fn on NVIDIA GPUs from sm_89 on, and this one is {arch}; use "
            "implementation='xla'"
        )
    return None
