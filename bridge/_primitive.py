"""The JAX primitive behind torch_call: its types, its lowering to `buffer_callback`, and how JAX transforms it.

Its parameters: `fn` and `name`; `out_avals` and `scratch_avals`, the types of its results; `returned_tree`, the
structure of what `fn` returns, or None if it writes; `aliases` of inputs and outputs; `capture`, whether XLA may;
`differentiable`, `vmap_method`; `linear`, how many of the last inputs `fn`, a derivative, is linear in; `one_device`,
whether a program over several devices is to be refused, outside `shard_map`.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
from jax import numpy as jnp
from jax.experimental.buffer_callback import buffer_callback
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir, xla

from bridge import _run
from bridge._dlpack import load_torch
from bridge._transforms import Jvp, Vjp, batched

VMAP_METHODS = ("sequential", "sequential_unrolled", "expand_dims", "broadcast_all", "torch")

torch_call_p = Primitive("torch_call")
torch_call_p.multiple_results = True
torch_call_p.def_impl(functools.partial(xla.apply_primitive, torch_call_p))


@torch_call_p.def_abstract_eval
def _types(*in_avals: Any, out_avals: tuple, scratch_avals: tuple, name: str, **_: Any) -> tuple:
    """The results' types; under `jax.shard_map(check_vma=True)` they vary over the devices that the arguments do."""
    results = out_avals + scratch_avals
    all_varying = [varying(aval) for aval in in_avals]
    union = frozenset().union(*all_varying)
    if not union:
        return results
    like = in_avals[all_varying.index(union)]  # torch_call has all of them vary alike

    def varied(aval: Any) -> Any:
        sharding = like.sharding.update(spec=jax.P(*[None] * aval.ndim))
        return like.update(shape=aval.shape, dtype=aval.dtype, weak_type=False, sharding=sharding)

    return tuple(map(varied, results))


def varying(aval: Any) -> frozenset:
    """The mesh axes over which a value varies inside `jax.shard_map`."""
    return frozenset(getattr(getattr(aval, "mat", None), "varying", ()))


# Lowering.


def _lower(
    ctx: Any, *operands: Any, fn, name, out_avals, scratch_avals, returned_tree, aliases, capture, one_device, gpu, **_
) -> Any:
    if ctx.module_context.lowering_parameters.for_export or len(ctx.module_context.platforms) > 1:
        raise NotImplementedError(
            f"torch_call of {name} cannot be exported (jax.export) or lowered for several platforms at once: "
            "it calls Python in this process. Export the parts around it"
        )
    devices = ctx.module_context.axis_context
    if one_device and isinstance(devices, mlir.ShardingContext) and devices.num_devices > 1:
        raise NotImplementedError(
            f"torch_call of {name}: sharding_rule needs mesh axes of the Explicit kind, in the arguments' types; over "
            "Auto axes XLA would gather the arguments. Use jax.make_mesh's own axis types, or jax.shard_map"
        )
    if returned_tree is None:
        run = _run.writer(fn, name, len(operands), out_avals + scratch_avals, aliases)
    else:
        run = _run.returner(fn, name, len(operands), out_avals, returned_tree)
    if gpu and load_torch().cuda.is_available():
        load_torch().cuda.init()  # not later, when a graph may be recording
    call = buffer_callback(
        (_run.on_gpu if gpu else _run.on_cpu)(run),
        [*out_avals, *scratch_avals],
        input_output_aliases=dict(aliases),
        command_buffer_compatible=capture,
    )
    return mlir.lower_fun(jax.named_scope(name)(call), multiple_results=True)(ctx, *operands)


def _refuse_platform(ctx: Any, *_: Any, name: str, **__: Any) -> Any:
    platforms = ", ".join(ctx.module_context.platforms)
    raise NotImplementedError(f"torch_call of {name} cannot run on {platforms}; it can on cpu, cuda and rocm")


mlir.register_lowering(torch_call_p, _refuse_platform)
mlir.register_lowering(torch_call_p, functools.partial(_lower, gpu=False), platform="cpu")
mlir.register_lowering(torch_call_p, functools.partial(_lower, gpu=True), platform="cuda")
mlir.register_lowering(torch_call_p, functools.partial(_lower, gpu=True), platform="rocm")


# Differentiation: a Jvp, which is linear in its tangents and is transposed to a Vjp, and the other way round.


