"""tools/check_kernel.py: right kernels agree, and each planted mistake is told for what it is."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
if not (ROOT / "tools").is_dir():
    pytest.skip("kernel-builder's own test run has no tools/", allow_module_level=True)
pytest.importorskip("triton")

from _corpus import HEAD, LAYER_NORM, MATMUL, SOFTMAX  # noqa: E402
from check_kernel import LOOKS_LIKE, Check, load  # noqa: E402

REFERENCES = {
    "softmax": lambda x: torch.softmax(x, -1),
    "layer_norm": lambda x, w: torch.nn.functional.layer_norm(x, x.shape[-1:], w) if x.numel() else x,
    "matmul": torch.matmul,
}
SHAPES = {"softmax": "(M, N)", "layer_norm": "(M, N), (N)", "matmul": "(M, K), (K, N)"}
# Without its autotuner, which needs a GPU to measure on.
PLAIN_TILES = MATMUL[MATMUL.index("@triton.jit\ndef matmul_kernel") :]
PLAIN_TILES = PLAIN_TILES.replace("*c.stride()\n", "*c.stride(), BLOCK_M=64, BLOCK_N=64, BLOCK_K=32, GROUP_M=8\n")
# The interpreter's dot takes bfloat16 for something else; and float32 is not tf32.
PLAIN_TILES = PLAIN_TILES.replace("(a, b, acc)", '(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")')
RIGHT = {"softmax": SOFTMAX, "layer_norm": LAYER_NORM, "matmul": PLAIN_TILES}

# (function, what stands in it, what is written instead, rung, what it looks like)
PLANTED = [
    ("softmax", 'other=-float("inf")', "other=0.0", "shapes", "power of two"),
    ("layer_norm", "tl.where(mask, x - mean, 0.0)", "x - mean", "shapes", "power of two"),
    ("softmax", "triton.next_power_of_2(max(x.shape[1], 1))", "64", "shapes", "tail"),
    ("matmul", "for k in range(0, tl.cdiv(K, BLOCK_K)):", "for k in range(0, K // BLOCK_K):", "shapes", "one element"),
    ("softmax", "tl.exp(x - tl.max(x, axis=0))", "tl.exp2(x - tl.max(x, axis=0))", "shapes", "everywhere"),
    ("softmax", "tl.sum(numerator", "tl.sum(numerator.to(tl.bfloat16).to(tl.float32)", "shapes", "half"),
    ("softmax", "    return y\n", "    return y if x.dtype == torch.float32 else y * 1.03\n", "dtypes", "half"),
    ("softmax", "x, y, *x.stride(), x.shape[1]", "x, y, x.shape[1], 1, x.shape[1]", "strides", "strides"),
    ("softmax", "y, mask=mask)\n", "y, mask=offsets < n_cols - n_cols // 65)\n", "shapes", "tail"),
    ("softmax", "    return y\n", "    x.add_(1)\n    return y\n", "shapes", "written"),
    ("softmax", "    return y\n", "    return y + torch.rand(()).item() * 1e-10\n", "the same call again", "repeat"),
    ("softmax", "    if y.numel():", "    assert len(x)\n    if y.numel():", "nothing", "empty"),
    ("softmax", "tl.exp(x - tl.max(x, axis=0))", "tl.exp(x)", "special values, 1e4 everywhere", "large"),
    ("softmax", "def softmax(x):\n", "def softmax(x):\n    x = x.nan_to_num(nan=0.0)\n", "special values, NaN", "NaN"),
]  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def kernels_run(on_kernels):
    if not on_kernels:
        pytest.skip("the kernels run in the interpreter, or on a GPU")


def checked(tmp_path, name, source, device):
    path = tmp_path / f"planted_{abs(hash(source))}.py"
    path.write_text(HEAD + source)
    return Check(load(f"{path}:{name}"), REFERENCES[name], SHAPES[name], device=device).run()


@pytest.mark.parametrize("name", RIGHT)
def test_right_kernels_agree(tmp_path, device, name):
    assert checked(tmp_path, name, RIGHT[name], device) == []


@pytest.mark.parametrize("case", range(len(PLANTED)))
def test_planted_mistakes_are_told(tmp_path, device, case):
    name, old, new, rung, looks_like = PLANTED[case]
    assert old in RIGHT[name]
    found = checked(tmp_path, name, RIGHT[name].replace(old, new, 1), device)
    assert found and (found[0].rung, found[0].looks_like) == (rung, looks_like), found
    assert LOOKS_LIKE[found[0].looks_like] in str(found[0])


def test_command_line(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(HEAD + SOFTMAX + "\n\ndef reference(x):\n    return torch.softmax(x, -1)\n")
    command = [
        sys.executable,
        ROOT / "tools" / "check_kernel.py",
        f"{file}:softmax",
        "--reference",
        f"{file}:reference",
    ]
    done = subprocess.run([*command, "--dtypes", "float32"], env=os.environ, capture_output=True, text=True)
    assert done.returncode == 0 and "agrees" in done.stdout, done.stdout + done.stderr
