"""What this plugin says through hooks. Imports no JAX."""

from axlearn_core.contracts.kernels import KernelImplementation
from axlearn_core.contracts.mesh import MeshRule
from axlearn_core.contracts.remat import RematPolicy
from axlearn_core.contracts.target import Target
from axlearn_core.plugins.hookspecs import hookimpl
from axlearn_plugins_tpu.rules import POLICIES, RULES
from axlearn_plugins_tpu.targets import TARGETS

KERNELS = (
    KernelImplementation(
        name="splash",
        op="attention",
        load="axlearn_plugins_tpu.kernels.splash:SPLASH_ATTENTION",
        priority=50,
        platforms=("tpu",),
    ),
    KernelImplementation(
        name="megablox",
        op="grouped_matmul",
        load="axlearn_plugins_tpu.kernels.megablox:MEGABLOX",
        priority=50,
        platforms=("tpu",),
    ),
)


@hookimpl
def axlearn_targets() -> list[Target]:
    """The generations from v4 on."""
    return list(TARGETS)


@hookimpl
def axlearn_kernels(op: str) -> list[KernelImplementation]:
    """Splash attention, and megablox for grouped matrix products."""
    return [k for k in KERNELS if k.op == op]


@hookimpl
def axlearn_mesh_rules() -> list[MeshRule]:
    """FSDP within slices, data parallel across them."""
    return list(RULES)


@hookimpl
def axlearn_remat_policies() -> list[RematPolicy]:
    """What to keep, on the chip or on its host."""
    return list(POLICIES)
