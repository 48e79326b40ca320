"""Cache formats: how a key becomes bytes, where the bytes lie in a page, and how to read them back.

Every kernel must follow the rounding rules in this file. A packed format (uint8 pages) puts all values of a page first,
row after row, then all scales, row after row. A plain format is an ordinary array `[pages, rows, head_dim]`.
"""

import dataclasses
import math
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from dsv4_jax import checks
from dsv4_jax.promotion import own_rules

ROPE_DIM = 64
FP8_MAX = 448.0
FP4_MAX = 6.0
FP8_AMAX_MIN = 1e-4
FP4_AMAX_MIN = 6.0 * 2.0**-126
FP8_NAN = 0x7F  # the only NaN that is stored; its sign is dropped
BF16_NAN = 0x7FC0
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclasses.dataclass(frozen=True)
class CacheFormat:
    """The layout of one kind of compressed cache.

    Attributes:
      name: vLLM's name of the format, if vLLM has it.
      head_dim: channels of a key.
      value_bytes: bytes of one row's values.
      scale_bytes: bytes of one row's scales.
      dtype: dtype of the cache array; uint8 means packed pages.
      page_align: page_bytes is padded to a multiple of this by default.
    """

    name: str
    head_dim: int
    value_bytes: int
    scale_bytes: int
    dtype: jnp.dtype
    page_align: int = 1

    @property
    def row_bytes(self) -> int:
        """Bytes of one key, scales included."""
        return self.value_bytes + self.scale_bytes

    @property
    def packed(self) -> bool:
        """Whether the cache is `[pages, page_bytes]` uint8."""
        return self.dtype == jnp.uint8

    @property
    def fp8(self) -> bool:
        """Whether values are float8_e4m3fn."""
        return self.name in ("fp8_ds_mla", "fp8", "indexer_fp8")

    @property
    def needs_scale(self) -> bool:
        """Whether the caller gives the scale that values are divided by."""
        return self.name == "fp8"

    def page_bytes(self, page_rows: int) -> int:
        """Bytes per page of `page_rows` rows, padded as vLLM pads it."""
        return -(-page_rows * self.row_bytes // self.page_align) * self.page_align

    def allocate(self, pages: int, page_rows: int, *, page_bytes: int | None = None) -> jax.Array:
        """Returns a cache of zeros: `[pages, page_bytes]` uint8 or `[pages, page_rows, head_dim]`.

        Args:
          pages: number of pages.
          page_rows: rows per page.
          page_bytes: length of a packed page; by default `self.page_bytes(page_rows)`.
        """
        if pages < 0 or page_rows < 1:
            raise ValueError(f"pages is {pages}, page_rows {page_rows}; they must be at least 0 and 1")
        if not self.packed:
            if page_bytes is not None:
                raise ValueError(f"page_bytes is {page_bytes}; a {self.name} cache has no page padding, leave it out")
            return jnp.zeros((pages, page_rows, self.head_dim), self.dtype)
        shape = (pages, self.page_bytes(page_rows) if page_bytes is None else page_bytes)
        self.check_cache("page_bytes", jax.ShapeDtypeStruct(shape, self.dtype), page_rows)
        return jnp.zeros(shape, self.dtype)

    def check_cache(self, name: str, cache, page_rows: int) -> None:
        """Raises unless `cache` (an array or its type) can hold pages of `page_rows` rows of this format."""
        checks.not_a_ref(name, cache)
        if not hasattr(cache, "dtype") or not hasattr(cache, "shape"):
            raise TypeError(f"{name} is a {type(cache).__name__}; it must be an array")
        if cache.dtype != self.dtype:
            raise TypeError(f"{name} has dtype {cache.dtype}; a {self.name} cache must have {self.dtype}")
        if not self.packed:
            if cache.ndim != 3 or cache.shape[1:] != (page_rows, self.head_dim):
                want = f"[pages, {page_rows}, {self.head_dim}]"
                raise ValueError(f"{name} has shape {cache.shape}; a {self.name} cache must have {want}")
            return
        least = page_rows * self.row_bytes
        if cache.ndim != 2 or cache.shape[1] < least or cache.shape[1] % 4:
            raise ValueError(
                f"{name} has shape {cache.shape}; a {self.name} cache of {page_rows} rows a page must be [pages, "
                f"page_bytes], page_bytes a multiple of 4 and at least {least}"
            )

    def check_scale(self, name: str, scale) -> jax.Array | None:
        """Returns the divisor of values, `[]` float32 or None; raises if it is missing or not wanted.

        A number or a NumPy array must be positive, finite and of float32's range. The values of JAX arrays are not
        checked: they may be traced.
        """
        if self.needs_scale == (scale is None):
            must = "a float32 scalar" if self.needs_scale else "None"
            raise ValueError(f"{name} is {scale!r}; for the cache format {self.name} it must be {must}")
        if scale is None:
            return None
        if isinstance(scale, int | float):
            scale = np.float32(checks.positive(name, scale))
        checked = checks.array(name, scale, ())
        if isinstance(scale, np.generic | np.ndarray):
            checks.positive(name, np.float32(scale))
        return checked

    def _needed_scale(self, scale) -> jax.Array:
        return cast(jax.Array, self.check_scale("scale", scale))

    @own_rules()
    def pack(self, keys: jax.Array, scale: jax.Array | None = None) -> tuple[jax.Array, jax.Array]:
        """Quantizes finished keys (after RMSNorm and RoPE).

        A block's scale exponent comes from the bits of its largest magnitude, in which NaN counts as infinity, and
        infinity as the largest finite bfloat16. NaN is stored as 0x7F (fp8), 0x7FC0 (bf16) or +6 (E2M1, which has no
        NaN; the scale then makes every value of the block overflow to infinity). Infinity saturates in fp8 and E2M1.

        Args:
          keys: `[..., head_dim]` float32.
          scale: `[]` float32, the divisor of values; only for the format `fp8`.

        Returns:
          values `[..., value_bytes]` and scales `[..., scale_bytes]`, both uint8.
        """
        if keys.shape[-1] != self.head_dim:
            raise ValueError(f"keys has shape {keys.shape}; its last axis must be {self.head_dim} for {self.name}")
        keys = keys.astype(jnp.float32)
        if self.name == "fp8_ds_mla":
            nope, rope = keys[..., :-ROPE_DIM], keys[..., -ROPE_DIM:]
            values, exponents = quantize_fp8(_round_bf16(nope), block=64)
            values = jnp.concatenate([values, _bytes(bf16(rope))], axis=-1)
            return values, jnp.pad(e8m0(exponents), [(0, 0)] * (keys.ndim - 1) + [(0, 1)])
        if self.name == "indexer_fp8":
            values, exponents = quantize_fp8(_round_bf16(keys), block=128)
            return values, _bytes(pow2(exponents))
        if self.name == "indexer_mxfp4":
            codes, exponents = _quantize_fp4(keys, block=32)
            return codes[..., 0::2] | codes[..., 1::2] << 4, e8m0(exponents)
        if self.name == "bf16":
            return _bytes(bf16(keys)), jnp.zeros((*keys.shape[:-1], 0), jnp.uint8)
        # A row for each key: XLA would multiply by the inverse of a scalar or of one row, which rounds differently.
        divisor = jnp.where(jnp.isnan(keys), jnp.nan, self._needed_scale(scale))
        return _fp8(keys / divisor), jnp.zeros((*keys.shape[:-1], 0), jnp.uint8)

    @own_rules()
    def store(
        self, cache: jax.Array, values: jax.Array, scales: jax.Array, slots: jax.Array, page_rows: int
    ) -> jax.Array:
        """Writes packed rows at their slots; a slot outside the cache writes nothing.

        Args:
          cache: as `allocate` returns it.
          values: `[N, value_bytes]` uint8, as `pack` returns them.
          scales: `[N, scale_bytes]` uint8, as `pack` returns them.
          slots: `[N]` int32, `page * page_rows + row`; those inside the cache are distinct.
          page_rows: rows per page.
        """
        inside = (slots >= 0) & (slots // page_rows < cache.shape[0])
        # JAX counts negative indices from the end; a page past the end is dropped.
        page = jnp.where(inside, slots // page_rows, cache.shape[0])
        row = slots % page_rows
        if not self.packed:
            if self.dtype == jnp.bfloat16:
                rows = lax.bitcast_convert_type(_blocks(values, 2), self.dtype)
                return cache.at[page, row].set(rows, mode="drop")
            return lax.platform_dependent(cache, page, row, values, cpu=_set_fp8_as_bytes, default=_set_fp8)
        cache = _scatter_bytes(cache, page, row * self.value_bytes, values)
        return _scatter_bytes(cache, page, page_rows * self.value_bytes + row * self.scale_bytes, scales)

    @own_rules()
    def load(self, cache: jax.Array, slots: jax.Array, page_rows: int) -> tuple[jax.Array, jax.Array]:
        """Reads rows in the form that `store` takes; a slot outside the cache reads zeros.

        Returns:
          values `[N, value_bytes]` and scales `[N, scale_bytes]`, both uint8.
        """
        inside = (slots >= 0) & (slots // page_rows < cache.shape[0])
        page = jnp.where(inside, slots // page_rows, cache.shape[0])
        row = slots % page_rows
        if not self.packed:
            values = _bytes(cache.at[page, row].get(mode="fill", fill_value=0))
            return values, jnp.zeros((slots.shape[0], 0), jnp.uint8)
        values = _gather_bytes(cache, page, row * self.value_bytes, self.value_bytes)
        offset = page_rows * self.value_bytes + row * self.scale_bytes
        return values, _gather_bytes(cache, page, offset, self.scale_bytes)

    @own_rules()
    def unpack(
        self,
        cache: jax.Array,
        slots: jax.Array,
        page_rows: int,
        *,
        scale: jax.Array | None = None,
        dtype: jnp.dtype = jnp.float32,
    ) -> jax.Array:
        """Dequantizes the rows at `slots`: value times scale, in float32; the scale byte 255 means NaN.

        Args:
          cache: as `allocate` returns it.
          slots: `[N]` int32; a slot outside the cache gives zeros.
          page_rows: rows per page.
          scale: `[]` float32, the factor of values; only for the format `fp8`.
          dtype: dtype of the result, float32 or bfloat16. For bfloat16, what is stored as bfloat16 keeps its bits;
            products are rounded to nearest, and NaN becomes 0x7FC0.

        Returns:
          `[N, head_dim]` of `dtype`.
        """
        checks.one_of("dtype", jnp.dtype(dtype), checks.FLOATS)
        checks.at_least("page_rows", page_rows, 1)
        self.check_cache("cache", cache, page_rows)
        slots = checks.integers("slots", slots, ("N",))
        values, scales = self.load(cache, slots, page_rows)
        narrow = bf16 if dtype == jnp.bfloat16 else lambda x: x
        if self.name == "fp8_ds_mla":
            nope, rope = values[:, : -2 * ROPE_DIM], values[:, -2 * ROPE_DIM :]
            nope = _scaled(_from_fp8(nope), scales[:, :7].astype(jnp.int32) - 127)
            return jnp.concatenate([narrow(nope), _as_bf16(rope).astype(dtype)], axis=1)
        if self.name == "indexer_fp8":
            return narrow(_from_fp8(values) * lax.bitcast_convert_type(scales, jnp.float32)[:, None])
        if self.name == "indexer_mxfp4":
            codes = jnp.stack([values & 0xF, values >> 4], axis=-1).reshape(-1, self.head_dim)
            magnitudes = jnp.array(E2M1_VALUES, jnp.float32)[codes & 7]
            return narrow(_scaled(jnp.where(codes >= 8, -magnitudes, magnitudes), scales.astype(jnp.int32) - 127))
        if self.name == "bf16":
            return _as_bf16(values).astype(dtype)
        return narrow(_from_fp8(values) * self._needed_scale(scale))


CACHE_FORMATS = {
    f.name: f
    for f in (
        CacheFormat("fp8_ds_mla", 512, 448 + 2 * ROPE_DIM, 8, jnp.dtype(jnp.uint8), page_align=576),
        CacheFormat("indexer_fp8", 128, 128, 4, jnp.dtype(jnp.uint8)),
        CacheFormat("indexer_mxfp4", 128, 64, 4, jnp.dtype(jnp.uint8)),
        CacheFormat("bf16", 512, 1024, 0, jnp.dtype(jnp.bfloat16)),
        CacheFormat("fp8", 512, 512, 0, jnp.dtype(jnp.float8_e4m3fn)),
    )
}
"""The cache formats, by name."""


def page_stride(cache) -> int:
    """Bytes from one page to the next, for a cache of any format."""
    return math.prod(cache.shape[1:]) * cache.dtype.itemsize


def quantize_fp8(x, block, amax_min=FP8_AMAX_MIN):
    """The fp8 codes of x, and the exponent of each block's scale."""
    blocks = _blocks(x, block)
    e = _scale_exponent(_amax(blocks, amax_min), FP8_MAX)
    return _fp8(blocks * pow2(-e)[..., None]).reshape(x.shape), e


def _quantize_fp4(x, block):
    """The E2M1 codes (one a byte) of bf16-rounded x, and the exponent of each block's scale."""
    blocks = _blocks(_round_bf16(x), block)
    e = _scale_exponent(_amax(blocks, FP4_AMAX_MIN), FP4_MAX)
    x = (blocks * pow2(-e)[..., None]).reshape(x.shape)
    a = jnp.abs(x)
    # Midpoints between neighbors; each rounds to the even code.
    code = sum((a > t).astype(jnp.uint8) for t in (0.25, 1.25, 2.5, 5.0))
    code += sum((a >= t).astype(jnp.uint8) for t in (0.75, 1.75, 3.5))
    code |= jnp.where(jnp.signbit(x), jnp.uint8(8), jnp.uint8(0))
    code = jnp.where(jnp.isnan(x), jnp.uint8(7), code)
    return code, e


def _blocks(x, block):
    """x with its last axis split into blocks. Not by -1, which fails if there are no rows."""
    return x.reshape(*x.shape[:-1], x.shape[-1] // block, block)


def _amax(x, least):
    """max |x| over the last axis, at least `least`. It compares bits, so that NaN has a defined effect."""
    bits = lax.bitcast_convert_type(jnp.abs(x), jnp.int32).max(axis=-1)
    infinity = 0x7F800000
    return jnp.maximum(lax.bitcast_convert_type(jnp.minimum(bits, infinity), jnp.float32), least)


def _scale_exponent(amax, largest):
    """ceil(log2(amax / largest)), exactly, from the bits; infinity counts as the largest finite value."""
    bits = lax.bitcast_convert_type(amax, jnp.int32)
    bits_largest = int(np.float32(largest).view(np.int32))
    round_up = (bits & 0x7FFFFF) > (bits_largest & 0x7FFFFF)
    return (bits >> 23) - (bits_largest >> 23) + round_up


def pow2(e):
    """2.0**e for int32 e in -126..127."""
    return lax.bitcast_convert_type((e + 127) << 23, jnp.float32)


def e8m0(e):
    """The UE8M0 byte of 2.0**e."""
    return (e + 127).astype(jnp.uint8)


def _round_bf16(x):
    # Not two converts: XLA may drop such a pair.
    return lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)


def bf16(x):
    """x as bfloat16, with one bit pattern for every NaN."""
    return jnp.where(jnp.isnan(x), lax.bitcast_convert_type(jnp.uint16(BF16_NAN), jnp.bfloat16), x.astype(jnp.bfloat16))


def _fp8(x):
    code = lax.bitcast_convert_type(jnp.clip(x, -FP8_MAX, FP8_MAX).astype(jnp.float8_e4m3fn), jnp.uint8)
    return jnp.where(jnp.isnan(x), jnp.uint8(FP8_NAN), code)


def _from_fp8(values):
    return lax.bitcast_convert_type(values, jnp.float8_e4m3fn).astype(jnp.float32)


def _as_bf16(values):
    return lax.bitcast_convert_type(_blocks(values, 2), jnp.bfloat16)


def _scaled(x, exponents):
    # Two exact multiplications, because 2**-127 is below the normal range. Exponent 128, the scale byte 255, is NaN.
    blocks = _blocks(x, x.shape[-1] // exponents.shape[-1])
    half = exponents // 2
    rest = jnp.where(exponents == 128, jnp.nan, pow2(exponents - half))
    return (blocks * pow2(half)[..., None] * rest[..., None]).reshape(x.shape)


def _bytes(x):
    """The bytes of x's last axis, little-endian."""
    b = lax.bitcast_convert_type(x, jnp.uint8)
    return b if b.ndim == x.ndim else b.reshape(*x.shape[:-1], x.shape[-1] * b.shape[-1])


def _set_fp8(cache, page, row, values):
    return cache.at[page, row].set(lax.bitcast_convert_type(values, cache.dtype), mode="drop")


def _set_fp8_as_bytes(cache, page, row, values):
    # To scatter fp8, XLA's CPU backend converts the whole cache to float16 and back. This costs only one copy of it.
    done = lax.bitcast_convert_type(cache, jnp.uint8).at[page, row].set(values, mode="drop")
    return lax.bitcast_convert_type(done, cache.dtype)


def _scatter_bytes(cache, page, offset, rows):
    numbers = lax.ScatterDimensionNumbers(
        update_window_dims=(1,), inserted_window_dims=(0,), scatter_dims_to_operand_dims=(0, 1)
    )
    index = jnp.stack([page, offset], axis=1)
    return lax.scatter(cache, index, rows, numbers, unique_indices=True, mode=lax.GatherScatterMode.FILL_OR_DROP)


def _gather_bytes(cache, page, offset, length):
    numbers = lax.GatherDimensionNumbers(offset_dims=(1,), collapsed_slice_dims=(0,), start_index_map=(0, 1))
    index = jnp.stack([page, offset], axis=1)
    return lax.gather(cache, index, numbers, (1, length), mode=lax.GatherScatterMode.FILL_OR_DROP, fill_value=0)
