"""Write docs/performance.* and the README's table from what was measured: python benchmarks/report.py

Of results/nvidia_h200_*.json: sweep (sweep.py), end_to_end (end_to_end.py), memory (memory_linear_cross_entropy.py).
docs/performance.md has every number, docs/performance.html lets a browser compare them, docs/plots/ has pictures.
"""

import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS, DOCS = ROOT / "benchmarks" / "results", ROOT / "docs"
OURS = "portable-kernels"
# What the README shows of the sweep: an op of each family, at the sizes of a model of 8 billion parameters.
SHORT = [
    ("softmax", "32768 x 4096"), ("rms_norm", "32768 x 4096"), ("layer_norm", "32768 x 4096"), ("swiglu", "llama3_8b"),
    ("apply_rotary_pos_emb", "llama3_8b"), ("cross_entropy", "llama3_8b"), ("linear", "4096 x 4096 x 4096"),
    ("gated_linear", "8192 x 14336 x 4096"), ("attention, causal", "4 x 32 x 4096, 128"),
    ("flash_attn_with_kvcache", "llama3_8b, 8 x 32768"),
]  # fmt: skip
PLOTTED = (
    "softmax", "log_softmax", "rms_norm", "add_rms_norm", "layer_norm", "cross_entropy", "linear",
    "linear with bias and gelu", "gated_linear", "attention", "attention, causal",
)  # fmt: skip


def load(name):
    path = RESULTS / f"nvidia_h200_{name}.json"
    found = json.loads(path.read_text()) if path.exists() else None
    if name == "sweep":
        calm = [r for r in found["rows"] if r["p80"] <= 1.5 * r["p20"]]  # else the device waited for the host
        found["disturbed"], found["rows"] = len(found["rows"]) - len(calm), calm
    return found


def grouped(rows):
    """{(op, case, direction): {provider: row}}, in the order of measurement."""
    found = {}
    for row in rows:
        found.setdefault((row["op"], row["case"], row["direction"]), {})[row["provider"]] = row
    return found


def speed(row):
    return row.get("tflops") or row["gbps"]


def ratios(sweep):
    """{(op, case, direction): this package's speed over the fastest other way's}"""
    found = {}
    for key, ways in grouped(sweep["rows"]).items():
        rivals = [speed(w) for name, w in ways.items() if name != OURS]
        if OURS in ways and rivals:
            found[key] = speed(ways[OURS]) / max(rivals)
    return found


def table(header, lines):
    return "\n".join(["| " + " | ".join(header) + " |", "|" + "---|" * len(header), *lines])


def line(cells):
    return "| " + " | ".join(cells) + " |"


def measured(sweep, flops):
    """One line a case: this package, its share of the ceiling, PyTorch and the peers, memory, and the ratio."""
    lines, to_fastest, counted = [], ratios(sweep), []
    rows = [r for r in sweep["rows"] if ("tflops" in r) == flops]
    others = sorted({r["provider"] for r in rows} - {OURS, "torch"})
    memory = any("peak_mib" in r for r in rows)
    for (op, case, direction), ways in grouped(rows).items():
        ours = ways.get(OURS)
        before = " †" if any("commit" in w for w in ways.values()) else ""
        cells = [f"`{op}`{before}", case, direction, f"{speed(ours):.0f}" if ours else ""]
        if not flops:
            read = f", {ours['of_read']:.2f} of a read" if ours and "of_read" in ours else ""
            cells.append(f"{ours['of_copy']:.2f}{read}" if ours else "")
        cells += [f"{speed(ways[n]):.0f}" if n in ways else "" for n in ("torch", *others)]
        ratio = to_fastest.get((op, case, direction))
        counted += [ratio] if ratio else []
        cells.append(f"{ratio:.2f}" if ratio else "")
        if memory:
            cells += [f"{w['peak_mib']:.0f}" if w and "peak_mib" in w else "" for w in (ours, ways.get("torch"))]
        lines.append(line(cells))
    header = ["op", "case", "direction", "this package", *([] if flops else ["of a copy"]), "torch", *others]
    header += ["ratio to the fastest", *(["MiB", "torch's MiB"] if memory else [])]
    slower = sum(r < 0.97 for r in counted)
    said = f"{len(counted)} cases; {slower} more than 3% slower than the fastest other way, as the ratio shows."
    return said + "\n\n" + table(header, lines)


