"""The node-local tier: frequent checkpoints of the training state on the local machine.

DIRECTORY/RUN/process-0/120/      checkpoint of all shards on process 0's devices, at step 120
    part.json                     its process, attempt and timeline
    manifest.json, state/, ...    as in every checkpoint
DIRECTORY/RUN/process-3/120/      copy from another machine
DIRECTORY/RUN/process-0/.120.damaged-TIME/   set aside because a hash did not match
"""

import contextlib
import json
import math
import os
import re
import shutil
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import jax

from axlearn_core.checkpoint import LocalStorage, manifest, stream
from axlearn_core.checkpoint.manifest import Checkpoints, Manifest
from axlearn_core.checkpoint.shards import Box, DamagedError, StoredArray
from axlearn_core.errors import CheckpointError, RequestError, StorageError

PART = "part.json"
Need = tuple[str, Box]
"""(path, box of the array) that a process must read."""


@attrs.frozen(order=True)
class Part:
    """The shards of one process at one step, stored on this machine.

    Attributes:
        step: Step of the training state.
        attempt: Id of the attempt that wrote the part. Parts with the same step and attempt belong together.
        process: Index of the process that wrote the part.
        timeline: Id of the timeline. It changes when a run rolls back to an earlier step, which invalidates later parts.
    """

    step: int
    attempt: str
    process: int
    timeline: str

    @property
    def folder(self) -> str:
        """Folder below the root of the tier."""
        return f"process-{self.process}/{self.step}"


class LocalParts:
    """The parts of one run on this machine.

    Raises:
        RequestError: The directory cannot be used, or belongs to another user.
    """

    def __init__(self, directory: str, run: str):
        self.root = open_directory(directory) / (run or "run")
        self.storage = LocalStorage(self.root)
        self.excluded: set[Part] = set()

    def place(self, process: int) -> Checkpoints:
        """Return the parts of one process as checkpoints."""
        return Checkpoints(self.storage, str(self.root / f"process-{process}"), f"process-{process}/")

    def find(self) -> list[Part]:
        """Return every complete part, oldest first."""
        parts = []
        for path in self.root.glob(f"process-*/*/{PART}"):
            step, process = path.parent.name, path.parent.parent.name.removeprefix("process-")
            if not (step.isdecimal() and process.isdecimal()):
                continue
            try:
                facts = json.loads(path.read_text())
                parts.append(Part(int(step), facts["attempt"], int(process), facts["timeline"]))
            except (OSError, ValueError, KeyError, TypeError):
                continue  # damaged, or deleted by another process
        return sorted(set(parts) - self.excluded)

    def describe(self, part: Part) -> list[tuple[str, int]]:
        """Return the name and the size in bytes of each file of a part."""
        folder = f"{part.folder}/"
        return [(f.path.removeprefix(folder), f.bytes) for f in self.storage.list(folder)]

    def inspect(self, part: Part) -> Manifest:
        """Return the manifest of a part. Raise `CheckpointError` if it is damaged."""
        return self.place(part.process).inspect(part.step)

    def index(self, parts: Iterable[Part]) -> dict[str, StoredArray]:
        """Merge the array indices of parts. Each box appears once, and file paths are relative to the root.

        Raises:
            CheckpointError: An index or manifest is damaged.
        """
        pieces: dict[str, dict[Any, Any]] = {}
        arrays: dict[str, StoredArray] = {}
        for part in parts:
            try:
                index = stream.ArrayIndex(self.storage, f"{part.folder}/", self.inspect(part)).find_all()
            except DamagedError as error:
                raise CheckpointError(f"{self.root / part.folder}: {error}") from error
            for path, array in index.items():
                arrays[path] = array
                for piece in array.pieces:
                    moved = attrs.evolve(piece, file=f"{part.folder}/{manifest.STATE}/{piece.file}")
                    pieces.setdefault(path, {}).setdefault((piece.start, piece.shape), moved)
        return {p: attrs.evolve(x, pieces=tuple(pieces[p].values())) for p, x in arrays.items() if p in pieces}

    def read(
        self, arrays: Mapping[str, StoredArray], abstract: Mapping[str, jax.ShapeDtypeStruct]
    ) -> dict[str, jax.Array]:
        """Read arrays into the shardings of `abstract`. Raise `DamagedError` if a hash does not match."""
        shardings = {p: x.sharding for p, x in abstract.items()}
        return dict(stream.read_arrays(self.storage, "", {p: arrays[p] for p in abstract}, shardings))

    def read_extra(self, part: Part) -> dict[str, Any]:
        """Return the extra data of a part. Raise `CheckpointError` if it is damaged."""
        name = f"{part.folder}/{manifest.EXTRA}"
        try:
            data = self.storage.read(name)
        except StorageError as error:
            raise CheckpointError(str(error)) from error
        if self.inspect(part).files.get(manifest.EXTRA) != manifest.describe(data):
            raise CheckpointError(f"{self.root / name} is damaged: its hash does not match")
        return json.loads(data)

    def is_damaged(self, part: Part) -> bool:
        """Return True if any hash of a part does not match."""
        try:
            self.place(part.process).verify(part.step)
        except CheckpointError:
            return True
        return False

    def quarantine(self, part: Part) -> Path | None:
        """Set a damaged part aside. Return its new path, or None if another process on this machine has moved it."""
        self.excluded.add(part)
        source = self.root / part.folder
        target = source.with_name(f".{part.step}.damaged-{time.time_ns()}")
        try:
            source.rename(target)
        except OSError:
            return None
        return target

    def delete(self, parts: Iterable[Part]) -> None:
        """Delete parts. Another process on this machine may delete them at the same time."""
        for part in parts:
            self.remove(part.folder)

    def remove(self, folder: str) -> None:
        """Delete a folder below the root. Ignore errors."""
        with contextlib.suppress(StorageError):
            self.storage.delete(folder)

    def clean(self) -> None:
        """Remove partial files left by killed attempts, and all damaged parts except the newest of each process."""
        for folder in self.root.glob("process-*"):
            for path in folder.glob(".*"):
                if re.fullmatch(r"\.\d+\.(partial|deleted|from-\d+)", path.name):
                    shutil.rmtree(path, ignore_errors=True)
            for path in sorted(folder.glob(".*.damaged-*"), key=lambda p: p.name.rpartition("-")[2])[:-1]:
                shutil.rmtree(path, ignore_errors=True)


