"""Input failures in multi-process jobs: all processes stop at the same step and save it.

A process without a batch cannot run a step, and the other processes would wait for it in a collective. Therefore each process
buffers its next batches. When the input of one process fails, it still has enough batches to reach a step that all processes
agree on.
"""

import contextlib
import json
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import attrs
import jax

from axlearn_core.compat import coordination_client
from axlearn_core.contracts.capabilities import DescribesPosition
from axlearn_core.contracts.parts import BatchIterator

DEPTH = 4
"""Number of buffered batches.

Other processes may be one step ahead of the failing process, and all stop one step later. One batch is spare."""
_KEY = "axlearn/input-failure"
_PEER_SECONDS = 60.0


@attrs.frozen
class _Batch:
    batch: Any
    state: Any
    position: Any


class LookAhead:
    """An iterator that reads batches `DEPTH` steps ahead. Its state is the one after the last returned batch.

    Args:
        batches: Batch iterator of this process.
        count: Maximum number of batches to read.
        fail: Called once with the iterator's error if batches are left in the buffer.
    """

    def __init__(self, batches: BatchIterator, count: int, fail: Callable[[Exception], None]):
        self._batches, self._remaining, self._fail = batches, count, fail
        self._positions = batches if isinstance(batches, DescribesPosition) else None
        self._buffer: deque[_Batch] = deque()
        self._last = _Batch(None, batches.get_state(), "")
        self._error: Exception | None = None

    def __iter__(self) -> "LookAhead":
        return self

    def __next__(self) -> Any:
        """Return the next batch. Raise the iterator's error once the buffer is empty."""
        while self._error is None and self._remaining > 0 and len(self._buffer) < DEPTH:
            try:
                self._buffer.append(self._read())
                self._remaining -= 1
            except Exception as error:  # raised once the buffer is empty
                self._error = error
                if self._buffer:
                    self._fail(error)
        if not self._buffer:
            raise self._error or StopIteration
        self._last = self._buffer.popleft()
        return self._last.batch

    def _read(self) -> _Batch:
        batch = next(self._batches)
        position = self._positions.describe_position() if self._positions is not None else ""
        return _Batch(batch, self._batches.get_state(), position)

    def get_state(self) -> Any:
        """See `BatchIterator`."""
        return self._last.state

    def set_state(self, state: Any) -> None:
        """See `BatchIterator`."""
        self._buffer.clear()
        self._batches.set_state(state)
        self._last, self._error = _Batch(None, state, ""), None

    def describe_position(self) -> Any:
        """See `DescribesPosition`. Returns an empty string if the iterator does not describe positions."""
        return self._last.position

    def close(self) -> None:
        """See `BatchIterator`."""
        self._batches.close()


class StopAgreement:
    """When one process asks to stop, makes all processes agree on the step to stop after.

    A thread polls the job's coordinator for a request every `seconds` seconds. It does not use the devices, because the process
    may be waiting there for another process.

    Attributes:
        reason: Reason to stop, and the process that asked. Empty until all processes have agreed.
    """

    def __init__(self, step: int, seconds: float | None = None):
        self.reason = ""
        self._step, self._stop_step = step, -1
        self._seconds = seconds or max(1.0, jax.process_count() / 256)
        self._lock = threading.Lock()
        self._closed, self._agreed = threading.Event(), threading.Event()
        self._client = coordination_client()
        self._key = f"{_KEY}/{step}"
        self._thread = threading.Thread(target=self._watch, name="stop-agreement", daemon=True)
        self._thread.start()

    def ask(self, reason: str) -> None:
        """Ask all processes to stop. Return once they have agreed on a step, or after a timeout."""
        message = json.dumps([jax.process_index(), reason[:2000]])
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # another process has already asked
            self._client.key_value_set(self._key, message)
        self._agreed.wait(_PEER_SECONDS)

    def reached(self, step: int) -> bool:
        """Return True if `step` is the agreed step to stop after. Call it before each step."""
        with self._lock:
            self._step = step
            return step == self._stop_step

    def close(self) -> None:
        """End the thread."""
        self._closed.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._closed.wait(self._seconds):
            try:
                message = self._client.key_value_try_get(self._key)
            except jax.errors.JaxRuntimeError:  # no request yet, or the coordinator is gone
                continue
            self._agree(*json.loads(message))
            return

    def _agree(self, process: int, reason: str) -> None:
        """Agree to stop one step after the furthest step that any process has started."""
        with self._lock:  # so that no step starts in the meantime
            try:
                self._client.key_value_set(f"{self._key}/{jax.process_index()}", str(self._step))
                deadline = time.monotonic() + _PEER_SECONDS
                steps = [self._read_step(p, deadline) for p in range(jax.process_count())]
            except jax.errors.JaxRuntimeError:  # a process is gone, so the job ends anyway
                return
            self._stop_step = max(steps) + 1
            self.reason = f"the input of process {process} failed: {reason}"
            self._agreed.set()

    def _read_step(self, process: int, deadline: float) -> int:
        left = max(1, int((deadline - time.monotonic()) * 1000))
        return int(self._client.blocking_key_value_get(f"{self._key}/{process}", left))
