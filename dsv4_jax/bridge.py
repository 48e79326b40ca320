"""The package `bridge`, under a name that no other project has."""

from bridge import to_jax, to_torch, torch_call

__all__ = ["to_jax", "to_torch", "torch_call"]
