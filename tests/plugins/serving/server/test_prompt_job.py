"""The engine requests behind an HTTP request: their errors, the reasons why they end, and their times."""

import asyncio
import time
from types import SimpleNamespace

import pytest

from axlearn_plugins_serving.contracts import Output, Request
from axlearn_plugins_serving.server.api_errors import ApiError
from axlearn_plugins_serving.server.engine_thread import EngineFailedError, EngineStoppingError, SlowReaderError
from axlearn_plugins_serving.server.prompt_job import Choice, Job
from axlearn_plugins_serving.server.server_metrics import Metrics


class Text:
    """An `OutputText` in which each token is a letter."""

    decoded, stopped = 0, False

    def push(self, token):
        return chr(token)

    def end(self):
        return ""


class Outputs:
    """Outputs of an engine, one batch at a time. An error is raised."""

    ids = ("a", "b")

    def __init__(self, *batches):
        self.batches = list(batches)

    async def get(self):
        batch = self.batches.pop(0)
        if isinstance(batch, Exception):
            raise batch
        return batch


@pytest.fixture
def metrics():
    return Metrics("tiny", lambda: None)


@pytest.fixture
def job(metrics):
    """Return a function that builds a job of two choices with the given outputs."""

    def build(*batches):
        choices = [Choice(i, Request(id=id, prompt=(1, 2, 3)), Text()) for i, id in enumerate("ab")]
        job = Job(choices, 2, SimpleNamespace(abort=lambda ids: None), metrics, "tiny")
        job._outputs = Outputs(*batches)
        return job

    return build


async def read(job):
    return [delta async for deltas in job.deltas() for delta in deltas]


def count(counter):
    """Return label -> value of the samples that are not 0."""
    (metric,) = counter.collect()
    return {s.labels["finished_reason"]: s.value for s in metric.samples if s.value and s.name.endswith("_total")}


@pytest.mark.parametrize(
    ("error", "status"),
    [(EngineStoppingError(), 503), (EngineFailedError("stopping at a broken token"), 500), (SlowReaderError("9"), 408)],
)
def test_the_kind_of_an_error_decides_its_status(job, error, status):
    with pytest.raises(ApiError) as raised:
        asyncio.run(read(job(error)))
    assert raised.value.status == status


def test_each_choice_counts_once_by_its_reason(job, metrics):
    finished = job([Output(id="a", tokens=(65,), finish="stop")], [Output(id="b", tokens=(66, 67), finish="length")])
    assert [delta.text for delta in asyncio.run(read(finished))] == ["A", "BC"]
    finished.close()
    finished.close()
    assert finished.finish_reasons == ["stop", "length"]
    assert count(metrics.finished) == {"stop": 1, "length": 1}


def test_choices_that_did_not_end_were_aborted(job, metrics):
    left = job([Output(id="a", tokens=(65,), finish="stop")], SlowReaderError("9"))
    with pytest.raises(ApiError):
        asyncio.run(read(left))
    left.close()
    assert count(metrics.finished) == {"stop": 1, "abort": 1}


@pytest.mark.parametrize(
    ("failure", "status"),
    [
        (EngineFailedError("lost"), 500),
        ([Output(id="b", finish="error", error="broken")], 500),
        ([Output(id="b", finish="error", error="too ambiguous", request_wrong=True)], 400),
    ],
)
def test_choices_that_the_engine_could_not_compute_are_errors(job, metrics, failure, status):
    failed = job([Output(id="a", tokens=(65,), finish="stop")], failure)
    with pytest.raises(ApiError) as raised:
        asyncio.run(read(failed))
    assert raised.value.status == status
    failed.close()
    assert count(metrics.finished) == {"stop": 1, "error": 1}


def test_the_times_of_a_job(job):
    began = time.monotonic()
    finished = job(
        [Output(id="a", started=began + 2)],
        [
            Output(id="a", tokens=(65,), started=began + 2, finish="stop"),
            Output(id="b", tokens=(66,), started=began + 1),
        ],
        [Output(id="b", tokens=(66,), started=began + 1, finish="stop")],
    )
    finished.timing.began = began - 4
    assert (finished.timing.queue_seconds, finished.timing.total_seconds) == (None, None)
    asyncio.run(read(finished))
    timing = finished.timing
    assert timing.queue_seconds == pytest.approx(6)
    assert timing.prefill_seconds == 0  # this engine said that it started in the future
    assert timing.first_token_seconds == pytest.approx(4, abs=1)
    assert timing.decode_seconds >= 0
    assert timing.total_seconds == pytest.approx(4, abs=1)
