#!/usr/bin/env python3
"""Compile every kernel that the package launches for GPUs that are not there, and read what came out.

    python tools/portability.py                        the whole matrix, into docs/portability.md
    python tools/portability.py --archs sm90 gfx942 --ops softmax linear      a part of it, printed
    python tools/portability.py --json found.jsonl     what a run before compiled is not compiled again
    PYTHONPATH=... python tools/portability.py --archs sm90 --dtypes bfloat16 --json found.jsonl   by another Triton
    PYTHONPATH=... python tools/portability.py --archs xpu --dtypes bfloat16 --json found.jsonl    by triton-xpu 3.3
    python tools/portability.py --json found.jsonl --page                     the page, from there alone

For each architecture the ops run on tensors without memory, at the sizes of benchmarks/workloads.py, with that device's
facts; what they would launch is compiled by Triton instead. A kernel passes if it compiles, fits the device's shared
memory and threads, and multiplies tiles of 16 bits with matrix instructions. Spilled registers are listed.
"""

import argparse
import collections
import contextlib
import hashlib
import importlib.util
import io
import itertools
import json
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
import types
from multiprocessing.connection import wait
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "benchmarks")]

# backend, what Triton calls it, threads of a warp; then the facts: multiprocessors, shared memory, descriptors, tf32
ARCHS = {
    "sm75": ("cuda", 75, 32, 40, 65536, False, False),
    "sm80": ("cuda", 80, 32, 108, 166912, False, True),
    "sm86": ("cuda", 86, 32, 84, 101376, False, True),
    "sm89": ("cuda", 89, 32, 128, 101376, False, True),
    "sm90": ("cuda", 90, 32, 132, 232448, True, True),
    "sm100": ("cuda", 100, 32, 148, 232448, True, True),
    "sm120": ("cuda", 120, 32, 170, 101376, True, True),
    "gfx90a": ("hip", "gfx90a", 64, 104, 65536, False, False),
    "gfx942": ("hip", "gfx942", 64, 304, 65536, False, False),
    "gfx950": ("hip", "gfx950", 64, 256, 163840, False, False),
    "gfx1100": ("hip", "gfx1100", 32, 96, 65536, False, False),
    "gfx1201": ("hip", "gfx1201", 32, 64, 65536, False, False),
}
# A Data Center GPU Max 1550, for the package `triton-xpu`: an older Triton, that alone has Intel's backend.
MAX_1550 = {
    "gpu_eu_count": 512, "gpu_subslice_count": 64, "max_work_group_size": 1024, "sub_group_sizes": [16, 32],
    "has_fp64": True, "has_bfloat16_conversions": True, "has_subgroup_matrix_multiply_accumulate": True,
    "has_subgroup_matrix_multiply_accumulate_tensor_float32": True, "has_subgroup_2d_block_io": True,
}  # fmt: skip
TARGETS = {**ARCHS, "xpu": ("xpu", MAX_1550, 32, 64, 131072, False, True)}


class Driver:
    """What Triton asks of a device in order to compile."""

    def __init__(self, target):
        self.target = target

    def get_current_target(self):
        return self.target

    def get_current_device(self):
        return 0

    def get_current_stream(self, device=0):
        return 0

    def get_active_torch_device(self):
        import torch

        return torch.device("cpu")

    def map_python_to_cpp_type(self, kind):
        return kind


def without_sycl():
    """Lets triton-xpu compile where there is no Intel driver, whose name for the device it asks a program in C."""
    import triton

    if not hasattr(triton, "knobs"):  # since 3.4
        triton.knobs = types.SimpleNamespace(runtime=types.SimpleNamespace(interpret=False))
    intel = getattr(triton.backends, "backends", {}).get("intel")
    if intel:
        stand_in = types.SimpleNamespace(parse_device_arch=lambda _: "pvc")
        intel.compiler.__init__.__globals__["compile_module_from_src"] = lambda *_: stand_in


