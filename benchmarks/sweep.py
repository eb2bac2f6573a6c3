"""Measure the package's ops on a GPU beside PyTorch, torch.compile and every peer that is installed.

    python benchmarks/sweep.py build/torch-cuda --json results.json [--ops rms_norm softmax] [--host]

Every way is held against PyTorch in float32 before it is timed; one that is wrong gets no time. All ways to do one case
are timed in turns, each with a cold L2 cache, by events on the device: median, and the 20th and 80th percentile. The
yardsticks of the same run are a device copy and a product by the vendor's library. `--host` adds the host's share of a
call, on inputs so small that there is nothing else.
"""

import argparse
import datetime
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
from workloads import WORKLOADS

OURS = "portable-kernels"


def load(folder):
    spec = importlib.util.spec_from_file_location(
        "portable_kernels_measured", Path(folder) / "__init__.py", submodule_search_locations=[str(folder)]
    )
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


class Clock:
    """Times functions in turns. Before each call the L2 cache is overwritten.

    The device then sleeps until the host has surely launched what it measures: the host's share is measured apart.
    """

    def __init__(self, seconds):
        self.seconds = seconds
        self.cold = torch.empty(2**28, dtype=torch.int8, device="cuda")

    def once(self, function):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.cold.zero_()
        torch.cuda._sleep(1_600_000)  # cycles: about 0.9 ms
        start.record()
        function()
        end.record()
        return start, end

    def turns(self, functions):
        """{name: (median, p20, p80)} in milliseconds."""
        took = {name: [] for name in functions}
        for function in functions.values():
            function(), function()
        torch.cuda.synchronize()
        began = time.perf_counter()
        while time.perf_counter() - began < self.seconds * len(functions) or len(next(iter(took.values()))) < 7:
            events = {name: self.once(function) for name, function in functions.items()}
            torch.cuda.synchronize()
            for name, (start, end) in events.items():
                took[name].append(start.elapsed_time(end))
        return {name: tuple(statistics.quantiles(ms, n=10)[i] for i in (4, 1, 7)) for name, ms in took.items()}


def ceilings(clock):
    a, b = (torch.empty(2**27, dtype=torch.bfloat16, device="cuda").normal_() for _ in range(2))
    m = a[: 2**24].view(4096, 4096)
    found = clock.turns({"copy": lambda: b.copy_(a), "matmul": lambda: m @ m.t()})
    return {"copy_gbps": 4 * 2**27 / found["copy"][0] / 1e6, "matmul_tflops": 2 * 4096**3 / found["matmul"][0] / 1e9}


def ways(workload, kernel, wanted):
    found = {OURS: lambda *a: workload.ours(kernel, *a), "torch": workload.torch}
    if "compile" in wanted:
        torch._dynamo.reset()
        found["torch.compile"] = torch.compile(workload.torch, dynamic=False)
    for name, find in workload.peers.items():
        if name in wanted:
            try:
                found[name] = find()
            except Exception as error:  # a peer that is not installed, or not for this torch
                print(f"  {name} left out: {type(error).__name__}: {str(error)[:100]}", file=sys.stderr)
    return found


def tensors(result):
    return [t for t in (result if isinstance(result, (tuple, list)) else (result,)) if t.is_floating_point()]


def off_by(actual, expected):
    """Norm of the error over the norm of what is expected, the largest of all results."""
    worst = 0.0
    for a, e in zip(actual, expected):
        scale = torch.linalg.vector_norm(e.detach().float()).clamp(min=1e-30)
        worst = max(worst, float(torch.linalg.vector_norm(a.detach().float() - e.detach().float()) / scale))
    return worst


def measure(op, case, shape, workload, kernel, clock, directions, wanted, ceiling):
    torch.manual_seed(0)
    inputs = workload.make(*shape)
    leaves = [t.detach().requires_grad_(i in workload.grads) for i, t in enumerate(inputs)]
    learn = [leaves[i] for i in workload.grads]
    random = op == "dropout"  # another mask for each: held against nothing
    with torch.no_grad():
        wide = [t.float() if t.is_floating_point() else t for t in inputs]
    for direction in directions:
        forward = direction == "forward"
        traffic = workload.forward if forward else workload.backward
        flops = workload.flops and (1.0 if forward else workload.backward_flops) * workload.flops(shape)
        if not traffic and not flops:
            continue
        expected, runs, dy = None, {}, None
        for name, way in ways(workload, kernel, wanted).items():
            try:
                if direction == "forward":
                    with torch.no_grad():
                        result = tensors(way(*inputs))
                        if expected is None:
                            expected = tensors((workload.exact or workload.torch)(*wide))

                    def run(way=way):
                        with torch.no_grad():
                            way(*inputs)
                else:
                    y = tensors(way(*leaves))
                    if dy is None:
                        dy = [torch.randn_like(t) if t.dim() else torch.ones_like(t) for t in y]
                        wide_leaves = [t.detach().requires_grad_(i in workload.grads) for i, t in enumerate(wide)]
                        y_expected = tensors((workload.exact or workload.torch)(*wide_leaves))
                        wide_learn = [wide_leaves[i] for i in workload.grads]
                        expected = torch.autograd.grad(y_expected, wide_learn, [t.float() for t in dy])
                        del y_expected, wide_learn
                        del wide_leaves
                    grads = [d.to(t.dtype) for d, t in zip(dy, y)]

                    def run(y=y, grads=grads):
                        return torch.autograd.grad(y, learn, grads, retain_graph=True)

                    result = run()
                error = 0.0 if random else off_by(result, expected)
                del result
                if error > 2e-2:
                    print(f"  {name} is wrong by {error:.1e}: {op} {case} {direction}", flush=True)
                else:
                    runs[name] = (run, error)
            except Exception as error:
                print(
                    f"  {name} failed: {op} {case} {direction}: {type(error).__name__}: {str(error)[:120]}", flush=True
                )
        del expected
        if not runs:
            continue
        times = clock.turns({name: run for name, (run, _) in runs.items()})
        for name, (median, p20, p80) in times.items():
            row = {"op": op, "case": case, "direction": direction, "provider": name, "ms": median, "p20": p20,
                   "p80": p80, "off_by": runs[name][1]}  # fmt: skip
            if flops:
                row["tflops"] = flops / median / 1e9
            else:
                row["gbps"] = traffic(shape) / median / 1e6
                row["of_copy"] = row["gbps"] / ceiling["copy_gbps"]
            yield row
        del runs


