"""`fused_qnorm_rope_kv_rope_quant_insert` against float64: the heads, and the bytes of the cache."""

import pathlib
import re
import types

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from helpers import norm_oracle, ops, oracle
from hypothesis import given, settings
from hypothesis import strategies as st

import dsv4_jax

GPU_TOO = True
ON_GPU = jax.default_backend() != "cpu"
BF16 = ml_dtypes.bfloat16
INF, NAN = np.inf, np.nan
FORMATS = ("fp8_ds_mla", "bf16", "fp8")
TABLE = dsv4_jax.Yarn(theta=100.0).table(40)


def draw(rng, *shape, scale=1.0):
    return (rng.standard_normal(shape) * scale).astype(BF16)


def empty_cache(fmt, pages, page_rows, *, padding=0):
    """A cache whose bytes are 0xA5 everywhere."""
    form = oracle.FORMATS[fmt]
    if fmt == "fp8_ds_mla":
        return np.full((pages, page_rows * form.row_bytes + padding), 0xA5, np.uint8)
    dtype = BF16 if fmt == "bf16" else oracle.FP8
    return np.full((pages, page_rows, form.value_bytes), 0xA5, np.uint8).view(dtype)


def run(q, kv, cache, slots, positions, cos_sin=TABLE, eps=1e-6, **options):
    arrays = (jnp.asarray(a) for a in (q, kv, cache, slots, positions, cos_sin))
    heads, cache = dsv4_jax.fused_qnorm_rope_kv_rope_quant_insert(*arrays, eps, **options)
    return np.asarray(heads), np.asarray(cache)


def check(
    q, kv, cache, slots, positions, cos_sin=TABLE, eps=1e-6, *, fmt, page_rows, implementation, padded_heads=None
):
    """Runs the op and holds the heads and the cache to float64; returns both."""
    scale = np.float32(0.37) if fmt == "fp8" else None
    heads, after = run(
        q, kv, cache, slots, positions, cos_sin, eps, page_rows=page_rows, cache_format=fmt, kv_scale=scale,
        padded_heads=padded_heads, implementation=implementation,
    )  # fmt: skip
    padded_heads = padded_heads if padded_heads is not None else 64 if q.shape[1] <= 64 else 128
    assert heads.shape == (len(q), padded_heads, 512) and heads.dtype == BF16
    slots, positions = np.asarray(slots, np.int64), np.asarray(positions, np.int64)
    inside = (positions >= 0) & (positions < len(cos_sin))
    assert (heads[~inside].view(np.uint16) == 0).all() and (heads[:, q.shape[1] :].view(np.uint16) == 0).all()
    exact = norm_oracle.rms_norm(q[inside], np.ones(512), eps)
    exact = norm_oracle.rotate(*exact, cos_sin[positions[inside]])
    norm_oracle.assert_near(heads[inside, : q.shape[1]], *exact)

    if not len(cache):
        assert after.shape == cache.shape
        return heads, after
    stored = np.flatnonzero(inside & (slots >= 0) & (slots < len(cache) * page_rows))
    keys = np.asarray(kv[stored], np.float64)
    keys, error = norm_oracle.rotate(keys, np.zeros_like(keys), cos_sin[positions[stored]])
    error[:, :448] = 0
    rows = oracle.Rows(stored, slots[stored], keys, keys - error, keys + error)
    config = types.SimpleNamespace(cache_format=fmt, kv_page_rows=page_rows)
    oracle.assert_same_cache(after, cache, rows, config, scale=scale)
    return heads, after


SIZES = [  # fmt, tokens, heads, padded_heads, page_rows, page padding
    ("fp8_ds_mla", 0, 2, None, 64, 0),
    ("fp8_ds_mla", 1, 1, 1, 1, 4),
    ("fp8_ds_mla", 2, 16, None, 2, 100),  # padded to 64
    ("fp8_ds_mla", 2, 65, None, 64, 40),  # to 128
    ("fp8_ds_mla", 9, 3, 11, 4, 8),
    ("fp8_ds_mla", 4, 0, 4, 2, 0),
    ("fp8_ds_mla", 4, 0, 0, 2, 0),
    ("bf16", 0, 1, 1, 1, 0),
    ("bf16", 5, 8, 8, 3, 0),
    ("bf16", 2, 130, 130, 64, 0),
    ("fp8", 0, 1, 1, 1, 0),
    ("fp8", 7, 2, 4, 2, 0),
    ("fp8", 3, 17, 24, 1, 0),
]


