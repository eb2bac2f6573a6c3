#!/usr/bin/env python3
"""Measure the error of every op and of PyTorch's own, in ulps against float64, and write docs/accuracy.md.

    python tools/accuracy.py                        PyTorch's path, on the CPU
    TRITON_INTERPRET=1 python tools/accuracy.py     the kernels, in Triton's interpreter
    python3 tools/accuracy.py                       on a machine with a GPU: the kernels, and torch.compile
    python tools/accuracy.py --page                 the page alone, from benchmarks/results/accuracy_*.json

An error is |result - exact| in ulps of |exact| + rms of its row, of a gradient in ulps of |exact| + rms of all of it: a
sum rounds at the scale of what it adds. Exact is PyTorch's formula in float64 on the same inputs. The rule: never more
than PyTorch's own error plus one ulp.
"""

import argparse
import json
import math
import os
import re
import sys
import time
import warnings
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "tests")]

DTYPES = ("float32", "bfloat16", "float16")
INPUTS = {  # how normal values of spread 3 are made others, for a dtype that is float16 or not
    "normal": lambda t, half: t,
    "large mean": lambda t, half: t + 1000,
    "tiny variance": lambda t, half: 5 + t * 1e-3,
    "heavy tails": lambda t, half: (t / (t.roll(1, -1).abs() + 0.01)).clamp(-1e4, 1e4),
    "huge": lambda t, half: t * (5e3 if half else 1e15),
    "denormal": lambda t, half: t * (1e-6 if half else 1e-39),
    "sparse": lambda t, half: t * (t.roll(1, -1) > 4.5),
}
START, COMPILE_SECONDS = time.time(), float(os.environ.get("COMPILE_SECONDS", "inf"))
NOT_HERE = {
    "dropout": "draws its own mask", "dropout_add": "draws its own mask", "quantize_fp8": "gives float8",
    "scaled_matmul": "takes float8", "reductions.argmax": "gives indices", "reductions.argmin": "gives indices",
}  # fmt: skip
# Why an error may pass PyTorch's by more than an ulp: (path, op, dtype, inputs, part; "" is any), the first that fits.
SOFTMAX = "attention|attn|distillation|softmax|cross_entropy|log_probs"
REASONS = (
    *(
        ("", "topk_softmax", dtype, inputs, "gradients", "of equal probabilities PyTorch and float64 choose others")
        for dtype, inputs in (("float32", "denormal"), ("bfloat16", ""), ("float16", ""))
    ),
    (
        "cpu|interpreter",
        r"reductions\.(cum)?(sum|mean|var|std)",
        "",
        "",
        "",
        "PyTorch's CPU sums in float64, or pairwise",
    ),
    (
        "gpu",
        r"reductions\.(var|std)",
        "",
        "",
        "gradients",
        "the mean is held beside the row's first element, right for large means and 2 ulps off where that is far",
    ),
    ("cpu", "modulated|gated", "", "huge", "gradients", "PyTorch's autograd cubes a reciprocal, which underflows"),
    ("", "", "", "denormal", "", "every rounding is of the smallest number there is"),
    ("", "masked_softmax", "float16", "huge", "gradients", "a row with inf is NaN where it is masked too"),
    ("", "attention|attn", "", "large mean", "gradients", "scores of millions, right to a half at best"),
    ("", "attention|attn", "", "huge", "results", "scores past 2^31, scaled and reduced in one rounding"),
    ("", SOFTMAX, "", "", "gradients", "probabilities all but 0 and 1: what is left of terms that cancel"),
    ("", "distillation", "", "", "results", "equal distributions: what is left of terms that cancel"),
    ("", "gelu|geglu", "", "huge", "", "1 + erf(x) near -4, beside numbers that overflow"),
)
SIZES = {"cpu": (32, 512), "interpreter": (8, 256), "gpu": (512, 2048)}


def given_of(name, inputs, dtype, device, sizes):
    """The arguments of the op's typical call: operands of the first one's shape are of that kind."""
    import torch
    from _calls import arguments

    given = arguments(name, torch.float64, "cpu", *sizes)
    first = next(iter(given.values()))
    for key, v in given.items():
        if isinstance(v, torch.Tensor):
            if v.is_floating_point():
                v = v / 3 if "att" in name else v  # else every softmax is all but 0 and 1
                v = INPUTS[inputs](v, dtype == "float16") if v.shape == first.shape else v
                v = v.to(getattr(torch, dtype))
            given[key] = v.to(device)
    return given


