"""An op: a JAX primitive that chooses its implementation when it is lowered."""

import functools
from collections.abc import Callable, Mapping

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from dsv4_jax import checks, gpus, platforms
from dsv4_jax.platforms import Implementation, Target
from dsv4_jax.promotion import own_rules

OPS: "list[Op]" = []  # every op of the package, in the order of import


class Op:
    """A primitive over pytrees of arrays; it updates some of them in place.

    An implementation is a function `implement(*args, **params)`. All implementations of an op take the same arguments.
    If the op makes new arrays, they also take `outputs=`, the types of these. They return a tuple: the updated arrays,
    then the new ones.
    """

    def __init__(
        self,
        name: str,
        *,
        xla: Callable | None = None,
        triton: Callable[[], Callable] | None = None,
        cutedsl: Callable[[], Callable] | None = None,
        updates: tuple[int, ...] = (),
        outputs: Callable | None = None,
        why_not: Callable[..., str | None] | None = None,
        preference: Callable[..., tuple[Implementation, ...]] | None = None,
        measured_on: tuple[str, ...] = (),
        fp8: Callable[..., bool] | bool = False,
    ):
        """Makes the primitive.

        Args:
          name: the op's name; it appears in the jaxpr.
          xla: the implementation in plain JAX.
          triton: imports and returns the Triton implementation; called when the op is lowered.
          cutedsl: the same for CuTeDSL.
          updates: the positional arguments that are returned updated, in this order.
          outputs: `outputs(*args, **params)` gives the types of the new arrays, a tuple of `jax.ShapeDtypeStruct`. Its
            arguments have only a shape and a dtype.
          why_not: `why_not(implementation, target, **params)` says why an implementation does not serve these
            parameters, or gives None.
          preference: `preference(*args, **params)` gives the implementations to try, best first, on the GPUs in
            `measured_on`. On other GPUs, and without a preference, the switch tries Triton.
          measured_on: GPU architectures, such as "sm_90".
          fp8: whether the Triton kernels convert to or from fp8, which not every GPU can: `fp8(**params)`, or always.
        """
        loaders = {"xla": None if xla is None else lambda: xla, "triton": triton, "cutedsl": cutedsl}
        self.implementations: Mapping[str, Callable] = {k: load for k, load in loaders.items() if load is not None}
        self.name = name
        self.updates = updates
        self.outputs = outputs
        self.preference = preference
        self.measured_on = measured_on
        self.fp8 = fp8
        self._why_not_params = why_not
        self.primitive = Primitive(name)
        self.primitive.multiple_results = True
        self.primitive.def_abstract_eval(self._abstract_eval)
        self.primitive.def_impl(self._run)
        for platform in ("cpu", "cuda", "rocm", "tpu"):
            mlir.register_lowering(self.primitive, functools.partial(self._lower, platform), platform=platform)
        ad.primitive_jvps[self.primitive] = self._no_grad
        batching.primitive_batchers[self.primitive] = self._no_vmap
        OPS.append(self)

    def __call__(self, *args, implementation: str | None, **params) -> tuple[jax.Array, ...]:
        """Binds the primitive; `params` are static and hashable."""
        if implementation is None:
            implementation = platforms.default_implementation()
        else:
            checks.one_of("implementation", implementation, platforms.IMPLEMENTATIONS)
        flat, tree = jax.tree.flatten(args)
        for leaf in flat:
            if any(axis is not None for axis in jax.typeof(leaf).sharding.spec):
                raise NotImplementedError(
                    f"{self.name} got an array of type {jax.typeof(leaf)}, sharded over a mesh with explicit axes; "
                    "call it inside jax.shard_map, each device with its own requests and caches, or make the axes Auto"
                )
        return tuple(
            self.primitive.bind(*flat, tree=tree, implementation=implementation, params=tuple(sorted(params.items())))
        )

    def choose(self, target: Target, *args, **params) -> str:
        """The implementation that the platform switch takes. The arguments need only a shape and a dtype.

        Without arguments, the one for small batches.
        """
        if target.platform not in platforms.GPUS:
            return "xla"
        names = ("triton",)
        if args and self.preference and target.arch in self.measured_on:
            names = self.preference(*args, **params)
        return next((name for name in names if self.why_not(name, target, **params) is None), "xla")

    def why_not(self, name: str, target: Target, **params) -> str | None:
        """Why an implementation cannot run (with these parameters, if given) and what would; None if it can."""
        if name not in self.implementations:
            return f"{self.name} has no {name} implementation; use one of {', '.join(self.implementations)}"
        why = platforms.why_not(name, target)
        if why is None and params and self._why_not_params:
            why = self._why_not_params(name, target, **params)
        if why is None and name == "triton" and target.arch:
            fp8 = self.fp8(**params) if callable(self.fp8) and params else self.fp8 is True
            why = gpus.why_no_fp8(target.arch) if fp8 else None
        return why

    def _run(self, *flat, **params):
        # Inside jax.disable_jit, bind would come straight back here.
        with jax.disable_jit(False):
            return _jitted(self.primitive, **params)(*flat)

    def _abstract_eval(self, *flat, tree, params, **_):
        args = jax.tree.unflatten(tree, flat)
        updated = [args[i] for i in self.updates]
        varying = frozenset().union(*map(_varying, flat))
        for result in updated:
            if axes := sorted(map(str, varying - _varying(result))):
                raise ValueError(
                    f"{self.name} under jax.shard_map: a cache of type {result} is the same on all devices along "
                    f"{', '.join(axes)}, but the batch differs there; shard the cache too, so that each has its own, "
                    "or where it is made inside, use jax.lax.pcast(cache, axes, to='varying')"
                )
        new = self.outputs(*args, **dict(params)) if self.outputs else ()
        return [*updated, *(_like(flat[0], struct, varying) for struct in new)]

    def _lower(self, platform, ctx, *flat, tree, implementation, params):
        args, params = jax.tree.unflatten(tree, ctx.avals_in), dict(params)
        target = platforms.target(platform)
        if implementation is None:
            implementation = self.choose(target, *args, **params)
        elif why := self.why_not(implementation, target, **params):
            raise NotImplementedError(f"{self.name}(implementation={implementation!r}) cannot run on {platform}: {why}")
        implement = self.implementations[implementation]()
        outputs = {"outputs": self.outputs(*args, **params)} if self.outputs else {}

        @own_rules()
        @jax.named_scope(self.name)
        def implement_flat(*flat):
            return implement(*jax.tree.unflatten(tree, flat), **params, **outputs)

        try:
            with platforms.lowering(target):
                return mlir.lower_fun(implement_flat, multiple_results=True)(ctx, *flat)
        except Exception as error:
            for pair, what in platforms.known_bad_pairs():
                error.add_note(f"{pair} are installed: {what}")
            raise

    def _no_grad(self, *_, **__):
        raise NotImplementedError(
            f"{self.name} has no derivative; put jax.lax.stop_gradient around its inputs, or wrap it in jax.custom_vjp"
        )

    def _no_vmap(self, *_, **__):
        raise NotImplementedError(
            f"{self.name} cannot be batched by jax.vmap; put the batch's sequences one after another as requests of "
            "one batch of tokens, or use jax.lax.map"
        )


def _varying(aval) -> frozenset:
    """The mesh axes along which a value differs from device to device, under `jax.shard_map(check_vma=True)`."""
    return getattr(getattr(aval, "mat", None), "varying", frozenset())


def _like(aval, struct, varying):
    """The type of a new array; under `jax.shard_map` it varies along the axes `varying`."""
    if not varying:
        return jax.core.ShapedArray(struct.shape, struct.dtype)
    sharding = jax.NamedSharding(jax.sharding.get_abstract_mesh(), jax.P(*[None] * len(struct.shape)))
    mat = type(aval.mat)(varying=varying)
    return jax.core.ShapedArray(struct.shape, struct.dtype, sharding=sharding, manual_axis_type=mat)


@functools.cache
def _jitted(primitive, **params):
    return jax.jit(functools.partial(primitive.bind, **params))
