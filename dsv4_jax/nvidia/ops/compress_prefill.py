"""Compressors in CuTeDSL for long prefills: each CTA loops over windows with a grid stride, and prefetches rows.

A CTA of 128 threads, four channels each, folds eight rows at a time: a window of CSA, a sixteenth of one of HCA.
Meanwhile it copies the next eight rows into shared memory. A thread reads only what it or its neighbor has copied, so a
CTA synchronizes once per window, for RMSNorm. Few threads keep rows in flight all the time, in one launch.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from dsv4_jax.nvidia.ops.helpers import launch
from dsv4_jax.nvidia.ops.helpers.launch import Arguments
from dsv4_jax.nvidia.ops.helpers.memory import BYTES, await_copies, copy16, load4, load_shared4, select
from dsv4_jax.nvidia.ops.helpers.norm_rope import HALF_WARPS, load_factors, norm_rope, squares_of_cta
from dsv4_jax.nvidia.ops.helpers.quantize_store import store_key
from dsv4_jax.nvidia.ops.helpers.window import (
    INFINITY,
    Entry,
    Rows,
    Sum,
    add,
    batch_address,
    bias_address,
    checked_entry,
    entry_numbers,
    is_whole,
    join,
    load_mixed,
    plan_entry,
    put,
    quotient,
    save_rows,
    saved_by_cta,
    softmax_sum,
)

THREADS = 128
ROWS = 8  # folded at once
CARVEOUT = 60  # percent of the L1 cache that are shared memory, for float32 rows; the rest is for the bias
MULTIPROCESSORS = 132  # of an H200; on another GPU there are a few CTAs too few or too many
LEAST_ROWS = 16384  # of all windows together; with fewer there are not enough CTAs


def serves(shape) -> bool:
    """Whether eight rows are a whole window, or of one half of an overlapping one."""
    return shape.window == ROWS or shape.ratio % ROWS == 0


def pays(shape, tokens: int) -> bool:
    """Whether a prefill takes less time by this kernel than by those for any batch.

    Measured on an H200, for CSA and HCA.
    """
    # float32 rows of short windows fill the memory's pipe without it.
    return tokens // shape.ratio * shape.window >= LEAST_ROWS and (shape.window > ROWS or shape.dtype == "bfloat16")


def resident(windows: int) -> int:
    """CTAs of a multiprocessor: with more, each has fewer registers."""
    return 3 if windows <= 3 * MULTIPROCESSORS else 4


def blocks(windows: int) -> int:
    """CTAs of a launch."""
    return min(windows, resident(windows) * MULTIPROCESSORS)


@cute.jit
def prefill_windows(a: Arguments, stream: launch.STREAM, shape: cutlass.Constexpr):
    prefill_kernel(a, shape).launch(
        grid=[a.blocks, 1, 1],
        block=[THREADS, 1, 1],
        smem=ROWS * 2 * THREADS * 4 * BYTES[shape.dtype],
        min_blocks_per_mp=shape.resident,
        preferred_smem_carveout=CARVEOUT,
        stream=stream,
    )


@cute.kernel
def prefill_kernel(a: Arguments, shape: cutlass.Constexpr):
    """Steps of eight rows, over the windows of a CTA; then the states that it saves."""
    thread, block = cute.arch.thread_idx()[0], cute.arch.block_idx()[0]
    channel = thread * 4
    folds = shape.window // ROWS
    stage = cute.arch.get_dyn_smem(Float32, 128).toint() + thread * (4 * BYTES[shape.dtype])
    squares = cute.arch.alloc_smem(Float32, 2 * HALF_WARPS)
    kv = cute.make_rmem_tensor((ROWS, 4), Float32)
    score = cute.make_rmem_tensor((ROWS, 4), Float32)
    bias = cute.make_rmem_tensor((ROWS, 4), Float32)
    folded = cute.make_rmem_tensor((3, 4), Float32)
    current = cute.make_rmem_tensor(4, Int32)  # the entry whose rows are copied
    following = cute.make_rmem_tensor(4, Int32)  # the numbers of the one after it, loaded long before they are needed
    _store_entry(current, plan_entry(a, block, shape), True)
    _load_entry(a, following, block + a.blocks)
    _copy(a, _stored_entry(current), Int32(0), channel, stage, shape)
    place = Int32(0)
    for step in range((a.windows - block + a.blocks - 1) // a.blocks * folds):
        index, first = block + step // folds * a.blocks, step % folds * ROWS
        entry = _stored_entry(current)
        is_last = first == (folds - 1) * ROWS
        if is_last:
            _store_entry(
                current, checked_entry(a, [following[i] for i in range(4)], shape), index + a.blocks < a.windows
            )
            _load_entry(a, following, index + 2 * a.blocks)
        if cutlass.const_expr(folds == 1):  # before the wait; long windows need them once in many steps
            factors = load_factors(a, select(entry.valid, entry.position, Int32(0)), channel, shape)
        # Load the bias also where no window closes: behind a branch, these loads would not overlap the wait.
        _load_bias(a, bias, first, channel, shape)
        await_copies()
        _meet(shape)
        if is_whole(entry, shape):
            _read_with_bias(kv, score, bias, stage, shape)
        else:
            if entry.valid:
                load_mixed(a, index, entry, Rows(first, 1, ROWS), channel, kv, score, shape)
        _meet(shape)
        _copy(a, _stored_entry(current), (step + 1) % folds * ROWS, channel, stage, shape)
        if entry.valid:
            part = softmax_sum(kv, score, ROWS)
            if cutlass.const_expr(folds > 1):
                if first == 0:
                    _put_sum(folded, Sum([Float32(-INFINITY)] * 4, [Float32(0)] * 4, [Float32(0)] * 4))
                part = join(Sum(*([folded[i, j] for j in range(4)] for i in range(3))), part)
                _put_sum(folded, part)
            if is_last:
                of_key = factors if folds == 1 else load_factors(a, entry.position, channel, shape)
                c = quotient(part)
                total = squares_of_cta(squares + place, c)
                # The next window uses the other place: a warp may get there while another still reads this one.
                place = place ^ HALF_WARPS
                store_key(a, norm_rope(c, total, of_key, shape), channel, entry.slot, True, shape)
    count = saved_by_cta(THREADS, shape)
    for portion in range(block, (a.saved + count - 1) // count, a.blocks):
        save_rows(a, portion, thread, THREADS, shape)


def _load_entry(a, into, index: Int32) -> None:
    """The numbers of entry `index`; past the last one, of any."""
    numbers = entry_numbers(a, select(index < a.windows, index, Int32(0)))
    for i in range(4):
        into[i] = numbers[i]


def _store_entry(into, entry: Entry, listed) -> None:
    """Its numbers, where it may write; else such as no entry has."""
    for i in range(4):
        into[i] = select(entry.valid & listed, entry[i], Int32(-1))


def _stored_entry(held) -> Entry:
    """What `_store_entry` has put there."""
    return Entry(*(held[i] for i in range(4)), held[0] >= 0)


def _sharers(shape) -> int:
    """Threads whose channels one copy of sixteen bytes holds; they take turns in copying rows."""
    return 4 // BYTES[shape.dtype]


def _meet(shape) -> None:
    """Waits for the threads that copy for one another."""
    if _sharers(shape) > 1:
        cute.arch.sync_warp()


def _copy(a, entry: Entry, first: Int32, channel: Int32, stage: Int32, shape) -> None:
    """Begins to copy rows `first` to `first + ROWS - 1` of a window, if it is whole."""
    size, sharers = 4 * BYTES[shape.dtype], _sharers(shape)  # bytes of a thread's channels
    turn = cute.arch.thread_idx()[0] % sharers
    row_bytes = 2 * shape.width * BYTES[shape.dtype]
    whole = is_whole(entry, shape)
    source = batch_address(a, entry, first, channel - 4 * turn, shape) + Int64(turn) * row_bytes
    # In the row that this thread copies, the place of the first sharer's channels.
    target = stage + turn * (2 * THREADS - 1) * size
    for i in range(0, ROWS, sharers):
        at, into = i * row_bytes, 2 * i * THREADS * size
        if shape.overlap and i >= shape.ratio:  # the newer half, where all of a window is copied at once
            at += shape.head_dim * BYTES[shape.dtype]
        copy16(target, source, whole, into=into, at=at)
        copy16(target, source, whole, into=into + THREADS * size, at=at + row_bytes // 2)


def _read_with_bias(kv, score, bias, stage: Int32, shape) -> None:
    """What was copied into registers, the bias added."""
    row_bytes = THREADS * 4 * BYTES[shape.dtype]  # of kv, and of score
    for i in range(ROWS):
        put(kv, i, load_shared4(stage, shape.dtype, at=2 * i * row_bytes))
        put(score, i, load_shared4(stage, shape.dtype, at=(2 * i + 1) * row_bytes))
    for i in range(ROWS):
        add(score, i, [bias[i, j] for j in range(4)])


def _load_bias(a, bias, first: Int32, channel: Int32, shape) -> None:
    rows = Rows(first, 1, ROWS)
    for i in range(ROWS):
        put(bias, i, load4(bias_address(a, rows.element(i), channel, shape), True))


def _put_sum(folded, total: Sum) -> None:
    for i in range(3):
        for j in range(4):
            folded[i, j] = total[i][j]
