"""`ResponseStore`: the responses that `/v1/responses` stores."""

import json
import os
import sqlite3
import threading
from typing import Any

import attrs

from axlearn_core.errors import RequestError

MAX_RESPONSES = 10_000
MAX_BYTES = 256 * 2**20
MAX_RECORD_BYTES = 16 * 2**20
_TABLE = (
    "CREATE TABLE IF NOT EXISTS responses "
    "(number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT UNIQUE, size INTEGER, record TEXT)"
)
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


class RecordTooLargeError(Exception):
    """A response is too large to be stored."""


@attrs.frozen
class StoredResponse:
    """A response, and the conversation that it ends.

    Attributes:
        response: The response, as the API returns it.
        input: The items of the request.
        messages: The conversation including the answer, as messages for the chat template.
        size: Size of the record in bytes; 0 if the response was not read from the store.
    """

    response: dict[str, Any]
    input: list[dict[str, Any]]
    messages: list[dict[str, Any]]
    size: int = attrs.field(default=0, eq=False)


class ResponseStore:
    """A bounded store of responses in SQLite. The oldest responses are removed first. Methods are thread-safe.

    Args:
        path: Path of the database file. Only its owner can read a new file. None keeps the responses in memory.
        max_responses: Maximum number of responses.
        max_bytes: Maximum size of all responses as JSON.
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
        self._lock = threading.Lock()
        try:
            if path is not None:
                os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))  # SQLite gives its other files the same mode
            self._database = sqlite3.connect(path or ":memory:", check_same_thread=False, isolation_level=None)
            self._database.execute(_TABLE)
            if path is not None:
                self._database.execute("PRAGMA journal_mode=WAL")
                if self._database.execute(_FAIL_UNFINISHED).rowcount:
                    self._database.execute(_MEASURE)
            self._size = self._database.execute("SELECT COALESCE(SUM(size), 0) FROM responses").fetchone()[0]
        except (OSError, sqlite3.Error) as error:
            raise RequestError(
                f"the responses cannot be stored in {path}: {error}\n    fix: name a file that can be written"
            ) from None

    def put(self, stored: StoredResponse) -> None:
        """Store a response. It replaces a response with the same id.

        Raises:
            RecordTooLargeError: The response and its conversation are larger than the limit.
        """
        fields = {"response": stored.response, "input": stored.input, "messages": stored.messages}
        record = json.dumps(fields, ensure_ascii=False)
        size = len(record.encode())
        if size > self._max_record_bytes:
            raise RecordTooLargeError(
                f"the response and its conversation have {size:,} bytes, and the server stores at most "
                f"{self._max_record_bytes:,}"
            )
        with self._lock:
            self._remove(stored.response["id"])
            self._database.execute(
                "INSERT INTO responses (id, size, record) VALUES (?, ?, ?)", (stored.response["id"], size, record)
            )
            self._size += size
            while self._size > self.max_bytes or self._count() > self.max_responses:
                (oldest,) = self._database.execute("SELECT id FROM responses ORDER BY number LIMIT 1").fetchone()
                self._remove(oldest)

    def get(self, id: str) -> StoredResponse | None:
        """Return a response, or None if it was never stored or has been removed."""
        with self._lock:
            row = self._database.execute("SELECT record, size FROM responses WHERE id = ?", (id,)).fetchone()
        return None if row is None else StoredResponse(**json.loads(row[0]), size=row[1])

    def delete(self, id: str) -> bool:
        """Remove a response. Returns False if it is not stored."""
        with self._lock:
            return self._remove(id)

    def close(self) -> None:
        """Close the database."""
        with self._lock:
            self._database.close()

    def _count(self) -> int:
        return self._database.execute("SELECT COUNT(*) FROM responses").fetchone()[0]

    def _remove(self, id: str) -> bool:
        row = self._database.execute("DELETE FROM responses WHERE id = ? RETURNING size", (id,)).fetchone()
        if row is None:
            return False
        self._size -= row[0]
        return True
