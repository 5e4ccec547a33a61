"""Modules under their earlier names, for one release: a warning says the new name."""

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import warnings
from collections.abc import Sequence
from types import ModuleType


def redirect(old: str, new: str) -> None:
    """Make `old`, the module that calls this while it is imported, and every module below it the modules of `new`.

    Both names give the same module objects, so a class has one identity. Importing `old` warns with `DeprecationWarning`.

    Raises:
        ImportError: `new` is not installed.
    """
    warnings.warn(f"{old} moved to {new}; the old name goes with version 0.3", DeprecationWarning, stacklevel=2)
    if not any(isinstance(finder, MovedFinder) and finder.old == old for finder in sys.meta_path):
        sys.meta_path.insert(0, MovedFinder(old, new))
    sys.modules[old] = importlib.import_module(new)


class MovedFinder(importlib.abc.MetaPathFinder):
    """Finds `old.x` as `new.x`."""

    def __init__(self, old: str, new: str):
        self.old, self.new = old, new

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The spec of a module below `old`; None for any other."""
        if not fullname.startswith(f"{self.old}."):
            return None
        name = self.new + fullname.removeprefix(self.old)
        if importlib.util.find_spec(name) is None:
            raise ModuleNotFoundError(f"No module named {name!r} ({self.old} moved to {self.new})", name=fullname)
        return importlib.util.spec_from_loader(fullname, MovedLoader(name))


class MovedLoader(importlib.abc.Loader):
    """Gives the module that has the new name, untouched."""

    def __init__(self, name: str):
        self.module = importlib.import_module(name)
        self.spec = self.module.__spec__

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        """The module itself."""
        return self.module

    def exec_module(self, module: ModuleType) -> None:
        """The module ran already; the import system has just put the spec of the old name into it."""
        module.__spec__ = self.spec
