"""Send the indices of all processes in a save to process 0, through the job's coordinator."""

import threading
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax

from axlearn_core.checkpoint.barrier import PEER_SECONDS, RECEIVERS, name_processes, next_number
from axlearn_core.compat import coordination_client
from axlearn_core.errors import StorageError, reason

POLL_SECONDS = 1.0
"""Seconds after which a receiver that waits for a process checks whether another process failed."""


class PartIndices:
    """The indices of the parts of one save.

    All processes must create these objects in the same order. The other methods may be called from other threads.
    """

    def __init__(self) -> None:
        self.number = next_number("saves/")
        self._own = b""

    def send(self, data: bytes) -> None:
        """Send the index of this process, which has written its part."""
        if jax.process_index() == 0:
            self._own = data
            return
        self._client().key_value_set_bytes(self._key(jax.process_index()), zlib.compress(data, 1))

    def fail(self, error: BaseException) -> None:
        """Tell process 0 that this process could not write its part."""
        if process := jax.process_index():
            text = f"process {process}: {reason(error)}"
            client = self._client()
            client.key_value_set(f"{self._folder}failed", text, allow_overwrite=True)
            client.key_value_set_bytes(self._key(process), b"")

    def collect(self, seconds: float = PEER_SECONDS) -> list[bytes]:
        """Wait until every process has written its part. Return the indices. Only process 0 calls this.

        Raises:
            StorageError: If a process failed or did not finish in time. The message names the process.
        """
        others = range(1, jax.process_count())
        if not others:
            return [self._own]
        deadline, stop = time.monotonic() + seconds, threading.Event()

        def receive(process: int) -> bytes | None:
            try:
                return self._receive(process, deadline, stop)
            except BaseException:
                stop.set()
                raise

        with ThreadPoolExecutor(min(RECEIVERS, len(others))) as pool:
            received = list(pool.map(receive, others))
        parts = [part for part in received if part is not None]
        if len(parts) < len(received):
            late = [process for process, part in zip(others, received, strict=True) if part is None]
            raise StorageError(f"process {name_processes(late)} wrote no part within {seconds:g} s")
        return [self._own, *parts]

    def clear(self) -> None:
        """Delete the indices of this save and of the one before from the coordinator. Only process 0 calls this."""
        if jax.process_count() > 1:
            for number in (self.number - 1, self.number):  # a late process may have sent its index after the deletion
                self._client().key_value_delete(f"axlearn/saves/{number}/")

    def _receive(self, process: int, deadline: float, stop: threading.Event) -> bytes | None:
        """Return the index of a process. Return None if it is late, or if `stop` is set because another process failed."""
        client, key = self._client(), self._key(process)
        while not stop.is_set():
            left = deadline - time.monotonic()
            try:
                data = client.blocking_key_value_get_bytes(key, max(1, int(min(left, POLL_SECONDS) * 1000)))
            except jax.errors.JaxRuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise StorageError(f"process {process}: {str(error).splitlines()[0]}") from error
                if (failure := self._failure(client)) is not None:
                    raise StorageError(failure) from error
                if left <= POLL_SECONDS:
                    return None
                continue
            if not data:
                raise StorageError(self._failure(client) or f"process {process} failed")
            return zlib.decompress(data)
        return None

    def _failure(self, client: Any) -> str | None:
        try:
            return client.key_value_try_get(f"{self._folder}failed")
        except jax.errors.JaxRuntimeError:  # no process failed
            return None

    @property
    def _folder(self) -> str:
        return f"axlearn/saves/{self.number}/"

    def _key(self, process: int) -> str:
        return f"{self._folder}{process}"

    def _client(self) -> Any:
        client = coordination_client()
        assert client is not None
        return client
