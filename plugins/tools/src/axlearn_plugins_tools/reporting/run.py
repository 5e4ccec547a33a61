"""What a run directory says about its run. Damaged or missing files become notes, never silence."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from axlearn_core.config import parse
from axlearn_core.errors import ConfigError, RequestError
from axlearn_core.run.metric_files import METRICS, PHASES, SAMPLES, read_jsonl
from axlearn_core.run.record import CONFIG, LOCK
from axlearn_plugins_tools.reporting.goodput import Attempt, read_attempts
from axlearn_plugins_tools.reporting.processes import PROCESSES, process_incidents

INCIDENTS = "watchdog.jsonl"
Points = list[tuple[int, float]]


@attrs.frozen(kw_only=True)
class Run:
    """A run as its files tell it.

    Attributes:
        train: records with a `loss`, by step.
        evaluations: the other records, by step.
        attempts: each start of the run, where its phases were recorded.
        incidents: what a watchdog found, and deaths of processes that a supervisor saw, by time.
        notes: what is missing or damaged, one sentence each.
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
        """The last step that was logged, 0 where none was."""
        return max((r["step"] for r in (*self.train, *self.evaluations)), default=0)

    @property
    def seconds(self) -> float | None:
        """Time spent in the run, downtime left out."""
        times = [v for r in (*self.train, *self.evaluations) if (v := number(r.get("elapsed_seconds"))) is not None]
        return max(times, default=None)

    def provenance(self, path: str) -> list[tuple[str, str]]:
        """(who, value) of everything that set a config path, the first one first."""
        chain = self._provenance.get(path)
        steps = chain if isinstance(chain, list) else []
        return [(str(s.get("by", "?")), str(s.get("value", ""))) for s in steps if isinstance(s, Mapping)]

    @property
    def _provenance(self) -> Mapping[str, Any]:
        provenance = self.lock.get("provenance")
        return provenance if isinstance(provenance, Mapping) else {}

    @property
    def provenance_paths(self) -> list[str]:
        """Every config path whose origin is known, those that were removed included."""
        return list(self._provenance)


def number(value: Any) -> float | None:
    """`value` where it is a finite number."""
    plain = isinstance(value, (int, float)) and not isinstance(value, bool)
    return float(value) if plain and math.isfinite(value) else None


def points(records: Sequence[Mapping[str, Any]], name: str) -> Points:
    """(step, value) of every record in which `name` is a finite number."""
    return [(r["step"], v) for r in records if (v := number(r.get(name))) is not None]


def names(records: Sequence[Mapping[str, Any]]) -> list[str]:
    """The names of the values in the records, in the order of their first appearance."""
    return [
        n for n in dict.fromkeys(n for r in records for n in r) if n not in ("step", "elapsed_seconds", "nonfinite")
    ]


def read_run(path: Path) -> Run:
    """Reads a run directory.

    Raises:
        RequestError: `path` holds no run; says what is missing.
    """
    if not path.is_dir():
        raise RequestError(
            f"{path} is {'a file' if path.exists() else 'not there'}\n    expected: a run directory{_FIX}"
        )
    if not any((path / name).is_file() for name in (CONFIG, LOCK, METRICS)):
        listing = ", ".join(sorted(p.name for p in path.iterdir())[:5]) or "an empty directory"
        raise RequestError(f"{path} is not a run: it has no {CONFIG}, {LOCK} or {METRICS}\n    got: {listing}{_FIX}")
    notes: list[str] = []
    metrics, remarks = _read(path / METRICS, read_jsonl, ([], []), notes)
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
        notes.append(f"the loss was not a finite number at {len(bad)} logged steps, the first of them step {bad[0]}")
    return Run(
        path=path,
        train=train,
        evaluations=[r for r in metrics if "loss" not in r],
        samples=[s for s in samples if isinstance(s.get("text"), str)],
        config=_read(path / CONFIG, lambda p: _mapping(parse(_text(p), p.name).data), {}, notes),
        lock=_read(path / LOCK, lambda p: _mapping(json.loads(_text(p))), {}, notes),
        attempts=attempts,
        incidents=sorted(incidents, key=lambda i: str(i.get("time", ""))),
        notes=notes,
    )


def _lines(path: Path) -> tuple[list[Mapping[str, Any]], list[str]]:
    """The objects of a file with one on each line, and what is wrong with it."""
    objects: list[Mapping[str, Any]] = []
    damaged = 0
    for line in _text(path).splitlines():
        try:
            objects.append(_mapping(json.loads(line)))
        except ValueError:  # the last line of a process that was killed
            damaged += 1
    return objects, [f"{path.name}: {damaged} damaged lines are left out"] if damaged else []


def _attempts(path: Path) -> tuple[list[Attempt], list[str]]:
    records, remarks = _lines(path)
    return read_attempts(records), remarks


_FIX = "\n    fix: give the directory that `axlearn train` printed, by default one under runs/"


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")


def _mapping(data: Any) -> Mapping[str, Any]:
    if not isinstance(data, Mapping):
        raise ValueError("it holds no mapping")
    return data


def _read(path: Path, read: Callable[[Path], Any], empty: Any, notes: list[str], *, optional: bool = False) -> Any:
    """What `read` returns, or `empty` and a note."""
    if not path.exists():
        if not optional:
            notes.append(f"{path.name} is missing, and with it what it would show")
        return empty
    try:
        return read(path)
    except OSError as error:
        notes.append(f"{path.name} cannot be read: {error.strerror or error}")
    except (ValueError, ConfigError) as error:
        notes.append(f"{path.name} is damaged and left out: {error}")
    return empty
