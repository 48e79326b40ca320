"""The GPU that a program is lowered for: its architecture, and what Triton can do there."""

import contextlib
import contextvars
from typing import NamedTuple

import jax

class Gpu(NamedTuple):
    """A kind of GPU.

    Attributes:
      platform: "cuda" or "rocm", as JAX names what it lowers for.
      arch: "sm_90" or "gfx942".
    """

    platform: str
    arch: str

    @property
    def compute_capability(self) -> int | None:
        """Of an NVIDIA GPU, 90 for 9.0; else None."""
        return int(self.arch.removeprefix("sm_")) if self.platform == "cuda" else None

    @property
    def wave_size(self) -> int:
        """Threads of a warp: 64 on AMD's GCN and CDNA, 32 on RDNA (gfx10 and later) and on NVIDIA's GPUs."""
        # gfx942 is generation 9, gfx1201 is 12: two hexadecimal digits follow it.
        return 64 if self.platform == "rocm" and int(self.arch.removeprefix("gfx")[:-2]) < 10 else 32

    def why_no_triton(self) -> str | None:
        """Why no Triton kernel runs here, or None."""
        if self.platform == "rocm" and self.wave_size == 32:
            return (
                f"{self.arch} has waves of 32 threads, and jaxlib starts Triton's kernels on ROCm with waves of 64; "
                "use implementation='xla'"
            )
        return None

    def why_no_fp8(self) -> str | None:
        """Why Triton cannot convert to or from float8_e4m3fn here, or None."""
        if self.platform == "cuda" and self.compute_capability < 89:
            return (
                f"Triton converts float8_e4m3fn on NVIDIA GPUs from sm_89 on, and this is {self.arch}; use "
                "implementation='xla'"
            )
        return None


def find(platform: str) -> Gpu | None:
    """The GPU that a program is lowered for on "cuda" or "rocm": the abstract device's, else the first local one.

    None if there is neither. Raises ValueError for an abstract device that JAX cannot map to an architecture.
    """
    local = _local_device(platform)
    abstract = jax.sharding.get_abstract_mesh().abstract_device
    if abstract is not None and abstract.platform in ("gpu", platform):
        # A mesh of local devices has an abstract device, too, which says no more than they do.
        if local is None or abstract.device_kind != local.device_kind:
            return _of_abstract_device(platform)
    return local and _gpu(platform, local.compute_capability)


def _of_abstract_device(platform):
    from jax.experimental.pallas import triton

    return _gpu(platform, triton.get_gpu_info().arch_name)


def _gpu(platform, arch):
    """From JAX's name of an architecture: "9.0" or "gfx942:sramecc+:xnack-"."""
    return Gpu(platform, "sm_" + arch.replace(".", "") if platform == "cuda" else arch.split(":")[0])


def _local_device(platform):
    try:
        return jax.local_devices(backend=platform)[0]
    except RuntimeError:  # no such backend
        return None


_lowered_for: contextvars.ContextVar[str | None] = contextvars.ContextVar("platform", default=None)


@contextlib.contextmanager
def lowering(platform: str):
    """While an op is lowered for `platform`: `target` tells its kernels what for."""
    token = _lowered_for.set(platform)
    try:
        yield
    finally:
        _lowered_for.reset(token)


def target() -> Gpu:
    """The GPU that the op is lowered for; raises RuntimeError if nothing says which."""
    platform = _lowered_for.get()
    assert platform is not None, "a kernel is launched outside of an op's lowering"
    gpu = find(platform)
    if gpu is None:
        kind = {"cuda": "NVIDIA H200", "rocm": "gfx942"}[platform]
        raise RuntimeError(
            f"Triton must know which GPU it compiles for, and this machine has none of {platform}; lower inside "
            "jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), axis_types=(), abstract_device="
            f"jax.sharding.AbstractDevice({kind!r}, None, 'gpu'))), or use implementation='xla'"
        )
    return gpu
