"""Read the files of a run directory. Missing and damaged files become notes."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from axlearn_core.config import parse
from axlearn_core.errors import ConfigError, RequestError, counted
from axlearn_core.run.metric_files import METRICS, PHASES, SAMPLES, read_jsonl
from axlearn_core.run.record import CONFIG, LOCK, get_origin
from axlearn_plugins_tools.reporting.goodput import Attempt, read_attempts
from axlearn_plugins_tools.reporting.processes import PROCESSES, process_incidents

INCIDENTS = "watchdog.jsonl"
Points = list[tuple[int, float]]


@attrs.frozen(kw_only=True)
class Run:
    """The content of a run directory.

    Attributes:
        path: Run directory.
        train: Records with a `loss`, by step.
        evaluations: All other records, by step.
        samples: Records of generated text.
        config: Config of the run.
        lock: Content of `run.lock.json`.
        attempts: Starts of the run, if its phases were recorded.
        incidents: Incidents from the watchdog, and process deaths that a supervisor saw, by time.
        notes: One sentence for each missing or damaged file.
    """

    path: Path
    train: Sequence[Mapping[str, Any]]
    evaluations: Sequence[Mapping[str, Any]]
    samples: Sequence[Mapping[str, Any]]
    config: Mapping[str, Any]
    lock: Mapping[str, Any]
    attempts: Sequence[Attempt]
    incidents: Sequence[Mapping[str, Any]]
    notes: Sequence[str]

    @property
    def last_step(self) -> int:
        """Last logged step, or 0."""
        return max((r["step"] for r in (*self.train, *self.evaluations)), default=0)

    @property
    def origin(self) -> str | None:
        """Run or model that a merged, converted or imported run was derived from, or None."""
        return get_origin(self.lock)

    @property
    def seconds(self) -> float | None:
        """Seconds spent in the run, excluding downtime."""
        times = [v for r in (*self.train, *self.evaluations) if (v := number(r.get("elapsed_seconds"))) is not None]
        return max(times, default=None)

    def provenance(self, path: str) -> list[tuple[str, str]]:
        """Return the origins of a config value, oldest first.

        Returns:
            The origin and the value that it set.
        """
        chain = self._provenance.get(path)
        steps = chain if isinstance(chain, list) else []
        return [(str(s.get("by", "?")), str(s.get("value", ""))) for s in steps if isinstance(s, Mapping)]

    @property
    def _provenance(self) -> Mapping[str, Any]:
        provenance = self.lock.get("provenance")
        return provenance if isinstance(provenance, Mapping) else {}

    @property
    def provenance_paths(self) -> list[str]:
        """Config paths with a known origin, including removed paths."""
        return list(self._provenance)


def number(value: Any) -> float | None:
    """Return `value` if it is a finite number, otherwise None."""
    plain = isinstance(value, (int, float)) and not isinstance(value, bool)
    return float(value) if plain and math.isfinite(value) else None


def points(records: Sequence[Mapping[str, Any]], name: str) -> Points:
    """Return the step and value of each record in which `name` is a finite number."""
    return [(r["step"], v) for r in records if (v := number(r.get(name))) is not None]


def names(records: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the names of the values in the records, in order of first appearance."""
    return [
        n for n in dict.fromkeys(n for r in records for n in r) if n not in ("step", "elapsed_seconds", "nonfinite")
    ]


def read_run(path: Path) -> Run:
    """Read a run directory.

    Raises:
        RequestError: If `path` does not contain a run. The message says what is missing.
    """
    if not path.is_dir():
        raise RequestError(f"{path} is {'a file' if path.exists() else 'missing'}\n    expected: a run directory{_FIX}")
    if not any((path / name).is_file() for name in (CONFIG, LOCK, METRICS)):
        listing = ", ".join(sorted(p.name for p in path.iterdir())[:5]) or "an empty directory"
        raise RequestError(f"{path} is not a run: it has no {CONFIG}, {LOCK} or {METRICS}\n    got: {listing}{_FIX}")
    notes: list[str] = []
    lock = _read(path / LOCK, lambda p: _mapping(json.loads(_text(p))), {}, notes)
    untrained = get_origin(lock) is not None  # such a run has no metrics until it is trained further
    metrics, remarks = _read(path / METRICS, read_jsonl, ([], []), notes, optional=untrained)
    samples, more = _read(path / SAMPLES, read_jsonl, ([], []), notes, optional=True)
    notes += [*remarks, *more]
    attempts, bad_phases = _read(path / PHASES, _attempts, ([], []), notes, optional=True)
    incidents, bad_incidents = _read(path / INCIDENTS, _lines, ([], []), notes, optional=True)
    processes, bad_processes = _read(path / PROCESSES, _lines, ([], []), notes, optional=True)
    notes += [*bad_phases, *bad_incidents, *bad_processes]
    incidents = [i for i in incidents if isinstance(i.get("message"), str)] + process_incidents(processes)
    metrics.sort(key=lambda r: r["step"])
    train = [r for r in metrics if "loss" in r]
    bad = [r["step"] for r in train if number(r["loss"]) is None]
    if bad:
        notes.append(f"the loss was not finite at {counted(len(bad), 'logged step')}, first at step {bad[0]}")
    return Run(
        path=path,
        train=train,
        evaluations=[r for r in metrics if "loss" not in r],
        samples=[s for s in samples if isinstance(s.get("text"), str)],
        config=_read(path / CONFIG, lambda p: _mapping(parse(_text(p), p.name).data), {}, notes),
        lock=lock,
        attempts=attempts,
        incidents=sorted(incidents, key=lambda i: str(i.get("time", ""))),
        notes=notes,
    )


def _lines(path: Path) -> tuple[list[Mapping[str, Any]], list[str]]:
    """Return the JSON objects in a file with one object per line, and any problems with the file."""
    objects: list[Mapping[str, Any]] = []
    damaged = 0
    for line in _text(path).splitlines():
        try:
            objects.append(_mapping(json.loads(line)))
        except ValueError:  # the last line from a killed process may be incomplete
            damaged += 1
    return objects, [f"{path.name}: ignored {counted(damaged, 'damaged line')}"] if damaged else []


def _attempts(path: Path) -> tuple[list[Attempt], list[str]]:
    records, remarks = _lines(path)
    return read_attempts(records), remarks


_FIX = "\n    fix: pass the directory that `axlearn train` printed (default: under runs/)"


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")


def _mapping(data: Any) -> Mapping[str, Any]:
    if not isinstance(data, Mapping):
        raise ValueError("it is not a mapping")
    return data


def _read(path: Path, read: Callable[[Path], Any], empty: Any, notes: list[str], *, optional: bool = False) -> Any:
    """Return the result of `read`. If it fails, add a note and return `empty`."""
    if not path.exists():
        if not optional:
            notes.append(f"{path.name} is missing, so the report is incomplete")
        return empty
    try:
        return read(path)
    except OSError as error:
        notes.append(f"{path.name} cannot be read: {error.strerror or error}")
    except (ValueError, ConfigError) as error:
        notes.append(f"{path.name} is damaged and was ignored: {error}")
    return empty
