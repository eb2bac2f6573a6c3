"""The measuring scripts: they run, and what they write is what the pages are made of."""

import importlib
import json
import re
import shutil
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


@pytest.mark.parametrize("model, what", [("Decoder", ["training step", "prefill"]), ("Encoder", ["100 sentences"])])
def test_end_to_end(kernel, model, what, script, monkeypatch):
    pytest.importorskip("transformers")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    end_to_end = script("end_to_end")
    rows = []
    for way in ("torch", end_to_end.OURS):
        runner = getattr(end_to_end, model)(way, True, torch.device("cpu"))
        rows += [{"model": model, "way": way, **row} for row in runner.measure()]
        kernel.patching.unpatch_model(runner.model)
    end_to_end.compare(rows)
    assert [row["what"] for row in rows] == what * 2
    assert all(row["p20"] <= row["per_s"] <= row["p80"] for row in rows)
    for row in rows[len(what) :]:  # in bfloat16; losses are near 6
        assert row.get("loss_off", 0) < 1e-2 and row.get("off_by", 0) < 2e-2


def test_end_to_end_reports_what_fails(tmp_path):
    """What is late is named, here the only one."""
    path = tmp_path / "found.json"
    command = [sys.executable, BENCHMARKS / "end_to_end.py", "--tiny", "--json", path, "--models", "encoder"]
    done = subprocess.run([*command, "--limit", "4.6", "--ways", "torch"], capture_output=True, text=True)
    assert done.returncode == 1 and "encoder, torch: LOST: was not ready in time" in done.stdout, (
        done.stdout + done.stderr
    )
    assert json.loads(path.read_text())["failed"] == ["encoder, torch: was not ready in time"]


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
    monkeypatch.setattr(sweep, "read", lambda numbers, sums: None)

    class Clock:
        def __init__(self, seconds):
            pass

        def turns(self, functions):
            for function in functions.values():
                function()
            return {name: (2.0, 1.0, 3.0) for name in functions}

    monkeypatch.setattr(sweep, "Clock", Clock)
    return sweep