def compile_all(selected, kernel, directions, jobs):
    """Call the package's way of every case once, in `jobs` processes: Triton's cache on disk then has its kernels.

    Before this process touches the device, or its children could not.
    """
    cases = [(workload, shape) for workload in selected.values() for shape in workload.cases.values()]
    children = []
    for job in range(jobs):
        child = os.fork()
        if child:
            children.append(child)
            continue
        for workload, shape in cases[job::jobs]:
            try:
                inputs = workload.make(*shape)
                workload.ours(kernel, *inputs)
                if "backward" in directions and workload.grads:
                    leaves = [t.detach().requires_grad_(i in workload.grads) for i, t in enumerate(inputs)]
                    y = tensors(workload.ours(kernel, *leaves))
                    torch.autograd.grad(y, [leaves[i] for i in workload.grads], [torch.zeros_like(t) for t in y])
                torch.cuda.synchronize()
            except Exception:  # is said when it is measured
                pass
            torch.cuda.empty_cache()
        os._exit(0)
    for child in children:
        os.waitpid(child, 0)


def host(workload, kernel, wanted, calls=1000):
    """{provider: (microseconds a call without, with a graph for gradients)}"""
    inputs = workload.make(*workload.tiny)
    leaves = [t.detach().requires_grad_(i in workload.grads) for i, t in enumerate(inputs)]
    found = {}
    for name, way in ways(workload, kernel, [w for w in wanted if w != "compile"]).items():
        try:
            row = []
            for arguments in (inputs, leaves):
                best = []
                for _ in range(5):
                    way(*arguments)
                    torch.cuda.synchronize()
                    began = time.perf_counter()
                    for _ in range(calls // 5):
                        way(*arguments)
                    best.append((time.perf_counter() - began) / (calls // 5) * 1e6)
                    torch.cuda.synchronize()
                row.append(statistics.median(best))
            found[name] = tuple(row)
        except Exception as error:
            print(f"  {name} failed on the host: {type(error).__name__}: {str(error)[:100]}", flush=True)
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("variant", help="a built variant of the package, such as build/torch-cuda")
    parser.add_argument("--json", type=Path, help="where to write what was measured")
    parser.add_argument("--ops", nargs="*", help="of: " + ", ".join(WORKLOADS))
    parser.add_argument("--directions", nargs="*", default=["forward", "backward"])
    parser.add_argument(
        "--providers", nargs="*", default=["compile", "liger", "quack", "cudnn", "flash2"], help="beside torch itself"
    )
    parser.add_argument("--seconds", type=float, default=0.02, help="of measuring, for each way to do a case")
    parser.add_argument("--jobs", type=int, default=0, help="compile in so many processes first")
    parser.add_argument("--commit", help="of what is measured; else git is asked")
    parser.add_argument("--host", action="store_true", help="measure the host's share of a call too")
    options = parser.parse_args()
    unknown = set(options.ops or ()) - set(WORKLOADS)
    if unknown:
        parser.error(f"no such ops: {', '.join(sorted(unknown))}")
    if not torch.cuda.device_count():  # asked without touching the device
        sys.exit("sweep.py measures on a GPU, and torch sees none")
    import triton

    kernel, began = load(options.variant), time.perf_counter()
    selected = {op: WORKLOADS[op] for op in options.ops or WORKLOADS}
    if options.jobs:
        compile_all(selected, kernel, options.directions, options.jobs)
        print(f"compiled in {time.perf_counter() - began:.0f} s", flush=True)
    clock = Clock(options.seconds)
    ceiling = ceilings(clock)
    asked = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    commit = options.commit or asked.stdout.strip()
    record = {
        "device": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__,
        "commit": commit, "date": datetime.date.today().isoformat(), "ceilings": ceiling, "rows": [], "host": {},
    }  # fmt: skip
    print(f"{record['device']}: copy {ceiling['copy_gbps']:.0f} GB/s, product {ceiling['matmul_tflops']:.0f} TFLOP/s")
    for number, (op, workload) in enumerate(selected.items(), 1):
        for case, shape in workload.cases.items():
            torch.cuda.empty_cache()
            rows = measure(op, case, shape, workload, kernel, clock, options.directions, options.providers, ceiling)
            by_direction = {}
            for row in rows:
                record["rows"].append(row)
                value = f"{row['tflops']:.0f}" if "tflops" in row else f"{row['of_copy']:.2f}"
                by_direction.setdefault(row["direction"], []).append(f"{row['provider']} {value}")
            for direction, values in by_direction.items():
                print(f"[{number}/{len(selected)}] {op} {case} {direction}: {', '.join(values)}", flush=True)
        if options.host:
            record["host"][op] = host(workload, kernel, options.providers)
            print(
                f"  host, us: { ({k: tuple(round(v, 1) for v in t) for k, t in record['host'][op].items()}) }",
                flush=True,
            )
        if options.json:
            options.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
