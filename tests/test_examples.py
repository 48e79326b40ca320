"""Every example runs, prints what it is for, and is short."""

import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SAYS = {
    "decode_loop": r"441 tokens of 3 requests, 109 keys in 3 cache pages\n6 of 12 state pages in use, 2 compilations\n",
    "from_torch": r"10 keys from torch's hidden states; JAX's own differ by \d\.\de[+-]\d\d of the largest\n",
    "sparse_decode": r"4 steps of 3 requests, 1 compilation, at most 0\.00\d from dense attention\n",
    "parity": r"compressor .*\nCSA +fp8_ds_mla(.*\n)+CSA +bf16(.*\n)+indexer +indexer_mxfp4(.*\n)+HCA(.*\n)+\*.*\n",
    "train_torch": r"gradients differ from torch's own by \d.*\nloss 0\.\d{3} before, 0\.0\d\d after 300 steps\n",
}
NEEDS = {
    "decode_loop": ["flax"],
    "from_torch": ["flax", "torch"],
    "parity": ["flax", "torch", "transformers"],
    "sparse_decode": [],
    "train_torch": ["torch"],
}


@pytest.mark.parametrize("name", sorted(p.stem for p in (ROOT / "examples").glob("*.py")))
def test_example(name):
    for package in NEEDS[name]:
        pytest.importorskip(package)
    path = ROOT / "examples" / f"{name}.py"
    source = path.read_text()
    assert f"python examples/{name}.py" in source.split('"""')[1] and len(source.splitlines()) < 80
    done = subprocess.run([sys.executable, path], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(SAYS[name], done.stdout), done.stdout


# How many of a page's programs run, each after those before it; the others name files and meshes that are not there.
@pytest.mark.parametrize(("page", "package", "count"), [("layer", "flax", 3), ("bridge", "torch", 3)])
def test_the_programs_in_the_docs(page, package, count):
    pytest.importorskip(package)
    text = (ROOT / "docs" / f"{page}.md").read_text()
    programs = re.findall(r"^ *```python\n(.*?)```", text, re.DOTALL | re.MULTILINE)
    program = "\n".join(map(textwrap.dedent, programs[:count]))
    said = re.findall(r"^print\(.*\)  # (.*)$", program, re.MULTILINE)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
    assert said and done.returncode == 0 and done.stdout.splitlines() == said, done.stderr