def options(**changes):
    return types.SimpleNamespace(
        **{"variant": None, "providers": ["liger"], "directions": ["forward", "backward", "both"], "seconds": 0,
           "host": True, "cases": None, **changes}
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
    assert all((r.get("of_copy") == 1.0) == (unit == "gbps") for r in rows)  # each call takes as long by this clock
    assert all(("of_read" in r) == no_gpu.WORKLOADS[name].reads for r in rows if r["direction"] == "forward")
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
    op = no_gpu.Op("silu", options(providers=["broken", "absent"], host=False))
    op.compile(until=time.time() + 60)
    rows = list(op.measure())
    assert {r["provider"] for r in rows} == {"torch"}
    said = capsys.readouterr().out
    assert "portable-kernels is wrong by 1.0e-01: silu small forward" in said
    assert "broken failed: silu small backward: AttributeError" in said and "absent left out: ModuleNotFound" in said


def test_sweep_of_some_cases(kernel, no_gpu, monkeypatch, capsys):
    """What was not asked for is not made, and a way that there was no time to compile is named."""
    monkeypatch.setattr(no_gpu, "load", lambda folder: kernel)
    workload = no_gpu.WORKLOADS["silu"]._replace(
        cases={"large": (2**40, 2**40), "small": (4, 64), "tall": (64, 4)},
        peers={"slow": lambda: torch.nn.functional.silu},
    )
    monkeypatch.setitem(no_gpu.WORKLOADS, "silu", workload)
    asked = options(providers=["slow"], host=False, cases=["small", "tall"], directions=["forward"])
    for until, ways in ((time.time() + 60, ("portable-kernels", "torch", "slow")), (0, ("portable-kernels", "torch"))):
        op = no_gpu.Op("silu", asked)
        op.compile(until)
        assert [(r["case"], r["provider"]) for r in op.measure()] == [(c, w) for c in ("small", "tall") for w in ways]
        assert ("slow left out, no time to compile: silu, small, tall" in capsys.readouterr().out) == (until == 0)


def test_sweep_ends_what_compiles_too_long(kernel, no_gpu, monkeypatch, capsys):
    monkeypatch.setattr(no_gpu, "load", lambda folder: kernel)
    peers = {"endless": lambda: lambda x: time.sleep(600), "quick": lambda: torch.nn.functional.silu}
    workload = no_gpu.WORKLOADS["silu"]._replace(cases={"small": (4, 64)}, peers=peers)
    monkeypatch.setitem(no_gpu.WORKLOADS, "silu", workload)
    op = no_gpu.Op("silu", options(providers=list(peers), host=False, directions=["forward"]))
    op.compile(until=time.time() + 1)
    assert {r["provider"] for r in op.measure()} == {"portable-kernels", "torch"}
    assert "endless left out, no time to compile: silu, small" in capsys.readouterr().out


def test_sweep_gives_each_way_the_same_inputs(kernel, no_gpu, monkeypatch):
    """Also after a way that writes its inputs."""

    class Overwrites(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.x = x
            return torch.nn.functional.silu(x)

        @staticmethod
        def backward(ctx, dy):
            x, s = ctx.x.data, torch.sigmoid(ctx.x.data)
            dx = dy * s * (1 + x * (1 - s))
            x.copy_(dx)
            return dx

    monkeypatch.setattr(no_gpu, "load", lambda folder: kernel)
    peers = {"overwrites": lambda: Overwrites.apply, "after": lambda: torch.nn.functional.silu}
    workload = no_gpu.WORKLOADS["silu"]._replace(cases={"small": (4, 64)}, peers=peers)
    monkeypatch.setitem(no_gpu.WORKLOADS, "silu", workload)
    op = no_gpu.Op("silu", options(providers=list(peers), host=False, directions=["backward", "both"]))
    op.compile(until=time.time() + 60)
    rows = [(r["direction"], r["provider"]) for r in op.measure()]
    assert rows == [(d, way) for d in ("backward", "both") for way in ("portable-kernels", "torch", *peers)]


def test_peers_tune_anew(no_gpu):
    """Triton's tuners by the trials of sweep.py, and FlagGems' entries, which keep what was chosen before."""
    triton = pytest.importorskip("triton")

    @triton.autotune([triton.Config({})], key=[])
    @triton.jit
    def tuner():
        pass

    tuner.cache["key"] = "chosen"
    entry = type("LibEntry", (), {})()
    entry.kernel_cache = ({"key": "kernel"},)
    no_gpu.tune(20)
    assert tuner.cache == {} and entry.kernel_cache == ({},)
    assert tuner.do_bench.keywords == {"warmup": 5, "rep": 20}


def test_sweep_adds_to_an_earlier_run(script):
    sweep = script("sweep")

    def rows(times, direction="forward"):
        return [
            {"op": "silu", "case": case, "direction": direction, "provider": way, "ms": ms}
            for (case, way), ms in times.items()
        ]

    then = {("llama3_8b", "torch"): 1.0, ("llama3_8b", "gems"): 2.0, ("llama3_8b", "liger"): 3.0}
    earlier = {
        "commit": "a", "ceilings": {"copy_gbps": 1}, "rows": rows(then) + rows({("bert_large", "torch"): 4.0}),
        "host": {"silu": 1}, "first_call": {"silu": 2}, "peers": {"liger": "1", "gems": "1"},
    }  # fmt: skip
    # FlagGems failed this time; Liger was not asked for.
    now = {("llama3_8b", "portable-kernels"): 5.0, ("llama3_8b", "torch"): 6.0}
    record = {"commit": "b", "ceilings": {}, "rows": rows(now), "host": {}, "first_call": {}, "peers": {"gems": "2"}}
    found = sweep.added(earlier, record, ["gems"])
    assert [(r["case"], r["provider"], r["ms"], r.get("commit")) for r in found["rows"]] == [
        ("llama3_8b", "portable-kernels", 5.0, None), ("llama3_8b", "torch", 6.0, None),
        ("llama3_8b", "liger", 3.0, "a"), ("bert_large", "torch", 4.0, "a"),
    ]  # fmt: skip
    assert (found["commit"], found["host_commit"], found["host"], found["ceilings"]) == (
        "b",
        "a",
        {"silu": 1},
        {"copy_gbps": 1},
    )
    assert found["peers"] == {"liger": "1", "gems": "2"}
    again = sweep.added(found, {**record, "commit": "c", "rows": rows(now, "backward")}, ["gems"])
    assert [r["commit"] for r in again["rows"] if "commit" in r] == ["b", "b", "a", "a"]


def test_sweep_needs_a_gpu(no_gpu, monkeypatch, tmp_path):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    monkeypatch.setattr(sys, "argv", ["sweep.py", str(tmp_path)])
    with pytest.raises(SystemExit, match="torch sees none"):
        no_gpu.main()


def run_of(ms, spread=0.01, **record):
    """A run of one op in two cases, whose times are `ms`."""
    rows = [
        {"op": "silu", "case": case, "direction": "forward", "provider": provider, "ms": t, "p20": t * (1 - spread),
         "p80": t * (1 + spread), "gbps": 1 / t}
        for case, t in zip(("small", "large"), ms) for provider in ("portable-kernels", "torch")
    ]  # fmt: skip
    about = {"device": "a GPU", "torch": "2", "triton": "3", "date": "today", "commit": "abc"}
    return {**about, "ceilings": {"copy_gbps": 4000.0, "matmul_tflops": 700.0}, "rows": rows, **record}


@pytest.mark.parametrize(
    "before, after, slower, faster",
    [
        (run_of((1.0, 2.0)), run_of((1.0, 2.0)), 0, 0),
        (run_of((1.0, 2.0)), run_of((1.1, 1.8)), 1, 1),
        (run_of((1.0, 2.0)), run_of((1.02, 1.97)), 0, 0),  # within what two runs differ by
        (run_of((1.0, 2.0), spread=0.06), run_of((1.1, 1.8), spread=0.06), 0, 0),  # within their own noise
        (run_of((1.0, 2.0)), run_of((2.0, 4.0), ceilings={"copy_gbps": 2000.0, "matmul_tflops": 700.0}), 0, 0),
        (run_of((1.0, 2.0)), run_of((1.0, 2.0), ceilings={"copy_gbps": 5000.0, "matmul_tflops": 700.0}), 2, 0),
    ],
)
def test_compare(script, tmp_path, monkeypatch, capsys, before, after, slower, faster):
    paths = [tmp_path / "before.json", tmp_path / "after.json"]
    for path, run in zip(paths, (before, after)):
        path.write_text(json.dumps(run))
    monkeypatch.setattr(sys, "argv", ["compare.py", *map(str, paths)])
    if slower:
        with pytest.raises(SystemExit, match="^1$"):
            script("compare").main()
    else:
        script("compare").main()
    said = capsys.readouterr().out
    assert f"slower: {slower} of 2" in said and f"faster: {faster} of 2" in said


def test_compare_names_what_only_one_measured(script, tmp_path, monkeypatch, capsys):
    paths = [tmp_path / "before.json", tmp_path / "after.json"]
    for path, ms in zip(paths, ((1.0, 2.0), (1.0,))):
        path.write_text(json.dumps(run_of(ms)))
    monkeypatch.setattr(sys, "argv", ["compare.py", *map(str, paths)])
    script("compare").main()
    assert "no longer measured: 1\nsilu  large  forward  portable-kernels" in capsys.readouterr().out


def test_report_is_what_was_measured(script):
    """docs/performance.*, the README's table and the plots, made anew from benchmarks/results/."""
    report, again = script("report"), "run python benchmarks/report.py"
    assert (report.DOCS / "performance.md").read_text() == report.page(), again
    assert (report.DOCS / "performance.html").read_text() == report.html(), again
    readme = (ROOT / "README.md").read_text()
    assert readme == report.readme() and report.short() in readme, again
    linked = set(re.findall(r"\(plots/(\w+\.png)\)", report.page()))
    assert linked == {path.name for path in (report.DOCS / "plots").iterdir()}, again


def test_plots(script, tmp_path):
    pytest.importorskip("matplotlib")
    report = script("report")
    report.draw(tmp_path)
    linked = set(re.findall(r"\(plots/(\w+\.png)\)", report.page()))
    assert {path.name for path in tmp_path.iterdir()} == linked
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in tmp_path.iterdir())


@pytest.fixture(scope="module")
def browser():
    """A real one, without a window."""
    sync_api = pytest.importorskip("playwright.sync_api")
    names = ("chromium-headless-shell", "chromium", "google-chrome")
    found = next(filter(None, map(shutil.which, names)), None)
    if found is None:
        pytest.skip(f"no browser: none of {', '.join(names)} is installed")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])  # CI runs as root
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser, tmp_path):
    """open_page(text of it), in the browser. Nothing may go wrong in it, and nothing be fetched for it."""
    wrong, pages, path = [], [], tmp_path / "page.html"

    def requested(request):
        if request.url.split("#")[0] != path.as_uri():
            wrong.append(request.url)

    def open_page(text):
        path.write_text(text)
        pages.append(browser.new_page(viewport={"width": 1200, "height": 900}))
        pages[-1].on("pageerror", lambda error: wrong.append(str(error)))
        pages[-1].on("console", lambda message: wrong.append(message.text))
        pages[-1].on("request", requested)
        pages[-1].goto(path.as_uri())
        return pages[-1]

    yield open_page
    for page in pages:
        page.close()
    assert wrong == []


