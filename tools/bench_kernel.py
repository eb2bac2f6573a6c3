#!/usr/bin/env python3
"""Time a kernel's wrapper beside a baseline and torch.compile of it, and say how far it is from the device's ceiling.

    python tools/bench_kernel.py my_kernel.py:softmax --baseline my_kernel.py:reference \
        --bytes "2 * M * N * itemsize" --sweep N=256,1024,4096,16384 --fixed M=8192
    python tools/bench_kernel.py my_kernel.py:matmul --baseline torch:matmul --shapes "(M, K), (K, N)" \
        --flops "2 * M * N * K" --sweep M=1024,2048,4096 --fixed N=4096 K=4096

The report is a `triton.testing.perf_report`: a table, and with --out a CSV file and a plot (which takes pandas and
matplotlib; the CSV is written without them, too). GB/s come from --bytes, TFLOP/s from --flops; given both, the verdict
says which of them bounds it. Bytes are those that have to be read and written once, whatever the kernel does.

Ceilings are measured here and now: a copy of 2^28 elements, and a product of 4096 x 4096 matrices by the vendor.
Nothing is timed before it agrees with the baseline. Without a GPU it times Triton's interpreter, which says nothing.
"""

import argparse
import csv
import itertools
import os
import shlex
import statistics
import sys
import time
from pathlib import Path

from check_kernel import letters, load


def timed(function, device):
    """(median, 20 and 80 percent) of a call, in ms. On a GPU the cache is emptied before each."""
    if device != "cpu":
        import triton

        return triton.testing.do_bench(function, quantiles=(0.5, 0.2, 0.8))
    function()
    took = []
    for _ in range(5):
        start = time.perf_counter()
        function()
        took.append(1e3 * (time.perf_counter() - start))
    return statistics.median(took), min(took), max(took)


def ceilings(device, dtype, small=False):
    """(GB/s of a copy, TFLOP/s of a product by the vendor's library)."""
    import torch

    n, m = (2**22, 256) if small else (2**28, 4096)
    x = torch.empty(n, device=device, dtype=torch.float16).zero_()
    y = torch.empty_like(x)
    a = torch.randn(m, m, device=device).to(dtype)
    copy, product = timed(lambda: y.copy_(x), device)[0], timed(lambda: a @ a, device)[0]
    return 2 * x.numel() * x.element_size() / copy * 1e-6, 2 * m**3 / product * 1e-9


class Bench:
    """What is timed, at which sizes, and how its speed is counted."""

    def __init__(self, function, baseline, shapes, dtype, device, moved=None, flops=None, options=None, compiled=True):
        import torch

        self.shapes, self.dtype, self.device = letters(shapes), dtype, device
        self.moved, self.flops, self.options = moved, flops, options or {}
        self.ways = {"kernel": function, "baseline": baseline}
        if compiled:
            self.ways["torch.compile"] = torch.compile(baseline)
        self.names = list(dict.fromkeys(itertools.chain(*self.shapes)))

    def count(self, expression, sizes):
        return eval(expression, {"__builtins__": {}}, {**sizes, "itemsize": self.dtype.itemsize})

    def tensors(self, sizes):
        import torch

        shapes = [[int(n) if n.isdigit() else sizes[n] for n in shape] for shape in self.shapes]
        return [torch.randn(shape, device=self.device).to(self.dtype) for shape in shapes]

    def agree(self, sizes):
        """Nothing is timed that is wrong: the kernel against the baseline, in units in the last place."""
        import torch

        tensors = self.tensors(sizes)
        results = [self.ways[w](*tensors, **self.options) for w in ("kernel", "baseline")]
        for y, e in zip(*(r if isinstance(r, (tuple, list)) else (r,) for r in results)):
            y, e = y.double(), e.double()
            bound = 8 * torch.finfo(self.dtype).eps * (e.abs() + e.square().mean().sqrt())
            if y.shape != e.shape or not bool(((y - e).abs() <= bound).all()):
                raise SystemExit(f"bench_kernel: the kernel is wrong at {sizes}: tools/check_kernel.py says how")

    def speed(self, provider, sizes):
        """(speed, of the slower runs, of the faster ones) of one way at one size, in GB/s or TFLOP/s."""
        tensors = self.tensors(sizes)
        took = timed(lambda: self.ways[provider](*tensors, **self.options), self.device)
        work = self.count(self.moved, sizes) * 1e-6 if self.moved else self.count(self.flops, sizes) * 1e-9
        return tuple(work / t for t in (took[0], took[2], took[1]))


def verdict(bench, sizes, speed, best_other, copy, product):
    """The speed of the kernel in words, against what bounds it."""
    if bench.moved and bench.flops:
        moved, flops = bench.count(bench.moved, sizes), bench.count(bench.flops, sizes)
        balance = product * 1e12 / (copy * 1e9)
        by_memory = flops / moved < balance
        text = f"{flops / moved:.3g} flops a byte, the device has {balance:.3g}: bound by "
        text += "memory. " if by_memory else "arithmetic. "
        share = speed / copy if by_memory else speed * flops / moved * 1e-3 / product
    else:
        by_memory, text = bool(bench.moved), ""
        share = speed / (copy if by_memory else product)
    text += f"{share:.2f} of " + ("a copy" if by_memory else "the vendor's product")
    if share > 1.05:
        text += ": more than the ceiling; the bytes or flops are counted too high, or the operands lie in the cache"
    elif share > 0.85:
        text += ": at the ceiling; only fewer bytes or fewer operations would help"
    elif share > 0.5:
        text += ": block sizes and num_warps are worth a search"
    else:
        text += ": the launch, too few programs or the way memory is read: profile it"
    return f"{text}. {speed / best_other:.2f} times the fastest other way."


