"""Checks that all processes of a job have the same config, versions and data."""

import hashlib
import json
import platform
from collections import Counter
from collections.abc import Mapping
from typing import Any

import jax

from axlearn_core.checkpoint.barrier import PEER_SECONDS, gather_objects
from axlearn_core.config import Node
from axlearn_core.config.assets import make_portable
from axlearn_core.config.flat import flatten
from axlearn_core.errors import RequestError
from axlearn_core.plugins.code_names import code_name, stable_repr
from axlearn_core.run.lock import versions

JOIN_SECONDS = 300.0
"""Seconds to wait for processes that have just joined the job."""
SHOWN = 12
SENDERS = 8
PER_PROCESS = "config.distributed."
"""Prefix of the settings that may differ between processes."""


def check_same_config(config: Node[Any]) -> None:
    """Compare the config and versions of all processes. Every process must call it before the first collective.

    Raises:
        RequestError: The configs or versions differ. The error lists the differences by process. Raised on every process.
        WorkError: A process does not respond. The error names the process.
    """
    if jax.process_count() == 1:
        return
    flat = {
        f"config.{path}": stable_repr(value) for path, value in flatten(make_portable(config)[0], code_name).items()
    }
    facts = {path: text for path, text in flat.items() if not path.startswith(PER_PROCESS)}
    facts |= {f"versions.{name}": text for name, text in versions().items()}
    _compare(facts | {"versions.python": platform.python_version()}, "config and versions", JOIN_SECONDS)


def check_same_data(facts: Mapping[str, Any]) -> None:
    """Compare the data facts of all processes. See `check_same_config`."""
    if jax.process_count() > 1:
        _compare({f"data.{name}": json.dumps(value, sort_keys=True) for name, value in facts.items()}, "data")


def _compare(facts: Mapping[str, str], name: str, seconds: float = PEER_SECONDS) -> None:
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
    digests = gather_objects(digest, f"comparison of {name}", seconds)
    counts = Counter(digests)
    if len(counts) == 1:
        return
    # Only one process from the majority and a few of the remaining processes send their configs. Gathering thousands of configs
    # would take too long.
    majority = digests.index(counts.most_common(1)[0][0])
    others = [rank for rank, other in enumerate(digests) if other != digests[majority]]
    senders = [majority, *others[:SENDERS]]
    rows = gather_objects(dict(facts) if jax.process_index() in senders else None, f"differences of {name}", seconds)
    paths = sorted({path for rank in senders for path in rows[rank]})
    lines = []
    for path in paths:
        values = {rank: rows[rank].get(path, "(absent)") for rank in senders}
        if len(set(values.values())) > 1:
            texts = [f"{_shorten(value)} on process {rank}" for rank, value in sorted(values.items())]
            lines.append(f"    {path}: {', '.join(texts)}")
    more = [f"    and {len(lines) - SHOWN} more"] if len(lines) > SHOWN else []
    raise RequestError(
        f"{len(others)} of {len(digests)} processes of this job differ from process {majority} in their {name}\n"
        + "\n".join([*lines[:SHOWN], *more])
        + "\n    fix: start every process with the same command, versions and data; nothing was written"
    )


def _shorten(text: str, length: int = 80) -> str:
    return text if len(text) <= length else f"{text[: length - 3]}..."
