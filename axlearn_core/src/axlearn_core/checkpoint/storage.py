"""Open a `Storage`: `LocalStorage` for directories, or a plugin's storage (`axlearn_checkpoint_storage`) for other schemes."""

import os
import re
import shutil
import stat
import sys
import threading
import uuid
from collections.abc import Iterable
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import unquote, urlsplit

from axlearn_core.config.files import open_regular, read_regular
from axlearn_core.contracts.experiment import checkpoint_uri
from axlearn_core.contracts.storage import Storage, StoredFile
from axlearn_core.errors import ConfigError, MissingFileError, PluginError, Problem, RequestError, StorageError
from axlearn_core.plugins.index import NO_INDEX, find_package, has_index
from axlearn_core.plugins.manager import Host, host


class LocalStorage:
    """Storage in a local or mounted directory. Implements `axlearn_core.contracts.storage.Storage`.

    Attributes:
        root: The directory. Reading does not create it.
    """

    def __init__(self, root: Path | str):
        self.root = Path(root)

    def list_names(self, folder: str = "") -> list[str]:
        """Return the names of the files and folders directly in a folder."""
        try:
            return sorted(os.listdir(self._locate(folder)))
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise self._error(folder, error) from error

    def list(self, prefix: str = "") -> list[StoredFile]:
        """Return all files whose path starts with `prefix`."""
        parent, _, start = prefix.rpartition("/")
        files: list[StoredFile] = []
        top = True
        for folder, folders, names in os.walk(self._locate(parent), onerror=self._unlistable):
            if top:  # skip the other folders, which may be large
                folders[:] = [name for name in folders if name.startswith(start)]
                names, top = [name for name in names if name.startswith(start)], False
            paths = (Path(folder, name) for name in names)
            sizes = ((path.relative_to(self.root).as_posix(), _file_size(path)) for path in paths)
            files += [StoredFile(name, size) for name, size in sizes if size is not None]
        return sorted(files)

    def _unlistable(self, error: OSError) -> None:
        """Ignore folders that another process renamed or deleted. Raise other errors."""
        if not isinstance(error, (FileNotFoundError, NotADirectoryError)):
            raise self._error(os.path.relpath(error.filename or "", self.root), error) from error

    def read(self, path: str) -> bytes:
        """Return the contents of a file."""
        try:
            return read_regular(self._locate(path), sys.maxsize)
        except OSError as error:
            raise self._error(path, error) from error

    def read_into(self, path: str, begin: int, buffer: memoryview) -> None:
        """Fill `buffer` from a file, starting at byte `begin`."""
        try:
            with open(open_regular(self._locate(path)), "rb", buffering=0) as file:
                file.seek(begin)
                filled = 0
                while filled < len(buffer):
                    count = file.readinto(buffer[filled:])
                    if not count:
                        raise StorageError(
                            f"{self.root / path} is too short: {begin + filled} bytes, expected {begin + len(buffer)}"
                        )
                    filled += count
        except OSError as error:
            raise self._error(path, error) from error

    def write(self, path: str, chunks: Iterable[bytes | memoryview]) -> None:
        """Write a temporary file, then rename it."""
        target = self._locate(path)
        temporary = target.with_name(f".{target.name}.{os.getpid()}-{threading.get_native_id()}")
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            try:
                with temporary.open("wb") as file:
                    for chunk in chunks:
                        file.write(chunk)
                    file.flush()
                    os.fsync(file.fileno())
                temporary.replace(target)
            finally:
                temporary.unlink(missing_ok=True)
        except OSError as error:
            raise self._error(path, error) from error

    def create(self, path: str, data: bytes) -> bool:
        """Create a file atomically. Return False if it already exists."""
        target = self._locate(path)
        temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex}")
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            try:
                temporary.write_bytes(data)
                os.link(temporary, target)
            finally:
                temporary.unlink(missing_ok=True)
        except FileExistsError:
            return False
        except OSError as error:
            raise self._error(path, error) from error
        return True

    def staging(self, target: str) -> str:
        """Return the path of a hidden folder next to the target."""
        folder, slash, name = target.rpartition("/")
        return f"{folder}{slash}.{name}.partial"

    def commit(self, source: str, target: str) -> None:
        """Rename a folder."""
        begin, end = self._locate(source), self._locate(target)
        if end.exists():
            raise StorageError(f"{end} already exists")
        try:
            for folder, _, _ in os.walk(begin, topdown=False):
                sync_path(Path(folder))
            end.parent.mkdir(parents=True, exist_ok=True)
            begin.rename(end)
            sync_path(end.parent)
        except OSError as error:
            raise self._error(source, error) from error

    def delete(self, path: str) -> None:
        """Delete a file or folder."""
        target = self._locate(path)
        try:
            if target.is_dir() and not target.is_symlink():
                if not target.name.startswith("."):  # hide the folder before deleting its files
                    hidden = target.with_name(f".{target.name}.deleted")
                    shutil.rmtree(hidden, ignore_errors=True)
                    target = target.rename(hidden)
                shutil.rmtree(target)
            else:
                target.unlink(missing_ok=True)
        except OSError as error:
            raise self._error(path, error) from error

    def directory(self) -> Path:
        """Create the directory if necessary, and return it."""
        try:
            self.root.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise self._error("", error) from error
        return self.root

    def _locate(self, path: str) -> Path:
        parts = PurePosixPath(path).parts
        if path.startswith("/") or ".." in parts:
            raise StorageError(f"{path!r} is not a path below {self.root}")
        return self.root.joinpath(*parts)

    def _error(self, path: str, error: OSError) -> StorageError:
        missing = isinstance(error, (FileNotFoundError, NotADirectoryError))
        return (MissingFileError if missing else StorageError)(f"{self.root / path}: {error.strerror or error}")


