"""Name the first tensor and the documents that became non-finite, or larger than usual."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs
import jax
import numpy as np

from axlearn_plugins_verify.replay.documents import Document, find_document
from axlearn_plugins_verify.replay.probes import Statistics, relative_error

GREW = 8.0
"""A tensor grew if its largest magnitude exceeds the usual one by this factor."""
DIVERGED = 0.1
"""Two executions diverge at a tensor if they differ by more than this, relative to its norm."""


@attrs.frozen(kw_only=True, eq=False)
class Finding:
    """A tensor with unusual values.

    Attributes:
        statistics: Statistics of the tensor.
        usual: Usual magnitude, in another batch with the same weights. None for a tensor that is not finite.
        documents: Documents with values that are not finite or that are larger than usual. Empty if the tensor has no rows.
    """

    statistics: Statistics
    usual: float | None = None
    documents: tuple[Document, ...] = ()

    def __str__(self) -> str:
        statistics = self.statistics
        if self.usual is None:
            problem = f"{statistics.nonfinite:,} of {statistics.size:,} values are not finite"
        else:
            problem = f"magnitude {statistics.magnitude:.4g}, usually {self.usual:.4g}"
        return f"{name_tensor(statistics)}: {problem}"

    def as_json(self) -> dict[str, Any]:
        """Return the finding as a JSON object."""
        return {
            **self.statistics.as_json(),
            "usual": self.usual,
            "documents": [attrs.asdict(document) for document in self.documents],
        }


def name_tensor(statistics: "Statistics | Divergence") -> str:
    """Name a tensor. The parent of a module computes its input, so the input is named after the parent."""
    tensor, _, call = statistics.tensor.partition(" of call ")
    if tensor != "input" or not statistics.layer:
        return f"{statistics.layer or 'model'} {statistics.tensor}"
    parent, _, child = statistics.layer.rpartition(".")
    return f"{parent or 'model'}, input of {child}" + (f" of call {call}" if call else "")


def first_nonfinite(
    statistics: Sequence[Statistics], documents: Sequence[Document], microbatches: int = 1
) -> Finding | None:
    """Return the first tensor with non-finite values, or None.

    Args:
        statistics: Statistics of the outputs or gradients, in the order of computation.
        documents: Documents of the batch.
        microbatches: Number of microbatches.
    """
    for tensor in statistics:
        if tensor.nonfinite:
            marks = tensor.bad
            return Finding(statistics=tensor, documents=_at(tensor, marks, documents, microbatches))
    return None


def first_grown(
    statistics: Sequence[Statistics],
    usual: Mapping[tuple[str, str], float],
    documents: Sequence[Document],
    microbatches: int = 1,
    factor: float = GREW,
) -> Finding | None:
    """Return the first tensor whose magnitude exceeds the usual one by a factor, or None.

    Args:
        statistics: Statistics of the outputs or gradients, in the order of computation.
        usual: Usual magnitude by (layer, tensor); see `usual_magnitudes`.
        documents: Documents of the batch.
        microbatches: Number of microbatches.
        factor: Smallest ratio to report.
    """
    for tensor in statistics:
        limit = factor * usual.get((tensor.layer, tensor.tensor), 0.0)
        if 0 < limit < tensor.magnitude:
            marks = None if tensor.peaks is None else tensor.peaks > limit
            return Finding(
                statistics=tensor, usual=limit / factor, documents=_at(tensor, marks, documents, microbatches)
            )
    return None


def usual_magnitudes(statistics: Sequence[Statistics]) -> dict[tuple[str, str], float]:
    """Return the largest magnitude of each tensor across the microbatches, by (layer, tensor)."""
    usual: dict[tuple[str, str], float] = {}
    for one in statistics:
        key = (one.layer, one.tensor)
        usual[key] = max(usual.get(key, 0.0), one.magnitude)
    return usual


@attrs.frozen(kw_only=True)
class Divergence:
    """The distance between two executions at a tensor.

    Attributes:
        layer: Path of the module.
        tensor: Name of the tensor.
        error: Norm of the difference, relative to the norm in the second execution. Infinite if only one of them is finite.
        nonfinite: Number of values that are not finite, in the run's own execution.
        finite_in_shadow: Whether all values of the second execution are finite.
    """

    layer: str
    tensor: str
    error: float
    nonfinite: int
    finite_in_shadow: bool

    @property
    def overflowed(self) -> bool:
        """Whether only the run's own execution has non-finite values."""
        return self.nonfinite > 0 and self.finite_in_shadow


def compare_executions(real: Sequence[Statistics], shadow: Sequence[Statistics]) -> list[Divergence]:
    """Return the distance at each tensor that both executions have, in the order of computation."""
    others = {(s.layer, s.tensor, s.microbatch): s for s in shadow}
    pairs = ((s, others.get((s.layer, s.tensor, s.microbatch))) for s in real)
    return [
        Divergence(
            layer=one.layer,
            tensor=one.tensor,
            error=relative_error(one, other),
            nonfinite=one.nonfinite,
            finite_in_shadow=other.nonfinite == 0,
        )
        for one, other in pairs
        if other is not None
    ]


def first_divergence(divergences: Sequence[Divergence]) -> Divergence | None:
    """Return the first tensor at which two executions diverge, or None."""
    return next((d for d in divergences if d.error > DIVERGED), None)


def nonfinite_arrays(arrays: Mapping[str, Any]) -> list[str]:
    """Return the paths of the floating-point arrays with non-finite values."""
    return [path for path, array in arrays.items() if not _is_finite(array)]


def _is_finite(array: Any) -> bool:
    if not jax.numpy.issubdtype(array.dtype, jax.numpy.floating):
        return True
    return bool(jax.device_get(jax.numpy.isfinite(array).all()))


def _at(
    tensor: Statistics, marks: np.ndarray | None, documents: Sequence[Document], microbatches: int
) -> tuple[Document, ...]:
    if marks is None:
        return ()
    return tuple(dict.fromkeys(_documents_at(tensor.microbatch, marks, documents, microbatches)))


def _documents_at(
    microbatch: int, marks: np.ndarray, documents: Sequence[Document], microbatches: int
) -> Iterator[Document]:
    for place in np.argwhere(marks).tolist():
        row, position = place[0] * microbatches + microbatch, place[1] if len(place) > 1 else 0
        if (document := find_document(documents, row, position)) is not None:
            yield document
