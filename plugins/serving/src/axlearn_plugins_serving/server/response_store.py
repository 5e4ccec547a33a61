"""`ResponseStore`: the responses that `/v1/responses` stores."""

import contextlib
import json
import os
import sqlite3
import threading
from collections.abc import Iterator
from typing import Any

import attrs

from axlearn_core.errors import RequestError

MAX_RESPONSES = 10_000
MAX_BYTES = 256 * 2**20
MAX_RECORD_BYTES = 16 * 2**20
_TABLES = (
    "CREATE TABLE IF NOT EXISTS responses "
    "(number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT UNIQUE, size INTEGER, record TEXT, turn INTEGER)",
    "CREATE TABLE IF NOT EXISTS turns "
    "(id INTEGER PRIMARY KEY AUTOINCREMENT, parent INTEGER, size INTEGER, total INTEGER, messages TEXT)",
    "CREATE INDEX IF NOT EXISTS responses_by_turn ON responses (turn)",
    "CREATE INDEX IF NOT EXISTS turns_by_parent ON turns (parent)",
    "CREATE TABLE IF NOT EXISTS items (id TEXT PRIMARY KEY, response TEXT, place INTEGER) WITHOUT ROWID",
    "CREATE INDEX IF NOT EXISTS items_by_response ON items (response)",
)
_ADD_ITEMS = """
INSERT OR REPLACE INTO items
SELECT json_extract(value, '$.id'), responses.id, key FROM responses, json_each(record, '$.response.output')
WHERE json_extract(value, '$.id') IS NOT NULL
"""
_FAIL_UNFINISHED = """
UPDATE responses
SET record = json_set(
    record,
    '$.response.status', 'failed',
    '$.response.error', json_object('code', 'server_error', 'message', 'the server stopped')
)
WHERE json_extract(record, '$.response.status') IN ('queued', 'in_progress')
"""
_MEASURE = "UPDATE responses SET size = LENGTH(CAST(record AS BLOB))"
_SPLIT = (
    "ALTER TABLE responses ADD COLUMN turn INTEGER",
    "INSERT INTO turns (id, messages) SELECT number, json_extract(record, '$.messages') FROM responses",
    "UPDATE turns SET size = LENGTH(CAST(messages AS BLOB)), total = LENGTH(CAST(messages AS BLOB))",
    "UPDATE responses SET turn = number, record = json_remove(record, '$.messages')",
    _MEASURE,
)
"""Statements that move the conversations of a file of an older version into `turns`."""
_READ_CONVERSATION = """
WITH RECURSIVE conversation (parent, messages, age) AS (
    SELECT parent, messages, 0 FROM turns WHERE id = ?
    UNION ALL
    SELECT turns.parent, turns.messages, age + 1 FROM turns JOIN conversation ON turns.id = conversation.parent
)
SELECT messages FROM conversation ORDER BY age DESC
"""
_IS_USED = (
    "SELECT EXISTS (SELECT 1 FROM responses WHERE turn = :turn) OR EXISTS (SELECT 1 FROM turns WHERE parent = :turn)"
)
_SIZE = "SELECT (SELECT COALESCE(SUM(size), 0) FROM responses) + (SELECT COALESCE(SUM(size), 0) FROM turns)"


class RecordTooLargeError(Exception):
    """A response is too large to be stored."""


@attrs.frozen
class StoredResponse:
    """A response, and the conversation that it ends.

    Attributes:
        response: The response, as the API returns it.
        input: The items of the request.
        messages: The conversation including the answer, as messages for the chat template.
        size: Size of the response and its conversation in bytes; 0 if the response was not read from the store.
        turn: Key of the last turn of the conversation; None if the response was not read from the store.
    """

    response: dict[str, Any]
    input: list[dict[str, Any]]
    messages: list[dict[str, Any]]
    size: int = attrs.field(default=0, eq=False)
    turn: int | None = attrs.field(default=None, eq=False)


