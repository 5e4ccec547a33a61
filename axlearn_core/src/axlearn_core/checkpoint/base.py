"""Base class for checkpointers that write to a `Storage`: background saves, atomic commits, ownership, and retention."""

import json
import logging
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, Protocol

import jax
from jax.sharding import Sharding

from axlearn_core.checkpoint import manifest, stream
from axlearn_core.checkpoint.barrier import share_from_first
from axlearn_core.checkpoint.manifest import ArrayInfo, Checkpoints, Index, Manifest
from axlearn_core.checkpoint.retention import (
    START_MARKER,
    clear_staging,
    list_expired_steps,
    remove_unfinished,
    set_aside,
)
from axlearn_core.checkpoint.state import abstract_arrays, agree, check_same, collect_arrays, describe, rebuild_state
from axlearn_core.checkpoint.storage import LocalStorage, open_storage
from axlearn_core.config import Configurable, node, setting
from axlearn_core.errors import CheckpointError, StorageError, WorkError, reason

log = logging.getLogger(__name__)


class ArrayReader(Protocol):
    """Reads arrays of one checkpoint."""

    def read(self, shardings: Mapping[str, Sharding | None]) -> dict[str, jax.Array]:
        """Read arrays and verify their hashes. All processes must call this together.

        Args:
            shardings: Sharding of each array by its path in the manifest. None means the default device.

        Raises:
            CheckpointError: If a file is damaged on any process.
        """
        ...


TextFiles = Mapping[str, str | Callable[[], str]]
WEIGHTS_ONLY = "weights_only"
"""Key in `extra` that marks a checkpoint that contains only `step`, `params`, and `variables`. A run can start from it."""


