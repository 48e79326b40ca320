"""What the compressor must write, in NumPy float64: the tests' own derivation of the specification, not of the code.

Narrowing is `ml_dtypes`'. Everything a float32 implementation may legitimately do otherwise (another order of a sum,
another exp, flushed subnormals) is in one place: `Rows.low` and `Rows.high` bound the exact value by a worst-case
float32 error, and `assert_same_cache` lets a stored code differ only inside that interval.
"""

import dataclasses
import math

import ml_dtypes
import numpy as np

BF16 = ml_dtypes.bfloat16
FP8 = ml_dtypes.float8_e4m3fn
FP4 = ml_dtypes.float4_e2m1fn
F32_MAX = float(np.finfo(np.float32).max)
U = 2.0**-24  # half a float32 ulp
TINY = 2.0**-126  # below this a float32 unit may flush to zero


@dataclasses.dataclass(frozen=True)
class Format:
    """Bytes of a row, and (first channel, past the last, largest code, least amax) of its blocks' shared scales."""

    name: str
    head_dim: int
    value_bytes: int
    scale_bytes: int
    block: int = 0
    scaled: int = 0  # leading channels under shared scales
    largest: float = 0.0
    least: float = 0.0

    @property
    def row_bytes(self):
        return self.value_bytes + self.scale_bytes


FORMATS = {
    f.name: f
    for f in (
        Format("fp8_ds_mla", 512, 576, 8, 64, 448, 448.0, 1e-4),
        Format("indexer_fp8", 128, 128, 4, 128, 128, 448.0, 1e-4),
        Format("indexer_mxfp4", 128, 64, 4, 32, 128, 6.0, 6.0 * TINY),
        Format("bf16", 512, 1024, 0),
        Format("fp8", 512, 512, 0),
    )
}


class OverflowEdgeError(Exception):
    """The data put a sum of squares within rounding of float32's largest: no one answer is right."""


@dataclasses.dataclass
class Rows:
    """Finished keys, before quantizing: exact values and float32 bounds, [K, D] float64, and where they go."""

    tokens: np.ndarray
    slots: np.ndarray
    exact: np.ndarray
    low: np.ndarray
    high: np.ndarray


def f32(x):
    """x as float32 values, in whatever dtype a NumPy float32 keeps exactly."""
    return np.asarray(x).astype(np.float32)


