"""Makes Triton's interpreter round as hardware does, and reduce in reasonable time.

The interpreter narrows float32 to bfloat16 and fp8 by cutting bits off, and widens bfloat16's subnormals to other
numbers (Triton 3.8); GPUs round to nearest, ties to even, and widen exactly. Here its conversions are replaced by
ml_dtypes' while a kernel runs. And it calls the function of a `tl.reduce` for each element; here, for each slice.
It gives a comparison of integers an integer's type, and Triton 3.9 refuses a scalar one as the mask of a block.
"""

import contextlib
import functools
import threading

import ml_dtypes
import numpy as np
import triton

_LOCK = threading.RLock()
_SHORT = {"bf16": ml_dtypes.bfloat16, "fp8e4nv": ml_dtypes.float8_e4m3fn, "fp8e5": ml_dtypes.float8_e5m2}


@contextlib.contextmanager
def amended():
    """While this lasts, conversions from float32 round to nearest even, those to it are exact, and reductions fast."""
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder
    # The interpreter holds its state in module globals: one kernel at a time.
    with _LOCK:
        convert, reduce = interpreter._convert_float, interpreter.ReduceOps.generic_reduce
        interpreter._convert_float = functools.partial(_convert, convert)
        interpreter.ReduceOps.generic_reduce = functools.partialmethod(_reduce, reduce)
        splat = builder.create_splat
        builder.create_splat = functools.partialmethod(_splat, splat)
        try:
            yield
        finally:
            interpreter._convert_float, interpreter.ReduceOps.generic_reduce = convert, reduce
            builder.create_splat = splat


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


def _reduce(self, original, inputs):
    """Several tensors over one axis, in the order of the original."""
    if self.axis is None or self.keep_dims or len(inputs) == 1 or inputs[0].handle.data.ndim == 1:
        return original(self, inputs)
    slices = zip(*(np.moveaxis(x.handle.data, self.axis, 0) for x in inputs), strict=True)
    rows = (tuple(self.to_tensor(part, x.dtype) for part, x in zip(row, inputs, strict=True)) for row in slices)
    return functools.reduce(lambda so_far, row: self.combine_fn.fn(*so_far, *row), rows)
