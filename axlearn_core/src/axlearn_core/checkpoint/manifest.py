"""Inspect and verify checkpoints without reading arrays. This module imports neither JAX nor Orbax.

checkpoints/
  120/
    manifest.json     written last: owner, arrays, metrics, the root of the index, and the size and hash of each other small file
    extra.json        the `extra` argument of `save`
    config.yaml, ...  text files of the run
    state/weights/    arrays of the model, as pieces with one hash each (see `shards`)
    state/others/     all other arrays of the training state, in the same format
    state/index/      where each piece is stored (see `piece_index`)
  .140.partial/       a save in progress or interrupted; it is renamed to `140` when it is complete

Object stores cannot rename, so files are written directly to `140/`, and a step without a manifest is not listed.

Format 4 is written for arrays with an index. In format 3, the manifest lists every file, and each process has its own indices.
Checkpoints by Orbax still have format 3.
"""

import hashlib
import json
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import attrs

from axlearn_core.checkpoint.storage import LocalStorage
from axlearn_core.contracts.storage import MARKER, Storage
from axlearn_core.errors import CheckpointError, MissingFileError, StorageError
from axlearn_core.plugins.migrations import migrate_arrays

MANIFEST, EXTRA, STATE = MARKER, "extra.json", "state"
WEIGHTS, NON_WEIGHTS = f"{STATE}/weights/", f"{STATE}/others/"
"""Folders that contain arrays."""
FORMAT, LISTED_FORMAT = 4, 3
"""Format of checkpoints with an index, and of those whose manifest lists every file."""
LAST_READER = "5eb2bae"
"""Last commit of axlearn-core that can read formats 1 and 2."""
_PART = 16 * 2**20


class FormatError(CheckpointError):
    """An intact checkpoint has a format that this version cannot read.

    Attributes:
        format: Format number in the manifest.
    """

    def __init__(self, subject: str, format: int):
        fix = (
            f"commit {LAST_READER} of axlearn-core reads formats 1 to {LISTED_FORMAT}; resume the run with it to save a "
            f"checkpoint in format {LISTED_FORMAT}"
            if isinstance(format, int) and format < LISTED_FORMAT
            else "install the version of axlearn-core that wrote it, or a later one"
        )
        super().__init__(
            f"{subject} has format {format}\n    expected: format {LISTED_FORMAT} or {FORMAT}\n    fix: {fix}"
        )
        self.format = format


@attrs.frozen
class ArrayInfo:
    """A stored array: its dotted path in the files, shape, and dtype name (`key<fry>` for random keys)."""

    path: str
    shape: tuple[int, ...]
    dtype: str

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


Key = tuple[int, str, tuple[int, ...]]
"""Sort key of a piece in an index: the relative position of its cell, the path of its array, and its start."""


@attrs.frozen
class Page:
    """A range of bytes in an index file.

    Attributes:
        first: Smallest key in the page.
        file: Number of the index file.
        offset: Offset in the file, in bytes.
        bytes: Size in bytes.
        sha256: Hash of the bytes.
    """

    first: Key
    file: int
    offset: int
    bytes: int
    sha256: str

    @classmethod
    def from_json(cls, row: Sequence[Any]) -> "Page":
        """Parse the output of `attrs.astuple`."""
        (position, path, start), *rest = row
        return cls((position, path, tuple(start)), *rest)


@attrs.frozen
class IndexedArray:
    """An array in an index, and its grid of cells.

    Attributes:
        shape: Shape of the stored array.
        dtype: Name of the stored array's dtype.
        cell: Size of a cell along each axis.
        reach: Number of further cells along each axis that a piece may extend to.
    """

    shape: tuple[int, ...]
    dtype: str
    cell: tuple[int, ...]
    reach: tuple[int, ...]


