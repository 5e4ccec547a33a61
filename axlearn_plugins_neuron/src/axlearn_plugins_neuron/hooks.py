"""Hook implementations of the plugin. Does not import JAX."""

from axlearn_core.contracts.kernels import KernelImplementation
from axlearn_core.contracts.mesh import MeshRule
from axlearn_core.contracts.remat import RematPolicy
from axlearn_core.contracts.target import Target
from axlearn_core.plugins.hookspecs import hookimpl
from axlearn_plugins_neuron.rules import POLICIES, rules
from axlearn_plugins_neuron.trainium import TRN2

_ATTENTION = "axlearn_plugins_transformer.kernels.attention:AttentionOp"


@hookimpl
def axlearn_targets() -> list[Target]:
    """Return the Trainium2 target."""
    return [TRN2]


@hookimpl
def axlearn_mesh_rules() -> list[MeshRule]:
    """Return the mesh rules, by model size."""
    return rules()


@hookimpl
def axlearn_remat_policies() -> list[RematPolicy]:
    """Return the remat policies for Trainium."""
    return list(POLICIES)


@hookimpl
def axlearn_kernels() -> list[KernelImplementation]:
    """Return the flash attention kernel from the Neuron SDK."""
    load = "axlearn_plugins_neuron.flash_attention:NKI_FLASH"
    return [
        KernelImplementation(
            name="nki-flash",
            op=_ATTENTION,
            load=load,
            priority=50,
            platforms=("neuron",),
            hardware_only="is a kernel of the Neuron SDK, which runs only on Trainium",
        )
    ]