@pytest.fixture
def opened(open_page, script):
    """The page as it is committed."""
    return open_page((script("report").DOCS / "performance.html").read_text())


def cells(page, column):
    return page.locator(f"#rows tbody tr td:nth-child({column})").all_inner_texts()


def test_page_chooses(opened, script):
    sweep = script("report").load("sweep")
    rows = [r for r in sweep["rows"] if r["op"] == "rms_norm"]
    opened.select_option("#op", "rms_norm")
    assert set(cells(opened, 1)) == {"rms_norm"}
    assert len(cells(opened, 1)) == len({(r["case"], r["direction"]) for r in rows})
    directions = {r["direction"] for r in rows}
    providers = {r["provider"] for r in rows}
    lines = opened.locator("#chart polyline.way")
    assert lines.count() == len(directions) * len(providers)
    assert opened.locator("#chart .ceiling").count() == len(directions)
    opened.select_option("#direction", "forward")
    assert set(cells(opened, 3)) == {"forward"} and lines.count() == len(providers)
    opened.fill("#case", "x 4096")
    case = next(r for r in rows if r["direction"] == "forward" and r["case"].endswith("x 4096"))
    assert cells(opened, 2) == [case["case"]]
    opened.select_option("#measure", "ms")
    ours = next(r["ms"] for r in rows if (r["case"], r["direction"], r["provider"]) ==
                (case["case"], "forward", "portable-kernels"))  # fmt: skip
    assert float(cells(opened, 4)[0]) == pytest.approx(ours, rel=0.01)
    opened.uncheck("#providers input[value=torch]")
    assert "torch" not in opened.locator("#rows thead").inner_text().split()
    assert lines.count() == len(providers) - 1
    opened.reload()  # what was chosen is in the address
    assert cells(opened, 2) == [case["case"]] and lines.count() == len(providers) - 1
    opened.select_option("#op", "")
    opened.fill("#case", "")
    assert lines.count() == 0 and opened.locator("#rows tbody tr").count() > 100
    opened.locator("#rows tbody tr", has_text="dropout").first.click()
    assert set(cells(opened, 1)) == {"dropout"}


