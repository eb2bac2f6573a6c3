"""Measure the package's ops on a GPU beside PyTorch, torch.compile and every peer that is installed.

    python benchmarks/sweep.py build/torch-cuda --json results.json [--ops rms_norm softmax] [--host]

Every way is held against PyTorch in float32 before it is timed; one that is wrong gets no time. All ways to do one case
are timed in turns, each with a cold L2 cache, by events on the device: median, and the 20th and 80th percentile. Among
them are the yardsticks: torch's copy of as many bytes, and where an op writes next to nothing a read of them. Those of
the whole run are a copy of 2^27 elements and a product by the vendor's library. Of each way it also says the memory
that a call takes beside its inputs, and of each op the seconds of a first call with nothing compiled. `--first` adds
those of a first call with warm caches on disk, `--host` the host's share of a call, on inputs so small that there is
nothing else.

Each op is a process: all compile at once, then each measures alone. What one of them breaks, the others do not see, and
the JSON has what was measured so far. `--add` keeps what an earlier run measured and this one does not.
"""

import argparse
import contextlib
import datetime
import functools
import gc
import importlib.metadata
import importlib.util
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import triton
import triton.language as tl
import turns
from workloads import WORKLOADS

OURS = "portable-kernels"
DIRECTIONS = ("forward", "backward", "both")
# One of each kind: whose first calls from caches `--first` measures, where it names none.
FIRST = (
    "softmax", "topk_softmax", "rms_norm", "layer_norm", "group_norm", "gelu", "swiglu", "dropout",
    "apply_rotary_pos_emb", "cross_entropy", "reductions.sum of rows", "linear", "scaled_matmul, accurate",
    "grouped_mm", "attention, causal",
)  # fmt: skip
CALLS = 1000  # of which the host's share is the mean, five times
WARM = 3  # calls before the first that is measured
CYCLES = 1.8e9  # of the device, in a second
READ_BLOCK = 4096  # numbers of 32 bits that a program of the yardstick reads
PEERS = {"liger": "liger-kernel", "quack": "quack-kernels", "gems": "flag-gems", "fla": "fla-core"}  # as packages
PROVIDERS = ("compile", "liger", "quack", "gems", "fla", "cudnn", "flash2")


def load(folder):
    spec = importlib.util.spec_from_file_location(
        "portable_kernels_measured", Path(folder) / "__init__.py", submodule_search_locations=[str(folder)]
    )
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    sys.modules[f"{spec.name}._replay"]._SEEN = 0  # what is measured is a call that has come often
    return module


class Clock:
    """Times functions in turns. Before each call the L2 cache is overwritten.

    The device then sleeps until the host has surely launched what it measures, which takes a composition or a peer with
    wrappers of its own more than a millisecond: the host's share is measured apart.
    """

    def __init__(self, seconds):
        self.seconds = seconds
        self.cold = torch.empty(2**28, dtype=torch.int8, device="cuda")

    def once(self, function, sleep):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.cold.zero_()
        torch.cuda._sleep(sleep)
        start.record()
        function()
        end.record()
        return start, end

    def turns(self, functions):
        """{name: (median, p20, p80)} in milliseconds."""
        took, sleep = {name: [] for name in functions}, {}
        for name, function in functions.items():
            host = []
            for _ in range(WARM):
                began = time.perf_counter()
                function()
                host.append(time.perf_counter() - began)
            sleep[name] = max(1_600_000, int(2 * CYCLES * min(host)))  # the least is about 0.9 ms
        torch.cuda.synchronize()
        began = time.perf_counter()
        while time.perf_counter() - began < self.seconds * len(functions) or len(next(iter(took.values()))) < 7:
            events = {name: self.once(function, sleep[name]) for name, function in functions.items()}
            torch.cuda.synchronize()
            for name, (start, end) in events.items():
                took[name].append(start.elapsed_time(end))
        return {name: tuple(statistics.quantiles(ms, n=10)[i] for i in (4, 1, 7)) for name, ms in took.items()}


