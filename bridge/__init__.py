"""Zero-copy exchange between JAX and PyTorch, eagerly and inside `jax.jit`.

PyTorch is imported when one of these functions is called, not before.
"""

from bridge._call import torch_call
from bridge._dlpack import to_jax, to_torch

__all__ = ["to_jax", "to_torch", "torch_call"]
