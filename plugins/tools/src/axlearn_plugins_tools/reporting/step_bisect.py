"""Find the first step at which two runs diverge, from their records and from steps that are run again."""

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs

from axlearn_core.errors import counted, unknown
from axlearn_core.run import Run
from axlearn_plugins_tools.reporting.checkpoint_arrays import iter_differences
from axlearn_plugins_tools.reporting.comparison import (
    TOLERANCE,
    Comparison,
    compare_runs,
    has_same_arrays,
    read_scalars,
    relative_difference,
)
from axlearn_plugins_tools.reporting.rerun import CannotRerun, Stretch, rerun

MARGIN = 4.0
"""Minimum ratio of a difference to the measured noise."""
Progress = Callable[[str], None]


@attrs.frozen
class Interval:
    """Steps between which two runs diverge, according to their files.

    Attributes:
        equal: Last step at which the runs are known to agree. 0 is the initial state.
        differs: First step at which they are known to differ, or None if no file shows a difference.
        names: Names of the scalars that differ there, or `checkpoint`.
    """

    equal: int
    differs: int | None
    names: tuple[str, ...] = ()


@attrs.frozen
class Reading:
    """The value of a scalar or an array at a step, in both runs.

    Attributes:
        name: Name of a scalar or path of an array.
        first: Value in the first run, or None for an array.
        second: Value in the second run, or None for an array.
        relative: Relative difference.
        noise: Relative difference that rounding causes.
    """

    name: str
    first: float | None
    second: float | None
    relative: float
    noise: float

    @property
    def is_clear(self) -> bool:
        """Whether the difference exceeds the noise."""
        return self.relative > self.noise


@attrs.frozen(kw_only=True)
class Divergence:
    """The first step at which two runs diverge.

    Attributes:
        step: Number of the step.
        cause: What differs first: the `parameters` before the step, or the step's `data`, `scalars` or `update`.
        positions: Position of the step in the data, in each run.
        same_batch: Whether the step has the same batch in both runs.
        scalars: Scalars of the step that differ.
        before: Arrays that differ before the step, in the order of the model.
        after: Arrays that differ after the step.
        arrays: Number of arrays.
    """

    step: int
    cause: str
    positions: tuple[str, str]
    same_batch: bool
    scalars: tuple[Reading, ...]
    before: tuple[Reading, ...]
    after: tuple[Reading, ...]
    arrays: int


@attrs.frozen(kw_only=True)
class Result:
    """The result of a search for the first step at which two runs diverge.

    Attributes:
        interval: Steps between which the runs diverge, according to their files.
        exact: Whether every difference counts, because both runs executed the same program on the same devices.
        divergence: The first step that diverges, or None if it was not found.
        start: Checkpoint from which steps were run again, or None.
        reruns: Number of times that steps were run again.
        ended: Why the search ended.
        notes: Sentences about steps that could not be reproduced, and about this machine.
    """

    interval: Interval
    exact: bool
    divergence: Divergence | None = None
    start: int | None = None
    reruns: int = 0
    ended: str = ""
    notes: tuple[str, ...] = ()

    @property
    def differs(self) -> bool:
        """Whether the files of the runs differ."""
        return self.interval.differs is not None


