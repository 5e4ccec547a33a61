"""Server startup: progress on standard error, and signals that arrive before the server can drain requests."""

import contextlib
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

STOPS = (signal.SIGINT, signal.SIGTERM)


class Startup:
    """Reports the phases of startup, and ends the process when a signal interrupts it.

    Each phase prints one line when it begins. A long phase prints another line every few seconds. SIGTERM or Ctrl-C prints
    one line and raises `SystemExit` with the exit code 128 + signal in the main thread. If the main thread does not end in
    time, for example because it is compiling, the process exits immediately.

    Use it as a context manager. Outside the main thread, it only reports phases.

    Args:
        every_seconds: Interval between the lines of a long phase.
        grace_seconds: Time for the main thread to clean up after a signal.
        write: Writes a line; the default prints it to standard error.
    """

    def __init__(
        self,
        *,
        every_seconds: float = 10.0,
        grace_seconds: float = 2.0,
        write: Callable[[str], None] | None = None,
    ):
        self._write = write or _print
        self.detail: Callable[[], str] = str
        self._every, self._grace = every_seconds, grace_seconds
        self._began = self._phase_began = time.monotonic()
        self._phase = ""
        self._handlers: dict[int, Any] = {}
        self._old_descriptor = -1
        self._descriptors: tuple[int, int] | None = None
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="startup", daemon=True)

    def __enter__(self) -> "Startup":
        self._descriptors = os.pipe()
        if threading.current_thread() is threading.main_thread():
            # The main thread runs Python's handlers only between two calls into the compiler. The C handler writes to this
            # descriptor immediately.
            os.set_blocking(self._descriptors[1], False)
            self._old_descriptor = signal.set_wakeup_fd(self._descriptors[1], warn_on_full_buffer=False)
            self._handlers = {number: signal.signal(number, _stop) for number in STOPS}
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if isinstance(error, StoppedStart):
            # The thread prints the reason, and ends the process if it does not exit by itself.
            self._stopped.wait(self._grace)
            return
        self._restore_signals()
        self._close()

    def report(self, phase: str) -> None:
        """Begin a phase, such as "reading the weights"."""
        self._phase, self._phase_began = phase, time.monotonic()
        self._write(phase)

    def finish(self) -> None:
        """End startup. Signal handlers that the server has installed in the meantime stay in place."""
        if all(signal.getsignal(number) is _stop for number in self._handlers):
            self._restore_signals()
        self._handlers = {}
        self._close()
        self._write(f"ready after {time.monotonic() - self._began:.1f} s")

    def _restore_signals(self) -> None:
        if not self._handlers:
            return
        for number, handler in self._handlers.items():
            # None stands for a handler that was not installed from Python, so Python cannot restore it.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        try:
            signal.set_wakeup_fd(self._old_descriptor)
        except (OSError, ValueError):  # its owner closed it
            signal.set_wakeup_fd(-1)

    def _close(self) -> None:
        if self._descriptors is not None:
            os.close(self._descriptors[1])
            self._thread.join()
            os.close(self._descriptors[0])
            self._descriptors = None

    def _watch(self) -> None:
        assert self._descriptors is not None
        reader = self._descriptors[0]
        while True:
            readable, _, _ = select.select([reader], [], [], self._every)
            if not readable:
                self._report_again()
                continue
            numbers = os.read(reader, 1)
            if not numbers:  # closed
                return
            if (number := numbers[0]) in STOPS:
                self._end(number)

    def _report_again(self) -> None:
        if self._phase:
            self._write(f"still {self._phase}: {time.monotonic() - self._phase_began:.0f} s{self.detail()}")

    def _end(self, number: int) -> None:
        phase = f" while {self._phase}" if self._phase else ""
        self._write(f"stopped by {signal.Signals(number).name} after {time.monotonic() - self._began:.1f} s{phase}")
        self._stopped.set()
        time.sleep(self._grace)
        os._exit(128 + number)


class StoppedStart(SystemExit):
    """Raised in the main thread when a signal arrives during startup. The exit code is 128 + signal."""


def _stop(number: int, _frame: FrameType | None) -> None:
    raise StoppedStart(128 + number)


def _print(line: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # standard error is closed
        print(line, file=sys.stderr, flush=True)
