#!/usr/bin/env python3
"""Break kernels on purpose, one place at a time, and see whether the tests notice.

    python tools/mutate.py                     the first place of each fault in each file
    python tools/mutate.py --some 20           as many of them, drawn; the same each time
    python tools/mutate.py --files softmax _norms --faults fill stride --all
    python tools/mutate.py --json found.jsonl  what a run before found is not looked for again
    python3 tools/mutate.py --gpu              kernels for Hopper alone, on such a GPU

A fault is a kind of mistake that kernels like these have had, as an edit of one line inside a `@triton.jit` function.
The file's tests run on a copy, in Triton's interpreter, until one fails: first those that noticed other faults of the
file, and without those that are known not to come to the function. What fails must pass on the file as it is. What no
test notices is listed, and makes the exit status 1; EQUIVALENT says of which edits nothing can be noticed.
"""

import argparse
import ast
import contextlib
import faulthandler
import io
import json
import multiprocessing
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from multiprocessing.connection import wait
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools"))
PACKAGE = Path("torch-ext") / "portable_kernels"

FAULTS = {  # name: what to find in a line, what to put there
    "fill": (r"^(?!.*mask=mask_m,)(.*)other=0\.0", r"\1other=3.0"),  # a masked lane takes part; rows are not stored
    "fill of a maximum": (r'other=-?float\("-?inf"\)|other=-_INF', "other=0.0"),
    "mask": (r"(offs_n|cols) < N\b", r"\1 < N - 1"),  # the last column is left out
    "rows": (r"offs_m < M\b", "offs_m < M - 1"),
    "offset": (r"tl\.cast\(([^()]+), tl\.int64\)", r"(\1)"),  # wraps past 2^31
    "stride": (r" \* (\w*strides\[\d\])", ""),  # taken for 1
    "sum in 16 bits": (  # not of pointers and indices
        r"^(\s+(?!\w+_ptr |offs\w* |tile |at |lo |hi |p |k\d )\w+) \+= (?!tl\.cast|.*stride)(.+)$",
        r"\1 += (\2).to(tl.float16)",
    ),
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
FAULTS_SM90 = {  # of kernels that run on a GPU alone: nothing that could make it wait for ever
    **{n: FAULTS[n] for n in ("offset", "mean", "eps")},
    "fill of a maximum": (r'else float\("-inf"\)', "else 0.0"),
    "mask": (r"offs_n < N\b", "offs_n < N - 1"),
    "maximum": (r"^(?!.*(?:next_smem|\* scale))(.*)gl\.max\(", r"\1gl.min("),
    "count": (r"gl\.minimum\(N - [^,]+, ", "gl.minimum(N, "),  # the columns of the last program
    "column": (r"(\[[^\[\]]*,[^\[\]]*,[^,\[\]]+), 0\]", r"\1, 8]"),  # of a tile that is copied
    "step": (r"(\[pid_\w \* BLOCK_\w), k\]", r"\1, 0]"),
    "rows": (r"^(?!.*pred=)(.*)\b(rows|row|i|at_m|at_n|columns) < (Sq|M|N)\b", r"\1\2 < \3 - 1"),
    "last key": (r"\(Sk - 1\)", "Sk"),
    "stride": (r" \* (\w*strides\[\d\]|stride_\w+)", ""),
    "scale": (r"^(?!.*max\()(.*) \* (scale(_[mn])?|share|fade|rstd|\(scale_m \* scale_n\)|out_scale)\b", r"\1"),
    "sum in 16 bits": (
        r"^(\s+(?:acc\d?|total|d[wb]) \+?= )(?!tiles|gl\.zeros)(.+ [+*] .+)$",
        r"\1(\2).to(gl.float16).to(gl.float32)",
    ),
    "operand in 16 bits": (r"\.to\(([gt]l)\.float32\)$", r".to(\1.float16).to(\1.float32)"),
    "sign": (r"(dp|g|xhat\)?) - (?=_row|total|xhat)", r"\1 + "),
    "base": (r" \* (LN2|LOG2E)\b", ""),
}
TESTS = {  # files whose tests are not named after them
    "_norms": "rms_norm layer_norm modulated_norm", "_rows": "softmax rms_norm epilogues",
    "_losses": "cross_entropy distillation", "_pointwise": "activations gated",
    "_activation_math": "activations", "_philox": "dropout", "_quantize": "scaled_matmul", "_fp8": "scaled_matmul",
    "_attention": "attention", "_attention_fwd": "attention", "_attention_bwd": "attention",
    "_attention_chunks": "attention", "_attention_decode": "kv_cache_attention", "_matmul_kernels": "matmul",
    "_tiles": "matmul", "_rms_norm_quantize": "rms_norm", "_rotary_layout": "rotary",
    "_moments": "layer_norm reductions", "_online": "softmax cross_entropy", "_triton": "rms_norm",
    "_attention_fwd_sm90": "attention_plans",
    "_attention_bwd_sm90": "attention_plans", "_scaled_matmul_sm90": "scaled_matmul", "_norms_sm90": "rms_norm",
}  # fmt: skip
FIRST = {  # by fault: tests besides the file's own
    "offset": [f"tests/test_every_op.py::test_{far}_past_32_bits" for far in ("strides", "batches")],
}
THEN = dict.fromkeys(("stride", "tiles"), ["tests/test_every_op.py::test_awkward_rows"])
EQUIVALENT = {  # (file, fault, text of the line): why no test can see it broken, here
    (
        "_rotary",
        "offset",
        "axis = (tl.cast(offs_r >= ends[0], tl.int64) + tl.cast(offs_r >= ends[1], tl.int64))[None, :]",
    ): "added to a number of 64 bits",
    (
        "_pointwise",
        "offset",
        "mask = inside(offs_m, M, cols, 2 * tl.cast(N, tl.int64), tiles_n)",
    ): "rows of more than 2^30 pairs: test_pairs_beyond_32_bits, on a GPU",
    (
        "_reductions",
        "offset",
        "offs_n = tl.cast(step, tl.int64) * BLOCK_N",
    ): "rows of more than 2^31 numbers: test_far_rows, on a GPU",
    (
        "_pointwise",
        "fill",
        "return first, tl.load(at(second_ptr, second_strides, a, b, offs_m, offs_n), mask=mask, other=0.0)",
    ): "a lane that is not stored",
    (
        "_pointwise",
        "offset",
        "return a, b, offs_m, tl.cast(pid % tiles_n, tl.int64) * BLOCK_N",
    ): "rows of more than 2^31 numbers: test_beyond_32_bits, on a GPU",
    **{
        (
            "_rotary",
            "fill",
            f"{name} = tl.load({name[:3]}_row + {member} * {name[:3]}_strides[3], mask=mask, other=0.0).to(COMPUTE)",
        ): "a pair that is loaded as zeros and not stored, or one whose position the table lacks, which gives NaN"
        for name, member in (("cos_1", "first"), ("sin_1", "first"), ("cos_2", "second"), ("sin_2", "second"))
    },
    (
        "distillation",
        "fill",
        "g = tl.load(g, mask=counted, other=0.0).to(COMPUTE) * factor",
    ): "an ignored row, whose probabilities are all 0",
    **{
        (
            "distillation",
            "fill",
            f"{log} = ({x} - tl.load({first}, mask=counted, other=0.0)[:, None])"
            f" - tl.load(out + {second}, mask=counted, other=0.0)[:, None]",
        ): "an ignored row, whose probabilities are all 0"
        for log, x, first, second in (("logp", "x", "out", 1), ("logq", "t", "out + 2", 3))
    },
    (
        "distillation",
        "fill",
        "dx = tl.where(p != 0, p * (term_p - tl.load(out + 4, mask=counted, other=0.0)[:, None]), 0.0)",
    ): "an ignored row, whose probabilities are all 0",
    (
        "distillation",
        "fill",
        "dt = tl.where(q != 0, q * (term_q - tl.load(out + 5, mask=counted, other=0.0)[:, None]), 0.0)",
    ): "an ignored row, whose probabilities are all 0",
    (
        "gated",
        "fill",
        "dy = tl.load(at(dy_ptr, dy_strides, outer_a, outer_b, offs_m, offs_n), mask=mask, other=0.0).to(COMPUTE)",
    ): "a lane that is not stored",
    (
        "epilogues",
        "fill",
        "p = tl.load(p_ptr + (offs_n * p_stride)[None, :], mask=(offs_n < N)[None, :], other=0.0).to(COMPUTE)",
    ): "a column of which nothing is stored",
    **{
        (
            "masked_softmax",
            "fill",
            f"{t} = tl.load(at({t}_ptr, {t}_strides, a, b, offs_m, offs_n), mask=mask, other=0.0).to(COMPUTE)",
        ): "one of a product of which the other is 0, or a score that is masked again"
        for t in ("dy", "y", "x")
    },
    (
        "dropout",
        "fill",
        "y += tl.load(at(r_ptr, r_strides, a, b, offs_m, offs_n), mask=mask, other=0.0).to(COMPUTE)",
    ): "a lane that is not stored",
    (
        "dropout",
        "offset",
        "first = tl.cast(tile_n, tl.int64) * (BLOCK_N // 4)",
    ): "rows of more than 2^33 numbers",
    (
        "dropout",
        "fill",
        "x = tl.load(at(x_ptr, x_strides, a, b, offs_m, offs_n), mask=mask, other=0.0).to(COMPUTE)",
    ): "a lane that is not stored",
    (
        "_linear_cross_entropy",
        "fill of a maximum",
        'x = tl.load(x_ptr + cols, mask=mask, other=float("-inf")).to(COMPUTE)',
    ): "logits that are masked again, of lanes that are not stored",
    (
        "activations",
        "fill",
        "dy = tl.load(at(dy_ptr, dy_strides, outer_a, outer_b, offs_m, offs_n), mask=mask, other=0.0).to(COMPUTE)",
    ): "a lane that is not stored",
    (
        "_pointwise",
        "fill",
        "first = tl.load(at(first_ptr, first_strides, a, b, offs_m, offs_n), mask=mask, other=0.0)",
    ): "a lane that is not stored",
    (
        "_scaled_matmul",
        "fill",
        "acc *= tl.load(sa_ptr + offs_m * sa_strides[0], mask=offs_m < M, other=0.0)[:, None]",
    ): "the scale of a row that is not stored",
    (
        "_reductions",
        "operand in 16 bits",
        "s1 = tl.where(s0 == before, s1, zero) + tl.sum(equal.to(COMPUTE), axis=2)",
    ): "counts of a few lanes, which float16 holds",
    (
        "activations",
        "fill",
        "x = tl.load(at(x_ptr, x_strides, outer_a, outer_b, offs_m, offs_n), mask=mask, other=0.0).to(COMPUTE)",
    ): "a lane that is not stored",
    (
        "_pointwise",
        "fill",
        "both = tl.load(at(first_ptr, first_strides, a, b, offs_m, cols), mask=mask, other=0.0)",
    ): "lanes that are not stored",
    (
        "_reductions",
        "offset",
        "offs_r = tl.cast(step % tiles_r, tl.int64) * BLOCK_R",
    ): "more than 2^31 rows: test_far_rows, on a GPU",
    (
        "_scaled_matmul",
        "fill",
        "return tl.load(ptr + offs // GROUP_ROWS * strides[0], mask=offs < size, other=0.0)",
    ): "the scale of a row that is not stored",
    (
        "_linear_cross_entropy",
        "fill",
        "u *= tl.load(w_ptr + cols, mask=mask, other=0.0).to(COMPUTE)",
    ): "the weight of a class whose gradient is not stored",
    (
        "_attention_bwd",
        "fill of a maximum",
        'lse = tl.load(lse_ptr + i, mask=i < Sq, other=float("-inf"))',
    ): "a query past the last: its incoming gradient and its delta are 0, whatever its probabilities",
    (
        "_attention_bwd",
        "fill",
        "delta -= tl.load(row, mask=i < Sq, other=0.0)",
    ): "a query past the last, of which nothing is stored",
    (
        "_attention_decode",
        "fill",
        "k = tl.load(k_row + lane * k_strides[3], mask=mask, other=0.0)",
    ): "a lane that is not stored",
    (
        "_attention_decode",
        "fill",
        "v = tl.load(v_ptr + v_at, mask=mask, other=0.0)",
    ): "a lane that is not stored",
    (
        "_attention_bwd",
        "fill",
        "delta = tl.load(delta_ptr + rows + i, mask=i < Sq, other=0.0)",
    ): "a query past the last: itself loaded as zeros, which its part in the gradients is a multiple of",
    (
        "_grouped_mm",
        "offset",
        "cols = tl.cast(n + offs_n, tl.int64)",
    ): "columns of the result, which lie together: more than 2^31 of them",
    (
        "_matmul_kernels",
        "fill",
        "y += tl.load(bias_ptr + offs_n * bias_stride, mask=offs_n < N, other=0.0).to(acc.dtype)[None, :]",
    ): "the bias of a column that is not stored",
    (
        "_scaled_matmul",
        "fill",
        "acc *= tl.load(sb_ptr + offs_n * sb_strides[0], mask=offs_n < N, other=0.0)[None, :]",
    ): "the scale of a column that is not stored",
    (
        "epilogues",
        "offset",
        "cells = (tl.cast(tile_m, tl.int64) * y_strides[2])[:, None] + (offs_n * y_strides[3])[None, :]",
    ): "rows of more than 2^25 numbers of a result that lies together",
    (
        "layer_norm",
        "operand in 16 bits",
        "more = within(N, start, BLOCK_N, GROUP).to(COMPUTE)",
    ): "counts of a few lanes, which float16 holds",
    (
        "topk_softmax",
        "fill",
        "dw = tl.load(dw_ptr + row * K + offs_k, mask=mask, other=0.0).to(COMPUTE)",
    ): "one of a product of which the other is 0",
    (
        "_attention_decode",
        "fill",
        "q = tl.load(q_row + offs_d[None, :] * q_strides[3], mask=mask_q, other=0.0)",
    ): "a query that is not stored, or a factor of a key's lane that is 0",
    (
        "_attention_decode",
        "fill",
        "partner = tl.load(q_row + other * q_strides[3], mask=mask_q & (offs_d < ROTARY)[None, :], other=0.0)",
    ): "a query that is not stored, or a lane that does not turn",
    (
        "_matmul_kernels",
        "fill",
        "y += tl.load(_place(residual_ptr, residual_strides, i, j, offs_m, offs_n), mask=mask, other=0.0)"
        ".to(acc.dtype)",
    ): "a lane that is not stored",
    (
        "_scaled_matmul",
        "fill",
        "acc += tl.load(bias_ptr + offs_n * stride_bias, mask=offs_n < N, other=0.0).to(tl.float32)[None, :]",
    ): "the bias of a column that is not stored",
    (
        "epilogues",
        "offset",
        "cells = tl.cast(tile_m, tl.int64)[:, None] * N + offs_n[None, :]",
    ): "rows of more than 2^25 numbers of a result that lies together",
    **{
        (stem, "fill", line): "a factor of what is 0 in the other operand, or of a row or column that is not stored"
        for stem, line in (
            ("_matmul_kernels", "a = tl.load(a_ptrs, mask=mask_a, other=0.0)"),
            ("_matmul_kernels", "b = tl.load(b_ptrs, mask=mask_b, other=0.0)"),
            ("_matmul_kernels", "acc2 = dot(a, tl.load(b2_ptrs, mask=mask_b, other=0.0), acc2, PRECISION)"),
            (
                "_matmul_kernels",
                "return tl.load(ptr + m * strides[2] + ks * strides[3], mask=mask, other=0.0).to(COMPUTE)[None, :]",
            ),
            ("_matmul_kernels", "b = tl.load(b_ptrs, mask=mask, other=0.0).to(COMPUTE)"),
            ("_scaled_matmul", "a = tl.load(a_row + (cols * step_ak)[None, :], mask=mask_a, other=0.0)"),
            ("_scaled_matmul", "b = tl.load(b_column + (cols * step_bk)[:, None], mask=mask_b, other=0.0)"),
        )
    },
    **{
        ("_matmul_kernels", "fill", line): "a lane that is not stored"
        for line in (
            "x = tl.load(ptr + at, mask=mask, other=0.0).to(COMPUTE)",
            "x += tl.load(ptr + at + tl.cast(step, tl.int64) * s, mask=mask, other=0.0).to(COMPUTE)",
        )
    },
    (
        "epilogues",
        "offset",
        "tl.store(dp_ptr + tl.cast(pid_m, tl.int64) * N + offs_n, dp, mask=offs_n < N)",
    ): "of a few hundred programs: rows of millions of numbers",
    **{
        ("_attention_decode", "fill", line): why
        for line, why in (
            ("slope = tl.load(slopes, mask=mask_m, other=0.0).to(COMPUTE) * LOG2E", "a query that is not stored"),
            ("sink = tl.load(sink_ptr + offs_h, mask=mask_m, other=0.0).to(COMPUTE) * LOG2E", "likewise"),
            (
                "k = tl.load(k_row[:, None] + offs_d[None, :] * k_strides[3], mask=mask_kv, other=0.0)",
                "a key whose score is masked again, or a factor of a query's lane that is 0",
            ),
            (
                "v = tl.load(v_row[:, None] + offs_d[None, :] * v_strides[3], mask=mask_kv, other=0.0)",
                "of a key whose probability is 0, or a lane that is not stored",
            ),
            (
                "parts = tl.load(at, mask=(offs_s < SPLITS)[:, None] & (offs_d < D)[None, :], other=0.0).to(COMPUTE)",
                "a share whose weight is 0, or a lane that is not stored",
            ),
        )
    },
    (
        "_attention_decode",
        "fill",
        "partner = tl.load(k_row + other * k_strides[3], mask=mask & (lane < ROTARY), other=0.0)",
    ): "a lane that does not turn",
    (
        "_attention_decode",
        "sum in 16 bits",
        'total += tl.where(peak == float("-inf"), 0.0, 1.0)',
    ): "0 and 1",
    (
        "_rows",
        "offset",
        "return 0, 0, tl.cast(tile, tl.int64) * BLOCK_M",
    ): "the interpreter passes no 1 as a constant",
    (
        "_pointwise",
        "offset",
        "return 0, 0, tl.arange(0, BLOCK_M), tl.cast(pid, tl.int64) * BLOCK_N",
    ): "the interpreter passes no 1 as a constant",
    (
        "_cross_entropy",
        "fill",
        "u *= tl.load(w_ptr + cols, mask=cols < N, other=0.0).to(COMPUTE)[None, :]",
    ): "a target that is masked again before it counts",
    (
        "_cross_entropy",
        "fill of a maximum",
        'z_y = tl.load(x_row + index * x_strides[3], mask=valid, other=float("-inf")).to(COMPUTE)',
    ): "a logit that is masked again",
    (
        "_cross_entropy",
        "fill",
        "dt *= tl.load(w_ptr + cols, mask=cols < N, other=0.0).to(COMPUTE)[None, :]",
    ): "the gradient of a column that is not stored",
    (
        "_cross_entropy",
        "fill",
        "own = tl.load(w_ptr + index, mask=valid, other=0.0).to(COMPUTE)",
    ): "the weight of a label whose share is masked again",
    **{
        ("_cross_entropy", "fill", line): "of a row whose incoming gradient is 0, or a label that no column is"
        for line in (
            "g = dloss * tl.load(stats_ptr + out_m * 4 + 2, mask=live, other=0.0)",
            "share *= tl.load(w_ptr + index, mask=valid, other=0.0).to(COMPUTE)",
            "peak = tl.load(stats_ptr + out_m * 4, mask=live, other=0.0)",
            "log_total = tl.load(stats_ptr + out_m * 4 + 1, mask=live, other=0.0)",
        )
    },
    (
        "_cross_entropy",
        "fill",
        "t = tl.load(at(t_ptr, t_strides, a, b, offs_m, cols), mask=mask, other=0.0).to(COMPUTE)",
    ): "a target that is masked again before it counts",
    (
        "_fp8",
        "operand in 16 bits",
        "x = tl.where(size >= (1 << MANTISSA), normal, size.to(tl.float32) * (2.0 ** (1 - BIAS - MANTISSA)))",
    ): "0 to 7 times a power of two, which float16 holds",
    (
        "_grouped_mm",
        "offset",
        "out_row = out_ptr + tl.cast(row, tl.int64) * out_strides[0]",
    ): "a result of more than 2^31 numbers: test_far_rows_of_no_group, on a GPU",
    (
        "_grouped_mm",
        "fill",
        "bias = tl.load(bias_ptr + group * bias_strides[0] + offs_n * bias_strides[1], mask=offs_n < N, other=0.0)",
    ): "the bias of a column that is not stored",
    (
        "_matmul_kernels",
        "fill",
        "y += tl.load(bias_ptr + offs_m * bias_stride, mask=offs_m < M, other=0.0).to(acc.dtype)[:, None]",
    ): "the bias of a row that is not stored",
    (
        "_norms",
        "offset",
        "row = ptr + a * strides[0] + b * strides[1] + tl.cast(m, tl.int64) * strides[2]",
    ): "m is of 64 bits, or a literal 0",
    (
        "_modulated_norm",
        "offset",
        "part = tl.cast(pid, tl.int64) * N",
    ): "of a few thousand programs: rows of a million numbers",
    (
        "_linear_cross_entropy",
        "fill of a maximum",
        'x = tl.load(x_ptr + start + offs_n, mask=mask, other=float("-inf")).to(COMPUTE)',
    ): "scaled logits, which are masked again",
}
CRASHED = "the process of the tests crashed, or hung"
UNABLE = 77  # the status of one that cannot run tests at all
LAST = re.compile(r"reference_is|compile|opcheck|export|transforms|vmap|gradcheck|bad_|_plan|second_order|far_rows")


def places(path, faults):
    """(fault, kernel, line number, line as it should not be) of every edit in the file's kernels."""
    text = path.read_text()
    lines = text.splitlines()
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef) and any(
            re.match(r"(triton|gluon)\.jit", ast.unparse(d)) for d in node.decorator_list
        ):
            for number in range(node.body[0].lineno - 1, node.end_lineno):
                code = lines[number].split("  #")[0]
                for fault, (find, put) in faults.items():
                    broken = re.sub(find, put, code, count=1)
                    if broken == code or (path.stem, fault, code.strip()) in EQUIVALENT:
                        continue
                    try:
                        ast.parse("\n".join([*lines[:number], broken, *lines[number + 1 :]]))
                    except SyntaxError:
                        continue  # part of a longer expression
                    yield fault, node.name, number, broken


