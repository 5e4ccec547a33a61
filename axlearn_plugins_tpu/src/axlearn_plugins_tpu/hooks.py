"""Hook implementations of the plugin. Does not import JAX."""

from collections.abc import Sequence
from pathlib import Path

from axlearn_core.contracts.kernels import KernelImplementation
from axlearn_core.contracts.mesh import MeshRule
from axlearn_core.contracts.remat import RematPolicy
from axlearn_core.contracts.target import Target
from axlearn_core.plugins.hookspecs import hookimpl
from axlearn_plugins_tpu import compat
from axlearn_plugins_tpu.generations import TARGETS
from axlearn_plugins_tpu.rules import POLICIES, RULES

OTHER_DEVICES = ("0x001f", "0x0042")
"""Other Google PCI devices: the storage and network adapters of Google's virtual machines."""


def has_local_tpu(bus: Path = Path("/sys/bus/pci/devices")) -> bool:
    """Return whether this machine has a TPU, or an unknown Google PCI device that may be one."""
    for device in bus.glob("*"):
        vendor, kind = ((device / name).read_text().strip() for name in ("vendor", "device"))
        if vendor == "0x1ae0" and kind not in OTHER_DEVICES:
            return True
    return False


@hookimpl
def axlearn_before_devices(platforms: Sequence[str] | None) -> None:
    """Describe a host to libtpu on a machine without a TPU. JAX loads libtpu as a compiler, which otherwise prints warnings.

    Do nothing if the user requested platforms, because an error about TPUs is then either appropriate or impossible.
    """
    if platforms is None and not has_local_tpu():
        compat.describe_host("v5litepod-4")


_ATTENTION = "axlearn_plugins_transformer.kernels.attention:AttentionOp"
_PAGED_ATTENTION = "axlearn_plugins_transformer.kernels.paged_attention:PagedAttentionOp"
_CROSS_ENTROPY = "axlearn_plugins_transformer.kernels.cross_entropy:CrossEntropyOp"
_GROUPED_MATMUL = "axlearn_plugins_moe.grouped_matmul:GroupedMatmulOp"
_INTERPRETER = "axlearn_plugins_tpu.kernels.interpreter:interpret"

KERNELS = (
    KernelImplementation(
        name="splash",
        op=_ATTENTION,
        load="axlearn_plugins_tpu.kernels.splash:SPLASH_ATTENTION",
        priority=50,
        platforms=("tpu",),
        extras=("sinks",),
        interpreter=_INTERPRETER,
        tags=("attention_residuals",),
    ),
    KernelImplementation(
        name="megablox",
        op=_GROUPED_MATMUL,
        load="axlearn_plugins_tpu.kernels.megablox:MEGABLOX",
        priority=50,
        platforms=("tpu",),
        interpreter=_INTERPRETER,
    ),
    # Below megablox, which needs no extra package. The speed of the two kernels has not been compared here.
    KernelImplementation(
        name="tokamax-mosaic-tpu",
        op=_GROUPED_MATMUL,
        load="axlearn_plugins_tpu.kernels.tokamax:MOSAIC",
        priority=40,
        platforms=("tpu",),
        interpreter=_INTERPRETER,
    ),
    # Below the reference, which uses XLA's own matmuls, until it is measured on a TPU. Configs can select it.
    KernelImplementation(
        name="tokamax-mosaic-tpu",
        op=_CROSS_ENTROPY,
        load="axlearn_plugins_tpu.kernels.cross_entropy:MOSAIC",
        priority=-1,
        platforms=("tpu",),
        interpreter=_INTERPRETER,
    ),
    KernelImplementation(
        name="ragged-paged",
        op=_PAGED_ATTENTION,
        load="axlearn_plugins_tpu.kernels.ragged_paged:RAGGED_PAGED",
        priority=50,
        platforms=("tpu",),
        interpreter=_INTERPRETER,
    ),
)


@hookimpl
def axlearn_targets() -> list[Target]:
    """Return the targets: TPU v4 and later."""
    return list(TARGETS)


@hookimpl
def axlearn_kernels() -> list[KernelImplementation]:
    """Return splash attention, megablox and tokamax grouped matmuls, tokamax's loss, and ragged paged attention."""
    return list(KERNELS)


@hookimpl
def axlearn_mesh_rules() -> list[MeshRule]:
    """Return the mesh rules: FSDP within slices, data parallelism across slices."""
    return list(RULES)


@hookimpl
def axlearn_remat_policies() -> list[RematPolicy]:
    """Return the remat policies, which save activations on the chip or in host memory."""
    return list(POLICIES)
