"""The implementations of this plugin, declared as any plugin declares its own. Imports no JAX."""

from axlearn_core.contracts.kernels import KernelImplementation
from axlearn_core.plugins.hookspecs import hookimpl

_IMPLEMENTATIONS = (
    KernelImplementation(name="xla", op="attention", load="axlearn_plugins_transformer.kernels.attention:XLA"),
    KernelImplementation(
        name="xla-blocked",
        op="attention",
        priority=10,
        load="axlearn_plugins_transformer.kernels.attention:XLA_BLOCKED",
    ),
    KernelImplementation(name="xla", op="cross_entropy", load="axlearn_plugins_transformer.kernels.cross_entropy:XLA"),
    KernelImplementation(
        name="xla", op="gated_linear_unit", load="axlearn_plugins_transformer.kernels.gated_linear_unit:XLA"
    ),
    KernelImplementation(
        name="xla", op="paged_attention", load="axlearn_plugins_transformer.kernels.paged_attention:XLA"
    ),
    KernelImplementation(name="xla", op="rms_norm", load="axlearn_plugins_transformer.kernels.rms_norm:XLA"),
)


@hookimpl
def axlearn_kernels(op: str) -> list[KernelImplementation]:
    """The XLA references, and attention by blocks for masks that hide blocks."""
    return [k for k in _IMPLEMENTATIONS if k.op == op]
