"""What happens at each call, and so what must be lean: from XLA's buffers to the function's arguments.

A callback here is a function `(ctx, *buffers)` that returns `()`: XLA's context of the call, then all inputs, then all
results.
"""

from __future__ import annotations

import ctypes
import functools
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax

from bridge._dlpack import load_torch, torch_dtype

if TYPE_CHECKING:
    import torch


def order_of(num_in: int, num_results: int, aliases: tuple) -> list[int]:
    """Which of a callback's buffers the function is passed, one after the other.

    An aliased input and output are one buffer: it is taken from the results, which are the ones that may be written.
    """
    result_of = {i: num_in + o for i, o in aliases}
    aliased = set(result_of.values())
    order = [result_of.get(i, i) for i in range(num_in)]
    return order + [r for r in range(num_in, num_in + num_results) if r not in aliased]


def require_utf8(error: BaseException) -> None:
    """Raises RuntimeError, whose text is `error`'s traceback, escaped, if UTF-8 cannot encode that.

    jaxlib (0.11) has what an error says, and the names of the files it came through, encoded, and crashes where they
    hold lone surrogates, as Python's names of files that are not UTF-8 do.
    """
    text = "".join(traceback.format_exception(error))
    escaped = text.encode(errors="backslashreplace").decode()
    if escaped != text:
        raise RuntimeError(escaped) from None


# Functions of tensors.


def on_cpu(run: Callable) -> Callable:
    """The callback for XLA's CPU runtime: `run` of the buffers, with gradients off."""
    torch = load_torch()

    def callback(_: Any, *buffers: Any) -> tuple:
        # no_grad's context manager takes several times as long as this.
        graded = torch.is_grad_enabled()
        if graded:
            torch.set_grad_enabled(False)
        try:
            run(buffers)
        except BaseException as error:
            require_utf8(error)
            raise
        finally:
            if graded:
                torch.set_grad_enabled(True)
        return ()

    return callback


def on_gpu(run: Callable) -> Callable:
    """The callback for XLA's GPU runtime: `run` of the buffers, on XLA's stream, with gradients off."""
    torch = load_torch()
    ungraded = on_cpu(run)

    def callback(ctx: Any, *buffers: Any) -> tuple:
        # What the context managers for streams and devices do, without what they look up again and again.
        _, device = buffers[-1].__dlpack_device__()
        device_before = torch.cuda.current_device()
        stream_before = torch.cuda.current_stream(device)
        torch.cuda.set_stream(_stream(ctx.stream, device))  # makes the device current, too
        try:
            return ungraded(ctx, *buffers)
        finally:
            torch.cuda.set_stream(stream_before)
            if device_before != device:
                torch.cuda.set_device(device_before)

    return callback


@functools.lru_cache(maxsize=64)
def _stream(pointer: int, device: int) -> torch.cuda.Stream:
    return load_torch().cuda.ExternalStream(pointer, device=device)


def writer(fn: Callable, name: str, num_in: int, result_avals: tuple, aliases: tuple) -> Callable:
    """A function of XLA's buffers that has `fn` write its outputs."""
    torch = load_torch()
    order = order_of(num_in, len(result_avals), aliases)
    written = [position for position, index in enumerate(order) if index >= num_in]
    shapes = [(position, result_avals[order[position] - num_in].shape) for position in written]

    def run(buffers: tuple) -> None:
        tensors = [torch.from_dlpack(buffers[index].__dlpack__()) for index in order]
        returned = fn(*tensors)
        if returned is not None and not any(returned is tensors[position] for position in written):
            raise TypeError(
                f"torch_call: {name} returned {_described(returned)}, which would be lost: out_type was given, so it "
                "must write to the output tensors it is passed last, and return None"
            )
        # torch moves an out= tensor of the wrong shape to other memory, where XLA would not see it.
        for position, shape in shapes:
            if tensors[position].shape != shape:
                raise TypeError(
                    f"torch_call: {name} changed the shape of an output from {tuple(shape)} to "
                    f"{tuple(tensors[position].shape)}; out_type must have the shape that it writes"
                )

    return run


