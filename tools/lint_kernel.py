#!/usr/bin/env python3
"""Find known mistakes in Triton kernels, each with its reason and its fix.

    python tools/lint_kernel.py my_kernel.py torch-ext/            files, or folders of them
    python tools/lint_kernel.py --rules                            what is looked for
    python tools/lint_kernel.py my_kernel.py --call "softmax(torch.randn(5, 300))"

The first form reads the source and runs nothing. It follows values through a kernel and the `@triton.jit` helpers it
calls: what lanes outside a mask hold, which dtype a sum runs in, whether an offset was multiplied in 32 bits. What it
does not know it lets pass. The last form also makes the call, on CPU tensors; what it would launch is compiled for GPUs
that need not be there, and held against their shared memory and threads.

A line that is right all the same says so, or the line above it: `# lint: ok RULE: the reason`. Without a reason that is
a finding, too.
"""

import argparse
import ast
import io
import re
import sys
import tokenize
from pathlib import Path
from typing import NamedTuple

from _kernel_values import Kernel, Source, configs_of, dotted, is_jit, last_name, number

RULES = {
    "masked-load-without-other": (
        "a masked load without `other` feeds a reduction: what its lanes outside the mask hold is undefined",
        "give the neutral element of what consumes it: other=0.0 for a sum or a dot, -inf for a max, inf for a min",
    ),
    "wrong-fill": (
        "lanes outside the mask hold a value that changes the result of the reduction",
        "fill with its neutral element: 0 for sum and dot, -inf for max and argmax, inf for min and argmin",
    ),
    "moved-fill": (
        "the fill of a masked load was mapped to something else before a reduction: x - mean makes -mean of 0",
        "mask again after the map: x = tl.where(mask, x - mean, 0.0)",
    ),
    "low-precision-sum": (
        "a sum runs in a dtype below float32: float16 overflows at 65504, bfloat16 keeps 8 bits",
        "convert before it, .to(tl.float32), and round once where the result is stored",
    ),
    "autotuned-reduction-block": (
        "a block that has to cover the reduced axis is autotuned: a config below the row's width drops its tail",
        "compute it in the wrapper, triton.next_power_of_2(N), or loop over blocks of the row",
    ),
    "autotune-without-key": (
        "autotune has no key: what was fastest for the first size serves all others",
        'name the sizes that decide, key=["M", "N", "K"]',
    ),
    "offset-in-32-bits": (
        "an offset from a program id is computed in 32 bits: beyond 2^31 elements it wraps to other memory",
        "widen the id before it meets a size or a stride: row = tl.program_id(0).to(tl.int64)",
    ),
    "small-block-k": (
        "tl.dot gets an inner dimension below 16, which matrix units do not have",
        "BLOCK_K of at least 16 (32 for 8-bit operands), the rest masked to 0",
    ),
    "device-work-at-import": (
        "importing this asks for a device: builders and CPU machines have none, and processes that fork break",
        "ask inside a function, with functools.cache if it is asked often",
    ),
    "absolute-self-import": (
        "the package imports itself by its name; get_kernel loads it under another one",
        "import relatively: from . import _ops",
    ),
    "op-without-prefix": (
        "an op is registered under a fixed name: two versions in one process overwrite each other",
        '@torch.library.custom_op(add_op_namespace_prefix("name"), mutates_args=()), in just that form',
    ),
    "too-many-warps": (
        "more threads than a program may have: 16 warps of 64 are all of the 1024 on AMD's data-centre GPUs",
        "num_warps of at most 16, or at most 1024 // warp_size of the device",
    ),
    "shared-memory": (
        "the tiles need more shared memory than the smallest targets have, 64 KiB",
        "smaller blocks or fewer stages; of autotuned configs at least one that fits everywhere",
    ),
    "does-not-compile": (
        "Triton refuses the kernel for this target",
        "see the message; what differs between targets is in docs/porting.md",
    ),
    "opt-out-without-reason": (
        "an opt-out that does not name a rule and a reason",
        "# lint: ok RULE: the reason",
    ),
}

SMALLEST_SHARED = 65536  # bytes, of gfx942 and sm75
MOST_WARPS = 16  # 1024 threads by 64