@triton.jit
def _read_kernel(x_ptr, sums_ptr, BLOCK: tl.constexpr):
    """Each program reads BLOCK numbers, and writes one."""
    pid = tl.program_id(0)
    x = tl.load(x_ptr + pid.to(tl.int64) * BLOCK + tl.arange(0, BLOCK))
    tl.store(sums_ptr + pid, tl.xor_sum(x, axis=0))


def read(numbers, sums):
    """The quickest of eight plain ways to read 2^27 to 2^30 bytes on an H200."""
    _read_kernel[(len(sums),)](numbers, sums, BLOCK=READ_BLOCK, num_warps=8)


def ceilings(clock):
    a, b = (torch.empty(2**27, dtype=torch.bfloat16, device="cuda").normal_() for _ in range(2))
    m = a[: 2**24].view(4096, 4096)
    found = clock.turns({"copy": lambda: b.copy_(a), "matmul": lambda: m @ m.t()})
    return {"copy_gbps": 4 * 2**27 / found["copy"][0] / 1e6, "matmul_tflops": 2 * 4096**3 / found["matmul"][0] / 1e9}


def ways(workload, kernel, wanted):
    found = {OURS: lambda *a: workload.ours(kernel, *a), "torch": workload.torch}
    for name, find in workload.peers.items():
        if name in wanted:
            try:
                found[name] = find()
            except Exception as error:  # a peer that is not installed, or not for this torch
                print(f"  {name} left out: {type(error).__name__}: {str(error)[:100]}", flush=True)
    if "compile" in wanted:
        found["torch.compile"] = torch.compile(workload.torch, dynamic=False)
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


def why(error):
    return f"{type(error).__name__}: {str(error).splitlines()[0][:120] if str(error) else ''}"