def host(sweep):
    lines = []
    for op, ways in sweep["host"].items():
        if OURS in ways and "torch" in ways:
            (ours, learning), (torchs, torch_learning) = ways[OURS], ways["torch"]
            lines.append(f"| `{op}` | {ours:.0f} | {torchs:.0f} | {learning:.0f} | {torch_learning:.0f} |")
    return table(["op", "no gradient", "torch", "with gradient", "torch"], lines)


def first_calls(sweep):
    """Seconds of the first call, forward and backward together."""

    def total(ways, name, temperature):
        took = ways.get(name, {}).get(temperature)
        return f"{sum(took.values()):.2f}" if took else ""

    lines = [
        line([f"`{op}`", *(total(ways, name, t) for name in (OURS, "torch.compile") for t in ("cold", "warm"))])
        for op, ways in sweep["first_call"].items()
    ]
    return table(["op", "this package", "from caches", "torch.compile", "from caches"], lines)


def memory(found):
    lines = [
        f"| {r['shape']} | {r['reduction']} | {r['way']} | {r['ms']:.1f} | {r['peak_mib']:.0f} |" for r in found["rows"]
    ]
    return table(["shape", "reduction", "way", "ms", "peak MiB"], lines)


def models(found):
    """One line a way to run a whole model."""
    torchs = {(r["model"], r["what"]): r["per_s"] for r in found["rows"] if r["way"] == "torch"}
    kinds, lines = list(dict.fromkeys((r["model"], r["what"]) for r in found["rows"])), []
    for r in sorted(found["rows"], key=lambda r: kinds.index((r["model"], r["what"]))):
        theirs, off = r.get("torchs") or torchs.get((r["model"], r["what"])), r.get("loss_off", r.get("off_by"))
        cells = [f"{r['per_s']:.0f}", f"{r['per_s'] / theirs:.2f}" if theirs else ""]
        cells += [f"{r['peak_mib']:.0f}" if "peak_mib" in r else "", f"{off:.1e}" if off is not None else ""]
        lines.append(line([r["model"], r["what"], r["way"] + " †" * ("commit" in r), *cells]))
    return table(["model", "what", "way", "tokens or sentences per second", "of torch's", "peak MiB", "off"], lines)


def plans():
    """What each plan of products had of the speed of torch's own, where it was measured, from the plans themselves."""
    lines = []
    for path in sorted((ROOT / "torch-ext" / "portable_kernels" / "configs").glob("*.json")):
        for row in json.loads(path.read_text()):
            measured = row.get("measured", {})
            kind = row["plan"]["kind"]
            for case, ratio in measured.get("of_torch", {}).items():
                lines.append(f"| `{path.stem}` | {case} | {kind} | {ratio:.2f} | {measured['on']} |")
    return table(["op", "M x N x K", "kind of plan", "speed, of torch's", "on"], lines)


def of(record):
    return (
        f"One {record['device']}, torch {record['torch']}, Triton {record['triton']}, {record['date']}, "
        f"commit {record['commit']}"
    )


def earlier(rows):
    """What the mark of rows of an earlier commit means."""
    ways = {}
    for row in rows:
        if "commit" in row:
            ways.setdefault(row["commit"], set()).add(row.get("provider") or row["way"])
    return "".join(f"† Measured at commit {c}: {'; '.join(sorted(names))}.\n" for c, names in sorted(ways.items()))


def peers(sweep):
    """Who the columns are, with the versions that were measured."""
    names = {"liger": "Liger", "quack": "quack", "gems": "FlagGems", "fla": "flash-linear-attention"}
    found = [f"`{name}` is {names[name]} {version}" for name, version in sweep.get("peers", {}).items()]
    return f"{', '.join(found)}.\n" if found else ""


def pictures(sweep):
    """{file in docs/plots: op} of the ops that have sizes to plot."""
    ops = {r["op"] for r in sweep["rows"]}
    return {op.replace(",", "").replace(" ", "_") + ".png": op for op in PLOTTED if op in ops}


