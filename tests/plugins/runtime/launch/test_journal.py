"""The journal of a job: when events are written, and how large the file becomes."""

from datetime import UTC, datetime, timedelta

import pytest

from axlearn_core.checkpoint import LocalStorage
from axlearn_core.errors import MissingFileError
from axlearn_plugins_runtime.launch import journal as module
from axlearn_plugins_runtime.launch.journal import OLDER, PROCESSES, REWRITE_SECONDS, Journal


class ObjectStore:
    """A storage that cannot append. Counts the writes."""

    def __init__(self):
        self.files, self.writes = {}, 0

    def read(self, path):
        if path not in self.files:
            raise MissingFileError(path)
        return self.files[path]

    def write(self, path, chunks):
        self.files[path] = b"".join(chunks)
        self.writes += 1


@pytest.fixture
def clock():
    return [datetime(2026, 1, 1, tzinfo=UTC)]


def test_events_are_appended_together(tmp_path):
    journal = Journal(LocalStorage(tmp_path))
    for rank in range(3):
        journal.write("started", attempt=1, rank=rank)
    assert not (tmp_path / PROCESSES).exists()
    journal.flush(now=False)
    journal.flush()
    assert (tmp_path / PROCESSES).read_text().count("\n") == 3


def test_an_object_store_rewrites_the_file_only_now_and_then(clock):
    store = ObjectStore()
    journal = Journal(store, now=lambda: clock[0])
    for rank in range(1000):
        journal.write("started", attempt=1, rank=rank)
        journal.flush(now=False)
    assert store.writes == 1
    clock[0] += timedelta(seconds=REWRITE_SECONDS)
    journal.flush(now=False)
    assert store.writes == 2
    assert store.files[PROCESSES].count(b"\n") == 1000
    journal.write("lost", attempt=1, rank=7)
    journal.flush()
    assert (store.writes, Journal(store).attempts()) == (3, 1)


@pytest.mark.parametrize("kind", ["local", "objects"])
def test_a_large_file_is_set_aside(kind, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "MAX_BYTES", 1000)
    storage = LocalStorage(tmp_path) if kind == "local" else ObjectStore()
    journal = Journal(storage)
    for attempt in range(1, 31):
        journal.write("started", attempt=attempt, rank=0)
        journal.flush()
    assert all(len(storage.read(name)) < 1300 for name in (PROCESSES, OLDER))
    assert b'"attempt": 30' in storage.read(PROCESSES)
    assert Journal(storage).attempts() == 30


def test_the_number_of_attempts_is_read_after_a_cut_line_or_a_rotation(tmp_path):
    assert Journal(LocalStorage(tmp_path)).attempts() == 0
    (tmp_path / OLDER).write_text('{"attempt": 4}\n')
    (tmp_path / PROCESSES).write_text('{"attem')
    assert Journal(LocalStorage(tmp_path)).attempts() == 4
