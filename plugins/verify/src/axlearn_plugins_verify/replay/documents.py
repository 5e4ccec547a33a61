"""The documents of a batch, and batches with only some of them."""

import itertools
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import attrs
import numpy as np

SEGMENTS = "segment_ids"


@attrs.frozen(kw_only=True)
class Document:
    """A document in a batch, or a whole row if the batch does not mark documents.

    Attributes:
        row: Index of the row in the global batch.
        number: Number of the document in its row, from 1. 0 stands for the whole row.
        start: First position of the document in the row.
        stop: Position after the document's last token.
        microbatch: Index of the microbatch that computes the row.
        source: File, and the position in it, if the input knows them.
    """

    row: int
    number: int
    start: int
    stop: int
    microbatch: int = 0
    source: str = ""

    def __str__(self) -> str:
        name = f"row {self.row}" + (f", document {self.number}" if self.number else "")
        place = f" (positions {self.start} to {self.stop - 1})" if self.number else ""
        return f"{name}{place}{f': {self.source}' if self.source else ''}"


def list_documents(batch: Mapping[str, Any], microbatches: int = 1) -> list[Document]:
    """Return the documents of a batch, ordered by microbatch, row and position.

    Args:
        batch: Arrays [B, ...]. `segment_ids` int32 [B, S] marks the documents.
        microbatches: Number of microbatches K. Microbatch k has rows k, k + K, ...
    """
    segments = batch.get(SEGMENTS)
    rows = len(next(iter(batch.values())))
    documents: list[Document] = []
    for row in sorted(range(rows), key=lambda r: (r % microbatches, r)):
        if segments is None:
            documents.append(Document(row=row, number=0, start=0, stop=0, microbatch=row % microbatches))
            continue
        ids = np.asarray(segments[row])
        edges = [0, *(np.flatnonzero(np.diff(ids)) + 1).tolist(), len(ids)]
        for start, stop in itertools.pairwise(edges):
            if ids[start] > 0:
                number = int(ids[start])
                documents.append(
                    Document(row=row, number=number, start=start, stop=stop, microbatch=row % microbatches)
                )
    return documents


def keep_documents(batch: Mapping[str, Any], documents: Collection[Document]) -> dict[str, np.ndarray]:
    """Return a batch with only some of its documents, in their original places.

    The other documents become padding: all their values are zero, as in the input's padding. If the batch does not mark
    documents, the other rows become copies of the first remaining one.
    """
    arrays = {name: np.array(value) for name, value in batch.items()}
    if SEGMENTS not in batch:
        remaining = sorted({d.row for d in documents})
        for value in arrays.values():
            removed = [row for row in range(len(value)) if row not in remaining]
            value[removed] = value[remaining[0]]
        return arrays
    shape = arrays[SEGMENTS].shape
    keep = np.zeros(shape, bool)
    for document in documents:
        keep[document.row, document.start : document.stop] = True
    return {
        name: np.where(keep.reshape(*shape, *(1,) * (value.ndim - 2)), value, np.zeros((), value.dtype))
        if value.shape[:2] == shape
        else value
        for name, value in arrays.items()
    }


def share_of_targets(batch: Mapping[str, Any], part: Mapping[str, Any]) -> float:
    """Return the share of a batch's targets that a part of it contains. 1 if the batch has no weights."""
    if "weights" not in batch:
        return 1.0
    total = float(np.sum(batch["weights"], dtype=np.float64))
    return float(np.sum(part["weights"], dtype=np.float64)) / total if total else 1.0


def find_document(documents: Sequence[Document], row: int, position: int) -> Document | None:
    """Return the document at a position in a row, or None if the position is padding."""
    for document in documents:
        if document.row == row and (document.number == 0 or document.start <= position < document.stop):
            return document
    return None
