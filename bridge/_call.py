"""torch_call and raw_call: a Python function of tensors, or of addresses, as an operation of a JAX program.

`bridge_call_p` is a JAX primitive whose lowering is `jax.experimental.buffer_callback`. Whatever can be decided before
the program runs is decided while tracing or lowering; a run (`_run.py`) only makes the arguments and calls the
function.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import jax
import numpy as np
from jax.experimental.buffer_callback import buffer_callback
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir, xla

from bridge import _run
from bridge._dlpack import carried, jax_dtype, load_torch, require_x64, torch_dtype


def torch_call(
    fn: Callable[..., Any],
    *args: jax.Array | np.ndarray,
    out_type: Any = None,
    input_output_aliases: Mapping[int, int] | None = None,
    scratch_type: Any = (),
    command_buffer_compatible: bool | None = None,
    name: str | None = None,
) -> Any:
    """Calls `fn` on torch tensors that are views of XLA's buffers, on XLA's stream, in or out of `jax.jit`.

    With `out_type`, `fn(*inputs, *outputs, *scratch)` writes its outputs in place. It returns nothing, or the very
    tensors it wrote. Outputs and scratch arrive uninitialized. An output aliased to an input is that input, updated
    in place, and is not passed a second time.

    Without `out_type`, `fn(*inputs, *scratch)` returns its results, a tensor or a pytree of them, which are copied
    into XLA's buffers. Their shapes and dtypes are found by running `fn` on fake tensors while tracing.

    `fn` runs under `torch.no_grad()`, with all tensors contiguous and on one device, that device and XLA's stream being
    torch's current ones. The tensors are valid during the call alone: it must not keep one, and must not write to an
    input that has no alias. Captured in a command buffer (a CUDA graph)
    its Python runs when the graph is recorded and not when it is replayed: it must launch the same work each time, and
    must not synchronize, read tensor values on the host, compile or allocate memory. Keep `fn` one object over calls:
    a new lambda or partial is a new program to compile.

    Args:
      fn: a hashable callable. Bind static arguments with `functools.partial`.
      *args: arrays, of any shape and any dtype both sides have; not pytrees, not Python scalars.
      out_type: a `jax.ShapeDtypeStruct` or a pytree of them: what is returned.
      input_output_aliases: `{index in args: index among the leaves of out_type}`, of one shape and dtype. XLA updates
        the input's own buffer if it is dead afterwards (donated to `jit`, or a loop's carry), and a copy if not.
      scratch_type: a `jax.ShapeDtypeStruct` or a pytree of them: buffers for `fn` to work in, dropped after the call.
      command_buffer_compatible: whether XLA may capture the call. By default it may where `out_type` is given: without,
        `fn` allocates its results, and torch would hand memory recorded in the graph to others.
      name: what errors and jaxprs call `fn`; its `__name__` by default.

    Returns:
      Arrays in the structure of `out_type`, or of what `fn` returned.

    Raises:
      TypeError, ValueError: while tracing, for an argument that can't be used, and says which and why.
      NotImplementedError: for `jax.grad`, `jax.vmap` and `jax.export`, and on platforms that are not CPU, CUDA or ROCm.
      jax.errors.JaxRuntimeError: when it runs, with the traceback of what `fn` raised in its text.
    """
    load_torch()
    name = _checked_name("torch_call", fn, name)
    if not isinstance(command_buffer_compatible, bool | None):
        raise TypeError(f"torch_call: command_buffer_compatible is {command_buffer_compatible!r}; it must be a bool")
    in_avals = _input_avals("torch_call", args, name)
    scratch_avals = _declared_avals(scratch_type, "torch_call: scratch_type")[0]
    if out_type is not None:
        out_avals, out_tree = _declared_avals(out_type, "torch_call: out_type")
    elif input_output_aliases:
        raise ValueError("torch_call: input_output_aliases needs out_type, to say what the outputs are")
    else:
        out_avals, out_tree = _infer(fn, name, in_avals, scratch_avals, _fake_device(), jax.config.jax_enable_x64)
    results = _bind(
        "torch_call", fn, name, args, in_avals, out_avals, scratch_avals, input_output_aliases,
        returned_tree=out_tree if out_type is None else None,
        capture=out_type is not None if command_buffer_compatible is None else command_buffer_compatible,
    )  # fmt: skip
    return jax.tree.unflatten(out_tree, results)


def raw_call(
    fn: Callable[..., None],
    *args: jax.Array | np.ndarray,
    out_type: Any,
    input_output_aliases: Mapping[int, int] | None = None,
    scratch_type: Any = (),
    command_buffer_compatible: bool = True,
    name: str | None = None,
) -> Any:
    """Calls `fn(stream, *addresses)`: `torch_call` for functions that need no tensors, such as launches of kernels.

    Needs no torch, and takes a fraction of the time that tensors take. Addresses are integers, of row-major arrays, in
    the order in which `torch_call` passes tensors: inputs, outputs, scratch, an aliased output not a second time.
    `stream` is the CUDA or HIP stream on which the work is to be queued, an integer (0 on the CPU); its device is the
    current one. What `torch_call` says about command buffers holds here too.

    Args:
      fn: a hashable callable. It returns nothing.
      *args, out_type, input_output_aliases, scratch_type, name: see `torch_call`; `out_type` is needed.
      command_buffer_compatible: whether XLA may capture the call.

    Returns:
      Arrays in the structure of `out_type`.

    Raises:
      As `torch_call`.
    """
    name = _checked_name("raw_call", fn, name)
    if not isinstance(command_buffer_compatible, bool):
        raise TypeError(f"raw_call: command_buffer_compatible is {command_buffer_compatible!r}; it must be a bool")
    in_avals = _input_avals("raw_call", args, name)
    out_avals, out_tree = _declared_avals(out_type, "raw_call: out_type")
    scratch_avals = _declared_avals(scratch_type, "raw_call: scratch_type")[0]
    results = _bind(
        "raw_call", fn, name, args, in_avals, out_avals, scratch_avals, input_output_aliases,
        returned_tree=None, capture=command_buffer_compatible,
    )  # fmt: skip
    return jax.tree.unflatten(out_tree, results)


def _bind(caller, fn, name, args, in_avals, out_avals, scratch_avals, aliases, **params) -> list:
    if not out_avals:
        raise ValueError(f"{caller}: {name} has no outputs; XLA drops a call that has none, so give it at least one")
    aliases = _checked_aliases(f"{caller}: input_output_aliases", aliases or {}, in_avals, out_avals)
    results = bridge_call_p.bind(
        *args, caller=caller, fn=fn, name=name, result_avals=out_avals + scratch_avals, aliases=aliases, **params
    )
    return results[: len(out_avals)]


# Tracing: every shape and dtype is known and checked before anything runs.


def _checked_name(caller: str, fn: Any, name: Any) -> str:
    """What to call `fn`, which must be hashable and callable."""
    if not callable(fn):
        raise TypeError(f"{caller}: fn is a {type(fn).__name__}; it must be callable")
    if not isinstance(fn, Hashable):
        raise TypeError(f"{caller}: fn, a {type(fn).__name__}, is not hashable; it must be, to key compiled programs")
    if name is None:
        inner = fn.func if isinstance(fn, functools.partial) else fn
        name = getattr(inner, "__name__", type(inner).__name__)
    if not isinstance(name, str):
        raise TypeError(f"{caller}: name is a {type(name).__name__}; it must be a str")
    try:
        name.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{caller}: name is {name!a}; it must be text that UTF-8 can encode") from None
    return name


def _input_avals(caller: str, args: tuple, name: str) -> tuple[jax.core.ShapedArray, ...]:
    return tuple(_input_aval(arg, f"{caller}: argument {i} of {name}") for i, arg in enumerate(args))


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


def _checked_aliases(what: str, aliases: Any, in_avals: tuple, out_avals: tuple) -> tuple[tuple[int, int], ...]:
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


def _fake_device() -> str:
    # Code for GPUs often asserts that its tensors are there. Fake ones can be only if torch can make real ones too.
    return "cuda" if jax.default_backend() == "gpu" and load_torch().cuda.is_available() else "cpu"


def _infer(fn: Callable, *case: Any) -> tuple[tuple, Any]:
    """`_infer_anew`, once for each case, for as long as `fn` lives."""
    try:
        known = _INFERRED.setdefault(fn, {})
    except TypeError:  # no weak references to such a callable
        return _infer_anew(fn, *case)
    if case not in known:
        known[case] = _infer_anew(fn, *case)
    return known[case]


_INFERRED: weakref.WeakKeyDictionary[Callable, dict] = weakref.WeakKeyDictionary()


def _infer_anew(
    fn: Callable, name: str, in_avals: tuple, scratch_avals: tuple, device: str, x64: bool
) -> tuple[tuple, Any]:
    """The avals and the structure of what `fn` returns, from a run on fake tensors. `x64` only tells cases apart."""
    del x64
    torch = load_torch()
    from torch._subclasses import FakeTensorMode

    # Real tensors may appear: those that fn closes over, such as weights.
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
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
    leaves, tree = jax.tree_util.tree_flatten_with_path(returned)
    if returned is None:
        raise TypeError(
            f"torch_call: {name} returned None; it must return tensors, or out_type be given for it to write"
        )
    avals = []
    for path, leaf in leaves:
        what = f"torch_call: what {name} returned{jax.tree_util.keystr(path)}"
        if not isinstance(leaf, torch.Tensor):
            raise TypeError(f"{what} is a {type(leaf).__name__}; it must be a torch.Tensor")
        if leaf.layout != torch.strided:
            raise TypeError(f"{what} has layout {leaf.layout}; it must be strided: return tensor.to_dense()")
        avals.append(jax.core.ShapedArray(tuple(leaf.shape), jax_dtype(leaf.dtype, what)))
    return tuple(avals), tree


# The primitive.

bridge_call_p = Primitive("bridge_call")
bridge_call_p.multiple_results = True
bridge_call_p.def_impl(functools.partial(xla.apply_primitive, bridge_call_p))


def _result_avals(*in_avals: Any, result_avals: tuple, caller: str, name: str, **_: Any) -> tuple:
    """The results' types; under `jax.shard_map(check_vma=True)` they vary over the devices that the arguments do."""
    varying = [frozenset(getattr(getattr(aval, "mat", None), "varying", ())) for aval in in_avals]
    union = frozenset().union(*varying)
    if not union:
        return result_avals
    if union not in varying:
        raise ValueError(
            f"{caller} of {name} under jax.shard_map: its arguments vary along different mesh axes, "
            f"{' and '.join(str(sorted(map(str, v))) for v in varying)}; make one vary along all by jax.lax.pcast"
        )
    like = in_avals[varying.index(union)]

    def varied(aval: Any) -> Any:
        sharding = like.sharding.update(spec=jax.P(*[None] * aval.ndim))
        return like.update(shape=aval.shape, dtype=aval.dtype, weak_type=False, sharding=sharding)

    return tuple(map(varied, result_avals))


