"""Which package brings a name, for the error about a name that is not installed.

The names are not in the core. A distribution publishes an index with an entry point in the group `axlearn.index` that names a
package; the package holds `index.json`: group -> name -> distribution. axlearn-core requires axlearn-index, which lists the
plugins of this project. Reading an index imports nothing of its package.
"""

import functools
import importlib.util
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from importlib_metadata import EntryPoints

    from axlearn_core.errors import RequestError

GROUP = "axlearn.index"
FILE = "index.json"
NO_INDEX = "pip install axlearn-index, whose errors then say which package brings a name"

Names = Mapping[str, Mapping[str, str]]


class Index(NamedTuple):
    """One published index.

    Attributes:
        name: of its entry point.
        origin: its distribution and version.
        names: group -> name -> distribution; empty if the index is broken.
        problem: why it cannot be read, or None.
    """

    name: str
    origin: tuple[str, str]
    names: Names
    problem: str | None


def entry_points() -> "EntryPoints":
    """The entry points of everything that is installed. Read again when `sys.path` changes.

    Reading them takes as long as all else that `axlearn --help` does.
    """
    return _entry_points(tuple(sys.path))


@functools.lru_cache(maxsize=1)
def _entry_points(path: Sequence[str]) -> "EntryPoints":
    import importlib_metadata

    return importlib_metadata.entry_points()


def indexes() -> Sequence[Index]:
    """The indexes that are installed, by the name of their entry point. Read again when `sys.path` changes."""
    return _indexes(tuple(sys.path))


@functools.lru_cache(maxsize=1)
def _indexes(path: Sequence[str]) -> Sequence[Index]:
    points = entry_points().select(group=GROUP)
    origins = [(p, (p.dist.name, p.dist.version) if p.dist else ("(no distribution)", "?")) for p in points]
    return [_read_index(p.name, p.value, origin) for p, origin in sorted(origins, key=lambda o: (o[0].name, o[1]))]


def _read_index(name: str, package: str, origin: tuple[str, str]) -> Index:
    try:
        top, *below = package.split(".")  # to find the package below imports the one above it
        spec = importlib.util.find_spec(top)
        folders = (spec.submodule_search_locations if spec else None) or ()
        file = next((f for folder in folders if (f := Path(folder, *below, FILE)).is_file()), None)
        if file is None:
            return Index(name, origin, {}, f"the package {package!r} has no {FILE}")
        names = json.loads(file.read_text("utf-8"))
    except Exception as error:  # a broken index costs a hint in errors, and must break nothing else
        return Index(name, origin, {}, f"{FILE} of {package!r} cannot be read: {type(error).__name__}: {error}")
    if not _is_index(names):
        return Index(name, origin, {}, f"{file} is not an index\n    expected: {{group: {{name: distribution}}}}")
    return Index(name, origin, names, None)


def _is_index(content: Any) -> bool:
    return isinstance(content, dict) and all(
        isinstance(names, dict) and all(isinstance(package, str) for package in names.values())
        for names in content.values()
    )


def packages_of(group: str) -> dict[str, str]:
    """Name -> distribution of all indexes; the first index by name wins."""
    names: dict[str, str] = {}
    for index in reversed(indexes()):
        names |= index.names.get(group, {})
    return names


def has_index() -> bool:
    """Whether an index that can be read is installed."""
    return any(index.problem is None for index in indexes())


def package_of(group: str, name: str) -> str | None:
    """The distribution that brings a name, or None if no index has it.

    A target is also found by the size behind its name: `tpu-v5p-512` comes with what brings `tpu-v5p`.
    """
    names = packages_of(group)
    if name in names or group != "targets":
        return names.get(name)
    fits = [target for target in names if name.startswith(f"{target}-")]
    return names[max(fits, key=len)] if fits else None


def not_installed(group: str, name: str) -> "RequestError | None":
    """The error for a name whose package is not installed, or None if no index has that name."""
    from axlearn_core.errors import RequestError  # the index is read for `axlearn --help`, which imports no attrs

    package = package_of(group, name)
    if package is None:
        return None
    kind = group.removesuffix("s")
    return RequestError(f"the {kind} {name!r} is not installed: {package} brings it\n    fix: pip install {package}")


def not_known(kind: str, group: str, name: str, candidates: Sequence[str], listing: str) -> "RequestError":
    """The error for a name that nothing installed has: the package that brings it, or else the nearest names.

    Args:
        kind: what to call the name, such as `feature`.
        group: where to look in the indexes.
        name: what was asked for.
        candidates: the names that are installed.
        listing: the command that lists them.
    """
    from axlearn_core.errors import RequestError, unknown

    if error := not_installed(group, name):
        return error
    error = unknown(kind, name, candidates, listing=listing)
    return error if has_index() else RequestError(f"{error}\n    or: {NO_INDEX}")
