"""Checkpoints through Orbax: asynchronous, atomic, checked before they are read. The layout is in `manifest`."""

import json
import logging
import shutil
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint.experimental.v1 as ocp
from jax.experimental import multihost_utils

from axlearn_core.checkpoint import manifest, stream
from axlearn_core.checkpoint.manifest import ArrayInfo, Manifest
from axlearn_core.checkpoint.shards import ShardWriter, is_weight
from axlearn_core.checkpoint.storage import LocalStorage, resolve, sync_directory
from axlearn_core.config import Configurable, node, setting
from axlearn_core.errors import CheckpointError, WorkError, nearest
from axlearn_core.learn.paths import flatten, unflatten

log = logging.getLogger(__name__)
TextFiles = Mapping[str, str | Callable[[], str]]
WEIGHTS_ONLY = "weights_only"
"""In `extra`: the checkpoint holds `step`, `params` and `variables` only, and a run begins with them."""


class OrbaxCheckpointer(Configurable):
    """The shipped checkpointer; see `axlearn_core.contracts.parts.Checkpointer`.

    `save` copies the state off the devices and returns; the rest happens in a thread. A checkpoint appears under its
    step in one rename, once everything in it is on the disk, so that a process killed at any moment leaves whole
    checkpoints only. What went wrong in the thread is raised by the next `save` or `wait`.

    Attributes:
        directory: where the checkpoints lie.
        files: text files (or functions that give their text) to put into each checkpoint, by name.
    """

    @node
    class Config(Configurable.Config["OrbaxCheckpointer"]):
        """When to save and what to keep; a checkpoint stays where any of the `keep_` fields wants it.

        Attributes:
            every_steps: a checkpoint is due after each such number of steps.
            keep_last: how many of the newest stay; None keeps all.
            keep_every: those of steps that this divides stay.
            keep_best: how many of those with the best `best_metric` stay.
            best_metric: a name among the metrics given to `save`.
            best_mode: whether small or large values are good.
            uri: where to keep checkpoints instead of the run directory: a path, or a URI that a plugin stores.
        """

        every_steps: int = setting(default=500, ge=1)
        keep_last: int | None = setting(default=3, ge=1)
        keep_every: int | None = setting(default=None, ge=1)
        keep_best: int = setting(default=0, ge=0)
        best_metric: str = "eval_loss"
        best_mode: Literal["min", "max"] = "min"
        uri: str | None = None

    def __init__(self, cfg: Config, *, directory: Path | str):
        self.cfg = cfg
        self.directory = resolve(cfg.uri if cfg.uri is not None else str(directory)).absolute()
        self.files: TextFiles = {}
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: tuple[int, Future[None]] | None = None
        self._restored: int | None = None
        self._opened = False

    def due(self, step: int) -> bool:
        """Whether the policy wants a checkpoint of this step."""
        return step > 0 and step % self.cfg.every_steps == 0

    def steps(self) -> list[int]:
        """All complete steps, oldest first."""
        return manifest.steps(self.directory)

    def latest_step(self) -> int | None:
        """The newest complete step."""
        return max(self.steps(), default=None)

    def inspect(self, step: int) -> Manifest:
        """What a checkpoint holds, without reading arrays."""
        return manifest.inspect(self.directory, step)

    def save(
        self,
        step: int,
        state: Any,
        *,
        extra: Mapping[str, Any] | None = None,
        metrics: Mapping[str, float] | None = None,
    ) -> bool:
        """Starts saving a pytree of arrays, JSON-able `extra` and `files`; False where the step is already there.

        Waits for the save before this one. The state may be donated as soon as this returns.

        Raises:
            WorkError: the save before this one failed, or this one cannot be started; earlier checkpoints are intact.
        """
        self.wait()
        texts = {name: text() if callable(text) else text for name, text in self.files.items()}
        texts[manifest.EXTRA] = json.dumps(dict(extra or {}))
        described = {p: describe(p, x) for p, x in flatten(state).items()}
        arrays = stored(state)
        weights = {p: x for p, x in arrays.items() if is_weight(p)}
        others = {p: x for p, x in arrays.items() if p not in weights}
        items = {**({"weights": ShardWriter(weights)} if weights else {}), **({"state": others} if others else {})}
        partial = self.directory / f".{step}.partial"
        try:
            if jax.process_index() == 0:
                self._open()
                if step not in self.steps():
                    shutil.rmtree(partial, ignore_errors=True)
                    partial.mkdir(parents=True)
            if (self.directory / str(step)).exists():
                return False
            with _context():
                response = ocp.save_checkpointables_async(str(partial / manifest.STATE), items)
        except (OSError, ValueError, TimeoutError) as error:
            raise self._failed(step, error) from error

        def finish() -> None:
            try:
                response.result()
                if jax.process_index() == 0:
                    self._commit(step, partial, described, texts, dict(metrics or {}))
            finally:
                if jax.process_index() == 0 and partial.exists():
                    shutil.rmtree(partial, ignore_errors=True)

        self._pending = step, self._pool.submit(finish)
        return True

    def wait(self) -> None:
        """Blocks until the save under way is complete on every process.

        Raises:
            WorkError: it failed, with the reason.
        """
        if self._pending is None:
            return
        step, future = self._pending
        self._pending = None
        error = future.exception()
        agree(self._failed(step, error) if error else None, error)

    def close(self) -> None:
        """Waits, then ends the thread."""
        try:
            self.wait()
        finally:
            self._pool.shutdown()

    def restore(self, step: int, like: Any) -> tuple[Any, dict[str, Any]]:
        """(state, extra) of a step. Shapes, dtypes and shardings are those of `like`, which may be abstract.

        A checkpoint of weights only leaves the learner, the objective and the random key as they are in `like`.

        Raises:
            CheckpointError: no such step; a damaged file; or arrays that are missing, unexpected or of another shape.
        """
        stored = self._verified(step)
        extra = json.loads((self.directory / str(step) / manifest.EXTRA).read_text(encoding="utf-8"))
        wanted = {p: describe(p, x) for p, x in flatten(like).items()}
        if extra.get(WEIGHTS_ONLY):
            parts = ("step", "params", "variables")
            wanted = {
                p: x for p, x in wanted.items() if p.split(".")[0] in parts and p.split(".")[1:2] != ["objective"]
            }
        stored = stored.migrated(wanted)
        _check_same(step, wanted, stored.arrays, unexpected=True)
        state = self._load(stored, like, list(wanted))
        self._restored = step
        return state, extra

    def _verified(self, step: int) -> Manifest:
        # Before any process enters a collective restore: one that fails in the middle would leave the others waiting.
        error: CheckpointError | None = None
        if jax.process_index() == 0:
            try:
                manifest.verify(self.directory, step)
            except CheckpointError as caught:
                error = caught
        agree(error, error)
        return self.inspect(step)

    def _load(self, found: Manifest, like: Any, names: list[str]) -> Any:
        flat = flatten(like)
        leaves = {p: flat[p] for p in names}
        abstract = {p: _abstract(x) for p, x in leaves.items() if np.prod(x.shape)}
        paths = {p: found.arrays[p].path for p in abstract}
        empty = {p: jnp.zeros(x.shape, x.dtype) for p, x in leaves.items() if not np.prod(x.shape)}
        try:
            storage, root = LocalStorage(self.directory), f"{found.step}/"
            index = stream.read_index(storage, root, found.files)
            weights = {p: index[paths[p]] for p in abstract if paths[p] in index}
            places = {p: abstract[p].sharding for p in weights}
            # Without hashes: `_verified` compared those of all files.
            loaded = dict(stream.read_arrays(storage, root + manifest.WEIGHTS, weights, places, verify=False))
        except stream.DamagedError as error:
            raise manifest.damaged(self.directory, found.step, [str(error)], self.steps()) from error
        others = {paths[p]: x for p, x in abstract.items() if p not in loaded}
        others = read_orbax(self.directory / str(found.step), others)
        loaded |= {p: others[paths[p]] for p in abstract if p not in loaded}
        loaded = {p: x if paths[p] == p else x.astype(abstract[p].dtype) for p, x in loaded.items()}
        keys = {p: jax.random.wrap_key_data(loaded[p], impl=_impl(x)) for p, x in leaves.items() if is_key(x)}
        return unflatten(like, {**empty, **loaded, **keys})

    def _open(self) -> None:
        """Before the first save: removes what was cut off, and sets aside what a rollback left ahead."""
        if self._opened:
            return
        self.directory.mkdir(parents=True, exist_ok=True)
        for path in self.directory.glob(".*"):
            if path.name.endswith((".partial", ".deleted")) and path.name.split(".")[1].isdecimal():
                shutil.rmtree(path)
        for step in self.steps():
            if self._restored is not None and step > self._restored:
                aside = self.directory / f"{step}.superseded-{int(time.time())}"
                (self.directory / str(step)).rename(aside)
                log.warning(
                    "the run goes on from step %d: the checkpoint of step %d is now %s", self._restored, step, aside
                )
        self._opened = True

    def _commit(
        self,
        step: int,
        partial: Path,
        arrays: dict[str, ArrayInfo],
        texts: Mapping[str, str],
        metrics: dict[str, float],
    ) -> None:
        for name, text in texts.items():
            (partial / name).write_text(text, encoding="utf-8")
        created = datetime.now(UTC).isoformat(timespec="seconds")
        manifest.write(partial, step=step, arrays=arrays, metrics=metrics, created=created)
        partial.rename(self.directory / str(step))
        sync_directory(self.directory)
        for old in self._unwanted():
            path = self.directory / str(old)
            shutil.rmtree(path.rename(path.with_name(f".{old}.deleted")))

    def _unwanted(self) -> list[int]:
        cfg, known = self.cfg, self.steps()
        if cfg.keep_last is None:
            return []
        keep = set(known[-cfg.keep_last :])
        if cfg.keep_every is not None:
            keep |= {s for s in known if s % cfg.keep_every == 0}
        if cfg.keep_best:
            values = {s: self.inspect(s).metrics.get(cfg.best_metric) for s in known}
            scored = [(v if cfg.best_mode == "min" else -v, s) for s, v in values.items() if v is not None]
            if not scored:
                log.warning("no checkpoint has the metric %r that checkpointer.keep_best goes by", cfg.best_metric)
            keep |= {s for _, s in sorted(scored)[: cfg.keep_best]}
        return [s for s in known if s not in keep]

    def _failed(self, step: int, error: BaseException) -> WorkError:
        kept = ", ".join(map(str, self.steps())) or "none"
        reason = (getattr(error, "strerror", None) or str(error) or type(error).__name__).splitlines()[0]
        return WorkError(
            f"the checkpoint of step {step} could not be written to {self.directory}: {reason}\n"
            f"    intact: {kept}\n    fix: free space or make the directory writable, then run the same command again"
        )


