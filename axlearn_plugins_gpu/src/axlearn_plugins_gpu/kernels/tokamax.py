"""tokamax's kernels, where it is installed: an optional extra, because it brings many packages along."""

import contextlib
import importlib
import importlib.util
import warnings
from collections.abc import Iterator
from typing import Any

MISSING = "tokamax is not installed: pip install 'axlearn-plugins-gpu[kernels]'"


def missing() -> str | None:
    """Why its kernels cannot be used; None where they can."""
    return None if importlib.util.find_spec("tokamax") else MISSING


def module(name: str) -> Any:
    """One of its modules, which have no public names for single implementations with given block sizes."""
    flags: Any = importlib.import_module("absl.flags")
    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()  # tokamax would read the options of the command line as its own
    return importlib.import_module(f"tokamax._src.{name}")


@contextlib.contextmanager
def for_target() -> Iterator[None]:
    """While its kernels are traced: they are for the target, whatever this machine has. `supports` has asked already."""
    with module("config").cross_compile(True), warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # it uses names that JAX is moving
        yield
