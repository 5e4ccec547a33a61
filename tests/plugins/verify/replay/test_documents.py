"""Documents of packed batches, and batches with only some of them."""

import numpy as np

from axlearn_plugins_verify.replay.documents import (
    Document,
    find_document,
    keep_documents,
    list_documents,
    share_of_targets,
)

SEGMENTS = np.array([[1, 1, 2, 2, 2, 0], [1, 1, 1, 1, 1, 1], [1, 2, 3, 0, 0, 0], [1, 1, 2, 2, 3, 3]], np.int32)


def make_batch():
    return {
        "tokens": np.arange(1, 25, dtype=np.int32).reshape(4, 6),
        "weights": (SEGMENTS > 0).astype(np.float32),
        "segment_ids": SEGMENTS,
        "prefix": np.array([1, 2, 3, 4], np.int32),
    }


def test_documents_have_their_places():
    documents = list_documents(make_batch())
    assert [(d.row, d.number, d.start, d.stop) for d in documents] == [
        (0, 1, 0, 2), (0, 2, 2, 5), (1, 1, 0, 6), (2, 1, 0, 1), (2, 2, 1, 2), (2, 3, 2, 3),
        (3, 1, 0, 2), (3, 2, 2, 4), (3, 3, 4, 6),
    ]  # fmt: skip


def test_documents_are_ordered_by_microbatch():
    documents = list_documents(make_batch(), 2)
    assert [d.row for d in documents] == [0, 0, 2, 2, 2, 1, 3, 3, 3]
    assert [d.microbatch for d in documents] == [0] * 5 + [1] * 4


def test_removed_documents_become_padding():
    batch = make_batch()
    part = keep_documents(batch, [Document(row=0, number=2, start=2, stop=5)])
    assert part["tokens"].tolist()[0] == [0, 0, 3, 4, 5, 0]
    assert not part["tokens"][1:].any()
    assert part["segment_ids"].tolist()[0] == [0, 0, 2, 2, 2, 0]
    assert part["weights"].sum() == 3
    assert part["prefix"].tolist() == [1, 2, 3, 4]
    assert {k: v.dtype for k, v in part.items()} == {k: v.dtype for k, v in batch.items()}
    assert batch["tokens"][1].all()
    assert share_of_targets(batch, part) == 3 / 20


def test_keeping_all_documents_changes_nothing():
    batch = make_batch()
    part = keep_documents(batch, list_documents(batch))
    inside = SEGMENTS > 0
    assert all((part[name][inside] == batch[name][inside]).all() for name in ("tokens", "weights", "segment_ids"))


def test_rows_without_documents_are_replaced_by_copies():
    batch = {"images": np.arange(12, dtype=np.float32).reshape(4, 3), "labels": np.arange(4)}
    rows = list_documents(batch)
    assert [(d.row, d.number) for d in rows] == [(0, 0), (1, 0), (2, 0), (3, 0)]
    part = keep_documents(batch, rows[1:3])
    assert part["labels"].tolist() == [1, 1, 2, 1]
    assert (part["images"] == batch["images"][[1, 1, 2, 1]]).all()
    assert share_of_targets(batch, part) == 1.0
    assert find_document(rows, 2, 0) == rows[2]


def test_document_at_a_position():
    documents = list_documents(make_batch())
    assert find_document(documents, 0, 4) == documents[1]
    assert find_document(documents, 0, 5) is None
    assert str(documents[1]) == "row 0, document 2 (positions 2 to 4)"