@attrs.frozen
class Index:
    """The root of the index of a checkpoint. See `axlearn_core.checkpoint.piece_index`.

    Attributes:
        depth: Number of levels of pages below the root.
        pages: Pages that the root refers to, sorted by `first`.
        arrays: Arrays by path.
        files: Number of files with pieces and pages.
        bytes: Total size of these files in bytes.
    """

    depth: int
    pages: tuple[Page, ...]
    arrays: dict[str, IndexedArray]
    files: int
    bytes: int

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> "Index":
        """Parse the output of `as_json`. Raise `KeyError`, `ValueError`, or `TypeError` if it is damaged."""
        arrays = {
            p: IndexedArray(tuple(shape), dtype, tuple(cell), tuple(reach))
            for p, (shape, dtype, cell, reach) in body["arrays"].items()
        }
        return cls(body["depth"], tuple(map(Page.from_json, body["pages"])), arrays, body["files"], body["bytes"])

    def as_json(self) -> dict[str, Any]:
        """Return the index as JSON values."""
        return {
            "depth": self.depth,
            "files": self.files,
            "bytes": self.bytes,
            "arrays": {p: list(attrs.astuple(x)) for p, x in self.arrays.items()},
            "pages": [attrs.astuple(page) for page in self.pages],
        }


@attrs.frozen
class Manifest:
    """Contents of one checkpoint.

    Attributes:
        arrays: Arrays keyed by dotted path in the training state. `ArrayInfo.path` differs from the key if an earlier version
            stored the array under a different path; see `migrated`.
        files: `bytes` and `sha256` by path, without the files in `index`. In format 3, files that consist of pieces have no hash.
        run: ID of the run that wrote the checkpoint, or empty if unknown.
        index: Root of the index of the arrays. None if `files` contains the files of the arrays.
    """

    step: int
    arrays: dict[str, ArrayInfo]
    metrics: dict[str, float]
    files: dict[str, dict[str, Any]]
    created: str = ""
    run: str = ""
    index: Index | None = None

    @property
    def format(self) -> int:
        """Number of the format."""
        return LISTED_FORMAT if self.index is None else FORMAT

    @property
    def bytes(self) -> int:
        """Total size of all files in bytes."""
        return sum(f["bytes"] for f in self.files.values()) + (self.index.bytes if self.index else 0)

    @property
    def num_files(self) -> int:
        """Number of files, without the manifest."""
        return len(self.files) + (self.index.files if self.index else 0)

    def migrated(self, expected: Collection[str]) -> "Manifest":
        """If expected arrays are missing, rename arrays from earlier versions to their current paths."""
        if all(path in self.arrays for path in expected):
            return self
        renamed = migrate_arrays(self.arrays, expected)
        paths = {path: renamed.get(path, path) for path in self.arrays}
        arrays = {new: self.arrays[path] for path, new in paths.items() if new is not None}
        return attrs.evolve(self, arrays=arrays)


