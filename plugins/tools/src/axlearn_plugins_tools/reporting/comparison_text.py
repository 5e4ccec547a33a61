"""Show a comparison of two runs as text or JSON."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from axlearn_core.errors import counted
from axlearn_plugins_tools.reporting.comparison import PARTS, Comparison, Difference, describe_counts

_SHOWN = 10
"""Maximum number of rows in each table of the text. The JSON has all rows."""
_WIDTH = 60


def summarize(comparison: Comparison) -> list[str]:
    """Return sentences that say where the runs diverge, earliest difference first."""
    if comparison.equal:
        parts = ["config, seeds, data and versions"]
        if comparison.scalars.steps:
            parts.append(f"the scalars of {counted(len(comparison.scalars.steps), 'step')}")
        if comparison.checkpoints.steps:
            parts.append(counted(len(comparison.checkpoints.steps), "checkpoint"))
        return [f"The runs are equal: {', '.join(parts)}."]
    return [_start_sentence(comparison), *_step_sentences(comparison), *_checkpoint_sentences(comparison)]


def _start_sentence(comparison: Comparison) -> str:
    counts = describe_counts(comparison.parts)
    if not counts:
        return "The runs start from the same config, seeds, data and versions."
    same = comparison.parts["config"] and comparison.same_mathematics
    return f"The runs start differently: {counts}." + (
        " The config values do not change the computation." if same else ""
    )


def _step_sentences(comparison: Comparison) -> list[str]:
    scalars = comparison.scalars
    if not scalars.steps:
        return ["No step is recorded by both runs."]
    sentences = []
    if scalars.first_step is None:
        sentences.append(f"Their scalars are identical up to step {scalars.steps[-1]}, the last common step.")
    else:
        last = scalars.last_equal_step
        names = _join([d.name for d in scalars.differences if d.first.step == scalars.first_step])
        when = (
            f"at step {scalars.first_step}, the first common step"
            if last is None
            else f"at step {scalars.first_step}; step {last} is identical"
        )
        sentences.append(f"Their scalars first differ {when} ({names}).")
        beyond = scalars.first_step_beyond
        if beyond is None:
            sentences.append(f"No difference exceeds the tolerance of {scalars.tolerance:g}.")
        elif beyond != scalars.first_step:
            sentences.append(f"The first difference beyond {scalars.tolerance:g} is at step {beyond}.")
    if scalars.last[0] != scalars.last[1]:
        sentences.append(f"A ends at step {scalars.last[0]}, B at step {scalars.last[1]}.")
    return sentences


def _checkpoint_sentences(comparison: Comparison) -> list[str]:
    common = comparison.checkpoints
    if common.step is None:
        return ["The runs have no common checkpoint."]
    sentences = []
    equal = [s for s in common.steps if s not in common.differing]
    if common.differences is None:
        sentences.append(f"The files of their checkpoints differ at step {common.step}.")
    elif common.differences:
        worst = next((d for d in common.differences if d.relative is not None), None)
        most = f", the most in {worst.path} ({number_text(worst.relative)})" if worst else ""
        sentences.append(
            f"At checkpoint {common.step}, {len(common.differences)} of {common.arrays} arrays differ{most}."
        )
    if equal:
        sentences.append(f"The checkpoints are equal at step {_join(list(map(str, equal)))}.")
    return sentences


def to_text(comparison: Comparison) -> str:
    """Return the summary, and a table for each part that differs."""
    lines = [f"A  {comparison.runs[0]}", f"B  {comparison.runs[1]}", "", *summarize(comparison)]
    lines += [f"note: {note}" for note in comparison.notes]
    if comparison.timeline and len(comparison.timeline) > 1:
        lines += ["", "in order:", *format_table([_event(*event) for event in comparison.timeline])]
    for part in PARTS:
        if comparison.parts[part]:
            lines += ["", f"{part}:", *_differences(comparison.parts[part])]
    if comparison.scalars.differences:
        lines += ["", *_scalar_table(comparison)]
    for run, names in zip("AB", comparison.scalars.only, strict=True):
        if names:
            lines += ["", f"scalars that only {run} recorded: {_join(list(names))}"]
    if comparison.checkpoints.position:
        lines += ["", f"position in the data at checkpoint {comparison.checkpoints.step}:"]
        lines += _differences(comparison.checkpoints.position)
    if comparison.checkpoints.differences:
        lines += ["", *_array_table(comparison)]
    return "\n".join(lines)


def _event(step: int, part: str, names: Sequence[str]) -> tuple[str, str, str]:
    return ("before step 1" if step == 0 else f"step {step}", part, _join(list(names), 2))


def _differences(differences: Sequence[Difference]) -> list[str]:
    lines = []
    for difference in differences[:_SHOWN]:
        lines.append(f"  {difference.name}")
        rows = [
            (run, _value(value), source)
            for run, value, source in zip("AB", (difference.first, difference.second), difference.sources, strict=True)
        ]
        lines += format_table(rows, "    ")
    return lines + _more(len(differences), "  ")


def _scalar_table(comparison: Comparison) -> list[str]:
    scalars = comparison.scalars
    rows = [("scalar", "first step", "A", "B", f"beyond {scalars.tolerance:g}", "largest difference")]
    for d in scalars.differences[:_SHOWN]:
        beyond = "never" if d.beyond is None else f"step {d.beyond.step}"
        largest = f"{number_text(d.largest.relative)} at step {d.largest.step}"
        first, second = pair_texts(d.first.first, d.first.second)
        rows.append((d.name, f"step {d.first.step}", first, second, beyond, largest))
    head = f"scalars at {counted(len(scalars.steps), 'common step')}: {len(scalars.differences)} of {len(scalars.names)} differ"
    return [head, *format_table(rows), *_more(len(scalars.differences), "  ")]


def _array_table(comparison: Comparison) -> list[str]:
    common = comparison.checkpoints
    differences = common.differences or ()
    rows = [("array", "largest relative difference", "differing elements")]
    for d in differences[:_SHOWN]:
        if d.relative is None or d.first != d.second:
            rows.append((d.path, f"{d.first} / {d.second}", ""))
        else:
            rows.append((d.path, number_text(d.relative), f"{d.count:,} of {d.size:,}"))
    head = f"arrays at checkpoint {common.step}: {len(differences)} of {common.arrays} differ"
    return [head, *format_table(rows), *_more(len(differences), "  ")]


def format_table(rows: Sequence[Sequence[str]], indent: str = "  ") -> list[str]:
    """Return a line with aligned columns for each row."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [(indent + "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True))).rstrip() for row in rows]


