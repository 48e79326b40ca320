"""What a function returns, found by running it on fake tensors, which have shapes and dtypes and no memory."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import jax

from bridge._dlpack import jax_dtype, load_torch, torch_dtype


def infer(fn: Callable, name: str, in_avals: tuple, scratch_avals: tuple) -> tuple[tuple, Any]:
    """The avals and the structure of what `fn` returns; found once for each case, for as long as `fn` lives."""
    case = (name, in_avals, scratch_avals, _fake_device(), jax.config.jax_enable_x64)
    try:
        known = _KNOWN.setdefault(fn, {})
    except TypeError:  # no weak references to such a callable
        known = {}
    if case not in known:
        known[case] = _infer(fn, *case[:4])
    return known[case]


_KNOWN: weakref.WeakKeyDictionary[Callable, dict] = weakref.WeakKeyDictionary()


def _fake_device() -> str:
    # Code for GPUs often asserts that its tensors are there. Fake ones can be only if torch can make real ones too.
    return "cuda" if jax.default_backend() == "gpu" and load_torch().cuda.is_available() else "cpu"


def _infer(fn: Callable, name: str, in_avals: tuple, scratch_avals: tuple, device: str) -> tuple[tuple, Any]:
    torch = load_torch()
    from torch._subclasses import FakeTensorMode

    # Real tensors may appear: those that fn closes over, such as weights. Code that torch.compile has made reads
    # memory, so what it was made from is run instead.
    with (
        FakeTensorMode(allow_non_fake_inputs=True),
        torch.no_grad(),
        torch.compiler.set_stance("force_eager"),
    ):
        fakes = [
            torch.empty(aval.shape, dtype=torch_dtype(aval.dtype, name), device=device)
            for aval in in_avals + scratch_avals
        ]
        try:
            returned = fn(*fakes)
        except Exception as error:
            raise TypeError(
                f"torch_call: out_type of {name} could not be inferred, as running it on fake tensors raised "
                f"{type(error).__name__}: {error}. Pass out_type, and let it write its outputs"
            ) from error
    for i, fake in enumerate(fakes[: len(in_avals)]):
        if fake._version:
            raise TypeError(
                f"torch_call: {name} writes to its input {i} in place, which JAX takes to be immutable; let it work "
                "on a clone, or pass out_type and input_output_aliases"
            )
    if returned is None:
        raise TypeError(
            f"torch_call: {name} returned None; it must return tensors, or out_type be given for it to write"
        )
    leaves, tree = jax.tree_util.tree_flatten_with_path(returned)
    avals = []
    for path, leaf in leaves:
        what = f"torch_call: what {name} returned{jax.tree_util.keystr(path)}"
        if not isinstance(leaf, torch.Tensor):
            raise TypeError(f"{what} is a {type(leaf).__name__}; it must be a torch.Tensor")
        if leaf.layout != torch.strided:
            raise TypeError(f"{what} has layout {leaf.layout}; it must be strided: return tensor.to_dense()")
        avals.append(jax.core.ShapedArray(tuple(leaf.shape), jax_dtype(leaf.dtype, what)))
    return tuple(avals), tree
