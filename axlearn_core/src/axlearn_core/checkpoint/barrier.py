"""Exchange values between processes through the job's coordinator. A timeout error names the missing processes.

Device collectives have no timeout. If one process never enters a collective, the other processes block until heartbeats fail.
"""

import json
import time
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from operator import itemgetter
from typing import Any

import jax

from axlearn_core.compat import coordination_client
from axlearn_core.errors import WorkError

PEER_SECONDS = 1800.0
"""Seconds to wait for the other processes. Must be longer than the slowest save."""
RECEIVERS = 16
"""Number of threads in which process 0 receives values."""
SHOWN = 8
"""Maximum number of processes that a message names."""
_GRACE = 60.0
_numbers: defaultdict[tuple[str, int], Iterator[int]] = defaultdict(count)


def next_number(channel: str) -> int:
    """Return the number of this process's next call in a channel. It is the same on all processes."""
    return next(_numbers[channel, jax.process_index()])


def reset_numbers() -> None:
    """Start all channels at 0, for another job in the same Python process."""
    _numbers.clear()


def reduce_objects(
    value: object,
    reduce: Callable[[list[Any]], Any],
    name: str,
    seconds: float = PEER_SECONDS,
    *,
    channel: str = "",
) -> Any:
    """Reduce JSON-serializable values of all processes on process 0, and return the result on every process.

    Each process sends one value and receives one result. All processes must call this in the same order from one thread. Other
    threads use other channels, each with its own order.

    Args:
        value: Value of this process.
        reduce: Function of the values of all processes, ordered by process index. Only process 0 calls it. The result must be
            JSON-serializable, and should be small, since every process downloads it.
        name: Purpose, for error messages.
        seconds: Seconds to wait for the other processes.
        channel: Name of the sequence of calls that this call belongs to, such as `rollouts/`.

    Raises:
        WorkError: If a process does not call this in time, or `reduce` failed on process 0. The message names the process.
    """
    if jax.process_count() == 1:
        return reduce([value])
    client, number = coordination_client(), next_number(channel)
    assert client is not None
    folder, process = f"axlearn/{channel}", jax.process_index()
    key = f"{folder}{number}"
    if process:
        client.key_value_set_bytes(f"{key}/{process}", _encode(value))
        try:
            answer = _decode(client.blocking_key_value_get_bytes(f"{key}/all", int((seconds + _GRACE) * 1000)))
        except jax.errors.JaxRuntimeError as error:
            raise WorkError(f"{name}: no answer from process 0 after {seconds + _GRACE:g} s") from error
        if "failed" in answer:
            raise WorkError(f"{name}: process 0 failed: {answer['failed']}")
    else:
        try:
            answer = _collect(client, key, value, reduce, name, seconds)
        except Exception as error:
            lines = str(error).splitlines() or [type(error).__name__]
            client.key_value_set_bytes(f"{key}/all", _encode({"failed": lines[0]}))
            raise
        client.key_value_set_bytes(f"{key}/all", _encode(answer))
        if number and "late" not in answer:
            # All processes have arrived, so they have read the previous values.
            client.key_value_delete(f"{folder}{number - 1}/")
    if "late" in answer:
        raise WorkError(
            f"{name}: waited {seconds:g} s for process {answer['late']}\n    fix: check whether it is still running and what it is "
            "doing; if its storage is slow, increase the timeout"
        )
    return answer["result"]


def share_from_first(value: object, name: str, seconds: float = PEER_SECONDS, *, channel: str = "") -> Any:
    """Return process 0's value on every process, once all processes have called this. See `reduce_objects`."""
    return reduce_objects(value if jax.process_index() == 0 else None, itemgetter(0), name, seconds, channel=channel)


def gather_objects(value: object, name: str, seconds: float = PEER_SECONDS, *, channel: str = "") -> list[Any]:
    """Gather the values of all processes, ordered by process index. See `reduce_objects`.

    Every process downloads every value, so the bytes in the job grow with the square of the number of processes.
    """
    return reduce_objects(value, list, name, seconds, channel=channel)


def name_processes(processes: Sequence[int]) -> str:
    """Return the first `SHOWN` processes of a list, and the number of the others."""
    more = f" and {len(processes) - SHOWN} more" if len(processes) > SHOWN else ""
    return ", ".join(map(str, processes[:SHOWN])) + more


def _collect(
    client: Any, key: str, value: object, reduce: Callable[[list[Any]], Any], name: str, seconds: float
) -> dict[str, Any]:
    """Return the result of all processes, or the late processes."""
    deadline = time.monotonic() + seconds

    def receive(process: int) -> tuple[Any, bool]:
        timeout_ms = max(1, int((deadline - time.monotonic()) * 1000))
        try:
            return _decode(client.blocking_key_value_get_bytes(f"{key}/{process}", timeout_ms)), True
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise WorkError(f"{name}: {str(error).splitlines()[0]}") from error
            return None, False

    others = range(1, jax.process_count())
    with ThreadPoolExecutor(min(RECEIVERS, len(others))) as pool:
        received = list(pool.map(receive, others))
    late = [process for process, (_, arrived) in zip(others, received, strict=True) if not arrived]
    if late:
        return {"late": name_processes(late)}
    return {"result": reduce([_decode(_encode(value)), *(other for other, _ in received)])}


def _encode(value: object) -> bytes:
    return zlib.compress(json.dumps(value).encode(), 1)


def _decode(data: bytes) -> Any:
    return json.loads(zlib.decompress(data))
