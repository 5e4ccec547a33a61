"""The `orbax` component: a checkpointer that stores arrays with Orbax, and adds the core's manifest and hashes."""

import json
import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import jax
from jax.sharding import NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from axlearn_core.checkpoint.base import WEIGHTS_ONLY, StorageCheckpointer
from axlearn_core.checkpoint.manifest import NON_WEIGHTS, STATE, WEIGHTS, ArrayInfo, Checkpoints, Index, Manifest
from axlearn_core.checkpoint.retention import rank_steps
from axlearn_core.checkpoint.shards import is_weight
from axlearn_core.checkpoint.state import agree
from axlearn_core.config import node, setting
from axlearn_core.errors import CheckpointError, Problem, RequestError, StorageError
from axlearn_plugins_orbax.file_names import METADATA
from axlearn_plugins_orbax.foreign import ForeignSteps, locate
from axlearn_plugins_orbax.hashes import (
    FAILED,
    HASHES,
    collect_hashes,
    hash_share,
    list_hashes,
    mark_failure,
    split_files,
)
from axlearn_plugins_orbax.trees import OrbaxTrees

log = logging.getLogger(__name__)
T = TypeVar("T")
ITEMS = {folder: folder.removeprefix(f"{STATE}/").rstrip("/") for folder in (WEIGHTS, NON_WEIGHTS)}
"""Name of Orbax's item by folder in a checkpoint."""
DATABASE = "manifest.ocdbt"
"""File of an item that Orbax uses to find the arrays of all processes."""
SPECIAL = "Orbax loses or misplaces arrays if a path contains glob or URL characters"