def page():
    sweep, found, whole = load("sweep"), load("memory"), load("end_to_end")
    ceiling = sweep["ceilings"]
    arithmetic = first = end_to_end = ""
    if any("tflops" in row for row in sweep["rows"]):
        arithmetic = f"""## What arithmetic bounds, in TFLOP/s

{measured(sweep, True)}

"""
    if sweep.get("first_call"):
        first = f"""## Seconds of the first call

Forward and backward of one case, in a process whose device has started: with nothing compiled, and with what Triton and
torch.compile keep on disk. Other processes compiled at the same time.

{first_calls(sweep)}

"""
    if whole:
        size = whole["size"]
        failed = "".join(f"\nNot measured at this commit: {f}." for f in whole["failed"])
        end_to_end = f"""## Whole models

`python benchmarks/end_to_end.py`. {of(whole)}, transformers {whole["transformers"]}, Liger {whole["liger"]}, bfloat16.
The decoder is shaped like Llama 3.2 1B, with random weights; a step is forward, backward and AdamW on
{size["batch"]} x {size["tokens"]} tokens. The encoder is shaped like all-MiniLM-L6-v2. "Off" is the largest difference
from PyTorch's loss in {size["steps"]} steps from the same weights on the same text, and else the norm of the difference
from its result over the norm of that.{failed}
{earlier(whole["rows"])}
![Speed and memory of whole models](plots/models.png)

{models(whole)}

"""
    return f"""# Performance

Written by `python benchmarks/report.py` from `benchmarks/results/`; measured by `python benchmarks/sweep.py`, whose
docstring says how. {of(sweep)}, bfloat16.
A device copy of 2^27 elements runs at {ceiling["copy_gbps"]:.0f} GB/s, and a product of 4096 x 4096 matrices by the
vendor's library at {ceiling["matmul_tflops"]:.0f} TFLOP/s. A cell is empty where a way was not there, refused or was
wrong, and where the device waited for the host (80th percentile over 1.5 times the 20th: {sweep["disturbed"]} times).
{peers(sweep)}{earlier(sweep["rows"])}

[performance.html](performance.html) has the same numbers to choose from, sort and plot, in one file for a browser.

![Every case beside the fastest other way](plots/overview.png)

{end_to_end}## What memory bounds, in GB/s

Bytes that must be read and written, over the time on the device; its share of the speed of torch's copy of as many
bytes, timed in turns with it, and of a read of them where the op writes next to nothing. MiB is what a call takes
beside its inputs.

{measured(sweep, False)}

{arithmetic}## Over sizes

{chr(10).join(f"![{op} over sizes](plots/{file})" for file, op in pictures(sweep).items())}

## Plans of products

While plans were searched for, each beside torch's own product (cuBLAS) in turns; from `configs/`. The kind `vendor`
hands the product to torch: its number is what the fastest kernel of this package had.

{plans()}

## The host's share of a call, in microseconds

On inputs so small that there is nothing else; torch's own function or composition beside it. Measured at commit
{sweep.get("host_commit", sweep["commit"])}.

{host(sweep)}

{first}## Memory of a linear layer with cross-entropy

Forward and backward; `python benchmarks/memory_linear_cross_entropy.py`. {of(found)}.
Peak is what the call needs beside its inputs. Liger adds the gradients of chunks in bfloat16 unless it is told to use
float32; this package always adds them in float32.

{memory(found)}
"""


