"""`python -m dsv4_jax bench`: every op over batches and sizes, as floor divided by time."""

import argparse
import json
import platform

import jax

from dsv4_jax.bench.cases import Case
from dsv4_jax.bench.timing import Timer
from dsv4_jax.common.reference.compress import compress
from dsv4_jax.common.reference.compress_norm_rope_store import compress_norm_rope_store
from dsv4_jax.common.reference.save_partial_states import save_partial_states
from dsv4_jax.config import CompressorConfig

CONFIGS = {
    "csa": CompressorConfig.csa(),
    "hca": CompressorConfig.hca(),
    "indexer_fp8": CompressorConfig.indexer("indexer_fp8"),
    "indexer_mxfp4": CompressorConfig.indexer("indexer_mxfp4"),
}
OPS = ("compress", "compress_all", "store", "save")
BATCHES = (("prefill", 2048), ("prefill", 8192), ("prefill", 65536), ("decode", 1), ("decode", 512), ("closing", 512))
QUICK = (("prefill", 8192), ("closing", 512))
CPU_BATCHES = (("prefill", 256), ("closing", 16))
LEGEND = """op: compress (save="tail"), compress_all (save="all"), store (compress_norm_rope_store), save
(save_partial_states). batch: prefill of one request; decode, a token a request at random positions; closing, all of
them closing windows. floor: MB / copy bandwidth; share: floor / time, above 1 where the L2 cache serves. warm:
inputs in the L2 cache where they fit; cold: not."""
COLD_BYTES = 256 << 20  # inputs that rotate over this much are out of the L2 cache when their turn comes