def returner(fn: Callable, name: str, num_in: int, out_avals: tuple, out_tree: Any) -> Callable:
    """A function of XLA's buffers that copies out what `fn` returns."""
    torch = load_torch()
    end = num_in + len(out_avals)
    expected = [(aval.shape, torch_dtype(aval.dtype, name)) for aval in out_avals]

    def run(buffers: tuple) -> None:
        tensors = [torch.from_dlpack(buffer.__dlpack__()) for buffer in buffers]
        returned = fn(*tensors[:num_in], *tensors[end:])
        leaves, tree = jax.tree.flatten(returned)
        if tree != out_tree or expected != [
            (tuple(leaf.shape), leaf.dtype) if isinstance(leaf, torch.Tensor) else None for leaf in leaves
        ]:
            declared = _described(jax.tree.unflatten(out_tree, out_avals))
            raise TypeError(
                f"torch_call: {name} returned {_described(returned)}, but returned {declared} when it was traced; "
                "shapes and dtypes must not depend on values"
            )
        for output, leaf in zip(tensors[num_in:end], leaves, strict=True):
            output.copy_(leaf)

    return run


# Functions of addresses.


def launcher(fn: Callable, name: str, num_in: int, num_results: int, aliases: tuple, gpu: bool) -> Callable:
    """The callback that passes `fn` XLA's stream and the buffers' addresses."""
    order = order_of(num_in, num_results, aliases)
    words: Any = None

    def callback(ctx: Any, *buffers: Any) -> tuple:
        nonlocal words
        if words is None:
            words = _words_by_hash(buffers)
        if words:
            addresses = [words[hash(buffers[index])] for index in order]
        else:
            addresses = [_dlpack_address(buffers[index]) for index in order]
        try:
            returned = fn(ctx.stream if gpu else 0, *addresses)
        except BaseException as error:
            require_utf8(error)
            raise
        if returned is not None:
            raise TypeError(f"raw_call: {name} returned a {type(returned).__name__}, which would be lost")
        return ()

    return callback


def _words_by_hash(buffers: tuple) -> memoryview | bool:
    """`words`, of which `words[hash(buffer)]` is the address of a buffer's data, or False.

    jaxlib's `Buffer` gives its address away by DLPack, or on GPUs in a new dict, and either takes up to a microsecond.
    It also keeps it in a field. Which one is not documented, so it is the only one in which each of `buffers` has what
    DLPack says of it; if there is no such field, it is to be DLPack.

    The hash of an object that has no other is where it lies, by 16. `id` tells that, too, and so does ctypes, but both
    raise audit events, and an audit hook written in Python (filelock, which JAX imports, has one) takes longer than all
    the rest.
    """
    addresses = [_dlpack_address(buffer) for buffer in buffers]
    if not any(addresses) or any(hash(buffer) << 4 != id(buffer) for buffer in buffers):
        return False
    fields = range(object.__basicsize__, min(type(buffer).__basicsize__ for buffer in buffers), 8)
    found = [
        words
        for words in map(_every_other_word, fields)
        if all(words[hash(buffer)] == address for buffer, address in zip(buffers, addresses, strict=True))
    ]
    return found[0] if len(found) == 1 else False


@functools.cache
def _every_other_word(start: int) -> memoryview:
    """All memory: item `i` is the word of eight bytes at `start + 16 * i`."""
    return memoryview((ctypes.c_uint64 * (1 << 59)).from_address(start)).cast("B").cast("Q")[::2]


def _dlpack_address(buffer: Any) -> int:
    capsule = buffer.__dlpack__()
    # A DLManagedTensor begins with the address of the data, to which XLA's have no offset.
    return _word_at(_capsule_pointer(capsule, b"dltensor")).value


_word_at = ctypes.c_size_t.from_address
_capsule_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)


def _described(tree: Any) -> str:
    """The tree with each tensor or aval given as dtype[sizes], other leaves by their types."""

    def describe(leaf: Any) -> _Bare:
        if hasattr(leaf, "shape") and hasattr(leaf, "dtype"):
            return _Bare(f"{str(leaf.dtype).removeprefix('torch.')}[{','.join(map(str, leaf.shape))}]")
        return _Bare(type(leaf).__name__)

    return repr(jax.tree.map(describe, tree))


class _Bare(str):
    __slots__ = ()
    __repr__ = str.__str__
