"""Lowers every op as users do, for a GPU that need not be here, and checks what comes out.

`PYTHONPATH=tests python -m helpers.lower_ops cuda "NVIDIA H200"` takes one call of each op and cache format; with
`--all` every call of `lowering_cases`, and what jax-triton leaves as PTX is assembled, too. Run it without
TRITON_INTERPRET. It prints each kernel's name and warps, and ends with 1 if a check fails.
"""

import importlib.abc
import re
import subprocess
import sys
import tempfile
import traceback
import zlib

import jax
import triton
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo

from dsv4_jax import gpus
from helpers import lowering_cases


class _NoTorch(importlib.abc.MetaPathFinder):
    """Kernels on a GPU need no torch, which ROCm's users may not have; and importing it takes seconds."""

    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            raise ModuleNotFoundError("torch is not to be imported here", name=name)


def under(kind: str):
    """A context in which programs are lowered for a GPU of this kind, "NVIDIA H200" or "gfx942"."""
    device = jax.sharding.AbstractDevice(kind, None, "gpu")
    return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), axis_types=(), abstract_device=device))


def kernel_calls(lowered) -> list[dict]:
    """The Triton kernels of a lowered program: "name", "num_warps" and "binary", PTX or the path of an hsaco file."""
    found = []
    for op in _operations(lowered):
        if _is_kernel_call(op):
            opaque = ir.DictAttr(op.attributes["mhlo.backend_config"])["opaque"]
            fields = _fields(_fields(_fields(zlib.decompress(ir.StringAttr(opaque).value_bytes))[1])[1])
            found.append({"name": fields[1].decode(), "num_warps": fields[2], "binary": fields[4].decode()})
    return found


def check_aliases(lowered, updated: int) -> None:
    """Asserts that kernels alone touch the caches: so many results are donated arguments, updated in place."""
    function = next(iter(lowered.compiler_ir("stablehlo").body.operations))
    results = list(function.regions[0].blocks[0].operations)[-1].operands
    donated = {}
    for i, attributes in enumerate(function.attributes["arg_attrs"]):
        if "tf.aliasing_output" in ir.DictAttr(attributes):
            donated[ir.IntegerAttr(ir.DictAttr(attributes)["tf.aliasing_output"]).value] = i
    assert len(donated) == updated, f"arguments donated by result: {donated}"
    for result, argument in donated.items():
        assert _argument_behind(results[result]) == argument, f"result {result} is not argument {argument} in place"
    caches = [results[result].type for result in donated]
    for op in _operations(lowered):
        copied = op.name != "func.func" and not _is_kernel_call(op) and any(r.type in caches for r in op.results)
        assert not copied, f"an array of a cache's size is made: {op}"


_assembled = set()


def check_binary(kernel: dict, platform: str, assemble: bool) -> None:
    """Asserts that a kernel's binary is one, of the architecture that is lowered for."""
    arch = gpus.arch(platform)
    if platform == "rocm":
        with open(kernel["binary"], "rb") as file:
            binary = file.read()
        # Triton 3.8 says amdgcn-amd-amdhsa--gfx942, 3.9 amdgpu9.42-amd-amdhsa-unknown-gfx942.
        assert binary.startswith(b"\x7fELF") and re.search(rb"-amd-amdhsa-\w*-%s\b" % arch.encode(), binary)
        return
    accelerated = arch + ("a" if gpus.compute_capability(arch) >= 90 else "")
    assert f".target {accelerated}\n" in kernel["binary"] and f".entry {kernel['name']}(" in kernel["binary"]
    if assemble and kernel["binary"] not in _assembled:
        _assembled.add(kernel["binary"])
        tools = triton.knobs.nvidia
        ptxas = (tools.ptxas_blackwell if gpus.compute_capability(arch) >= 100 else tools.ptxas).path
        with tempfile.NamedTemporaryFile(suffix=".ptx") as source, tempfile.NamedTemporaryFile() as binary:
            source.write(kernel["binary"].encode())
            source.flush()
            subprocess.run([ptxas, f"--gpu-name={accelerated}", source.name, "-o", binary.name], check=True)
            assert binary.read(4) == b"\x7fELF"


def _operations(lowered):
    found = []

    def visit(op):
        found.append(op)
        return ir.WalkResult.ADVANCE

    lowered.compiler_ir("stablehlo").operation.walk(visit)
    return found


def _is_kernel_call(op):
    return (
        op.name == "stablehlo.custom_call"
        and ir.StringAttr(op.attributes["call_target_name"]).value == "triton_kernel_call_ffi"
    )


def _argument_behind(value):
    """The function's argument whose buffer a value is, followed back through the kernels' aliases; None if none's."""
    while isinstance(value, ir.OpResult):
        call = value.owner
        if not _is_kernel_call(call):
            return None
        aliases = map(stablehlo.OutputOperandAlias, ir.ArrayAttr(call.attributes["output_operand_aliases"]))
        # A call with one result gives no tuple.
        operands = {(a.output_tuple_indices or [0])[0]: a.operand_index for a in aliases}
        if value.result_number not in operands:
            return None
        value = call.operands[operands[value.result_number]]
    return value.arg_number


def _fields(message: bytes) -> dict:
    """The fields of a serialized protobuf message, by number: integers and bytes; of repeated ones the last."""
    found, at = {}, 0

    def varint():
        nonlocal at
        value = shift = 0
        while True:
            byte = message[at]
            at += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    while at < len(message):
        tag = varint()
        if tag & 7 == 0:
            found[tag >> 3] = varint()
        else:
            assert tag & 7 == 2, f"wire type {tag & 7}"
            length = varint()
            found[tag >> 3] = message[at : at + length]
            at += length
    return found


def check(case, platform: str, assemble: bool) -> list[dict]:
    """Lowers a call, asserts that it is right, and returns its kernels."""
    if case.fp8 and gpus.why_no_fp8(gpus.arch(platform)):
        assert not kernel_calls(case.lower(platform, None)), "a kernel that converts fp8 is taken"
        return []
    # Where fp8 cannot be converted, the choice itself is looked at.
    lowered = case.lower(platform, None if gpus.why_no_fp8(gpus.arch(platform)) else "triton")
    kernels = kernel_calls(lowered)
    assert kernels, "no kernel is called"
    check_aliases(lowered, len(case.updated))
    for kernel in kernels:
        check_binary(kernel, platform, assemble)
    return kernels


def main(platform: str, kind: str, every: bool) -> int:
    """Checks all calls; returns the exit code."""
    sys.meta_path.insert(0, _NoTorch())
    failed = 0
    for case in lowering_cases.cases() if every else lowering_cases.representatives():
        try:
            with under(kind):
                for kernel in check(case, platform, assemble=every):
                    print(kernel["name"], kernel["num_warps"], flush=True)
        except Exception:
            failed += 1
            print(f"{case} for {kind}:\n{traceback.format_exc()}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], "--all" in sys.argv[3:]))
