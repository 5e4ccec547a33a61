"""Exchange values between processes through the job's coordinator. A timeout error names the missing processes.

Device collectives have no timeout. If one process never enters a collective, the other processes block until heartbeats fail.
"""

import json
import time
import zlib
from collections import defaultdict
from collections.abc import Iterator
from itertools import count
from typing import Any

import jax

from axlearn_core.compat import coordination_client
from axlearn_core.errors import WorkError

PEER_SECONDS = 1800.0
"""Seconds to wait for the other processes. Must be longer than the slowest save."""
_GRACE = 60.0
_numbers: defaultdict[str, Iterator[int]] = defaultdict(count)


def gather_objects(value: object, name: str, seconds: float = PEER_SECONDS, *, channel: str = "") -> list[Any]:
    """Gather JSON-serializable values from all processes, ordered by process index.

    All processes must call this in the same order from one thread. Other threads use other channels, each with its own order.

    Args:
        value: Value of this process.
        name: Purpose, for error messages.
        seconds: Seconds to wait for the other processes.
        channel: Name of the sequence of calls that this call belongs to, such as `rollouts/`.

    Raises:
        WorkError: If a process does not call this in time. The message names the process.
    """
    if jax.process_count() == 1:
        return [value]
    client, number = coordination_client(), next(_numbers[channel])
    assert client is not None
    folder, process = f"axlearn/{channel}", jax.process_index()
    key = f"{folder}{number}"
    client.key_value_set_bytes(f"{key}/{process}", zlib.compress(json.dumps(value).encode(), 1))
    if process == 0:
        text = _collect(client, key, name, seconds)
        client.key_value_set_bytes(f"{key}/all", text)
        if number:
            client.key_value_delete(
                f"{folder}{number - 1}/"
            )  # all processes have arrived, so they have read the previous values
    else:
        try:
            text = client.blocking_key_value_get_bytes(f"{key}/all", int((seconds + _GRACE) * 1000))
        except jax.errors.JaxRuntimeError as error:
            raise WorkError(f"{name}: no answer from process 0 after {seconds + _GRACE:g} s") from error
    answer = json.loads(zlib.decompress(text))
    if "late" in answer:
        late = ", ".join(map(str, answer["late"]))
        raise WorkError(
            f"{name}: waited {seconds:g} s for process {late}\n    fix: check whether it is still running and what it is doing; "
            "if its storage is slow, increase the timeout"
        )
    return answer["values"]


def _collect(client: Any, key: str, name: str, seconds: float) -> bytes:
    """Serialize the values of all processes, or the list of late processes."""
    deadline, values, late = time.monotonic() + seconds, [], []
    for process in range(jax.process_count()):
        timeout_ms = max(1, int((deadline - time.monotonic()) * 1000))
        try:
            values.append(
                json.loads(zlib.decompress(client.blocking_key_value_get_bytes(f"{key}/{process}", timeout_ms)))
            )
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise WorkError(f"{name}: {str(error).splitlines()[0]}") from error
            late.append(process)
    return zlib.compress(json.dumps({"late": late} if late else {"values": values}).encode(), 1)
