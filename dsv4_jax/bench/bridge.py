"""`python -m dsv4_jax bench bridge`: what a call costs by jax-triton, the bridge and `cutlass.jax.cutlass_call`."""

import argparse
import datetime
import functools
import json
import shlex
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.buffer_callback import buffer_callback

import bridge
from dsv4_jax.common.reference.compress import compress
from dsv4_jax.config import CompressorConfig
from dsv4_jax.metadata import CompressorMetadata
from dsv4_jax.platforms import installed

CHAIN = 20  # ops in a jit, or steps of a scan
CALLS, REPEATS = 20, 7
DELAY_BYTES, DELAY_COPIES = 2 << 30, 8  # 8 ms on an H200: longer than 40 calls take to launch
FRESH = 64  # sets of inputs that take turns, so that XLA meets new addresses at each call
LEGEND = """us an op, wall clock, host included. lone: one op a jit; chain: 20; hidden: the chain behind long copies, so
that only the GPU's time counts; scan: 20 steps of an op and an addition; fresh: the chain, an input at another address
at each call. The op is `compress` of a CSA decode step of 8 requests: 11 buffers, two of them inputs updated in place,
and 2 us or less on an H200."""

# What a call that is not captured consists of, and what is compared.
STEPS = {
    "empty callback": "jax's buffer_callback of a function that does nothing",
    "addresses": "raw_call of a function that does nothing, not captured: the buffers' addresses",
    "launch": "the bridge, not captured: the kernel is launched",
    "tensors": "an empty callback that makes a tensor of each buffer by DLPack",
    "torch_call": "torch_call of a function that does nothing: tensors, stream, gradient mode",
}
KERNELS = {
    "triton": "jax-triton",
    "bridge": "CuTeDSL by the bridge, captured where XLA captures",
    "cutlass_call": "the same kernel by cutlass.jax.cutlass_call",
}

# What lets XLA capture a lone op or a loop: compiler options of jit, and `unroll` of scan. The last ones last, as XLA's
# own loops in graphs are young.
_SMALL = {"xla_gpu_graph_min_graph_size": 1}
_LOOPS = {"xla_gpu_enable_command_buffer": "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,DYNAMIC_SLICE_FUSION,WHILE"}
SETTINGS = {
    "default": ({}, 1),
    "unroll5": ({}, 5),
    "unroll20": ({}, CHAIN),
    "small": (_SMALL, 1),
    "loops": (_SMALL | _LOOPS, 1),
    "unrolled_loops": (_SMALL | _LOOPS | {"xla_gpu_command_buffer_unroll_loops": True}, 1),
}


