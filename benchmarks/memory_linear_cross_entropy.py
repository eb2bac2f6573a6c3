"""Time and peak memory of a linear layer with cross-entropy, forward and backward, beside the other ways to do it.

    python benchmarks/memory_linear_cross_entropy.py build/torch-universal --json results.json

The first argument is a built variant of this package; rows of one shape are measured in turns, median of the turns.
"""

import argparse
import datetime
import importlib.util
import json
import statistics
import sys
from pathlib import Path

import torch
import torch.nn.functional as F

# name: tokens, width, classes
SHAPES = {
    "llama3_8b": (8192, 4096, 128256),
    "llama2_7b": (8192, 4096, 32000),
    "qwen2_0.5b": (8192, 896, 151936),
    "gemma3_1b": (8192, 1152, 262144),
}


def load(folder):
    spec = importlib.util.spec_from_file_location(
        "portable_kernels_measured", Path(folder) / "__init__.py", submodule_search_locations=[str(folder)]
    )
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def ways(kernel, reduction, chunks):
    found = {"ours": lambda x, w, t: kernel.linear_cross_entropy(x, w, t, reduction=reduction)}
    for mib in chunks:
        found[f"ours, {mib} MiB"] = lambda x, w, t, b=mib << 20: kernel.linear_cross_entropy(
            x, w, t, reduction=reduction, chunk_bytes=b
        )
    found["torch linear, cross_entropy"] = lambda x, w, t: F.cross_entropy(F.linear(x, w), t, reduction=reduction)
    if hasattr(torch.nn, "LinearCrossEntropyOptions"):
        options = torch.nn.LinearCrossEntropyOptions()
        found["torch linear_cross_entropy"] = lambda x, w, t: F.linear_cross_entropy(
            x, w, t, reduction=reduction, options=options
        )
    try:
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

        liger = LigerFusedLinearCrossEntropyLoss(reduction=reduction)
        found["liger"] = lambda x, w, t: liger(w, x, t)
        exact = LigerFusedLinearCrossEntropyLoss(reduction=reduction, accum_dtype=torch.float32)
        found["liger, float32 sums"] = lambda x, w, t: exact(w, x, t)
    except (ImportError, TypeError) as error:
        print(f"liger left out: {error}", file=sys.stderr)
    return found


def step(way, x, w, t):
    x.grad = w.grad = None
    loss = way(x, w, t)
    (loss if loss.dim() == 0 else loss.sum()).backward()
    return loss.detach()


def measure(shape, reduction, kernel, chunks, turns):
    T, H, V = SHAPES[shape]
    torch.manual_seed(0)
    x = torch.randn(T, H, device="cuda").bfloat16().requires_grad_()
    w = (torch.randn(V, H, device="cuda") * H**-0.5).bfloat16().requires_grad_()
    t = torch.randint(0, V, (T,), device="cuda")
    t[::17] = -100
    with torch.no_grad():
        expected = torch.cat(
            [F.cross_entropy(F.linear(a, w).float(), b, reduction="none") for a, b in zip(x.split(512), t.split(512))]
        )
    total = expected.sum() / ((t != -100).sum() if reduction == "mean" else 1)
    rows = {}
    candidates = ways(kernel, reduction, chunks)
    for name, way in list(candidates.items()):
        try:
            loss = step(way, x, w, t).float().sum()
            off = float((loss - total).abs() / total.abs())
            assert off < 0.1, f"loss {float(loss)}, expected {float(total)}"
            step(way, x, w, t)
            torch.cuda.synchronize()
            x.grad = w.grad = None
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            step(way, x, w, t)
            torch.cuda.synchronize()
            peak = torch.cuda.max_memory_allocated() - before
            rows[name] = {"shape": shape, "reduction": reduction, "way": name, "peak_mib": peak / 2**20, "off": off}
        except Exception as error:  # a way that does not take this case is named and left out
            print(f"{shape}, {reduction}: {name} left out: {type(error).__name__}: {error}"[:300], file=sys.stderr)
            del candidates[name]
    times = {name: [] for name in candidates}
    for _ in range(turns):
        for name, way in candidates.items():
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            step(way, x, w, t)
            stop.record()
            torch.cuda.synchronize()
            times[name].append(start.elapsed_time(stop))
    for name, spent in times.items():
        rows[name]["ms"] = statistics.median(spent)
    return list(rows.values())


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("package", help="folder of the built variant")
    parser.add_argument("--json", help="where to write the measurements")
    parser.add_argument("--shapes", nargs="*", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--reductions", nargs="*", default=["mean", "none"])
    parser.add_argument("--chunks", nargs="*", type=int, default=[], help="MiB, other than the default")
    parser.add_argument("--commit", default="", help="of what is measured")
    parser.add_argument("--turns", type=int, default=10)
    args = parser.parse_args()
    kernel, rows = load(args.package), []
    print("| shape | reduction | | ms | peak MiB | loss off by |\n|---|---|---|---|---|---|")
    for shape in args.shapes:
        for reduction in args.reductions:
            for r in measure(shape, reduction, kernel, args.chunks, args.turns):
                rows.append(r)
                print(
                    f"| {r['shape']} | {r['reduction']} | {r['way']} | {r['ms']:.2f} | {r['peak_mib']:.0f} "
                    f"| {r['off']:.1e} |",
                    flush=True,
                )
            torch.cuda.empty_cache()
    if args.json:
        import triton

        about = {
            "device": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__,
            "commit": args.commit, "date": datetime.date.today().isoformat(), "rows": rows,
        }  # fmt: skip
        Path(args.json).write_text(json.dumps(about, indent=1) + "\n")


if __name__ == "__main__":
    main()
