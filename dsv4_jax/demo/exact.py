"""What the cache must hold, in float64 NumPy: from the projection's output to the error that the format allows.

This module uses nothing of the code that it checks. It writes out softmax, RMSNorm, YaRN, the layout of a page and the
decoding of its bytes again, plainly.
"""

import dataclasses
import math

import numpy as np

ULP32 = 2.0**-24  # half an ulp of a float32, relative
VALUE_SCALE_BYTES = {"fp8_ds_mla": (576, 8), "indexer_fp8": (128, 4), "indexer_mxfp4": (64, 4)}
BLOCK = {"fp8_ds_mla": 64, "indexer_fp8": 128, "indexer_mxfp4": 32}
# A block's largest magnitude counts as at least the first number, and is scaled to at most the second.
AMAX = {"fp8_ds_mla": (1e-4, 448.0), "indexer_fp8": (1e-4, 448.0), "indexer_mxfp4": (6 * 2.0**-126, 6.0)}


@dataclasses.dataclass(frozen=True)
class Verdict:
    """How a cache compares with exact keys.

    Attributes:
      values: `[windows, D]`, the cache's keys, dequantized.
      exact: `[windows, D]`, the exact keys.
      error: `[windows, D]`, their distance as a fraction of what is allowed; above 1 is a fault.
      faults: one line per kind of fault.
    """

    values: np.ndarray
    exact: np.ndarray
    error: np.ndarray
    faults: list[str]


def keys(kv_score, ape, norm_weight, config):
    """The keys `[windows, D]` of one request's tokens `[T, 2W]`, and how far off float32 arithmetic may be."""
    m, d, w = config.compress_ratio, config.head_dim, config.width
    count = len(kv_score) // m
    rows = np.asarray(kv_score[: count * m], np.float64).reshape(count, m, 2 * w)
    kv, score = rows[..., :w], rows[..., w:] + np.asarray(ape, np.float64)
    if config.overlap:
        kv, score = _with_window_before(kv, d, 0.0), _with_window_before(score, d, -np.inf)

    weight = np.exp(score - score.max(axis=1, keepdims=True))
    weight /= weight.sum(axis=1, keepdims=True)
    c = (weight * kv).sum(axis=1)
    # A sum of n terms, and weights with rounded exponents. Both errors are relative to the sum of magnitudes.
    largest = np.abs(score[np.isfinite(score)]).max(initial=0)
    slack = (2 * kv.shape[1] + 4 * largest + 16) * ULP32 * (weight * np.abs(kv)).sum(axis=1)

    gain = np.asarray(norm_weight, np.float64) / np.sqrt((c * c).mean(axis=1, keepdims=True) + config.eps)
    return _rotate(c * gain, slack * np.abs(gain), np.arange(count) * m, config)


def _with_window_before(x, d, missing):
    """`[windows, 2m, D]`: the first D columns of the window before, then the other columns of the window itself."""
    before = np.full_like(x[..., :d], missing)
    before[1:] = x[:-1, :, :d]
    return np.concatenate([before, x[..., d:]], axis=1)


def _rotate(x, slack, positions, config):
    """RoPE on the last channels, and the slack it adds."""
    half = config.rope_head_dim // 2
    angle = positions[:, None] * _frequencies(config.rope, 2 * half)
    cos, sin = np.cos(angle), np.sin(angle)
    even, odd = x[:, -2 * half :: 2].copy(), x[:, -2 * half + 1 :: 2].copy()
    x[:, -2 * half :: 2] = even * cos - odd * sin
    x[:, -2 * half + 1 :: 2] = odd * cos + even * sin
    # The model rounds frequency and angle to float32, an error that grows with the position.
    turned = (np.abs(even) + np.abs(odd)) * (8 * ULP32 * (1 + angle))
    turned += slack[:, -2 * half :: 2] + slack[:, -2 * half + 1 :: 2]
    slack[:, -2 * half :] = np.repeat(turned, 2, axis=1)
    return x, slack


