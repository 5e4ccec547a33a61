"""Input that fails in one of several processes: all of them take the steps that are left, stop at the same one, and save it.

A process without a batch cannot take a step, and the others would wait for it in a collective. So each has the next batches in
memory. The one whose input fails still has enough of them to reach a step that all processes agree on.
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
"""Batches in memory. Others may have begun one step more than the process that fails, and stop after one further; one is spare."""
_KEY = "axlearn/input-failure"
_PEER_SECONDS = 60.0


@attrs.frozen
class _Held:
    batch: Any
    state: Any
    position: Any


class LookAhead:
    """The batches of an iterator, read `DEPTH` steps before they are taken; its state is that of the batch taken last.

    Args:
        batches: of this process.
        count: batches to read at most.
        fail: called once with the error of the iterator, while batches are left.
    """

    def __init__(self, batches: BatchIterator, count: int, fail: Callable[[Exception], None]):
        self._batches, self._left, self._fail = batches, count, fail
        self._positions = batches if isinstance(batches, DescribesPosition) else None
        self._held: deque[_Held] = deque()
        self._taken = _Held(None, batches.get_state(), "")
        self._error: Exception | None = None

    def __iter__(self) -> "LookAhead":
        return self

    def __next__(self) -> Any:
        """The next batch. Raises what the iterator raised once no batch is left."""
        while self._error is None and self._left > 0 and len(self._held) < DEPTH:
            try:
                self._held.append(self._read())
                self._left -= 1
            except Exception as error:  # raised to the caller once the batches in memory are taken
                self._error = error
                if self._held:
                    self._fail(error)
        if not self._held:
            raise self._error or StopIteration
        self._taken = self._held.popleft()
        return self._taken.batch

    def _read(self) -> _Held:
        batch = next(self._batches)
        position = self._positions.describe_position() if self._positions is not None else ""
        return _Held(batch, self._batches.get_state(), position)

    def get_state(self) -> Any:
        """See `BatchIterator`."""
        return self._taken.state

    def set_state(self, state: Any) -> None:
        """See `BatchIterator`."""
        self._held.clear()
        self._batches.set_state(state)
        self._taken, self._error = _Held(None, state, ""), None

    def describe_position(self) -> Any:
        """See `DescribesPosition`; empty if the iterator cannot say."""
        return self._taken.position

    def close(self) -> None:
        """See `BatchIterator`."""
        self._batches.close()


class StopAgreement:
    """Agrees on the step after which all processes stop, once one of them asks.

    A thread looks for the question every `seconds`, through the job's coordinator. It does not use the devices, on which the
    process may be waiting for another one.

    Attributes:
        reason: why to stop, and which process asked; empty until it was agreed.
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
        """Asks all processes to stop. Returns once they have agreed on a step, or cannot agree."""
        question = json.dumps([jax.process_index(), reason[:2000]])
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # another one asked before
            self._client.key_value_set(self._key, question)
        self._agreed.wait(_PEER_SECONDS)

    def reached(self, step: int) -> bool:
        """Whether this is the step to stop after. Call it before each step."""
        with self._lock:
            self._step = step
            return step == self._stop_step

    def close(self) -> None:
        """Ends the thread."""
        self._closed.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._closed.wait(self._seconds):
            try:
                question = self._client.key_value_try_get(self._key)
            except jax.errors.JaxRuntimeError:  # nobody asked, or the coordinator is gone
                continue
            self._agree(*json.loads(question))
            return

    def _agree(self, process: int, reason: str) -> None:
        """The step after the furthest one that any process has begun."""
        with self._lock:  # no step begins meanwhile
            try:
                self._client.key_value_set(f"{self._key}/{jax.process_index()}", str(self._step))
                deadline = time.monotonic() + _PEER_SECONDS
                steps = [self._step_of(p, deadline) for p in range(jax.process_count())]
            except jax.errors.JaxRuntimeError:  # a process is gone: the job ends anyway
                return
            self._stop_step = max(steps) + 1
            self.reason = f"the input of process {process} failed: {reason}"
            self._agreed.set()

    def _step_of(self, process: int, deadline: float) -> int:
        left = max(1, int((deadline - time.monotonic()) * 1000))
        return int(self._client.blocking_key_value_get(f"{self._key}/{process}", left))
