"""The head_dim 512 compressors (CSA, HCA) in CuTeDSL for NVIDIA GPUs of compute capability 9.0 and newer.

One launch goes from scores to bytes. For a short window (CSA) a CTA of 128 threads holds the whole window in registers,
four channels per thread, and stores its key. A cluster of eight CTAs shares a long window (HCA), 64 channels each, a
block of the fp8 format, too. They exchange only the sum of squares for RMSNorm, through distributed shared
memory. The CTAs after those of the windows save states. Long prefills have their own kernel, in `compress_prefill`.
"""

import dataclasses
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
import jax
import jax.numpy as jnp
from cutlass import Float32, Int32, Int64

import bridge
from dsv4_jax.cache import page_stride
from dsv4_jax.common.sizes import count_work, measure_arrays
from dsv4_jax.nvidia import support
from dsv4_jax.nvidia.ops import compress_prefill
from dsv4_jax.nvidia.ops.helpers.launch import STREAM, Arguments, Launch, Shape
from dsv4_jax.nvidia.ops.helpers.memory import load, load4, store4, store_in_peer
from dsv4_jax.nvidia.ops.helpers.norm_rope import HALF_WARPS, load_factors, norm_rope, squares_of_cta, sum_of_squares
from dsv4_jax.nvidia.ops.helpers.quantize_store import store_key
from dsv4_jax.nvidia.ops.helpers.window import (
    Sum,
    join,
    load_window,
    plan_entry,
    quotient,
    save_rows,
    saved_by_cta,
    shuffled,
    softmax_sum,
)

SHORT_WINDOW = 16  # rows that a thread's registers hold
SHORT_THREADS = 128  # of a short window: four channels each
LONG_THREADS = 256  # of an eighth of a long window: sixteen threads a row
CLUSTER = 8  # CTAs of a long window: 64 channels each
WARPS = LONG_THREADS // 32
GROUPS = LONG_THREADS // 16  # rows that are read at once
CARVEOUT = 10  # percent of the L1 cache that are shared memory; without it cutlass asks the driver, which needs a GPU
FEW_WINDOWS = 128  # up to this many long windows are faster with many registers per thread than with many threads


class Call(NamedTuple):
    """A launch: the kernel and its key, its arrays and numbers by the names in `Arguments`, and what it updates."""

    kernel: object
    shape: Shape
    arrays: dict
    numbers: dict
    updates: tuple[str, ...]


def implement(*args, config, save):
    """See `dsv4_jax.compress`: one launch."""
    call = plan(*args, config=config, save=save)
    _, _, state_cache, kv_cache, *_ = args
    results = dict(zip(call.updates, launch(call), strict=True)) if call else {}
    return results.get("state_cache", state_cache), results.get("kv_cache", kv_cache)


def implement_store(*args, config):
    """See `dsv4_jax.compress_norm_rope_store`: the same launch, with every row taken from the state cache."""
    _, kv_cache = implement(None, None, *args, config=config, save="none")
    return (kv_cache,)


def plan(kv_score, ape, state_cache, kv_cache, metadata, norm_weight, cos_sin, kv_scale, *, config, save):
    """What to launch, or None if there is nothing to do.

    Args: those of `dsv4_jax.compress`, and save="none". Without `kv_score` every row of a window comes from the state
      cache.
    """
    windows, saved = count_work(metadata, state_cache, kv_cache, cos_sin, save)
    if windows + saved == 0:
        return None
    sizes = measure_arrays(metadata, state_cache, kv_cache, cos_sin)
    arrays = {"state_cache": state_cache} if state_cache.shape[0] else {}
    if windows:
        arrays |= {"closing": metadata.closing, "window_slots": metadata.window_slots}
        arrays |= {"kv_cache": kv_cache, "norm_weight": norm_weight, "cos_sin": cos_sin}
        if kv_scale is not None:
            arrays["kv_scale"] = kv_scale
    if kv_score is not None:
        arrays |= {"kv_score": kv_score, "ape": ape}
    if saved and save == "tail":
        arrays["saving"] = metadata.saving
    elif saved:
        arrays |= {"positions": metadata.positions, "slot_mapping": metadata.slot_mapping}
    shape = _shape(config, windows, kv_cache, kv_score, norm_weight, save)
    # Measured for save="tail" alone.
    fits = metadata.prefill and save == "tail" and compress_prefill.serves(shape)
    if fits and compress_prefill.pays(shape, sizes["tokens"]):
        shape = dataclasses.replace(shape, resident=compress_prefill.resident(windows))
        kernel, blocks = compress_prefill.prefill_windows, compress_prefill.blocks(windows)
    else:
        kernel, blocks = _kernel(shape), _blocks(shape, windows, saved)
    updates = tuple(name for name, does in (("state_cache", saved), ("kv_cache", windows)) if does)
    numbers = {**sizes, "windows": windows, "saved": saved, "blocks": blocks}
    return Call(kernel, shape, arrays, numbers, updates)


