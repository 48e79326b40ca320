"""Checks of arguments while tracing: an error names the argument, what it was and what it must be."""

import jax
import jax.numpy as jnp
import numpy as np

FLOATS = (jnp.float32, jnp.bfloat16)


def array(name: str, value, shape: tuple, dtypes: tuple = (jnp.float32,)) -> jax.Array:
    """Returns `value` as a JAX array after checking dtype and shape.

    Args:
      name: the argument's name, for the error.
      value: anything array-like.
      shape: the length of each axis; a string stands for any length.
      dtypes: the dtypes that are accepted.
    """
    not_a_ref(name, value)
    # JAX would take a ShapeDtypeStruct for a scalar, and refuse a masked array without naming the argument.
    other = isinstance(value, jax.ShapeDtypeStruct | np.ma.MaskedArray)
    if other or not hasattr(value, "shape") or not hasattr(value, "dtype"):
        raise TypeError(f"{name} is a {type(value).__name__}; it must be an array of {_names(dtypes)} {_shape(shape)}")
    if not any(value.dtype == d for d in dtypes):
        raise TypeError(f"{name} has dtype {value.dtype}; it must be {_names(dtypes)}")
    if len(value.shape) != len(shape) or any(
        isinstance(want, int) and want != got for want, got in zip(shape, value.shape, strict=True)
    ):
        raise ValueError(f"{name} has shape {list(value.shape)}; it must be {_shape(shape)}")
    # Copy NumPy arrays: JAX on the CPU may read their memory later, after the caller has changed it.
    return jnp.asarray(value.copy() if isinstance(value, np.ndarray) else value)


def not_a_ref(name: str, value) -> None:
    """Raises for a `jax.Ref`: an op returns what it updates, and would not know where to write it."""
    if isinstance(value, jax.Ref):
        raise TypeError(
            f"{name} is a jax.Ref; pass its value, {name}[...]. To update it, write the result back: "
            f"{name}[...] = result"
        )


def integers(name: str, value, shape: tuple) -> jax.Array:
    """Returns indices as int32. An int64 beyond int32's range stays out of range; it does not wrap around."""
    if isinstance(value, list | tuple):
        try:
            value = np.asarray(value, None if len(value) else np.int32)
        except ValueError as error:
            raise ValueError(f"{name} is a {type(value).__name__} that is no array: {error}") from error
    # Clip in NumPy: without x64, JAX would wrap int64 to int32.
    if isinstance(value, np.ndarray) and value.dtype == np.int64:
        value = np.clip(value, -1, 2**31 - 1).astype(np.int32)
    value = array(name, value, shape, (jnp.int32, jnp.int64))
    if value.dtype == jnp.int64:
        value = jnp.clip(value, -1, 2**31 - 1)
    return value.astype(jnp.int32)


def instance(name: str, value, kind: type) -> None:
    """Raises unless `value` is a `kind`."""
    if not isinstance(value, kind):
        raise TypeError(f"{name} is a {type(value).__name__}; it must be a {kind.__name__}")


def at_least(name: str, value, least: int) -> int:
    """Returns `value` as an int; raises unless it is an integer of at least `least` that fits int32."""
    if not isinstance(value, int | np.integer) or isinstance(value, bool) or not least <= value < 2**31:
        raise ValueError(f"{name} is {value!r}; it must be an integer of at least {least}, and below 2**31")
    return int(value)


def positive(name: str, value) -> float:
    """Returns a static number, above 0 in float32, as a float."""
    if not isinstance(value, int | float | np.number) or isinstance(value, bool):
        raise TypeError(f"{name} is a {type(value).__name__}; it must be a number, known while tracing")
    if not 2.0**-126 <= value < 2.0**127:
        raise ValueError(f"{name} is {value!r}; it must be above 0, finite, and of float32's range")
    return float(value)


def one_of(name: str, value, choices: tuple) -> None:
    """Raises unless `value` is one of `choices`."""
    if value not in choices:
        raise ValueError(f"{name} is {value!r}; it must be one of {', '.join(map(repr, choices))}")


def _names(dtypes):
    return " or ".join(np.dtype(d).name for d in dtypes)


def _shape(shape):
    return "[" + ", ".join(map(str, shape)) + "]"
