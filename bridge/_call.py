"""torch_call: a Python function of tensors as an operation of a JAX program.

Whatever can be checked is checked here, while the program is traced. The operation itself is in `_primitive.py`, what
happens when it runs in `_run.py`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Mapping
from typing import Any, Literal

import jax
import numpy as np

from bridge import _sharding
from bridge._dlpack import carried, load_torch, require_x64
from bridge._infer import infer
from bridge._primitive import VMAP_METHODS, torch_call_p

VmapMethod = Literal["sequential", "sequential_unrolled", "expand_dims", "broadcast_all", "torch"]


def torch_call(
    fn: Callable[..., Any],
    *args: jax.Array | np.ndarray,
    out_type: Any = None,
    input_output_aliases: Mapping[int, int] | None = None,
    scratch_type: Any = (),
    command_buffer_compatible: bool | None = None,
    differentiable: bool = False,
    vmap_method: VmapMethod | None = None,
    sharding_rule: str | None = None,
    name: str | None = None,
) -> Any:
    """Calls `fn` on torch tensors that are views of XLA's buffers, on XLA's stream, in or out of `jax.jit`.

    With `out_type`, `fn(*inputs, *outputs, *scratch)` writes its outputs in place. It returns nothing, or the very
    tensors it wrote. Outputs and scratch arrive uninitialized. An output aliased to an input is that input, updated
    in place, and is not passed a second time.

    Without `out_type`, `fn(*inputs, *scratch)` returns its results, a tensor or a pytree of them, which are copied
    into XLA's buffers. Their shapes and dtypes are found by running `fn` on fake tensors while tracing.

    `fn` runs under `torch.no_grad()`, with all tensors contiguous and on one device. That device and XLA's stream are
    torch's current ones. The tensors are valid during the call alone: `fn` must not keep one, and must not write to an
    input that has no alias. Captured in a command buffer (a CUDA graph), `fn` runs when the graph is recorded and not
    when it is replayed: it must launch the same work each time, and must not synchronize, read tensor values on the
    host, compile or allocate memory. Keep `fn` one object over calls: a new lambda or partial is a new program to
    compile, and JAX's caches keep it alive.

    Args:
      fn: a hashable callable. Bind static arguments with `functools.partial`.
      *args: arrays, of any shape and any dtype both sides have; not pytrees, not Python scalars.
      out_type: a `jax.ShapeDtypeStruct` or a pytree of them: what is returned.
      input_output_aliases: `{index in args: index among the leaves of out_type}`, of one shape and dtype. XLA updates
        the input's own buffer if it is dead afterwards (donated to `jit`, or a loop's carry), and a copy if not.
      scratch_type: a `jax.ShapeDtypeStruct` or a pytree of them: buffers for `fn` to work in, dropped after the call.
      command_buffer_compatible: whether XLA may capture the call. By default it may where `out_type` is given: without,
        `fn` allocates its results, and torch would hand memory recorded in the graph to others.
      differentiable: whether JAX may differentiate the call, by torch.autograd, as often as torch can. `fn` then
        returns its results and has no scratch. Its forward pass is computed again in the backward pass. Tensors that
        `fn` closes over are constants: pass weights as arguments.
      vmap_method: how `jax.vmap` batches the call. "sequential", "sequential_unrolled": `fn` is called for one element
        after the other. "expand_dims", "broadcast_all": `fn` is called once, on inputs and outputs with one more
        leading axis, which for inputs without a batch axis has size 1 or the batch's size. (These are the names of
        `jax.ffi.ffi_call`.) "torch": `torch.vmap` of `fn`, which then returns its results and has no scratch.
      sharding_rule: which axes can be split over devices, such as "b i, i j -> b j": a name for each axis of each
        argument, then of each result. An axis whose name stands in an argument and in every result is split as the
        argument's type says, and `fn` is called on each shard; others are gathered. Needs mesh axes of the Explicit
        kind; elsewhere use `jax.shard_map`. Scratch has the declared shape on every device.
      name: what errors and jaxprs call `fn`; its `__name__` by default.

    Returns:
      Arrays in the structure of `out_type`, or of what `fn` returned.

    Raises:
      TypeError, ValueError: while tracing, for an argument that can't be used, and says which and why.
      NotImplementedError: for `jax.grad` without `differentiable`, `jax.vmap` without `vmap_method`, arguments sharded
        over Explicit axes without `sharding_rule`, for `jax.export`, and on platforms other than CPU, CUDA and ROCm.
      jax.errors.JaxRuntimeError: when it runs, with the traceback of what `fn` raised in its text.
    """
    load_torch()
    name = _checked_name(fn, name)
    _require_bool("command_buffer_compatible", command_buffer_compatible, optional=True)
    _require_bool("differentiable", differentiable)
    if vmap_method not in (None, *VMAP_METHODS):
        raise ValueError(f"torch_call: vmap_method is {vmap_method!r}; it must be one of {', '.join(VMAP_METHODS)}")
    in_avals = tuple(_input_aval(arg, f"torch_call: argument {i} of {name}") for i, arg in enumerate(args))
    scratch_avals = _declared_avals(scratch_type, "torch_call: scratch_type")[0]
    for option, used in (("differentiable=True", differentiable), ("vmap_method='torch'", vmap_method == "torch")):
        if used and (out_type is not None or input_output_aliases or scratch_avals):
            raise ValueError(
                f"torch_call: {option} needs a function that returns new tensors; {name} was given out_type, "
                "input_output_aliases or scratch_type, and so writes in place, which torch does not follow"
            )
    if out_type is not None:
        out_avals, out_tree = _declared_avals(out_type, "torch_call: out_type")
    elif input_output_aliases:
        raise ValueError("torch_call: input_output_aliases needs out_type, to say what the outputs are")
    else:
        out_avals, out_tree = infer(fn, name, in_avals, scratch_avals)
    if not out_avals:
        raise ValueError(f"torch_call: {name} has no outputs; XLA drops a call that has none, so give it at least one")
    params: dict[str, Any] = {
        "fn": fn,
        "name": name,
        "scratch_avals": scratch_avals,
        "returned_tree": out_tree if out_type is None else None,
        "aliases": _checked_aliases(input_output_aliases or {}, in_avals, out_avals),
        "capture": out_type is not None if command_buffer_compatible is None else command_buffer_compatible,
        "differentiable": differentiable,
        "vmap_method": vmap_method,
        "linear": 0,
    }
    results = _sharding.call_on_shards(
        lambda args, out_avals, one_device: torch_call_p.bind(
            *args, out_avals=out_avals, one_device=one_device, **params
        ),
        sharding_rule, name, args, in_avals, out_avals,
    )  # fmt: skip
    return jax.tree.unflatten(out_tree, results[: len(out_avals)])


def _checked_name(fn: Any, name: Any) -> str:
    """What to call `fn`, which must be hashable and callable."""
    if not callable(fn):
        raise TypeError(f"torch_call: fn is a {type(fn).__name__}; it must be callable")
    if not isinstance(fn, Hashable):
        raise TypeError(f"torch_call: fn, a {type(fn).__name__}, is not hashable; it must be, to key compiled programs")
    if name is None:
        inner = fn.func if isinstance(fn, functools.partial) else fn
        name = getattr(inner, "__name__", type(inner).__name__)
    if not isinstance(name, str):
        raise TypeError(f"torch_call: name is a {type(name).__name__}; it must be a str")
    try:
        name.encode()
    except UnicodeEncodeError:
        raise ValueError(f"torch_call: name is {name!a}; it must be text that UTF-8 can encode") from None
    return name


def _require_bool(argument: str, value: Any, optional: bool = False) -> None:
    if not isinstance(value, bool) and not (optional and value is None):
        raise TypeError(f"torch_call: {argument} is {value!r}; it must be a bool")


def _input_aval(arg: Any, what: str) -> jax.core.ShapedArray:
    if not isinstance(arg, jax.Array | np.ndarray | np.generic):
        hint = "bind static values with functools.partial, or make it an array with jnp.asarray"
        if isinstance(arg, tuple | list | dict):
            hint = "pytrees are not taken: pass their leaves one by one"
        elif type(arg).__module__.partition(".")[0] == "torch":
            hint = "use bridge.to_jax, or let the function close over it"
        raise TypeError(f"{what} is a {type(arg).__name__}; it must be an array ({hint})")
    aval = _aval(jax.typeof(arg), what)
    require_x64(arg.dtype, what)  # NumPy's, which jax.typeof has narrowed
    return aval


def _declared_avals(declared: Any, what: str) -> tuple[tuple[jax.core.ShapedArray, ...], Any]:
    leaves, tree = jax.tree_util.tree_flatten_with_path(declared)
    for path, leaf in leaves:
        if not (hasattr(leaf, "shape") and hasattr(leaf, "dtype")):
            where = what + jax.tree_util.keystr(path)
            raise TypeError(f"{where} is {leaf!r}; it must be a jax.ShapeDtypeStruct or a pytree of them")
    return tuple(_aval(leaf, what + jax.tree_util.keystr(path)) for path, leaf in leaves), tree


def _aval(x: Any, what: str) -> jax.core.ShapedArray:
    if not all(isinstance(size, int | np.integer) for size in x.shape):
        raise TypeError(f"{what} has shape {x.shape}; every size must be a known integer")
    carried(x.dtype, what)
    require_x64(x.dtype, what)
    return jax.core.ShapedArray(x.shape, x.dtype)


def _checked_aliases(aliases: Any, in_avals: tuple, out_avals: tuple) -> tuple[tuple[int, int], ...]:
    what = "torch_call: input_output_aliases"
    if not isinstance(aliases, Mapping) or not all(type(i) is int for pair in aliases.items() for i in pair):
        raise TypeError(f"{what} is {aliases!r}; it must be a dict of int to int, input index to output index")
    pairs = tuple(sorted(aliases.items()))
    for i, o in pairs:
        if not 0 <= i < len(in_avals):
            raise ValueError(f"{what} names input {i}; there are {len(in_avals)} inputs, counted from 0")
        if not 0 <= o < len(out_avals):
            raise ValueError(f"{what} names output {o}; there are {len(out_avals)} outputs, counted from 0")
        if in_avals[i] != out_avals[o]:
            raise ValueError(
                f"{what} joins input {i}, {in_avals[i]}, and output {o}, {out_avals[o]}; they must be alike"
            )
    if len({o for _, o in pairs}) != len(pairs):
        raise ValueError(f"{what} is {dict(pairs)}; an output can be only one input's")
    return pairs
