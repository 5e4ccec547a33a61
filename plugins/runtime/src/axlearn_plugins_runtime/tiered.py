"""The `tiered` component: checkpoints, and frequent local states on the machines of the job."""

import functools
import json
import logging
import socket
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jax

from axlearn_core.checkpoint import ShardedCheckpointer, manifest
from axlearn_core.checkpoint.barrier import reduce_objects, share_from_first
from axlearn_core.checkpoint.manifest import ArrayInfo, Manifest
from axlearn_core.checkpoint.piece_index import write_index
from axlearn_core.checkpoint.shards import DamagedError
from axlearn_core.checkpoint.state import abstract_arrays, check_same, collect_arrays, describe, rebuild_state
from axlearn_core.checkpoint.writer import PartWriter
from axlearn_core.config import Configurable, Node, node, setting
from axlearn_core.errors import AxlearnError, CheckpointError, MissingFileError, WorkError, reason
from axlearn_core.learn.paths import flatten
from axlearn_plugins_runtime import part_transfers
from axlearn_plugins_runtime.local_tier import PART, LocalParts, Part, find_overlaps, is_covered, list_needs
from axlearn_plugins_runtime.process_max import max_over_processes

log = logging.getLogger(__name__)
TRIES = 5
"""Number of times to retry a local state after some of its parts were set aside or did not arrive."""
TIMELINE = ".timeline.json"
"""File next to the checkpoints with the id of the current timeline. Only local parts of this timeline are valid."""


CANDIDATES = 64
"""Maximum number of (step, attempt) pairs that a restore considers."""


class LocalTier(Configurable):
    """Local states on the disks or in `/dev/shm` of the training machines, for `tiered`."""

    @node
    class Config(Configurable.Config["LocalTier"]):
        """Interval, location and retention of local states.

        Attributes:
            every_steps: Steps between local states.
            directory: Directory on every machine, writable only by this user. Environment variables are expanded.
            keep: Number of complete states to keep.
            copies: Number of other machines that keep a copy of each part. Required to survive the loss of a machine if each
                shard exists on only one process.
            suspect_steps: Roll back to the previous checkpoint if a non-finite step occurs within this many steps after a local
                restore.
            wait_seconds: Seconds that processes wait for each other during a restore.
        """

        every_steps: int = setting(default=10, ge=1)
        directory: str = "/tmp/axlearn-local"
        keep: int = setting(default=2, ge=1)
        copies: int = setting(default=0, ge=0)
        suspect_steps: int = setting(default=20, ge=0)
        wait_seconds: float = setting(default=600.0, gt=0)

    def __init__(self, cfg: Config):
        self.cfg = cfg


