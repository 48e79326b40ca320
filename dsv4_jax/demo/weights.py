"""The compressors in the demo, and random weights for them."""

import dataclasses

import jax
import numpy as np

from dsv4_jax import CompressorConfig

HIDDEN = 256
VOCABULARY = 256  # tokens are bytes


class BadInput(Exception):
    """The user's input is unusable; the message says why, in one line."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Weights:
    """`embedding` [256, hidden], `wkv_gate` [hidden, 2W], `ape` [m, W], `norm` [D]; float32."""

    embedding: np.ndarray
    wkv_gate: np.ndarray
    ape: np.ndarray
    norm: np.ndarray


def default_configs() -> dict[str, CompressorConfig]:
    """DeepSeek-V4's compressors, by the names that the demo prints."""
    return {
        "CSA": CompressorConfig.csa(),
        "HCA": CompressorConfig.hca(),
        "indexer": CompressorConfig.indexer("indexer_fp8"),
        "indexer fp4": CompressorConfig.indexer("indexer_mxfp4"),
    }


def random_weights() -> dict[str, tuple[CompressorConfig, Weights]]:
    """Weights of plausible size: channels differ in strength, and scores differ enough for the softmax to choose."""
    rng = np.random.default_rng(0)
    embedding = random_embedding(HIDDEN)

    def weights(config):
        w = config.width
        strength = np.exp(0.5 * rng.standard_normal(2 * w))
        strength[w:] = 2
        wkv_gate = rng.standard_normal((HIDDEN, 2 * w)) * (strength * HIDDEN**-0.5)
        ape = 0.5 * rng.standard_normal((config.compress_ratio, w))
        norm = 1 + 0.1 * rng.standard_normal(config.head_dim)
        return Weights(embedding, *(x.astype(np.float32) for x in (wkv_gate, ape, norm)))

    configs = default_configs()
    made = {name: weights(configs[name]) for name in ("CSA", "HCA", "indexer")}
    return {name: (config, made.get(name, made["indexer"])) for name, config in configs.items()}


def random_embedding(hidden: int) -> np.ndarray:
    """One random row per byte. All rows have a part in common, like hidden states of trained models."""
    rng = np.random.default_rng(2)
    common = rng.standard_normal(hidden)
    return (0.6 * common + 0.8 * rng.standard_normal((VOCABULARY, hidden))).astype(np.float32)
