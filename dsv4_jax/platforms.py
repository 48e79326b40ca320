"""Facts about platforms: what a program is lowered for, what is installed, and why an implementation cannot run."""

import contextlib
import contextvars
import functools
import importlib.metadata
import os
import sys
from typing import Literal, NamedTuple, get_args

from dsv4_jax import gpus

Implementation = Literal["xla", "triton", "cutedsl"]
IMPLEMENTATIONS: tuple[Implementation, ...] = get_args(Implementation)
GPUS = ("cuda", "rocm")

# Pairs of versions that are known not to work together: a package from and up to a version, both included, another
# package likewise, and what happens.
KNOWN_BAD = (
    ("jax", (0, 12), None, "jax-triton", None, (0, 4, 0), "jax-triton up to 0.4.0 fails at the first lowering"),
    ("triton", None, (3, 6), "jax-triton", (0, 4, 1), None, "jax-triton 0.4.1 needs a name that Triton got in 3.7"),
)


class Target(NamedTuple):
    """What a program is lowered for.

    Attributes:
      platform: "cpu", "cuda", "rocm" or "tpu".
      arch: of the GPU, "sm_90" or "gfx942"; None on other platforms, and where nothing says which GPU.
    """

    platform: str
    arch: str | None = None


_lowered_for: contextvars.ContextVar[Target] = contextvars.ContextVar("the target of the op that is lowered")


def target(platform: str) -> Target:
    """The target of a platform: of GPUs the one of `gpus.arch`."""
    return Target(platform, gpus.arch(platform) if platform in GPUS else None)


@contextlib.contextmanager
def lowering(target: Target):
    """While an op is lowered; tells its kernels the target, of which their launch parameters depend."""
    token = _lowered_for.set(target)
    try:
        yield
    finally:
        _lowered_for.reset(token)


def lowered_for() -> Target:
    """The target of the op that is lowered now."""
    return _lowered_for.get()


def default_target() -> Target:
    """The target that JAX compiles for by default."""
    import jax

    backend = jax.default_backend()
    if backend != "gpu":
        return Target(backend)
    return target("rocm" if "rocm" in jax.devices()[0].client.platform_version.lower() else "cuda")


def default_implementation() -> str | None:
    """The implementation that `DSV4_JAX_IMPLEMENTATION` names, or None: the switch chooses."""
    name = os.environ.get("DSV4_JAX_IMPLEMENTATION") or None
    if name is not None and name not in IMPLEMENTATIONS:
        raise ValueError(f"DSV4_JAX_IMPLEMENTATION is {name!r}; it must be one of {', '.join(IMPLEMENTATIONS)}")
    return name


def why_not(implementation: str, target: Target) -> str | None:
    """None where an implementation can run on a target, else why not and what would."""
    if implementation == "triton":
        return _why_no_triton(target.platform) or (gpus.why_no_triton(target.arch) if target.arch else None)
    return _why_no_cutedsl(target) if implementation == "cutedsl" else None


def _why_no_triton(platform):
    versions = map(installed, ("triton", "pytorch-triton-rocm", "triton-rocm"))
    version = next(filter(None, versions), None)
    if version is None:
        if platform == "cpu":
            return "triton is not installed; its interpreter needs triton and torch, or use implementation='xla'"
        return "triton is not installed; install dsv4-jax[cuda13] or dsv4-jax[rocm]"
    if numbers(version) < (3, 8):
        return f"triton {version} is installed; the kernels need 3.8 or newer, which has triton.aggregate"
    if platform in GPUS:
        if not installed("jax-triton"):
            return "jax-triton is not installed; install dsv4-jax[cuda13] or dsv4-jax[rocm]"
        return None
    if platform != "cpu":
        return f"Triton has no backend for {platform}; use implementation='xla'"
    interprets = os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "on", "yes", "y")
    # Set when Triton was imported, too? Its own functions are of one kind or the other from then on.
    if language := sys.modules.get("triton.language"):
        interprets &= not hasattr(language.sum, "device_caches")
    if not interprets:
        return (
            "on the CPU Triton kernels run only in Triton's interpreter; set TRITON_INTERPRET=1 before anything "
            "imports triton, or use implementation='xla'"
        )
    if not installed("torch"):
        return "Triton's interpreter needs torch, which is not installed"
    return None


def _why_no_cutedsl(target):
    if target.platform != "cuda":
        return (
            f"CuTeDSL kernels run on NVIDIA GPUs only, not on {target.platform}; with implementation=None, compress "
            f"and compress_norm_rope_store run on {target.platform} too"
        )
    capability = gpus.compute_capability(target.arch) if target.arch else None
    if capability is not None and capability < 90:
        return (
            f"CuTeDSL kernels use thread block clusters, which GPUs have from sm_90 on; this one is {target.arch}. "
            "implementation='triton' runs on it"
        )
    without = "implementation='triton' does without, and is what the switch takes where it is not installed"
    if not installed("nvidia-cutlass-dsl"):
        return f"nvidia-cutlass-dsl is not installed; install dsv4-jax[cuda13]. {without}"
    if error := _cutlass_import_error():
        return (
            f"nvidia-cutlass-dsl cannot be imported: {error}. Installed: {installed_cutlass()}; the cu13 libraries are "
            f"for CUDA 13, the cu12 ones for CUDA 12. {without}"
        )
    if "+cpu" in (installed("torch") or "+cpu"):
        return (
            f"CuTeDSL kernels are called through a torch for CUDA, which is not installed: pip install torch. {without}"
        )
    return None


@functools.cache
def _cutlass_import_error():
    try:
        import cutlass.cute  # noqa: F401
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def installed_cutlass() -> str:
    """The installed packages of cutlass-dsl and their versions."""
    names = ("nvidia-cutlass-dsl" + end for end in ("", "-libs-base", "-libs-core", "-libs-cu12", "-libs-cu13"))
    return ", ".join(f"{name} {installed(name)}" for name in names if installed(name)) or "no nvidia-cutlass-dsl"


def known_bad_pairs() -> list[tuple[str, str]]:
    """The installed pairs of packages that are known not to work together, each with what happens."""
    found = []
    for package, least, most, other, other_least, other_most, what in KNOWN_BAD:
        version, other_version = installed(package), installed(other)
        if not version or not other_version:
            continue
        if (least and numbers(version) < least) or (most and numbers(version)[:2] > most):
            continue
        number = numbers(other_version)
        if (other_least and number < other_least) or (other_most and number > other_most):
            continue
        found.append((f"{package} {version} with {other} {other_version}", what))
    return found


@functools.cache
def installed(package: str) -> str | None:
    """The version of an installed package, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: `"3.8.0+git1"` gives `(3, 8, 0)`."""
    parts = []
    for part in version.split("+")[0].split("."):
        if not part.isdigit():
            break
        parts.append(int(part))
    return tuple(parts)
