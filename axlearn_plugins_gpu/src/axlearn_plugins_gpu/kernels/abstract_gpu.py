"""Set the GPU that Pallas kernels are lowered for. JAX reads it from the current mesh, or else uses the local GPU."""

import contextlib
from collections.abc import Iterator

import jax
from jax.sharding import AbstractDevice

from axlearn_plugins_gpu.chips import CHIPS
from axlearn_plugins_gpu.gpus import TARGETS


@contextlib.contextmanager
def use_abstract_gpu(target: str) -> Iterator[None]:
    """Trace a kernel for a GPU in `CHIPS`."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.abstract_device is not None:
        yield
        return
    # For one device, or for a mesh without an abstract device.
    kind = next(t for t in TARGETS if t.name == target).device_kinds[0]
    device = AbstractDevice(device_kind=kind, num_cores=CHIPS[target].cores, platform="gpu")
    with jax.sharding.use_abstract_mesh(mesh.update(abstract_device=device)):
        yield
