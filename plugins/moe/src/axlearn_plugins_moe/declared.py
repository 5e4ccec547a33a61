"""The implementations of the op `grouped_matmul`. Imports no JAX."""

from axlearn_core.contracts.kernels import KernelImplementation
from axlearn_core.plugins.hookspecs import hookimpl

_IMPLEMENTATIONS = (
    KernelImplementation(name="xla", op="grouped_matmul", load="axlearn_plugins_moe.grouped_matmul:XLA"),
    KernelImplementation(
        name="xla-blocked",
        op="grouped_matmul",
        priority=10,
        platforms=("cpu",),
        load="axlearn_plugins_moe.grouped_matmul:XLA_BLOCKED",
    ),
)


@hookimpl
def axlearn_kernels(op: str) -> list[KernelImplementation]:
    """`jax.lax.ragged_dot`, and products by blocks of rows for CPUs."""
    return [k for k in _IMPLEMENTATIONS if k.op == op]
