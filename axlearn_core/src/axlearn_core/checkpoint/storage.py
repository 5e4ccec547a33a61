"""Opens storages: local and mounted directories here, other URI schemes through `axlearn_checkpoint_storage`."""

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
from axlearn_core.plugins.index import NO_INDEX, has_index, package_of
from axlearn_core.plugins.manager import Host, host


class LocalStorage:
    """The storage of a local or mounted directory; see `axlearn_core.contracts.storage.Storage`.

    Attributes:
        root: the directory. Reading does not create it.
    """

    def __init__(self, root: Path | str):
        self.root = Path(root)

    def list(self, prefix: str = "") -> list[StoredFile]:
        """All files whose path begins with `prefix`."""
        parent, _, start = prefix.rpartition("/")
        files: list[StoredFile] = []
        top = True
        for folder, folders, names in os.walk(self._locate(parent), onerror=self._unlistable):
            if top:  # the rest of the tree, which may be large, is not looked at
                folders[:] = [name for name in folders if name.startswith(start)]
                names, top = [name for name in names if name.startswith(start)], False
            paths = (Path(folder, name) for name in names)
            sizes = ((path.relative_to(self.root).as_posix(), _file_size(path)) for path in paths)
            files += [StoredFile(name, size) for name, size in sizes if size is not None]
        return sorted(files)

    def _unlistable(self, error: OSError) -> None:
        """A folder that another process renames or deletes meanwhile is not listed; others cannot be read."""
        if not isinstance(error, (FileNotFoundError, NotADirectoryError)):
            raise self._error(os.path.relpath(error.filename or "", self.root), error) from error

    def read(self, path: str) -> bytes:
        """A whole file."""
        try:
            return read_regular(self._locate(path), sys.maxsize)
        except OSError as error:
            raise self._error(path, error) from error

    def read_into(self, path: str, begin: int, buffer: memoryview) -> None:
        """Fills `buffer` with the file from byte `begin` on."""
        try:
            with open(open_regular(self._locate(path)), "rb", buffering=0) as file:
                file.seek(begin)
                filled = 0
                while filled < len(buffer):
                    count = file.readinto(buffer[filled:])
                    if not count:
                        raise StorageError(
                            f"{self.root / path} ends too early: {begin + filled} bytes, expected {begin + len(buffer)}"
                        )
                    filled += count
        except OSError as error:
            raise self._error(path, error) from error

    def write(self, path: str, chunks: Iterable[bytes | memoryview]) -> None:
        """Writes a file beside its place and renames it there."""
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
        """Links a whole file to its name, which only one of several writers can do."""
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
        """A hidden folder beside the target."""
        folder, slash, name = target.rpartition("/")
        return f"{folder}{slash}.{name}.partial"

    def commit(self, source: str, target: str) -> None:
        """Renames a folder."""
        begin, end = self._locate(source), self._locate(target)
        if end.exists():
            raise StorageError(f"{end} exists already")
        try:
            for folder in (*(p for p in begin.rglob("*") if p.is_dir()), begin):
                sync_path(folder)
            end.parent.mkdir(parents=True, exist_ok=True)
            begin.rename(end)
            sync_path(end.parent)
        except OSError as error:
            raise self._error(source, error) from error

    def delete(self, path: str) -> None:
        """Deletes a file or folder."""
        target = self._locate(path)
        try:
            if target.is_dir() and not target.is_symlink():
                if not target.name.startswith("."):  # out of sight at once
                    hidden = target.with_name(f".{target.name}.deleted")
                    shutil.rmtree(hidden, ignore_errors=True)
                    target = target.rename(hidden)
                shutil.rmtree(target)
            else:
                target.unlink(missing_ok=True)
        except OSError as error:
            raise self._error(path, error) from error

    def directory(self) -> Path:
        """The directory, created."""
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
    """The bytes of a file; None where it is gone, or is not a file."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return status.st_size if stat.S_ISREG(status.st_mode) else None


def open_storage(uri: str | Path, plugins: Host | None = None) -> Storage:
    """The storage of a path or URI. Creates and reads nothing.

    Raises:
        RequestError: no plugin stores this scheme.
        PluginError: more than one does, or the storage of the one that does lacks methods of the contract.
    """
    text = str(uri)
    parts = urlsplit(text)
    if parts.scheme == "file":
        return LocalStorage(Path(unquote(parts.path)))
    if "://" not in text:
        return LocalStorage(Path(text).expanduser())
    plugins = plugins or host()
    storage = plugins.only("axlearn_checkpoint_storage", uri=text)
    if storage is None:
        implementations = plugins.hook.axlearn_checkpoint_storage.get_hookimpls()
        names = [f"{o.plugin_name} ({plugins.entries[o.plugin_name].origin})" for o in implementations]
        raise RequestError(
            f"no plugin stores checkpoints at {_hide_credentials(text)!r}: the scheme {parts.scheme!r} is unknown\n"
            "    known: paths and file:// (the core)"
            + "".join(f"; what {name} takes" for name in sorted(names))
            + "\n    fix: install a plugin for it, or mount it and give the path"
            + _storage_hint(parts.scheme)
        )
    methods = [name for name, value in vars(Storage).items() if callable(value) and not name.startswith("_")]
    missing = sorted(name for name in methods if not callable(getattr(storage, name, None)))
    if missing:
        written = f"{type(storage).__module__}.{type(storage).__qualname__}"
        raise PluginError(
            f"the storage of {parts.scheme}://, {written}, lacks {', '.join(missing)}\n"
            "    expected: every method of axlearn_core.contracts.storage.Storage\n"
            "    fix: install a version of its plugin for this version of axlearn-core"
        )
    return storage


def _storage_hint(scheme: str) -> str:
    if package := package_of("storages", scheme):
        return f"; {package} has {scheme}://"
    return "" if has_index() else f"; {NO_INDEX}"


def _hide_credentials(uri: str) -> str:
    return re.sub(r"//[^/@]*@", "//***@", uri)


def check_uri(config: Any) -> None:
    """Raises `ConfigError` where nothing stores the scheme of a trainer's `checkpointer.uri`. Reaches nothing."""
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
    """The local or mounted directory of a path or URI. A local one is not created.

    Raises:
        RequestError: no plugin stores this scheme.
        PluginError: more than one does.
        StorageError: the storage has no such directory, or it cannot be written.
    """
    storage = open_storage(uri, plugins)
    return storage.root if isinstance(storage, LocalStorage) else storage.directory()


def sync_path(path: Path) -> None:
    """Brings the content of a file, or the entries of a directory, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
