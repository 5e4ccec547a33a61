"""What the trackers share: failures with their reason, and text that is safe to show."""

import contextlib
import unicodedata
from collections.abc import Iterator
from pathlib import Path

from axlearn_core.errors import WorkError


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turns what the system says against writing `path` (a full disk, no permission) into a `WorkError`."""
    try:
        yield
    except OSError as error:
        raise WorkError(
            f"cannot write {path}: {error.strerror or error}\n"
            "    fix: make room, or make the directory writable, and run the same command again; it resumes from the "
            "last checkpoint"
        ) from error


def printable(text: str) -> str:
    """`text` with control characters and lone surrogates shown as `\N{REPLACEMENT CHARACTER}`.

    A model may sample any bytes; those that steer a terminal, or that UTF-8 cannot encode, must not get there.
    """
    text = text.replace("\r\n", "\n")
    return "".join(
        c if c in "\n\t" or unicodedata.category(c) not in ("Cc", "Cs") else "\N{REPLACEMENT CHARACTER}" for c in text
    )
