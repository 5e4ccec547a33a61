"""Private names of JAX and tokamax that this plugin uses, with reasons, versions and conditions for removal.

- `jax._src.cudnn.fused_attention_stablehlo` (jax 0.10 to 0.12): `jax.nn.dot_product_attention` queries the local GPU, and
  its residuals have no checkpoint names. Remove when the public function accepts a target and names its residuals.
- `jax._src.xla_bridge` (jax 0.10 to 0.12): no public API reports whether a platform is registered. Remove when one exists.
- `_infer_arch` of Mosaic GPU, patched while a program for a GPU is lowered (jax 0.10 to 0.12): it treats every abstract GPU
  as a Hopper. Remove when it reads the device kind of the mesh.
- `paged_attention_kernel` of `jax.experimental.pallas.ops.gpu.paged_attention` (jax 0.10 to 0.12, deprecated in 0.12): the
  public function that calls it requires keys and values in separate arrays. If a JAX version lacks the kernel, our kernel
  reports that it is not supported, and the op falls back to a different one.
- `tokamax._src` (0.0.12, 0.0.14), partly patched while a kernel is traced: implementations with given block sizes have no
  public names, and they query the local device. Remove when they have public names and accept a target.

`JAX_SKIP_CUDA_CONSTRAINTS_CHECK` is set on a machine without a driver before JAX looks for devices, and before a program is
compiled for an abstract GPU. Importing the plugin does not set it. Without it, JAX's CUDA plugin searches for the CUDA libraries,
reports that they are missing, and refuses to start as a compiler.
"""

import contextlib
import functools
import importlib
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from importlib import metadata
from typing import Any

from axlearn_core.compat import override_attribute

MOSAIC = ("jax.experimental.mosaic.gpu.core", "jax.experimental.mosaic.gpu.utils")
"""Modules that contain `_infer_arch`, in the supported versions of JAX."""


def cudnn() -> Any:
    """Return JAX's internal binding for cuDNN attention, which the public function uses."""
    return importlib.import_module("jax._src.cudnn.fused_attention_stablehlo")


PAGED_ATTENTION = "jax.experimental.pallas.ops.gpu.paged_attention"


def paged_attention() -> Any:
    """Return JAX's module with the paged attention kernel."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return importlib.import_module(PAGED_ATTENTION)


def triton() -> Any:
    """Return JAX's module with the Triton options for Pallas kernels."""
    return importlib.import_module("jax.experimental.pallas.triton")


def missing_paged_attention() -> str | None:
    """Return why `paged_attention` is unavailable, or None if it is available."""
    try:
        has_kernel = hasattr(paged_attention(), "paged_attention_kernel") and hasattr(triton(), "CompilerParams")
    except ImportError:
        has_kernel = False
    return None if has_kernel else f"JAX {metadata.version('jax')} does not have the kernel in {PAGED_ATTENTION}"


def tokamax(name: str) -> Any:
    """Import a tokamax module by name."""
    flags: Any = importlib.import_module("absl.flags")
    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()  # otherwise tokamax would parse this program's command line
    return importlib.import_module(f"tokamax._src.{name}")


@contextlib.contextmanager
def patch_tokamax(values: Mapping[tuple[str, str], object]) -> Iterator[None]:
    """Patch names in tokamax modules within the context: (module, name) -> value. Used for facts about the local device."""
    with contextlib.ExitStack() as stack:
        for (place, name), value in values.items():
            stack.enter_context(override_attribute(tokamax(place), name, value))
        yield


def patch_pallas(name: str, value: object) -> contextlib.AbstractContextManager[Any]:
    """Replace a name of `jax.experimental.pallas` within the context, to run kernels in the interpreter."""
    return override_attribute(importlib.import_module("jax.experimental.pallas"), name, value)


def patch_tokamax_indexer(change: Callable[[Any], Any]) -> contextlib.AbstractContextManager[Any]:
    """Change the indices into tokamax's block references within the context. The interpreter accepts fewer types than Triton."""
    indexer: Any = tokamax("pallas.block").BlockRefIndexer
    get = indexer.__getitem__
    return override_attribute(indexer, "__getitem__", lambda self, index: get(self, change(index)))


def has_platform(name: str) -> bool:
    """Return whether a platform is registered with JAX, even if it has not started."""
    bridge: Any = importlib.import_module("jax._src.xla_bridge")
    return name in bridge._backend_factories


def skip_cuda_check() -> None:
    """Let JAX's CUDA plugin start as a compiler when the CUDA libraries are missing."""
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")


def has_mosaic_architecture() -> bool:
    """Return whether this JAX calls `_infer_arch` for Mosaic kernels. Imports Mosaic, which takes seconds."""
    for name in MOSAIC:
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(name)
    return bool(_mosaic_modules())


@contextlib.contextmanager
def patch_mosaic_architecture(answer: Callable[[Callable[[], tuple[int, int]]], tuple[int, int]]) -> Iterator[None]:
    """Make the lowering of Mosaic kernels call `answer(original)` for the compute capability, within the context.

    Does not import Mosaic: if a program has a Mosaic kernel, tracing it has already imported Mosaic.
    """
    with contextlib.ExitStack() as stack:
        for module in _mosaic_modules():
            question = functools.partial(answer, module._infer_arch)
            stack.enter_context(override_attribute(module, "_infer_arch", question))
        yield


def _mosaic_modules() -> list[Any]:
    modules: list[Any] = [sys.modules.get(name) for name in MOSAIC]
    return [module for module in modules if hasattr(module, "_infer_arch")]
