"""Runs the demo and reports a table, a picture and an exit code."""

import importlib.resources
import os
import sys
import time
from pathlib import Path

import jax
import numpy as np

from dsv4_jax import platforms
from dsv4_jax.api.compress import OP
from dsv4_jax.demo import engine, exact
from dsv4_jax.demo.checkpoint import checkpoint_weights
from dsv4_jax.demo.weights import BadInput, random_weights


def main(
    text: str | None = None,
    *,
    checkpoint: str | None = None,
    implementation: str | None = None,
    output: str = "demo.png",
    tokens: int = 2048,
    layer: int = 0,
) -> int:
    """Returns 0 if every byte is right, 1 if one is not, 2 if the input is unusable."""
    start = time.perf_counter()
    try:
        name, content = _read_text(text)
        implementation = _checked_implementation(implementation)
        _check_output(output)
        compressors = checkpoint_weights(checkpoint, layer) if checkpoint else random_weights()
    except BadInput as error:
        print(f"demo: {error}", file=sys.stderr)
        return 2

    requests = engine.split(np.frombuffer(content[:tokens], np.uint8))
    lengths = [len(r) for r in requests]
    weights = f"weights of {checkpoint}" if checkpoint else "random weights"
    print(f"{sum(lengths)} byte tokens of {name} as {len(requests)} requests of {lengths}, {weights}")

    progress = Progress(len(compressors) * len(engine.schedule(lengths)))
    verdicts = {}
    for kind, (config, w) in compressors.items():
        result = engine.run(config, w, requests, implementation, lambda kind=kind: progress.step(kind))
        verdicts[kind] = (config, _check(config, w, result))
    progress.finish()

    _print_table(verdicts, sum(lengths), implementation)
    faults = [f"{kind}: {fault}" for kind, (_, verdict) in verdicts.items() for fault in verdict.faults]
    for fault in faults:
        print(f"FAULT  {fault}")
    if not faults:
        print("Every stored value is within the rounding of its format, and no other byte of a cache changed.")
    _plot(verdicts, lengths, output)
    print(f"{time.perf_counter() - start:.1f} s")
    return 1 if faults else 0


class Progress:
    """A progress bar: redrawn on a terminal, printed at every quarter elsewhere."""

    WIDTH = 30

    def __init__(self, total: int, stream=None):
        self.total, self.done = total, 0
        self.stream = sys.stdout if stream is None else stream
        self.terminal = self.stream.isatty()

    def step(self, label: str) -> None:
        """Counts one more step as done."""
        before = self.done
        self.done += 1
        if not self.terminal and self.done * 4 // self.total == before * 4 // self.total:
            return
        filled = self.done * self.WIDTH // self.total
        bar = "#" * filled + "-" * (self.WIDTH - filled)
        line = f"[{bar}] {self.done * 100 // self.total:3} %  {label}"
        self.stream.write(f"\r{line:<79}" if self.terminal else line + "\n")
        self.stream.flush()

    def finish(self) -> None:
        """Ends the bar's line."""
        if self.terminal:
            self.stream.write("\n")


def _read_text(path):
    if path is None:
        return "the demo's own text", importlib.resources.files(__package__).joinpath("text.txt").read_bytes()
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise BadInput(f"{path}: {error.strerror}") from error
    if not content:
        raise BadInput(f"{path} is empty")
    try:
        binary = "\0" in content.decode()
    except UnicodeDecodeError:
        binary = True
    if binary:
        raise BadInput(f"{path} is not a text in UTF-8")
    return path, content


def _checked_implementation(name):
    try:
        name = name or platforms.default_implementation()
    except ValueError as error:
        raise BadInput(str(error)) from error
    if name and (why := platforms.why_not(name, platforms.default_target())):
        raise BadInput(f"implementation {name!r} cannot run here: {why}")
    return name


def _check_output(output):
    path = Path(output)
    if path.suffix.lower() != ".png":
        raise BadInput(f"--output is {output}; it must end in .png")
    if path.is_dir() or not path.absolute().parent.is_dir() or not os.access(path.absolute().parent, os.W_OK):
        raise BadInput(f"--output is {output}; it cannot be written there")


def _check(config, weights, result):
    made = [exact.keys(kv_score, weights.ape, weights.norm, config) for kv_score in result.kv_score]
    keys, slack = (np.concatenate(parts) for parts in zip(*made, strict=True))
    return exact.check(result.before, result.after, np.concatenate(result.slots), keys, slack, config)


def _print_table(verdicts, tokens, implementation):
    target = platforms.default_target()
    chosen = implementation or OP.choose(target)
    rows = [("compressor", "format", "tokens", "keys", "bytes/token", "as bf16*", "smaller", "worst error**", "")]
    for kind, (config, verdict) in verdicts.items():
        stored = config.format.row_bytes / config.compress_ratio
        plain = 2 * config.head_dim
        worst = f"{verdict.error.max():.3f}" if verdict.error.size else "no key yet"
        state = "WRONG" if verdict.faults else "ok"
        sizes = (f"{stored:.1f}", str(plain), f"{plain / stored:.0f}x")
        rows.append((kind, config.cache_format, str(tokens), str(len(verdict.exact)), *sizes, worst, state))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    print()
    for row in rows:
        left = [cell.ljust(width) for cell, width in zip(row[:2], widths[:2], strict=True)]
        right = [cell.rjust(width) for cell, width in zip(row[2:], widths[2:], strict=True)]
        print("  ".join(left + right).rstrip())
    print(f"implementation {chosen} on {target.platform} ({jax.devices()[0].device_kind}), jax {jax.__version__}")
    print("*  a bfloat16 vector of the same channels for every token; page padding is not counted")
    print("** of any value, as a fraction of what its format's rounding allows; 1 is a tie between two of its values")
    print()


def _plot(verdicts, lengths, output):
    try:
        from dsv4_jax.demo.plot import plot
    except ImportError:
        print("No picture: matplotlib is not installed; pip install 'dsv4-jax[demo]'.")
        return
    plot(verdicts, lengths, output)
    print(f"Wrote {output}")