def _jvp(primals: tuple, tangents: tuple, **params: Any) -> tuple[list, list]:
    fn, name, out_avals = params["fn"], params["name"], params["out_avals"]
    if not params["differentiable"]:
        raise NotImplementedError(
            f"torch_call of {name} cannot be differentiated: JAX does not see into it. Pass differentiable=True if "
            "torch.autograd can differentiate it, or wrap it in jax.custom_vjp"
        )
    outputs = torch_call_p.bind(*primals, **params)
    wrt = tuple(i for i, t in enumerate(tangents) if not isinstance(t, ad.Zero) and t.dtype != jax.dtypes.float0)
    of = tuple(o for o, aval in enumerate(out_avals) if jnp.issubdtype(aval.dtype, jnp.inexact))
    results = [ad.Zero(jax.typeof(y).to_tangent_aval()) for y in outputs]
    if wrt and of:
        derivative = _derivative(Jvp(fn, wrt, of), params, [out_avals[o] for o in of])
        derivative["name"] = f"jvp_{name}"
        moved = torch_call_p.bind(*primals, *(tangents[i] for i in wrt), **derivative)
        for o, tangent in zip(of, moved, strict=True):
            results[o] = tangent
    return outputs, results


def _transpose(cotangents: list, *args: Any, **params: Any) -> list:
    fn, name, linear = params["fn"], params["name"], params["linear"]
    inputs, linear_args = args[: len(args) - linear], args[len(args) - linear :]
    if not linear or any(map(ad.is_undefined_primal, inputs)):
        raise NotImplementedError(f"torch_call of {name} cannot be transposed: JAX does not know it to be linear")
    given = [o for o, ct in enumerate(cotangents) if not isinstance(ct, ad.Zero)]
    wanted = [i for i, x in enumerate(linear_args) if ad.is_undefined_primal(x)]
    results: list = [None] * len(args)
    if given:
        if isinstance(fn, Jvp):
            adjoint = Vjp(fn.fn, tuple(fn.wrt[i] for i in wanted), tuple(fn.of[o] for o in given))
        else:
            adjoint = Jvp(fn.fn, tuple(fn.wrt[o] for o in given), tuple(fn.of[i] for i in wanted))
        avals = [jax.core.ShapedArray(linear_args[i].aval.shape, linear_args[i].aval.dtype) for i in wanted]
        derivative = _derivative(adjoint, params, avals)
        derivative["name"] = name.replace("jvp_", "vjp_", 1) if isinstance(fn, Jvp) else name.replace("vjp_", "jvp_", 1)
        pulled = torch_call_p.bind(*inputs, *(cotangents[o] for o in given), **derivative)
        for i, ct in zip(wanted, pulled, strict=True):
            results[len(inputs) + i] = ct
    return results


def _derivative(fn: Jvp | Vjp, params: dict, out_avals: list) -> dict:
    """The parameters of a call of `fn`, which allocates and so is not captured."""
    return {
        **params,
        "fn": fn,
        "out_avals": tuple(out_avals),
        "returned_tree": jax.tree.structure((0,) * len(out_avals)),
        "capture": False,
        "linear": len(fn.wrt if isinstance(fn, Jvp) else fn.of),
    }


ad.primitive_jvps[torch_call_p] = _jvp
ad.primitive_transposes[torch_call_p] = _transpose


# Batching.


def _batch(args: tuple, dims: tuple, **params: Any) -> tuple[list, list]:
    name, method, aliased = params["name"], params["vmap_method"], dict(params["aliases"])
    if method is None:
        raise NotImplementedError(
            f"torch_call of {name} cannot be batched by jax.vmap: its vmap_method is None. Pass one of "
            f"{', '.join(map(repr, VMAP_METHODS))}"
        )
    (size,) = {x.shape[d] for x, d in zip(args, dims, strict=True) if d is not None}
    args = tuple(x if d is None else jnp.moveaxis(x, d, 0) for x, d in zip(args, dims, strict=True))
    if method in ("sequential", "sequential_unrolled"):
        each = tuple(x for x, d in zip(args, dims, strict=True) if d is not None)

        def call_one(_: None, xs: tuple) -> tuple[None, list]:
            rest = iter(xs)
            return None, torch_call_p.bind(
                *(x if d is None else next(rest) for x, d in zip(args, dims, strict=True)), **params
            )

        results = jax.lax.scan(call_one, None, each, unroll=method == "sequential_unrolled")[1]
        return results, [0] * len(results)

    def with_axis(i: int, x: Any) -> Any:
        # A derivative has a result for each element, also with respect to an input that all elements share.
        if method == "broadcast_all" or params["linear"] or i in aliased:
            return jnp.broadcast_to(x, (size, *x.shape))
        return x[None] if method == "expand_dims" else x

    whole = [with_axis(i, x) if d is None else x for i, (x, d) in enumerate(zip(args, dims, strict=True))]
    if method == "torch":
        in_dims = tuple(None if d is None and not params["linear"] else 0 for d in dims)
        params["fn"] = batched(params["fn"], in_dims)
    for kind in ("out_avals", "scratch_avals"):
        params[kind] = tuple(jax.core.ShapedArray((size, *aval.shape), aval.dtype) for aval in params[kind])
    results = torch_call_p.bind(*whole, **params)
    return results, [0] * len(results)


batching.primitive_batchers[torch_call_p] = _batch
