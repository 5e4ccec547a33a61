"""What is in a checkpoint, and whether it is whole. Reads no arrays, imports neither JAX nor Orbax.

checkpoints/
  120/
    manifest.json     written last, over everything below: arrays, metrics, size and hash of each file
    extra.json        what was given to `save` besides the state
    config.yaml, ...  the run's own text files
    state/            the arrays: weights in `weights/` (see `shards`), all others in `state/` (Orbax)
  .140.partial/       a save that is under way or was cut off; becomes `140` in one rename when it is complete
"""

import hashlib
import json
import os
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import attrs

from axlearn_core.checkpoint.storage import sync_directory
from axlearn_core.errors import CheckpointError
from axlearn_core.plugins.migrations import migrate_arrays

MANIFEST, EXTRA, STATE = "manifest.json", "extra.json", "state"
WEIGHTS = f"{STATE}/weights/"
"""Where the files of weights lie. Checkpoints of format 1 have none: Orbax keeps all of their arrays."""
_FORMAT, _READABLE = 2, (1, 2)


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
    """

    step: int
    arrays: dict[str, ArrayInfo]
    metrics: dict[str, float]
    files: dict[str, dict[str, Any]]
    created: str = ""

    @property
    def bytes(self) -> int:
        """The size of all files."""
        return sum(f["bytes"] for f in self.files.values())

    def migrated(self, wanted: Collection[str]) -> "Manifest":
        """The manifest with the paths of this version, where arrays that are wanted are missing under theirs."""
        if all(path in self.arrays for path in wanted):
            return self
        renamed = migrate_arrays(self.arrays, wanted)
        paths = {path: renamed.get(path, path) for path in self.arrays}
        arrays = {to: self.arrays[path] for path, to in paths.items() if to is not None}
        return attrs.evolve(self, arrays=arrays)


def steps(directory: Path) -> list[int]:
    """The steps that have a checkpoint, oldest first. Saves that were cut off are not among them."""
    if not directory.is_dir():
        return []
    return sorted(int(p.name) for p in directory.iterdir() if p.name.isdecimal() and p.is_dir())


def inspect(directory: Path, step: int) -> Manifest:
    """What the checkpoint of a step holds, from its manifest alone.

    Raises:
        CheckpointError: there is no such step, or its manifest is damaged.
    """
    known = steps(directory)
    if step not in known:
        raise CheckpointError(
            f"there is no checkpoint of step {step} in {directory}\n    steps: {', '.join(map(str, known)) or 'none'}"
        )
    return _read(directory / str(step), step, known)


def verify(directory: Path, step: int) -> Manifest:
    """`inspect`, and compares the size and hash of every file with what was written.

    Raises:
        CheckpointError: names each file that differs, and how to go on from the checkpoint before it.
    """
    manifest = inspect(directory, step)
    root = directory / str(step)
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        found = pool.map(lambda item: _compare(root / item[0], item[0], item[1]), manifest.files.items())
    if problems := [p for p in found if p]:
        raise damaged(directory, step, problems, steps(directory))
    return manifest


def damaged(directory: object, step: int, problems: list[str], known: list[int]) -> CheckpointError:
    """The error for a checkpoint that is not what was written."""
    before = [s for s in known if s < step]
    fix = (
        f"`--restore-step {before[-1]}` continues from the checkpoint before it"
        if before
        else "there is no earlier checkpoint; start anew in another run directory"
    )
    shown = [*problems[:8], *([f"and {len(problems) - 8} more"] if len(problems) > 8 else [])]
    listed = "\n".join(f"    {p}" for p in shown)
    return CheckpointError(f"the checkpoint of step {step} in {directory} is damaged\n{listed}\n    fix: {fix}")


def write(
    root: Path, *, step: int, arrays: Mapping[str, ArrayInfo], metrics: Mapping[str, float], created: str
) -> None:
    """Hashes every file below `root`, brings it to the disk, and writes the manifest. Raises `OSError`."""
    files = sorted(p for p in root.rglob("*") if p.is_file() and p != root / MANIFEST)
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        described = list(pool.map(lambda p: _describe(p, sync=True), files))
    body = {
        "format": _FORMAT,
        "step": step,
        "created": created,
        "metrics": dict(metrics),
        "arrays": {a.path: [list(a.shape), a.dtype] for a in arrays.values()},
        "files": {p.relative_to(root).as_posix(): d for p, d in zip(files, described, strict=True)},
    }
    with (root / MANIFEST).open("w", encoding="utf-8") as file:
        json.dump({"sha256": _digest(body), **body}, file)
        file.flush()
        os.fsync(file.fileno())
    for folder in {p.parent for p in files} | {root}:
        sync_directory(folder)


def parse(data: bytes, step: int) -> Manifest:
    """The manifest of a step. Raises `ValueError`, `KeyError`, `TypeError` or `AttributeError` where it is damaged."""
    body = json.loads(data)
    digest = body.pop("sha256")
    if digest != _digest(body) or body["format"] not in _READABLE or body["step"] != step:
        raise ValueError("its own checksum, format or step is another one")
    arrays = {p: ArrayInfo(p, tuple(shape), dtype) for p, (shape, dtype) in body["arrays"].items()}
    return Manifest(step, arrays, body["metrics"], body["files"], body["created"])


def _read(root: Path, step: int, known: list[int]) -> Manifest:
    try:
        return parse((root / MANIFEST).read_bytes(), step)
    except OSError as error:
        raise damaged(root.parent, step, [f"{MANIFEST}: {error.strerror}"], known) from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise damaged(root.parent, step, [f"{MANIFEST}: not what was written ({error})"], known) from None


def _digest(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _describe(path: Path, *, sync: bool = False) -> dict[str, Any]:
    with path.open("rb") as file:
        if sync:
            os.fsync(file.fileno())
        return {"sha256": hashlib.file_digest(file, "sha256").hexdigest(), "bytes": path.stat().st_size}


def _compare(path: Path, name: str, expected: Mapping[str, Any]) -> str | None:
    try:
        if (size := path.stat().st_size) != expected["bytes"]:
            return f"{name}: got {size} bytes, expected {expected['bytes']}"
        got = _describe(path)["sha256"]
    except OSError as error:
        return f"{name}: {error.strerror}"
    return None if got == expected["sha256"] else f"{name}: got sha256 {got[:16]}, expected {expected['sha256'][:16]}"
