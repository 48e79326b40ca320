"""What a compressor is: its window, its head, its cache. Every op takes this one frozen value."""

import dataclasses
import json
import os
from collections.abc import Mapping
from typing import Any, Literal, get_args

import jax
import jax.export

from dsv4_jax import pretrained
from dsv4_jax.cache import CACHE_FORMATS, CacheFormat
from dsv4_jax.rope import Yarn

State = Literal["rows", "online"]


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class CompressorConfig:
    """The static description of one compressor.

    It is hashable, so it can be a static argument of `jax.jit`; it is also a pytree without leaves. `csa`, `hca` and
    `indexer` make DeepSeek-V4's three; `dataclasses.replace` changes a field.

    Attributes:
      compress_ratio: m, tokens per key; a power of two.
      head_dim: D, channels per key.
      overlap: whether a window also spans the m tokens before its own. Then n = 2m, and a state half is 2D wide.
      cache_format: name of the `CacheFormat` that stores the keys.
      page_rows: rows per state page. A row holds one token, or the online state after one token.
      kv_page_rows: rows (keys) per cache page.
      rope_head_dim: number of trailing channels that RoPE rotates.
      eps: epsilon of the RMSNorm.
      rope: frequencies of the RoPE.
      state: what the state cache keeps of an open window. "rows": kv and biased score of each token. "online": their
        running maximum, sum and weighted sum; only for windows that do not overlap.
    """

    compress_ratio: int
    head_dim: int
    overlap: bool
    cache_format: str
    page_rows: int
    kv_page_rows: int
    rope_head_dim: int = 64
    eps: float = 1e-6
    rope: Yarn = dataclasses.field(default_factory=Yarn)
    state: State = "rows"

    def __post_init__(self):
        m = self.compress_ratio
        if not isinstance(m, int) or m < 1 or m & (m - 1):
            raise ValueError(f"compress_ratio is {m!r}; it must be a power of two")
        if self.cache_format not in CACHE_FORMATS:
            raise ValueError(f"cache_format is {self.cache_format!r}; it must be one of {', '.join(CACHE_FORMATS)}")
        if self.head_dim != self.format.head_dim:
            raise ValueError(
                f"head_dim is {self.head_dim!r}; cache_format {self.cache_format!r} stores {self.format.head_dim}"
            )
        for name in ("page_rows", "kv_page_rows"):
            rows = getattr(self, name)
            if not isinstance(rows, int) or rows < 1:
                raise ValueError(f"{name} is {rows!r}; it must be an integer of at least 1")
        if self.rope_head_dim != 64:
            raise ValueError(f"rope_head_dim is {self.rope_head_dim!r}; the cache formats are laid out for 64")
        if not self.eps > 0:
            raise ValueError(f"eps is {self.eps!r}; it must be positive")
        if self.state not in get_args(State):
            raise ValueError(f"state is {self.state!r}; it must be 'rows' or 'online'")
        if self.state == "online" and self.overlap:
            raise ValueError("state is 'online'; with overlap it must be 'rows', since a token is in two windows")

    @classmethod
    def csa(cls, cache_format: str = "fp8_ds_mla", *, page_rows: int = 4, kv_page_rows: int = 64) -> "CompressorConfig":
        """Compressed sparse attention: one key of 512 channels per 4 tokens, over overlapping windows of 8."""
        return cls(4, 512, True, cache_format, page_rows, kv_page_rows)

    @classmethod
    def hca(
        cls,
        cache_format: str = "fp8_ds_mla",
        *,
        page_rows: int | None = None,
        kv_page_rows: int = 2,
        state: State = "rows",
    ) -> "CompressorConfig":
        """Heavily compressed attention: one key of 512 channels per 128 tokens.

        `page_rows` is 8 by default, or 1 with the online state.
        """
        if page_rows is None:
            page_rows = 1 if state == "online" else 8
        return cls(128, 512, False, cache_format, page_rows, kv_page_rows, state=state)

    @classmethod
    def indexer(
        cls, cache_format: str = "indexer_fp8", *, page_rows: int = 4, kv_page_rows: int = 64
    ) -> "CompressorConfig":
        """The indexer inside CSA layers: one key of 128 channels per 4 tokens, over overlapping windows of 8."""
        return cls(4, 128, True, cache_format, page_rows, kv_page_rows)

    @classmethod
    def from_pretrained_config(
        cls,
        config: Mapping[str, Any] | str | os.PathLike,
        *,
        csa_format: str = "fp8_ds_mla",
        hca_format: str = "fp8_ds_mla",
        indexer_format: str = "indexer_fp8",
    ) -> tuple[tuple["CompressorConfig", ...], ...]:
        """Reads the compressors of every layer from a DeepSeek-V4 `config.json`.

        Both styles are read: the published one (`compress_ratios`, `rope_scaling`, `compress_rope_theta`) and the one
        that Hugging Face writes back (`layer_types`, `compress_rates`, `rope_parameters`). If a file has both, they
        must agree. A null counts as a missing field, and no default is guessed for one. If there is a `text_config`,
        the fields are read from it.

        Args:
          config: the parsed file, its path, or the directory that holds it.
          csa_format: cache format of CSA compressors.
          hca_format: cache format of HCA compressors.
          indexer_format: cache format of indexers.

        Returns:
          One tuple for each of the `num_hidden_layers` layers: `()` for sliding-window attention, `(csa, indexer)` or
          `(hca,)`. Further entries of `compress_ratios` belong to multi-token prediction and are left out. Page sizes
          are the defaults, 256 tokens per cache page; `dataclasses.replace` changes them.

        Raises:
          ValueError: a field is missing, has a value that the kernels are not made for, or contradicts another. The
            message names the file, the field, what it is and what it must be.
        """
        templates = cls.csa(csa_format), cls.hca(hca_format), cls.indexer(indexer_format)
        return pretrained.read_compressors(config, *templates)

    @property
    def format(self) -> CacheFormat:
        """The `CacheFormat` that `cache_format` names."""
        return CACHE_FORMATS[self.cache_format]

    @property
    def layout(self) -> tuple[int, bool, int, int, str]:
        """What slots and plans depend on: ratio, overlap, rows per state page, rows per cache page, kind of state."""
        return self.compress_ratio, self.overlap, self.page_rows, self.kv_page_rows, self.state

    @property
    def window(self) -> int:
        """n, tokens per window."""
        return self.compress_ratio * (2 if self.overlap else 1)

    @property
    def width(self) -> int:
        """W, channels of a token's kv, and of its score."""
        return self.head_dim * (2 if self.overlap else 1)

    @property
    def state_width(self) -> int:
        """Channels per row of the state cache: 2W (kv, score), or 3W of the online state (maximum, sum, weighted)."""
        return self.width * (3 if self.state == "online" else 2)


jax.export.register_pytree_node_serialization(
    CompressorConfig,
    serialized_name="dsv4_jax.CompressorConfig",
    serialize_auxdata=lambda config: json.dumps(dataclasses.asdict(config)).encode(),
    deserialize_auxdata=lambda data: _from_dict(json.loads(data)),
)


def _from_dict(fields: dict[str, Any]) -> CompressorConfig:
    return CompressorConfig(**fields | {"rope": Yarn(**fields["rope"])})
