"""`DeepseekCompressor`: projection and `compress` as a Flax module. Only this module needs flax."""

import jax
import jax.numpy as jnp

from dsv4_jax import checks
from dsv4_jax.api.compress import Save, compress
from dsv4_jax.config import CompressorConfig
from dsv4_jax.metadata import CompressorMetadata
from dsv4_jax.platforms import Implementation
from dsv4_jax.promotion import own_rules

try:
    from flax import nnx
except ImportError as error:
    raise ImportError("DeepseekCompressor needs flax: pip install 'dsv4-jax[flax]'") from error


class DeepseekCompressor(nnx.Module):
    """One compressor of one layer: takes hidden states, stores keys in a paged cache.

    The module holds only parameters. Caches are values that go in and come out. The RoPE table (256 bytes per position)
    is an argument, because all layers of a model share one.

    Each parameter carries its logical axes as Flax's `out_sharding` metadata. By themselves they shard nothing.
    `nnx.get_named_sharding` turns them into shardings, inside `flax.core.spmd.logical_axis_rules` that map "embed" and
    "state" to axes of a mesh or to None. Shard only "embed": the op needs every column of a state row.

    Attributes:
      wkv_gate: `[hidden_size, 2W]` of `param_dtype`, axes ("embed", "state"); kv in the first half, score in the
        second.
      ape: `[m, W]` float32, axes (None, "state"), the position bias.
      norm: `[D]` float32, axes (None,), the RMSNorm's weight.
    """

    def __init__(
        self,
        config: CompressorConfig,
        hidden_size: int,
        *,
        param_dtype: jax.typing.DTypeLike = jnp.float32,
        precision: jax.lax.PrecisionLike = None,
        rngs: nnx.Rngs,
    ):
        """Initializes the parameters: a random projection, no bias, norm weights of 1.

        Args:
          config: the compressor.
          hidden_size: channels of the hidden states.
          param_dtype: dtype of `wkv_gate`, float32 or bfloat16.
          precision: precision of the projection, as in `jax.lax.dot_general`. None is the platform's default: a GPU may
            round float32 operands to TF32. "highest" forbids it. bfloat16 operands are exact either way.
          rngs: its stream `params` gives the random weights.
        """
        checks.instance("config", config, CompressorConfig)
        checks.at_least("hidden_size", hidden_size, 1)
        if jnp.dtype(param_dtype) not in checks.FLOATS:
            raise TypeError(f"param_dtype is {jnp.dtype(param_dtype).name}; it must be float32 or bfloat16")
        self.config = config
        self.precision = precision
        m, d, w = config.compress_ratio, config.head_dim, config.width
        projection = nnx.initializers.lecun_normal()(rngs.params(), (hidden_size, 2 * w), param_dtype)
        self.wkv_gate = _param(projection, "embed", "state")
        self.ape = _param(jnp.zeros((m, w), jnp.float32), None, "state")
        self.norm = _param(jnp.ones((d,), jnp.float32), None)

    def init_caches(self, state_pages: int, kv_pages: int) -> tuple[jax.Array, jax.Array]:
        """Returns caches of zeros, `(state_cache, kv_cache)`.

        Args:
          state_pages: pages of the state cache; if layers share it, the sum over the layers.
          kv_pages: pages of the cache; if layers share it, the sum over the layers.
        """
        c = self.config
        checks.at_least("state_pages", state_pages, 0)
        state_cache = jnp.zeros((state_pages, c.page_rows, c.state_width), jnp.float32)
        return state_cache, c.format.allocate(kv_pages, c.kv_page_rows)

    def __call__(
        self,
        hidden: jax.Array,
        caches: tuple[jax.Array, jax.Array],
        metadata: CompressorMetadata,
        cos_sin: jax.Array,
        *,
        save: Save = "tail",
        kv_scale: jax.Array | float | None = None,
        implementation: Implementation | None = None,
    ) -> tuple[jax.Array, jax.Array]:
        """Projects the hidden states, saves states and stores the keys of windows that close.

        The projection multiplies in the wider dtype of `hidden` and `wkv_gate`, and sums in float32.

        Args:
          hidden: `[T, hidden_size]` float32 or bfloat16.
          caches: `(state_cache, kv_cache)`, `[pages, page_rows, config.state_width]` float32 and a cache of
            `config.format`; updated in place when donated.
          metadata: this step's `CompressorMetadata`; its `at_layer` if layers share the caches.
          cos_sin: `[P, 64]` float32, `config.rope.table(P)`. Pass it to `jit` as an argument; otherwise it becomes a
            constant of the compiled program.
          save: as in `compress`.
          kv_scale: as in `compress`.
          implementation: as in `compress`.

        Returns:
          The caches.
        """
        wkv_gate = self.wkv_gate.get_value()
        hidden = checks.array("hidden", hidden, ("T", wkv_gate.shape[0]), checks.FLOATS)
        if not isinstance(caches, tuple | list) or len(caches) != 2:
            raise TypeError("caches must be the pair (state_cache, kv_cache)")
        with own_rules():
            kv_score = jnp.matmul(hidden, wkv_gate, precision=self.precision, preferred_element_type=jnp.float32)
        return compress(
            kv_score,
            self.ape.get_value(),
            *caches,
            metadata,
            self.norm.get_value(),
            cos_sin,
            config=self.config,
            save=save,
            kv_scale=kv_scale,
            implementation=implementation,
        )


def _param(value, *axes):
    # Not sharded eagerly, which would require a mesh.
    return nnx.Param(value, out_sharding=axes, eager_sharding=False)
