"""The result of a replay as text, JSON, and an HTML page."""

import math
from collections.abc import Sequence
from typing import Any

import attrs

from axlearn_core.config import html
from axlearn_core.errors import counted
from axlearn_plugins_verify.replay.documents import Document
from axlearn_plugins_verify.replay.findings import GREW, name_tensor
from axlearn_plugins_verify.replay.step_replay import Replay

SHOWN = 12
"""Maximum number of differences to print. For the remaining ones, only their count is printed."""
SHOWN_DOCUMENTS = 6
"""Maximum number of documents to print."""


def text(result: Replay) -> str:
    """Return the result for a terminal."""
    return "\n".join(
        [
            *_verdict(result),
            *(f"changed since the run: {change}" for change in result.changes),
            _scalars("scalars", result.scalars),
            *_features(result),
            *_located(result),
            *_shadow(result),
            *_bisection(result),
            *_probes(result),
        ]
    )


def as_json(result: Replay) -> dict[str, Any]:
    """Return the result as a JSON object. Numbers that are not finite are text."""
    bisection = result.bisection
    return _plain(
        {
            "run": result.run,
            "step": result.step,
            "start": result.start,
            "identical": result.identical,
            "changes": list(result.changes),
            "scalars": dict(result.scalars),
            "compared": {
                "steps": list(result.compared_steps),
                "scalars": result.compared_scalars,
                "arrays": result.compared_arrays,
            },
            "different_scalars": [attrs.asdict(d) for d in result.different_scalars],
            "different_arrays": [attrs.asdict(d) for d in result.different_arrays],
            "position": result.position,
            "features": list(result.features),
            "feature_scalars": dict(result.feature_scalars),
            "weights": list(result.weights),
            "nonfinite": None if result.nonfinite is None else result.nonfinite.as_json(),
            "grown": None if result.grown is None else result.grown.as_json(),
            "shadow": result.shadow,
            "divergences": [attrs.asdict(d) for d in result.divergences],
            "bisection": None if bisection is None else bisection.as_json(),
            "probes": [s.as_json() for s in result.probes],
        }
    )


def page(result: Replay) -> str:
    """Return the result as a self-contained HTML page."""
    from axlearn_plugins_tools.reporting.page import html_page

    return html_page(_title(result), "", "", _sections(result))


def fragment(result: Replay) -> str:
    """Return the result for a notebook, with collapsible sections."""
    parts = (html.fold(name, content, is_open=i == 0) for i, (name, content) in enumerate(_sections(result)))
    return html.fragment(html.tag("b", html.text(_title(result))) + "".join(parts))


def _title(result: Replay) -> str:
    return f"Step {result.step:,} of {result.run}"


def _sections(result: Replay) -> list[tuple[str, str]]:
    """Return the heading and the HTML of each section."""
    sections = [
        ("Result", [*_verdict(result), *result.changes, _scalars("scalars", result.scalars), *_features(result)]),
        ("What went wrong", [*_located(result), *_bisection(result)]),
        (f"Compared with {result.shadow}", _shadow(result)),
        ("Probes", _probes(result)),
    ]
    return [(name, html.tag("pre", html.text("\n".join(lines)))) for name, lines in sections if lines]


def _verdict(result: Replay) -> list[str]:
    origin = f"the checkpoint of step {result.start:,}" if result.start else "the initial state"
    lines = [f"step {result.step:,} of {result.run}, computed again from {origin}"]
    compared = []
    if result.compared_scalars:
        steps = _ranges(result.compared_steps)
        compared.append(f"{counted(result.compared_scalars, 'scalar')} of {steps}")
    if result.compared_arrays:
        compared.append(f"{counted(result.compared_arrays, 'array')} of the checkpoint of step {result.step:,}")
    if result.identical is None:
        return [*lines, "nothing to compare: the run recorded neither the scalars nor a checkpoint of these steps"]
    if result.identical:
        return [*lines, f"bit-identical: {' and '.join(compared)}"]
    differences = [*map(str, result.different_scalars), *map(str, result.different_arrays)]
    more = [f"  and {len(differences) - SHOWN} more"] if len(differences) > SHOWN else []
    total = f"{len(result.different_scalars)} of {counted(result.compared_scalars, 'scalar')}"
    arrays = f", {len(result.different_arrays)} of {counted(result.compared_arrays, 'array')}"
    head = f"not bit-identical: {total}{arrays if result.compared_arrays else ''} differ"
    return [*lines, head, *(f"  {difference}" for difference in differences[:SHOWN]), *more]


