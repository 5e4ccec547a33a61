"""Private names of JAX and tokamax that this plugin uses, each with why, for which versions, and until when.

- `jax._src.cudnn.fused_attention_stablehlo` (jax 0.10 to 0.12): `jax.nn.dot_product_attention` asks the GPU that is here what it
  can do, and its residuals have no names. Not needed once the public function takes a target, and names for what it keeps.
- `jax._src.xla_bridge` (jax 0.10 to 0.12): nothing public tells whether a platform is registered. Not needed once something does.
- `_infer_arch` of Mosaic GPU, replaced (jax 0.10 to 0.12): it takes every GPU that is not here for a Hopper. Not needed once it
  reads the device kind of the mesh.
- `tokamax._src` (0.0.12, 0.0.14), some of it replaced while a kernel is traced: single implementations with given block sizes have
  no public names, and ask the device that is here. Not needed once they get names and take a target.

`JAX_SKIP_CUDA_CONSTRAINTS_CHECK` is set before JAX looks for devices on a machine without a driver, and when something is compiled for
a GPU that is not here; importing the plugin sets nothing. JAX's CUDA plugin would look for
CUDA's libraries, print that it misses them, and refuse to start as a compiler.
"""

import functools
import importlib
import os
from collections.abc import Callable
from typing import Any

MOSAIC = ("jax.experimental.mosaic.gpu.core", "jax.experimental.mosaic.gpu.utils")
"""Where versions of JAX have `_infer_arch`."""


def cudnn() -> Any:
    """JAX's binding of cuDNN's attention, below its public function."""
    return importlib.import_module("jax._src.cudnn.fused_attention_stablehlo")


def tokamax(name: str) -> Any:
    """The module `name` of tokamax."""
    flags: Any = importlib.import_module("absl.flags")
    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()  # tokamax would read the options of the command line as its own
    return importlib.import_module(f"tokamax._src.{name}")


def has_platform(name: str) -> bool:
    """Whether JAX knows a platform, started or not."""
    bridge: Any = importlib.import_module("jax._src.xla_bridge")
    return name in bridge._backend_factories


def skip_cuda_check() -> None:
    """Lets JAX's CUDA plugin start as a compiler where CUDA's libraries are missing."""
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")


def replace_mosaic_architecture(answer: Callable[[Callable[[], tuple[int, int]]], tuple[int, int]]) -> bool:
    """Has the lowering of Mosaic kernels ask `answer(original)` for the compute capability, for as long as the process lives.

    A lowering happens after the trace, whenever JAX compiles, so that no block of code encloses it.

    Returns:
        False where this JAX asks in some other way.
    """
    modules = []
    for place in MOSAIC:
        try:
            module: Any = importlib.import_module(place)
        except ModuleNotFoundError:
            continue
        if "_infer_arch" in vars(module):
            module._infer_arch = functools.partial(answer, vars(module)["_infer_arch"])
            modules.append(place)
    return bool(modules)
