"""The guides in docs/ and the skill: every Python block runs as it is written, and what they name exists."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
GUIDES = [ROOT / "docs" / f"{name}.md" for name in (
    "writing", "numerics", "autotuning", "benchmarking", "patterns", "porting", "profiling", "publishing",
)] + [ROOT / "skills" / "portable-kernels" / "SKILL.md"]  # fmt: skip
if not all(guide.is_file() for guide in GUIDES):
    pytest.skip("kernel-builder's own test run has no docs/", allow_module_level=True)
pytest.importorskip("triton")

from check_kernel import LOOKS_LIKE  # noqa: E402
from lint_kernel import RULES, lint_text  # noqa: E402

TABLE = ROOT / "docs" / "troubleshooting.md"


def blocks(guide):
    """[(line, code), ...] of the Python blocks. Another kind of block would be run by nobody."""
    found, start, lines = [], None, []
    for number, line in enumerate(guide.read_text().splitlines(), 1):
        if start is None:
            assert not line.startswith("```") or line == "```python", f"{guide.name}:{number}"
            start = number + 1 if line == "```python" else None
        elif line == "```":
            found.append((start, "\n".join(lines)))
            start, lines = None, []
        else:
            lines.append(line)
    assert start is None
    return found


# Kernels are looked up by file and line: each block is a file of its own, with the guide's lines.
PROGRAM = """
import json, linecache, sys, traceback
import torch
import triton
device, guides = json.load(sys.stdin)
sys.path.insert(0, sys.argv[1])
if device == "cpu":  # no speeds to compare: the first config serves
    triton.runtime.Autotuner._bench = lambda *args, **options: [0.0, 0.0, 0.0]
errors = {}
for name, blocks in guides.items():
    torch.manual_seed(0)
    names = {"DEVICE": device, "__name__": "guide"}
    for line, code in blocks:
        file = f"{name}:{line}"
        text = "\\n" * (line - 1) + code + "\\n"
        linecache.cache[file] = (len(text), None, text.splitlines(True), file)
        try:
            exec(compile(text, file, "exec"), names)
        except Exception:
            errors[name] = f"block at line {line}:\\n" + traceback.format_exc()
            break
print("ERRORS" + json.dumps(errors))
"""


@pytest.fixture(scope="module")
def errors(device):
    """What went wrong in which guide. All in one process, which runs kernels: in the interpreter without a GPU."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("the other run of these tests interprets the kernels, too")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **({"TRITON_INTERPRET": "1"} if device.type == "cpu" else {})}
    given = json.dumps([device.type, {guide.stem: blocks(guide) for guide in GUIDES}])
    command = [sys.executable, "-c", PROGRAM, str(ROOT / "tools")]
    done = subprocess.run(command, input=given, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert "ERRORS" in done.stdout, done.stdout + done.stderr
    return json.loads(done.stdout.rpartition("ERRORS")[2])


@pytest.mark.parametrize("guide", [guide.stem for guide in GUIDES])
def test_blocks_run(errors, guide):
    assert guide not in errors, errors[guide]


@pytest.mark.parametrize("guide", GUIDES, ids=[guide.stem for guide in GUIDES])
def test_blocks_have_no_findings(guide):
    code = "\n".join("\n" + code for _, code in blocks(guide))
    rules = {finding.rule for finding in lint_text(code, guide.name)}
    assert rules <= {"device-work-at-import"}  # of scripts, which launch as they go


@pytest.mark.parametrize("guide", [*GUIDES, TABLE], ids=[guide.stem for guide in [*GUIDES, TABLE]])
def test_what_is_named_exists(guide):
    text = guide.read_text()
    assert max(len(line) for line in text.splitlines() if not line.startswith(("|", "    ", "description"))) <= 120
    for link in re.findall(r"\]\(([\w./-]+\.md)\)", text):
        assert (guide.parent / link).exists(), link
    for path in re.findall(r"\b(?:tools|tests|torch-ext|docs)/[\w/.-]*\w", text):
        if "my_kernel" not in path and path != "tools/ci.sh":
            assert (ROOT / path).exists(), path
    for path in re.findall(r"`(_?\w+\.py)`", text):
        assert (ROOT / "torch-ext" / "portable_kernels" / path).exists() or path in ("_ops.py", "__init__.py"), path
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert set(re.findall(r"(?:`|^    )make ([a-z-]+)", text, re.MULTILINE)) <= set(targets)
    for name, option in re.findall(r"tools/(\w+\.py)[^\n`]*?(--[a-z]+)", text):
        assert f'"{option}"' in (ROOT / "tools" / name).read_text(), f"{name} {option}"


def test_troubleshooting_has_every_rule_and_every_failure():
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in TABLE.read_text().splitlines()]
    rows = [row for row in rows if len(row) == 6][2:]
    assert {row[3].strip("`") for row in rows} - {""} == set(RULES)
    assert {row[4] for row in rows} - {""} == set(LOOKS_LIKE)
    for row in rows:
        path, _, name = row[5].strip("`").partition("::")
        assert f"def {name}(" in (ROOT / path).read_text(), row[5]


def test_the_skill_has_its_front_matter():
    head = (ROOT / "skills" / "portable-kernels" / "SKILL.md").read_text().split("---\n")[1]
    fields = dict(line.split(": ", 1) for line in head.splitlines())
    assert fields["name"] == "portable-kernels" and len(fields["description"]) < 500
    assert set(fields) == {
        "name", "description", "disable-model-invocation", "user-invocable", "allowed-tools", "argument-hint",
    }  # fmt: skip