def tests_of(stem):
    names = TESTS.get(stem, stem.lstrip("_")).split()
    return [f"tests/test_{name}.py" for name in names]


class Place(NamedTuple):
    """One edit: the file, its function, the fault, the line as it is and as it should not be, the file's text so, and
    what is asked to notice it, as pytest takes it."""

    stem: str
    kernel: tuple
    fault: str
    was: str
    broken: str
    text: str
    tests: list


class Run(NamedTuple):
    what: str
    process: object
    found: object
    slot: int
    stem: str
    was: str
    start: float


class Watch:
    """A plugin of pytest: which tests run, in which order; those that failed, and the kernels that others came to."""

    def __init__(self, limit, kernel=None, noticed=(), reach=(), failing=()):
        """kernel: what is broken. noticed: how many faults of its file each test did; reach: what tests came to."""
        self.limit, self.kernel, self.noticed, self.reach, self.failing = limit, kernel, noticed, reach, failing
        self.failed, self.reached, self.now = [], {}, None

    def pytest_collection_modifyitems(self, items):
        if self.kernel is None:
            return
        seen, order, files = Counter(), {}, list(dict.fromkeys(item.path for item in items))
        for item in items:  # what noticed others first, then a case of each test, then the second of each
            test, name = item.nodeid, item.originalname
            reached = self.kernel in self.reach[test] if test in self.reach else None
            if reached is not False and test not in self.failing:
                late = files.index(item.path), bool(LAST.search(name)), seen[name]
                order[item] = (-self.noticed[test], not reached, *late)
                seen[name] += 1
        items[:] = sorted(order, key=order.get)

    def pytest_runtest_logstart(self, nodeid):
        self.now = self.reached[nodeid] = set()
        faulthandler.dump_traceback_later(self.limit, exit=True)  # a kernel that hangs lets go of no lock

    def pytest_runtest_logreport(self, report):
        if report.failed:
            self.failed.append(report.nodeid)
            self.reached.pop(report.nodeid, None)  # more, had it gone on

    pytest_collectreport = pytest_runtest_logreport

    def kernels(self):
        """Note the kernels that run from now on, and in the interpreter the functions that they call."""
        from triton.runtime.interpreter import InterpretedFunction
        from triton.runtime.jit import JITFunction

        def noting(before):
            def note(function, *args, **kwargs):
                if self.now is not None:
                    stem = function.fn.__module__.rpartition(".")[2]
                    self.now.add((stem, "" if stem.endswith("_sm90") else function.fn.__name__))
                return before(function, *args, **kwargs)

            return note

        InterpretedFunction.rewrite = noting(InterpretedFunction.rewrite)
        JITFunction.run = noting(JITFunction.run)


