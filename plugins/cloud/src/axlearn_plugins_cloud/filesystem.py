"""What fsspec reaches, by whole objects: Azure (`az://`, `abfs://`), and memory for tests."""

from collections.abc import Iterator, Sequence
from functools import cached_property
from threading import Lock
from typing import Any

from axlearn_plugins_cloud.objects import Missing, Refused, Transient

_creating = Lock()
STATUSES = {408, 429, 500, 502, 503, 504}


class FsspecObjects:
    """The objects of a bucket (in Azure a container) of an fsspec protocol; see `Objects`."""

    def __init__(self, protocol: str, bucket: str):
        self.protocol, self.bucket = protocol, bucket

    @cached_property
    def files(self) -> Any:
        """The file system, made at the first call. Without its cache of listings: other processes write too."""
        import fsspec

        try:
            return fsspec.filesystem(self.protocol, use_listings_cache=False, skip_instance_cache=True)
        except ImportError as error:
            fix = 'pip install "axlearn-plugins-cloud[azure]"'
            raise Refused(f"fsspec has no {self.protocol}://: {error}", fix) from error
        except ValueError as error:
            raise Refused(
                str(error), "set the credentials that fsspec looks for, such as AZURE_STORAGE_ACCOUNT_NAME"
            ) from error

    def put(self, key: str, data: bytes) -> None:
        """See `Objects`."""
        self._call("pipe_file", key, data)

    def put_new(self, key: str, data: bytes) -> bool:
        """See `Objects`."""
        if self.protocol == "memory":  # of this process, whose threads it does not keep apart
            with _creating:
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
        """See `Objects`."""
        return self._call("cat_file", key)

    def get_range(self, key: str, begin: int, size: int) -> bytes:
        """See `Objects`."""
        return self._call("cat_file", key, start=begin, end=begin + size)

    def list(self, prefix: str) -> Iterator[tuple[str, int]]:
        """See `Objects`."""
        folder = prefix.rpartition("/")[0]
        try:
            infos = self._call("find", folder, detail=True)
        except Missing:
            infos = {}
        root = f"{self.bucket}/"
        keys = ((name.lstrip("/").removeprefix(root), info["size"]) for name, info in infos.items())
        return ((key, size) for key, size in keys if key.startswith(prefix))

    def delete(self, keys: Sequence[str]) -> None:
        """See `Objects`."""
        for key in keys:
            try:
                self._call("rm_file", key)
            except Missing:
                continue

    def copy(self, source: str, target: str) -> None:
        """See `Objects`."""
        self._call("cp_file", source, self._name(target))

    def _name(self, key: str) -> str:
        return f"{self.bucket}/{key}".rstrip("/")

    def _call(self, name: str, key: str, *args: Any, **fields: Any) -> Any:
        try:
            return getattr(self.files, name)(self._name(key), *args, **fields)
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
            raise Missing from error
        except (FileExistsError, Refused):
            raise
        except PermissionError as error:
            raise Refused(str(error), "check that these credentials may list, read and write there") from error
        except (ConnectionError, TimeoutError) as error:
            raise Transient(str(error) or type(error).__name__) from error
        except Exception as error:  # each protocol has errors of its own
            status = getattr(error, "status_code", None) or getattr(error, "status", None)
            if status in STATUSES or isinstance(error, OSError):
                raise Transient(f"{type(error).__name__}: {error}") from error
            raise Refused(f"{type(error).__name__}: {error}", "check the URI and the credentials") from error
