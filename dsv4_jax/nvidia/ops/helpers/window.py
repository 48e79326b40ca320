"""CuTeDSL: the plan's entries, the rows of a window, the softmax-sum over them, and the rows to save.

A thread holds four neighboring channels of some of a window's rows.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64

from dsv4_jax.nvidia.ops.helpers.memory import BYTES, load, load4, load_int4, reciprocal, select, store4

INFINITY = float("inf")
LOG2_E = 1.4426950408889634


class Entry(NamedTuple):
    """An entry of the plan, and whether it may write: the plan is data and can be wrong."""

    row: Int32
    position: Int32
    slot: Int32
    in_batch: Int32
    valid: Boolean


class Rows(NamedTuple):
    """The window's elements that a thread holds: `first`, `first + step`, ... (`count` of them)."""

    first: Int32
    step: int
    count: int

    def element(self, i: int) -> Int32:
        return self.first + i * self.step


class Sum(NamedTuple):
    """A softmax-sum of some rows, for each of four channels: largest score, sum of weights, weighted sum of kv."""

    largest: list
    total: list
    weighted: list


def plan_entry(a, index: Int32, shape) -> Entry:
    """Entry `index` of `metadata.closing`."""
    return checked_entry(a, entry_numbers(a, index), shape)


def entry_numbers(a, index: Int32) -> tuple:
    """The four int32 of entry `index`, unchecked."""
    return load_int4(a.closing + Int64(index) * 16)


