"""Hashes of the code that is installed: what was made by other code is not taken for what this code makes."""

import functools
import hashlib
import importlib.metadata
import importlib.util
from collections.abc import Mapping
from pathlib import Path

from axlearn_core.plugins.index import GROUP as INDEX


@functools.cache
def plugin_packages() -> tuple[str, ...]:
    """The import names of the core and of every installed plugin; an index of names is data, not a plugin."""
    points = importlib.metadata.entry_points()
    groups = [group for group in points.groups if group.startswith("axlearn.") and group != INDEX]
    modules = {point.module.partition(".")[0] for group in groups for point in points.select(group=group)}
    return tuple(sorted({*modules, "axlearn_core"}))


def source_hashes() -> Mapping[str, str]:
    """Package -> 16 hex digits of SHA-256 of its source and its compiled libraries, for each of `plugin_packages`."""
    return {name: _hash_package(name) for name in plugin_packages()}


def _hash_package(package: str) -> str:
    spec = importlib.util.find_spec(package)
    digest = hashlib.sha256()
    for folder in sorted((spec.submodule_search_locations or ()) if spec else ()):
        files = [path for pattern in ("*.py", "*.so") for path in Path(folder).rglob(pattern)]
        for path in sorted(files):
            digest.update(str(path.relative_to(folder)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]
