"""What this plugin says through hooks. Imports no JAX."""

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
"""What else Google makes for the PCI bus: storage and network adapters of its virtual machines."""


def tpu_here(bus: Path = Path("/sys/bus/pci/devices")) -> bool:
    """Whether this machine has a TPU, or something of Google's that may be one."""
    for device in bus.glob("*"):
        vendor, kind = ((device / name).read_text().strip() for name in ("vendor", "device"))
        if vendor == "0x1ae0" and kind not in OTHER_DEVICES:
            return True
    return False


@hookimpl
def axlearn_before_devices() -> None:
    """JAX tries libtpu where it is installed, to compile with, and that prints that it misses what a TPU machine tells it."""
    if not tpu_here():
        compat.describe_host("v5litepod-4")


_ATTENTION = "axlearn_plugins_transformer.kernels.attention:AttentionOp"
_PAGED_ATTENTION = "axlearn_plugins_transformer.kernels.paged_attention:PagedAttentionOp"
_CROSS_ENTROPY = "axlearn_plugins_transformer.kernels.cross_entropy:CrossEntropyOp"
_GROUPED_MATMUL = "axlearn_plugins_moe.grouped_matmul:GroupedMatmulOp"

KERNELS = (
    KernelImplementation(
        name="splash",
        op=_ATTENTION,
        load="axlearn_plugins_tpu.kernels.splash:SPLASH_ATTENTION",
        priority=50,
        platforms=("tpu",),
        tags=("attention_residuals",),
    ),
    KernelImplementation(
        name="megablox",
        op=_GROUPED_MATMUL,
        load="axlearn_plugins_tpu.kernels.megablox:MEGABLOX",
        priority=50,
        platforms=("tpu",),
    ),
    # Behind megablox, which needs nothing that is not installed: nobody has measured here that either is faster.
    KernelImplementation(
        name="tokamax-mosaic-tpu",
        op=_GROUPED_MATMUL,
        load="axlearn_plugins_tpu.kernels.tokamax:MOSAIC",
        priority=40,
        platforms=("tpu",),
    ),
    # Behind the reference, whose products are XLA's own: for configs that name it, until a TPU has said more.
    KernelImplementation(
        name="tokamax-mosaic-tpu",
        op=_CROSS_ENTROPY,
        load="axlearn_plugins_tpu.kernels.cross_entropy:MOSAIC",
        priority=-1,
        platforms=("tpu",),
    ),
    KernelImplementation(
        name="ragged-paged",
        op=_PAGED_ATTENTION,
        load="axlearn_plugins_tpu.kernels.ragged_paged:RAGGED_PAGED",
        priority=50,
        platforms=("tpu",),
    ),
)


@hookimpl
def axlearn_targets() -> list[Target]:
    """The generations from v4 on."""
    return list(TARGETS)


@hookimpl
def axlearn_kernels() -> list[KernelImplementation]:
    """Splash attention, megablox and tokamax for grouped matrix products, tokamax's loss, and ragged paged attention."""
    return list(KERNELS)


@hookimpl
def axlearn_mesh_rules() -> list[MeshRule]:
    """FSDP within slices, data parallel across them."""
    return list(RULES)


@hookimpl
def axlearn_remat_policies() -> list[RematPolicy]:
    """What to keep, on the chip or on its host."""
    return list(POLICIES)
