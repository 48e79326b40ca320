"""The bench: its batches, the bytes it counts, its timer, and its command line."""

import dataclasses
import functools
import json
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv4_jax.bench import cases, results, run, timing
from dsv4_jax.bench.cases import CONFIGS, Case, CompanionCase
from dsv4_jax.bench.companions import WORKLOADS, Workload, once_each
from dsv4_jax.common.reference.compress import compress


@pytest.fixture(scope="module")
def timer():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timing, "DELAY_BYTES", 1 << 20)
        return timing.Timer()


@pytest.fixture
def bench(monkeypatch, timer):
    """The command line, with a timer at hand and batches of 16 tokens."""
    monkeypatch.setattr(run, "Timer", lambda: timer)
    monkeypatch.setitem(run.PLANS, "cpu", (run.Entry("compress", ("float32",), (("prefill", 16),)),))
    return run.main


def test_bytes_of_a_prefill():
    case = Case(CONFIGS["csa"], "prefill", 64)
    batch = case.batch()
    assert batch.host.closing[:16, 0].tolist() == list(range(3, 64, 4)) and batch.host.closing[:, 3].max() == 8
    assert batch.pages == 16 and batch.kv_pages >= 1
    # 64 tokens of 2 * 1024 float32; the last window's 4 rows are still needed; 16 keys of 584 bytes.
    assert case.bytes("compress") == 64 * 8192 + 4 * 8192 + 16 * 584
    assert case.bytes("compress_all") == 64 * 8192 * 2 + 16 * 584
    assert case.bytes("store") == (15 * 8 + 4) * 2 * 512 * 4 + 16 * 584  # the first window has 4 rows
    assert case.bytes("save") == 64 * 8192 * 2
    assert Case(case.config, "prefill", 64, "bfloat16").bytes("compress_all") == 64 * (4096 + 8192) + 16 * 584
    # An indexer's rows are a quarter as wide; its keys have 128 bytes and a float32, or 64 and 4 scales of a byte.
    assert Case(CONFIGS["indexer_fp8"], "prefill", 64).bytes("compress") == 64 * 2048 + 4 * 2048 + 16 * 132
    assert Case(CONFIGS["indexer_mxfp4"], "prefill", 64).bytes("compress") == 64 * 2048 + 4 * 2048 + 16 * 68
    assert Case(CONFIGS["csa_bf16"], "prefill", 64).bytes("compress") == 64 * 8192 + 4 * 8192 + 16 * 1024
    assert Case(CONFIGS["csa_fp8"], "prefill", 64).bytes("compress") == 64 * 8192 + 4 * 8192 + 16 * 512


@pytest.mark.parametrize(
    ("name", "a_token"),
    [
        # A row of the batch, history, the row saved, the key.
        ("csa", 8192 + 7 * 4096 + 8192 + 584),
        ("indexer_mxfp4", 2048 + 7 * 1024 + 2048 + 68),
        ("hca", 4096 + 127 * 4096 + 0 + 584),
        ("hca_online", 4096 + 6144 + 0 + 584),
    ],
)
def test_bytes_of_closing_tokens(name, a_token):
    assert Case(CONFIGS[name], "closing", 8).bytes("compress") == 8 * a_token


@pytest.mark.parametrize("kind", cases.KINDS)
@pytest.mark.parametrize("name", ["csa", "hca", "hca_online"])
def test_a_case_knows_a_prefill_without_its_batch(name, kind):
    case = Case(CONFIGS[name], kind, 512)
    # Of 512 mixed tokens 64 are decodes, more requests than HCA has windows.
    prefill = kind == "prefill" or (kind == "mixed" and name == "csa")
    assert case.prefill is case.batch().host.prefill is prefill


