"""The node-local tier: what this process keeps of the training state on its own machine, every few steps.

DIRECTORY/RUN/process-0/120/      an ordinary checkpoint, of every shard on the devices of process 0
    part.json                     whose it is: process, attempt, timeline
    manifest.json, state/, ...    as in every checkpoint
DIRECTORY/RUN/process-3/120/      copied here from another machine
DIRECTORY/RUN/process-0/.120.damaged-TIME/   set aside: a hash did not hold
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
from axlearn_core.checkpoint.shards import Box, StoredArray
from axlearn_core.errors import CheckpointError, RequestError, StorageError

PART = "part.json"
Need = tuple[str, Box]
"""(path, box of the array) that a process has to read."""


@attrs.frozen(order=True)
class Part:
    """The shards of one process at one step, on this machine.

    Attributes:
        attempt: of the job; parts of one step belong together where they have the same.
        process: that wrote it, in its attempt.
        timeline: changes where a run is told to go back to an earlier step: what is ahead then does not count.
    """

    step: int
    attempt: str
    process: int
    timeline: str

    @property
    def folder(self) -> str:
        """Below the tier's root."""
        return f"process-{self.process}/{self.step}"


class LocalParts:
    """The parts of one run that lie on this machine.

    Raises:
        RequestError: the directory cannot be used, or belongs to somebody else.
    """

    def __init__(self, directory: str, run: str):
        self.root = open_directory(directory) / (run or "run")
        self.storage = LocalStorage(self.root)
        self.excluded: set[Part] = set()

    def place(self, process: int) -> Checkpoints:
        """The checkpoints of one process's parts."""
        return Checkpoints(self.storage, str(self.root / f"process-{process}"), f"process-{process}/")

    def find(self) -> list[Part]:
        """Every complete part, oldest first."""
        parts = []
        for path in self.root.glob(f"process-*/*/{PART}"):
            step, process = path.parent.name, path.parent.parent.name.removeprefix("process-")
            if not (step.isdecimal() and process.isdecimal()):
                continue
            try:
                facts = json.loads(path.read_text())
                parts.append(Part(int(step), facts["attempt"], int(process), facts["timeline"]))
            except (OSError, ValueError, KeyError, TypeError):
                continue  # damaged, or deleted meanwhile
        return sorted(set(parts) - self.excluded)

    def describe(self, part: Part) -> list[tuple[str, int]]:
        """(name, bytes) of each file of a part."""
        folder = f"{part.folder}/"
        return [(f.path.removeprefix(folder), f.bytes) for f in self.storage.list(folder)]

    def inspect(self, part: Part) -> Manifest:
        """What a part holds. Raises `CheckpointError` where it is damaged."""
        return self.place(part.process).inspect(part.step)

    def index(self, parts: Iterable[Part]) -> dict[str, StoredArray]:
        """The arrays of some parts, each box once; the files of pieces are below the root.

        Raises:
            CheckpointError: an index or manifest is damaged.
        """
        pieces: dict[str, dict[Any, Any]] = {}
        arrays: dict[str, StoredArray] = {}
        for part in parts:
            part_manifest = self.inspect(part)
            for folder in (manifest.WEIGHTS, manifest.NON_WEIGHTS):
                try:
                    index = stream.read_index(self.storage, f"{part.folder}/", part_manifest.files, folder)
                except stream.DamagedError as error:
                    raise CheckpointError(f"{self.root / part.folder}: {error}") from error
                for path, array in index.items():
                    arrays[path] = array
                    for piece in array.pieces:
                        moved = attrs.evolve(piece, file=f"{part.folder}/{folder}{piece.file}")
                        pieces.setdefault(path, {}).setdefault((piece.start, piece.shape), moved)
        return {p: attrs.evolve(x, pieces=tuple(pieces[p].values())) for p, x in arrays.items() if p in pieces}

    def read(
        self, arrays: Mapping[str, StoredArray], abstract: Mapping[str, jax.ShapeDtypeStruct]
    ) -> dict[str, jax.Array]:
        """The arrays, in the shardings of `abstract`. Raises `DamagedError` where a hash does not hold."""
        shardings = {p: x.sharding for p, x in abstract.items()}
        return dict(stream.read_arrays(self.storage, "", {p: arrays[p] for p in abstract}, shardings))

    def read_extra(self, part: Part) -> dict[str, Any]:
        """What was saved in addition to arrays. Raises `CheckpointError` where it is damaged."""
        name = f"{part.folder}/{manifest.EXTRA}"
        try:
            data = self.storage.read(name)
        except StorageError as error:
            raise CheckpointError(str(error)) from error
        if self.inspect(part).files.get(manifest.EXTRA) != manifest.describe(data):
            raise CheckpointError(f"{self.root / name} is not what was written")
        return json.loads(data)

    def is_damaged(self, part: Part) -> bool:
        """Reads a part and compares every hash."""
        try:
            self.place(part.process).verify(part.step)
        except CheckpointError:
            return True
        return False

    def quarantine(self, part: Part) -> Path | None:
        """Sets a part aside, where it stays; None where another process of this machine did."""
        self.excluded.add(part)
        source = self.root / part.folder
        target = source.with_name(f".{part.step}.damaged-{time.time_ns()}")
        try:
            source.rename(target)
        except OSError:
            return None
        return target

    def delete(self, parts: Iterable[Part]) -> None:
        """Deletes parts. What another process of this machine deletes meanwhile is deleted."""
        for part in parts:
            self.remove(part.folder)

    def remove(self, folder: str) -> None:
        """Deletes a folder below the root as far as it can be."""
        with contextlib.suppress(StorageError):
            self.storage.delete(folder)

    def clean(self) -> None:
        """Removes what a killed attempt left half-written, and all but the newest of what was set aside."""
        for folder in self.root.glob("process-*"):
            for path in folder.glob(".*"):
                if re.fullmatch(r"\.\d+\.(partial|deleted|from-\d+)", path.name):
                    shutil.rmtree(path, ignore_errors=True)
            for path in sorted(folder.glob(".*.damaged-*"), key=lambda p: p.name.rpartition("-")[2])[:-1]:
                shutil.rmtree(path, ignore_errors=True)


