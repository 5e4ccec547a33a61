"""Find the package that provides a name, for errors about names that are not installed.

The core does not list the names itself. A distribution publishes an index with an entry point in the `axlearn.index` group.
The entry point refers to a package that contains `index.json`, a mapping from group to name to distribution. axlearn-core
depends on axlearn-index, which lists the plugins of this project. Reading an index does not import its package.
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
NO_INDEX = "pip install axlearn-index, so that errors name the package to install"

Names = Mapping[str, Mapping[str, str]]


class Index(NamedTuple):
    """A published index.

    Attributes:
        name: Name of the entry point.
        origin: Distribution and version.
        names: Distributions by group and name. Empty if the index is broken.
        problem: Reason why the index cannot be read, or None.
    """

    name: str
    origin: tuple[str, str]
    names: Names
    problem: str | None


def entry_points() -> "EntryPoints":
    """Return the entry points of all installed distributions.

    They are cached until `sys.path` changes, because reading them takes half as long as all of `axlearn --help`.
    """
    return _entry_points(tuple(sys.path))


@functools.lru_cache(maxsize=1)
def _entry_points(path: Sequence[str]) -> "EntryPoints":
    import importlib_metadata

    return importlib_metadata.entry_points()


def indexes() -> Sequence[Index]:
    """Return the installed indexes, sorted by the name of their entry point. They are cached until `sys.path` changes."""
    return _indexes(tuple(sys.path))


@functools.lru_cache(maxsize=1)
def _indexes(path: Sequence[str]) -> Sequence[Index]:
    points = entry_points().select(group=GROUP)
    origins = [(p, (p.dist.name, p.dist.version) if p.dist else ("(no distribution)", "?")) for p in points]
    return [_read_index(p.name, p.value, origin) for p, origin in sorted(origins, key=lambda o: (o[0].name, o[1]))]


def _read_index(name: str, package: str, origin: tuple[str, str]) -> Index:
    try:
        top, *subpackages = package.split(".")  # find_spec for a subpackage would import its parent
        spec = importlib.util.find_spec(top)
        folders = (spec.submodule_search_locations if spec else None) or ()
        file = next((f for folder in folders if (f := Path(folder, *subpackages, FILE)).is_file()), None)
        if file is None:
            return Index(name, origin, {}, f"the package {package!r} has no {FILE}")
        names = json.loads(file.read_text("utf-8"))
    except Exception as error:  # a broken index must not hide the original error; only its hint is lost
        return Index(name, origin, {}, f"{FILE} of {package!r} cannot be read: {type(error).__name__}: {error}")
    if not _is_index(names):
        return Index(name, origin, {}, f"{file} is not an index\n    expected: {{group: {{name: distribution}}}}")
    return Index(name, origin, names, None)


def _is_index(content: Any) -> bool:
    return isinstance(content, dict) and all(
        isinstance(names, dict) and all(isinstance(package, str) for package in names.values())
        for names in content.values()
    )


def read_packages(group: str) -> dict[str, str]:
    """Return the distributions by name from all indexes. The first index takes precedence."""
    names: dict[str, str] = {}
    for index in reversed(indexes()):
        names |= index.names.get(group, {})
    return names


def has_index() -> bool:
    """Return True if a readable index is installed."""
    return any(index.problem is None for index in indexes())


def find_package(group: str, name: str) -> str | None:
    """Return the distribution that provides a name, or None if no index lists it.

    Targets may include a size. For example, `tpu-v5p-512` is provided by the distribution that provides `tpu-v5p`.
    """
    names = read_packages(group)
    if name in names or group != "targets":
        return names.get(name)
    fits = [target for target in names if name.startswith(f"{target}-")]
    return names[max(fits, key=len)] if fits else None


def not_installed_error(group: str, name: str, label: str | None = None) -> "RequestError | None":
    """Return the error for a name whose package is not installed, or None if no index lists the name.

    Args:
        group: Group of the name in the indexes.
        name: The unknown name.
        label: Kind and name for the error message. By default, the singular of the group, and the name.
    """
    from axlearn_core.errors import RequestError  # `axlearn --help` reads the index and must not import attrs

    package = find_package(group, name)
    if package is None:
        return None
    label = label or f"{group.removesuffix('s')} {name!r}"
    return RequestError(f"the {label} is not installed: {package} provides it\n    fix: pip install {package}")


def unknown_name_error(kind: str, group: str, name: str, candidates: Sequence[str], listing: str) -> "RequestError":
    """Return the error for an unknown name. It suggests the package that provides the name, or the nearest names.

    Args:
        kind: Kind of name for the error message, such as `feature`.
        group: Group of the name in the indexes.
        name: The unknown name.
        candidates: The installed names.
        listing: Command that lists the installed names.
    """
    from axlearn_core.errors import RequestError, unknown

    if error := not_installed_error(group, name):
        return error
    error = unknown(kind, name, candidates, listing=listing)
    return error if has_index() else RequestError(f"{error}\n    or: {NO_INDEX}")
