"""The eager pair, and what both halves of the package know about dtypes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import numpy as np

if TYPE_CHECKING:
    import torch

# Names that JAX and torch share and that DLPack carries both ways. Sub-byte kinds are left out: JAX keeps one value in
# a byte, and neither side's DLPack takes them.
_CARRIED = frozenset(
    (
        "bool uint8 uint16 uint32 uint64 int8 int16 int32 int64 float16 bfloat16 float32 float64 complex64 complex128 "
        "float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu"
    ).split()
)

# XLA takes a foreign buffer only at these alignments, in bytes: what its compiled code may assume of a parameter.
_ALIGNMENT = {"cpu": 64, "cuda": 16}


def load_torch() -> Any:
    """Imports torch, or says how to get it."""
    try:
        import torch
    except ImportError as error:
        raise ImportError(f"bridge needs PyTorch, which could not be imported ({error}): pip install torch") from error
    return torch


def carried(dtype: Any, what: str) -> None:
    """TypeError if DLPack does not carry a JAX dtype to torch. `what` names the argument."""
    if dtype.name not in _CARRIED:
        key = jax.numpy.issubdtype(dtype, jax.dtypes.prng_key)
        instead = "jax.random.key_data of it" if key else "its bits, as uint8 (jax.lax.bitcast_convert_type)"
        raise TypeError(
            f"{what} has dtype {dtype.name}, which DLPack does not carry between JAX and torch; pass {instead}"
        )


def torch_dtype(dtype: Any, what: str) -> torch.dtype:
    """The torch dtype for a JAX one; TypeError if no tensor can hold it. `what` names the argument."""
    carried(dtype, what)
    return getattr(load_torch(), dtype.name)


def jax_dtype(dtype: torch.dtype, what: str) -> np.dtype:
    """The JAX dtype for a torch one; TypeError if JAX cannot hold it, now. `what` names the argument."""
    name = str(dtype).removeprefix("torch.")
    if name not in _CARRIED:
        raise TypeError(f"{what} has dtype {dtype}, which DLPack does not carry between torch and JAX")
    found = jax.numpy.dtype(name)
    require_x64(found, what)
    return found


def require_x64(dtype: np.dtype, what: str) -> None:
    """TypeError if JAX would narrow this dtype: a narrowed array cannot share its bytes."""
    narrowed = jax.dtypes.canonicalize_dtype(dtype)
    if narrowed != dtype:
        raise TypeError(
            f"{what} has dtype {dtype.name}, which JAX holds only with jax_enable_x64 on; "
            f"turn that on, or use {narrowed.name}"
        )


def to_torch(array: jax.Array) -> torch.Tensor:
    """A torch tensor over the memory of a JAX array: same shape, same dtype, no copy.

    Torch's current stream waits for the array to be computed (on the CPU, this call does). The tensor keeps the memory
    alive. JAX arrays are immutable: writing to the tensor is undefined. While it is in use do not donate the array: JAX
    then copies, or refuses. On a GPU, JAX may use the memory again as soon as array and tensor are both gone, even if
    torch still has queued work that reads it: keep one of them until that work is done.

    Args:
      array: a `jax.Array` of any shape on one CPU or GPU, of a dtype both sides have.

    Raises:
      TypeError: not a `jax.Array`, a traced one (use `torch_call` inside `jax.jit`), or a dtype DLPack can't carry.
      ValueError: the array lies on several devices, or has been deleted or donated.
    """
    torch = load_torch()
    if isinstance(array, jax.core.Tracer):
        raise TypeError(f"to_torch: array is traced ({array.aval}) and has no memory yet; use bridge.torch_call here")
    if not isinstance(array, jax.Array):
        raise TypeError(f"to_torch: array is a {type(array).__name__}; it must be a jax.Array")
    if len(array.sharding.device_set) != 1:
        raise ValueError(
            f"to_torch: array lies on {len(array.sharding.device_set)} devices ({array.sharding}); it must lie on one: "
            "take its shards, array.addressable_shards[i].data, one by one"
        )
    torch_dtype(array.dtype, "to_torch: array")
    if array.is_deleted():
        raise ValueError(f"to_torch: array, {array.aval}, was deleted or donated; its memory is no longer its own")
    if next(iter(array.sharding.device_set)).platform == "cpu":
        array.block_until_ready()  # there is no stream on the CPU for torch to wait on
    return torch.from_dlpack(array)


def to_jax(tensor: torch.Tensor) -> jax.Array:
    """A JAX array over the memory of a torch tensor: same shape, same dtype, no copy.

    JAX waits, on its stream, for what torch's current stream has queued. The array keeps the tensor's memory alive.
    JAX takes arrays to be immutable: do not write to the tensor while the array is in use.

    Args:
      tensor: a contiguous strided tensor of any shape on the CPU or a GPU, of a dtype both sides have.

    Raises:
      TypeError: not a tensor, or a dtype that DLPack can't carry or JAX can't hold (int64, float64 and complex128 need
        `jax_enable_x64`).
      ValueError: the tensor requires grad, is sparse or nested, is a lazy conjugate or negative, is not contiguous,
        starts at an address XLA can't use, or is on a device that is neither CPU nor GPU.
    """
    torch = load_torch()
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"to_jax: tensor is a {type(tensor).__name__}; it must be a torch.Tensor")
    if type(tensor).__name__ == "FakeTensor":
        raise TypeError("to_jax: tensor is a FakeTensor, which has no memory; it must be a real one")
    if tensor.device.type not in _ALIGNMENT:
        raise ValueError(f"to_jax: tensor is on device {tensor.device}; it must be on cpu or cuda (ROCm's name too)")
    if tensor.is_nested:
        raise ValueError(
            "to_jax: tensor is a nested one; it must be a single one: use tensor.unbind() or to_padded_tensor"
        )
    if tensor.layout != torch.strided:
        raise ValueError(f"to_jax: tensor has layout {tensor.layout}; it must be strided: use tensor.to_dense()")
    jax_dtype(tensor.dtype, "to_jax: tensor")
    if tensor.requires_grad:
        raise ValueError("to_jax: tensor requires grad, and JAX would not record it: use tensor.detach()")
    if tensor.is_conj() or tensor.is_neg():
        raise ValueError("to_jax: tensor is a lazy view: use tensor.resolve_conj() or tensor.resolve_neg()")
    if not tensor.is_contiguous():
        raise ValueError(
            f"to_jax: tensor of shape {tuple(tensor.shape)} has strides {tensor.stride()}, which a JAX array does not "
            "keep; it must be contiguous: use tensor.contiguous()"
        )
    if tensor.data_ptr() % _ALIGNMENT[tensor.device.type]:
        raise ValueError(
            f"to_jax: tensor starts at an address that is no multiple of {_ALIGNMENT[tensor.device.type]} bytes, "
            "as XLA needs: use tensor.clone()"
        )
    if tensor.device.type == "cpu":
        return jax.dlpack.from_dlpack(tensor, copy=False)
    with torch.cuda.device(tensor.device):  # torch exports only from its current device
        return jax.dlpack.from_dlpack(tensor, copy=False)
