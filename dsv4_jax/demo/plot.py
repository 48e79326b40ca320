"""The picture: the cache's keys, the exact keys, and the error between them."""

import itertools

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np

INK, FAINT, ROPE = "#22262b", "#7a818b", "#e0892b"
MOST_KEYS = 96  # more would be too small to see


def plot(verdicts: dict, lengths: list[int], output: str) -> None:
    """Writes a PNG with one row of three panels per compressor.

    Args:
      verdicts: by the compressor's name, its config and `exact.Verdict`.
      lengths: the length of each request in tokens.
      output: path of the PNG.
    """
    plt.rcParams.update({"text.color": INK, "axes.labelcolor": INK, "xtick.color": INK, "ytick.color": INK})
    figure, axes = plt.subplots(
        len(verdicts), 3, figsize=(16, 3 * len(verdicts) + 0.8), layout="constrained", squeeze=False
    )
    figure.suptitle(
        f"Compressed keys of {sum(lengths)} tokens in {len(lengths)} requests: the cache's bytes decoded, "
        "and what they stand for",
        fontsize=15,
    )
    for row, (name, (config, verdict)) in zip(axes, verdicts.items(), strict=True):
        windows = [n // config.compress_ratio for n in lengths]
        edges = [edge for edge in itertools.accumulate(windows[:-1]) if 0 < edge < MOST_KEYS]
        largest = np.percentile(np.abs(verdict.exact), 98) if verdict.exact.size else 1.0
        colors = {"cmap": "RdBu_r", "vmin": -largest, "vmax": largest}
        _panel(row[0], verdict.values, edges, config, **colors)
        keys = _panel(row[1], verdict.exact, edges, config, **colors)
        error = _panel(row[2], verdict.error, edges, config, cmap="magma", vmin=0, vmax=1)
        shown = min(len(verdict.exact), MOST_KEYS)
        row[0].set_ylabel(f"{name}\nkeys 0-{shown - 1} of {len(verdict.exact)}" if shown else name, fontsize=11)
        titles = (f"cache, {config.cache_format}", "exact, float64", "error as a fraction of the allowed rounding")
        for panel, title in zip(row, titles, strict=True):
            panel.set_title(title, fontsize=11, loc="left", pad=9)
        for panel, image in ((row[1], keys), (row[2], error)):
            bar = figure.colorbar(image, ax=panel, pad=0.01, aspect=18)
            bar.ax.tick_params(labelsize=8)
            bar.outline.set_visible(False)
    for panel in axes[-1]:
        panel.set_xlabel("channel (orange: turned by RoPE)", fontsize=9)
    figure.savefig(output, dpi=110)
    plt.close(figure)


def _panel(axis, image, edges, config, **colors):
    """A heat map with one row per key, and a line where a request ends."""
    image = image[:MOST_KEYS]
    drawn = axis.imshow(
        image if image.size else np.zeros((1, config.head_dim)), aspect="auto", interpolation="nearest", **colors
    )
    if not image.size:
        axis.text(0.5, 0.5, "no window closed", ha="center", va="center", transform=axis.transAxes, color=FAINT)
    for edge in edges:
        axis.axhline(edge - 0.5, color=INK, linewidth=0.8)
    rope = [config.head_dim - config.rope_head_dim - 0.5, config.head_dim - 0.5]
    axis.plot(rope, [1.015, 1.015], transform=axis.get_xaxis_transform(), color=ROPE, linewidth=3, clip_on=False)
    axis.set_xticks(range(0, config.head_dim, config.head_dim // 8))
    axis.yaxis.get_major_locator().set_params(integer=True)
    axis.tick_params(labelsize=8, length=2)
    axis.spines[:].set_visible(False)
    return drawn
