"""Private names of JAX and tokamax that this plugin uses, each with why, for which versions, and until when.

- `jax._src.cudnn.fused_attention_stablehlo` (jax 0.10 to 0.12): `jax.nn.dot_product_attention` asks the GPU that is here what it
  can do, and its residuals have no names. Not needed once the public function takes a target, and names for what it keeps.
- `jax._src.xla_bridge` (jax 0.10 to 0.12): nothing public tells whether a platform is registered. Not needed once something does.
- `_infer_arch` of Mosaic GPU, replaced while a program for a GPU is lowered (jax 0.10 to 0.12): it takes every described GPU for a
  Hopper. Not needed once it reads the device kind of the mesh.
- `paged_attention_kernel` of `jax.experimental.pallas.ops.gpu.paged_attention` (jax 0.10 to 0.12, deprecated in 0.12): what the
  public function beside it calls, which takes keys and values in arrays of their own. Where a JAX has no such kernel, ours says
  so, and another one of the op is taken.
- `tokamax._src` (0.0.12, 0.0.14), some of it replaced while a kernel is traced: single implementations with given block sizes have
  no public names, and ask the device that is here. Not needed once they get names and take a target.

`JAX_SKIP_CUDA_CONSTRAINTS_CHECK` is set before JAX looks for devices on a machine without a driver, and before a program is
compiled for a described GPU; importing the plugin sets nothing. Without it, JAX's CUDA plugin looks for CUDA's libraries, prints
that they are missing, and refuses to start as a compiler.
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

from axlearn_core.compat import replaced

MOSAIC = ("jax.experimental.mosaic.gpu.core", "jax.experimental.mosaic.gpu.utils")
"""Where versions of JAX have `_infer_arch`."""


def cudnn() -> Any:
    """JAX's binding of cuDNN's attention, below its public function."""
    return importlib.import_module("jax._src.cudnn.fused_attention_stablehlo")


PAGED_ATTENTION = "jax.experimental.pallas.ops.gpu.paged_attention"


def paged_attention() -> Any:
    """JAX's module with the kernel for attention to pages."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return importlib.import_module(PAGED_ATTENTION)


def triton() -> Any:
    """JAX's module with the options of Pallas' kernels for Triton."""
    return importlib.import_module("jax.experimental.pallas.triton")


def missing_paged_attention() -> str | None:
    """Why `paged_attention` cannot be used; None where it can."""
    try:
        has_kernel = hasattr(paged_attention(), "paged_attention_kernel") and hasattr(triton(), "CompilerParams")
    except ImportError:
        has_kernel = False
    return None if has_kernel else f"JAX {metadata.version('jax')} has no kernel of {PAGED_ATTENTION}"


def tokamax(name: str) -> Any:
    """The module `name` of tokamax."""
    flags: Any = importlib.import_module("absl.flags")
    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()  # tokamax would read the options of the command line as its own
    return importlib.import_module(f"tokamax._src.{name}")


@contextlib.contextmanager
def tokamax_answers(values: Mapping[tuple[str, str], object]) -> Iterator[None]:
    """While it lasts, names in modules of tokamax have other values: (module, name) -> value. For facts about the local device."""
    with contextlib.ExitStack() as stack:
        for (place, name), value in values.items():
            stack.enter_context(replaced(tokamax(place), name, value))
        yield


def has_platform(name: str) -> bool:
    """Whether JAX knows a platform, started or not."""
    bridge: Any = importlib.import_module("jax._src.xla_bridge")
    return name in bridge._backend_factories


def skip_cuda_check() -> None:
    """Lets JAX's CUDA plugin start as a compiler where CUDA's libraries are missing."""
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")


def has_mosaic_architecture() -> bool:
    """Whether this JAX asks `_infer_arch` for the architecture of a Mosaic kernel; imports Mosaic, which takes seconds."""
    for name in MOSAIC:
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(name)
    return bool(_mosaic_modules())


@contextlib.contextmanager
def mosaic_architecture(answer: Callable[[Callable[[], tuple[int, int]]], tuple[int, int]]) -> Iterator[None]:
    """While it lasts, the lowering of Mosaic kernels asks `answer(original)` for the compute capability.

    Imports nothing: a program that has a Mosaic kernel was traced before it is lowered, and with it Mosaic was imported.
    """
    with contextlib.ExitStack() as stack:
        for module in _mosaic_modules():
            question = functools.partial(answer, module._infer_arch)
            stack.enter_context(replaced(module, "_infer_arch", question))
        yield


def _mosaic_modules() -> list[Any]:
    modules: list[Any] = [sys.modules.get(name) for name in MOSAIC]
    return [module for module in modules if hasattr(module, "_infer_arch")]