def run_tests(found, folder, kernels, tests, watch):
    """In a process of its own: sends the tests that failed, how pytest ended, and what each test came to."""
    os.setsid()
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nowhere, stream)
    os.chdir(folder)
    os.environ["LOCAL_KERNELS"] = kernels
    try:
        import pytest

        watch.kernels()
    except BaseException:
        os._exit(UNABLE)
    off = [f"-pno:{plugin}" for plugin in ("cacheprovider", "xdist", "faulthandler")]
    status = pytest.main(["-q", "--tb=no", *off, *tests], plugins=[watch])
    found.send((watch.failed, int(status), watch.reached))


class Slots:
    """Copies of the built package, each for one process of tests at a time."""

    def __init__(self, jobs):
        from build_local import build
        from kernels.compat import tomllib

        self.folder = Path(tempfile.mkdtemp(prefix="mutate-"))
        (self.folder / "repository").mkdir()
        for name in ("tests", "examples", "torch-ext"):
            shutil.copytree(ROOT / name, self.folder / "repository" / name, ignore=shutil.ignore_patterns("__py*"))
        for name in ("build.toml", "pytest.ini"):
            shutil.copy(ROOT / name, self.folder / "repository")
        with contextlib.redirect_stdout(io.StringIO()):
            build(ROOT, self.folder / "0")
        for slot in range(1, jobs):
            shutil.copytree(self.folder / "0", self.folder / str(slot))
        self.name = tomllib.loads((ROOT / "build.toml").read_text())["general"]["hub"]["repo-id"]
        self.free, self.running = list(range(jobs)), []

    def start(self, what, tests, watch, stem="", text=""):
        """Run `tests`, arguments of pytest, on the package whose file `stem` has that text."""
        slot = self.free.pop()
        was = self.write(slot, stem, text)
        found, to = multiprocessing.Pipe(duplex=False)
        kernels = f"{self.name}={self.folder / str(slot)}"
        process = multiprocessing.get_context("fork").Process(
            target=run_tests, args=(to, self.folder / "repository", kernels, tests, watch)
        )
        process.start()
        to.close()
        self.running.append(Run(what, process, found, slot, stem, was, time.time()))

    def close(self):
        for one in self.running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(one.process.pid, signal.SIGKILL)
        shutil.rmtree(self.folder, ignore_errors=True)

    def write(self, slot, stem, text):
        """Give the file `stem` that text; returns the text that it had."""
        was = ""
        if stem:
            for variant in (self.folder / str(slot)).iterdir():
                was = (variant / f"{stem}.py").read_text()
                (variant / f"{stem}.py").write_text(text)
                for old in (variant / "__pycache__").glob(f"{stem}.*"):  # of the same second and size
                    old.unlink()
        return was

    def ended(self):
        """(what was started, the tests that failed, pytest's status or None, what tests came to, seconds) of those that
        end next."""
        ready = wait([end for one in self.running for end in (one.process.sentinel, one.found)])
        for one in [one for one in self.running if one.process.sentinel in ready or one.found in ready]:
            self.running.remove(one)
            failed, status, reached = [], None, {}
            with contextlib.suppress(EOFError):
                failed, status, reached = one.found.recv()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(one.process.pid, signal.SIGKILL)
            one.process.join()
            if one.process.exitcode == UNABLE or (status not in (None, 0, 1, 5) and not failed):
                sys.exit(f"{one.what}: the tests do not run; pytest ended with {status}")
            self.write(one.slot, one.stem, one.was)
            self.free.append(one.slot)
            yield one.what, failed, status, reached, time.time() - one.start