def _ranges(steps: Sequence[int]) -> str:
    return f"step {steps[0]:,}" if len(steps) == 1 else f"{len(steps)} steps from {steps[0]:,} to {steps[-1]:,}"


def _scalars(name: str, scalars: Any) -> str:
    return f"{name}: " + ", ".join(f"{key} {value:.6g}" for key, value in scalars.items())


def _features(result: Replay) -> list[str]:
    if not result.features:
        return []
    return [_scalars(f"with {' '.join(result.features)}", result.feature_scalars)]


def _located(result: Replay) -> list[str]:
    lines = []
    if result.weights:
        listed = ", ".join(result.weights[:4]) + (
            f" and {len(result.weights) - 4} more" if len(result.weights) > 4 else ""
        )
        lines.append(f"not finite before the step: {listed}")
    if result.nonfinite is not None:
        lines += [f"first values that are not finite: {result.nonfinite}", *_documents(result.nonfinite.documents)]
    if result.grown is not None:
        lines += [
            f"first tensor beyond {GREW:g} times its usual size: {result.grown}",
            *_documents(result.grown.documents),
        ]
    return lines


def _documents(documents: Sequence[Document]) -> list[str]:
    rest = len(documents) - SHOWN_DOCUMENTS
    more = [f"  and {counted(rest, 'more document')}"] if rest > 0 else []
    return [*(f"  in {document}" for document in documents[:SHOWN_DOCUMENTS]), *more]


def _shadow(result: Replay) -> list[str]:
    if not result.shadow:
        return []
    lines = []
    overflow = next((d for d in result.divergences if d.overflowed), None)
    first = result.divergence
    if overflow is not None:
        lines.append(
            f"first overflow: {name_tensor(overflow)} is finite with {result.shadow}, "
            f"but {overflow.nonfinite:,} of its values are not in the run"
        )
    if first is not None and first is not overflow:
        lines.append(f"first divergence from {result.shadow}: {name_tensor(first)}, {first.error:.2g} of its norm")
    rows = [d for d in result.divergences if d.tensor == "output"]
    width = max((len(d.layer) for d in rows), default=0)
    return [
        *(lines or [f"no module diverges from {result.shadow}"]),
        f"distance of each output from {result.shadow}, relative to its norm:",
        *(f"  {d.layer.ljust(width)}  {d.error:.2g}" for d in rows),
    ]


def _bisection(result: Replay) -> list[str]:
    bisection = result.bisection
    if bisection is None:
        return []
    whole, rest = bisection.whole, bisection.rest
    usual = "" if bisection.usual is None else f", usually {bisection.usual:.4g}"
    lines = [f"gradient norm of the batch: {whole.norm:.4g}{usual}"]
    if not bisection.documents:
        return [*lines, f"bisection: {bisection.ended}"]
    without = "" if rest is None else f" (loss {rest.loss:.4g}, gradient norm {rest.norm:.4g})"
    return [
        *lines,
        f"bisection: {counted(len(bisection.documents), 'document')} after {counted(bisection.reruns, 're-run')}; "
        f"{bisection.ended}{without}",
        *(f"  microbatch {d.microbatch}, {d}" for d in bisection.documents[:SHOWN]),
    ]


def _probes(result: Replay) -> list[str]:
    if not result.probes:
        return []
    header = ("TENSOR", "MIN", "MAX", "MEAN", "NOT FINITE")
    many = any(s.microbatch for s in result.probes)
    rows = [
        (
            name_tensor(s) + (f" of microbatch {s.microbatch}" if many and s.tensor != "gradient" else ""),
            f"{s.smallest:.4g}",
            f"{s.largest:.4g}",
            f"{s.mean:.4g}",
            f"{s.nonfinite:,}",
        )
        for s in result.probes
    ]
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in (header, *rows)
    ]


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
