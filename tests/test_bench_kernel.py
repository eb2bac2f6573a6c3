"""tools/bench_kernel.py: it refuses what is wrong, counts what it is told to, and judges by the ceilings. Speeds are a
GPU's to say: `make gpu-test` runs this there."""

import csv
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
if not (ROOT / "tools").is_dir():
    pytest.skip("kernel-builder's own test run has no tools/", allow_module_level=True)
pytest.importorskip("triton")

from _corpus import HEAD, SOFTMAX  # noqa: E402
from bench_kernel import Bench, profiler_lines, verdict  # noqa: E402

MINE = HEAD + SOFTMAX + "\n\ndef reference(x):\n    return torch.softmax(x, -1)\n"


@pytest.fixture(autouse=True)
def once(on_kernels, device):
    if on_kernels and device.type == "cpu":
        pytest.skip("the command below runs in the interpreter as it is")


def bench(tmp_path, source, *more):
    file = tmp_path / "mine.py"
    file.write_text(source)
    command = [sys.executable, ROOT / "tools" / "bench_kernel.py", f"{file}:softmax", "--baseline", f"{file}:reference"]
    command += ["--bytes", "2 * M * N * itemsize", "--sweep", "N=64,300", "--fixed", "M=4", *more]
    return subprocess.run(command, capture_output=True, text=True)


def test_report(tmp_path, device):
    done = bench(tmp_path, MINE, "--out", tmp_path / "out")
    assert done.returncode == 0, done.stdout + done.stderr
    verdicts = ("N = 64: ", "N = 300: ", " of a copy") if device.type != "cpu" else ("no GPU",)
    for words in ("ceilings: a copy", "nsys profile", "rocprofv3", *verdicts):
        assert words in done.stdout, done.stdout
    with open(tmp_path / "out" / "softmax.csv") as file:
        head, *rows = csv.reader(file)
    assert head[:2] == ["N", "kernel (GB/s)"] and [float(r[0]) for r in rows] == [64, 300]
    assert all(float(cell) > 0 for row in rows for cell in row)


def test_a_wrong_kernel_is_not_timed(tmp_path):
    done = bench(tmp_path, MINE.replace('other=-float("inf")', "other=0.0"))
    assert done.returncode != 0 and "the kernel is wrong at {'N': 300, 'M': 4}" in done.stderr, done.stderr


@pytest.mark.parametrize(
    "moved, flops, speed, words",
    [
        ("2 * M * N * itemsize", None, 3900.0, "0.93 of a copy: at the ceiling"),
        ("2 * M * N * itemsize", None, 1000.0, "0.24 of a copy: the launch, too few programs"),
        ("2 * M * N * itemsize", None, 9000.0, "more than the ceiling"),
        (None, "2 * M * N * 4096", 500.0, "0.62 of the vendor's product: block sizes"),
        (
            "M * N * itemsize",
            "2 * M * N",
            4100.0,
            "1 flops a byte, the device has 190: bound by memory. 0.98 of a copy",
        ),
        ("M * N * itemsize", "2000 * M * N", 780.0, "bound by arithmetic. 0.97 of the vendor's product"),
    ],
)
def test_verdicts(moved, flops, speed, words):
    one = Bench(torch.relu, torch.relu, "(M, N)", torch.bfloat16, "cpu", moved, flops, compiled=False)
    assert words in verdict(one, {"M": 64, "N": 64}, speed, speed / 2, 4200.0, 800.0)
    assert "2.00 times the fastest other way" in verdict(one, {"M": 64, "N": 64}, speed, speed / 2, 4200.0, 800.0)


def test_profilers_run_the_same_command():
    lines = profiler_lines(["my kernel.py:softmax", "--sweep", "N=64"])
    assert lines.count("bench_kernel.py 'my kernel.py:softmax' --sweep N=64") == 4