def chosen_places(options):
    """{file:line fault: Place}."""
    chosen = []
    for path in sorted((ROOT / PACKAGE).glob("*.py")):
        if path.stem.endswith("_sm90") != options.gpu or (options.files and path.stem not in options.files):
            continue  # kernels for one GPU do not run in the interpreter
        if not (ROOT / tests_of(path.stem)[0]).exists():
            continue
        lines, seen = path.read_text().splitlines(), set()
        for fault, kernel, number, broken in places(path, FAULTS_SM90 if options.gpu else FAULTS):
            once = fault, options.gpu and kernel  # kernels for one GPU are few
            if (not options.faults or fault in options.faults) and (options.all or once not in seen):
                seen.add(once)
                text = "\n".join([*lines[:number], broken, *lines[number + 1 :]]) + "\n"
                tests = [*FIRST.get(fault, []), *tests_of(path.stem), *THEN.get(fault, [])]
                at = path.stem, "" if options.gpu else kernel  # launches tell of no functions that a kernel calls
                place = Place(path.stem, at, fault, lines[number], broken, text, tests)
                chosen.append((f"{path.stem}:{number + 1} {fault}", place))
    if options.some:  # of every fault in turn
        random.Random(0).shuffle(chosen)
        turns, order = Counter(), {}
        for name, place in chosen:
            order[name] = turns[place.fault]
            turns[place.fault] += 1
        chosen = sorted(chosen, key=lambda one: order[one[0]])[: options.some]
    return dict(chosen)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", nargs="*", help="without .py; all that have kernels")
    parser.add_argument("--faults", nargs="*", choices=[*{**FAULTS, **FAULTS_SM90}])
    parser.add_argument("--all", action="store_true", help="every place of a fault in a file, not the first alone")
    parser.add_argument("--some", type=int, help="how many to draw")
    parser.add_argument("--gpu", action="store_true", help="kernels for Hopper alone, by their tests on such a GPU")
    parser.add_argument("--limit", type=float, default=120, help="seconds that one test may take")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes at once")
    parser.add_argument("--json", type=Path, help="a line for each, appended; those that are there are not done again")
    options = parser.parse_args()

    os.environ.update(OMP_NUM_THREADS="1")
    if not options.gpu:
        os.environ.update(TRITON_INTERPRET="1", CUDA_VISIBLE_DEVICES="")
    import kernels  # noqa: F401  once, for the processes that are forked
    import pytest  # noqa: F401
    import torch
    import triton  # noqa: F401

    torch.set_num_threads(1)
    chosen = chosen_places(options)
    results = {}  # {name: the test that noticed, or None}
    if options.json and options.json.exists():
        same = {(place.stem, place.fault, place.broken): name for name, place in chosen.items()}
        for line in options.json.read_text().splitlines():
            was = json.loads(line)
            at, fault = was["name"].split(" ", 1)
            if name := same.get((at.split(":")[0], fault, was["broken"])):  # on whichever line by now
                results[name] = was["caught_by"]
    reach = {}  # {test: the kernels that it comes to}
    passing, failing = set(), set()  # of the tests that noticed a fault: those that pass without it, and the others
    slots = Slots(options.jobs)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))
    hopper = ["-khopper or sm90"] * options.gpu

    def each(names):
        """Break them in turn, and ask what is known by then to come there first."""
        names = iter(names)
        while True:
            while slots.free and (name := next(names, None)):
                place = chosen[name]
                noticed = Counter(test for other, test in results.items() if chosen[other].stem == place.stem)
                watch = Watch(options.limit, place.kernel, noticed, reach, failing)
                slots.start(name, ["-x", *hopper, *place.tests], watch, place.stem, place.text)
            if not slots.running:
                return
            yield from slots.ended()

    try:
        waiting = [name for name in chosen if name not in results]
        while True:
            for name, failed, status, reached, seconds in each(waiting):
                reach.update({test: kernels for test, kernels in reached.items() if test not in reach})
                results[name] = caught = failed[0] if failed else CRASHED if status is None else None
                print(f"{name}: {caught or 'NOT NOTICED'} ({seconds:.0f} s)", flush=True)
                if options.json:
                    with options.json.open("a") as file:
                        one = {"name": name, "broken": chosen[name].broken, "caught_by": caught}
                        file.write(json.dumps({**one, "seconds": round(seconds)}) + "\n")
            noticed = sorted({test for test in results.values() if test and "::" in test} - passing - failing)
            while noticed or slots.running:  # what noticed a fault must pass without
                while slots.free and noticed:
                    file = noticed[0].split("::")[0]
                    tests = [test for test in noticed if test.startswith(file)]
                    noticed = noticed[len(tests) :]
                    slots.start(tests, tests, Watch(options.limit))
                for tests, failed, status, _, _ in slots.ended():
                    failing.update(failed if status in (0, 1) else tests)
            passing.update({*results.values()} - failing)
            waiting = [name for name, test in results.items() if test in failing]
            if not waiting:
                break
            print(f"these fail without a fault too, and are left out: {', '.join(sorted(failing))}", flush=True)
    finally:
        slots.close()
    missed = [name for name, test in results.items() if not test]
    print(f"\n{len(results)} faults, {len(missed)} not noticed")
    for name in missed:
        print(f"{name}\n  - {chosen[name].was.strip()}\n  + {chosen[name].broken.strip()}")
    sys.exit(bool(missed) or not results)


if __name__ == "__main__":
    main()