@pytest.mark.parametrize(("fmt", "tokens", "heads", "padded_heads", "page_rows", "padding"), SIZES, ids=str)
def test_sizes(fmt, tokens, heads, padded_heads, page_rows, padding, implementation):
    rng = np.random.default_rng(tokens)
    pages = 2 * tokens // page_rows + 2
    cache = empty_cache(fmt, pages, page_rows, padding=padding)
    slots = rng.permutation(pages * page_rows)[:tokens].astype(np.int32)
    positions = rng.integers(0, len(TABLE), tokens).astype(np.int32)
    check(
        draw(rng, tokens, heads, 512), draw(rng, tokens, 512), cache, slots, positions,
        fmt=fmt, page_rows=page_rows, padded_heads=padded_heads, implementation=implementation,
    )  # fmt: skip


@pytest.mark.parametrize("fmt", FORMATS)
def test_magnitudes(fmt, implementation):
    """Heads whose squares vanish beside eps, or nearly overflow; keys below the least amax and above fp8's range."""
    rng = np.random.default_rng(1)
    scales = np.array([1e-38, 1e-25, 1e-7, 1e-4, 1e-2, 1.0, 1e3, 1e10, 1e17, 0.0])
    q = draw(rng, 10, 2, 512, scale=scales[:, None, None])
    kv = draw(rng, 10, 512, scale=np.maximum(scales, 1e-30)[:, None])
    kv[9] = 0
    # Blocks of different magnitudes within a key.
    kv[5] = (kv[5].astype(np.float64) * np.repeat(2.0 ** np.arange(-20, 20, 5), 64)).astype(BF16)
    cache = empty_cache(fmt, 3, 4, padding=8)
    check(
        q, kv, cache, np.arange(10, dtype=np.int32), np.arange(10, 20, dtype=np.int32), eps=1e-5,
        fmt=fmt, page_rows=4, padded_heads=2, implementation=implementation,
    )  # fmt: skip


FAR = 2**31 - 1
indices = st.lists(st.sampled_from([-FAR - 1, -7, -1, 0, 1, 2, 4, 5, 6, 11, FAR - 1, FAR]), min_size=6, max_size=6)


@settings(max_examples=10, deadline=None, derandomize=True)
@given(
    slots=st.lists(st.integers(-3, 8), min_size=6, max_size=6, unique=True),
    far=st.lists(st.sampled_from([None] * 4 + [-FAR - 1, FAR - 1, FAR]), min_size=6, max_size=6),
    positions=indices,
    seed=st.integers(0, 99),
)
def check_any_indices(implementation, slots, far, positions, seed):
    rng = np.random.default_rng(seed)
    slots = np.array([s if f is None else f for s, f in zip(slots, far, strict=True)], np.int32)
    positions = np.array(positions, np.int32)
    check(
        draw(rng, 6, 1, 512), draw(rng, 6, 512), empty_cache("fp8_ds_mla", 2, 3, padding=4), slots, positions,
        TABLE[:5], fmt="fp8_ds_mla", page_rows=3, padded_heads=2, implementation=implementation,
    )  # fmt: skip


def test_any_indices(implementation):
    """Slots outside the cache store nothing; positions outside the table store nothing and give heads of zeros."""
    check_any_indices(implementation)


@pytest.mark.parametrize("fmt", FORMATS)
def test_empty(fmt, implementation):
    """A table of no positions; a cache of no pages, which still gives heads."""
    rng = np.random.default_rng(2)
    q, kv, zeros = draw(rng, 3, 2, 512), draw(rng, 3, 512), np.zeros(3, np.int32)
    rest = {"fmt": fmt, "page_rows": 4, "padded_heads": 3, "implementation": implementation}
    heads, _ = check(q, kv, empty_cache(fmt, 2, 4), zeros, zeros, TABLE[:0], **rest)
    assert not heads.any()
    heads, after = check(q, kv, empty_cache(fmt, 0, 4), zeros, zeros, **rest)
    assert heads[:, :2].any(axis=2).all() and after.shape[0] == 0


