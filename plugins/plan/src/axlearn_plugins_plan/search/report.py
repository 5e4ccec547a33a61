"""Report the result of a search as a table, JSON, a plot or an HTML page, and write its best layout to a file."""

import html
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from axlearn_core.errors import RequestError
from axlearn_core.plugins.request import Request
from axlearn_core.plugins.resolve import resolve
from axlearn_plugins_plan.render import seconds, share, size
from axlearn_plugins_plan.search.compile_layouts import plan_words, resolved_request
from axlearn_plugins_plan.search.layout_file import LayoutFile, model_hash
from axlearn_plugins_plan.search.search import Result, Row

COLUMNS = ("", "step", "memory", "estimated", "tokens/s/chip", "target", "layout")


def marks(row: Row, result: Result) -> str:
    """Return `*` for a row on the Pareto front, and `shipped` for the shipped layout."""
    labels = ["*"] if row in result.front else []
    return " ".join([*labels, *(["shipped"] if row.choice.shipped else [])])


def cells(row: Row, result: Result) -> tuple[str, ...]:
    """Format a row of the table."""
    error = row.memory_error
    tokens, chips = row.ranked.tokens, row.ranked.machine.chips
    rate = tokens / row.seconds / chips if tokens else None
    fits = "" if row.compiled is None or row.compiled.fits else " (does not fit)"
    return (
        marks(row, result),
        seconds(row.seconds),
        size(row.bytes) + fits,
        f"{seconds(row.ranked.seconds)}, {size(row.ranked.estimate.total)}"
        + (f" ({100 * error:+.0f}%)" if error is not None else ""),
        "?" if rate is None else f"{rate:,.0f}",
        row.ranked.machine.name,
        shlex.join(row.choice.words) or "as shipped",
    )


def text(request: Request, result: Result) -> str:
    """Format the table, the notes and the command for the best layout."""
    table = [COLUMNS, *(cells(r, result) for r in result.rows)]
    widths = [max(len(line[i]) for line in table) for i in range(len(COLUMNS))]
    lines = ["  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in table]
    lines += ["", *notes(result)]
    if result.rows:
        lines += ["", "best layout:", f"  axlearn plan {shlex.join(plan_words(request, result.rows[0].ranked))}"]
    return "\n".join(lines)


def notes(result: Result) -> list[str]:
    """Return notes about the ranked, pruned and compiled layouts, and about the estimation errors."""
    errors = [abs(r.memory_error) for r in result.rows if r.memory_error is not None]
    lines = [
        f"{result.ranked:,} legal layouts, {result.left_out:,} pruned by memory, {len(result.rows)} compiled; "
        f"ended because {result.ended}",
        f"memory estimates are within {share(max(errors))} of the compiled figures; layouts are pruned if they exceed "
        f"the device's memory by {share(result.bound)}"
        if errors
        else "",
        "* Pareto front of time and memory. Times are predictions (docs/plan.md); memory figures come from the compiler",
    ]
    lines += [f"not compiled: {words}: {why}" for words, why in result.failures]
    return [line for line in lines if line]


def layout_json(row: Row, result: Result) -> dict[str, Any]:
    """Return a row as a JSON object. Bytes are per chip."""
    per_chip = row.ranked.machine.target.devices_per_chip
    return {
        "target": row.ranked.machine.name,
        "chips": row.ranked.machine.chips,
        "set": row.choice.settings,
        "with": list(row.choice.features),
        "seconds": row.seconds,
        "bytes": row.bytes * per_chip,
        "compiled": row.compiled is not None,
        "fits": row.compiled is not None and row.compiled.fits,
        "shipped": row.choice.shipped,
        "front": row in result.front,
        "estimated_seconds": row.ranked.seconds,
        "estimated_bytes": row.ranked.estimate.total * per_chip,
    }


def as_json(request: Request, result: Result) -> dict[str, Any]:
    """Return the result as one JSON object, best layout first."""
    return {
        "name": str(request.experiment),
        "layouts": [layout_json(r, result) for r in result.rows],
        "ranked": result.ranked,
        "left_out": result.left_out,
        "memory_error_bound": result.bound,
        "ended": result.ended,
        "failures": [{"layout": words, "why": why} for words, why in result.failures],
    }


def require_matplotlib(option: str) -> None:
    """Raise `RequestError` if matplotlib is not installed."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise RequestError(
            f"{option} needs matplotlib, which is not installed\n    fix: pip install 'axlearn-plugins-plan[plot]'"
        ) from None


def draw(result: Result, path: Path) -> None:
    """Plot memory against step time for all compiled layouts, with the Pareto front as a line."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
    gib = 2.0**30
    for target in dict.fromkeys(r.ranked.machine.name for r in result.rows):
        rows = [r for r in result.rows if r.ranked.machine.name == target]
        axes.scatter([r.seconds for r in rows], [r.bytes / gib for r in rows], s=18, label=target)
    axes.plot(
        [r.seconds for r in result.front], [r.bytes / gib for r in result.front], lw=1, color="0.4", label="front"
    )
    shipped = [r for r in result.rows if r.choice.shipped]
    axes.scatter(
        [r.seconds for r in shipped], [r.bytes / gib for r in shipped],
        s=90, facecolors="none", edgecolors="black", label="as shipped",
    )  # fmt: skip
    axes.set_xlabel("predicted seconds per step")
    axes.set_ylabel("GiB per device, compiled")
    axes.legend()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def page(request: Request, result: Result) -> str:
    """Return the table and the plot as one self-contained HTML page."""
    head = "".join(f"<th>{html.escape(c)}</th>" for c in COLUMNS)
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(c)}</td>" for c in cells(r, result)) + "</tr>" for r in result.rows
    )
    title = html.escape(f"Layouts of {request.experiment}")
    remarks = "".join(f"<p>{html.escape(line)}</p>" for line in notes(result))
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>{title}</title><style>{STYLE}</style>"
        f"<h1>{title}</h1>{picture(result)}<div><table><tr>{head}</tr>{body}</table></div>{remarks}</html>\n"
    )


