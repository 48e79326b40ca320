"""What torch_call refuses, and how errors of the function reach the user."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.bridging import OwnError, Type, double, double_into, torch

from bridge import torch_call

# While tracing.


@pytest.mark.parametrize(
    ("kwargs", "error", "match"),
    [
        ({"fn": 3}, TypeError, "fn is a int; it must be callable"),
        ({"fn": type("F", (), {"__call__": double_into, "__hash__": None})()}, TypeError, "fn, a F, is not hashable"),
        ({"args": [3]}, TypeError, r"argument 0 of double_into is a int.*functools\.partial"),
        ({"args": [None]}, TypeError, "argument 0 of double_into is a NoneType"),
        ({"args": [jnp.ones(3), (jnp.ones(3),)]}, TypeError, "argument 1 of double_into is a tuple.*pytrees"),
        ({"args": [torch.ones(3)]}, TypeError, "argument 0 of double_into is a Tensor.*to_jax"),
        ({"out_type": 3}, TypeError, "out_type is 3; it must be a jax.ShapeDtypeStruct"),
        ({"out_type": [Type((), int), "x"]}, TypeError, r"out_type\[1\] is 'x'"),
        ({"out_type": ()}, ValueError, "double_into has no outputs"),
        ({"scratch_type": [3]}, TypeError, r"scratch_type\[0\] is 3"),
        ({"input_output_aliases": [(0, 0)]}, TypeError, "input_output_aliases is .*it must be a dict"),
        ({"input_output_aliases": {0: "x"}}, TypeError, "input_output_aliases is .*it must be a dict"),
        ({"input_output_aliases": {1: 0}}, ValueError, "names input 1; there are 1 inputs"),
        ({"input_output_aliases": {-1: 0}}, ValueError, "names input -1"),
        ({"input_output_aliases": {0: 2}}, ValueError, "names output 2; there are 1 outputs"),
        ({"input_output_aliases": {0: 0}, "out_type": Type((4,), jnp.float32)}, ValueError, r"float32\[3\].*alike"),
        ({"input_output_aliases": {0: 0}, "out_type": Type((3,), jnp.int32)}, ValueError, r"int32\[3\].*alike"),
        ({"input_output_aliases": {0: 0}, "out_type": None}, ValueError, "needs out_type"),
        ({"args": [np.float32([1])] * 2, "input_output_aliases": {0: 0, 1: 0}, "out_type": Type((1,), jnp.float32)},
         ValueError, "only one input's"),
        ({"command_buffer_compatible": "yes"}, TypeError, "command_buffer_compatible is 'yes'"),
        ({"differentiable": 1}, TypeError, "differentiable is 1"),
        ({"vmap_method": "parallel"}, ValueError, "vmap_method is 'parallel'; it must be one of sequential, "),
        ({"name": 3}, TypeError, "name is a int; it must be a str"),
        ({"name": "\udc80"}, ValueError, "name is .*udc80.*; it must be text that UTF-8 can encode"),
    ],
)  # fmt: skip
def test_bad_arguments(kwargs, error, match):
    good = {"fn": double_into, "args": [jnp.ones(3)], "out_type": Type((3,), jnp.float32)}
    good.update(kwargs)
    with jax.enable_x64("int" in str(kwargs.get("out_type"))), pytest.raises(error, match=match):
        torch_call(good.pop("fn"), *good.pop("args"), **good)


@pytest.mark.parametrize(
    ("fn", "match"),
    [
        (lambda x: None, "returned None"),
        (lambda x: "text", "is a str; it must be a torch.Tensor"),
        (lambda x: (x, 1.0), r"returned\[1\] is a float; it must be a torch.Tensor"),
        (lambda x: x.to_sparse(), "could not be inferred|layout torch.sparse_coo"),
        (lambda x: x.nonzero(), "could not be inferred.*Pass out_type"),
        (lambda x: x[5], "could not be inferred.*IndexError"),
        (lambda x: (), None),
    ],
)
def test_results_that_cannot_be_inferred(fn, match):
    with pytest.raises(TypeError if match else ValueError, match=match or "no outputs"):
        torch_call(fn, jnp.ones(3))


def test_transformations_say_what_to_use():
    x = jnp.ones(3)
    with pytest.raises(
        NotImplementedError, match=r"double_into cannot be differentiated.*differentiable=True.*jax\.custom_vjp"
    ):
        jax.grad(lambda x: double(x).sum())(x)
    with pytest.raises(NotImplementedError, match=r"double_into cannot be transposed"):
        jax.linear_transpose(double, x)(x)
    with pytest.raises(NotImplementedError, match=r"double_into cannot be batched.*vmap_method is None.*'sequential'"):
        jax.vmap(double)(x)
    for platforms in (None, ["cpu", "cuda"]):
        with pytest.raises(NotImplementedError, match=r"double_into cannot be exported"):
            jax.export.export(jax.jit(double), platforms=platforms)(x)
    with pytest.raises(NotImplementedError, match=r"double_into cannot run on tpu; it can on cpu, cuda and rocm"):
        jax.jit(double).trace(x).lower(lowering_platforms=("tpu",))


# While running.


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit])
def test_exceptions_reach_the_user_and_do_no_harm(wrap):
    def fn(x, out):
        raise OwnError("something of fn's own")

    f = wrap(lambda x: torch_call(fn, x, out_type=Type.like(x)))
    for _ in range(3):
        with pytest.raises(jax.errors.JaxRuntimeError, match=r"(?s)in fn.*OwnError: something of fn's own"):
            f(jnp.ones(3)).block_until_ready()
        assert torch.is_grad_enabled()
        np.testing.assert_array_equal(wrap(double)(jnp.ones(3)), [2, 2, 2])


def fails_in_its_text():
    raise ValueError("\udcff")


def fails_in_a_note():
    error = ValueError("x")
    error.add_note("\udcff")
    raise error


def fails_in_its_cause():
    raise ValueError("x") from OSError("\udcff")


def fails_in_a_file():
    exec(compile("raise ValueError('x')", "\udcff.py", "exec"))


def exits():
    raise SystemExit("\udcff")


@pytest.mark.parametrize(
    ("fail", "escaped"),
    [
        (fails_in_its_text, "ValueError: \\udcff\n"),
        (fails_in_a_note, "ValueError: x\n\\udcff\n"),
        (fails_in_its_cause, "OSError: \\udcff\n\nThe above"),
        (fails_in_a_file, ' File "\\udcff.py", line 1, in '),
        (exits, "SystemExit: \\udcff\n"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_errors_that_utf8_cannot_encode(fail, escaped):
    """jaxlib alone would crash on these, or leave out the note and the cause."""
    failing = True

    def fn(*_):
        if failing:
            fail()

    options = {"input_output_aliases": {0: 0}, "command_buffer_compatible": False}
    f = jax.jit(lambda x: torch_call(fn, x, out_type=Type.like(x), **options))
    for _ in range(2):
        with pytest.raises(jax.errors.JaxRuntimeError) as caught:
            f(jnp.ones(3)).block_until_ready()
        assert escaped in str(caught.value)
        assert ("SystemExit" if fail is exits else "ValueError: ") in str(caught.value)
    failing = False
    np.testing.assert_array_equal(f(jnp.arange(3.0)), [0, 1, 2])


def test_errors_that_utf8_can_encode_stay_as_they_are():
    def fn(*_):
        raise OwnError("größer als 2³¹ \U0001f600")

    f = jax.jit(lambda x: torch_call(fn, x, out_type=Type.like(x), command_buffer_compatible=False))
    with pytest.raises(jax.errors.JaxRuntimeError, match="\nOwnError: größer als 2³¹ \U0001f600\n") as caught:
        f(jnp.ones(3)).block_until_ready()
    assert "in require_utf8" not in str(caught.value)


@pytest.mark.parametrize(
    ("fn", "returned"),
    [
        (lambda x, out: x, r"float32\[3\]"),
        (lambda x, out: (out, 3), r"\(float32\[3\], int\)"),
        (lambda x, out: out + x, r"float32\[3\]"),
    ],
)
def test_returning_instead_of_writing(fn, returned):
    with pytest.raises(jax.errors.JaxRuntimeError, match=rf"TypeError: .*returned {returned}, which would be lost"):
        torch_call(fn, jnp.ones(3), out_type=Type((3,), jnp.float32)).block_until_ready()


@pytest.mark.parametrize(
    ("later", "described"),
    [
        (lambda x: x.to(torch.int8), r"int8\[3\]"),
        (lambda x: x[:2], r"float32\[2\]"),
        (lambda x: (x, x), r"\(float32\[3\], float32\[3\]\)"),
        (lambda x: 3, "int"),
        (lambda x: None, "None"),
    ],
)
def test_returning_something_else_than_when_traced(later, described):
    def fn(x):
        return x if type(x).__name__ == "FakeTensor" else later(x)

    match = rf"fn returned {described}, but returned float32\[3\] when it was traced"
    with pytest.raises(jax.errors.JaxRuntimeError, match=match):
        torch_call(fn, jnp.ones(3)).block_until_ready()


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
def test_an_output_of_another_shape_than_declared():
    """torch resizes an out= tensor, with a warning only, and would write where XLA does not look."""

    def fn(x, out):
        torch.add(x, 1, out=out)

    with pytest.raises(jax.errors.JaxRuntimeError, match=r"changed the shape of an output from \(4,\) to \(3,\)"):
        jax.block_until_ready(torch_call(fn, jnp.ones(3), out_type=Type((4,), jnp.float32)))
