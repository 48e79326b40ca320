"""The platform switch: which implementation runs where, and why another cannot."""

import functools
import importlib.metadata
import importlib.util
import os
import sys
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from dsv4_jax.config import CompressorConfig

IMPLEMENTATIONS = ("xla", "triton", "cutedsl")

# Where each implementation of an op lives; `{op}` is the op's name. A module is imported only where it is used.
MODULES = {
    "xla": "dsv4_jax.common.reference.{op}",
    "triton": "dsv4_jax.common.ops.{op}",
    "cutedsl": "dsv4_jax.nvidia.ops.{op}",
}

# Pairs of versions that are known not to work together: a package from and up to a version, both included, another
# package likewise, and what happens.
KNOWN_BAD = (
    ("jax", (0, 12), None, "jax-triton", None, (0, 4, 1), "jax-triton up to 0.4.1 fails at the first lowering"),
    ("triton", None, (3, 6), "jax-triton", (0, 4, 1), None, "jax-triton 0.4.1 needs a name that Triton got in 3.7"),
)


class Faster(NamedTuple):
    """Where CuTeDSL is taken: an op of one compressor, on a GPU, for so many tokens, of a prefill or of a decode."""

    op: str
    compute_capability: str
    layout: tuple  # compress_ratio, overlap
    dtypes: tuple[str, ...]  # of kv_score
    save: str
    tokens: range
    prefill: bool = True  # as `metadata.prefill`


# Where CuTeDSL took clearly less time in docs/measurements/h200_triton_cutedsl.json, h200_triton_cutedsl_long.json and,
# for long prefills of HCA, h200_hca_prefill.json: by 0.4 us (HCA, one token) to 46 us (CSA of bfloat16, 131072 tokens).
# Other decodes, save="all", and sizes in between are Triton's; 16384 tokens of HCA take both as long. Where XLA does
# not capture the call in a command buffer, Python launches it, at a few microseconds more than Triton's launch.
CUTEDSL_FASTER = (
    Faster("compress", "9.0", (4, True), ("float32", "bfloat16"), "tail", range(8192, 2**31)),
    Faster("compress", "9.0", (128, False), ("float32", "bfloat16"), "tail", range(512, 2049)),
    Faster("compress", "9.0", (128, False), ("float32", "bfloat16"), "tail", range(32768, 2**31)),
    Faster("compress", "9.0", (128, False), ("float32", "bfloat16"), "tail", range(1, 2), prefill=False),
)


def default_implementation() -> str | None:
    """The implementation that `DSV4_JAX_IMPLEMENTATION` names, or None: the switch chooses."""
    name = os.environ.get("DSV4_JAX_IMPLEMENTATION") or None
    if name is not None and name not in IMPLEMENTATIONS:
        raise ValueError(f"DSV4_JAX_IMPLEMENTATION is {name!r}; it must be one of {', '.join(IMPLEMENTATIONS)}")
    return name


def choose(
    op: str,
    platform: str,
    config: "CompressorConfig | None" = None,
    batch=None,
    save: str = "tail",
    prefill: bool = False,
) -> str:
    """The implementation that the switch takes.

    Args:
      op: its name.
      platform: "cpu", "cuda", "rocm" or "tpu".
      config: the compressor, if the op has one.
      batch: the op's first array, `[T, ...]`, or its type. Without these two, what is taken for small batches.
      save: as `compress` takes it.
      prefill: `metadata.prefill`.
    """
    if platform not in ("cuda", "rocm"):
        return "xla"
    if config is not None and batch is not None and _cutedsl_is_faster(op, platform, config, batch, save, prefill):
        return "cutedsl"
    return "triton" if why_not("triton", op, platform) is None else "xla"


def choices(op: str, platform: str) -> list[str]:
    """All implementations that the switch takes for an op here, by size; the one for small batches first."""
    also = _measured_here([faster for faster in CUTEDSL_FASTER if faster.op == op], op, platform)
    return [choose(op, platform), *(["cutedsl"] if also else [])]


def _cutedsl_is_faster(op, platform, config, batch, save, prefill):
    case = op, (config.compress_ratio, config.overlap), save, prefill
    measured = [
        f
        for f in CUTEDSL_FASTER
        if (f.op, f.layout, f.save, f.prefill) == case and batch.dtype.name in f.dtypes and batch.shape[0] in f.tokens
    ]
    return _measured_here(measured, op, platform, config)


def _measured_here(measured, op, platform, config=None):
    """Whether some of these were measured on such a GPU as is here, and CuTeDSL runs."""
    if not measured or why_not("cutedsl", op, platform, config) is not None:
        return False
    return _compute_capability() in [faster.compute_capability for faster in measured]


def _compute_capability():
    """Of the first NVIDIA GPU, as "9.0"; None if there is none, as when a program is lowered for another machine."""
    import jax

    try:
        return jax.local_devices(backend="cuda")[0].compute_capability
    except RuntimeError:
        return None


def why_not(implementation: str, op: str, platform: str, config: "CompressorConfig | None" = None) -> str | None:
    """None where the implementation of an op can run, for a compressor if one is given, else why not and what would."""
    if implementation == "xla":
        return None
    if importlib.util.find_spec(MODULES[implementation].format(op=op)) is None:
        return f"{op} has no {implementation} implementation; use one of {', '.join(implementations(op))}"
    if implementation == "triton":
        return _why_no_triton(platform)
    return _why_no_cutedsl(platform, config)


def implementations(op: str) -> tuple[str, ...]:
    """The implementations that an op has, on whatever platform."""
    return tuple(i for i in IMPLEMENTATIONS if importlib.util.find_spec(MODULES[i].format(op=op)) is not None)


def _why_no_triton(platform):
    if not any(map(installed, ("triton", "pytorch-triton-rocm", "triton-rocm"))):
        if platform == "cpu":
            return "triton is not installed; its interpreter needs triton and torch, or use implementation='xla'"
        return "triton is not installed; install dsv4-jax[cuda13] or dsv4-jax[rocm]"
    if platform in ("cuda", "rocm"):
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


def _why_no_cutedsl(platform, config):
    if platform != "cuda":
        return (
            f"CuTeDSL kernels run on NVIDIA GPUs only, not on {platform}; with implementation=None, compress and "
            f"compress_norm_rope_store run on {platform} too"
        )
    if not installed("nvidia-cutlass-dsl"):
        return "nvidia-cutlass-dsl is not installed; install dsv4-jax[cuda13], or use implementation='triton'"
    if config is not None:
        from dsv4_jax.nvidia.ops import support

        return support.why_not(config)
    return None


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
