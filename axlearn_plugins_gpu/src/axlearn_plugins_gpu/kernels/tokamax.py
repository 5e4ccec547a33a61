"""Access to tokamax's kernels. tokamax is an optional extra because it has many dependencies."""

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
from axlearn_plugins_gpu.kernels.abstract_gpu import use_abstract_gpu

LATER = sys.version_info >= (3, 12)
"""True if the newer of the two supported tokamax versions is used.

The older version is the last that supports Python 3.11. The newer one is the last with grouped matmuls in Pallas Triton, and it
has more Mosaic GPU kernels.
"""

VERSION = "0.0.14" if LATER else "0.0.12"

_FIX = "pip install 'axlearn-plugins-gpu[kernels]'"

_CORE_COUNT_USERS = (("pallas.grid", "jax"), ("ops.gated_linear_unit.pallas_mosaic_gpu_kernel_sm90", "backend"))
"""(module, name) of the objects that tokamax queries for the number of concurrent blocks; the fake also has its `Array` type."""


def unavailable_reason() -> str | None:
    """Return why tokamax cannot be used, or None if it can."""
    try:
        version = metadata.version("tokamax")
    except metadata.PackageNotFoundError:
        return f"tokamax is not installed: {_FIX}"
    return None if version == VERSION else f"tokamax {version} is installed, but {VERSION} is required: {_FIX}"


def module(name: str) -> Any:
    """Import a tokamax module. Implementations with given block sizes have no public names."""
    return compat.tokamax(name)


@contextlib.contextmanager
def use_core_count(target: str) -> Iterator[None]:
    """Report the target's core count while tracing a kernel whose block numbering depends on how many blocks run concurrently."""
    device = types.SimpleNamespace(core_count=CHIPS[target].cores)
    fake_jax = types.SimpleNamespace(devices=lambda: [device], get_default_device=lambda: device, Array=jax.Array)
    with compat.patch_tokamax(dict.fromkeys(_CORE_COUNT_USERS, fake_jax)):
        yield


@contextlib.contextmanager
def use_target(target: str) -> Iterator[None]:
    """Trace tokamax's kernels for the target, not for the local GPU. `supports` has checked the target."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(module("config").cross_compile(True))
        stack.enter_context(jax.numpy_rank_promotion("allow"))  # our tests forbid it for our own code
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore", DeprecationWarning)  # tokamax uses names that JAX is moving
        stack.enter_context(use_abstract_gpu(target))
        yield
