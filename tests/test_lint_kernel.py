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

from lint_kernel import RULES, lint_paths, lint_text  # noqa: E402

HEAD = """
import torch
import triton
import triton.language as tl
"""

ADD = """
@triton.jit
def add_kernel(x_ptr, y_ptr, out_ptr, n_elements, BLOCK_SIZE: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    mask = offsets < n_elements
    x = tl.load(x_ptr + offsets, mask=mask)
    y = tl.load(y_ptr + offsets, mask=mask)
    tl.store(out_ptr + offsets, x + y, mask=mask)


def add(x, y):
    out = torch.empty_like(x)
    add_kernel[(triton.cdiv(x.numel(), 1024),)](x, y, out, x.numel(), BLOCK_SIZE=1024)
    return out
"""

SOFTMAX = """
@triton.jit
def softmax_kernel(x_ptr, y_ptr, stride_x, stride_y, n_cols, BLOCK_SIZE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.arange(0, BLOCK_SIZE)
    mask = offsets < n_cols
    x = tl.load(x_ptr + row * stride_x + offsets, mask=mask, other=-float("inf")).to(tl.float32)
    numerator = tl.exp(x - tl.max(x, axis=0))
    y = numerator / tl.sum(numerator, axis=0)
    tl.store(y_ptr + row * stride_y + offsets, y, mask=mask)


def softmax(x):
    y = torch.empty_like(x)
    block = triton.next_power_of_2(x.shape[1])
    num_warps = 4 if block <= 2048 else 16
    softmax_kernel[(x.shape[0],)](x, y, x.stride(0), y.stride(0), x.shape[1], BLOCK_SIZE=block, num_warps=num_warps)
    return y
"""

LAYER_NORM = """
@triton.jit
def centred(x, mean, mask):
    return tl.where(mask, x - mean, 0.0)


@triton.jit
def layer_norm_kernel(x_ptr, w_ptr, y_ptr, stride, N, eps, BLOCK_N: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK_N)
    mask = cols < N
    x = tl.load(x_ptr + row * stride + cols, mask=mask, other=0.0).to(tl.float32)
    mean = tl.sum(x, axis=0) / N
    d = centred(x, mean, mask)
    rstd = tl.rsqrt(tl.sum(d * d, axis=0) / N + eps)
    w = tl.load(w_ptr + cols, mask=mask)
    tl.store(y_ptr + row * stride + cols, d * rstd * w, mask=mask)
"""

# Rows that are looped over, in tiles of two dimensions, with a largest size beside the sum.
LOOPED = """
@triton.jit
def squares_kernel(x_ptr, sum_ptr, size_ptr, M, N, stride_m, stride_n, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    offs_m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = tl.arange(0, BLOCK_N)
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    size = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for start in range(0, N, BLOCK_N):
        cols = start + offs_n
        mask = (offs_m < M)[:, None] & (cols < N)[None, :]
        ptrs = x_ptr + offs_m[:, None] * stride_m + cols[None, :] * stride_n
        x = tl.load(ptrs, mask=mask, other=0.0).to(tl.float32)
        total += x * x
        size = tl.maximum(size, tl.abs(x))
    tl.store(sum_ptr + offs_m, tl.sum(total, axis=1), mask=offs_m < M)
    tl.store(size_ptr + offs_m, tl.max(size, axis=1), mask=offs_m < M)
"""

MATMUL = """
def configs():
    return [
        triton.Config({"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k, "GROUP_M": 8}, num_stages=s, num_warps=w)
        for m, n, k, s, w in ((128, 128, 32, 3, 8), (64, 64, 32, 3, 4))
    ]


@triton.autotune(
    configs=[
        triton.Config({"BLOCK_M": 128, "BLOCK_N": 256, "BLOCK_K": 64, "GROUP_M": 8}, num_stages=3, num_warps=8),
        triton.Config({"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 32, "GROUP_M": 8}, num_stages=4, num_warps=4),
    ],
    key=["M", "N", "K"],
)
@triton.jit
def matmul_kernel(
    a_ptr, b_ptr, c_ptr, M, N, K, stride_am, stride_ak, stride_bk, stride_bn, stride_cm, stride_cn,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
):
    pid = tl.program_id(0)
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    width = GROUP_M * tiles_n
    first = pid // width * GROUP_M
    rows = min(tiles_m - first, GROUP_M)
    pid_m = first + pid % width % rows
    pid_n = pid % width // rows
    offs_m = pid_m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = pid_n.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_K)
    a_ptrs = a_ptr + offs_m[:, None] * stride_am + offs_k[None, :] * stride_ak
    b_ptrs = b_ptr + offs_k[:, None] * stride_bk + offs_n[None, :] * stride_bn
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(0, tl.cdiv(K, BLOCK_K)):
        mask_k = offs_k < K - k * BLOCK_K
        a = tl.load(a_ptrs, mask=(offs_m < M)[:, None] & mask_k[None, :], other=0.0)
        b = tl.load(b_ptrs, mask=mask_k[:, None] & (offs_n < N)[None, :], other=0.0)
        acc = tl.dot(a, b, acc)
        a_ptrs += BLOCK_K * stride_ak
        b_ptrs += BLOCK_K * stride_bk
    c_ptrs = c_ptr + offs_m[:, None] * stride_cm + offs_n[None, :] * stride_cn
    tl.store(c_ptrs, acc.to(c_ptr.dtype.element_ty), mask=(offs_m < M)[:, None] & (offs_n < N)[None, :])
"""

