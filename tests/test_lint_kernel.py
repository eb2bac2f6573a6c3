"""tools/lint_kernel.py: nothing in right kernels, one finding for each mistake that is planted in them."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
if not (ROOT / "tools").is_dir():
    pytest.skip("kernel-builder's own test run has no tools/", allow_module_level=True)
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the same with and without Triton's interpreter", allow_module_level=True)

from _corpus import ADD, HEAD, LAYER_NORM, LOOPED, MATMUL, ONLINE, OP, PARTS, RIGHT, SOFTMAX  # noqa: E402
from lint_kernel import RULES, lint_paths, lint_text  # noqa: E402

# (rule, right kernel, what stands in it, what is written instead)
PLANTED = [
    ("masked-load-without-other", SOFTMAX, ', mask=mask, other=-float("inf"))', ", mask=mask)"),
    ("masked-load-without-other", LOOPED, "mask=mask, other=0.0)", "mask=mask)"),
    ("masked-load-without-other", MATMUL, "& (offs_n < N)[None, :], other=0.0)", "& (offs_n < N)[None, :])"),
    ("masked-load-without-other", PARTS, "offsets < n_elements, other=0.0)", "offsets < n_elements)"),
    ("wrong-fill", SOFTMAX, 'other=-float("inf")', "other=0.0"),
    ("wrong-fill", LAYER_NORM, "mask=mask, other=0.0)", "mask=mask, other=1.0)"),
    ("wrong-fill", LOOPED, "tl.maximum(size, tl.abs(x))", "tl.maximum(size, tl.where(mask, tl.abs(x), 9.0))"),
    ("wrong-fill", MATMUL, "mask=mask_k[:, None] & (offs_n < N)[None, :], other=0.0)",
     "mask=mask_k[:, None] & (offs_n < N)[None, :], other=1.0)\n        a = tl.where(mask_k[None, :], a, 1.0)"),
    ("moved-fill", LAYER_NORM, "tl.where(mask, x - mean, 0.0)", "x - mean"),
    ("moved-fill", LOOPED, "total += x * x", "total += (x + 1.0) * x + 1.0"),
    ("moved-fill", SOFTMAX, "tl.exp(x - tl.max(x, axis=0))", "tl.exp(x - tl.max(x, axis=0)) + 1.0"),
    ("moved-fill", ONLINE, 'scores - higher[:, None])', "tl.where(scores > -1e30, scores, -20.0) - higher[:, None])"),
    ("low-precision-sum", SOFTMAX, ".to(tl.float32)\n    numerator", "\n    numerator"),
    ("low-precision-sum", PARTS, "x.to(tl.float32)", "x"),
    ("low-precision-sum", PARTS, "x.to(tl.float32)", "x.to(tl.bfloat16)"),
    ("low-precision-sum", LOOPED, "total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)",
     "total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float16)"),
    ("low-precision-sum", MATMUL, "dtype=tl.float32)", "dtype=tl.float16)"),
    ("low-precision-sum", ONLINE, "tl.dot(q, k)", "tl.dot(q, k, out_dtype=tl.float16)"),
    ("autotuned-reduction-block", SOFTMAX, "@triton.jit",
     '@triton.autotune([triton.Config({"BLOCK_SIZE": b}) for b in (256, 1024)], key=["n_cols"])\n@triton.jit'),
    ("autotuned-reduction-block", LAYER_NORM, "@triton.jit\ndef layer",
     '@triton.autotune([triton.Config({"BLOCK_N": 512})], key=["N"])\n@triton.jit\ndef layer'),
    ("autotune-without-key", MATMUL, 'key=["M", "N", "K"]', "key=[]"),
    ("autotune-without-key", PARTS, ', key=["n_elements"]', ""),
    ("offset-in-32-bits", SOFTMAX, "tl.program_id(0).to(tl.int64)", "tl.program_id(0)"),
    ("offset-in-32-bits", ADD, "tl.program_id(0).to(tl.int64)", "tl.program_id(0)"),
    ("offset-in-32-bits", MATMUL, "pid_m.to(tl.int64) * BLOCK_M", "pid_m * BLOCK_M"),
    ("offset-in-32-bits", LAYER_NORM, "row = tl.program_id(0).to(tl.int64)",
     "row = tl.program_id(0)\n    x_ptr += (row * stride).to(tl.int64)\n    row = row.to(tl.int64)"),
    ("small-block-k", MATMUL, '"BLOCK_N": 64, "BLOCK_K": 32', '"BLOCK_N": 64, "BLOCK_K": 8'),
    ("small-block-k", ONLINE, "BLOCK_N: tl.constexpr):", "BLOCK_N: tl.constexpr = 8):"),
    ("shared-memory", MATMUL,
     '"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 32', '"BLOCK_M": 128, "BLOCK_N": 256, "BLOCK_K": 64'),
    ("too-many-warps", SOFTMAX, "4 if block <= 2048 else 16", "4 if block <= 2048 else 32"),
    ("too-many-warps", MATMUL, "num_stages=3, num_warps=8)", "num_stages=3, num_warps=32)"),
    ("device-work-at-import", OP, "HAS_GPU = torch.cuda.is_available()", "GPU = torch.cuda.get_device_name(0)"),
    ("device-work-at-import", OP, "DTYPES = (", 'ONES = torch.ones(2, device="cuda")\nDTYPES = ('),
    ("device-work-at-import", ADD, "\n\ndef add(x, y):",
     "\n\nDEVICE = triton.runtime.driver.active.get_active_torch_device()\n\n\ndef add(x, y):"),
    ("op-without-prefix", OP, 'add_op_namespace_prefix("twice_fwd")', '"mine::twice_fwd"'),
    ("op-without-prefix", OP, 'add_op_namespace_prefix("twice_fwd")', "NAME"),
    ("op-without-prefix", OP, "@twice_fwd.register_fake", '@torch.library.register_fake("mine::twice_fwd")'),
    ("opt-out-without-reason", ADD, "mask = offsets", "mask = offsets  # lint: ok\n    mask = offsets"),
]  # fmt: skip


@pytest.mark.parametrize("name", RIGHT)
def test_right_kernels_have_no_findings(name):
    assert lint_text(HEAD + RIGHT[name]) == []


@pytest.mark.parametrize("rule, right, old, new", PLANTED, ids=[f"{r}-{i}" for i, (r, *_) in enumerate(PLANTED)])
def test_each_planted_mistake_is_one_finding(rule, right, old, new):
    assert old in right
    wrong = HEAD + right.replace(old, new, 1)
    found = lint_text(wrong)
    assert [f.rule for f in found] == [rule], found
    # The line is one that the mistake changed, or one that it flows into.
    assert 0 < found[0].line <= len(wrong.splitlines())
    reason, fix = RULES[rule]
    assert reason in str(found[0]) and fix in str(found[0])


def test_the_package_imports_itself_by_name(tmp_path):
    package = tmp_path / "torch-ext" / "my_kernel"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("from . import one\nfrom my_kernel import two\n")
    (package / "one.py").write_text("import my_kernels\n")
    (finding,) = lint_paths([tmp_path])
    assert (finding.rule, finding.line) == ("absolute-self-import", 2)


def test_every_rule_is_planted():
    at_compile_time = {"does-not-compile"}  # below
    assert {rule for rule, *_ in PLANTED} | {"absolute-self-import"} | at_compile_time == set(RULES)


def test_helpers_of_other_files_are_followed(tmp_path):
    helper, rest = LAYER_NORM.split("\n\n\n", 1)
    (tmp_path / "_helpers.py").write_text(HEAD + helper.replace("tl.where(mask, x - mean, 0.0)", "x - mean"))
    (tmp_path / "norm.py").write_text(HEAD + "from ._helpers import centred\n" + rest)
    (finding,) = lint_paths([tmp_path / "norm.py"])
    assert finding.rule == "moved-fill" and finding.path.endswith("_helpers.py")


def test_opting_out_takes_a_rule_and_a_reason():
    wrong = HEAD + ADD.replace("tl.program_id(0).to(tl.int64)", "tl.program_id(0)")
    line = next(x for x in wrong.splitlines() if "program_id" in x)
    assert lint_text(wrong.replace(line, line + "  # lint: ok offset-in-32-bits: at most 2^20 elements")) == []
    assert {f.rule for f in lint_text(wrong.replace(line, line + "  # lint: ok offset-in-32-bits"))} == {
        "offset-in-32-bits",
        "opt-out-without-reason",
    }


def test_this_repository_has_no_findings():
    folders = [ROOT / name for name in ("torch-ext", "examples", "benchmarks", "tools")]
    assert lint_paths(folders) == []
    sources = [p.read_text() for p in (ROOT / "torch-ext").rglob("*.py")]
    assert sum(len(re.findall(r"# lint: ok", s)) for s in sources) <= 5  # an opt-out is an exception


def test_command_line(tmp_path):
    file = tmp_path / "kernel.py"
    file.write_text(HEAD + SOFTMAX.replace('other=-float("inf")', "other=0.0"))
    command = [sys.executable, ROOT / "tools" / "lint_kernel.py"]
    done = subprocess.run([*command, file], capture_output=True, text=True)
    assert done.returncode == 1 and f"{file}:11: wrong-fill" in done.stdout and "Fix: " in done.stdout
    file.write_text(HEAD + SOFTMAX)
    done = subprocess.run([*command, file], capture_output=True, text=True)
    assert done.returncode == 0 and "0 findings" in done.stdout


def test_a_call_is_compiled_for_targets_that_are_not_there(tmp_path):
    pytest.importorskip("triton")
    file = tmp_path / "kernel.py"
    wide = ADD.replace("BLOCK_SIZE=1024)\n", "BLOCK_SIZE=1024, num_warps=WARPS)\n")
    refused = ADD.replace("add", "sub").replace("x + y", "tl.no_such_function(x)")
    file.write_text(HEAD + wide + refused + "\n\nWARPS = 2**5\n")
    command = [sys.executable, ROOT / "tools" / "lint_kernel.py", file, "--targets", "sm90", "gfx942"]
    command += ["--call", "add(torch.ones(9), torch.ones(9)), sub(torch.ones(9), torch.ones(9))"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1 and "3 findings\n" in done.stdout, done.stdout + done.stderr
    assert "too-many-warps" in done.stdout and "gfx942: 32 warps of 64 threads" in done.stdout
    assert done.stdout.count(": does-not-compile: ") == 2 and "no_such_function" in done.stdout