def find_step(
    first: Run,
    second: Run,
    *,
    metric: str | None = None,
    tolerance: float | None = None,
    max_reruns: int = 60,
    max_steps: int = 1000,
    progress: Progress = lambda _: None,
    run_again: Callable[..., Stretch] = rerun,
) -> Result:
    """Find the first step at which two runs diverge.

    The recorded scalars and a binary search over the common checkpoints bound the step. Then the steps in between are run
    again for both runs, from the nearest common checkpoint. If rounding may differ between the runs, the first run is run once more
    from slightly changed parameters, which measures the noise.

    Args:
        first: The first run.
        second: The second run.
        metric: Scalar that must differ. None considers all scalars, the data and the parameters.
        tolerance: Relative difference that counts as noise. None means 0 if both runs executed the same program, and
            otherwise the larger of `TOLERANCE` and the measured noise.
        max_reruns: Maximum number of times to run steps again. If it is less than 2, only the files are searched.
        max_steps: Maximum number of steps to run again at a time.
        progress: Receives a line of text after each part of the search.
        run_again: Runs steps again, like `rerun`.

    Raises:
        RequestError: If a run does not record the metric, or if its steps cannot be run on these devices.
    """
    comparison = compare_runs(first, second, tolerance=TOLERANCE)
    if metric is not None and metric not in comparison.scalars.names:
        raise unknown("metric of both runs", metric, comparison.scalars.names)
    exact = is_exact(comparison) if tolerance is None else tolerance == 0
    limit = 0.0 if exact else TOLERANCE if tolerance is None else tolerance
    interval = bound_by_scalars(first, second, metric, limit)
    interval = bound_by_checkpoints(first, second, interval, lowers_end=exact and metric is None)
    progress(_describe_interval(interval, limit))
    facts: dict[str, Any] = {"interval": interval, "exact": exact}
    if interval.differs is None:
        return Result(**facts, ended="the runs do not differ beyond the tolerance")
    common = sorted({*first.checkpoints.steps()} & {*second.checkpoints.steps()})
    start = max((step for step in common if step <= interval.equal), default=0)
    count = interval.differs - start
    if max_reruns < 2:
        return Result(**facts, ended="no steps were run again, because --max-runs is smaller than 2")
    if count > max_steps:
        source = f"checkpoint {start}" if start else "the initial state"
        return Result(
            **facts,
            ended=f"{source} is {counted(count, 'step')} earlier; --steps {count} runs them again to find the step",
        )
    progress(f"running steps {start + 1} to {interval.differs} again in both runs")
    try:
        stretches = [run_again(run, start, interval.differs) for run in (first, second)]
        noise, reruns = None, 2
        if not exact and tolerance is None and max_reruns > 2:
            progress("running them again in A with rounding noise")
            noise, reruns = run_again(first, start, interval.differs, _rounding(stretches)), 3
    except CannotRerun as error:
        return Result(**facts, ended=str(error))
    if metric is not None and metric not in stretches[0].steps[0].scalars:
        raise unknown("metric of a step", metric, stretches[0].steps[0].scalars)
    divergence = find_divergence(stretches, metric, limit, noise)
    return Result(
        **facts,
        divergence=divergence,
        start=start,
        reruns=reruns,
        ended="" if divergence else "the runs agree when their steps are run again here",
        notes=tuple(_check_records((first, second), stretches, limit)),
    )


def _rounding(stretches: Sequence[Stretch]) -> dict[str, float]:
    """Return the relative size of the rounding errors that the steps before a stretch caused in each array."""
    if not stretches[0].start:
        return {}
    sizes = stretches[0].arrays.compare(stretches[1].arrays)
    return {path: size for path, size in sizes.items() if math.isfinite(size)}


def is_exact(comparison: Comparison) -> bool:
    """Return whether both runs executed the same program with the same versions, so that equal inputs give equal bits."""
    same = not any(comparison.parts[part] for part in ("versions", "devices", "program"))
    return same and comparison.same_mathematics is not None


def bound_by_scalars(first: Run, second: Run, metric: str | None, limit: float) -> Interval:
    """Return the interval in which the recorded scalars start to differ by more than `limit`."""
    one, other = read_scalars(first.metrics), read_scalars(second.metrics)
    names = [name for name in one if name in other and metric in (None, name)]
    steps: dict[int, list[str]] = {}
    for name in names:
        for step in one[name].keys() & other[name].keys():
            differing = steps.setdefault(step, [])
            if relative_difference(one[name][step], other[name][step]) > limit:
                differing.append(name)
    differs = min((step for step, differing in steps.items() if differing), default=None)
    # A step's records say nothing about its update, so matching records only show that the states before the step agree.
    equal = max((step - 1 for step in steps if differs is None or step < differs), default=0)
    return Interval(equal, differs, tuple(steps[differs]) if differs is not None else ())


def bound_by_checkpoints(first: Run, second: Run, interval: Interval, *, lowers_end: bool) -> Interval:
    """Narrow an interval by a binary search over the common checkpoints before its end.

    Args:
        first: The first run.
        second: The second run.
        interval: Interval to narrow.
        lowers_end: Whether a checkpoint with any differing bit ends the interval. If False, the difference may be rounding.
    """
    common = sorted({*first.checkpoints.steps()} & {*second.checkpoints.steps()})
    before = [step for step in common if interval.differs is None or step < interval.differs]
    first_differing = bisect_left(before, True, key=lambda step: differs_at(first, second, step))
    equal = before[first_differing - 1] if first_differing else 0
    if lowers_end and first_differing < len(before):
        return Interval(equal, before[first_differing], ("checkpoint",))
    return attrs.evolve(interval, equal=max(equal, interval.equal))


