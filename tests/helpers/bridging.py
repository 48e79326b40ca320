"""What the tests of the bridge share. Without torch, importing it skips the module that does."""

import os
import subprocess
import sys
import textwrap

import jax
import numpy as np
import pytest

from bridge import torch_call

torch = pytest.importorskip("torch")

Type = jax.ShapeDtypeStruct


class OwnError(Exception):
    pass


def assert_same_bytes(actual, expected):
    actual, expected = np.asarray(actual), np.asarray(expected)
    assert (actual.shape, actual.dtype) == (expected.shape, expected.dtype)
    assert actual.tobytes() == expected.tobytes()


def double_into(x, out):
    torch.mul(x, 2, out=out)


def add_in_place(x, cache):
    cache += x


def double(x):
    return torch_call(double_into, x, out_type=Type.like(x))


def accumulate(x, cache):
    return torch_call(add_in_place, x, cache, out_type=Type.like(cache), input_output_aliases={1: 0})


def run_python(script, **env):
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": root, **env}
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], env=env, check=True, timeout=120)