# The first stage of a sum over everything: its block may be tuned, since each program writes what it has summed.
PARTS = """
@triton.autotune(
    configs=[triton.Config({"BLOCK": 1024}), triton.Config({"BLOCK": 4096}, num_warps=8)], key=["n_elements"]
)
@triton.jit
def parts_kernel(x_ptr, part_ptr, n_elements, BLOCK: tl.constexpr):
    pid = tl.program_id(0)
    offsets = pid.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offsets, mask=offsets < n_elements, other=0.0)
    tl.store(part_ptr + pid, tl.sum(x.to(tl.float32), axis=0))
"""

# Keys one block at a time, with a running maximum: the first row of scores may be all -inf.
ONLINE = """
@triton.jit
def online_kernel(q_ptr, k_ptr, v_ptr, o_ptr, S, scale, D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    offs_m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, D)
    q = tl.load(q_ptr + offs_m[:, None] * D + offs_d[None, :], mask=(offs_m < S)[:, None], other=0.0)
    peak = tl.full((BLOCK_M,), -1e30, dtype=tl.float32)
    total = tl.zeros((BLOCK_M,), dtype=tl.float32)
    acc = tl.zeros((BLOCK_M, D), dtype=tl.float32)
    for start in range(0, S, BLOCK_N):
        offs_n = start + tl.arange(0, BLOCK_N)
        mask_n = offs_n < S
        k = tl.load(k_ptr + offs_d[:, None] + offs_n[None, :] * D, mask=mask_n[None, :], other=0.0)
        v = tl.load(v_ptr + offs_n[:, None] * D + offs_d[None, :], mask=mask_n[:, None], other=0.0)
        scores = tl.where(mask_n[None, :], tl.dot(q, k) * scale, -float("inf"))
        higher = tl.maximum(peak, tl.max(scores, axis=1))
        p = tl.exp(scores - higher[:, None])
        fade = tl.exp(peak - higher)
        total = total * fade + tl.sum(p, axis=1)
        acc = tl.dot(p.to(v.dtype), v, acc * fade[:, None])
        peak = higher
    out = o_ptr + offs_m[:, None] * D + offs_d[None, :]
    tl.store(out, acc / total[:, None], mask=(offs_m < S)[:, None])
"""

OP = """
from ._ops import add_op_namespace_prefix


@torch.library.custom_op(add_op_namespace_prefix("twice_fwd"), mutates_args=())
def twice_fwd(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


@twice_fwd.register_fake
def _(x):
    return torch.empty_like(x)


HAS_GPU = torch.cuda.is_available()
DTYPES = (torch.float32, torch.bfloat16)


def multiprocessors(device):
    return torch.cuda.get_device_properties(device).multi_processor_count


if __name__ == "__main__":
    print(twice_fwd(torch.ones(2, device="cuda")))
"""

RIGHT = {
    "add": ADD, "softmax": SOFTMAX, "layer_norm": LAYER_NORM, "looped": LOOPED, "matmul": MATMUL, "parts": PARTS,
    "online": ONLINE, "op": OP,
}  # fmt: skip

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
    at_compile_time = {"does-not-compile"}
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
    file.write_text(
        HEAD + ADD.replace("BLOCK_SIZE=1024)\n", "BLOCK_SIZE=1024, num_warps=WARPS)\n") + "\n\nWARPS = 2**5\n"
    )
    command = [sys.executable, ROOT / "tools" / "lint_kernel.py", file, "--call", "add(torch.ones(9), torch.ones(9))"]
    done = subprocess.run([*command, "--targets", "sm90", "gfx942"], capture_output=True, text=True)
    assert done.returncode == 1 and "1 finding\n" in done.stdout, done.stdout + done.stderr
    assert "too-many-warps" in done.stdout and "gfx942: 32 warps of 64 threads" in done.stdout
