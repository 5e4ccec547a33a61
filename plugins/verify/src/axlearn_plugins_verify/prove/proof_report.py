"""The result of a proof as text, JSON, and an HTML page."""

import math
from collections.abc import Sequence
from html import escape
from typing import Any

import attrs
import click

from axlearn_core.config import html
from axlearn_plugins_tools.reporting.page import html_page
from axlearn_plugins_verify.prove import minimize
from axlearn_plugins_verify.prove.checks import FAILS, HOLDS, NOT_RUN, SKIPPED, Check
from axlearn_plugins_verify.prove.proof import Proof

STYLE = (
    ".fails { color: #c62828; font-weight: 600 } .holds { color: #2e7d32 } .not-run { color: #b26a00 } "
    ".wide { overflow-x: auto }"
)
COLORS = {HOLDS: "green", FAILS: "red", SKIPPED: None, NOT_RUN: "yellow"}


def line(check: Check, width: int = 0) -> str:
    """Return one line for a check, as it is printed while the proof runs.

    Args:
        check: The check.
        width: Width of the column with the names.
    """
    status = click.style(check.status.ljust(len(SKIPPED)), fg=COLORS[check.status])
    seed = f"  seed {check.seed}" if check.seed else ""
    return f"{check.name.ljust(width)}  {status}  {check.seconds:5.1f} s  {_details(check)}{seed}".rstrip()


def _details(check: Check) -> str:
    return _facts(check) if check.outcome else next(iter(check.reason.splitlines()), "")


def _facts(check: Check) -> str:
    outcome = check.outcome
    assert outcome is not None
    return f"{outcome.compared}: error {outcome.error:.2g}, tolerance {outcome.tolerance:.2g}"


def summary(proof: Proof) -> str:
    """Return the text after the lines of the checks: the failures, the smallest config that fails, notes, and the counts."""
    parts = [text for check in proof.failures[:1] for text in _failure(proof, check)]
    parts += [f"note: {note}" for note in proof.shrunk.notes]
    counts = {status: sum(c.status == status for c in proof.checks) for status in COLORS}
    words = {HOLDS: "passed", FAILS: "failed", SKIPPED: "skipped", NOT_RUN: "not run"}
    total = ", ".join(f"{count} {words[status]}" for status, count in counts.items() if count)
    parts.append(f"{proof.title}: {total} in {proof.seconds:.0f} s")
    if counts[NOT_RUN]:
        parts.append("to run the others, raise --minutes")
    return "\n".join(parts)


def _failure(proof: Proof, check: Check) -> list[str]:
    minimal = proof.minimal
    shown = check if minimal is None else minimal.check
    lines = ["", f"{check.name} does not hold: {check.summary}", *_difference(shown)]
    if minimal is None:
        return [*lines, "the smallest config that fails is unknown: a second check of this config passed", ""]
    lines.append(f"smallest config that fails: {minimize.command(minimal)}")
    if minimal.removed:
        lines.append(f"  no effect on the failure: {', '.join(minimal.removed)}")
    if not minimal.complete:
        lines.append("  the time limit was reached, so more settings may have no effect")
    return [*lines, ""]


def _difference(check: Check) -> list[str]:
    if check.outcome is None:
        return [f"  error: {text}" if n == 0 else f"  {text}" for n, text in enumerate(check.reason.splitlines())]
    difference = check.outcome.difference
    if difference is None:
        return []
    place = f"{difference.layer or 'model'}: {difference.tensor}"
    detail = f"\n  {difference.detail}" if difference.detail else ""
    return [f"  first difference: {place}, error {difference.error:.2g}{detail}"]


def as_json(proof: Proof) -> dict[str, Any]:
    """Return the result as a JSON object."""
    minimal = proof.minimal
    return {
        "title": proof.title,
        "holds": proof.holds,
        "seconds": round(proof.seconds, 1),
        "checks": [_check_json(check) for check in proof.checks],
        "sizes": {path: [_plain(old), _plain(new)] for path, (old, new) in proof.shrunk.changes.items()},
        "meshes": [dict(shape) for shape in proof.shrunk.meshes],
        "notes": list(proof.shrunk.notes),
        "minimal": minimal
        and {
            "command": minimize.command(minimal),
            "features": list(minimal.features),
            "meshes": [dict(shape) for shape in minimal.meshes],
            "removed": list(minimal.removed),
            "complete": minimal.complete,
            "check": _check_json(minimal.check),
        },
    }


def _check_json(check: Check) -> dict[str, Any]:
    values = attrs.asdict(check)
    outcome = values.pop("outcome")
    return {
        **values,
        "seconds": round(check.seconds, 2),
        **({k: _plain(v) for k, v in outcome.items()} if outcome else {}),
    }


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(v) for key, v in value.items()}
    if isinstance(value, tuple):
        return [_plain(v) for v in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def fragment(proof: Proof) -> str:
    """Return the checks and the first failure as HTML for notebooks."""
    lines = [text for check in proof.failures[:1] for text in _failure(proof, check)]
    rows = [
        [html.text(c.name), html.tag("span", c.status, "removed" if c.status == FAILS else ""), html.text(_details(c))]
        for c in proof.checks
    ]
    parts = [
        html.tag("b", html.text(summary(proof).splitlines()[-1]), "" if proof.holds else "removed"),
        html.tag("pre", html.text("\n".join(lines).strip())) if lines else "",
        html.fold("checks", html.table(rows, ("property", "result", "details")), is_open=not lines),
    ]
    return html.fragment("".join(parts))


def page(proof: Proof) -> str:
    """Return an HTML page with all checks, and the sizes that changed."""
    rows = [
        (
            c.name,
            f'<span class="{c.status.replace(" ", "-").lower()}">{c.status}</span>',
            f"{c.seed}",
            "" if c.outcome is None else f"{c.outcome.error:.2g}",
            "" if c.outcome is None else f"{c.outcome.tolerance:.2g}",
            f"{c.seconds:.1f} s",
            escape(c.reason or (c.outcome.compared if c.outcome else "")),
        )
        for c in proof.checks
    ]
    sizes = [
        (escape(path), escape(str(old)), escape(str(new))) for path, (old, new) in sorted(proof.shrunk.changes.items())
    ]
    failures = [
        (f"{c.name} does not hold", f"<pre>{escape(chr(10).join(_failure(proof, c)).strip())}</pre>")
        for c in proof.failures[:1]
    ]
    columns = ("Property", "Result", "Seed", "Error", "Tolerance", "Time", "Details")
    return html_page(
        f"Proof of {proof.title}",
        summary(proof).strip().splitlines()[-1],
        f"<style>{STYLE}</style>",
        [
            *failures,
            ("Properties", _table(columns, rows)),
            ("Sizes", f"<p>{escape(_meshes(proof))}</p>{_notes(proof)}{_table(('Setting', 'Config', 'Proof'), sizes)}"),
        ],
    )


def _meshes(proof: Proof) -> str:
    shapes = [", ".join(f"{axis}={size}" for axis, size in shape.items()) for shape in proof.shrunk.meshes]
    return f"meshes: {'; '.join(shapes)}" if shapes else "no mesh"


def _notes(proof: Proof) -> str:
    return "".join(f"<p>{escape(note)}</p>" for note in proof.shrunk.notes)


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{name}</th>" for name in header)
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
