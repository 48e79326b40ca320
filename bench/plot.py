"""The roofline: what each measurement moved per second, under what copies and launches allow."""

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.lines import Line2D

from bench.report import LABELS

MARKERS = {"xla": "^", "triton": "o", "cutedsl": "s"}
WHERE = {"warm": "inputs in the L2 cache where they fit", "cold": "inputs out of the L2 cache"}


def plot(record: dict, output: str) -> None:
    """Writes a PNG with a panel for warm inputs and one for cold inputs.

    The line is the copy bandwidth, or what one launch lets through. A color is a compressor or an op around it, a
    marker an implementation.

    Args:
      record: as `report.read` returns it.
      output: path of the PNG.
    """
    labels = [label for label in LABELS if any(label in row for row in record["rows"])] or ["warm"]
    figure, axes = plt.subplots(
        1, len(labels), figsize=(7 * len(labels) + 3, 6.5), squeeze=False, sharey=True, layout="constrained"
    )
    bandwidth, launch = record["bandwidth"], record["launch"]
    figure.suptitle(f"{record['device']}: {bandwidth / 1e9:,.0f} GB/s copied, {launch:.2f} µs per launch")
    names = list(dict.fromkeys(map(_name, record["rows"])))
    colors = {name: plt.get_cmap("turbo")((i + 0.5) / len(names)) for i, name in enumerate(names)}
    for axis, label in zip(axes[0], labels, strict=True):
        rows = [row for row in record["rows"] if label in row]
        moved = [row["bytes"] for row in rows] or [1e6]
        size = np.geomspace(min(moved) / 2, max(moved) * 2, 200)
        axis.plot(size / 1e6, size / np.maximum(size / bandwidth * 1e6, launch) / 1e3, color="gray", zorder=0)
        for row in rows:
            speed = row["bytes"] / row[label] / 1e3
            axis.plot(row["bytes"] / 1e6, speed, MARKERS[row["implementation"]], color=colors[_name(row)], alpha=0.8)
        axis.set(xscale="log", yscale="log", xlabel="MB that the op must move", ylabel="GB/s", title=WHERE[label])
        axis.grid(alpha=0.25)
    used = dict.fromkeys(row["implementation"] for row in record["rows"])
    entries = [(name, "o", color) for name, color in colors.items()] + [(name, MARKERS[name], "gray") for name in used]
    handles = [Line2D([], [], linestyle="none", label=name, marker=m, color=color) for name, m, color in entries]
    figure.legend(handles=handles, fontsize=9, loc="outside right upper", frameon=False)
    figure.savefig(output, dpi=110)
    plt.close(figure)


def _name(row):
    """What a color stands for."""
    return row["op"] if row["compressor"] == "-" else f"{row['compressor']} {row['op']} {row['dtype']}"
