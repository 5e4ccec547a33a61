"""The component `orbax`: a checkpointer that leaves arrays to Orbax, with the core's manifest and hashes beside them."""

import json
import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import jax
from jax.sharding import NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from axlearn_core.checkpoint.base import WEIGHTS_ONLY, StorageCheckpointer
from axlearn_core.checkpoint.manifest import NON_WEIGHTS, STATE, WEIGHTS, ArrayInfo, Checkpoints, Manifest
from axlearn_core.checkpoint.retention import BEGUN, rank_steps
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
"""Folder in a checkpoint -> name of Orbax's item in it."""
DATABASE = "manifest.ocdbt"
"""The file of an item by which Orbax finds the arrays of all processes."""
SPECIAL = "Orbax loses or misplaces arrays if a path has a character of patterns or of URLs"


class OrbaxCheckpointer(StorageCheckpointer):
    """A checkpointer whose arrays Orbax writes and reads, on local paths and `gs://`.

    A step has Orbax's checkpoint in `state/`: an item `weights` with the arrays of the model, and an item `others`. Once Orbax
    is done, the processes hash its files together, and the manifest is written over all of them. A restore compares the hashes
    first. Steps that plain Orbax wrote are readable too; nothing can verify their files.

    Orbax's policies decide what is due and what is preserved.
    """

    layout_file = f"{STATE}/{METADATA}"

    @node
    class Config(StorageCheckpointer.Config):
        """The fields of `StorageCheckpointer`, and how Orbax stores arrays.

        Attributes:
            ocdbt: keeps all arrays in one database. Otherwise each array has a folder.
            zarr3: writes version 3 of the zarr format, otherwise version 2.
            compression: compresses with zstd. Trained weights barely shrink, and a save takes several times as long.
            max_host_bytes: limit on copies of arrays in host memory. `save` waits for room. None copies everything at once.
            timeout_seconds: limit on a save. One that takes longer fails.
        """

        ocdbt: bool = True
        zarr3: bool = True
        compression: bool = False
        max_host_bytes: int | None = setting(default=None, ge=1, hide_default=True)
        timeout_seconds: int = setting(default=1200, ge=1, hide_default=True)

        def validate(self) -> Iterable[Problem]:
            """Refuses a `uri` that Orbax cannot reach."""
            scheme, separator, _ = (self.uri or "").partition("://")
            fix = "set checkpointer.type=sharded, which takes every storage"
            if separator and scheme not in ("gs", "file"):
                yield Problem(
                    path="uri",
                    message="Orbax keeps checkpoints at paths and gs:// only",
                    got=f"{scheme}://",
                    expected="a path, file:// or gs://",
                    fix=fix,
                )
            elif wrong := _special_characters(self.uri or ""):
                yield Problem(
                    path="uri",
                    message=SPECIAL,
                    got=", ".join(wrong),
                    expected="a name without them",
                    fix=f"rename it, or {fix}",
                )

    def __init__(self, cfg: Config, *, directory: Path | str):
        super().__init__(cfg, directory=directory)
        if wrong := _special_characters(locate(self.place, self.place.folder)):
            raise RequestError(
                f"{self.place.name}: {SPECIAL}\n    got: {', '.join(wrong)}\n    fix: give a name without them"
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
        # The last save that failed, as (step, what waits for it): Orbax may still be busy with it.
        self._left: tuple[int, Callable[[Callable[[], object]], None]] | None = None

    def due(self, step: int) -> bool:
        """Says whether Orbax's policy of fixed intervals saves this step."""
        return step > 0 and self._compat.is_due(self.cfg.every_steps, step)

    def steps(self) -> list[int]:
        """All complete steps, oldest first; those that plain Orbax wrote are among them."""
        return sorted({*self.place.steps(), *self._foreign.steps()})

    def inspect(self, step: int) -> Manifest:
        """Reads the manifest of a checkpoint, and no arrays. That of a step of plain Orbax lists no files."""
        return self._foreign.describe(step) if self._foreign.has(step) else self.place.inspect(step)

    def read_extra(self, step: int) -> dict[str, Any]:
        """See `StorageCheckpointer.read_extra`. For a step of plain Orbax, says at most that it has weights only."""
        if not self._foreign.has(step):
            return super().read_extra(step)
        parts = {path.partition(".")[0] for path in self.inspect(step).arrays}
        return {WEIGHTS_ONLY: True} if parts <= {"step", "params", "variables"} else {}

    def reader(self, checkpoint: Manifest) -> "OrbaxReader":
        """Opens a checkpoint to read its arrays. A step of plain Orbax works too, with a note."""
        if not checkpoint.files:
            log.warning(
                "note: step %d in %s has no manifest, so its files cannot be verified, and the position in the data is unknown",
                *(checkpoint.step, self.place.name),
            )
        return OrbaxReader(self.place, checkpoint)

    def _unwanted_steps(self, manifests: Mapping[int, Manifest]) -> list[int]:
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
        except (
            Exception
        ) as error:  # of the file system, of Orbax or of TensorStore: the save fails like one that failed later
            finish = _raiser(error)

        def write() -> None:
            storage = self.place.storage
            try:
                finish((lambda: list_hashes(storage, folder)) if jax.process_count() > 1 else (lambda: None))
                hashes = hash_share(storage, folder)
            except BaseException as error:
                self._left = step, finish
                mark_failure(storage, folder, error)
                raise
            storage.write(f"{folder}{HASHES}/{jax.process_index()}.json", [json.dumps(hashes).encode()])

        return write

    def _begin(self, step: int) -> bool:
        left, self._left = self._left, None
        if left is not None and left[0] == step:  # both would write to the same folder
            with suppress(Exception):  # was reported already
                left[1](lambda: None)
        agree(None, None)  # the first process empties the folder next
        return super()._begin(step)

    def _discard(self, folder: str) -> None:
        """Deletes the files of a save that failed, except those that say whose it was and why it failed.

        Those are needed if Orbax still writes there, on this process or on another one, which has yet to learn of the failure.
        They stay until the step is saved again, or the run is opened again.
        """
        storage, marks = self.place.storage, {}
        try:
            if failed := [f.path for f in storage.list(f"{folder}/{HASHES}/") if f.path.endswith(FAILED)]:
                marks = {path: storage.read(path) for path in (f"{folder}/{BEGUN}", *failed)}
            super()._discard(folder)
            for path, content in marks.items():
                storage.write(path, [content])
        except StorageError as error:
            log.warning("a save that failed could not be marked: %s", error)

    def _collect_files(self, folder: str) -> dict[str, dict[str, Any]]:
        files = collect_hashes(self.place.storage, folder, jax.process_count())
        listed = {f.path.removeprefix(folder): f.bytes for f in self.place.storage.list(f"{folder}{STATE}/")}
        if {n: f["bytes"] for n, f in files.items()} != listed:
            raise StorageError("the processes do not see the same files; is the storage shared between them?")
        if self._format.ocdbt:
            for item in ITEMS:
                if any(n.startswith(item) for n in files) and f"{item}{DATABASE}" not in files:
                    raise StorageError(f"Orbax did not merge the arrays in {item}")
        return files

    def _verify_step(self, step: int) -> Manifest:
        """Compares the files that are not of arrays with the manifest, on the first process. All processes agree."""
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
    """The arrays of one checkpoint; see `axlearn_core.checkpoint.base.ArrayReader`.

    Args:
        place: the folder of checkpoints.
        manifest: of the checkpoint; without files for a step of plain Orbax.
    """

    def __init__(self, place: Checkpoints, manifest: Manifest):
        self.place, self.manifest = place, manifest

    def read(self, shardings: Mapping[str, Sharding | None]) -> dict[str, jax.Array]:
        """The arrays at some paths of the manifest, in their shardings (None: the default device).

        Compares first the hashes of all files that the arrays may lie in, each process a share of them.

        Raises:
            CheckpointError: a file is damaged, on this process or on another one.
        """
        infos = {path: self.manifest.arrays[path] for path in shardings}
        folders = {_folder(info.path) for info in infos.values()}
        self._together(lambda: self._verify(folders))
        return self._together(lambda: self._load(infos, shardings))

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
        if lacking := [info.path for info in infos.values() if info.path not in stored]:
            raise CheckpointError(f"Orbax finds no array {lacking[0]} in {trees.path}")
        like = {
            info.path: jax.ShapeDtypeStruct(
                stored[info.path].shape, stored[info.path].dtype, sharding=shardings[path] or default
            )
            for path, info in infos.items()
        }
        loaded = trees.read(like)
        return {path: loaded[info.path] for path, info in infos.items()}

    def _together(self, call: Callable[[], T]) -> T:
        """Calls a function; if it fails on one process, all of them raise."""
        error: CheckpointError | None = None
        result: Any = None
        try:
            result = call()
        except CheckpointError as caught:
            error = caught
        agree(error, error)
        return result


def _special_characters(path: str) -> list[str]:
    """The characters of a path or URI that Orbax takes for parts of a pattern or of a URL."""
    special = "[]*?#;" if path.startswith("gs://") else "[]*?"
    return sorted(set(special) & set(path))


def _folder(path: str) -> str:
    return WEIGHTS if is_weight(path) else NON_WEIGHTS


def _global(array: jax.Array) -> jax.Array:
    """The array on all devices of the job, as Orbax wants it; each process holds a copy of what is not split."""
    if jax.process_count() == 1 or not array.is_fully_addressable:
        return array
    everywhere = NamedSharding(jax.make_mesh((jax.device_count(),), ("all",)), PartitionSpec())
    return jax.make_array_from_process_local_data(everywhere, jax.device_get(array), array.shape)


def _raiser(error: Exception) -> Callable[[Callable[[], object]], None]:
    def fail(check: Callable[[], object]) -> None:
        raise error

    return fail
