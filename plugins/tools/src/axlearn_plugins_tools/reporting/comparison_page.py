"""The page of `axlearn runs compare`: the summary, the losses of both runs, and a table for each part that differs."""

from collections.abc import Sequence
from pathlib import Path

from axlearn_core.run import Run
from axlearn_core.run.record import write_whole
from axlearn_core.train.trackers import writing
from axlearn_plugins_tools.reporting.charts import Series, line_chart, text
from axlearn_plugins_tools.reporting.comparison import PARTS, Comparison, Difference
from axlearn_plugins_tools.reporting.comparison_text import summarize
from axlearn_plugins_tools.reporting.page import html_page
from axlearn_plugins_tools.reporting.run import points

_CHARTED = ("loss", "grad_norm", "learning_rate", "eval_loss")


def write_page(path: Path, comparison: Comparison, first: Run, second: Run) -> None:
    """Write the page atomically.

    Raises:
        WorkError: If the page cannot be written.
    """
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, render(comparison, first, second))


def render(comparison: Comparison, first: Run, second: Run) -> str:
    """Return the HTML page."""
    notes = "".join(f"<li>{text(note)}</li>" for note in comparison.notes)
    summary = "".join(f"<p>{text(sentence)}</p>" for sentence in summarize(comparison))
    order = [
        (_when(step), f"{part}: {', '.join(names)}" if names else part) for step, part, names in comparison.timeline
    ]
    sections = [
        ("Summary", summary + _table(("when", "what differs"), order)),
        ("Recorded scalars", _charts(first, second) + _scalars(comparison)),
        *((part.capitalize(), _differences(comparison.parts[part])) for part in PARTS),
        ("Position in the data", _differences(comparison.checkpoints.position)),
        (f"Arrays at checkpoint {comparison.checkpoints.step}", _arrays(comparison)),
    ]
    head = f'<ul class="notes">{notes}</ul>' if notes else ""
    return html_page("Comparison of two runs", " / ".join(comparison.runs), head, sections)


def _when(step: int) -> str:
    return "before step 1" if step == 0 else f"step {step}"


def _charts(first: Run, second: Run) -> str:
    charts = []
    for name in _CHARTED:
        series = [
            Series(label=label, style=style, points=sorted(points(run.metrics, name)))
            for label, style, run in (("A", "main", first), ("B", "second", second))
        ]
        if all(len(one.points) > 1 for one in series):
            chart = line_chart(f"{name} over steps", series, width=470, height=220)
            charts.append(f"<figure><figcaption>{text(name)}</figcaption>{chart}</figure>")
    return f'<div class="grid2">{"".join(charts)}</div>' if charts else ""


def _scalars(comparison: Comparison) -> str:
    rows = []
    for d in comparison.scalars.differences:
        beyond = "never" if d.beyond is None else f"step {d.beyond.step}"
        largest = f"{d.largest.relative:.2g} at step {d.largest.step}"
        rows.append((d.name, f"step {d.first.step}", repr(d.first.first), repr(d.first.second), beyond, largest))
    header = ("scalar", "first step", "A", "B", f"beyond {comparison.scalars.tolerance:g}", "largest difference")
    return _table(header, rows)


def _differences(differences: Sequence[Difference]) -> str:
    def show(value: object, source: str) -> str:
        return f"{value} ({source})" if source else str(value)

    rows = [(d.name, show(d.first, d.sources[0]), show(d.second, d.sources[1])) for d in differences]
    return _table(("name", "A", "B"), rows)


def _arrays(comparison: Comparison) -> str:
    rows = [
        (
            d.path,
            "" if d.relative is None else f"{d.relative:.2g}",
            f"{d.count:,} of {d.size:,}" if d.first == d.second else f"{d.first} / {d.second}",
        )
        for d in comparison.checkpoints.differences or ()
    ]
    return _table(("array", "largest relative difference", "differing elements"), rows)


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table, or an empty string if it has no rows."""
    if not rows:
        return ""
    head = "".join(f"<th>{text(name)}</th>" for name in header)
    body = "".join(f"<tr>{''.join(f'<td>{text(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table><tr>{head}</tr>{body}</table>"
