"""`sparse_mla_decode` against attention in float64, and FlashMLA's outputs."""

import pathlib

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from helpers import attention, heads
from helpers.attention import as_jax
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4_jax import fused_inv_rope_fp8_quant, sparse_mla_decode

GPU_TOO = True
GOLDEN = pathlib.Path(__file__).parent / "golden" / "attention_h200.npz"


def golden(case):
    """A case's arrays by name."""
    with np.load(GOLDEN) as archive:
        found = {n.removeprefix(case + "/"): archive[n] for n in archive.files if n.startswith(case + "/")}
    return {
        n.removesuffix("__bf16"): v.view(ml_dtypes.bfloat16) if n.endswith("__bf16") else v for n, v in found.items()
    }


def run(case, implementation, **options):
    arguments = as_jax(case.arguments)
    return sparse_mla_decode(**arguments, **case.options, **options, implementation=implementation)


def check(case, implementation):
    o, lse = run(case, implementation, return_lse=True)
    assert o.dtype == jnp.bfloat16 and lse.dtype == jnp.float32
    attention.assert_near(o, case.exact, lse)
    return o


@pytest.mark.parametrize("kind", ["swa", "csa", "hca"])
def test_golden(kind, implementation):
    arrays = golden(f"decode/{kind}")
    given = {k: arrays[k] for k in ("q", "sink", "window_cache", "window_indices", "window_lens")}
    given |= {k: arrays[k] for k in ("cache", "indices", "lens") if k in arrays}
    if kind != "swa":
        given["page_rows"] = int(arrays["page_rows"])
    options = {"window_page_rows": 64, "return_lse": True, "implementation": implementation}
    o, lse = sparse_mla_decode(**as_jax(given), **options)
    keys = []
    for t in range(len(given["q"])):
        named = [("window_", 64)] + ([("", given["page_rows"])] if kind != "swa" else [])
        parts = [
            attention.read("fp8_ds_mla", given[f"{p}cache"], rows, given[f"{p}indices"][t], given[f"{p}lens"][t])
            for p, rows in named
        ]
        keys.append(np.concatenate(parts))
    exact = attention.attend(given["q"], given["sink"], keys)
    attention.assert_near(o, exact, lse)
    many = [len(k) >= 100 for k in keys]
    attention.assert_within_flashmla(o, exact.o, many)
    attention.assert_within_flashmla(o, arrays["out"], many)
    np.testing.assert_allclose(lse, arrays["lse"], atol=1e-5, rtol=2e-6)
    # And FlashMLA's own outputs are within the bounds that the tests hold these implementations to.
    attention.assert_near(arrays["out"], exact, arrays["lse"])


@pytest.mark.parametrize("fmt", ["fp8_ds_mla", "bf16", "fp8"])
@pytest.mark.parametrize(
    ("count", "window", "second"),
    [(1, (5, 3), (7, 2)), (17, (40, 64), None), (3, (1, 1), (33, 5)), (5, (0, 4), (16, 2))],
)
def test_formats_and_sizes(fmt, count, window, second, implementation):
    rng = np.random.default_rng(count)
    check(attention.random_decode(rng, fmt, heads=count, window=window, second=second), implementation)


def test_many_keys(implementation):
    """More than an implementation holds at a time, of both caches."""
    rng = np.random.default_rng(0)
    check(attention.random_decode(rng, heads=2, window=(130, 64), second=(200, 2), lens=[130, 77]), implementation)


# Heads, format, and (indices a token, rows of a page) of both caches: few, as each is compiled.
SHAPES = [
    (5, "fp8_ds_mla", (9, 64), (20, 2)),
    (1, "bf16", (3, 1), (7, 3)),
    (2, "fp8", (6, 2), None),
]


@settings(max_examples=40, deadline=None)
@given(
    shape=st.sampled_from(SHAPES),
    lens=st.lists(st.integers(-2, 12), min_size=3, max_size=3),
    second_lens=st.lists(st.integers(-2, 25), min_size=3, max_size=3),
    magnitude=st.sampled_from([1e-3, 1.0, 30.0]),
    seed=st.integers(0, 99),
)
def test_ragged(shape, lens, second_lens, magnitude, seed):
    """Lengths from nothing to more than there is, -1 and other wrong indices anywhere, NaN wherever no key counts."""
    count, fmt, window, second = shape
    sizes = {"heads": count, "window": window, "second": second, "lens": lens, "second_lens": second_lens}
    check(attention.random_decode(np.random.default_rng(seed), fmt, **sizes, magnitude=magnitude), "xla")


