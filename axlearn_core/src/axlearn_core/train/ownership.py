"""Check that run directories and checkpoints belong to the same run. Both store the ID of their run."""

import uuid
from collections.abc import Mapping
from typing import Any

from axlearn_core.contracts.capabilities import OwnsCheckpoints
from axlearn_core.errors import CheckpointError, RequestError, StorageError
from axlearn_core.run.metric_files import METRICS, read_jsonl
from axlearn_core.run.record import RunDir
from axlearn_core.train.distributed import allgather_data_state

SAVED = "saved"
"""Lock key whose value is True if the run ever had a checkpoint."""


def claim_checkpoints(session: Any) -> None:
    """Set the ID of the run and of its checkpointer.

    Raises:
        CheckpointError: The checkpoints belong to a different run.
        RequestError: The location of the checkpoints is unreachable.
    """
    checkpointer, run_dir = session.checkpointer, session.run_dir
    owns = checkpointer if isinstance(checkpointer, OwnsCheckpoints) else None
    try:
        owner = owns.owner() if owns else ""
    except StorageError as unreachable:
        raise RequestError(
            f"the checkpoints cannot be reached: {unreachable}\n"
            "    fix: make them reachable, or set another checkpointer.uri"
        ) from unreachable
    # All processes use the ID of process 0, which writes the lock.
    session.run_id = allgather_data_state(session.lock.get("run") or owner or uuid.uuid4().hex[:16])
    if owns and owner and owner != session.run_id:
        raise CheckpointError(
            f"{owns.place.name} has checkpoints from a different run\n    got: run {owner}\n    expected: run {session.run_id}, "
            f"as in {run_dir.path}/run.lock.json\n"
            "    fix: set another checkpointer.uri, or use the run directory that they belong to"
        )
    if owns:
        owns.run = session.run_id


def was_saved(session: Any, *, restart: bool) -> bool:
    """Return True if the run ever had a checkpoint, unless it restarts."""
    return session.step > 0 or (session.lock.get(SAVED, False) and not restart)


def check_metrics(run_dir: RunDir, lock: Mapping[str, Any]) -> None:
    """Refuse to start at step 0 if the run has metrics but its checkpoints are gone.

    Raises:
        CheckpointError: The run had a checkpoint, but it has none now.
    """
    if not lock.get(SAVED):
        return  # it ended before its first checkpoint, so it starts again and its metrics are set aside
    try:
        records, _ = read_jsonl(run_dir.path / METRICS)
    except OSError:
        return
    if records:
        raise CheckpointError(
            f"{run_dir.path} has metrics up to step {records[-1]['step']}, but no checkpoint to resume from\n"
            "    fix: restore its checkpoints, or start at step 0 with --restart, which sets the metrics aside; "
            "nothing was written"
        )
