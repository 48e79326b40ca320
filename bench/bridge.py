"""`python -m bench bridge`: what a call from a JAX program costs, host included, by several ways to a kernel."""

import argparse
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.buffer_callback import buffer_callback

from bench import report, timing
from bench.cases import Case, Workload

CHAIN = 20  # ops in a program
REPLAYS = 20  # of a program in a sample; of a lone op ten times as many
LEGEND = f"""Microseconds per op, host included. add: one kernel on one array of 64 KB; nothing: a callback that does
nothing, on the same array; compress: a CSA decode step of 8 requests, 11 buffers, two of them updated in place. lone:
one op per jit; chain: {CHAIN}; uncaptured: the chain with XLA's command buffers off; gpu: the chain behind long copies,
so that the host's time does not count; scan: {CHAIN} steps of one op. Rows take turns; median of the rounds."""


class Kind(NamedTuple):
    """A program: its calls, steps by which a scan of them is unrolled (0: no scan), compiler options, what counts."""

    ops: int = CHAIN
    unroll: int = 0
    options: dict | None = None
    with_host: bool = True


# By default XLA captures runs of at least five operations, and no loops.
SMALL = {"xla_gpu_graph_min_graph_size": 1}
RECORDED = SMALL | {
    "xla_gpu_enable_command_buffer": "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,DYNAMIC_SLICE_FUSION,WHILE",
}
KINDS = {
    "lone": Kind(ops=1),
    "chain": Kind(),
    "uncaptured": Kind(options={"xla_gpu_enable_command_buffer": ""}),
    "gpu": Kind(with_host=False),
    "scan": Kind(unroll=1),
}
# What lets XLA capture a lone op or a loop; the last ones last, as XLA's own loops in graphs are young.
LOOPS = {
    "lone_small": Kind(ops=1, options=SMALL),
    "scan_unroll5": Kind(unroll=5),
    "scan_unroll20": Kind(unroll=CHAIN),
    "scan_small": Kind(unroll=1, options=SMALL),
    "scan_recorded": Kind(unroll=1, options=RECORDED),
    "scan_recorded_unrolled": Kind(unroll=1, options=RECORDED | {"xla_gpu_command_buffer_unroll_loops": True}),
}


def add_by_xla(x, _):
    return jax.lax.optimization_barrier(x) + 1.0


def add_by_torch(x, _):
    from bridge import torch_call

    return torch_call(_add_one, x, out_type=jax.ShapeDtypeStruct(x.shape, x.dtype), input_output_aliases={0: 0})


def _add_one(tensor):
    tensor.add_(1)


def do_nothing(x, _):
    call = buffer_callback(_do_nothing, jax.ShapeDtypeStruct(x.shape, x.dtype), input_output_aliases={0: 0})
    return call(x)


def _do_nothing(*_):
    pass


def compress_by_cutlass_call(carry, inputs):
    from bench import native_call
    from dsv4_jax.nvidia.ops.compress import plan

    state_cache, kv_cache = carry
    arguments = inputs | {"state_cache": state_cache, "kv_cache": kv_cache, "kv_scale": None}
    return list(native_call.run(plan(**arguments, config=STEP.config, save="tail")))


STEP = Case("compress", "decode", 8, "csa", "float32")
# The op, the way to it, and the function `(carry, inputs) -> carry`; None: the op's own implementation.
ROWS = (
    ("add", "xla", add_by_xla),
    ("nothing", "buffer_callback", do_nothing),
    ("add", "torch_call", add_by_torch),
    ("compress", "triton", None),
    ("compress", "cutedsl", None),
    ("compress", "cutlass_call", compress_by_cutlass_call),
)


def workload(op: str, implementation: str, run) -> Workload:
    """The workload of a row."""
    if op == "compress":
        workload = STEP._replace(implementation=None if run else implementation).workload()
        return workload._replace(run=run or workload.run)
    x = jax.random.normal(jax.random.key(0), (8, 2048))
    return Workload(run, x, (), 2 * x.nbytes)


def sampler(timer: timing.Timer, row: Workload, kind: Kind):
    """Samples the microseconds per op of a kind of program."""

    def program(carry, inputs):
        if kind.unroll:
            step = lambda carry, _: (row.run(carry, inputs), None)
            return jax.lax.scan(step, carry, None, length=kind.ops, unroll=kind.unroll)[0]
        for _ in range(kind.ops):
            carry = row.run(carry, inputs)
        return carry

    jitted = jax.jit(program, donate_argnums=0, compiler_options=kind.options)
    carry = jax.tree.map(jnp.copy, row.carry)  # which is donated
    replays = None if not kind.with_host else REPLAYS if kind.ops > 1 else 10 * REPLAYS
    return timer.sampler(jitted, carry, row.inputs, kind.ops, replays=replays, with_host=kind.with_host)


def main(argv: list[str]) -> int:
    """Runs the command line; returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m bench bridge", description=__doc__)
    known = KINDS | LOOPS
    parser.add_argument("--kind", choices=known, action="append", help="default: " + ", ".join(KINDS))
    parser.add_argument("--loops", action="store_true", help="instead: what lets XLA capture loops and lone ops")
    parser.add_argument("--json", metavar="FILE", help="write the measurements there")
    parser.add_argument("--against", metavar="FILE", help="name what got more than 3 %% slower than in this JSON")
    options = parser.parse_args(argv)
    try:
        earlier = report.read(options.against) if options.against else None
    except (OSError, ValueError) as error:
        parser.error(str(error))
    rows, kinds = ROWS, options.kind or (LOOPS if options.loops else KINDS)
    if jax.default_backend() == "cpu":
        print("No GPU: no kernel is launched, nothing is captured, and only the ratios of times mean something.")
        rows = [row for row in ROWS if row[0] != "compress"]
    print(LEGEND)
    timer = timing.Timer()
    record = report.new_record(timer, ["bridge", *argv])
    samplers = {}
    for op, implementation, run in rows:
        for kind in kinds:
            row = {"compressor": "-", "op": op, "kind": kind, "tokens": 8, "dtype": "float32"}
            row["implementation"] = implementation
            try:
                samplers[report.name_of(row)] = sampler(timer, workload(op, implementation, run), known[kind])
                record["rows"].append(row)
            except Exception as error:  # the others are worth having
                print(f"left out: {report.name_of(row)}: {type(error).__name__}: {str(error)[:300]}", flush=True)
    times = timing.measure(samplers)
    for row in record["rows"]:
        row["warm"], row["warm_spread"] = times[report.name_of(row)]
    if options.json:
        report.write(options.json, record)
    print(report.table([record], "implementations"))
    if earlier:
        print("\n".join(report.compare(record["rows"], earlier["rows"])))
    return 0
