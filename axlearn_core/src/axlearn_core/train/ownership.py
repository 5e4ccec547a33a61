"""The run that a run directory and its checkpoints belong to: both carry its id."""

import uuid
from collections.abc import Mapping
from typing import Any

from axlearn_core.contracts.capabilities import OwnsCheckpoints
from axlearn_core.errors import CheckpointError, RequestError, StorageError
from axlearn_core.run.metric_files import METRICS, read_jsonl
from axlearn_core.run.record import RunDir
from axlearn_core.train.distributed import allgather_data_state

SAVED = "saved"
"""In the lock: whether the run ever had a checkpoint."""


def claim_checkpoints(session: Any) -> None:
    """Gives the run and its checkpointer the run's id.

    Raises:
        CheckpointError: the checkpoints belong to another run.
        RequestError: the place of the checkpoints cannot be reached.
    """
    checkpointer, run_dir = session.checkpointer, session.run_dir
    owns = checkpointer if isinstance(checkpointer, OwnsCheckpoints) else None
    try:
        owner = owns.owner() if owns else ""
    except StorageError as unreachable:
        raise RequestError(
            f"the checkpoints cannot be reached: {unreachable}\n"
            "    fix: make them reachable, or give another checkpointer.uri"
        ) from unreachable
    # The first process's id: it writes the lock.
    session.run_id = allgather_data_state(session.lock.get("run") or owner or uuid.uuid4().hex[:16])
    if owns and owner and owner != session.run_id:
        raise CheckpointError(
            f"{owns.place.name} has checkpoints of another run\n    got: run {owner}\n    expected: run {session.run_id}, "
            f"as in {run_dir.path}/run.lock.json\n"
            "    fix: give another checkpointer.uri, or the run directory that they belong to"
        )
    if owns:
        owns.run = session.run_id


def was_saved(session: Any, *, restart: bool) -> bool:
    """Whether the run ever had a checkpoint that it does not begin anew from."""
    return session.step > 0 or (session.lock.get(SAVED, False) and not restart)


def check_metrics(run_dir: RunDir, lock: Mapping[str, Any]) -> None:
    """Refuses to begin at step 0 over the metrics of a run that had checkpoints.

    Raises:
        CheckpointError: it had, and none is there any more.
    """
    if not lock.get(SAVED):
        return  # it ended before its first checkpoint: it begins anew, and its metrics are set aside
    try:
        records, _ = read_jsonl(run_dir.path / METRICS)
    except OSError:
        return
    if records:
        raise CheckpointError(
            f"{run_dir.path} has metrics up to step {records[-1]['step']}, and no checkpoint to go on from\n"
            "    fix: bring its checkpoints back, or begin at step 0 with --restart, which sets the metrics aside; "
            "nothing was written"
        )
