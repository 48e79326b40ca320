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
CALLS, ROUNDS = 20, 9
DELAY_BYTES, DELAY_COPIES = 2 << 30, 8  # 8 ms on an H200: longer than 40 calls take to launch
FRESH = 64  # sets of inputs that take turns, so that XLA meets new addresses at each call
LEGEND = """us an op, wall clock, host included. lone: one op a jit; chain: 20; hidden: the chain behind long copies, so
that only the GPU's time counts; scan: 20 steps of an op and an addition; fresh: the chain, an input at another address
at each call. The rows take turns, as a host is slower at times than at others: median of the rounds. The op is
`compress` of a CSA decode step of 8 requests: 11 buffers, two of them inputs updated in place, and 2 to 3 us on an
H200."""

# What a call that is not captured consists of, and what is compared.
STEPS = {
    "empty callback": "jax's buffer_callback of a function that does nothing",
    "addresses": "raw_call of a function that does nothing, not captured: the buffers' addresses",
    "launch": "the bridge, not captured: the kernel is launched",
    "tensors": "an empty callback that makes a tensor of each buffer by DLPack",
    "torch_call": "torch_call of a function that does nothing: tensors, stream, gradient mode",
}
NATIVE = {
    "triton launch": "jax-triton, not captured: XLA's command buffers are off",
    "cutlass launch": "cutlass.jax.cutlass_call, not captured, likewise",
}
KERNELS = {
    "triton": "jax-triton",
    "bridge": "CuTeDSL by the bridge, captured where XLA captures",
    "cutlass_call": "the same kernel by cutlass.jax.cutlass_call",
}

PACKAGES = {
    **dict.fromkeys(("triton", "triton launch"), "jax-triton"),
    **dict.fromkeys(("launch", "bridge", "cutlass_call", "cutlass launch"), "nvidia-cutlass-dsl"),
    **dict.fromkeys(("tensors", "torch_call"), "torch"),
}
RATIOS = {
    "bridge, captured / cutlass_call": ("bridge", "cutlass_call", ("hidden", "chain")),
    "bridge, not captured / empty callback": ("launch", "empty callback", ("lone", "scan", "chain")),
    "bridge, not captured / cutlass_call, not captured": ("launch", "cutlass launch", ("lone", "scan", "chain")),
    "cutlass_call, not captured / empty callback": ("cutlass launch", "empty callback", ("lone", "scan", "chain")),
    "addresses / empty callback": ("addresses", "empty callback", ("lone", "chain")),
    "torch_call / empty callback": ("torch_call", "empty callback", ("lone", "chain")),
}

_UNCAPTURED = {"xla_gpu_enable_command_buffer": ""}

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
    known = STEPS | NATIVE | KERNELS
    variants = {name: what for name, what in known.items() if _why_not(name, on_cpu) is None}
    for name in known:
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
    if on_cpu and (name in NATIVE | KERNELS or name == "launch"):
        return "needs a GPU"
    package = PACKAGES.get(name, "jax")
    return None if installed(package) else f"{package} is not installed"


def _calls(report, variants, on_cpu):
    print(f"{LEGEND}\n")
    columns = ("lone", "chain", "scan", "fresh") if on_cpu else ("lone", "chain", "hidden", "scan", "fresh")
    inputs = _inputs()
    cells = {}
    for name in variants:
        for column in columns:
            if column == "hidden" and name not in KERNELS:  # only what is captured can be
                continue
            if column in ("scan", "fresh") and name in ("addresses", "tensors", "torch_call"):
                continue
            try:
                cells[name, column] = _timer(_op(name), column, inputs, _UNCAPTURED if name in NATIVE else None)
            except Exception as error:  # the others are worth having
                print(f"{name}, {column}: {type(error).__name__}: {str(error)[:500]}")
    times = _medians(cells)
    print(f"{'':16}" + "".join(f"{column:>9}" for column in columns))
    for name, what in variants.items():
        row = {column: times[name, column] for column in columns if (name, column) in times}
        report.add(variant=name, **row)
        print(f"{name:16}" + "".join(f"{row[c]:9.2f}" if c in row else f"{'':9}" for c in columns) + f"  {what}")
    print("\nRatios:")
    for label, (over, under, of) in RATIOS.items():
        ratios = {c: times[over, c] / times[under, c] for c in of if (over, c) in times and (under, c) in times}
        if ratios:
            report.content["ratios"][label] = ratios
            print(f"{label}: " + ", ".join(f"{column} {ratio:.2f}" for column, ratio in ratios.items()))
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
        timers, errors = {}, {}
        for name, case in cases:
            if case == "lone" and unroll > 1:  # a lone op is not unrolled
                continue
            try:
                timers[name, case] = _timer(_op(name), case, inputs, compiler_options, unroll)
            except Exception as error:
                errors[name, case] = error
        times = _medians(timers)
        for name, case in cases:
            row = {"variant": name, "case": case, "setting": setting}
            if error := errors.get((name, case)):
                report.add(**row, error=str(error))
            else:
                report.add(**row, us=times.get((name, case)))
        cells = [times.get(case, type(errors[case]).__name__[:12] if case in errors else "-") for case in cases]
        line = "".join(f"{cell:14.2f}" if isinstance(cell, float) else f"{cell:>14}" for cell in cells)
        print(f"{setting:16}{line}  unroll={unroll} {compiler_options}", flush=True)


def _medians(timers):
    """What each of the timers measures, taken by turns."""
    rounds = [{cell: timer() for cell, timer in timers.items()} for _ in range(ROUNDS)]
    return {cell: statistics.median(us[cell] for us in rounds) for cell in timers}


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
    if name in ("triton", "triton launch"):
        return lambda inputs: compress(**inputs, config=CONFIG, implementation="triton")
    if name in ("bridge", "launch", "cutlass_call", "cutlass launch"):
        return functools.partial(_cutedsl, name)
    return functools.partial(_nothing, name)


def _cutedsl(name, inputs):
    from dsv4_jax.nvidia.ops import compress, native_call

    call = compress.plan(**inputs, kv_scale=None, config=CONFIG, save="tail")
    if name in ("cutlass_call", "cutlass launch"):
        return native_call.run(call)
    return compress.launched(call, command_buffer_compatible=name == "bridge")


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


def _timer(op, column, inputs, compiler_options=None, unroll=1):
    """A function that measures the microseconds an op; what it calls is compiled already."""
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

    ops = calls * (1 if column == "lone" else CHAIN)

    def microseconds():
        # What is not of the calls takes as long for more of them.
        less = seconds(calls)
        return (seconds(2 * calls) - less) / ops * 1e6

    seconds(calls)
    return microseconds


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
