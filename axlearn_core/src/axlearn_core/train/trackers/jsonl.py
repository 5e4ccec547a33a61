"""Metrics and samples as files of JSON lines in the run directory, and their reader."""

import json
import math
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from axlearn_core.config import Configurable, node
from axlearn_core.config.files import read_regular
from axlearn_core.train.trackers.common import writing

METRICS, SAMPLES = "metrics.jsonl", "samples.jsonl"


class JsonlTracker(Configurable):
    """Appends to `metrics.jsonl` (one object per call of `log`) and `samples.jsonl` (`step`, `name`, `text`).

    Each metrics line has `step`, the values, and `elapsed_seconds`: time spent in this run, downtime between a stop and
    its resumption left out. A value that is not finite is `null`, with what it was under `nonfinite`:
    `{"step": 7, "loss": null, "nonfinite": {"loss": "nan"}}`.

    Every line is handed to the system whole, so that killing the process loses no complete line. Starting at step k
    cuts both files back to what was logged up to k: a resumed run leaves the files that an uninterrupted one would. Starting at
    0 sets files that are there aside, as `metrics.superseded-TIME.jsonl`.
    """

    @node
    class Config(Configurable.Config["JsonlTracker"]):
        """Nothing to set."""

    def __init__(self, cfg: Config, *, run_dir: Path):
        self._run_dir = Path(run_dir)
        self._files: dict[str, IO[str]] = {}
        self._begin = 0.0

    def start(self, info: Mapping[str, Any]) -> None:
        """Cuts both files back to `info["start_step"]` and opens them.

        Raises:
            WorkError: they cannot be written.
        """
        self.close()
        start_step = int(info.get("start_step", 0))
        for name in (METRICS, SAMPLES):
            path = self._run_dir / name
            with writing(path):
                path.parent.mkdir(parents=True, exist_ok=True)
                if start_step == 0 and path.exists() and path.stat().st_size:
                    path.rename(path.with_name(f"{path.stem}.superseded-{time.time_ns()}.jsonl"))
                records = cut_back(path, start_step)
                self._files[name] = path.open("a", encoding="utf-8")
            if name == METRICS:
                spent = max((r.get("elapsed_seconds") or 0.0 for r in records), default=0.0)
                self._begin = time.monotonic() - spent

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Writes one line."""
        record: dict[str, Any] = {"step": int(step)}
        odd: dict[str, str] = {}
        for name, value in values.items():
            number = value if isinstance(value, int) else float(value)
            if math.isfinite(number):
                record[name] = number
            else:
                record[name] = None
                odd[name] = str(number)
        record.setdefault("elapsed_seconds", round(time.monotonic() - self._begin, 3))
        if odd:
            record["nonfinite"] = odd
        self._write(METRICS, record)

    def text(self, step: int, name: str, value: str) -> None:
        """Writes one sample."""
        self._write(SAMPLES, {"step": int(step), "name": name, "text": value})

    def close(self) -> None:
        """Closes both files."""
        files, self._files = self._files, {}
        for name, file in files.items():
            with writing(self._run_dir / name):
                file.close()

    def _write(self, name: str, record: Mapping[str, Any]) -> None:
        file = self._files[name]
        with writing(self._run_dir / name):
            file.write(json.dumps(record, allow_nan=False) + "\n")
            file.flush()


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


def _parse(path: Path) -> tuple[list[tuple[bytes, dict[str, Any]]], list[str]]:
    try:
        raw_lines = read_regular(path, sys.maxsize).splitlines(keepends=True)
    except FileNotFoundError:
        return [], []
    lines, remarks = [], []
    for number, raw in enumerate(raw_lines, 1):
        try:
            record = json.loads(raw)
        except (ValueError, RecursionError):
            record = None
        if isinstance(record, dict) and type(record.get("step")) is int and _is_finite(record.get("elapsed_seconds")):
            lines.append((raw, record))
        elif number == len(raw_lines) and not raw.endswith(b"\n"):
            remarks.append(f"{path.name}: the last line is incomplete, as after a sudden stop; it is left out")
        else:
            remarks.append(f"{path.name}: line {number} is not a record with a step; it is left out")
    return lines, remarks
