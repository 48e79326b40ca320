"""A PyTorch module in a JAX training step: gradients by torch.autograd, updates by JAX, in one `jax.jit`.

pip install -e . torch
python examples/train_torch.py
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import torch

from bridge import torch_call

STEPS, RATE = 300, 0.3
torch.manual_seed(0)
module = torch.nn.Sequential(torch.nn.Linear(2, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
names = [name for name, _ in module.named_parameters()]
params = {name: jnp.asarray(value.detach().numpy()) for name, value in module.named_parameters()}


def forward(x, *weights):
    """The module with other weights: those that it holds itself would get no gradient."""
    return torch.func.functional_call(module, dict(zip(names, weights, strict=True)), (x,))


def loss(params, x, y):
    predicted = torch_call(forward, x, *(params[name] for name in names), differentiable=True)
    return jnp.square(predicted[:, 0] - y).mean()


@functools.partial(jax.jit, donate_argnums=0)
def step(params, x, y):
    value, grads = jax.value_and_grad(loss)(params, x, y)
    return jax.tree.map(lambda p, g: p - RATE * g, params, grads), value


x = jax.random.uniform(jax.random.key(0), (256, 2), minval=-1, maxval=1)
y = x[:, 0] * x[:, 1]
grads = jax.grad(loss)(params, x, y)
inputs, targets = (torch.from_numpy(np.array(a)) for a in (x, y))
torch.nn.functional.mse_loss(module(inputs)[:, 0], targets).backward()
error = max(float(jnp.abs(grads[name] - p.grad.numpy()).max()) for name, p in module.named_parameters())
print(f"gradients differ from torch's own by {error:.1e}")
assert error < 1e-6

first = float(loss(params, x, y))
for _ in range(STEPS):
    params, value = step(params, x, y)
print(f"loss {first:.3f} before, {float(value):.3f} after {STEPS} steps")
assert float(value) < first / 2