def load_package():
    """The package as it is in the working tree, with the file that a build adds."""
    from build_local import build

    without_sycl()

    with contextlib.redirect_stdout(io.StringIO()):
        folder = build(ROOT, tempfile.mkdtemp(prefix="portability-")) / "torch-cuda"
    spec = importlib.util.spec_from_file_location(
        "portable_kernels_compiled", folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def pretend(device, launch):
    """Make every module of the package see this device, and launch by `launch`."""
    for name, module in list(sys.modules.items()):
        if name.startswith("portable_kernels_compiled"):
            for attribute, value in (
                ("launch", launch), ("facts", lambda _: device), ("runs_kernels", lambda _: True),
                ("use_kernel", lambda _: True), ("is_plain", lambda _: True),
            ):  # fmt: skip
                if hasattr(module, attribute) and not (attribute == "facts" and name.endswith("._device")):
                    setattr(module, attribute, value)


def spills(assembly, arch):
    """(registers, bytes or registers spilled) of a kernel."""
    if arch == "xpu":  # SPIR-V has none yet
        return 0, 0
    if arch.startswith("gfx"):
        found = [re.findall(rf"\.{what}:\s+(\d+)", assembly) for what in ("vgpr_count", "vgpr_spill_count")]
        return tuple(int(f[-1]) if f else 0 for f in found)
    from triton.backends.nvidia.compiler import get_ptxas

    number = int(arch[2:])
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(assembly)
        file.flush()
        command = [get_ptxas(number).path, "-v", "--gpu-name", f"sm_{number}{'a' * (number >= 90)}", file.name]
        said = subprocess.run([*command, "-o", os.devnull], capture_output=True, text=True, check=True).stderr
    used, spilled = re.findall(r"Used (\d+) registers", said), re.findall(r"(\d+) bytes spill stores", said)
    return int(used[-1]), int(spilled[-1])


def widest(assembly):
    """Bits of the widest load or store of global memory. Not of LLVM's code for Intel, which a driver compiles."""
    if "spir64" in assembly:
        return 128
    bits = [int(v) * int(b) for v, b in re.findall(r"(?:ld|st)\.global[\w.:]*?\.v(\d)\.b(\d+)", assembly)]
    bits += [8 * int(n, 0) for n in re.findall(r"cp\.async\.c[ag]\.shared\.global[^;]*?, (0x\w+|\d+)", assembly)]
    bits += [32 * int(n) for n in re.findall(r"(?:global|buffer)_(?:load|store)_dwordx(\d)", assembly)]
    bits += [int(n) for n in re.findall(r"(?:global|buffer)_(?:load|store)_b(\d+)", assembly)]
    return 128 if "cp.async.bulk" in assembly else max(bits, default=32)


MATRIX = re.compile(r"wgmma|mma\.sync|tcgen05\.mma|v_mfma|v_wmma|matrix_mad")


def compile_for(kernel, arch, op, dtype):
    """One record a kernel that the op launches on this architecture."""
    import torch
    import triton
    import workloads
    from triton.backends.compiler import GPUTarget
    from triton.runtime.errors import OutOfResources

    backend, name, warp, multiprocessors, shared_memory, descriptors, tf32 = TARGETS[arch]
    triton.runtime.driver.set_active(Driver(GPUTarget(backend, name, warp)))
    module = sys.modules["portable_kernels_compiled._device"]
    early = descriptors
    device = module.Device(multiprocessors, 1024 // warp, shared_memory, arch, arch, descriptors, tf32, early)
    records, seen, case = [], set(), ""

    def launch(jitted, grid, _, args, **options):
        compiled = jitted.warmup(*args, grid=grid, **module.FUSED, **options)
        if compiled.metadata.shared > shared_memory:  # as a launch would: the next plan is taken
            raise OutOfResources(compiled.metadata.shared, shared_memory, "shared memory")
        if compiled.hash in seen:
            return
        assembly = next(compiled.asm[kind] for kind in ("ptx", "amdgcn", "llir") if kind in compiled.asm)
        registers, spilled = spills(assembly, arch)
        shared, warps = compiled.metadata.shared, compiled.metadata.num_warps
        problems = []
        if warps * warp > 1024:
            problems.append(f"{warps} warps of {warp} threads")
        small = any(getattr(a, "dtype", None) in (torch.float16, torch.bfloat16) for a in args)
        if small and arch != "sm75" and "dot(" in jitted.src and not MATRIX.search(assembly):
            problems.append("no matrix instructions")
        seen.add(compiled.hash)
        records.append(
            {"op": op, "case": case, "dtype": dtype, "kernel": jitted.__name__, "hash": compiled.hash[:16],
             "shared": shared, "warps": warps, "registers": registers, "spilled": spilled, "bits": widest(assembly),
             "problems": problems}
        )  # fmt: skip

    pretend(device, launch)
    workloads.DEVICE, workloads.DTYPE = "meta", getattr(torch, dtype)
    workload = workloads.WORKLOADS[op]
    for case, shape in workload.cases.items():
        try:
            leaves = [t.requires_grad_(i in workload.grads) for i, t in enumerate(workload.make(*shape))]
            y = workload.ours(kernel, *leaves)
            y = [t for t in (y if isinstance(y, tuple) else (y,)) if t.requires_grad]
            if y and (workload.backward or workload.backward_flops):
                torch.autograd.grad(y, [leaves[i] for i in workload.grads], [torch.empty_like(t) for t in y])
        except Exception as error:
            while error.__cause__:  # Triton names the line of each kernel that it was called from
                error = error.__cause__
            said = f"{type(error).__name__}: {' '.join(str(error).split())[-200:]}"
            records.append({"op": op, "case": case, "dtype": dtype, "kernel": "", "problems": [said]})
    return records


def in_child(to, kernel, *task):
    to.send(compile_for(kernel, *task))


def compile_all(tasks, jobs, keep):
    """Calls keep(task, records) as each ends, of processes forked from this one."""
    kernel = load_package()
    # What each would import and read anew, for two seconds: torch's formulas of tensors without memory, Triton's files.
    import torch._dynamo  # noqa: F401
    import workloads  # noqa: F401

    with contextlib.suppress(ImportError):
        from triton.runtime.cache import triton_key

        triton_key()

    fork, waiting, running = multiprocessing.get_context("fork"), list(tasks), {}
    while waiting or running:
        while waiting and len(running) < jobs:
            task = waiting.pop()
            found, to = fork.Pipe(duplex=False)
            process = fork.Process(target=in_child, args=(to, kernel, *task))
            process.start()
            to.close()
            running[found] = task, process
        for found in wait(list(running)):
            task, process = running.pop(found)
            try:
                records = found.recv()
            except EOFError:
                process.join()
                sys.exit(f"{' '.join(task)}: the compiling process ended with {process.exitcode}")
            process.join()
            keep(task, records)


def merged(found, archs):
    """{arch: records}: a kernel counts once, at the first op that launches it."""
    by_arch = {}
    for arch in archs:
        seen = set()
        by_arch[arch] = [
            r for task, records in found.items() if task[0] == arch for r in records
            if not r["kernel"] or not (r["hash"] in seen or seen.add(r["hash"]))
        ]  # fmt: skip
        if not by_arch[arch]:
            sys.exit(f"{arch}: nothing was launched")
    return by_arch


def summaries(others):
    """A line for each Triton beside the page's own, and what it does not compile."""
    found = []
    for version, tasks in others.items():
        archs, dtypes = ({task[i]: None for task in tasks} for i in (0, 2))
        commits = {line["commit"]: None for line in tasks.values()}
        by_arch = merged({task: line["records"] for task, line in tasks.items()}, archs)
        records = [r for some in by_arch.values() for r in some]
        bad = [r for r in records if r["problems"]]
        found.append(
            f"- Triton {version}, commit {', '.join(commits)}, {', '.join(archs)}, {', '.join(dtypes)}: "
            f"{len(records) - len(bad)} kernels compile and fit, {len(bad)} do not"
        )
        reasons = {}
        for r in bad:
            reasons.setdefault("; ".join(r["problems"]), {})[f"`{r['op']}`"] = None
        found += [f"  - {reason}: {', '.join(ops)}" for reason, ops in reasons.items()]
    return found


def page(found, version, commits, others):
    ops = list(dict.fromkeys(r["op"] for records in found.values() for r in records))
    lines = []
    for op in ops:
        cells = []
        for records in found.values():
            mine = [r for r in records if r["op"] == op]
            bad, spilled = sum(bool(r["problems"]) for r in mine), max((r.get("spilled", 0) for r in mine), default=0)
            text = f"{len(mine) - bad}" + (f", {bad} fail" if bad else "") + (f", spills {spilled}" if spilled else "")
            cells.append(text if mine else "")
        lines.append(f"| `{op}` | " + " | ".join(cells) + " |")
    problems = [
        f"- {arch}, `{r['op']}`, {r['case']}, {r['dtype']}, {r['kernel'] or 'no kernel'}: {'; '.join(r['problems'])}"
        for arch, records in found.items()
        for r in records
        if r["problems"]
    ]
    spilled, narrow = {}, {}
    for arch, records in found.items():
        for r in records:
            if r.get("spilled"):
                mine = spilled.setdefault(r["kernel"], {})
                mine[arch] = max(mine.get(arch, 0), r["spilled"])
            if r.get("bits", 128) < 128:
                narrow.setdefault((r["kernel"], r["op"]), {}).setdefault(r["bits"], {})[arch] = None
    spilled = [f"- `{k}`: " + ", ".join(f"{a} {n}" for a, n in by.items()) for k, by in sorted(spilled.items())]
    narrow = [
        f"- `{kernel}` of `{op}`: "
        + "; ".join(
            f"{bits} on {'all' if len(archs) == len(found) else ', '.join(archs)}" for bits, archs in by.items()
        )
        for (kernel, op), by in sorted(narrow.items())
    ]
    nothing, at = "None.", f" at commit {', '.join(sorted(commits))}" if commits else ""
    return f"""# Portability

Written by `python tools/portability.py`, whose docstring says how, with Triton {version}{at}: no GPU was there.
Numbers are of kernels that compile and fit; `spills` is the most that one of them spills (bytes on NVIDIA, registers on
AMD). sm75 has no bfloat16, and is compiled for float16 in its place; Triton uses none of its matrix instructions. A
kernel of two ops counts once. Intel's backend is in the package `triton-xpu` alone, an older Triton: see the end.

| op | {" | ".join(found)} |
|---|{"---|" * len(found)}
{chr(10).join(lines)}

## What does not compile, or does not fit

{chr(10).join(problems) or nothing}

## What spills

The most of any case, in bytes on NVIDIA and registers on AMD. sm75 multiplies tiles without matrix instructions.

{chr(10).join(spilled) or nothing}

## What moves less than 128 bits at once

In some case, at the widest: operands that are read where they lie, and buffers of few numbers.

{chr(10).join(narrow) or nothing}

## By other versions of Triton

What each was asked for, as the docstring says. triton-xpu 3.3 compiles to SPIR-V, for a Data Center GPU Max 1550.

{chr(10).join(summaries(others)) or nothing}
"""


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--archs", nargs="*", default=list(ARCHS), choices=list(TARGETS))
    parser.add_argument("--ops", nargs="*", help="of benchmarks/workloads.py")
    parser.add_argument("--dtypes", nargs="*", default=["bfloat16", "float32"])
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes at once")
    parser.add_argument("--json", type=Path, help="a line for each op, appended; those that are there are not compiled")
    parser.add_argument("--commit", help="of what is compiled; else git is asked")
    parser.add_argument("--page", action="store_true", help="compile nothing: write what --json has")
    options = parser.parse_args()
    os.environ.update(CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1")
    import triton
    from workloads import WORKLOADS

    ops = options.ops or list(WORKLOADS)
    if unknown := set(ops) - set(WORKLOADS):
        parser.error(f"no such ops: {', '.join(sorted(unknown))}")
    if os.environ.get("TRITON_INTERPRET") == "1":
        parser.error("nothing is compiled in the interpreter")
    # sm75 has no bfloat16: Triton refuses it there.
    tasks = {
        (arch, op, "float16" if arch == "sm75" and dtype == "bfloat16" else dtype): None
        for arch, dtype, op in itertools.product(options.archs, options.dtypes, ops)
    }
    sources = hashlib.sha256()
    for path in sorted([*(ROOT / "torch-ext").rglob("*.py"), ROOT / "benchmarks" / "workloads.py"]):
        sources.update(path.read_bytes())
    commit = options.commit or subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True
    ).stdout.strip()  # fmt: skip
    same = {"sources": sources.hexdigest()[:16], "triton": triton.__version__}
    lines = options.json.read_text().splitlines() if options.json and options.json.exists() else []
    lines = [json.loads(line) for line in lines]
    if options.page and lines:  # of the Triton that compiled most
        same["triton"] = collections.Counter(line["triton"] for line in lines).most_common(1)[0][0]
    commits, others = {}, {}
    for line in lines:
        task = tuple(line["task"])
        if line["triton"] != same["triton"]:
            others.setdefault(line["triton"], {})[task] = line
        elif task in tasks and (options.page or line["sources"] == same["sources"]):
            tasks[task], commits[task] = line["records"], line["commit"]

    def keep(task, records):
        tasks[task], commits[task] = records, commit
        for record in records:
            for problem in record["problems"]:
                print(f"  {' '.join(task)}, {record['case']} {record['kernel']}: {problem}", flush=True)
        if options.json:
            with options.json.open("a") as file:
                file.write(json.dumps({"task": task, **same, "commit": commit, "records": records}) + "\n")

    missing = [task for task, records in tasks.items() if records is None]
    if options.page and missing:
        parser.error(f"not compiled: {', '.join(' '.join(task) for task in missing)}")
    if missing:
        missing.sort(key=lambda task: len(WORKLOADS[task[1]].cases))  # the last are taken first, and take longest
        compile_all(missing, options.jobs, keep)
    found = merged(tasks, options.archs)
    text = page(found, same["triton"], set(commits.values()), others)
    if options.archs == list(ARCHS) and not options.ops:
        (ROOT / "docs" / "portability.md").write_text(text)
    else:
        print(text)
    for arch, records in found.items():
        problems = sum(bool(r["problems"]) for r in records)
        print(f"{arch}: {len(records)} kernels, {problems} with problems")
    sys.exit(any(r["problems"] for records in found.values() for r in records))


if __name__ == "__main__":
    main()