def save_states(kv, score, ape, positions, state, slots, m, *, tokens=None):
    """Step 1: returns the state after the rows of `tokens` (default all) are written; -1 in `tokens` is padding."""
    state = np.array(state, np.float32, copy=True)
    pages, page_rows, _ = state.shape
    kv, score, ape = f32(kv), f32(score), f32(ape)
    for t in range(len(kv)) if tokens is None else tokens:
        if not 0 <= t < len(kv):
            continue
        s = int(slots[t])
        if 0 <= s < pages * page_rows and positions[t] >= 0:
            with np.errstate(over="ignore", invalid="ignore"):
                biased = score[t] + ape[int(positions[t]) % m]
            state[s // page_rows, s % page_rows] = np.concatenate([kv[t], biased])
    return state


def compressed_rows(config, state, metadata, norm_weight, cos_sin, kv_pages, *, kv_score=None, ape=None):
    """Steps 2 and 3 of every token in `metadata.closing` that may write.

    Args:
      config: has compress_ratio, head_dim, overlap, kv_page_rows, eps.
      state: [pages, page_rows, 2W]; anything with `shape` and `[page, row]`.
      metadata: has positions, token_to_req, query_start_loc, block_table, kv_slot_mapping, closing.
      kv_pages: pages of the cache.
      kv_score, ape: rows of the batch come from here when given, and only older ones from the state.
    """
    m, dim = config.compress_ratio, config.head_dim
    n = m * (2 if config.overlap else 1)
    width = dim * (2 if config.overlap else 1)
    positions, requests, starts, table, kv_slots, closing = (
        np.asarray(getattr(metadata, k)).astype(np.int64)
        for k in ("positions", "token_to_req", "query_start_loc", "block_table", "kv_slot_mapping", "closing")
    )
    if kv_score is not None:
        kv_score, ape = f32(kv_score), f32(ape)
    pages, page_rows = state.shape[:2]
    found = []
    for t in closing:
        if not 0 <= t < len(positions):
            continue
        p, r, k = int(positions[t]), int(requests[t]), int(kv_slots[t])
        anchor = p // m * m
        if (p + 1) % m or not 0 <= r < len(table) or not 0 <= anchor < len(cos_sin):
            continue
        if not 0 <= k < kv_pages * config.kv_page_rows:
            continue
        kvs, scores = [], []
        for i in range(n):
            q = p - n + 1 + i
            b = t - (p - q)
            columns = slice(dim, 2 * dim) if config.overlap and i >= m else slice(0, dim)
            if q < 0:
                continue
            if kv_score is not None and b >= max(starts[r], 0):
                kv = kv_score[b, :width][columns]
                with np.errstate(over="ignore", invalid="ignore"):
                    score = (kv_score[b, width:] + ape[q % m])[columns]
            else:
                column = q // page_rows
                if column >= table.shape[1] or not 0 <= table[r, column] < pages:
                    continue
                row = f32(state[int(table[r, column]), q % page_rows])
                kv, score = row[:width][columns], row[width:][columns]
            kvs.append(kv)
            scores.append(score)
        if kvs:
            row = _finish(np.array(kvs, np.float64), np.array(scores, np.float64), norm_weight, cos_sin[anchor], config)
            found.append((t, k, *row))
    if not found:
        empty = np.zeros((0, dim))
        return Rows(np.zeros(0, np.int64), np.zeros(0, np.int64), empty, empty, empty)
    return Rows(*(np.array(column) for column in zip(*found, strict=True)))


def _finish(kv, score, norm_weight, angles, config):
    """Softmax-sum, RMSNorm, RoPE of one window [n, D]: the exact row, and its lower and upper bound in float32."""
    with np.errstate(all="ignore"):
        weight = np.asarray(f32(norm_weight), np.float64)
        below = score - score.max(0)
        p = np.exp(below)
        total = p.sum(0)
        share = p / total
        c = (share * kv).sum(0)
        if not np.isfinite(c).all():
            nan = np.full(config.head_dim, np.nan)
            return nan, nan, nan
        # exp of a rounded difference, and of its product with log2(e): relative error grows with the distance.
        relative = np.where(p > 0, U * (16 + 4 * np.abs(np.where(p > 0, below, 0))), 0)
        flushed = TINY * (np.where(p < 2.0**-120, np.abs(kv), 0) + 1).sum(0)
        error = (share * np.abs(kv) * (relative + (share * relative).sum(0) + 4 * U)).sum(0) + flushed

        squares = (c * c).sum()
        if abs(squares / F32_MAX - 1) < 1e-3:
            raise OverflowEdgeError(squares)
        if squares > F32_MAX:  # mean(c^2) is infinite in float32, its rsqrt is 0
            x, x_error = c * 0.0 * weight, np.zeros_like(c)
        else:
            mean = squares / config.head_dim + config.eps
            inverse = 1 / math.sqrt(mean)
            off = ((2 * np.abs(c) * error + error**2).sum() / config.head_dim / mean + 12 * U) / 2 + 4 * U
            x = c * inverse * weight
            x_error = (error + np.abs(c) * off) * inverse * np.abs(weight) + 3 * U * np.abs(x)
            x_error += TINY * (np.abs(weight) + 1)
        rotated, rotated_error = x.copy(), x_error.copy()
        even, odd, even_error, odd_error = x[-64::2], x[-63::2], x_error[-64::2], x_error[-63::2]
        cos, sin = (np.asarray(f32(a), np.float64) for a in (angles[:32], angles[32:]))
        rotated[-64::2] = even * cos - odd * sin
        rotated[-63::2] = odd * cos + even * sin
        if squares <= F32_MAX:
            for start, a, a_error, b, b_error in (
                (-64, even, even_error, odd, odd_error),
                (-63, odd, odd_error, even, even_error),
            ):
                rotated_error[start::2] = (
                    (a_error + 3 * U * np.abs(a)) * np.abs(cos) + (b_error + 3 * U * np.abs(b)) * np.abs(sin) + 3 * TINY
                )
        sure = (rotated_error == 0) | ~np.isfinite(rotated_error) | ~np.isfinite(rotated)
        low = np.where(sure, rotated, rotated - rotated_error)
        high = np.where(sure, rotated, rotated + rotated_error)
        if squares > F32_MAX:  # all zeros; only a sign that c does not settle is open
            unsure = np.sign(c - error) * np.sign(c + error) <= 0
            unsure[-64:] = np.repeat(unsure[-64::2] | unsure[-63::2], 2)
            unsure &= rotated == 0
            low, high = np.where(unsure, -0.0, rotated), np.where(unsure, 0.0, rotated)
        return rotated, low, high


def bf16(x):
    """x rounded to bfloat16 (nearest, ties to even), as float64."""
    with np.errstate(all="ignore"):
        return f32(x).astype(BF16).astype(np.float64)


def exponent(amax, largest):
    """ceil(log2(amax / largest)) by exact comparison; NaN counts as infinity, infinity as the largest bfloat16."""
    biggest = float(ml_dtypes.finfo(BF16).max)
    amax = biggest if not amax <= biggest else float(amax)
    e = math.frexp(amax / largest)[1] - 2
    while largest * 2.0**e < amax:
        e += 1
    return e


def exponents(fmt, magnitudes):
    """[K, blocks] scale exponents of [K, D] magnitudes that are already bf16 values."""
    blocks = magnitudes[:, : fmt.scaled].reshape(len(magnitudes), -1, fmt.block)
    # np.max propagates NaN.
    least = float(np.float32(fmt.least))
    with np.errstate(invalid="ignore"):
        return np.array([[exponent(np.maximum(b.max(), least), fmt.largest) for b in row] for row in blocks], np.int64)


def fp8_code(x):
    with np.errstate(all="ignore"):
        code = f32(np.clip(x, -448.0, 448.0)).astype(FP8).view(np.uint8)
    return np.where(np.isnan(x), np.uint8(0x7F), code)


def bf16_code(x):
    with np.errstate(all="ignore"):
        code = f32(x).astype(BF16).view(np.uint16)
    return np.where(np.isnan(x), np.uint16(0x7FC0), code)


def fp4_code(x):
    code = f32(np.clip(np.nan_to_num(x), -6.0, 6.0)).astype(FP4).view(np.uint8) & 0xF
    return np.where(np.isnan(x), np.uint8(7), code)


def codes(fmt, rows, e, scale=None):
    """Codes of every channel under exponents e, as parts (first channel, codes [K, C], largest magnitude's code)."""
    with np.errstate(all="ignore"):
        if fmt.name == "bf16":
            return [(0, bf16_code(rows), 0x7FFF)]
        if fmt.name == "fp8":
            return [(0, fp8_code(np.asarray(f32(rows), np.float64) / float(np.float32(scale))), 0x7F)]
        shared = np.repeat(e, fmt.block, axis=1)
        x = np.ldexp(bf16(rows[:, : fmt.scaled]), -shared)
        if fmt.name == "indexer_mxfp4":
            return [(0, fp4_code(x), 7)]
        parts = [(0, fp8_code(x), 0x7F)]
        if fmt.scaled < fmt.head_dim:
            parts.append((fmt.scaled, bf16_code(rows[:, fmt.scaled :]), 0x7FFF))
        return parts


def quantize(format_name, rows, *, scale=None):
    """Step 4: [K, D] rows -> values [K, value_bytes], scales [K, scale_bytes], uint8."""
    fmt = FORMATS[format_name]
    rows = np.asarray(rows, np.float64)
    e = exponents(fmt, np.abs(bf16(rows))) if fmt.block else None
    return _values(fmt, codes(fmt, rows, e, scale)), _scales(fmt, e, len(rows))


def _values(fmt, parts):
    if fmt.name == "indexer_mxfp4":
        code = parts[0][1]
        return code[:, 0::2] | code[:, 1::2] << 4
    return np.concatenate([np.ascontiguousarray(c).view(np.uint8).reshape(len(c), -1) for _, c, _ in parts], axis=1)


def _scales(fmt, e, count):
    if not fmt.block:
        return np.zeros((count, 0), np.uint8)
    if fmt.name == "indexer_fp8":
        return np.ldexp(np.float32(1), e).astype(np.float32).view(np.uint8).reshape(count, 4)
    scales = np.zeros((count, fmt.scale_bytes), np.uint8)
    scales[:, : e.shape[1]] = e + 127
    return scales


def decode(format_name, values, scales, scale=None):
    """[N, D] float64 values of rows of bytes: the meaning of a format, said once more."""
    with np.errstate(invalid="ignore"):
        if format_name == "bf16":
            return values.view(BF16).astype(np.float64)
        if format_name == "fp8":
            return values.view(FP8).astype(np.float64) * float(np.float32(scale))
        if format_name == "indexer_fp8":
            return values.view(FP8).astype(np.float64) * scales.view(np.float32)
        if format_name == "indexer_mxfp4":
            codes = np.stack([values & 15, values >> 4], axis=-1).reshape(len(values), 128)
            numbers = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])[codes & 7] * np.where(codes > 7, -1.0, 1.0)
            return np.ldexp(numbers, np.repeat(scales.astype(int) - 127, 32, axis=1)) * _nan_of_255(scales, 32)
        nope = values[:, :448].view(FP8).astype(np.float64)
        nope = np.ldexp(nope, np.repeat(scales[:, :7].astype(int) - 127, 64, axis=1)) * _nan_of_255(scales[:, :7], 64)
        rope = np.ascontiguousarray(values[:, 448:]).view(BF16).astype(np.float64)
        return np.concatenate([nope, rope], axis=1)


