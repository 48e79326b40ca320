"""RoPE tables for DeepSeek-V4's compressed layers."""

import dataclasses
import math

import numpy as np


@dataclasses.dataclass(frozen=True)
class Yarn:
    """RoPE frequencies with YaRN's interpolation; cos and sin are not multiplied by YaRN's attention factor.

    A pair that turns more than `beta_fast` times within the original context keeps its frequency. A pair that turns
    less than `beta_slow` times is slowed by `factor`. The pairs between are blended (https://arxiv.org/abs/2309.00071,
    section 3.2). `factor=1` is plain RoPE.

    Attributes:
      theta: base of the frequencies `theta ** (-2i / dim)`.
      factor: the context's length as a multiple of the original one.
      original_max_position_embeddings: tokens of the original context.
      beta_fast: turns within the original context from which on a pair keeps its frequency.
      beta_slow: turns within the original context up to which a pair is slowed by `factor`.
    """

    theta: float = 160_000.0
    factor: float = 16.0
    original_max_position_embeddings: int = 65_536
    beta_fast: float = 32.0
    beta_slow: float = 1.0

    def __post_init__(self):
        if not 1 < self.theta < math.inf:
            raise ValueError(f"theta is {self.theta!r}; it must be above 1")
        if not 1 <= self.factor < math.inf:
            raise ValueError(f"factor is {self.factor!r}; it must be at least 1")
        if not self.original_max_position_embeddings >= 1:
            got = self.original_max_position_embeddings
            raise ValueError(f"original_max_position_embeddings is {got!r}; it must be at least 1")
        if not 0 < self.beta_slow <= self.beta_fast < math.inf:
            raise ValueError(
                f"beta_slow is {self.beta_slow!r}, beta_fast {self.beta_fast!r}; it must be 0 < beta_slow <= beta_fast"
            )

    def inv_freq(self, dim: int = 64) -> np.ndarray:
        """Radians per position: `[dim // 2]` float32, one per rotated pair, the fastest first.

        Every step is rounded to float32, as in the model's own code: at position 2**20, one ulp of a frequency is up to
        0.06 radians.
        """
        if dim < 2 or dim % 2:
            raise ValueError(f"dim is {dim!r}; it must be even and at least 2")
        f32 = np.float32
        exponents = np.arange(0, dim, 2, dtype=f32) / f32(dim)
        # A float32 power differs between libraries. A float64 power, rounded, is the nearest float32 in all of them.
        periods = np.power(self.theta, exponents, dtype=np.float64).astype(f32)
        kept = f32(1) / periods
        if self.factor == 1:
            return kept
        slowed = f32(1) / (f32(self.factor) * periods)
        low = max(math.floor(self._pair_that_turns(self.beta_fast, dim)), 0)
        high = min(math.ceil(self._pair_that_turns(self.beta_slow, dim)), dim - 1)
        width = f32(high - low if high != low else 0.001)
        keep = f32(1) - np.clip((np.arange(dim // 2, dtype=f32) - f32(low)) / width, f32(0), f32(1))
        return slowed * (f32(1) - keep) + kept * keep

    def table(self, num_positions: int, dim: int = 64) -> np.ndarray:
        """Cosines and sines of positions `0 ... num_positions - 1`: the `cos_sin` of every op.

        The angle, position times frequency, is rounded to float32, as in the model. Its cosine and sine are rounded to
        the nearest float32.

        Returns:
          `[num_positions, dim]` float32: `dim // 2` cosines, then `dim // 2` sines. 256 bytes per position for dim 64.
        """
        if num_positions < 0:
            raise ValueError(f"num_positions is {num_positions!r}; it must be at least 0")
        inv_freq = self.inv_freq(dim)
        table = np.empty((num_positions, dim), np.float32)
        block = 8192  # keeps the float64 angles in the processor's cache
        for start in range(0, num_positions, block):
            rows = table[start : start + block]
            positions = np.arange(start, start + len(rows), dtype=np.float32)
            angles = (positions[:, None] * inv_freq).astype(np.float64)
            rows[:, : dim // 2] = np.cos(angles)
            rows[:, dim // 2 :] = np.sin(angles)
        return table

    def _pair_that_turns(self, turns: float, dim: int) -> float:
        """The index, a real number, of the pair that turns this often within the original context."""
        radians = turns * 2 * math.pi
        return dim * math.log(self.original_max_position_embeddings / radians) / (2 * math.log(self.theta))