def test_int64_slots():
    """Beyond int32 they are outside, not wrapped round."""
    rng = np.random.default_rng(3)
    cache, slots = empty_cache("bf16", 1, 4), np.array([2**32 + 1, -(2**32) + 2, 3], np.int64)
    arrays = draw(rng, 3, 1, 512), draw(rng, 3, 512), jnp.asarray(cache)
    for positions in (np.zeros(3, np.int64), np.array([2**32, 0, -(2**33)], np.int64)):
        heads, after = dsv4_jax.fused_qnorm_rope_kv_rope_quant_insert(
            *arrays, slots, positions, TABLE, page_rows=4, cache_format="bf16", padded_heads=1
        )
        inside = positions == 0
        assert (np.asarray(heads).astype(bool).any(axis=(1, 2)) == inside).all()
        changed = (oracle.as_pages(after) != oracle.as_pages(cache)).reshape(4, 1024).any(axis=1)
        assert changed.tolist() == [False, False, False, bool(inside[2])]


def test_heads_by_hand(implementation):
    """A head of one magnitude becomes its signs; a quarter turn takes (a, b) to (-b, a); padding is +0."""
    q = np.full((2, 1, 512), 2.0**-30, BF16)
    q[:, :, 1::2] *= -1
    turns = np.zeros((2, 64), np.float32)
    turns[0, :32] = -1.0  # half a turn
    turns[1, 32:] = 1.0  # a quarter
    heads, _ = run(
        q, np.zeros((2, 512), BF16), empty_cache("bf16", 1, 1), [-1, -1], np.array([0, 1]), turns, 1e-30,
        page_rows=1, cache_format="bf16", padded_heads=2, implementation=implementation,
    )  # fmt: skip
    want = np.tile([1.0, -1.0], 256)
    assert heads[:, 0, :448].tolist() == [want[:448].tolist()] * 2
    assert heads[:, 0, 448:].tolist() == [[-1.0, 1.0] * 32, [1.0, 1.0] * 32]
    assert not heads[:, 1].view(np.uint16).any()


@pytest.mark.filterwarnings("ignore:overflow|invalid:RuntimeWarning")  # of the interpreter
@pytest.mark.parametrize("fmt", FORMATS)
def test_not_finite(fmt, implementation):
    """In q the whole head is NaN; in kv what `CacheFormat.pack` makes of the rotated key."""
    rng = np.random.default_rng(4)
    q, kv = draw(rng, 5, 3, 512), draw(rng, 5, 512)
    q[0, 1, 3], q[1, 0, 511], q[2, 2, 448], q[3, 1, 7] = NAN, INF, -INF, 1e30
    kv[0, 70], kv[1, 500], kv[2, 449], kv[3, 0], kv[3, 64:128] = NAN, -NAN, INF, -INF, INF
    turns = np.array([[1.0] * 32 + [0.0] * 32, [0.0] * 32 + [1.0] * 32, [0.5] * 32 + [0.75] * 32], np.float32)
    positions = np.array([0, 1, 2, 0, 2])
    cache = empty_cache(fmt, 2, 3)
    heads, after = run(
        q, kv, cache, np.arange(5), positions, turns, page_rows=3, cache_format=fmt, padded_heads=4,
        kv_scale=0.5 if fmt == "fp8" else None, implementation=implementation,
    )  # fmt: skip
    codes = heads.view(np.uint16)
    for token, head in ((0, 1), (1, 0), (2, 2)):
        assert (codes[token, head] == 0x7FC0).all()
    assert not (codes[3, 1] & 0x7FFF).any()  # the squares are beyond float32
    others = np.ones((5, 4), bool)
    others[[0, 1, 2, 3], [1, 0, 2, 1]] = others[:, 3] = False
    assert np.isfinite(heads[others].astype(np.float32)).all() and heads[others].any(axis=1).all()
    keys, _ = norm_oracle.rotate(kv, np.zeros(kv.shape), turns[positions])
    assert np.isnan(keys[0, 70]) and np.isnan(keys[1, 500:502]).all() and np.isinf(keys[2, 448:450]).all()
    want = oracle.quantize(fmt, keys, scale=0.5)
    ops.same_bytes(after, oracle.store(fmt, oracle.as_pages(cache), *want, np.arange(5), 3))


