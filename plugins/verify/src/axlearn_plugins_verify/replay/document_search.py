"""Find the documents of a batch that make its step non-finite, or its gradients larger than usual."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs

from axlearn_plugins_verify.replay.documents import Document, keep_documents, share_of_targets
from axlearn_plugins_verify.replay.workbench import Measure

MAX_RERUNS = 12
GREW = 4.0
"""A step is abnormal if the norm of its gradients exceeds the usual norm by this factor."""


@attrs.frozen(kw_only=True)
class Bisection:
    """The result of a search for documents.

    Attributes:
        documents: The documents to blame. If the search ended early, the smallest group that contains them. Empty if the step
            is normal.
        whole: Measure of the whole batch.
        rest: Measure of the batch without these documents. None if nothing is left, or if the search ended early.
        usual: Usual norm of the gradients. None if it is unknown.
        reruns: Number of times that a part of the batch was computed.
        ended: Why the search ended.
    """

    documents: tuple[Document, ...] = ()
    whole: Measure
    rest: Measure | None = None
    usual: float | None = None
    reruns: int = 0
    ended: str

    def as_json(self) -> dict[str, Any]:
        """Return the result as a JSON object."""
        return attrs.asdict(self)


class _OutOfReruns(Exception):
    pass


class _Search:
    """Computes parts of a batch, and decides whether they are abnormal."""

    def __init__(
        self,
        batch: Mapping[str, Any],
        measure: Callable[[Mapping[str, Any]], Measure],
        limit: float | None,
        max_reruns: int,
    ):
        self.batch, self.measure, self.limit, self.max_reruns = batch, measure, limit, max_reruns
        self.reruns = 0
        self.known: dict[tuple[Document, ...], Measure] = {}

    def compute(self, documents: Sequence[Document]) -> Measure:
        key = tuple(documents)
        if key not in self.known:
            if self.reruns == self.max_reruns:
                raise _OutOfReruns
            self.reruns += 1
            self.known[key] = self.measure(keep_documents(self.batch, documents))
        return self.known[key]

    def is_abnormal(self, documents: Sequence[Document]) -> bool:
        """Return True if these documents alone are not finite, or contribute a larger gradient than usual."""
        if not documents:
            return False
        measured = self.compute(documents)
        # A mean over fewer targets has larger gradients, so compare what the documents contribute to the whole batch.
        share = share_of_targets(self.batch, keep_documents(self.batch, documents))
        return is_abnormal(measured, self.limit, share)


def is_abnormal(measure: Measure, limit: float | None, share: float = 1.0) -> bool:
    """Return True if a result is not finite, or if the gradient's norm times `share` exceeds the limit."""
    return not measure.finite or (limit is not None and measure.norm * share > limit)


def bisect_documents(
    batch: Mapping[str, Any],
    documents: Sequence[Document],
    measure: Callable[[Mapping[str, Any]], Measure],
    *,
    whole: Measure,
    usual: float | None = None,
    suspects: Sequence[Document] = (),
    max_reruns: int = MAX_RERUNS,
) -> Bisection:
    """Find the documents that make a step abnormal.

    The search halves the documents, in the order of microbatches, rows and positions, until one is left. It then checks that
    this document alone is abnormal, and that the step is normal without it. If either check fails, it searches the remaining
    documents.

    Args:
        batch: Arrays [B, ...] of the batch.
        documents: All documents of the batch.
        measure: Computes the loss and the gradients of a batch.
        whole: Measure of the whole batch.
        usual: Usual norm of the gradients. If None, only non-finite values are abnormal.
        suspects: Documents to check first, for example those with the first non-finite values.
        max_reruns: Maximum number of times to compute a part of the batch.
    """
    # Halfway between the two norms, on a logarithmic scale.
    limit = None if usual is None or not whole.finite else (usual * whole.norm) ** 0.5
    facts: dict[str, Any] = {"whole": whole, "usual": usual}
    if whole.finite and (usual is None or whole.norm <= GREW * usual):
        return Bisection(**facts, ended="the step is normal")
    search = _Search(batch, measure, limit, max_reruns)
    remaining, blamed, group = list(documents), [], list(documents)
    try:
        while True:
            group = [d for d in suspects if d in remaining] or remaining
            if len(suspects) != 1 or not search.is_abnormal(group):
                group = remaining
            while len(group) > 1:
                half = group[: len(group) // 2]
                # If the first half is normal, the second must contain a culprit. The check below notices if it does not.
                group = half if search.is_abnormal(half) else group[len(half) :]
            if not search.is_abnormal(group):
                return Bisection(
                    **facts, documents=tuple(blamed), reruns=search.reruns,
                    ended="no single document is abnormal alone, so several act together",
                )  # fmt: skip
            blamed += group
            remaining = [d for d in remaining if d not in group]
            if not search.is_abnormal(remaining):
                break
            suspects = ()
    except _OutOfReruns:
        return Bisection(
            **facts, documents=(*blamed, *(d for d in group if d not in blamed)), reruns=search.reruns,
            ended=f"the limit of {max_reruns} re-runs was reached",
        )  # fmt: skip
    rest = search.known.get(tuple(remaining))
    ended = "the step is normal without them" if len(blamed) > 1 else "the step is normal without it"
    return Bisection(**facts, documents=tuple(blamed), rest=rest, reruns=search.reruns, ended=ended)
