"""Set the TPU that kernels are traced for.

Some instructions differ between chips. Pallas reads the chip from the current mesh, or else from the default device, which
is a CPU on a machine that only compiles.
"""

import contextlib
from collections.abc import Iterator

import jax

from axlearn_core.kernels import selection
from axlearn_plugins_tpu.generations import TARGETS

_TARGETS = {t.name: t for t in TARGETS}


@contextlib.contextmanager
def use_target_chip() -> Iterator[None]:
    """Use the chip of the selected target while a kernel, or one of its derivatives, is traced.

    Use this context around the function that one device runs, inside `per_device`, because no other mesh can be entered there. It
    does nothing within a mesh, which already names its devices, or for targets that this plugin does not support, which use the
    default device.
    """
    kernel_selection = selection.get_active_selection()
    target = _TARGETS.get(kernel_selection.target) if kernel_selection else None
    if target is None or not jax.sharding.get_abstract_mesh().empty:
        yield
        return
    device = jax.sharding.AbstractDevice(
        device_kind=target.device_kinds[0], num_cores=target.cores_per_chip, platform=target.platform
    )
    single = jax.sharding.AbstractMesh((1,), ("device",), (jax.sharding.AxisType.Auto,), abstract_device=device)
    with jax.sharding.use_abstract_mesh(single):
        yield
