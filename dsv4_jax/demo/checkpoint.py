"""Reads the weights of one CSA layer and one HCA layer from a checkpoint; no other tensor is loaded."""

import dataclasses
import re
from pathlib import Path

import numpy as np

from dsv4_jax import CompressorConfig
from dsv4_jax.demo.weights import BadInput, Weights, default_configs, random_embedding

# What a tensor is, by the end of its name: DeepSeek's, Hugging Face's and vLLM's.
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
NAME = re.compile(rf"(?:.*\.)?layers\.(\d+)\.(.*\bcompressor\b.*?)\.({'|'.join(map(re.escape, ROLES))})")
DTYPES = ("F32", "F16", "BF16")


@dataclasses.dataclass(frozen=True)
class _Tensor:
    name: str
    file: Path
    shape: tuple[int, ...]
    dtype: str

    def read(self, *shape: int | None) -> np.ndarray:
        """The tensor as float32, after checking its shape (None stands for any length)."""
        if len(shape) != len(self.shape) or any(w not in (None, g) for w, g in zip(shape, self.shape, strict=True)):
            want = ", ".join("any" if n is None else str(n) for n in shape)
            raise BadInput(f"{self.file}: {self.name} has shape {list(self.shape)}; it must be [{want}]")
        if self.dtype not in DTYPES:
            raise BadInput(f"{self.file}: {self.name} has dtype {self.dtype}; it must be {', '.join(DTYPES)}")
        with _open(self.file) as file:
            return file.get_tensor(self.name).astype(np.float32)


def checkpoint_weights(directory: str, first_layer: int) -> dict[str, tuple[CompressorConfig, Weights]]:
    """Configs and weights by the compressor's name, of the first CSA and HCA layers from `first_layer` on."""
    path = Path(directory)
    main, indexers = _find(path)
    layer_of = {}
    for kind, ratio in (("CSA", 4), ("HCA", 128)):
        layers = [i for i in sorted(main) if i >= first_layer and "ape" in main[i] and main[i]["ape"].shape[0] == ratio]
        if not layers:
            raise BadInput(f"{path} has no {kind} compressor (ratio {ratio}) in a layer from {first_layer} on")
        layer_of[kind] = layers[0]
    csa, hca = layer_of["CSA"], layer_of["HCA"]
    configs = _configs(path, csa, hca)
    tensors = {"CSA": main[csa], "HCA": main[hca]}
    weights = {name: _weights(tensors[name], configs[name], f"{path}: layer {layer_of[name]}") for name in tensors}
    indexer = _weights(indexers.get(csa, {}), configs["indexer"], f"{path}: layer {csa}, indexer")
    return {name: (config, weights.get(name, indexer)) for name, config in configs.items()}


def _find(path):
    """The tensors of each layer's compressor, and of its indexer's, by role."""
    if not path.is_dir():
        raise BadInput(f"{path} is not a directory")
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise BadInput(f"{path} has no .safetensors file")
    main, indexers = {}, {}
    for file in files:
        with _open(file) as tensors:
            for name in tensors.keys():  # noqa: SIM118 - not a dict
                if not (match := NAME.fullmatch(name)):
                    continue
                of_layer = (indexers if "indexer" in match[2].split(".") else main).setdefault(int(match[1]), {})
                view = tensors.get_slice(name)
                of_layer[ROLES[match[3]]] = _Tensor(name, file, tuple(view.get_shape()), view.get_dtype())
    return main, indexers


def _configs(path, csa, hca):
    configs = default_configs()
    if not (path / "config.json").exists():
        return configs
    try:
        layers = CompressorConfig.from_pretrained_config(path)
    except (OSError, ValueError) as error:
        raise BadInput(str(error)) from error
    for layer, count, kind in ((csa, 2, "CSA"), (hca, 1, "HCA")):
        if layer >= len(layers) or len(layers[layer]) != count:
            raise BadInput(f"{path}: layer {layer} has the weights of {kind}, but config.json says otherwise")
    configs["CSA"], configs["indexer"] = layers[csa]
    (configs["HCA"],) = layers[hca]
    configs["indexer fp4"] = dataclasses.replace(configs["indexer"], cache_format="indexer_mxfp4")
    return configs


def _weights(tensors, config, where):
    needed = {"ape", "norm"} | ({"kv_gate"} if "kv_gate" in tensors else {"kv", "gate"})
    if missing := needed - set(tensors):
        names = sorted(name for name, role in ROLES.items() if role in missing)
        raise BadInput(f"{where}: no tensor {' or '.join(names)}")
    w = config.width
    if "kv_gate" in tensors:
        projection = tensors["kv_gate"].read(2 * w, None)
    else:
        kv = tensors["kv"].read(w, None)
        projection = np.concatenate([kv, tensors["gate"].read(w, kv.shape[1])])
    return Weights(
        embedding=random_embedding(projection.shape[1]),
        wkv_gate=np.ascontiguousarray(projection.T),
        ape=tensors["ape"].read(config.compress_ratio, w),
        norm=tensors["norm"].read(config.head_dim),
    )


def _open(file):
    try:
        import safetensors
    except ImportError:
        raise BadInput("--checkpoint needs safetensors, which is not installed: pip install safetensors") from None
    try:
        return safetensors.safe_open(file, framework="numpy")
    except (OSError, safetensors.SafetensorError) as error:
        raise BadInput(f"{file} cannot be read: {error}") from error
