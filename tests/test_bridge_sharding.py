"""torch_call over four devices of the CPU, in one process of its own."""

import pytest
from helpers.bridging import run_python

pytest.importorskip("torch")

SETUP = """
import re, jax, jax.numpy as jnp, numpy as np, torch
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from bridge import torch_call
mesh = jax.make_mesh((2, 2), ("d", "m"))
rng = np.random.default_rng(0)
xn, wn = rng.normal(size=(8, 4)).astype("f"), rng.normal(size=(4, 6)).astype("f")
put = lambda a, *spec, mesh=mesh: jax.device_put(a, NamedSharding(mesh, P(*spec)))
shapes = set()
def fn(x, w):
    if type(x).__name__ != "FakeTensor":
        shapes.add((tuple(x.shape), tuple(w.shape)))
    return torch.tanh(x @ w)
RULE = {"sharding_rule": "b i, i j -> b j"}
def call(x, w, **options):
    return torch_call(fn, x, w, differentiable=True, **options)
def loss(f):
    return lambda x, w: (f(x, w) ** 2).sum()
same = lambda x, w: jnp.tanh(x @ w)
def refused(f, match):
    try:
        f()
    except NotImplementedError as error:
        assert re.search(match, str(error)), error
    else:
        raise AssertionError("no error")
"""


def run(script):
    import textwrap

    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    run_python(textwrap.dedent(SETUP) + textwrap.dedent(script), **flags)


def test_explicit_axes():
    run("""
        x, w = put(xn, "d"), put(wn, None, "m")
        f = lambda x, w: call(x, w, **RULE)
        y = jax.jit(f)(x, w)
        assert y.sharding.spec == P("d", "m")
        np.testing.assert_allclose(y, same(xn, wn), rtol=1e-5)
        assert shapes == {((4, 4), (4, 3))}, shapes
        assert not re.search("all-gather|all-to-all", jax.jit(f).lower(x, w).compile().as_text())
        np.testing.assert_allclose(f(x, w), y)
        for found, expected in zip(jax.jit(jax.grad(loss(f), (0, 1)))(x, w), jax.grad(loss(same), (0, 1))(xn, wn)):
            np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)

        shapes.clear()  # a contracted axis is gathered
        np.testing.assert_allclose(jax.jit(f)(x, put(wn, "d", "m")), y)
        assert shapes == {((4, 4), (4, 3))}, shapes

        with jax.set_mesh(mesh):  # nothing is sharded
            np.testing.assert_allclose(jax.jit(f)(xn, wn), y, rtol=1e-6)

        def add(x, cache):
            cache += x
        like = lambda c: jax.ShapeDtypeStruct(c.shape, c.dtype)
        step = jax.jit(lambda x, c: torch_call(add, x, c, out_type=like(c), input_output_aliases={1: 0},
                                               sharding_rule="a b, a b -> a b"), donate_argnums=1)
        cache = put(np.ones((8, 4), "f"), "d")
        text = step.lower(x, cache).compile().as_text()
        assert not re.search("all-gather| copy", text)
        new = step(x, cache)
        np.testing.assert_array_equal(new, xn + 1)

        refused(lambda: jax.jit(call)(x, w), "argument 0 of fn is sharded.*Pass sharding_rule")
        whole = put(xn)
        np.testing.assert_allclose(jax.jit(call)(whole, put(wn)), y, rtol=1e-6)
    """)


def test_auto_axes():
    run("""
        auto = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Auto,))
        x = put(xn, "d", mesh=auto)
        y = jax.jit(call)(x, wn)  # each device calls the function on the whole
        np.testing.assert_allclose(y, same(xn, wn), rtol=1e-5)
        assert shapes == {((8, 4), (4, 6))}, shapes
        refused(lambda: jax.jit(lambda x, w: call(x, w, **RULE))(x, wn), "needs mesh axes of the Explicit kind")

        shapes.clear()
        f = jax.shard_map(call, mesh=auto, in_specs=(P("d"), P()), out_specs=P("d"))
        np.testing.assert_allclose(jax.jit(f)(x, wn), y)
        assert shapes == {((2, 4), (4, 6))}, shapes
        for found, expected in zip(jax.jit(jax.grad(loss(f), (0, 1)))(x, wn), jax.grad(loss(same), (0, 1))(xn, wn)):
            np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    """)


@pytest.mark.parametrize(
    ("rule", "match"),
    [
        (3, "sharding_rule is 3; it must be a text"),
        ("a b", "it must be a text such as"),
        ("a b, b -> a", "with 2 arguments; there are 1"),
        ("a -> a b", r"argument 0 is float32\[3,3\]: it must have a name of its own for each axis"),
        ("a a -> a b", "a name of its own"),
        ("a b -> a b, a", "with 2 results; there are 1"),
    ],
)
def test_rules_that_do_not_fit(rule, match):
    import jax.numpy as jnp

    from bridge import torch_call

    with pytest.raises(ValueError, match=match):
        torch_call(lambda x: x * 2, jnp.ones((3, 3)), sharding_rule=rule)
