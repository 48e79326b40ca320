"""Times of ops inside one jitted chain, which XLA replays as a CUDA graph."""

import statistics
import time
from typing import NamedTuple

import jax
import jax.numpy as jnp

REPLAYS = 16  # of the chain in one measurement; JAX lets Python run 32 calls ahead
REPEATS = 9
DELAY_BYTES = 4 << 30  # of a GPU with the memory for it
MOST_DELAY = 12  # copies


class Time(NamedTuple):
    """Median of the repeats, microseconds, and the distance between their quartiles as a share of it."""

    microseconds: float
    spread: float


class Timer:
    """Measures chains of calls so that only the GPU's time counts.

    A few long copies go ahead of the chain: while they run, Python launches everything behind them.
    """

    def __init__(self):
        self._cpu = jax.default_backend() == "cpu"
        memory = (jax.devices()[0].memory_stats() or {}).get("bytes_limit", 1 << 30)
        self._source = jnp.ones(min(DELAY_BYTES, memory // 16) // 4, jnp.float32)
        self._copy = jax.jit(lambda x: x + 1.0)
        one, nine = (statistics.median(self._run(lambda: None, copies) for _ in range(7)) for copies in (1, 9))
        self.copy_seconds = (nine - one) / 8
        # The barrier keeps XLA from making one kernel of all.
        increment = lambda x, _: jax.lax.optimization_barrier(x) + 1.0
        self.launch = self.chain(increment, [jnp.zeros(1)], [()], length=60).microseconds

    @property
    def bandwidth(self) -> float:
        """Bytes a second, read plus written, of a copy in device memory."""
        return 2 * self._source.nbytes / self.copy_seconds

    def chain(self, run, carries: list, inputs: list, *, length: int) -> Time:
        """Time of one `carry = run(carry, inputs)` of a chain that goes round several sets of arrays.

        Args:
          run: a JAX function.
          carries: for each set a pytree that is updated in place (donated).
          inputs: for each set a pytree. An array that several hold is passed once.
          length: calls in the chain, rounded up to whole rounds.
        """
        step, sets = jax.jit(run), len(carries)  # jitted by itself, so that it is traced and lowered once, not per call
        length = -(-length // sets) * sets
        leaves, tree = jax.tree.flatten(inputs)
        distinct = list({id(leaf): leaf for leaf in leaves}.values())
        place = {id(leaf): i for i, leaf in enumerate(distinct)}
        places = [place[id(leaf)] for leaf in leaves]

        def calls(carries, distinct):
            carries, inputs = list(carries), jax.tree.unflatten(tree, [distinct[i] for i in places])
            for i in range(length):
                carries[i % sets] = step(carries[i % sets], inputs[i % sets])
            return carries

        replay = jax.jit(calls, donate_argnums=0)
        held, count = [carries], 2 if self._cpu else REPLAYS

        def replays():
            for _ in range(count):
                held[0] = replay(held[0], distinct)
            return held[0]

        jax.block_until_ready(replays())
        start = time.perf_counter()
        launched = replays()
        launching = time.perf_counter() - start
        jax.block_until_ready(launched)
        del launched  # its buffers are donated next
        # On the CPU launching is part of the work, and there is nothing to hide it behind.
        copies = 0 if self._cpu else min(MOST_DELAY, 2 + int(1.5 * launching / self.copy_seconds))
        times = [
            (self._run(replays, copies) - self._run(lambda: None, copies)) / (count * length) * 1e6
            for _ in range(REPEATS)
        ]
        low, median, high = statistics.quantiles(times, n=4)
        return Time(median, (high - low) / median)

    def _run(self, launch, copies: int) -> float:
        start = time.perf_counter()
        x = self._source
        for _ in range(copies):
            x = self._copy(x)
        jax.block_until_ready((x, launch()))
        return time.perf_counter() - start


def compile_seconds(run, carry, inputs) -> float:
    """Seconds to trace, lower and compile one call; kernels that this process has compiled are not compiled again."""

    def once(carry, inputs):  # a function that JAX has not seen
        return run(carry, inputs)

    start = time.perf_counter()
    jax.jit(once, donate_argnums=0).lower(carry, inputs).compile()
    return time.perf_counter() - start
