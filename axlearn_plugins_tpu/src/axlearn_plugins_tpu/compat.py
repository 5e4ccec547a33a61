"""Private names of tokamax that this plugin uses, and what it tells libtpu.

- `tokamax._src.ops` (0.0.12, 0.0.14): kernels with given tiles have no public names. Not needed once they get some.
- `TensorCoreMesh` of Pallas, replaced while a kernel of tokamax 0.0.14 is traced: that starts one kernel on every core, and its
  tiles may be split among fewer. Not needed once it starts as many as it splits them among.

libtpu looks for a TPU machine's description where there is none, and prints that it misses it; it also lets one process at a time
load it, for the sake of the TPU. The environment variables below tell it what it looks for, and that it only compiles. They
are set before JAX looks for devices, and when something is compiled for a TPU that is not here; importing the plugin sets nothing.
"""

import contextlib
import functools
import importlib
import os
from collections.abc import Iterator
from typing import Any

from axlearn_core.compat import replaced


def tokamax(module: str) -> Any:
    """A module of tokamax's kernels: `ragged_dot.pallas_mosaic_tpu_kernel`."""
    return importlib.import_module(f"tokamax._src.ops.{module}")


@contextlib.contextmanager
def kernel_cores(pallas: Any, cores: int) -> Iterator[None]:
    """While it lasts, kernels start on this number of cores. `pallas` is `pltpu`, as a module of tokamax knows it."""
    with replaced(pallas, "TensorCoreMesh", functools.partial(pallas.TensorCoreMesh, num_cores=cores)):
        yield


def describe_host(accelerator: str) -> None:
    """Tells libtpu that this host has one accelerator of this type (`v5litepod-4`)."""
    os.environ.setdefault("TPU_ACCELERATOR_TYPE", accelerator)
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")


def only_compile() -> None:
    """Lets many processes load libtpu, as long as none uses a TPU."""
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
