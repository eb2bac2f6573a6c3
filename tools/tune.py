#!/usr/bin/env python3
"""Search tile plans for matrix products on the GPU at hand, and write the quickest to configs/matmul.json.

    python tools/tune.py 4096x4096x4096 16x4096x14336 [--dtype bfloat16] [--activation gelu | --gated] [--write]

Shapes are MxNxK of x (M, K) @ weight.T (K, N). Plans are compiled in parallel, then held against torch, then timed in
turns with torch's product (and the activation after it), each with a cold L2 cache. With --write, the quickest of each
shape becomes a row of the table for this device, with what was measured; "vendor" where torch was quicker.
"""

import argparse
import contextlib
import importlib
import itertools
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F

ROOT = Path(__file__).resolve().parents[1]
TABLE = ROOT / "torch-ext" / "portable_kernels" / "configs" / "matmul.json"
ACTIVATIONS = {"gelu": F.gelu, "silu": F.silu, "relu": F.relu}


def load():
    """_matmul, _device and _tuning of the package as it stands, under a name of their own."""
    folder = Path(tempfile.mkdtemp()) / "tuned"
    folder.symlink_to(ROOT / "torch-ext" / "portable_kernels")
    sys.path.insert(0, str(folder.parent))
    ops = type(sys)("tuned._ops")  # as the build writes it
    ops.ops, ops.add_op_namespace_prefix = torch.ops.tuned, lambda name: f"tuned::{name}"
    sys.modules["tuned._ops"] = ops
    return [importlib.import_module(f"tuned.{name}") for name in ("_matmul", "_device", "_tuning")]


