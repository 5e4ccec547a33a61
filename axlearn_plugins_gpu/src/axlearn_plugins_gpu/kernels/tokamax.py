"""tokamax's kernels, where it is installed: an optional extra, because it brings many packages along."""

import contextlib
import sys
import types
import warnings
from collections.abc import Iterator
from importlib import metadata
from typing import Any

import jax

from axlearn_plugins_gpu import compat
from axlearn_plugins_gpu.chips import CHIPS
from axlearn_plugins_gpu.kernels.named_gpu import named

LATER = sys.version_info >= (3, 12)
"""Whether it is the later of the two versions whose kernels are used: the earlier is the last one for Python 3.11, the later the
last one with grouped products in Pallas' Triton. The later has more kernels in Mosaic GPU.
"""

VERSION = "0.0.14" if LATER else "0.0.12"

_FIX = "pip install 'axlearn-plugins-gpu[kernels]'"

_COUNTED = (("pallas.grid", "jax"), ("ops.gated_linear_unit.pallas_mosaic_gpu_kernel_sm90", "backend"))
"""Modules that ask how many blocks run at once, and the name by which they ask; they need nothing else of it but a type."""


def missing() -> str | None:
    """Why its kernels cannot be used; None where they can."""
    try:
        version = metadata.version("tokamax")
    except metadata.PackageNotFoundError:
        return f"tokamax is not installed: {_FIX}"
    return None if version == VERSION else f"tokamax {version} is not {VERSION}, whose kernels are used: {_FIX}"


def module(name: str) -> Any:
    """One of its modules, which have no public names for single implementations with given block sizes."""
    return compat.tokamax(name)


@contextlib.contextmanager
def numbered_for(target: str) -> Iterator[None]:
    """While a kernel is traced that numbers its blocks by how many run at once: on the target, and not on what is here."""
    device = types.SimpleNamespace(core_count=CHIPS[target].cores)
    fake_jax = types.SimpleNamespace(devices=lambda: [device], get_default_device=lambda: device, Array=jax.Array)
    with compat.tokamax_answers(dict.fromkeys(_COUNTED, fake_jax)):
        yield


@contextlib.contextmanager
def for_target(target: str) -> Iterator[None]:
    """Use while tracing its kernels: they are for the target, not for the local GPU. `supports` has checked the target."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(module("config").cross_compile(True))
        stack.enter_context(jax.numpy_rank_promotion("allow"))  # which our tests forbid to our own code
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore", DeprecationWarning)  # it uses names that JAX is moving
        stack.enter_context(named(target))
        yield
