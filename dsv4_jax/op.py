"""An op as a JAX primitive whose implementation is chosen when it is lowered."""

import functools
import importlib
from collections.abc import Callable

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from dsv4_jax import checks, gpus, platforms


class Op:
    """A primitive over pytrees of arrays, in place on some of them.

    Each implementation is a function `implement(*args, **params)` in the module that `platforms.MODULES` names for it;
    all take the same arguments, `outputs=` among them where the op makes new arrays, and return a tuple: the updated
    arrays, then the new ones.
    """

    def __init__(self, name: str, updates: tuple[int, ...] = (), outputs: Callable | None = None):
        """Makes the primitive.

        Args:
          name: of the op; it stands in the jaxpr and names the implementations' modules.
          updates: which positional arguments are returned updated, in this order.
          outputs: `outputs(*args, **params)` gives the shapes and dtypes of the new arrays, a tuple of
            `jax.ShapeDtypeStruct`; its arguments have a shape and a dtype alone.
        """
        self.name = name
        self.updates = updates
        self.outputs = outputs
        self.primitive = Primitive(name)
        self.primitive.multiple_results = True
        self.primitive.def_abstract_eval(self._abstract_eval)
        self.primitive.def_impl(self._run)
        for platform in ("cpu", "cuda", "rocm", "tpu"):
            mlir.register_lowering(self.primitive, functools.partial(self._lower, platform), platform=platform)
        ad.primitive_jvps[self.primitive] = self._no_grad
        batching.primitive_batchers[self.primitive] = self._no_vmap

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

    def _run(self, *flat, **params):
        # Also inside jax.disable_jit, where bind would come straight back here.
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
        config, save = dict(params).get("config"), dict(params).get("save", "tail")
        batch = ctx.avals_in[0] if flat else None
        prefill = any(getattr(arg, "prefill", False) for arg in jax.tree.unflatten(tree, ctx.avals_in))
        name = implementation or platforms.choose(self.name, platform, config, batch, save, prefill)
        if why := platforms.why_not(name, self.name, platform, config):
            raise NotImplementedError(f"{self.name}(implementation={name!r}) cannot run on {platform}: {why}")
        implement: Callable = importlib.import_module(platforms.MODULES[name].format(op=self.name)).implement

        avals = jax.tree.unflatten(tree, ctx.avals_in)
        new = {"outputs": self.outputs(*avals, **dict(params))} if self.outputs else {}

        def flat_implement(*flat):
            return implement(*jax.tree.unflatten(tree, flat), **new, **dict(params))

        try:
            with gpus.lowering(platform):
                return mlir.lower_fun(flat_implement, multiple_results=True)(ctx, *flat)
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
    """The type of a new array, which under `jax.shard_map` differs along the axes `varying`."""
    if not varying:
        return jax.core.ShapedArray(struct.shape, struct.dtype)
    sharding = jax.NamedSharding(jax.sharding.get_abstract_mesh(), jax.P(*[None] * len(struct.shape)))
    mat = type(aval.mat)(varying=varying)
    return jax.core.ShapedArray(struct.shape, struct.dtype, sharding=sharding, manual_axis_type=mat)


@functools.cache
def _jitted(primitive, **params):
    return jax.jit(functools.partial(primitive.bind, **params))
