"""The rules of implicit promotion inside the package."""

import contextlib

import jax


@contextlib.contextmanager
def own_rules():
    """Promotes ranks and dtypes as NumPy does, whatever the program forbids itself; also a decorator.

    `jax_numpy_rank_promotion="raise"` and `jax_numpy_dtype_promotion="strict"` are for a program's own mistakes.
    """
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield
