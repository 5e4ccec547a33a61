"""Assets: files that belong to a run, such as its tokenizer.

A field declared with `setting(asset=True)` contains the path of an asset. Every run keeps a copy of the file, and the run's
config refers to the copy by a relative path:

    input:
      tokenizer: {type: tokenizer-json, path: run:files/input.tokenizer/tokenizer.json}

`make_portable` converts paths to this form. `attach` converts them back to paths that can be opened.
"""

import logging
import os
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any, Protocol
from urllib.parse import quote

import attrs

from axlearn_core.config.node import Node, asset_fields
from axlearn_core.config.run_scheme import RUN_SCHEME
from axlearn_core.config.tree import children, join, with_children

log = logging.getLogger(__name__)

FOLDER = "files"
"""Folder in a run directory that contains the run's assets."""
_IMPORTED = "huggingface"
"""Folder of an imported run in which earlier versions stored files next to the tokenizer."""


@attrs.frozen
class Asset:
    """A config field that contains the path of an asset.

    Attributes:
        node: Dotted path of the node.
        field: Name of the field.
        value: Value of the field.
        siblings: Names of related files in the same folder as the asset.
        folder: Name of the folder below `FOLDER` that contains the run's copy.
    """

    node: str
    field: str
    value: str
    siblings: tuple[str, ...]
    folder: str

    @property
    def path(self) -> str:
        """Dotted path of the field."""
        return join(self.node, self.field)

    @property
    def name(self) -> str:
        """Name of the file."""
        return file_name(self.value)


def file_name(path: str) -> str:
    """Return the last part of a path or URL."""
    return path.replace("\\", "/").rstrip("/").rpartition("/")[2]


def map_assets(tree: Any, function: Callable[[Asset], str]) -> Any:
    """Replace the value of each asset with the result of `function`, in tree order."""
    return _map(tree, "", function)


def _map(value: Any, path: str, function: Callable[[Asset], str]) -> Any:
    below = children(value)
    if isinstance(value, Node) and (fields := asset_fields(type(value))):
        for name, siblings in fields.items():
            if isinstance(below[name], str):
                folder = _folder_name(path if len(fields) == 1 else join(path, name))
                below[name] = function(Asset(path, name, below[name], siblings, folder))
    return with_children(value, {name: _map(child, join(path, name), function) for name, child in below.items()})


def _folder_name(path: str) -> str:
    """Return a valid file name for a dotted path, which may contain arbitrary mapping keys."""
    name = quote(path, safe="")
    return f"%2E{name[1:]}" if name.startswith(".") else name


def assets(tree: Any) -> list[Asset]:
    """Return the assets of a config in order."""
    result: list[Asset] = []

    def collect(asset: Asset) -> str:
        result.append(asset)
        return asset.value

    map_assets(tree, collect)
    return result


def make_portable(tree: Any, keep: Callable[[Asset], bool] = lambda asset: False) -> tuple[Any, dict[str, Asset]]:
    """Convert asset paths to paths relative to the run.

    Args:
        tree: A config.
        keep: Returns True for an asset that stays outside the run.

    Returns:
        The new config, and the assets to copy by their path in the run. Fields with the same path share one copy.
    """
    copies: dict[str, Asset] = {}
    names_by_source: dict[tuple[str, tuple[str, ...]], str] = {}

    def stored_value(asset: Asset) -> str:
        if asset.value.startswith(RUN_SCHEME) or keep(asset):
            return asset.value
        key = asset.value, asset.siblings
        if key not in names_by_source:
            parts = [FOLDER, asset.folder, _folder_name(asset.name)]
            names_by_source[key] = "/".join(part for part in parts if part)
            copies[names_by_source[key]] = asset
        return RUN_SCHEME + names_by_source[key]

    return map_assets(tree, stored_value), copies


class RunFolder(Protocol):
    """Access to the files of a run."""

    @property
    def name(self) -> str:
        """Path of the run's config file, for use in error messages."""
        ...

    def find(self, path: str) -> str | None:
        """Return a local path for a file in the run, or None if it does not exist."""
        ...

    def holds(self, path: str) -> bool:
        """Return True if an absolute local path is inside the run."""
        ...