class Finding(NamedTuple):
    path: str
    line: int
    rule: str
    detail: str = ""

    def __str__(self):
        reason, fix = RULES[self.rule]
        detail = f" ({self.detail})" if self.detail else ""
        return f"{self.path}:{self.line}: {self.rule}: {reason}{detail}.\n    Fix: {fix}."


def literal_configs(node):
    """[({name: number}, num_stages, num_warps node)] of a list of triton.Config, as far as it is written out."""
    found = []
    for call in ast.walk(node) if node is not None else ():
        if isinstance(call, ast.Call) and last_name(call) == "Config" and call.args:
            if isinstance(call.args[0], ast.Dict):
                values = {
                    k.value: number(v) for k, v in zip(call.args[0].keys, call.args[0].values)
                    if isinstance(k, ast.Constant)
                }  # fmt: skip
                found.append((call, values, {k.arg: number(k.value) for k in call.keywords}))
    return found


class Linter:
    def __init__(self):
        self.findings, self.seen = [], set()

    def report(self, source, line, rule, detail="", once=None):
        keys = {(source.path, line, rule), once or (source.path, line, rule)}
        known = keys & self.seen
        self.seen |= keys
        if known:
            return
        text = "\n".join(source.text.splitlines()[max(line - 2, 0) : line])
        if not re.search(rf"#\s*lint:\s*ok\s+{rule}:\s*\S", text):
            self.findings.append(Finding(str(source.path), line, rule, detail))

    def lint(self, source):
        for function in [n for n in ast.walk(source.tree) if isinstance(n, ast.FunctionDef) and is_jit(n)]:
            kernel = Kernel(self, source, function).bind((), {})
            kernel.run()
            self.sizes(source, function, kernel)
        self.autotune(source)
        self.warps(source)
        self.imports(source)
        self.registrations(source)
        self.at_import(source, source.tree.body)
        for token in tokenize.generate_tokens(io.StringIO(source.text).readline):
            if token.type == tokenize.COMMENT and re.search(r"lint:\s*ok\b", token.string):
                if not re.search(rf"lint:\s*ok\s+({'|'.join(RULES)}):\s*\S", token.string):
                    self.report(source, token.start[0], "opt-out-without-reason")
        self.findings.sort(key=lambda f: (f.path, f.line))
        return self.findings

    def sizes(self, source, function, kernel):
        """Blocks of products, with the numbers that configs, defaults and launches give them."""
        if not kernel.dots:
            return
        choices = []  # (line, {block: number}, stages)
        tuned = configs_of(function)
        if tuned:
            choices += [(c.lineno, v, k.get("num_stages") or 3.0) for c, v, k in literal_configs(tuned[1])]
        arguments = function.args.args
        defaults = {
            a.arg: number(d) for a, d in zip(reversed(arguments), reversed(function.args.defaults)) if number(d)
        }  # fmt: skip
        names = [a.arg for a in arguments]
        for call in ast.walk(source.tree):
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Subscript):
                if last_name(call.func.value) == function.name:
                    given = {
                        **dict(zip(names, map(number, call.args))),
                        **{k.arg: number(k.value) for k in call.keywords},
                    }
                    choices.append((call.lineno, {**defaults, **given}, given.get("num_stages") or 3.0))
        if not choices and defaults:
            choices.append((function.lineno, defaults, 3.0))
        needs = []
        for line, values, stages in choices:
            for rows, columns, inner, _ in kernel.dots:
                m, n, k = (float(s) if isinstance(s, int) else values.get(s) for s in (rows, columns, inner))
                if k is not None and k < 16 and not isinstance(inner, int):
                    self.report(source, line, "small-block-k", f"{inner} = {k:g}")
                if None not in (m, n, k):
                    # Operands of 16 bits; the pipeline holds one tile of each for every stage but one.
                    needs.append((2 * (m * k + k * n) * max(stages - 1, 1), line))
        if needs and min(needs)[0] > SMALLEST_SHARED:
            self.report(source, min(needs)[1], "shared-memory", f"about {min(needs)[0] / 1024:.0f} KiB in 16 bits")

    def autotune(self, source):
        for function in [n for n in ast.walk(source.tree) if isinstance(n, ast.FunctionDef)]:
            tuned = configs_of(function)
            if tuned and (tuned[2] is None or (isinstance(tuned[2], (ast.List, ast.Tuple)) and not tuned[2].elts)):
                self.report(source, tuned[0].lineno, "autotune-without-key")

    def warps(self, source):
        for node in ast.walk(source.tree):
            values = []
            if isinstance(node, ast.Call):
                values = [k.value for k in node.keywords if k.arg == "num_warps"]
            elif isinstance(node, ast.Assign) and any(getattr(t, "id", "") == "num_warps" for t in node.targets):
                values = [node.value]
            for value in values:
                largest = max(largest_constants(value), default=0)
                if largest > MOST_WARPS:
                    self.report(source, node.lineno, "too-many-warps", f"num_warps={largest:g}")

    def imports(self, source):
        folders, parent = set(), Path(source.path).resolve().parent
        while (parent / "__init__.py").is_file():
            folders.add(parent.name)
            parent = parent.parent
        for node in ast.walk(source.tree):
            names = []
            if isinstance(node, ast.Import):
                names = [a.name for a in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module]
            if any(name.split(".")[0] in folders for name in names):
                self.report(source, node.lineno, "absolute-self-import")

    def registrations(self, source):
        takes_name = {"custom_op", "triton_op", "register_kernel", "register_fake", "register_vmap", "define", "impl"}

        def prefixed(node):
            return isinstance(node, ast.Call) and last_name(node) == "add_op_namespace_prefix"

        for node in ast.walk(source.tree):
            if isinstance(node, ast.Call) and last_name(node) in takes_name and node.args:
                text = isinstance(node.args[0], ast.Constant) and "::" in str(node.args[0].value)
                creates = last_name(node) in ("custom_op", "triton_op") and not isinstance(node.args[0], ast.Constant)
                if text or (creates and not prefixed(node.args[0])):
                    self.report(source, node.lineno, "op-without-prefix")

    def at_import(self, source, body):
        for node in body:
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                parts = [*node.decorator_list, *node.args.defaults, *filter(None, node.args.kw_defaults)]
            elif isinstance(node, ast.ClassDef):
                self.at_import(source, node.body)
                continue
            elif isinstance(node, ast.If) and "__name__" in ast.unparse(node.test):
                continue
            elif isinstance(node, (ast.If, ast.Try, ast.With)):
                inner = [getattr(node, "test", None), *getattr(node, "items", ())]
                parts = [p for p in inner if p is not None]
                for handler in getattr(node, "handlers", ()):
                    self.at_import(source, handler.body)
                for name in ("body", "orelse", "finalbody"):
                    self.at_import(source, getattr(node, name, []))
            else:
                parts = [node]
            for call in [c for p in parts for c in eager(p) if isinstance(c, ast.Call)]:
                if touches_device(call, source):
                    self.report(source, call.lineno, "device-work-at-import")
                    break