def _more(count: int, indent: str) -> list[str]:
    return [f"{indent}and {count - _SHOWN} more (see --json)"] if count > _SHOWN else []


def _join(names: Sequence[str], limit: int = 4) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


def _value(value: Any) -> str:
    text = "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    return text if len(text) <= _WIDTH else f"{text[: _WIDTH - 3]}..."


def number_text(value: float | None) -> str:
    """Format a difference with two digits. None becomes an empty string."""
    return "" if value is None else f"{value:.2g}"


def pair_texts(first: float, second: float) -> tuple[str, str]:
    """Format two numbers with enough digits to tell them apart."""
    for digits in range(5, 17):
        texts = f"{first:.{digits}g}", f"{second:.{digits}g}"
        if texts[0] != texts[1]:
            return texts
    return repr(first), repr(second)


def to_json(comparison: Comparison) -> Mapping[str, Any]:
    """Return the comparison as one JSON object. Infinite differences and non-finite values become text."""
    scalars, common = comparison.scalars, comparison.checkpoints
    return to_plain(
        {
            "first": comparison.runs[0],
            "second": comparison.runs[1],
            "equal": comparison.equal,
            "summary": " ".join(summarize(comparison)),
            "timeline": [{"step": s, "part": part, "names": names} for s, part, names in comparison.timeline],
            **{part: [_difference(d) for d in comparison.parts[part]] for part in PARTS},
            "same_mathematics": comparison.same_mathematics,
            "scalars": {
                "tolerance": scalars.tolerance,
                "common_steps": len(scalars.steps),
                "last_common_step": max(scalars.steps, default=None),
                "last_equal_step": scalars.last_equal_step,
                "first_step": scalars.first_step,
                "first_step_beyond_tolerance": scalars.first_step_beyond,
                "last_steps": scalars.last,
                "only": scalars.only,
                "differences": [attrs.asdict(d) for d in scalars.differences],
            },
            "checkpoints": {
                "common_steps": common.steps,
                "differing_steps": common.differing,
                "step": common.step,
                "arrays": common.arrays,
                "position": [_difference(d) for d in common.position],
                "differences": None if common.differences is None else [attrs.asdict(d) for d in common.differences],
            },
            "notes": comparison.notes,
        }
    )


def _difference(difference: Difference) -> dict[str, Any]:
    first, second = difference.sources
    return {
        "name": difference.name,
        "first": difference.first,
        "second": difference.second,
        "first_source": first,
        "second_source": second,
    }


def to_plain(value: Any) -> Any:
    """Convert tuples to lists, and non-finite numbers to text, for strict JSON."""
    if isinstance(value, Mapping):
        return {str(k): to_plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_plain(v) for v in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
