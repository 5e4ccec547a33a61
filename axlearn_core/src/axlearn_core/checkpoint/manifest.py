"""What is in a checkpoint, and whether it is whole. Reads no arrays, imports neither JAX nor Orbax.

checkpoints/
  120/
    manifest.json     written last, over everything below: owner, arrays, metrics, size and hash of each file
    extra.json        what was given to `save` in addition to the state
    config.yaml, ...  the run's own text files
    state/weights/    the arrays of the model, in pieces with a hash each (see `shards`)
    state/others/     all other arrays of the training state, in the same way
  .140.partial/       a save that is under way or was cut off; becomes `140` in one rename when it is complete

An object store cannot rename: files are written to `140/` there, and a step without its manifest is not listed.
"""

import hashlib
import json
import os
from collections.abc import Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import attrs

from axlearn_core.checkpoint.storage import LocalStorage
from axlearn_core.contracts.storage import MARKER, Storage
from axlearn_core.errors import CheckpointError, MissingFileError, StorageError
from axlearn_core.plugins.migrations import migrate_arrays

MANIFEST, EXTRA, STATE = MARKER, "extra.json", "state"
WEIGHTS, OTHERS = f"{STATE}/weights/", f"{STATE}/others/"
"""Where arrays lie."""
FORMAT = 3
LAST_READER = "5eb2bae"
"""The last commit of axlearn-core that reads formats 1 and 2."""
_PART = 16 * 2**20


class FormatError(CheckpointError):
    """An intact checkpoint of a format that this version does not read.

    Attributes:
        format: the number in its manifest.
    """

    def __init__(self, subject: str, format: int):
        fix = (
            f"commit {LAST_READER} of axlearn-core reads formats 1 to {FORMAT}; a run that resumes there saves its next "
            f"checkpoint in format {FORMAT}"
            if isinstance(format, int) and format < FORMAT
            else "install the version of axlearn-core that wrote it, or a later one"
        )
        super().__init__(f"{subject} has format {format}\n    expected: format {FORMAT}\n    fix: {fix}")
        self.format = format


@attrs.frozen
class ArrayInfo:
    """One stored array: its dotted path in the files, shape, dtype name (`key<fry>` for random keys)."""

    path: str
    shape: tuple[int, ...]
    dtype: str

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


@attrs.frozen
class Manifest:
    """The contents of one checkpoint.

    Attributes:
        arrays: by dotted path in the training state. An earlier version may have stored one under another path, which is in
            its `ArrayInfo`; see `migrated`.
        files: path -> `bytes`, and `sha256` but for files in pieces, whose hashes are in their index.
        run: the id of the run that wrote it; empty where none is known.
    """

    step: int
    arrays: dict[str, ArrayInfo]
    metrics: dict[str, float]
    files: dict[str, dict[str, Any]]
    created: str = ""
    run: str = ""
    format: int = FORMAT

    @property
    def bytes(self) -> int:
        """The size of all files."""
        return sum(f["bytes"] for f in self.files.values())

    def migrated(self, expected: Collection[str]) -> "Manifest":
        """The manifest with the paths of this version, where arrays that are wanted are missing under theirs."""
        if all(path in self.arrays for path in expected):
            return self
        renamed = migrate_arrays(self.arrays, expected)
        paths = {path: renamed.get(path, path) for path in self.arrays}
        arrays = {to: self.arrays[path] for path, to in paths.items() if to is not None}
        return attrs.evolve(self, arrays=arrays)