def eager(node):
    """The nodes that run when `node` does: not what is inside a lambda."""
    if isinstance(node, ast.Lambda):
        return
    yield node
    for child in ast.iter_child_nodes(node):
        yield from eager(child)


HARMLESS = {"is_available", "is_built", "is_initialized"}


def touches_device(call, source):
    name = dotted(call.func)
    if name.startswith(("torch.cuda.", "torch.xpu.", "torch.accelerator.")) and last_name(call) not in HARMLESS:
        return True
    if name.startswith("triton.runtime.driver.active") or last_name(call) in ("get_device_properties", "cuda", "xpu"):
        return True
    gpu = re.compile(r"cuda|xpu|hip")
    where = [k.value for k in call.keywords if k.arg == "device"]
    if last_name(call) in ("to", "device") and isinstance(call.func, ast.Attribute) and last_name(call) == "to":
        where += call.args
    if any(isinstance(w, ast.Constant) and gpu.match(str(w.value)) for w in where):
        return True
    return isinstance(call.func, ast.Subscript) and source.find(last_name(call.func.value)) is not None


def largest_constants(node):
    """The numbers that an expression may be, as far as they are written."""
    value = number(node)
    if value is not None:
        return [value]
    if isinstance(node, ast.IfExp):
        return [*largest_constants(node.body), *largest_constants(node.orelse)]
    if isinstance(node, ast.Call) and last_name(node) == "min":
        values = [v for a in node.args for v in largest_constants(a)]
        return [min(values)] if values and all(largest_constants(a) for a in node.args) else []
    if isinstance(node, ast.Call) and last_name(node) == "max":
        return [v for a in node.args for v in largest_constants(a)]
    return []


