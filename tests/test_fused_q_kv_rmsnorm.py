"""`fused_q_kv_rmsnorm` against float64, over widths, sizes, dtypes and magnitudes."""

import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from helpers import norm_oracle

import dsv4_jax

GPU_TOO = True
BF16, F32 = ml_dtypes.bfloat16, np.float32
INF, NAN = np.inf, np.nan


def run(q, kv, q_weight, kv_weight, eps=1e-6, implementation=None):
    arrays = (jnp.asarray(a) for a in (q, kv, q_weight, kv_weight))
    return [np.asarray(a) for a in dsv4_jax.fused_q_kv_rmsnorm(*arrays, eps, implementation=implementation)]


def check(q, kv, q_weight, kv_weight, eps=1e-6, implementation=None):
    """Runs the op and holds both results to float64."""
    got = run(q, kv, q_weight, kv_weight, eps, implementation)
    for result, x, weight in ((got[0], q, q_weight), (got[1], kv, kv_weight)):
        assert result.dtype == x.dtype
        norm_oracle.assert_near(result, *norm_oracle.rms_norm(x, weight, eps))
    return got


def draw(rng, *shape, dtype=BF16, scale=1.0):
    return (rng.standard_normal(shape) * scale).astype(dtype)


@pytest.mark.parametrize(
    ("tokens", "widths"),
    [
        (0, (1024, 512)),
        (1, (1024, 512)),
        (19, (1024, 512)),
        (7, (1536, 512)),
        (2, (1, 3)),
        (33, (1000, 77)),
        (3, (130, 5000)),
    ],
    ids=str,
)
def test_sizes(tokens, widths, implementation):
    rng = np.random.default_rng(tokens)
    q, kv = (draw(rng, tokens, w) for w in widths)
    check(q, kv, *(draw(rng, w, dtype=F32) for w in widths), implementation=implementation)


@pytest.mark.parametrize(
    ("dtypes", "weights"),
    [((F32, F32), (F32, BF16)), ((BF16, BF16), (BF16, F32)), ((F32, BF16), (BF16, BF16)), ((BF16, F32), (F32, F32))],
    ids=["f32", "bf16", "f32-bf16", "bf16-f32"],
)
def test_dtypes(dtypes, weights, implementation):
    rng = np.random.default_rng(1)
    q, kv = draw(rng, 5, 96, dtype=dtypes[0]), draw(rng, 5, 64, dtype=dtypes[1])
    check(q, kv, draw(rng, 96, dtype=weights[0]), draw(rng, 64, dtype=weights[1]), implementation=implementation)


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_magnitudes(dtype, implementation):
    """From squares that vanish beside eps, or in float32, to ones near its largest; rows of zeros."""
    rng = np.random.default_rng(2)
    scales = np.array([1e-38, 1e-25, 1e-10, 1e-3, 1.0, 1e3, 1e10, 1e17, 0.0])[:, None]
    q, kv = draw(rng, 9, 1536, dtype=dtype, scale=scales), draw(rng, 9, 512, dtype=dtype, scale=scales)
    for eps in (1e-6, 1e-12, 3.0):
        check(q, kv, draw(rng, 1536, dtype=F32), draw(rng, 512, dtype=F32), eps, implementation)


def test_by_hand(implementation):
    """[3, 4]: mean of squares 12.5, so 0.848528 and 1.131371; a row of one value becomes its sign times the weight."""
    q = np.array([[3, 4], [0, 0]], BF16)
    kv = np.full((2, 5), [[-8.0], [2.0**-20]], BF16)
    weight = np.array([1, 0.5, -3, 0, 2.0**-10], F32)
    q, kv = run(q, kv, np.ones(2, F32), weight, 1e-30, implementation)
    assert q.view(np.uint16).tolist() == [[0x3F59, 0x3F91], [0, 0]]  # 0.84765625, 1.1328125
    assert kv.astype(F32).tolist() == [[-1, -0.5, 3, 0, -(2.0**-10)], [1, 0.5, -3, 0, 2.0**-10]]


@pytest.mark.filterwarnings("ignore:overflow|invalid:RuntimeWarning")  # of the interpreter
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_not_finite(dtype, implementation):
    """A channel that is not finite makes its row NaN, a sum of squares past float32's largest makes it 0."""
    rng = np.random.default_rng(3)
    q, kv = draw(rng, 7, 96, dtype=dtype), draw(rng, 7, 33, dtype=dtype)
    q[0, 5], q[1, 95], q[2, 0], q[3, 7] = NAN, INF, -INF, 1e30
    kv[4, 32], kv[5, 0], kv[6] = -NAN, INF, -1e25
    got = check(q, kv, draw(rng, 96, dtype=F32), np.ones(33, F32), implementation=implementation)
    assert [np.isnan(g.astype(F32)).all(axis=1).nonzero()[0].tolist() for g in got] == [[0, 1, 2], [4, 5]]
    assert (got[0][3] == 0).all() and (got[1][6] == 0).all()

    weight = np.ones(96, F32)
    weight[[1, 2, 3]] = NAN, INF, -INF
    q = np.ones((7, 96), dtype)
    q[1, 2:4] = 0
    got = run(q, kv, weight, np.ones(33, F32), implementation=implementation)[0][:2]
    np.testing.assert_array_equal(got[:, 1:4].astype(F32), [[NAN, INF, -INF], [NAN, NAN, NAN]])
    assert np.isfinite(got[:, 4:].astype(F32)).all() and np.isfinite(got[:, 0].astype(F32)).all()
    if dtype == BF16:
        assert (got[:, 1].view(np.uint16) == 0x7FC0).all()


