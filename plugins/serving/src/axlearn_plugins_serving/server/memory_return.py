"""Gives memory back to the system after large requests."""

import asyncio
import ctypes
import functools
from collections.abc import Callable

LARGE = 64 * 1024
"""Bytes of a request after which memory is given back."""
_SECONDS = 0.5


@functools.cache
def _trim() -> Callable[[int], int] | None:
    """`malloc_trim` of the GNU C library; None where there is another one."""
    return getattr(ctypes.CDLL(None), "malloc_trim", None)


def give_back() -> None:
    """Returns the pages that hold nothing. The C library keeps them otherwise, for each thread that was at work."""
    if (trim := _trim()) is not None:
        trim(0)


class MemoryReturn:
    """Gives memory back once after several large requests, half a second after the first of them has ended."""

    def __init__(self) -> None:
        self._due = False

    def note(self, size: int) -> None:
        """A request of so many bytes has ended. Call it in the event loop."""
        if size >= LARGE and not self._due:
            self._due = True
            asyncio.get_running_loop().call_later(_SECONDS, self._start)

    def _start(self) -> None:
        self._due = False
        asyncio.get_running_loop().run_in_executor(None, give_back)


class Budget:
    """Bytes that several tasks share; tasks wait in line for theirs.

    Args:
        limit: bytes that may be taken at one time. A task that asks for more than all of them gets them when it is alone.
    """

    def __init__(self, limit: int):
        self._limit, self._taken = limit, 0
        self._line = asyncio.Lock()
        self._freed = asyncio.Event()

    async def take(self, size: int) -> None:
        """Waits until `size` bytes are free, and takes them."""
        async with self._line:  # in order: a large one is not passed by small ones for ever
            while self._taken and self._taken + size > self._limit:
                self._freed.clear()
                await self._freed.wait()
            self._taken += size

    def release(self, size: int) -> None:
        """Gives bytes back."""
        self._taken -= size
        self._freed.set()