def main(argv: list[str]) -> int:
    """Runs the command line; returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m dsv4_jax bench bridge", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--loops", action="store_true", help="instead: settings by which XLA captures a scan's body")
    parser.add_argument("--setting", choices=SETTINGS, action="append", help="with --loops: only this one (repeatable)")
    parser.add_argument("--json", metavar="FILE", help="write the measurements there, after each one")
    options = parser.parse_args(argv)
    on_cpu = jax.default_backend() == "cpu"
    if on_cpu:
        print("No GPU: nothing is launched or captured, and only the ratios between two rows mean something.")
    variants = {name: what for name, what in (STEPS | KERNELS).items() if _why_not(name, on_cpu) is None}
    for name in STEPS | KERNELS:
        if why := _why_not(name, on_cpu):
            print(f"left out: {name}: {why}")
    report = _Report(options.json, argv)
    print(jax.devices()[0].device_kind)
    if options.loops:
        _loops(report, [name for name in ("bridge", "triton") if name in variants], options.setting or SETTINGS)
    else:
        _calls(report, variants, on_cpu)
    return 0


class _Report:
    """Rows of measurements, kept in a file as they come: a setting can take the process with it."""

    def __init__(self, path, argv):
        versions = {name: installed(name) for name in ("jax", "torch", "triton", "jax-triton", "nvidia-cutlass-dsl")}
        self.content: dict[str, Any] = {
            "device": jax.devices()[0].device_kind,
            "versions": versions,
            "command": shlex.join(["python", "-m", "dsv4_jax", "bench", "bridge", *argv]),
            "date": datetime.date.today().isoformat(),
            "unit": "us",
            "rows": [],
            "ratios": {},
        }
        self.path = path
        self.write()

    def add(self, **row):
        self.content["rows"].append(row)
        self.write()

    def write(self):
        if self.path:
            with open(self.path, "w") as file:
                json.dump(self.content, file, indent=1)


def _why_not(name, on_cpu):
    if on_cpu and (name in KERNELS or name == "launch"):
        return "needs a GPU"
    packages = {"triton": "jax-triton", "tensors": "torch", "torch_call": "torch"}
    package = packages.get(name, "nvidia-cutlass-dsl" if name in ("bridge", "launch", "cutlass_call") else "jax")
    return None if installed(package) else f"{package} is not installed"


def _calls(report, variants, on_cpu):
    print(f"{LEGEND}\n")
    columns = ("lone", "chain", "scan", "fresh") if on_cpu else ("lone", "chain", "hidden", "scan", "fresh")
    print(f"{'':16}" + "".join(f"{column:>9}" for column in columns))
    times = {}
    inputs = _inputs()
    for name, what in variants.items():
        row = {}
        for column in columns:
            if column == "hidden" and name not in KERNELS:  # only what is captured can be
                continue
            if column in ("scan", "fresh") and name in ("addresses", "tensors", "torch_call"):
                continue
            try:
                row[column] = _measure(_op(name), column, inputs)
            except Exception as error:  # the others are worth having
                print(f"{name}, {column}: {type(error).__name__}: {str(error)[:500]}")
        report.add(variant=name, **row)
        times[name] = row
        cells = "".join(f"{row[column]:9.2f}" if column in row else f"{'':9}" for column in columns)
        print(f"{name:16}{cells}  {what}", flush=True)
    print("\nRatios:")
    for label, over, under, column in (
        ("bridge, captured / cutlass_call", "bridge", "cutlass_call", "hidden"),
        ("bridge, captured / cutlass_call, host included", "bridge", "cutlass_call", "chain"),
        ("bridge, not captured / empty callback", "launch", "empty callback", "chain"),
        ("bridge, not captured / empty callback, lone", "launch", "empty callback", "lone"),
        ("addresses / empty callback", "addresses", "empty callback", "chain"),
        ("addresses / empty callback, lone", "addresses", "empty callback", "lone"),
        ("torch_call / empty callback", "torch_call", "empty callback", "chain"),
    ):
        if column in times.get(over, {}) and column in times.get(under, {}):
            report.content["ratios"][label] = ratio = times[over][column] / times[under][column]
            print(f"{ratio:8.2f}  {label}")
    report.write()


def _loops(report, variants, settings):
    if not variants:
        print("There is nothing to capture.")
        return
    print(f"us a step of a scan of {CHAIN}, and of a lone op, by what XLA is told\n")
    cases = [(name, case) for name in variants for case in ("scan", "lone")]
    print(f"{'':16}" + "".join(f"{name + ' ' + case:>14}" for name, case in cases))
    inputs = _inputs()
    for setting in settings:
        compiler_options, unroll = SETTINGS[setting]
        print(f"{setting:16}", end="", flush=True)
        for name, case in cases:
            row = {"variant": name, "case": case, "setting": setting}
            try:
                # A lone op is not unrolled.
                us = (
                    None
                    if case == "lone" and unroll > 1
                    else _measure(_op(name), case, inputs, compiler_options, unroll)
                )
            except Exception as error:
                report.add(**row, error=str(error))
                print(f"{type(error).__name__[:12]:>14}", end="", flush=True)
                continue
            report.add(**row, us=us)
            print(f"{'-' if us is None else format(us, '.2f'):>14}", end="", flush=True)
        print(f"  unroll={unroll} {compiler_options}", flush=True)


CONFIG = CompressorConfig.csa()
LENGTHS = (97, 100, 128, 131, 254, 256, 401, 404)  # tokens of the requests; half of them close a window


@jax.jit
def _inputs():
    c, requests = CONFIG, len(LENGTHS)
    pages, kv_pages = -(-max(LENGTHS) // c.page_rows), -(-max(LENGTHS) // (c.compress_ratio * c.kv_page_rows))
    starts, lengths = jnp.arange(requests + 1, dtype=jnp.int32), jnp.array(LENGTHS, jnp.int32)
    tables = (jnp.arange(requests * n, dtype=jnp.int32).reshape(requests, n) for n in (pages, kv_pages))
    keys = jax.random.split(jax.random.key(0), 2)
    return {
        "kv_score": jax.random.normal(keys[0], (requests, 2 * c.width)),
        "ape": jnp.zeros((c.compress_ratio, c.width)),
        "state_cache": jax.random.normal(keys[1], (requests * pages, c.page_rows, 2 * c.width)),
        "kv_cache": c.format.allocate(requests * kv_pages, c.kv_page_rows),
        "metadata": CompressorMetadata.build(c, starts, lengths, *tables, num_tokens=requests),
        "norm_weight": jnp.ones(c.head_dim),
        "cos_sin": jnp.asarray(c.rope.table(max(LENGTHS))),
    }


def _op(name):
    """A function `inputs -> (state cache, cache)` that makes one call."""
    if name == "triton":
        return lambda inputs: compress(**inputs, config=CONFIG, implementation="triton")
    return functools.partial(_cutedsl if name in ("bridge", "launch", "cutlass_call") else _nothing, name)


def _cutedsl(name, inputs):
    from dsv4_jax.nvidia.ops import native_call, sparse_attn_compress_cutedsl

    call = sparse_attn_compress_cutedsl.plan(**inputs, kv_scale=None, config=CONFIG, save="tail")
    if name == "cutlass_call":
        return native_call.run(call)
    return sparse_attn_compress_cutedsl.launched(call, command_buffer_compatible=name == "bridge")


def _nothing(name, inputs):
    """A call with the buffers of `compress`, of a function that does nothing."""
    plan = inputs["metadata"]
    others = (inputs[name] for name in ("kv_score", "ape", "norm_weight", "cos_sin"))
    operands = [inputs["state_cache"], inputs["kv_cache"], *others, plan.closing, plan.window_slots, plan.saving]
    out_type = [jax.ShapeDtypeStruct.like(x) for x in operands[:2]]
    options = {"input_output_aliases": {0: 0, 1: 1}, "command_buffer_compatible": False}
    if name == "addresses":
        return bridge.raw_call(_do_nothing, *operands, out_type=out_type, **options)
    if name == "torch_call":
        return bridge.torch_call(_do_nothing, *operands, out_type=out_type, **options)
    return buffer_callback({"tensors": _make_tensors}.get(name, _do_nothing), out_type, **options)(*operands)


def _do_nothing(*_):
    pass


def _make_tensors(_, results, *inputs):
    import torch

    for buffer in (*results, *inputs[2:]):
        torch.from_dlpack(buffer.__dlpack__())


def _measure(op, column, inputs, compiler_options=None, unroll=1):
    """Microseconds an op."""
    inputs = dict(inputs)
    carry = jax.tree.map(jnp.copy, (inputs.pop("state_cache"), inputs.pop("kv_cache")))

    def step(carry, inputs):
        return tuple(op({**inputs, "state_cache": carry[0], "kv_cache": carry[1]}))

    def run(carry, inputs):
        if column == "lone":
            return step(carry, inputs)
        if column == "scan":
            kv_score = inputs["kv_score"]

            def body(state, _):
                carry, kv_score = state
                return (step(carry, {**inputs, "kv_score": kv_score}), kv_score + 1), None

            return jax.lax.scan(body, (carry, kv_score), None, length=CHAIN, unroll=unroll)[0][0]
        for _ in range(CHAIN):
            carry = step(carry, inputs)
        return carry

    jitted = jax.jit(run, donate_argnums=0, compiler_options=compiler_options or None)
    sets = [{**inputs, "kv_score": inputs["kv_score"] + i} for i in range(FRESH if column == "fresh" else 1)]
    calls = max(len(sets), CALLS * (10 if column == "lone" else 1))
    held = [carry]
    delay = _delay() if column == "hidden" else lambda: None

    def seconds(calls):
        start = time.perf_counter()
        delayed = delay()
        for i in range(calls):
            held[0] = jitted(held[0], sets[i % len(sets)])
        jax.block_until_ready((delayed, held[0]))
        return time.perf_counter() - start

    seconds(calls)
    # What is not of the calls takes as long for more of them.
    pairs = [(seconds(calls), seconds(2 * calls)) for _ in range(REPEATS)]
    ops = calls * (1 if column == "lone" else CHAIN)
    return statistics.median(more - less for less, more in pairs) / ops * 1e6


@functools.cache
def _delay():
    """A function that keeps the GPU busy for some milliseconds."""
    source = jnp.ones(DELAY_BYTES // 4, jnp.float32)
    copy = jax.jit(lambda x: x + 1.0)

    def delay():
        x = source
        for _ in range(DELAY_COPIES):
            x = copy(x)
        return x

    return delay