def candidates(Plan, M, N, K, gated, multiprocessors):
    """Plans worth a try for these sizes, before it is asked what fits."""
    if min(M, N) <= 4:
        for n, k, warps, stages in itertools.product((2, 4, 8, 16, 64), (64, 256, 512, 1024, 2048), (2, 4, 8), (1, 3)):
            if 16 <= n * k // (32 * warps) <= 64:
                yield Plan("rows", 16, n, k, num_warps=warps, num_stages=stages)
    rows = [m for m in (16, 32, 64, 128, 256) if m <= max(16, 2 * M)]
    for m, n, k in itertools.product(rows, (16, 32, 64, 128, 256), (32, 64, 128, 256)):
        warps = 8 if m * n >= 16384 else 4
        if not 512 <= m * n <= 32768 or (m + n) * k > 32768:
            continue
        tiles = -(-M // m) * -(-N // n)
        for split in (1, 2, 3, 4, 8):
            if split > 1 and (tiles * split > 2 * multiprocessors or K // k < 4 * split):
                continue
            for stages in (2, 3, 4, 5, 6):
                yield Plan("pointers", m, n, k, SPLIT_K=split, num_warps=warps, num_stages=stages)
                for parts, flat in ((1, True), (2, True), (4, True), (2, False)):
                    if n // parts >= 16 and flat != gated:
                        most = max(1, 227328 // ((m + n * (2 if gated else 1)) * k * 2 * stages + m * n // parts * 2))
                        for per in {1, min(most, 3)}:
                            yield Plan(
                                "descriptors", m, n, k, SPLIT_K=split, SUBTILES=parts, PER_SM=per, FLATTEN=flat,
                                num_warps=warps, num_stages=stages,
                            )  # fmt: skip


def compile_all(matmul, device_module, calls, processes):
    """Fill Triton's cache on disk in children; this process has not touched the GPU yet."""

    def compile_only(kernel, grid, device, args, **options):
        kernel.warmup(*args, grid=grid, **device_module.FUSED, **options)

    children = []
    for i in range(processes):
        children.append(os.fork())
        if children[-1] == 0:
            matmul.launch = compile_only
            for call in calls[i::processes]:
                with contextlib.suppress(Exception):  # it is tried again, and reported, below
                    call()
            os._exit(0)
    for child in children:
        os.waitpid(child, 0)


class Clock:
    """Times functions in turns, each with a cold L2 cache; the device sleeps first, so that the host runs ahead."""

    def __init__(self):
        self.cold = torch.empty(2**28, dtype=torch.int8, device="cuda")

    def once(self, function):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.cold.zero_()
        torch.cuda._sleep(400_000)
        start.record()
        function()
        end.record()
        return start, end

    def turns(self, functions, rounds):
        events = {name: [] for name in functions}
        for _, (name, function) in itertools.product(range(rounds), functions.items()):
            events[name].append(self.once(function))
        torch.cuda.synchronize()
        return {name: statistics.median(a.elapsed_time(b) for a, b in pairs) * 1e3 for name, pairs in events.items()}


def tensors(shape, dtype, gated, make):
    M, N, K = shape
    options = {"device": "cuda", "dtype": dtype}
    return make(M, K, **options), make(N, K, **options), make(N, K, **options) if gated else None, make(N, **options)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shapes", nargs="+", help="MxNxK")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--activation", choices=sorted(ACTIVATIONS))
    parser.add_argument("--gated", action="store_true", help="two products, silu of one times the other")
    parser.add_argument("--limit", type=int, default=200, help="plans tried for a shape, spread over all that fit")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    shapes = [tuple(map(int, shape.split("x"))) for shape in arguments.shapes]
    dtype, gated = getattr(torch, arguments.dtype), arguments.gated
    matmul, device_module, tuning = load()
    name = "silu" if gated else arguments.activation
    act = ACTIVATIONS.get(name, lambda x: x)
    how = matmul.Product(name, 1.0, 0.0)

    def ours(x, w, w2, bias, plan):
        return matmul.product(
            x, w.T, None if w2 is None else w2.T, bias if name and not gated else None, None, how, plan
        )[0]

    def torchs(x, w, w2, bias):
        return act(F.linear(x, w)) * F.linear(x, w2) if gated else act(F.linear(x, w, bias if name else None))

    def plans(shape):
        M, N, K = shape
        ask = dict(matmul.sizes(facts, M, N, K, 1, gated), aligned=K % 8 == 0, pads=True, vendor=False)
        ask.update(out_bytes=dtype.itemsize, turned=True)
        found = [
            plan for plan in candidates(matmul.Plan, M, N, K, gated, facts.multiprocessors)
            if matmul.fits(plan, facts, dtype, **ask)
        ]  # fmt: skip
        return found[:: -(-len(found) // arguments.limit)]

    # The facts are asked for in a child: a process that has touched the GPU cannot be forked for the compilers.
    reader, writer = os.pipe()
    if os.fork() == 0:
        os.write(writer, json.dumps(device_module.facts(torch.device("cuda", 0))).encode())
        os._exit(0)
    os.wait()
    facts = device_module.Device(*json.loads(os.read(reader, 65536)))
    todo = [(shape, plan) for shape in shapes for plan in plans(shape)]
    print(f"{facts.name}: {len(todo)} plans")
    compile_all(
        matmul,
        device_module,
        [lambda s=s, p=p: ours(*tensors(s, dtype, gated, torch.empty), p) for s, p in todo],
        arguments.processes,
    )
    torch.manual_seed(0)
    clock, rows = Clock(), []
    for shape in shapes:
        given = tensors(shape, dtype, gated, torch.randn)
        expected = torchs(*given).float()
        functions = {"torch": lambda g=given: torchs(*g)}
        for plan in plans(shape):
            with contextlib.suppress(Exception):
                error = (ours(*given, plan).float() - expected).norm() / expected.norm()
                if error < 8 * torch.finfo(dtype).eps:
                    functions[plan] = lambda g=given, p=plan: ours(*g, p)
                else:
                    print(f"WRONG by {float(error):.2g}: {plan}")
        first = clock.turns(functions, 3)
        best = sorted((plan for plan in first if plan != "torch"), key=first.__getitem__)[:8]
        took = clock.turns({key: functions[key] for key in ("torch", *best)}, 20)
        quickest = min(best, key=took.__getitem__)
        print("x".join(map(str, shape)), f"torch {took['torch']:.1f} us", f"{len(functions) - 1} plans right")
        for plan in sorted(best, key=took.__getitem__)[:4]:
            print(f"    {took['torch'] / took[plan]:.3f} of torch's speed, {took[plan]:.1f} us: {plan}")
        M, N, K = shape
        changed = {k: v for k, v in quickest._asdict().items() if v != matmul.Plan._field_defaults.get(k)}
        lost = took[quickest] > took["torch"] and not name
        rows.append({
            "when": {
                "device": facts.name, "dtype": [arguments.dtype], "gated": gated, "act": name is not None,
                "M": [M, M], "N": [N, N], "K": [K, K],
            },
            "plan": {"kind": "vendor"} if lost else changed,
            "measured": {
                "us": round(took[quickest], 1), "torch_us": round(took["torch"], 1), "activation": name,
                "torch": torch.__version__, "triton": matmul.triton.__version__,
            },
        })  # fmt: skip
    if arguments.write:
        same = [row["when"] for row in rows]
        kept = [row for row in json.loads(TABLE.read_text()) if row["when"] not in same]
        TABLE.write_text("[\n" + ",\n".join("  " + json.dumps(row) for row in rows + kept) + "\n]\n")
        print(f"wrote {len(rows)} rows to {TABLE}")


if __name__ == "__main__":
    main()
