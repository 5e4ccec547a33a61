"""Checks that all processes of a job have the same config, versions and data."""

import hashlib
import json
import platform
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from axlearn_core.checkpoint.barrier import PEER_SECONDS, reduce_objects
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
    groups = reduce_objects(digest, _find_differing, f"comparison of {name}", seconds)
    if groups is None:
        return
    # Only one process from the majority and a few of the remaining processes send their configs.
    majority, senders, differing = groups
    sent = [jax.process_index(), dict(facts)] if jax.process_index() in (majority, *senders) else None
    lines = reduce_objects(sent, _describe_differences, f"differences of {name}", seconds)
    raise RequestError(
        f"{differing} of {jax.process_count()} processes of this job differ from process {majority} in their {name}\n"
        + "\n".join(lines)
        + "\n    fix: start every process with the same command, versions and data; nothing was written"
    )


def _find_differing(digests: Sequence[str]) -> tuple[int, list[int], int] | None:
    """Return a process of the majority, some processes that differ from it, and their number. None if all are equal."""
    counts = Counter(digests)
    if len(counts) == 1:
        return None
    majority = digests.index(counts.most_common(1)[0][0])
    others = [rank for rank, other in enumerate(digests) if other != digests[majority]]
    return majority, others[:SENDERS], len(others)


def _describe_differences(sent: Sequence[tuple[int, Mapping[str, str]] | None]) -> list[str]:
    """Return a line for each fact that differs, with the value of each process that sent its facts."""
    rows = dict(row for row in sent if row is not None)
    lines = []
    for path in sorted({path for row in rows.values() for path in row}):
        values = {rank: row.get(path, "(absent)") for rank, row in rows.items()}
        if len(set(values.values())) > 1:
            texts = [f"{_shorten(value)} on process {rank}" for rank, value in sorted(values.items())]
            lines.append(f"    {path}: {', '.join(texts)}")
    more = [f"    and {len(lines) - SHOWN} more"] if len(lines) > SHOWN else []
    return [*lines[:SHOWN], *more]


def _shorten(text: str, length: int = 80) -> str:
    return text if len(text) <= length else f"{text[: length - 3]}..."