def checked_entry(a, numbers, shape) -> Entry:
    """The entry that four int32 of the plan are."""
    row, position, slot, in_batch = numbers
    m = shape.ratio
    valid = (row >= 0) & (row < a.tokens) & (slot >= 0) & (slot // shape.kv_page_rows < a.kv_pages)
    valid = valid & (position >= 0) & ((position + 1) % m == 0) & (position // m * m < a.table_rows)
    if shape.from_batch:
        valid = valid & (in_batch >= 1)  # the closing token itself
    return Entry(row, position, slot, in_batch, valid)


def is_whole(entry: Entry, shape) -> Boolean:
    """Whether all rows of a valid entry's window lie in the batch."""
    return (entry.in_batch >= shape.window) & (entry.row >= shape.window - 1)


@cute.jit
def load_window(
    a, index: Int32, entry: Entry, rows: cutlass.Constexpr, first: Int32, channel: Int32, kv, score, present,
    shape: cutlass.Constexpr,
):  # fmt: skip
    """Loads four channels of a thread's rows; an absent row has kv 0 and score -inf.

    Args:
      a: the kernel's `Arguments`.
      index, entry: of the window.
      rows: `(step, count)` of the elements from `first` on.
      channel: of the key, the first of four.
      kv, score: register tensors `[count, 4]` float32 that are filled.
      present: register tensor `[1]` int32: set to whether any of the rows is there.
      shape: the kernel's `Shape`.
    """
    step, count = rows
    held = Rows(first, step, count)
    if cutlass.const_expr(shape.from_batch):
        present[0] = Int32(1)
        if is_whole(entry, shape):
            # The common case of a prefill: nothing to look up, nothing to mask.
            _load_batch(a, entry, held, channel, kv, score, shape)
        else:
            load_mixed(a, index, entry, held, channel, kv, score, shape)
    else:
        present[0] = Int32(load_mixed(a, index, entry, held, channel, kv, score, shape))


def _load_batch(a, entry, rows, channel, kv, score, shape):
    bias = [load4(bias_address(a, rows.element(i), channel, shape), True) for i in range(rows.count)]
    for i in range(rows.count):
        at = batch_address(a, entry, rows.element(i), channel, shape)
        put(kv, i, load4(at, True, shape.dtype, once=True))
        put(score, i, load4(at + shape.width * BYTES[shape.dtype], True, shape.dtype, once=True))
    for i in range(rows.count):
        add(score, i, bias[i])


def load_mixed(a, index, entry, rows, channel, kv, score, shape):
    """Rows from the batch, from the state cache, or from nowhere; returns whether any is there."""
    slots = [load(a.window_slots + (Int64(index) * shape.window + rows.element(i)) * 4) for i in range(rows.count)]
    half = shape.width * 4  # bytes from kv to score in a row of float32
    in_batch, in_state = [], []
    for i, slot in enumerate(slots):
        back = shape.window - 1 - rows.element(i)
        from_batch = (back < entry.in_batch) & (back <= entry.row) if shape.from_batch else Boolean(False)
        in_batch.append(from_batch)
        in_state.append((slot >= 0) & (slot // shape.page_rows < a.state_pages) & ~from_batch)
    for i, slot in enumerate(slots):
        at = a.state_cache + Int64(slot) * (2 * half) + _column(rows.element(i), channel, shape) * 4
        there = in_state[i]
        if shape.from_batch and shape.dtype == "float32":
            # One load serves both, as both are of the same dtype.
            at = select(in_batch[i], batch_address(a, entry, rows.element(i), channel, shape), at)
            there = there | in_batch[i]
        put(kv, i, load4(at, there, once=True))
        put(score, i, load4(at + half, there, once=True))
        if shape.from_batch and shape.dtype != "float32":
            at = batch_address(a, entry, rows.element(i), channel, shape)
            put(kv, i, load4(at, in_batch[i], shape.dtype, once=True), in_batch[i])
            at = at + shape.width * BYTES[shape.dtype]
            put(score, i, load4(at, in_batch[i], shape.dtype, once=True), in_batch[i])
    found = Boolean(False)
    for i in range(rows.count):
        there = in_batch[i] | in_state[i]
        found = found | there
        if shape.from_batch:
            add(score, i, load4(bias_address(a, rows.element(i), channel, shape), in_batch[i]))
        put(score, i, [Float32(-INFINITY)] * 4, ~there)
    return found


def batch_address(a, entry, element, channel, shape):
    row = Int64(entry.row) - (shape.window - 1) + element
    return a.kv_score + (row * (2 * shape.width) + _column(element, channel, shape)) * BYTES[shape.dtype]


def bias_address(a, element, channel, shape):
    return a.ape + (Int64(element % shape.ratio) * shape.width + _column(element, channel, shape)) * 4


def _column(element, channel, shape):
    """With overlap the older half of a window reads the first D columns, the newer half the last."""
    if shape.overlap:
        channel = channel + select(element >= shape.ratio, Int32(shape.head_dim), Int32(0))
    return Int64(channel)


def put(rows, i, values, where=None):
    for j in range(4):
        rows[i, j] = values[j] if where is None else select(where, values[j], rows[i, j])


def add(rows, i, values):
    for j in range(4):
        rows[i, j] = rows[i, j] + values[j]


def softmax_sum(kv, score, count: int) -> Sum:
    """The softmax-sum of rows `[count, 4]`."""
    result = Sum([], [], [])
    for j in range(4):
        largest = score[0, j]
        for i in range(1, count):
            largest = cute.arch.fmax(largest, score[i, j])
        reference = _reference(largest)
        total = weighted = None
        for i in range(count):
            weight = _exp(score[i, j] - reference)
            total = weight if total is None else total + weight
            weighted = weight * kv[i, j] if weighted is None else weighted + weight * kv[i, j]
        result.largest.append(largest)
        result.total.append(total)
        result.weighted.append(weighted)
    return result


def join(x: Sum, y: Sum) -> Sum:
    """The softmax-sum of the rows of both."""
    result = Sum([], [], [])
    for j in range(4):
        largest = cute.arch.fmax(x.largest[j], y.largest[j])
        reference = _reference(largest)
        scale_x, scale_y = _exp(x.largest[j] - reference), _exp(y.largest[j] - reference)
        result.largest.append(largest)
        result.total.append(x.total[j] * scale_x + y.total[j] * scale_y)
        result.weighted.append(x.weighted[j] * scale_x + y.weighted[j] * scale_y)
    return result


def shuffled(x: Sum, lanes: int) -> Sum:
    """The sum that the thread `lanes` away (by exclusive or) holds."""
    return Sum(*([cute.arch.shuffle_sync_bfly(value, lanes) for value in values] for values in x))


def quotient(x: Sum) -> list:
    """The compressed channels: NaN where they are not finite."""
    found = []
    for total, weighted in zip(x.total, x.weighted, strict=True):
        c = weighted * reciprocal(total)
        found.append(select(cute.math.absf(c) < Float32(INFINITY), c, Float32(float("nan"))))
    return found


def _reference(largest):
    # While all scores are -inf, differences from it must not become inf - inf.
    return select(largest == Float32(-INFINITY), Float32(0), largest)


def _exp(x):
    return cute.math.exp2(x * Float32(LOG2_E), fastmath=True)


def saved_by_cta(threads: int, shape) -> int:
    """Rows that a CTA saves at once: eight loads in flight in each thread."""
    return 8 * 4 * threads // (2 * shape.width)


def save_rows(a, portion: Int32, thread: Int32, threads: int, shape) -> None:
    """Saves the states of one CTA's portion of the rows that the plan (save="tail") or the batch ("all") has."""
    count, pieces = saved_by_cta(threads, shape), 2 * shape.width // (4 * threads)
    sources, targets, biases, valids = [], [], [], []
    for i in range(count):
        index = portion * count + i
        listed = index < a.saved
        if shape.save == "tail":
            at = a.saving + Int64(index) * 12
            row, position, slot = (load(at + 4 * j, Int32, listed) for j in range(3))
        else:
            row, at = index, Int64(index) * 4
            position, slot = (load(base + at, Int32, listed) for base in (a.positions, a.slot_mapping))
        valid = listed & (row >= 0) & (row < a.tokens) & (position >= 0)
        valid = valid & (slot >= 0) & (slot // shape.page_rows < a.state_pages)
        for piece in range(pieces):
            column = Int64((piece * threads + thread) * 4)
            valids.append(valid)
            sources.append(a.kv_score + (Int64(row) * (2 * shape.width) + column) * BYTES[shape.dtype])
            targets.append(a.state_cache + (Int64(slot) * (2 * shape.width) + column) * 4)
            biases.append(a.ape + (Int64(position % shape.ratio) * shape.width + column - shape.width) * 4)
    values = [load4(at, valid, shape.dtype) for at, valid in zip(sources, valids, strict=True)]
    for i, (value, bias, target, valid) in enumerate(zip(values, biases, targets, valids, strict=True)):
        is_score = (i % pieces * threads + thread) * 4 >= shape.width
        added = load4(bias, valid & is_score)
        # kv is moved, not added to: -0 + 0 is 0.
        value = [select(is_score, v + b, v) for v, b in zip(value, added, strict=True)]
        store4(target, value, valid)
