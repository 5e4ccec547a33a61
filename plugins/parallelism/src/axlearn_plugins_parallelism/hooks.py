"""Implement the hooks of this plugin. This module does not import JAX."""

from axlearn_core.contracts.kernels import KernelImplementation
from axlearn_core.plugins.hookspecs import hookimpl

_MODULE = "axlearn_plugins_parallelism.context"
_ATTENTION = "axlearn_plugins_transformer.kernels.attention:AttentionOp"
_BY_NAME_ONLY = -1  # never chosen automatically: the reference has priority 0 and supports every call
_IMPLEMENTATIONS = tuple(
    KernelImplementation(name=name, op=_ATTENTION, priority=_BY_NAME_ONLY, load=f"{_MODULE}:{attribute}")
    for name, attribute in (
        ("ring", "RING"),
        ("context-all-gather", "ALL_GATHER"),
        ("context-all-to-all", "ALL_TO_ALL"),
    )
)


@hookimpl
def axlearn_kernels() -> list[KernelImplementation]:
    """Return the attention kernels for sequences that are sharded over devices."""
    return list(_IMPLEMENTATIONS)
