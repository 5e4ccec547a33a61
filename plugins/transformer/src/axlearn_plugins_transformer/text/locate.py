"""Find the document in the data files that a piece of a row comes from, for use in messages.

A position says only which records a shard reads. The documents of these records are tokenized again and searched for the tokens
of the piece.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from axlearn_plugins_transformer.text.records import Document, LocatesText, Records
from axlearn_plugins_transformer.text.sources import Part
from axlearn_plugins_transformer.text.tokenizers import token_bytes

LOOK_BACK = 32
"""Number of earlier records to search. First-fit packing holds documents back until a row is full."""

Places = Mapping[str, Sequence[Any]]


def find_source(
    source: Any, parts: Sequence[Part], order: Any, shard: str, places: Sequence[Any], targets: np.ndarray
) -> str:
    """Return the file and position of the document that contains the given tokens, or an empty string.

    Args:
        source: The input, which tokenizes documents.
        parts: Parts of the data.
        order: Order of the records.
        shard: Shard that produced the row.
        places: Place of the shard in each part after the batch.
        targets: Target tokens of the piece, int32 [T].
    """
    for index, (part, place) in enumerate(zip(parts, places, strict=True)):
        for record, documents in _candidates(part, order, index, int(shard), place):
            for document in documents:
                offset = _find(source, document, targets)
                if offset is not None:
                    return _describe(source, part.records, record, document, offset)
    return ""


def _candidates(part: Part, order: Any, index: int, shard: int, place: Any) -> Iterator[tuple[int, Sequence[Document]]]:
    """Yield records that the shard may have read, most likely first, with their documents."""
    if not isinstance(place, int):  # the rows of small data can come from any record
        likely = [*dict.fromkeys(place)]
        rest = [record for record in range(len(part.records)) if record not in likely]
        yield from ((record, part.records[record]) for record in (*likely, *rest))
        return
    reads = order.reads(part.records, index, shard)
    for position in (place, *range(place - 1, max(place - LOOK_BACK, 0) - 1, -1), place + 1):
        yield reads.number(position), reads[position]


def _find(source: Any, document: Document, targets: np.ndarray) -> int | None:
    """Return the offset of some target tokens in the example of a document, or None."""
    if not document.text or (example := source.example(document)) is None:
        return None
    data, piece = np.ascontiguousarray(example[:, 1]).tobytes(), np.ascontiguousarray(targets, np.int32).tobytes()
    start = data.find(piece)
    while start > 0 and start % 4:
        start = data.find(piece, start + 1)
    return start // 4 if start >= 0 else None


def _describe(source: Any, records: Records, record: int, document: Document, offset: int) -> str:
    name = records.name(record)
    if not isinstance(records, LocatesText):
        return name
    sizes = token_bytes(source.tokenizer)[source.example(document)[:offset, 1]]
    return records.locate(record, document, int(np.sum(sizes, dtype=np.float64)))
