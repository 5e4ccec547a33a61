"""Read files from untrusted folders."""

import errno
import os
import stat
from pathlib import Path

MAX_BYTES = 64 << 20


def open_regular(path: Path) -> int:
    """Open a regular file for reading. The caller closes the descriptor. Raise `OSError` for pipes and directories."""
    # Without O_NONBLOCK, opening a pipe would wait for a writer forever.
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    mode = os.fstat(handle).st_mode
    if stat.S_ISREG(mode):
        return handle
    os.close(handle)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, "Is a directory", str(path))
    raise OSError(errno.EINVAL, "Not a regular file", str(path))


def read_regular(path: Path, limit: int = MAX_BYTES) -> bytes:
    """Return the content of a regular file. Raise `OSError` if it is not regular or is larger than `limit` bytes."""
    with open(open_regular(path), "rb") as file:
        if (size := os.fstat(file.fileno()).st_size) > limit:
            raise OSError(errno.EFBIG, f"It has {size:,} bytes, more than {limit:,}", str(path))
        return file.read()