def run(function, name, given, into=None):
    """(floating results, gradients of every operand, what flowed in)."""
    import torch
    from _calls import floats, leaves, on_tensors

    names = leaves(name, given)
    tensors = [given[n].detach().clone().requires_grad_() for n in names]
    results = floats(on_tensors(function, given, names)(*tensors))
    learn = [r for r in results if r.requires_grad]
    if not learn:
        return results, [], None
    if into is None:
        into = [torch.randn(r.shape, dtype=torch.float64).to(r) for r in learn]
    into = [g.to(r.dtype) for g, r in zip(into, learn)]
    return results, torch.autograd.grad(learn, tensors, into, allow_unused=True, materialize_grads=True), into


def errors(found, exact, dtype, dim=-1):
    """[largest, mean] in ulps; None where there is nothing finite."""
    import torch

    worst, total, count = 0.0, 0.0, 0
    for y, e in zip(found, exact):
        e = e.double()
        eps, tiny = torch.finfo(dtype).eps, torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
        fits = e.to(y.dtype).isfinite()
        rms = torch.where(fits, e, 0.0).square().mean(dim, keepdim=True).sqrt() if e.dim() else e.abs()
        error = (y.double() - e).abs() / ((e.abs() + rms) * eps + tiny)
        error = torch.where(fits & error.isnan(), math.inf, error)[fits]
        if error.numel():
            worst, total, count = max(worst, error.max().item()), total + error.sum().item(), count + error.numel()
    return [worst, total / count] if count else None


def measure(kernel, device, path, names, say, compiles=True):
    import torch
    from _calls import TORCHS, find

    rows = []
    for name in names:
        for dtype in DTYPES:
            compiled = None
            if compiles and path == "gpu" and dtype != "float16" and time.time() - START < COMPILE_SECONDS:
                torch._dynamo.reset()
                compiled = torch.compile(TORCHS[name], dynamic=False)
            for inputs in INPUTS:
                if (path, dtype, inputs) == ("interpreter", "bfloat16", "denormal"):
                    continue  # the interpreter drops bits of subnormal bfloat16
                torch.manual_seed(0)
                given = given_of(name, inputs, dtype, device, SIZES[path])
                wide = {k: v.double() if torch.is_tensor(v) and v.is_floating_point() else v for k, v in given.items()}
                ours, our_grads, into = run(find(kernel, name), name, given)
                exact, exact_grads, _ = run(TORCHS[name], name, wide, into)
                row = {"op": name, "dtype": dtype, "inputs": inputs}
                ways = {"torch": TORCHS[name]} | ({"compile": compiled} if compiled else {})
                for way, function in {"ours": None, **ways}.items():
                    try:
                        results, grads, _ = (
                            (ours, our_grads, into) if way == "ours" else run(function, name, given, into)
                        )
                    except Exception as error:  # not the package's: torch.compile of PyTorch's formula
                        say(f"{name} {dtype} {inputs}, {way}: {type(error).__name__}: {str(error)[:100]}")
                        continue
                    row[way] = [
                        errors(results, exact, ours[0].dtype),
                        errors(grads, exact_grads, getattr(torch, dtype), None),
                    ]
                rows.append(row)
        say(name)
    return rows


def reason(path, row, part):
    for where, op, dtype, inputs, what, why in REASONS:
        if (
            re.search(where, path) and re.search(op, row["op"]) and re.match(dtype, row["dtype"])
            and row["inputs"].startswith(inputs) and part.startswith(what)
        ):  # fmt: skip
            return why
    ours, torchs = (row[way][part == "gradients"][0] for way in ("ours", "torch"))
    return "sums in another order" if ours < 2.5 * max(torchs, 1) else "not explained"


def over(row):
    """How far the largest errors, forward and of gradients, pass the rule."""
    return [
        o[0] - t[0] - 1 if o and t and not (math.isinf(o[0]) and math.isinf(t[0])) else -1.0
        for o, t in zip(row["ours"], row["torch"])
    ]


def number(x):
    return "∞" if math.isinf(x) else f"{x:.1e}" if x >= 1000 else f"{x:.2f}" if x < 10 else f"{x:.0f}"


def cell(rows, part):
    """Largest (mean) of the package's, of PyTorch's and of torch.compile's errors over all inputs."""
    texts = []
    for way in ("ours", "torch", "compile"):
        found = [r[way][part] for r in rows if r.get(way) and r[way][part]]
        found = [f for f in found if math.isfinite(f[0])]
        if found:
            texts.append(f"{number(max(f[0] for f in found))} ({number(math.fsum(f[1] for f in found) / len(found))})")
    return " / ".join(texts)


