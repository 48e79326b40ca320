"""`python -m dsv4_jax bench`: every op over sizes and batches, as floor divided by time."""

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
BATCHES = [("prefill", t) for t in (2048, 8192, 65536)] + [("decode", 1), ("decode", 512), ("closing", 512)]
L2_BYTES = 256 << 20  # inputs that rotate over this much are out of the L2 cache when their turn comes


def run(names=tuple(CONFIGS), batches=BATCHES, ops=("compress", "compress_all", "store", "save"), dtype="float32"):
    """Prints a line a measurement; returns them."""
    timer = Timer()
    print(f"copy bandwidth {timer.bandwidth / 1e12:.2f} TB/s", flush=True)
    print(f"{'compressor':14} {'op':13} {'batch':8} {'tokens':>7} {'MB':>8} {'floor us':>9} {'warm us':>9} {'cold us':>9}"
          f" {'floor/warm':>10} {'floor/cold':>10}", flush=True)
    rows = []
    for name in names:
        for kind, tokens in batches:
            case = Case(CONFIGS[name], kind, tokens, dtype)
            for op in ops:
                if op == "save" and kind != "prefill":
                    continue
                row = measure(case, op, timer)
                row["compressor"] = name
                rows.append(row)
                print(f"{name:14} {op:13} {kind:8} {tokens:7} {row['bytes'] / 1e6:8.2f} {row['floor']:9.2f}"
                      f" {row['warm']:9.2f} {row['cold']:9.2f} {row['floor'] / row['warm']:10.2f}"
                      f" {row['floor'] / row['cold']:10.2f}", flush=True)
    return rows


def measure(case: Case, op: str, timer: Timer) -> dict:
    """Times one op of one case, with its inputs in the L2 cache where they fit (warm) and out of it (cold)."""
    c = case.config
    metadata, pages, kv_pages = case.batch()
    step, size = _step(case, op, metadata)
    floor = size / timer.bandwidth * 1e6
    times = {}
    for label in ("warm", "cold"):
        sets = 1 if label == "warm" else max(1, min(16, -(-L2_BYTES // max(size, 1))))
        arrays = [case.arrays(metadata, pages, kv_pages, jax.random.key(i)) for i in range(sets)]
        carry = [(a.pop("state_cache"), a.pop("kv_cache")) for a in arrays]
        if op == "save":
            for a in arrays:
                a["kv"], a["score"] = a["kv_score"][:, : c.width], a.pop("kv_score")[:, c.width :]
        times[label] = _time(timer, step, carry, arrays, floor)
    return {"op": op, "kind": case.kind, "tokens": case.tokens, "bytes": size, "floor": floor, **times}


def _time(timer, step, carry, arrays, floor):
    """Each set of arrays has its own caches; all are carried, and a round over all of them counts as one step."""
    sets = len(arrays)

    def round_(carry, inputs):
        return [step(c, a) for c, a in zip(carry, inputs, strict=True)]

    length = max(2, min(20, round(600 / max(sets * floor, 10.0))))
    return timer.microseconds(round_, carry, [arrays], length=length) / sets


def _step(case, op, metadata):
    c = case.config
    if op.startswith("compress"):
        save = "all" if op == "compress_all" else "tail"

        def step(carry, a):
            return compress(
                a["kv_score"], a["ape"], *carry, metadata, a["norm_weight"], a["cos_sin"], config=c, save=save
            )

        return step, case.compress_bytes(metadata, save)
    if op == "store":

        def step(carry, a):
            # The barrier ties the state to the cache: without, XLA would do equal calls' first halves once.
            state, cache = jax.lax.optimization_barrier(carry)
            return state, compress_norm_rope_store(
                state, cache, metadata, a["norm_weight"], a["cos_sin"], config=c
            )

        return step, case.store_bytes(metadata)

    def step(carry, a):
        state, cache = carry
        state = save_partial_states(
            a["kv"], a["score"], a["ape"], metadata.positions, state, metadata.slot_mapping,
            compress_ratio=c.compress_ratio,
        )  # fmt: skip
        return state, cache

    return step, case.save_bytes()


if __name__ == "__main__":
    run()
