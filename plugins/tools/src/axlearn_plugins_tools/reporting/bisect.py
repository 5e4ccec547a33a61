"""Which of the changes between two runs moves a metric: delta debugging over short trainings."""

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
"""How many standard errors apart two runs have to be, before what moves the metric from one to the other is looked for."""
_KEEPS = ("evaluators", "checkpointer", "distributed", "trackers", "profiler", "watchdog", "log_every_steps")
"""What measures and keeps a run. A short training has none of it."""


@attrs.frozen
class Change:
    """A part of the config that differs: a value, or a node whose class differs.

    Attributes:
        path: of the part.
        old, new: in either run.
    """

    path: str
    old: Any
    new: Any


@attrs.frozen
class Score:
    """A metric of short trainings that differ by their seeds alone: the mean over the last quarter of the steps of each."""

    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        """Over the seeds."""
        return statistics.fmean(self.values)

    @property
    def error(self) -> float:
        """The standard error of the mean; 0 for one seed, which tells nothing of it."""
        return statistics.stdev(self.values) / math.sqrt(len(self.values)) if len(self.values) > 1 else 0.0


@attrs.frozen(kw_only=True)
class Result:
    """What a bisection found.

    Attributes:
        first, second: the metric of either run.
        changes: all that differ.
        moving: those that together move the metric by more than half of the way, none of which can be left out; empty where
            the two runs do not differ by more than their seeds.
        moved: the metric of the first run with `moving`.
        alone: the metric of the first run with each of `moving` by itself; None where that cannot be trained.
        trainings: how many there were.
        ended: why the search ended.
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
        """Whether the two runs differ by more than their seeds."""
        return is_clear(self.first, self.second)


class OutOfTrainings(Exception):
    """As many trainings ran as are allowed."""


def is_clear(first: Score, second: Score) -> bool:
    """Whether two scores are further apart than their errors explain."""
    return abs(first.mean - second.mean) > max(CLEAR * math.hypot(first.error, second.error), 1e-12)


def read_runs(first: Path, second: Path) -> tuple[Any, Any]:
    """The configs of two runs.

    Raises:
        RequestError: one of them is not a run, or they read different data.
    """
    configs = []
    for path in (first, second):
        config = Run(path).config
        if not isinstance(config, Trainer.Config):
            raise RequestError(f"{path} is not the directory of a run\n    fix: see `axlearn runs list`")
        configs.append(config)
    one, other = (json.loads((p / "run.lock.json").read_text("utf-8")).get("data", {}) for p in (first, second))
    differing = [c.path for c in changes(configs[0].input, configs[1].input, "input")]
    differing += [f"data: {name}" for name in sorted({*one, *other}) if one.get(name) != other.get(name)]
    if differing:
        more = f" and {len(differing) - 4} more" if len(differing) > 4 else ""
        raise RequestError(
            "the runs read different data: what moves a metric between them would be looked for in the wrong place\n"
            f"    got: {', '.join(differing[:4])}{more}\n    expected: runs of one input\n"
            "    fix: train the second again on the data of the first"
        )
    return configs[0], configs[1]


def changes(old: Any, new: Any, path: str = "") -> list[Change]:
    """The smallest parts of `old` that can be set to those of `new` by themselves."""
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
    """Looks for the changes from `first` to `second` that move a metric.

    Args:
        first, second: the configs.
        metric: its name, for messages.
        score: trains a config; raises `OutOfTrainings`, or `RequestError` for one that cannot be trained.
    """
    differences = [c for c in changes(first, second) if c.path.partition(".")[0] not in (*_KEEPS, "seed")]
    ends = score(first), score(second)
    progress(f"{metric}: {_shown(ends[0])} and {_shown(ends[1])}; {len(differences)} changes between them")
    facts: dict[str, Any] = {"first": ends[0], "second": ends[1], "changes": tuple(differences)}
    if not differences or not is_clear(*ends):
        return Result(
            **facts, ended="the runs do not differ by more than their seeds" if differences else "nothing differs"
        )
    half = (ends[0].mean + ends[1].mean) / 2
    scores: dict[tuple[str, ...], Score | None] = {}

    def scored(some: Sequence[Change]) -> Score | None:
        key = tuple(c.path for c in some)
        if key not in scores:
            try:
                scores[key] = score(patch(first, {c.path: c.new for c in some}))
            except RequestError:  # changes that need one another
                scores[key] = None
            shown = "cannot be trained" if scores[key] is None else _shown(scores[key])  # type: ignore[arg-type]
            progress(
                f"{len(some)} of {len(differences)} changes ({', '.join(key[:3])}{', ...' if len(key) > 3 else ''}): {shown}"
            )
        return scores[key]

    def moves(some: Sequence[Change]) -> bool:
        at = scored(some)
        return at is not None and (at.mean - half) * (ends[1].mean - half) > 0

    scores[tuple(c.path for c in differences)] = ends[1]
    moving, ended = list(differences), "none of them can be left out"
    try:
        for smaller in minimize(differences, moves):
            moving = smaller
    except OutOfTrainings:
        ended = "the trainings were used up: some of them may not be needed"
    alone: list[Score | None] = []
    try:
        alone = [scored([c]) for c in moving]
    except OutOfTrainings:
        alone += [None] * (len(moving) - len(alone))
    return Result(
        **facts, moving=tuple(moving), moved=scores.get(tuple(c.path for c in moving)), alone=tuple(alone), ended=ended
    )


def minimize(items: Sequence[Any], fails: Callable[[Sequence[Any]], bool]) -> Any:
    """Yields smaller and smaller subsets that fail, the last one minimal: without any one of its items it does not fail.

    Zeller and Hildebrandt, Simplifying and Isolating Failure-Inducing Input, 2002 (`ddmin`). `fails(items)` is taken to be true.
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
    """Scores configs by short trainings on the devices that are here.

    Attributes:
        metric: the name of a scalar of a step.
        steps: of each training, the first ones of the run's schedule.
        seeds: those that each config is trained with.
        most: how many trainings there may be.
        count: how many there were.
    """

    metric: str
    steps: int
    seeds: Sequence[int]
    most: int
    count: int = 0

    def score(self, config: Any) -> Score:
        """The metric of a config.

        Raises:
            OutOfTrainings: there were as many as are allowed.
            RequestError: the config cannot be trained, or a step reports no such metric.
        """
        if self.count + len(self.seeds) > self.most:
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
    """Raises `RequestError` where a run cannot be trained here, or reports no such metric."""
    Trainings(metric, min(steps, 1), (0,), 1).score(config)