def _frequencies(rope, dim):
    """YaRN: pairs that turn often within the original context keep their frequency; slow ones get slower."""
    pair = np.arange(dim // 2)
    kept = rope.theta ** (-2.0 * pair / dim)
    if rope.factor == 1:
        return kept
    context = rope.original_max_position_embeddings / (2 * math.pi)
    fast, slow = (dim * math.log(context / b) / (2 * math.log(rope.theta)) for b in (rope.beta_fast, rope.beta_slow))
    first, last = max(math.floor(fast), 0), min(math.ceil(slow), dim - 1)
    slowed = np.clip((pair - first) / max(last - first, 1e-3), 0, 1)
    return kept * (1 - slowed) + kept / rope.factor * slowed


@np.errstate(all="ignore")  # a wrong byte may be an infinity or a NaN
def check(before, after, slots, exact, slack, config) -> Verdict:
    """Compares a cache `[pages, page_bytes]`, before and after, with the exact keys that belong at `slots`."""
    fmt, block = config.cache_format, BLOCK[config.cache_format]
    page, byte = _where(slots, config)
    row = after[page, byte]
    values, exponents, faults = _decode(row, fmt)

    scaled = values.shape[1] - (64 if fmt == "fp8_ds_mla" else 0)
    largest, extra = (np.abs(x[:, :scaled]).reshape(len(x), scaled // block, block).max(axis=2) for x in (exact, slack))
    margin = largest * 2.0**-8 + extra  # rounding to bfloat16 or float32 may cross a power of two
    low, high = _exponent(largest - margin, *AMAX[fmt]), _exponent(largest + margin, *AMAX[fmt])
    if wrong := np.count_nonzero((exponents < low) | (exponents > high)):
        faults.append(f"{wrong} of {exponents.size} block scales are wrong")

    # Values are rounded to bfloat16 first. Under a shared scale they are rounded once more.
    allowed = slack + _half_step(exact, 7, -126)
    step = 2.0 ** np.repeat(np.clip(exponents, low, high), block, axis=1)
    y = exact[:, :scaled] / step
    # E2M1 has one mantissa bit, e4m3 three. Below the least exponent, the step stays the same.
    allowed[:, :scaled] += step * (_half_step(y, 1, 0) if fmt == "indexer_mxfp4" else _half_step(y, 3, -6))
    error = np.nan_to_num(np.abs(values - exact) / allowed, nan=np.inf)
    if wrong := np.count_nonzero(error > 1):
        i, d = np.unravel_index(error.argmax(), error.shape)
        faults.append(
            f"{wrong} of {error.size} values are too far off; the worst, window {i} channel {d}, is "
            f"{values[i, d]:.6g} and should be {exact[i, d]:.6g} +- {allowed[i, d]:.2g}"
        )

    changed = before != after
    changed[page, byte] = False
    if stray := np.count_nonzero(changed):
        faults.append(f"{stray} bytes changed that belong to no key; the first in page {np.argwhere(changed)[0][0]}")
    return Verdict(values, exact, error, faults)


def _where(slots, config):
    """Page and bytes of the rows at `slots`; in a page, all values come before all scales."""
    values, scales = VALUE_SCALE_BYTES[config.cache_format]
    page, row = np.divmod(np.asarray(slots, np.int64)[:, None], config.kv_page_rows)
    value_bytes = row * values + np.arange(values)
    scale_bytes = config.kv_page_rows * values + row * scales + np.arange(scales)
    return page, np.concatenate([value_bytes, scale_bytes], axis=1)


def _decode(row, fmt):
    """Values `[N, D]`, exponents of the blocks' scales, and what is wrong with the bytes themselves."""
    split = VALUE_SCALE_BYTES[fmt][0]
    values, scales, faults = row[:, :split], row[:, split:], []
    if fmt == "indexer_fp8":
        mantissa, exponents = np.frexp(np.ascontiguousarray(scales).view("<f4").astype(np.float64))
        exponents = exponents - 1
        if (mantissa != 0.5).any():
            faults.append("a scale is not a power of two")
    else:
        exponents = scales.astype(np.int64) - 127
        if fmt == "fp8_ds_mla":
            if scales[:, 7].any():
                faults.append("the byte after the scales is not 0")
            exponents = exponents[:, :7]
    scale = 2.0 ** np.repeat(exponents, BLOCK[fmt], axis=1)
    if fmt == "indexer_mxfp4":
        return _E2M1[np.stack([values & 15, values >> 4], axis=2).reshape(len(row), 128)] * scale, exponents, faults
    if fmt == "indexer_fp8":
        return _E4M3[values] * scale, exponents, faults
    rope = np.ascontiguousarray(values[:, 448:]).view("<u2").astype(np.uint32) << 16
    return np.hstack([_E4M3[values[:, :448]] * scale, rope.view(np.float32)]), exponents, faults


def _small_float(mantissa_bits, bias, codes):
    """The values of all codes of a small float: sign, exponent, mantissa; subnormal if the exponent is 0."""
    code = np.arange(codes // 2)
    exponent, mantissa = code >> mantissa_bits, code % 2**mantissa_bits / 2**mantissa_bits
    positive = np.where(exponent, 1 + mantissa, 2 * mantissa) * 2.0 ** (exponent - bias)
    return np.concatenate([positive, -positive])


_E2M1 = _small_float(1, 1, 16)
_E4M3 = _small_float(3, 7, 256)
_E4M3[[0x7F, 0xFF]] = np.nan


def _half_step(x, mantissa_bits, least_exponent):
    """Half the distance between the binary floats around x."""
    exponent = np.frexp(x)[1] - 1
    return 2.0 ** (np.maximum(np.where(x == 0, least_exponent, exponent), least_exponent) - mantissa_bits - 1)


def _exponent(amax, least, largest):
    """ceil(log2(amax / largest))."""
    mantissa, exponent = np.frexp(np.maximum(amax, least) / largest)
    return np.maximum(exponent - (mantissa == 0.5), -127)
