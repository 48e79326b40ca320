"""The bench: its batches, the bytes it counts, its timer, reports and command line. No test depends on a speed."""

import json
import subprocess
import sys
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bench import alone, batches, bridge, calls, cases, report, run, timing
from bench.__main__ import main
from bench.cases import CONFIGS, OPS, Case, Workload

ROOT = Path(__file__).parent.parent
ON_CPU = jax.default_backend() == "cpu"


def needed(op, kind, tokens, compressor, dtype="float32"):
    return Case(op, kind, tokens, compressor, dtype).workload().bytes


def test_bytes_of_a_prefill():
    # 16 tokens of 2 * 1024 float32; the last window's 4 rows are still needed; 4 keys of 584 bytes.
    assert needed("compress", "prefill", 16, "csa") == 16 * 8192 + 4 * 8192 + 4 * 584
    assert needed("compress_all", "prefill", 16, "csa") == 16 * 8192 * 2 + 4 * 584
    assert needed("compress_all", "prefill", 16, "csa", "bfloat16") == 16 * (4096 + 8192) + 4 * 584
    assert needed("store", "prefill", 16, "csa") == (3 * 8 + 4) * 2 * 512 * 4 + 4 * 584  # the first window has 4 rows
    assert needed("save", "prefill", 16, "csa") == 16 * 8192 * 2
    # An indexer's rows are a quarter as wide; its keys have 128 bytes and a float32, or 64 and 4 scales of a byte.
    assert needed("compress", "prefill", 16, "indexer_fp8") == 16 * 2048 + 4 * 2048 + 4 * 132
    assert needed("compress", "prefill", 16, "indexer_mxfp4") == 16 * 2048 + 4 * 2048 + 4 * 68


@pytest.mark.parametrize(
    ("name", "a_token"),
    [
        # A row of the batch, history, the row saved, the key.
        ("hca", 4096 + 127 * 4096 + 0 + 584),
        ("hca_online", 4096 + 6144 + 0 + 584),
    ],
)
def test_bytes_of_closing_tokens(name, a_token):
    assert needed("compress", "closing", 8, name) == 8 * a_token


