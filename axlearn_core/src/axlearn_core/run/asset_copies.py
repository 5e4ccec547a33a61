"""Copies of a run's assets: read when a run is written, found when it is opened, compared when it goes on.

`axlearn_core.config.assets` says what an asset is.
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
from axlearn_core.config.assets import FOLDER, Asset, LocalRun, assets, attach, file_name, map_assets, portable
from axlearn_core.config.files import read_regular
from axlearn_core.config.node import Node
from axlearn_core.contracts.storage import Storage
from axlearn_core.errors import CheckpointError, ConfigError, MissingFileError, Problem, RequestError, StorageError

log = logging.getLogger(__name__)
Tree = TypeVar("Tree", bound=Node[Any])
Place = tuple[Storage, str]
"""A storage, and a folder in it: empty, or with a `/` at its end."""


def collect_assets(tree: Tree, *, required: bool = True) -> tuple[Tree, dict[str, bytes]]:
    """The config as a run stores it, and the files to store with it: path in the run -> content.

    A URL that no storage reads stays in the config, with a note.

    Args:
        tree: a config.
        required: refuses an asset that cannot be read. Otherwise it stays as it is, with a note.

    Raises:
        ConfigError: names each asset that cannot be read.
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
                expected="a file, which the run keeps a copy of",
                fix="set the path of a file that can be read",
            )
    outside = {value: problem for value, problem in problems.items() if "://" in value or not required}
    if refused := [problem for value, problem in problems.items() if value not in outside]:
        raise ConfigError(refused)
    for problem in outside.values():
        log.warning("note: %s stays outside of the run: %s (%s)", problem.path, problem.got, problem.message)
    config, copies = portable(tree, keep=lambda asset: asset.value in outside)
    files: dict[str, bytes] = {}
    for name, asset in copies.items():
        files[name] = contents[asset.value]
        folder = name.rpartition("/")[0]
        for sibling in asset.siblings:
            if sibling != asset.name and (content := _read_sibling(asset.value, sibling)) is not None:
                files[f"{folder}/{sibling}"] = content
    return config, files


def _read(path: str) -> bytes:
    """The content of a file at a path or URL. Raises `OSError` or `StorageError`."""
    if "://" not in path:
        return read_regular(Path(path).expanduser(), sys.maxsize)
    folder, _, name = path.rpartition("/")
    return open_storage(folder).read(name)


def _read_sibling(path: str, name: str) -> bytes | None:
    """The content of a file beside another one; None if there is none."""
    try:
        return _read(f"{path.rpartition('/')[0]}/{name}" if "/" in path else name)
    except (MissingFileError, FileNotFoundError):
        return None
    except OSError as error:
        raise StorageError(f"{name} beside {path} cannot be read: {error.strerror or error}") from error


def write_assets(storage: Storage, files: Mapping[str, bytes]) -> None:
    """Writes a run's assets; those that are the same already are left alone. Raises `StorageError`."""
    for name, content in files.items():
        try:
            same = storage.read(name) == content
        except MissingFileError:
            same = False
        if not same:
            storage.write(name, [content])


@attrs.frozen
class StoredRun:
    """A run behind storages; see `axlearn_core.config.assets.RunFolder`.

    Attributes:
        name: the run's config file, for messages.
        places: where its files may be, the first one first.
    """

    name: str
    places: Sequence[Place]

    def find(self, path: str) -> str | None:
        """See `RunFolder`. A file that is not local is copied to the user's cache, with the files beside it."""
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
    """The config of a run with paths of assets that can be opened now.

    Args:
        tree: the config.
        name: of its file, for messages.
        places: where the run's files may be.

    Raises:
        CheckpointError: the run lacks an asset.
        StorageError: a storage cannot be read.
    """
    config, lost = attach(tree, StoredRun(name, places))
    if lost:
        got = "\n".join(f"    {asset.path}: {asset.value}" for asset in lost)
        raise CheckpointError(
            f"{name} names files that its run does not have\n{got}\n"
            f"    expected: them in the run directory, below {FOLDER}/\n"
            "    fix: copy the run directory as a whole, or set the path of a file elsewhere in this config.yaml"
        )
    return config


def _download(storage: Storage, path: str) -> str | None:
    """A file of a storage, copied to the cache with the files beside it; None if it does not exist."""
    folder, _, name = path.rpartition("/")
    prefix = f"{folder}/" if folder else ""
    beside = [f.path for f in storage.list(prefix if prefix else name)]
    names = [p.removeprefix(prefix) for p in beside if "/" not in p.removeprefix(prefix)]
    if name not in names:
        return None
    files = {n: storage.read(prefix + n) for n in sorted(names if prefix else [name])}
    return str(_cached(files) / name)


def _cached(files: Mapping[str, bytes]) -> Path:
    """A folder of the cache with these files. Its name is a hash of them."""
    digest = hashlib.sha256()
    for name, content in files.items():
        digest.update(f"{name}\0{len(content)}\0".encode() + content)
    folder = cache_folder() / digest.hexdigest()[:32]
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_assets(LocalStorage(folder), files)  # also repairs what was changed there
    return folder


@functools.cache
def cache_folder() -> Path:
    """The user's own folder for copies of remote assets; a temporary one if the home directory cannot be written."""
    home = os.environ.get("XDG_CACHE_HOME")
    try:
        folder = (Path(home) if home else Path.home() / ".cache") / "axlearn" / "assets"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if os.access(folder, os.W_OK) and folder.stat().st_uid == os.getuid():
            return folder.absolute()
    except (OSError, RuntimeError):  # no home directory
        pass
    return Path(tempfile.mkdtemp(prefix="axlearn-assets-"))


def aligned_assets(stored: Any, config: Any) -> Any:
    """The stored config of a run, with the paths that `config` has for assets of the same content."""
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


def recovered_assets(config: Tree, stored: Any) -> tuple[Tree, list[str]]:
    """A config that continues a run, with the run's copies of assets whose original is gone.

    Args:
        config: of the request.
        stored: the run's config, attached; or None.

    Returns:
        The config, and a note for each such asset.
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
        notes.append(f"{asset.path}: {asset.value} does not exist; using the run's copy of it, {copy}")
        return copy

    return map_assets(config, recovered), notes


def located_by_content(tree: Tree) -> Tree:
    """The config with assets that lie in a run named by their content, so that equal runs give equal texts anywhere."""

    def named(asset: Asset) -> str:
        folder = Path(asset.value).parent
        in_run = folder.parent.name == FOLDER and (folder.parent.parent / "config.yaml").is_file()
        if not in_run and folder.parent != cache_folder():
            return asset.value
        return f"sha256:{hashlib.sha256(_read(asset.value)).hexdigest()[:16]}"

    return map_assets(tree, named)