def differs_at(first: Run, second: Run, step: int) -> bool:
    """Return whether the arrays of two checkpoints differ. Equal file hashes prove that they do not."""
    if has_same_arrays(first.checkpoints.inspect(step), second.checkpoints.inspect(step)):
        return False
    return next(iter_differences(first, second, step), None) is not None


def find_divergence(
    stretches: Sequence[Stretch], metric: str | None, limit: float, noise: Stretch | None = None
) -> Divergence | None:
    """Return the first step that differs between two stretches by more than the noise, or None.

    Args:
        stretches: The same steps of both runs.
        metric: Scalar that must differ. None considers all scalars, the data and the parameters.
        limit: Relative difference that counts as noise.
        noise: The same steps of the first run, from slightly changed parameters.
    """
    one, other = stretches
    before = _compare_arrays(one.arrays, other.arrays, one.arrays, noise.arrays if noise else None, limit)
    for number, (a, b) in enumerate(zip(one.steps, other.steps, strict=True)):
        changed = noise.steps[number] if noise else None
        after = _compare_arrays(a.arrays, b.arrays, a.arrays, changed.arrays if changed else None, limit)
        scalars = _compare_scalars(a.scalars, b.scalars, changed.scalars if changed else None, limit)
        causes = {
            "parameters": any(r.is_clear for r in before),
            "data": a.batch != b.batch,
            "scalars": any(r.is_clear for r in scalars),
            "update": any(r.is_clear for r in after),
        }
        cause = next((name for name, differs in causes.items() if differs), None)
        if cause if metric is None else any(r.is_clear for r in scalars if r.name == metric):
            return Divergence(
                step=a.step,
                cause=cause or "scalars",
                positions=(a.position, b.position),
                same_batch=a.batch == b.batch,
                scalars=tuple(scalars),
                before=tuple(before),
                after=tuple(after),
                arrays=len(a.arrays.paths),
            )
        before = after
    return None


def _compare_arrays(first: Any, second: Any, base: Any, changed: Any | None, limit: float) -> list[Reading]:
    noise = base.compare(changed) if changed is not None else {}
    return [
        Reading(path, None, None, relative, max(limit, MARGIN * noise.get(path, 0.0)))
        for path, relative in first.compare(second).items()
    ]


def _compare_scalars(
    first: Mapping[str, float], second: Mapping[str, float], changed: Mapping[str, float] | None, limit: float
) -> list[Reading]:
    readings = []
    for name in first:
        relative = relative_difference(first[name], second[name]) if name in second else math.inf
        if relative:
            noise = relative_difference(first[name], changed[name]) if changed is not None else 0.0
            readings.append(Reading(name, first[name], second.get(name), relative, max(limit, MARGIN * noise)))
    return readings


def _check_records(runs: Sequence[Run], stretches: Sequence[Stretch], limit: float) -> list[str]:
    """Return a sentence for each run whose re-run steps do not match its records, and the drift of this machine."""
    notes = []
    for run, stretch in zip(runs, stretches, strict=True):
        recorded = read_scalars(run.metrics)
        for step in stretch.steps:
            wrong = [
                f"{name} {recorded[name][step.step]:.9g} in the records, {value:.9g} here"
                for name, value in step.scalars.items()
                if step.step in recorded.get(name, ()) and relative_difference(recorded[name][step.step], value) > limit
            ]
            if wrong:
                notes.append(f"{run} does not reproduce its records at step {step.step}: {', '.join(wrong[:3])}")
                break
        notes += stretch.notes
    return notes


def _describe_interval(interval: Interval, limit: float) -> str:
    tolerance = f" beyond {limit:g}" if limit else ""
    if interval.differs is None:
        return f"the files of the runs do not differ{tolerance}"
    names = ", ".join(interval.names[:4])
    return f"the files first differ{tolerance} at step {interval.differs} ({names}); the state of step {interval.equal} agrees"
