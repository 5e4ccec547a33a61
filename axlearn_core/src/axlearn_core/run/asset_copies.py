"""Copy the assets of a run when it is written, find them when it is opened, and compare them when it is resumed.

`axlearn_core.config.assets` defines assets.
"""

import functools
import hashlib
import logging
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import unquote

import attrs

from axlearn_core.checkpoint.storage import LocalStorage, open_storage
from axlearn_core.config.assets import FOLDER, Asset, LocalRun, assets, attach, file_name, make_portable, map_assets
from axlearn_core.config.files import read_regular
from axlearn_core.config.node import Node
from axlearn_core.contracts.storage import Storage
from axlearn_core.errors import CheckpointError, ConfigError, MissingFileError, Problem, RequestError, StorageError

log = logging.getLogger(__name__)
Tree = TypeVar("Tree", bound=Node[Any])
Place = tuple[Storage, str]
"""A `Storage` and a folder in it. The folder is empty or has a trailing `/`."""


def collect_assets(tree: Tree, *, required: bool = True) -> tuple[Tree, dict[str, bytes]]:
    """Return the config that a run stores, and the contents of its assets by path in the run.

    If no storage backend can read a URL, keep the URL in the config and log a note.

    Args:
        tree: A config.
        required: Raise an error if an asset cannot be read. If False, keep its path and log a note.

    Raises:
        ConfigError: Lists each asset that cannot be read.
    """
    problems: dict[str, Problem] = {}
    contents: dict[str, bytes] = {}
    for asset in assets(tree):
        if asset.value in contents or asset.value in problems:
            continue
        try:
            contents[asset.value] = _read(asset.value)
        except (OSError, RequestError, StorageError) as error:
            reason = (error.strerror if isinstance(error, OSError) else None) or str(error).partition("\n")[0]
            problems[asset.value] = Problem(
                path=asset.path,
                message=f"cannot be read: {reason}",
                got=asset.value,
                expected="a file that the run can copy",
                fix="set the path of a readable file",
            )
    outside = {value: problem for value, problem in problems.items() if "://" in value or not required}
    if refused := [problem for value, problem in problems.items() if value not in outside]:
        raise ConfigError(refused)
    for problem in outside.values():
        log.warning("note: %s stays outside the run: %s (%s)", problem.path, problem.got, problem.message)
    config, copies = make_portable(tree, keep=lambda asset: asset.value in outside)
    files: dict[str, bytes] = {}
    for name, asset in copies.items():
        files[name] = contents[asset.value]
        folder = name.rpartition("/")[0]
        for sibling in asset.siblings:
            if sibling != asset.name and (content := _read_sibling(asset.value, sibling)) is not None:
                files[f"{folder}/{sibling}"] = content
    return config, files


def _read(path: str) -> bytes:
    """Return the contents of a file at a path or URL. Raise `OSError` or `StorageError`."""
    if "://" not in path:
        return read_regular(Path(path).expanduser(), sys.maxsize)
    folder, _, name = path.rpartition("/")
    return open_storage(folder).read(name)


def _read_sibling(path: str, name: str) -> bytes | None:
    """Return the contents of the file `name` in the same folder as `path`, or None if it does not exist."""
    try:
        return _read(f"{path.rpartition('/')[0]}/{name}" if "/" in path else name)
    except (MissingFileError, FileNotFoundError):
        return None
    except OSError as error:
        raise StorageError(f"{name} next to {path} cannot be read: {error.strerror or error}") from error


def write_assets(storage: Storage, files: Mapping[str, bytes]) -> None:
    """Write the assets of a run. Skip files that have not changed. Raise `StorageError` on failure."""
    for name, content in files.items():
        try:
            same = storage.read(name) == content
        except MissingFileError:
            same = False
        if not same:
            storage.write(name, [content])


@attrs.frozen
class StoredRun:
    """A run whose files are in one or more storage folders. Implements `axlearn_core.config.assets.RunFolder`.

    Attributes:
        name: Path of the run's config file, for use in error messages.
        places: Folders to search for its files, in order.
    """

    name: str
    places: Sequence[Place]

    def find(self, path: str) -> str | None:
        """See `RunFolder`. A remote file is copied to the user's cache, together with the other files in its folder."""
        for storage, folder in self.places:
            if isinstance(storage, LocalStorage):
                location = LocalRun(self.name, (storage.root / folder,)).find(path)
            else:
                location = _download(storage, folder + path)
            if location is not None:
                return location
        return None

    def holds(self, path: str) -> bool:
        """See `RunFolder`."""
        roots = tuple(s.root / folder for s, folder in self.places if isinstance(s, LocalStorage))
        return LocalRun(self.name, roots).holds(path)