def open_directory(directory: str) -> Path:
    """Create the directory of a tier if it does not exist, with mode 700. Expand environment variables in its path.

    Raises:
        RequestError: A variable is not set, the directory cannot be created or written, or other users may write to it.
    """
    path = Path(os.path.expandvars(directory)).expanduser()
    fix = "set checkpointer.local.directory to a directory on a local disk or in /dev/shm"
    if "$" in str(path):
        raise RequestError(f"checkpointer.local.directory: a variable in {directory!r} is not set\n    fix: {fix}")
    if "://" in directory:
        raise RequestError(
            f"checkpointer.local.directory: {directory!r} is a URI\n    expected: a local path\n    fix: {fix}"
        )
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = path.stat()
    except OSError as error:
        raise RequestError(f"checkpointer.local.directory: {path}: {error.strerror}\n    fix: {fix}") from error
    if status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise RequestError(
            f"checkpointer.local.directory: others may write to {path}, and training would resume from their files\n"
            f"    got: mode {status.st_mode & 0o777:o}, user {status.st_uid}\n    expected: 700, user {os.geteuid()}\n"
            "    fix: run chmod 700 on it, or set a subdirectory, which is created"
        )
    if not os.access(path, os.W_OK | os.X_OK):
        raise RequestError(f"checkpointer.local.directory: {path} cannot be written\n    fix: {fix}")
    return path.absolute()


def list_needs(abstract: Mapping[str, jax.ShapeDtypeStruct]) -> list[Need]:
    """Return the array boxes on the devices of this process."""
    needs = {}
    for path, spec in abstract.items():
        sharding: Any = spec.sharding
        for index in sharding.addressable_devices_indices_map(spec.shape).values():
            box = tuple(s.indices(n)[:2] for s, n in zip(index, spec.shape, strict=True))
            needs[path, box] = None
    return list(needs)


def find_overlaps(need: Need, arrays: Mapping[str, StoredArray]) -> list[Box]:
    """Return the regions of a need's box that the arrays contain."""
    path, box = need
    if path not in arrays:
        return []
    overlaps = (overlap(piece.box, box) for piece in arrays[path].pieces)
    return [o for o in overlaps if o is not None]


def is_covered(need: Need, boxes: Sequence[Box]) -> bool:
    """Return True if boxes, which must not overlap, cover a need."""
    return sum(map(volume, boxes)) >= volume(need[1])


def overlap(one: Box, other: Box) -> Box | None:
    """Return the intersection of two boxes, or None if they do not overlap."""
    both = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return None if any(a >= b for a, b in both) else both


def volume(box: Box) -> int:
    """Return the number of elements in a box."""
    return math.prod(end - begin for begin, end in box)