@pytest.mark.parametrize("fmt", FORMATS)
def test_in_place(fmt, implementation):
    """One primitive; a donated cache is updated where it is, and no instruction copies it.

    On the CPU the Triton interpreter is a callback, whose results are new buffers, and XLA copies an fp8 array to see
    it as bytes; there only the bytes are held.
    """
    rng = np.random.default_rng(5)
    q, kv, cache = draw(rng, 4, 2, 512), draw(rng, 4, 512), empty_cache(fmt, 4, 2)
    slots, positions = np.array([3, -1, 0, 6], np.int32), np.array([3, 4, 5, 39], np.int32)
    scale = np.float32(0.37) if fmt == "fp8" else None

    def op(cache, *rest):
        q, kv, slots, positions = rest
        return dsv4_jax.fused_qnorm_rope_kv_rope_quant_insert(
            q, kv, cache, slots, positions, TABLE, page_rows=2, cache_format=fmt, kv_scale=scale, padded_heads=3,
            implementation=implementation,
        )  # fmt: skip

    arguments = [jnp.array(a, copy=True) for a in (cache, q, kv, slots, positions)]
    assert [e.primitive.name for e in jax.make_jaxpr(op)(*arguments).eqns] == ["fused_qnorm_rope_kv_rope_quant_insert"]
    compiled = jax.jit(op, donate_argnums=0).lower(*arguments).compile()
    address = arguments[0].unsafe_buffer_pointer()
    heads, after = compiled(*arguments)
    if ON_GPU or (implementation == "xla" and fmt != "fp8"):
        assert not ops.copies(compiled, after)
        assert after.unsafe_buffer_pointer() == address and arguments[0].is_deleted()
    rest = {"fmt": fmt, "page_rows": 2, "padded_heads": 3, "implementation": implementation}
    same_heads, same_cache = check(q, kv, cache, slots, positions, **rest)
    ops.same_bytes(after, same_cache)
    ops.same_bytes(heads, same_heads)


def test_without_donation_the_cache_stays(implementation):
    rng = np.random.default_rng(6)
    cache = jnp.array(empty_cache("fp8_ds_mla", 2, 2), copy=True)
    _, after = run(
        draw(rng, 1, 1, 512), draw(rng, 1, 512), cache, [1], np.zeros(1, np.int32), page_rows=2, padded_heads=1,
        implementation=implementation,
    )  # fmt: skip
    assert (np.asarray(cache) == 0xA5).all() and (after != 0xA5).any()


def test_a_wrong_result_is_found(monkeypatch):
    rng = np.random.default_rng(7)
    arrays = draw(rng, 3, 2, 512), draw(rng, 3, 512), empty_cache("fp8_ds_mla", 2, 2), [0, 3, 1], np.arange(3)
    right = run(*arrays, page_rows=2, padded_heads=3)
    options = {"fmt": "fp8_ds_mla", "page_rows": 2, "padded_heads": 3, "implementation": "xla"}

    def with_flipped(which, *index):
        results = [np.array(r, copy=True) for r in right]
        results[which].view(np.uint16 if which == 0 else np.uint8)[index] ^= 1
        monkeypatch.setitem(globals(), "run", lambda *_, **__: results)
        with pytest.raises(AssertionError):
            check(*arrays, **options)

    with_flipped(0, 1, 1, 400)
    with_flipped(0, 1, 1, 500)
    with_flipped(0, 2, 2, 0)  # a padded head
    with_flipped(1, 0, 577)  # a value of row 1
    with_flipped(1, 1, 0)  # row 2, that no slot names


def test_the_program_in_the_docs(capsys):
    """It prints what its comment says."""
    text = (pathlib.Path(__file__).parents[1] / "docs" / "ops.md").read_text()
    (program,) = [p for p in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "fused_q_kv_rmsnorm" in p]
    said = re.findall(r"^print\(.*\)  # (.*)$", program, re.MULTILINE)
    exec(program, {})
    assert said and capsys.readouterr().out.splitlines() == said


def arguments(fmt="fp8_ds_mla"):
    return {
        "q": jnp.zeros((4, 2, 512), jnp.bfloat16),
        "kv": jnp.zeros((4, 512), jnp.bfloat16),
        "cache": jnp.asarray(empty_cache(fmt, 2, 8)),
        "slots": jnp.zeros(4, jnp.int32) - 1,
        "positions": jnp.zeros(4, jnp.int32),
        "cos_sin": jnp.asarray(TABLE),
        "page_rows": 8,
        "cache_format": fmt,
    }