def report(bench, x_name, x_values, fixed, out, plot_name):
    """The table as [{size, way: speed}], printed and written by perf_report, or by hand where pandas is missing."""
    import triton

    unit = "GB/s" if bench.moved else "TFLOP/s"
    rows = []

    def measure(provider, **sizes):
        sizes = {n: sizes[n] for n in sizes}
        found = bench.speed(provider, sizes)
        row = next((r for r in rows if r[x_name] == sizes[x_name]), None)
        if row is None:
            rows.append(row := {x_name: sizes[x_name]})
        row[provider] = found[0]
        return found

    ways = list(bench.ways)
    mark = triton.testing.perf_report(
        triton.testing.Benchmark(
            x_names=[x_name],
            x_vals=x_values,
            line_arg="provider",
            line_vals=ways,
            line_names=ways,
            styles=[("blue", "-"), ("green", "-"), ("red", "--")][: len(ways)],
            ylabel=unit,
            x_log=True,
            plot_name=plot_name,
            args=fixed,
        )
    )(measure)
    if out:
        out.mkdir(parents=True, exist_ok=True)
    try:
        import matplotlib.pyplot  # noqa: F401
        import pandas  # noqa: F401
    except ImportError:
        for x in x_values:
            for way in ways:
                measure(way, **{x_name: x}, **fixed)
        for row in rows:
            print("  ".join(f"{k} {v:g}" if k == x_name else f"{k} {v:.4g} {unit}" for k, v in row.items()), flush=True)
        if out:
            with open(out / f"{plot_name}.csv", "w", newline="") as file:
                writer = csv.writer(file)
                writer.writerow([x_name, *(f"{w} ({unit})" for w in ways)])
                writer.writerows([row[x_name], *(f"{row[w]:.6f}" for w in ways)] for row in rows)
            print("no plot: pandas and matplotlib draw it")
    else:
        mark.run(print_data=True, save_path=str(out) if out else "")
    return rows


def profiler_lines(arguments):
    """Commands that run the same under a profiler: where time goes, and what one kernel does."""
    again = f"python {shlex.join([os.path.relpath(__file__), *arguments])}"
    return (
        f"NVIDIA  nsys profile --stats=true -o bench {again}\n"
        f"        ncu --set full --launch-skip 20 --launch-count 3 -o bench {again}\n"
        f"AMD     rocprofv3 --kernel-trace --stats -d bench -- {again}\n"
        f"        rocprof-compute profile -n bench -- {again}"
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("function", help="path.py:function, or module:function")
    parser.add_argument("--baseline", required=True, help="the same by PyTorch")
    parser.add_argument("--shapes", default="(M, N)")
    parser.add_argument("--bytes", help='an expression of the sizes and itemsize: "2 * M * N * itemsize"')
    parser.add_argument("--flops", help='an expression of the sizes: "2 * M * N * K"')
    parser.add_argument("--sweep", required=True, help="a size and its values: N=1024,4096")
    parser.add_argument("--fixed", nargs="*", default=[], help="the other sizes: M=8192")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--options", default="dict()", help="keywords for both")
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
    parser.add_argument("--out", type=Path, help="a folder for the CSV file and the plot")
    options = parser.parse_args()
    if not options.bytes and not options.flops:
        parser.error("--bytes or --flops says what is counted")
    import torch

    kinds = [k for k in ("xpu", "cuda") if getattr(torch, k).is_available()]
    device = kinds[0] if kinds else "cpu"
    if not kinds:
        os.environ.setdefault("TRITON_INTERPRET", "1")
        print("no GPU: these are times of Triton's interpreter, and say nothing of the kernel")
    torch.manual_seed(0)
    dtype = getattr(torch, options.dtype)
    x_name, _, values = options.sweep.partition("=")
    x_values = [int(v) for v in values.split(",")]
    fixed = {name: int(value) for name, value in (f.split("=") for f in options.fixed)}
    bench = Bench(
        load(options.function), load(options.baseline), options.shapes, dtype, device,
        options.bytes, options.flops, eval(options.options), not options.no_compile and bool(kinds),
    )  # fmt: skip
    if missing := set(bench.names) - {x_name, *fixed} - {n for n in bench.names if n.isdigit()}:
        parser.error(f"--fixed lacks {', '.join(sorted(missing))}")
    for x in x_values:
        bench.agree({x_name: x, **fixed})
    copy, product = ceilings(device, dtype, small=not kinds)
    print(f"ceilings: a copy {copy:.4g} GB/s, a product of {options.dtype} {product:.4g} TFLOP/s", flush=True)
    rows = report(bench, x_name, x_values, fixed, options.out, options.function.rpartition(":")[2])
    for row in rows if kinds else ():
        others = max(v for k, v in row.items() if k not in (x_name, "kernel"))
        text = verdict(bench, {x_name: row[x_name], **fixed}, row["kernel"], others, copy, product)
        print(f"{x_name} = {row[x_name]}: {text}")
    print(profiler_lines(sys.argv[1:]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