def _shown(score: Score) -> str:
    return f"{score.mean:.5g}" + (f" ± {score.error:.2g}" if len(score.values) > 1 else "")


def text(result: Result, metric: str, shown: Callable[[Any], str]) -> str:
    """For people."""
    lines = [f"{metric}: {_shown(result.first)} in A, {_shown(result.second)} in B; {len(result.changes)} changes"]
    if not result.moving:
        return "\n".join([*lines, result.ended])
    gap = result.second.mean - result.first.mean
    moved = "" if result.moved is None else f" move it to {_shown(result.moved)}"
    lines.append(f"of them {len(result.moving)}{moved} ({result.ended}):")
    for change, alone in zip(result.moving, result.alone, strict=True):
        share = (
            "cannot be trained alone"
            if alone is None
            else f"alone {(alone.mean - result.first.mean) / gap:.0%} of the way"
        )
        lines.append(f"  {change.path}: {shown(change.old)} -> {shown(change.new)}  ({share})")
    return "\n".join([*lines, f"{result.trainings} trainings"])


def as_json(result: Result, shown: Callable[[Any], str]) -> Mapping[str, Any]:
    """One object."""

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


def counted(result: Result, trainings: int) -> Result:
    """The result with the number of trainings."""
    return attrs.evolve(result, trainings=trainings)


def run_exists(path: Path) -> None:
    """Raises `CheckpointError` for a directory that does not exist."""
    if not path.is_dir():
        raise CheckpointError(f"{path} is not a directory\n    expected: the directory of a run")
