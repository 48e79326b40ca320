"""The house rules that a reader relies on: an op has one file name in every folder, and imports point down only."""

import ast
from pathlib import Path

import pytest

from dsv4_jax.op import OPS

PACKAGE = Path(__file__).parents[1] / "dsv4_jax"
FOLDERS = {"xla": "common/reference", "triton": "common/ops", "cutedsl": "nvidia/ops"}

# What may not be imported from where: the front door knows the implementations, and they know nothing of it.
FORBIDDEN = {
    "op.py": ("api", "common", "nvidia"),
    "platforms.py": ("api", "common", "nvidia", "op"),
    "common/reference": ("api", "op", "common.ops", "nvidia", "platforms"),
    "common/ops": ("api", "op", "nvidia"),
    "nvidia": ("api", "op", "common.ops", "common.reference"),
}


def imported(path: Path) -> set[str]:
    """The modules of this package that a file imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
    return {name.removeprefix("dsv4_jax.") for name in found if name.startswith("dsv4_jax.")}


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_an_op_has_one_file_name(op):
    assert (PACKAGE / "api" / f"{op.name}.py").is_file()
    for name, load in op.implementations.items():
        module = load().__module__
        folder = FOLDERS[name].replace("/", ".")
        # compress_norm_rope_store and its two halves are compress's kernels.
        assert module in (f"dsv4_jax.{folder}.{op.name}", f"dsv4_jax.{folder}.compress")


@pytest.mark.parametrize("folder", FORBIDDEN)
def test_imports_point_down(folder):
    path = PACKAGE / folder
    for file in [path] if path.is_file() else path.rglob("*.py"):
        for module in imported(file):
            for other in FORBIDDEN[folder]:
                assert module != other and not module.startswith(other + "."), f"{file} imports {module}"


def test_no_long_file():
    root = PACKAGE.parent
    for file in (f for folder in ("dsv4_jax", "bridge", "tests", "examples") for f in (root / folder).rglob("*.py")):
        assert len(file.read_text().splitlines()) <= 520, file
