"""Times of ops inside one jitted chain, which XLA replays as a CUDA graph."""

import statistics
import time

import jax
import jax.numpy as jnp


def microseconds(step, carry, inputs, *, expected: float, repeats: int = 7):
    """Median time of one `carry = step(carry, inputs[i])`, microseconds, and the last carry.

    Calls are chained inside one `jax.jit` with the carry donated, as many as make up a millisecond, so that launching
    the graph from Python stays hidden behind the GPU's work.

    Args:
      step: a JAX function.
      carry: pytree that is updated in place.
      inputs: list of pytrees; call i takes `inputs[i % len(inputs)]`. Several large ones keep the L2 cache cold.
      expected: roughly what a call takes, microseconds.
      repeats: runs of the chain, of which the median counts.
    """
    length = max(4, min(100, round(1000 / max(expected, 2.0))))
    length += -length % len(inputs)

    def chain(carry, inputs):
        for i in range(length):
            carry = step(carry, inputs[i % len(inputs)])
        return carry

    run = jax.jit(chain, donate_argnums=0)
    for _ in range(4):
        carry = run(carry, inputs)
    jax.block_until_ready(carry)
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        for _ in range(4):
            carry = run(carry, inputs)
        jax.block_until_ready(carry)
        times.append((time.perf_counter() - start) / (4 * length) * 1e6)
    return statistics.median(times), carry


def copy_bandwidth(size: int = 1 << 31) -> float:
    """Bytes a second, read plus written, of a copy of `size` bytes in device memory."""
    x = jax.random.normal(jax.random.key(0), (size // 4,), jnp.float32)
    # x[0] keeps XLA from folding one addition into the next.
    run = jax.jit(lambda x: x + 1.0, donate_argnums=())
    out = jax.block_until_ready(run(x))
    times = []
    for _ in range(5):
        del out
        start = time.perf_counter()
        for _ in range(10):
            out = run(x)
        jax.block_until_ready(out)
        times.append((time.perf_counter() - start) / 10)
    return 2 * size / statistics.median(times)
