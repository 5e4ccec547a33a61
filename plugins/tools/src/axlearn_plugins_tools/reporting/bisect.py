"""Find the config changes between two runs that move a metric.

Applies delta debugging with short training runs.
"""

import itertools
import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import jax
import numpy as np

from axlearn_core.compose import compose
from axlearn_core.config import Node, patch
from axlearn_core.config.tree import children, join
from axlearn_core.contracts.capabilities import vocabulary_size
from axlearn_core.errors import CheckpointError, RequestError, unknown
from axlearn_core.run import Run
from axlearn_core.train.trainer import Trainer

CLEAR = 4.0
"""Minimum difference between two runs, in standard errors, to start a search."""
_IGNORED_FIELDS = ("evaluators", "checkpointer", "distributed", "trackers", "profiler", "watchdog", "log_every_steps")
"""Config fields that only affect how a run is started, watched, measured or saved. Short training runs do not use them."""


@attrs.frozen
class Change:
    """A difference between two configs: a value, or a node with a different class.

    Attributes:
        path: Config path.
        old: Value in the first config.
        new: Value in the second config.
    """

    path: str
    old: Any
    new: Any


@attrs.frozen
class Score:
    """A metric of short training runs that differ only in their seeds.

    Attributes:
        values: Mean over the last quarter of the steps, for each seed.
    """

    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        """Mean across seeds."""
        return statistics.fmean(self.values)

    @property
    def error(self) -> float:
        """Standard error of the mean, or 0 if there is only one seed."""
        return statistics.stdev(self.values) / math.sqrt(len(self.values)) if len(self.values) > 1 else 0.0


@attrs.frozen(kw_only=True)
class Result:
    """The result of a bisection.

    Attributes:
        first: Metric of the first run.
        second: Metric of the second run.
        changes: All changes between the runs.
        moving: Minimal set of changes that moves the metric more than halfway. Empty if the runs do not differ by more than the
            variation across seeds.
        moved: Metric of the first run with all changes in `moving`.
        alone: Metric of the first run with each change in `moving` on its own, or None if that config cannot be trained.
        trainings: Number of training runs.
        ended: Why the search ended.
    """

    first: Score
    second: Score
    changes: tuple[Change, ...]
    moving: tuple[Change, ...] = ()
    moved: Score | None = None
    alone: tuple[Score | None, ...] = ()
    trainings: int = 0
    ended: str = ""

    @property
    def clear(self) -> bool:
        """Whether the two runs differ by more than the variation across seeds."""
        return is_clear(self.first, self.second)


class OutOfTrainings(Exception):
    """Raised when another training run would exceed the limit."""


def is_clear(first: Score, second: Score) -> bool:
    """Return whether the difference between two scores is too large for their errors to explain."""
    return abs(first.mean - second.mean) > max(CLEAR * math.hypot(first.error, second.error), 1e-12)


def read_runs(first: Path, second: Path) -> tuple[Any, Any]:
    """Return the configs of two runs.

    Raises:
        RequestError: If one of them is not a run, or they read different data.
    """
    configs = []
    for path in (first, second):
        config = Run(path).config
        if not isinstance(config, Trainer.Config):
            raise RequestError(f"{path} is not a run directory\n    fix: see `axlearn runs list`")
        configs.append(config)
    one, other = (json.loads((p / "run.lock.json").read_text("utf-8")).get("data", {}) for p in (first, second))
    differing = [c.path for c in changes(configs[0].input, configs[1].input, "input")]
    differing += [f"data: {name}" for name in sorted({*one, *other}) if one.get(name) != other.get(name)]
    if differing:
        more = f" and {len(differing) - 4} more" if len(differing) > 4 else ""
        raise RequestError(
            "the runs read different data, so their configs alone cannot explain a difference\n"
            f"    got: {', '.join(differing[:4])}{more}\n    expected: runs with the same input\n"
            "    fix: retrain the second run on the data of the first"
        )
    return configs[0], configs[1]


