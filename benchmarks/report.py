"""Write docs/performance.md from what was measured: python benchmarks/report.py

Of results/<device>_sweep.json (sweep.py) and results/<device>_memory.json (memory_linear_cross_entropy.py).
"""

import json
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
OURS = "portable-kernels"


def load(name):
    path = RESULTS / f"nvidia_h200_{name}.json"
    return json.loads(path.read_text()) if path.exists() else None


def grouped(rows):
    """{(op, case, direction): {provider: row}}, in the order of measurement."""
    found = {}
    for row in rows:
        found.setdefault((row["op"], row["case"], row["direction"]), {})[row["provider"]] = row
    return found


def speed(row):
    return row.get("tflops") or row["gbps"]


def table(header, lines):
    return "\n".join(["| " + " | ".join(header) + " |", "|" + "---|" * len(header), *lines])


def measured(sweep, flops):
    """One line a case: this package, its share of the ceiling, PyTorch and the peers, and the ratio to the fastest."""
    lines, ratios = [], []
    others = sorted({r["provider"] for r in sweep["rows"] if ("tflops" in r) == flops} - {OURS, "torch"})
    for (op, case, direction), ways in grouped(sweep["rows"]).items():
        if ("tflops" in next(iter(ways.values()))) != flops:
            continue
        ours = ways.get(OURS)
        rivals = [speed(w) for name, w in ways.items() if name != OURS]
        cells = [f"`{op}`", case, direction, f"{speed(ours):.0f}" if ours else "wrong or refused"]
        if not flops:
            cells.append(f"{ours['of_copy']:.2f}" if ours else "")
        cells += [f"{speed(ways[n]):.0f}" if n in ways else "" for n in ("torch", *others)]
        if ours and rivals:
            ratios.append(speed(ours) / max(rivals))
            cells.append(f"{ratios[-1]:.2f}")
        else:
            cells.append("")
        lines.append("| " + " | ".join(cells) + " |")
    header = ["op", "case", "direction", "this package", *([] if flops else ["of a copy"]), "torch", *others]
    slower = sum(r < 0.97 for r in ratios)
    said = f"{len(ratios)} cases; {slower} more than 3% slower than the fastest other way, as the ratio shows."
    return said + "\n\n" + table([*header, "ratio to the fastest"], lines)


def host(sweep):
    lines = []
    for op, ways in sweep["host"].items():
        if OURS in ways and "torch" in ways:
            (ours, learning), (torchs, torch_learning) = ways[OURS], ways["torch"]
            lines.append(f"| `{op}` | {ours:.0f} | {torchs:.0f} | {learning:.0f} | {torch_learning:.0f} |")
    return table(["op", "no gradient", "torch", "with gradient", "torch"], lines)


def memory(found):
    lines = [
        f"| {r['shape']} | {r['reduction']} | {r['way']} | {r['ms']:.1f} | {r['peak_mib']:.0f} |" for r in found["rows"]
    ]
    return table(["shape", "reduction", "way", "ms", "peak MiB"], lines)


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


def page():
    sweep, found = load("sweep"), load("memory")
    ceiling = sweep["ceilings"]
    arithmetic = ""
    if any("tflops" in row for row in sweep["rows"]):
        arithmetic = f"""## What arithmetic bounds, in TFLOP/s

{measured(sweep, True)}

"""
    return f"""# Performance

Written by `python benchmarks/report.py` from `benchmarks/results/`; measured by `python benchmarks/sweep.py`, whose
docstring says how. {of(sweep)}, bfloat16.
A device copy of 2^27 elements runs at {ceiling["copy_gbps"]:.0f} GB/s, and a product of 4096 x 4096 matrices by the
vendor's library at {ceiling["matmul_tflops"]:.0f} TFLOP/s. {sweep.get("note", "")}

## What memory bounds, in GB/s

Bytes that must be read and written, over the time on the device.

{measured(sweep, False)}

{arithmetic}## Plans of products

While plans were searched for, each beside torch's own product (cuBLAS) in turns; from `configs/`. The kind `vendor`
hands the product to torch: its number is what the fastest kernel of this package had.

{plans()}

## The host's share of a call, in microseconds

On inputs so small that there is nothing else; torch's own function or composition beside it.

{host(sweep)}

## Memory of a linear layer with cross-entropy

Forward and backward; `python benchmarks/memory_linear_cross_entropy.py`. {of(found)}.
Peak is what the call needs beside its inputs. Liger adds the gradients of chunks in bfloat16 unless it is told to use
float32; this package always adds them in float32.

{memory(found)}
"""


if __name__ == "__main__":
    (ROOT / "docs").mkdir(exist_ok=True)
    (ROOT / "docs" / "performance.md").write_text(page())
