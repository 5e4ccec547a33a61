"""Names the GPU that a kernel is for: JAX's lowering of Pallas asks the mesh in force, or else the GPU of this machine."""

import contextlib
from collections.abc import Iterator

import jax
from jax.sharding import AbstractDevice

from axlearn_plugins_gpu.chips import CHIPS
from axlearn_plugins_gpu.gpus import TARGETS


@contextlib.contextmanager
def named(target: str) -> Iterator[None]:
    """Use while tracing a kernel for a GPU that `CHIPS` knows."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.abstract_device is not None:
        yield
        return
    # Of one device, or of a mesh that somebody made without any.
    kind = next(t for t in TARGETS if t.name == target).device_kinds[0]
    device = AbstractDevice(device_kind=kind, num_cores=CHIPS[target].cores, platform="gpu")
    with jax.sharding.use_abstract_mesh(mesh.update(abstract_device=device)):
        yield
