"""Which TPU a kernel is traced for, where the kernel or Pallas asks.

Some instructions are other ones on other chips. Pallas takes the chip from the mesh in force, and where there is none from the
default device: on the machine that only compiles, a CPU.
"""

import contextlib
from collections.abc import Iterator

import jax

from axlearn_core.kernels import selection
from axlearn_plugins_tpu.generations import TARGETS

_KNOWN = {t.name: t for t in TARGETS}


@contextlib.contextmanager
def known_chip() -> Iterator[None]:
    """While a kernel is traced (and each of its derivatives, which are traced apart): the chip is that of the target in force.

    It goes around what one device runs, inside of `per_device`, for no other mesh can be entered within it. Within a mesh nothing
    is changed, since that says what it is made of; nor for a target that this plugin does not know: there it is the default device.
    """
    kernel_selection = selection.in_force()
    target = _KNOWN.get(kernel_selection.target) if kernel_selection else None
    if target is None or not jax.sharding.get_abstract_mesh().empty:
        yield
        return
    device = jax.sharding.AbstractDevice(
        device_kind=target.device_kinds[0], num_cores=target.cores_per_chip, platform=target.platform
    )
    alone = jax.sharding.AbstractMesh((1,), ("device",), (jax.sharding.AxisType.Auto,), abstract_device=device)
    with jax.sharding.use_abstract_mesh(alone):
        yield
