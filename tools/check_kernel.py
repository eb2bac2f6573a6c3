#!/usr/bin/env python3
"""Hold a kernel's wrapper against a reference, rung by rung, and say in words what is wrong.

    python tools/check_kernel.py my_kernel.py:softmax --reference my_kernel.py:reference
    python tools/check_kernel.py my_kernel.py:matmul --reference torch:matmul --shapes "(M, K), (K, N)"

Both take tensors by position, and give a tensor or a tuple. The reference runs in float64 on the CPU. `--shapes` says
what the arguments are, a letter for each size, "(M, N)" where it is left out; `--given N=64` fixes a size, and
`--options "dict(eps=1e-5)"` passes keywords to both.

Without a GPU it runs in Triton's interpreter. The rungs: shapes from one element to just over a power of two; dtypes,
with their tolerances; strides; memory that nobody wrote; the caller's tensors; the same call again; nothing at all;
special values. Mistakes are named in the order in which to fix them.
"""

import argparse
import importlib
import importlib.util
import itertools
import os
import re
import sys
import traceback
from pathlib import Path
from typing import NamedTuple

DTYPES = ("float32", "float16", "bfloat16")
ULPS = {"float32": 16, "float16": 2, "bfloat16": 2}

# What a failure looks like, and where it is explained: docs/troubleshooting.md has a row for each.
LOOKS_LIKE = {
    "one element": "a size, a stride or a mask that is wrong at 1",
    "power of two": "lanes outside the mask in the result: a fill that is not neutral, or was moved by a map",
    "tail": "what lies beyond one block is not computed: the block does not cover the row",
    "everywhere": "the formula itself, or another order of arguments",
    "half": "sums or products below float32, or a result rounded more than once",
    "bfloat16": "arithmetic on what was loaded, or a rounding that cuts off: float32 first, rounded where stored",
    "strides": "offsets that take rows or columns to be contiguous: pass strides, or make it contiguous in the wrapper",
    "unwritten": "memory that no program writes: a store's mask or the grid leaves it out",
    "written": "it writes to its caller's tensors: write to a new one, or declare it",
    "repeat": "a race, atomics in sums, autotuning in place, or reads of memory that nobody wrote",
    "empty": "a launch over nothing: return early where there are no elements",
    "NaN": "NaN is lost: tl.max and tl.minimum drop it, and comparisons with it are false",
    "inf": "inf - inf, or an exponential that overflows: subtract the row's maximum first",
    "large": "an overflow on the way: exp before the maximum is subtracted, or squares in 16 bits",
    "raises": "see the message; on CPU tensors, that the wrapper refuses them",
}


class Failure(NamedTuple):
    rung: str
    what: str
    looks_like: str

    def __str__(self):
        return f"{self.rung}: {self.what}\n    It looks like {LOOKS_LIKE[self.looks_like]}."


def load(spec):
    """The function that `path.py:name`, or `module:name`, is."""
    path, _, name = spec.rpartition(":")
    if path.endswith(".py"):
        path = Path(path).resolve()
        sys.path.insert(0, str(path.parent))
        loaded = importlib.util.spec_from_file_location(path.stem, path)
        module = importlib.util.module_from_spec(loaded)
        sys.modules[path.stem] = module
        loaded.loader.exec_module(module)
    else:
        module = importlib.import_module(path)
    for part in name.split("."):
        module = getattr(module, part)
    return module


def letters(shapes):
    """[("M", "K"), ("K", "N")] of "(M, K), (K, N)"."""
    found = [tuple(re.findall(r"\w+", inner)) for inner in re.findall(r"\(([^)]*)\)", shapes)]
    if not found:
        raise SystemExit(f'check_kernel: shapes are written as "(M, K), (K, N)", got {shapes!r}')
    return found


