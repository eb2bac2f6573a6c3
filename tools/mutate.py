#!/usr/bin/env python3
"""Break kernels on purpose, one place at a time, and see whether the tests notice.

    python tools/mutate.py                     the first place of each fault in each file: two hours
    python tools/mutate.py --some 20           as many of them, drawn; the same each time
    python tools/mutate.py --files softmax _norms --faults fill stride --all

A fault is a kind of mistake that kernels like these have had, as an edit of one line inside a `@triton.jit` function.
The file's tests run on a copy of the repository, in Triton's interpreter, until one fails. What no test notices is
listed, and makes the exit status 1; EQUIVALENT says of which edits nothing can be noticed.
"""

import argparse
import ast
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = Path("torch-ext") / "portable_kernels"

FAULTS = {  # name: what to find in a line, what to put there
    "fill": (r"^(?!.*mask=mask_m,)(.*)other=0\.0", r"\1other=3.0"),  # a masked lane takes part; rows are not stored
    "fill of a maximum": (r'other=-?float\("-?inf"\)|other=-_INF', "other=0.0"),
    "mask": (r"(offs_n|cols) < N\b", r"\1 < N - 1"),  # the last column is left out
    "rows": (r"offs_m < M\b", "offs_m < M - 1"),
    "offset": (r"tl\.cast\(([^()]+), tl\.int64\)", r"(\1)"),  # wraps past 2^31
    "stride": (r" \* (\w*strides\[\d\])", ""),  # taken for 1
    "sum in 16 bits": (r"^(\s+\w+) \+= (?!tl\.cast)(.+)$", r"\1 += (\2).to(tl.float16)"),
    "operand in 16 bits": (r"\.to\((?:COMPUTE|tl\.float32)\)", ".to(tl.float16)"),
    "mean": (r" / N\b", " / (N + 1)"),  # the padding is counted
    "eps": (r" \+ eps\b", ""),
    "sign": (r"(\w) - (\w+ \*)", r"\1 + \2"),
    "maximum": (r"tl\.max\(", "tl.min("),
    "tiles": (r"tl\.num_programs\((\d)\)", r"(tl.num_programs(\1) + 1)"),  # some are skipped
    "softcap": (r"(\w+) = (?:soft)?cap \* ", r"\1 = \1 * "),
    "order of roundings": (r"if BEFORE_WEIGHT:", "if not BEFORE_WEIGHT:"),
    "causal": (r"\bj ([<>])= i\b", r"j \1 i"),  # the window loses a key
    "gate": (r"at\(gate_ptr, gate_strides", "at(up_ptr, up_strides"),  # the halves are taken for each other
    "turn": (r"(=|return) -(\w)", r"\1 \2"),
    "scale of what is kept": (r" \* scale\b", ""),
}
TESTS = {  # files whose tests are not named after them
    "_norms": "rms_norm", "_rows": "softmax", "_losses": "cross_entropy", "_pointwise": "activations",
    "_activation_math": "activations", "_philox": "dropout", "_quantize": "scaled_matmul", "_fp8": "scaled_matmul",
    "_attention": "attention", "_attention_fwd": "attention", "_attention_bwd": "attention",
    "_attention_chunks": "attention", "_attention_decode": "kv_cache_attention", "_matmul_kernels": "matmul",
    "_tiles": "matmul", "_rms_norm_quantize": "rms_norm", "_rotary_layout": "rotary",
}  # fmt: skip
EQUIVALENT = {  # (file, text of the line): why no test can see it broken, here
    (
        "_reductions",
        "offs_r = tl.cast(step % tiles_r, tl.int64) * BLOCK_R",
    ): "more than 2^31 rows: test_far_rows, on a GPU",
    (
        "_scaled_matmul",
        "return tl.load(ptr + offs // GROUP_ROWS * strides[0], mask=offs < size, other=0.0)",
    ): "the scale of a row that is not stored",
    (
        "_linear_cross_entropy",
        "u *= tl.load(w_ptr + cols, mask=mask, other=0.0).to(COMPUTE)",
    ): "the weight of a class whose gradient is not stored",
}


