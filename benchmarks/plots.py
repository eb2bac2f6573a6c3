"""Pictures of what was measured, for docs/: one of each op over its sizes, one of all ops, one of whole models."""

import matplotlib

matplotlib.use("agg")
from matplotlib import pyplot  # noqa: E402

OURS = "portable-kernels"
COLORS = {
    OURS: "#d62728", "torch": "#7f7f7f", "torch.compile": "#1f77b4", "liger": "#2ca02c", "quack": "#9467bd",
    "gems": "#8c564b", "fla": "#e377c2", "cudnn": "#17becf", "flash2": "#bcbd22",
    f"{OURS}, torch's attention": "#ff9896", f"{OURS}, torch.compile": "#aec7e8",
}  # fmt: skip
STYLE = {
    "font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.3,
    "svg.hashsalt": "0",
}  # fmt: skip


def save(figure, path):
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=90, metadata={"Software": None}, bbox_inches="tight")
    pyplot.close(figure)


def sizes(op, rows, record, path):
    """One op: a panel a direction, a line a provider over the cases, the ceiling drawn."""
    flops = "tflops" in rows[0]
    unit, ceiling = ("TFLOP/s", "matmul_tflops") if flops else ("GB/s", "copy_gbps")
    directions = list(dict.fromkeys(r["direction"] for r in rows))
    cases = list(dict.fromkeys(r["case"] for r in rows))
    providers = [p for p in COLORS if any(r["provider"] == p for r in rows)]
    with pyplot.rc_context(STYLE):
        figure, panels = pyplot.subplots(
            1, len(directions), figsize=(4.2 * len(directions), 3.4), sharey=True, squeeze=False
        )
        for panel, direction in zip(panels[0], directions):
            for provider in providers:
                of = {r["case"]: r for r in rows if r["direction"] == direction and r["provider"] == provider}
                y = [of[c].get("tflops", of[c].get("gbps")) if c in of else float("nan") for c in cases]
                panel.plot(
                    range(len(cases)), y, "o-", color=COLORS[provider], label=provider, markersize=3,
                    linewidth=2 if provider == OURS else 1.2, zorder=3 if provider == OURS else 2,
                )  # fmt: skip
            what = "a product of 4096 x 4096" if flops else "a device copy"
            panel.axhline(record["ceilings"][ceiling], color="black", linestyle="--", linewidth=1, label=what)
            panel.set_title(direction)
            panel.set_xticks(range(len(cases)), cases, rotation=60, ha="right", fontsize=7)
        largest = max([record["ceilings"][ceiling], *(r.get("tflops") or r["gbps"] for r in rows)])
        panels[0][0].set_ylim(0, 1.05 * largest)
        panels[0][0].set_ylabel(unit)
        handles, labels = panels[0][0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
        figure.suptitle(f"{op}, bfloat16, {record['device']}")
        figure.tight_layout()
        save(figure, path)


def overview(groups, record, path):
    """The speed of every case beside that of the fastest other way: a point a case, a line an op."""
    ops = list(dict.fromkeys(op for op, _, _ in groups))
    marks = {"forward": ("o", "#d62728"), "backward": ("s", "#1f77b4"), "both": ("^", "#2ca02c")}
    with pyplot.rc_context(STYLE):
        figure, panel = pyplot.subplots(figsize=(7.5, 0.22 * len(ops) + 1.2))
        for direction, (mark, color) in marks.items():
            points = [
                (min(8.0, ratio), len(ops) - 1 - ops.index(op))
                for (op, _, d), ratio in groups.items()
                if d == direction
            ]
            if points:
                panel.plot(*zip(*points), mark, color=color, label=direction, markersize=4, alpha=0.7, linestyle="none")
        panel.axvline(1, color="black", linewidth=1)
        panel.set_xscale("log", base=2)
        ticks = [0.25, 0.5, 1, 2, 4, 8]
        panel.set_xticks(ticks, ["1/4", "1/2", "1", "2", "4", "8 or more"])
        panel.set_yticks(range(len(ops)), ops[::-1], fontsize=7)
        panel.set_xlabel("speed of this package over that of the fastest other way")
        panel.set_title(f"every case, bfloat16, {record['device']}")
        panel.legend(loc="lower right", fontsize=7)
        save(figure, path)


def models(record, path):
    """Whole models: a panel each of speed and of memory, a bar a way."""
    kinds = list(dict.fromkeys((r["model"], r["what"]) for r in record["rows"]))
    panels_of = [(k, "per_s") for k in kinds] + [(k, "peak_mib") for k in kinds if k[0] == "decoder"]
    with pyplot.rc_context(STYLE):
        figure, panels = pyplot.subplots(2, -(-len(panels_of) // 2), figsize=(15, 6.2), squeeze=False)
        for panel, ((model, what), measure) in zip(panels.flat, panels_of):
            rows = [r for r in record["rows"] if (r["model"], r["what"]) == (model, what) and measure in r]
            rows = sorted(rows, key=lambda r: list(COLORS).index(r["way"]), reverse=True)
            bars = panel.barh(
                [r["way"] for r in rows], [r[measure] for r in rows], color=[COLORS[r["way"]] for r in rows]
            )
            panel.bar_label(bars, fmt="{:,.0f}", padding=2, fontsize=7)
            unit = "tokens" if model == "decoder" else "sentences"
            panel.set_title(
                f"{model}, {what}: " + (f"{unit} per second" if measure == "per_s" else "peak MiB"), fontsize=9
            )
            panel.tick_params(axis="y", labelsize=7)
            panel.margins(x=0.18)
        for panel in list(panels.flat)[len(panels_of) :]:
            panel.axis("off")
        figure.suptitle(f"Whole models, bfloat16, {record['device']}")
        figure.tight_layout()
        save(figure, path)