class TieredCheckpointer(ShardedCheckpointer):
    """The core's checkpointer with a local tier on the machines of the job.

    Each process writes all shards on its devices, including replicas, as a separate local checkpoint. A restore uses the newest
    intact step: from this machine, from the machine of another process, or from the checkpoints, in that order. Damaged parts
    and checkpoints are set aside.
    """

    @node
    class Config(ShardedCheckpointer.Config):
        """The fields of the core's checkpointer, and the local tier.

        Attributes:
            local: Settings for the local tier.
        """

        local: Node[LocalTier] = LocalTier.Config()

    def __init__(self, cfg: Config, *, directory: Path | str):
        super().__init__(cfg, directory=directory)
        self.local = cfg.local.build().cfg
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="local-tier")
        self._parts: LocalParts | None = None
        self._attempt, self._timeline = "", ""
        self._saving: Future[Part] | None = None
        self._complete: list[tuple[int, str]] = []
        self._trusted_until: int | None = None
        LocalParts(self.local.directory, "")  # raises before training if the directory cannot be used

    @property
    def parts(self) -> LocalParts:
        """The local parts on this machine."""
        if self._parts is None:
            self._parts = LocalParts(self.local.directory, self.run)
            self._join(self._read_timeline() if jax.process_index() == 0 else "")
        return self._parts

    def local_due(self, step: int) -> bool:
        """See `axlearn_core.contracts.capabilities.KeepsLocalTier`."""
        return step > 0 and step % self.local.every_steps == 0

    def save_local(self, step: int, state: Any, *, extra: Mapping[str, Any], metrics: Mapping[str, float]) -> bool:
        """See `axlearn_core.contracts.capabilities.KeepsLocalTier`."""
        parts = self.parts
        self._finish_saves(wait=True)
        part = Part(step, self._attempt, jax.process_index(), self._timeline)
        folder = parts.storage.staging(part.folder)
        described, arrays = collect_arrays(state)
        texts = {n: text() if callable(text) else text for n, text in self.files.items()}
        texts[manifest.EXTRA] = json.dumps(dict(extra))
        texts[PART] = json.dumps({"attempt": part.attempt, "process": part.process, "timeline": part.timeline})
        parts.delete([part])
        parts.remove(folder)
        writer = PartWriter(parts.storage, f"{folder}/", self._buffers, self._writers, single_process=True)
        writer.copy(arrays)
        self._saving = self._threads.submit(self._write, writer, part, folder, described, texts, dict(metrics))
        return True

    def _write(
        self,
        writer: PartWriter,
        part: Part,
        folder: str,
        arrays: dict[str, ArrayInfo],
        texts: Mapping[str, str],
        metrics: dict[str, float],
    ) -> Part:
        storage = self.parts.storage
        try:
            index = write_index(storage, f"{folder}/", [writer.finish()])
            files: dict[str, Any] = {}
            for name, text in texts.items():
                storage.write(f"{folder}/{name}", [text.encode()])
                files[name] = manifest.describe(text.encode())
            created = datetime.now(UTC).isoformat(timespec="seconds")
            body = Manifest(part.step, arrays, metrics, files, created, self.run, index)
            storage.write(f"{folder}/{manifest.MANIFEST}", [manifest.render(body)])
            storage.commit(folder, part.folder)
        except BaseException:
            self.parts.remove(folder)
            raise
        return part

    def _finish_saves(self, *, wait: bool) -> None:
        """Finish the pending local save, copy it to other machines, and delete all but the newest `keep` complete states.

        All processes agree on the complete states before anything is deleted.
        """
        if self._saving is None:
            return
        saving, self._saving = self._saving, None
        part: Part | None = None
        try:
            part = saving.result()
        except Exception as error:
            log.warning(
                "cannot write the local tier: %s\n    training continues; checkpoints are not affected",
                reason(error),
            )
        step = -1 if part is None else part.step
        largest, negated = max_over_processes([step, -step]) if jax.process_count() > 1 else (step, -step)
        if wait and part is not None and largest == -negated:
            self._copy_out(part)
            self._complete = [*self._complete, (part.step, part.attempt)][-self.local.keep :]
            oldest = min(s for s, _ in self._complete)
            if len(self._complete) == self.local.keep:
                self.parts.delete(p for p in self.parts.find() if p.step < oldest)

    def _copy_out(self, part: Part) -> None:
        count = jax.process_count()
        if not self.local.copies or count == 1:
            return
        facts = [self._machine(), self.parts.describe(part)]
        plan = functools.partial(part_transfers.plan_copies, part, copies=self.local.copies)
        part_transfers.send_parts(self._reduce_transfers(facts, plan, "copy of the local tier") or [], self.parts)

    def _machine(self) -> str:
        """Return an id that is the same for all processes that share a directory."""
        return f"{socket.gethostname()}:{self.parts.root}"

    def restore_newest(self, like: Any) -> tuple[Any, dict[str, Any], int] | None:
        """See `axlearn_core.contracts.capabilities.KeepsLocalTier`.

        Raises:
            CheckpointError: No checkpoint can be restored.
            WorkError: A process does not respond within `local.wait_seconds`. The error names the process.
        """
        self.parts.clean()
        newest = self._share(self.latest_step() if jax.process_index() == 0 else None, "restore")
        if (restored := self._restore_local(like, -1 if newest is None else newest)) is not None:
            state, extra, step = restored
            self._trusted_until = step + self.local.suspect_steps
            self._restored = step
        elif newest is not None:
            state, extra, step = self._restore_checkpoint(like)
        else:
            return None
        self.parts.delete(p for p in self.parts.find() if p.step > step)
        return state, extra, step

    def step_behind(self, step: int) -> int | None:
        """See `axlearn_core.contracts.capabilities.KeepsLocalTier`."""
        until, self._trusted_until = self._trusted_until, None
        if until is None or step > until:
            return None
        restored = until - self.local.suspect_steps
        steps = self.steps() if jax.process_index() == 0 else []
        behind = [s for s in self._share(steps, "going back") if s <= restored]
        if not behind:
            log.warning(
                "step %d is not finite, %d steps after a local restore; there is no earlier checkpoint to roll back to",
                step,
                step - restored,
            )
            return None
        log.warning(
            "step %d is not finite, %d steps after a local restore: rolling back to step %d",
            step,
            step - restored,
            behind[-1],
        )
        return behind[-1]

    def restore(self, step: int, like: Any) -> tuple[Any, dict[str, Any]]:
        """Restore a checkpoint as the core's checkpointer does. Discard local states, which may be newer."""
        state, extra = super().restore(step, like)
        self._begin_timeline()
        return state, extra

    def restart(self) -> None:
        """See `axlearn_core.contracts.capabilities.OwnsCheckpoints`."""
        super().restart()
        self._begin_timeline()

    def close(self) -> None:
        """Wait for the pending save and end the threads."""
        try:
            self._finish_saves(wait=False) if jax.process_count() == 1 else self._abandon()
        finally:
            self._threads.shutdown()
            super().close()

    def _abandon(self) -> None:
        """Wait for the local save without the other processes, which may have ended."""
        if self._saving is not None:
            self._saving.exception()

    def _restore_checkpoint(self, like: Any) -> tuple[Any, dict[str, Any], int]:
        """Restore the newest intact checkpoint. Set newer, damaged ones aside."""
        while True:
            steps = self._share(self.steps() if jax.process_index() == 0 else [], "restore")
            if not steps:
                raise CheckpointError(
                    f"{self.place.name} has no intact checkpoint\n    fix: restore one from a backup, or start over with --restart"
                )
            problem: AxlearnError | None = None
            try:
                state, extra = super().restore(steps[-1], like)
                return state, extra, steps[-1]
            except (CheckpointError, WorkError) as error:
                problem = error
            if not self._reduce(" is damaged\n" in str(problem), any, "restore"):
                raise problem
            if jax.process_index() == 0:
                aside = f"{steps[-1]}.damaged-{uuid.uuid4().hex[:8]}"
                folder = self.place.folder
                self.place.storage.commit(f"{folder}{steps[-1]}", f"{folder}{aside}")
                log.warning("%s\n    set aside as %s; falling back to the previous checkpoint", problem, aside)

    def _restore_local(self, like: Any, newer_than: int) -> tuple[Any, dict[str, Any], int] | None:
        names = list(flatten(like))
        abstract = abstract_arrays(like, names)
        refused: set[tuple[int, str]] = set()
        tries: dict[tuple[int, str], int] = {}
        while True:
            local = [(p.step, p.attempt) for p in self.parts.find() if p.timeline == self._timeline]
            available = {tuple(c) for c in self._reduce(sorted(set(local)), _newest_candidates, "local restore")}
            candidates = sorted(c for c in available - refused if c[0] > newer_than)
            if not candidates:
                return None
            step, attempt = candidates[-1]
            parts = [p for p in self.parts.find() if (p.step, p.attempt) == candidates[-1]]
            outcome, arrays = self._cover(parts, like, abstract)
            if outcome == "missing":
                refused.add((step, attempt))
                continue
            if outcome == "again":
                tries[step, attempt] = tries.get((step, attempt), 0) + 1
                if tries[step, attempt] > TRIES:
                    refused.add((step, attempt))
                continue
            assert arrays is not None
            parts = [p for p in self.parts.find() if (p.step, p.attempt) == (step, attempt)]
            loaded: dict[str, jax.Array] = {}
            extra: dict[str, Any] = {}
            problem = ""
            try:
                extra = self.parts.read_extra(parts[0])
                loaded = self.parts.read(arrays, abstract)
            except (DamagedError, CheckpointError) as error:
                problem = str(error)
                self._set_aside(parts, problem)
            if not self._reduce(bool(problem), any, "local restore"):
                log.info("restored step %d from the local tier", step)
                return rebuild_state(like, names, loaded), extra, step

    def _cover(self, parts: list[Part], like: Any, abstract: Mapping[str, Any]) -> tuple[str, Any]:
        """Make sure that this machine has all parts that its process needs, and fetch missing parts from other machines.

        Returns:
            (`whole`, arrays) on success, (`missing`, None) if no machine has a needed part, or (`again`, None) if parts were set
            aside.
        """
        needs = list_needs(abstract)
        for _ in range(2):
            arrays: dict[str, Any] = {}
            problem = ""
            try:
                arrays = self.parts.index(parts)
                for part in parts[:1]:
                    check_same(part.step, describe(like), self.parts.inspect(part).arrays, unexpected=True)
            except CheckpointError as error:
                problem = str(error)
                self._set_aside(parts, problem)
            if self._reduce(bool(problem), any, "local restore"):
                return "again", None
            missing = [n for n in needs if not is_covered(n, find_overlaps(n, arrays))]
            rows = self._reduce(part_transfers.as_json(missing), part_transfers.list_missing, "local restore")
            if not rows:
                return "whole", arrays
            missing_needs = {process: part_transfers.from_json(row) for process, row in rows}
            offers = part_transfers.offer_parts(self.parts, parts, missing_needs)
            plan = functools.partial(part_transfers.plan_transfers, missing_needs)
            transfers = self._reduce_transfers(offers, plan, "local restore")
            if transfers is None:
                return "missing", None
            received = part_transfers.send_parts(transfers, self.parts)
            if received:
                log.warning(
                    "process %d received %d bytes of step %d from other machines",
                    jax.process_index(),
                    received,
                    transfers[0].part.step,
                )
            step = transfers[0].part
            parts = [p for p in self.parts.find() if (p.step, p.attempt) == (step.step, step.attempt)]
        return "again", None

    def _set_aside(self, parts: list[Part], problem: str) -> None:
        damaged = [p for p in parts if self.parts.is_damaged(p)]
        for part in damaged or parts:
            aside = self.parts.quarantine(part)
            if aside is not None:
                log.warning("local state of step %d: %s\n    set aside as %s", part.step, problem, aside)

    def _reduce(self, value: Any, reduce: Callable[[list[Any]], Any], name: str) -> Any:
        return reduce_objects(value, reduce, name, self.local.wait_seconds)

    def _reduce_transfers(
        self, value: Any, plan: Callable[[list[Any]], Sequence[part_transfers.Transfer] | None], name: str
    ) -> list[part_transfers.Transfer] | None:
        """Plan transfers on process 0 from the values of all processes."""
        rows = self._reduce(value, lambda values: part_transfers.transfers_as_json(plan(values)), name)
        return part_transfers.transfers_from_json(rows)

    def _share(self, value: Any, name: str) -> Any:
        return share_from_first(value, name, self.local.wait_seconds)

    def _join(self, timeline: str) -> None:
        """Use process 0's attempt and timeline ids on all processes."""
        self._attempt, self._timeline = self._share([uuid.uuid4().hex[:12], timeline], "local tier")

    def _begin_timeline(self) -> None:
        timeline = uuid.uuid4().hex[:12]
        parts = self.parts
        if jax.process_index() == 0:
            text = json.dumps({"timeline": timeline}).encode()
            self.place.storage.write(f"{self.place.folder}{TIMELINE}", [text])
        self._join(timeline)
        parts.delete(p for p in parts.find() if p.timeline != self._timeline)

    def _read_timeline(self) -> str:
        try:
            return str(json.loads(self.place.storage.read(f"{self.place.folder}{TIMELINE}"))["timeline"])
        except MissingFileError:
            return ""
        except (ValueError, KeyError, TypeError):
            return "damaged"  # matches no part


def _newest_candidates(rows: Sequence[Sequence[Sequence[Any]]]) -> list[Any]:
    """Return the newest distinct (step, attempt) pairs of all processes."""
    return sorted({tuple(pair) for row in rows for pair in row})[-CANDIDATES:]
