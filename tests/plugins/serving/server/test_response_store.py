"""The bounds, the order and the file of stored responses."""

import contextlib
import json
import random
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


def with_items(id, *items):
    return StoredResponse({"id": id, "output": [{"id": item, "text": f"{item} of {id}"} for item in items]}, [], [])


def test_items_are_stored_and_removed_with_their_response():
    store = ResponseStore(max_responses=2)
    for id in "abc":
        store.put(with_items(id, f"{id}1", f"{id}2"))
    assert store.get_item("a1") is None
    assert json.loads(store.get_item("b2")) == {"id": "b2", "text": "b2 of b"}
    store.put(with_items("b", "b3"))
    assert [store.get_item(item) is None for item in ("b1", "b2", "b3")] == [True, True, False]
    store.delete("b")
    assert store.get_item("b3") is None
    assert store.get_item("c1") is not None


def test_items_of_a_file_of_an_older_version_are_found(tmp_path):
    path = str(tmp_path / "r.sqlite")
    store = ResponseStore(path)
    store.put(with_items("a", "a1"))
    store.close()
    with contextlib.closing(sqlite3.connect(path)) as database:
        database.execute("DROP TABLE IF EXISTS items")
    store = ResponseStore(path)
    assert json.loads(store.get_item("a1")) == {"id": "a1", "text": "a1 of a"}
    store.put(with_items("b", "b1"))
    store.close()
    with contextlib.closing(sqlite3.connect(path)) as database, database:
        database.execute("DELETE FROM items WHERE response = 'b'")  # as if an older version had stored it
    assert json.loads(ResponseStore(path).get_item("b1"))["id"] == "b1"


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
    assert again.size == len(json.dumps({"response": again.response, "input": again.input})) + len("[]")


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
    check_sizes(sqlite3.connect(path))


def check_sizes(database, store=None):
    """Check that the sizes are those of the rows, and return their sum."""
    rows = database.execute("SELECT size, record FROM responses UNION ALL SELECT size, messages FROM turns").fetchall()
    assert all(size == len(text.encode()) for size, text in rows)
    if store is not None:
        assert store._size == sum(size for size, _ in rows)
    return sum(size for size, _ in rows)


def converse(store, turns, first=0, previous=None):
    """Store the turns of a conversation, of two messages each, and return the expected messages of each response."""
    messages, expected = [] if previous is None else list(previous.messages), {}
    for turn in range(first, first + turns):
        messages += [{"role": "user", "content": f"é{turn}" * 10}, {"role": "assistant", "content": "b" * 20}]
        store.put(StoredResponse({"id": str(turn)}, [], list(messages)), previous)
        previous, expected[str(turn)] = store.get(str(turn)), list(messages)
    return expected


def test_a_conversation_grows_linearly():
    store, sizes = ResponseStore(), []
    for length in (50, 100):
        expected = converse(store, length)
        assert {id: store.get(id).messages for id in expected} == expected
        last = store.get(str(length - 1))
        assert (
            last.size
            == len(json.dumps({"response": last.response, "input": []}))
            + store._database.execute("SELECT total FROM turns WHERE id = ?", (last.turn,)).fetchone()[0]
        )
        sizes.append(check_sizes(store._database, store))
        for id in expected:
            store.delete(id)
        assert check_sizes(store._database, store) == 0
    assert sizes[1] < 2.1 * sizes[0]


def test_random_deletions_keep_the_other_responses():
    rng, store = random.Random(0), ResponseStore()
    expected = converse(store, 20)
    expected |= converse(store, 10, 20, previous=store.get("7"))  # two conversations share their first turns
    for id in rng.sample(sorted(expected), 30):
        assert store.get(id).messages == expected.pop(id)
        assert store.delete(id)
        assert {id: store.get(id).messages for id in expected} == expected
        check_sizes(store._database, store)
    assert store._size == 0


def test_the_oldest_responses_of_a_conversation_make_room():
    unbounded = ResponseStore()
    converse(unbounded, 12)
    limit = unbounded._size - 100
    store = ResponseStore(max_bytes=limit)
    expected = converse(store, 12)
    remaining = [id for id in expected if store.get(id)]
    assert remaining == list(expected)[-len(remaining) :]
    assert 0 < len(remaining) < 12
    assert store.get("11").messages == expected["11"]
    assert check_sizes(store._database, store) <= limit
    with pytest.raises(RecordTooLargeError):
        converse(store, 30, 12, previous=store.get("11"))
    check_sizes(store._database, store)


def test_a_conversation_whose_last_turn_was_deleted_is_stored_whole():
    store = ResponseStore()
    expected = converse(store, 3)
    previous = store.get("2")
    for id in expected:
        store.delete(id)
    expected = converse(store, 1, 3, previous=previous)
    assert store.get("3").messages == expected["3"]
    store.put(StoredResponse({"id": "3"}, [], []), previous)  # a conversation that does not begin with the previous one
    assert store.get("3").messages == []
    check_sizes(store._database, store)


def test_a_response_can_replace_itself_after_the_one_before_was_deleted():
    store = ResponseStore()
    converse(store, 2)
    previous, last = store.get("0"), store.get("1")
    store.delete("0")
    store.put(last, previous)
    assert store.get("1").messages == last.messages
    assert store._database.execute("SELECT COUNT(*) FROM turns").fetchone() == (2,)
    check_sizes(store._database, store)


def test_a_file_of_an_older_version_is_converted(tmp_path):
    path = str(tmp_path / "r.sqlite")
    database = sqlite3.connect(path)
    database.execute(
        "CREATE TABLE responses (number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT UNIQUE, size INTEGER, record TEXT)"
    )
    messages = [{"content": "é 0.1"}]
    for id, status in (("a", "completed"), ("b", "queued")):
        record = {"response": {"id": id, "status": status}, "input": [1], "messages": messages}
        database.execute("INSERT INTO responses (id, size, record) VALUES (?, 0, ?)", (id, json.dumps(record)))
    database.commit()
    for _ in range(2):
        store = ResponseStore(path)
        first, second = store.get("a"), store.get("b")
        assert first == StoredResponse({"id": "a", "status": "completed"}, [1], messages)
        assert (second.response["status"], second.messages) == ("failed", messages)
        check_sizes(store._database, store)
        store.close()


def test_a_file_that_is_not_a_database_is_an_error(tmp_path):
    (tmp_path / "r.sqlite").write_text("hello " * 1000)
    with pytest.raises(RequestError, match=r"cannot be stored in .*r\.sqlite"):
        ResponseStore(str(tmp_path / "r.sqlite"))