def short():
    """The README's table: speed on the device at some sizes, and what a whole model gains."""
    sweep, whole = load("sweep"), load("end_to_end")
    found, lines = grouped(sweep["rows"]), []
    others = [n for n in ("torch.compile", "liger") if any(r["provider"] == n for r in sweep["rows"])]
    names = (OURS, "torch", *others)
    for op, case in SHORT:
        both = [found.get((op, case, direction), {}) for direction in ("forward", "backward")]
        unit = "TFLOP/s" if any("tflops" in row for rows in both for row in rows.values()) else "GB/s"
        cells = [f"{speed(rows[n]):.0f}" if n in rows else "" for rows in both for n in names]
        before = " †" * any("commit" in rows.get(n, ()) for rows in both for n in names)
        lines.append(line([f"`{op}`{before}", case, unit, *cells]))
    copy, product = (sweep["ceilings"][k] for k in ("copy_gbps", "matmul_tflops"))
    ways = ["this package", "PyTorch", *others]
    header = ["op", "at", "unit", *(f"forward: {n}" for n in ways), *(f"backward: {n}" for n in ways)]
    text = f"""{of(sweep)}.
bfloat16, time on the device; a device copy runs at {copy:.0f} GB/s, a product of 4096 x 4096 matrices by cuBLAS at
{product:.0f} TFLOP/s.

{table(header, lines).replace("liger", "Liger")}"""
    if whole:
        lines = []
        for way in dict.fromkeys(r["way"] for r in whole["rows"] if r["model"] == "decoder"):
            step, prefill = (
                next((r for r in whole["rows"] if (r["way"], r["what"]) == (way, what)), {})
                for what in ("training step", "prefill")
            )
            cells = (step.get("per_s"), prefill.get("per_s"), step.get("peak_mib"))
            before = " †" * any(r["way"] == way and "commit" in r for r in whole["rows"])
            lines.append(line([way + before, *("" if c is None else f"{c:.0f}" for c in cells)]))
        at = f", commit {whole['commit']}" * (whole["commit"] != sweep["commit"])
        size = whole["size"]
        text += f"""

A decoder shaped like Llama 3.2 1B, {size["batch"]} x {size["tokens"]} tokens, random weights, AdamW{at}:

{table(["way", "training, tokens/s", "prefill, tokens/s", "peak MiB in training"], lines)}"""
    shown = [
        r
        for case in SHORT
        for d in ("forward", "backward")
        for r in found.get((*case, d), {}).values()
        if r["provider"] in names
    ]
    old = earlier(shown + (whole["rows"] if whole else []))
    return text + ("\n\n" + old.strip() if old else "")


MARKS = re.compile("(<!-- measured -->\n).*?(\n<!-- end of measured -->)", re.DOTALL)


def readme():
    return MARKS.sub(lambda m: m[1] + short() + m[2], (ROOT / "README.md").read_text())


def html():
    """One file that needs nothing else: the page, with the numbers in it."""
    sweep, whole = load("sweep"), load("end_to_end")
    fields = (
        "op",
        "case",
        "direction",
        "provider",
        "ms",
        "p20",
        "p80",
        "gbps",
        "tflops",
        "of_copy",
        "peak_mib",
        "off_by",
    )

    def rounded(value):
        return float(f"{value:.4g}") if isinstance(value, float) else value

    data = {
        "about": {k: sweep[k] for k in ("device", "torch", "triton", "commit", "date", "ceilings")}, "ours": OURS,
        "fields": fields, "rows": [[rounded(row.get(f)) for f in fields] for row in sweep["rows"]],
        "host": {op: {n: [round(v, 1) for v in t] for n, t in ways.items()} for op, ways in sweep["host"].items()},
        "first": {
            op: {n: {t: round(sum(took.values()), 2) for t, took in of.items()} for n, of in ways.items()}
            for op, ways in sweep.get("first_call", {}).items()
        },
        "models": [
            {k: rounded(r.get(k)) for k in ("model", "what", "way", "per_s", "peak_mib", "loss_off", "off_by")}
            for r in (whole["rows"] if whole else [])
        ],
    }  # fmt: skip
    text = json.dumps(data, separators=(",", ":")).replace("</", "<\\/")
    return (ROOT / "benchmarks" / "page.html").read_text().replace('"DATA"', text)


def draw(folder):
    import plots

    sweep, whole = load("sweep"), load("end_to_end")
    for file, op in pictures(sweep).items():
        plots.sizes(op, [r for r in sweep["rows"] if r["op"] == op], sweep, folder / file)
    plots.overview(ratios(sweep), sweep, folder / "overview.png")
    if whole:
        plots.models(whole, folder / "models.png")


if __name__ == "__main__":
    DOCS.mkdir(exist_ok=True)
    (DOCS / "performance.md").write_text(page())
    (DOCS / "performance.html").write_text(html())
    (ROOT / "README.md").write_text(readme())
    try:
        draw(DOCS / "plots")
    except ImportError as error:
        sys.exit(f"docs/plots/ is as it was: {error}; pip install matplotlib")
