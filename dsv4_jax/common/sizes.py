"""What the compressing kernels count: how long a call's arrays are, and how much work they hold."""


def measure_arrays(metadata, state_cache, kv_cache, cos_sin) -> dict[str, int]:
    """The lengths that bound what the plan may name, by the kernels' names for them."""
    return {
        "tokens": metadata.positions.shape[0],
        "state_pages": state_cache.shape[0],
        "kv_pages": kv_cache.shape[0],
        "table_rows": cos_sin.shape[0],
    }


def count_work(metadata, state_cache, kv_cache, cos_sin, save: str) -> tuple[int, int]:
    """How many entries of the plan may close a window, and how many states may be saved.

    Without a page in the cache or a row in the RoPE table no window closes; without a state page nothing is saved.

    Args:
      save: as `dsv4_jax.compress` takes it, or "none".
    """
    windows = metadata.closing.shape[0] if kv_cache.shape[0] and cos_sin.shape[0] else 0
    saved = {"all": metadata.positions.shape[0], "tail": metadata.saving.shape[0], "none": 0}[save]
    return windows, saved if state_cache.shape[0] else 0
