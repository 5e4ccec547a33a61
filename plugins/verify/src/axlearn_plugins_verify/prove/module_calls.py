"""Record the inputs and outputs of every module of a model, and name the first ones that differ.

A module call records its first array argument when it starts, and the arrays that it returns when it ends. The records of
one run are in the order of the calls, so the first record that differs is close to the cause. If it is the input of a
child, its parent computed it.
"""

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import attrs
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AxisType

from axlearn_core.contracts.arrays import is_array
from axlearn_plugins_verify.prove.contract import Difference

REPEATED = "#"
"""Part of a path that stands for the index of a layer until the order of the calls is known."""

Select = Callable[[np.ndarray], np.ndarray | None]
"""Selects the values of a record that another run also computes. Returns None to skip the record."""

_located: ContextVar[bool] = ContextVar("located", default=True)


@contextlib.contextmanager
def without_location() -> Iterator[None]:
    """Make checks report only whether a property holds.

    Most of the time that a failed check takes is spent on finding the first layer that differs.
    """
    token = _located.set(False)
    try:
        yield
    finally:
        _located.reset(token)


def is_located() -> bool:
    """Return whether a check that fails should name the first layer that differs."""
    return _located.get()


def unlocated(error: float) -> Difference:
    """Return the difference found by a check that does not name a layer."""
    return Difference(layer="", tensor="result", error=error)


@attrs.frozen(kw_only=True, eq=False)
class Record:
    """An input or output of a module call.

    Attributes:
        layer: Path of the module, such as `decoder.layer.1.attention`.
        tensor: `input`, `output`, or `output 1` for the second array that the module returns.
        value: The values.
    """

    layer: str
    tensor: str
    value: np.ndarray


def record_calls(model: Any, run: Callable[..., Any], *arguments: Any) -> tuple[Any, list[Record]]:
    """Run a function, and record the module calls in it.

    Args:
        model: The model, possibly with abstract arrays. It defines the classes and paths of the modules.
        run: Compiled function that calls the model. It must not have been traced before.
        arguments: Arrays, or pytrees of arrays.

    Returns:
        The result of the function and the records.
    """
    calls: list[tuple[str, str, np.ndarray]] = []
    ordered = _one_device(arguments)
    with patched(Recorder(model, calls, ordered=ordered)):
        result = run(*arguments)
        jax.block_until_ready(result)
        jax.effects_barrier()
    return result, number_layers(calls, ordered=ordered)


def _one_device(arguments: Any) -> bool:
    devices = {d for x in jax.tree.leaves(arguments) if isinstance(x, jax.Array) for d in x.devices()}
    return len(devices) <= 1  # JAX supports ordered callbacks only on one device


def number_layers(calls: Sequence[tuple[str, str, Any]], *, ordered: bool = True) -> list[Record]:
    """Replace each `REPEATED` part of the paths with the index of the layer, in the order of the calls.

    The body of a scan is traced once, so its calls have no index when they are traced. If the calls are not ordered, because
    they ran on several devices, only the calls of the same module are in order. Each of its calls then belongs to the next layer.
    """
    finished: Counter[str] = Counter()
    records: list[Record] = []
    for path, tensor, value in calls:
        if not ordered and REPEATED in path:
            index = str(finished[f"{path} {tensor}"])
            finished[f"{path} {tensor}"] += 1
            records.append(Record(layer=path.replace(REPEATED, index), tensor=tensor, value=value))
            continue
        numbered: list[str] = []
        for part in path.split("."):
            numbered.append(str(finished[".".join([*numbered, REPEATED])]) if part == REPEATED else part)
        layer = ".".join(numbered)
        records.append(Record(layer=layer, tensor=tensor, value=value))
        if path.endswith(f".{REPEATED}") and tensor.endswith("output"):
            finished[".".join([*numbered[:-1], REPEATED])] += 1
    return records


def join_chunks(chunks: Sequence[Sequence[Record]]) -> list[Record]:
    """Join the records of runs over consecutive positions, [B, S, ...] each, in the order of the first run."""
    values: dict[tuple[str, str], list[np.ndarray]] = {}
    for chunk in chunks:
        for record in chunk:
            values.setdefault((record.layer, record.tensor), []).append(record.value)
    return [
        Record(layer=layer, tensor=tensor, value=np.concatenate(parts, axis=1))
        for (layer, tensor), parts in values.items()
        if len(parts) == len(chunks) and len({x.shape[2:] for x in parts}) == 1
    ]