class Op:
    """One op: its ways, compiled, then measured."""

    def __init__(self, name, options):
        self.name, self.options = name, options
        cases = WORKLOADS[name].cases
        self.workload = WORKLOADS[name]._replace(cases={c: cases[c] for c in cases if c in (options.cases or cases)})
        self.kernel = load(options.variant)
        self.ways = ways(self.workload, self.kernel, options.providers)
        self.compiled = set()  # (way, case)
        torch._dynamo.config.recompile_limit = 1000
        torch._dynamo.config.accumulated_recompile_limit = 1000
        torch._functorch.config.donated_buffer = False  # a graph is kept, to go back through it many times

    def asked(self, direction):
        """Whether it is measured: bytes or products are known, and there is something to differentiate."""
        w = self.workload
        if w.flops:
            return direction == "forward" or bool(w.backward_flops)
        return bool(w.forward if direction == "forward" else w.backward)

    def leaves(self, inputs):
        return [t.detach().requires_grad_(i in self.workload.grads) for i, t in enumerate(inputs)]

    def call(self, way, direction, inputs):
        """Once, as it will be measured: for what it compiles."""
        if direction == "forward":
            with torch.no_grad():
                way(*inputs)
        else:
            leaves = self.leaves(inputs)
            y = tensors(way(*leaves))
            torch.autograd.grad(y, [leaves[i] for i in self.workload.grads], [torch.ones_like(t) for t in y])
        torch.cuda.synchronize()

    def first_call(self):
        """Seconds of the very first calls of the first case: {way: {direction: seconds}}."""
        inputs = self.workload.make(*next(iter(self.workload.cases.values())))
        m = torch.ones(64, 64, device="cuda")
        (m @ m).sum().item()  # the device has started
        took = {}
        for name in (OURS, "torch.compile"):
            for direction in DIRECTIONS[:2]:
                if name in self.ways and direction in self.options.directions and self.asked(direction):
                    began = time.perf_counter()
                    try:
                        self.call(self.ways[name], direction, inputs)
                        took.setdefault(name, {})[direction] = round(time.perf_counter() - began, 3)
                    except Exception as error:
                        print(f"  {name} failed at first: {self.name} {direction}: {why(error)}", flush=True)
        return took

    def compile(self, until):
        """Call every way of every case once, others than this package while there is time: torch.compile is last."""

        def late(*_):
            raise TimeoutError

        tune(1)
        signal.signal(signal.SIGALRM, late)
        for name, way in self.ways.items():
            for case, shape in self.workload.cases.items():
                limited, left = name not in (OURS, "torch"), until - time.time()
                if limited and left <= 0:
                    continue
                try:
                    signal.setitimer(signal.ITIMER_REAL, left if limited else 0)
                    inputs = self.workload.make(*shape)
                    for direction in DIRECTIONS[:2]:
                        if name != "torch" and direction in self.options.directions and self.asked(direction):
                            self.call(way, direction, inputs)
                except Exception:  # is said when it is measured
                    pass
                signal.setitimer(signal.ITIMER_REAL, 0)
                if not limited or time.time() < until:
                    self.compiled.add((name, case))
                inputs = None
                torch.cuda.empty_cache()

    def measure(self):
        tune(20)
        clock = Clock(self.options.seconds)
        for case, shape in self.workload.cases.items():
            torch.cuda.empty_cache()
            yield from self.measure_case(case, shape, clock)
        for name in self.ways:
            late = [case for case in self.workload.cases if (name, case) not in self.compiled]
            if late:
                print(f"  {name} left out, no time to compile: {self.name}, {', '.join(late)}", flush=True)
        if self.options.host:
            yield {"host": host(self.workload, self.ways)}

    def measure_case(self, case, shape, clock):
        workload, random = self.workload, self.name == "dropout"  # another mask for each: held against nothing
        torch.manual_seed(0)
        inputs = workload.make(*shape)
        leaves = self.leaves(inputs)
        learn = [leaves[i] for i in workload.grads]
        wide = [t.detach().float() if t.is_floating_point() else t for t in inputs]
        first = [t.clone() for t in inputs]
        exact = workload.exact or workload.torch
        for direction in DIRECTIONS:
            if direction not in self.options.directions or not self.asked(direction):
                continue
            runs, expected, y, dy = {}, None, None, None
            for name, way in self.ways.items():
                if (name, case) not in self.compiled:
                    continue
                if direction == "backward" and name in workload.early:
                    continue
                for t, value in zip(inputs, first):  # Liger's swiglu writes gradients over its inputs
                    t.data.copy_(value)
                try:
                    if direction == "forward":

                        def run(way=way):
                            with torch.no_grad():
                                return way(*inputs)

                        result = tensors(run())
                        if expected is None:
                            with torch.no_grad():
                                expected = tensors(exact(*wide))
                    else:
                        y = tensors(way(*leaves))
                        if dy is None:
                            dy = [torch.randn_like(t) if t.dim() else torch.ones_like(t) for t in y]
                        grads = [torch.empty_like(t).copy_(d) for d, t in zip(dy, y)]
                        if direction == "backward":

                            def run(y=y, grads=grads):
                                return torch.autograd.grad(y, learn, grads, retain_graph=True)

                        else:
                            y = None

                            def run(way=way, grads=grads):
                                return torch.autograd.grad(tensors(way(*leaves)), learn, grads)

                        result = run()
                        if expected is None:
                            wide_leaves = self.leaves(wide)
                            y_wide = tensors(exact(*wide_leaves))
                            expected = torch.autograd.grad(
                                y_wide, [wide_leaves[i] for i in workload.grads], [t.float() for t in dy]
                            )
                            y_wide = wide_leaves = None
                    error = 0.0 if random else off_by(result, expected)
                    result = None
                    if error > 2e-2:
                        print(f"  {name} is wrong by {error:.1e}: {self.name} {case} {direction}", flush=True)
                    else:
                        runs[name] = (run, error, peak(run))
                except Exception as error:
                    print(f"  {name} failed: {self.name} {case} {direction}: {why(error)}", flush=True)
            expected = None
            if not runs:
                continue
            marks = self.yardsticks(direction, shape, inputs[0].device)
            times = clock.turns({**{name: run for name, (run, _, _) in runs.items()}, **marks})
            marks = {name: times.pop(name)[0] for name in marks}
            for name, (median, p20, p80) in times.items():
                yield {
                    "op": self.name, "case": case, "shape": list(shape), "direction": direction, "provider": name,
                    "ms": median, "p20": p20, "p80": p80, "off_by": runs[name][1], "peak_mib": runs[name][2],
                    **self.speed(direction, shape, median), **{mark: ms / median for mark, ms in marks.items()},
                }  # fmt: skip
            runs = y = dy = None

    def yardsticks(self, direction, shape, device):
        """{share: a function that moves as many bytes as the op must}"""
        if self.workload.flops:
            return {}
        size = round(self.speed(direction, shape, 1e-6)["gbps"])
        source, target = (torch.zeros(size // 2, dtype=torch.int8, device=device) for _ in range(2))
        marks = {"of_copy": lambda: target.copy_(source)}
        if self.workload.reads and direction == "forward":
            sums = torch.empty(triton.cdiv(size, 4 * READ_BLOCK), dtype=torch.int32, device=device)
            numbers = sums.new_zeros(len(sums) * READ_BLOCK)
            marks["of_read"] = lambda: read(numbers, sums)
        return marks

    def speed(self, direction, shape, ms):
        w = self.workload
        parts = {"forward": (1, 0), "backward": (0, 1), "both": (1, 1)}[direction]
        if w.flops:
            return {"tflops": (parts[0] + parts[1] * w.backward_flops) * w.flops(shape) / ms / 1e9}
        return {"gbps": (parts[0] * w.forward(shape) + (parts[1] and w.backward(shape))) / ms / 1e6}


def tune(ms):
    """Peers that Triton tunes choose anew, in trials of so many milliseconds: a first time, while other processes run
    too, to compile what they choose from, and alone before they are measured. torch.compile goes by its first choice.
    """
    trial = functools.partial(triton.testing.do_bench, warmup=ms / 4, rep=ms)
    for found in gc.get_objects():
        if issubclass(type(found), triton.runtime.Autotuner):
            found.do_bench = trial
            found.cache = {}
            if hasattr(found, "benchmark_table_name"):  # FlagGems' own keep on disk what they measured
                found.benchmark_table_name += f"_{ms}"
        elif type(found).__name__ == "LibEntry":  # FlagGems keeps what its tuners chose
            for kept in found.kernel_cache:
                kept.clear()


def peak(run):
    """MiB that a call takes at its most, beside what was there before it."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def host(workload, found):
    """{provider: (microseconds a call without, with a graph for gradients)}"""
    inputs = workload.make(*workload.tiny)
    leaves = [t.detach().requires_grad_(i in workload.grads) for i, t in enumerate(inputs)]
    took = {}
    for name, way in found.items():
        if name == "torch.compile":
            continue
        try:
            row = []
            for arguments in (inputs, leaves):
                best = []
                for _ in range(5):
                    way(*arguments)
                    torch.cuda.synchronize()
                    began = time.perf_counter()
                    for _ in range(CALLS // 5):
                        way(*arguments)
                    best.append((time.perf_counter() - began) / (CALLS // 5) * 1e6)
                    torch.cuda.synchronize()
                row.append(statistics.median(best))
            took[name] = tuple(row)
        except Exception as error:
            print(f"  {name} failed on the host: {why(error)}", flush=True)
    return took


def child(kind, name, options):
    """One op, in a process of its own; or the ceilings; or the first calls of an op, from the caches on disk."""

    def prepare():
        if kind == "ceilings":
            return lambda: [ceilings(Clock(0.3))], {}
        op = Op(name, options)
        first = op.first_call()
        if kind == "warm":
            return lambda: [], first
        op.compile(options.compile_until)
        return op.measure, first

    turns.take_turn(prepare)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("variant", help="a built variant of the package, such as build/torch-cuda")
    parser.add_argument("--json", type=Path, help="where to write what was measured")
    parser.add_argument("--ops", nargs="*", help="of: " + ", ".join(WORKLOADS))
    parser.add_argument("--cases", nargs="*", help="of those ops, by their names; else all")
    parser.add_argument("--directions", nargs="*", default=list(DIRECTIONS), choices=DIRECTIONS)
    parser.add_argument("--providers", nargs="*", default=list(PROVIDERS), help="beside torch itself")
    parser.add_argument("--seconds", type=float, default=0.02, help="of measuring, for each way to do a case")
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 2) - 1), help="processes that compile")
    parser.add_argument("--limit", type=float, default=3600, help="seconds in all; what there is no time for is named")
    parser.add_argument("--add", type=Path, help="JSON of an earlier run, whose rows stay where none is measured anew")
    parser.add_argument("--commit", help="of what is measured; else git is asked")
    parser.add_argument("--host", action="store_true", help="measure the host's share of a call too")
    parser.add_argument("--first", nargs="*", help="ops to measure first calls of from the caches on disk too")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--compile-until", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        return child(*options.child, options)
    unknown = set(options.ops or ()) - set(WORKLOADS)
    if unknown:
        parser.error(f"no such ops: {', '.join(sorted(unknown))}")
    unknown = set(options.cases or ()) - {case for op in options.ops or WORKLOADS for case in WORKLOADS[op].cases}
    if unknown:
        parser.error(f"no such cases: {', '.join(sorted(unknown))}")
    if not torch.cuda.device_count():  # asked without touching the device
        sys.exit("sweep.py measures on a GPU, and torch sees none")
    return sweep(options)


def write(record, path):
    """A line a row, in five digits."""
    if path is None:
        return

    def rounded(row):
        return {k: float(f"{v:.5g}") if isinstance(v, float) else v for k, v in row.items()}

    rows = ",\n".join(json.dumps(rounded(row)) for row in record["rows"])
    path.write_text(json.dumps({**record, "rows": []}, indent=1).replace('"rows": []', f'"rows": [\n{rows}\n]') + "\n")


def versions():
    """{peer: version} of those that are installed."""
    found = {}
    for name, package in PEERS.items():
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(package)
    return found


def place(row):
    """Where a row belongs: in the order of the workloads' ops, cases and directions."""
    cases = list(WORKLOADS[row["op"]].cases)
    return list(WORKLOADS).index(row["op"]), cases.index(row["case"]), DIRECTIONS.index(row["direction"])


def added(earlier, record, providers):
    """An earlier run's record with this one's rows in place of its own; those that stay say their commit, if another.

    A case that is measured anew loses the rows of all `providers` that were asked for, measured or not.
    """
    asked = {OURS, "torch", *("torch.compile" if name == "compile" else name for name in providers)}
    anew = {(r["op"], r["case"], r["direction"]) for r in record["rows"]}
    then = {} if earlier["commit"] == record["commit"] else {"commit": earlier["commit"]}
    stay = [
        {**then, **row}
        for row in earlier["rows"]
        if row["provider"] not in asked or (row["op"], row["case"], row["direction"]) not in anew
    ]
    return {
        **record, "rows": sorted(record["rows"] + stay, key=place), "host": {**earlier["host"], **record["host"]},
        "host_commit": record["commit"] if record["host"] else earlier.get("host_commit", earlier["commit"]),
        "first_call": {**earlier["first_call"], **record["first_call"]},
        "ceilings": record["ceilings"] or earlier["ceilings"],
        "peers": {**earlier.get("peers", {}), **record["peers"]},
    }  # fmt: skip


def sweep(options):
    began, begun = time.monotonic(), time.time()
    names = [op for op in WORKLOADS if op in (options.ops or WORKLOADS)]
    asked = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    record = {
        "device": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__,
        "commit": options.commit or asked.stdout.strip(), "date": datetime.date.today().isoformat(),
        "peers": versions(), "ceilings": {}, "rows": [], "host": {}, "first_call": {}, "failed": [],
    }  # fmt: skip

    def say(text):
        print(f"{time.monotonic() - began:4.0f} s  {text}", flush=True)

    def heard(worker, line):
        op = worker.name
        if worker.kind == "ceilings":
            if "row" in line:
                record["ceilings"] = line["row"]
                say("copy {copy_gbps:.0f} GB/s, product {matmul_tflops:.0f} TFLOP/s".format(**line["row"]))
        elif "ready" in line:
            temperature = "warm" if worker.kind == "warm" else "cold"
            for way, took in line["ready"].items():
                record["first_call"].setdefault(op, {}).setdefault(way, {})[temperature] = took
            say(f"{op}: compiled" if worker.kind == "op" else f"{op}: called again from the caches")
        elif "row" in line and "host" in line["row"]:
            record["host"][op] = line["row"]["host"]
            say(f"  host, us: { ({k: tuple(round(v, 1) for v in t) for k, t in record['host'][op].items()}) }")
        elif "row" in line:
            row = line["row"]
            worker.rows.append(row)
        elif "done" in line and worker.kind == "op":
            keep(worker)

    earlier = json.loads(options.add.read_text()) if options.add else None

    def save():
        write(added(earlier, record, options.providers) if earlier else record, options.json)

    def keep(worker):
        cases = itertools.groupby(worker.rows, key=lambda r: (r["case"], r["direction"]))
        for (case, direction), rows in cases:
            found = ", ".join(f"{r['provider']} {r.get('tflops') or r.get('of_copy', r['gbps']):.3g}" for r in rows)
            say(f"{worker.name} {case} {direction}: {found}")
        for text in worker.errors:
            if text.startswith("  "):
                print(text.rstrip(), flush=True)
        record["rows"] += worker.rows
        save()

    def lost(worker, reason):
        record["failed"].append(f"{worker.kind} {worker.name}: {reason}")
        say(f"{worker.name} LOST: {reason}\n{''.join(worker.errors[-6:])}")
        keep(worker)

    with tempfile.TemporaryDirectory() as caches:
        environment = {
            "TRITON_CACHE_DIR": f"{caches}/triton", "TORCHINDUCTOR_CACHE_DIR": f"{caches}/inductor",
            "TORCHINDUCTOR_COMPILE_THREADS": "1", "FLA_CACHE_RESULTS": "0", "FLAGGEMS_CACHE_DIR": f"{caches}/gems",
            "QUACK_CACHE_DIR": f"{caches}/quack",
        }  # fmt: skip

        def workers(kind, of):
            passed = [*sys.argv[1:], "--compile-until", str(begun + 0.55 * options.limit)]
            made = []
            for name in of:
                worker = turns.Worker(name, [sys.executable, __file__, *passed, "--child", kind, name], environment)
                worker.kind, worker.rows = kind, []
                made.append(worker)
            return made

        done_by = began + options.limit
        # Those with most cases first: they compile longest.
        ops = workers("op", sorted(names, key=lambda n: -len(WORKLOADS[n].cases)))
        turns.run(
            workers("ceilings", ["ceilings"]) + ops, heard, lost, jobs=options.jobs,
            ready_by=began + 0.65 * options.limit, done_by=done_by, patience=120,
        )  # fmt: skip
        if options.first is not None:
            again = [w.name for w in ops if w.state == "done" and w.name in (options.first or FIRST)]
            turns.run(
                workers("warm", again), heard, lost, jobs=options.jobs, ready_by=done_by, done_by=done_by, patience=10
            )
    record["rows"].sort(key=place)
    save()
    say(f"{len(record['rows'])} rows of {len(names)} ops; {len(record['failed'])} processes lost")
    return 1 if record["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
