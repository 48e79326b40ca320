"""The ops around the compressor as workloads: for each a function of T that makes what the timer runs."""

from collections.abc import Callable
from typing import NamedTuple

import jax


class Workload(NamedTuple):
    """One op on one batch.

    Attributes:
      run: `run(carry, inputs) -> carry`; the carry is what the op updates in place, or what it returned last.
      carry, inputs: pytrees.
      bytes: that the op must read and write.
    """

    run: Callable
    carry: object
    inputs: object
    bytes: int


def once_each(op: Callable) -> Callable:
    """`op(inputs) -> results` as `run`: tied to the last call's results, so that XLA does every call of a chain."""

    def run(carry, inputs):
        _, inputs = jax.lax.optimization_barrier((carry, inputs))
        return op(inputs)

    return run


# Name of the op to a function `(tokens, key) -> Workload` on fresh random data; sorted by name.
WORKLOADS: dict[str, Callable] = {}
