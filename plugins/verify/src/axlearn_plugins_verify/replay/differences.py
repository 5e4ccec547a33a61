"""Compare scalars and training states bit by bit."""

from collections.abc import Mapping
from typing import Any

import attrs
import jax
import numpy as np

from axlearn_core.checkpoint.state import is_key
from axlearn_core.learn.paths import flatten
from axlearn_plugins_verify.replay.history import same_scalar


@attrs.frozen(kw_only=True)
class ScalarDifference:
    """A scalar that differs from the recorded one.

    Attributes:
        step: Step of the scalar.
        name: Name of the scalar.
        recorded: Value in `metrics.jsonl`.
        replayed: Value in the replay.
    """

    step: int
    name: str
    recorded: float
    replayed: float

    def __str__(self) -> str:
        return f"{self.name} of step {self.step}: {self.recorded!r} recorded, {self.replayed!r} replayed"


@attrs.frozen(kw_only=True)
class ArrayDifference:
    """An array of the state that differs from the checkpoint.

    Attributes:
        path: Path of the array in the state.
        shape: Shape of the array.
        count: Number of elements that differ.
        bits: Number of bits that differ, across all elements.
        index: Index of the first element that differs.
        recorded: This element in the checkpoint.
        replayed: This element in the replay.
        bit: Position of the bit that differs, counted from 0 for the lowest, if the arrays differ in only one bit.
        error: Norm of the difference, relative to the norm of the checkpoint's array.
    """

    path: str
    shape: tuple[int, ...]
    count: int
    bits: int
    index: tuple[int, ...]
    recorded: float
    replayed: float
    bit: int | None
    error: float

    def __str__(self) -> str:
        place = f"{self.path}{list(self.index) if self.index else ''}"
        values = f"{self.recorded:.9g} in the checkpoint, {self.replayed:.9g} replayed"
        if self.bit is not None:
            return f"{place}: bit {self.bit} is flipped: {values}"
        size = int(np.prod(self.shape))
        count = f"{self.count:,} of {size:,} values differ by {self.error:.2g}"
        return f"{self.path}: {count}, the first at {list(self.index)}: {values}"


def compare_scalars(step: int, recorded: Mapping[str, float], replayed: Mapping[str, float]) -> list[ScalarDifference]:
    """Return the scalars that both sides have and that differ."""
    return [
        ScalarDifference(step=step, name=name, recorded=recorded[name], replayed=value)
        for name, value in replayed.items()
        if name in recorded and not same_scalar(recorded[name], value)
    ]


def compare_states(recorded: Any, replayed: Any) -> list[ArrayDifference]:
    """Return the arrays of two training states that differ in at least one bit: weights first, then by size of the error."""
    expected, actual = flatten(recorded), flatten(replayed)
    differences = [_compare_arrays(path, expected[path], actual[path]) for path in expected]
    changed = [difference for difference in differences if difference is not None]
    return sorted(changed, key=lambda d: (not d.path.startswith(("params.", "variables.")), -d.error))


def _compare_arrays(path: str, recorded: Any, replayed: Any) -> ArrayDifference | None:
    one, other = _to_host(recorded), _to_host(replayed)
    bits = _to_bits(one) ^ _to_bits(other)
    if not bits.any():
        return None
    different = np.flatnonzero(bits.reshape(-1))
    flipped = int(np.bitwise_count(bits).sum())
    index = tuple(int(i) for i in np.unravel_index(int(different[0]), one.shape))
    x, y = one.astype(np.float64), other.astype(np.float64)
    with np.errstate(invalid="ignore", over="ignore"):
        norm, distance = float(np.linalg.norm(x)), float(np.linalg.norm(y - x))
    return ArrayDifference(
        path=path,
        shape=tuple(one.shape),
        count=len(different),
        bits=flipped,
        index=index,
        recorded=float(x[index]),
        replayed=float(y[index]),
        bit=int(bits[index]).bit_length() - 1 if flipped == 1 else None,
        error=distance / norm if norm else distance,
    )


def _to_host(array: Any) -> np.ndarray:
    return np.asarray(jax.device_get(jax.random.key_data(array) if is_key(array) else array))


def _to_bits(array: np.ndarray) -> np.ndarray:
    contiguous = np.ascontiguousarray(array).reshape(array.shape)
    return contiguous.view(np.dtype(f"uint{8 * array.dtype.itemsize}"))
