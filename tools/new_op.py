#!/usr/bin/env python3
"""Add an op to this repository, from code that passes its tests.

    python tools/new_op.py scaled_tanh --kind pointwise

rowwise: rows divided by their root mean square.   pointwise: x * sigmoid(x).   reduction: mean of squares.   matmul:
a @ b by tiles. Three new files: the op, its tests and its benchmark. Elsewhere a line for the import and one for
`__all__`; a row of the README's table, and a typical call for the tests that are of all ops.
"""

import argparse
import sys

from new_kernel_repo import KINDS, ROOT, TEMPLATES, op_names, renamed

ROW = {  # of the README's table
    "rowwise": "`{op}(x, eps=1e-6)` | x / sqrt(mean(x^2) + eps)",
    "pointwise": "`{op}(x)` | x * sigmoid(x)",
    "reduction": "`{op}(x)` | the mean of squares over the last dimension",
    "matmul": "`{op}(a, b)` | a @ b",
}
TYPICAL_CALL = {  # what examples/quickstart.py holds it against, and tests/test_every_op.py does everything to
    "rowwise": "lambda x: F.rms_norm(x, x.shape[-1:], eps=1e-6)",
    "pointwise": "lambda x: x * torch.sigmoid(x)",
    "reduction": "lambda x: wide(x).square().mean(-1)",
    "matmul": "lambda a, b: a @ b",
}


def insert(path, lines, before):
    """Insert `lines` into a file, before the first line that satisfies `before`; what was written, as in a diff."""
    text = path.read_text(encoding="utf-8").splitlines()
    place = next(i for i, line in enumerate(text) if before(line))
    path.write_text("\n".join([*text[:place], *lines, *text[place:], ""]), encoding="utf-8")
    return [f"{path.name}:{place + 1}: {line.strip()}" for line in lines]


def template(kind, name):
    """The file that an op's is made from: its own, or the one that repositories of this kind have too."""
    own = TEMPLATES / "op" / kind / name
    return own if own.exists() else next((TEMPLATES / "repository" / kind).rglob(name))


def add(root, op, kind):
    """What was written, one line each."""
    package = root / "torch-ext" / "portable_kernels"
    files = {
        "my_op.py": package / f"{op}.py",
        "test_my_op.py": root / "tests" / f"test_{op}.py",
        "benchmark_my_op.py": root / "benchmarks" / f"benchmark_{op}.py",
    }
    for target in files.values():
        if target.exists():
            raise SystemExit(f"{target} is there already")
    sources = {template(kind, name): target for name, target in files.items()}
    names = op_names(op, sources)
    for source, target in sources.items():
        target.write_text(renamed(source.read_text(encoding="utf-8"), names), encoding="utf-8")
    written = [f"new: {path.relative_to(root)}" for path in files.values()]

    def later(line):  # imports are sorted by module
        module = line.partition("from .")[2].partition(" ")[0]
        return line == "" or (module[:1].isalpha() and module > op)

    imports = (package / "__init__.py").read_text().splitlines()
    first = next(i for i, line in enumerate(imports) if line.startswith("from ._report"))
    count = iter(range(len(imports)))
    written += insert(package / "__init__.py", [f"from .{op} import {op}"], lambda x: next(count) > first and later(x))
    written += insert(package / "__init__.py", [f'    "{op}",'], lambda x: x == '    "reductions",')
    row = f"| {ROW[kind].format(op=op)} |"
    written += insert(root / "README.md", [row], lambda x: x.startswith("| `reductions` |"))
    quickstart = root / "examples" / "quickstart.py"
    written += insert(quickstart, [f'    "{op}": {TYPICAL_CALL[kind]},'], lambda x: x.startswith('    "add_rms_norm"'))
    if kind == "matmul":  # whose arguments have other names, and whose rows do not stand alone
        line = f'    "{op}": {{"a": "x", "b": "columns"}},'
        written += insert(quickstart, [line], lambda x: x.startswith('    "rotary": {'))
        every = root / "tests" / "test_every_op.py"
        written += insert(every, [f'    "{op}",'], lambda x: x.startswith('    "matmul", "linear"'))
    return written


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("op", help="the function's name")
    parser.add_argument("--kind", required=True, choices=KINDS)
    options = parser.parse_args()
    for line in add(ROOT, options.op, options.kind):
        print(line)
    print(f"now: python -m pytest tests/test_{options.op}.py tests/test_package.py, then make them yours")
    return 0


if __name__ == "__main__":
    sys.exit(main())
