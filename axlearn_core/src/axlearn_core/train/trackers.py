"""Trackers, which write the scalars and samples of a run. See `axlearn_core.contracts.parts.Tracker`."""

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
    """Convert an `OSError` while writing `path`, such as a full disk, to a `WorkError`."""
    try:
        yield
    except OSError as error:
        raise WorkError(
            f"cannot write {path}: {error.strerror or error}\n"
            "    fix: free disk space, or make the directory writable, and run the same command again; it resumes from the "
            "last checkpoint"
        ) from error


def printable(text: str) -> str:
    """Replace control characters and lone surrogates in `text` with `\N{REPLACEMENT CHARACTER}`.

    A model may sample any bytes, including terminal control sequences and characters that UTF-8 cannot encode.
    """
    text = text.replace("\r\n", "\n")
    return "".join(
        c if c in "\n\t" or unicodedata.category(c) not in ("Cc", "Cs") else "\N{REPLACEMENT CHARACTER}" for c in text
    )


def show_parameters(info: Mapping[str, Any], unit: str = "") -> str:
    """Format a run's parameter count, and its trainable parameter count if training updates only some of them."""
    total = info["parameters"]
    trained = info.get("trained_parameters", total)
    return f"{total:,}{unit}" + ("" if trained == total else f", of which {trained:,} are trained")


class JsonlTracker(Configurable):
    """Appends scalars to `metrics.jsonl` and samples to `samples.jsonl` in the run directory.

    `axlearn_core.run.metric_files` reads both files.

    Each line of `metrics.jsonl` is one call to `log`: the `step`, the values, and `elapsed_seconds`, the time spent in this
    run excluding the downtime between attempts. A value that is not finite is `null`, and `nonfinite` contains it as text:
    `{"step": 7, "loss": null, "nonfinite": {"loss": "nan"}}`. Each line of `samples.jsonl` contains `step`, `name` and `text`.

    Every line is flushed, so a killed process does not lose complete lines. Starting at step k removes the lines after step
    k from both files, so a resumed run writes the same files as an uninterrupted one. Starting at step 0 sets existing files
    aside as `metrics.superseded-TIME.jsonl` and `samples.superseded-TIME.jsonl`.
    """

    @node
    class Config(Configurable.Config["JsonlTracker"]):
        """No settings."""

    def __init__(self, cfg: Config, *, run_dir: Path):
        self._run_dir = Path(run_dir)
        self._files: dict[str, IO[str]] = {}
        self._begin = 0.0

    def start(self, info: Mapping[str, Any]) -> None:
        """Remove the lines after `info["start_step"]` from both files and open them.

        Raises:
            WorkError: The files cannot be written.
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
        """Append one line to `metrics.jsonl`."""
        record: dict[str, Any] = {"step": int(step)}
        nonfinite: dict[str, str] = {}
        for name, value in values.items():
            number = value if isinstance(value, int) else float(value)
            if math.isfinite(number):
                record[name] = number
            else:
                record[name] = None
                nonfinite[name] = str(number)
        record.setdefault("elapsed_seconds", round(time.monotonic() - self._begin, 3))
        if nonfinite:
            record["nonfinite"] = nonfinite
        self._write(METRICS, record)

    def text(self, step: int, name: str, value: str) -> None:
        """Append one sample to `samples.jsonl`."""
        self._write(SAMPLES, {"step": int(step), "name": name, "text": value})

    def close(self) -> None:
        """Close both files."""
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
    """Prints to standard error: the number of parameters, and one line per call with every value.

    This is one of the default trackers.

    The `console` tracker of axlearn-plugins-tools adds a progress bar and the remaining time.
    """

    @node
    class Config(Configurable.Config["LinesTracker"]):
        """No settings."""

    def __init__(self, cfg: Config):
        self._max_steps = 0

    def start(self, info: Mapping[str, Any]) -> None:
        """Print the number of parameters. Store the run's number of steps."""
        self._max_steps = int(info.get("max_steps", 0))
        if "parameters" in info:
            print(f"parameters: {show_parameters(info)}", file=sys.stderr, flush=True)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Print the values with four significant digits."""
        parts = (f"{name} {value:.4g}" for name, value in values.items())
        print(f"step {step}/{self._max_steps}", *parts, sep="  ", file=sys.stderr, flush=True)

    def text(self, step: int, name: str, value: str) -> None:
        """Print a sample with control characters replaced."""
        print(f"{printable(name)} at step {step}:\n{printable(value)}", file=sys.stderr, flush=True)

    def close(self) -> None:
        """Do nothing."""
