"""The report: summary, charts, samples, and the config with the origin of each value."""

import statistics
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from axlearn_core.config.html import fold
from axlearn_core.errors import counted
from axlearn_core.plugins.registry import registry
from axlearn_core.run.record import write_whole
from axlearn_core.train.trackers import writing
from axlearn_plugins_tools.reporting.charts import Series, histogram, line_chart, short, smooth, text
from axlearn_plugins_tools.reporting.durations import clock
from axlearn_plugins_tools.reporting.goodput import BADPUT, Attempt, compute_goodput
from axlearn_plugins_tools.reporting.run import Run, names, number, points, read_run

_CHARTED = ("loss", "step_seconds", "tokens_per_second")
_PERCENTILES = (5, 50, 90, 95, 99)
_SAMPLES = 50


@attrs.frozen(repr=False)
class Report:
    """The report of a run. A notebook shows its sections as collapsible parts.

    Attributes:
        run: Data of the run.
    """

    run: Run

    @classmethod
    def read(cls, run_dir: str | Path, *, name: str | None = None) -> "Report":
        """Read a run directory.

        Args:
            run_dir: A run directory.
            name: Name of the run to display.

        Raises:
            RequestError: If the directory does not contain a run.
        """
        return cls(attrs.evolve(read_run(Path(run_dir)), path=Path(name or run_dir)))

    @property
    def page(self) -> str:
        """The report as an HTML page."""
        return render(self.run)

    def __repr__(self) -> str:
        return f"Report({_title(self.run)}, step {self.run.last_step:,})"

    def _repr_html_(self) -> str:
        """Return the summary and the collapsible sections."""
        parts = (
            fold(name, content, is_open=i == 0, kind="card") for i, (name, content) in enumerate(_sections(self.run))
        )
        # Nested rules apply only inside the output of this cell.
        style = page_style().replace(":root", "&").replace("body", "&")
        return (
            f'<div class="axlearn-report"><style>.axlearn-report {{ {style} }}</style>'
            f"<h2>{text(_title(self.run))}</h2>{_notes(self.run)}{_facts(self.run)}{''.join(parts)}</div>"
        )


def write_report(run_dir: Path, *, name: str | None = None) -> Path:
    """Write `report.html` atomically into a run directory and return its path.

    Args:
        run_dir: A run directory.
        name: Name of the run to display.

    Raises:
        RequestError: If the directory does not contain a run.
        WorkError: If the page cannot be written.
    """
    page = Report.read(run_dir, name=name).page
    path = run_dir / "report.html"
    with writing(path):
        write_whole(path, page)
    return path


def _title(run: Run) -> str:
    return str(run.lock.get("experiment") or run.path.resolve().name)


def page_style() -> str:
    """Return the style sheet of report pages."""
    return files("axlearn_plugins_tools.reporting").joinpath("style.css").read_text()


def _notes(run: Run) -> str:
    notes = "".join(f"<li>{text(n)}</li>" for n in run.notes)
    return f'<ul class="notes">{notes}</ul>' if notes else ""


def _sections(run: Run) -> list[tuple[str, str]]:
    """Return the name and the HTML of each section that is not empty."""
    sections = [
        ("Loss", _losses(run)),
        ("Throughput", _throughput(run)),
        ("Step time", _step_times(run)),
        ("Goodput", _goodput(run)),
        *_plugin_sections(run),
        ("Other values", _other_values(run)),
        ("Samples", _samples(run)),
        ("Config", _config(run)),
        ("Environment", _environment(run)),
    ]
    return [(name, content) for name, content in sections if content]


def _plugin_sections(run: Run) -> list[tuple[str, str]]:
    """Return the sections that plugins register as `axlearn.report_sections`: functions from a `Run` to HTML.

    An entry point named `my-section` has the title "My section". A section that fails shows its error.
    """
    sections = []
    for entry in registry().entries("report_sections"):
        try:
            content = entry.load()(run)
        except Exception as error:  # a plugin may raise anything, and the rest of the page does not need it
            content = f'<p class="sub">{text(entry.wrap_error("cannot draw its section", error))}</p>'
        sections.append((entry.name.replace("-", " ").capitalize(), content))
    return sections