@attrs.frozen
class LocalRun:
    """A run in a local or mounted directory. Implements `RunFolder`.

    Attributes:
        name: Path of the run's config file, for use in error messages.
        folders: Directories to search, in order.
    """

    name: str
    folders: tuple[Path, ...]

    @classmethod
    def from_config_file(cls, file: Path) -> "LocalRun":
        """Return the run that a config file belongs to. The file is in the root of the run or in a checkpoint's folder."""
        folder = Path(os.path.abspath(file)).parent
        in_checkpoint = folder.name.isdecimal() and (folder / "manifest.json").is_file()
        return cls(str(file), (folder.parent, folder.parent.parent) if in_checkpoint else (folder,))

    @property
    def has_lock(self) -> bool:
        """True if one of the folders contains a run."""
        return any((folder / "run.lock.json").is_file() for folder in self.folders)

    def find(self, path: str) -> str | None:
        """See `RunFolder`."""
        places = (os.path.join(os.path.abspath(folder), *PurePosixPath(path).parts) for folder in self.folders)
        return next((place for place in places if os.path.isfile(place)), None)

    def holds(self, path: str) -> bool:
        """See `RunFolder`."""
        return any(Path(os.path.abspath(path)).is_relative_to(os.path.abspath(folder)) for folder in self.folders)


def attach(tree: Any, run: RunFolder, *, earlier: bool = True) -> tuple[Any, list[Asset]]:
    """Convert paths relative to a run to paths that can be opened.

    Args:
        tree: A config.
        run: The run's files.
        earlier: Accept assets that earlier versions left outside the run, and log a note. If such a file no longer exists
            and the run has a file with the same name, use that file.

    Returns:
        The new config, and the assets that the run lacks, which keep their `run:` values.
    """
    lost: list[Asset] = []

    def attached(asset: Asset) -> str:
        if not asset.value.startswith(RUN_SCHEME):
            return _attach_earlier(asset, run) if earlier else asset.value
        path = asset.value.removeprefix(RUN_SCHEME)
        place = None if path.startswith("/") or ".." in PurePosixPath(path).parts else run.find(path)
        if place is None:
            lost.append(asset)
        return asset.value if place is None else place

    return map_assets(tree, attached), lost


def match_asset_paths(tree: Any, other: Any) -> Any:
    """Replace each asset path with the one in `other` if the files have equal contents, so that a diff omits copies."""
    originals = {asset.path: asset.value for asset in assets(other)}

    def named(asset: Asset) -> str:
        original = originals.get(asset.path)
        return original if original is not None and _are_copies(asset, original) else asset.value

    return map_assets(tree, named)


def _are_copies(asset: Asset, original: str) -> bool:
    one, other = Path(asset.value).expanduser(), Path(original).expanduser()
    if not (one.is_file() and other.is_file()):
        return False
    pairs = [(one, other), *((one.with_name(name), other.with_name(name)) for name in asset.siblings)]
    return all((a.read_bytes() if a.is_file() else None) == (b.read_bytes() if b.is_file() else None) for a, b in pairs)


def _attach_earlier(asset: Asset, run: RunFolder) -> str:
    """Resolve an asset whose path is not relative to the run."""
    path = os.path.expanduser(asset.value)
    if "://" in path or (os.path.isfile(path) and not run.holds(path)):
        copy = f"{FOLDER}/{asset.folder}/{asset.name}"
        _note(
            f"note: {asset.path} of {run.name} is a file outside the run: {asset.value}\n"
            f"    fix: to make the run portable, copy the file to {copy} in the run and set {asset.path} to "
            f"{RUN_SCHEME}{copy} in its config.yaml"
        )
        return asset.value
    if os.path.isfile(path):
        imported_path = os.path.join(os.path.dirname(path), _IMPORTED, asset.name)
        return imported_path if os.path.isfile(imported_path) else asset.value
    places = (f"{FOLDER}/{asset.folder}/", f"{_IMPORTED}/", "")
    copy = next((place for p in places if (place := run.find(p + asset.name)) is not None), None)
    if copy is None:
        return asset.value
    _note(f"note: {asset.path} of {run.name}: {asset.value} does not exist; using the run's copy of {asset.name}")
    return copy


_notes: set[str] = set()


def _note(text: str) -> None:
    """Log a message once per process."""
    if text not in _notes:
        _notes.add(text)
        log.warning("%s", text)
