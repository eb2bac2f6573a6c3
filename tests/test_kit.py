"""What tools/new_kernel_repo.py and tools/new_op.py make passes the tests that it makes: here a kind of each, and with
PORTABLE_KERNELS_KIT=all (make kit) every kind."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
if not (ROOT / "tools").is_dir():
    pytest.skip("kernel-builder's own test run has no tools/", allow_module_level=True)

import new_op  # noqa: E402
from lint_kernel import lint_paths  # noqa: E402
from new_kernel_repo import KINDS, TEMPLATES, make  # noqa: E402

EVERY = os.environ.get("PORTABLE_KERNELS_KIT") == "all"
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def run_tests(folder, *arguments):
    environment = {k: v for k, v in os.environ.items() if k not in ("LOCAL_KERNELS", "PYTEST_CURRENT_TEST")}
    environment = {k: v for k, v in environment.items() if not k.startswith("PYTEST_XDIST")}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    return done.stdout


@pytest.mark.parametrize("kind", KINDS if EVERY else () if INTERPRETED else ("rowwise",))
def test_a_repository_of_ones_own(tmp_path, kind):
    made = make("some-org/quick-maths", kind, "quick_op", tmp_path / "made")
    assert lint_paths([made / "torch-ext"]) == []
    leftovers = [p for p in made.rglob("*") if p.is_file() and "my_op" in p.read_text() + p.name]
    assert leftovers == []
    assert " passed" in run_tests(made)  # its conftest builds it, and loads it with get_kernel
    for benchmark in (made / "benchmarks").iterdir():
        compile(benchmark.read_text(), benchmark.name, "exec")
    subprocess.run(["sh", "-n", made / "tools" / "ci.sh"], check=True)
    if importlib.util.find_spec("jinja2"):
        import jinja2

        card = jinja2.Environment(undefined=jinja2.StrictUndefined).from_string((made / "CARD.md").read_text())
        told = {"repo_id": "some-org/quick-maths", "version": 1, "functions": ["quick_op"], "license": "apache-2.0"}
        assert "help(kernel.quick_op)" in card.render(told) and "{" not in card.render(told)


@pytest.mark.parametrize("kind", KINDS if EVERY else ("pointwise",))
def test_an_op_here(tmp_path, kind):
    ignored = shutil.ignore_patterns("__pycache__", "*.pyc", "results", "_ops.py")
    for name in ("torch-ext", "tests", "tools", "benchmarks", "examples"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=ignored)
    for name in ("build.toml", "README.md", "pytest.ini", "CARD.md", "ruff.toml"):
        shutil.copy(ROOT / name, tmp_path / name)
    before = {p: p.read_text() for p in tmp_path.rglob("*") if p.is_file() and p.suffix in (".py", ".md")}
    written = new_op.add(tmp_path, "an_op_with_a_long_name", kind)
    changed = {p.name for p, text in before.items() if p.read_text() != text}
    new = [p for p in tmp_path.rglob("*.py") if p not in before and "_ops" not in p.name]
    elsewhere = {"__init__.py", "README.md", "quickstart.py", *(["test_every_op.py"] if kind == "matmul" else [])}
    assert len(written) == (9 if kind == "matmul" else 7) and changed == elsewhere and len(new) == 3
    assert lint_paths(new) == []
    if importlib.util.find_spec("ruff"):
        command = [sys.executable, "-m", "ruff", "check", "torch-ext/portable_kernels/__init__.py", *new]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout
    rules = ["tests/test_package.py", "tests/test_every_op.py"] if EVERY else []
    chosen = ("an_op", "docstrings", "has_a_call", "exports", "agrees", "imports", "fill", "autotuned", "registered",
              "hook", "syntax")  # fmt: skip
    run_tests(tmp_path, "tests/test_an_op_with_a_long_name.py", *rules, "-k", " or ".join(chosen))


def test_the_run_in_contributing_is_what_happens(tmp_path):
    for name in ("README.md", "torch-ext/portable_kernels/__init__.py", "examples/quickstart.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    for name in ("tests", "benchmarks"):
        (tmp_path / name).mkdir()
    recorded = (ROOT / "CONTRIBUTING.md").read_text().split("$ .venv/bin/python tools/new_op.py scaled_tanh")[1]
    recorded = [line.strip() for line in recorded.split("\n\n")[0].splitlines()[1:-1]]
    numbers = re.compile(r":\d+: ")
    written = new_op.add(tmp_path, "scaled_tanh", "pointwise")
    assert [numbers.sub(": ", line) for line in written] == [numbers.sub(": ", line) for line in recorded]


def test_names_that_are_refused(tmp_path):
    ops = [("org/fine", name) for name in ("Op", "lambda", "max", "launch", "x")]
    for repo_id, op in (("no-organisation", "scaled"), ("org/Upper", "scaled"), *ops):
        with pytest.raises(SystemExit, match="got"):
            make(repo_id, "rowwise", op, tmp_path / "made")
    (tmp_path / "made").mkdir()
    with pytest.raises(SystemExit, match="is there already"):
        make("org/fine", "rowwise", "scaled", tmp_path / "made")


def test_a_fresh_repository_is_small():
    """A newcomer reads it in ten minutes: what is not build_local.py."""
    for kind in KINDS:
        folders = (TEMPLATES / "repository" / "common", TEMPLATES / "repository" / kind)
        lines = [len(p.read_text().splitlines()) for f in folders for p in f.rglob("*") if p.suffix in (".py", ".md")]
        assert sum(lines) < 500