def render(run: Run) -> str:
    """Return the HTML page."""
    return html_page(_title(run), str(run.path.resolve()), _notes(run) + _facts(run), _sections(run))


def html_page(title: str, path: str, head: str, sections: Sequence[tuple[str, str]]) -> str:
    """Return a self-contained HTML page.

    Args:
        title: Title as plain text.
        path: Location of the run or file that the page describes, as plain text.
        head: HTML above the sections.
        sections: Name and HTML of each section. Empty sections are omitted.
    """
    body = "".join(f"<section><h2>{text(name)}</h2>{content}</section>" for name, content in sections if content)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{text(title)}</title><style>{page_style()}</style></head><body><main>"
        f'<header><h1>{text(title)}</h1><p class="path">{text(path)}</p></header>'
        f"{head}{body}</main></body></html>\n"
    )


def _with_separators(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else text(value)


def _facts(run: Run) -> str:
    """Return the summary cards."""
    lock, facts = run.lock, []
    max_steps = run.config.get("max_steps")
    if isinstance(max_steps, int):
        facts.append(
            ("Steps", f"{run.last_step:,} of {max_steps:,}", "done" if run.last_step >= max_steps else "not done")
        )
    else:
        facts.append(("Steps", f"{run.last_step:,}", ""))
    if run.seconds is not None:
        facts.append(("Time", clock(run.seconds), "excluding downtime"))
    if run.attempts:
        facts.append(("Goodput", f"{compute_goodput(run.attempts).share:.1%}", counted(len(run.attempts), "attempt")))
    for name in _held_out_losses(run)[:2]:
        values = points(run.evaluations, name)
        if values:
            best = min(values, key=lambda p: p[1])
            label = "Validation loss" if name == "eval_loss" else name
            facts.append((label, f"{values[-1][1]:.4f}", f"best {best[1]:.4f} at step {best[0]:,}"))
    for name in [n for n in names(run.evaluations) if n.endswith("nats_per_byte")][:1]:
        if values := points(run.evaluations, name):
            facts.append(("Nats per byte", f"{values[-1][1]:.4f}", "on the held-out data"))
    if losses := points(run.train, "loss"):
        facts.append(("Training loss", f"{losses[-1][1]:.4f}", f"at step {losses[-1][0]:,}"))
    for name, label, scale, unit in (
        ("tokens_per_second", "Tokens per second", 1, ""),
        ("mfu", "MFU", 100, "%"),
    ):
        if values := points(run.train, name):
            facts.append((label, f"{short(scale * statistics.median(v for _, v in values))}{unit}", "median"))
    if lock.get("parameters") is not None:
        total, trained = lock["parameters"], lock.get("trained_parameters")
        sub = "" if trained in (None, total) else f"{_with_separators(trained)} trained"
        facts.append(("Parameters", _with_separators(total), sub))
    if lock.get("devices") is not None:
        facts.append(("Devices", _with_separators(lock["devices"]), str(lock.get("platform", ""))))
    cards = "".join(
        f'<div class="card"><div class="label">{text(label)}</div><div class="value">{text(value)}</div>'
        f'<div class="sub">{text(sub)}</div></div>'
        for label, value, sub in facts
    )
    return f'<div class="cards">{cards}</div>'


def _held_out_losses(run: Run) -> list[str]:
    """Return the names of the evaluators' losses, such as `eval_loss`.

    Auxiliary losses of an evaluator are excluded.
    """
    auxiliary = tuple(f"_{name}" for name in names(run.train) if name.endswith("_loss"))
    return [n for n in names(run.evaluations) if n.endswith("_loss") and not n.endswith(auxiliary)]


def _losses(run: Run) -> str:
    loss = points(run.train, "loss")
    series = [Series(label="training", style="raw" if len(loss) >= 20 else "main", points=loss)]
    if len(loss) >= 20:
        series.append(Series(label="smoothed", style="main", points=smooth(loss, len(loss) // 20)))
    held_out = _held_out_losses(run)
    for name, style in zip(held_out, ("second", "third", "fourth"), strict=False):
        label = "validation" if name == "eval_loss" else name
        series.append(Series(label=label, style=style, points=points(run.evaluations, name), dots=True))
    values = [v for one in series for _, v in one.points]
    steep = bool(values) and max(values) > 3 * min(values)
    charts = line_chart("loss over steps", series, height=340, log=steep)
    other_names = [n for n in names(run.evaluations) if n not in held_out or n in held_out[3:]]
    return charts + _grid([(n, points(run.evaluations, n), True) for n in ["eval_loss", *other_names]])


def _grid(items: Sequence[tuple[str, list[tuple[int, float]], bool]]) -> str:
    """Return small charts side by side. Constant values are listed as text."""
    charts, constant = [], []
    for name, series, dots in items:
        if len(series) > 1 and len({v for _, v in series}) == 1:
            constant.append(f"{text(name)} = {short(series[0][1])}")
        elif series:
            one = Series(label=name, style="second" if dots else "main", points=series, dots=dots)
            chart = line_chart(name, [one], width=470, height=180)
            charts.append(f"<figure><figcaption>{text(name)}</figcaption>{chart}</figure>")
    words = f'<p class="sub">Constant throughout: {", ".join(constant)}.</p>' if constant else ""
    return f'<div class="grid2">{"".join(charts)}</div>{words}' if charts or constant else ""


def _throughput(run: Run) -> str:
    rates = points(run.train, "tokens_per_second")
    if not rates:
        return ""
    median = statistics.median(v for _, v in rates)
    series = [Series(label="tokens per second", style="main", points=rates)]
    if len(rates) > 1:
        level = [(rates[0][0], median), (rates[-1][0], median)]
        series.append(Series(label=f"median {short(median)}", style="third dashed", points=level))
    return line_chart("tokens per second over steps", series, height=220)


def _step_times(run: Run) -> str:
    values = [v for _, v in points(run.train, "step_seconds")]
    if not values:
        return ""
    percentiles = [float(v) for v in np.percentile(values, _PERCENTILES)]
    scale, unit = (1000, "ms") if percentiles[1] < 1 else (1, "s")

    def show(seconds: float) -> str:
        return f"{seconds * scale:,.4g} {unit}"

    cells = "".join(f"<tr><th>p{p}</th><td>{show(v)}</td></tr>" for p, v in zip(_PERCENTILES, percentiles, strict=True))
    above = sum(v > percentiles[-1] for v in values)
    more = f"; not drawn: {above} above p99 (longest: {show(max(values))})" if above else ""
    chart = histogram("step time", values, [(f"p{p}", percentiles[_PERCENTILES.index(p)]) for p in (50, 99)], show)
    note = f'<p class="sub">{len(values):,} logged mean step times{more}.</p>'
    return f'<div class="split"><table>{cells}</table><div>{chart}{note}</div></div>'


def _goodput(run: Run) -> str:
    """Return the time by phase, the attempts if there is more than one, and the incidents."""
    parts = []
    if run.attempts:
        goodput = compute_goodput(run.attempts)
        labels = {"productive": "productive: steps that were kept", **BADPUT}
        shares = [(labels[k], v) for k, v in goodput.seconds.items() if v >= 0.0005 * goodput.total]
        rows = [(name, f"{clock(v)} ({v / goodput.total:.1%})") for name, v in sorted(shares, key=lambda s: -s[1])]
        parts.append(table(rows) if goodput.total else "")
    if len(run.attempts) > 1:
        parts.append(table([_attempt(number, attempt) for number, attempt in enumerate(run.attempts, 1)]))
    tables = f'<div class="split wide">{"".join(parts)}</div>' if any(parts) else ""
    incidents = [(f"{i.get('time', '')} {i.get('rule', '')}", i["message"]) for i in run.incidents[-_SAMPLES:]]
    return tables + (f"<h3>Incidents</h3>{table(incidents)}" if incidents else "")


def _attempt(number: int, attempt: Attempt) -> tuple[str, str]:
    steps = f"steps {attempt.first_step:,} to {attempt.last_step:,}"
    end = "" if attempt.ended else ", killed or lost"
    begin = attempt.begin.strftime("%Y-%m-%d %H:%M:%S UTC")
    return f"attempt {number}, {begin}", f"{steps}{end} ({attempt.place})"


def _other_values(run: Run) -> str:
    return _grid([(n, points(run.train, n), False) for n in names(run.train) if n not in _CHARTED])


def _samples(run: Run) -> str:
    samples = list(reversed(run.samples[-_SAMPLES:]))

    def block(sample: Mapping[str, Any]) -> str:
        head = f"{text(sample.get('name', 'sample'))} · step {sample['step']:,}"
        return f"<figure><figcaption>{head}</figcaption><pre>{text(sample['text'])}</pre></figure>"

    newest, older = "".join(map(block, samples[:2])), "".join(map(block, samples[2:]))
    remaining = len(run.samples) - len(samples)
    more = f'<p class="sub">samples.jsonl has {remaining:,} older samples.</p>' if remaining else ""
    return newest + (
        f"<details><summary>earlier samples ({len(samples) - 2})</summary>{older}{more}</details>" if older else ""
    )


def _config(run: Run) -> str:
    """Return the config tree. A node is expanded if it contains a value that was changed after the experiment set it."""
    data = {k: v for k, v in run.config.items() if k not in ("resolved", "type")}
    if not data:
        return ""
    changed = [p for p in run.provenance_paths if len(run.provenance(p)) > 1]
    paths = {"type"}

    def visit(name: str, value: Any, path: str) -> str:
        paths.update((path, f"{path}.type"))
        key = f'<span class="k">{text(name)}</span>'
        inner: Any = value
        if isinstance(value, list) and any(isinstance(v, (Mapping, list)) for v in value):
            inner = {str(i): v for i, v in enumerate(value)}
        if not isinstance(inner, Mapping):
            value_text = "null" if value is None else str(value).lower() if isinstance(value, bool) else value
            return f'<div class="leaf">{key} <span class="v">{text(value_text)}</span>{_chain(run, path)}</div>'
        kind = f' <span class="type">{text(inner["type"])}</span>' if "type" in inner else ""
        below = "".join(visit(str(k), v, f"{path}.{k}") for k, v in inner.items() if k != "type")
        if not below:
            return f'<div class="leaf">{key}{kind}{_chain(run, f"{path}.type")}</div>'
        is_open = " open" if any(p.startswith(f"{path}.") for p in changed) else ""
        return f"<details{is_open}><summary>{key}{kind}{_chain(run, f'{path}.type')}</summary>{below}</details>"

    tree = "".join(visit(k, v, k) for k, v in data.items())
    removed = [p for p in changed if p not in paths]
    removed_rows = "".join(f'<div class="leaf"><span class="k">{text(p)}</span>{_chain(run, p)}</div>' for p in removed)
    tail = (
        f"<details><summary>no longer in the config ({len(removed)})</summary>{removed_rows}</details>"
        if removed_rows
        else ""
    )
    return f'<div class="tree">{tree}{tail}</div>'


def _chain(run: Run, path: str) -> str:
    """Return the origins of a value, oldest first. If there are several, also show the value that each one set."""
    chain = run.provenance(path)
    if not chain:
        return ""
    if len(chain) == 1:
        return f'<span class="by">{text(chain[0][0])}</span>'
    steps = (f"{text(origin)} <b>{text(v if len(v) <= 48 else v[:47] + '…')}</b>" for origin, v in chain)
    return f'<span class="by changed">{" → ".join(steps)}</span>'


def _environment(run: Run) -> str:
    """Return the remaining values in the lock."""
    skipped = {"provenance", "versions", "experiment", "parameters", "trained_parameters", "devices"}
    rows = [(k, v) for k, v in run.lock.items() if k not in skipped and v not in (None, {}, [], "")]
    versions = run.lock.get("versions")
    parts = [table([(k, _flat(v)) for k, v in rows])]
    if isinstance(versions, Mapping) and versions:
        parts.append(table([(k, str(v)) for k, v in versions.items()]))
    return f'<div class="split wide">{"".join(parts)}</div>' if any(parts) else ""


def table(rows: Sequence[tuple[str, str]]) -> str:
    """Return an HTML table with a header cell and a value in each row, as plain text, or an empty string."""
    cells = "".join(f"<tr><th>{text(k)}</th><td>{text(v)}</td></tr>" for k, v in rows)
    return f"<table>{cells}</table>" if cells else ""


def _flat(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{k}: {_flat(v)}" for k, v in value.items())
    if isinstance(value, list):
        return ", ".join(map(_flat, value))
    return f"{value:,}" if isinstance(value, int) and number(value) is not None else str(value)