def main(argv: list[str]) -> int:
    """Runs the command line; returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m dsv4_jax bench", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--compressor", choices=CONFIGS, action="append", help="only this one (repeatable)")
    parser.add_argument("--op", choices=OPS, action="append", help="only this one (repeatable)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of kv_score")
    parser.add_argument("--implementation", choices=("xla", "triton", "cutedsl"), help="default: the switch chooses")
    parser.add_argument("--quick", action="store_true", help="two batches, warm only")
    parser.add_argument("--json", metavar="FILE", help="write the measurements there")
    parser.add_argument("--against", metavar="FILE", help="name what got more than 5 % slower than in this JSON")
    options = parser.parse_args(argv)
    if options.json:
        open(options.json, "a").close()  # a bad path is better said before the measurements than after
    earlier = None
    if options.against:
        with open(options.against) as file:
            earlier = json.load(file)
    on_cpu = jax.default_backend() == "cpu"
    if on_cpu:
        print("No GPU: tiny batches, and only the ratios between two rows' times mean something.")
    batches = CPU_BATCHES if on_cpu else QUICK if options.quick else BATCHES
    timer = Timer()
    print(f"{jax.devices()[0].device_kind}, copy bandwidth {timer.bandwidth / 1e9:.0f} GB/s (read + written)")
    print(LEGEND)
    rows = []
    labels = ("warm",) if options.quick or on_cpu else ("warm", "cold")
    heads = "".join(f"{label + ' us':>10}{'share':>7}" for label in labels)
    print(f"{'compressor':14}{'op':13}{'batch':8}{'tokens':>7}{'MB':>9}{'floor us':>10}{heads}", flush=True)
    for name in options.compressor or CONFIGS:
        for kind, tokens in batches:
            for op in options.op or OPS:
                if op == "save" and kind != "prefill":
                    continue
                row = measure(
                    Case(CONFIGS[name], kind, tokens, options.dtype), op, timer, labels, options.implementation
                )
                rows.append({"compressor": name, **row})
                times = "".join(f"{row[label]:10.2f}{row['floor'] / row[label]:7.2f}" for label in labels)
                print(
                    f"{name:14}{op:13}{kind:8}{tokens:7}{row['bytes'] / 1e6:9.2f}{row['floor']:10.2f}{times}",
                    flush=True,
                )
    if options.json:
        versions = {"jax": jax.__version__, "python": platform.python_version()}
        device = {"device": jax.devices()[0].device_kind, "bandwidth": timer.bandwidth}
        with open(options.json, "w") as file:
            json.dump({**device, "versions": versions, "dtype": options.dtype, "rows": rows}, file, indent=1)
    if earlier is not None:
        print("\n".join(slower(rows, earlier["rows"])) or "nothing got slower")
    return 0


def slower(rows: list[dict], earlier: list[dict], tolerance: float = 0.05) -> list[str]:
    """A line for each measurement that takes longer than the same one did earlier, by more than `tolerance`."""

    def case(row):
        return row["compressor"], row["op"], row["kind"], row["tokens"]

    before = {case(row): row for row in earlier}
    return [
        f"slower: {' '.join(map(str, case(row)))} {label}: {old[label]:.2f} -> {row[label]:.2f} us"
        for row in rows
        if (old := before.get(case(row)))
        for label in ("warm", "cold")
        if label in row and label in old and row[label] > old[label] * (1 + tolerance)
    ]


def measure(case: Case, op: str, timer: Timer, labels=("warm", "cold"), implementation: str | None = None) -> dict:
    """Times one op of one case, with its inputs in the L2 cache where they fit (warm) and out of it (cold)."""
    c = case.config
    metadata, pages, kv_pages = case.batch()
    step, size = _step(case, op, metadata, implementation)
    floor = size / timer.bandwidth * 1e6
    row = {"op": op, "kind": case.kind, "tokens": case.tokens, "bytes": size, "floor": floor}
    for label in labels:
        sets = 1 if label == "warm" else max(1, min(16, -(-COLD_BYTES // max(size, 1))))
        arrays = [case.arrays(metadata, pages, kv_pages, jax.random.key(i)) for i in range(sets)]
        carry = [(a.pop("state_cache"), a.pop("kv_cache")) for a in arrays]
        if op == "save":
            for a in arrays:
                a["kv"], a["score"] = a["kv_score"][:, : c.width], a.pop("kv_score")[:, c.width :]
        row[label] = _time(timer, step, carry, arrays, floor)
    return row


def _time(timer, step, carry, arrays, floor):
    """Each set of arrays has its own caches; all are carried, and a round over all of them counts as one step."""
    sets = len(arrays)

    def round_(carry, inputs):
        return [step(c, a) for c, a in zip(carry, inputs, strict=True)]

    length = max(2, min(60, round(600 / max(sets * floor, 10.0))))
    return timer.microseconds(round_, carry, [arrays], length=length) / sets


def _step(case, op, metadata, implementation=None):
    """The op as `carry, inputs -> carry`, and the bytes that it must move."""
    options = {"config": case.config, "implementation": implementation}
    save = "all" if op == "compress_all" else "tail"

    def run_compress(carry, a):
        state, cache = carry
        weights = a["norm_weight"], a["cos_sin"]
        return compress(a["kv_score"], a["ape"], state, cache, metadata, *weights, save=save, **options)

    def run_store(carry, a):
        # The barrier ties the state to the cache: without, XLA would do equal calls' first halves once.
        state, cache = jax.lax.optimization_barrier(carry)
        return state, compress_norm_rope_store(state, cache, metadata, a["norm_weight"], a["cos_sin"], **options)

    def run_save(carry, a):
        state, cache = carry
        ratio = case.config.compress_ratio
        where = metadata.positions, state, metadata.slot_mapping
        state = save_partial_states(
            a["kv"], a["score"], a["ape"], *where, compress_ratio=ratio, implementation=implementation
        )
        return state, cache

    return {
        "compress": (run_compress, case.compress_bytes(metadata, save)),
        "compress_all": (run_compress, case.compress_bytes(metadata, save)),
        "store": (run_store, case.store_bytes(metadata)),
        "save": (run_save, case.save_bytes()),
    }[op]