@pytest.mark.parametrize("name", ["csa", "hca", "hca_online"])
def test_bytes_of_a_mixed_batch(name):
    """Against a loop over its tokens."""
    config = CONFIGS[name]
    m, n, tokens = config.compress_ratio, config.window, 600
    queries, lengths = cases.requests("mixed", tokens, m, np.random.default_rng(0))
    assert queries.sum() == tokens and (lengths >= queries).all() and len(queries) == 64 + 4
    assert sorted(queries)[-4:] == [53, 107, 161, 215] and (lengths > queries).sum() == 64 + 2
    total = tokens * 2 * config.width * 4
    for query, length in zip(queries, lengths, strict=True):
        first = length - query
        if name == "hca_online":
            total += 6144 * (int(first % m > 0) + int(length % m > 0))
        else:
            total += 2 * config.width * 4 * sum(p >= max(first, length // m * m - (n - m)) for p in range(length))
        for p in range(first, length):
            if (p + 1) % m == 0:
                total += 584
                if name != "hca_online":
                    total += sum(0 <= row < first for row in range(p - n + 1, p + 1)) * 2 * 512 * 4
    assert Case(config, "mixed", tokens).bytes("compress") == total


@pytest.mark.parametrize("name", ["csa", "hca", "hca_online", "indexer_fp8"])
def test_closing_requests_have_all_their_rows(name):
    case = Case(CONFIGS[name], "closing", 8)
    batch = case.batch()
    slots = batch.host.window_slots[:8]
    assert batch.host.closing[:8, 0].tolist() == list(range(8)) and (batch.host.closing[:8, 3] == 1).all()
    assert (slots >= 0).all() and len(np.unique(slots)) == slots.size
    assert slots.max() < batch.pages * case.config.page_rows


@pytest.mark.parametrize("tokens", [1, 2, 9, 700])
@pytest.mark.parametrize("kind", cases.KINDS)
@pytest.mark.parametrize("name", ["csa", "hca", "hca_online"])
def test_pages(name, kind, tokens):
    """Every token and every row of its window has a state page, every key a cache page, each its own."""
    config = CONFIGS[name]
    m, n = config.compress_ratio, config.window
    (starts, lengths, table, kv_table), pages, kv_pages = cases.tables(config, kind, tokens)
    assert starts[0] == 0 and starts[-1] == tokens and (np.diff(starts) > 0).all()
    assert len(np.unique(kv_table)) == kv_table.size == kv_pages and 0 <= kv_table.min() <= kv_table.max() < kv_pages
    assert (-(-lengths // m) <= kv_table.shape[1] * config.kv_page_rows).all()
    used = table[table >= 0]
    assert sorted(used) == list(range(pages)) and table.min() >= -1
    for r, (first, length) in enumerate(zip(lengths - np.diff(starts), lengths, strict=True)):
        if name == "hca_online":
            assert table[r, 0] >= 0
        else:
            assert (table[r, np.arange(max(0, first // m * m - (n - m)), length) // config.page_rows] >= 0).all()


def test_random_phases_close_some_windows():
    queries, lengths = cases.requests("decode", 256, 4, np.random.default_rng(0))
    assert (queries == 1).all() and 32 < (lengths % 4 == 0).sum() < 96  # 64, give or take 7 (sigma)
    _, lengths = cases.requests("closing", 256, 4, np.random.default_rng(0))
    assert (lengths % 4 == 0).all()


def test_sets_share_what_layers_share():
    a, b = (Case(CONFIGS["csa"], "prefill", 16).workload("compress", seed) for seed in (0, 1))
    assert a.inputs["metadata"] is b.inputs["metadata"] and a.inputs["cos_sin"] is b.inputs["cos_sin"]
    for name in ("kv_score", "ape"):
        x, y = np.asarray(a.inputs[name]), np.asarray(b.inputs[name])
        assert 0.9 < np.std(x) < 1.1 and (x == y).mean() < 0.01
    assert (np.asarray(a.carry[0]) == np.asarray(b.carry[0])).mean() < 0.01


@pytest.mark.parametrize("op", cases.OPS)
@pytest.mark.parametrize("name", ["csa_fp8", "indexer_fp8", "hca_online"])
def test_workloads_give_back_what_they_carry(name, op):
    if name == "hca_online" and op != "compress":
        pytest.skip("the online state has no other op")
    assert_carries(Case(CONFIGS[name], "prefill", 16).workload(op))


@pytest.mark.parametrize("op", WORKLOADS)
def test_companions_give_back_what_they_carry(op):
    assert_carries(CompanionCase(16).workload(op))


def assert_carries(workload):
    types = lambda tree: jax.tree.map(lambda x: (x.shape, x.dtype), tree)
    result = jax.eval_shape(workload.run, workload.carry, workload.inputs)
    assert types(result) == types(workload.carry) and workload.bytes > 0
    carried, read = ({id(x) for x in jax.tree.leaves(tree)} for tree in (workload.carry, workload.inputs))
    assert not carried & read  # what is donated cannot be read again


def test_timer_counts_a_call(timer):
    """A call that sleeps for 10 ms takes that long, or on a busy machine longer, but not twice; it is traced once."""
    traced = []

    def run(carry, inputs):
        traced.append(None)

        def sleep(x, y):
            time.sleep(10e-3)
            return np.asarray(x) + np.asarray(y)

        return jax.pure_callback(sleep, jax.typeof(carry), carry, inputs["one"]), inputs["one"]

    one = jnp.ones(())
    first = lambda carry, inputs: run(carry, inputs)[0]
    for sets in (1, 3):
        taken = timer.chain(first, [jnp.zeros(()) for _ in range(sets)], [{"one": one}] * sets, length=2)
        assert 10_000 <= taken.microseconds < 20_000 and 0 <= taken.spread < 1
    assert len(traced) == 1 and timer.bandwidth > 0 and timer.launch > 0


def test_cold_sets_rotate(timer, monkeypatch):
    """Sets are as many as fill the bytes; what is too small for that has no cold time."""
    seen = []

    def chain(run, carries, inputs, *, length):
        seen.append(len(carries))
        return timing.Time(2.0, 0.0)

    monkeypatch.setattr(timer, "chain", chain)
    case = Case(CONFIGS["indexer_fp8"], "prefill", 16)
    size = case.bytes("save")
    assert size == 16 * 2048 * 2
    for cold, least, sets in ((10 * size - 1, size, [1, 10]), (size, size, [1]), (1 << 40, 65 * size, [1])):
        monkeypatch.setattr(run, "COLD_BYTES", cold)
        monkeypatch.setattr(run, "LEAST_COLD_BYTES", least)
        seen.clear()
        row = run.measure(case, "save", timer)
        assert seen == sets and row["warm"] == 2.0 and ("cold" in row) == (least == size)
    assert row["bytes"] == size and row["floor"] == pytest.approx(size / timer.bandwidth * 1e6)
    assert row["implementation"] == "xla" and row["compile"] > 0


def test_what_got_slower_is_named():
    row = {"compressor": "csa", "op": "save", "kind": "prefill", "tokens": 64, "dtype": "float32"}
    row |= {"implementation": "triton", "warm": 2.0, "cold": 3.0}
    assert results.compare([row | {"warm": 2.09}], [row]) == ["0 of 2 times that both runs have got slower"]
    assert results.compare([row | {"warm": 2.2}], [row]) == [
        "slower: csa save prefill 64 float32 triton warm: 2.00 -> 2.20 us",
        "1 of 2 times that both runs have got slower",
    ]
    others = [row | {"warm": 9.0, "tokens": 65}, row | {"warm": 9.0, "dtype": "bfloat16"}]
    assert results.compare(others, [row]) == ["0 of 0 times that both runs have got slower"]


def test_tables():
    row = {"compressor": "csa", "op": "save", "kind": "prefill", "tokens": 2048, "dtype": "float32"}
    row |= {"implementation": "triton", "floor": 4.0, "warm": 5.0, "cold": 8.0, "compile": 1.25}
    small = row | {"kind": "decode", "tokens": 1, "floor": 0.5, "warm": 1.0}
    del small["cold"]
    record = {"device": "A GPU", "driver": "580.1", "versions": {"jax": "1.2"}, "date": "2026-01-02T03:04:05"}
    record |= {"bandwidth": 4.25e12, "launch": 1.5, "command": "bench", "rows": [small, row]}
    machine, table = results.tables(record).split("\n\n")
    assert machine == (
        "A GPU, driver 580.1; jax 1.2; 2026-01-02. Copy bandwidth 4.25 TB/s read plus written, launch 1.50 µs. "
        "Compilation of one call took at most 1.2 s. Command: `bench`."
    )
    assert table.splitlines() == [
        "| `save`, float32 `kv_score`, µs (floor ÷ time) | prefill 2,048 | decode 1 |",
        "|---|---|---|",
        "| csa triton warm | 5.00 (0.80) | 1.00 (0.50) |",
        "| csa triton cold | 8.00 (0.50) | - |",
    ]
    # The ops around the compressor share a table.
    around = {"compressor": "-", "kind": "tokens", "tokens": 64, "dtype": "-"}
    record["rows"] = [row | around | {"op": op} for op in ("one", "two")]
    assert results.tables(record).split("\n\n")[1].splitlines() == [
        "| op, µs (floor ÷ time) | tokens 64 |",
        "|---|---|",
        "| `one` triton warm | 5.00 (0.80) |",
        "| `one` triton cold | 8.00 (0.50) |",
        "| `two` triton warm | 5.00 (0.80) |",
        "| `two` triton cold | 8.00 (0.50) |",
    ]
    # A kind of batch to a table, where one would be too wide.
    record["rows"] = [row | {"kind": kind, "tokens": 2**i} for kind in ("prefill", "decode") for i in range(5)]
    assert [t.split(" | ")[1:3] for t in results.tables(record).split("\n\n")[1:]] == [
        ["prefill 1", "prefill 2"],
        ["decode 1", "decode 2"],
    ]


def test_command_line(tmp_path, capsys, bench):
    file, picture = tmp_path / "bench.json", tmp_path / "bench.png"
    arguments = ["--compressor", "indexer_mxfp4", "--op", "save", "--dtype", "float32", "--dtype", "bfloat16"]
    assert bench([*arguments, "--json", str(file), "--plot", str(picture)]) == 0
    written = json.loads(file.read_text())
    names = [results.name_of(row) for row in written["rows"]]
    assert names == ["indexer_mxfp4 save prefill 16 float32 xla", "indexer_mxfp4 save prefill 16 bfloat16 xla"]
    for row, size in zip(written["rows"], (16 * 4096, 16 * 3072), strict=True):
        assert row["bytes"] == size and row["warm"] > 0 and row["compile"] > 0
    assert written["bandwidth"] > 0 and written["launch"] > 0 and written["left_out"] == []
    assert written["device"] and written["versions"]["jax"] == jax.__version__ and written["date"].startswith("20")
    assert written["command"].startswith("python -m dsv4_jax bench --compressor indexer_mxfp4 --op save")
    assert picture.read_bytes().startswith(b"\x89PNG")
    out = capsys.readouterr().out
    assert "only the ratios" in out and len([x for x in out.splitlines() if x.startswith("indexer_mxfp4 save")]) == 2

    picture.unlink()
    assert bench(["--table", str(file), "--plot", str(picture)]) == 0
    assert "| indexer_mxfp4 xla warm |" in capsys.readouterr().out and picture.exists()

    for row in written["rows"]:
        row["warm"] = 1e9
    file.write_text(json.dumps(written))
    assert bench([*arguments, "--against", str(file)]) == 0
    assert capsys.readouterr().out.endswith("\n0 of 2 times that both runs have got slower\n")
    for row in written["rows"]:
        row["warm"] = 1e-9
    file.write_text(json.dumps(written))
    assert bench([*arguments, "--against", str(file)]) == 0
    assert capsys.readouterr().out.count("slower: indexer_mxfp4 save prefill 16") == 2


def test_a_run_that_is_stopped_leaves_its_rows(tmp_path, monkeypatch, capsys, bench):
    def measure(case, op, *_):
        row = {"op": op, "kind": case.kind, "tokens": case.tokens, "dtype": case.dtype, "implementation": "xla"}
        if case.tokens == 2:
            raise ValueError("no memory")
        if case.tokens == 3:
            raise KeyboardInterrupt
        time.sleep(0.2)
        return row | {"bytes": 1, "floor": 1.0, "warm": 1.0, "compile": 0.1}

    monkeypatch.setattr(run, "measure", measure)
    file = tmp_path / "bench.json"
    batches = [argument for tokens in (1, 2, 4, 3, 5) for argument in ("--batch", f"prefill:{tokens}")]
    arguments = ["--compressor", "csa", *batches, "--json", str(file)]
    with pytest.raises(KeyboardInterrupt):
        bench(arguments)
    assert [row["tokens"] for row in results.read(file)["rows"]] == [1, 4]
    assert "failed: csa compress prefill 2 float32 xla: ValueError: no memory" in capsys.readouterr().out
    assert bench(["--compressor", "csa", *batches[2:4]]) == 1
    left = [*batches[:2], *batches[4:6], *batches[8:]]
    assert bench(["--compressor", "csa", *left, "--json", str(file), "--seconds", "0.1"]) == 0
    record = results.read(file)
    assert [row["tokens"] for row in record["rows"]] == [1]
    assert record["left_out"] == ["csa compress prefill 4 float32 xla", "csa compress prefill 5 float32 xla"]
    assert "2 measurements are left out:\n  csa compress prefill 4" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--batch", "prefill"], "prefill, decode, closing, mixed or tokens, a colon, and a number of at least 1"),
        (["--batch", "prefill:0"], "a number of at least 1"),
        (["--json", "{path}/none/bench.json"], "No such file or directory"),
        (["--plot", "{path}/none/bench.png"], "No such file or directory"),
        (["--against", "{path}/none.json"], "No such file or directory"),
        (["--table", "{path}/other.json"], "other.json is not a result of the bench"),
        (["--compressor", "hca_online", "--op", "save"], "nothing is left to measure"),
        (["--compressor", "csa", "--implementation", "cutedsl"], "not measured: csa compress cutedsl: CuTeDSL kernels"),
    ],
)
def test_bad_arguments(arguments, message, tmp_path, capsys, bench):
    (tmp_path / "other.json").write_text("[]")
    with pytest.raises(SystemExit) as stopped:
        bench([argument.format(path=tmp_path) for argument in arguments])
    assert stopped.value.code == 2 and message in capsys.readouterr().err


def options(*arguments, plan="full"):
    parsed = run._parser().parse_args(arguments)
    parsed.set = plan
    return parsed


def test_what_is_measured():
    report = run.planned(options(plan="report"), "cuda-without-triton")[0]
    assert len(report) == 5 * 6 and {m.implementation for m in report} == {"xla"}
    full, notes = run.planned(options(), "cpu")
    names = [m.name for m in full]
    assert [m.name for m in full[:30]] == [m.name for m in report] and len(set(names)) == len(names) and not notes
    for tokens in (1, 131072):
        assert f"csa compress prefill {tokens} float32 xla" in names
    for name in ("decode 1024 float32", "closing 1024 float32", "mixed 8192 float32", "prefill 8192 bfloat16"):
        assert f"hca_online compress {name} xla" in names
    assert not any(m.compressor == "hca_online" and m.op != "compress" for m in full)

    both, notes = run.planned(
        options("--implementation", "xla", "--implementation", "cutedsl", "--batch", "closing:7", plan="report"), "cuda"
    )
    assert next(m.name for m in both if m.compressor == "csa") == "csa compress closing 7 float32 xla"
    assert all("cutedsl" in note for note in notes) and any("indexer_fp8" in note for note in notes)


@pytest.fixture
def companion(monkeypatch):
    seen = []

    def double(tokens, key):
        def op(x):
            seen.append(cases.os.environ.get(cases.VARIABLE))
            return x * 2

        x = jax.random.normal(key, (tokens, 4))
        return Workload(once_each(op), jnp.zeros_like(x), x, x.nbytes * 2)

    monkeypatch.setitem(WORKLOADS, "double", double)
    return seen


def test_an_op_around_the_compressor(timer, companion, monkeypatch):
    monkeypatch.setenv(cases.VARIABLE, "xla")
    row = run.measure(CompanionCase(8), "double", timer, ("warm",), "triton")
    assert row["bytes"] == 8 * 4 * 4 * 2 and row["warm"] > 0 and row["kind"] == "tokens" and row["tokens"] == 8
    assert set(companion) == {"triton"} and cases.os.environ[cases.VARIABLE] == "xla"
    names = {m.name for m in run.planned(options("--companions", plan="report"), "cpu")[0]}
    assert "- double tokens 8192 - xla" in names and "csa compress prefill 2048 float32 xla" in names
    (only,) = run.planned(options("--op", "double", plan="cpu"), "cpu")[0]
    assert only.name == "- double tokens 16 - xla"


def test_every_call_of_a_chain_is_done():
    x = jax.random.normal(jax.random.key(0), (8, 16))
    run_once = once_each(jnp.sort)

    def chain(carry, x):
        for _ in range(3):
            carry = run_once(carry, x)
        return carry

    compiled = jax.jit(chain).lower(jnp.zeros_like(x), x).compile()
    assert compiled.as_text().count(" sort(") == 3
    np.testing.assert_array_equal(compiled(jnp.zeros_like(x), x), np.sort(x))


@pytest.mark.parametrize("name", ["csa", "hca_online"])
def test_a_bucket_is_compiled_once(name):
    """Batches of other lengths, requests and positions, padded to one size, reuse the executable."""
    config, tokens, requests = dataclasses.replace(CONFIGS[name], cache_format="bf16"), 160, 3
    states = jnp.zeros((200, config.page_rows, config.state_width))
    cache = config.format.allocate(60, config.kv_page_rows)
    table = np.arange(requests * (1 if name == "hca_online" else 64), dtype=np.int32).reshape(requests, -1)
    kv_table = np.arange(requests * 20, dtype=np.int32).reshape(requests, -1)
    cos_sin = jnp.asarray(config.rope.table(512))

    @functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
    def step(states, cache, kv_score, starts, lengths):
        metadata = cases.CompressorMetadata.build(config, starts, lengths, table, kv_table, num_tokens=tokens)
        ape, norm_weight = jnp.zeros((config.compress_ratio, config.width)), jnp.ones(config.head_dim)
        return compress(kv_score, ape, states, cache, metadata, norm_weight, cos_sin, config=config)

    kv_score = jax.random.normal(jax.random.key(0), (tokens, 2 * config.width))
    for queries, lengths in (([128, 5, 3], [128, 5, 3]), ([1, 1, 140], [128, 9, 150]), ([0, 140, 0], [0, 140, 0])):
        starts = np.cumsum([0, *queries]).astype(np.int32)
        _, written = step(states, cache, kv_score, starts, np.array(lengths, np.int32))
        m = config.compress_ratio
        closed = sum(length // m - (length - query) // m for query, length in zip(queries, lengths, strict=True))
        assert np.asarray(written, np.float32).any(axis=2).sum() == closed > 0
    assert step._cache_size() == 1


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("case", "kernels"),
    [
        ("csa prefill:64", "_compress_store_kernel"),
        ("hca closing:8", "_compress_kernel _store_kernel"),
        ("hca_online decode:8", "_online_walk_kernel"),
        ("hca_fp8 prefill:2048 --implementation cutedsl", "_long_windows"),
        ("csa prefill:8192 bfloat16 --implementation cutedsl", "prefill_windows"),
        ("hca prefill:64 --op save", "_save_kernel"),
    ],
)
def test_kernels_alone(case, kernels):
    command = [sys.executable, "-m", "dsv4_jax.bench.alone", *case.split()]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert " ".join(line.split(":")[0] for line in printed.splitlines()) == kernels
