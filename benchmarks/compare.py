"""What changed between two runs of sweep.py: python benchmarks/compare.py before.json after.json

Times are held against the ceiling of their own run, a device copy or a product, so that two machines can be compared.
A change counts where it is larger than the noise that both runs measured, half of p80 - p20 each, and larger than
`--slack`, which is what two runs of the same code may differ by. Ends with 1 where this package became slower.
"""

import argparse
import json
import sys
from pathlib import Path

OURS = "portable-kernels"


def key(row):
    return row["op"], row["case"], row["direction"], row["provider"]


def changes(before, after, slack, providers):
    """(new time over old, noise, row before, row after) of all that both measured, the slowest first."""
    old = {key(r): r for r in before["rows"]}
    found = []
    for row in after["rows"]:
        was = old.get(key(row))
        if was is None or row["provider"] not in providers:
            continue
        kind = "matmul_tflops" if "tflops" in row else "copy_gbps"
        ratio = row["ms"] / was["ms"] * after["ceilings"][kind] / before["ceilings"][kind]
        noise = sum((r["p80"] - r["p20"]) / r["ms"] / 2 for r in (was, row))
        found.append((ratio, max(slack, noise), was, row))
    return sorted(found, key=lambda f: -f[0])


def line(ratio, noise, was, row):
    times = f"{was['ms']:.4f} -> {row['ms']:.4f} ms"
    return f"{ratio:6.2f} x the time (noise {noise:4.0%})  " + "  ".join((*key(row), times))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--slack", type=float, default=0.03, help="of the time: differences of less are none")
    parser.add_argument("--providers", nargs="*", default=[OURS], help="whose times are compared")
    options = parser.parse_args()
    before, after = (json.loads(path.read_text()) for path in (options.before, options.after))
    for name, run in (("before", before), ("after", after)):
        print(f"{name}: {run['device']}, torch {run['torch']}, Triton {run['triton']}, {run['date']}, {run['commit']}")
    found = changes(before, after, options.slack, options.providers)
    slower = [f for f in found if f[0] > 1 + f[1]]
    faster = [f for f in found if f[0] < 1 / (1 + f[1])][::-1]
    for title, group in (("slower", slower), ("faster", faster)):
        print(f"\n{title}: {len(group)} of {len(found)}")
        for entry in group:
            print(line(*entry))
    for title, (a, b) in {"no longer measured": (before, after), "new": (after, before)}.items():
        keys = {key(r) for r in b["rows"]}
        missing = [key(r) for r in a["rows"] if key(r) not in keys and r["provider"] in options.providers]
        if missing:
            print(f"\n{title}: {len(missing)}\n" + "\n".join("  ".join(k) for k in missing))
    if slower:
        sys.exit(1)


if __name__ == "__main__":
    main()
