"""The base of checkpointers over a storage: background saves, atomic commits, ownership and retention."""

import json
import logging
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, Protocol

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Sharding

from axlearn_core.checkpoint import manifest, stream
from axlearn_core.checkpoint.manifest import ArrayInfo, Checkpoints, Manifest
from axlearn_core.checkpoint.retention import BEGUN, clear_staging, remove_unfinished, set_aside, unwanted_steps
from axlearn_core.checkpoint.state import abstract_arrays, agree, check_same, collect_arrays, describe, rebuild_state
from axlearn_core.checkpoint.storage import LocalStorage, open_storage
from axlearn_core.config import Configurable, node, setting
from axlearn_core.errors import CheckpointError, StorageError, WorkError, reason

log = logging.getLogger(__name__)


class ArrayReader(Protocol):
    """Reads arrays of one checkpoint."""

    def read(self, shardings: Mapping[str, Sharding | None]) -> dict[str, jax.Array]:
        """The arrays at some paths of the manifest, in their shardings (None: the default device).

        Compares the hashes of what it reads. All processes call this together.

        Raises:
            CheckpointError: a file is damaged, on this process or on another one.
        """
        ...


TextFiles = Mapping[str, str | Callable[[], str]]
WEIGHTS_ONLY = "weights_only"
"""In `extra`: the checkpoint holds `step`, `params` and `variables` only, and a run begins with them."""


