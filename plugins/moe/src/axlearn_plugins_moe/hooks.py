"""Kernels of the `grouped_matmul` op. This module does not import JAX."""

from axlearn_core.contracts.kernels import KernelImplementation
from axlearn_core.plugins.hookspecs import hookimpl

_MODULE = "axlearn_plugins_moe.grouped_matmul"


@hookimpl
def axlearn_kernels() -> list[KernelImplementation]:
    """Register the blocked implementation for CPUs."""
    blocked = KernelImplementation(
        name="xla-blocked",
        op=f"{_MODULE}:GroupedMatmulOp",
        load=f"{_MODULE}:XLA_BLOCKED",
        priority=10,
        platforms=("cpu",),
    )
    return [blocked]
