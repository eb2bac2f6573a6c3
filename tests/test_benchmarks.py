"""The measuring scripts: they run, and what they write is what the pages are made of."""

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
BENCHMARKS = ROOT / "benchmarks"
if not (BENCHMARKS / "sweep.py").exists():
    pytest.skip("kernel-builder's own test run has no benchmarks/ of ours", allow_module_level=True)


@pytest.fixture
def script(monkeypatch):
    """script("sweep"): benchmarks/sweep.py as a module."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module


@pytest.mark.parametrize("model, what", [("Decoder", ["training step", "prefill"]), ("Encoder", ["300 sentences"])])
def test_end_to_end(kernel, model, what, script, monkeypatch):
    pytest.importorskip("transformers")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    end_to_end = script("end_to_end")
    rows = []
    for way in ("torch", end_to_end.OURS):
        runner = getattr(end_to_end, model)(way, True, torch.device("cpu"))
        assert runner.attention == "by name"
        rows += [{"model": model, "way": way, **row} for row in runner.measure()]
        kernel.patching.unpatch_model(runner.model)
    end_to_end.compare(rows)
    assert [row["what"] for row in rows] == what * 2
    assert all(row["p20"] <= row["per_s"] <= row["p80"] for row in rows)
    for row in rows[len(what) :]:  # in bfloat16; losses are near 6
        assert row.get("loss_off", 0) < 1e-2 and row.get("off_by", 0) < 2e-2


def test_end_to_end_reports_what_fails(tmp_path):
    """One process each: what is late or dies is named, and the rest is measured."""
    path = tmp_path / "found.json"
    command = [sys.executable, BENCHMARKS / "end_to_end.py", "--tiny", "--json", path, "--models", "encoder"]
    done = subprocess.run([*command, "--limit", "4.6", "--ways", "torch"], capture_output=True, text=True)
    assert done.returncode == 1 and "encoder, torch: too late, ended" in done.stdout, done.stdout + done.stderr
    assert json.loads(path.read_text())["failed"] == ["encoder, torch: too late"]