def read_orbax(checkpoint: Path, abstract: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
    """Arrays by dotted path, in the shardings of `abstract`, of those that Orbax keeps in a checkpoint's directory."""
    if not abstract:
        return {}
    with _context(partial=True):
        return ocp.load(str(checkpoint / manifest.STATE), {p: _abstract(x) for p, x in abstract.items()})


def describe(path: str, leaf: Any) -> ArrayInfo:
    """The shape and dtype of a leaf, which may be abstract.

    Raises:
        CheckpointError: it is no array that JAX holds as it is.
    """
    dtype = getattr(leaf, "dtype", None)
    if dtype is None or not (is_key(leaf) or jax.dtypes.canonicalize_dtype(dtype) == dtype):
        raise CheckpointError(f"{path}: a checkpoint holds JAX arrays, not {type(leaf).__name__} {dtype or repr(leaf)}")
    return ArrayInfo(path, tuple(leaf.shape), str(dtype))


def stored(state: Any) -> dict[str, jax.Array]:
    """The arrays that Orbax gets: by dotted path, random keys as their data, without those that have no elements."""
    flat = flatten(state)
    if len(flat) != len(jax.tree.leaves(state)):
        raise CheckpointError("two leaves of the state have the same dotted path")
    values = {p: jax.random.key_data(x) if is_key(x) else jnp.asarray(x) for p, x in flat.items()}
    return {p: x for p, x in values.items() if x.size}


def is_key(leaf: Any) -> bool:
    """Whether a leaf is a typed random key (or stands for one)."""
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _impl(leaf: Any) -> Any:
    found = []  # `key_impl` takes keys, and a traced one where there is only a shape
    jax.eval_shape(lambda key: found.append(jax.random.key_impl(key)), jax.ShapeDtypeStruct(leaf.shape, leaf.dtype))
    return found[0]


def _abstract(leaf: Any) -> jax.ShapeDtypeStruct:
    sharding = getattr(leaf, "sharding", None) or jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    if is_key(leaf):
        leaf = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(leaf.shape, leaf.dtype))
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _check_same(
    step: int, wanted: Mapping[str, ArrayInfo], there: Mapping[str, ArrayInfo], *, unexpected: bool
) -> None:
    problems = []
    for path, info in wanted.items():
        if path not in there:
            close = nearest(path, there, limit=1)
            problems.append(f"missing: {path} {info}" + (f" (nearest there: {close[0]})" if close else ""))
        elif not _is_same(there[path], info):
            problems.append(f"differs: {path}: the checkpoint has {there[path]}, expected {info}")
    if unexpected:
        problems += [f"unexpected: {path} {info}" for path, info in there.items() if path not in wanted]
    if problems:
        more = [f"and {len(problems) - 20} more"] if len(problems) > 20 else []
        listed = "\n".join(f"    {p}" for p in [*problems[:20], *more])
        raise CheckpointError(
            f"the checkpoint of step {step} is of another model or optimizer\n{listed}\n"
            "    fix: use the config that it was written with, or another run directory"
        )


def _is_same(there: ArrayInfo, wanted: ArrayInfo) -> bool:
    """An array that an earlier version stored under another path may have another dtype."""
    return there.shape == wanted.shape and (there.dtype == wanted.dtype or there.path != wanted.path)


def agree(mine: Exception | None, cause: BaseException | None) -> None:
    """Raises on every process where any process has an error, so that none goes on alone."""
    if jax.process_count() > 1:
        flags = np.asarray(multihost_utils.process_allgather(np.asarray(mine is not None)))
        if mine is None and flags.any():
            failed = ", ".join(str(i) for i in np.flatnonzero(flags))
            raise WorkError(f"a checkpoint failed on process {failed}; see its error")
    if mine is not None:
        raise mine from (cause if cause is not mine else None)


def _context(*, partial: bool = False) -> ocp.Context:
    context = ocp.Context()
    # Otherwise a directory that cannot be created shows after minutes, as a signal that nobody sent.
    context.asynchronous.create_directories_asynchronously = False
    context.array.saving.enable_write_sharding_file = False  # shardings come from the reader
    context.array.saving.use_compression = False  # trained weights shrink by a few percent, and it takes twice as long
    context.pytree.loading.partial_load = partial
    return context
