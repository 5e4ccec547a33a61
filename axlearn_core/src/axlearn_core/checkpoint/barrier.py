"""What processes say to each other about checkpoints, through the job's coordinator: with a time limit that names who is missing.

Collectives of the devices have no time limit: one that a process never enters stops all the others until heartbeats fail.
"""

import json
import time
import zlib
from itertools import count
from typing import Any

import jax

from axlearn_core.compat import coordination_client
from axlearn_core.errors import WorkError

PEER_SECONDS = 1800.0
"""How long processes wait for each other: the slowest storage of the job decides how long a save takes."""
_GRACE = 60.0
_numbers = count()


def gather_objects(value: object, name: str, seconds: float = PEER_SECONDS) -> list[Any]:
    """The JSON-able values of all processes, by process index. All call it, in the same order, from one thread.

    Raises:
        WorkError: a process did not get here in time; names which, on every process that did.
    """
    if jax.process_count() == 1:
        return [value]
    client, number = coordination_client(), next(_numbers)
    assert client is not None
    key, own = f"axlearn/{number}", jax.process_index()
    client.key_value_set_bytes(f"{key}/{own}", zlib.compress(json.dumps(value).encode(), 1))
    if own == 0:
        text = _collect(client, key, name, seconds)
        client.key_value_set_bytes(f"{key}/all", text)
        if number:
            client.key_value_delete(f"axlearn/{number - 1}/")  # everyone has read it: all are here
    else:
        try:
            text = client.blocking_key_value_get_bytes(f"{key}/all", int((seconds + _GRACE) * 1000))
        except jax.errors.JaxRuntimeError as error:
            raise WorkError(f"{name}: no answer of process 0 after {seconds + _GRACE:g} s") from error
    answer = json.loads(zlib.decompress(text))
    if "late" in answer:
        late = ", ".join(map(str, answer["late"]))
        raise WorkError(
            f"{name}: waited {seconds:g} s for process {late}\n    fix: see whether it still runs, and what it does; "
            "where its storage is slow, give it more time"
        )
    return answer["values"]


def _collect(client: Any, key: str, name: str, seconds: float) -> bytes:
    """The values of all processes, or who is late, as one text."""
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
