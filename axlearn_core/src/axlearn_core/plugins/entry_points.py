"""The entry points of everything that is installed, read once: it takes as long as all else that `axlearn --help` does."""

import functools
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from importlib_metadata import EntryPoints


def entry_points() -> "EntryPoints":
    """Of every distribution. Read again when `sys.path` changes."""
    return _entry_points(tuple(sys.path))


@functools.lru_cache(maxsize=1)
def _entry_points(path: Sequence[str]) -> "EntryPoints":
    import importlib_metadata

    return importlib_metadata.entry_points()
