"""Create a temporary directory that is removed even if its process is killed.

Compilers write gigabytes to this directory, and long plans are often stopped by Ctrl-C, a scheduler or the OOM killer.
Python's signal handlers do not run during native code or after SIGKILL, so a separate process removes the directory.
"""

import contextlib
import fcntl
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

PREFIX = "axlearn-dump-"
_REMOVE = 'cat > /dev/null; rm -rf -- "$1"'
"""Shell command that waits until the process at the other end of the pipe exits."""


@contextlib.contextmanager
def scratch_directory() -> Iterator[Path]:
    """Create a temporary directory that is removed on exit, even if this process is killed.

    The directory is locked while in use. Unlocked directories that were left behind, for example after a power failure, are
    removed first.
    """
    _remove_abandoned()
    directory, lock = _make_locked()
    try:
        with _remover(directory):
            yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        os.close(lock)


@contextlib.contextmanager
def _remover(directory: Path) -> Iterator[None]:
    """Start a process that removes the directory when this process exits. A separate session shields it from our signals."""
    command = ["sh", "-c", _REMOVE, "sh", str(directory)]
    silent = subprocess.DEVNULL
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=silent, stderr=silent, start_new_session=True):
        yield


def _make_locked() -> tuple[Path, int]:
    """Create and lock a new directory. Return its path and the file descriptor of the lock."""
    while True:
        directory = Path(tempfile.mkdtemp(prefix=PREFIX))
        # Another process may consider the directory abandoned and remove it before it is locked.
        with contextlib.suppress(FileNotFoundError):
            lock = os.open(directory, os.O_RDONLY)
            fcntl.flock(lock, fcntl.LOCK_EX)
            if directory.exists():
                return directory, lock
            os.close(lock)


def _remove_abandoned() -> None:
    """Remove this user's directories that no process has locked."""
    for directory in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            if directory.is_symlink() or directory.stat().st_uid != os.geteuid():
                continue
            lock = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(directory, ignore_errors=True)
            finally:
                os.close(lock)