def implement_compress_kv(state_cache, metadata, *, config, outputs):
    """See `dsv4_jax.compress_kv_sparse_attn_cutedsl`."""
    windows = metadata.closing.shape[0]
    (compressed,) = outputs
    if windows == 0 or state_cache.shape[0] == 0:
        return (jnp.zeros(compressed.shape, compressed.dtype),)
    shape = _shape(config, windows)
    arrays = {"closing": metadata.closing, "window_slots": metadata.window_slots, "state_cache": state_cache}
    numbers = {
        "tokens": metadata.positions.shape[0],
        "state_pages": state_cache.shape[0],
        # The cache and the RoPE table belong to the second launch, so here they bound nothing.
        "kv_pages": 2**31 - 1,
        "table_rows": 2**31 - 1,
        "windows": windows,
        "blocks": windows * CLUSTER if _is_long(shape) else windows,
    }
    return launch(Call(_kernel(shape), shape, arrays, numbers, ()), compressed)[:1]


def implement_norm_rope_insert(compressed, state_cache, kv_cache, metadata, norm_weight, cos_sin, kv_scale, *, config):
    """See `dsv4_jax.norm_rope_insert_sparse_attn_cutedsl`."""
    windows, _ = count_work(metadata, state_cache, kv_cache, cos_sin, "none")
    if windows == 0:
        return (kv_cache,)
    arrays = {
        "closing": metadata.closing,
        "window_slots": metadata.window_slots,
        "compressed": compressed,
        "kv_cache": kv_cache,
        "norm_weight": norm_weight,
        "cos_sin": cos_sin,
    }
    if kv_scale is not None:
        arrays["kv_scale"] = kv_scale
    sizes = measure_arrays(metadata, state_cache, kv_cache, cos_sin)
    numbers = {**sizes, "windows": windows, "blocks": windows}
    shape = _shape(config, windows, kv_cache, None, norm_weight)
    return launch(Call(_norm_rope_insert, shape, arrays, numbers, ("kv_cache",)))


def launch(call, out_type=None, *, command_buffer_compatible=True):
    """Launches a `Call`; returns the updated arrays and, if `out_type` is given, the compressed rows."""
    names = tuple(call.arrays)
    aliases = {names.index(name): i for i, name in enumerate(call.updates)}
    types = [jax.ShapeDtypeStruct(call.arrays[name].shape, call.arrays[name].dtype) for name in call.updates]
    if out_type is not None:
        types.append(out_type)
        names = (*names, "compressed")
    function = Launch(call.kernel, call.shape, support.gpu_arch(), names, tuple(call.numbers.items()))
    return bridge.torch_call(
        function,
        *call.arrays.values(),
        out_type=tuple(types),
        input_output_aliases=aliases,
        command_buffer_compatible=command_buffer_compatible,
    )


def _shape(config, windows, kv_cache=None, kv_score=None, norm_weight=None, save="none"):
    return Shape(
        ratio=config.compress_ratio,
        window=config.window,
        head_dim=config.head_dim,
        width=config.width,
        rope_dim=config.rope_head_dim,
        eps=config.eps,
        page_rows=config.page_rows,
        kv_page_rows=config.kv_page_rows,
        format="compressed" if kv_cache is None else config.cache_format,
        page_bytes=0 if kv_cache is None else page_stride(kv_cache),
        dtype=None if kv_score is None else kv_score.dtype.name,
        norm_dtype="float32" if norm_weight is None else norm_weight.dtype.name,
        save=save,
        resident=_resident(config.window, windows),
    )


