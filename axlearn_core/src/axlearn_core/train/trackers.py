"""Trackers: where a run's scalars and samples go. Each meets `axlearn_core.contracts.parts.Tracker`."""

import contextlib
import json
import math
import sys
import time
import unicodedata
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from axlearn_core.config import Configurable, node
from axlearn_core.errors import WorkError
from axlearn_core.run.metric_files import METRICS, SAMPLES, cut_back


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turns what the system says against writing `path` (a full disk, no permission) into a `WorkError`."""
    try:
        yield
    except OSError as error:
        raise WorkError(
            f"cannot write {path}: {error.strerror or error}\n"
            "    fix: make room, or make the directory writable, and run the same command again; it resumes from the "
            "last checkpoint"
        ) from error


def printable(text: str) -> str:
    """`text` with control characters and lone surrogates shown as `\N{REPLACEMENT CHARACTER}`.

    A model may sample any bytes; those that steer a terminal, or that UTF-8 cannot encode, must not get there.
    """
    text = text.replace("\r\n", "\n")
    return "".join(
        c if c in "\n\t" or unicodedata.category(c) not in ("Cc", "Cs") else "\N{REPLACEMENT CHARACTER}" for c in text
    )


class JsonlTracker(Configurable):
    """Appends to `metrics.jsonl` (one object per call of `log`) and `samples.jsonl` (`step`, `name`, `text`) in the run directory.

    `axlearn_core.run.metric_files` reads them.

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


class LinesTracker(Configurable):
    """A line per call on standard error, with every value: what a run shows if it has no other tracker.

    `console`, of axlearn-plugins-tools, has a bar and the remaining time.
    """

    @node
    class Config(Configurable.Config["LinesTracker"]):
        """Nothing to set."""

    def __init__(self, cfg: Config):
        self._max_steps = 0

    def start(self, info: Mapping[str, Any]) -> None:
        """Takes note of where the run ends."""
        self._max_steps = int(info.get("max_steps", 0))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Prints the values to four digits."""
        parts = (f"{name} {value:.4g}" for name, value in values.items())
        print(f"step {step}/{self._max_steps}", *parts, sep="  ", file=sys.stderr, flush=True)

    def text(self, step: int, name: str, value: str) -> None:
        """Prints a sample, its control characters made harmless."""
        print(f"{printable(name)} at step {step}:\n{printable(value)}", file=sys.stderr, flush=True)

    def close(self) -> None:
        """Nothing is open."""
