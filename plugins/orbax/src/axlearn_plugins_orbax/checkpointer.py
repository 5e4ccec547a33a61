"""The component `orbax`: a checkpointer that leaves arrays to Orbax, with the core's manifest and hashes beside them."""

import json
import logging
import os
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import jax
from jax.sharding import NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from axlearn_core.checkpoint.barrier import PEER_SECONDS
from axlearn_core.checkpoint.base import WEIGHTS_ONLY, StorageCheckpointer
from axlearn_core.checkpoint.manifest import OTHERS, STATE, WEIGHTS, ArrayInfo, Checkpoints, Manifest, hash_file
from axlearn_core.checkpoint.retention import BEGUN, rank_steps
from axlearn_core.checkpoint.shards import is_weight
from axlearn_core.checkpoint.state import agree
from axlearn_core.checkpoint.storage import LocalStorage
from axlearn_core.config import node, setting
from axlearn_core.contracts.storage import Storage
from axlearn_core.errors import CheckpointError, Problem, RequestError, StorageError
from axlearn_plugins_orbax.foreign import METADATA, ForeignSteps, locate
from axlearn_plugins_orbax.trees import OrbaxTrees

log = logging.getLogger(__name__)
T = TypeVar("T")
ITEMS = {folder: folder.removeprefix(f"{STATE}/").rstrip("/") for folder in (WEIGHTS, OTHERS)}
"""Folder in a checkpoint -> name of Orbax's item in it."""
HASHES = "hashes"
"""The folder for what each process hashed, until the first one collects it."""
FAILED = ".failed"
"""Ends the name of the file there that a process writes if its save fails."""


SPECIAL = "Orbax loses or misplaces arrays at gs:// if a name has a character of patterns or of URLs"


class PeerError(StorageError):
    """A save failed on another process."""


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
        if wrong := _special_characters(self.place.name):
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
                hashes = _hash_share(storage, folder)
            except BaseException as error:
                self._left = step, finish
                _mark_failure(storage, folder, error)
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
            self.place.verify(self.manifest.step, pieces=False, names=_share(sizes))

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


def _special_characters(uri: str) -> list[str]:
    """The characters of a URI in `gs://` that Orbax takes for parts of a pattern or of the URI."""
    return sorted(set("[]*?#;") & set(uri)) if uri.startswith("gs://") else []


def _folder(path: str) -> str:
    return WEIGHTS if is_weight(path) else OTHERS


def _global(array: jax.Array) -> jax.Array:
    """The array on all devices of the job, as Orbax wants it; each process holds a copy of what is not split."""
    if jax.process_count() == 1 or not array.is_fully_addressable:
        return array
    everywhere = NamedSharding(jax.make_mesh((jax.device_count(),), ("all",)), PartitionSpec())
    return jax.make_array_from_process_local_data(everywhere, jax.device_get(array), array.shape)


def _share(sizes: Mapping[str, int]) -> list[str]:
    """The files that this process hashes: every process takes as many bytes, to within one file."""
    loads = [0] * jax.process_count()
    shares: list[list[str]] = [[] for _ in loads]
    for name in sorted(sizes, key=lambda n: (-sizes[n], n)):
        lightest = loads.index(min(loads))
        loads[lightest] += sizes[name] + 1
        shares[lightest].append(name)
    return shares[jax.process_index()]


def _hash_share(storage: Storage, folder: str) -> dict[str, dict[str, Any]]:
    """Size and hash of this process's share of Orbax's files below a folder, by their paths in it."""
    files = storage.list(f"{folder}{STATE}/")
    sizes = {f.path.removeprefix(folder): f.bytes for f in files}

    def describe(name: str) -> dict[str, Any]:
        if isinstance(storage, LocalStorage):  # Orbax leaves its own files, though not TensorStore's, to the page cache
            _sync_file(storage.root / folder / name)
        return {"bytes": sizes[name], "sha256": hash_file(storage, f"{folder}{name}", sizes[name])}

    names = _share(sizes)
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        return dict(zip(names, pool.map(describe, names), strict=True))


def _sync_file(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def collect_hashes(
    storage: Storage, folder: str, processes: int, seconds: float = PEER_SECONDS
) -> dict[str, dict[str, Any]]:
    """Waits until every process has hashed its share. Returns the files of all, and deletes what the processes wrote for that.

    Raises:
        StorageError: a process failed, or did not finish in time; it names which.
    """
    deadline, pause = time.monotonic() + seconds, 0.02
    expected = {f"{folder}{HASHES}/{p}.json": p for p in range(processes)}
    while True:
        paths = list_hashes(storage, folder)
        if not (missing := [p for path, p in expected.items() if path not in paths]):
            break
        if time.monotonic() > deadline:
            raise StorageError(f"no hashes of process {', '.join(map(str, missing))} after {seconds:g} s")
        time.sleep(pause)
        pause = min(2 * pause, 1.0)
    files: dict[str, dict[str, Any]] = {}
    for path in expected:
        files |= json.loads(storage.read(path))
    storage.delete(f"{folder}{HASHES}")
    return files


def list_hashes(storage: Storage, folder: str) -> set[str]:
    """The files of hashes that the processes of a save have written so far.

    Args:
        storage: of the save.
        folder: its staging folder, with a `/` at its end.

    Raises:
        PeerError: a process failed; says which, and why.
    """
    paths = {f.path for f in storage.list(f"{folder}{HASHES}/")}
    if failed := sorted(p for p in paths if p.endswith(FAILED)):
        process = failed[0].rpartition("/")[2].removesuffix(FAILED)
        raise PeerError(f"process {process}: {storage.read(failed[0]).decode(errors='replace')}")
    return paths


def _mark_failure(storage: Storage, folder: str, error: BaseException) -> None:
    """Tells the other processes of a save that it failed here, or that Orbax was still writing when its time was over."""
    if isinstance(error, PeerError) or (jax.process_count() == 1 and not isinstance(error, TimeoutError)):
        return
    try:
        storage.write(f"{folder}{HASHES}/{jax.process_index()}{FAILED}", [str(error).encode() or b"?"])
    except StorageError as unwritten:  # the others wait until Orbax gives up
        log.warning("the other processes could not be told that a save failed: %s", unwritten)


def _raiser(error: Exception) -> Callable[[Callable[[], object]], None]:
    def fail(check: Callable[[], object]) -> None:
        raise error

    return fail
