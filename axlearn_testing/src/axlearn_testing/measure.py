"""Suites for evaluators, profilers and watchdogs, which observe a run without changing its results."""

import math
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

from axlearn_core.config import Node, check
from axlearn_core.contracts.capabilities import vocabulary_size
from axlearn_core.learn import AdamW, Learner
from axlearn_testing.common import assert_equal
from axlearn_testing.train import Journal, Noise, Numbers, TrainerSuite

PHASES = ("restore", "compile", "input", "step", "evaluate", "save")
"""Phases that `Watchdog.beat` receives."""


class _StepError(Numbers):
    def __next__(self) -> Any:
        if self.position == 2:
            raise RuntimeError("no more data")
        return super().__next__()


class BrokenInput(Noise):
    """An input that fails after two batches."""

    def train(self) -> Numbers:
        """Return two batches, then raise a `RuntimeError`."""
        return _StepError()


class EvaluatorSuite:
    """Tests that every evaluator must pass, in runs of five steps.

    Attributes:
        config: Config of the evaluator.
        edits: Path -> value, changes to the trainer of `TrainerSuite` that the evaluator needs, such as a text model and
            input.
        measures_model: Whether its values change when the model is trained.
    """

    config: Node[Any]
    edits: Mapping[str, Any] = {}
    measures_model: bool = True

    def run(self, path: Path, evaluators: Mapping[str, Node[Any]]) -> list[tuple[Any, ...]]:
        """Run the trainer with these evaluators, and return what it logs."""
        TrainerSuite().run(path, **{**self.edits, "evaluators": evaluators})
        return Journal.journals[path]

    def select_entries(self, entries: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
        """Return the entries that evaluators logged."""
        return [e for e in entries if e[0] in ("eval", "text")]

    def test_metrics_have_evaluator_name(self, tmp_path: Path) -> None:
        entries = self.select_entries(self.run(tmp_path / "run", {"probe": self.config}))
        assert entries, "it logged nothing in a whole run"
        assert entries[-1][1] == 5, "it must run at the end"
        for kind, step, *rest in entries:
            if kind == "text":
                assert rest[0].startswith("probe"), f"step {step}: got a text named {rest[0]!r}, expected probe..."
                continue
            for name, value in rest[0].items():
                assert name.startswith("probe_"), f"step {step}: got {name!r}, expected probe_..."
                assert math.isfinite(value), f"step {step}: {name} is {value}"

    def test_two_evaluators_are_independent(self, tmp_path: Path) -> None:
        entries = self.select_entries(self.run(tmp_path / "run", {"probe": self.config, "other": self.config}))
        scalars = [{k.partition("_")[2]: v for k, v in e[2].items()} for e in entries if e[0] == "eval"]
        texts = [e[3] for e in entries if e[0] == "text"]
        assert scalars[0::2] == scalars[1::2], "two evaluators with the same config must log the same values"
        assert texts[0::2] == texts[1::2], "two evaluators with the same config must log the same texts"

    def test_values_depend_on_model(self, tmp_path: Path) -> None:
        if not self.measures_model:
            pytest.skip("needs values that depend on the parameters: set `measures_model`")
        values = []
        for rate in (0.05, 0.5):
            edits = {**self.edits, "learner": Learner.Config(optimizer=AdamW(learning_rate=rate))}
            TrainerSuite().run(tmp_path / str(rate), **{**edits, "evaluators": {"probe": self.config}})
            values.append([e[2:] for e in self.select_entries(Journal.journals[tmp_path / str(rate)])])
        assert values[0] != values[1], "two differently trained models have the same values; does it use the model?"

    def test_training_is_unchanged(self, tmp_path: Path) -> None:
        losses = [
            [(e[1], e[2]["loss"]) for e in self.run(tmp_path / name, evaluators) if e[0] == "loss"]
            for name, evaluators in (("without", {}), ("with", {"probe": self.config}))
        ]
        assert losses[0] == losses[1], "the evaluator changes the training losses"

    def test_due_depends_only_on_step(self) -> None:
        cfg = TrainerSuite().trainer(**{**self.edits, "evaluators": {"probe": self.config}})
        check(cfg)
        one, two = (self._build(cfg) for _ in range(2))
        due = [one.due(step, False) for step in range(1, 200)]
        assert all(type(d) is bool for d in due)
        assert due == [two.due(step, False) for step in range(1, 200)], "processes must agree on when it is due"

    def _build(self, cfg: Any) -> Any:
        build_input = lambda input_config: cfg.build_input(input_config, vocabulary_size(cfg.model))  # noqa: E731
        return self.config.build(name="probe", input=build_input(cfg.input), build_input=build_input)


class _ObserverSuite:
    """Tests that profilers and watchdogs share. `slot` is their field in the trainer."""

    config: Node[Any]
    slot: str

    def build(self, run_dir: Path) -> Any:
        """Build the part for a run."""
        return self.config.build(run_dir=run_dir)

    def test_training_is_unchanged(self, tmp_path: Path, capfd: Any) -> None:
        suite = TrainerSuite()
        suite.run(tmp_path / "without")
        capfd.readouterr()
        suite.run(tmp_path / "with", **{self.slot: self.config})
        assert capfd.readouterr().out == "", "standard output must stay empty; it is for results"
        assert suite.losses(tmp_path / "with") == suite.losses(tmp_path / "without")
        assert_equal(suite.saved(tmp_path / "with")[5], suite.saved(tmp_path / "without")[5], "state")

    def test_resumed_run_succeeds(self, tmp_path: Path) -> None:
        suite, edits = TrainerSuite(), {self.slot: self.config}
        assert suite.run(tmp_path / "run", max_steps=3, **edits).step == 3
        assert suite.run(tmp_path / "run", **edits).step == 5

    def test_failed_run_releases_resources(self, tmp_path: Path) -> None:
        suite, edits = TrainerSuite(), {self.slot: self.config}
        threads = _threads()
        with pytest.raises(RuntimeError, match="no more data"):
            suite.run(tmp_path / "failed", input=BrokenInput.Config(), **edits)
        assert not (leaks := _new_threads(threads)), f"threads left after the run: {leaks}"
        assert suite.run(tmp_path / "next", **edits).step == 5, (
            "the next run in the same process must be able to use the part"
        )

    def test_close_without_start(self, tmp_path: Path) -> None:
        part = self.build(tmp_path / "unused")
        part.close()  # as in a run that fails before the first step
        part.close()


class ProfilerSuite(_ObserverSuite):
    """Tests that every profiler must pass.

    Attributes:
        config: Config of the profiler. If it has a window, the window must be within the first five steps.
        remote: Reason why it leaves no files in the run directory, for example because it sends the profile to a service.
    """

    slot = "profiler"
    remote: str = ""

    def test_run_writes_files(self, tmp_path: Path) -> None:
        if self.remote:
            pytest.skip(f"needs a local output: {self.remote}")
        sizes = []
        for name, edits in (("without", {}), ("with", {self.slot: self.config})):
            TrainerSuite().run(tmp_path / name, **edits)
            sizes.append({str(p.relative_to(tmp_path / name)) for p in (tmp_path / name).rglob("*") if p.is_file()})
        assert sizes[1] - sizes[0], "the profiler leaves no file in the run directory: set `remote`, or write one"

    def test_profiler_handles_every_step(self, tmp_path: Path) -> None:
        profiler = self.build(tmp_path)
        for step in range(8):
            profiler.before(step)
            profiler.after(step + 1, {"loss": jnp.float32(step)})
        profiler.close()
        profiler.close()

    def test_close_during_step(self, tmp_path: Path) -> None:
        for _ in range(2):  # the first one must not leave a trace running
            profiler = self.build(tmp_path)
            for step in range(3):
                profiler.before(step)
                if step < 2:
                    profiler.after(step + 1, {"loss": jnp.float32(step)})
            profiler.close()


class WatchdogSuite(_ObserverSuite):
    """Tests that every watchdog must pass.

    Attributes:
        config: Config of the watchdog, with a limit of about `seconds`, so that tests can observe it act.
        seconds: Seconds without a heartbeat after which it acts.
        acted: Returns whether the watchdog has acted, given the run directory. None if a test cannot observe or survive its action.
    """

    slot = "watchdog"
    seconds: float = 1.0
    acted: Callable[[Path], bool] | None = None

    def test_watchdog_handles_every_phase(self, tmp_path: Path) -> None:
        threads = _threads()
        watchdog = self.build(tmp_path)
        watchdog.start()
        for step in range(3):
            for phase in PHASES:
                watchdog.beat(phase, step)
        watchdog.close()
        watchdog.close()
        assert not (leaks := _new_threads(threads)), f"threads left after close: {leaks}"

    def test_processes_share_the_run_directory(self, tmp_path: Path) -> None:
        one, two = self.build(tmp_path), self.build(tmp_path)
        one.start()
        one.close()  # before the second one starts, or while it runs
        two.start()
        three = self.build(tmp_path)
        three.start()
        for watchdog in (two, three):
            watchdog.close()

    def test_watchdog_acts_only_without_heartbeats(self, tmp_path: Path) -> None:
        acted = self._action_check()
        watchdog = self.build(tmp_path)
        watchdog.start()
        try:
            for step in range(12):  # longer than its limit
                watchdog.beat("step", step)
                time.sleep(self.seconds / 6)
            assert not acted(tmp_path), "it acted on a run that made progress"
            time.sleep(self.seconds)
            for _ in range(50):
                if acted(tmp_path):
                    break
                time.sleep(self.seconds / 5)
            assert acted(tmp_path), f"it did not act after {11 * self.seconds:g} s without a beat"
        finally:
            watchdog.close()

    def test_closed_watchdog_does_not_act(self, tmp_path: Path) -> None:
        acted = self._action_check()
        watchdog = self.build(tmp_path)
        watchdog.start()
        watchdog.beat("step", 1)
        watchdog.close()
        time.sleep(2 * self.seconds)
        assert not acted(tmp_path), "it acted after close()"

    def _action_check(self) -> Callable[[Path], bool]:
        """Return `acted` as a function. Skip the test if the watchdog's actions cannot be observed."""
        acted = type(self).acted
        if acted is None:
            pytest.skip("needs a way to see the watchdog act: set `acted`")
        return acted


def _threads() -> set[threading.Thread]:
    return set(threading.enumerate())


def _new_threads(before: set[threading.Thread]) -> list[str]:
    """Return the names of threads that a part left running, after waiting a moment for library threads to end."""
    for _ in range(50):
        if all(thread in before for thread in threading.enumerate()):
            break
        time.sleep(0.1)
    return [thread.name for thread in threading.enumerate() if thread not in before]
