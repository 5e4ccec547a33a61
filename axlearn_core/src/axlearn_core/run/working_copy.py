"""Local working copies of run directories that are in storage.

Checkpoints are written directly to the storage, below `checkpoints/`.
"""

import re
from pathlib import Path
from urllib.parse import urlsplit

from axlearn_core.contracts.storage import Storage
from axlearn_core.errors import StorageError, WorkError

CHECKPOINTS = "checkpoints/"


def is_remote(run_dir: str | Path) -> bool:
    """Return True if a run directory is a storage URI."""
    return "://" in str(run_dir) and urlsplit(str(run_dir)).scheme != "file"


def strip_slashes(uri: str) -> str:
    """Remove slashes at the end of a URI, but not those after its scheme."""
    scheme, separator, rest = uri.partition("://")
    return scheme + separator + rest.rstrip("/")


def working_copy(uri: str) -> Path:
    """Return the local folder for the files of a run at a URI: `runs/s3/bucket/run`."""
    scheme, _, rest = uri.partition("://")
    return Path(
        "runs", scheme, *(re.sub(r"[^\w.=+@ -]", "_", part) for part in rest.split("/") if part not in ("", ".", ".."))
    )


def fetch_files(storage: Storage, uri: str, path: Path) -> list[str]:
    """Update a working copy from the storage. Remove files that the storage does not have.

    Args:
        storage: Storage of the run.
        uri: URI of the run, for use in the error message.
        path: Path of the working copy.

    Returns:
        The names of the files.

    Raises:
        WorkError: If the storage cannot be read, or if the working copy cannot be written.
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
            f"cannot copy the run at {uri} to {path}: {error}\n    fix: make both accessible and writable"
        ) from error
    return names


def local_files(path: Path) -> set[str]:
    """Return the names of the files in a working copy that belong in the storage."""
    files = (p.relative_to(path).as_posix() for p in path.rglob("*") if p.is_file())
    return {name for name in files if is_copied(name)}


def is_copied(name: str) -> bool:
    """Return True if a file is copied to and from the storage. Checkpoints, locks, and temporary files are not."""
    return not name.startswith(CHECKPOINTS) and not any(part.startswith(".") for part in name.split("/"))