def places(path):
    """(fault, line number, line as it should not be) of every edit in the file's kernels."""
    text = path.read_text()
    lines = text.splitlines()
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef) and any("triton.jit" in ast.unparse(d) for d in node.decorator_list):
            for number in range(node.body[0].lineno - 1, node.end_lineno):
                code = lines[number].split("  #")[0]
                for fault, (find, put) in FAULTS.items():
                    broken = re.sub(find, put, code, count=1)
                    if broken == code or (path.stem, code.strip()) in EQUIVALENT:
                        continue
                    try:
                        ast.parse("\n".join([*lines[:number], broken, *lines[number + 1 :]]))
                    except SyntaxError:
                        continue  # part of a longer expression
                    yield fault, number, broken


def tests_of(stem):
    name = TESTS.get(stem, stem.lstrip("_"))
    return f"tests/test_{name}.py"


def caught_by(copy, stem, limit):
    """The test that fails, or None."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--tb=no", "-p", "no:cacheprovider", tests_of(stem)]
    env = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(command, cwd=copy, env=env, capture_output=True, text=True, timeout=limit)
    except subprocess.TimeoutExpired:
        return "NOT ENDED"
    if not done.returncode:
        return None
    failed = re.findall(r"^(?:FAILED|ERROR) \S+?::(\S+)", done.stdout, re.M)
    return failed[0] if failed else f"the process ended with {done.returncode}"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", nargs="*", help="without .py; all that have portable kernels")
    parser.add_argument("--faults", nargs="*", choices=list(FAULTS), default=list(FAULTS))
    parser.add_argument("--all", action="store_true", help="every place of a fault in a file, not the first alone")
    parser.add_argument("--some", type=int, help="how many to draw")
    parser.add_argument("--limit", type=float, default=600, help="seconds that a file's tests may take")
    options = parser.parse_args()

    copy = Path(tempfile.mkdtemp(prefix="mutate-")) / "repository"
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".*", "build", "__pycache__", "results"))
    chosen = []
    for path in sorted((copy / PACKAGE).glob("*.py")):
        if path.stem.endswith("_sm90") or (options.files and path.stem not in options.files):
            continue  # kernels for one GPU do not run in the interpreter
        if not (copy / tests_of(path.stem)).exists():
            continue
        seen = set()
        for fault, number, broken in places(path):
            if fault in options.faults and (options.all or fault not in seen):
                seen.add(fault)
                chosen.append((path, fault, number, broken))
    if options.some:  # of every fault in turn
        random.Random(0).shuffle(chosen)
        turns = Counter()
        place = {}
        for one in chosen:
            place[one] = turns[one[1]]
            turns[one[1]] += 1
        chosen = sorted(chosen, key=place.get)[: options.some]
    survivors = []
    for path, fault, number, broken in chosen:
        right = path.read_text()
        lines = right.splitlines()
        was, lines[number] = lines[number], broken
        path.write_text("\n".join(lines) + "\n")
        start = time.time()
        found = caught_by(copy, path.stem, options.limit)
        path.write_text(right)
        seconds = time.time() - start
        print(f"{path.stem}:{number + 1} {fault}: {found or 'NOT NOTICED'} ({seconds:.0f} s)", flush=True)
        if found in (None, "NOT ENDED"):
            survivors.append(f"{path.stem}.py:{number + 1} {fault}\n  - {was.strip()}\n  + {broken.strip()}")
    shutil.rmtree(copy.parent, ignore_errors=True)
    print(f"\n{len(chosen)} faults, {len(survivors)} not noticed")
    print("\n".join(survivors))
    sys.exit(bool(survivors) or not chosen)


if __name__ == "__main__":
    main()
