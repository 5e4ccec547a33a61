"""Kernels of the `grouped_matmul` op. This module does not import JAX."""

from axlearn_core.contracts.kernels import KernelImplementation
from axlearn_core.plugins.hookspecs import hookimpl
from axlearn_plugins_transformer.kernels.hooks import DOTS_ONLY

_MODULE = "axlearn_plugins_moe.grouped_matmul"


@hookimpl
def axlearn_kernels() -> list[KernelImplementation]:
    """Register the blocked implementation for CPUs, and the batch-invariant one."""
    blocked = KernelImplementation(
        name="xla-blocked",
        op=f"{_MODULE}:GroupedMatmulOp",
        load=f"{_MODULE}:XLA_BLOCKED",
        priority=10,
        platforms=("cpu",),
    )
    # It computes more rows than `xla-blocked` for small batches, so it runs only if a config names it.
    invariant = KernelImplementation(
        name="invariant",
        op=f"{_MODULE}:GroupedMatmulOp",
        load=f"{_MODULE}:INVARIANT",
        priority=-1,
        compiler_options=DOTS_ONLY,
    )
    return [blocked, invariant]