def one_key_each(scores, sinks, fmt="bf16"):
    """A token whose keys have, by hand, the scores given, and values that say which key it was."""
    keys = np.zeros((len(scores), 512), np.float32)
    keys[:, 0] = np.array(scores) * 512**0.5
    keys[np.arange(len(scores)), 1 + np.arange(len(scores))] = 1
    q = np.zeros((1, len(sinks), 512), np.float32)
    q[..., 0] = 1
    return {
        "q": jnp.asarray(q, jnp.bfloat16),
        "window_cache": jnp.asarray(keys, jnp.bfloat16)[:, None, :],
        "window_indices": jnp.arange(len(scores))[None],
        "window_lens": jnp.array([len(scores)]),
        "sink": jnp.array(sinks, jnp.float32),
        "window_page_rows": 1,
        "cache_format": fmt,
    }


def test_huge_scores(implementation):
    """The largest score takes all, however far apart they are, and the sink, if it is larger, all of that."""
    arguments = one_key_each([1e30, -1e30, 3e30, 7.0], [0.0, 1e35, -1e35])
    o, lse = sparse_mla_decode(**arguments, return_lse=True, implementation=implementation)
    assert np.asarray(o, np.float32)[0, :, 1:5].tolist() == [[0, 0, 1, 0], [0, 0, 0, 0], [0, 0, 1, 0]]
    np.testing.assert_allclose(lse[0], 3e30, rtol=0.01)


def test_sink(implementation):
    """By hand: two equal scores and a sink of log 2 above them share 1/4, 1/4, 1/2; -inf is no sink."""
    arguments = one_key_each([0.0, 0.0], [np.log(2), -np.inf, np.inf])
    o, lse = sparse_mla_decode(**arguments, return_lse=True, implementation=implementation)
    assert np.asarray(o, np.float32)[0, :, 1:3].tolist() == [[0.25, 0.25], [0.5, 0.5], [0, 0]]
    np.testing.assert_allclose(lse[0], np.log(2), rtol=1e-6)


@pytest.mark.parametrize("sink", [0.0, -np.inf])
def test_no_key(sink, implementation):
    """Without a key o is 0 and lse +inf, though the cache is NaN all over."""
    rng = np.random.default_rng(1)
    case = attention.random_decode(rng, lens=[0, 0, 3], second_lens=[0, 2, 0], outside=False)
    arguments = case.arguments
    arguments["sink"] = np.full(3, sink, np.float32)
    arguments["window_indices"][2], arguments["indices"][1] = -1, 10**6
    o, lse = run(case, implementation, return_lse=True)
    assert not np.asarray(o, np.float32).any() and (np.asarray(lse) == np.inf).all()


def test_nan_in_a_key_that_counts(implementation):
    """It is not hidden: all heads of that token, and no other token's."""
    rng = np.random.default_rng(2)
    case = attention.random_decode(rng, lens=[3, 3], outside=False)
    unused = np.setdiff1d(np.arange(24), case.arguments["window_indices"][:, :3])
    case.arguments["window_indices"][0, 1] = unused[0]
    o = np.asarray(run(case, implementation), np.float32)
    assert np.isnan(o[0, :, 0]).all() and not np.isnan(o[1]).any()


def test_largest_and_least_scales(implementation):
    """The whole range of fp8_ds_mla's scale bytes that gives finite keys, and fp8's subnormals and largest."""
    rng = np.random.default_rng(3)
    codes = rng.integers(0, 256, (24, 448)).astype(np.uint8)
    codes[(codes & 0x7F) == 0x7F] = 0x7E
    exponents = rng.integers(-60, 40, (24, 7))
    exponents[:, 0] = np.linspace(-110, 60, 24)
    rows = np.concatenate([codes, rng.integers(0, 2, (24, 128)).astype(np.uint8)], axis=1)
    scales = np.concatenate([exponents + 127, np.zeros((24, 1))], axis=1).astype(np.uint8)
    cache = np.concatenate([rows.reshape(1, -1), scales.reshape(1, -1)], axis=1)
    q = np.zeros((2, 2, 512), np.float32)
    q[..., 449] = 1  # scores are small: a bfloat16 of 0, 1, 256 or 257 bits, a subnormal
    indices = np.stack([np.arange(24), rng.integers(0, 24, 24)]).astype(np.int32)
    lens, sink = np.array([24, 1], np.int32), np.zeros(2, np.float32)
    q = q.astype(ml_dtypes.bfloat16)
    given = {"q": q, "window_cache": cache, "window_indices": indices, "window_lens": lens, "sink": sink}
    o = sparse_mla_decode(**as_jax(given), window_page_rows=24, implementation=implementation)
    keys = [attention.read("fp8_ds_mla", cache, 24, i, n) for i, n in zip(indices, lens, strict=True)]
    exact = attention.attend(q, sink, keys)
    exact.o_error += 2.0**-126  # what is below may count as 0
    attention.assert_near(o, exact)


