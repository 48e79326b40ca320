"""Attention over cached keys in NumPy float64, with a bound on what an implementation's roundings may change."""

import dataclasses

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from helpers import oracle

SCALE = 512**-0.5


@dataclasses.dataclass
class Exact:
    """o `[T, H, 512]` and lse `[T, H]`, and how far rounding may carry each of them."""

    o: np.ndarray
    lse: np.ndarray
    o_error: np.ndarray
    lse_error: np.ndarray


def make_cache(rng, fmt, rows, pages, page_rows, *, scale=None, waste=0xFF):
    """A cache `[pages, ...]` whose rows are the keys given `[N, 512]` in random slots, and these slots.

    All else is `waste` bytes: 0xFF is NaN, in every format.
    """
    values, scales = oracle.quantize(fmt, rows, scale=scale)
    slots = rng.permutation(pages * page_rows)[: len(rows)]
    size = page_rows * oracle.FORMATS[fmt].row_bytes
    packed = fmt == "fp8_ds_mla"
    stored = np.full((pages, -(-size // 576) * 576 if packed else size), waste, np.uint8)
    return as_cache(fmt, oracle.store(fmt, stored, values, scales, slots, page_rows), page_rows), slots.astype(np.int32)


def as_cache(fmt, pages, page_rows):
    """Bytes of pages as the format's array."""
    if fmt == "fp8_ds_mla":
        return pages
    return pages.view(ml_dtypes.bfloat16 if fmt == "bf16" else ml_dtypes.float8_e4m3fn).reshape(-1, page_rows, 512)


def read(fmt, cache, page_rows, indices, length, *, scale=None):
    """The keys `[K, 512]` of one token, bfloat16 values as float64: those that count."""
    pages = oracle.as_pages(cache)
    indices = np.asarray(indices, np.int64)[: max(int(length), 0)]
    indices = indices[(indices >= 0) & (indices < len(pages) * page_rows)]
    rows = pages[oracle.row_index(fmt, indices, page_rows)]
    bytes_ = oracle.FORMATS[fmt].value_bytes
    return oracle.bf16(oracle.decode(fmt, rows[:, :bytes_], rows[:, bytes_:], scale))


def attend(q, sink, keys, softmax_scale=SCALE):
    """What to expect of q `[T, H, 512]` and, for each token, its keys `[K, 512]`.

    The bounds are those of the rules: weights and o are rounded to bfloat16 (2**-8 of each, half a unit in the last
    place), scores are float32 sums of 512 products in any order, and an exponential is good to a few units in its last
    place.
    """
    q, sink = np.asarray(q, np.float64), np.asarray(sink, np.float64)
    out = Exact(np.zeros(q.shape), np.full(q.shape[:2], np.inf), np.zeros(q.shape), np.zeros(q.shape[:2]))
    for t, k in enumerate(keys):
        if not len(k):
            continue
        scores = q[t] @ k.T * softmax_scale
        top = np.maximum(scores.max(axis=1), sink)[:, None]
        weights = np.exp(scores - top)
        total = weights.sum(axis=1, keepdims=True) + np.exp(sink[:, None] - top)
        out.o[t] = weights @ k / total
        largest = scores.max(axis=1, keepdims=True)
        out.lse[t] = largest[:, 0] + np.log(np.exp(scores - largest).sum(axis=1))
        moved = 64 * oracle.U * (np.abs(q[t]) @ np.abs(k).T * softmax_scale + np.abs(scores) + 1)
        moved = moved.max(axis=1, keepdims=True) + 64 * oracle.U * (1 + np.abs(sink[:, None]))
        spread = weights @ np.abs(k) / total
        out.o_error[t] = (2.0**-8 + 2 * moved) * spread + 1.01 * 2.0**-8 * np.abs(out.o[t]) + 1e-30
        out.lse_error[t] = moved[:, 0]
    return out


def assert_near(got, exact, lse=None):
    """Holds o, and lse if given, to the bounds."""
    got = np.asarray(got, np.float64)
    assert got.shape == exact.o.shape
    error = np.abs(got - exact.o)
    assert (error <= exact.o_error).all(), f"{np.max(error / np.maximum(exact.o_error, 1e-30))} of the bound"
    if lse is not None:
        lse = np.asarray(lse, np.float64)
        none = np.isinf(exact.lse)
        assert (lse[none] == np.inf).all()
        assert (np.abs(lse - np.where(none, lse, exact.lse))[~none] <= exact.lse_error[~none]).all()


def assert_within_flashmla(got, want, many, *, absolute=1e-3, relative=2 / 128, cosine=5e-6):
    """FlashMLA's own tolerance: each element of tokens with `many` keys `[T]`, and the angle of every token.

    Over few keys of magnitude 1 the elements are larger than in FlashMLA's tests, and its own outputs exceed it.
    """
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    error = np.abs(got - want)[many]
    assert len(error) and ((error <= absolute) | (error <= relative * np.abs(want[many]))).all(), error.max()
    for g, w in zip(got, want, strict=True):
        assert 1 - 2 * (g * w).sum() / max((g**2 + w**2).sum(), 1e-30) <= cosine or not w.any()


@dataclasses.dataclass
class Case:
    """A decode: arguments of `sparse_mla_decode` by name, and what it must give."""

    arguments: dict
    options: dict
    exact: Exact


def random_decode(
    rng, fmt="fp8_ds_mla", *, heads=3, window=(5, 3), second=(7, 2), lens=None, second_lens=None, magnitude=1.0,
    outside=True, scale=0.5,
):  # fmt: skip
    """A batch over random keys; `window` and `second` are (indices a token, rows of a page), `lens` those of tokens.

    What is past a length, a page's padding and all rows that nobody names are NaN; with `outside`, some indices are
    outside the cache.
    """
    lens = [0, 1, window[0], window[0] + 9, -3] if lens is None else lens
    tokens = len(lens)
    second_lens = np.array(lens)[::-1] if second_lens is None else second_lens
    scale = scale if fmt == "fp8" else None
    q = (rng.standard_normal((tokens, heads, 512)) * magnitude).astype(ml_dtypes.bfloat16)
    sink = rng.standard_normal(heads).astype(np.float32)
    arguments, keys = {"q": q, "sink": sink}, [[] for _ in range(tokens)]
    for prefix, size, counts in (("window_", window, lens), ("", second, second_lens)):
        if size is None:
            continue
        columns, page_rows = size
        rows = rng.standard_normal((max(2 * columns, 4), 512))
        pages = -(-2 * len(rows) // page_rows)
        cache, slots = make_cache(rng, fmt, rows, pages, page_rows, scale=scale)
        indices = slots[rng.integers(0, len(slots), (tokens, columns))]
        if outside and columns:
            wrong = rng.random(indices.shape) < 0.2
            choices = np.array([-1, -2, -(2**31), pages * page_rows, pages * page_rows + 7, 2**31 - 1])
            indices = np.where(wrong, rng.choice(choices, indices.shape), indices)
        for t, length in enumerate(counts):
            # Past the length: rows of NaN, which are there to be read by mistake.
            unused = np.setdiff1d(np.arange(pages * page_rows), slots)
            indices[t, max(length, 0) :] = rng.choice(unused, indices[t, max(length, 0) :].shape)
            keys[t].append(read(fmt, cache, page_rows, indices[t], length, scale=scale))
        arguments |= {
            f"{prefix}cache": cache,
            f"{prefix}indices": indices.astype(np.int32),
            f"{prefix}lens": np.array(counts, np.int32),
            f"{prefix}page_rows": page_rows,
        }
    options = {"cache_format": fmt} | ({"kv_scale": scale} if scale else {})
    return Case(arguments, options, attend(q, sink, [np.concatenate(k) for k in keys]))


def as_jax(arguments):
    return {k: jnp.asarray(v) if isinstance(v, np.ndarray) else v for k, v in arguments.items()}
