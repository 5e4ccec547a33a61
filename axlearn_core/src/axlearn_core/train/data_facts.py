"""What an input says of its data, and whether it is the data that a checkpoint was written with."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from axlearn_core.checkpoint.state import agree
from axlearn_core.contracts.experiment import context_length, sequence_length
from axlearn_core.errors import CheckpointError
from axlearn_core.run.notices import log_message

SHOWN = 12


def plain_facts(facts: Mapping[str, Any]) -> dict[str, Any]:
    """The facts of `Input.describe` as JSON keeps them."""
    return json.loads(json.dumps(dict(facts), default=str))


def log_context(config: Any) -> None:
    """Log a note if the rows of an experiment's input are longer than its model was made for."""
    limit, length = context_length(config), sequence_length(config)
    if limit is not None and length is not None and length > limit:
        log_message(f"note: input.sequence_length is {length}, and the model was made for {limit} tokens")


def check_facts(run_dir: Path, old: object, new: Mapping[str, Any], *, allow_drift: bool) -> list[str]:
    """Compares the data of a checkpoint with the data that is there. Every process calls it.

    Args:
        run_dir: for the message.
        old: the facts of the checkpoint. What only one side has is not compared: another version said it.
        new: the facts now.
        allow_drift: go on all the same.

    Returns:
        What differs, one line each, where that is allowed.

    Raises:
        CheckpointError: the data is another one; it names what differs, on every process where it differs on one.
    """
    before, now = _flat(old, "data"), _flat(new, "data")
    changes = [f"{path}: {before[path]} -> {now[path]}" for path in before if path in now and before[path] != now[path]]
    files = "data.digests."
    gone = [f"{path}: gone" for path in before if path.startswith(files) and path not in now]
    added = [f"{path}: new" for path in now if path.startswith(files) and path not in before]
    if any(path.startswith(files) for path in before) and any(path.startswith(files) for path in now):
        changes += [*gone, *added]
    error = None
    if changes and not allow_drift:
        more = [f"    and {len(changes) - SHOWN} more"] if len(changes) > SHOWN else []
        lines = "\n".join([*(f"    {change}" for change in changes[:SHOWN]), *more])
        error = CheckpointError(
            f"the data of {run_dir} changed since its checkpoint; nothing was written\n{lines}\n"
            "    fix: bring the data back as it was; to go on at the same position in other data: --allow-drift; to begin "
            "at step 0: --restart"
        )
    agree(error, error)
    return [f"the data changed: {change}" for change in changes]


def _flat(facts: object, path: str) -> dict[str, Any]:
    if isinstance(facts, Mapping):
        return {p: v for name, below in facts.items() for p, v in _flat(below, f"{path}.{name}").items()}
    return {path: facts}
