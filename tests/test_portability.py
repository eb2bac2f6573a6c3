"""A sample of the matrix that `make portability` compiles: kernels for GPUs that are not there."""

import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).resolve().parent.parent / "tools" / "portability.py"


@pytest.mark.parametrize("arch", ["sm75", "gfx942"])
def test_a_sample_compiles(internals, arch):
    if not TOOL.exists():
        pytest.skip("kernel-builder's own test run has no tools/")
    if internals("_triton").ABSENT or internals("_triton").INTERPRET:
        pytest.skip("nothing is compiled on this path")
    command = [sys.executable, str(TOOL), "--archs", arch, "--ops", "rms_norm", "grouped_mm", "--dtypes", "bfloat16"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"| {arch} |" in done.stdout and "None." in done.stdout
