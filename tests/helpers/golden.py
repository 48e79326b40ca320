"""What other systems' kernels returned, as recorded in tests/golden."""

import pathlib

import ml_dtypes
import numpy as np

FOLDER = pathlib.Path(__file__).parents[1] / "golden"
COMPRESSOR, COMPANIONS = FOLDER / "vllm_0.33_h200.npz", FOLDER / "vllm_0.33_h200_companions.npz"


def cases(file=COMPRESSOR):
    """The names of a file's cases."""
    with np.load(file) as archive:
        return sorted({name.rpartition("/")[0] for name in archive.files})


def load(case, file=COMPANIONS):
    """The arrays of a case by name; bfloat16 and fp8 ones with their dtype, and without the name's ending."""
    dtypes = {"bf16": ml_dtypes.bfloat16, "e4m3fn": ml_dtypes.float8_e4m3fn}
    found = {}
    with np.load(file) as archive:
        for path in archive.files:
            of, _, name = path.rpartition("/")
            if of == case:
                name, _, ending = name.partition("__")
                found[name] = archive[path].view(dtypes[ending]) if ending else archive[path]
    return found
