"""What the plugin says through hooks. Imports no JAX."""

from axlearn_core.contracts.kernels import KernelImplementation
from axlearn_core.plugins.hookspecs import hookimpl


@hookimpl
def axlearn_kernels() -> list[KernelImplementation]:
    """Attention over pages."""
    return [
        KernelImplementation(
            name="native",
            op="axlearn_plugins_transformer.kernels.paged_attention:PagedAttention",
            load="axlearn_plugins_cpu.kernels.paged_attention:NATIVE",
            priority=20,
            platforms=("cpu",),
        )
    ]