def _file_size(path: Path) -> int | None:
    """Return the size of a regular file, or None if there is no such file."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return status.st_size if stat.S_ISREG(status.st_mode) else None


def open_storage(uri: str | Path, plugins: Host | None = None) -> Storage:
    """Return the storage for a path or URI, without accessing it.

    Raises:
        RequestError: If no plugin supports the URI scheme.
        PluginError: If several plugins support it, or if the plugin's storage lacks required methods.
    """
    text = str(uri)
    parts = urlsplit(text)
    if parts.scheme == "file":
        return LocalStorage(Path(unquote(parts.path)))
    if "://" not in text:
        return LocalStorage(Path(text).expanduser())
    plugins = plugins or host()
    storage = plugins.call_single("axlearn_checkpoint_storage", uri=text)
    if storage is None:
        implementations = plugins.hook.axlearn_checkpoint_storage.get_hookimpls()
        names = [f"{o.plugin_name} ({plugins.entries[o.plugin_name].origin})" for o in implementations]
        raise RequestError(
            f"no plugin supports checkpoints at {_hide_credentials(text)!r}: the scheme {parts.scheme!r} is unknown\n"
            "    known: paths and file:// (axlearn-core)"
            + "".join(f"; the schemes of {name}" for name in sorted(names))
            + "\n    fix: install a plugin for it, or mount it and use the path"
            + _storage_hint(parts.scheme)
        )
    methods = [name for name, value in vars(Storage).items() if callable(value) and not name.startswith("_")]
    missing = sorted(name for name in methods if not callable(getattr(storage, name, None)))
    if missing:
        written = f"{type(storage).__module__}.{type(storage).__qualname__}"
        raise PluginError(
            f"the storage of {parts.scheme}://, {written}, lacks {', '.join(missing)}\n"
            "    expected: every method of axlearn_core.contracts.storage.Storage\n"
            "    fix: install a version of the plugin that supports this version of axlearn-core"
        )
    return storage


def _storage_hint(scheme: str) -> str:
    if package := find_package("storages", scheme):
        return f"; {package} supports {scheme}://"
    return "" if has_index() else f"; {NO_INDEX}"


def _hide_credentials(uri: str) -> str:
    return re.sub(r"//[^/@]*@", "//***@", uri)


def check_uri(config: Any) -> None:
    """Raise `ConfigError` if no plugin supports the scheme of `checkpointer.uri`. Do not access the storage."""
    uri = checkpoint_uri(config)
    if not isinstance(uri, str):
        return
    try:
        open_storage(uri)
    except RequestError as error:
        first, *rest = str(error).splitlines()
        parts = (line.strip().partition(": ") for line in rest)
        lines = {label: value for label, _, value in parts}
        schemes = lines.get("known") or lines.get("expected")
        raise ConfigError(
            Problem(path="checkpointer.uri", message=first, expected=schemes, fix=lines.get("fix"))
        ) from error


def resolve(uri: str | Path, plugins: Host | None = None) -> Path:
    """Return the local or mounted directory of a path or URI. Do not create local directories.

    Raises:
        RequestError: If no plugin supports the URI scheme.
        PluginError: If several plugins support it.
        StorageError: If the storage has no directory, or the directory is not writable.
    """
    storage = open_storage(uri, plugins)
    return storage.root if isinstance(storage, LocalStorage) else storage.directory()


def sync_path(path: Path) -> None:
    """Flush the contents of a file, or the entries of a directory, to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
