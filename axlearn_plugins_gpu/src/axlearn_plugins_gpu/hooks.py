"""What the plugin says through hooks. Imports no JAX."""

from axlearn_core.contracts.mesh import MeshRule
from axlearn_core.contracts.target import Target
from axlearn_core.plugins.hookspecs import hookimpl
from axlearn_plugins_gpu.targets import TARGETS


@hookimpl
def axlearn_targets() -> list[Target]:
    """A100, H100, H200 and B200."""
    return list(TARGETS)


@hookimpl
def axlearn_mesh_rules() -> list[MeshRule]:
    """Fully sharded data parallelism."""
    return [MeshRule(target=f"{t.name}-*", shape={"fsdp": -1}) for t in TARGETS]