class OrbaxCheckpointer(StorageCheckpointer):
    """A checkpointer that writes and reads arrays with Orbax, on local paths and `gs://`.

    Each step has an Orbax checkpoint in `state/`, with a `weights` item for the arrays of the model and an `others` item for the
    remaining arrays. When Orbax has finished, each process hashes a share of the files, and the manifest records all hashes. A
    restore first compares the hashes. Steps that plain Orbax wrote are also readable, but their files cannot be verified.

    Orbax's policies decide which steps to save and which to preserve.
    """

    layout_file = f"{STATE}/{METADATA}"

    @node
    class Config(StorageCheckpointer.Config):
        """Settings for `StorageCheckpointer` and for Orbax's array storage.

        Attributes:
            ocdbt: Store all arrays in one database. If False, store each array in a folder.
            zarr3: Use version 3 of the zarr format. If False, use version 2.
            compression: Compress with zstd. Trained weights barely shrink, and a save takes several times as long.
            max_host_bytes: Limit on copies of arrays in host memory, in bytes. `save` waits for memory. None copies everything at
                once.
            timeout_seconds: Time limit for a save. A save that takes longer fails.
        """

        ocdbt: bool = True
        zarr3: bool = True
        compression: bool = False
        max_host_bytes: int | None = setting(default=None, ge=1, hide_default=True)
        timeout_seconds: int = setting(default=1200, ge=1, hide_default=True)

        def validate(self) -> Iterable[Problem]:
            """Yield a problem if Orbax does not support `uri`."""
            scheme, separator, _ = (self.uri or "").partition("://")
            fix = "set checkpointer.type=sharded, which supports every storage"
            if separator and scheme not in ("gs", "file"):
                yield Problem(
                    path="uri",
                    message="Orbax supports only local paths and gs://",
                    got=f"{scheme}://",
                    expected="a path, file:// or gs://",
                    fix=fix,
                )
            elif characters := _special_characters(self.uri or ""):
                yield Problem(
                    path="uri",
                    message=SPECIAL,
                    got=", ".join(characters),
                    expected="a name without these characters",
                    fix=f"rename it, or {fix}",
                )

    def __init__(self, cfg: Config, *, directory: Path | str):
        super().__init__(cfg, directory=directory)
        if characters := _special_characters(locate(self.place, self.place.folder)):
            raise RequestError(
                f"{self.place.name}: {SPECIAL}\n    got: {', '.join(characters)}\n    fix: use a name without these characters"
            )
        from axlearn_plugins_orbax import compat

        self._compat = compat
        self._format = compat.ArrayFormat(
            ocdbt=cfg.ocdbt,
            zarr3=cfg.zarr3,
            compression=cfg.compression,
            max_host_bytes=cfg.max_host_bytes,
            timeout_seconds=cfg.timeout_seconds,
        )
        self._foreign = ForeignSteps(self.place)
        # The last failed save as (step, function that waits for it), because Orbax may still be writing.
        self._failed_save: tuple[int, Callable[[Callable[[], object]], None]] | None = None

    def due(self, step: int) -> bool:
        """Return True if Orbax's fixed-interval policy saves this step."""
        return step > 0 and self._compat.is_due(self.cfg.every_steps, step)

    def steps(self) -> list[int]:
        """Return all complete steps, oldest first, including those that plain Orbax wrote."""
        return sorted({*self.place.steps(), *self._foreign.steps()})

    def inspect(self, step: int) -> Manifest:
        """Read the manifest of a checkpoint, without arrays. The manifest of a plain Orbax step lists no files."""
        return self._foreign.describe(step) if self._foreign.has(step) else self.place.inspect(step)

    def read_extra(self, step: int) -> dict[str, Any]:
        """See `StorageCheckpointer.read_extra`. A plain Orbax step has at most the `WEIGHTS_ONLY` key."""
        if not self._foreign.has(step):
            return super().read_extra(step)
        parts = {path.partition(".")[0] for path in self.inspect(step).arrays}
        return {WEIGHTS_ONLY: True} if parts <= {"step", "params", "variables"} else {}

    def reader(self, checkpoint: Manifest) -> "OrbaxReader":
        """Open a checkpoint to read its arrays. Log a note for a plain Orbax step."""
        if not checkpoint.files:
            log.warning(
                "note: step %d in %s has no manifest: its files cannot be verified, and its data position is unknown",
                *(checkpoint.step, self.place.name),
            )
        return OrbaxReader(self.place, checkpoint)

    def _list_expired_steps(self, manifests: Mapping[int, Manifest]) -> list[int]:
        cfg = self.cfg
        assert cfg.keep_last is not None
        preserved = self._compat.preserved_steps(
            list(manifests), rank_steps(cfg, manifests), last=cfg.keep_last, every=cfg.keep_every, best=cfg.keep_best
        )
        return sorted(manifests.keys() - preserved)

    def _copy(self, step: int, arrays: Mapping[str, jax.Array]) -> Callable[[], None]:
        folder = f"{self._staging(step)}/"
        trees = {ITEMS[f]: {p: _global(x) for p, x in arrays.items() if _folder(p) == f} for f in ITEMS}
        try:
            finish = self._compat.start_save(
                locate(self.place, folder + STATE), {name: tree for name, tree in trees.items() if tree}, self._format
            ).finish
        except Exception as error:  # any error from Orbax: report it like an error during the save
            finish = _raiser(error)

        def write() -> None:
            storage = self.place.storage
            try:
                finish((lambda: list_hashes(storage, folder)) if jax.process_count() > 1 else (lambda: None))
                hashes = hash_share(storage, folder)
            except BaseException as error:
                self._failed_save = step, finish
                mark_failure(storage, folder, error)
                raise
            storage.write(f"{folder}{HASHES}/{jax.process_index()}.json", [json.dumps(hashes).encode()])

        return write

    def _begin(self, step: int) -> bool:
        failed_save, self._failed_save = self._failed_save, None
        if failed_save is not None and failed_save[0] == step:  # both saves would write to the same folder
            with suppress(Exception):  # already reported
                failed_save[1](lambda: None)
        agree(None, None)  # wait for all processes before process 0 empties the folder
        return super()._begin(step)

    def _discard(self, folder: str) -> None:
        """Delete the files of a failed save, unless Orbax may still be writing them on some process.

        A write into a folder that was deleted waits until the folder exists again. It would then end up in the next save of
        the step. Such files are deleted when the step is saved again, after Orbax has ended, or when the run is opened again.
        """
        try:
            files = self.place.storage.list(f"{folder}/{HASHES}/")
        except StorageError as error:
            log.warning("cannot look for other processes of a failed save: %s", error)
            return
        if not any(file.path.endswith(FAILED) for file in files):  # see `mark_failure`
            super()._discard(folder)

    def _collect_files(self, folder: str) -> tuple[dict[str, dict[str, Any]], Index | None]:
        files = collect_hashes(self.place.storage, folder, jax.process_count())
        listed = {f.path.removeprefix(folder): f.bytes for f in self.place.storage.list(f"{folder}{STATE}/")}
        if {n: f["bytes"] for n, f in files.items()} != listed:
            raise StorageError("the processes do not see the same files; is the storage shared between them?")
        if self._format.ocdbt:
            for item in ITEMS:
                if any(n.startswith(item) for n in files) and f"{item}{DATABASE}" not in files:
                    raise StorageError(f"Orbax did not merge the arrays in {item}")
        return files, None

    def _verify_step(self, step: int) -> Manifest:
        """Verify the files other than arrays on process 0. All processes raise an error if any is damaged."""
        error: CheckpointError | None = None
        checkpoint: Manifest | None = None
        try:
            checkpoint = self.inspect(step)
            if checkpoint.files:
                self._check_layout(checkpoint)
                if jax.process_index() == 0:
                    names = [n for n in checkpoint.files if not n.startswith(tuple(ITEMS))]
                    self.place.verify(step, pieces=False, names=names)
        except CheckpointError as caught:
            error = caught
        agree(error, error)
        assert checkpoint is not None
        return checkpoint


