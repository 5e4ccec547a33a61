"""`ResponseStore`: the responses that `/v1/responses` stores."""

import json
import sqlite3
import threading
from typing import Any

import attrs

from axlearn_core.errors import RequestError

MAX_RESPONSES = 10_000
MAX_BYTES = 256 * 2**20
_TABLE = (
    "CREATE TABLE IF NOT EXISTS responses "
    "(number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT UNIQUE, size INTEGER, record TEXT)"
)


@attrs.frozen
class StoredResponse:
    """A response, and the conversation that it ends.

    Attributes:
        response: The response, as the API returns it.
        input: The items of the request.
        messages: The conversation including the answer, as messages for the chat template.
    """

    response: dict[str, Any]
    input: list[dict[str, Any]]
    messages: list[dict[str, Any]]


class ResponseStore:
    """A bounded store of responses in SQLite. The oldest responses are removed first. Methods are thread-safe.

    Args:
        path: Path of the database file. None keeps the responses in memory.
        max_responses: Maximum number of responses.
        max_bytes: Maximum size of all responses as JSON.

    Raises:
        RequestError: The file is not a database or cannot be written.
    """

    def __init__(
        self, path: str | None = None, *, max_responses: int = MAX_RESPONSES, max_bytes: int = MAX_BYTES
    ) -> None:
        self.max_responses, self._max_bytes = max_responses, max_bytes
        self._lock = threading.Lock()
        try:
            self._database = sqlite3.connect(path or ":memory:", check_same_thread=False, isolation_level=None)
            self._database.execute(_TABLE)
            if path is not None:
                self._database.execute("PRAGMA journal_mode=WAL")
            self._size = self._database.execute("SELECT COALESCE(SUM(size), 0) FROM responses").fetchone()[0]
        except sqlite3.Error as error:
            raise RequestError(
                f"the responses cannot be stored in {path}: {error}\n    fix: name a file that can be written"
            ) from None

    def put(self, stored: StoredResponse) -> None:
        """Store a response. It replaces a response with the same id."""
        record = json.dumps(attrs.asdict(stored), ensure_ascii=False)
        size = len(record.encode())
        with self._lock:
            self._remove(stored.response["id"])
            if size > self._max_bytes:
                return
            self._database.execute(
                "INSERT INTO responses (id, size, record) VALUES (?, ?, ?)", (stored.response["id"], size, record)
            )
            self._size += size
            while self._size > self._max_bytes or self._count() > self.max_responses:
                (oldest,) = self._database.execute("SELECT id FROM responses ORDER BY number LIMIT 1").fetchone()
                self._remove(oldest)

    def get(self, id: str) -> StoredResponse | None:
        """Return a response, or None if it was never stored or has been removed."""
        with self._lock:
            row = self._database.execute("SELECT record FROM responses WHERE id = ?", (id,)).fetchone()
        return None if row is None else StoredResponse(**json.loads(row[0]))

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