def _nan_of_255(scales, block):
    return np.repeat(np.where(scales == 255, np.nan, 1.0), block, axis=1)


def as_pages(cache):
    """A cache of any format as [pages, bytes of a page] uint8."""
    cache = np.ascontiguousarray(np.asarray(cache))
    return cache.view(np.uint8).reshape(cache.shape[0], -1)


def row_index(format_name, slots, page_rows):
    """(page [K, 1], byte in page [K, row_bytes]) of rows at `slots`: values, then scales."""
    fmt, slots = FORMATS[format_name], np.asarray(slots, np.int64)
    row = (slots % page_rows)[:, None]
    values = row * fmt.value_bytes + np.arange(fmt.value_bytes)
    scales = page_rows * fmt.value_bytes + row * fmt.scale_bytes + np.arange(fmt.scale_bytes)
    return (slots // page_rows)[:, None], np.concatenate([values, scales], axis=1)


def store(format_name, pages, values, scales, slots, page_rows):
    """Writes packed rows into [pages, page_bytes] uint8; returns a copy."""
    pages = np.array(pages, copy=True)
    if len(slots):
        pages[row_index(format_name, slots, page_rows)] = np.concatenate([values, scales], axis=1)
    return pages


def assert_same_cache(got, before, rows, config, *, scale=None):
    """Holds a cache to the oracle: `before` everywhere but in the rows' bytes, and there `rows` quantized.

    A code may differ from the oracle's only if float32 rounding can carry the value there; then an fp8 code is the
    neighboring one. A block's exponent may differ only if its amax can be carried across a power of two; then the
    block's values must be right under the exponent found. At most 1 byte in 2000, and always one, may differ (a block
    of another exponent counts once: its values follow).
    """
    fmt = FORMATS[config.cache_format]
    got, before = as_pages(got), as_pages(before)
    assert got.shape == before.shape
    named = np.zeros(got.shape, bool)
    if len(rows.slots):
        index = row_index(fmt.name, rows.slots, config.kv_page_rows)
        named[index] = True
        assert_same_rows(got[index], rows, config, scale=scale)
    stray = np.argwhere((got != before) & ~named)
    assert not len(stray), f"{len(stray)} stray bytes, the first at (page, byte) {stray[:8].tolist()}"


def assert_same_rows(got, rows, config, *, scale=None):
    """`assert_same_cache` for the bytes [K, row_bytes] (values, then scales) of the rows alone."""
    fmt = FORMATS[config.cache_format]
    values, scales = quantize(fmt.name, rows.exact, scale=scale)
    count = len(rows.exact)
    got_values, got_scales = got[:, : fmt.value_bytes], got[:, fmt.value_bytes :]
    moved = np.zeros((count, 1), bool)
    e = want_e = None
    differing = 0
    if fmt.block:
        with np.errstate(all="ignore"):
            across = (rows.low <= 0) & (rows.high >= 0)
            largest = np.maximum(np.abs(rows.low), np.abs(rows.high))
            smallest = np.where(across, 0, np.minimum(np.abs(rows.low), np.abs(rows.high)))
        e_low, e_high = exponents(fmt, bf16(smallest)), exponents(fmt, bf16(largest))
        want_e = exponents(fmt, np.abs(bf16(rows.exact)))
        if fmt.name == "indexer_fp8":
            found = np.ascontiguousarray(got_scales).view(np.float32).astype(np.float64)
            mantissa, e = np.frexp(found)
            _none("scale is a power of two", (mantissa != 0.5), rows, got_scales, scales)
            e = e.astype(np.int64) - 1
        else:
            blocks = want_e.shape[1]
            _none("byte after the scales is 0", got_scales[:, blocks:] != 0, rows, got_scales, scales)
            e = got_scales[:, :blocks].astype(np.int64) - 127
        _none("scale", (e < e_low) | (e > e_high), rows, e, want_e)
        moved = e != want_e
        differing += int(moved.sum())
    bounds = zip(
        codes(fmt, rows.low, e, scale), codes(fmt, rows.high, e, scale), codes(fmt, rows.exact, e, scale), strict=True
    )
    offset, zeros = 0, []
    for (first, low, largest), (_, high, _), (_, exact, _) in bounds:
        if fmt.name == "indexer_mxfp4":
            code = np.stack([got_values & 0xF, got_values >> 4], axis=-1).reshape(count, -1)
        else:
            size = exact.shape[1] * exact.itemsize
            code = np.ascontiguousarray(got_values[:, offset : offset + size]).view(exact.dtype)
            offset += size
        g, lo, hi, x = (_ordered(c, largest) for c in (code, low, high, exact))
        wrong = (g < np.minimum(lo, hi)) | (g > np.maximum(lo, hi))
        nan = np.isnan(rows.exact[:, first : first + exact.shape[1]])
        wrong = np.where(nan, code != exact, wrong)
        # bfloat16 has as many bits for a channel that canceled as for its neighbors, so there the bound alone holds.
        if largest == 0x7F:
            wrong |= np.abs(g - x) > 1
        _none("value", wrong, rows, code, exact)
        zeros.append(np.repeat(((code | exact) & largest) == 0, exact.itemsize, axis=1))
    both_zero = np.concatenate(zeros, axis=1)
    if fmt.name == "indexer_mxfp4":
        both_zero = both_zero[:, 0::2] & both_zero[:, 1::2]
    outside = np.ones(got_values.shape, bool)
    if fmt.block:
        per_block = fmt.block // (2 if fmt.name == "indexer_mxfp4" else 1)
        under = np.repeat(~moved, per_block, axis=1)
        outside[:, : under.shape[1]] = under
    # A zero's sign is already held to its interval; where float32 may flush to zero it is no rounding difference.
    differing += int(((got_values != values) & outside & ~both_zero).sum())
    allowed = max(1, count * fmt.row_bytes // 2000)
    assert differing <= allowed, f"{differing} of {count * fmt.row_bytes} bytes differ, {allowed} may"


def _ordered(code, largest):
    code = code.astype(np.int64)
    return np.where(code > largest, -(code & largest) - 1, code)


def _none(what, wrong, rows, got, want):
    where = np.argwhere(wrong)
    if len(where):
        k, d = where[0]
        raise AssertionError(
            f"{len(where)} x wrong {what}, the first at key {k} (token {rows.tokens[k]}, slot {rows.slots[k]}), "
            f"{d}: got {got[k, d]}, want {want[k, d] if want.shape == got.shape else want[k]}"
        )


def saving(config, query_start_loc, seq_lens, *, rollback=0):
    """Batch rows that `save="tail"` keeps: of windows open after up to `rollback` tokens are taken back, and before."""
    m, rows = config.compress_ratio, []
    for start, end, length in zip(query_start_loc[:-1], query_start_loc[1:], seq_lens, strict=True):
        first = max(int(length) - rollback, 0) // m * m - (m if config.overlap else 0)
        rows += [t for t in range(int(start), int(end)) if int(length) - int(end) + t >= first]
    return rows
