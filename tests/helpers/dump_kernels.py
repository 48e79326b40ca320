"""Writes the code of every Triton kernel, as the ops launch it, for one GPU target; needs no GPU.

With PYTHONPATH=tests and without TRITON_INTERPRET, `python -m helpers.dump_kernels cuda 90 FOLDER` writes PTX (`hip
gfx942 FOLDER`: AMD's assembly) without debug information, a file per call and kernel of `lowering_cases`.

To show that a change leaves the machine code alone, write a folder before it and one after it. Then
`python -m helpers.dump_kernels compare BEFORE AFTER` prints the files that differ, and fails if any do.
"""

import os
import pathlib
import sys
import zlib

os.environ["TRITON_DISABLE_LINE_INFO"] = "1"  # read when Triton is imported

import jax.numpy as jnp
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from dsv4_jax import gpus
from dsv4_jax.common.ops.helpers.launch import launching_with
from helpers import lowering_cases

TYPES = {"float32": "fp32", "bfloat16": "bf16", "int32": "i32", "uint8": "u8", "float8_e4m3fn": "fp8e4nv", "bool": "i1"}
ASSEMBLY = {"cuda": "ptx", "hip": "amdgcn"}


def dump(backend: str, arch: str, folder: pathlib.Path) -> None:
    number = int(arch) if arch.isdigit() else arch
    target = GPUTarget(backend, number, gpus.wave_size(f"sm_{arch}" if arch.isdigit() else arch))
    folder.mkdir(parents=True, exist_ok=True)
    compiled, files = {}, 0
    for case in lowering_cases.cases():
        for kernel, num_warps, source in _launches(case):
            key = kernel.__name__, tuple(source.signature.items()), tuple(source.constants.items()), num_warps
            if key not in compiled:
                options = {"num_warps": max(1, num_warps * 32 // target.warp_size)}
                compiled[key] = triton.compile(source, target=target, options=options).asm[ASSEMBLY[backend]]
            (folder / f"{case.op}-{zlib.crc32(str(case).encode()):08x}{kernel.__name__}.txt").write_text(compiled[key])
            files += 1
    print(f"{files} launches, {len(compiled)} kernels")


def _launches(case) -> list[tuple]:
    """The kernels that an op launches when it is lowered, with their warps and what is compiled."""
    found = []

    def record(kernel, grid, updates, outputs, num_warps, constants, args):
        found.append((kernel, num_warps, _source(kernel, {**args, **outputs}, constants)))
        return tuple(args[name] for name in updates) + tuple(jnp.zeros(o.shape, o.dtype) for o in outputs.values())

    with launching_with(record):
        case.lower("cuda")
    return found


def _source(kernel, values, constants) -> ASTSource:
    """The kernel specialized as jax-triton does: arrays are aligned, and an integer that is 1 is a constant."""
    constants = constants | {name: 1 for name, value in values.items() if isinstance(value, int) and value == 1}
    signature, attributes = {}, {}
    for i, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
        elif isinstance(values[name], int):
            signature[name] = "i32"
        else:
            signature[name] = "*" + TYPES[values[name].dtype.name]
            attributes[(i,)] = [["tt.divisibility", 16]]
    return ASTSource(kernel, signature, constexprs=constants, attrs=attributes)


def compare(before: pathlib.Path, after: pathlib.Path) -> int:
    """Prints the names of the files that differ; returns how many do."""
    names = sorted({path.name for folder in (before, after) for path in folder.iterdir()})
    pairs = [[(folder / name) for folder in (before, after)] for name in names]
    different = [
        old.name for old, new in pairs if not (old.exists() and new.exists()) or old.read_text() != new.read_text()
    ]
    print(*different, f"{len(names) - len(different)} of {len(names)} are equal", sep="\n")
    return len(different)


if __name__ == "__main__":
    if sys.argv[1] == "compare":
        sys.exit(compare(*map(pathlib.Path, sys.argv[2:])) > 0)
    dump(sys.argv[1], sys.argv[2], pathlib.Path(sys.argv[3]))
