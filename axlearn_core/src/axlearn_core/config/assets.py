"""Assets: the files that belong to a run, such as the tokenizer of its input.

A field marked with `setting(asset=True)` holds the path of an asset. Every run keeps a copy, and its config names the copy
relative to the run:

    input:
      tokenizer: {type: tokenizer-json, path: run:files/input.tokenizer/tokenizer.json}

`portable` gives this form. `attach` turns it back into paths that can be opened, for a run that lies anywhere.
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
"""The folder of a run that holds its assets."""
_IMPORTED = "huggingface"
"""The folder of an imported run where earlier versions kept what lies beside the tokenizer."""


@attrs.frozen
class Asset:
    """A field of a config that holds the path of an asset.

    Attributes:
        node: the dotted path of the node.
        field: the name of the field.
        value: what the field holds.
        siblings: names of files beside the asset that belong to it.
        folder: the name of the folder below `FOLDER` that holds the run's copy.
    """

    node: str
    field: str
    value: str
    siblings: tuple[str, ...]
    folder: str

    @property
    def path(self) -> str:
        """The dotted path of the field."""
        return join(self.node, self.field)

    @property
    def name(self) -> str:
        """The file name."""
        return file_name(self.value)


def file_name(path: str) -> str:
    """The last part of a path or URL."""
    return path.replace("\\", "/").rstrip("/").rpartition("/")[2]


def map_assets(tree: Any, function: Callable[[Asset], str]) -> Any:
    """The tree with each asset's value replaced by what `function` returns for it, in the order of the tree."""
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
    """A file name for a dotted path, which may hold any key of a mapping."""
    name = quote(path, safe="")
    return f"%2E{name[1:]}" if name.startswith(".") else name


def assets(tree: Any) -> list[Asset]:
    """The assets of a config, in its order."""
    result: list[Asset] = []

    def collect(asset: Asset) -> str:
        result.append(asset)
        return asset.value

    map_assets(tree, collect)
    return result


def portable(tree: Any, keep: Callable[[Asset], bool] = lambda asset: False) -> tuple[Any, dict[str, Asset]]:
    """The config as a run stores it: assets by their place in the run.

    Args:
        tree: a config.
        keep: whether an asset stays outside of the run.

    Returns:
        The config, and path in the run -> asset to copy there. Two fields with the same path share a copy.
    """
    copies: dict[str, Asset] = {}
    by_source: dict[tuple[str, tuple[str, ...]], str] = {}

    def stored_value(asset: Asset) -> str:
        if asset.value.startswith(RUN_SCHEME) or keep(asset):
            return asset.value
        key = asset.value, asset.siblings
        if key not in by_source:
            parts = [FOLDER, asset.folder, _folder_name(asset.name)]
            by_source[key] = "/".join(part for part in parts if part)
            copies[by_source[key]] = asset
        return RUN_SCHEME + by_source[key]

    return map_assets(tree, stored_value), copies


class RunFolder(Protocol):
    """Where a run's files are."""

    @property
    def name(self) -> str:
        """The run's config file, for messages."""
        ...

    def find(self, path: str) -> str | None:
        """A local path of one of the run's files; None if the run lacks it."""
        ...

    def holds(self, path: str) -> bool:
        """Whether an absolute local path lies inside the run."""
        ...


@attrs.frozen
class LocalRun:
    """A run in a local or mounted directory; see `RunFolder`.

    Attributes:
        name: the run's config file, for messages.
        folders: the directories to look in, the first one first.
    """

    name: str
    folders: tuple[Path, ...]

    @classmethod
    def of_config(cls, file: Path) -> "LocalRun":
        """The run whose config a file is: it lies in the root, or in the folder of a checkpoint."""
        folder = Path(os.path.abspath(file)).parent
        in_checkpoint = folder.name.isdecimal() and (folder / "manifest.json").is_file()
        return cls(str(file), (folder.parent, folder.parent.parent) if in_checkpoint else (folder,))

    @property
    def has_lock(self) -> bool:
        """Whether a run was written there."""
        return any((folder / "run.lock.json").is_file() for folder in self.folders)

    def find(self, path: str) -> str | None:
        """See `RunFolder`."""
        places = (os.path.join(os.path.abspath(folder), *PurePosixPath(path).parts) for folder in self.folders)
        return next((place for place in places if os.path.isfile(place)), None)

    def holds(self, path: str) -> bool:
        """See `RunFolder`."""
        return any(Path(os.path.abspath(path)).is_relative_to(os.path.abspath(folder)) for folder in self.folders)


def attach(tree: Any, run: RunFolder, *, earlier: bool = True) -> tuple[Any, list[Asset]]:
    """The config of a run with paths of assets that can be opened now.

    Args:
        tree: the config.
        run: where its files are.
        earlier: also handles assets that an earlier version left outside of the run. They are used with a note. If one is
            gone, and the run has a file of its name, that file is used.

    Returns:
        The config, and the assets that the run lacks, which keep their `run:` values.
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


def with_equal_names(tree: Any, other: Any) -> Any:
    """The tree with the assets of `other` in place of copies of them, so that a comparison names only what differs."""
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
    """The path of an asset that the config does not name by its place in the run."""
    path = os.path.expanduser(asset.value)
    if "://" in path or (os.path.isfile(path) and not run.holds(path)):
        copy = f"{FOLDER}/{asset.folder}/{asset.name}"
        _note(
            f"note: {asset.path} of {run.name} is a file outside of the run: {asset.value}\n"
            f"    fix: to make the run portable, copy the file to {copy} in it and set {asset.path} to "
            f"{RUN_SCHEME}{copy} in its config.yaml"
        )
        return asset.value
    if os.path.isfile(path):
        beside = os.path.join(os.path.dirname(path), _IMPORTED, asset.name)
        return beside if os.path.isfile(beside) else asset.value
    places = (f"{FOLDER}/{asset.folder}/", f"{_IMPORTED}/", "")
    own = next((place for p in places if (place := run.find(p + asset.name)) is not None), None)
    if own is None:
        return asset.value
    _note(f"note: {asset.path} of {run.name}: {asset.value} does not exist; using the run's own {asset.name}")
    return own


_notes: set[str] = set()


def _note(text: str) -> None:
    """Logs a text once per process."""
    if text not in _notes:
        _notes.add(text)
        log.warning("%s", text)
