"""The streams of several workers: they are read in parallel, and never return a batch of another position."""

import itertools
import threading

import numpy as np
import pytest

from axlearn_core.errors import InputError
from axlearn_plugins_transformer.text.batch_iterator import Batches
from axlearn_plugins_transformer.text.workers import WorkerStream

SECONDS = 60


class Rows:
    """Grain's iterator over a worker, but without a process. Its batches are its position, once per shard."""

    def __init__(self, shards, first=lambda: None, fails_at=None):
        self.shards, self.first, self.position, self.fails_at = shards, first, 0, fails_at

    def __next__(self):
        if self.position == 0:
            self.first()
        if self.position == self.fails_at:
            raise InputError("a broken record")
        self.position += 1
        return {"tokens": np.array([self.position * 10 + s for s in self.shards])}

    def get_state(self):
        return {"iterators_in_use_states": [{str(s): self.position for s in self.shards}]}

    def set_state(self, state):
        (positions,) = state["iterators_in_use_states"]
        self.position = positions[str(self.shards[0])]

    def close(self):
        pass


def batches(*makes):
    streams = {(i,): WorkerStream(lambda _, m=make, i=i: m([i]), (i,), SECONDS) for i, make in enumerate(makes)}
    return Batches(streams, workers=True)


def test_no_worker_waits_for_the_first_batch_of_another():
    together = threading.Barrier(3)
    stream = batches(*[lambda shards: Rows(shards, first=lambda: together.wait(SECONDS))] * 3)
    assert [next(stream)["tokens"].tolist() for _ in range(2)] == [[10, 11, 12], [20, 21, 22]]
    stream.close()


def test_going_to_a_position_after_an_error_drops_what_was_asked_for():
    failures = itertools.chain([2], itertools.repeat(None))
    stream = batches(lambda shards: Rows(shards, fails_at=next(failures)), Rows)
    start = stream.get_state()
    taken = [next(stream)["tokens"].tolist() for _ in range(2)]
    with pytest.raises(InputError, match="a broken record"):
        next(stream)
    stream.set_state(start)
    assert [next(stream)["tokens"].tolist() for _ in range(2)] == taken == [[10, 11], [20, 21]]
    stream.close()
