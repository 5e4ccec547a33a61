"""Prometheus metrics for a run, from logged values and the files in the run directory."""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from axlearn_core.run.metric_files import PHASES
from axlearn_plugins_tools.reporting.goodput import compute_goodput, read_attempts
from axlearn_plugins_tools.reporting.processes import PROCESSES
from axlearn_plugins_tools.reporting.run import INCIDENTS

BUCKETS = {
    "productive": "productive",
    "start": "training_prep",
    "restore": "unproductive_checkpoint_restore_time",
    "compile": "program_startup",
    "input": "data_loading_sync",
    "evaluate": "custom_badput_events",
    "save": "unproductive_checkpoint_save_time",
    "lost": "wasted_progress_from_disruption",
    "idle": "infrastructure_recovery_from_disruption",
}
"""Equivalent `BadputType` of ml-goodput-measurement 0.2, by phase."""

LOGGED = {
    "loss": "Training loss at the last logged step.",
    "step_seconds": "Seconds per step since the previous logged step.",
    "tokens_per_second": "Tokens per second across all processes.",
    "mfu": "Model FLOP utilization, from 0 to 1.",
}
"""Values that have their own metric. All other values are `axlearn_train_scalar{name=...}`."""


class GrowingFile:
    """A file of JSON objects, one per line, that another part of the program appends to.

    Args:
        path: Path of the file, which may not exist yet.
        take: Called once with each object.
        clear: Called before the file is reread from the start because it became shorter.
    """

    def __init__(self, path: Path, take: Callable[[Mapping[str, Any]], None], clear: Callable[[], None]):
        self.path, self._take, self._clear = path, take, clear
        self._offset = 0

    def read(self) -> None:
        """Process new complete lines. Lines that are not JSON objects are skipped."""
        try:
            if self.path.stat().st_size < self._offset:
                self._offset = 0
                self._clear()
            with self.path.open("rb") as file:
                file.seek(self._offset)
                lines = file.read().splitlines(keepends=True)
        except OSError:
            return
        for line in lines:
            if not line.endswith(b"\n"):
                break
            self._offset += len(line)
            try:
                record = json.loads(line)
            except ValueError:
                continue
            if isinstance(record, dict):
                self._take(record)


class RunFiles:
    """Attempts, checkpoints, incidents and process events from a run directory, read incrementally.

    Attributes:
        checkpoints: Number of complete saves, across all attempts.
        failed_saves: Number of failed saves, across all attempts.
        checkpoint: Step and time (seconds since 1970) of the newest complete save, or None.
        incidents: Number of violations by watchdog rule.
        processes: Number of records in `processes.jsonl`, by event.
    """

    def __init__(self, run_dir: Path):
        self._clear_phases()
        self.incidents: Counter[str] = Counter()
        self.processes: Counter[str] = Counter()
        self._files = (
            GrowingFile(run_dir / PHASES, self._take_phase, self._clear_phases),
            GrowingFile(
                run_dir / INCIDENTS, lambda r: self.incidents.update([str(r.get("rule"))]), self.incidents.clear
            ),
            GrowingFile(
                run_dir / PROCESSES, lambda r: self.processes.update([str(r.get("event"))]), self.processes.clear
            ),
        )

    def read(self) -> None:
        """Read new records."""
        for file in self._files:
            file.read()

    @property
    def step(self) -> int:
        """Number of finished steps. It may lag by a few seconds."""
        newest = [records[-1] for records in self._attempts.values()][-1:]
        return int(newest[0].get("step", 0)) if newest else 0

    def attempts(self) -> list[Mapping[str, Any]]:
        """Return the first and the last record of each attempt."""
        return [record for records in self._attempts.values() for record in records]

    def _clear_phases(self) -> None:
        self._attempts: dict[str, list[Mapping[str, Any]]] = {}
        self.checkpoints = self.failed_saves = 0
        self.checkpoint: tuple[int, float] | None = None

    def _take_phase(self, record: Mapping[str, Any]) -> None:
        self._attempts[str(record.get("attempt"))] = [
            *self._attempts.get(str(record.get("attempt")), ())[:1],
            record,
        ]
        if record.get("event") == "saved":
            self.checkpoints += 1
            self.checkpoint = (
                int(record["checkpoint"]),
                datetime.fromisoformat(record["time"]).timestamp(),
            )
        elif record.get("event") == "save-failed":
            self.failed_saves += 1


