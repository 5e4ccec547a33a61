"""Report the cost of a job as a table with fitted exponents, as JSON, and as a picture."""

import html
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs

from axlearn_plugins_runtime.scale.simulation import Cost

FIGURES: Mapping[str, tuple[str, Callable[[Cost], float]]] = {
    "requests": ("process", lambda c: c.use.requests + c.messages),
    "bytes": ("process", lambda c: c.use.bytes + c.message_bytes),
    "seconds": ("process", lambda c: c.seconds),
    "coordinator requests": ("coordinator", lambda c: c.first_use.requests + c.job_messages),
    "coordinator bytes": ("coordinator", lambda c: c.first_use.bytes + c.job_message_bytes),
    "coordinator seconds": ("coordinator", lambda c: c.first_seconds),
    "coordinator CPU": ("coordinator", lambda c: c.first_cpu_seconds),
    "coordinator memory": ("coordinator", lambda c: c.first_memory),
}
"""Figures of a cost by name, each with whom it belongs to. Requests and bytes include messages to the coordinator."""
COLORS = ("#4e79a7", "#f28e2b", "#e15759", "#76b7b2", "#59a14f", "#b07aa1", "#9c755f", "#79706e")
_WIDTH, _HEIGHT, _LEFT, _TOP, _BOTTOM = 460, 300, 60, 30, 40


def fit_exponent(costs: Sequence[Cost], figure: str) -> float:
    """Return the exponent of the number of processes in a figure, by least squares on a log-log scale.

    Args:
        costs: Costs of one part with at least two numbers of processes.
        figure: Name in `FIGURES`.
    """
    value = FIGURES[figure][1]
    xs = [math.log(cost.processes) for cost in costs]
    ys = [math.log(max(value(cost), 1e-9)) for cost in costs]
    mean_x, mean_y = sum(xs) / len(xs), sum(ys) / len(ys)
    products = sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True))
    return products / sum((x - mean_x) ** 2 for x in xs)


def table(costs: Sequence[Cost]) -> str:
    """Return a table for each part: a row for each number of processes, and the fitted exponents."""
    return "\n\n".join(_part_table(part, [c for c in costs if c.part == part]) for part in _parts(costs))


def _part_table(part: str, costs: Sequence[Cost]) -> str:
    rows = [[part, *FIGURES]]
    rows += [[f"{c.processes:,}", *(_format(name, value(c)) for name, (_, value) in FIGURES.items())] for c in costs]
    if len(costs) > 1:
        rows.append(["exponent", *(f"{fit_exponent(costs, name):.2f}" for name in FIGURES)])
    return "\n".join([_align(rows), *_decisions(costs)])


def _decisions(costs: Sequence[Cost]) -> list[str]:
    """Return a title and a table of the seconds of the launcher's decisions, if there are any."""
    names = list(dict.fromkeys(name for cost in costs for name in cost.decisions))
    if not names:
        return []
    rows = [["hosts", *names]]
    for cost in costs:
        seconds = (cost.decisions.get(name) for name in names)
        rows.append([f"{cost.processes:,}", *("-" if s is None else f"{s:.3g} s" for s in seconds)])
    return ["", "time from each event to the last order to start again:", _align(rows)]


def _align(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)


def as_json(costs: Sequence[Cost], facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return facts about the simulation, the costs, and the exponents by part and figure."""
    groups = {part: [c for c in costs if c.part == part] for part in _parts(costs)}
    exponents = {p: {f: fit_exponent(g, f) for f in FIGURES} for p, g in groups.items() if len(g) > 1}
    return {**facts, "costs": [attrs.asdict(cost) for cost in costs], "exponents": exponents}


def picture(costs: Sequence[Cost]) -> str:
    """Return an SVG with a log-log chart for each part. The lines show figures relative to the smallest job."""
    parts = _parts(costs)
    charts = [
        f'<g transform="translate({i * _WIDTH},0)">{_chart(part, [c for c in costs if c.part == part])}</g>'
        for i, part in enumerate(parts)
    ]
    legend = "".join(
        f'<text x="{20 + (i % 4) * 210}" y="{_HEIGHT + 18 + i // 4 * 18}" fill="{color}">{html.escape(name)}</text>'
        for i, (name, color) in enumerate(zip(FIGURES, COLORS, strict=True))
    )
    width, height = max(len(parts) * _WIDTH, 860), _HEIGHT + 50
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12">'
        f'<rect width="{width}" height="{height}" fill="white"/>{"".join(charts)}{legend}</svg>\n'
    )


def _chart(part: str, costs: Sequence[Cost]) -> str:
    lines = {
        name: [(c.processes, max(value(c), 1e-9) / max(value(costs[0]), 1e-9)) for c in costs]
        for name, (_, value) in FIGURES.items()
    }
    low_x, high_x = math.log10(costs[0].processes), math.log10(costs[-1].processes)
    ratios = [math.log10(y) for points in lines.values() for _, y in points]
    low_y, high_y = math.floor(min(ratios)), max(math.ceil(max(ratios)), 1)

    def place(x: float, y: float) -> tuple[float, float]:
        across = (math.log10(x) - low_x) / ((high_x - low_x) or 1)
        up = (math.log10(y) - low_y) / (high_y - low_y)
        return _LEFT + across * (_WIDTH - _LEFT - 20), _HEIGHT - _BOTTOM - up * (_HEIGHT - _TOP - _BOTTOM)

    parts = [
        f'<text x="{_LEFT}" y="18" font-weight="bold">{html.escape(part)}: growth with the number of processes</text>'
    ]
    for power in range(low_y, high_y + 1):
        x, y = place(costs[0].processes, 10.0**power)
        parts.append(f'<line x1="{x:.1f}" x2="{_WIDTH - 20}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{x - 8:.1f}" y="{y + 4:.1f}" text-anchor="end">{10.0**power:g}x</text>')
    for cost in costs[:: max(1, len(costs) // 5)]:
        x, _ = place(cost.processes, 1)
        parts.append(f'<text x="{x:.1f}" y="{_HEIGHT - 18}" text-anchor="middle">{cost.processes:,}</text>')
    for (name, points), color in zip(lines.items(), COLORS, strict=True):
        dash = ' stroke-dasharray="5 3"' if FIGURES[name][0] == "coordinator" else ""
        path = " ".join("{:.1f},{:.1f}".format(*place(*point)) for point in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2"{dash}/>')
    return "".join(parts)


def _parts(costs: Sequence[Cost]) -> list[str]:
    return list(dict.fromkeys(cost.part for cost in costs))


def _format(name: str, value: float) -> str:
    if name.endswith(("seconds", "CPU")):
        return f"{value:.3g} s"
    if not name.endswith(("bytes", "memory")):
        return f"{value:,.0f}"
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.3g} {unit}"
        value /= 1024
    return f"{value:.3g} GiB"
