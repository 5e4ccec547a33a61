"""Format the result of a search for the first diverging step as text or JSON."""

from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from axlearn_plugins_tools.reporting.comparison_text import format_table, number_text, pair_texts, to_plain
from axlearn_plugins_tools.reporting.step_bisect import Divergence, Reading, Result

_SHOWN = 10
_CAUSES = {
    "parameters": "the parameters before it differ first",
    "data": "its batch differs first",
    "scalars": "its scalars differ first",
    "update": "the parameters after it differ first",
}


def to_text(result: Result) -> str:
    """Return a human-readable summary."""
    interval, divergence = result.interval, result.divergence
    if interval.differs is None:
        return result.ended
    if divergence is None:
        lines = [
            f"the runs diverge after step {interval.equal} and at step {interval.differs} at the latest",
            result.ended,
        ]
        return "\n".join([*lines, *_notes(result)])
    lines = [f"the runs diverge at step {divergence.step}: {_CAUSES[divergence.cause]}"]
    if divergence.same_batch:
        lines.append(f"  data  the same batch: {divergence.positions[0]}")
    else:
        lines += [f"  data  A  {divergence.positions[0]}", f"        B  {divergence.positions[1]}"]
    lines += _scalars(divergence)
    lines += _arrays("before", divergence.before, divergence)
    lines += _arrays("after", divergence.after, divergence)
    return "\n".join([*lines, f"{result.reruns} re-runs from step {result.start}", *_notes(result)])


def _notes(result: Result) -> list[str]:
    return [f"note: {note}" for note in result.notes]


def _scalars(divergence: Divergence) -> list[str]:
    if not divergence.scalars:
        return ["  scalars  identical"]
    rows = [("scalar", "A", "B", "difference", "noise")]
    for reading in divergence.scalars:
        if reading.first is None or reading.second is None:
            texts: Sequence[str] = (str(reading.first), str(reading.second))
        else:
            texts = pair_texts(reading.first, reading.second)
        rows.append((reading.name, *texts, number_text(reading.relative), _noise(reading)))
    return format_table(rows)


def _arrays(when: str, readings: Sequence[Reading], divergence: Divergence) -> list[str]:
    clear = [r for r in readings if r.is_clear]
    if not clear:
        same = "differ only by rounding" if readings else "identical"
        return [f"  parameters {when} the step: {same}"]
    lines = [f"  parameters {when} the step: {len(clear)} of {divergence.arrays} differ, in the order of the model"]
    rows = [(r.name, number_text(r.relative), _noise(r)) for r in clear[:_SHOWN]]
    more = [f"    and {len(clear) - _SHOWN} more (see --json)"] if len(clear) > _SHOWN else []
    return [*lines, *format_table([("parameter", "difference", "noise"), *rows], "    "), *more]


def _noise(reading: Reading) -> str:
    return number_text(reading.noise) if reading.noise else "none"


def to_json(result: Result) -> Mapping[str, Any]:
    """Return the result as one JSON object."""
    divergence = result.divergence
    return to_plain(
        {
            "step": None if divergence is None else divergence.step,
            "cause": None if divergence is None else divergence.cause,
            "equal_step": result.interval.equal,
            "differing_step": result.interval.differs,
            "exact": result.exact,
            "divergence": None if divergence is None else attrs.asdict(divergence),
            "start": result.start,
            "reruns": result.reruns,
            "ended": result.ended,
            "notes": result.notes,
        }
    )
