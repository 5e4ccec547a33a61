"""Return memory to the operating system after large requests."""

import asyncio
import ctypes
import functools
from collections.abc import Callable

LARGE = 64 * 1024
"""Memory is returned after requests of at least this many bytes."""
_SECONDS = 0.5


@functools.cache
def _trim() -> Callable[[int], int] | None:
    """Return `malloc_trim` from the GNU C library, or None if a different C library is used."""
    return getattr(ctypes.CDLL(None), "malloc_trim", None)


def return_memory() -> None:
    """Return unused pages to the operating system.

    Otherwise, the C library would keep them separately for each thread.
    """
    if (trim := _trim()) is not None:
        trim(0)


class MemoryReturn:
    """A timer that returns memory once after several large requests.

    It fires half a second after the first of them ends.
    """

    def __init__(self) -> None:
        self._scheduled = False

    def note(self, size: int) -> None:
        """Record that a request of `size` bytes has ended. Call it in the event loop."""
        if size >= LARGE and not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_later(_SECONDS, self._start)

    def _start(self) -> None:
        self._scheduled = False
        asyncio.get_running_loop().run_in_executor(None, return_memory)


class Budget:
    """A budget of bytes that tasks share. Tasks wait for their share in order of arrival.

    Args:
        limit: Maximum number of bytes in use at a time. A task that asks for more than this waits until the whole budget is
            free.
    """

    def __init__(self, limit: int):
        self._limit, self._used = limit, 0
        self._line = asyncio.Lock()
        self._freed = asyncio.Event()

    async def take(self, size: int) -> None:
        """Wait until `size` bytes are free and take them."""
        async with self._line:  # first come, first served, so that small requests do not starve a large one
            while self._used and self._used + size > self._limit:
                self._freed.clear()
                await self._freed.wait()
            self._used += size

    def release(self, size: int) -> None:
        """Return bytes to the budget."""
        self._used -= size
        self._freed.set()
