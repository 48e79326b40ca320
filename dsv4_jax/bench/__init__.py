"""Benchmarks: time of an op inside `jax.jit` against the time that its bytes need at copy bandwidth."""
