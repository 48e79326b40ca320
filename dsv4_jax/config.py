"""What a compressor is: its window, its head, its cache. Every op takes this one frozen value."""

import dataclasses
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dsv4_jax.cache import CACHE_FORMATS, CacheFormat
from dsv4_jax.rope import Yarn


@dataclasses.dataclass(frozen=True)
class CompressorConfig:
    """The static description of one compressor; hashable, so it can be a static argument of `jax.jit`.

    `csa`, `hca` and `indexer` make DeepSeek-V4's three; `dataclasses.replace` changes a field.

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
    state: str = "rows"

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
        if self.state not in ("rows", "online"):
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
        state: str = "rows",
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
        that Hugging Face writes back (`layer_types`, `compress_rates`, `rope_parameters`). Where a file has both they
        must agree. No default is guessed for a missing field.

        Args:
          config: the parsed file, its path, or the directory that holds it.
          csa_format: cache format of CSA compressors.
          hca_format: cache format of HCA compressors.
          indexer_format: cache format of indexers.

        Returns:
          One tuple for each of the `num_hidden_layers` layers: `()` for sliding-window attention, `(csa, indexer)` or
          `(hca,)`. The layers of multi-token prediction, which `compress_ratios` also lists, are left out. Page sizes
          are the defaults, 256 tokens a cache page; `dataclasses.replace` changes them.

        Raises:
          ValueError: a field is missing, has a value that the kernels are not made for, or contradicts another. The
            message names the file, the field, what it is and what it must be.
        """
        csa, hca, indexer = cls.csa(csa_format), cls.hca(hca_format), cls.indexer(indexer_format)
        fields = _Fields.read(config)
        fields.must_be("model_type", "deepseek_v4")
        fields.must_be("head_dim", csa.head_dim)
        fields.must_be("index_head_dim", indexer.head_dim)
        fields.check_rope_head_dim(csa.rope_head_dim)
        shared = {"eps": fields.positive("rms_norm_eps"), "rope": fields.rope()}

        templates = {_SLIDING: (), _CSA: (csa, indexer), _HCA: (hca,)}
        return tuple(
            tuple(
                dataclasses.replace(template, compress_ratio=ratio, kv_page_rows=max(1, 256 // ratio), **shared)
                for template in templates[kind]
            )
            for kind, ratio in fields.layers()
        )

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


_SLIDING, _CSA, _HCA = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
_KIND_OF_RATIO = {0: _SLIDING, 4: _CSA, 128: _HCA}


@dataclasses.dataclass(frozen=True)
class _Fields:
    """The fields of a config file, or of an object inside it, with errors that say where they stand."""

    values: Mapping[str, Any]
    where: str
    prefix: str = ""

    @classmethod
    def read(cls, config: Mapping[str, Any] | str | os.PathLike) -> "_Fields":
        if isinstance(config, Mapping):
            return cls(config, "config")
        if not isinstance(config, str | os.PathLike):
            raise TypeError(
                f"config is a {type(config).__name__}; it must be a dict or a path (of an object: to_dict())"
            )
        path = Path(config)
        path = path / "config.json" if path.is_dir() else path
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{path} is not JSON: {error}") from error
        if type(values) is not dict:
            raise ValueError(f"{path} holds a {type(values).__name__}; it must hold a JSON object")
        return cls(values, str(path))

    def error(self, key: str, want: str) -> ValueError:
        got = f"is {self.values[key]!r}" if key in self.values else "is missing"
        return ValueError(f"{self.where}: {self.prefix}{key} {got}; it must be {want}")

    def must_be(self, key: str, want: str | int) -> None:
        if key not in self.values or self.values[key] != want:
            raise self.error(key, repr(want))

    def positive(self, key: str) -> float:
        value = self.values.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise self.error(key, "a positive number")
        return float(value)

    def count(self, key: str, default: int | None = None) -> int:
        value = self.values.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise self.error(key, "an integer of at least 0")
        return value

    def inner(self, key: str) -> "_Fields":
        value = self.values.get(key)
        if not isinstance(value, Mapping):
            raise self.error(key, "an object")
        return _Fields(value, self.where, f"{self.prefix}{key}.")

    def items(self, key: str, lengths: tuple[int, ...]) -> list:
        value = self.values.get(key)
        if not isinstance(value, list | tuple):
            raise self.error(key, "a list")
        if len(value) not in lengths:
            want = " or ".join(map(str, dict.fromkeys(lengths)))
            raise ValueError(f"{self.where}: {self.prefix}{key} has {len(value)} entries; it must have {want}")
        return list(value)

    def either(self, published: str, hugging_face: str, found: list) -> Any:
        """What the two styles say, which is the same where both are there."""
        if not found:
            raise ValueError(f"{self.where}: {published} is missing; it or {hugging_face} must be given")
        if len(found) == 2 and found[0] != found[1]:
            raise ValueError(f"{self.where}: {published} says {found[0]}, {hugging_face} {found[1]}; they must agree")
        return found[0]

    def check_rope_head_dim(self, want: int) -> None:
        # As itself, as a fraction of the head (what Hugging Face computes with), or both.
        if "qk_rope_head_dim" in self.values or self.values.get("partial_rotary_factor") is None:
            self.must_be("qk_rope_head_dim", want)
        places: list[_Fields] = [self]
        if isinstance(self.values.get("rope_parameters"), Mapping):
            places.append(self.inner("rope_parameters").inner("compress"))
        for fields in places:
            if fields.values.get("partial_rotary_factor") is not None:
                fraction = want / self.values["head_dim"]
                if fields.positive("partial_rotary_factor") != fraction:
                    raise fields.error("partial_rotary_factor", f"{fraction} ({want} of {self.values['head_dim']})")

    def layers(self) -> list[tuple[str, int]]:
        """The kind and the compress ratio of every layer."""
        n = self.count("num_hidden_layers")
        found = []
        if "compress_ratios" in self.values:
            ratios = self.items("compress_ratios", (n, n + self.count("num_nextn_predict_layers", 1)))
            for i, ratio in enumerate(ratios):
                if isinstance(ratio, bool) or not isinstance(ratio, int) or ratio not in _KIND_OF_RATIO:
                    want = _or(_KIND_OF_RATIO)
                    raise ValueError(f"{self.where}: compress_ratios[{i}] is {ratio!r}; it must be {want}")
            found.append([(_KIND_OF_RATIO[ratio], ratio) for ratio in ratios[:n]])
        if "layer_types" in self.values:
            kinds = self.items("layer_types", (n,))
            for i, kind in enumerate(kinds):
                if kind not in _KIND_OF_RATIO.values():
                    want = _or(_KIND_OF_RATIO.values())
                    raise ValueError(f"{self.where}: layer_types[{i}] is {kind!r}; it must be {want}")
            ratio_of = {_SLIDING: 0}
            for kind in sorted(set(kinds) - {_SLIDING}):
                rates = self.inner("compress_rates")
                ratio_of[kind] = rates.count(kind)
                if ratio_of[kind].bit_count() != 1:
                    raise rates.error(kind, "a power of two")
            found.append([(kind, ratio_of[kind]) for kind in kinds])
        return self.either("compress_ratios", "layer_types", found)

    def rope(self) -> Yarn:
        """The RoPE of compressed layers."""
        found = []
        if self.values.get("rope_scaling") is not None:
            found.append(self.inner("rope_scaling").yarn(self.positive("compress_rope_theta")))
        elif "rope_scaling" in self.values and "rope_parameters" not in self.values:
            found.append(self.plain_rope(self.positive("compress_rope_theta")))
        if "rope_parameters" in self.values:
            # Hugging Face computes with the theta in here; compress_rope_theta is then only what it was made from.
            fields = self.inner("rope_parameters").inner("compress")
            found.append(fields.yarn(fields.positive("rope_theta")))
        return self.either("rope_scaling", "rope_parameters", found)

    def yarn(self, theta: float) -> Yarn:
        kinds = {key: self.values[key] for key in ("rope_type", "type") if key in self.values}
        for key, kind in kinds.items() or [("rope_type", None)]:
            if kind not in ("yarn", "default"):
                raise self.error(key, "'yarn' or 'default'")
        if len(set(kinds.values())) == 2:
            raise self.error("type", f"{kinds['rope_type']!r}, as rope_type is")
        if "default" in kinds.values():
            return self.plain_rope(theta)
        if self.values.get("attention_factor") is not None:
            self.must_be("attention_factor", 1)
        if self.values.get("truncate") is not None:
            self.must_be("truncate", True)
        rope = {key: self.positive(key) for key in ("factor", "beta_fast", "beta_slow")}
        rope["original_max_position_embeddings"] = self.count("original_max_position_embeddings")
        return self.checked_rope(theta=theta, **rope)

    def plain_rope(self, theta: float) -> Yarn:
        return self.checked_rope(theta=theta, factor=1.0)

    def checked_rope(self, **rope) -> Yarn:
        try:
            return Yarn(**rope)
        except ValueError as error:
            raise ValueError(f"{self.where}: {self.prefix[:-1] or 'compressed layers'}: {error}") from error


def _or(names) -> str:
    return " or ".join(repr(name) for name in names)
