"""What a run leaves: its JSON, what got slower since another, and Markdown tables in the docs."""

import argparse
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
KEYS = ("compressor", "op", "kind", "tokens", "dtype", "implementation")  # what names a row
MARKS = {"cutedsl": " †"}


def new_record(timer, argv: list[str]) -> dict:
    """A record without rows: the machine, what was measured of it, versions, command and date.

    A row has the `KEYS`, and for each of the `LABELS` that was measured its microseconds and `<label>_spread`.
    """
    versions = {package: version for package in PACKAGES if (version := platforms.installed(package))}
    device = jax.devices()[0]
    return {
        "device": device.device_kind,
        "platform": device.client.platform_version.strip().splitlines()[-1],
        "driver": _driver(),
        "bandwidth": timer.bandwidth,
        "launch": timer.launch,
        "versions": {"dsv4-jax": dsv4_jax.__version__, "python": platform.python_version(), **versions},
        "command": shlex.join(["python", "-m", "bench", *argv]),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "rows": [],
    }


def _driver():
    """The NVIDIA driver's version, None where it cannot be told."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        return None


def write(file: str | Path, record: dict) -> None:
    """Writes the JSON; a run that is killed meanwhile leaves the one before."""
    Path(f"{file}.part").write_text(json.dumps(record, indent=1) + "\n")
    os.replace(f"{file}.part", file)


def read(file: str | Path) -> dict:
    """Reads a JSON that `write` wrote; ValueError where it is another."""
    record = json.loads(Path(file).read_text())
    if not isinstance(record, dict) or not {"device", "launch", "rows"} <= record.keys():
        raise ValueError(f"{file} is not a result of the bench")
    return record


def name_of(row: dict) -> str:
    """What was measured, in words: the same for the same measurement in another run."""
    return " ".join(str(row[key]) for key in KEYS)


def compare(rows: list[dict], earlier: list[dict], tolerance: float = 0.03) -> list[str]:
    """A line for each time that is longer than in the earlier run by more than `tolerance`; last, how many."""
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


def main(argv: list[str]) -> int:
    """`python -m bench tables PAGE`."""
    parser = argparse.ArgumentParser(
        prog="python -m bench tables",
        description="Makes a page's tables anew from the JSON files that each one's marker names: "
        "<!-- table warm FILE... -->, old table, <!-- end -->. Instead of warm: cold, or implementations.",
    )
    parser.add_argument("page", type=Path, nargs="+")
    for page in parser.parse_args(argv).page:
        page.write_text(with_tables(page))
    return 0


def with_tables(page: Path) -> str:
    """The text of a page, with every table between markers made from its JSON files, which are named from the page."""

    def make(match):
        records = [read(page.parent / name) for name in match[3].split()]
        return f"{match[1]}{table(records, match[2])}\n{match[4]}"

    pattern = r"(<!-- table (warm|cold|implementations) ([^>]*?) -->\n).*?(<!-- end -->)"
    return re.sub(pattern, make, page.read_text(), flags=re.DOTALL)


def table(records: list[dict], form: str = "warm") -> str:
    """The rows of some runs as one Markdown table, a column per batch. A later run's rows replace an earlier one's.

    Args:
      records: as `read` returns them.
      form: "warm" or "cold": these times, with floor divided by time unless the floor is below that of a launch, and
        with the implementation's mark. "implementations": warm, with a line per implementation.
    """
    label = "cold" if form == "cold" else "warm"
    keys = ("op", "compressor", "dtype") + (("implementation",) if form == "implementations" else ())
    cells, lines, batches = {}, {}, {}
    for record in records:
        for row in record["rows"]:
            if label in row:
                line, batch = tuple(row[key] for key in keys), (row["kind"], row["tokens"])
                cells[line, batch] = _cell(row, label, record["launch"], form)
                lines[line] = batches[batch] = None
    # What all lines share goes into the title.
    shared = [len({line[i] for line in lines}) == 1 for i in range(len(keys))]
    name = lambda line, of: ", ".join(x for x, s in zip(line, shared, strict=True) if s == of and x != "-")
    title = ", ".join(filter(None, [name(next(iter(lines)), True), label, "µs"]))
    kinds = list(dict.fromkeys(kind for kind, _ in batches))
    columns = sorted(batches, key=lambda batch: (kinds.index(batch[0]), batch[1]))
    heads = [title, *(f"{kind} {tokens:,}".replace(",", " ") for kind, tokens in columns)]
    text = [heads, ["---"] * len(heads)]
    text += [[name(line, False), *(cells.get((line, batch), "") for batch in columns)] for line in lines]
    return "\n".join("| " + " | ".join(line) + " |" for line in text)


def _cell(row, label, launch, form):
    time = f"{row[label]:,.{0 if row[label] > 99.95 else 1}f}".replace(",", " ")
    if form == "implementations":
        return time
    share = f" ({row['floor'] / row[label]:.2f})" if row.get("floor", 0) > launch else ""
    return time + share + MARKS.get(row["implementation"], "")