class StorageCheckpointer(Configurable):
    """A checkpointer whose steps are folders of a storage, each with a manifest; see `axlearn_core.contracts.parts.Checkpointer`.

    `save` copies the state off the devices and returns; the rest happens in threads. A checkpoint appears under its step once
    everything in it is written, so that a process killed at any moment leaves whole checkpoints only.

    A subclass writes arrays to files and reads them: it implements `_copy`, `_collect_files` and `reader`.

    Attributes:
        place: where the checkpoints lie.
        files: text files (or functions that give their text) to put into each checkpoint, by name.
        run: the id of the run that owns what is saved. Checkpoints of other ids are never deleted.
        on_result: see `axlearn_core.contracts.capabilities.ReportsSaves`.
        max_saves_in_flight: how many saves may be under way; one more waits for the oldest.
        layout_file: a file that each checkpoint of the class has, by its path in the checkpoint.
    """

    layout_file: str

    @node
    class Config(Configurable.Config["StorageCheckpointer"]):
        """When to save and what to keep; a checkpoint stays if any of the `keep_` fields wants it.

        Attributes:
            every_steps: number of steps between checkpoints.
            keep_last: how many of the newest stay; None keeps all.
            keep_every: those of steps that this divides stay.
            keep_best: how many of those with the best `best_metric` stay.
            best_metric: a name among the metrics given to `save`.
            best_mode: whether small or large values are good.
            uri: where to keep checkpoints instead of the run directory: a path, or a URI that a plugin stores.
            max_failed_saves: saves in a row that may fail with a warning before training stops.
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
        """Copies arrays off the devices, which may be donated once this returns.

        Returns:
            A function for a thread, which writes this process's part of the step below its staging folder.
        """
        raise NotImplementedError

    def _collect_files(self, folder: str) -> dict[str, dict[str, Any]]:
        """Waits for the parts of all processes; called on the first one.

        Args:
            folder: the staging folder of the step, with a `/` at its end.

        Returns:
            Path -> size and hash of each file, as in the manifest. The commit adds its own files.
        """
        raise NotImplementedError

    def reader(self, checkpoint: Manifest) -> ArrayReader:
        """Opens a checkpoint to read its arrays.

        Args:
            checkpoint: the manifest, with the paths to read the arrays by.
        """
        raise NotImplementedError

    @property
    def directory(self) -> Path:
        """The local or mounted directory of the checkpoints. Raises `StorageError` if the storage has no directory."""
        storage = self.place.storage
        return (storage.root if isinstance(storage, LocalStorage) else storage.directory()).absolute()

    def due(self, step: int) -> bool:
        """Says whether the policy saves this step."""
        return step > 0 and step % self.cfg.every_steps == 0

    def steps(self) -> list[int]:
        """All complete steps, oldest first."""
        return self.place.steps()

    def latest_step(self) -> int | None:
        """The newest complete step."""
        return max(self.steps(), default=None)

    def inspect(self, step: int) -> Manifest:
        """Reads the manifest of a checkpoint, and no arrays."""
        return self.place.inspect(step)

    def owner(self) -> str:
        """The id of the run that wrote the newest checkpoint; empty if there is none, or it has no id."""
        try:
            return "" if (step := self.latest_step()) is None else self.inspect(step).run
        except CheckpointError:  # damaged: restoring says so
            return ""

    def save(
        self,
        step: int,
        state: object,
        *,
        extra: Mapping[str, Any] | None = None,
        metrics: Mapping[str, float] | None = None,
    ) -> bool:
        """Starts saving a pytree of arrays, JSON-able `extra` and `files`. Returns False if the step exists.

        Waits while as many saves as allowed are under way. The state may be donated as soon as this returns. A save that fails
        is a warning (and False) until more than `max_failed_saves` in a row have failed.

        Raises:
            WorkError: too many saves failed; earlier checkpoints are intact.
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
        """Blocks until every save under way is complete on every process.

        Raises:
            WorkError: one failed, with the reason.
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
        """Waits, then ends the threads."""
        try:
            self.wait()
        finally:
            self._pool.shutdown()

    def read_extra(self, step: int) -> dict[str, Any]:
        """See `Checkpoints.read_extra`."""
        return self.place.read_extra(step)

    def restore(self, step: int, like: object) -> tuple[Any, dict[str, Any]]:
        """(state, extra) of a step. Shapes, dtypes and shardings are those of `like`, which may be abstract.

        If a checkpoint has weights only, the learner, the objective and the random key stay as they are in `like`. Each process
        compares the hashes of what it reads.

        Raises:
            CheckpointError: no such step; a damaged file; or arrays that are missing, unexpected or of another shape.
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
        """Begins at step 0 all the same: sets every checkpoint aside."""
        self._restored = 0
        if jax.process_index() == 0:
            self._open()

    def _verify_step(self, step: int) -> Manifest:
        """Compares all files with the manifest except those of arrays. A reader compares these."""
        # This comes before any process enters a collective restore: one that fails there would leave the others waiting.
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
        """Raises `CheckpointError` if another kind of checkpointer wrote a checkpoint."""
        if self.layout_file not in checkpoint.files:
            raise CheckpointError(
                f"another checkpointer wrote the checkpoint of step {checkpoint.step} in {self.place.name}\n"
                f"    got: no {self.layout_file}, which {type(self).__name__} writes\n"
                "    fix: set checkpointer.type to what it was in the run that wrote it"
            )

    def _load(self, checkpoint: Manifest, like: object, names: list[str]) -> Any:
        abstract = abstract_arrays(like, names)
        # Each byte is read once in the job; the links of the devices are faster than a storage that every replica reads.
        places = {p: stream.spread_sharding(x.sharding, x.shape) for p, x in abstract.items()}
        loaded = self.reader(checkpoint).read(places)
        loaded = {p: jax.device_put(x, abstract[p].sharding) for p, x in loaded.items()}
        loaded = {p: x if checkpoint.arrays[p].path == p else x.astype(abstract[p].dtype) for p, x in loaded.items()}
        return rebuild_state(like, names, loaded)

    def _staging(self, step: int) -> str:
        return self.place.storage.staging(f"{self.place.folder}{step}")

    def _begin(self, step: int) -> bool:
        """Makes room for a step, on the first process. Returns False on all processes if the step exists."""
        error: WorkError | None = None
        is_new = True
        if jax.process_index() == 0:
            try:
                self._open()
                is_new = step not in self.steps()
                if is_new:
                    clear_staging(self.place, step, self.run)
                    text = json.dumps({"run": self.run, "step": step}).encode()
                    self.place.storage.write(f"{self._staging(step)}/{BEGUN}", [text])
            except (OSError, StorageError) as caught:
                error = self._write_error(step, caught)
        agree(error, error)
        return bool(multihost_utils.broadcast_one_to_all(np.asarray(is_new))) if jax.process_count() > 1 else is_new

    def _open(self) -> None:
        """Cleans up before the first save: deletes unfinished saves, and sets aside the steps after a rollback."""
        if not self._opened:
            remove_unfinished(self.place, self.run)
            if self._restored is not None:
                set_aside(self.place, [s for s in self.steps() if s > self._restored], self._restored)
            self._opened = True

    def _commit(
        self, step: int, arrays: dict[str, ArrayInfo], texts: Mapping[str, str], metrics: dict[str, float]
    ) -> None:
        storage, folder = self.place.storage, self._staging(step)
        files = self._collect_files(f"{folder}/")
        for name, text in texts.items():
            storage.write(f"{folder}/{name}", [text.encode()])
            files[name] = manifest.describe(text.encode())
        files[BEGUN] = manifest.describe(storage.read(f"{folder}/{BEGUN}"))
        created = datetime.now(UTC).isoformat(timespec="seconds")
        body = Manifest(step, arrays, metrics, files, created, self.run)
        storage.write(f"{folder}/{manifest.MANIFEST}", [manifest.render(body)])
        storage.commit(folder, f"{self.place.folder}{step}")
        self.on_result(step, None)
        for old in self._steps_to_delete():
            storage.delete(f"{self.place.folder}{old}")

    def _discard(self, folder: str) -> None:
        try:
            self.place.storage.delete(folder)
        except StorageError as error:
            log.warning("a save that failed could not be removed: %s", error)

    def _steps_to_delete(self) -> list[int]:
        if self.cfg.keep_last is None:
            return []
        return self._unwanted_steps({s: m for s in self.steps() if (m := self._own_manifest(s)) is not None})

    def _unwanted_steps(self, manifests: Mapping[int, Manifest]) -> list[int]:
        """Lists the run's own checkpoints that no `keep_` field wants."""
        return unwanted_steps(self.cfg, manifests)

    def _own_manifest(self, step: int) -> Manifest | None:
        """The manifest of a checkpoint that this run wrote; None for all others."""
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
            "%s\n    training goes on: failure %d in a row, and the %dth stops it (checkpointer.max_failed_saves)",
            *(error, self._failures, self.cfg.max_failed_saves + 1),
        )

    def _write_error(self, step: int, error: BaseException) -> WorkError:
        try:
            intact_steps = ", ".join(map(str, self.steps())) or "none"
        except StorageError:
            intact_steps = "unknown: they cannot be listed"
        why = reason(error)
        self.on_result(step, why)
        return WorkError(
            f"the checkpoint of step {step} could not be written to {self.place.name}: {why}\n"
            f"    intact: {intact_steps}\n    fix: free space or make the directory writable, then run the same command again"
        )
