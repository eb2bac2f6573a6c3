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
    assert "FP_FUSION" not in done.stderr  # Triton warns where a launch leaves it to a default that will change


def test_the_page_says_which_commits_and_other_versions():
    if not TOOL.exists():
        pytest.skip("kernel-builder's own test run has no tools/")
    sys.path.insert(0, str(TOOL.parent))
    try:
        import portability
    finally:
        sys.path.remove(str(TOOL.parent))
    fine = {"op": "relu", "case": "a", "dtype": "bfloat16", "kernel": "k", "hash": "1", "bits": 128, "problems": []}
    bad = {**fine, "hash": "2", "kernel": "", "problems": ["ValueError: no"]}
    other = {("sm90", "relu", "bfloat16"): {"records": [fine, {**bad, "op": "tanh"}, bad], "commit": "def"}}
    text = portability.page({"sm90": [fine], "gfx942": [fine]}, "3.6.0", {"abc"}, {"3.9.0": other})
    assert "with Triton 3.6.0 at commit abc" in text and "| `relu` | 1 | 1 |" in text
    assert "- Triton 3.9.0, commit def, sm90, bfloat16: 1 kernels compile and fit, 2 do not\n" in text
    assert "  - ValueError: no: `tanh`, `relu`\n" in text