def changes(old: Any, new: Any, path: str = "") -> list[Change]:
    """Return the smallest changes from `old` to `new` that can be applied independently."""
    if isinstance(old, Node) and type(old) is type(new):
        below = children(new)
        return [c for name, value in children(old).items() for c in changes(value, below[name], join(path, name))]
    return [] if old == new else [Change(path, old, new)]


def bisect(
    first: Any,
    second: Any,
    metric: str,
    score: Callable[[Any], Score],
    *,
    progress: Callable[[str], None] = lambda _: None,
) -> Result:
    """Find the changes from `first` to `second` that move a metric.

    Args:
        first: Config of the first run.
        second: Config of the second run.
        metric: Name of the metric, for use in messages.
        score: Trains a config. Raises `OutOfTrainings`, or `RequestError` if the config cannot be trained.
        progress: Receives a line of text after each score.
    """
    differences = [c for c in changes(first, second) if c.path.partition(".")[0] not in (*_IGNORED_FIELDS, "seed")]
    ends = score(first), score(second)
    progress(
        f"{metric}: {_format_score(ends[0])} and {_format_score(ends[1])}; {len(differences)} changes between them"
    )
    facts: dict[str, Any] = {"first": ends[0], "second": ends[1], "changes": tuple(differences)}
    if not differences or not is_clear(*ends):
        return Result(
            **facts,
            ended="the runs do not differ by more than the variation across seeds"
            if differences
            else "the configs are the same",
        )
    half = (ends[0].mean + ends[1].mean) / 2
    scores: dict[tuple[str, ...], Score | None] = {}

    def score_changes(some: Sequence[Change]) -> Score | None:
        key = tuple(c.path for c in some)
        if key not in scores:
            try:
                scores[key] = score(patch(first, {c.path: c.new for c in some}))
            except RequestError:  # the changes depend on each other
                scores[key] = None
            shown = "cannot be trained" if scores[key] is None else _format_score(scores[key])  # type: ignore[arg-type]
            progress(
                f"{len(some)} of {len(differences)} changes ({', '.join(key[:3])}{', ...' if len(key) > 3 else ''}): {shown}"
            )
        return scores[key]

    def moves(some: Sequence[Change]) -> bool:
        result = score_changes(some)
        return result is not None and (result.mean - half) * (ends[1].mean - half) > 0

    scores[tuple(c.path for c in differences)] = ends[1]
    moving, ended = list(differences), "each of them is needed"
    try:
        for smaller in minimize(differences, moves):
            moving = smaller
    except OutOfTrainings:
        ended = "the limit on training runs was reached, so some of them may not be needed"
    alone: list[Score | None] = []
    try:
        alone = [score_changes([c]) for c in moving]
    except OutOfTrainings:
        alone += [None] * (len(moving) - len(alone))
    return Result(
        **facts, moving=tuple(moving), moved=scores.get(tuple(c.path for c in moving)), alone=tuple(alone), ended=ended
    )