def test_bytes_of_a_mixed_batch():
    """Against a loop over its tokens."""
    tokens, total = 600, 600 * 8192
    queries, lengths = batches.requests("mixed", tokens, 4, np.random.default_rng(0))
    assert queries.sum() == tokens and (lengths >= queries).all() and len(queries) == 64 + 4
    assert sorted(queries)[-4:] == [53, 107, 161, 215] and (lengths > queries).sum() == 64 + 2
    for query, length in zip(queries, lengths, strict=True):
        first = length - query
        total += 8192 * sum(p >= max(first, length // 4 * 4 - 4) for p in range(length))  # rows saved
        for p in range(first, length):
            if p % 4 == 3:
                total += 584 + 4096 * sum(0 <= row < first for row in range(p - 7, p + 1))
    assert needed("compress", "mixed", tokens, "csa") == total


def test_bytes_of_an_op_that_returns_new_arrays():
    """Inputs and results of both RMSNorms: 1024 and 512 channels of bfloat16, and two float32 weights."""
    assert Case("fused_q_kv_rmsnorm", "tokens", 16).workload().bytes == 2 * 16 * 1536 * 2 + 1536 * 4


@pytest.mark.parametrize("tokens", [1, 9, 700])
@pytest.mark.parametrize("kind", batches.KINDS)
@pytest.mark.parametrize("name", ["csa", "hca", "hca_online"])
def test_pages(name, kind, tokens):
    """Every token and every row of its window has a state page, every key a cache page, each its own."""
    config = CONFIGS[name]
    m, n = config.compress_ratio, config.window
    (starts, lengths, table, kv_table), pages, kv_pages = batches.tables(config, kind, tokens)
    assert starts[0] == 0 and starts[-1] == tokens and (np.diff(starts) > 0).all()
    assert kind != "closing" or (lengths % m == 0).all()
    assert len(np.unique(kv_table)) == kv_table.size == kv_pages and 0 <= kv_table.min() <= kv_table.max() < kv_pages
    assert (-(-lengths // m) <= kv_table.shape[1] * config.kv_page_rows).all()
    used = table[table >= 0]
    assert sorted(used) == list(range(pages)) and table.min() >= -1
    for r, (first, length) in enumerate(zip(lengths - np.diff(starts), lengths, strict=True)):
        if name == "hca_online":
            assert table[r, 0] >= 0
        else:
            assert (table[r, np.arange(max(0, first // m * m - (n - m)), length) // config.page_rows] >= 0).all()


def test_sets_share_what_layers_share():
    a, b = (Case("compress", "prefill", 16, "csa", "float32").workload(seed) for seed in (0, 1))
    assert a.inputs["metadata"] is b.inputs["metadata"] and a.inputs["cos_sin"] is b.inputs["cos_sin"]
    for x, y in ((a.inputs["kv_score"], b.inputs["kv_score"]), (a.carry[0], b.carry[0])):
        assert x.shape == y.shape and (np.asarray(x) != np.asarray(y)).mean() > 0.9


@pytest.mark.parametrize("name", OPS)
def test_entries(name):
    """An entry gives back what it carries, and calls one op, on arguments that can be computed apart."""
    op = OPS[name]
    workload = Case(
        name, "prefill" if op.compressors else "tokens", 16, op.compressors[0] if op.compressors else "-", "float32"
    ).workload()
    like = lambda tree: jax.tree.map(lambda x: (x.shape, x.dtype), tree)
    assert like(jax.eval_shape(workload.run, workload.carry, workload.inputs)) == like(workload.carry)
    carried, read = ({id(x) for x in jax.tree.leaves(tree)} for tree in (workload.carry, workload.inputs))
    assert not carried & read  # what is donated cannot be read again
    call = calls.find(workload)
    assert call.implementation == "xla" and like(call.arguments(workload)) == like(call.types)
    expected = {"store": "compress_norm_rope_store", "save": "save_partial_states", "compress_all": "compress"}
    assert call.op.name == expected.get(name, name)
    assert call.params.get("save") == {"compress": "tail", "compress_all": "all"}.get(name)


def test_every_call_of_a_chain_is_done():
    x = jax.random.normal(jax.random.key(0), (8, 16))

    def chain(carry, x):
        for _ in range(3):
            carry = jnp.sort(cases.wait_for(carry, x))
        return carry

    compiled = jax.jit(chain).lower(jnp.zeros_like(x), x).compile()
    assert compiled.as_text().count(" sort(") == 3
    np.testing.assert_array_equal(compiled(jnp.zeros_like(x), x), np.sort(x))


@pytest.fixture(scope="module")
def timer():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timing, "DELAY_BYTES", 1 << 16)
        return timing.Timer()


def test_a_sample_is_the_time_of_a_call(timer, monkeypatch):
    """By a clock that only the program moves."""
    now, calls = [0.0], []

    def program(carry, inputs):
        now[0] += 6e-3
        calls.append(inputs)
        return carry + 1

    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])
    sample = timer.sampler(program, 0, "inputs", 3, replays=4, with_host=True)
    del calls[:]
    assert sample() == pytest.approx(2000) and calls == ["inputs"] * 4


def test_a_chain_goes_round_its_sets(timer, monkeypatch):
    seen = {}
    monkeypatch.setattr(timer, "sampler", lambda *args: seen.update(args=args))
    shared = jnp.ones(())
    inputs = [{"own": jnp.float32(own), "shared": shared} for own in (10, 20)]
    timer.chain(lambda x, a: x + a["own"] + a["shared"], [jnp.zeros(()), jnp.zeros(())], inputs, 5)
    program, carries, distinct, ops = seen["args"]
    assert ops == 6 and len(distinct) == 3
    assert [float(carry) for carry in program(carries, distinct)] == [33, 63]


def test_medians_of_turns():
    samples = {"a": iter([3.0, 1.0, 2.0]), "b": iter([5.0, 5.0, 5.0])}
    order = []
    samplers = {name: (lambda name=name: order.append(name) or next(samples[name])) for name in samples}
    assert timing.measure(samplers, 3) == {"a": (2.0, 1.0), "b": (5.0, 0.0)}  # quartiles of three: the outer ones
    assert order == ["a", "b"] * 3


class FakeTimer:
    """Copies a gigabyte per millisecond; a call in a chain takes 2 us."""

    bandwidth, flops, launch = 1e12, 1e12, 0.5

    def __init__(self):
        self.sets = []

    def chain(self, run, carries, inputs, length):
        self.sets.append(len(carries))
        return lambda: 2.0


def test_cold_sets_rotate(monkeypatch):
    """Sets are as many as fill the bytes; what is too small for that has no cold time."""
    case, size = Case("save", "prefill", 16, "indexer_fp8", "float32"), 16 * 2048 * 2
    for cold, least, sets in ((10 * size - 1, size, [1, 10]), (size, size, [1]), (1 << 40, 65 * size, [1])):
        monkeypatch.setattr(run, "COLD_BYTES", cold)
        monkeypatch.setattr(run, "LEAST_COLD_BYTES", least)
        timer = FakeTimer()
        row = run.measure(case, timer)
        assert timer.sets == sets and row["warm"] == 2.0 and ("cold" in row) == (least == size)
    assert row["bytes"] == size and row["floor"] == pytest.approx(size / 1e12 * 1e6) and row["compile"] > 0
    assert report.name_of(row) == "indexer_fp8 save prefill 16 float32 xla"


def test_a_floor_of_arithmetic(monkeypatch):
    make = lambda case, draw: Workload(lambda carry, x: carry, jnp.zeros(4), jnp.zeros(4), 16, operations=10**9)
    monkeypatch.setitem(OPS, "product", cases.Op(make, cases.TOKENS, ()))
    monkeypatch.setattr(calls, "find", lambda workload: types.SimpleNamespace(implementation="xla"))
    assert run.measure(Case("product", "tokens", 4), FakeTimer(), ("warm",))["floor"] == pytest.approx(1000)


def planned(*arguments, **options):
    return run.plan(run._parser().parse_args(arguments), **options)


def test_what_is_measured():
    names = lambda chosen: [report.name_of(case._asdict()) for case in chosen]
    earlier = report.read(ROOT / "docs/measurements/h200_report.json")
    assert sorted(name.rsplit(" ", 1)[0] for name in names(planned("--report"))) == sorted(
        report.name_of(row).rsplit(" ", 1)[0] for row in earlier["rows"]
    )
    everything = planned()
    assert {case.op for case in everything} == set(OPS) and len(set(everything)) == len(everything)
    assert not any(case.compressor == "hca_online" and case.op != "compress" for case in everything)
    assert len(planned("--quick")) == 5 * 3 and len(planned("--quick", on_cpu=True)) == 5 * 2
    chosen = planned(*"--op store --compressor csa_bf16 --batch prefill:7 --batch tokens:9 --dtype bfloat16".split())
    assert names(chosen) == ["csa_bf16 store prefill 7 bfloat16 None"]
    assert {case.op for case in planned("--batch", "tokens:9")} == {name for name in OPS if not OPS[name].compressors}
    both = planned("--op", "save", "--compressor", "csa", "--implementation", "xla", "--implementation", "triton")
    assert [case.implementation for case in both] == ["xla", "triton"] * 3


ROW = {"compressor": "csa", "op": "save", "kind": "prefill", "tokens": 2048, "dtype": "float32"}
ROW |= {"implementation": "triton", "floor": 4.0, "warm": 5.0, "cold": 8.0}


def test_what_got_slower_is_named():
    assert report.compare([ROW | {"warm": 5.14}], [ROW]) == ["0 of 2 times that both runs have got slower"]
    assert report.compare([ROW | {"warm": 5.2}], [ROW]) == [
        "slower: csa save prefill 2048 float32 triton warm: 5.00 -> 5.20 us",
        "1 of 2 times that both runs have got slower",
    ]
    others = [ROW | {"warm": 9.0, "tokens": 65}, ROW | {"warm": 9.0, "dtype": "bfloat16"}]
    assert report.compare(others, [ROW]) == ["0 of 0 times that both runs have got slower"]


def test_tables(tmp_path):
    small = ROW | {"kind": "decode", "tokens": 1, "floor": 0.5, "warm": 1.04}
    del small["cold"]
    first = {"device": "A GPU", "launch": 1.5, "rows": [small, ROW, ROW | {"compressor": "hca", "warm": 123.4}]}
    second = {**first, "rows": [ROW | {"implementation": "cutedsl", "warm": 4.0}]}
    for name, record in (("a.json", first), ("b.json", second)):
        report.write(tmp_path / name, record)
    page = tmp_path / "page.md"
    page.write_text(
        "Text.\n<!-- table warm a.json b.json -->\nold\n<!-- end -->\n<!-- table cold a.json -->\n<!-- end -->\n"
        "<!-- table implementations a.json b.json -->\n<!-- end -->\nText.\n"
    )
    assert main(["tables", str(page)]) == 0
    assert page.read_text().splitlines() == [
        "Text.",
        "<!-- table warm a.json b.json -->",
        "| save, float32, warm, µs | decode 1 | prefill 2 048 |",
        "| --- | --- | --- |",
        "| csa | 1.0 | 4.0 (1.00) † |",
        "| hca |  | 123 (0.03) |",
        "<!-- end -->",
        "<!-- table cold a.json -->",
        "| save, float32, cold, µs | prefill 2 048 |",
        "| --- | --- |",
        "| csa | 8.0 (0.50) |",
        "| hca | 8.0 (0.50) |",
        "<!-- end -->",
        "<!-- table implementations a.json b.json -->",
        "| save, float32, warm, µs | decode 1 | prefill 2 048 |",
        "| --- | --- | --- |",
        "| csa, triton | 1.0 | 5.0 |",
        "| hca, triton |  | 123 |",
        "| csa, cutedsl |  | 4.0 |",
        "<!-- end -->",
        "Text.",
    ]


@pytest.mark.parametrize(
    "page",
    [page for page in sorted(ROOT.glob("docs/*.md")) if "<!-- table" in page.read_text()],
    ids=lambda page: page.name,
)
def test_tables_of_the_docs(page):
    assert page.read_text() == report.with_tables(page), f"run: python -m bench tables {page.relative_to(ROOT)}"


@pytest.fixture
def bench(monkeypatch, timer):
    monkeypatch.setattr(timing, "Timer", lambda: timer)
    monkeypatch.setattr(timing, "REPEATS", 2)
    return main


@pytest.mark.skipif(not ON_CPU, reason="takes other batches on a GPU")
def test_command_line(tmp_path, capsys, bench):
    pytest.importorskip("matplotlib")
    file, earlier, picture = (str(tmp_path / name) for name in ("bench.json", "earlier.json", "bench.png"))
    name = "indexer_mxfp4 save prefill 16 float32"
    row = dict(zip(report.KEYS, (*name.split(), "xla"), strict=True), warm=1e-9)
    report.write(earlier, {"device": "", "launch": 1.0, "rows": [row]})
    arguments = ["--compressor", "indexer_mxfp4", "--op", "save", "--batch", "prefill:16"]
    arguments += ["--implementation", "xla", "--implementation", "cutedsl"]
    assert bench([*arguments, "--json", file, "--plot", picture, "--against", earlier]) == 0
    out = capsys.readouterr().out
    assert "only the ratios" in out and f"not measured: {name} cutedsl: " in out
    assert f"slower: {name} xla warm: 0.00 -> " in out and out.endswith(
        "\n1 of 1 times that both runs have got slower\n"
    )
    written = report.read(file)
    (row,) = written["rows"]
    assert report.name_of(row) == f"{name} xla" and row["bytes"] == 16 * 4096
    assert written["command"].startswith("python -m bench --compressor indexer_mxfp4")
    assert written["versions"]["jax"] == jax.__version__
    with open(picture, "rb") as image:
        assert image.read(4) == b"\x89PNG"


def test_a_run_that_is_stopped_leaves_its_rows(tmp_path, monkeypatch, capsys, bench):
    def measure(case, *_):
        if case.tokens == 2:
            raise ValueError("no memory")
        if case.tokens == 3:
            raise KeyboardInterrupt
        return case._asdict() | {"implementation": "xla", "bytes": 1, "floor": 1.0, "warm": 1.0, "compile": 0.1}

    monkeypatch.setattr(run, "measure", measure)
    file, batch = tmp_path / "bench.json", ["--op", "save", "--compressor", "csa", "--batch"]
    with pytest.raises(KeyboardInterrupt):
        bench([*batch, "prefill:1", *(x for t in (2, 4, 3) for x in ("--batch", f"prefill:{t}")), "--json", str(file)])
    assert [row["tokens"] for row in report.read(file)["rows"]] == [1, 4]
    assert "failed: csa save prefill 2 float32 None: ValueError: no memory" in capsys.readouterr().out
    assert bench([*batch, "prefill:2"]) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--batch", "prefill"], "a colon, and a number of tokens of at least 1"),
        (["--batch", "prefill:0"], "a number of tokens of at least 1"),
        (["--json", "{path}/none/bench.json"], "No such file or directory"),
        (["--against", "{path}/none.json"], "No such file or directory"),
        (["--against", "{path}/other.json"], "other.json is not a result of the bench"),
        (["--compressor", "hca_online", "--op", "save"], "no op takes such batches, compressors and dtypes"),
    ],
)
def test_bad_arguments(arguments, message, tmp_path, capsys, bench):
    (tmp_path / "other.json").write_text("[]")
    with pytest.raises(SystemExit) as stopped:
        bench([argument.format(path=tmp_path) for argument in arguments])
    assert stopped.value.code == 2 and message in capsys.readouterr().err


@pytest.mark.skipif(not ON_CPU, reason="has more rows on a GPU")
def test_bridge(tmp_path, monkeypatch, capsys, bench):
    pytest.importorskip("torch")
    monkeypatch.setattr(bridge, "REPLAYS", 2)
    file = tmp_path / "bridge.json"
    assert bench(["bridge", "--kind", "scan_small", "--json", str(file)]) == 0
    assert "no kernel is launched" in capsys.readouterr().out
    written = json.loads(file.read_text())
    assert [(row["op"], row["implementation"], row["kind"]) for row in written["rows"]] == [
        (op, implementation, kind)
        for op, implementation in (("add", "xla"), ("nothing", "buffer_callback"), ("add", "torch_call"))
        for kind in ("scan_small",)
    ]
    assert written["command"] == f"python -m bench bridge --kind scan_small --json {file}"


@pytest.mark.parametrize("kind", [bridge.Kind(ops=3), bridge.Kind(ops=4, unroll=2)])
@pytest.mark.parametrize("add", [bridge.add_by_xla, bridge.add_by_torch])
def test_programs_make_all_their_calls(add, kind):
    if add is bridge.add_by_torch:
        pytest.importorskip("torch")
    seen = {}
    recorder = types.SimpleNamespace(sampler=lambda *args, **options: seen.update(args=args))
    bridge.sampler(recorder, Workload(add, jnp.zeros((8, 2048)), (), 0), kind)
    program, carry, inputs, ops = seen["args"]
    assert ops == kind.ops and (program(carry, inputs) == kind.ops).all()


def test_xla_knows_the_options():
    for kind in (bridge.KINDS | bridge.LOOPS).values():
        assert jax.jit(lambda x: x + 1, compiler_options=kind.options)(1.0) == 2


def test_launches_can_be_taken_over():
    """The way to kernels alone: a launcher gets what the op would launch, and its results are the op's."""
    pytest.importorskip("triton")
    from dsv4_jax.common.ops.helpers.launch import launching_with

    seen = []

    def launcher(kernel, grid, updates, outputs, num_warps, constants, args):
        seen.append((kernel.__name__, updates))
        return tuple(args[name] + 1 for name in updates)

    workload = Case("save", "prefill", 16, "csa", "float32").workload()
    call = calls.find(workload)
    with launching_with(launcher):
        (states,) = call.op.implementations["triton"]()(*call.arguments(workload), **call.params)
    assert [(name, list(updates)) for name, updates in seen] == [("_save_kernel", ["state_cache"])]
    np.testing.assert_array_equal(states, workload.carry[0] + 1)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("case", "kernels"),
    [
        ("compress csa prefill:64", "_compress_store_kernel"),
        ("compress hca closing:8", "_compress_kernel _store_kernel"),
        ("compress hca_online decode:8", "_online_walk_kernel"),
        ("compress hca_fp8 prefill:2048 --implementation cutedsl", "_long_windows"),
        ("compress csa prefill:8192 --dtype bfloat16 --implementation cutedsl", "prefill_windows"),
        ("save hca prefill:64", "_save_kernel"),
        ("fused_q_kv_rmsnorm - tokens:64", "_q_kv_norm_kernel"),
    ],
)
def test_kernels_alone(case, kernels):
    command = [sys.executable, "-m", "bench", "alone", *case.split()]
    printed = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout
    assert " ".join(line.split(":")[0] for line in printed.splitlines()) == kernels


def test_alone_names_its_arguments(capsys):
    with pytest.raises(SystemExit):
        alone.main(["compress", "csa", "prefill:0"])
    assert "a number of tokens of at least 1" in capsys.readouterr().err