class OrbaxReader:
    """Reads the arrays of one checkpoint. See `axlearn_core.checkpoint.base.ArrayReader`.

    Args:
        place: Folder of the checkpoints.
        manifest: Manifest of the checkpoint. For a plain Orbax step, it lists no files.
    """

    def __init__(self, place: Checkpoints, manifest: Manifest):
        self.place, self.manifest = place, manifest

    def read(self, shardings: Mapping[str, Sharding | None]) -> dict[str, jax.Array]:
        """Read arrays by their paths in the manifest. A sharding of None uses the default device.

        First the processes compare the hashes of all files that may contain the arrays. Each process hashes a share of the files.

        Raises:
            CheckpointError: A file is damaged. Raised on every process.
        """
        infos = {path: self.manifest.arrays[path] for path in shardings}
        folders = {_folder(info.path) for info in infos.values()}
        self._call_on_all(lambda: self._verify(folders))
        return self._call_on_all(lambda: self._load(infos, shardings))

    def _verify(self, folders: Collection[str]) -> None:
        sizes = {n: f["bytes"] for n, f in self.manifest.files.items() if n.startswith(tuple(folders))}
        if sizes:
            self.place.verify(self.manifest.step, pieces=False, names=split_files(sizes))

    def _load(self, infos: Mapping[str, ArrayInfo], shardings: Mapping[str, Sharding | None]) -> dict[str, jax.Array]:
        if not infos:
            return {}
        root, default = f"{self.place.folder}{self.manifest.step}", SingleDeviceSharding(jax.local_devices()[0])
        if self.manifest.files:
            items = sorted({ITEMS[_folder(info.path)] for info in infos.values()})
            trees = OrbaxTrees.open(locate(self.place, f"{root}/{STATE}"), items)
        else:
            trees = OrbaxTrees.open(locate(self.place, root))
        stored = trees.arrays()
        if missing := [info.path for info in infos.values() if info.path not in stored]:
            raise CheckpointError(f"Orbax cannot find the array {missing[0]} in {trees.path}")
        like = {
            info.path: jax.ShapeDtypeStruct(
                stored[info.path].shape, stored[info.path].dtype, sharding=shardings[path] or default
            )
            for path, info in infos.items()
        }
        loaded = trees.read(like)
        return {path: loaded[info.path] for path, info in infos.items()}

    def _call_on_all(self, call: Callable[[], T]) -> T:
        """Call a function. If it raises `CheckpointError` on one process, raise an error on all processes."""
        error: CheckpointError | None = None
        result: Any = None
        try:
            result = call()
        except CheckpointError as caught:
            error = caught
        agree(error, error)
        return result


def _special_characters(path: str) -> list[str]:
    """Return the characters of a path or URI that Orbax interprets as glob or URL syntax."""
    special = "[]*?#;" if path.startswith("gs://") else "[]*?"
    return sorted(set(special) & set(path))


def _folder(path: str) -> str:
    return WEIGHTS if is_weight(path) else NON_WEIGHTS


def _global(array: jax.Array) -> jax.Array:
    """Replicate an array over all devices of the job, as Orbax requires, if each process has its own copy."""
    if jax.process_count() == 1 or not array.is_fully_addressable:
        return array
    replicated = NamedSharding(jax.make_mesh((jax.device_count(),), ("all",)), PartitionSpec())
    return jax.make_array_from_process_local_data(replicated, jax.device_get(array), array.shape)


def _raiser(error: Exception) -> Callable[[Callable[[], object]], None]:
    def fail(check: Callable[[], object]) -> None:
        raise error

    return fail
