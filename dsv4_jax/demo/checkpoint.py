"""The demo's weights from a checkpoint: one CSA layer and one HCA layer."""

import dataclasses

from dsv4_jax import CompressorConfig
from dsv4_jax.checkpoint import Checkpoint
from dsv4_jax.demo.weights import BadInput, Weights, default_configs, random_embedding


def checkpoint_weights(path: str, first_layer: int) -> dict[str, tuple[CompressorConfig, Weights]]:
    """By the compressor's name, configs and weights of the first CSA and HCA layers from `first_layer` on."""
    try:
        checkpoint = Checkpoint(path)
        layers = {"CSA": _first(checkpoint, "CSA", 4, first_layer), "HCA": _first(checkpoint, "HCA", 128, first_layer)}
        configs = _configs(checkpoint, layers["CSA"], layers["HCA"])
        return {
            name: (config, _weights(checkpoint, layers.get(name, layers["CSA"]), config, name.startswith("indexer")))
            for name, config in configs.items()
        }
    except (OSError, ValueError) as error:
        raise BadInput(str(error)) from error


def _first(checkpoint, kind, ratio, first_layer):
    for (layer, indexer), names in sorted(checkpoint.compressors.items()):
        if layer < first_layer or indexer or "ape" not in names:
            continue
        if checkpoint.tensor(names["ape"]).shape[:1] == (ratio,):
            return layer
    raise BadInput(f"{checkpoint.directory} has no {kind} compressor (ratio {ratio}) in a layer from {first_layer} on")


def _configs(checkpoint, csa, hca):
    configs, file = default_configs(), checkpoint.directory / "config.json"
    if not file.exists():
        return configs
    layers = CompressorConfig.from_pretrained_config(file)
    for layer, count, kind in ((csa, 2, "CSA"), (hca, 1, "HCA")):
        if layer >= len(layers) or len(layers[layer]) != count:
            raise BadInput(f"{file.parent}: layer {layer} has the weights of {kind}, but config.json says otherwise")
    configs["CSA"], configs["indexer"] = layers[csa]
    (configs["HCA"],) = layers[hca]
    configs["indexer fp4"] = dataclasses.replace(configs["indexer"], cache_format="indexer_mxfp4")
    return configs


def _weights(checkpoint, layer, config, indexer):
    weights = checkpoint.weights(layer, config, indexer=indexer)
    return Weights(random_embedding(len(weights["wkv_gate"])), **weights)
