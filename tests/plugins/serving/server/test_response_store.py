"""The bounds, the order and the file of stored responses."""

import pytest

from axlearn_core.errors import RequestError
from axlearn_plugins_serving.server.response_store import ResponseStore, StoredResponse


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
    store.put(stored("huge", "x" * 2000))
    assert store.get("huge") is None
    assert store.get("f") is not None
    assert store.delete("f")
    assert not store.delete("f")


def test_a_file_outlives_the_server(tmp_path):
    first = ResponseStore(str(tmp_path / "r.sqlite"))
    first.put(stored("a"))
    first.close()
    assert ResponseStore(str(tmp_path / "r.sqlite")).get("a") == stored("a")


def test_a_file_that_is_not_a_database_is_an_error(tmp_path):
    (tmp_path / "r.sqlite").write_text("hello " * 1000)
    with pytest.raises(RequestError, match=r"cannot be stored in .*r\.sqlite"):
        ResponseStore(str(tmp_path / "r.sqlite"))