bridge_call_p.def_abstract_eval(_result_avals)


def _lower(ctx, *operands, caller, fn, name, result_avals, returned_tree, aliases, capture, gpu) -> Any:
    if ctx.module_context.lowering_parameters.for_export or len(ctx.module_context.platforms) > 1:
        raise NotImplementedError(
            f"{caller} of {name} cannot be exported (jax.export) or lowered for several platforms at once: "
            "it calls Python in this process. Export the parts around it"
        )
    if caller == "raw_call":
        callback = _run.launcher(fn, name, len(operands), len(result_avals), aliases, gpu)
    else:
        if returned_tree is None:
            run = _run.writer(fn, name, len(operands), result_avals, aliases)
        else:
            run = _run.returner(fn, name, len(operands), result_avals[: returned_tree.num_leaves], returned_tree)
        callback = (_run.on_gpu if gpu else _run.on_cpu)(run)
        if gpu and load_torch().cuda.is_available():
            load_torch().cuda.init()  # not later, when a graph may be recording

    def called_by_jax(xla: Any, results: list, *inputs: Any) -> None:
        callback(xla, *inputs, *results)

    call = buffer_callback(
        called_by_jax, list(result_avals), input_output_aliases=dict(aliases), command_buffer_compatible=capture
    )
    # XLA calls what JAX appends to this list: a function that makes pytrees of the buffers for the one above, which
    # takes longer than all that raw_call does. It is to call ours. JAX does not document the list; without it, all is
    # as it was, only slower.
    called_by_xla = getattr(ctx.module_context, "host_callbacks", [])
    before = len(called_by_xla)
    results = mlir.lower_fun(jax.named_scope(name)(call), multiple_results=True)(ctx, *operands)
    if len(called_by_xla) == before + 1:
        called_by_xla[-1] = callback
    return results