def lint_text(text, path="kernel.py"):
    """Findings of source given as text."""
    return Linter().lint(Source(path, text))


def lint_paths(paths):
    Source.known.clear()
    linter = Linter()
    for path in paths:
        path = Path(path)
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            linter.lint(Source.of(file))
    return linter.findings


def compile_call(path, call, targets):
    """Findings of the kernels that `call`, evaluated in the module at `path`, would launch on each target.

    Of autotuned configs one has to fit. Nothing is launched: tensors stay on the CPU, and hold nothing afterwards.
    """
    import runpy

    import torch
    import triton
    from portability import ARCHS, Driver
    from triton.backends.compiler import GPUTarget
    from triton.runtime.autotuner import Autotuner
    from triton.runtime.jit import JITFunction

    found, launches = [], []
    run = JITFunction.run

    def compile_only(self, *args, grid, warmup=False, **options):
        code = self.fn.__code__
        try:
            compiled = run(self, *args, grid=grid, warmup=True, **options)
            launches[-1].append((code, compiled.metadata.shared, compiled.metadata.num_warps, None))
        except Exception as error:
            launches[-1].append((code, 0, 0, f"{type(error).__name__}: {str(error).strip().splitlines()[-1]}"))

    def compile_all(self, *args, **options):
        single = launches.pop()
        launches.append([])
        for config in self.configs:
            self.fn.run(*args, **{**options, **config.all_kwargs()})
        launches.append(single)

    def begin(kernel, grid):
        launches.append([])
        return lambda *args, **options: kernel.run(*args, grid=grid, warmup=False, **options)

    for target in targets:
        backend, name, warp, _, shared_memory, *_ = ARCHS[target]
        triton.runtime.driver.set_active(Driver(GPUTarget(backend, name, warp)))
        launches.clear()
        saved = JITFunction.run, Autotuner.run, triton.runtime.KernelInterface.__getitem__
        JITFunction.run, Autotuner.run, triton.runtime.KernelInterface.__getitem__ = compile_only, compile_all, begin
        try:
            module = runpy.run_path(str(path))
            eval(call, {"torch": torch, **module})
        finally:
            JITFunction.run, Autotuner.run, triton.runtime.KernelInterface.__getitem__ = saved
        for choices in filter(None, launches):
            faults = []
            for code, shared, warps, error in choices:
                place = str(path), code.co_firstlineno
                if error:
                    faults.append(Finding(*place, "does-not-compile", f"{target}: {error}"))
                elif shared > shared_memory:
                    faults.append(Finding(*place, "shared-memory", f"{target}: {shared} of {shared_memory} bytes"))
                elif warps * warp > 1024:
                    faults.append(Finding(*place, "too-many-warps", f"{target}: {warps} warps of {warp} threads"))
            if len(faults) == len(choices):
                found.append(faults[-1])
        if not any(launches):
            raise SystemExit(f"lint_kernel: {call} launches no kernel on {target}")
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*", type=Path)
    parser.add_argument("--rules", action="store_true", help="list the rules")
    parser.add_argument("--call", help="an expression in the names of the one file given; torch is there")
    parser.add_argument(
        "--targets", nargs="*", default=["sm75", "sm90", "gfx942", "gfx1100"], help="as portability.py's"
    )
    options = parser.parse_args()
    if options.rules:
        for rule, (reason, fix) in RULES.items():
            print(f"{rule}: {reason}.\n    Fix: {fix}.")
        return 0
    findings = lint_paths(options.paths)
    if options.call:
        findings += compile_call(options.paths[0], options.call, options.targets)
    for finding in findings:
        print(finding)
    print(f"{len(findings)} finding{'' if len(findings) == 1 else 's'}")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