class ResponseStore:
    """A bounded store of responses in SQLite. The oldest responses are removed first. Methods are thread-safe.

    A conversation is a chain of turns. Each turn has the messages that are new in it, and a link to the turn before, so the size
    of a conversation grows linearly. A turn is removed once no response and no later turn needs it.

    Args:
        path: Path of the database file. Only its owner can read a new file. None keeps the responses in memory.
        max_responses: Maximum number of responses.
        max_bytes: Maximum size of all responses and turns as JSON.
        max_record_bytes: Maximum size of one response with its conversation.

    In a file, responses that a stopped server did not finish become failed responses.

    Raises:
        RequestError: The file is not a database or cannot be written.
    """

    def __init__(
        self,
        path: str | None = None,
        *,
        max_responses: int = MAX_RESPONSES,
        max_bytes: int = MAX_BYTES,
        max_record_bytes: int = MAX_RECORD_BYTES,
    ) -> None:
        self.max_responses, self.max_bytes = max_responses, max_bytes
        self._max_record_bytes = min(max_bytes, max_record_bytes)
        self._lock, self._size = threading.Lock(), 0
        try:
            if path is not None:
                os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))  # SQLite gives its other files the same mode
            self._database = sqlite3.connect(path or ":memory:", check_same_thread=False, isolation_level=None)
            if path is not None:
                self._database.execute("PRAGMA journal_mode=WAL")
            with self._transaction():
                self._prepare_tables()
            self._size = self._database.execute(_SIZE).fetchone()[0]
        except (OSError, sqlite3.Error) as error:
            raise RequestError(
                f"the responses cannot be stored in {path}: {error}\n    fix: name a file that can be written"
            ) from None

    def put(self, stored: StoredResponse, previous: StoredResponse | None = None) -> None:
        """Store a response. It replaces a response with the same id.

        Args:
            stored: The response.
            previous: The stored response that the conversation continues. Its messages are not stored again.

        Raises:
            RecordTooLargeError: The response and its conversation are larger than the limit.
        """
        record = json.dumps({"response": stored.response, "input": stored.input}, ensure_ascii=False)
        size = len(record.encode())
        with self._lock, self._transaction():
            turn, conversation_size = self._add_turn(stored, previous)
            if size + conversation_size > self._max_record_bytes:
                raise RecordTooLargeError(
                    f"the response and its conversation have {size + conversation_size:,} bytes, and the server stores at most "
                    f"{self._max_record_bytes:,}"
                )
            self._remove(stored.response["id"])
            self._database.execute(
                "INSERT INTO responses (id, size, record, turn) VALUES (?, ?, ?, ?)",
                (stored.response["id"], size, record, turn),
            )
            self._database.execute(f"{_ADD_ITEMS} AND responses.id = ?", (stored.response["id"],))
            self._size += size
            while self._size > self.max_bytes or self._count() > self.max_responses:
                (oldest,) = self._database.execute("SELECT id FROM responses ORDER BY number LIMIT 1").fetchone()
                self._remove(oldest)

    def get(self, id: str) -> StoredResponse | None:
        """Return a response, or None if it was never stored or has been removed."""
        query = (
            "SELECT record, responses.size + total, turn FROM responses JOIN turns ON turns.id = turn "
            "WHERE responses.id = ?"
        )
        with self._lock:
            row = self._database.execute(query, (id,)).fetchone()
            parts = () if row is None else self._database.execute(_READ_CONVERSATION, (row[2],)).fetchall()
        if row is None:
            return None
        messages = [message for (part,) in parts for message in json.loads(part)]
        return StoredResponse(**json.loads(row[0]), messages=messages, size=row[1], turn=row[2])

    def get_item(self, id: str) -> str | None:
        """Return an item of a response's output by its own id, as JSON, or None if no stored response has it."""
        query = (
            "SELECT json_extract(record, '$.response.output[' || place || ']') "
            "FROM items JOIN responses ON responses.id = items.response WHERE items.id = ?"
        )
        with self._lock:
            row = self._database.execute(query, (id,)).fetchone()
        return None if row is None else row[0]

    def delete(self, id: str) -> bool:
        """Remove a response. Returns False if it is not stored.

        Later responses of the conversation keep its messages.
        """
        with self._lock, self._transaction():
            return self._remove(id)

    def close(self) -> None:
        """Close the database."""
        with self._lock:
            self._database.close()

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        """Write all changes in this context, or none of them if an error is raised."""
        size = self._size
        self._database.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            self._size = size
            self._database.execute("ROLLBACK")
            raise
        self._database.execute("COMMIT")

    def _prepare_tables(self) -> None:
        """Create the tables, update those of an older version, and mark responses that were not finished."""
        for statement in _TABLES[:2]:
            self._database.execute(statement)
        columns = [row[1] for row in self._database.execute("PRAGMA table_info(responses)")]
        for statement in (*(() if "turn" in columns else _SPLIT), *_TABLES[2:]):
            self._database.execute(statement)
        # The file may have responses of an older version.
        self._database.execute(f"{_ADD_ITEMS} AND responses.id NOT IN (SELECT response FROM items)")
        if self._database.execute(_FAIL_UNFINISHED).rowcount:
            self._database.execute(_MEASURE)

    def _add_turn(self, stored: StoredResponse, previous: StoredResponse | None) -> tuple[int, int]:
        """Add the last turn of a conversation. Returns its key, and the size of the conversation in bytes."""
        messages, parent, total = stored.messages, None, 0
        if previous is not None and messages[: len(previous.messages)] == previous.messages:
            query = "SELECT id, total FROM turns WHERE id = ?"
            row = self._database.execute(query, (previous.turn,)).fetchone()
            if row is not None:  # otherwise it was removed meanwhile, so store the whole conversation
                (parent, total), messages = row, messages[len(previous.messages) :]
        text = json.dumps(messages, ensure_ascii=False)
        size = len(text.encode())
        total += size
        added = self._database.execute(
            "INSERT INTO turns (parent, size, total, messages) VALUES (?, ?, ?, ?)", (parent, size, total, text)
        )
        self._size += size
        assert added.lastrowid is not None
        return added.lastrowid, total

    def _count(self) -> int:
        return self._database.execute("SELECT COUNT(*) FROM responses").fetchone()[0]

    def _remove(self, id: str) -> bool:
        """Remove a response, and the turns that nothing needs any more."""
        query = "DELETE FROM responses WHERE id = ? RETURNING size, turn"
        row = self._database.execute(query, (id,)).fetchone()
        if row is None:
            return False
        size, turn = row
        self._size -= size
        self._database.execute("DELETE FROM items WHERE response = ?", (id,))
        while turn is not None and not self._database.execute(_IS_USED, {"turn": turn}).fetchone()[0]:
            query = "DELETE FROM turns WHERE id = ? RETURNING size, parent"
            size, turn = self._database.execute(query, (turn,)).fetchone()
            self._size -= size
        return True