def _resident(window, windows):
    """CTAs of a multiprocessor that are to fit its registers. Measured on an H200, as are the numbers above."""
    if window <= SHORT_WINDOW:
        return min(4, 32 // window)
    if window > 128:
        return 1
    return 2 if windows <= FEW_WINDOWS else 3


def _is_long(shape):
    return shape.window > SHORT_WINDOW


def _kernel(shape):
    """The kernel for a window's length, for any batch."""
    return _long_windows if _is_long(shape) else _short_windows


def _blocks(shape, windows, saved):
    """CTAs of that kernel."""
    savers = -(-saved // saved_by_cta(LONG_THREADS if _is_long(shape) else SHORT_THREADS, shape))
    return (windows + -(-savers // CLUSTER)) * CLUSTER if _is_long(shape) else windows + savers


@cute.jit
def _short_windows(a: Arguments, stream: STREAM, shape: cutlass.Constexpr):
    short_window_kernel(a, shape).launch(
        grid=[a.blocks, 1, 1],
        block=[SHORT_THREADS, 1, 1],
        min_blocks_per_mp=shape.resident,
        preferred_smem_carveout=CARVEOUT,
        stream=stream,
    )


@cute.kernel
def short_window_kernel(a: Arguments, shape: cutlass.Constexpr):
    """One CTA per window, then one per few states to save."""
    thread, block = cute.arch.thread_idx()[0], cute.arch.block_idx()[0]
    if block < a.windows:
        channel = thread * 4
        kv = cute.make_rmem_tensor((shape.window, 4), Float32)
        score = cute.make_rmem_tensor((shape.window, 4), Float32)
        present = cute.make_rmem_tensor(1, Int32)
        entry = plan_entry(a, block, shape)
        if entry.valid:
            if cutlass.const_expr(shape.format != "compressed"):
                factors = load_factors(a, entry.position, channel, shape)
            load_window(a, block, entry, (1, shape.window), Int32(0), channel, kv, score, present, shape)
            c = quotient(softmax_sum(kv, score, shape.window))
            if cutlass.const_expr(shape.format == "compressed"):
                store4(a.compressed + (Int64(block) * shape.head_dim + channel) * 4, c)
            else:
                squares = squares_of_cta(cute.arch.alloc_smem(Float32, HALF_WARPS), c)
                key = norm_rope(c, squares, factors, shape)
                store_key(a, key, channel, entry.slot, present[0] != 0, shape)
    else:
        if cutlass.const_expr(shape.save != "none"):
            save_rows(a, block - a.windows, thread, SHORT_THREADS, shape)


@cute.jit
def _norm_rope_insert(a: Arguments, stream: STREAM, shape: cutlass.Constexpr):
    norm_rope_insert_kernel(a, shape).launch(grid=[a.blocks, 1, 1], block=[SHORT_THREADS, 1, 1], stream=stream)


@cute.kernel
def norm_rope_insert_kernel(a: Arguments, shape: cutlass.Constexpr):
    """From a compressed window to its key; the second of two launches."""
    thread, block = cute.arch.thread_idx()[0], cute.arch.block_idx()[0]
    channel = thread * 4
    entry = plan_entry(a, block, shape)
    if entry.valid:
        factors = load_factors(a, entry.position, channel, shape)
        c = load4(a.compressed + (Int64(block) * shape.head_dim + channel) * 4, True)
        # Whether any row is there. Nothing else says so, so each warp looks through all slots.
        found = cutlass.Boolean(False)
        lane = thread % 32
        for i in range(0, shape.window, 32):
            listed = lane + i < shape.window
            slot = load(a.window_slots + (Int64(block) * shape.window + i + lane) * 4, Int32, listed)
            found = found | (listed & (slot >= 0) & (slot // shape.page_rows < a.state_pages))
        squares = squares_of_cta(cute.arch.alloc_smem(Float32, HALF_WARPS), c)
        key = norm_rope(c, squares, factors, shape)
        store_key(a, key, channel, entry.slot, cute.arch.vote_any_sync(found), shape)


@cute.jit
def _long_windows(a: Arguments, stream: STREAM, shape: cutlass.Constexpr):
    long_window_kernel(a, shape).launch(
        grid=[a.blocks, 1, 1],
        block=[LONG_THREADS, 1, 1],
        cluster=[CLUSTER, 1, 1],
        min_blocks_per_mp=shape.resident,
        preferred_smem_carveout=CARVEOUT,
        stream=stream,
    )


@cute.kernel
def long_window_kernel(a: Arguments, shape: cutlass.Constexpr):
    """One cluster per window, 64 channels per CTA; then clusters whose CTAs save states."""
    thread, rank = cute.arch.thread_idx()[0], cute.arch.block_idx_in_cluster()
    cluster = cute.arch.block_idx()[0] // CLUSTER
    warp, lane, group = thread // 32, thread % 32, thread // 16
    channel = rank * 64 + thread % 16 * 4
    rows = shape.window // GROUPS
    sums = cute.make_tensor(
        cute.arch.alloc_smem(Float32, WARPS * 3 * 64, alignment=16),
        cute.make_layout((WARPS, 3, 64), stride=(192, 64, 1)),
    )
    founds = cute.make_tensor(cute.arch.alloc_smem(Int32, WARPS), cute.make_layout(WARPS))
    squares_at = cute.arch.alloc_smem(Float32, CLUSTER)
    if cluster < a.windows:
        entry = plan_entry(a, cluster, shape)
        if entry.valid:
            # A peer may write to a CTA's shared memory only once that CTA has begun. The wait is after the loads below.
            if cutlass.const_expr(shape.format != "compressed"):
                cute.arch.cluster_arrive_relaxed()
                factors = load_factors(a, entry.position, channel, shape)
            kv = cute.make_rmem_tensor((rows, 4), Float32)
            score = cute.make_rmem_tensor((rows, 4), Float32)
            present = cute.make_rmem_tensor(1, Int32)
            load_window(a, cluster, entry, (GROUPS, rows), group, channel, kv, score, present, shape)

            # Join the rows of a warp's two halves in registers, those of different warps in shared memory.
            part = softmax_sum(kv, score, rows)
            part = join(part, shuffled(part, 16))
            if lane < 16:
                for i in cutlass.range_constexpr(3):
                    for j in cutlass.range_constexpr(4):
                        sums[warp, i, lane * 4 + j] = part[i][j]
            founds[warp] = Int32(cute.arch.vote_any_sync(present[0] != 0))
            cute.arch.sync_threads()
            if cutlass.const_expr(shape.format != "compressed"):
                cute.arch.cluster_wait()
            if warp == 0:
                c, found = _joined(sums, founds, lane)
                if cutlass.const_expr(shape.format == "compressed"):
                    store4(a.compressed + (Int64(cluster) * shape.head_dim + channel) * 4, c, lane < 16)
                else:
                    store_in_peer(squares_at + rank, lane, sum_of_squares(c), lane < CLUSTER)
                    cute.arch.cluster_arrive()
                    cute.arch.cluster_wait()
                    squares = Float32(0)
                    for i in cutlass.range_constexpr(CLUSTER):
                        squares = squares + (squares_at + i).load()
                    key = norm_rope(c, squares, factors, shape)
                    store_key(a, key, channel, entry.slot, found & (lane < 16), shape)
            else:
                if cutlass.const_expr(shape.format != "compressed"):
                    # These warps must not exit before the peers have written to this CTA.
                    cute.arch.cluster_arrive()
                    cute.arch.cluster_wait()
    else:
        if cutlass.const_expr(shape.save != "none"):
            save_rows(a, (cluster - a.windows) * CLUSTER + rank, thread, LONG_THREADS, shape)


def _joined(sums, founds, lane):
    """The four channels of a lane over all warps' rows, and whether any row is there."""
    quad, half = lane % 16 * 4, lane // 16
    total, found = None, founds[0]
    for i in range(WARPS // 2):
        part = Sum(*([sums[half * (WARPS // 2) + i, k, quad + j] for j in range(4)] for k in range(3)))
        total = part if total is None else join(total, part)
    for i in range(1, WARPS):
        found = found | founds[i]
    return quotient(join(total, shuffled(total, 16))), found != 0
