"""`TurnLock`: a lock that threads take in turns."""

import threading
from collections import deque
from types import TracebackType


class TurnLock:
    """A lock that threads get in the order in which they ask for it.

    A thread that takes a `threading.Lock` in a loop can keep all other threads from it.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._turns: deque[object] = deque()

    def __enter__(self) -> None:
        turn = object()
        with self._changed:
            self._turns.append(turn)
            try:
                self._changed.wait_for(lambda: self._turns[0] is turn)
            except BaseException:  # an interrupt of the main thread
                self._turns.remove(turn)
                self._changed.notify_all()
                raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._changed:
            self._turns.popleft()
            self._changed.notify_all()
