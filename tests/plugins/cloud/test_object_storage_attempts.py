"""Retries of transient errors, without a server and without pauses."""

import pytest

from axlearn_core.contracts.storage import MARKER
from axlearn_core.errors import MissingFileError, StorageError
from axlearn_plugins_cloud import object_storage as module
from axlearn_plugins_cloud.object_storage import ATTEMPTS, ObjectStorage
from axlearn_plugins_cloud.objects import MissingObjectError, RefusedError, TransientError


class Flaky:
    """Objects in memory. Each call fails `failures` times before it succeeds."""

    batch = 1000

    def __init__(self, failures, error):
        self.failures, self.error = failures, error
        self.kept: dict[str, bytes] = {"run/file": b"data", "run/folder/file": b"more"}
        self.calls: list[str] = []

    def _call(self, name):
        self.calls.append(name)
        if len(self.calls) <= self.failures:
            raise self.error

    def list(self, prefix):
        self._call("list")
        return iter([(key, len(data)) for key, data in self.kept.items() if key.startswith(prefix)])

    def list_names(self, folder):
        self._call("list_names")
        return iter([key.removeprefix(folder).partition("/")[0] for key in self.kept if key.startswith(folder)])

    def get(self, key):
        self._call("get")
        return self.kept[key]

    def get_range(self, key, begin, size):
        self._call("get_range")
        return self.kept[key][begin : begin + size]

    def put(self, key, data):
        self._call("put")
        self.kept[key] = bytes(data)

    def put_new(self, key, data):
        self._call("put_new")
        if key in self.kept:
            return False
        self.kept[key] = data
        return True

    def copy(self, source, target):
        self._call("copy")
        self.kept[target] = self.kept[source]

    def delete(self, keys):
        self._call("delete")
        for key in keys:
            self.kept.pop(key, None)


def read_into(storage):
    buffer = bytearray(2)
    storage.read_into("file", 1, memoryview(buffer))
    return bytes(buffer)


CALLS = {
    "list": (lambda s: [f.path for f in s.list("fi")], ["file"]),
    "list_names": (lambda s: s.list_names(), ["file", "folder"]),
    "get": (lambda s: s.read("file"), b"data"),
    "get_range": (read_into, b"at"),
    "put": (lambda s: s.write("new", [b"a", b"b"]), None),
    "put_new": (lambda s: s.create("new", b"ab"), True),
}


@pytest.fixture
def pauses(monkeypatch):
    waited = []
    monkeypatch.setattr(module.time, "sleep", waited.append)
    return waited


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("failures", [1, ATTEMPTS - 1])
def test_a_call_that_fails_for_a_while_works_in_the_end(name, failures, pauses):
    call, expected = CALLS[name]
    objects = Flaky(failures, TransientError("503"))
    assert call(ObjectStorage(objects, "s3://bucket/run", "run")) == expected
    assert objects.calls[: failures + 1] == [name] * (failures + 1)
    assert len(pauses) == failures
    assert all(later > 0 for later in pauses)
    if failures > 1:
        assert pauses[-1] > pauses[0], "the pauses become longer"


def test_moving_and_deleting_a_folder_try_again_too(pauses):
    objects = Flaky(0, TransientError("503"))
    plain = objects._call
    failed_once = set()

    def fail_once(name):
        if name not in failed_once:
            failed_once.add(name)
            raise TransientError("503")
        plain(name)

    objects._call = fail_once
    ObjectStorage(objects, "s3://bucket/run", "run").commit("folder", "moved")
    assert objects.kept == {"run/file": b"data", "run/moved/file": b"more"}
    assert {"list", "copy", "delete"} <= failed_once
    assert len(pauses) == len(failed_once)


def test_lasting_errors_are_reported_after_the_last_attempt(pauses):
    objects = Flaky(ATTEMPTS, TransientError("503"))
    with pytest.raises(StorageError, match=rf"s3://bucket/run/file: 503 \({ATTEMPTS} attempts"):
        ObjectStorage(objects, "s3://bucket/run", "run").read("file")
    assert len(objects.calls) == ATTEMPTS
    assert len(pauses) == ATTEMPTS - 1


def test_retries_of_all_requests_have_a_common_limit(pauses, monkeypatch):
    """If a store fails for all requests, a process must not multiply its load by the number of attempts."""
    monkeypatch.setattr(module, "RETRIES", 5)
    objects = Flaky(1, TransientError("503"))
    storage = ObjectStorage(objects, "s3://bucket/run", "run")
    for _ in range(5):
        assert storage.read("file") == b"data"
        objects.calls.clear()
    with pytest.raises(StorageError, match=r"file: 503 \(not retried: 5 of this process's requests were retried"):
        storage.read("file")
    assert objects.calls == ["get"]
    for _ in range(module.EARNED):  # successes earn further retries
        storage.read("file")
    objects.calls.clear()
    assert storage.read("file") == b"data"
    assert len(pauses) == 6


@pytest.mark.parametrize(
    ("error", "expected"),
    [(MissingObjectError("no"), MissingFileError), (RefusedError("denied", "ask for the right"), StorageError)],
)
def test_permanent_errors_are_reported_at_once(error, expected, pauses):
    objects = Flaky(1, error)
    with pytest.raises(expected):
        ObjectStorage(objects, "s3://bucket/run", "run").read("file")
    assert objects.calls == ["get"]
    assert pauses == []


def test_a_creation_whose_answer_was_lost_is_this_process_s(pauses):
    objects = Flaky(0, TransientError("503"))
    put_new = objects.put_new

    def loses_the_answer(key, data):
        created = put_new(key, data)
        if created:
            raise TransientError("connection reset")
        return created

    objects.put_new = loses_the_answer
    storage = ObjectStorage(objects, "s3://bucket/run", "run")
    assert storage.create("new", b"mine") is True
    assert storage.create("new", b"theirs") is False
    assert len(pauses) == 1


def test_a_moved_folder_is_complete_only_after_its_files(monkeypatch):
    objects = Flaky(0, None)
    objects.kept = {f"run/1/{name}": b"x" for name in ("a.bin", MARKER, "z.bin")}
    copied = []
    copy = objects.copy
    monkeypatch.setattr(objects, "copy", lambda source, target: (copied.append(target), copy(source, target)))
    ObjectStorage(objects, "s3://bucket/run", "run").commit("1", "2")
    assert copied[-1] == f"run/2/{MARKER}"
    assert sorted(copied) == sorted(objects.kept) == [f"run/2/{name}" for name in ("a.bin", MARKER, "z.bin")]
