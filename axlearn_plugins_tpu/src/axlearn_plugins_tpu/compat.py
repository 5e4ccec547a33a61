"""Private names of tokamax that this plugin uses, and environment variables for libtpu.

- `tokamax._src.ops` (0.0.12, 0.0.14): the kernels that accept explicit tile sizes are not public. Remove when they are.
- `TensorCoreMesh` of Pallas, patched while a kernel of tokamax 0.0.14 is traced: tokamax starts the kernel on every core,
  but may divide its tiles among fewer cores. Remove when it starts the kernel only on those cores.

On a machine without a TPU, libtpu searches for the machine's TPU description and reports that it is missing. It also lets
only one process load it at a time, to protect the TPU. The environment variables below provide the description, and declare
that libtpu is used only to compile. They are set before JAX looks for devices, and when something is compiled for an absent
TPU. Importing the plugin does not set them.
"""

import contextlib
import functools
import importlib
import os
from collections.abc import Iterator
from typing import Any

from axlearn_core.compat import override_attribute


def tokamax(module: str) -> Any:
    """Import a module of tokamax's kernels, such as `ragged_dot.pallas_mosaic_tpu_kernel`."""
    return importlib.import_module(f"tokamax._src.ops.{module}")


@contextlib.contextmanager
def use_kernel_cores(pallas: Any, cores: int) -> Iterator[None]:
    """Start kernels on the given number of cores, within the context. `pallas` is `pltpu` as a tokamax module imports it."""
    with override_attribute(pallas, "TensorCoreMesh", functools.partial(pallas.TensorCoreMesh, num_cores=cores)):
        yield


def patch_pallas_call(run: Any) -> contextlib.AbstractContextManager[Any]:
    """Replace `jax.experimental.pallas.pallas_call` within the context, to run kernels in the interpreter."""
    return override_attribute(importlib.import_module("jax.experimental.pallas"), "pallas_call", run)


def describe_host(accelerator: str) -> None:
    """Tell libtpu that this host has one accelerator of this type (`v5litepod-4`)."""
    os.environ.setdefault("TPU_ACCELERATOR_TYPE", accelerator)
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")


def allow_compile_only() -> None:
    """Let several processes load libtpu. None of them may use a TPU."""
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