class StorageCheckpointer(Configurable):
    """Base class for checkpointers that store each step in a folder with a manifest.

    It implements `axlearn_core.contracts.parts.Checkpointer`. `save` copies the state to host memory and returns. Threads
    write the files. A checkpoint becomes visible only when it is complete, so killing a process never leaves a partial
    checkpoint.

    Subclasses write and read the array files. They implement `_copy`, `_collect_files`, and `reader`.

    Attributes:
        place: Location of the checkpoints.
        files: Text files to store in each checkpoint, by name. A value is the text or a function that returns it.
        run: ID of the run that owns the saved checkpoints. Checkpoints of other runs are never deleted.
        on_result: See `axlearn_core.contracts.capabilities.ReportsSaves`.
        max_saves_in_flight: Maximum number of concurrent saves. Any further save waits for the oldest one to finish.
        layout_file: Path, within a checkpoint, of a file that every checkpoint of this class contains.
    """

    layout_file: str

    @node
    class Config(Configurable.Config["StorageCheckpointer"]):
        """Saving and retention policy. A checkpoint is kept if any `keep_` field selects it.

        Attributes:
            every_steps: Number of steps between checkpoints.
            keep_last: Number of most recent checkpoints to keep. None keeps all checkpoints.
            keep_every: Keep checkpoints whose step is a multiple of this number.
            keep_best: Number of best checkpoints to keep, ranked by `best_metric`.
            best_metric: Name of one of the metrics passed to `save`.
            best_mode: `min` if smaller values are better, `max` if larger values are.
            uri: Location of the checkpoints, if not the run directory: a path, or a URI that a plugin supports.
            max_failed_saves: Number of consecutive failed saves that only log a warning. One more failure stops training.
        """

        every_steps: int = setting(default=500, ge=1)
        keep_last: int | None = setting(default=3, ge=1)
        keep_every: int | None = setting(default=None, ge=1)
        keep_best: int = setting(default=0, ge=0)
        best_metric: str = "eval_loss"
        best_mode: Literal["min", "max"] = "min"
        uri: str | None = None
        max_failed_saves: int = setting(default=2, ge=0, hide_default=True)

    def __init__(self, cfg: Config, *, directory: Path | str):
        self.cfg = cfg
        name = cfg.uri if cfg.uri is not None else str(directory)
        storage = open_storage(name)
        self.place = Checkpoints(storage, str(storage.root) if isinstance(storage, LocalStorage) else name)
        self.files: TextFiles = {}
        self.run = ""
        self.on_result: Callable[[int, str | None], None] = lambda step, reason: None
        self.max_saves_in_flight = 1
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: deque[tuple[int, Future[None]]] = deque()
        self._failures = 0
        self._restored: int | None = None
        self._opened = False

    def _copy(self, step: int, arrays: Mapping[str, jax.Array]) -> Callable[[], None]:
        """Copy arrays to host memory. The originals may be donated after this returns.

        Returns:
            A function that writes this process's part of the checkpoint to the staging folder. It runs in a thread.
        """
        raise NotImplementedError

    def _collect_files(self, folder: str) -> tuple[dict[str, dict[str, Any]], Index | None]:
        """Wait until all processes have written their parts. Only process 0 calls this.

        Args:
            folder: Staging folder of the step, with a trailing `/`.

        Returns:
            Size and hash of each file by path, as in the manifest, and the root of the index, if there is one. The commit adds
            more files.
        """
        raise NotImplementedError

    def reader(self, checkpoint: Manifest) -> ArrayReader:
        """Open a checkpoint to read its arrays.

        Args:
            checkpoint: Manifest of the checkpoint, which defines the paths of the arrays.
        """
        raise NotImplementedError

    @property
    def directory(self) -> Path:
        """Local or mounted directory of the checkpoints. Raises `StorageError` if the storage has no directory."""
        storage = self.place.storage
        return (storage.root if isinstance(storage, LocalStorage) else storage.directory()).absolute()

    def due(self, step: int) -> bool:
        """Return True if the policy saves a checkpoint at this step."""
        return step > 0 and step % self.cfg.every_steps == 0

    def steps(self) -> list[int]:
        """Return the steps of all complete checkpoints, oldest first."""
        return self.place.steps()

    def latest_step(self) -> int | None:
        """Return the step of the newest complete checkpoint, or None."""
        return max(self.steps(), default=None)

    def inspect(self, step: int) -> Manifest:
        """Read the manifest of a checkpoint."""
        return self.place.inspect(step)

    def owner(self) -> str:
        """Return the ID of the run that wrote the newest checkpoint, or an empty string if it is unknown."""
        try:
            return "" if (step := self.latest_step()) is None else self.inspect(step).run
        except CheckpointError:  # restoring reports the damage
            return ""

    def save(
        self,
        step: int,
        state: object,
        *,
        extra: Mapping[str, Any] | None = None,
        metrics: Mapping[str, float] | None = None,
    ) -> bool:
        """Start saving a pytree of arrays, `extra`, and `files`.

        Blocks while the maximum number of saves is in flight. The state may be donated after this returns. A failed save
        only logs a warning, unless more than `max_failed_saves` consecutive saves have failed.

        Args:
            step: Number of completed steps.
            state: Pytree of arrays.
            extra: JSON-serializable data.
            metrics: Metrics for the retention policy.

        Returns:
            False if the step already exists or the save failed.

        Raises:
            WorkError: If too many saves failed. Earlier checkpoints are intact.
        """
        texts = {name: text() if callable(text) else text for name, text in self.files.items()}
        texts[manifest.EXTRA] = json.dumps(dict(extra or {}))
        described, arrays = collect_arrays(state)
        while len(self._pending) >= self.max_saves_in_flight or step in dict(self._pending):
            try:
                self._finish_oldest()
            except WorkError as error:
                self._tolerate(error)
        try:
            if not self._begin(step):
                return False
        except WorkError as error:
            self._tolerate(error)
            return False
        write = self._copy(step, arrays)

        def finish() -> None:
            try:
                write()
                if jax.process_index() == 0:
                    self._commit(step, described, texts, dict(metrics or {}))
            except BaseException:
                if jax.process_index() == 0:
                    self._discard(self._staging(step))
                raise

        self._pending.append((step, self._pool.submit(finish)))
        return True

    def wait(self) -> None:
        """Block until every save is complete on every process.

        Raises:
            WorkError: If a save failed.
        """
        errors: list[WorkError] = []
        while self._pending:
            try:
                self._finish_oldest()
            except WorkError as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def _finish_oldest(self) -> None:
        step, future = self._pending.popleft()
        error = future.exception()
        agree(self._write_error(step, error) if error else None, error)
        self._failures = 0

    def close(self) -> None:
        """Wait for all saves, then stop the threads."""
        try:
            self.wait()
        finally:
            self._pool.shutdown()

    def read_extra(self, step: int) -> dict[str, Any]:
        """See `Checkpoints.read_extra`."""
        return self.place.read_extra(step)

    def restore(self, step: int, like: object) -> tuple[Any, dict[str, Any]]:
        """Restore the state and `extra` of a step.

        If the checkpoint contains only weights, the learner, the objective, and the random key are taken from `like`. Each process
        verifies the hashes of the data that it reads.

        Args:
            step: Step of a complete checkpoint.
            like: State with the required shapes, dtypes, and shardings. It may be abstract.

        Raises:
            CheckpointError: If the step does not exist, if a file is damaged, or if arrays are missing or unexpected, or have the
                wrong shape.
        """
        checkpoint = self._verify_step(step)
        extra = self.read_extra(step)
        expected = describe(like)
        if extra.get(WEIGHTS_ONLY):
            parts = ("step", "params", "variables")
            expected = {
                p: x for p, x in expected.items() if p.split(".")[0] in parts and p.split(".")[1:2] != ["objective"]
            }
        checkpoint = checkpoint.migrated(expected)
        check_same(step, expected, checkpoint.arrays, unexpected=True)
        state = self._load(checkpoint, like, list(expected))
        self._restored = step
        return state, extra

    def restart(self) -> None:
        """Start again at step 0 and rename all existing checkpoints."""
        self._restored = 0
        if jax.process_index() == 0:
            self._open()

    def _verify_step(self, step: int) -> Manifest:
        """Verify all files except arrays, which the reader verifies."""
        # Verify before any process enters a collective restore. A failure inside it would leave the other processes waiting.
        error: CheckpointError | None = None
        if jax.process_index() == 0:
            try:
                self._check_layout(self.inspect(step))
                self.place.verify(step, pieces=False)
            except CheckpointError as caught:
                error = caught
        agree(error, error)
        return self.inspect(step)

    def _check_layout(self, checkpoint: Manifest) -> None:
        """Raise `CheckpointError` if a different checkpointer class wrote the checkpoint."""
        if not self._has_layout(checkpoint):
            raise CheckpointError(
                f"a different checkpointer wrote the checkpoint of step {checkpoint.step} in {self.place.name}\n"
                f"    got: no {self.layout_file}, which {type(self).__name__} writes\n"
                "    fix: set checkpointer.type to the value in the run that wrote it"
            )

    def _has_layout(self, checkpoint: Manifest) -> bool:
        """Return True if this class can read the files of a checkpoint."""
        return self.layout_file in checkpoint.files

    def _load(self, checkpoint: Manifest, like: object, names: list[str]) -> Any:
        abstract = abstract_arrays(like, names)
        # Read each byte once per job. Copying between devices is faster than reading from storage on every replica.
        places = {p: stream.spread_sharding(x.sharding, x.shape) for p, x in abstract.items()}
        loaded = self.reader(checkpoint).read(places)
        loaded = {p: jax.device_put(x, abstract[p].sharding) for p, x in loaded.items()}
        loaded = {p: x if checkpoint.arrays[p].path == p else x.astype(abstract[p].dtype) for p, x in loaded.items()}
        return rebuild_state(like, names, loaded)

    def _staging(self, step: int) -> str:
        return self.place.storage.staging(f"{self.place.folder}{step}")

    def _begin(self, step: int) -> bool:
        """Prepare the staging folder on process 0. Return False on all processes if the step exists."""
        error: WorkError | None = None
        is_new = True
        if jax.process_index() == 0:
            try:
                self._open()
                is_new = step not in self.steps()
                if is_new:
                    clear_staging(self.place, step, self.run)
                    text = json.dumps({"run": self.run, "step": step}).encode()
                    self.place.storage.write(f"{self._staging(step)}/{START_MARKER}", [text])
            except (OSError, StorageError) as caught:
                error = self._write_error(step, caught)
        agree(error, error)
        return bool(share_from_first(is_new, "start of a save"))

    def _open(self) -> None:
        """Before the first save, delete unfinished saves. After a rollback, also rename the checkpoints from later steps."""
        if not self._opened:
            remove_unfinished(self.place, self.run)
            if self._restored is not None:
                set_aside(self.place, [s for s in self.steps() if s > self._restored], self._restored)
            self._opened = True

    def _commit(
        self, step: int, arrays: dict[str, ArrayInfo], texts: Mapping[str, str], metrics: dict[str, float]
    ) -> None:
        storage, folder = self.place.storage, self._staging(step)
        files, index = self._collect_files(f"{folder}/")
        for name, text in texts.items():
            storage.write(f"{folder}/{name}", [text.encode()])
            files[name] = manifest.describe(text.encode())
        files[START_MARKER] = manifest.describe(storage.read(f"{folder}/{START_MARKER}"))
        created = datetime.now(UTC).isoformat(timespec="seconds")
        body = Manifest(step, arrays, metrics, files, created, self.run, index)
        storage.write(f"{folder}/{manifest.MANIFEST}", [manifest.render(body)])
        storage.commit(folder, f"{self.place.folder}{step}")
        self.on_result(step, None)
        for old in self._steps_to_delete():
            storage.delete(f"{self.place.folder}{old}")

    def _discard(self, folder: str) -> None:
        try:
            self.place.storage.delete(folder)
        except StorageError as error:
            log.warning("could not remove a failed save: %s", error)

    def _steps_to_delete(self) -> list[int]:
        if self.cfg.keep_last is None:
            return []
        return self._list_expired_steps({s: m for s in self.steps() if (m := self._read_run_manifest(s)) is not None})

    def _list_expired_steps(self, manifests: Mapping[int, Manifest]) -> list[int]:
        """Return the checkpoints of this run that no `keep_` field selects."""
        return list_expired_steps(self.cfg, manifests)

    def _read_run_manifest(self, step: int) -> Manifest | None:
        """Return the manifest of a checkpoint if this run wrote it, or None."""
        try:
            manifest = self.inspect(step)
        except CheckpointError:
            return None
        return manifest if manifest.run == self.run else None

    def _tolerate(self, error: WorkError) -> None:
        self._failures += 1
        if self._failures > self.cfg.max_failed_saves:
            raise error
        log.warning(
            "%s\n    training continues: consecutive failure %d; number %d stops it (checkpointer.max_failed_saves)",
            *(error, self._failures, self.cfg.max_failed_saves + 1),
        )

    def _write_error(self, step: int, error: BaseException) -> WorkError:
        try:
            intact_steps = ", ".join(map(str, self.steps())) or "none"
        except StorageError:
            intact_steps = "unknown (the storage cannot be listed)"
        why = reason(error)
        self.on_result(step, why)
        return WorkError(
            f"the checkpoint of step {step} could not be written to {self.place.name}: {why}\n"
            f"    intact: {intact_steps}\n    fix: free space or make the directory writable, then repeat the command"
        )
