"""Benchmarks: the time of an op inside `jax.jit` against the least time that its bytes and its arithmetic take."""