class RunCollector(Collector):
    """Collects the metrics of one run.

    Attributes:
        train: Values of the last logged step by name.
        evaluation: Values of the last evaluation by name.
        logged_step: Last logged step.
        logged_time: Time at which that step was logged, in seconds since 1970, or 0.
        max_steps: Number of steps in the run.
    """

    def __init__(self, run_dir: Path, *, max_steps: int, start_step: int, info: Mapping[str, str]):
        self._files = RunFiles(run_dir)
        self._info = dict(info)
        self.train: Mapping[str, float] = {}
        self.evaluation: Mapping[str, float] = {}
        self.logged_step, self.logged_time, self.max_steps = start_step, 0.0, max_steps

    def collect(self) -> Iterable[Metric]:
        """Yield the current metrics."""
        self._files.read()
        info = GaugeMetricFamily("axlearn_train_info", "Facts about the run.", labels=list(self._info))
        info.add_metric(list(self._info.values()), 1)
        yield info
        yield from self._progress()
        yield from self._time()
        yield from self._events()

    def _progress(self) -> Iterable[Metric]:
        step = max(self.logged_step, self._files.step)
        yield GaugeMetricFamily("axlearn_train_step", "Number of finished steps.", value=step)
        yield GaugeMetricFamily("axlearn_train_max_steps", "Number of steps in the run.", value=self.max_steps)
        yield GaugeMetricFamily(
            "axlearn_train_logged_time_seconds",
            "Time when the last step was logged, in seconds since 1970.",
            value=self.logged_time,
        )
        for name, text in LOGGED.items():
            if name in self.train:
                yield GaugeMetricFamily(f"axlearn_train_{name}", text, value=self.train[name])
        other_values = {name: value for name, value in self.train.items() if name not in LOGGED}
        yield _labelled_metric("axlearn_train_scalar", "Other values of the last logged step.", "name", other_values)
        yield _labelled_metric("axlearn_train_evaluation", "Results of the last evaluation.", "name", self.evaluation)

    def _time(self) -> Iterable[Metric]:
        try:
            goodput = compute_goodput(read_attempts(self._files.attempts()))
        except ValueError:  # a damaged record; `axlearn report` names the file
            return
        yield GaugeMetricFamily("axlearn_train_attempts", "Starts of the run.", value=len(goodput.attempts))
        yield GaugeMetricFamily(
            "axlearn_train_goodput_ratio", "Share of time spent on kept steps.", value=goodput.share
        )
        seconds = GaugeMetricFamily(
            "axlearn_train_phase_seconds", "Seconds across all attempts, by phase.", labels=["phase", "bucket"]
        )
        for phase, value in goodput.seconds.items():
            seconds.add_metric([phase, BUCKETS[phase]], value)
        yield seconds

    def _events(self) -> Iterable[Metric]:
        files = self._files
        yield CounterMetricFamily("axlearn_train_checkpoints", "Number of complete saves.", value=files.checkpoints)
        yield CounterMetricFamily("axlearn_train_failed_saves", "Number of failed saves.", value=files.failed_saves)
        if files.checkpoint is not None:
            step, time = files.checkpoint
            yield GaugeMetricFamily("axlearn_train_checkpoint_step", "Step of the newest checkpoint.", value=step)
            yield GaugeMetricFamily(
                "axlearn_train_checkpoint_time_seconds",
                "Time when the newest checkpoint was complete, in seconds since 1970.",
                value=time,
            )
        for name, text, label, values in (
            ("incidents", "Violations of watchdog rules.", "rule", files.incidents),
            ("process_events", "Starts, deaths and replacements of processes.", "event", files.processes),
        ):
            counter = CounterMetricFamily(f"axlearn_train_{name}", text, labels=[label])
            for key, count in sorted(values.items()):
                counter.add_metric([key], count)
            yield counter


def _labelled_metric(name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
    family = GaugeMetricFamily(name, text, labels=[label])
    for key, value in values.items():
        family.add_metric([key], value)
    return family
