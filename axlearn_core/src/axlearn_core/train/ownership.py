"""Whose a run directory and its checkpoints are: an id that both carry, and one trainer at a time."""

import uuid
from collections.abc import Mapping
from typing import Any

import jax

from axlearn_core.checkpoint import open_storage
from axlearn_core.checkpoint.state import agree
from axlearn_core.contracts.capabilities import OwnsCheckpoints
from axlearn_core.contracts.experiment import checkpoint_uri
from axlearn_core.contracts.storage import Storage
from axlearn_core.errors import AxlearnError, CheckpointError, RequestError, StorageError
from axlearn_core.run.events import RunListener
from axlearn_core.run.holder import Holder
from axlearn_core.run.metric_files import METRICS, read_jsonl
from axlearn_core.run.record import RunDir
from axlearn_core.train.distributed import allgather_data_state

SAVED = "saved"
"""In the lock: whether the run ever had a checkpoint."""


class Ownership(RunListener):
    """Keeps other trainers out of a run directory, and out of its folder of checkpoints if that is elsewhere."""

    def __init__(self) -> None:
        self._holders: list[Holder] = []
        self._session: Any = None
        self._is_noted = False

    def opened(self, run: Any) -> None:
        """Takes hold of the run, and gives it and its checkpointer the run's id.

        Raises:
            CheckpointError: another trainer is there, or the checkpoints are another run's.
            RequestError: a place cannot be reached.
        """
        self._session = run
        checkpointer, run_dir = run.checkpointer, run.run_dir
        owns = checkpointer if isinstance(checkpointer, OwnsCheckpoints) else None
        try:
            owner = owns.owner() if owns else ""
        except StorageError as unreachable:
            raise RequestError(
                f"the checkpoints cannot be reached: {unreachable}\n"
                "    fix: make them reachable, or give another checkpointer.uri"
            ) from unreachable
        # The first process's id: it writes the lock.
        run.run_id = allgather_data_state(run.lock.get("run") or owner or uuid.uuid4().hex[:16])
        error: AxlearnError | None = None
        if jax.process_index() == 0:
            try:
                for name, storage in self._places(owns).items():
                    self._holders.append(Holder(storage, name, run.run_id))
            except AxlearnError as caught:
                error = caught
        agree(error, error)
        if owns and owner and owner != run.run_id:
            raise CheckpointError(
                f"{owns.place.name} has checkpoints of another run\n    got: run {owner}\n    expected: run {run.run_id}, "
                f"as in {run_dir.path}/run.lock.json\n"
                "    fix: give another checkpointer.uri, or the run directory that they belong to"
            )
        if owns:
            owns.run = run.run_id

    def _places(self, owns: OwnsCheckpoints | None) -> dict[str, Storage]:
        """Name -> storage of every place that the run writes to."""
        run_dir = self._session.run_dir
        places = {str(run_dir.path): open_storage(run_dir.path)}
        if owns and checkpoint_uri(self._session.program.config) is not None:
            places[owns.place.name] = owns.place.storage
        if run_dir.uri is not None:
            places[run_dir.uri] = open_storage(run_dir.uri)
        return places

    def restored(self, run: Any) -> None:
        """Looks up whether the lock says that the run has a checkpoint."""
        self._is_noted = bool(run.run_dir.read_lock().get(SAVED))

    def saving(self, step: int) -> None:
        """Raises `WorkError` on every process if another trainer took over. Notes the first checkpoint in the lock."""
        lost: AxlearnError | None = None
        for holder in self._holders:
            try:
                holder.check()
            except AxlearnError as caught:
                lost = caught
        agree(lost, lost)
        if jax.process_index() == 0 and not self._is_noted and self._session.checkpointer.latest_step() is not None:
            self._is_noted = True
            self._session.run_dir.write_fact(SAVED, True)

    def closed(self) -> None:
        """Lets the next trainer in."""
        for holder in reversed(self._holders):
            holder.release()


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