def page():
    parts = [__doc__.split("\n\n")[-1].replace("\n", " ").strip()]
    lines = [
        "# Accuracy", "",
        "Written by `tools/accuracy.py` from `benchmarks/results/accuracy_*.json`.", "", *parts, "",
        f"Inputs: {', '.join(INPUTS)}. A cell is the largest error over all of them, and the mean in brackets: of the "
        "package / of PyTorch / of torch.compile on a GPU. Not here: "
        + ", ".join(f"`{n}` ({why})" for n, why in NOT_HERE.items())
        + "; subnormal bfloat16 in the interpreter, which drops bits of it.", "",
    ]  # fmt: skip
    broken = {}
    for file in sorted(RESULTS.glob("accuracy_*.json")):
        found = json.loads(file.read_text())
        kept = found["rows"]
        heads = [f"{d}, {what}" for d in DTYPES for what in ("results", "gradients")]
        lines += [f"## {found['path']}", "", f"PyTorch {found['torch']}, Triton {found['triton']}.", ""]
        lines += ["| op | " + " | ".join(heads) + " |", "|---|" + "---|" * len(heads)]
        for name in dict.fromkeys(r["op"] for r in kept):
            mine = [r for r in kept if r["op"] == name]
            cells = [cell([r for r in mine if r["dtype"] == d], part) for d in DTYPES for part in (0, 1)]
            lines.append(f"| `{name}` | " + " | ".join(cells) + " |")
        lines.append("")
        for r in kept:
            for part, by in zip(("results", "gradients"), over(r)):
                if by > 0:
                    key = r["op"], found["path"], r["dtype"], part, reason(file.stem.split("_")[-1], r, part)
                    broken.setdefault(key, []).append(
                        (by, r["inputs"], *(r[w][part != "results"][0] for w in ("ours", "torch")))
                    )
    lines += ["## Where the rule is broken", ""]
    if broken:
        lines += ["| op | path | dtype | | inputs, the worst first | package | PyTorch | why |", "|---|" + "---|" * 7]
        for (op, path, dtype, part, why), cases in broken.items():
            cases.sort(reverse=True)
            names, (ours, torchs) = ", ".join(c[1] for c in cases), map(number, cases[0][2:])
            lines.append(f"| `{op}` | {path} | {dtype} | {part} | {names} | {ours} | {torchs} | {why} |")
    else:
        lines.append("Nowhere.")
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--page", action="store_true")
    parser.add_argument("--ops", nargs="*")
    parser.add_argument("--json", help="instead of benchmarks/results/")
    options = parser.parse_args()
    target = ROOT / "docs" / "accuracy.md"
    if options.page:
        target.write_text(page())
        return
    import torch
    from _calls import NAMES
    from portability import load_package

    warnings.simplefilter("ignore")
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    path = "interpreter" if interpreted else "gpu" if torch.cuda.is_available() else "cpu"
    device = "cuda" if path == "gpu" else "cpu"
    kernel = load_package()
    named = {
        "cpu": "PyTorch's path, on a CPU", "interpreter": "The kernels, in Triton's interpreter",
        "gpu": f"The kernels, on an {torch.cuda.get_device_name()}" if path == "gpu" else "",
    }  # fmt: skip
    names = options.ops or [n for n in NAMES if n not in NOT_HERE]
    rows = measure(kernel, device, path, names, lambda text: print(f"{time.time() - START:.0f} s: {text}", flush=True))
    version = sys.modules.get("triton")
    found = {
        "path": named[path],
        "torch": torch.__version__,
        "triton": getattr(version, "__version__", None),
        "rows": rows,
    }
    for r in rows:
        for what, by in zip(("results", "gradients"), over(r)):
            if by > 0:
                print(f"{r['op']} {r['dtype']} {r['inputs']}: {what} {r['ours']} beside {r['torch']}")
    short = lambda e: e if e is None else [float(f"{v:.4g}") for v in e]  # noqa: E731
    for r in rows:
        r.update({way: [short(e) for e in r[way]] for way in ("ours", "torch", "compile") if way in r})
    text = json.dumps(found).replace('{"op"', '\n{"op"') + "\n"
    Path(options.json or RESULTS / f"accuracy_{path}.json").write_text(text)
    if not options.json:
        target.write_text(page())


if __name__ == "__main__":
    main()
