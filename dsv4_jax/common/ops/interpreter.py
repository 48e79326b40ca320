"""Makes Triton's interpreter round as hardware does.

The interpreter narrows float32 to bfloat16 and fp8 by cutting bits off, and widens bfloat16's subnormals to other
numbers (Triton 3.8); GPUs round to nearest, ties to even, and widen exactly. Here its conversions are replaced by
ml_dtypes' while a kernel runs.
"""

import contextlib
import threading

import ml_dtypes
import numpy as np

_LOCK = threading.RLock()
_SHORT = {"bf16": ml_dtypes.bfloat16, "fp8e4nv": ml_dtypes.float8_e4m3fn, "fp8e5": ml_dtypes.float8_e5m2}


@contextlib.contextmanager
def round_to_nearest_even():
    """While this lasts, the interpreter's conversions from float32 round to nearest even, and those to it are exact."""
    from triton.runtime import interpreter

    # The interpreter holds its state in module globals: one kernel at a time.
    with _LOCK:
        original = interpreter._convert_float

        def convert(values, from_type, to_type, rounding_mode):
            narrow, wide = _SHORT.get(str(to_type)), _SHORT.get(str(from_type))
            if narrow and str(from_type) == "fp32":
                bits = np.asarray(values).view(np.float32).astype(narrow)
                return bits.view(np.uint16 if bits.itemsize == 2 else np.uint8)
            if wide and str(to_type) == "fp32":
                return np.asarray(values).view(wide).astype(np.float32).view(np.uint32)
            return original(values, from_type, to_type, rounding_mode)

        interpreter._convert_float = convert
        try:
            yield
        finally:
            interpreter._convert_float = original