def minimize(items: Sequence[Any], fails: Callable[[Sequence[Any]], bool]) -> Any:
    """Yield smaller and smaller subsets that fail.

    The last subset is minimal: it no longer fails if any item is removed. This is the `ddmin` algorithm from Zeller and
    Hildebrandt, Simplifying and Isolating Failure-Inducing Input, 2002. Assumes that `fails(items)` is true.
    """
    items, parts = list(items), 2
    while len(items) > 1:
        parts = min(parts, len(items))
        bounds = [len(items) * i // parts for i in range(parts + 1)]
        subsets = [items[a:b] for a, b in itertools.pairwise(bounds)]
        rests = [[i for i in items if i not in s] for s in subsets] if parts > 2 else []
        smaller = next((s for s in [*subsets, *rests] if fails(s)), None)
        if smaller is not None:
            parts = 2 if smaller in subsets else max(parts - 1, 2)
            items = smaller
            yield items
        elif parts == len(items):
            return
        else:
            parts = min(len(items), 2 * parts)


@attrs.define
class Trainings:
    """Scores configs by short training runs on the local devices.

    Attributes:
        metric: Name of a scalar that each step reports.
        steps: Number of steps per training run. They are the first steps of the run's schedule.
        seeds: Seeds to train each config with.
        max_runs: Maximum number of training runs.
        count: Number of training runs so far.
    """

    metric: str
    steps: int
    seeds: Sequence[int]
    max_runs: int
    count: int = 0

    def score(self, config: Any) -> Score:
        """Return the metric of a config.

        Raises:
            OutOfTrainings: If the limit on training runs would be exceeded.
            RequestError: If the config cannot be trained, or its steps do not report the metric.
        """
        if self.count + len(self.seeds) > self.max_runs:
            raise OutOfTrainings
        values = [self._train(patch(config, {"seed": seed})) for seed in self.seeds]
        return Score(tuple(values))

    def _train(self, config: Any) -> float:
        self.count += 1
        program = compose(config)
        source = config.build_input(config.input, vocabulary_size(program.functional.describe()))
        stream, state, values = source.train(), program.init(config.seed), []
        try:
            for _ in range(self.steps):
                state, scalars = program.train_step(state, program.put(next(stream)))
                values.append(scalars)
        finally:
            stream.close()
        if self.metric not in values[-1]:
            raise unknown("metric of a step", self.metric, values[-1])
        last = values[-max(1, self.steps // 4) :]
        return float(np.mean([jax.device_get(v[self.metric]) for v in last]))


def check_metric(config: Any, metric: str, steps: int) -> None:
    """Raise `RequestError` if a run cannot be trained here or does not report the metric."""
    Trainings(metric, min(steps, 1), (0,), 1).score(config)


def _format_score(score: Score) -> str:
    return f"{score.mean:.5g}" + (f" ± {score.error:.2g}" if len(score.values) > 1 else "")


def text(result: Result, metric: str, shown: Callable[[Any], str]) -> str:
    """Return a human-readable summary."""
    lines = [
        f"{metric}: {_format_score(result.first)} in A, {_format_score(result.second)} in B; {len(result.changes)} changes"
    ]
    if not result.moving:
        return "\n".join([*lines, result.ended])
    gap = result.second.mean - result.first.mean
    moved = "" if result.moved is None else f" move it to {_format_score(result.moved)}"
    lines.append(f"{len(result.moving)} of them{moved} ({result.ended}):")
    for change, alone in zip(result.moving, result.alone, strict=True):
        share = (
            "cannot be trained alone"
            if alone is None
            else f"alone {(alone.mean - result.first.mean) / gap:.0%} of the way"
        )
        lines.append(f"  {change.path}: {shown(change.old)} -> {shown(change.new)}  ({share})")
    return "\n".join([*lines, f"{result.trainings} training runs"])


def as_json(result: Result, shown: Callable[[Any], str]) -> Mapping[str, Any]:
    """Return the result as a JSON object."""

    def score(value: Score | None) -> Any:
        return None if value is None else {"mean": value.mean, "error": value.error, "values": list(value.values)}

    return {
        "first": score(result.first),
        "second": score(result.second),
        "clear": result.clear,
        "changes": [c.path for c in result.changes],
        "moving": [
            {"path": c.path, "old": shown(c.old), "new": shown(c.new), "alone": score(alone)}
            for c, alone in zip(result.moving, result.alone, strict=True)
        ],
        "moved": score(result.moved),
        "trainings": result.trainings,
        "ended": result.ended,
    }


def set_trainings(result: Result, trainings: int) -> Result:
    """Return the result with its number of training runs set."""
    return attrs.evolve(result, trainings=trainings)


def run_exists(path: Path) -> None:
    """Raise `CheckpointError` if a directory does not exist."""
    if not path.is_dir():
        raise CheckpointError(f"{path} is not a directory\n    expected: a run directory")
