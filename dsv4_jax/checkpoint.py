"""Weights of compressors from safetensors files, under the names of DeepSeek, Hugging Face and vLLM.

A safetensors file is a JSON header (names, types, offsets) before plain little-endian arrays. This module maps it into
memory without another library, because NumPy's front end of safetensors does not know fp8.
"""

import dataclasses
import functools
import json
import math
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from dsv4_jax.config import CompressorConfig

if TYPE_CHECKING:
    from dsv4_jax.compressor import DeepseekCompressor

# What a tensor is, by the last part of its name.
ROLES = {
    "wkv.weight": "kv",
    "kv_proj.weight": "kv",
    "wgate.weight": "gate",
    "gate_proj.weight": "gate",
    "fused_wkv_wgate.weight": "kv_gate",
    "ape": "ape",
    "position_bias": "ape",
    "norm.weight": "norm",
    "kv_norm.weight": "norm",
}
# "indexer" comes before "compressor" or after it. Layers of multi-token prediction have another prefix.
NAME = re.compile(
    r"(?:(?:language_)?model\.)*layers\.(\d+)\.((?:\w+\.)*?compressor(?:\.\w+)*?)\."
    rf"({'|'.join(map(re.escape, ROLES))})"
)
SCALES = ("scale", "weight_scale_inv", "weight_scale")  # replaces `weight` at the end of the name
BLOCKS = (128, 32)  # a scale of a quantized weight covers so many rows and as many columns
DTYPES = {
    "F32": jnp.float32,
    "F16": jnp.float16,
    "BF16": jnp.bfloat16,
    "F8_E4M3": jnp.float8_e4m3fn,
    "F8_E8M0": jnp.float8_e8m0fnu,
}


def load_compressors(
    path: str | os.PathLike,
    layers: Iterable[int] | None = None,
    *,
    configs: Sequence[tuple[CompressorConfig, ...]] | None = None,
    dtype: jax.typing.DTypeLike = jnp.float32,
) -> dict[int, tuple["DeepseekCompressor", ...]]:
    """Loads the compressors of a DeepSeek-V4 checkpoint; no other tensor is read. Needs flax.

    Names: DeepSeek's (`layers.N.attn.compressor.wkv.weight`), Hugging Face's
    (`model.layers.N.self_attn.compressor.kv_proj.weight`) and vLLM's (`...compressor.fused_wkv_wgate.weight`). Weights
    in fp8 are multiplied by the scales of their blocks of 128 x 128 or 32 x 32: `weight_scale_inv`, `scale` or
    compressed-tensors' `weight_scale`.

    Args:
      path: a .safetensors file, or a directory of them, with or without `model.safetensors.index.json`.
      layers: which layers to load; all by default.
      configs: the compressors of every layer, as `CompressorConfig.from_pretrained_config` returns them. Pass them to
        choose other cache formats or page sizes. By default they come from the config.json beside the weights.
      dtype: dtype of the projections, float32 or bfloat16. Position biases and norm weights are always float32.

    Returns:
      For each layer `(csa, indexer)`, `(hca,)`, or `()` if it has only sliding-window attention.

    Raises:
      FileNotFoundError: there is no such file, no weights, or no config.json.
      ValueError: a file is malformed, or a tensor is missing or has a wrong shape or dtype; names the file and the
        tensor.
    """
    from dsv4_jax.compressor import DeepseekCompressor, nnx

    checkpoint = Checkpoint(path)
    if configs is None:
        configs = CompressorConfig.from_pretrained_config(checkpoint.directory / "config.json")

    def load(layer: int, config: CompressorConfig, indexer: bool) -> "DeepseekCompressor":
        weights = checkpoint.weights(layer, config, indexer=indexer, dtype=dtype)
        hidden_size = len(weights["wkv_gate"])
        # Abstract: random weights would only be thrown away.
        module = nnx.eval_shape(lambda: DeepseekCompressor(config, hidden_size, param_dtype=dtype, rngs=nnx.Rngs(0)))
        for name, value in weights.items():
            getattr(module, name).set_value(jnp.asarray(value))
        return module

    layers = range(len(configs)) if layers is None else list(layers)
    for layer in layers:
        if not 0 <= layer < len(configs):
            raise ValueError(f"layers has {layer!r}; the model's layers are 0 to {len(configs) - 1}")
    return {layer: tuple(load(layer, c, indexer=i == 1) for i, c in enumerate(configs[layer])) for layer in layers}


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A tensor in a file: its place, and what the header says about it."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def size(self) -> int:
        """Bytes."""
        return math.prod(self.shape) * np.dtype(DTYPES[self.dtype]).itemsize

    def map(self) -> np.ndarray:
        """The tensor, mapped into memory; bytes are read on use."""
        bytes_ = np.memmap(self.file, np.uint8, "r", self.offset, self.size)
        return bytes_.view(np.dtype(DTYPES[self.dtype])).reshape(self.shape)

    def must_have(self, shape: tuple[int | None, ...], dtypes: Iterable[str]) -> None:
        """Raises unless shape (None: any length but 0) and dtype are right."""
        fits = len(shape) == len(self.shape) and 0 not in self.shape
        if not fits or any(w not in (None, n) for n, w in zip(self.shape, shape, strict=True)):
            want = ", ".join("any" if n is None else str(n) for n in shape)
            raise ValueError(f"{self.file}: {self.name} has shape {list(self.shape)}; it must be [{want}]")
        if self.dtype not in dtypes:
            raise ValueError(f"{self.file}: {self.name} has dtype {self.dtype}; it must be {' or '.join(dtypes)}")


