"""The files of metrics and samples in a run directory: one JSON object with a `step` on each line."""

import json
import math
import os
import sys
from pathlib import Path
from typing import Any

from axlearn_core.config.files import read_regular

METRICS, SAMPLES = "metrics.jsonl", "samples.jsonl"
PHASES = "phases.jsonl"
"""Seconds by phase; `axlearn_plugins_runtime.job.phases` writes it, and reports read it."""
Lines = list[tuple[bytes, dict[str, Any]]]


def read_jsonl(path: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """The records of a file that a `JsonlTracker` wrote or is writing, and a remark per line that is not one.

    A missing file has no records. Raises `OSError` where the file cannot be read.
    """
    lines, remarks = _parse(path)
    return [record for _, record in lines], remarks


def cut_back(path: Path, start_step: int) -> list[dict[str, Any]]:
    """Drops, in one atomic replacement, the lines after `start_step` and those that are not whole; returns the rest.

    Starting at 0 drops all: nothing has been done yet.
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
    """The lines of a file that are records, each with its record, and a remark for each that is not.

    Args:
        data: the file.
        name: of the file, for the remarks.
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
            remarks.append(f"{name}: the last line is incomplete, as after a sudden stop; it is left out")
        else:
            remarks.append(f"{name}: line {number} is not a record with a step; it is left out")
    return lines, remarks