def test_under_jit_it_is_one_primitive(implementation):
    rng = np.random.default_rng(4)
    arrays = [draw(rng, 3, 48), draw(rng, 3, 16), draw(rng, 48, dtype=F32), draw(rng, 16, dtype=F32)]

    def op(*arrays):
        return dsv4_jax.fused_q_kv_rmsnorm(*arrays, implementation=implementation)

    assert [e.primitive.name for e in jax.make_jaxpr(op)(*arrays).eqns] == ["fused_q_kv_rmsnorm"]
    for result, x, weight in zip(jax.jit(op)(*arrays), arrays[:2], arrays[2:], strict=True):
        norm_oracle.assert_near(result, *norm_oracle.rms_norm(x, weight, 1e-6))


def test_a_wrong_value_is_found():
    rng = np.random.default_rng(5)
    x, weight = draw(rng, 4, 512), np.ones(512, F32)
    exact, error = norm_oracle.rms_norm(x, weight, 1e-6)
    norm_oracle.assert_near(exact.astype(BF16), exact, error)
    norm_oracle.assert_near(exact.astype(F32), exact, error)
    for dtype in (BF16, F32):
        with pytest.raises(AssertionError):
            norm_oracle.assert_near((exact * 1.0005).astype(dtype), exact, error)
    wrong = exact.astype(BF16)
    wrong.view(np.uint16)[2, 7] ^= 1
    with pytest.raises(AssertionError, match="1 values wrong"):
        norm_oracle.assert_near(wrong, exact, error)


ARGUMENTS = {
    "q": jnp.zeros((4, 12), jnp.bfloat16),
    "kv": jnp.zeros((4, 8), jnp.bfloat16),
    "q_weight": jnp.zeros(12),
    "kv_weight": jnp.zeros(8),
}


@pytest.mark.parametrize(
    ("name", "wrong", "error", "match"),
    [
        ("q", jnp.zeros((4, 12), jnp.float16), TypeError, "dtype float16; it must be float32 or bfloat16"),
        ("q", jnp.zeros(12), ValueError, "shape [12]; it must be [T, Dq]"),
        ("q", jnp.zeros((4, 0)), ValueError, "shape [4, 0]; it must have at least 1 channel"),
        ("q", [[1.0]], TypeError, "a list; it must be an array"),
        ("kv", jnp.zeros((4, 8), jnp.int32), TypeError, "dtype int32; it must be float32 or bfloat16"),
        ("kv", jnp.zeros((5, 8)), ValueError, "shape [5, 8]; it must be [4, Dkv]"),
        ("kv", jnp.zeros((4, 0)), ValueError, "shape [4, 0]; it must have at least 1 channel"),
        ("q_weight", jnp.zeros(8), ValueError, "shape [8]; it must be [12]"),
        ("q_weight", jnp.zeros(12, jnp.float16), TypeError, "dtype float16; it must be float32 or bfloat16"),
        ("kv_weight", jnp.zeros((1, 8)), ValueError, "shape [1, 8]; it must be [8]"),
        ("kv_weight", None, TypeError, "a NoneType; it must be an array"),
        ("eps", 0.0, ValueError, "0.0; it must be above 0"),
        ("eps", -1e-6, ValueError, "-1e-06; it must be above 0"),
        ("eps", 1e-50, ValueError, "1e-50; it must be above 0"),
        ("eps", NAN, ValueError, "nan; it must be above 0"),
        ("eps", INF, ValueError, "inf; it must be above 0"),
        ("eps", "1e-6", TypeError, "a str; it must be a number"),
        ("eps", True, TypeError, "a bool; it must be a number"),
        ("implementation", "cuda", ValueError, "'cuda'; it must be one of 'xla', 'triton', 'cutedsl'"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_input(name, wrong, error, match):
    with pytest.raises(error, match=rf"^{name} (has|is) {re.escape(match)}"):
        dsv4_jax.fused_q_kv_rmsnorm(**ARGUMENTS | {name: wrong})


def test_the_arguments_are_right():
    """What the cases start from raises nothing."""
    q, kv = dsv4_jax.fused_q_kv_rmsnorm(**ARGUMENTS, eps=1, implementation="xla")
    assert (q.shape, kv.shape) == ((4, 12), (4, 8))


def test_an_eps_that_is_traced():
    with pytest.raises(TypeError, match=r"eps is a \w*Tracer; it must be a number, known while tracing"):
        jax.jit(lambda eps: dsv4_jax.fused_q_kv_rmsnorm(**ARGUMENTS, eps=eps))(1e-6)
