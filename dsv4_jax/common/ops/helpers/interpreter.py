"""Makes Triton's interpreter round as hardware does, and run in reasonable time (written for Triton 3.7 to 3.9).

The interpreter narrows float32 to bfloat16 and fp8 by cutting bits off, and widens bfloat16's subnormals to other
numbers; GPUs round to nearest, ties to even, and widen exactly. Here ml_dtypes' conversions replace its own while a
kernel runs. It gives a comparison of integers an integer's type, and Triton 3.9 refuses a scalar one as the mask of a
block. It multiplies the bits of bfloat16 matrices as if they were integers. Three things made it slow: it called the
function of a `tl.reduce` for each element (here for each slice), it patched all of triton.language again at each call
of a helper (here once per launch), and it built a table of dtypes each time it looked one up.
"""

import contextlib
import functools
import threading
import types

import ml_dtypes
import numpy as np
import triton

_LOCK = threading.RLock()
_SHORT = {"bf16": ml_dtypes.bfloat16, "fp8e4nv": ml_dtypes.float8_e4m3fn, "fp8e5": ml_dtypes.float8_e5m2}


@contextlib.contextmanager
def correct_rounding():
    """While this lasts, conversions from float32 round to nearest even, those to it are exact, and launches are fast.

    For one launch: the interpreter undoes its patches of triton.language at the end of each.
    """
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder
    # The interpreter holds its state in module globals: one kernel at a time.
    with _LOCK, contextlib.ExitStack() as undo:
        reduce_ops = interpreter.ReduceOps
        for owner, name, new in (
            (interpreter, "_convert_float", functools.partial(_convert, interpreter._convert_float)),
            (interpreter, "_patch_lang", _patch_once(interpreter._patch_lang)),
            (interpreter, "_get_np_dtype", _remembering(interpreter._get_np_dtype)),
            (builder, "create_splat", functools.partialmethod(_splat, builder.create_splat)),
            (builder, "create_dot", functools.partialmethod(_dot, builder.create_dot)),
            (reduce_ops, "generic_reduce", functools.partialmethod(_reduce, reduce_ops.generic_reduce)),
        ):
            undo.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, new)
        yield


def _convert(original, values, from_type, to_type, rounding_mode):
    narrow, wide = _SHORT.get(str(to_type)), _SHORT.get(str(from_type))
    if narrow and str(from_type) == "fp32":
        bits = np.asarray(values).view(np.float32).astype(narrow)
        return bits.view(np.uint16 if bits.itemsize == 2 else np.uint8)
    if wide and str(to_type) == "fp32":
        return np.asarray(values).view(wide).astype(np.float32).view(np.uint32)
    return original(values, from_type, to_type, rounding_mode)


def _splat(self, original, block, scalar):
    if scalar.data.dtype == bool:
        scalar = type(scalar)(scalar.data, triton.language.int1)
    return original(self, block, scalar)


def _dot(self, original, a, b, *rest):
    wide = (type(x)(_widened(x.data), triton.language.float32) if str(x.dtype) == "bf16" else x for x in (a, b))
    return original(self, *wide, *rest)


def _widened(bits):
    return bits.view(ml_dtypes.bfloat16).astype(np.float32)


def _reduce(self, original, inputs):
    """Several tensors over one axis, in the order of the original."""
    if self.axis is None or self.keep_dims or len(inputs) == 1 or inputs[0].handle.data.ndim == 1:
        return original(self, inputs)
    slices = zip(*(np.moveaxis(x.handle.data, self.axis, 0) for x in inputs), strict=True)
    rows = (tuple(self.to_tensor(part, x.dtype) for part, x in zip(row, inputs, strict=True)) for row in slices)
    return functools.reduce(lambda so_far, row: self.combine_fn.fn(*so_far, *row), rows)


def _patch_once(original):
    """A `_patch_lang` whose first call, the launch's own, patches all that a helper may use; the others do nothing."""
    import triton.language as tl

    done = False

    def patch(fn):
        nonlocal done
        if not done:
            done = True
            return original(types.SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))

    return patch


def _remembering(original):
    known = functools.cache(original)  # pointers have no hash
    return lambda dtype: original(dtype) if dtype.scalar.is_ptr() else known(dtype.scalar)
