"""What the plugin says through hooks. Imports no JAX."""

from axlearn_core.contracts.kernels import KernelImplementation
from axlearn_core.plugins.hookspecs import hookimpl

_OPS = "axlearn_plugins_transformer.kernels"
_KERNELS = {
    f"{_OPS}.paged_attention:PagedAttentionOp": "paged_attention:NATIVE",
    f"{_OPS}.invariant:InvariantAttentionOp": "invariant:ROWS",
    f"{_OPS}.invariant:InvariantPagedAttentionOp": "invariant:PAGES",
}
"""Op -> where in `axlearn_plugins_cpu.kernels` its kernel is."""


@hookimpl
def axlearn_kernels() -> list[KernelImplementation]:
    """Attention over pages; and attention that does not depend on the batch, over pages and over rows."""
    return [
        KernelImplementation(
            name="native", op=op, load=f"axlearn_plugins_cpu.kernels.{place}", priority=20, platforms=("cpu",)
        )
        for op, place in _KERNELS.items()
    ]
