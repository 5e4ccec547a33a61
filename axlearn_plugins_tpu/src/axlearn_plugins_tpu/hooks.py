"""What this plugin says through hooks. Imports no JAX."""

from axlearn_core.contracts.mesh import MeshRule
from axlearn_core.contracts.target import Target
from axlearn_core.plugins.hookspecs import hookimpl
from axlearn_plugins_tpu.rules import RULES
from axlearn_plugins_tpu.targets import TARGETS


@hookimpl
def axlearn_targets() -> list[Target]:
    """The generations from v4 on."""
    return list(TARGETS)


@hookimpl
def axlearn_mesh_rules() -> list[MeshRule]:
    """FSDP within slices, data parallel across them."""
    return list(RULES)
