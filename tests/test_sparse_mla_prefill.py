"""`sparse_mla_prefill` against attention in float64, and FlashMLA's outputs."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from helpers import attention, heads
from test_sparse_mla_decode import golden

from dsv4_jax import fused_inv_rope_fp8_quant, sparse_mla_prefill

GPU_TOO = True


def expected(q, kv, indices, lens, sink):
    keys = []
    for row, length in zip(indices.astype(np.int64), lens, strict=True):
        row = row[: max(length, 0)]
        keys.append(kv[row[(row >= 0) & (row < len(kv))]].astype(np.float64))
    return attention.attend(q, sink, keys)


def random_prefill(rng, *, heads, columns, rows, lens):
    """Arguments; a third of the buffer's rows, which nobody may read, is NaN."""
    kv = rng.standard_normal((rows, 512)).astype(ml_dtypes.bfloat16)
    kv[::3] = np.nan
    indices = rng.integers(0, rows // 3, (len(lens), columns)) * 3 + rng.integers(1, 3, (len(lens), columns))
    wrong = rng.random(indices.shape) < 0.2
    indices = np.where(wrong, rng.choice([-1, -(2**31), rows, 2**31 - 1], indices.shape), indices)
    for t, length in enumerate(lens):
        indices[t, max(length, 0) :] = 0
    q = rng.standard_normal((len(lens), heads, 512)).astype(ml_dtypes.bfloat16)
    sink = rng.standard_normal(heads).astype(np.float32)
    return q, kv, indices.astype(np.int32), np.array(lens, np.int32), sink


def test_golden(implementation):
    arrays = golden("prefill/any")
    given = [arrays[k] for k in ("q", "kv", "indices", "lens", "sink")]
    o, lse = sparse_mla_prefill(*map(jnp.asarray, given), return_lse=True, implementation=implementation)
    exact = expected(*given)
    attention.assert_near(o, exact, lse)
    tolerance = {"absolute": 8e-4, "relative": 3 / 128, "cosine": 7e-6}
    many = arrays["lens"] >= 100
    attention.assert_within_flashmla(o, exact.o, many, **tolerance)
    attention.assert_within_flashmla(o, arrays["out"], many, **tolerance)


@pytest.mark.parametrize(
    ("count", "columns", "lens"), [(1, 5, [0, 1, 5, 9, -3]), (17, 33, [33, 20]), (3, 0, [0, 4]), (2, 300, [300, 77])]
)
def test_sizes(count, columns, lens, implementation):
    given = random_prefill(np.random.default_rng(count), heads=count, columns=columns, rows=99, lens=lens)
    o, lse = sparse_mla_prefill(*map(jnp.asarray, given), return_lse=True, implementation=implementation)
    attention.assert_near(o, expected(*given), lse)


def test_no_rows(implementation):
    all_q, all_kv, *rest = random_prefill(np.random.default_rng(0), heads=2, columns=3, rows=9, lens=[3, 1])
    for q, kv in ((all_q, all_kv[:0]), (all_q[:, :0], all_kv)):
        rest[-1] = rest[-1][: q.shape[1]]
        o, lse = sparse_mla_prefill(*map(jnp.asarray, (q, kv, *rest)), return_lse=True, implementation=implementation)
        assert o.shape == q.shape and not np.asarray(o, np.float32).any() and (np.asarray(lse) == np.inf).all()


def test_rotated_and_quantized(implementation):
    rng = np.random.default_rng(1)
    given = tuple(map(jnp.asarray, random_prefill(rng, heads=3, columns=5, rows=9, lens=[5, 3])))
    positions, table = np.array([3, 8]), heads.random_table(rng, 9)
    o = sparse_mla_prefill(*given, implementation=implementation)
    options = {"positions": positions, "cos_sin": table, "quant_group_size": 128}
    got = sparse_mla_prefill(*given, **options, implementation=implementation)
    want = fused_inv_rope_fp8_quant(o, positions, table, 3, 1, implementation="xla")
    for g, w in zip(got, want, strict=True):
        np.testing.assert_array_equal(np.asarray(g).view(np.uint8), np.asarray(w).view(np.uint8))


def test_bad_input():
    q, kv, indices, lens, sink = random_prefill(np.random.default_rng(2), heads=2, columns=3, rows=9, lens=[3, 1])
    with pytest.raises(TypeError, match="kv has dtype float32; it must be bfloat16"):
        sparse_mla_prefill(q, kv.astype(np.float32), indices, lens, sink)
    with pytest.raises(ValueError, match=r"indices has shape \[1, 3\]; it must be \[2, K\]"):
        sparse_mla_prefill(q, kv, indices[:1], lens, sink)
    with pytest.raises(ValueError, match=r"lens has shape \[1\]; it must be \[2\]"):
        sparse_mla_prefill(q, kv, indices, lens[:1], sink)
