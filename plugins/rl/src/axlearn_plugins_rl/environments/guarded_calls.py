"""Calls into environments and agents: time limits, errors that name their place, and threads for blocking code."""

import asyncio
import hashlib
import threading
import traceback
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")


class CallFailedError(Exception):
    """Raised if user code raises an error or takes too long."""


async def guard_call(call: Awaitable[T], name: str, seconds: float) -> T:
    """Await user code.

    Args:
        call: The awaitable.
        name: Name of the call in errors.
        seconds: Time limit.

    Raises:
        CallFailedError: If the call raises an error or takes too long. The message names the error and its place.
    """
    timer = asyncio.timeout(seconds)
    try:
        async with timer:
            return await call
    except Exception as error:
        if isinstance(error, TimeoutError) and timer.expired():
            raise CallFailedError(f"{name} took longer than {seconds:g} s") from None
        raise CallFailedError(f"{name}: {describe_error(error)}") from error


def describe_error(error: BaseException) -> str:
    """Return the type, the message and the innermost line of an error."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}{place}"


async def call_in_thread(function: Callable[..., T], *args: Any) -> T:
    """Call a blocking function in a thread of its own, and return its result.

    A call that is cancelled keeps its thread until it returns. It does not delay other calls, as it would in a pool.
    """
    loop = asyncio.get_running_loop()
    result: asyncio.Future[T] = loop.create_future()

    def deliver(value: T | None, error: BaseException | None) -> None:
        if result.cancelled():
            return
        result.set_result(value) if error is None else result.set_exception(error)  # type: ignore[arg-type]

    def run() -> None:
        try:
            outcome: tuple[T | None, BaseException | None] = (function(*args), None)
        except StopIteration as error:  # futures refuse it
            outcome = (None, RuntimeError(f"the function raised {error!r}"))
        except BaseException as error:
            outcome = (None, error)
        if not loop.is_closed():
            loop.call_soon_threadsafe(deliver, *outcome)

    threading.Thread(target=run, name="environment", daemon=True).start()
    return await result


def derive_seed(seed: int, *facts: object) -> int:
    """Return a seed for a part of a rollout, from 0 to 2^63 - 1."""
    digest = hashlib.blake2b(repr((seed, *facts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