STYLE = (
    "body{font:14px/1.45 system-ui,sans-serif;margin:2em auto;max-width:72em;padding:0 1em;color:#1f2430}"
    "svg{max-width:100%;height:auto}svg text{font:11px system-ui,sans-serif;fill:#555}"
    "div{overflow-x:auto}table{border-collapse:collapse}th,td{padding:5px 14px 5px 0;text-align:left;white-space:nowrap}"
    "tr+tr{border-top:1px solid #ddd}td:last-child{white-space:normal;min-width:22em;font:12px ui-monospace,monospace}p{color:#555}"
)


def picture(result: Result, width: int = 760, height: int = 380) -> str:
    """Plot memory against step time as SVG. A line shows the Pareto front, and a ring marks the shipped layout."""
    if not result.rows:
        return ""
    left, right, top, bottom = 64, width - 40, 24, height - 52
    xs, ys = [r.seconds for r in result.rows], [r.bytes / 2**30 for r in result.rows]

    def scale(value: float, values: Sequence[float], low: float, high: float) -> float:
        least, most = min(values), max(values)
        return (low + high) / 2 if most == least else low + (value - least) / (most - least) * (high - low)

    def place(row: Row) -> tuple[float, float]:
        return scale(row.seconds, xs, left + 16, right), scale(row.bytes / 2**30, ys, bottom - 16, top)

    line = " ".join("{:.1f},{:.1f}".format(*place(r)) for r in result.front)
    dots = ""
    for row in result.rows:
        x, y = place(row)
        fill = "none" if row.choice.shipped else "#1f6feb"
        radius = 8 if row.choice.shipped else 4
        label = html.escape(
            f"{seconds(row.seconds)}, {size(row.bytes)}: {shlex.join(row.choice.words) or 'as shipped'}"
        )
        dots += f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius}" fill="{fill}" stroke="#333"><title>{label}</title></circle>'
    return (
        f'<svg viewBox="0 0 {width} {height}" width="{width}" role="img"><title>memory against step time</title>'
        f'<path d="M{left},{top - 12}V{bottom}H{right + 12}" fill="none" stroke="#bbb"/>'
        f'<polyline points="{line}" fill="none" stroke="#999"/>{dots}{_axis_labels(xs, ys, left, right, top, bottom)}</svg>'
    )


def _axis_labels(xs: Sequence[float], ys: Sequence[float], left: int, right: int, top: int, bottom: int) -> str:
    """Return the SVG labels of both axes: the name and the limits, or a single value if the limits are equal."""
    labels = [(left + 16, bottom + 18, "middle", seconds(min(xs))), (left - 8, bottom - 12, "end", f"{min(ys):.1f}")]
    labels += [(right, bottom + 18, "middle", seconds(max(xs)))] if max(xs) > min(xs) else []
    labels += [(left - 8, top + 4, "end", f"{max(ys):.1f}")] if max(ys) > min(ys) else []
    labels += [((left + right) // 2, bottom + 40, "middle", "predicted time per step")]
    texts = "".join(f'<text x="{x}" y="{y}" text-anchor="{anchor}">{text}</text>' for x, y, anchor, text in labels)
    middle = (top + bottom) // 2
    return f'{texts}<text transform="translate(14,{middle}) rotate(-90)" text-anchor="middle">GiB per device</text>'


def write_layout(request: Request, row: Row, path: Path) -> None:
    """Write a layout file for `axlearn train --layout`.

    The file does not contain the request's own options; pass them on the command line again.
    """
    resolved = resolve(resolved_request(request, row.ranked))
    varies = [path for path in ("input.batch_size", "learner") if _varies(row, path)]
    LayoutFile(
        experiment=str(request.experiment),
        model=model_hash(resolved.config),
        target=row.ranked.machine.name,
        features=row.choice.features,
        settings=row.choice.settings,
        varies=tuple(varies),
    ).write(path)


def _varies(row: Row, path: str) -> bool:
    return (row.choice.batch is not None and path == "input.batch_size") or (
        row.choice.optimizer_dtype is not None and path == "learner"
    )
