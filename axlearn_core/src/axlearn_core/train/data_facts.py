"""Collect facts about the input's data, and compare them with the facts in a checkpoint."""

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
    """Return the facts from `Input.describe` as JSON represents them."""
    return json.loads(json.dumps(dict(facts), default=str))


def log_context(config: Any) -> None:
    """Log a note if the input's sequences are longer than the model's context length."""
    limit, length = context_length(config), sequence_length(config)
    if limit is not None and length is not None and length > limit:
        log_message(f"note: input.sequence_length is {length}, but the model's context length is {limit}")


def check_facts(run_dir: Path, old: object, new: Mapping[str, Any], *, allow_drift: bool) -> list[str]:
    """Compare the data facts in a checkpoint with the current facts. Every process must call it.

    Args:
        run_dir: Run directory, for use in the error message.
        old: Facts in the checkpoint. Facts that only one side has are ignored, because a different version may have written them.
        new: Current facts.
        allow_drift: Return the differences instead of raising.

    Returns:
        One line for each difference.

    Raises:
        CheckpointError: The data changed. Raised on every process if the data of one process changed.
    """
    before, now = _flat(old, "data"), _flat(new, "data")
    changes = [f"{path}: {before[path]} -> {now[path]}" for path in before if path in now and before[path] != now[path]]
    files = "data.digests."
    missing = [f"{path}: gone" for path in before if path.startswith(files) and path not in now]
    added = [f"{path}: new" for path in now if path.startswith(files) and path not in before]
    if any(path.startswith(files) for path in before) and any(path.startswith(files) for path in now):
        changes += [*missing, *added]
    error = None
    if changes and not allow_drift:
        more = [f"    and {len(changes) - SHOWN} more"] if len(changes) > SHOWN else []
        lines = "\n".join([*(f"    {change}" for change in changes[:SHOWN]), *more])
        error = CheckpointError(
            f"the data of {run_dir} changed since its checkpoint; nothing was written\n{lines}\n"
            "    fix: restore the original data, pass --allow-drift to resume at the same position in the new data, or pass "
            "--restart to start at step 0"
        )
    agree(error, error)
    return [f"the data changed: {change}" for change in changes]


def _flat(facts: object, path: str) -> dict[str, Any]:
    if isinstance(facts, Mapping):
        return {p: v for name, below in facts.items() for p, v in _flat(below, f"{path}.{name}").items()}
    return {path: facts}
