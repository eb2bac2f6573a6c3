"""The measuring scripts: they run, and what they write is what the pages are made of."""

import importlib
import json
import subprocess
import sys
import time
import types
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


CHILD = """
import sys, time
sys.path.insert(0, {benchmarks!r})
import turns

def rows():
    yield {{"n": 1}}
    {measure}
    yield {{"n": 2}}

def prepare():
    print("not a line of JSON")
    {prepare}
    return rows, {{"about": "it"}}

turns.take_turn(prepare)
"""


def test_turns(script, tmp_path):
    """What dies, hangs or is late is named, and stops nobody else."""
    turns = script("turns")
    kinds = {
        "good": ("", ""), "wrong": ("raise ValueError('no good')", ""), "dies": ("", "__import__('os')._exit(3)"),
        "hangs": ("", "time.sleep(60)"), "late": ("time.sleep(60)", ""), "fine": ("", ""),
    }  # fmt: skip
    workers = [
        turns.Worker(name, [sys.executable, "-c", CHILD.format(benchmarks=str(BENCHMARKS), prepare=p, measure=m)])
        for name, (p, m) in kinds.items()
    ]
    heard, lost, measuring = [], {}, []

    def hear(worker, line):
        heard.append((worker.name, *line))
        if "row" in line:
            measuring.append(worker.name)

    now = time.monotonic()
    turns.run(
        workers, hear, lambda w, why: lost.update({w.name: why}), jobs=3, ready_by=now + 6, done_by=now + 40, patience=3
    )
    assert lost == {
        "wrong": "ValueError: no good", "dies": "ended with code 3", "late": "was not ready in time",
        "hangs": "did not finish measuring in time",
    }  # fmt: skip
    assert measuring == ["good", "good", "dies", "hangs", "fine", "fine"]  # in their order, one at a time
    assert [line for line in heard if line[0] == "good"] == [("good", k) for k in ("ready", "row", "row", "done")]
    assert all(w.process.poll() is not None for w in workers)
    assert "not a line of JSON\n" in workers[0].errors


@pytest.fixture
def no_gpu(script, monkeypatch):
    """sweep.py and its workloads on the CPU, with a clock that calls each way once."""
    workloads, sweep = script("workloads"), script("sweep")
    monkeypatch.setattr(workloads, "DEVICE", "cpu")
    monkeypatch.setattr(workloads, "DTYPE", torch.float32)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(sweep, "peak", lambda run: 1.5)
    monkeypatch.setattr(sweep, "CALLS", 5)

    class Clock:
        def __init__(self, seconds):
            pass

        def turns(self, functions, sleep=0):
            for function in functions.values():
                function()
            return {name: (2.0, 1.0, 3.0) for name in functions}

    monkeypatch.setattr(sweep, "Clock", Clock)
    return sweep


def options(**changes):
    return types.SimpleNamespace(
        **{"variant": None, "providers": ["liger"], "directions": ["forward", "backward", "both"], "seconds": 0,
           "host": True, **changes}
    )  # fmt: skip


@pytest.mark.parametrize("name", ["rms_norm", "cross_entropy", "dropout", "linear", "flash_attn_with_kvcache"])
def test_sweep_measures(kernel, name, no_gpu, monkeypatch):
    monkeypatch.setattr(no_gpu, "load", lambda folder: kernel)
    small = {"dropout": (4, 256), "flash_attn_with_kvcache": (1, 2, 2, 64, 64)}.get(name, (4, 64))
    small = (4, 64, 32) if name == "linear" else small
    monkeypatch.setitem(no_gpu.WORKLOADS, name, no_gpu.WORKLOADS[name]._replace(cases={"small": small}))
    op = no_gpu.Op(name, options())
    op.compile(until=0)
    rows = list(op.measure())
    assert set(rows.pop()["host"]) == {"portable-kernels", "torch"}
    directions = ["forward"] if name == "flash_attn_with_kvcache" else ["forward", "backward", "both"]
    assert [(r["direction"], r["provider"]) for r in rows] == [
        (d, p) for d in directions for p in ("portable-kernels", "torch")
    ]
    unit = "tflops" if name == "linear" else "gbps"
    assert all(r[unit] > 0 and r["off_by"] < 1e-4 and r["peak_mib"] == 1.5 for r in rows)
    if len(directions) == 3:
        forward, backward, both = (r[unit] for r in rows[::2])
        assert both == pytest.approx(forward + backward)


def test_sweep_does_not_time_what_is_wrong(kernel, no_gpu, monkeypatch, capsys):
    monkeypatch.setattr(no_gpu, "load", lambda folder: kernel)
    workload = no_gpu.WORKLOADS["silu"]._replace(
        cases={"small": (4, 64)}, ours=lambda k, x: 1.1 * k.silu(x),
        peers={"broken": lambda: lambda x: x.no_such_thing, "absent": lambda: __import__("no_such_peer")},
    )  # fmt: skip
    monkeypatch.setitem(no_gpu.WORKLOADS, "silu", workload)
    rows = list(no_gpu.Op("silu", options(providers=["broken", "absent"], host=False)).measure())
    assert {r["provider"] for r in rows} == {"torch"}
    said = capsys.readouterr().out
    assert "portable-kernels is wrong by 1.0e-01: silu small forward" in said
    assert "broken failed: silu small backward: AttributeError" in said and "absent left out: ModuleNotFound" in said


def test_sweep_needs_a_gpu(no_gpu, monkeypatch, tmp_path):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    monkeypatch.setattr(sys, "argv", ["sweep.py", str(tmp_path)])
    with pytest.raises(SystemExit, match="torch sees none"):
        no_gpu.main()
