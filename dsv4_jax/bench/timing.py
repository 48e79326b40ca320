"""Times of ops inside one jitted chain, which XLA replays as a CUDA graph."""

import statistics
import time

import jax
import jax.numpy as jnp

CALLS = 16  # of the chain in one measurement
DELAY_BYTES = {"cpu": 64 << 20}


class Timer:
    """Measures chains of calls so that only the GPU's time counts.

    A few long copies go ahead of the chain: while they run, Python launches everything behind them.
    """

    def __init__(self):
        size = DELAY_BYTES.get(jax.default_backend(), 4 << 30)
        self._source = jnp.ones(size // 4, jnp.float32)
        self._copy = jax.jit(lambda x: x + 1.0)
        one, nine = (statistics.median(self._run(lambda: None, copies) for _ in range(7)) for copies in (1, 9))
        self.copy_seconds = (nine - one) / 8

    @property
    def bandwidth(self) -> float:
        """Bytes a second, read plus written, of a copy in device memory."""
        return 2 * self._source.nbytes / self.copy_seconds

    def microseconds(self, step, carry, inputs, *, length: int, repeats: int = 9) -> float:
        """Median time of one `carry = step(carry, inputs[i])`, microseconds.

        Args:
          step: a JAX function.
          carry: pytree that is updated in place (donated).
          inputs: list of pytrees; call i of the chain takes `inputs[i % len(inputs)]`. Several large ones keep the L2
            cache cold.
          length: calls in a chain.
          repeats: measurements, of which the median counts.
        """

        def chain(carry, inputs):
            for i in range(length):
                carry = step(carry, inputs[i % len(inputs)])
            return carry

        run = jax.jit(chain, donate_argnums=0)
        held = [carry]

        def calls():
            for _ in range(CALLS):
                held[0] = run(held[0], inputs)
            return held[0]

        for _ in range(2):
            jax.block_until_ready(calls())
        # On the CPU launching is part of the work, and there is nothing to hide it behind.
        copies = 0 if jax.default_backend() == "cpu" else 3
        times = [self._run(calls, copies) - self._run(lambda: None, copies) for _ in range(repeats)]
        return statistics.median(times) / (CALLS * length) * 1e6

    def _run(self, launch, copies: int) -> float:
        start = time.perf_counter()
        x = self._source
        for _ in range(copies):
            x = self._copy(x)
        jax.block_until_ready((x, launch()))
        return time.perf_counter() - start
