"""`python -m dsv4_jax bench`: every op over batches and sizes, as floor divided by time."""

import argparse
import dataclasses
import importlib.util
import time
from typing import NamedTuple

import jax

from dsv4_jax import platforms
from dsv4_jax.bench import results
from dsv4_jax.bench.cases import CONFIGS, KINDS, OPS, Case, CompanionCase
from dsv4_jax.bench.companions import WORKLOADS
from dsv4_jax.bench.timing import Timer, compile_seconds
from dsv4_jax.doctor import jax_platform

COMPRESSORS = ("csa", "hca", "hca_online", "indexer_fp8", "indexer_mxfp4")  # by default
PREFILL = (("prefill", 2048), ("prefill", 8192), ("prefill", 65536))
REPORT = (*PREFILL, ("decode", 1), ("decode", 512), ("closing", 512))
SIZES = (
    *(("prefill", tokens) for tokens in (1, 8, 64, 512, 32768, 131072)),
    *(("decode", tokens) for tokens in (8, 64, 1024)),
    *(("closing", tokens) for tokens in (64, 1024)),
    *(("mixed", tokens) for tokens in (512, 8192)),
)
COMPANION = (("tokens", 64), ("tokens", 8192))


class Entry(NamedTuple):
    """An op over dtypes of `kv_score` and batches, for every compressor."""

    op: str
    dtypes: tuple[str, ...]
    batches: tuple[tuple[str, int], ...]


FLOAT32, BFLOAT16 = ("float32",), ("bfloat16",)
# The most wanted first.
PLANS = {
    "quick": (Entry("compress", FLOAT32, (("prefill", 8192), ("decode", 1), ("closing", 512))),),
    "report": (Entry("compress", FLOAT32, REPORT),),
    "full": (
        Entry("compress", FLOAT32, REPORT),
        Entry("compress", BFLOAT16, PREFILL),
        Entry("compress_all", FLOAT32, PREFILL),
        Entry("store", FLOAT32, (*PREFILL, ("closing", 512))),
        Entry("save", FLOAT32 + BFLOAT16, PREFILL),
        *(Entry(op, (), COMPANION) for op in WORKLOADS),
        Entry("compress", FLOAT32, SIZES),
    ),
    "cpu": (Entry("compress", FLOAT32, (("prefill", 256), ("closing", 16))),),
}
CPU_COMPANION = (("tokens", 16),)
COLD_BYTES = 256 << 20  # inputs that rotate over this much are out of the L2 cache when their turn comes
LEAST_COLD_BYTES = 128 << 20
MOST_SETS = 64
MOST_SETS_BYTES = 8 << 30
NOISY = 0.05
LEGEND = """op: compress (save="tail"), compress_all (save="all"), store (compress_norm_rope_store), save
(save_partial_states), or another op by its name. batch: prefill of one request; decode, a token a request at random
positions; closing, all of them closing windows; mixed, decodes and chunks of unequal prefills. warm: inputs in the L2
cache where they fit; cold: out of it, by turns among many sets of weights, states, caches and inputs, which share
metadata and RoPE table (-: too small for that). us: of one call in a chain in one jit, caches donated, replayed as a
CUDA graph where XLA makes one. floor: MB / copy bandwidth; share: floor / time, above 1 where the L2 cache serves; ~:
the middle half of the repeats is more than 5 % apart.
compile: seconds to trace, lower and compile one call; an op's first row includes its kernel's own compilation."""


@dataclasses.dataclass(frozen=True)
class Measurement:
    """What one row is of."""

    compressor: str
    op: str
    case: Case | CompanionCase
    implementation: str

    @property
    def name(self) -> str:
        """As `results.name_of` names its row."""
        case = {key: getattr(self.case, key) for key in ("kind", "tokens", "dtype")}
        return results.name_of({**vars(self), **case})