def first_difference(
    one: Sequence[Record],
    other: Sequence[Record],
    tolerance: float,
    select_one: Select = lambda x: x,
    select_other: Select = lambda x: x,
) -> Difference | None:
    """Return the first record that differs by more than the tolerance.

    Args:
        one: Records of the run that is assumed to be correct.
        other: Records of the run to compare.
        tolerance: Largest relative error that rounding explains.
        select_one: Selects the comparable values of `one`.
        select_other: Selects the comparable values of `other`, in the same order.

    Returns:
        The difference. If the errors grow so slowly that no record differs by the whole tolerance, the first one that differs by
        a fraction of it. None if no record that the runs have in common differs.
    """
    later = {(r.layer, r.tensor): r for r in reversed(other)}
    pairs = [(r, select_one(r.value), select_other(m.value)) for r in one if (m := later.get((r.layer, r.tensor)))]
    errors = [
        (record, vector_error(expected, actual), expected, actual)
        for record, expected, actual in pairs
        if expected is not None and actual is not None and expected.shape == actual.shape
    ]
    for limit in (tolerance, tolerance / 10):
        for record, error, expected, actual in errors:
            if not error <= limit:
                return _describe(record, error, expected, actual, limit)
    return None


def _describe(record: Record, error: float, expected: Any, actual: Any, tolerance: float) -> Difference:
    layer, tensor = record.layer, record.tensor
    if tensor == "input":  # the parent computed it
        layer, _, child = layer.rpartition(".")
        if child.isdigit():
            layer, _, name = layer.rpartition(".")
            child = f"{name}.{child}"
        tensor = f"input of {child}"
    bad = ~np.isfinite(actual)
    if np.any(bad & np.isfinite(expected)):
        detail = f"{int(bad.sum())} of {bad.size} values are not finite"
    else:
        apart = np.abs(actual.astype(np.float64) - expected.astype(np.float64))
        scale = max(float(np.sqrt(np.mean(np.square(expected.astype(np.float64))))), 1e-30)
        place = np.unravel_index(int(np.argmax(apart > tolerance * scale)), apart.shape)
        detail = f"first at {list(map(int, place))} of {list(apart.shape)}"
    return Difference(layer=layer, tensor=tensor, error=error, detail=detail)


def vector_error(expected: np.ndarray, actual: np.ndarray) -> float:
    """Return the largest error of a vector along the last axis, relative to the root mean square of all vectors."""
    expected, actual = np.asarray(expected, np.float64), np.asarray(actual, np.float64)
    if not (np.isfinite(expected).all() and np.isfinite(actual).all()):
        return relative_error(expected, actual)
    differences = np.linalg.norm(actual - expected, axis=-1)
    scale = float(np.sqrt(np.mean(np.square(np.linalg.norm(expected, axis=-1)))))
    largest = float(np.max(differences, initial=0.0))
    return largest / scale if scale else float(largest > 0)


def relative_error(expected: np.ndarray, actual: np.ndarray) -> float:
    """Return the norm of the difference, relative to the norm of the expected values. Infinite if either is not finite."""
    expected, actual = np.asarray(expected, np.float64), np.asarray(actual, np.float64)
    if not (np.isfinite(expected).all() and np.isfinite(actual).all()):
        return 0.0 if np.array_equal(expected, actual, equal_nan=True) else float("inf")
    difference, norm = float(np.linalg.norm(actual - expected)), float(np.linalg.norm(expected))
    return difference / norm if norm else float(difference > 0)


