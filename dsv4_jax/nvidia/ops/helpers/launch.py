"""Compiles CuTeDSL kernels, once a key, while an op is lowered; launches them on the buffers of a running program."""

import ctypes
import dataclasses
import functools
import threading
from collections.abc import Callable
from typing import NamedTuple

import cuda.bindings.driver as cuda
import cutlass.cute as cute
import torch
from cutlass import Int32, Int64
from cutlass.cute.runtime import make_fake_stream

from dsv4_jax import platforms


@dataclasses.dataclass(frozen=True)
class Shape:
    """All that a kernel is specialized for; with the kernel and the target it is the key of the compiled function.

    Numbers of tokens, windows, pages and requests are not in it: they are arguments. (Many windows have another
    `resident` than few.)

    Attributes:
      ratio, window, head_dim, width, rope_dim, eps, page_rows, kv_page_rows: of the `CompressorConfig`.
      format: of the cache, or "compressed": float32 rows before RMSNorm, by window.
      page_bytes: of a cache page.
      dtype: of `kv_score`, or None: every row comes from the state cache.
      norm_dtype: of the norm weight.
      save: "tail", "all" or "none".
      resident: CTAs for which a multiprocessor must have registers.
    """

    ratio: int
    window: int
    head_dim: int
    width: int
    rope_dim: int
    eps: float
    page_rows: int
    kv_page_rows: int
    format: str
    page_bytes: int
    dtype: str | None
    norm_dtype: str
    save: str
    resident: int

    @property
    def overlap(self) -> bool:
        return self.window > self.ratio

    @property
    def from_batch(self) -> bool:
        return self.dtype is not None


class Arguments(NamedTuple):
    """What a kernel is launched with: addresses (0: not used), lengths, and the number of CTAs."""

    closing: Int64
    window_slots: Int64
    kv_score: Int64
    ape: Int64
    state_cache: Int64
    saving: Int64
    positions: Int64
    slot_mapping: Int64
    kv_cache: Int64
    norm_weight: Int64
    cos_sin: Int64
    kv_scale: Int64
    compressed: Int64
    tokens: Int32
    state_pages: Int32
    kv_pages: Int32
    table_rows: Int32
    windows: Int32
    saved: Int32
    blocks: Int32


STREAM = cuda.CUstream


_ONE_AT_A_TIME = threading.RLock()


def _once(function):
    """`function`, run once for the same arguments, and on one thread at a time.

    `cute.compile` rewrites the code of the kernels' functions and has global state.
    """
    cached = functools.cache(function)

    @functools.wraps(function)
    def locked(*args):
        with _ONE_AT_A_TIME:
            return cached(*args)

    return locked


@_once
def compile_kernel(kernel, shape: Shape, arch: str):
    """The function `kernel(arguments, stream)` for one target. Needs no GPU; takes about a second."""
    nothing = Arguments(*(kind(0) for kind in Arguments.__annotations__.values()))
    return cute.compile(kernel, nothing, make_fake_stream(), shape, options=f"--gpu-arch {arch}")


@_once
def load_kernel(kernel, shape: Shape, arch: str):
    """The compiled function with its code on every GPU of this process."""
    try:
        return compile_kernel(kernel, shape, arch).to()
    except Exception as error:
        error.add_note(
            f"The CuTeDSL kernel for {arch} could not be compiled and loaded. Installed: "
            f"{platforms.installed_cutlass()}; the cu13 libraries are for CUDA 13, the cu12 ones for CUDA 12. "
            "implementation='triton' does without them"
        )
        raise


class Packed:
    """Words of eight bytes that a compiled function takes as they are, by cutlass's protocol for types of one's own.

    Converting Python numbers one by one, as cutlass does otherwise, takes longer than the launch.
    """

    def __init__(self, *values: int):
        self.words = (ctypes.c_int64 * len(values))(*values)
        first = ctypes.addressof(self.words)
        self._pointers = [ctypes.c_void_p(first + 8 * i) for i in range(len(values))]

    def __c_pointers__(self) -> list[ctypes.c_void_p]:
        return self._pointers


@dataclasses.dataclass(frozen=True)
class Launch:
    """A function of tensors, of which `names` has the names in their order, that launches a kernel on torch's stream.

    May run while a CUDA graph is recorded, and on several threads at once.
    """

    kernel: Callable
    shape: Shape
    arch: str
    names: tuple[str, ...]
    numbers: tuple[tuple[str, int], ...]

    @property
    def __name__(self) -> str:
        return self.kernel.__name__

    def __post_init__(self):
        object.__setattr__(self, "_function", load_kernel(self.kernel, self.shape, self.arch))
        object.__setattr__(self, "_places", [Arguments._fields.index(name) for name in self.names])
        object.__setattr__(self, "_spare", [])  # arguments that no launch is using

    def __call__(self, *tensors: torch.Tensor) -> None:
        try:
            arguments, stream = self._spare.pop()
        except IndexError:
            numbers = dict(self.numbers)
            arguments, stream = Packed(*(numbers.get(name, 0) for name in Arguments._fields)), Packed(0)
        for place, tensor in zip(self._places, tensors, strict=True):
            arguments.words[place] = tensor.data_ptr()
        stream.words[0] = torch.cuda.current_stream().cuda_stream
        self._function(arguments, stream)
        self._spare.append((arguments, stream))
