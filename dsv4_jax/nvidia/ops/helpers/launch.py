"""Compiles CuTeDSL kernels, once a key, while an op is lowered; launches them on the buffers of a running program."""

import ctypes
import dataclasses
import functools
import threading
from typing import NamedTuple

import cuda.bindings.driver as cuda
import cutlass.cute as cute
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
def compiled(kernel, shape: Shape, arch: str):
    """The function `kernel(arguments, stream)` for one target. Needs no GPU; takes about a second."""
    nothing = Arguments(*(kind(0) for kind in Arguments.__annotations__.values()))
    return cute.compile(kernel, nothing, make_fake_stream(), shape, options=f"--gpu-arch {arch}")


@_once
def loaded(kernel, shape: Shape, arch: str):
    """The compiled function with its code on every GPU of this process."""
    try:
        return compiled(kernel, shape, arch).to()
    except Exception as error:
        error.add_note(
            f"The CuTeDSL kernel for {arch} could not be compiled and loaded. Installed: "
            f"{platforms.installed_cutlass()}; the cu13 libraries are for CUDA 13, the cu12 ones for CUDA 12. "
            "implementation='triton' does without them"
        )
        raise


@dataclasses.dataclass(frozen=True)
class Launch:
    """A function `(stream, *addresses)`, the addresses named by `names` in their order, that launches a kernel.

    May run while a CUDA graph is recorded, and on several threads at once.
    """

    kernel: object
    shape: Shape
    arch: str
    names: tuple[str, ...]
    numbers: tuple[tuple[str, int], ...]

    @property
    def __name__(self) -> str:
        return self.kernel.__name__

    def __post_init__(self):
        object.__setattr__(self, "_function", loaded(self.kernel, self.shape, self.arch))
        object.__setattr__(self, "_given", 1 + len(self.names))
        object.__setattr__(self, "_of_thread", {})

    def __call__(self, *stream_and_addresses: int) -> None:
        values, launch, pointers = self._of_thread.get(threading.get_ident()) or self._prepared()
        values[: self._given] = stream_and_addresses
        launch()
        if values[-1]:
            self._function.run_compiled_program(pointers)  # again, to raise what the error is

    def _prepared(self) -> tuple:
        """What a thread launches with: every argument in eight bytes of one array, and a call that has their addresses.

        Calling the compiled function with Python objects instead would convert them one by one, at several microseconds
        each.

        It is kept by the thread's number, as no two threads have one number at a time. A `threading.local` would be
        empty at every call on a thread that Python did not start, as XLA's own are.
        """
        given, numbers = ("stream", *self.names), dict(self.numbers)
        names = given + tuple(name for name in Arguments._fields if name not in given) + ("error",)
        values = (ctypes.c_int64 * len(names))(*(numbers.get(name, 0) for name in names))
        address = {name: ctypes.addressof(values) + 8 * i for i, name in enumerate(names)}
        pointers = [ctypes.c_void_p(address[name]) for name in (*Arguments._fields, "stream")]
        held = values, launcher(self._function, pointers, address["error"]), pointers
        return self._of_thread.setdefault(threading.get_ident(), held)


def launcher(function, pointers: list, error: int):
    """`function.run_compiled_program` on pointers to arguments that stay where they are.

    That packs them at every call, which takes longer than the launch; this packs them once and calls the C function,
    which cutlass keeps in attributes that it does not document. Where they are missing, it is `run_compiled_program`.

    Args:
      function: what `loaded` returns.
      pointers: `ctypes.c_void_p` to the arguments.
      error: the address of an int32 for the CUDA error, 0 if there is none. `run_compiled_program` raises it itself.
    """
    if packs_as_here(function):
        packed = (ctypes.c_void_p * (len(pointers) + 1))(*pointers, error)
        # Without types of arguments and result ctypes has nothing to convert, which halves what it takes.
        untyped = ctypes.CFUNCTYPE(None)(ctypes.cast(function.capi_func, ctypes.c_void_p).value)
        return functools.partial(untyped, ctypes.byref(packed))
    return functools.partial(function.run_compiled_program, pointers)


def packs_as_here(function) -> bool:
    """Whether a C function takes its arguments' addresses and last that of an int32, the error; see `launcher`."""
    c_function = getattr(function, "capi_func", None)
    return (
        getattr(c_function, "argtypes", None) == (ctypes.c_void_p,)
        and isinstance(getattr(function, "cuda_result", None), ctypes.c_int32)
        and getattr(function, "exec_context", 0) is None
    )