@pytest.mark.parametrize(("size", "packed"), [(None, False), (128, True), (64, False), (32, True)])
def test_rotated_and_quantized(size, packed, implementation):
    """The epilogue gives, to the bit, what `fused_inv_rope_fp8_quant` makes of o."""
    rng = np.random.default_rng(4)
    case = attention.random_decode(rng, heads=5, lens=[5, 2, 0, 5])
    o, lse = run(case, implementation, return_lse=True)
    positions, table = np.array([3, 0, 2, 99]), heads.random_table(rng, 9)
    options = {"positions": positions, "cos_sin": table, "quant_group_size": size, "tma_aligned_scales": packed}
    *got, got_lse = run(case, implementation, return_lse=True, **options)
    rest = {"quantize": False} if size is None else {"quant_group_size": size, "tma_aligned_scales": packed}
    want = fused_inv_rope_fp8_quant(o, positions, table, 5, 1, **rest, implementation="xla")
    for g, w in zip(got, want if size else [want], strict=True):
        assert g.dtype == w.dtype
        np.testing.assert_array_equal(np.asarray(g).view(np.uint8), np.asarray(w).view(np.uint8))
    np.testing.assert_array_equal(got_lse, lse)
    assert np.asarray(got[0], np.float32)[:2].any() and not np.asarray(got[0], np.float32)[2:].any()


def test_nothing_to_do(implementation):
    none = attention.random_decode(np.random.default_rng(5), lens=[], window=(4, 2))
    assert run(none, implementation).shape == (0, 3, 512)
    case = attention.random_decode(np.random.default_rng(5), lens=[2, 0])
    case.arguments["window_cache"] = case.arguments["window_cache"][:0]
    case.arguments["cache"] = case.arguments["cache"][:0]
    o, lse = run(case, implementation, return_lse=True)
    assert not np.asarray(o, np.float32).any() and (np.asarray(lse) == np.inf).all()


def test_under_jit_without_recompilation():
    case = attention.random_decode(np.random.default_rng(6), lens=[3, 1])
    arguments = as_jax(case.arguments)
    static = {"window_page_rows": arguments.pop("window_page_rows"), "page_rows": arguments.pop("page_rows")}
    step = jax.jit(lambda arguments: sparse_mla_decode(**arguments, **static))
    for lens in ([3, 1], [0, 5], [5, 5]):
        step(arguments | {"window_lens": jnp.array(lens)})
    assert step._cache_size() == 1
    with pytest.raises(NotImplementedError, match="no derivative"):
        jax.grad(lambda q: step(arguments | {"q": q}).astype(jnp.float32).sum())(arguments["q"])


BAD = [
    ({"q": np.zeros((2, 3, 512), np.float32)}, TypeError, "q has dtype float32; it must be bfloat16"),
    (
        {"q": np.zeros((2, 3, 256), ml_dtypes.bfloat16)},
        ValueError,
        r"q has shape \[2, 3, 256\]; it must be \[T, H",
    ),
    ({"sink": np.zeros(4, np.float32)}, ValueError, r"sink has shape \[4\]; it must be \[3\]"),
    ({"window_indices": np.zeros((3, 5), np.int32)}, ValueError, r"window_indices has shape \[3, 5\]; it must be \[2"),
    ({"window_lens": np.zeros((2, 1), np.int32)}, ValueError, r"window_lens has shape \[2, 1\]; it must be \[2\]"),
    ({"lens": None}, ValueError, "lens is None; it must be given together with cache, indices, page_rows"),
    ({"page_rows": 0}, ValueError, "page_rows is 0; it must be an integer of at least 1"),
    ({"cache_format": "indexer_fp8"}, ValueError, "cache_format is 'indexer_fp8'; it must be one of 'fp8_ds_mla'"),
    ({"cache": np.zeros((4, 100), np.uint8)}, ValueError, r"cache has shape \(4, 100\); a fp8_ds_mla cache"),
    ({"kv_scale": 1.0}, ValueError, "kv_scale is 1.0; for the cache format fp8_ds_mla it must be None"),
    ({"positions": np.zeros(2, np.int32)}, ValueError, "cos_sin is None; positions and cos_sin must be given together"),
    ({"quant_group_size": 64}, ValueError, "positions is None; with quant_group_size, positions and cos_sin must be"),
    ({"softmax_scale": 0}, ValueError, "softmax_scale is 0; it must be above 0"),
    ({"implementation": "cuda"}, ValueError, "implementation is 'cuda'; it must be one of"),
]


@pytest.mark.parametrize(("wrong", "error", "says"), BAD, ids=[next(iter(b[0])) + str(i) for i, b in enumerate(BAD)])
def test_bad_input(wrong, error, says):
    case = attention.random_decode(np.random.default_rng(7), lens=[3, 1])
    with pytest.raises(error, match=says):
        sparse_mla_decode(**(case.arguments | case.options | wrong))
