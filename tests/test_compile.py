"""Every Triton kernel, as the ops launch it, compiles for every GPU that is supported; no GPU is needed."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="triton is not installed")

HERE = os.path.dirname(__file__)
TARGETS = {
    "sm_90": ("cuda", "90", "32"),
    "sm_100": ("cuda", "100", "32"),
    "gfx942": ("hip", "gfx942", "64"),
    "gfx950": ("hip", "gfx950", "64"),
    "gfx1201": ("hip", "gfx1201", "32"),
}


@pytest.mark.parametrize("target", TARGETS)
def test_kernels_compile(target, tmp_path):
    # A process of its own: this one's kernels may be the interpreter's.
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"JAX_PLATFORMS": "cpu", "TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.path.dirname(HERE)}
    done = subprocess.run(
        [sys.executable, os.path.join(HERE, "helpers", "compile_kernels.py"), *TARGETS[target]],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    names = {line.split()[0] for line in done.stdout.splitlines()[:-1]}
    assert names == {
        "_attend_kernel",
        "_attend_part_kernel",
        "_combine_kernel",
        "_compress_kernel",
        "_compress_store_kernel",
        "_gather_kernel",
        "_global_topk_kernel",
        "_indexer_q_fp4_kernel",
        "_indexer_q_fp8_kernel",
        "_insert_kernel",
        "_inv_rope_kernel",
        "_inv_rope_quant_kernel",
        "_join_kernel",
        "_online_fold_kernel",
        "_online_walk_kernel",
        "_online_write_kernel",
        "_prepare_kernel",
        "_q_kv_norm_kernel",
        "_qnorm_insert_kernel",
        "_save_kernel",
        "_store_kernel",
    }