@attrs.frozen
class Checkpoints:
    """The checkpoints in a storage folder.

    Attributes:
        name: Name of the location, for use in error messages.
        folder: Path of the folder in the storage: empty, or ending in `/`.
    """

    storage: Storage
    name: str
    folder: str = ""

    @classmethod
    def from_directory(cls, place: "Checkpoints | Path | str") -> "Checkpoints":
        """Return the checkpoints in a local directory."""
        return place if isinstance(place, Checkpoints) else cls(LocalStorage(place), str(place))

    def steps(self) -> list[int]:
        """Return the steps of complete checkpoints, oldest first."""
        moves = self.storage.staging("0") != "0"  # if so, a step without a manifest was complete and is damaged
        marks = {MANIFEST, STATE} if moves else {MANIFEST}
        steps = (name for name in self.storage.list_names(self.folder) if name.isdecimal())
        return sorted(int(n) for n in steps if marks.intersection(self.storage.list_names(f"{self.folder}{n}/")))

    def inspect(self, step: int) -> Manifest:
        """Read the manifest of a step.

        Raises:
            CheckpointError: If the step does not exist or its manifest is damaged.
        """
        try:
            return parse(self.storage.read(f"{self.folder}{step}/{MANIFEST}"), step, self.name)
        except MissingFileError:
            steps = self.steps()
            if step in steps:
                raise self.damaged(step, [f"{MANIFEST}: No such file or directory"]) from None
            listed = ", ".join(map(str, steps)) or "none"
            raise CheckpointError(
                f"there is no checkpoint of step {step} in {self.name}\n    steps: {listed}"
            ) from None
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise self.damaged(step, [f"{MANIFEST}: is damaged ({error})"]) from None

    def read_extra(self, step: int) -> dict[str, Any]:
        """Read the `extra` data of a step, such as the position in the input.

        Raises:
            CheckpointError: If the file is missing or damaged.
        """
        try:
            return json.loads(self.storage.read(f"{self.folder}{step}/{EXTRA}"))
        except (MissingFileError, ValueError) as error:
            raise self.damaged(step, [f"{EXTRA}: {str(error).splitlines()[0]}"]) from None

    def verify(self, step: int, *, pieces: bool = True, names: Collection[str] | None = None) -> Manifest:
        """Verify the size and hash of every file. Return the manifest.

        Args:
            step: Step of the checkpoint.
            pieces: Also verify arrays. Not needed before reading them, because readers verify the hashes. The index is verified
                in any case, unless `names` is given.
            names: Files in the manifest to verify. None verifies all files.

        Raises:
            CheckpointError: Lists each damaged file and explains how to continue from the previous checkpoint.
        """
        manifest = self.inspect(step)
        root = f"{self.folder}{step}/"
        whole = {n: f for n, f in manifest.files.items() if "sha256" in f and (names is None or n in names)}
        with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
            problems = [p for p in pool.map(lambda n: _compare(self.storage, root, n, whole[n]), whole) if p]
            if not problems and (pieces or (manifest.index is not None and names is None)):
                checks, problems = _piece_checks(self.storage, root, whole, manifest.index, pieces=pieces)
                if pieces and not problems:
                    results = pool.map(lambda check: _compare_piece(self.storage, root, *check), checks)
                    problems = [p for p in results if p]
        if problems:
            raise self.damaged(step, problems)
        return manifest

    def damaged(self, step: int, problems: list[str]) -> CheckpointError:
        """Return the error for a damaged checkpoint."""
        before = [s for s in self.steps() if s < step]
        fix = (
            f"`--restore-step {before[-1]}` continues from the previous checkpoint"
            if before
            else "there is no earlier checkpoint; start again in another run directory"
        )
        lines = [*problems[:8], *([f"and {len(problems) - 8} more"] if len(problems) > 8 else [])]
        listed = "\n".join(f"    {p}" for p in lines)
        return CheckpointError(f"the checkpoint of step {step} in {self.name} is damaged\n{listed}\n    fix: {fix}")


def steps(place: Checkpoints | Path) -> list[int]:
    """See `Checkpoints.steps`."""
    return Checkpoints.from_directory(place).steps()


def inspect(place: Checkpoints | Path, step: int) -> Manifest:
    """See `Checkpoints.inspect`."""
    return Checkpoints.from_directory(place).inspect(step)


def verify(place: Checkpoints | Path, step: int) -> Manifest:
    """See `Checkpoints.verify`."""
    return Checkpoints.from_directory(place).verify(step)


def render(manifest: Manifest) -> bytes:
    """Serialize a manifest."""
    body = {
        "format": manifest.format,
        "step": manifest.step,
        "run": manifest.run,
        "created": manifest.created,
        "metrics": manifest.metrics,
        "arrays": {a.path: [list(a.shape), a.dtype] for a in manifest.arrays.values()},
        "files": dict(sorted(manifest.files.items())),
        **({"index": manifest.index.as_json()} if manifest.index else {}),
    }
    return json.dumps({"sha256": _digest(body), **body}).encode()


