"""While a step is computed, record statistics of module outputs and of the gradients with respect to them.

Callbacks in the compiled program send each tensor to the host, which keeps its statistics.
"""

import functools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import attrs
import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from axlearn_plugins_verify.prove.module_calls import REPEATED, Recorder, number_layers

SAMPLE = 1 << 16
"""Maximum number of values to keep per tensor, for comparisons with another execution."""

What = Literal["outputs", "gradients"]


@attrs.frozen(kw_only=True, eq=False)
class Statistics:
    """Statistics of one tensor. Non-finite values are counted, but excluded from all other statistics.

    Attributes:
        layer: Path of the module, such as `decoder.layer.1.attention`, or of the parameter.
        tensor: `output`, `input`, `gradient of output`, or `gradient`.
        shape: Shape of the tensor.
        dtype: Dtype of the tensor.
        smallest: Minimum.
        largest: Maximum.
        mean: Mean.
        nonfinite: Number of values that are not finite.
        bad: bool [B, S], True if a position has a value that is not finite. None if the tensor has no rows and positions.
        peaks: float [B, S], the largest magnitude at each position. None if the tensor has no rows and positions.
        sample: At most `SAMPLE` of the values, float32.
        microbatch: Index of the microbatch.
    """

    layer: str
    tensor: str
    shape: tuple[int, ...]
    dtype: str
    smallest: float
    largest: float
    mean: float
    nonfinite: int
    sample: np.ndarray
    bad: np.ndarray | None = None
    peaks: np.ndarray | None = None
    microbatch: int = 0

    @classmethod
    def measure(cls, layer: str, tensor: str, value: Any, rows: tuple[int, ...] = ()) -> "Statistics":
        """Measure an array.

        Args:
            layer: Path of the module or parameter.
            tensor: Name of the tensor.
            value: The array.
            rows: Shape [B, S] or [B] of the batch. The tensor has positions if its shape begins with this shape.
        """
        array = np.asarray(value)
        dtype, array = str(array.dtype), array.astype(np.float32) if array.dtype.itemsize < 4 else array
        finite = np.isfinite(array)
        values = array if finite.all() else array[finite]
        has_rows = bool(rows) and array.shape[: len(rows)] == rows
        inner = tuple(range(len(rows), array.ndim))
        magnitude = np.where(finite, np.abs(array), 0.0) if has_rows else None
        flat = array.reshape(-1)
        return cls(
            layer=layer,
            tensor=tensor,
            shape=tuple(array.shape),
            dtype=dtype,
            smallest=float(values.min()) if values.size else 0.0,
            largest=float(values.max()) if values.size else 0.0,
            mean=float(values.mean(dtype=np.float64)) if values.size else 0.0,
            nonfinite=int(array.size - finite.sum()),
            sample=flat[:: -(-flat.size // SAMPLE)].astype(np.float32) if flat.size else flat.astype(np.float32),
            bad=np.asarray(~finite.all(axis=inner)) if has_rows else None,
            peaks=magnitude.max(axis=inner) if magnitude is not None else None,
        )

    @property
    def magnitude(self) -> float:
        """Largest magnitude of a finite value."""
        return max(abs(self.smallest), abs(self.largest))

    @property
    def size(self) -> int:
        """Number of values."""
        return int(np.prod(self.shape))

    def as_json(self) -> dict[str, Any]:
        """Return the statistics as a JSON object."""
        return {
            "layer": self.layer,
            "tensor": self.tensor,
            "shape": list(self.shape),
            "dtype": self.dtype,
            "min": self.smallest,
            "max": self.largest,
            "mean": self.mean,
            "nonfinite": self.nonfinite,
            "microbatch": self.microbatch,
        }


@attrs.frozen
class _Site:
    """A tensor of a module call, as it was traced.

    Attributes:
        path: Path of the module.
        tensor: Name of the tensor.
        root: Path of the outermost module that was running.
        call: Number of this call among the module's calls, from 1.
    """

    path: str
    tensor: str
    root: str
    call: int


class ProbeRecorder(Recorder):
    """Measures the tensors of module calls.

    The body of a loop is traced once and runs several times. Callbacks of one call arrive in the order of the iterations,
    but those of different calls may be out of order, so each call has its own list.

    Args:
        model: The model, possibly with abstract arrays.
        rows: Shape [B, S] or [B] of the batch.
        what: Measure outputs, or the gradients with respect to them.
        mesh: Mesh of the program.
    """

    def __init__(self, model: Any, rows: tuple[int, ...], what: What, mesh: jax.sharding.Mesh):
        super().__init__(model, [], ordered=False)
        self.rows, self.what, self.mesh = rows, what, mesh
        self.sites: list[_Site] = []
        self.root_calls: Counter[str] = Counter()
        self.outermost = ""
        self.arrivals: defaultdict[int, list[Statistics]] = defaultdict(list)

    def call(self, function: Callable[..., Any], module: Any, args: Any, kwargs: Any) -> Any:
        """See `Recorder.call`. Counts the calls of outermost modules."""
        if not self.stack:
            self.outermost = self.path(module)
            self.root_calls[self.outermost] += 1
        return super().call(function, module, args, kwargs)

    def record(self, path: str, tensor: str, value: Any) -> Any:
        """Measure a tensor when the compiled program computes it. Return the tensor."""
        if self.what == "gradients" and tensor == "input":
            return value
        site = len(self.sites)
        name = tensor if self.what == "outputs" else f"gradient of {tensor}"
        self.sites.append(_Site(path, name, self.outermost, self.root_calls[self.outermost]))
        if self.what == "outputs":
            self._send(site, value)
            return value
        return _watch_gradient(functools.partial(self._send, site), value)

    def _send(self, site: int, value: jax.Array) -> None:
        if self.mesh.size > 1 and not jax.sharding.get_abstract_mesh().manual_axes:
            value = jax.lax.with_sharding_constraint(value, NamedSharding(self.mesh, PartitionSpec()))
        jax.debug.callback(functools.partial(self._keep, site), value)

    def _keep(self, site: int, value: Any) -> None:
        self.arrivals[site].append(Statistics.measure("", "", value, self.rows))

    def statistics(self) -> list[Statistics]:
        """Return the measurements since the last call. Outputs are in the order of the calls, gradients in reverse order."""
        jax.effects_barrier()
        calls = [(site, statistics) for group in self._loops() for site, statistics in self._order(group)]
        self.arrivals.clear()
        # Number the layers of each call of the model separately: an objective may call it several times.
        numbers = self._number_calls([site for site, _ in calls])
        layers: dict[int, str] = {}
        for number in set(numbers):
            indices = [index for index, other in enumerate(numbers) if other == number]
            sites = [(calls[i][0].path, calls[i][0].tensor, np.empty(0)) for i in indices]
            layers |= {i: record.layer for i, record in zip(indices, number_layers(sites), strict=True)}
        measured = [
            attrs.evolve(
                statistics,
                layer=layers[index],
                tensor=site.tensor + (f" of call {numbers[index]}" if numbers[index] > 1 else ""),
            )
            for index, (site, statistics) in enumerate(calls)
        ]
        return measured if self.what == "outputs" else measured[::-1]

    @staticmethod
    def _number_calls(sites: Sequence[_Site]) -> list[int]:
        """For each site, return the number of the model call that it belongs to. Calls that never ran do not count."""
        calls: defaultdict[str, set[int]] = defaultdict(set)
        for site in sites:
            calls[site.root].add(site.call)
        numbers = {root: {call: n for n, call in enumerate(sorted(some), 1)} for root, some in calls.items()}
        return [numbers[site.root][site.call] for site in sites]

    def _order(self, group: Sequence[int]) -> Iterator[tuple[_Site, Statistics]]:
        """Yield the measurements of a loop, one iteration at a time."""
        count = len(self.arrivals[group[0]])
        for iteration in range(count):
            index = iteration if self.what == "outputs" else count - 1 - iteration
            yield from ((self.sites[site], self.arrivals[site][index]) for site in group)

    def _loops(self) -> Iterator[list[int]]:
        """Yield groups of calls: those that belong to the body of one loop, or a single call."""
        group: list[int] = []
        key: Any = None
        for site in sorted(self.arrivals):
            place, count = self.sites[site], len(self.arrivals[site])
            current = (count, place.path.partition(REPEATED)[0], place.call) if count > 1 else None
            if group and (current is None or current != key):
                yield group
                group = []
            group.append(site)
            key = current
        if group:
            yield group


def _watch_gradient(send: Callable[[Any], None], value: jax.Array) -> jax.Array:
    @jax.custom_vjp
    def identity(x: jax.Array) -> jax.Array:
        return x

    def backward(_: None, gradient: jax.Array) -> tuple[jax.Array]:
        send(gradient)
        return (gradient,)

    identity.defvjp(lambda x: (x, None), backward)
    return identity(value)


def measure_parameters(gradients: Any, layers: dict[str, int]) -> list[Statistics]:
    """Measure the gradients of parameters.

    Args:
        gradients: Gradients by path.
        layers: Axis of the layers, for each stack of parameters keyed by path. Each layer is measured separately.
    """
    measured = []
    for path, gradient in gradients.items():
        array = np.asarray(jax.device_get(gradient))
        if path not in layers:
            measured.append(Statistics.measure(path, "gradient", array))
            continue
        for index in range(array.shape[layers[path]]):
            row = np.take(array, index, axis=layers[path])
            measured.append(Statistics.measure(f"{path}[layer {index}]", "gradient", row))
    return measured


def relative_error(one: Statistics, other: Statistics) -> float:
    """Return the norm of the difference between a tensor's values in two executions, relative to the norm of the second."""
    if one.shape != other.shape:
        return float("inf")
    a, b = one.sample.astype(np.float64), other.sample.astype(np.float64)
    with np.errstate(invalid="ignore", over="ignore"):
        distance, norm = float(np.linalg.norm(a - b)), float(np.linalg.norm(b))
    if not np.isfinite(distance):
        return 0.0 if np.array_equal(a, b, equal_nan=True) else float("inf")
    return distance / norm if norm else distance