def main(argv: list[str]) -> int:
    """Runs the command line; returns its exit code: 0, or 1 where a measurement failed."""
    start = time.perf_counter()
    parser = _parser()
    options = parser.parse_args(argv)
    if options.plot and importlib.util.find_spec("matplotlib") is None:
        parser.error("--plot needs matplotlib: pip install 'dsv4-jax[demo]'")
    try:
        earlier = results.read(options.against) if options.against else None
        shown = results.read(options.table) if options.table else None
        for file in filter(None, (options.json, options.plot)):
            open(file, "a").close()  # a bad path is better said before the measurements than after
    except (OSError, ValueError) as error:
        parser.error(str(error))
    if shown:
        return _show(shown, options.plot)
    if jax.default_backend() == "cpu":
        options.set = "cpu"
        print("No GPU: tiny batches, and only the ratios between two rows' times mean something.")
    measurements, notes = planned(options, jax_platform())
    if not measurements:
        parser.error("; ".join(["nothing is left to measure", *notes]))
    timer = Timer()
    record = results.new_record(timer, argv)
    print(
        f"{record['device']}, copy bandwidth {timer.bandwidth / 1e9:.0f} GB/s (read + written), launch "
        f"{timer.launch:.2f} us\n{LEGEND}"
    )
    print("".join(note + "\n" for note in notes), end="")
    labels = options.l2 or (("warm",) if options.set in ("quick", "cpu") else results.LABELS)
    heads = "".join(f"{label + ' us':>10}{'share':>6} " for label in labels)
    width = max(len(m.op) for m in measurements) + 2
    print(
        f"{'compressor':14}{'op':{width}}{'batch':8}{'tokens':>7}  {'dtype':9}{'by':8}{'MB':>9}{'floor us':>9}{heads}"
        f"{'compile':>9}",
        flush=True,
    )
    failed = 0
    for i, m in enumerate(measurements):
        if options.seconds and time.perf_counter() - start > options.seconds:
            record["left_out"] = [left.name for left in measurements[i:]]
            break
        try:
            row = {"compressor": m.compressor, **measure(m.case, m.op, timer, labels, m.implementation)}
        except Exception as error:  # the others are worth having
            print(f"failed: {m.name}: {type(error).__name__}: {str(error)[:500]}", flush=True)
            failed += 1
            continue
        record["rows"].append(row)
        if options.json:
            results.write(options.json, record)
        print(_line(row, labels, width), flush=True)
    return _finish(record, earlier, options, failed)


