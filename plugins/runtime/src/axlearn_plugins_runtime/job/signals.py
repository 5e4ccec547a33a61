"""Handling of Ctrl-C and SIGTERM: the first signal saves and stops, and the second ends the process immediately."""

import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from axlearn_core.run.events import owns_process

INPUT_SECONDS = 2.0
"""Seconds to wait for the next batch after a stop signal."""
END_SECONDS = 5.0
"""Seconds that a process may take to end after the second signal."""


class InputWaitEnded(Exception):
    """Raised if a signal ended the wait for a batch."""


class StopSignals:
    """Signal handlers between `install` and `uninstall`. They do nothing outside the main thread.

    The first signal is stored in `signal_number`. The second raises `KeyboardInterrupt`. A thread ends a command-line process
    that is still running `END_SECONDS` later, because Python cannot run a handler until native code returns.

    Args:
        ask: Called at the first signal.
        ends_input: Stop waiting for a batch soon after the first signal.

    Attributes:
        signal_number: Number of the first signal, or None.
    """

    def __init__(self, ask: Callable[[], None], *, ends_input: bool):
        self.signal_number: int | None = None
        self._ask, self._ends_input = ask, ends_input
        self._waiting = False
        self._old: dict[int, Any] = {}
        self._sockets: tuple[socket.socket, socket.socket] | None = None
        self._old_wakeup = -1

    def install(self, *signals: int) -> None:
        """Install the handlers of these signals."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number in signals:
            self._old[number] = signal.signal(number, self._stop)
        self._old[signal.SIGALRM] = signal.signal(signal.SIGALRM, self._end_wait)
        if not owns_process.is_set():
            return
        receive, send = self._sockets = socket.socketpair()
        send.setblocking(False)
        self._old_wakeup = signal.set_wakeup_fd(send.fileno(), warn_on_full_buffer=False)
        threading.Thread(target=_watch, args=(receive, signals), name="stop-signals", daemon=True).start()

    def uninstall(self) -> None:
        """Restore the previous handlers."""
        for number, handler in self._old.items():
            signal.signal(number, handler)
        self._old = {}
        if self._sockets is not None:
            signal.set_wakeup_fd(self._old_wakeup)
            self._sockets[1].close()  # ends the thread, which closes the other socket
            self._sockets = None

    def wait(self, get: Callable[[], Any]) -> Any:
        """Return the result of `get`. Raise `InputWaitEnded` if a signal ends the wait."""
        self._waiting = True
        try:
            return get()
        finally:
            self._waiting = False
            if self._old:
                signal.setitimer(signal.ITIMER_REAL, 0)

    def _stop(self, number: int, _frame: FrameType | None) -> None:
        if self.signal_number is not None:
            raise KeyboardInterrupt
        self.signal_number = number
        self._ask()
        if self._waiting and self._ends_input:
            signal.setitimer(signal.ITIMER_REAL, INPUT_SECONDS)

    def _end_wait(self, _number: int, _frame: FrameType | None) -> None:
        if self._waiting:
            raise InputWaitEnded


def _watch(receive: socket.socket, signals: tuple[int, ...]) -> None:
    """End the process `END_SECONDS` after the second signal. Return when the socket is closed."""
    count = 0
    with receive:
        while data := receive.recv(64):
            count += sum(number in signals for number in data)
            if count >= 2:
                break
        else:
            return
        timer = threading.Timer(END_SECONDS, _end_process)
        timer.daemon = True
        timer.start()


def _end_process() -> None:
    print(
        "stopped by the second signal without saving; the steps since the last checkpoint are lost",
        file=sys.stderr,
        flush=True,
    )
    os._exit(128 + signal.SIGINT)
