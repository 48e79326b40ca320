"""Compiles every CuTeDSL kernel, as the ops launch it, for one GPU target; needs no GPU.

`CUTE_DSL_ARCH=sm_90a python tests/helpers/compile_cutedsl.py` prints a line a kernel: its name, its key, seconds.
"""

import ctypes
import dataclasses
import functools
import itertools
import time

import jax
import jax.numpy as jnp

from dsv4_jax import CompressorConfig, CompressorMetadata
from dsv4_jax.nvidia.ops import compress
from dsv4_jax.nvidia.ops.helpers import launch

# Cache format, dtype of kv_score (None: from the state cache alone), of the norm weight, what is saved.
OF_EACH = (
    ("fp8_ds_mla", "float32", "float32", "tail"),
    ("fp8_ds_mla", "bfloat16", "bfloat16", "all"),
    ("fp8_ds_mla", None, "float32", "none"),
    ("bf16", "float32", "bfloat16", "all"),
    ("fp8", "bfloat16", "float32", "tail"),
    ("two launches", None, "float32", "none"),
)
CSA, HCA = CompressorConfig.csa(), CompressorConfig.hca()
VARIANTS = [
    *((config, *variant, 256) for config in (CSA, HCA) for variant in OF_EACH),
    (HCA, *OF_EACH[1], 32768),  # many windows
    # Long prefills, with more registers a thread and with fewer.
    *((HCA, *variant, tokens) for variant in (OF_EACH[0], OF_EACH[4]) for tokens in (32768, 65536)),
    (CSA, *OF_EACH[4], 32768),
    *(
        (dataclasses.replace(CSA, compress_ratio=ratio, overlap=overlap), *OF_EACH[0], 256)
        for ratio, overlap in ((1, False), (16, True), (256, False))
    ),
]


def main() -> int:
    """Compiles all variants; returns how many kernels that made."""
    launch.load_kernel = announced
    for variant in VARIANTS:
        jax.eval_shape(functools.partial(trace, *variant))
    return announced.cache_info().currsize


@functools.cache
def announced(kernel, shape, arch):
    """What `launch.load_kernel` does, without a GPU to load the code on."""
    start = time.perf_counter()
    function = launch.compile_kernel(kernel, shape, arch)
    assert packed(function, 20, 1) == list(range(21)), "cutlass-dsl does not hand on packed arguments as they are"
    print(kernel.__name__, shape, arch, f"{time.perf_counter() - start:.1f} s", flush=True)
    return function


def packed(function, *counts):
    """What a compiled function is about to launch with, of `Packed` arguments that hold 0, 1, 2 and so on."""
    function._load_cuda_library = list
    executor, pointers, values = function.to(), [], itertools.count()
    executor.run_compiled_program = pointers.extend
    executor(*(arguments := [launch.Packed(*itertools.islice(values, count)) for count in counts]))
    found = [ctypes.c_int64.from_address(pointer.value).value for pointer in pointers]
    del arguments  # which the pointers point into
    return found


def trace(config, fmt, dtype, norm_dtype, save, tokens):
    """Runs an op's implementation on arrays without values."""
    if fmt != "two launches":
        config = dataclasses.replace(config, cache_format=fmt)
    metadata = CompressorMetadata.build(
        config,
        jnp.array([0, tokens]),
        jnp.array([tokens]),
        jnp.zeros((1, tokens // config.page_rows), jnp.int32),
        jnp.zeros((1, 8), jnp.int32),
        num_tokens=tokens,
    )
    states = jnp.zeros((8, config.page_rows, 2 * config.width))
    cache = config.format.allocate(8, config.kv_page_rows)
    norm, cos_sin = jnp.ones(config.head_dim, norm_dtype), jnp.zeros((tokens, config.rope_head_dim))
    scale = jnp.float32(1) if config.format.needs_scale else None
    if fmt == "two launches":
        types = (jax.ShapeDtypeStruct((metadata.closing.shape[0], config.head_dim), jnp.float32),)
        (rows,) = compress.implement_compress_kv(states, metadata, config=config, outputs=types)
        return compress.implement_norm_rope_insert(rows, states, cache, metadata, norm, cos_sin, scale, config=config)
    args = states, cache, metadata, norm, cos_sin, scale
    if dtype is None:
        return compress.implement_store(*args, config=config)
    kv_score, ape = jnp.zeros((tokens, 2 * config.width), dtype), jnp.zeros((config.compress_ratio, config.width))
    return compress.implement(kv_score, ape, *args, config=config, save=save)


if __name__ == "__main__":
    print(f"{main()} kernels compiled")
