"""Whose a run directory and its checkpoints are: an id that both carry, and one trainer at a time."""

import uuid
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import jax

from axlearn_core.checkpoint import open_storage
from axlearn_core.checkpoint.state import agree
from axlearn_core.contracts.capabilities import OwnsCheckpoints
from axlearn_core.errors import AxlearnError, CheckpointError, RequestError, StorageError
from axlearn_core.run.holder import Holder
from axlearn_core.run.metric_files import METRICS, read_jsonl
from axlearn_core.run.record import RunDir
from axlearn_core.train.distributed import allgather_data_state

SAVED = "saved"
"""In the lock: whether the run ever had a checkpoint."""


def hold_run(
    run_dir: RunDir, checkpointer: object, lock: Mapping[str, Any], closing: ExitStack
) -> tuple[str, Callable[[], None]]:
    """Keeps other trainers out of the run directory, and out of where its checkpoints are if that is elsewhere.

    Args:
        run_dir: of the run.
        checkpointer: of the run; it gets the id.
        lock: what `run.lock.json` says; empty for a new run.
        closing: ends it.

    Returns:
        The id of the run, and a function that raises on every process once another trainer took over.

    Raises:
        CheckpointError: another trainer is there, or the checkpoints are another run's.
        RequestError: a place cannot be reached.
    """
    owns = checkpointer if isinstance(checkpointer, OwnsCheckpoints) else None
    try:
        owner = owns.owner() if owns else ""
    except StorageError as unreachable:
        raise RequestError(
            f"the checkpoints cannot be reached: {unreachable}\n    fix: make them reachable, or give another checkpointer.uri"
        ) from unreachable
    run = allgather_data_state(
        lock.get("run") or owner or uuid.uuid4().hex[:16]
    )  # the first process's: it writes the lock
    holders: list[Holder] = []
    error: AxlearnError | None = None
    if jax.process_index() == 0:
        places = {str(run_dir.path): open_storage(run_dir.path)}
        if owns and getattr(getattr(checkpointer, "cfg", None), "uri", None) is not None:
            places[owns.place.name] = owns.place.storage
        if run_dir.uri is not None:
            places[run_dir.uri] = open_storage(run_dir.uri)
        try:
            for name, storage in places.items():
                holders.append(Holder(storage, name, run))
                closing.callback(holders[-1].release)
        except AxlearnError as caught:
            error = caught
    agree(error, error)
    if owns and owner and owner != run:
        raise CheckpointError(
            f"{owns.place.name} has checkpoints of another run\n    got: run {owner}\n    expected: run {run}, as in "
            f"{run_dir.path}/run.lock.json\n    fix: give another checkpointer.uri, or the run directory that they belong to"
        )
    if owns:
        owns.run = run

    def check() -> None:
        lost: AxlearnError | None = None
        for holder in holders:
            try:
                holder.check()
            except AxlearnError as caught:
                lost = caught
        agree(lost, lost)

    return run, check


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