def test_page_sorts(opened):
    opened.select_option("#op", "")
    ratio = opened.locator("#rows thead th").last
    ratio.locator("button").click()
    assert ratio.get_attribute("aria-sort") == "descending"
    column = opened.locator("#rows thead th").count()
    found = [float(text) for text in cells(opened, column) if text]
    assert len(found) > 100 and found == sorted(found, reverse=True)
    ratio.locator("button").click()
    assert ratio.get_attribute("aria-sort") == "ascending"
    found = [float(text) for text in cells(opened, column) if text]
    assert found == sorted(found)
    marked = opened.locator("#rows tbody tr.slower").count()  # by more digits than are shown
    assert sum(value < 0.97 for value in found) <= marked <= sum(value <= 0.97 for value in found)
    opened.get_by_role("button", name="op", exact=True).first.click()
    assert cells(opened, 1) == sorted(cells(opened, 1), key=str.lower)
    assert opened.locator("#host tbody tr").count() > 40


def test_report_of_whole_models(script, monkeypatch, tmp_path):
    """Before and after one of the ways failed."""
    pytest.importorskip("matplotlib")
    report = script("report")
    ways = ("torch", "liger", "portable-kernels", "torch.compile")
    rows = [
        {"model": "decoder", "way": way, "what": what, "per_s": 1000.0 + 1000 * i, "peak_mib": 10.0 * i,
         "loss_off": 0.01}
        for i, way in enumerate(ways) for what in ("training step", "prefill")
    ]  # fmt: skip
    record = {**run_of((1.0,)), "transformers": "5", "liger": "0", "size": {"batch": 2, "tokens": 8, "steps": 4}}
    found, load = {**record, "failed": ["decoder, torch: died"]}, report.load
    monkeypatch.setattr(report, "load", lambda name: found if name == "end_to_end" else load(name))
    for kept, first in ((rows, "| 3000 | 3.00 | 20 | 1.0e-02 |"), (rows[2:], "| 3000 |  | 20 | 1.0e-02 |")):
        found["rows"] = kept
        assert "| decoder | training step | portable-kernels " + first in report.page()
        assert "Not measured at this commit: decoder, torch: died." in report.page()
        assert "| portable-kernels | 3000 | 3000 | 20 |" in report.short()
        assert '"way":"torch.compile"' in report.html()
        script("plots").models(found, tmp_path / "models.png")
        assert (tmp_path / "models.png").read_bytes().startswith(b"\x89PNG")