def measure(case, op: str, timer: Timer, labels=results.LABELS, implementation: str | None = None) -> dict:
    """Times one op of one case, with its inputs in the L2 cache where they fit (warm) and out of it (cold).

    Args:
      case: a `Case` or `CompanionCase`.
      op: what its `workload` takes.
      timer: of this process.
      labels: "warm", "cold" or both.
      implementation: "xla", "triton", "cutedsl" or None: the switch chooses.

    Returns:
      The row: times and `floor` in microseconds, `compile` in seconds, `warm_spread` between the quartiles of the
      repeats as a share of the median.
    """
    first = case.workload(op, 0, implementation)
    floor = first.bytes / timer.bandwidth * 1e6
    row = {
        "op": op,
        "kind": case.kind,
        "tokens": case.tokens,
        "dtype": case.dtype,
        "implementation": _resolve(case, op, implementation, jax_platform()),
        "bytes": first.bytes,
        "floor": floor,
        "compile": compile_seconds(first.run, first.carry, first.inputs),
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
        workloads = [case.workload(op, seed, implementation) for seed in range(sets if label == "cold" else 1)]
        carries, inputs = [w.carry for w in workloads], [w.inputs for w in workloads]
        del workloads
        row[label], row[f"{label}_spread"] = timer.chain(first.run, carries, inputs, length=length)
    return row


def planned(options: argparse.Namespace, platform: str) -> tuple[list[Measurement], list[str]]:
    """The measurements that the options ask for, and why some that they name cannot be made."""
    found, notes = {}, {}
    for entry in _entries(options):
        op = entry.op
        for compressor in ("-",) if op in WORKLOADS else options.compressor or COMPRESSORS:
            for case in _cases(entry, compressor, options):
                for implementation in options.implementation or (None,):
                    name = _resolve(case, op, implementation, platform)
                    if why := platforms.why_not(name, OPS.get(op, op), platform, CONFIGS.get(compressor)):
                        notes[f"not measured: {compressor} {op} {name}: {why}"] = None
                    else:
                        found[Measurement(compressor, op, case, name)] = None
    return list(found), list(notes)


def _entries(options):
    """Those of the plan, of the ops that are named; an op that the plan lacks gets its first batches."""
    plan = PLANS[options.set]
    ops = options.op or list(dict.fromkeys(entry.op for entry in plan))
    if options.companions:
        ops = [*ops, *(op for op in WORKLOADS if op not in ops)]
    others = CPU_COMPANION if options.set == "cpu" else COMPANION
    missing = [op for op in ops if all(op != entry.op for entry in plan)]
    return [
        *(entry for entry in plan if entry.op in ops),
        *(Entry(op, FLOAT32, others if op in WORKLOADS else plan[0].batches) for op in missing),
    ]


def _cases(entry, compressor, options):
    batches = options.batch or entry.batches
    if entry.op in WORKLOADS:
        return [CompanionCase(tokens) for kind, tokens in batches if kind == "tokens"]
    config = CONFIGS[compressor]
    if config.state == "online" and entry.op != "compress":
        return []
    return [
        Case(config, kind, tokens, dtype)
        for dtype in options.dtype or entry.dtypes
        for kind, tokens in batches
        if kind != "tokens"
    ]


def _resolve(case, op, implementation, platform):
    """The implementation that an op takes."""
    config, batch, prefill = None, None, False
    if op.startswith("compress"):
        config, prefill = case.config, case.prefill
        batch = jax.ShapeDtypeStruct((case.tokens, 2 * config.width), case.dtype)
    name = implementation or platforms.default_implementation()
    save = "all" if op == "compress_all" else "tail"
    return name or platforms.choose(OPS.get(op, op), platform, config, batch, save, prefill)


def _line(row, labels, width):
    cells = ""
    for label in labels:
        cells += f"{row[label]:10.2f}{row['floor'] / row[label]:6.2f}" if label in row else f"{'-':>10}{'-':>6}"
        cells += "~" if row.get(f"{label}_spread", 0) > NOISY else " "
    return (
        f"{row['compressor']:14}{row['op']:{width}}{row['kind']:8}{row['tokens']:7}  {row['dtype']:9}"
        f"{row['implementation']:8}{row['bytes'] / 1e6:9.2f}{row['floor']:9.2f}{cells}{row['compile']:9.2f}"
    )


def _finish(record, earlier, options, failed):
    if record["left_out"]:
        print(f"After {options.seconds:g} s {len(record['left_out'])} measurements are left out:")
        print("\n".join(f"  {name}" for name in record["left_out"]))
    if options.json:
        results.write(options.json, record)
    if options.plot:
        _plot(record, options.plot)
    if earlier is not None:
        print("\n".join(results.compare(record["rows"], earlier["rows"])))
    return 1 if failed else 0


def _show(record, picture):
    print(results.tables(record))
    if picture:
        _plot(record, picture)
    return 0


def _plot(record, picture):
    from dsv4_jax.bench.plot import plot

    plot(record, picture)


def _parser():
    parser = argparse.ArgumentParser(
        prog="python -m dsv4_jax bench",
        description="Times the ops. What an option names replaces the default; all but the files can be repeated.",
        epilog="See also: python -m dsv4_jax bench bridge",
    )
    option = parser.add_argument
    ops = [*OPS, *WORKLOADS]
    option("--compressor", choices=CONFIGS, action="append", help="default: " + ", ".join(COMPRESSORS))
    option("--op", choices=ops, action="append", metavar="OP", help=", ".join(ops))
    option("--companions", action="store_true", help="also all ops around the compressor")
    batches = ", ".join(KINDS) + "; tokens for an op around the compressor"
    option("--batch", type=parsed_batch, action="append", metavar="KIND:T", help=batches)
    option("--dtype", choices=("float32", "bfloat16"), action="append", help="of kv_score")
    implementations = platforms.IMPLEMENTATIONS
    option("--implementation", choices=implementations, action="append", help="default: the switch chooses")
    option("--l2", choices=results.LABELS, action="append", help="inputs in the L2 cache, or out of it")
    sets = parser.add_mutually_exclusive_group()
    sets.add_argument(
        "--quick", dest="set", action="store_const", const="quick", help="at most three batches, warm; within a minute"
    )
    sets.add_argument("--report", dest="set", action="store_const", const="report", help="compress, six batches")
    option("--seconds", type=float, metavar="N", help="stop when over, and say what was left out")
    option("--json", metavar="FILE", help="write the measurements there, after each")
    option("--plot", metavar="PNG", help="draw the roofline there; needs matplotlib")
    option("--against", metavar="FILE", help="name what got more than 5 %% slower than in this JSON")
    option("--table", metavar="FILE", help="measure nothing; print this JSON as Markdown tables")
    parser.set_defaults(set="full")
    return parser


def parsed_batch(text: str) -> tuple[str, int]:
    """Kind and tokens of what `--batch` takes."""
    kind, _, tokens = text.partition(":")
    if kind not in (*KINDS, "tokens") or not tokens.isdigit() or int(tokens) < 1:
        raise argparse.ArgumentTypeError(
            f"{text!r}; it must be {', '.join(KINDS)} or tokens, a colon, and a number of at least 1"
        )
    return kind, int(tokens)