def attach_assets(tree: Tree, name: str, places: Sequence[Place]) -> Tree:
    """Convert paths relative to a run to paths that can be opened.

    Args:
        tree: A config.
        name: Path of its file, for use in error messages.
        places: Folders to search for the run's files.

    Raises:
        CheckpointError: If an asset is missing.
        StorageError: If files cannot be read.
    """
    config, lost = attach(tree, StoredRun(name, places))
    if lost:
        got = "\n".join(f"    {asset.path}: {asset.value}" for asset in lost)
        raise CheckpointError(
            f"{name} refers to files that its run does not have\n{got}\n"
            f"    expected: the files below {FOLDER}/ in the run directory\n"
            "    fix: copy the complete run directory, or set the path of another file in this config.yaml"
        )
    return config


def _download(storage: Storage, path: str) -> str | None:
    """Copy a file and the other files in its folder from storage to the cache. Return None if it does not exist."""
    folder, _, name = path.rpartition("/")
    prefix = f"{folder}/" if folder else ""
    paths = [f.path for f in storage.list(prefix if prefix else name)]
    names = [p.removeprefix(prefix) for p in paths if "/" not in p.removeprefix(prefix)]
    if name not in names:
        return None
    files = {n: storage.read(prefix + n) for n in sorted(names if prefix else [name])}
    return str(_cached(files) / name)


def _cached(files: Mapping[str, bytes]) -> Path:
    """Return a cache folder that contains these files. It is named after their hash."""
    digest = hashlib.sha256()
    for name, content in files.items():
        digest.update(f"{name}\0{len(content)}\0".encode() + content)
    folder = cache_folder() / digest.hexdigest()[:32]
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_assets(LocalStorage(folder), files)  # also repairs modified files
    return folder


@functools.cache
def cache_folder() -> Path:
    """Return the user's cache folder for remote assets, or a temporary folder if it is not writable."""
    home = os.environ.get("XDG_CACHE_HOME")
    try:
        folder = (Path(home) if home else Path.home() / ".cache") / "axlearn" / "assets"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if os.access(folder, os.W_OK) and folder.stat().st_uid == os.getuid():
            return folder.absolute()
    except (OSError, RuntimeError):  # no home directory
        pass
    return Path(tempfile.mkdtemp(prefix="axlearn-assets-"))


def align_assets(stored: Any, config: Any) -> Any:
    """In the stored config of a run, replace asset paths with those in `config` if the files have equal contents."""
    paths = {asset.path: asset.value for asset in assets(config)}

    def aligned(asset: Asset) -> str:
        other = paths.get(asset.path, asset.value)
        return other if other != asset.value and _same_content(asset.value, other) else asset.value

    return map_assets(stored, aligned)


def _same_content(one: str, other: str) -> bool:
    try:
        return _read(one) == _read(other)
    except (OSError, RequestError, StorageError):
        return False


def recover_assets(config: Tree, stored: Any) -> tuple[Tree, list[str]]:
    """When resuming a run, use the run's copies of assets whose originals no longer exist.

    Args:
        config: Config of the request.
        stored: Config of the run with paths that can be opened, or None.

    Returns:
        The new config, and a note for each such asset.
    """
    copies = {asset.path: asset.value for asset in assets(stored)} if stored is not None else {}
    notes: list[str] = []

    def recovered(asset: Asset) -> str:
        copy = copies.get(asset.path)
        if (
            copy is None
            or copy == asset.value
            or "://" in asset.value
            or os.path.exists(os.path.expanduser(asset.value))
        ):
            return asset.value
        if unquote(file_name(copy)) != asset.name or not os.path.isfile(copy):
            return asset.value
        notes.append(f"{asset.path}: {asset.value} does not exist; using the run's copy, {copy}")
        return copy

    return map_assets(config, recovered), notes


def hash_asset_paths(tree: Tree) -> Tree:
    """Replace asset paths inside runs with content hashes. Equal runs then have equal configs, wherever they are stored."""

    def named(asset: Asset) -> str:
        folder = Path(asset.value).parent
        in_run = folder.parent.name == FOLDER and (folder.parent.parent / "config.yaml").is_file()
        if not in_run and folder.parent != cache_folder():
            return asset.value
        return f"sha256:{hashlib.sha256(_read(asset.value)).hexdigest()[:16]}"

    return map_assets(tree, named)
