"""A storage without a local directory."""

from axlearn_core.checkpoint import LocalStorage
from axlearn_core.errors import StorageError


class Shelf:
    """A storage that does not expose a directory and records its reads."""

    files: set = set()  # noqa: RUF012

    def __init__(self, root):
        self.local = LocalStorage(root)
        for name in ("list", "list_names", "write", "create", "staging", "commit", "delete"):
            setattr(self, name, getattr(self.local, name))

    def read(self, path):
        self.files.add(path)
        return self.local.read(path)

    def read_into(self, path, begin, buffer):
        self.files.add(path)
        self.local.read_into(path, begin, buffer)

    def directory(self):
        raise StorageError("a shelf is not a directory")
