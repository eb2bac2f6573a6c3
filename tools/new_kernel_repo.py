#!/usr/bin/env python3
"""Make a kernel repository of one's own for the Hugging Face Kernels Hub, from code that passes its tests.

    python tools/new_kernel_repo.py org/fast-softmax --kind rowwise [--op softmax] [--out ../fast-softmax]

rowwise: softmax of rows, the whole row at once.   pointwise: x * sigmoid(x).   reduction: mean of squares, rows of any
width in blocks.   matmul: a @ b by tiles.   Each has gradients, torch.compile, five tests and a benchmark.
"""

import argparse
import ast
import keyword
import re
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TEMPLATES = ROOT / "tools" / "templates"
KINDS = ("rowwise", "pointwise", "reduction", "matmul")


def renamed(text, names):
    for old, new in names.items():
        text = text.replace(old, new)
    return text


def op_names(op, templates):
    """What the templates call their op, and what it is called instead: not as something that they use."""
    if not re.fullmatch(r"[a-z][a-z0-9_]*", op) or keyword.iskeyword(op):
        raise SystemExit(f"the name of an op is lower case, digits and _, got {op!r}")
    for path in templates:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if op in (getattr(node, "id", ""), getattr(node, "arg", ""), getattr(node, "asname", None) or ""):
                raise SystemExit(f"the name of an op must not be one that {path.name} uses, got {op!r}")
    return {"my_op": op, "MyOp": "".join(part.capitalize() for part in op.split("_"))}


def make(repo_id, kind, op, out):
    """Write the repository into the folder `out`, which must not be there."""
    organisation, _, name = repo_id.partition("/")
    if not organisation or not re.fullmatch(r"[a-z][-a-z0-9]*[a-z0-9]", name):
        raise SystemExit(f"a repository is org/name, the name of lower case, digits and -, got {repo_id!r}")
    module = name.replace("-", "_")
    op = op or module
    if out.exists():
        raise SystemExit(f"{out} is there already")
    used = (TEMPLATES / "repository" / kind).rglob("*.py")
    names = {"org/my-kernel": repo_id, "my-kernel": name, "my_kernel": module, **op_names(op, used)}
    for folder in (TEMPLATES / "repository" / "common", TEMPLATES / "repository" / kind):
        for source in sorted(p for p in folder.rglob("*") if p.is_file() and "__pycache__" not in p.parts):
            target = out / renamed(source.relative_to(folder).as_posix(), names)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(renamed(source.read_text(encoding="utf-8"), names), encoding="utf-8")
    shutil.copy(ROOT / "tools" / "build_local.py", out / "tools" / "build_local.py")
    shutil.copy(ROOT / "LICENSE", out / "LICENSE")
    return out


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("repo_id", help="org/name")
    parser.add_argument("--kind", required=True, choices=KINDS)
    parser.add_argument("--op", help="the function's name; by default the repository's")
    parser.add_argument("--out", type=Path, help="by default the repository's name, beside this one")
    options = parser.parse_args()
    out = options.out or ROOT.parent / options.repo_id.rpartition("/")[2]
    make(options.repo_id, options.kind, options.op, out)
    print(f"{out}: read README.md there, then run sh tools/ci.sh")
    return 0


if __name__ == "__main__":
    sys.exit(main())
