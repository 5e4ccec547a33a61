"""Hook implementations of the plugin. Does not import JAX."""

from axlearn_core.contracts.kernels import KernelImplementation
from axlearn_core.plugins.hookspecs import hookimpl

_OPS = "axlearn_plugins_transformer.kernels"
_KERNELS = {
    f"{_OPS}.paged_attention:PagedAttentionOp": "paged_attention:NATIVE",
    f"{_OPS}.invariant:InvariantAttentionOp": "invariant:ROWS",
    f"{_OPS}.invariant:InvariantPagedAttentionOp": "invariant:PAGES",
}
"""Op -> module and name of its kernel, relative to `axlearn_plugins_cpu.kernels`."""


@hookimpl
def axlearn_kernels() -> list[KernelImplementation]:
    """Return the kernels for paged attention and for batch-invariant attention over rows and pages."""
    return [
        KernelImplementation(
            name="native",
            op=op,
            load=f"axlearn_plugins_cpu.kernels.{place}",
            priority=20,
            platforms=("cpu",),
            extras=("sinks", "log_sum_exp") if op.endswith(":PagedAttentionOp") else ("sinks",),
        )
        for op, place in _KERNELS.items()
    ]
