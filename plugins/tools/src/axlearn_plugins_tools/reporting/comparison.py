"""Compare two runs by their files: config, seeds, data, versions, recorded scalars and checkpoints. Does not import JAX."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from axlearn_core.checkpoint.manifest import STATE, Manifest
from axlearn_core.errors import CheckpointError, counted, nearest
from axlearn_core.run import Run
from axlearn_core.run.metric_files import is_timing
from axlearn_core.run.record import CONFIG, LOCK

TOLERANCE = 1e-5
"""Default for the largest relative difference between two scalars that counts as rounding."""
ABSENT = "(absent)"
"""Text for a value that only the other run has."""
_LOCKED = {
    "versions": ("versions", "python"),
    "devices": ("platform", "devices", "mesh", "flags"),
    "data": ("data",),
    "program": ("parameters", "trained_parameters", "kernels", "hlo_fingerprint"),
}
"""Lock keys by part of a comparison. All other keys follow from the config or name the run."""
PARTS = ("config", "seeds", "data", "versions", "devices", "program")
"""Parts of a comparison that are known before the first step."""


@attrs.frozen
class Difference:
    """A value that differs between two runs.

    Attributes:
        name: Config path, or the key of a fact.
        first: Value in the first run, or `ABSENT`.
        second: Value in the second run, or `ABSENT`.
        sources: Source of the value in each run. Empty if it is unknown.
    """

    name: str
    first: Any
    second: Any
    sources: tuple[str, str] = ("", "")


@attrs.frozen
class StepDifference:
    """A scalar at a step, in two runs.

    Attributes:
        relative: Difference, relative to the larger magnitude. Infinite if only one value is finite.
    """

    step: int
    first: float
    second: float
    relative: float


@attrs.frozen
class ScalarDifference:
    """A scalar that differs between two runs.

    Attributes:
        name: Name of the scalar.
        steps: Number of steps that both runs recorded.
        first: First step at which the bits differ.
        beyond: First step at which the difference exceeds the tolerance, or None.
        largest: Step with the largest relative difference.
    """

    name: str
    steps: int
    first: StepDifference
    beyond: StepDifference | None
    largest: StepDifference


@attrs.frozen(kw_only=True)
class Scalars:
    """The recorded scalars of two runs. Timings are not compared.

    Attributes:
        names: Scalars that both runs recorded.
        only: Scalars that only one run recorded, by run.
        steps: Steps that both runs recorded.
        last: Last recorded step of each run, or 0.
        tolerance: Largest relative difference that counts as rounding.
        differences: Scalars that differ, by first step.
    """

    names: tuple[str, ...]
    only: tuple[tuple[str, ...], tuple[str, ...]]
    steps: tuple[int, ...]
    last: tuple[int, int]
    tolerance: float
    differences: tuple[ScalarDifference, ...]

    @property
    def first_step(self) -> int | None:
        """First step at which the bits differ, or None."""
        return min((d.first.step for d in self.differences), default=None)

    @property
    def first_step_beyond(self) -> int | None:
        """First step at which a difference exceeds the tolerance, or None."""
        return min((d.beyond.step for d in self.differences if d.beyond), default=None)

    @property
    def last_equal_step(self) -> int | None:
        """Last common step before the first difference, or None if there is none."""
        first = self.first_step
        return max((s for s in self.steps if first is None or s < first), default=None)


@attrs.frozen
class ArrayDifference:
    """An array of a training state that differs between two checkpoints.

    Attributes:
        path: Dotted path in the training state.
        relative: Largest difference between two elements, relative to the largest magnitude in the arrays. Infinite if only one
            of two elements is finite. None if the shapes of the arrays differ.
        count: Number of elements with different bits.
        size: Number of elements.
        first: Shape and dtype in the first run, or `ABSENT`.
        second: Shape and dtype in the second run, or `ABSENT`.
    """

    path: str
    relative: float | None
    count: int
    size: int
    first: str
    second: str


@attrs.frozen(kw_only=True)
class Checkpoints:
    """The checkpoints that two runs have in common.

    Attributes:
        steps: Steps of the common checkpoints.
        differing: Common steps whose array files differ.
        step: Step whose arrays were compared, or None.
        arrays: Number of arrays at this step.
        differences: Arrays that differ at this step, weights first, then by largest difference. None if they were not
            compared.
        position: Differences between the positions in the data at this step.
    """

    steps: tuple[int, ...]
    differing: tuple[int, ...] = ()
    step: int | None = None
    arrays: int = 0
    differences: tuple[ArrayDifference, ...] | None = None
    position: tuple[Difference, ...] = ()


@attrs.frozen(kw_only=True)
class Comparison:
    """The differences between two runs.

    Attributes:
        runs: URIs of the two runs.
        parts: Differences before the first step, by part. See `PARTS`.
        same_mathematics: Whether the configs compute the same function with the same updates, or None if it is unknown.
        scalars: Differences between the recorded scalars.
        checkpoints: Differences between the common checkpoints.
        notes: One sentence for each fact that could not be compared.
    """

    runs: tuple[str, str]
    parts: Mapping[str, tuple[Difference, ...]]
    same_mathematics: bool | None
    scalars: Scalars
    checkpoints: Checkpoints
    notes: tuple[str, ...] = ()

    @property
    def equal(self) -> bool:
        """Whether nothing differs."""
        return not self.timeline and self.scalars.last[0] == self.scalars.last[1] and not any(self.scalars.only)

    @property
    def timeline(self) -> list[tuple[int, str, list[str]]]:
        """Step, part and names of the differences, in the order in which they arise. Step 0 precedes the first step."""
        events = [(0, part, [d.name for d in self.parts[part]]) for part in PARTS if self.parts[part]]
        steps = sorted({d.first.step for d in self.scalars.differences})
        events += [(s, "scalars", [d.name for d in self.scalars.differences if d.first.step == s]) for s in steps]
        common = self.checkpoints
        if common.differing and (common.differing[0] != common.step or common.differences is None):
            events.append((common.differing[0], "checkpoint", []))
        if common.position and common.step is not None:
            events.append((common.step, "position in the data", [d.name for d in common.position]))
        if common.differences and common.step is not None:
            events.append((common.step, "checkpoint", [d.path for d in common.differences]))
        return sorted(events, key=lambda event: event[0])


def open_run(uri: str | Path) -> Run:
    """Open a run to compare.

    Raises:
        CheckpointError: If `uri` is not a run. The message lists the nearest runs in its folder.
    """
    run = Run(uri)
    if run.settings or run.lock or run.metrics:
        return run
    error, path = run.missing(), Path(run.uri)
    if "://" in run.uri or path.exists() or not path.parent.is_dir():
        raise error
    close = nearest(path.name, (p.name for p in path.parent.iterdir() if (p / CONFIG).is_file()))
    if not close:
        raise error
    head, *lines = str(error).splitlines()
    names = ", ".join(str(path.parent / name) for name in close)
    raise CheckpointError("\n".join([head, f"    did you mean: {names}?", *lines]))


def compare_runs(first: Run, second: Run, *, tolerance: float = TOLERANCE) -> Comparison:
    """Compare the files of two runs. Checkpoint arrays are compared only by the hashes of their files.

    Args:
        first: The first run.
        second: The second run.
        tolerance: Largest relative difference between two scalars that counts as rounding.

    Raises:
        CheckpointError: If a file of a run is damaged.
    """
    notes = [
        f"{run} has no {file}, so {what} cannot be compared"
        for run in (first, second)
        for file, content, what in (
            (CONFIG, run.settings, "configs, seeds and checkpoints"),
            (LOCK, run.lock, "versions, devices and data"),
        )
        if not content
    ]
    parts = _compare_configs(first, second) if first.settings and second.settings else {}
    facts, more_notes = _compare_locks(first, second) if first.lock and second.lock else ({}, [])
    hashes = [run.lock.get("hash") for run in (first, second)]
    has_configs = bool(first.settings and second.settings)
    return Comparison(
        runs=(first.uri, second.uri),
        parts={part: (*parts.get(part, ()), *facts.get(part, ())) for part in PARTS},
        same_mathematics=hashes[0] == hashes[1] if all(hashes) else None,
        scalars=compare_scalars(first.metrics, second.metrics, tolerance),
        checkpoints=_compare_checkpoint_files(first, second) if has_configs else Checkpoints(steps=()),
        notes=(*notes, *more_notes),
    )


def _compare_configs(first: Run, second: Run) -> dict[str, list[Difference]]:
    """Return the leaves that differ, split by what they control: seeds, data, or anything else."""
    parts: dict[str, list[Difference]] = {"seeds": [], "data": [], "config": []}
    for difference in diff_values(first.settings, second.settings):
        path = difference.name
        name = path.rpartition(".")[2]
        is_seed = name == "seed" or name.endswith("_seed")
        part = "seeds" if is_seed else "data" if path.partition(".")[0] == "input" else "config"
        sources = find_source(first.lock, path), find_source(second.lock, path)
        parts[part].append(attrs.evolve(difference, sources=sources))
    return parts


def _compare_locks(first: Run, second: Run) -> tuple[dict[str, list[Difference]], list[str]]:
    """Return the differing facts by part. A fact that only one lock records becomes a note, as for derived runs."""
    parts, notes = {}, []
    for part, keys in _LOCKED.items():
        parts[part] = []
        for key in keys:
            missing = [run for run in (first, second) if key not in run.lock]
            if len(missing) == 1 and part != "program":
                notes.append(f"the {LOCK} of {missing[0]} has no {key}, so it cannot be compared")
            if not missing:
                prefix = "" if key in ("versions", "data") else key
                parts[part] += diff_values(first.lock[key], second.lock[key], prefix)
    return parts, notes


def find_source(lock: Mapping[str, Any], path: str) -> str:
    """Return the most recent source of a config value, such as `--set seed=1`. Empty if the lock does not record it."""
    provenance = lock.get("provenance")
    chain = provenance.get(path) if isinstance(provenance, Mapping) else None
    last = chain[-1] if isinstance(chain, list) and chain else None
    return str(last.get("by", "")) if isinstance(last, Mapping) else ""


def diff_values(first: Any, second: Any, path: str = "") -> list[Difference]:
    """Return the leaves that differ between two trees of plain data."""
    one, other = flatten_values(first, path), flatten_values(second, path)
    return [
        Difference(name, one.get(name, ABSENT), other.get(name, ABSENT))
        for name in dict.fromkeys([*one, *other])
        if name not in one or name not in other or one[name] != other[name]
    ]


def flatten_values(value: Any, path: str = "") -> dict[str, Any]:
    """Return the leaves of plain data by dotted path. Empty mappings and lists are leaves."""
    if isinstance(value, Mapping) and value:
        items = [(str(name), below) for name, below in value.items()]
    elif isinstance(value, Sequence) and not isinstance(value, str) and value:
        items = [(str(i), below) for i, below in enumerate(value)]
    else:
        return {path: value}
    return {p: v for name, below in items for p, v in flatten_values(below, f"{path}.{name}" if path else name).items()}


def read_scalars(records: Sequence[Mapping[str, Any]]) -> dict[str, dict[int, float]]:
    """Return the recorded scalars by name and step, without timings. Non-finite values are returned as NaN or infinity."""
    scalars: dict[str, dict[int, float]] = {}
    for record in records:
        texts = record.get("nonfinite")
        values = {**record, **(texts if isinstance(texts, Mapping) else {})}
        for name, value in values.items():
            if name in ("step", "nonfinite") or is_timing(name):
                continue
            try:
                scalars.setdefault(name, {})[record["step"]] = float(value)
            except (TypeError, ValueError):  # text or a damaged value
                continue
    return scalars


def relative_difference(first: float, second: float) -> float:
    """Return the difference between two numbers, relative to the larger magnitude. Infinite if only one is finite."""
    if first == second or (math.isnan(first) and math.isnan(second)):
        return 0.0
    if not (math.isfinite(first) and math.isfinite(second)):
        return math.inf
    return abs(first - second) / max(abs(first), abs(second))


def compare_scalars(
    first: Sequence[Mapping[str, Any]], second: Sequence[Mapping[str, Any]], tolerance: float = TOLERANCE
) -> Scalars:
    """Compare the records of two `metrics.jsonl` files at the steps that both contain."""
    one, other = read_scalars(first), read_scalars(second)
    names = [name for name in one if name in other]
    differences = [d for name in names if (d := _compare_scalar(name, one[name], other[name], tolerance))]
    return Scalars(
        names=tuple(names),
        only=(tuple(n for n in one if n not in other), tuple(n for n in other if n not in one)),
        steps=tuple(sorted({s for name in names for s in one[name].keys() & other[name].keys()})),
        last=_last_step(first, second),
        tolerance=tolerance,
        differences=tuple(sorted(differences, key=lambda d: d.first.step)),
    )


def _last_step(*runs: Sequence[Mapping[str, Any]]) -> Any:
    return tuple(max((record["step"] for record in records), default=0) for records in runs)


def _compare_scalar(
    name: str, first: Mapping[int, float], second: Mapping[int, float], tolerance: float
) -> ScalarDifference | None:
    steps = sorted(first.keys() & second.keys())
    every = [StepDifference(s, first[s], second[s], relative_difference(first[s], second[s])) for s in steps]
    differing = [d for d in every if d.relative > 0]
    if not differing:
        return None
    beyond = next((d for d in differing if d.relative > tolerance), None)
    return ScalarDifference(name, len(steps), differing[0], beyond, max(differing, key=lambda d: d.relative))


def _compare_checkpoint_files(first: Run, second: Run) -> Checkpoints:
    """Compare the manifest hashes of the checkpoints that both runs have."""
    steps = sorted({*first.checkpoints.steps()} & {*second.checkpoints.steps()})
    differing = [s for s in steps if not has_same_arrays(first.checkpoints.inspect(s), second.checkpoints.inspect(s))]
    position = diff_positions(first, second, steps[-1]) if steps else []
    return Checkpoints(
        steps=tuple(steps),
        differing=tuple(differing),
        step=steps[-1] if steps else None,
        arrays=len(first.checkpoints.inspect(steps[-1]).arrays) if steps else 0,
        differences=() if steps and steps[-1] not in differing else None,
        position=tuple(position),
    )


def has_same_arrays(first: Manifest, second: Manifest) -> bool:
    """Return True if the array files have equal hashes. Equal arrays may still be stored in different files."""
    files = [{n: f for n, f in m.files.items() if n.startswith(f"{STATE}/")} for m in (first, second)]
    has_hashes = first.index is not None or bool(files[0])
    return first.arrays == second.arrays and has_hashes and files[0] == files[1] and first.index == second.index


def diff_positions(first: Run, second: Run, step: int) -> list[Difference]:
    """Return the differences between the positions in the data at a common checkpoint."""
    one, other = (run.checkpoints.read_extra(step).get("data") for run in (first, second))
    return diff_values(one, other) if one is not None and other is not None else []


def describe_counts(parts: Mapping[str, Sequence[Difference]]) -> str:
    """Return the number of differences by part, such as `2 config values, 1 seed`."""
    nouns = {
        "config": ("config value", ""),
        "seeds": ("seed", ""),
        "data": ("fact", " about the data"),
        "versions": ("version", ""),
        "devices": ("fact", " about the devices"),
        "program": ("fact", " about the program"),
    }
    counts = {part: len(differences) for part, differences in parts.items() if differences}
    return ", ".join(counted(count, nouns[part][0]) + nouns[part][1] for part, count in counts.items())
