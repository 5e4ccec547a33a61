"""Compare the arrays of two checkpoints, one array at a time."""

import math
from collections.abc import Iterator
from typing import Any

import attrs
import jax
import numpy as np

from axlearn_core.checkpoint.shards import is_weight
from axlearn_core.checkpoint.state import is_key
from axlearn_core.errors import CheckpointError, RequestError
from axlearn_core.run import Run
from axlearn_core.run.checkpoints import open_checkpoint
from axlearn_plugins_tools.reporting.comparison import (
    ABSENT,
    ArrayDifference,
    Checkpoints,
    diff_positions,
    has_same_arrays,
)

_CHUNK = 2**20
"""Number of elements that are compared at once."""


def compare_checkpoints(first: Run, second: Run, common: Checkpoints, step: int | None = None) -> Checkpoints:
    """Compare the arrays at a common checkpoint. Only one array of each run is in memory at a time.

    Args:
        first: The first run.
        second: The second run.
        common: The common checkpoints.
        step: Step of the checkpoint (default: the last common one).

    Raises:
        RequestError: If the runs have no common checkpoint at `step`.
        CheckpointError: If a file is damaged.
    """
    if step is not None and step not in common.steps:
        raise RequestError(
            f"the runs have no common checkpoint at step {step}\n"
            f"    expected: {', '.join(map(str, common.steps)) or 'none exists'}\n    fix: omit --step, or use one of these"
        )
    step = common.step if step is None else step
    if step is None or (step == common.step and common.differences is not None):
        return common
    same_files = has_same_arrays(first.checkpoints.inspect(step), second.checkpoints.inspect(step))
    try:
        differences = () if same_files else tuple(iter_differences(first, second, step))
    except CheckpointError as error:
        raise CheckpointError(
            f"the arrays of step {step} cannot be compared: {error}\n"
            "    to compare the runs anyway: use another --step, or --no-arrays"
        ) from error
    differing = common.differing if differences else tuple(s for s in common.differing if s != step)
    return attrs.evolve(
        common,
        step=step,
        arrays=len(first.checkpoints.inspect(step).arrays),
        differing=differing,
        differences=tuple(sorted(differences, key=_severity)),
        position=tuple(diff_positions(first, second, step)),
    )


def iter_differences(first: Run, second: Run, step: int) -> Iterator[ArrayDifference]:
    """Yield the arrays that differ between two runs' checkpoints at a step, in the order of the first run."""
    one, other = (_open(run, step) for run in (first, second))
    for path in dict.fromkeys([*one.arrays, *other.arrays]):
        infos = one.arrays.get(path), other.arrays.get(path)
        texts = [ABSENT if info is None else f"{info.dtype}{list(info.shape)}" for info in infos]
        if None in infos or tuple(infos[0].shape) != tuple(infos[1].shape):  # type: ignore[union-attr]
            size = max(math.prod(info.shape) for info in infos if info is not None)
            yield ArrayDifference(path, None, size, size, *texts)
            continue
        count, relative = compare_values(_read(one, path), _read(other, path))
        if count or texts[0] != texts[1]:
            yield ArrayDifference(path, relative, count, math.prod(infos[0].shape), *texts)  # type: ignore[union-attr]


def _open(run: Run, step: int) -> Any:
    return open_checkpoint(run.uri, run.storage, run.config, step)


def _read(checkpoint: Any, path: str) -> np.ndarray:
    """Read one array. The reader takes the shape and dtype from the checkpoint."""
    if 0 in checkpoint.arrays[path].shape:
        return np.zeros(0)
    array = checkpoint.read({path: jax.ShapeDtypeStruct((), np.uint8)})[path]
    return np.asarray(jax.random.key_data(array) if is_key(array) else array)


def compare_values(first: np.ndarray, second: np.ndarray) -> tuple[int, float]:
    """Compare two arrays of the same shape.

    Returns:
        The number of elements that differ, and the largest difference relative to the largest magnitude in both arrays. Two
        elements differ if their bits differ or, if the dtypes are different, if their values differ. The relative difference is
        infinite if only one of two elements is finite.
    """
    flat = first.reshape(-1), second.reshape(-1)
    count, largest, scale = 0, 0.0, 0.0
    for begin in range(0, flat[0].size, _CHUNK):
        one, other = (x[begin : begin + _CHUNK] for x in flat)
        values = one.astype(np.float64), other.astype(np.float64)
        differ = _differing_bits(one, other) if one.dtype == other.dtype else values[0] != values[1]
        count += int(differ.sum())
        finite = [np.isfinite(v) for v in values]
        if np.any(differ & (finite[0] != finite[1])):
            largest = math.inf
        both = finite[0] & finite[1]
        if np.any(both):
            scale = max(scale, *(float(np.max(np.abs(v[both]))) for v in values))
            largest = max(largest, float(np.max(np.abs(values[0][both] - values[1][both]))))
    return count, largest / scale if scale and math.isfinite(largest) else largest


def _differing_bits(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    size = first.dtype.itemsize
    one, other = (np.ascontiguousarray(x).view(np.uint8).reshape(-1, size) for x in (first, second))
    return np.any(one != other, axis=1)


def _severity(difference: ArrayDifference) -> tuple[bool, float]:
    """Return a key that sorts weights before the rest of the state, and large differences before small ones."""
    return not is_weight(difference.path), -math.inf if difference.relative is None else -difference.relative
