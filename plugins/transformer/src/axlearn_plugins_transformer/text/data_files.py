"""List and open data files.

Files are local or behind an fsspec URL (`s3://`, `gs://`, `memory://`, ...).
"""

import glob
import os
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from axlearn_core.config.files import open_regular
from axlearn_core.errors import InputError, nearest
from axlearn_plugins_transformer.text.fingerprint import DataFile, fingerprint_files, remote_digest
from axlearn_plugins_transformer.text.urls import check_url


def is_url(path: str) -> bool:
    """Return whether fsspec must open the path."""
    return "://" in path


def filesystem(url: str) -> tuple[Any, str]:
    """Return the fsspec filesystem for a URL, and the path in it.

    Raises:
        InputError: The protocol is not allowed (see `urls`), or fsspec or its driver is missing.
    """
    check_url(url)
    try:
        import fsspec

        return fsspec.core.url_to_fs(url)
    except (ImportError, ValueError) as error:  # fsspec or a driver is not installed, or the protocol is unknown
        raise InputError(
            f"cannot read {url}: {error}\n    fix: pip install 'axlearn-plugins-transformer[remote]' and fsspec's driver for "
            f"{url.partition(':')[0]}"
        ) from None


def open_file(path: str) -> IO[bytes]:
    """Open a file for reading bytes. Raise InputError with the reason if this fails."""
    try:
        if is_url(path):
            fs, inner = filesystem(path)
            return fs.open(inner, "rb")
        return open(open_regular(Path(path)), "rb")
    except OSError as error:
        raise InputError(f"cannot read the data file {path}: {error.strerror or error}") from None


def open_data(file: DataFile) -> IO[bytes]:
    """Open a data file. Raise InputError if it has changed since it was listed."""
    handle = open_file(file.path)
    try:
        file.check(handle)
    except BaseException:
        handle.close()
        raise
    return handle


def list_files(patterns: Sequence[str]) -> tuple[DataFile, ...]:
    """Return the files that match paths and globs, sorted, without duplicates.

    `**` matches recursively. Globs skip empty files. Naming an empty file is an error.

    Raises:
        InputError: A pattern matches nothing, or a named file is missing, empty or a directory.
    """
    by_path: dict[str, DataFile] = {}
    for pattern in patterns:
        files = _remote(pattern) if is_url(pattern) else _local(os.path.expanduser(pattern))
        if not files:
            raise InputError(f"no data file matches {pattern!r}{_hint(os.path.expanduser(pattern))}")
        data = {f.path: f for f in files if f.size}
        if not data:
            raise InputError(f"the data file {pattern!r} is empty (0 bytes)")
        by_path |= data
    files = [by_path[path] for path in sorted(by_path)]
    local = {f.path: f for f in fingerprint_files([f for f in files if not is_url(f.path)])}
    return tuple(local.get(f.path, f) for f in files)


def _local(pattern: str) -> list[DataFile]:
    if os.path.isdir(pattern):
        raise InputError(
            f"{pattern!r} is a directory\n    fix: use a glob, such as {os.path.join(pattern, '**', '*.txt')!r}"
        )
    if os.path.lexists(pattern) and not os.path.isfile(pattern):
        raise InputError(f"the data file {pattern!r} is not a regular file or a link to one")
    # A path that exists is never a glob, even if its name contains brackets or stars.
    paths = [pattern] if os.path.exists(pattern) else glob.glob(pattern, recursive=True)
    return [DataFile(p, p, os.path.getsize(p)) for p in paths if os.path.isfile(p)]


def _remote(url: str) -> list[DataFile]:
    fs, path = filesystem(url)
    try:
        infos = fs.glob(path, detail=True).values() if glob.has_magic(path) else [fs.info(path)]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise InputError(f"cannot list {url}: {error}") from None
    infos_by_name = [(fs.unstrip_protocol(i["name"]), i) for i in infos if i["type"] == "file"]
    try:
        return [
            DataFile(name, name, int(info["size"] or 0), digest=remote_digest(info, fs) if info["size"] else "")
            for name, info in infos_by_name
        ]
    except OSError as error:
        raise InputError(f"cannot read {url}: {error}") from None


def _hint(pattern: str) -> str:
    folder, name = os.path.split(pattern)
    if is_url(pattern) or glob.has_magic(folder):
        return ""
    if not os.path.isdir(folder or "."):
        return f"\n    the directory {folder!r} does not exist"
    close = nearest(name, os.listdir(folder or "."))
    return f"\n    did you mean: {', '.join(os.path.join(folder, n) for n in close)}?" if close else ""
