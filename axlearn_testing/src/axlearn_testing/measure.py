"""The suites for evaluators, profilers and watchdogs: what a run takes along without computing anything else."""

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
"""What `Watchdog.beat` is told."""


class _Broken(Numbers):
    def __next__(self) -> Any:
        if self.at == 2:
            raise RuntimeError("no more data")
        return super().__next__()


class BrokenInput(Noise):
    """An input that fails after two batches."""

    def train(self) -> Numbers:
        """Two batches, then a `RuntimeError`."""
        return _Broken()


class EvaluatorSuite:
    """What every evaluator keeps, in runs of five steps.

    Attributes:
        config: the evaluator.
        edits: path -> value, what it needs of the trainer of `TrainerSuite`: a model of text and its input.
        measures_model: whether its values change as the model is trained.
    """

    config: Node[Any]
    edits: Mapping[str, Any] = {}
    measures_model: bool = True

    def run(self, path: Path, evaluators: Mapping[str, Node[Any]]) -> list[tuple[Any, ...]]:
        """What a run with these evaluators logs."""
        TrainerSuite().run(path, **{**self.edits, "evaluators": evaluators})
        return Journal.journals[path]

    def measured(self, entries: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
        """The evaluator's own entries."""
        return [e for e in entries if e[0] in ("eval", "text")]

    def test_it_measures_under_its_own_name(self, tmp_path: Path) -> None:
        entries = self.measured(self.run(tmp_path / "run", {"probe": self.config}))
        assert entries, "it logged nothing in a whole run"
        assert entries[-1][1] == 5, "it runs at the end"
        for kind, step, *rest in entries:
            if kind == "text":
                assert rest[0].startswith("probe"), f"step {step}: a text named {rest[0]!r}, expected probe..."
                continue
            for name, value in rest[0].items():
                assert name.startswith("probe_"), f"step {step}: {name!r}, expected probe_..."
                assert math.isfinite(value), f"step {step}: {name} is {value}"

    def test_two_of_them_measure_apart(self, tmp_path: Path) -> None:
        entries = self.measured(self.run(tmp_path / "run", {"probe": self.config, "other": self.config}))
        scalars = [{k.partition("_")[2]: v for k, v in e[2].items()} for e in entries if e[0] == "eval"]
        texts = [e[3] for e in entries if e[0] == "text"]
        assert scalars[0::2] == scalars[1::2], "two evaluators of one config measure the same"
        assert texts[0::2] == texts[1::2], "two evaluators of one config write the same"

    def test_its_values_follow_the_model(self, tmp_path: Path) -> None:
        if not self.measures_model:
            pytest.skip("its values have nothing to do with the parameters: `measures_model` is False")
        values = []
        for rate in (0.05, 0.5):
            edits = {**self.edits, "learner": Learner.Config(optimizer=AdamW(learning_rate=rate))}
            TrainerSuite().run(tmp_path / str(rate), **{**edits, "evaluators": {"probe": self.config}})
            values.append([e[2:] for e in self.measured(Journal.journals[tmp_path / str(rate)])])
        assert values[0] != values[1], "models that were trained in two ways measure the same: does it look at them?"

    def test_it_changes_no_step(self, tmp_path: Path) -> None:
        losses = [
            [(e[1], e[2]["loss"]) for e in self.run(tmp_path / name, own) if e[0] == "loss"]
            for name, own in (("without", {}), ("with", {"probe": self.config}))
        ]
        assert losses[0] == losses[1], "the losses of training are others with the evaluator"

    def test_due_is_a_matter_of_the_step(self) -> None:
        cfg = TrainerSuite().trainer(**{**self.edits, "evaluators": {"probe": self.config}})
        check(cfg)
        one, two = (self._build(cfg) for _ in range(2))
        due = [one.due(step, False) for step in range(1, 200)]
        assert all(type(d) is bool for d in due)
        assert due == [two.due(step, False) for step in range(1, 200)], "processes have to agree on what is due"

    def _build(self, cfg: Any) -> Any:
        build_input = lambda own: cfg.build_input(own, vocabulary_size(cfg.model))  # noqa: E731
        return self.config.build(name="probe", input=build_input(cfg.input), build_input=build_input)


class _Observed:
    """What profilers and watchdogs keep alike. `slot` is their field in the trainer."""

    config: Node[Any]
    slot: str

    def build(self, run_dir: Path) -> Any:
        """The part for a run."""
        return self.config.build(run_dir=run_dir)

    def test_it_changes_no_step(self, tmp_path: Path, capfd: Any) -> None:
        suite = TrainerSuite()
        suite.run(tmp_path / "without")
        capfd.readouterr()
        suite.run(tmp_path / "with", **{self.slot: self.config})
        assert capfd.readouterr().out == "", "standard output is for results"
        assert suite.losses(tmp_path / "with") == suite.losses(tmp_path / "without")
        assert_equal(suite.saved(tmp_path / "with")[5], suite.saved(tmp_path / "without")[5], "state")

    def test_a_continued_run_takes_it_too(self, tmp_path: Path) -> None:
        suite, edits = TrainerSuite(), {self.slot: self.config}
        assert suite.run(tmp_path / "run", max_steps=3, **edits).step == 3
        assert suite.run(tmp_path / "run", **edits).step == 5

    def test_a_run_that_fails_closes_it(self, tmp_path: Path) -> None:
        suite, edits = TrainerSuite(), {self.slot: self.config}
        threads = _threads()
        with pytest.raises(RuntimeError, match="no more data"):
            suite.run(tmp_path / "failed", input=BrokenInput.Config(), **edits)
        assert not (leaks := _new_threads(threads)), f"threads after the run: {leaks}"
        assert suite.run(tmp_path / "next", **edits).step == 5, "the next run of the process can use it"

    def test_closing_is_always_allowed(self, tmp_path: Path) -> None:
        part = self.build(tmp_path / "unused")
        part.close()  # a run that fails before the first step
        part.close()


class ProfilerSuite(_Observed):
    """What every profiler keeps.

    Attributes:
        config: the profiler, with a window within the first five steps if it has one.
        remote: why nothing of it appears in the run directory: a service that has it.
    """

    slot = "profiler"
    remote: str = ""

    def test_a_run_leaves_something_to_read(self, tmp_path: Path) -> None:
        if self.remote:
            pytest.skip(f"nothing of it can be seen here: {self.remote}")
        sizes = []
        for name, edits in (("without", {}), ("with", {self.slot: self.config})):
            TrainerSuite().run(tmp_path / name, **edits)
            sizes.append({str(p.relative_to(tmp_path / name)) for p in (tmp_path / name).rglob("*") if p.is_file()})
        assert sizes[1] - sizes[0], (
            "a run with the profiler has no file more than one without: set `remote`, or write one"
        )

    def test_it_watches_every_step(self, tmp_path: Path) -> None:
        profiler = self.build(tmp_path)
        for step in range(8):
            profiler.before(step)
            profiler.after(step + 1, {"loss": jnp.float32(step)})
        profiler.close()
        profiler.close()

    def test_it_may_be_closed_within_a_step(self, tmp_path: Path) -> None:
        for _ in range(2):  # the second one finds nothing that still runs
            profiler = self.build(tmp_path)
            for step in range(3):
                profiler.before(step)
                if step < 2:
                    profiler.after(step + 1, {"loss": jnp.float32(step)})
            profiler.close()


class WatchdogSuite(_Observed):
    """What every watchdog keeps.

    Attributes:
        config: the watchdog; to see it act, with a limit of about `seconds`.
        seconds: after how long without a beat it acts.
        acted: run directory -> whether it has acted there; None where a test cannot see it, or would not survive it.
    """

    slot = "watchdog"
    seconds: float = 1.0
    acted: Callable[[Path], bool] | None = None

    def test_it_takes_every_phase(self, tmp_path: Path) -> None:
        threads = _threads()
        watchdog = self.build(tmp_path)
        watchdog.start()
        for step in range(3):
            for phase in PHASES:
                watchdog.beat(phase, step)
        watchdog.close()
        watchdog.close()
        assert not (leaks := _new_threads(threads)), f"threads after close: {leaks}"

    def test_processes_share_the_run_directory(self, tmp_path: Path) -> None:
        one, two = self.build(tmp_path), self.build(tmp_path)
        one.start()
        one.close()  # before the other one has started, or while it runs
        two.start()
        three = self.build(tmp_path)
        three.start()
        for watchdog in (two, three):
            watchdog.close()

    def test_it_acts_on_silence_alone(self, tmp_path: Path) -> None:
        acted = self._action_check()
        watchdog = self.build(tmp_path)
        watchdog.start()
        try:
            for step in range(12):  # for longer than its limit
                watchdog.beat("step", step)
                time.sleep(self.seconds / 6)
            assert not acted(tmp_path), "it acted on a run that makes progress"
            time.sleep(self.seconds)
            for _ in range(50):
                if acted(tmp_path):
                    break
                time.sleep(self.seconds / 5)
            assert acted(tmp_path), f"it has not acted after {11 * self.seconds:g} s without a beat"
        finally:
            watchdog.close()

    def test_nothing_happens_once_it_is_closed(self, tmp_path: Path) -> None:
        acted = self._action_check()
        watchdog = self.build(tmp_path)
        watchdog.start()
        watchdog.beat("step", 1)
        watchdog.close()
        time.sleep(2 * self.seconds)
        assert not acted(tmp_path), "it acted after close"

    def _action_check(self) -> Callable[[Path], bool]:
        """`acted` as a function; skips the test of a watchdog whose actions cannot be seen."""
        acted = type(self).acted
        if acted is None:
            pytest.skip("needs a way to see it act: set `acted`")
        return acted


def _threads() -> set[threading.Thread]:
    return set(threading.enumerate())


def _new_threads(before: set[threading.Thread]) -> list[str]:
    """Names of the threads that a part has left behind; those of libraries may need a moment to end."""
    for _ in range(50):
        if all(thread in before for thread in threading.enumerate()):
            break
        time.sleep(0.1)
    return [thread.name for thread in threading.enumerate() if thread not in before]
