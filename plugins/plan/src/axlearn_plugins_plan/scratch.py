"""A temporary directory that goes with its process, also if that is killed.

A compiler writes gigabytes into such a directory, and a plan that takes long is often stopped: by Ctrl-C, by a scheduler, for
lack of memory. While a native compiler runs, no Python handler does, and SIGKILL runs none at all. So another process removes
the directory.
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
"""Waits for the end of its input, which is the end of the process that holds the other end of the pipe."""


@contextlib.contextmanager
def scratch_directory() -> Iterator[Path]:
    """A directory in the temporary folder, removed afterwards and if this process is killed.

    It is locked while it is in use. Directories without a lock, such as those of a machine that lost power, are removed here.
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
    """A process of its own session, which no signal to this one reaches. It removes the directory when this process ends."""
    command = ["sh", "-c", _REMOVE, "sh", str(directory)]
    silent = subprocess.DEVNULL
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=silent, stderr=silent, start_new_session=True):
        yield


def _make_locked() -> tuple[Path, int]:
    """(a new directory, the descriptor that locks it)."""
    while True:
        directory = Path(tempfile.mkdtemp(prefix=PREFIX))
        # Another process may take it for an abandoned one, and remove it, before it is locked.
        with contextlib.suppress(FileNotFoundError):
            lock = os.open(directory, os.O_RDONLY)
            fcntl.flock(lock, fcntl.LOCK_EX)
            if directory.exists():
                return directory, lock
            os.close(lock)


def _remove_abandoned() -> None:
    """Removes this user's directories that no process has locked."""
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