BAD = [
    ("q", jnp.zeros((4, 2, 512)), TypeError, "has dtype float32; it must be bfloat16"),
    ("q", jnp.zeros((4, 512), jnp.bfloat16), ValueError, "has shape [4, 512]; it must be [T, h, 512]"),
    ("q", jnp.zeros((4, 2, 128), jnp.bfloat16), ValueError, "has shape [4, 2, 128]; it must be [T, h, 512]"),
    ("q", jnp.zeros((4, 129, 512), jnp.bfloat16), ValueError, "has 129 heads; above 128 padded_heads must be given"),
    ("kv", jnp.zeros((4, 512)), TypeError, "has dtype float32; it must be bfloat16"),
    ("kv", jnp.zeros((5, 512), jnp.bfloat16), ValueError, "has shape [5, 512]; it must be [4, 512]"),
    ("kv", None, TypeError, "is a NoneType; it must be an array"),
    (
        "cache",
        jnp.zeros((2, 8, 512), jnp.bfloat16),
        TypeError,
        "has dtype bfloat16; a fp8_ds_mla cache must have uint8",
    ),
    ("cache", jnp.zeros((2, 4668), jnp.uint8), ValueError, "has shape (2, 4668); a fp8_ds_mla cache of 8 rows"),
    ("cache", "text", TypeError, "is a str; it must be an array"),
    ("slots", jnp.zeros(4), TypeError, "has dtype float32; it must be int32 or int64"),
    ("slots", jnp.zeros(3, jnp.int32), ValueError, "has shape [3]; it must be [4]"),
    ("positions", jnp.zeros(4, jnp.uint32), TypeError, "has dtype uint32; it must be int32 or int64"),
    ("positions", jnp.zeros((1, 4), jnp.int32), ValueError, "has shape [1, 4]; it must be [4]"),
    ("cos_sin", jnp.zeros((9, 64), jnp.bfloat16), TypeError, "has dtype bfloat16; it must be float32"),
    ("cos_sin", jnp.zeros((9, 32)), ValueError, "has shape [9, 32]; it must be [P, 64]"),
    ("eps", 0.0, ValueError, "is 0.0; it must be above 0"),
    ("eps", None, TypeError, "is a NoneType; it must be a number"),
    ("page_rows", 0, ValueError, "is 0; it must be an integer of at least 1"),
    ("padded_heads", 1, ValueError, "is 1; it must be an integer of at least 2"),
    ("padded_heads", 64.0, ValueError, "is 64.0; it must be an integer of at least 2"),
    ("cache_format", "indexer_fp8", ValueError, "is 'indexer_fp8'; it must be one of 'fp8_ds_mla', 'bf16', 'fp8'"),
    ("kv_scale", 1.0, ValueError, "is 1.0; for the cache format fp8_ds_mla it must be None"),
    ("implementation", "cuda", ValueError, "is 'cuda'; it must be one of 'xla', 'triton', 'cutedsl'"),
]


@pytest.mark.parametrize(("name", "wrong", "error", "match"), BAD, ids=[f"{b[0]}-{i}" for i, b in enumerate(BAD)])
def test_bad_input(name, wrong, error, match):
    with pytest.raises(error, match=rf"^{name} {re.escape(match)}"):
        dsv4_jax.fused_qnorm_rope_kv_rope_quant_insert(**arguments() | {name: wrong})


@pytest.mark.parametrize("fmt", FORMATS)
def test_kv_scale(fmt):
    """What the cases above start from raises nothing; the format fp8 needs a scalar."""
    op = dsv4_jax.fused_qnorm_rope_kv_rope_quant_insert
    if fmt != "fp8":
        op(**arguments(fmt))
        return
    for scale in (2, 0.5, np.float32(0.5), jnp.float32(0.5)):
        heads, _ = op(**arguments(fmt), kv_scale=scale)
        assert heads.shape == (4, 64, 512)
    for wrong, error, got in (
        (None, ValueError, "is None"),
        (jnp.zeros(1), ValueError, "[1]"),
        ("x", TypeError, "str"),
    ):
        with pytest.raises(error, match=rf"^kv_scale .*{re.escape(got)}.* must be"):
            op(**arguments(fmt), kv_scale=wrong)