class Check:
    """Two functions of tensors, and what was found where they differ."""

    def __init__(self, function, reference, shapes="(M, N)", given=(), options=None, dtypes=DTYPES, device="cpu"):
        self.function, self.reference, self.shapes = function, reference, letters(shapes)
        self.given, self.options, self.dtypes, self.device = dict(given), dict(options or {}), dtypes, device
        self.names = list(dict.fromkeys(itertools.chain(*self.shapes)))
        self.failures = []

    def sizes(self, *values):
        """Letters by size: the values in turn, the given ones fixed."""
        wheel = itertools.cycle(values)
        return {**{n: next(wheel) for n in self.names}, **self.given}

    def draw(self, sizes, dtype="float32", layout=None):
        import torch

        tensors = []
        for shape in self.shapes:
            shape = tuple(int(n) if n.isdigit() else sizes[n] for n in shape)
            flat = torch.randn(shape, dtype=torch.float64).to(getattr(torch, dtype)).to(self.device)
            tensors.append(flat if layout is None else layout(flat))
        return tensors

    def compare(self, tensors):
        """(what it looks like, how it differs, which arguments were written to); raises what the function raises."""
        import torch

        wide = [t.detach().cpu().double() for t in tensors]
        try:
            exact = self.reference(*wide, **self.options)
        except Exception:
            if all(t.numel() for t in tensors):
                raise
            return "", "", []  # which has no answer for nothing, either
        before = [t.detach().clone() for t in tensors]
        actual = self.function(*tensors, **self.options)
        pairs = list(zip(*(r if isinstance(r, (tuple, list)) else (r,) for r in (actual, exact))))
        touched = [
            i for i, (t, b) in enumerate(zip(tensors, before)) if not torch.equal(t.nan_to_num(), b.nan_to_num())
        ]
        for y, e in pairs:
            if y.shape != e.shape:
                return "everywhere", f"shape {tuple(y.shape)}, expected {tuple(e.shape)}", touched
            y, e = y.detach().cpu(), e.detach().double()
            rounded = e.to(y.dtype)
            kind = str(y.dtype).removeprefix("torch.")
            same = (y == rounded) | (y.isnan() & rounded.isnan())
            finite = y.isfinite() & rounded.isfinite()
            known = torch.where(rounded.isfinite(), e, 0.0)
            rms = known.square().mean(-1, keepdim=True).sqrt() if e.dim() else known.abs()
            bound = ULPS.get(kind, 16) * torch.finfo(y.dtype).eps * (known.abs() + rms) + 1e-45
            wrong = ~same & ~(finite & ((y.double() - e).abs() <= bound))
            if wrong.any():
                index = tuple(wrong.nonzero()[0].tolist())
                off = ((y.double() - e).abs() / (known.abs() + rms))[wrong & finite]
                slight = bool(finite[wrong].all()) and len(off) and float(off.max()) < 0.01
                text = f"{int(wrong.sum())} of {wrong.numel()} elements differ, first at {index}: "
                text += f"{y[index].item():.6g}, expected {e[index].item():.6g}"
                return "half" if slight else "everywhere", text, touched
        return "", "", touched

    def attempt(self, rung, tensors, guess):
        """True where all agrees; else notes it, as what `guess` says, or as what the numbers say where it is None."""
        shown = ", ".join(f"{tuple(t.shape)}" for t in tensors)
        where = f"{str(tensors[0].dtype).removeprefix('torch.')} {shown}"
        try:
            kind, text, touched = self.compare(tensors)
        except Exception as error:
            said = traceback.format_exception_only(type(error), error)[-1].strip().splitlines()[0]
            self.failures.append(Failure(rung, f"{where} raises {said}", "empty" if rung == "nothing" else "raises"))
            return False
        if touched:
            self.failures.append(Failure(rung, f"{where}: argument {touched[0]} is not what it was", "written"))
        if text:
            self.failures.append(Failure(rung, f"{where}: {text}", guess or kind))
        return not text and not touched

    def run(self):
        import torch

        # Whole blocks, parts of a block, more than a block: what is wrong first tells.
        tall = 65 if len(self.names) > 2 else 20  # of tiles; of rows a few will do
        ladder = [(None, (tall - 1, 64)), ("one element", (1, 1)), ("one element", (1, 64)), ("one element", (tall, 1))]
        ladder += [("power of two", size) for size in ((2, 3), (5, 40), (17, 63), (tall - 2, 5))]
        ladder += [("tail", size) for size in ((17, 65), (tall, 17), (3, 129), (5, 1000))]
        for guess, size in ladder:
            if not self.attempt("shapes", self.draw(self.sizes(*size)), guess):
                break
        if self.failures:
            return self.failures
        for dtype in self.dtypes:
            guess = "bfloat16" if dtype == "bfloat16" else "half"
            if not self.attempt("dtypes", self.draw(self.sizes(5, 300), dtype), guess):
                break
        for layout in (
            lambda t: t.t().contiguous().t() if t.dim() == 2 else t,
            lambda t: torch.stack([t, t + 1], -1)[..., 0],
            lambda t: torch.cat([t, t + 1])[: t.shape[0]] if t.dim() else t,
            lambda t: t[:1].expand(t.shape) if t.dim() else t,
        ):
            if not self.attempt("strides", self.draw(self.sizes(6, 40), layout=layout), "strides"):
                break
        self.unwritten()
        self.repeats()
        for sizes in ((0, 8), (3, 0)):
            if not self.attempt("nothing", self.draw(self.sizes(*sizes)), "empty"):
                break
        for name, value, guess in (
            ("1e4 everywhere", None, "large"),
            ("NaN", float("nan"), "NaN"),
            ("inf", float("inf"), "inf"),
            ("-inf", -float("inf"), "inf"),
        ):
            tensors = self.draw(self.sizes(6, 40))
            if value is None:
                tensors = [t * 1e4 for t in tensors]
            elif tensors[0].numel():
                tensors[0].view(-1)[tensors[0].numel() // 2] = value
            if not self.attempt(f"special values, {name}", tensors, guess):
                break
        return self.failures

    def unwritten(self):
        """torch fills what empty() returns with NaN: what nobody writes shows where it was right by luck."""
        import torch

        saved = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            for a, b in ((9, 129), (3, 70)):
                if not self.attempt("unwritten memory", self.draw(self.sizes(a, b)), "unwritten"):
                    break
        finally:
            torch.use_deterministic_algorithms(saved[0], warn_only=saved[1])

    def repeats(self):
        import torch

        tensors = self.draw(self.sizes(9, 129))
        runs = [self.function(*tensors, **self.options) for _ in range(4)]
        runs = [r if isinstance(r, (tuple, list)) else (r,) for r in runs]
        for again in runs[1:]:
            if any(not torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(again, runs[0])):
                self.failures.append(Failure("the same call again", "another result", "repeat"))
                return


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("function", help="path.py:function, or module:function")
    parser.add_argument("--reference", required=True, help="the same, in plain PyTorch")
    parser.add_argument("--shapes", default="(M, N)")
    parser.add_argument("--given", nargs="*", default=[], help="sizes that are fixed: N=64")
    parser.add_argument("--options", default="dict()", help="keywords for both")
    parser.add_argument("--dtypes", nargs="*", default=list(DTYPES), choices=list(ULPS))
    options = parser.parse_args()
    import torch

    kinds = [k for k in ("xpu", "cuda") if getattr(torch, k).is_available()]
    device = kinds[0] if kinds else "cpu"
    if not kinds:
        os.environ.setdefault("TRITON_INTERPRET", "1")  # Triton reads it when it is imported
    torch.manual_seed(0)
    given = {name: int(value) for name, value in (g.split("=") for g in options.given)}
    check = Check(
        load(options.function), load(options.reference), options.shapes, given,
        eval(options.options), options.dtypes, device,
    )  # fmt: skip
    failures = check.run()
    where = "in Triton's interpreter" if device == "cpu" else f"on {device}"
    for failure in failures:
        print(failure)
    print(f"{options.function} {where}: {'agrees' if not failures else f'{len(failures)} found'}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
