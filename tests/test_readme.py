"""The README's programs run as they stand there."""

import os
import re
import subprocess
import sys

import pytest

ROOT = os.path.dirname(os.path.dirname(__file__))
with open(os.path.join(ROOT, "README.md")) as file:
    PROGRAMS = re.findall(r"```python\n(.*?)```", file.read(), re.DOTALL)


@pytest.mark.parametrize("program", PROGRAMS, ids=["compress", "bridge"])
def test_program_prints_what_its_comments_say(program):
    said = re.findall(r"^print\(.*\)  # (.*)$", program, re.MULTILINE)
    assert said
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == said
