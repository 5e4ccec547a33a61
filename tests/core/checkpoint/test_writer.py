"""Saves in flight and their bandwidth."""

import threading
import time

import jax.numpy as jnp
import pytest

from axlearn_core.checkpoint import LocalStorage, ShardedCheckpointer
from axlearn_core.checkpoint.writer import RateLimit
from axlearn_core.errors import CheckpointError, WorkError
from axlearn_testing.chaos import FaultyStorage


@pytest.fixture
def kind():
    """Only this checkpointer has several saves under way and a limit of bandwidth."""
    return "sharded"


def state(step):
    return {f"w{i}": jnp.full((64, 64), step, jnp.int32) for i in range(4)}


class Gate(LocalStorage):
    """A storage that writes files of arrays once it is opened."""

    def __init__(self, root):
        super().__init__(root)
        self.opened = threading.Event()

    def write(self, path, chunks):
        if path.endswith(".bin"):
            assert self.opened.wait(60)
        super().write(path, chunks)


def gated(one):
    gate = Gate(one.place.storage.root)
    one.place = type(one.place)(gate, one.place.name)
    return gate


def test_several_saves_are_under_way_and_appear_in_order(make):
    one = make(max_saves_in_flight=3, keep_last=None)
    gate = gated(one)
    for step in (1, 2, 3):
        assert one.save(step, state(step))  # none of them waits
    assert one.steps() == []
    late = threading.Thread(target=lambda: one.save(4, state(4)))
    late.start()
    late.join(0.3)
    assert late.is_alive()  # the fourth waits for the first
    gate.opened.set()
    late.join(60)
    one.wait()
    assert one.steps() == [1, 2, 3, 4]
    for step in one.steps():
        got, _ = one.restore(step, state(0))
        assert all((x == step).all() for x in got.values())


def test_the_same_step_is_not_written_twice_at_once(make):
    one = make(max_saves_in_flight=3)
    gated(one).opened.set()
    assert one.save(1, state(1))
    assert not one.save(1, state(1))
    one.wait()
    assert one.steps() == [1]


def test_one_failure_of_several_is_reported_and_the_others_stay(make, caplog):
    one = make(max_saves_in_flight=2, max_failed_saves=2, keep_last=None)
    one.save(1, state(1))
    one.wait()
    storage = one.place.storage
    one.place = type(one.place)(FaultyStorage(storage, full_after=20_000), one.place.name)
    assert one.save(2, state(2))
    one.save(3, state(3))  # begun, or refused at once where the disk is full by then
    with pytest.raises(WorkError, match=r"step 2 could not be written[^$]*No space left"):
        one.wait()
    assert one.steps() == [1]
    one.place = type(one.place)(storage, one.place.name)
    assert one.save(4, state(4))
    one.wait()
    assert one.steps() == [1, 4]


def test_writers_together_stay_below_the_limit():
    """As far as it can be said without a clock of its own: nobody writes before the others have had their time."""
    limit, begun, written = RateLimit(1_000_000), time.monotonic(), []

    def write():
        for _ in limit.chunks(memoryview(bytes(50_000)) for _ in range(5)):
            written.append(time.monotonic() - begun)

    threads = [threading.Thread(target=write) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(written) == 10
    for count, seconds in enumerate(sorted(written)):
        assert seconds >= count * 0.05 - 0.001
    assert list(RateLimit().chunks(iter([memoryview(b"x")]))) == [b"x"]


def test_a_limited_save_is_whole(make):
    one = make(max_bytes_per_second=200_000)
    one.save(1, state(1))
    one.wait()
    one.place.verify(1)


def test_verification_compares_the_hash_of_every_piece(make):
    one = make()
    one.save(1, state(1))
    one.wait()
    one.place.verify(1)
    file = next((one.directory / "1").rglob("*.bin"))
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"\.bin: at byte \d+: got sha256"):
        one.place.verify(1)
    one.place.verify(1, pieces=False)  # whoever reads the arrays compares the hashes


def test_the_limits_are_checked():
    for name in ("max_bytes_per_second", "max_saves_in_flight"):
        with pytest.raises(Exception, match=name):
            ShardedCheckpointer.Config(**{name: 0})
