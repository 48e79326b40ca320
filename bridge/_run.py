"""What happens at each call, and so what must be lean: from XLA's buffers to the function's tensors.

A callback is what `buffer_callback` takes, a function `(ctx, results, *inputs)`: XLA's context of the call, then its
buffers.
"""

from __future__ import annotations

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


def on_cpu(run: Callable) -> Callable:
    """The callback for XLA's CPU runtime: `run` of the buffers, with gradients off."""
    torch = load_torch()

    def callback(_: Any, results: list, *inputs: Any) -> None:
        # no_grad's context manager takes several times as long as this.
        graded = torch.is_grad_enabled()
        if graded:
            torch.set_grad_enabled(False)
        try:
            run([*inputs, *results])
        except BaseException as error:
            require_utf8(error)
            raise
        finally:
            if graded:
                torch.set_grad_enabled(True)

    return callback


def on_gpu(run: Callable) -> Callable:
    """The callback for XLA's GPU runtime: `run` of the buffers, on XLA's stream, with gradients off."""
    torch = load_torch()
    ungraded = on_cpu(run)

    def callback(ctx: Any, results: list, *inputs: Any) -> None:
        # What the context managers for streams and devices do, without what they look up again and again.
        _, device = results[0].__dlpack_device__()
        device_before = torch.cuda.current_device()
        stream_before = torch.cuda.current_stream(device)
        torch.cuda.set_stream(_stream(ctx.stream, device))  # makes the device current, too
        try:
            ungraded(ctx, results, *inputs)
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

    def run(buffers: list) -> None:
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

    def run(buffers: list) -> None:
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
