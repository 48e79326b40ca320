"""The roofline: what each measurement moved a second, under what copies and launches allow."""

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.lines import Line2D

from dsv4_jax.bench.results import LABELS

INK, FAINT = "#22262b", "#7a818b"
MARKERS = {"compress": "o", "compress_all": "D", "store": "s", "save": "^"}
OTHER = "P"
WHERE = {"warm": "inputs in the L2 cache where they fit", "cold": "inputs out of the L2 cache"}


def plot(record: dict, output: str) -> None:
    """Writes a PNG with a panel for inputs warm and one for inputs cold in the L2 cache, where there are such.

    The line is the copy bandwidth, or what one launch lets through.

    Args:
      record: as `results.read` returns it.
      output: path of the PNG.
    """
    labels = [label for label in LABELS if any(label in row for row in record["rows"])] or ["warm"]
    figure, axes = plt.subplots(
        1, len(labels), figsize=(7 * len(labels) + 3, 6.5), squeeze=False, sharey=True, layout="constrained"
    )
    gigabytes = record["bandwidth"] / 1e9
    title = f"{record['device']}: {gigabytes:,.0f} GB/s copied, {record['launch']:.2f} µs a launch"
    figure.suptitle(title, color=INK, x=0.02, ha="left")
    names = list(dict.fromkeys(map(_name, record["rows"])))
    colors = {name: plt.get_cmap("turbo")((i + 0.5) / len(names)) for i, name in enumerate(names)}
    first = record["rows"][0]["implementation"] if record["rows"] else ""
    for axis, label in zip(axes[0], labels, strict=True):
        rows = [row for row in record["rows"] if label in row]
        moved = [row["bytes"] for row in rows] or [1e6]
        size = np.geomspace(min(moved) / 2, max(moved) * 2, 200)
        microseconds = np.maximum(size / record["bandwidth"] * 1e6, record["launch"])
        axis.plot(size / 1e6, size / microseconds / 1e3, color=FAINT, zorder=0)
        for row in rows:
            color = colors[_name(row)]
            axis.plot(
                row["bytes"] / 1e6,
                row["bytes"] / row[label] / 1e3,
                linestyle="none",
                marker=MARKERS.get(row["op"], OTHER),
                color=color,
                markerfacecolor=color if row["implementation"] == first else "none",
                markersize=4 if row["dtype"] == "bfloat16" else 7,
                alpha=0.8,
            )
        axis.set(xscale="log", yscale="log", xlabel="MB that the op must move", ylabel="GB/s")
        axis.set_title(WHERE[label], loc="left", fontsize=11, color=INK)
        axis.grid(alpha=0.25)
    ops = dict.fromkeys(row["op"] for row in record["rows"] if row["op"] in MARKERS)
    others = dict.fromkeys(row["implementation"] for row in record["rows"] if row["implementation"] != first)
    handles = [
        *(_entry(name, "s", color) for name, color in colors.items()),
        *(_entry(op, MARKERS[op], FAINT) for op in ops),
        _entry(first, "o", INK),
        *(_entry(name, "o", INK, hollow=True) for name in others),
        _entry("bfloat16 kv_score: small", "o", FAINT, size=4),
    ]
    figure.legend(handles=handles, fontsize=9, loc="outside right upper", frameon=False)
    figure.savefig(output, dpi=110)
    plt.close(figure)


def _name(row):
    """What a color stands for: a compressor, or an op around it."""
    return row["op"] if row["compressor"] == "-" else row["compressor"]


def _entry(name, marker, color, *, hollow=False, size=7):
    """A line of the legend."""
    face = "none" if hollow else color
    return Line2D(
        [], [], linestyle="none", label=name, marker=marker, color=color, markerfacecolor=face, markersize=size
    )