class Checkpoint:
    """The compressors in one or more safetensors files. Headers and tensors are read on use.

    Attributes:
      directory: the directory of the files.
      compressors: for each `(layer, whether it is the indexer's)`, the tensors' names by role (`ROLES`).
    """

    def __init__(self, path: str | os.PathLike):
        path = Path(path)
        self.directory = path if path.is_dir() else path.parent
        self.files = _files(path)
        self.compressors: dict[tuple[int, bool], dict[str, str]] = {}
        for name in self.files:
            if match := NAME.fullmatch(name):
                key = int(match[1]), "indexer" in match[2].split(".")
                other = self.compressors.setdefault(key, {}).setdefault(ROLES[match[3]], name)
                if other != name:
                    raise ValueError(f"{path} has both {other} and {name}; it must have one of them")

    def tensor(self, name: str) -> Tensor:
        """The tensor of this name."""
        file = self.files[name]
        if name not in (header := _header(file)):
            raise ValueError(f"{file} has no tensor {name}, which the index says it has")
        return header[name]

    def weights(
        self, layer: int, config: CompressorConfig, *, indexer: bool = False, dtype: jax.typing.DTypeLike = jnp.float32
    ) -> dict[str, np.ndarray]:
        """A compressor's `wkv_gate` `[hidden, 2W]` of `dtype`, `ape` `[m, W]` and `norm` `[D]` float32."""
        names = self.compressors.get((layer, indexer), {})
        needed = ("kv_gate", "ape", "norm") if "kv_gate" in names else ("kv", "gate", "ape", "norm")
        if missing := [role for role in needed if role not in names]:
            ends = " or ".join(end for end, role in ROLES.items() if role == missing[0])
            of = f"layer {layer}'s {'indexer' if indexer else 'compressor'}"
            raise ValueError(f"{self.directory}: {of} has no tensor {ends}{self._others(layer, indexer)}")
        w = config.width
        if "kv_gate" in names:
            projection = self._weight(names["kv_gate"], 2 * w, None, dtype)
        else:
            kv = self._weight(names["kv"], w, None, dtype)
            projection = np.concatenate([kv, self._weight(names["gate"], w, kv.shape[1], dtype)])
        return {
            "wkv_gate": np.ascontiguousarray(projection.T),
            "ape": self._plain(names["ape"], (config.compress_ratio, w)),
            "norm": self._plain(names["norm"], (config.head_dim,)),
        }

    def _plain(self, name: str, shape: tuple[int | None, ...], dtype: jax.typing.DTypeLike = jnp.float32):
        tensor = self.tensor(name)
        tensor.must_have(shape, ("F32", "F16", "BF16"))
        return tensor.map().astype(np.dtype(dtype))

    def _others(self, layer: int, indexer: bool) -> str:
        """The other tensors of a compressor, for an error message."""
        pattern = re.compile(rf"(?:\w+\.)*layers\.{layer}\.(?:\w+\.)*compressor\.[\w.]+")
        found = [n for n in self.files if pattern.fullmatch(n) and ("indexer" in n.split(".")) == indexer]
        return f"; it has {', '.join(sorted(found))}" if found else ""

    def _weight(self, name: str, rows: int, columns: int | None, dtype: jax.typing.DTypeLike):
        """A projection's weight, multiplied by its scales if it is in fp8."""
        tensor = self.tensor(name)
        if tensor.dtype != "F8_E4M3":
            return self._plain(name, (rows, columns), dtype)
        tensor.must_have((rows, columns), ("F8_E4M3",))
        known = [name.removesuffix("weight") + end for end in SCALES]
        scales = [s for s in known if s in self.files]
        if len(scales) != 1:
            has = " and ".join(scales) or "no scales"
            raise ValueError(
                f"{tensor.file}: {name} has dtype F8_E4M3 and {has} beside it; it must have one of {', '.join(known)}"
            )
        scale = self.tensor(scales[0])
        shapes = {block: tuple(-(-n // block) for n in tensor.shape) for block in BLOCKS}
        block = next((block for block, shape in shapes.items() if shape == scale.shape), None)
        if block is None:
            want = " or ".join(f"{list(shape)} (blocks of {n} x {n})" for n, shape in shapes.items())
            raise ValueError(f"{scale.file}: {scale.name} has shape {list(scale.shape)}; it must be {want}")
        scale.must_have(scale.shape, ("F32", "F16", "BF16", "F8_E8M0"))
        rows, columns = tensor.shape
        factors = scale.map().astype(np.float32).repeat(block, axis=0)[:rows].repeat(block, axis=1)[:, :columns]
        return (tensor.map().astype(np.float32) * factors).astype(np.dtype(dtype))


def _files(path: Path) -> dict[str, Path]:
    """The file that holds each tensor."""
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist")
    if not path.is_dir():
        return dict.fromkeys(_header(path), path)
    index = path / "model.safetensors.index.json"
    if index.exists():
        try:
            weight_map = _parsed(index.read_text(encoding="utf-8"))["weight_map"]
            return {name: path / file for name, file in weight_map.items()}
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise ValueError(f"{index} is not an index of safetensors files: {error!r}") from error
    files: dict[str, Path] = {}
    for file in sorted(path.glob("*.safetensors")):
        for name in _header(file):
            if other := files.get(name):
                raise ValueError(
                    f"{other} and {file} both have {name}; without {index.name}, which says what counts, one must not"
                )
            files[name] = file
    if not files:
        raise FileNotFoundError(f"{path} has no .safetensors file with a tensor in it")
    return files


def _parsed(text: str | bytes):
    """Parses JSON and refuses objects with a repeated key, of which Python would take the last."""

    def unique(pairs):
        found = dict(pairs)
        if len(found) < len(pairs):
            names = [name for name, _ in pairs]
            raise ValueError(f"{next(name for name in names if names.count(name) > 1)} stands in it twice")
        return found

    return json.loads(text, object_pairs_hook=unique)


def _header(file: Path) -> dict[str, Tensor]:
    stat = file.stat()
    return _read_header(file, stat.st_size, stat.st_mtime_ns)


@functools.lru_cache(maxsize=256)  # size and time are in the key, so a changed file is read again
def _read_header(file: Path, size: int, _) -> dict[str, Tensor]:
    try:
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if 8 + length > size:
                raise ValueError("its header is longer than the file")
            header = _parsed(stream.read(length))
        header.pop("__metadata__", None)
        tensors = {}
        for name, entry in header.items():
            start, end = (8 + length + at for at in entry["data_offsets"])
            tensors[name] = tensor = Tensor(name, file, entry["dtype"], tuple(entry["shape"]), start)
            if not 8 + length <= start <= end <= size:
                raise ValueError(f"{name} does not lie in the file")
            if tensor.dtype in DTYPES and end - start != tensor.size:
                raise ValueError(f"{name} has not the {tensor.size} bytes of its shape")
        return tensors
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"{file} cannot be read as safetensors: {error}") from error
