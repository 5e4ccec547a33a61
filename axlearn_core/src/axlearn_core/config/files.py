"""Reads files that somebody else may have put there."""

import errno
import os
import stat
from pathlib import Path

MAX_BYTES = 64 << 20


def open_regular(path: Path) -> int:
    """A descriptor of a regular file, for reading; the caller closes it. Raises `OSError` for a pipe, a device, a directory."""
    # Opening a pipe for reading would wait for a writer, for ever.
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    mode = os.fstat(handle).st_mode
    if stat.S_ISREG(mode):
        return handle
    os.close(handle)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, "Is a directory", str(path))
    raise OSError(errno.EINVAL, "Not a regular file", str(path))


def read_regular(path: Path, limit: int = MAX_BYTES) -> bytes:
    """The content of a regular file; raises `OSError` as `open_regular` does, and for one of more than `limit` bytes."""
    with open(open_regular(path), "rb") as file:
        if (size := os.fstat(file.fileno()).st_size) > limit:
            raise OSError(errno.EFBIG, f"It has {size:,} bytes, more than {limit:,}", str(path))
        return file.read()
