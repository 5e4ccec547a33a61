"""Files of metrics and samples in a run directory. Each line is a JSON object with a `step`."""

import json
import math
import os
import sys
from pathlib import Path
from typing import Any

from axlearn_core.config.files import read_regular

METRICS, SAMPLES = "metrics.jsonl", "samples.jsonl"
PHASES = "phases.jsonl"
"""File with the seconds per phase. `axlearn_plugins_runtime.job.phases` writes it, and reports read it."""
Lines = list[tuple[bytes, dict[str, Any]]]


def is_timing(name: str) -> bool:
    """Return True for a logged value that measures time, such as `step_seconds`. It may differ between identical runs."""
    return name == "mfu" or name.endswith(("_seconds", "_per_second"))


def read_jsonl(path: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """Read the records of a file that a `JsonlTracker` writes. Also return a note for each invalid line.

    A missing file has no records. Raise `OSError` if the file cannot be read.
    """
    lines, remarks = _parse(path)
    return [record for _, record in lines], remarks


def cut_back(path: Path, start_step: int) -> list[dict[str, Any]]:
    """Remove lines after `start_step` and incomplete lines, atomically. Return the remaining records.

    A `start_step` of 0 removes all lines.
    """
    lines, remarks = _parse(path)
    entries = [(raw, record) for raw, record in lines if 0 < start_step >= record["step"]]
    if remarks or len(entries) < len(lines) or any(not raw.endswith(b"\n") for raw, _ in entries):
        temporary = path.with_name(path.name + ".tmp")
        with temporary.open("wb") as file:
            file.writelines(raw if raw.endswith(b"\n") else raw + b"\n" for raw, _ in entries)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    return [record for _, record in entries]


def _is_finite(seconds: Any) -> bool:
    return seconds is None or (type(seconds) in (int, float) and math.isfinite(seconds))


def _parse(path: Path) -> tuple[Lines, list[str]]:
    try:
        return parse_records(read_regular(path, sys.maxsize), path.name)
    except FileNotFoundError:
        return [], []


def parse_records(data: bytes, name: str) -> tuple[Lines, list[str]]:
    """Parse a file. Return its valid lines with their records, and a note for each invalid line.

    Args:
        data: Contents of the file.
        name: Name of the file, for use in the notes.
    """
    raw_lines = data.splitlines(keepends=True)
    lines: Lines = []
    remarks = []
    for number, raw in enumerate(raw_lines, 1):
        try:
            record = json.loads(raw)
        except (ValueError, RecursionError):
            record = None
        if isinstance(record, dict) and type(record.get("step")) is int and _is_finite(record.get("elapsed_seconds")):
            lines.append((raw, record))
        elif number == len(raw_lines) and not raw.endswith(b"\n"):
            remarks.append(f"{name}: ignoring the last line, which is incomplete, possibly after a crash")
        else:
            remarks.append(f"{name}: ignoring line {number}, which is not a record with a step")
    return lines, remarks
