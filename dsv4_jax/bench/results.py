"""What a run of the bench leaves: its JSON, Markdown tables of it, and what got slower since another."""

import datetime
import json
import os
import platform
import re
import shlex
import subprocess
from pathlib import Path

import jax

import dsv4_jax
from dsv4_jax import platforms

PACKAGES = ("jax", "jaxlib", "jax-triton", "triton", "torch", "nvidia-cutlass-dsl")
LABELS = ("warm", "cold")
MOST_COLUMNS = 8  # of a table; with more, each kind of batch has its own


def new_record(timer, argv: list[str]) -> dict:
    """A record without rows: the machine, what was measured of it, versions, command and date."""
    versions = {package: version for package in PACKAGES if (version := platforms.installed(package))}
    device = jax.devices()[0]
    return {
        "device": device.device_kind,
        "platform": device.client.platform_version.strip().splitlines()[-1],
        "driver": _driver(),
        "bandwidth": timer.bandwidth,
        "launch": timer.launch,
        "versions": {"dsv4-jax": dsv4_jax.__version__, "python": platform.python_version(), **versions},
        "command": shlex.join(["python", "-m", "dsv4_jax", "bench", *argv]),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "rows": [],
        "left_out": [],
    }


def write(file: str, record: dict) -> None:
    """Writes the JSON; a run that is killed meanwhile leaves the one before."""
    Path(f"{file}.part").write_text(json.dumps(record, indent=1) + "\n")
    os.replace(f"{file}.part", file)


def read(file: str) -> dict:
    """Reads a JSON that `write` wrote; ValueError where it is another."""
    record = json.loads(Path(file).read_text())
    if not isinstance(record, dict) or not {"device", "driver", "bandwidth", "launch", "rows"} <= record.keys():
        raise ValueError(f"{file} is not a result of the bench")
    return record


def name_of(row: dict) -> str:
    """What was measured, in words: the same for the same measurement of another run."""
    return " ".join(str(row[key]) for key in ("compressor", "op", "kind", "tokens", "dtype", "implementation"))


def compare(rows: list[dict], earlier: list[dict], tolerance: float = 0.05) -> list[str]:
    """A line for each time that is longer than the same one was earlier, by more than `tolerance`; last, how many."""
    before = {name_of(row): row for row in earlier}
    pairs = [
        (f"{name_of(row)} {label}", old[label], row[label])
        for row in rows
        if (old := before.get(name_of(row)))
        for label in LABELS
        if label in row and label in old
    ]
    slower = [f"slower: {name}: {old:.2f} -> {new:.2f} us" for name, old, new in pairs if new > old * (1 + tolerance)]
    return [*slower, f"{len(slower)} of {len(pairs)} times that both runs have got slower"]


def tables(record: dict) -> str:
    """The record in Markdown: a table for each op and dtype, one for the ops around the compressor."""
    groups = {}
    for row in record["rows"]:
        groups.setdefault((row["op"] if row["compressor"] != "-" else "-", row["dtype"]), []).append(row)
    text = [_machine(record)]
    for (op, dtype), rows in groups.items():
        title = "op" if op == "-" else f"`{op}`, {dtype} `kv_score`"
        if len({(row["kind"], row["tokens"]) for row in rows}) <= MOST_COLUMNS:
            text.append(_table(title, rows))
            continue
        for kind in dict.fromkeys(row["kind"] for row in rows):
            text.append(_table(title, [row for row in rows if row["kind"] == kind]))
    return "\n\n".join(text)


def _machine(record):
    versions = ", ".join(f"{package} {version}" for package, version in record["versions"].items())
    driver = f", driver {record['driver']}" if record["driver"] else ""
    slowest = max(record["rows"], key=lambda row: row["compile"], default=None)
    compilation = f" Compilation of one call took at most {slowest['compile']:.1f} s." if slowest else ""
    speed = f"Copy bandwidth {record['bandwidth'] / 1e12:.2f} TB/s read plus written, launch {record['launch']:.2f} µs."
    return (
        f"{record['device']}{driver}; {versions}; {record['date'][:10]}. {speed}{compilation} "
        f"Command: `{record['command']}`."
    )


def _table(title, rows):
    batches = sorted({(row["kind"], row["tokens"]): None for row in rows}, key=lambda batch: batch[0] != "prefill")
    lines = [f"| {title}, µs (floor ÷ time) | " + " | ".join(f"{kind} {t:,}" for kind, t in batches) + " |"]
    lines.append("|---" * (1 + len(batches)) + "|")
    series = {}
    for row in rows:
        name = row["compressor"] if row["compressor"] != "-" else f"`{row['op']}`"
        series.setdefault(f"{name} {row['implementation']}", {})[row["kind"], row["tokens"]] = row
    for name, own in series.items():
        for label in LABELS:
            cells = [_cell(own.get(batch, {}), label) for batch in batches]
            if any(cells):
                lines.append(f"| {name} {label} | " + " | ".join(cell or "-" for cell in cells) + " |")
    return "\n".join(lines)


def _cell(row, label):
    return f"{row[label]:.2f} ({row['floor'] / row[label]:.2f})" if label in row else None


def _driver():
    """The NVIDIA driver's version, None where it cannot be told."""
    try:
        found = re.search(r"Kernel Module.*?(\d+\.\d[\d.]*)", Path("/proc/driver/nvidia/version").read_text())
        if found:
            return found[1]
    except OSError:
        pass
    try:
        command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        return None
