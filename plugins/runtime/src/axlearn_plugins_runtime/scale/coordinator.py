"""A simulated coordinator of a job: a key-value store in memory that counts the messages of each process."""

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import attrs
import jax

from axlearn_core.checkpoint.barrier import reset_numbers
from axlearn_core.compat import coordination_client, replace_coordination_client


@attrs.define
class Messages:
    """Messages between one process and the coordinator.

    Attributes:
        count: Number of requests.
        bytes: Bytes that were sent and received, without protocol overhead.
        largest: Bytes of the largest answer.
    """

    count: int = 0
    bytes: int = 0
    largest: int = 0


class SimulatedCoordinator:
    """The client of `jax.distributed`, for several simulated processes in one Python process.

    Threads that `run_as` starts belong to its process. Other threads belong to `default`.

    Attributes:
        messages: Messages by process.
        default: Process of threads that `run_as` did not start, such as those in a pool of process 0.
        stand_in: Returns the value that a process without a thread would have written to a key, or None.
    """

    def __init__(self, stand_in: Callable[[str], bytes | None] = lambda key: None):
        self.messages: defaultdict[int, Messages] = defaultdict(Messages)
        self.default = 0
        self.stand_in = stand_in
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()
        self._thread = threading.local()

    @property
    def process(self) -> int:
        """Process of the current thread."""
        return self._thread.__dict__.get("process", self.default)

    def run_as(self, process: int, call: Callable[[], Any]) -> Any:
        """Call a function as a process."""
        self._thread.process = process
        try:
            return call()
        finally:
            del self._thread.process

    @contextmanager
    def replace_client(self, processes: int) -> Iterator[None]:
        """Make this the coordinator of a job of some size in this Python process."""
        count, index, client = jax.process_count, jax.process_index, coordination_client()
        jax.process_count, jax.process_index = (lambda: processes), (lambda: self.process)
        replace_coordination_client(self)
        reset_numbers()
        try:
            yield
        finally:
            jax.process_count, jax.process_index = count, index
            replace_coordination_client(client)
            reset_numbers()

    def key_value_set(self, key: str, value: str, allow_overwrite: bool = False) -> None:
        """Write a text."""
        self.key_value_set_bytes(key, value.encode(), allow_overwrite)

    def key_value_set_bytes(self, key: str, value: bytes, allow_overwrite: bool = False) -> None:
        """Write a value."""
        self._count(len(key) + len(value), 0)
        with self._changed:
            if key in self._values and not allow_overwrite:
                raise jax.errors.JaxRuntimeError(f"ALREADY_EXISTS: {key}")
            self._values[key] = value
            self._changed.notify_all()

    def blocking_key_value_get(self, key: str, timeout_in_ms: int) -> str:
        """Wait for a text."""
        return self.blocking_key_value_get_bytes(key, timeout_in_ms).decode()

    def blocking_key_value_get_bytes(self, key: str, timeout_in_ms: int) -> bytes:
        """Wait for a value."""
        value = self._values.get(key)
        if value is None:
            value = self.stand_in(key)
        if value is None:
            value = self._wait(key, timeout_in_ms / 1000)
        self._count(len(key) + len(value), len(value))
        return value

    def key_value_try_get(self, key: str) -> str:
        """Return a text, or raise an error if it does not exist."""
        value = self._values.get(key)
        self._count(len(key) + len(value or b""), len(value or b""))
        if value is None:
            raise jax.errors.JaxRuntimeError(f"NOT_FOUND: {key}")
        return value.decode()

    def key_value_dir_get(self, folder: str) -> list[tuple[str, str]]:
        """Return all keys and texts in a folder."""
        with self._changed:
            items = [(key, value.decode()) for key, value in self._values.items() if key.startswith(folder)]
        size = sum(len(key) + len(value) for key, value in items)
        self._count(len(folder) + size, size)
        return items

    def key_value_delete(self, folder: str) -> None:
        """Delete a key, or all keys in a folder."""
        self._count(len(folder), 0)
        with self._changed:
            for key in [key for key in self._values if key == folder or key.startswith(folder.rstrip("/") + "/")]:
                del self._values[key]

    def start(self, values: Mapping[str, bytes]) -> None:
        """Replace all values and reset the counters, as if a new job had started."""
        with self._changed:
            self._values = dict(values)
            self.messages.clear()

    def list_keys(self) -> list[str]:
        """Return all keys."""
        with self._changed:
            return sorted(self._values)

    def peek(self, key: str, seconds: float) -> bytes:
        """Wait for a value without counting a message."""
        return self._wait(key, seconds)

    def _wait(self, key: str, seconds: float) -> bytes:
        end = time.monotonic() + seconds
        with self._changed:
            while key not in self._values:
                if not self._changed.wait(end - time.monotonic()):
                    raise jax.errors.JaxRuntimeError(f"DEADLINE_EXCEEDED: {key}")
            return self._values[key]

    def _count(self, size: int, received: int) -> None:
        with self._changed:
            messages = self.messages[self.process]
            messages.count += 1
            messages.bytes += size
            messages.largest = max(messages.largest, received)