def open_directory(directory: str) -> Path:
    """The directory of a tier, made if need be, for this user alone. Environment variables in it are filled in.

    Raises:
        RequestError: a variable is not set, it cannot be made or written, or others may write to it.
    """
    path = Path(os.path.expandvars(directory)).expanduser()
    fix = "give another checkpointer.local.directory: a disk of this machine, or /dev/shm"
    if "$" in str(path):
        raise RequestError(f"checkpointer.local.directory: a variable in {directory!r} is not set here\n    fix: {fix}")
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
            f"checkpointer.local.directory: others may write to {path}, and what lies there is trained on\n"
            f"    got: mode {status.st_mode & 0o777:o}, user {status.st_uid}\n    expected: 700, user {os.geteuid()}\n"
            "    fix: chmod 700 it, or give a directory in it, which is made"
        )
    if not os.access(path, os.W_OK | os.X_OK):
        raise RequestError(f"checkpointer.local.directory: {path} cannot be written\n    fix: {fix}")
    return path.absolute()


def needs_of(abstract: Mapping[str, jax.ShapeDtypeStruct]) -> list[Need]:
    """What this process's devices hold of some arrays."""
    needs = {}
    for path, spec in abstract.items():
        sharding: Any = spec.sharding
        for index in sharding.addressable_devices_indices_map(spec.shape).values():
            box = tuple(s.indices(n)[:2] for s, n in zip(index, spec.shape, strict=True))
            needs[path, box] = None
    return list(needs)


def overlaps_of(need: Need, arrays: Mapping[str, StoredArray]) -> list[Box]:
    """The parts of a need that some arrays hold."""
    path, box = need
    if path not in arrays:
        return []
    overlaps = (overlap(piece.box, box) for piece in arrays[path].pieces)
    return [o for o in overlaps if o is not None]


def is_covered(need: Need, boxes: Sequence[Box]) -> bool:
    """Whether the boxes, which do not overlap, cover a need."""
    return sum(map(volume, boxes)) >= volume(need[1])


def overlap(one: Box, other: Box) -> Box | None:
    """The box in both; None where there is none."""
    both = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return None if any(a >= b for a, b in both) else both


def volume(box: Box) -> int:
    """The number of elements of a box."""
    return math.prod(end - begin for begin, end in box)
