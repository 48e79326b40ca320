"""`python -m bench`: every op over kinds of batches and sizes, as floor divided by time."""

import argparse
import importlib.util

import jax

from bench import calls, cases, report, timing
from bench.cases import CONFIGS, OPS, Case
from dsv4_jax import platforms

KINDS = tuple(dict.fromkeys(kind for op in OPS.values() for kind in op.kinds))
QUICK = (("prefill", 8192), ("decode", 1), ("closing", 512))
ON_CPU = (("prefill", 256), ("closing", 16), ("tokens", 16))
COLD_BYTES = 256 << 20  # inputs that rotate over this much are out of the L2 cache when their turn comes
LEAST_COLD_BYTES = 128 << 20
MOST_SETS = 64
MOST_SETS_BYTES = 8 << 30
NOISY = 0.05
LEGEND = """op: compress (save="tail"), compress_all (save="all"), store (compress_norm_rope_store), save
(save_partial_states), or another op by its name. us: one call in a chain inside one jit, caches donated, replayed as a
CUDA graph where XLA makes one. warm: inputs in the L2 cache where they fit; cold: out of it (-: the batch is too small
for that). floor: the least time for the bytes at copy bandwidth, and for the arithmetic; share: floor / time, above 1
where the L2 cache serves. ~: the middle half of the repeats is more than 5 % apart. compile: seconds for one call; the
first row of an op includes the kernel's own compilation."""


def main(argv: list[str]) -> int:
    """Runs the command line; returns the exit code: 1 where a measurement failed."""
    parser = _parser()
    options = parser.parse_args(argv)
    if options.plot and importlib.util.find_spec("matplotlib") is None:
        parser.error("--plot needs matplotlib: pip install 'dsv4-jax[demo]'")
    try:
        earlier = report.read(options.against) if options.against else None
        for file in filter(None, (options.json, options.plot)):
            open(file, "a").close()  # a bad path is better said before the measurements than after
    except (OSError, ValueError) as error:
        parser.error(str(error))
    on_cpu = jax.default_backend() == "cpu"
    planned = plan(options, on_cpu)
    if not planned:
        parser.error("no op takes such batches, compressors and dtypes")
    if on_cpu:
        print("No GPU: tiny batches, and only the ratios between two rows' times mean something.")
    labels = options.l2 or (("warm",) if on_cpu or options.set == "quick" else report.LABELS)
    timer = timing.Timer()
    record = report.new_record(timer, argv)
    print(f"{record['device']}, copy {timer.bandwidth / 1e9:.0f} GB/s, launch {timer.launch:.2f} us\n{LEGEND}")
    width = max(len(case.op) for case in planned) + 1
    heads = f"{'MB':>9}{'floor us':>9}" + "".join(f"{label + ' us':>11} share" for label in labels)
    print(f"{'compressor':14}{'op':{width}}{'batch':14}{'dtype':9}{'by':8}{heads}{'compile':>9}", flush=True)
    failed = False
    for case in planned:
        try:
            row = measure(case, timer, labels)
        except NotImplementedError as error:
            print(f"not measured: {report.name_of(case._asdict())}: {error}", flush=True)
            continue
        except Exception as error:  # the others are worth having
            print(f"failed: {report.name_of(case._asdict())}: {type(error).__name__}: {str(error)[:500]}", flush=True)
            failed = True
            continue
        record["rows"].append(row)
        if options.json:
            report.write(options.json, record)
        print(_line(row, labels, width), flush=True)
    if options.plot:
        from bench.plot import plot

        plot(record, options.plot)
    if earlier:
        print("\n".join(report.compare(record["rows"], earlier["rows"])))
    return int(failed)


def plan(options: argparse.Namespace, on_cpu: bool = False) -> list[Case]:
    """The cases that the options ask for. What an option names replaces the default."""
    compress_alone = on_cpu or options.set in ("quick", "report")
    chosen = []
    for name in options.op or (("compress",) if compress_alone else OPS):
        op = OPS[name]
        default = ON_CPU if on_cpu else QUICK if options.set == "quick" and name == "compress" else op.batches
        compressors, dtypes = ("-",), ("-",)
        if op.compressors:
            compressors = [c for c in options.compressor or cases.COMPRESSORS if c in op.compressors]
            dtypes = options.dtype or ("float32",)
        elif options.compressor or options.dtype:
            continue
        chosen += [
            Case(name, kind, tokens, compressor, dtype, implementation)
            for compressor in compressors
            for dtype in dtypes
            for kind, tokens in options.batch or default
            if kind in op.kinds
            for implementation in options.implementation or (None,)
        ]
    return list(dict.fromkeys(chosen))


