"""Object stores through fsspec, which writes whole objects: Azure (`az://`, `abfs://`), and memory for tests."""

from collections.abc import Iterator, Sequence
from functools import cached_property
from threading import Lock
from typing import Any

from axlearn_plugins_cloud.objects import MissingObjectError, RefusedError, TransientError

_memory_lock = Lock()
STATUSES = {408, 429, 500, 502, 503, 504}


class FsspecObjects:
    """The objects in a bucket (a container in Azure) behind an fsspec protocol; see `Objects`."""

    def __init__(self, protocol: str, bucket: str):
        self.protocol, self.bucket = protocol, bucket
        self.batch = 1000

    @cached_property
    def files(self) -> Any:
        """The file system, created on first use. It does not cache listings, because other processes write too."""
        import fsspec

        try:
            return fsspec.filesystem(self.protocol, use_listings_cache=False, skip_instance_cache=True)
        except ImportError as error:
            fix = 'pip install "axlearn-plugins-cloud[azure]"'
            raise RefusedError(f"fsspec does not support {self.protocol}://: {error}", fix) from error
        except ValueError as error:
            raise RefusedError(
                str(error), "set the credentials that fsspec looks for, such as AZURE_STORAGE_ACCOUNT_NAME"
            ) from error

    def put(self, key: str, data: bytes) -> None:
        """Write an object; see `Objects.put`."""
        self._call("pipe_file", key, data)

    def put_new(self, key: str, data: bytes) -> bool:
        """Create an object; see `Objects.put_new`."""
        if self.protocol == "memory":  # used within one process, but not thread-safe
            with _memory_lock:
                if self._call("exists", key):
                    return False
                self.put(key, data)
                return True
        try:
            self._call("pipe_file", key, data, mode="create")
        except FileExistsError:
            return False
        return True

    def get(self, key: str) -> bytes:
        """Read an object; see `Objects.get`."""
        return self._call("cat_file", key)

    def get_range(self, key: str, begin: int, size: int) -> bytes:
        """Read a range; see `Objects.get_range`."""
        return self._call("cat_file", key, start=begin, end=begin + size)

    def list(self, prefix: str) -> Iterator[tuple[str, int]]:
        """List objects; see `Objects.list`."""
        folder = prefix.rpartition("/")[0]
        try:
            infos = self._call("find", folder, detail=True)
        except MissingObjectError:
            infos = {}
        root = f"{self.bucket}/"
        keys = ((name.lstrip("/").removeprefix(root), info["size"]) for name, info in infos.items())
        return ((key, size) for key, size in keys if key.startswith(prefix))

    def list_names(self, folder: str) -> Iterator[str]:
        """List a folder; see `Objects.list_names`."""
        try:
            infos = self._call("ls", folder, detail=True)
        except MissingObjectError:
            infos = []
        names = (info["name"].strip("/") for info in infos)
        return (name.rpartition("/")[2] for name in names if name != self._name(folder).strip("/"))

    def delete(self, keys: Sequence[str]) -> None:
        """Delete objects; see `Objects.delete`."""
        for key in keys:
            try:
                self._call("rm_file", key)
            except MissingObjectError:
                continue

    def copy(self, source: str, target: str) -> None:
        """Copy an object; see `Objects.copy`."""
        self._call("cp_file", source, self._name(target))

    def _name(self, key: str) -> str:
        return f"{self.bucket}/{key}".rstrip("/")

    def _call(self, name: str, key: str, *args: Any, **fields: Any) -> Any:
        try:
            return getattr(self.files, name)(self._name(key), *args, **fields)
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
            raise MissingObjectError from error
        except (FileExistsError, RefusedError):
            raise
        except PermissionError as error:
            raise RefusedError(
                str(error), "check that these credentials may list, read and write the bucket"
            ) from error
        except (ConnectionError, TimeoutError) as error:
            raise TransientError(str(error) or type(error).__name__) from error
        except Exception as error:  # each protocol has its own errors
            status = getattr(error, "status_code", None) or getattr(error, "status", None)
            if status in STATUSES or isinstance(error, OSError):
                raise TransientError(f"{type(error).__name__}: {error}") from error
            raise RefusedError(f"{type(error).__name__}: {error}", "check the URI and the credentials") from error