def _refuse_platform(ctx: Any, *_: Any, caller: str, name: str, **__: Any) -> Any:
    platforms = ", ".join(ctx.module_context.platforms)
    raise NotImplementedError(f"{caller} of {name} cannot run on {platforms}; it can on cpu, cuda and rocm")


def _refuse_grad(*_: Any, caller: str, name: str, **__: Any) -> Any:
    raise NotImplementedError(
        f"{caller} of {name} cannot be differentiated: JAX does not see into it. "
        "Wrap it in jax.custom_vjp, with a backward pass of its own (another torch_call, perhaps)"
    )


def _refuse_vmap(*_: Any, caller: str, name: str, **__: Any) -> Any:
    raise NotImplementedError(
        f"{caller} of {name} cannot be batched by jax.vmap: give the function the batch axis and let it work on "
        "that, or call it for one element after the other with jax.lax.map"
    )


mlir.register_lowering(bridge_call_p, _refuse_platform)
mlir.register_lowering(bridge_call_p, functools.partial(_lower, gpu=False), platform="cpu")
mlir.register_lowering(bridge_call_p, functools.partial(_lower, gpu=True), platform="cuda")
mlir.register_lowering(bridge_call_p, functools.partial(_lower, gpu=True), platform="rocm")
ad.primitive_jvps[bridge_call_p] = _refuse_grad
ad.primitive_transposes[bridge_call_p] = _refuse_grad
batching.primitive_batchers[bridge_call_p] = _refuse_vmap
