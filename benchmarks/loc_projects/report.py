"""The table and the plot, with published figures."""

import importlib.util
import sys
from pathlib import Path
from typing import Any

PUBLISHED = {
    "Megatron-LM": ("O(NM)", "O(N)", 400, 20),
    "DeepSpeed": ("O(NM)", "O(NM)", 320, 4000),
    "TorchTitan, before its config trees": ("O(NM)", "O(NM)", 240, 400),
    "Praxis": ("O(NM)", "O(M)", 300, 5),
    "MaxText": ("O(NM)", "O(NM)", 200, 300),
    "AXLearn": ("O(1)", "O(1)", 0, 0),
}
"""Growth and lines of RoPE and MoE by system, as estimated in arXiv 2507.05411 for 20 model x 10 attention variants."""


def table(results: dict[str, Any]) -> str:
    """Return the measured table in Markdown."""
    n, m, base = results["modules"], results["experiments"], results["baseline"]
    rows = [
        f"{n} modules x {m} experiments, {results['cells']} cells",
        "",
        "| | lines in existing files | lines of activation | lines per module | lines per experiment | active cells |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for title, facts in (("axlearn-core", results), ("subtyping", base)):
        for feature, slopes in facts["slopes"].items():
            rows.append(
                f"| {title}, {feature} | {facts['changed_lines'][feature]:,} | {facts['activation_lines'][feature]} | "
                f"{slopes['N']:g} | {slopes['M']:g} | {facts['active'][feature]:,} of {results['cells']:,} |"
            )
    rows += [
        "",
        "| published, estimated for 20 x 10 | RoPE | MoE | RoPE lines | MoE lines |",
        "|---|---|---|---:|---:|",
    ]
    rows += [f"| {name} | {a} | {b} | {x:,} | {y:,} |" for name, (a, b, x, y) in PUBLISHED.items()]
    for title, facts in (("subtyping", base), ("axlearn-core", results)):
        at = {f: next((t for a, b, t in facts["lines"][f] if (a, b) == (20, 10)), None) for f in ("rope", "moe")}
        if at["rope"] is not None:
            o = "O(NM)" if facts is base else "O(1)"
            rows.append(f"| {title}, counted here | {o} | {o} | {at['rope']:,} | {at['moe']:,} |")
    modifier_lines = ", ".join(f"{f} {lines}" for f, lines in results["modifier_lines"].items())
    seconds = results["seconds"]
    rows += [
        "",
        f"Lines of a modifier (at most 10): {modifier_lines}",
        f"RoPE and MoE applied to {results['timed_configs']:,} configs (at most 2 s for 1,000): {seconds['apply']:.2f} s; "
        f"as whole requests by name, with who set what: {seconds['resolve']:.2f} s",
    ]
    return "\n".join(rows)


def need_matplotlib() -> None:
    """Exit with installation instructions if matplotlib is missing."""
    if importlib.util.find_spec("matplotlib") is None:
        sys.exit(
            "--plot needs matplotlib, which is not installed\n    fix: uv pip install matplotlib, or remove --plot"
        )


def plot(results: dict[str, Any], file: Path) -> None:
    """Plot the lines by modules and by experiments, and the published rows."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 3, figsize=(15, 4.6), width_ratios=(1, 1, 1.25))
    most = {"N": results["modules"], "M": results["experiments"]}
    for axis, (along, other), word in zip(axes, (("N", "M"), ("M", "N")), ("modules", "experiments"), strict=False):
        fixed = most[other]
        for title, facts, style in (("subtyping", results["baseline"], "--"), ("axlearn-core", results, "-")):
            for (feature, points), colour in zip(facts["lines"].items(), (f"C{k}" for k in range(10)), strict=False):
                points_here = [
                    (n if along == "N" else m, t) for n, m, t in points if (m if along == "N" else n) == fixed
                ]
                label = f"{title}, {feature}: {facts['slopes'][feature][along]:g} per {word[:-1]}"
                axis.plot(*zip(*points_here, strict=True), style, marker="o", color=colour, label=label)
        axis.set(xlabel=word, ylabel="lines outside the feature's package", title=f"{fixed} {_other(word)}")
        axis.set_yscale("symlog", linthresh=10)
        axis.set_ylim(-0.5, None)
        axis.legend(fontsize=7, loc="center right")
    _bars(axes[2], results)
    figure.tight_layout()
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=110, metadata={"Software": None})
    pyplot.close(figure)


def _other(word: str) -> str:
    return "experiments" if word == "modules" else "modules"


def _bars(axis: Any, results: dict[str, Any]) -> None:
    """Draw the published lines, and ours if 20 x 10 was counted."""
    names = [n.replace(", before", ",\nbefore") for n in PUBLISHED]
    values = [(x, y) for _, _, x, y in PUBLISHED.values()]
    for title, facts in (("subtyping (counted)", results["baseline"]), ("axlearn-core (counted)", results)):
        at = {f: next((t for a, b, t in facts["lines"][f] if (a, b) == (20, 10)), None) for f in ("rope", "moe")}
        if at["rope"] is not None:
            names.append(title)
            values.append((at["rope"], at["moe"]))
    for k, (label, colour) in enumerate((("RoPE", "C0"), ("MoE", "C1"))):
        places = [p + 0.4 * k for p in range(len(names))]
        bars = axis.barh(places, [v[k] for v in values], height=0.38, color=colour, label=label)
        axis.bar_label(bars, fontsize=7, padding=2)
    axis.set_yticks([p + 0.2 for p in range(len(names))], names, fontsize=8)
    axis.set_xscale("symlog", linthresh=10)
    axis.set_xlim(0, 30_000)
    axis.invert_yaxis()
    axis.set(xlabel="lines", title="20 x 10; others: published estimates")
    axis.legend(fontsize=8)
