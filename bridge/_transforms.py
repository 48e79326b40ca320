"""Functions of tensors made from another: its derivatives, by torch.autograd, and itself batched, by torch.vmap.

JAX differentiates a linear map by transposing it, torch computes the adjoint: for complex tensors they differ by
conjugation.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax

from bridge._dlpack import load_torch

if TYPE_CHECKING:
    import torch


@dataclasses.dataclass(frozen=True)
class Jvp:
    """`(*inputs, *tangents) -> tangents`: of the inputs `wrt`, to those of the outputs `of`, leaves of a pytree.

    It is the derivative of the `Vjp`, which is linear, by cotangents: torch has more reverse-mode than forward-mode
    derivatives.
    """

    fn: Callable
    wrt: tuple[int, ...]
    of: tuple[int, ...]

    def __call__(self, *args: torch.Tensor) -> tuple[torch.Tensor, ...]:
        torch = load_torch()
        followed = torch.is_grad_enabled()
        inputs, tangents = _split(self.wrt, args, len(self.wrt))
        with torch.enable_grad():
            outputs = _outputs(self, inputs)
            cotangents = [torch.zeros_like(y).requires_grad_() for y in outputs]
            pulled = _pull(outputs, [inputs[i] for i in self.wrt], cotangents, followed=True)
            return _pull(pulled, cotangents, tangents, followed)


@dataclasses.dataclass(frozen=True)
class Vjp:
    """`(*inputs, *cotangents) -> cotangents`: of the outputs `of`, to those of the inputs `wrt`."""

    fn: Callable
    wrt: tuple[int, ...]
    of: tuple[int, ...]

    def __call__(self, *args: torch.Tensor) -> tuple[torch.Tensor, ...]:
        torch = load_torch()
        followed = torch.is_grad_enabled()
        inputs, cotangents = _split(self.wrt, args, len(self.of))
        with torch.enable_grad():
            conjugates = [ct.conj() for ct in cotangents]
            pulled = _pull(_outputs(self, inputs), [inputs[i] for i in self.wrt], conjugates, followed)
            return tuple(ct.conj() for ct in pulled)


def _split(wrt: tuple[int, ...], args: tuple, linear: int) -> tuple[list, tuple]:
    """The inputs, those of `wrt` as tensors that require grad, and the tangents or cotangents."""
    inputs = list(args[:-linear])
    for i in wrt:
        if not inputs[i].requires_grad:  # it does within another derivative
            inputs[i] = inputs[i].detach().requires_grad_()
    return inputs, args[-linear:]


def _outputs(derivative: Jvp | Vjp, inputs: list) -> list[torch.Tensor]:
    leaves = jax.tree.leaves(derivative.fn(*inputs))
    return [leaves[o] for o in derivative.of]


def _pull(outputs: Sequence, inputs: list, cotangents: Sequence, followed: bool) -> tuple[torch.Tensor, ...]:
    """Torch's vector-Jacobian product, with zeros where no output depends on an input.

    `followed`: whether it is to be differentiated. Gradients are on before a derivative runs if that is so.
    """
    torch = load_torch()
    linked = [(y, ct) for y, ct in zip(outputs, cotangents, strict=True) if y.requires_grad]
    if not linked:
        return tuple(map(torch.zeros_like, inputs))
    return torch.autograd.grad(
        [y for y, _ in linked], inputs, [ct for _, ct in linked],
        create_graph=followed, allow_unused=True, materialize_grads=True,
    )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Vmap:
    """`fn` over the leading axis of the inputs whose `in_dims` is 0, the others being the same for all."""

    fn: Callable
    in_dims: tuple[int | None, ...]

    def __call__(self, *args: torch.Tensor) -> Any:
        return load_torch().vmap(self.fn, in_dims=self.in_dims)(*args)


def batched(fn: Callable, in_dims: tuple[int | None, ...]) -> Callable:
    """`Vmap` of `fn`; of a derivative, all of whose inputs have the axis, the derivative of a `Vmap`.

    torch.vmap does not go over torch.autograd. One element's results depend on no other's, so the order is the same.
    """
    if isinstance(fn, Jvp | Vjp):
        linear = len(fn.wrt if isinstance(fn, Jvp) else fn.of)
        return dataclasses.replace(fn, fn=batched(fn.fn, in_dims[:-linear]))
    return Vmap(fn, in_dims)
