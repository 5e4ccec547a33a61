"""The bounds, the order and the file of stored responses."""

import json
import sqlite3

import pytest

from axlearn_core.errors import RequestError
from axlearn_plugins_serving.server.response_store import RecordTooLargeError, ResponseStore, StoredResponse


def stored(id, text="a"):
    return StoredResponse({"id": id, "text": text}, [{"role": "user"}], [])


def test_the_oldest_responses_make_room():
    store = ResponseStore(max_responses=2)
    for id in "abc":
        store.put(stored(id))
    assert [id for id in "abc" if store.get(id)] == ["b", "c"]
    store.put(stored("b", "new"))
    store.put(stored("d"))
    assert [id for id in "abcd" if store.get(id)] == ["b", "d"]
    assert store.get("b") == stored("b", "new")


def test_the_size_is_bounded():
    store = ResponseStore(max_bytes=1000)
    for id in "abcdef":
        store.put(stored(id, "x" * 200))
    assert sum(store.get(id) is not None for id in "abcdef") == 3
    with pytest.raises(RecordTooLargeError, match=r"2,0.* bytes, and the server stores at most 1,000"):
        store.put(stored("huge", "x" * 2000))
    with pytest.raises(RecordTooLargeError):
        ResponseStore(max_record_bytes=100).put(stored("long", "x" * 100))
    assert store.get("huge") is None
    assert store.get("f") is not None
    assert store.delete("f")
    assert not store.delete("f")


def test_a_file_outlives_the_server(tmp_path):
    first = ResponseStore(str(tmp_path / "r.sqlite"))
    first.put(stored("a"))
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o600}
    first.close()
    again = ResponseStore(str(tmp_path / "r.sqlite")).get("a")
    assert again == stored("a")
    assert again.size == len(json.dumps({"response": again.response, "input": again.input, "messages": []}))


def test_unfinished_responses_of_a_stopped_server_have_failed(tmp_path):
    path = str(tmp_path / "r.sqlite")
    first = ResponseStore(path)
    for id in ("queued", "in_progress", "completed"):
        first.put(StoredResponse({"id": id, "status": id, "error": None}, [], [{"content": "é 0.1"}]))
    first.close()
    second = ResponseStore(path)
    for id in ("queued", "in_progress"):
        response = second.get(id).response
        assert (response["status"], response["error"]["message"]) == ("failed", "the server stopped")
        assert second.get(id).messages == [{"content": "é 0.1"}]
    assert second.get("completed").response == {"id": "completed", "status": "completed", "error": None}
    rows = sqlite3.connect(path).execute("SELECT size, record FROM responses").fetchall()
    assert all(size == len(record.encode()) for size, record in rows)


def test_a_file_that_is_not_a_database_is_an_error(tmp_path):
    (tmp_path / "r.sqlite").write_text("hello " * 1000)
    with pytest.raises(RequestError, match=r"cannot be stored in .*r\.sqlite"):
        ResponseStore(str(tmp_path / "r.sqlite"))
