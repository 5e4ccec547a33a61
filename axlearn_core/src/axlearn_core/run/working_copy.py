"""A run directory at the URI of a storage, and the working copy of its files on this machine.

Checkpoints go to the storage directly, below `checkpoints/`.
"""

import re
from pathlib import Path
from urllib.parse import urlsplit

from axlearn_core.contracts.storage import Storage
from axlearn_core.errors import StorageError, WorkError

CHECKPOINTS = "checkpoints/"


def is_remote(run_dir: str | Path) -> bool:
    """Whether a run directory is the URI of a storage, and not a path."""
    return "://" in str(run_dir) and urlsplit(str(run_dir)).scheme != "file"


def working_copy(uri: str) -> Path:
    """The local folder for the files of a run at a URI: `runs/s3/bucket/run`."""
    scheme, _, rest = uri.partition("://")
    return Path(
        "runs", scheme, *(re.sub(r"[^\w.=+@ -]", "_", part) for part in rest.split("/") if part not in ("", ".", ".."))
    )


def fetch_files(storage: Storage, uri: str, path: Path) -> list[str]:
    """Makes a working copy equal to the storage, and removes files that the storage does not have.

    Args:
        storage: of the run.
        uri: of the run, for the error.
        path: of the working copy.

    Returns:
        The names of the files.

    Raises:
        WorkError: the storage cannot be read, or the copy cannot be written.
    """
    try:
        names = [f.path for f in storage.list() if is_copied(f.path)]
        for name in names:
            target = path / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(storage.read(name))
        for name in local_files(path) - set(names):
            (path / name).unlink()
    except (StorageError, OSError) as error:
        raise WorkError(
            f"the run at {uri} cannot be copied to {path}: {error}\n    fix: make both reachable and writable"
        ) from error
    return names


def local_files(path: Path) -> set[str]:
    """The names of the files of a working copy that belong in the storage."""
    files = (p.relative_to(path).as_posix() for p in path.rglob("*") if p.is_file())
    return {name for name in files if is_copied(name)}


def is_copied(name: str) -> bool:
    """Whether a file is copied: not checkpoints, which the checkpointer writes, and not locks and temporary files."""
    return not name.startswith(CHECKPOINTS) and not any(part.startswith(".") for part in name.split("/"))