def parse(data: bytes, step: int, place: str) -> Manifest:
    """Parse the manifest of a step.

    Args:
        data: Contents of the file.
        step: Step of the checkpoint.
        place: Location of the checkpoint, for use in error messages.

    Raises:
        ValueError, KeyError, TypeError, AttributeError: If the manifest is damaged.
        FormatError: If it is intact but this version cannot read its format.
    """
    body = json.loads(data)
    digest = body.pop("sha256")
    if digest != _digest(body) or body["step"] != step:
        raise ValueError("its checksum or step does not match")
    if body["format"] not in (LISTED_FORMAT, FORMAT):
        raise FormatError(f"the checkpoint of step {step} in {place}", body["format"])
    arrays = {p: ArrayInfo(p, tuple(shape), dtype) for p, (shape, dtype) in body["arrays"].items()}
    run = body.get("run", "")
    index = Index.from_json(body["index"]) if body["format"] == FORMAT else None
    return Manifest(step, arrays, body["metrics"], body["files"], body["created"], run, index)


def describe(data: bytes) -> dict[str, Any]:
    """Return the manifest entry for a file: its size and hash."""
    return {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def _digest(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def hash_file(storage: Storage, path: str, size: int) -> str:
    """Return the SHA-256 of the first `size` bytes of a file. Raise `StorageError` if it is missing or shorter."""
    digest, buffer = hashlib.sha256(), memoryview(bytearray(min(size, _PART)))
    for begin in range(0, size, _PART):
        part = buffer[: size - begin]
        storage.read_into(path, begin, part)
        digest.update(part)
    return digest.hexdigest()


def _compare(storage: Storage, root: str, name: str, expected: Mapping[str, Any]) -> str | None:
    """Describe the damage to a file. Return None if its size and hash are correct."""
    size = expected["bytes"]
    try:
        if size <= _PART:
            data = storage.read(f"{root}{name}")
            actual_size, got = len(data), hashlib.sha256(data).hexdigest()
        else:
            sizes = [f.bytes for f in storage.list(f"{root}{name}") if f.path == f"{root}{name}"]
            if not sizes:
                return f"{name}: No such file or directory"
            actual_size = sizes[0]
            got = hash_file(storage, f"{root}{name}", size) if actual_size == size else ""
    except MissingFileError:
        return f"{name}: No such file or directory"
    except StorageError as error:
        return f"{name}: {str(error).splitlines()[0]}"
    if actual_size != size:
        return f"{name}: got {actual_size} bytes, expected {size}"
    return None if got == expected["sha256"] else f"{name}: got sha256 {got[:16]}, expected {expected['sha256'][:16]}"


def _piece_checks(
    storage: Storage, root: str, names: Iterable[str], index: Index | None, *, pieces: bool
) -> tuple[list[tuple[str, int, int, str]], list[str]]:
    """Return the file, offset, size, and hash of every piece (only if `pieces`), and the problems of the index."""
    from axlearn_core.checkpoint.piece_index import IndexReader  # imports JAX
    from axlearn_core.checkpoint.shards import DamagedError, parse_index

    arrays = []
    if index is not None:
        try:
            reader = IndexReader(storage, root, index)
            arrays += reader.find_all().values() if pieces else ()
            if not pieces:
                reader.verify()
        except DamagedError as error:
            return [], [str(error)]
    else:
        for name in names:
            folder = name.rpartition("/")[0] + "/"
            if folder in (WEIGHTS, NON_WEIGHTS) and name.endswith(".json"):
                arrays += parse_index(storage.read(f"{root}{name}"), folder.removeprefix(f"{STATE}/")).values()
    return [(f"{STATE}/{p.file}", p.offset, x.piece_bytes(p), p.sha256) for x in arrays for p in x.pieces], []


def _compare_piece(storage: Storage, root: str, name: str, offset: int, size: int, expected: str) -> str | None:
    data = bytearray(size)
    try:
        storage.read_into(f"{root}{name}", offset, memoryview(data))
    except StorageError as error:
        return f"{name}: {str(error).splitlines()[0]}"
    got = hashlib.sha256(data).hexdigest()
    return None if got == expected else f"{name}: at byte {offset}: got sha256 {got[:16]}, expected {expected[:16]}"