@attrs.frozen
class Checkpoints:
    """The checkpoints in a folder of a storage.

    Attributes:
        name: of the place, for people.
        folder: empty, or with a `/` at its end.
    """

    storage: Storage
    name: str
    folder: str = ""

    @classmethod
    def of(cls, place: "Checkpoints | Path | str") -> "Checkpoints":
        """The checkpoints of a local directory."""
        return place if isinstance(place, Checkpoints) else cls(LocalStorage(place), str(place))

    def steps(self) -> list[int]:
        """The steps that have a checkpoint, oldest first. Saves that were cut off are not among them."""
        moves = self.storage.staging("0") != "0"  # then a step without a manifest was complete and is damaged
        parts = (f.path.removeprefix(self.folder).partition("/") for f in self.storage.list(self.folder))
        step_names = {n for n, _, rest in parts if rest == MANIFEST or (moves and rest.startswith(f"{STATE}/"))}
        return sorted(int(n) for n in step_names if n.isdecimal())

    def inspect(self, step: int) -> Manifest:
        """What the checkpoint of a step holds, from its manifest alone.

        Raises:
            CheckpointError: there is no such step, or its manifest is damaged.
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
            raise self.damaged(step, [f"{MANIFEST}: not what was written ({error})"]) from None

    def read_extra(self, step: int) -> dict[str, Any]:
        """Reads what was saved with the state, such as the position in the data.

        Raises:
            CheckpointError: the file is missing or damaged.
        """
        try:
            return json.loads(self.storage.read(f"{self.folder}{step}/{EXTRA}"))
        except (MissingFileError, ValueError) as error:
            raise self.damaged(step, [f"{EXTRA}: {str(error).splitlines()[0]}"]) from None

    def verify(self, step: int, *, pieces: bool = True, names: Collection[str] | None = None) -> Manifest:
        """`inspect`, and compares the size and hash of every file with what was written.

        Args:
            step: which checkpoint.
            pieces: whether to read the arrays too; who reads them next compares their hashes then.
            names: which files of the manifest to compare; None compares all.

        Raises:
            CheckpointError: names each file that differs, and how to go on from the checkpoint before it.
        """
        manifest = self.inspect(step)
        root = f"{self.folder}{step}/"
        whole = {n: f for n, f in manifest.files.items() if "sha256" in f and (names is None or n in names)}
        with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
            problems = [p for p in pool.map(lambda n: _compare(self.storage, root, n, whole[n]), whole) if p]
            if not problems and pieces:
                checks = _piece_checks(self.storage, root, whole)
                problems = [p for p in pool.map(lambda check: _compare_piece(self.storage, root, *check), checks) if p]
        if problems:
            raise self.damaged(step, problems)
        return manifest

    def damaged(self, step: int, problems: list[str]) -> CheckpointError:
        """The error for a checkpoint that is not what was written."""
        before = [s for s in self.steps() if s < step]
        fix = (
            f"`--restore-step {before[-1]}` continues from the checkpoint before it"
            if before
            else "there is no earlier checkpoint; start anew in another run directory"
        )
        lines = [*problems[:8], *([f"and {len(problems) - 8} more"] if len(problems) > 8 else [])]
        listed = "\n".join(f"    {p}" for p in lines)
        return CheckpointError(f"the checkpoint of step {step} in {self.name} is damaged\n{listed}\n    fix: {fix}")


def steps(place: Checkpoints | Path) -> list[int]:
    """See `Checkpoints.steps`."""
    return Checkpoints.of(place).steps()


def inspect(place: Checkpoints | Path, step: int) -> Manifest:
    """See `Checkpoints.inspect`."""
    return Checkpoints.of(place).inspect(step)


def verify(place: Checkpoints | Path, step: int) -> Manifest:
    """See `Checkpoints.verify`."""
    return Checkpoints.of(place).verify(step)


def render(manifest: Manifest) -> bytes:
    """The manifest as a file."""
    body = {
        "format": manifest.format,
        "step": manifest.step,
        "run": manifest.run,
        "created": manifest.created,
        "metrics": manifest.metrics,
        "arrays": {a.path: [list(a.shape), a.dtype] for a in manifest.arrays.values()},
        "files": dict(sorted(manifest.files.items())),
    }
    return json.dumps({"sha256": _digest(body), **body}).encode()


def parse(data: bytes, step: int, place: str) -> Manifest:
    """Parses the manifest of a step.

    Args:
        data: the file.
        step: of the checkpoint.
        place: where the checkpoint is, for messages.

    Raises:
        ValueError, KeyError, TypeError, AttributeError: it is damaged.
        FormatError: it is intact, and of a format that this version does not read.
    """
    body = json.loads(data)
    digest = body.pop("sha256")
    if digest != _digest(body) or body["step"] != step:
        raise ValueError("its checksum or step does not match")
    if body["format"] != FORMAT:
        raise FormatError(f"the checkpoint of step {step} in {place}", body["format"])
    arrays = {p: ArrayInfo(p, tuple(shape), dtype) for p, (shape, dtype) in body["arrays"].items()}
    run = body.get("run", "")
    return Manifest(step, arrays, body["metrics"], body["files"], body["created"], run, body["format"])


def describe(data: bytes) -> dict[str, Any]:
    """Size and hash of a file, as a manifest has them."""
    return {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def _digest(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def hash_file(storage: Storage, path: str, size: int) -> str:
    """The SHA-256 of a file of `size` bytes, read in parts. Raises `StorageError` if the file is missing or shorter."""
    digest, buffer = hashlib.sha256(), memoryview(bytearray(min(size, _PART)))
    for begin in range(0, size, _PART):
        part = buffer[: size - begin]
        storage.read_into(path, begin, part)
        digest.update(part)
    return digest.hexdigest()


def _compare(storage: Storage, root: str, name: str, expected: Mapping[str, Any]) -> str | None:
    """Describes damage of a file; None if its size and hash are as expected. Reads a large file in parts."""
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


def _piece_checks(storage: Storage, root: str, names: Iterable[str]) -> list[tuple[str, int, int, str]]:
    """(file, offset, bytes, hash) of every piece in the indices."""
    from axlearn_core.checkpoint.shards import parse_index  # imports JAX

    checks = []
    for name in names:
        folder = name.rpartition("/")[0] + "/"
        if folder in (WEIGHTS, OTHERS) and name.endswith(".json"):
            for array in parse_index(storage.read(f"{root}{name}")).values():
                checks += [(f"{folder}{p.file}", p.offset, array.piece_bytes(p), p.sha256) for p in array.pieces]
    return checks


def _compare_piece(storage: Storage, root: str, name: str, offset: int, size: int, expected: str) -> str | None:
    data = bytearray(size)
    try:
        storage.read_into(f"{root}{name}", offset, memoryview(data))
    except StorageError as error:
        return f"{name}: {str(error).splitlines()[0]}"
    got = hashlib.sha256(data).hexdigest()
    return None if got == expected else f"{name}: bytes {offset} on: got sha256 {got[:16]}, expected {expected[:16]}"