def test_sweep_writes_what_the_report_reads(script, tmp_path):
    record = run_of((1.23456789, 2.0), spread=0.0)
    script("sweep").write(record, tmp_path / "found.json")
    text = (tmp_path / "found.json").read_text()
    assert text.count("\n") > len(record["rows"]) and json.loads(text)["rows"][0]["ms"] == 1.2346
    record["rows"] = json.loads(text)["rows"]
    assert json.loads(text) == record


def test_page_of_all_that_can_be_measured(open_page, script, monkeypatch):
    report = script("report")
    sweep = run_of((1.0, 2.0), host={"silu": {"portable-kernels": (4.0, 8.0), "torch": (5.0, 9.0)}})
    sweep["first_call"] = {
        "silu": {"portable-kernels": {"cold": {"forward": 1.5, "backward": 2.0}, "warm": {"forward": 0.1}}}
    }
    row = {"model": "decoder", "what": "prefill", "per_s": 5e4, "peak_mib": 123.4}
    whole = {"rows": [{**row, "way": "torch", "off_by": 0.0}, {**row, "way": "</script><b>", "off_by": 1e-3}]}
    monkeypatch.setattr(report, "load", lambda name: {"sweep": sweep, "end_to_end": whole}[name])
    page = open_page(report.html())
    text = [page.locator(f"#{id} tbody tr").all_inner_texts() for id in ("host", "first", "models")]
    host, first, models = ([row.split("\t") for row in rows] for rows in text)
    assert host == [["silu", "4.00", "8.00", "5.00", "9.00"]]
    assert first == [["silu", "3.50", "0.100", "", ""]]
    assert models[1] == ["decoder", "prefill", "</script><b>", "50000", "123", "1.0e-3"]
    page.get_by_role("button", name="off", exact=True).click()
    assert page.locator("#models tbody tr").first.inner_text().split("\t")[2] == "</script><b>"
