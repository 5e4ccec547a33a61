"""A run directory at the URI of a storage: a local working copy, brought there at each checkpoint and at the end.

Checkpoints themselves go to the storage directly, below `checkpoints/`.
"""

import re
from pathlib import Path
from urllib.parse import urlsplit

from axlearn_core.checkpoint import open_storage
from axlearn_core.errors import StorageError, WorkError
from axlearn_core.run.notices import log_message

CHECKPOINTS = "checkpoints/"


class RunMirror:
    """The files of a run, here and at a URI. The storage decides: what lies here is a copy.

    Attributes:
        uri: of the run, without a `/` at its end.
        path: of the working copy.
    """

    def __init__(self, uri: str, path: Path | None = None):
        self.uri = uri.rstrip("/")
        self.path = path or working_copy(self.uri)
        self.storage = open_storage(self.uri)
        self._pushed: dict[str, tuple[int, int]] = {}

    def fetch(self) -> None:
        """Makes the working copy what the storage has; files that the storage does not have are removed.

        Raises:
            WorkError: the storage cannot be read, or the copy not be written.
        """
        try:
            names = [f.path for f in self.storage.list() if _is_mirrored(f.path)]
            for name in names:
                target = self.path / name
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(self.storage.read(name))
            for name in self._local_files() - set(names):
                (self.path / name).unlink()
        except (StorageError, OSError) as error:
            raise WorkError(
                f"the run at {self.uri} cannot be copied to {self.path}: {error}\n    fix: make both reachable and writable"
            ) from error
        self._pushed = {name: self._state(name) for name in names}

    def push(self) -> None:
        """Brings what changed to the storage. Where that fails, it says so: the next push tries again."""
        try:
            for name in sorted(self._local_files()):
                state = self._state(name)
                if self._pushed.get(name) != state:
                    self.storage.write(name, [(self.path / name).read_bytes()])
                    self._pushed[name] = state
        except (StorageError, OSError) as error:
            log_message(f"note: {self.uri} was not brought up to date: {error}\n    its files are in {self.path}")

    def _local_files(self) -> set[str]:
        files = (p.relative_to(self.path).as_posix() for p in self.path.rglob("*") if p.is_file())
        return {name for name in files if _is_mirrored(name)}

    def _state(self, name: str) -> tuple[int, int]:
        status = (self.path / name).stat()
        return status.st_size, status.st_mtime_ns


def is_remote(run_dir: str | Path) -> bool:
    """Whether a run directory is the URI of a storage, and not a path."""
    return "://" in str(run_dir) and urlsplit(str(run_dir)).scheme != "file"


def working_copy(uri: str) -> Path:
    """Where the files of a run at a URI lie on this machine: `runs/s3/bucket/run`."""
    scheme, _, rest = uri.partition("://")
    return Path(
        "runs", scheme, *(re.sub(r"[^\w.=+@ -]", "_", part) for part in rest.split("/") if part not in ("", ".", ".."))
    )


def _is_mirrored(name: str) -> bool:
    """Not checkpoints, which the checkpointer writes, nor locks and temporary files."""
    return not name.startswith(CHECKPOINTS) and not any(part.startswith(".") for part in name.split("/"))