def measure(case: Case, timer: timing.Timer, labels=report.LABELS) -> dict:
    """Times one case.

    Args:
      case: what to measure.
      timer: of this process.
      labels: "warm" (inputs in the L2 cache where they fit), "cold" (out of it) or both.

    Returns:
      The row: times and `floor` in microseconds, `compile` in seconds, `warm_spread` between the quartiles of the
      repeats as a share of the median.
    """
    first = case.workload()
    floor = first.bytes / timer.bandwidth * 1e6
    if first.operations:
        floor = max(floor, first.operations / timer.flops * 1e6)
    row = case._asdict() | {
        "implementation": calls.find(first).implementation,
        "bytes": first.bytes,
        "operations": first.operations,
        "floor": floor,
        "compile": timing.compile_seconds(first.run, first.carry, first.inputs),
    }
    length = 2 if jax.default_backend() == "cpu" else max(2, min(60, round(600 / max(floor, 10.0))))
    allocated = sum(leaf.nbytes for leaf in jax.tree.leaves((first.carry, first.inputs)))
    sets = max(1, min(MOST_SETS, -(-COLD_BYTES // max(1, first.bytes)), MOST_SETS_BYTES // allocated))
    for label in labels:
        if label == "cold":
            if sets == 1 and "warm" in row:  # too large to be warm
                row |= {"cold": row["warm"], "cold_spread": row["warm_spread"]}
                continue
            if sets * first.bytes < LEAST_COLD_BYTES:
                continue
        # Fresh ones, since a chain donates its carries.
        workloads = [case.workload(seed) for seed in range(sets if label == "cold" else 1)]
        carries, inputs = [w.carry for w in workloads], [w.inputs for w in workloads]
        del workloads
        time = timing.measure({label: timer.chain(first.run, carries, inputs, length)})[label]
        row |= {label: time.microseconds, f"{label}_spread": time.spread}
    return row


def _line(row, labels, width):
    cells = ""
    for label in labels:
        cells += f"{row[label]:11.2f}{row['floor'] / row[label]:5.2f}" if label in row else f"{'-':>11}{'-':>5}"
        cells += "~" if row.get(f"{label}_spread", 0) > NOISY else " "
    return (
        f"{row['compressor']:14}{row['op']:{width}}{row['kind'] + ' ' + str(row['tokens']):14}{row['dtype']:9}"
        f"{row['implementation']:8}{row['bytes'] / 1e6:9.2f}{row['floor']:9.2f}{cells}{row['compile']:9.2f}"
    )


def _parser():
    parser = argparse.ArgumentParser(
        prog="python -m bench",
        description="Times the ops. What an option names replaces the default; all but the files can be repeated.",
        epilog="See also: python -m bench bridge | alone | tables, each with --help",
    )
    sets = parser.add_mutually_exclusive_group()
    sets.add_argument(
        "--quick", dest="set", action="store_const", const="quick", help="compress, three batches, warm; a minute"
    )
    sets.add_argument("--report", dest="set", action="store_const", const="report", help="compress, six batches")
    option = parser.add_argument
    option("--op", choices=OPS, action="append", metavar="OP", help="default: all; " + ", ".join(OPS))
    option("--compressor", choices=CONFIGS, action="append", help="default: " + ", ".join(cases.COMPRESSORS))
    option("--batch", type=parse_batch, action="append", metavar="KIND:T", help=", ".join(KINDS) + "; and tokens")
    option("--dtype", choices=("float32", "bfloat16"), action="append", help="of kv_score")
    implementations = platforms.IMPLEMENTATIONS
    option("--implementation", choices=implementations, action="append", help="default: the switch chooses")
    option("--l2", choices=report.LABELS, action="append", help="inputs in the L2 cache, or out of it")
    option("--json", metavar="FILE", help="write the measurements there, after each")
    option("--plot", metavar="PNG", help="draw the roofline there; needs matplotlib")
    option("--against", metavar="FILE", help="name what got more than 3 %% slower than in this JSON")
    return parser


def parse_batch(text: str) -> tuple[str, int]:
    """Kind and tokens of what `--batch` takes."""
    kind, _, tokens = text.partition(":")
    if kind not in KINDS or not tokens.isdigit() or int(tokens) < 1:
        raise argparse.ArgumentTypeError(
            f"{text!r}; it must be a kind ({', '.join(KINDS)}), a colon, and a number of tokens of at least 1"
        )
    return kind, int(tokens)
