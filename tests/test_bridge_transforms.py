"""torch_call under jax.grad and its kin, and jax.vmap: against the same function written in JAX."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.bridging import Type, double_into, torch

from bridge import torch_call

RNG = np.random.default_rng(0)
X, W = RNG.normal(size=(3, 4)).astype(np.float32), RNG.normal(size=(4, 5)).astype(np.float32)


def dense_torch(x, w):
    return torch.tanh(x @ w)


def dense(x, w):
    return torch_call(dense_torch, x, w, differentiable=True)


def dense_jax(x, w):
    return jnp.tanh(x @ w)


def attention_torch(q, k, v):
    scores = torch.where(torch.ones(3, 3, dtype=bool, device=q.device).tril(), q @ k.mT / 2, -torch.inf)
    return torch.softmax(scores, -1) @ v


def attention_jax(q, k, v):
    scores = jnp.where(jnp.tril(jnp.ones((3, 3), bool)), q @ k.mT / 2, -jnp.inf)
    return jax.nn.softmax(scores, -1) @ v


def assert_close(found, expected):
    """Sums of some dozen float32 products, in another order."""
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5), found, expected)


TRANSFORMS = {
    "grad": lambda f: jax.grad(lambda x, w: (f(x, w) ** 2).sum(), (0, 1))(X, W),
    "grad of one": lambda f: jax.grad(lambda w: (f(X, w) ** 2).sum())(W),
    "vjp": lambda f: jax.vjp(f, X, W)[1](jnp.ones((3, 5))),
    "jvp": lambda f: jax.jvp(f, (X, W), (X + 1, W - 1)),
    "linearize": lambda f: jax.linearize(f, X, W)[1](X + 1, W - 1),
    "transposed twice": lambda f: jax.linear_transpose(jax.vjp(f, X, W)[1], jnp.ones((3, 5)))((X, W)),
    "reverse over reverse": lambda f: jax.grad(
        lambda x, w: (jax.grad(lambda x: (f(x, w) ** 3).sum())(x) ** 2).sum(), (0, 1)
    )(X, W),
    "forward over reverse": lambda f: jax.jvp(jax.grad(lambda x: (f(x, W) ** 3).sum()), (X,), (X + 1,)),
    "checkpoint": lambda f: jax.grad(lambda x: (jax.checkpoint(f)(x, W) ** 2).sum())(X),
    "scan": lambda f: jax.grad(lambda x: jax.lax.scan(lambda c, _: (f(c, W) @ W.T, None), x, length=3)[0].sum())(X),
}


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS.keys())
def test_derivatives(transform):
    assert_close(jax.jit(lambda: transform(dense))(), transform(dense_jax))


def test_derivatives_outside_jit():
    grad = TRANSFORMS["grad"]
    assert_close(grad(dense), grad(dense_jax))


def test_gradients_of_attention():
    q, k, v = (RNG.normal(size=(2, 3, 4)).astype(np.float32) for _ in range(3))
    call = functools.partial(torch_call, attention_torch, differentiable=True)
    first = lambda f: jax.grad(lambda *a: (f(*a) ** 2).sum(), (0, 1, 2))(q, k, v)
    second = lambda f: jax.grad(lambda q: (jax.grad(lambda k: (f(q, k, v) ** 2).sum())(k) ** 2).sum())(q)
    for transform in (first, second):
        assert_close(jax.jit(transform, static_argnums=0)(call), transform(attention_jax))


def test_gradients_are_torchs_own():
    x, w = (torch.tensor(a, requires_grad=True) for a in (X, W))
    (dense_torch(x, w) ** 2).sum().backward()
    found = jax.grad(lambda x, w: (dense(x, w) ** 2).sum(), (0, 1))(X, W)
    assert_close(found, (x.grad.numpy(), w.grad.numpy()))


def test_inputs_without_gradients_and_outputs_without():
    """An index, an input that is not used, one that only an integer depends on, and integer results."""

    def fn(x, index, unused, counted):
        return {"y": x[index] * 3, "count": (counted > 0).sum(dtype=torch.int32)}

    def loss(x, index, unused, counted):
        out = torch_call(fn, x, index, unused, counted, differentiable=True)
        assert out["count"].dtype == jnp.int32
        return out["y"].sum()

    # torch takes int32 indices.
    args = jnp.arange(4.0), jnp.array([1, 1, 3], jnp.int32), jnp.ones(2), jnp.ones(3)
    found = jax.grad(loss, (0, 2, 3))(*args)
    assert_close(found, ([0, 6, 0, 3], [0, 0], [0, 0, 0]))
    assert_close(jax.jvp(lambda x: loss(x, *args[1:]), args[:1], (jnp.ones(4),)), (15.0, 9.0))


def test_complex_gradients_are_jaxs():
    z = (RNG.normal(size=3) + 1j * RNG.normal(size=3)).astype(np.complex64)
    call = lambda z: torch_call(lambda z: (z * z * (1 + 2j), z.abs()), z, differentiable=True)
    same = lambda z: (z * z * (1 + 2j), jnp.abs(z))
    cotangents = jnp.array([1 + 1j, 2, 3j], jnp.complex64), jnp.ones(3)
    assert_close(jax.vjp(call, z)[1](cotangents), jax.vjp(same, z)[1](cotangents))
    assert_close(jax.jvp(call, (z,), (z + 1j,)), jax.jvp(same, (z,), (z + 1j,)))


def test_weights_that_are_closed_over_are_constants():
    layer = torch.nn.Linear(4, 2)
    x = jnp.ones((3, 4))
    found = jax.grad(lambda x: torch_call(layer, x, differentiable=True).sum())(x)
    np.testing.assert_allclose(found, np.tile(layer.weight.detach().numpy().sum(0), (3, 1)), rtol=1e-5)
    assert layer.weight.grad is None


@pytest.mark.parametrize("options", [{"out_type": Type((3,), jnp.float32)}, {"scratch_type": Type((3,), jnp.float32)}])
@pytest.mark.parametrize("option", [{"differentiable": True}, {"vmap_method": "torch"}])
def test_functions_that_write_are_refused(options, option):
    with pytest.raises(ValueError, match=r"needs a function that returns new tensors; double_into was given out_type"):
        torch_call(double_into, jnp.ones(3), **options, **option)


def test_writing_to_an_input_is_refused():
    with pytest.raises(TypeError, match=r"<lambda> writes to its input 1 in place.*clone"):
        torch_call(lambda x, y: y.mul_(x), jnp.ones(3), jnp.ones(3), differentiable=True)


# vmap.


def scaled(x, s):  # one element: x is [3], s is []
    return x * s + torch.arange(x.shape[-1], device=x.device), x.sum(-1)


def scaled_leading(x, s):  # with one more leading axis, of size 1 or more
    return x * s[..., None] + torch.arange(x.shape[-1], device=x.device), (x + 0 * s[..., None]).sum(-1)


def scaled_jax(x, s):
    return x * s + jnp.arange(x.shape[-1]), x.sum(-1)


METHODS = ["sequential", "sequential_unrolled", "expand_dims", "broadcast_all", "torch"]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("in_axes", "shape"), [((0, 0), (4, 3)), ((1, None), (3, 4)), ((None, 0), (3,))])
def test_vmap(method, in_axes, shape):
    x = RNG.normal(size=shape).astype(np.float32)
    s = np.float32(2) if in_axes[1] is None else np.float32([1, 2, 3, 4])
    fn = scaled_leading if method in ("expand_dims", "broadcast_all") else scaled
    call = functools.partial(torch_call, fn, vmap_method=method, differentiable=True)
    expected = jax.vmap(scaled_jax, in_axes)(x, s)
    assert_close(jax.jit(jax.vmap(call, in_axes))(x, s), expected)

    def gradients(f):
        return jax.jit(jax.vmap(jax.grad(lambda x, s: (f(x, s)[0] ** 2).sum(), (0, 1)), in_axes))(x, s)

    assert_close(gradients(call), gradients(scaled_jax))


def test_vmap_of_vmap_and_shapes_that_the_function_sees():
    seen = []

    def fn(x, y):
        seen.append((tuple(x.shape), tuple(y.shape)))
        return x + y

    for method, shapes in (("expand_dims", ((5, 2), (1, 2))), ("broadcast_all", ((5, 2), (5, 2)))):
        f = jax.vmap(functools.partial(torch_call, fn, vmap_method=method), (0, None))
        np.testing.assert_array_equal(f(jnp.ones((5, 2)), jnp.ones(2)), np.full((5, 2), 2))
        assert seen[-1] == shapes
    call = lambda x, y: torch_call(torch.dot, x, y, vmap_method="torch")
    x, y = RNG.normal(size=(4, 3)).astype(np.float32), RNG.normal(size=(5, 3)).astype(np.float32)
    found = jax.vmap(jax.vmap(call, (None, 0)), (0, None))(x, y)
    np.testing.assert_allclose(found, x @ y.T, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("method", ["sequential", "expand_dims", "broadcast_all"])
def test_vmap_of_an_update_in_place(method):
    def fn(x, cache, out, scratch):
        scratch.copy_(x)
        cache += scratch
        out.copy_(cache * 2)

    like = Type((3,), jnp.float32)

    def call(x, cache):
        return torch_call(
            fn, x, cache, out_type=(like, like), input_output_aliases={1: 0}, scratch_type=like, vmap_method=method
        )

    x, cache = np.arange(6, dtype=np.float32).reshape(2, 3), np.ones(3, np.float32)
    new, out = jax.jit(jax.vmap(call, (0, None)))(x, cache)
    np.testing.assert_array_equal(new, x + 1)
    np.testing.assert_array_equal(out, 2 * (x + 1))
