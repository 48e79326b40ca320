"""Reads the compressors of a model's layers from its `config.json`."""

import dataclasses
import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsv4_jax.rope import Yarn

if TYPE_CHECKING:
    from dsv4_jax.config import CompressorConfig

SLIDING, CSA, HCA = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
# What `compress_ratios` may hold. One token per key compresses nothing.
KIND_OF_RATIO = {0: SLIDING, 1: SLIDING, 4: CSA, 128: HCA}


def read_compressors(
    config: Mapping[str, Any] | str | os.PathLike,
    csa: "CompressorConfig",
    hca: "CompressorConfig",
    indexer: "CompressorConfig",
) -> tuple[tuple["CompressorConfig", ...], ...]:
    """See `CompressorConfig.from_pretrained_config`; the file's ratios, eps and RoPE replace those of the templates."""
    fields = Fields.read(config)
    fields.must_be("model_type", "deepseek_v4")
    fields.must_be("head_dim", csa.head_dim)
    fields.must_be("index_head_dim", indexer.head_dim)
    fields.check_rope_head_dim(csa.rope_head_dim)
    shared = {"eps": fields.positive("rms_norm_eps"), "rope": fields.rope()}

    templates = {SLIDING: (), CSA: (csa, indexer), HCA: (hca,)}
    return tuple(
        tuple(
            dataclasses.replace(template, compress_ratio=ratio, kv_page_rows=max(1, 256 // ratio), **shared)
            for template in templates[kind]
        )
        for kind, ratio in fields.layers()
    )


@dataclasses.dataclass(frozen=True)
class Fields:
    """The fields of a config file, or of an object inside it. Errors name the file and the field."""

    values: Mapping[str, Any]
    where: str
    prefix: str = ""

    @classmethod
    def read(cls, config: Mapping[str, Any] | str | os.PathLike) -> "Fields":
        """The fields of a parsed file, or of the file at a path; those of its `text_config`, if it has one."""
        if isinstance(config, Mapping):
            fields = cls(config, "config")
        elif isinstance(config, str | os.PathLike):
            path = Path(config)
            path = path / "config.json" if path.is_dir() else path
            try:
                values = json.loads(path.read_text(encoding="utf-8"))
            except ValueError as error:
                raise ValueError(f"{path} is not JSON: {error}") from error
            if type(values) is not dict:
                raise ValueError(f"{path} holds a {type(values).__name__}; it must hold a JSON object")
            fields = cls(values, str(path))
        else:
            raise TypeError(
                f"config is a {type(config).__name__}; it must be a dict or a path (of an object: to_dict())"
            )
        return fields.inner("text_config") if fields.has("text_config") else fields

    def has(self, key: str) -> bool:
        """Whether a field is given; null is not."""
        return self.values.get(key) is not None

    def error(self, key: str, want: str) -> ValueError:
        got = f"is {self.values[key]!r}" if key in self.values else "is missing"
        return ValueError(f"{self.where}: {self.prefix}{key} {got}; it must be {want}")

    def must_be(self, key: str, want: str | int) -> None:
        if not self.has(key) or self.values[key] != want:
            raise self.error(key, repr(want))

    def positive(self, key: str) -> float:
        value = self.values.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise self.error(key, "a positive number")
        return float(value)

    def count(self, key: str) -> int:
        value = self.values.get(key)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise self.error(key, "an integer of at least 0")
        return value

    def inner(self, key: str) -> "Fields":
        value = self.values.get(key)
        if not isinstance(value, Mapping):
            raise self.error(key, "an object")
        return Fields(value, self.where, f"{self.prefix}{key}.")

    def of_layers(self, key: str, choices: Iterable) -> list:
        """The first entries of a list, one per layer; further entries are for multi-token prediction."""
        layers, values = self.count("num_hidden_layers"), self.values[key]
        if not isinstance(values, list | tuple):
            raise self.error(key, "a list")
        if len(values) < layers:
            raise ValueError(
                f"{self.where}: {self.prefix}{key} has {len(values)} entries; it must have at least {layers}, as "
                "num_hidden_layers says"
            )
        choices = tuple(choices)
        for i, value in enumerate(values[:layers]):
            if type(value) is not type(choices[0]) or value not in choices:
                raise ValueError(f"{self.where}: {self.prefix}{key}[{i}] is {value!r}; it must be {_or(choices)}")
        return list(values[:layers])

    def either(self, published: str, hugging_face: str, found: list) -> Any:
        """What the two styles say; an error if they disagree."""
        if not found:
            raise ValueError(f"{self.where}: {self.prefix}{published} is missing; it or {hugging_face} must be given")
        if len(found) == 2 and found[0] != found[1]:
            raise ValueError(
                f"{self.where}: {self.prefix}{published} says {found[0]}, {hugging_face} {found[1]}; they must agree"
            )
        return found[0]

    def check_rope_head_dim(self, want: int) -> None:
        # Given as a number, as a fraction of the head (which Hugging Face computes with), or as both.
        if self.has("qk_rope_head_dim") or not self.has("partial_rotary_factor"):
            self.must_be("qk_rope_head_dim", want)
        for fields in [self, *([self.rope_parameters()] if self.has("rope_parameters") else [])]:
            if fields.has("partial_rotary_factor"):
                fraction = want / self.values["head_dim"]
                if fields.positive("partial_rotary_factor") != fraction:
                    raise fields.error("partial_rotary_factor", f"{fraction} ({want} of {self.values['head_dim']})")

    def layers(self) -> list[tuple[str, int]]:
        """The kind and the compress ratio of every layer; the ratio of a sliding window is 0."""
        self.count("num_hidden_layers")
        found = []
        if self.has("compress_ratios"):
            ratios = self.of_layers("compress_ratios", KIND_OF_RATIO)
            found.append([(KIND_OF_RATIO[ratio], ratio if ratio > 1 else 0) for ratio in ratios])
        if self.has("layer_types"):
            kinds = self.of_layers("layer_types", (SLIDING, CSA, HCA))
            ratio_of = {SLIDING: 0}
            for kind in sorted(set(kinds) - {SLIDING}):
                rates = self.inner("compress_rates")
                ratio_of[kind] = rates.count(kind)
                if ratio_of[kind].bit_count() != 1:
                    raise rates.error(kind, "a power of two")
            found.append([(kind, ratio_of[kind]) for kind in kinds])
        return self.either("compress_ratios", "layer_types", found)

    def rope_parameters(self) -> "Fields":
        """The object in `rope_parameters` for compressed layers, or all of `rope_parameters` if it is flat."""
        fields = self.inner("rope_parameters")
        return fields.inner("compress") if fields.has("compress") or fields.has("main") else fields

    def rope(self) -> Yarn:
        """The RoPE of compressed layers."""
        found = []
        if self.has("rope_scaling"):
            found.append(self.inner("rope_scaling").yarn(self.positive("compress_rope_theta")))
        elif "rope_scaling" in self.values and not self.has("rope_parameters"):
            found.append(self.plain_rope(self.positive("compress_rope_theta")))  # null means no scaling
        if self.has("rope_parameters"):
            fields = self.rope_parameters()
            if fields.values is self.values["rope_parameters"]:  # flat: its theta is for sliding windows
                theta = self.positive("compress_rope_theta")
            else:  # Hugging Face computes with this theta, which it made from compress_rope_theta
                theta = fields.positive("rope_theta")
            found.append(fields.yarn(theta))
        return self.either("rope_scaling", "rope_parameters", found)

    def yarn(self, theta: float) -> Yarn:
        kinds = {key: self.values[key] for key in ("rope_type", "type") if self.has(key)}
        for key, kind in kinds.items() or [("rope_type", None)]:
            if kind not in ("yarn", "default"):
                raise self.error(key, "'yarn' or 'default'")
        if len(set(kinds.values())) == 2:
            raise self.error("type", f"{kinds['rope_type']!r}, as rope_type is")
        if "default" in kinds.values():
            return self.plain_rope(theta)
        if self.has("attention_factor"):
            self.must_be("attention_factor", 1)
        if self.has("truncate"):
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
