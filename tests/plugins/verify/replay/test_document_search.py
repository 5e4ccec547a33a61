"""The search for documents, with results that are computed by hand."""

import numpy as np
import pytest

from axlearn_plugins_verify.replay.document_search import MAX_RERUNS, bisect_documents
from axlearn_plugins_verify.replay.documents import list_documents
from axlearn_plugins_verify.replay.workbench import Measure

ROWS, PER_ROW, LENGTH = 64, 8, 2


def make_batch():
    """Each document has a unique token, from 1."""
    segments = np.tile(np.repeat(np.arange(1, PER_ROW + 1), LENGTH), (ROWS, 1)).astype(np.int32)
    tokens = np.arange(ROWS)[:, None] * PER_ROW + segments
    return {"tokens": tokens.astype(np.int32), "segment_ids": segments, "weights": np.ones(segments.shape, np.float32)}


def measure_with(bad):
    """Return a measure of batches: `bad` maps a token to the norm of its document's gradient."""

    def measure(batch):
        present = set(np.unique(batch["tokens"]).tolist()) - {0}
        share = len(present) / (ROWS * PER_ROW)
        spikes = [bad[token] for token in bad if token in present]
        if any(np.isnan(spike) for spike in spikes):
            return Measure(loss=float("nan"), norm=float("nan"), nonfinite=3)
        return Measure(loss=1.0, norm=(share**0.5 + sum(spikes)) / share, nonfinite=0)

    return measure


def search(bad, **options):
    batch = make_batch()
    documents, measure = list_documents(batch, options.pop("microbatches", 1)), measure_with(bad)
    result = bisect_documents(batch, documents, measure, whole=measure(batch), usual=1.0, **options)
    return result, [int(batch["tokens"][d.row, d.start]) for d in result.documents]


@pytest.mark.parametrize("token", [1, 77, 256, 257, ROWS * PER_ROW])
@pytest.mark.parametrize("norm", [float("nan"), 20.0], ids=["nan", "spike"])
@pytest.mark.parametrize("microbatches", [1, 4])
def test_one_of_512_documents_is_found(token, norm, microbatches):
    result, tokens = search({token: norm}, microbatches=microbatches)
    assert tokens == [token]
    assert result.reruns <= MAX_RERUNS
    assert result.rest is not None
    assert result.rest.finite
    assert result.ended == "the step is normal without it"


def test_suspect_is_checked_first():
    batch = make_batch()
    suspect = [d for d in list_documents(batch) if batch["tokens"][d.row, d.start] == 77]
    result, tokens = search({77: float("nan")}, suspects=suspect)
    assert (tokens, result.reruns) == ([77], 2)


def test_wrong_suspect_costs_one_rerun():
    right, _ = search({77: float("nan")})
    wrong, tokens = search({77: float("nan")}, suspects=list_documents(make_batch())[:1])
    assert tokens == [77]
    assert wrong.reruns == right.reruns + 1


def test_all_bad_documents_are_found():
    result, tokens = search({3: float("nan"), 500: float("nan")}, max_reruns=40)
    assert sorted(tokens) == [3, 500]
    assert result.ended == "the step is normal without them"


def test_limit_leaves_the_smallest_group():
    result, tokens = search({77: float("nan")}, max_reruns=4)
    assert result.reruns == 4
    assert 77 in tokens
    assert len(tokens) == ROWS * PER_ROW / 2**4
    assert "limit of 4 re-runs" in result.ended


def test_normal_step_is_not_searched():
    result, tokens = search({})
    assert (tokens, result.reruns, result.ended) == ([], 0, "the step is normal")


def test_documents_that_only_fail_together_are_not_blamed():
    batch = make_batch()

    def measure(part):
        bad = {3, 500} <= set(np.unique(part["tokens"]).tolist())
        return Measure(loss=float("nan") if bad else 1.0, norm=1.0, nonfinite=int(bad))

    result = bisect_documents(batch, list_documents(batch), measure, whole=measure(batch))
    assert result.documents == ()
    assert "several act together" in result.ended
