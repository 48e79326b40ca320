"""Times one call of an op inside a jitted program, which XLA replays as a CUDA graph."""

import functools
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

REPLAYS = 16  # of the program in one sample; JAX lets Python run 32 calls ahead
REPEATS = 9
DELAY_BYTES = 4 << 30  # on a GPU with the memory for it
MOST_DELAY = 12  # copies
MATRIX = 8192  # rows and columns of the matrices whose product is timed


class Time(NamedTuple):
    """The median in microseconds, and the distance between the quartiles as a share of it."""

    microseconds: float
    spread: float


def measure(samplers: dict[str, Callable[[], float]], repeats: int | None = None) -> dict[str, Time]:
    """Takes samples in turns, since a host is slower at some times than at others."""
    rounds = [{name: sample() for name, sample in samplers.items()} for _ in range(repeats or REPEATS)]
    times = {}
    for name in samplers:
        low, median, high = statistics.quantiles([samples[name] for samples in rounds], n=4)
        times[name] = Time(median, (high - low) / median)
    return times


class Timer:
    """Times programs on JAX's first device.

    Attributes:
      bandwidth: bytes per second, read plus written, of a copy in device memory.
      launch: microseconds of a kernel of one number; no op is faster.
    """

    def __init__(self):
        self._on_cpu = jax.default_backend() == "cpu"
        memory = (jax.devices()[0].memory_stats() or {}).get("bytes_limit", 1 << 28)
        self._source = jnp.ones(min(DELAY_BYTES, memory // 16) // 4, jnp.float32)
        self._copy = jax.jit(lambda x: x + 1.0)
        one, nine = (statistics.median(self._run(lambda: None, copies) for _ in range(7)) for copies in (1, 9))
        self._copy_seconds = (nine - one) / 8
        self.bandwidth = 2 * self._source.nbytes / self._copy_seconds
        # The barrier keeps XLA from fusing the chain into one kernel.
        increment = lambda x, _: jax.lax.optimization_barrier(x) + 1.0
        self.launch = self._one(self.chain(increment, [jnp.zeros(1)], [()], 60))

    @functools.cached_property
    def flops(self) -> float:
        """Floating-point operations per second of a large matrix product in bfloat16."""
        n = MATRIX
        x, w = (jax.random.normal(jax.random.key(i), (n, n), jnp.bfloat16) for i in range(2))
        product = lambda x, w: (x @ w) * jnp.bfloat16(n**-0.5)
        return 2 * n**3 / (self._one(self.chain(product, [x], [w], 4)) * 1e-6)

    def chain(self, run, carries: list, inputs: list, length: int) -> Callable[[], float]:
        """A sampler of one `carry = run(carry, inputs)` in a chain of calls inside one jit.

        Args:
          run: a JAX function.
          carries: pytrees that are updated in place (donated), one per set of arrays. The chain goes round the sets.
          inputs: one pytree per set. An array that several sets share is passed once.
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

        return self.sampler(jax.jit(calls, donate_argnums=0), carries, distinct, length)

    def sampler(self, program, carry, inputs, ops: int, *, replays: int | None = None, with_host: bool = False):
        """A function that takes one sample: microseconds of one of the `ops` calls in `program(carry, inputs)`.

        Args:
          program: a jitted function that donates its carry and returns the next one. It is compiled here.
          carry, inputs: pytrees.
          ops: calls of the op in the program.
          replays: of the program in a sample.
          with_host: whether the time that Python needs to launch the program counts. Otherwise a few long copies run
            ahead of it; while they run, Python launches everything behind them. On a CPU it always counts.
        """
        held, replays = [carry], replays or (2 if self._on_cpu else REPLAYS)

        def replay():
            for _ in range(replays):
                held[0] = program(held[0], inputs)
            return held[0]

        jax.block_until_ready(replay())
        start = time.perf_counter()
        launched = replay()
        launching = time.perf_counter() - start
        jax.block_until_ready(launched)
        del launched  # its buffers are donated next
        copies = 0
        if not (self._on_cpu or with_host):
            copies = min(MOST_DELAY, 2 + int(1.5 * launching / self._copy_seconds))
        return lambda: (self._run(replay, copies) - self._run(lambda: None, copies)) / (replays * ops) * 1e6

    def _one(self, sample):
        return measure({"": sample})[""].microseconds

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
