"""Makes Triton's interpreter round as hardware does.

The interpreter narrows float32 to bfloat16 and fp8 by cutting bits off (Triton 3.8); GPUs round to nearest, ties to
even. Here its conversion is replaced by ml_dtypes' while a kernel runs.
"""

import contextlib
import threading

import ml_dtypes
import numpy as np

_LOCK = threading.RLock()
_NARROW = {"bf16": ml_dtypes.bfloat16, "fp8e4nv": ml_dtypes.float8_e4m3fn, "fp8e5": ml_dtypes.float8_e5m2}


@contextlib.contextmanager
def round_to_nearest_even():
    """While this lasts, the interpreter's narrowing conversions round to nearest even."""
    from triton.runtime import interpreter

    # The interpreter holds its state in module globals: one kernel at a time.
    with _LOCK:
        original = interpreter._convert_float

        def convert(values, from_type, to_type, rounding_mode):
            narrow = _NARROW.get(str(to_type))
            if narrow is None or str(from_type) != "fp32":
                return original(values, from_type, to_type, rounding_mode)
            bits = np.asarray(values).view(np.float32).astype(narrow)
            return bits.view(np.uint16 if bits.itemsize == 2 else np.uint8)

        interpreter._convert_float = convert
        try:
            yield
        finally:
            interpreter._convert_float = original
