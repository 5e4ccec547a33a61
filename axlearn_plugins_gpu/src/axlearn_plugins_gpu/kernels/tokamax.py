"""tokamax's kernels, where it is installed: an optional extra, because it brings many packages along."""

import contextlib
import importlib
import types
import warnings
from collections.abc import Iterator
from importlib import metadata
from typing import Any
from unittest import mock

import jax

from axlearn_plugins_gpu.chips import CHIPS

VERSION = "0.0.12"
"""The one whose kernels are used. Later ones have none for grouped products, and need Python 3.12."""

_FIX = "pip install 'axlearn-plugins-gpu[kernels]' with Python 3.11"


def missing() -> str | None:
    """Why its kernels cannot be used; None where they can."""
    try:
        found = metadata.version("tokamax")
    except metadata.PackageNotFoundError:
        return f"tokamax is not installed: {_FIX}"
    return None if found == VERSION else f"tokamax {found} is not {VERSION}, whose kernels are used: {_FIX}"


def module(name: str) -> Any:
    """One of its modules, which have no public names for single implementations with given block sizes."""
    flags: Any = importlib.import_module("absl.flags")
    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()  # tokamax would read the options of the command line as its own
    return importlib.import_module(f"tokamax._src.{name}")


@contextlib.contextmanager
def numbered_for(target: str) -> Iterator[None]:
    """While a kernel is traced that numbers its blocks by how many run at once: on the target, and not on what is here.

    tokamax takes that from `jax.devices()`, by the name `jax` of a module that needs nothing else of it.
    """
    here = types.SimpleNamespace(devices=lambda: [types.SimpleNamespace(core_count=CHIPS[target].cores)])
    with mock.patch.object(module("pallas.grid"), "jax", here):
        yield


@contextlib.contextmanager
def for_target() -> Iterator[None]:
    """While its kernels are traced: they are for the target, whatever this machine has. `supports` has asked already."""
    # It promotes ranks, which our tests forbid to our own code.
    with module("config").cross_compile(True), jax.numpy_rank_promotion("allow"), warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # it uses names that JAX is moving
        yield