class Recorder:
    """Records module calls: it inserts callbacks while a function is traced, which record tensors when the function runs."""

    def __init__(self, model: Any, calls: list[tuple[str, str, np.ndarray]], ordered: bool):
        self.root, self.calls, self.ordered = model, calls, ordered
        self.modules = [(tuple(map(str, path)), module) for path, module in nnx.iter_modules(model)]
        self.classes = dict.fromkeys(type(module) for _, module in self.modules)
        self.stack: list[tuple[str, Any]] = []

    def call(self, function: Callable[..., Any], module: Any, args: Any, kwargs: Any) -> Any:
        """Call a module and record its input and outputs."""
        if self.stack and self.stack[-1][1] is module:  # a class that calls the method of its base class
            return function(module, *args, **kwargs)
        path = self.path(module)
        self.stack.append((path, module))
        try:
            inputs = [x for x in args if _is_float(x)]
            if inputs:
                self.record(path, "input", inputs[0])
            result = function(module, *args, **kwargs)
            leaves, tree = jax.tree.flatten(result)
            outputs = [place for place, x in enumerate(leaves) if _is_float(x)]
            replaced = False
            for index, place in reversed([*enumerate(outputs)]):  # the first output ends the call
                recorded = self.record(path, f"output {index}" if index else "output", leaves[place])
                replaced, leaves[place] = replaced or recorded is not leaves[place], recorded
            return jax.tree.unflatten(tree, leaves) if replaced else result
        finally:
            self.stack.pop()

    def record(self, path: str, tensor: str, value: Any) -> Any:
        """Record a tensor. Return the tensor with which the model continues.

        Skips the parts of a model that run on each device separately, because their tensors cover only one device.
        """
        if AxisType.Manual in jax.sharding.get_abstract_mesh().axis_types:
            return value

        def keep(array: Any) -> None:
            self.calls.append(
                (path, tensor, np.asarray(array.astype(np.float32) if array.dtype.itemsize < 4 else array))
            )

        jax.debug.callback(keep, value, ordered=self.ordered)
        return value

    def path(self, module: Any) -> str:
        """Return the path of a module, with `REPEATED` for the index of a layer that its stack rebuilds for each call."""
        parent_path, parent = self.stack[-1] if self.stack else ("", None)
        if parent is None and type(module) is type(self.root):
            return ""
        name = next((k for k, v in vars(parent).items() if v is module), None) if parent is not None else None
        if name is not None:
            return f"{parent_path}.{name}" if parent_path else name
        prefix = tuple(p for p in parent_path.split(".") if p and p != REPEATED)
        candidates = [
            (path[len(prefix) :], other)
            for path, other in self.modules
            if path[: len(prefix)] == prefix and len(path) > len(prefix) and type(other) is type(module)
        ]
        equal = [path for path, other in candidates if _shapes(other) == _shapes(module)]
        if parent is None and len(equal) == 1:  # a method of the root other than `__call__` calls this module
            return ".".join(equal[0])
        stacks = [(path, other) for path, other in candidates if _is_stack_of(other, module)]
        below = [path for path, _ in stacks or candidates]
        if not below:
            return f"{parent_path}.{type(module).__name__}" if parent_path else type(module).__name__
        nearest = min(below, key=len)
        if parent is None and len(nearest) == 1:
            return nearest[0]
        parts = [p for p in nearest if not p.isdigit()] or [nearest[0]]
        return ".".join([*([parent_path] if parent_path else []), *parts, REPEATED])


def _shapes(module: Any) -> list[tuple[int, ...]]:
    return [tuple(x.shape) for x in jax.tree.leaves(nnx.state(module))]


def _is_stack_of(stack: Any, module: Any) -> bool:
    """Return True if the arrays of `stack` have one more axis than the arrays of `module`."""
    ranks = ([len(x.shape) for x in jax.tree.leaves(nnx.state(m))] for m in (stack, module))
    return any(one == other + 1 for one, other in zip(*ranks, strict=False))


def _is_float(x: Any) -> bool:
    return is_array(x) and jnp.issubdtype(x.dtype, jnp.floating) and len(x.shape) > 0


@contextlib.contextmanager
def patched(recorder: Recorder) -> Iterator[None]:
    """Make the classes of a model report their calls to a recorder."""
    originals: dict[type, Any] = {}
    for cls in recorder.classes:
        if any("__call__" in vars(base) for base in cls.__mro__):
            originals[cls] = vars(cls).get("__call__")
            cls.__call__ = _wrap(cls.__call__, recorder)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for cls, original in originals.items():
            if original is None:
                del cls.__call__  # type: ignore[attr-defined]
            else:
                cls.__call__ = original  # type: ignore[attr-defined]


def _wrap(function: Callable[..., Any], recorder: Recorder) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(module: Any, *args: Any, **kwargs: Any) -> Any:
        return recorder.call(function, module, args, kwargs)

    return call
